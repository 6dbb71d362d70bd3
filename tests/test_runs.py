"""Run folders: records and metrics are true, whatever happened before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle3lib import runs
from eagle3lib.errors import CheckFailed, Eagle3Error, ParamError
from eagle3lib.runs import begin, read_metrics, read_record


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder that begin() finds by itself."""
    monkeypatch.setenv(runs.ENV_RUN_DIR, str(tmp_path / "run"))
    monkeypatch.delenv(runs.ENV_NONCE, raising=False)
    return tmp_path / "run"


def namespace(**values: Any) -> dict[str, Any]:
    """A notebook's globals after its parameters cell."""
    return {"__annotations__": {"lr": float, "rows": int, "texts": list[str]}, "lr": 1e-3, "rows": 3, "texts": ["a"], **values}


def done(stage: str, **metrics: Any) -> None:
    begin(stage, namespace()).finish(**metrics)


def test_begin_and_finish(run: Path) -> None:
    stage = begin("prepare", namespace(lr=1))
    assert read_record(run, "prepare")["status"] == "running"
    assert stage.params == {"lr": 1.0, "rows": 3, "texts": ["a"]} and stage.dir == run
    stage.path("out.bin").write_bytes(b"12345")
    stage.checks.add("sum", True, 1, 1, "nothing", "nothing")
    stage.finish(rows=np.int64(3), share=np.float32(0.5), loss=torch.tensor(2.0), ok=np.True_, sets={"a": [1, 2]})
    assert read_metrics(run) == {
        "prepare.rows": 3,
        "prepare.share": 0.5,
        "prepare.loss": 2.0,
        "prepare.ok": True,
        "prepare.sets": {"a": [1, 2]},
    }
    record = read_record(run, "prepare")
    assert record["status"] == "ok" and record["seconds"] >= 0 and record["checks"][0]["name"] == "sum"
    assert record["outputs"][0][:2] == ["out.bin", 5]


def test_a_failed_check_is_written_and_raised(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.ENV_NONCE, "n")
    stage = begin("prepare", namespace())
    stage.checks.add("sum", False, 1, 2, "wrong sums", "Add again.")
    with pytest.raises(CheckFailed, match="sum: measured 1, limit 2. Add again."):
        stage.finish(rows=3)
    record = read_record(run, "prepare")
    assert (record["status"], record["checks"][0]["passed"]) == ("failed", False)
    assert read_metrics(run) == {"prepare.rows": 3}
    with pytest.raises(Eagle3Error, match="already failed"):
        stage.finish(rows=3)


NAN = float("nan")


@pytest.mark.parametrize("value", [NAN, np.float32("inf"), torch.tensor(NAN), {"a": [NAN]}, object(), torch.zeros(2)])
def test_a_metric_that_json_cannot_say_fails_the_stage(run: Path, value: Any) -> None:
    with pytest.raises(Eagle3Error, match="prepare.rows"):
        begin("prepare", namespace()).finish(rows=value)
    assert read_record(run, "prepare")["status"] == "failed" and read_metrics(run) == {}


def test_a_stage_needs_the_one_before(run: Path) -> None:
    with pytest.raises(Eagle3Error, match=r"extract needs prepare, which is missing in .*; run notebooks/01_prepare.ipynb first"):
        begin("extract", namespace())
    begin("prepare", namespace()).fail(ValueError("no rows"))
    with pytest.raises(Eagle3Error, match=r"which is failed in .*ValueError: no rows"):
        begin("extract", namespace())
    done("prepare")
    begin("extract", namespace())


def test_running_a_stage_again_makes_later_results_stale(run: Path) -> None:
    done("prepare", rows=1)
    done("extract", tokens=2)
    done("verify", passed=True)
    runs.merge_metrics(run, "run", {"seconds": 3})
    done("prepare", rows=9)
    assert read_metrics(run) == {"prepare.rows": 9}
    assert read_record(run, "verify")["status"] == "stale" and read_record(run, "verify")["stale_because"] == "prepare"
    with pytest.raises(Eagle3Error, match="verify needs extract, which is stale"):
        begin("verify", namespace())


def test_a_bad_parameter_leaves_earlier_results_alone(run: Path) -> None:
    done("prepare", rows=1)
    with pytest.raises(ParamError, match="lr: found '1e-4' .*1.0e-4"):
        begin("prepare", namespace(lr="1e-4"))
    assert read_record(run, "prepare")["status"] == "ok" and read_metrics(run) == {"prepare.rows": 1}


def test_names_injected_by_papermill_must_be_known(run: Path) -> None:
    with pytest.raises(ParamError, match="unknown parameter lrr; nearest: lr"):
        begin("prepare", namespace(lrr=3, In=["", "lr: float = 1e-3  # x", "# Parameters\nlr = 0.1\nlrr = 3\n"]))
    begin("prepare", namespace(scratch=3, In=["", "scratch = 3"]))  # JupyterLab: anybody's own variable


def test_by_hand_a_cell_may_be_mended_but_not_after_the_input_changed(run: Path) -> None:
    done("prepare")
    stage = begin("extract", namespace())
    stage.fail(NameError("a typo"))
    assert read_record(run, "extract")["status"] == "failed"
    stage.finish(tokens=3)
    assert read_record(run, "extract")["status"] == "ok" and read_record(run, "extract")["error"] == ""
    done("prepare")
    with pytest.raises(Eagle3Error, match="one before it ran again"):
        stage.finish(tokens=3)
    assert "extract.tokens" not in read_metrics(run)


def test_a_shell_line_that_failed_before_begin(run: Path) -> None:
    with pytest.raises(Eagle3Error, match="exit code 2"):
        begin("prepare", namespace(_exit_code=2))


def test_a_stage_whose_process_is_gone_has_died(run: Path) -> None:
    code = "import os; from eagle3lib.runs import begin; begin('prepare', {}); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=runs.repo_root())
    assert json.loads(runs.record_path(run, "prepare").read_text())["status"] == "running"
    assert read_record(run, "prepare")["status"] == "died"


def test_a_folder_in_use_is_refused(run: Path) -> None:
    code = "import sys; from eagle3lib.runs import begin; begin('prepare', {}); print('on', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=runs.repo_root()) as other:
        assert other.stdout and other.stdout.readline() == b"on\n"
        with pytest.raises(Eagle3Error, match=f"in use: prepare is running in process {other.pid}"):
            begin("prepare", namespace())
        assert other.stdin
        other.stdin.close()
    begin("prepare", namespace())


def test_run_folder_does_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(runs.ENV_RUN_DIR, raising=False)
    monkeypatch.chdir(tmp_path)
    assert runs.run_folder() == runs.repo_root() / "runs" / "lab"
    assert runs.run_folder("runs/x") == runs.repo_root() / "runs" / "x"
    assert runs.run_folder(str(tmp_path)) == tmp_path


def test_paths_stay_inside_the_run_folder(run: Path) -> None:
    stage = begin("prepare", namespace())
    assert stage.path("a/b.txt") == run / "a" / "b.txt"
    for outside in ("../x", "/etc/passwd", "a/../../x"):
        with pytest.raises(Eagle3Error, match="leads out of the run folder"):
            stage.path(outside)


def test_a_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    runs.write_json(path, {"a": 1})
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Eagle3Error, match="x.json: cannot be written: No space left on device"):
        runs.write_json(path, {"a": 2})
    assert runs.read_json(path) == {"a": 1} and os.listdir(tmp_path) == ["x.json"]


def test_secrets_are_not_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "planted-secret-value")
    begin("prepare", namespace(texts=["x planted-secret-value", "https://me:pw123@host/x", "hf_" + "a1" * 16])).finish()
    written = "".join(p.read_text() for p in run.rglob("*.json"))
    assert "planted-secret-value" not in written and "pw123" not in written and "a1a1a1" not in written
    assert "x [hidden HF_TOKEN]" in written and "https://[hidden]@host/x" in written
