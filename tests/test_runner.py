"""The runner on real kernels: what a good run leaves, and what stops a run before it starts."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from labs import Lab, gone, prepare_environment, state
from workbooks import workbook

from eagle3lib import redact, runner, runs, sweep
from eagle3lib.errors import ParamError
from eagle3lib.params import STAGES


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run folder of the caller's, and a library that does not change while the tests run."""
    prepare_environment(monkeypatch)


# ---- a good run ----


def test_a_good_run_leaves_everything_in_place(finished: Lab) -> None:
    latest = finished.runs / "latest"
    assert latest.is_symlink() and latest.resolve().name.endswith("-small")
    names = {p.name for p in latest.iterdir()}
    assert {"run.json", "params.yaml", "metrics.json", "report.html", *(f"{n:02d}_{s}.ipynb" for n, s in enumerate(STAGES, 1))} <= names
    assert state(latest) == dict.fromkeys(STAGES, "ok")
    metrics = runs.read_metrics(latest)
    assert metrics["prepare.length"] == 1 and metrics["run.seconds"] > 1
    assert (finished.runs / "index.html").exists()


def test_each_notebook_got_its_own_parameters_only(finished: Lab) -> None:
    book = runs.read_json(finished.runs / "latest" / "04_train.ipynb")
    assert set(book["metadata"]["papermill"]["parameters"]) == {"lr", "seed", "run_dir"}
    assert runs.read_record(finished.runs / "latest", "train")["params"]["lr"] == 1e-4
    about = runs.read_json(finished.runs / "latest" / "run.json")["params"]
    assert (about["lr"]["origin"], about["seed"]["origin"], about["show"]["origin"]) == ("file", "override", "default")


def test_params_yaml_repeats_the_run(finished: Lab) -> None:
    text = (finished.runs / "latest" / "params.yaml").read_text()
    assert "lr: 0.0001\n" in text and "seed: 3  # override\n" in text


def test_progress_is_one_clean_line_in_notebook_and_log(finished: Lab) -> None:
    assert finished.text.count("9/9") == 1 and "\r" not in finished.text and "\x1b" not in finished.text
    book = (finished.runs / "latest" / "01_prepare.ipynb").read_text()
    assert book.count("9/9") == 1 and "\\r" not in book


def test_a_planted_secret_lands_nowhere(finished: Lab) -> None:
    everything = [p for p in finished.runs.rglob("*") if p.is_file()]
    assert len(everything) > 10
    assert not [p for p in everything if b"planted-secret-value" in p.read_bytes()]
    assert "planted-secret-value" not in finished.text and "[hidden PLANTED_TOKEN]" in finished.text


def test_a_server_that_a_notebook_forgot_is_ended(finished: Lab) -> None:
    folder = finished.runs / "latest"
    assert gone(folder)
    assert f"({(folder / 'server.pid').read_text().strip()})" in finished.text and "ended what the notebook left running" in finished.text


SECRET = "planted & <odd> \"secret\" value"


@pytest.mark.parametrize("ending", ["", "raise ValueError(api_key)"])
def test_a_secret_parameter_lands_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(redact, "_told", {})
    lab = Lab(tmp_path)
    say = f"from IPython.display import HTML, display\nprint(api_key)\ndisplay(HTML(f'<b>{{api_key}}</b>'))\ndisplay(api_key)\n{ending}"
    workbook(lab.notebooks, {"prepare": say}, {"prepare": 'rows: int = 3  # rows\napi_key: str = ""  # key of a service'})
    result = lab.run({"api_key": SECRET}, run_id="r")
    assert result.status == ("failed" if ending else "ok"), lab.text
    everything = [p for p in lab.runs.rglob("*") if p.is_file() and p.suffix != ".txt"]  # those the notebooks write themselves
    forms = (SECRET, json.dumps(SECRET)[1:-1], html.escape(SECRET), html.escape(SECRET, quote=False), repr(SECRET)[1:-1])
    assert len(everything) > 5
    assert not [(p, f) for p in everything for f in forms if f.encode() in p.read_bytes()]
    assert not [f for f in forms if f in lab.text] and "[hidden api_key]" in lab.text
    assert '"value": "[hidden api_key]"' in (result.dir / "run.json").read_text()
    assert SECRET not in lab.describe({"api_key": SECRET})


def test_a_sweep_refuses_to_write_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", "planted-secret-value")
    lab = Lab(tmp_path)
    with pytest.raises(ParamError, match="holds a secret"):
        sweep.make_points(lab.params, {"texts": ["planted-secret-value"], "lr": [0.1, 0.2]}, lab.notebooks, lab.runs)
    assert not lab.runs.exists()


@pytest.mark.parametrize("words", [["--api-key", "planted-flag-value"], ["--log-level=info", "--api-key=planted-flag-value"]])
def test_a_secret_among_the_engines_arguments_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setattr(redact, "_told", {})
    lab = Lab(tmp_path)
    for call in (
        lambda: lab.run({"texts": words}),
        lambda: lab.describe({"texts": words}),
        lambda: sweep.make_points(lab.params, {"texts": [["--tp-size", "2"], words]}, lab.notebooks, lab.runs),
    ):
        with pytest.raises(ParamError, match="engine arguments api_key: these are set by the engine itself") as error:
            call()
        assert "planted" not in str(error.value) and not lab.runs.exists()
    assert redact.hide({"engine": words, "text": f"key {words[-1][-18:]}!"}) == {
        "engine": [*words[:-1], words[-1].replace("planted-flag-value", "[hidden api_key]")], "text": "key [hidden api_key]!"
    }  # by hand the notebook gets them, and its record says `hidden`
    redact.remember({"engine_args": ["--max-total-tokens", "100000000", "--tokenizer-mode", "the_slow_one", "--revision", "abcdefghij"]})
    assert redact.hide("100000000 the_slow_one abcdefghij") == "100000000 the_slow_one abcdefghij"


def test_every_line_of_a_secret_is_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["-----BEGIN PRIVATE KEY-----", "MIIEvQIBADANBgkqhkiG9w0B", "AQEFAASCBKcwggSjAgEAAoIB", "short", "-----END PRIVATE KEY-----"]
    for ends in ("\n", "\r\n", "\n    "):
        monkeypatch.setenv("PLANTED_PRIVATE_KEY", ends.join(lines))
        shown = redact.hide(f"> {lines[1]}\n{json.dumps(ends.join(lines))}\n{lines[2]}")
        assert not [line for line in lines if line in shown], shown


# ---- parameters fail before a kernel starts ----


@pytest.mark.parametrize(
    ("overrides", "says"),
    [({"rowz": 3}, "nearest: rows"), ({"rows": "3"}, "wanted int"), ({"run_dir": "/x"}, "--run-id")],
)
def test_bad_parameters_leave_no_trace(tmp_path: Path, overrides: dict[str, Any], says: str) -> None:
    lab = Lab(tmp_path)
    began = time.monotonic()
    with pytest.raises(ParamError, match=says):
        lab.run(overrides)
    assert time.monotonic() - began < 0.5 and not lab.runs.exists()


def test_run_ids_are_names_and_never_paths(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for bad in ("../x", "a/b", "", "latest", "lab", ".hidden", "x" * 81):
        if bad:
            with pytest.raises(ParamError, match="run id"):
                lab.run(run_id=bad)
    with pytest.raises(ParamError, match="no earlier run"):
        lab.run(start="train")
    assert [runner.new_run(lab.runs, "a b", "").name[13:] for _ in range(2)] == ["-a-b", "-a-b-2"]


# ---- without the runner, and the command line ----


def test_plain_papermill_works_with_the_same_checks(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    base = [sys.executable, "-m", "papermill", str(lab.notebooks / "01_prepare.ipynb"), str(tmp_path / "out.ipynb"), "--log-level", "ERROR"]
    env = {**os.environ, runs.ENV_NOTEBOOKS: str(lab.notebooks)}
    where = ["-p", "run_dir", str(tmp_path / "run")]
    good = subprocess.run([*base, *where, "-p", "rows", "7", "-p", "lr", "1.0e-4"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert runs.read_record(tmp_path / "run", "prepare")["params"]["rows"] == 7
    bad = subprocess.run([*base, *where, "-p", "rowz", "7"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode != 0 and "unknown parameter rowz; nearest: rows" in bad.stderr


def command(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "eagle3lib", *args], capture_output=True, text=True, cwd=runs.repo_root(), **more)


def test_the_command_line_says_errors_in_one_line_and_by_exit_code(tmp_path: Path) -> None:
    gone = command("run", str(tmp_path / "gone.yaml"))
    assert gone.returncode == 2 and gone.stderr.startswith("error: ") and "Traceback" not in gone.stderr
    assert command("report", "no-such-run").returncode == 1
    assert command("frobnicate").returncode == 2
    assert "Traceback" in command("--debug", "run", str(tmp_path / "gone.yaml")).stderr
