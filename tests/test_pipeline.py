"""One complete pass of all notebooks through the runner, on a tiny target with a real SGLang, as `make run` does it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors import safe_open
from tiny import tiny_target

from eagle3lib.params import STAGES

ROOT = Path(__file__).resolve().parents[1]
WANTED = [
    "prepare.rows_in", "prepare.rows_kept", "prepare.tokens", "prepare.supervised_tokens", "extract.tokens", "extract.tokens_per_s",
    "extract.bytes", "extract.bytes_predicted", "verify.passed", "verify.checks", "train.steps", "train.tokens_per_s", "train.loss_last",
    "evaluate.acceptance_length_measured", "evaluate.acceptance_length_simulated", "evaluate.lossless", "run.seconds",
]
TINY = """\
# One pass in a minute: 80 prompts, short replies, a small draft.
target: {target}
max_prompts: 80
max_new_tokens: 40
max_tokens: 400
heldout_share: 0.1
draft_vocab: 256
ttt_steps: 3
epochs: 6
lr: 3.0e-3
eval_prompts: 2
eval_tokens: 24
draft_steps: 3
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The run folder of one complete pass, made by the command that the README names."""
    folder = tmp_path_factory.mktemp("tiny")
    params = folder / "tiny.yaml"
    params.write_text(TINY.format(target=tiny_target(folder / "target", branch=0.3)))
    before = {p.pid for p in psutil.process_iter()}
    done = subprocess.run(["make", "run", f"PARAMS={params}"], cwd=ROOT, capture_output=True, text=True, timeout=900,
                          env={**os.environ, "HF_TOKEN": "hf_planted_secret_value"})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    left = [p for p in psutil.process_iter() if p.pid not in before and "sglang" in " ".join(_cmdline(p))]
    assert not left, f"survivors: {left}"
    folder = Path(re.search(r"(\S*runs/\d{8}\S*)", done.stdout).group(1).rstrip("/:,"))
    return (ROOT / folder).resolve()


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_every_result_is_there(run):
    for name in ("report.html", "metrics.json", "engine.log", "run.json", "verdict.json", "draft/config.json", "draft/model.safetensors"):
        assert (run / name).is_file(), name
    assert sorted(p.name for p in run.glob("0*.ipynb")) == [f"0{n}_{stage}.ipynb" for n, stage in enumerate(STAGES, 1)]
    assert (ROOT / "runs" / "latest").resolve().parent == run.parent


def test_the_metrics_carry_what_was_promised(run):
    metrics = json.loads((run / "metrics.json").read_text())
    assert not [name for name in WANTED if name not in metrics]
    assert metrics["verify.passed"] is True and metrics["evaluate.lossless"] is True
    about = json.loads((run / "prepared/prepared.json").read_text())
    assert 0 < metrics["prepare.rows_kept"] <= 80 and metrics["prepare.rows_in"] == metrics["prepare.rows_kept"] + sum(about["dropped"].values())
    assert metrics["extract.tokens"] == metrics["prepare.tokens"]
    assert abs(metrics["extract.bytes"] - metrics["extract.bytes_predicted"]) <= max(8192, 0.01 * metrics["extract.bytes"])
    assert 1.2 < metrics["evaluate.acceptance_length_measured"] <= 4.0  # a draft that learned nothing stays at 1.0


def test_the_report_opens_offline_and_shows_figures_and_checks(run):
    page = (run / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", page)
    assert page.count("data:image/png;base64,") >= 8 and page.count('alt="') >= 8
    assert len(page) < 5e6


def test_no_secret_of_the_environment_is_in_any_file(run):
    for path in run.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            assert b"hf_planted_secret_value" not in path.read_bytes(), path


def test_the_exported_draft_has_sglangs_names(run):
    with safe_open(run / "draft" / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "midlayer.self_attn.q_proj.weight"} <= names
    config = json.loads((run / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]


def test_a_second_run_in_place_skips_what_is_unchanged(run):
    again = subprocess.run([sys.executable, "-m", "eagle3lib", "run", str(run / "params.yaml"), "--run-id", run.name],
                           cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("skipped, nothing changed") == 5, again.stdout


def papermill(cwd: Path, book: str, out: Path, *words: str) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).parent / "papermill"), str(ROOT / f"notebooks/{book}.ipynb"), str(out), "--no-progress-bar"]
    return subprocess.run([*command, *words], cwd=cwd, capture_output=True, text=True, timeout=300)


def test_plain_papermill_works_from_other_directories_with_the_same_checks(run, tmp_path):
    """The runner worked in notebooks/. From elsewhere 03 to 06 pass on a copy of its run, and a wrong name is refused."""
    mine = shutil.copytree(run, tmp_path / "mine")
    given = ["-f", str(run / "params.yaml"), "-p", "run_dir", str(mine)]
    for cwd, book in ((tmp_path, "03_verify"), (ROOT, "04_train"), (ROOT / "docs", "05_evaluate")):
        done = papermill(cwd, book, tmp_path / "out.ipynb", *given)
        assert done.returncode == 0, f"{book} in {cwd}: {done.stderr[-3000:]}"
    shown = papermill(tmp_path, "06_compare", tmp_path / "compared.ipynb", "-y", f"runs: ['{run}', '{mine}']")
    assert shown.returncode == 0 and "Best of 2" in (tmp_path / "compared.ipynb").read_text(), shown.stderr[-3000:]
    wrong = papermill(tmp_path, "03_verify", tmp_path / "wrong.ipynb", *given, "-p", "parity_row", "3")
    assert wrong.returncode != 0 and "parity_rows" in wrong.stderr, wrong.stderr[-3000:]
