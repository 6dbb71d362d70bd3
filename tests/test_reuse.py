"""What is skipped, what runs again and why, and what a run will need."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from labs import Lab, copy_of, prepare_environment
from workbooks import workbook

from eagle3lib import reuse, runs
from eagle3lib.errors import Eagle3Error
from eagle3lib.params import STAGES


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run folder of the caller's, and a library that does not change while the tests run."""
    prepare_environment(monkeypatch)


def test_nothing_runs_twice_and_only_what_changed_runs_again(finished: Lab, tmp_path: Path) -> None:
    lab = copy_of(finished, tmp_path)
    name = (lab.runs / "latest").resolve().name
    before = runs.read_metrics(lab.runs / name)
    assert lab.run({"seed": 3}, run_id=name).exit_code == 0
    assert lab.text.count("skipped, nothing changed") == 5
    assert runs.read_metrics(lab.runs / name) == before
    assert lab.run({"seed": 3, "draft_steps": 3}, run_id=name).exit_code == 0
    assert lab.text.count("skipped, nothing changed") == 9 and "[5/5] evaluate: its parameters changed" in lab.text
    assert "'draft_steps': 3" in (lab.runs / name / "evaluate.txt").read_text()


def change_code(lab: Lab, folder: Path) -> None:
    path = lab.notebooks / "03_verify.ipynb"
    path.write_text(path.read_text().replace("stage.finish(", "stage.finish(more=1, "))


def change_text(lab: Lab, folder: Path) -> None:
    path = lab.notebooks / "03_verify.ipynb"
    path.write_text(path.read_text().replace("A stage of the test workbook.", "Other words."))


def lose_output(lab: Lab, folder: Path) -> None:
    (folder / "extract.txt").unlink()


def edit_output(lab: Lab, folder: Path) -> None:
    (folder / "train.txt").write_text("other")


@pytest.mark.parametrize(
    ("change", "first", "why"),
    [
        (change_code, "verify", "its notebook changed"),
        (change_text, "", ""),
        (lose_output, "extract", "extract.txt is gone"),
        (edit_output, "train", "train.txt changed"),
    ],
)
def test_what_makes_a_stage_run_again(finished: Lab, tmp_path: Path, change: Callable[[Lab, Path], None], first: str, why: str) -> None:
    lab = copy_of(finished, tmp_path)
    folder = (lab.runs / "latest").resolve()
    change(lab, folder)
    plan = lab.describe({"seed": 3}, run_id=folder.name)
    skipped = STAGES[: STAGES.index(first)] if first else STAGES
    assert plan.count("skip (unchanged)") == len(skipped)
    assert not first or f"{first:<10}run ({why})" in plan


def test_an_input_file_that_changed_counts(tmp_path: Path) -> None:
    data, book = tmp_path / "data.jsonl", workbook(tmp_path / "nb")
    data.write_text("one")
    (tmp_path / "more.jsonl").write_text("more")
    named = os.path.relpath(data, runs.repo_root())
    mix = [f"{named}@70.5%", f"{tmp_path / 'more.jsonl'}@29.5%"]
    for value in (str(data), [f"{data}@3"], mix, [str(tmp_path / "*.jsonl")], [f"{tmp_path / '*.jsonl'}@50%"], str(tmp_path), named, "../data.jsonl"):
        key = reuse.stage_key(book, "prepare", {"prompts": value}, None)
        assert reuse.stage_key(book, "prepare", {"prompts": value}, None) == key
        data.write_text(data.read_text() + "more")
        changed = reuse.stage_key(book, "prepare", {"prompts": value}, None)
        assert [part for part in key if key[part] != changed[part]] == ["inputs"]


READ = """from eagle3lib import options, sources
print(len([raw for part in options.Options(prompts=prompts).mix() for raw in sources.read(part.name)]), "records")"""


def test_a_relative_name_means_for_the_plan_what_the_kernel_reads(tmp_path: Path) -> None:
    """From the notebooks' folder, where kernels run, or else from the repository; with a share behind it all the same."""
    lab = Lab(tmp_path)
    workbook(lab.notebooks, {"prepare": READ}, {"prepare": 'prompts: list[str] = []  # data'})
    for stage in STAGES[1:]:
        next(lab.notebooks.glob(f"*_{stage}.ipynb")).unlink()
    here, there = lab.notebooks / "here.jsonl", tmp_path / "there.jsonl"
    here.write_text("{}\n")
    there.write_text("{}\n{}\n")
    lab.params.write_text(f"prompts: [here.jsonl@30%, {os.path.relpath(there, runs.repo_root())}@70%]\n")
    assert lab.run(run_id="r").exit_code == 0 and "3 records" in lab.text
    assert "skip (unchanged)" in lab.describe(run_id="r")
    for file in (here, there):
        before = file.read_text()
        file.write_text(before + "{}\n")
        assert "run (a file that its parameters name changed)" in lab.describe(run_id="r")
        file.write_text(before)


def test_from_and_only_take_earlier_stages_as_they_are(finished: Lab, tmp_path: Path) -> None:
    lab = copy_of(finished, tmp_path)
    assert lab.run({"seed": 3}, only="verify", force=True).exit_code == 0
    assert "[1/1] verify: forced" in lab.text
    folder = lab.runs / "latest"
    assert [runs.read_record(folder, s)["status"] for s in STAGES] == ["ok", "ok", "ok", "stale", "stale"]
    assert set(runs.read_metrics(folder)) == {"prepare.length", "extract.length", "verify.length", "run.seconds"}
    with pytest.raises(Eagle3Error, match="stage train is stale"):
        lab.run({"seed": 3}, only="evaluate")
    with pytest.raises(Eagle3Error, match="prepare in .* does not fit: its parameters changed"):
        lab.run({"seed": 4}, start="verify")
    assert lab.run({"seed": 3}, start="train").exit_code == 0
    assert [runs.read_record(folder, s)["status"] for s in STAGES] == ["ok"] * 5


def test_dry_run_writes_nothing_and_tells_origins(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    text = lab.describe({"seed": 3})
    assert "prepare   run (new run)" in text and not lab.runs.exists()
    origins = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith("  ")}
    assert (origins["lr"], origins["seed"], origins["show"]) == ("file", "override", "default")
    assert "disk needed" in text and "disk free" in text and "memory available" in text


def test_dry_run_forecasts_a_new_run_from_sizes_and_a_repeated_one_from_what_was_seen(finished: Lab, tiny: Path, tmp_path: Path) -> None:
    own = {
        "prepare": 'target: str = ""  # model\nmax_prompts: int = 10  # prompts\nmax_tokens: int = 100  # longest row [tokens]',
        "train": "draft_vocab: int = 256  # draft vocabulary [tokens]",
    }
    lab = Lab(tmp_path)
    lab.notebooks, lab.params = workbook(tmp_path / "sized", own=own), tmp_path / "sized.yaml"
    lab.params.write_text(f"target: {tiny}\n")
    text = lab.describe()
    tokens, hidden, draft = 10 * 100, 64, 3 * 64 * 64 + 128 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 256 * 64
    assert f"extract   run (new run); about 4.2 GB memory, at most {tokens * (4 * hidden * 2 + 5) / 1e3:.1f} kB on disk" in text
    assert f"at most {28 * draft / 1e6:.1f} MB on disk" in text
    assert "disk not known yet" in lab.describe({"max_prompts": 0}) and "and what cannot be told yet" in lab.describe({"max_prompts": 0})
    assert "NOT ENOUGH" in lab.describe({"max_prompts": 10**12}) and "NOT ENOUGH" not in text
    again = copy_of(finished, tmp_path / "again")
    seen = again.describe({"seed": 3}, run_id=(again.runs / "latest").resolve().name, force=True)
    assert seen.count("; last time ") == len(STAGES)




def test_runs_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for stage in STAGES[1:]:
        next(lab.notebooks.glob(f"*_{stage}.ipynb")).unlink()
    env = {**os.environ, runs.ENV_NOTEBOOKS: str(lab.notebooks), runs.ENV_RUNS: str(lab.runs)}
    command = [sys.executable, "-m", "eagle3lib", "run", str(lab.params), "--stage-timeout", "60"]
    lab.params.write_text("rows: 5\n")
    together = [subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    said = [process.communicate()[0] for process in together]
    assert [process.returncode for process in together] == [0] * 5, said
    assert len({(text.split()[1]) for text in said}) == 5  # five run ids
    assert [p.suffix for p in lab.notebooks.iterdir()] == [".ipynb"]
