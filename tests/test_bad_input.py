"""Bad input through the command line: exit code, one readable line that says what to do, a report up to there, no traceback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(tmp_path: Path, target: Path, *settings: str) -> tuple[int, str, Path]:
    """(exit code, all output, run folder) of `python -m eagle3lib run` on the tiny target."""
    params = tmp_path / "bad.yaml"
    params.write_text(f"target: {target}\nmax_prompts: 8\nmax_new_tokens: 8\n")
    command = [sys.executable, "-m", "eagle3lib", "run", str(params), *(word for s in settings for word in ("--set", s))]
    env = {**os.environ, "EAGLE3_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=env)
    folders = list((tmp_path / "runs").glob("2*")) if (tmp_path / "runs").exists() else []
    return done.returncode, done.stdout + done.stderr, folders[0] if folders else tmp_path


def assert_one_readable_failure(outcome: tuple[int, str, Path], *words: str) -> None:
    code, output, folder = outcome
    assert code == 1, output
    assert "Traceback" not in output
    line = next(line for line in output.splitlines() if "prepare: failed" in line)
    assert not [w for w in words if w not in line], line
    assert (folder / "report.html").is_file() and "Traceback (most recent call last)" not in (folder / "report.html").read_text()


def test_a_missing_file(tmp_path, tiny):
    assert_one_readable_failure(run(tmp_path, tiny, "prompts=[no/such.jsonl]"), "no/such.jsonl", "no such file")


def test_broken_json_is_named_with_its_line(tmp_path, tiny):
    file = tmp_path / "broken.jsonl"
    file.write_text('{"prompt": "Is this line whole and good?"}\n{"prompt": "this one is\n')
    assert_one_readable_failure(run(tmp_path, tiny, f"prompts=[{file}]"), "broken.jsonl:2")


def test_nothing_left_after_filtering_shows_the_reasons(tmp_path, tiny):
    file = tmp_path / "empty.jsonl"
    file.write_text('{"prompt": ""}\n{"messages": []}\n')
    code, output, _ = outcome = run(tmp_path, tiny, f"prompts=[{file}]")
    assert_one_readable_failure(outcome, "no conversations left")


def test_a_target_without_a_chat_template(tmp_path, tiny):
    folder = shutil.copytree(tiny, tmp_path / "bare")
    (folder / "chat_template.jinja").unlink()
    assert_one_readable_failure(run(tmp_path, folder), "no chat template", str(folder))


def test_a_busy_port_names_its_holder(tmp_path, tiny):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert_one_readable_failure(run(tmp_path, tiny, f"engine_port={port}"), str(port), str(os.getpid()))


def test_an_interpreter_without_sglang_is_named(tmp_path, tiny):
    bare = tmp_path / "bare-python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    assert_one_readable_failure(run(tmp_path, tiny, f"engine_python={bare}/bin/python"), f"{bare}/bin/python", "sglang")


@pytest.mark.parametrize(("setting", "words"), [
    ("max_prompt=3", ["max_prompt", "max_prompts"]), ("epochs=many", ["epochs", "int"]), ("lr=.nan", ["lr"])])
def test_wrong_parameters_stop_before_anything_starts(tmp_path, tiny, setting, words):
    code, output, _ = run(tmp_path, tiny, setting)
    assert code == 2 and "Traceback" not in output and not [w for w in words if w not in output], output
    assert not (tmp_path / "runs").exists()
