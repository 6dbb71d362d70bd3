"""Fixtures shared by all tests: offline, loopback only, one tiny target."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

from labs import SERVER, Lab, prepare_environment  # noqa: E402  (after the path)
from servers import Witness  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama (8 layers, hidden 64, vocabulary 320, ChatML)."""
    from tiny import tiny_target

    return tiny_target(tmp_path_factory.mktemp("target") / "tiny-llama")


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory):
    """(target, f, draft): the target continues x with f(x), the draft never misses it. The model knows its folder as name_or_path."""
    from toys import make_toy

    return make_toy(tmp_path_factory.mktemp("toy") / "target")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A complete good run, with a progress bar, a planted secret and a server that nobody stopped."""
    bar = "import os, sys, tqdm\nfor _ in tqdm.tqdm(range(9), file=sys.stdout, mininterval=0): pass\nprint(os.environ['PLANTED_TOKEN'])"
    lab = Lab(tmp_path_factory.mktemp("good"), {"prepare": bar, "extract": SERVER})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_TOKEN", "planted-secret-value")
        prepare_environment(patch)
        result = lab.run({"seed": 3})
    assert (result.exit_code, result.status) == (0, "ok"), lab.text
    return lab


@pytest.fixture
def witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Witness]:
    """Servers started in this test can be told; when it ends nothing of them may be there."""
    found = Witness(tmp_path)
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(found.tmp))
    yield found
    found.require_nothing()
