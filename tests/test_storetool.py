"""`eagle3lib store` and `eagle3lib plan` as the command line runs them: they say what is true and delete nothing else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_store import MANIFEST, SAMPLES, assert_holds, fill

from eagle3lib import cli, fp8, plan, storetool
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.store import FP8, Sample, Store, make_manifest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder of two runs with a store each."""
    fill(tmp_path / "runs/a/store")
    fill(tmp_path / "runs/b/store", SAMPLES[:3])
    (tmp_path / "runs/a/run.json").write_text("{}")
    return tmp_path / "runs"


def store(*words: object) -> int:
    return cli.main(["store", *map(str, words)])


def test_ls_shows_size_age_and_state_of_every_store_below(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = time.time() - 3 * 86400
    for file in (run / "a/store").iterdir():
        os.utime(file, (old, old))
    with Store.create(run / "b/store", MANIFEST):
        assert store("ls", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(str(run / "a/store")) and " 12 " in lines[1] and "3 d" in lines[1] and "bfloat16" in lines[1]
    assert lines[2].startswith(str(run / "b/store")) and lines[2].endswith("being written")


def test_a_store_behind_a_link_is_listed_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "latest").symlink_to(run / "a")
    assert store("ls", run) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_stat_is_json_and_counts_right(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store("stat", run / "a") == 0
    about = json.loads(capsys.readouterr().out.split("\n", 1)[1])
    assert about["samples"] == 12 and about["tokens"] == sum(len(s.input_ids) for s in SAMPLES)
    assert about["tokens_a_sample"]["most"] == 58 and about["layers"] == [2, 4, 5] and about["fingerprint"]["weights"] == "w1"
    assert about["bytes"] == sum(f.stat().st_size for f in (run / "a/store").iterdir())


def test_verify_names_every_damaged_sample_and_drop_lets_them_be_asked_for_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "a/store"
    assert store("verify", path) == 0 and "12 of 12 samples are whole" in capsys.readouterr().out
    victim = Store.open(path).index[4]
    shard = path / f"shard-{int(victim['shard']):05d}.safetensors"
    data = bytearray(shard.read_bytes())
    data[1024 + int(victim["row"]) * 64 + 5] ^= 1
    shard.write_bytes(data)
    assert store("verify", path) == 1
    said = capsys.readouterr().out
    assert "11 of 12" in said and bytes(victim["id"]).hex() in said and shard.name in said
    assert store("verify", path, "--drop") == 1 and len(Store.open(path)) == 11
    assert store("verify", path) == 0
    with Store.create(path, MANIFEST) as writer:
        for sample in SAMPLES:
            if sample.id not in writer:
                writer.append(sample)
    assert_holds(Store.open(path), SAMPLES)


def test_reclaim_deletes_the_named_store_and_says_what_came_free(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "a/store"
    size = sum(f.stat().st_blocks * 512 for f in path.iterdir())
    assert store("reclaim", path) == 1 and path.exists()  # nobody was there to say yes
    assert "--yes" in capsys.readouterr().err
    assert store("reclaim", path, "--yes") == 0
    assert f"({size:,} bytes) are free again" in capsys.readouterr().out
    assert not path.exists() and (run / "a/run.json").exists() and len(Store.open(run / "b/store")) == 3


def other_folder(path: Path) -> str:
    (path / "store.json").unlink()
    return "no store of ours"


def other_json(path: Path) -> str:
    (path / "store.json").write_text('{"name": "a shop"}')
    return "no store of ours"


def stranger(path: Path) -> str:
    (path / "thesis.tex").write_text("years of work")
    return "thesis.tex"


def folder_in_it(path: Path) -> str:
    (path / "shard-00000.safetensors").rename(path / "x")
    (path / "shard-00000.safetensors").mkdir()
    return "shard-00000"


def linked(path: Path) -> str:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")
    return "no folder"


def its_run(path: Path) -> str:
    return "no store of ours"


@pytest.mark.parametrize("case", [other_folder, other_json, stranger, folder_in_it, linked, its_run])
def test_reclaim_deletes_nothing_that_is_not_a_store_of_ours(run: Path, capsys: pytest.CaptureFixture[str], case: object) -> None:
    path = run / "a/store"
    why = case(path)
    before = sorted(p.name for p in run.rglob("*"))
    named = path.parent if case is its_run else path
    assert store("reclaim", run / "b/store", named, "--yes") == 1
    assert why in capsys.readouterr().err
    assert sorted(p.name for p in run.rglob("*")) == before  # the sound one beside it stays too


def test_reclaim_refuses_a_store_in_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Store.create(run / "a/store", MANIFEST):
        assert store("reclaim", run / "a/store", "--yes") == 1
    assert "writing it now" in capsys.readouterr().err and len(Store.open(run / "a/store")) == 12


def test_a_path_without_a_store_is_one_readable_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert store("ls", tmp_path) == 1 and store("verify", tmp_path / "nothing") == 1
    assert capsys.readouterr().err.count("error: ") == 2


def test_the_audit_reads_a_gigabyte_a_second_of_processor_time(tmp_path: Path) -> None:
    """128 MB out of the page cache."""
    manifest = make_manifest({}, [2, 4, 5], 1024, "bfloat16")
    ids = torch.zeros(1000, dtype=torch.int64)
    with Store.create(tmp_path, manifest) as writer:
        for n in range(16):
            sample = torch.full((1000,), n), ids.bool()
            writer.append(Sample(storetool_id(*sample), *sample, torch.randn(1000, 4, 1024).bfloat16()))
    begun = time.process_time()
    found = storetool.audit(tmp_path)
    rate = found.bytes / (time.process_time() - begun) / 1e9
    print(f"audit: {rate:.2f} GB/s of a core")
    assert not found.damaged and found.samples == 16 and rate > 1


def storetool_id(ids: torch.Tensor, mask: torch.Tensor) -> str:
    from eagle3lib.store import sample_id
    return sample_id(ids, mask)


# ---- fp8 ----


def test_fp8_says_what_it_is_to_any_reader_of_safetensors(tmp_path: Path) -> None:
    with Store.create(tmp_path, make_manifest({}, [2, 4, 5], 8, "bfloat16", FP8)) as writer:
        for sample in SAMPLES:
            writer.append(sample)
    plain = load_file(tmp_path / "shard-00000.safetensors")
    assert plain["hidden"].dtype == torch.float8_e4m3fn and plain["scale"].shape == plain["hidden"].shape[:2]
    values = plain["hidden"].float() * plain["scale"][..., None]
    ours = torch.cat([sample.hidden for sample in Store.open(tmp_path)])
    assert torch.equal(values, ours.float())
    whole = torch.cat([sample.hidden for sample in SAMPLES]).float()
    assert ((values - whole).abs() <= whole.abs() / 16 + whole.abs().amax(-1, keepdim=True) * 2.0**-18).all()
    assert storetool.audit(tmp_path).damaged == {}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 25_000.0, 1e30])
def test_fp8_is_exact_for_what_it_can_hold_and_keeps_the_largest(scale: float) -> None:
    hidden = torch.randn(50, 4, 64, generator=torch.Generator().manual_seed(0)) * scale
    packed, scales = fp8.encode(hidden, "x")
    once = fp8.decode(packed, scales, torch.bfloat16)
    again = fp8.decode(*fp8.encode(once, "x"), torch.bfloat16)
    assert torch.equal(once, again) and torch.isfinite(once.float()).all()
    assert (packed.float().abs().amax(-1) >= 208).all()  # the range is used
    peak = hidden.abs().argmax(-1, keepdim=True)
    assert ((once.float() - hidden).gather(-1, peak).abs() <= hidden.gather(-1, peak).abs() / 16).all()


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf"), 1e-38])
def test_what_fp8_cannot_hold_is_an_error_and_no_cast(bad: float) -> None:
    hidden = torch.randn(5, 4, 8)
    hidden[3, 1] = bad
    with pytest.raises(Eagle3Error, match="sample abc: row 3 of stream 1 .* no fp8 scale"):
        fp8.encode(hidden, "abc")


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ParamError, match="store_dtype 'float16' with states captured in 'bfloat16'"):
        make_manifest({}, [2, 4, 5], 8, "bfloat16", "float16")


# ---- plan ----


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["plan", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_plan_for_kimi_is_five_terabytes_without_gpu_or_target(capsys: pytest.CaptureFixture[str]) -> None:
    args = (ROOT / "params/kimi-k2.5.yaml", "--sequences", 37312, "--tokens", 87_800_000)
    said = planned(capsys, *args)
    assert "5.03 TB (57,344 bytes a token" in said and "DOES NOT FIT" in said and "float8_e4m3" in said and "at most" in said
    assert "24.4 hours at 1,000 tokens/s" in said
    fewer = planned(capsys, *args, "--rate", 8000, "--set", "store_dtype=float8_e4m3")
    assert "2.52 TB in" in fewer and "3.0 hours at 8,000" in fewer


def test_a_plan_that_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "verdict         fits" in planned(capsys, ROOT / "params/kimi-k2.5.yaml", "--sequences", 2, "--tokens", 2000)


@pytest.mark.parametrize(("words", "why"), [
    (("--sequences", "5", "--tokens", "3"), "at least one token"),
    (("--sequences", "5", "--tokens", "30", "--set", "target_hidden=0"), "not on this disk"),
    (("--sequences", "5", "--tokens", "30", "--set", "store_dtype=int4"), "store_dtype 'int4'"),
    (("--sequences", "5", "--tokens", "30", "--set", "target_hidden=-7"), "target_hidden is -7; it must be at least 0"),
    (("--sequences", "5", "--tokens", "30", "--set", "target_layers=-1"), "target_layers is -1"),
    (("--sequences", "5", "--tokens", "30", "--set", "shard_mb=0"), "shard_mb is 0; it must be at least 1"),
    (("--sequences", "5", "--tokens", "30", "--set", "tokens_in_flight=-3"), "tokens_in_flight is -3"),
    (("--sequences", "5", "--tokens", "30", "--rate", "-5"), "a rate of -5"),
    (("--sequences", "5", "--tokens", "30", "--rate", "nan"), "a rate of nan"),
])
def test_a_plan_that_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str) -> None:
    assert cli.main(["plan", str(ROOT / "params/kimi-k2.5.yaml"), *words]) == 2
    assert why in capsys.readouterr().err


def test_the_forecast_refuses_by_name_of_what_is_short() -> None:
    fits = plan.Forecast(10, 1000, 10**6, 4, 1000, 10**6, "bfloat16", 10**5, 10**7, 10**6)
    fits.require_room()
    from dataclasses import replace
    with pytest.raises(Eagle3Error, match="disk: .*prepare at most 818 tokens.*stream"):
        replace(fits, disk_free=900_000).require_room()
    with pytest.raises(Eagle3Error, match="shared memory: .*lower tokens_in_flight to 50 %"):
        replace(fits, shm_free=50_000).require_room()
