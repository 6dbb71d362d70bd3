"""Doctor: everything that can be known before a server is started, in one table. Starts nothing, changes nothing.

With `clean` it also ends processes and deletes files of earlier servers of ours: only what their records name, and never
those of a server whose notebook is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eagle3lib import places, plan, preflight, redact, runs, targets
from eagle3lib.checks import Checks
from eagle3lib.console import duration, size
from eagle3lib.errors import Eagle3Error
from eagle3lib.experiment import Experiment, read_run
from eagle3lib.settings import Settings, choose, dump_bytes, itemsize
from eagle3lib.shards import FP8, Layout


def report(source: Path, overrides: Mapping[str, Any], clean: bool = False) -> int:
    """Print the table and what to do about each thing that is wrong. 0 when nothing is, else 1."""
    experiment = Experiment.load(source, overrides, runs.notebooks_dir())
    checks = examine({name: setting.value for name, setting in experiment.settings.items()}, source.name, clean)
    print(checks.table())
    for line in [f"{check.name}: {check.remedy}" for check in checks.failed]:
        print(f"\n{line}")
    return 1 if checks.failed else 0


class Doctor:
    def __init__(self, values: Mapping[str, Any], clean: bool):
        self.values, self.clean, self.checks = values, clean, Checks()

    def look(self, name: str, wanted: str, protects: str, find: Callable[[], str]) -> None:
        """One row of the table: what was found, or the error that a start would end with."""
        try:
            self.checks.add(name, True, find(), wanted, protects, "")
        except Eagle3Error as error:
            what, _, remedy = str(error).splitlines()[0].partition(". ")
            self.checks.add(name, False, what, wanted, protects, remedy or what)


def examine(values: Mapping[str, Any], source: str, clean: bool = False) -> Checks:
    """The checks for these parameter values. source: name of the params file, to find an earlier run of it."""
    doctor = Doctor(values, clean)
    doctor.look("leftovers", "none", "a server of an earlier run that keeps memory, a port or shared memory", lambda: leftovers(clean))
    doctor.look("target", "a model folder", "a start that ends after minutes", lambda: str(local_target(values["target"])))
    if doctor.checks.failed and doctor.checks.failed[-1].name == "target":
        return doctor.checks
    plain = settings_of(values, None)
    doctor.look("interpreter", ", ".join(plain.versions) or "SGLang and our plugin", "a module missing where the server really runs",
                lambda: describe_interpreter(plain))
    doctor.look("arguments", "no contradiction", "arguments that SGLang changes silently", lambda: sense(plain))
    doctor.look("port", "free", "a stale or foreign server that answers in place of ours", lambda: port(plain))
    doctor.look("device memory", "room for the weights", "a start that ends after minutes", lambda: device(plain))
    layers = targets.capture_layers(targets.text_config(plain.target).num_hidden_layers)
    capturing = settings_of(values, layers)
    doctor.look("capture", "prefix cache, CUDA graphs and speculation off", "a dump with holes", lambda: sense(capturing))
    doctor.look("shared memory", "room for what is under way", "dumps that cannot be written", lambda: shared_memory(capturing))
    doctor.look("disk", "room for the dump", "a full disk in the middle of the night", lambda: disk(capturing, values, source))
    doctor.look("old dumps", "for your information", "a disk that old runs have filled", old_dumps)
    return doctor.checks


def settings_of(values: Mapping[str, Any], capture_layers: list[int] | None) -> Settings:
    """The server that 01_prepare (None) or 02_extract would start. Parameters that a notebook lacks keep the engine's defaults."""
    return choose(local_target(values["target"]), runs.runs_dir(), capture_layers=capture_layers, device=values["engine_device"],
                  dtype=values["engine_dtype"], python=values["engine_python"], port=values["engine_port"],
                  chunked_prefill_size=values.get("prefill_chunk") if capture_layers else None,
                  extra_args=values.get("engine_args", []), versions=values.get("engine_versions", []))


def local_target(name: str) -> Path:
    """The target's folder; a hub name is not fetched here."""
    if name != targets.SMOLLM2 and not places.located(name).is_dir():
        raise Eagle3Error(f"target {name!r} is not on this machine. 01_prepare fetches a hub name; give a folder to check everything now.")
    return targets.resolve(name)


def describe_interpreter(settings: Settings) -> str:
    here = next(place for place in (settings.run_dir, *settings.run_dir.parents) if place.exists())
    found = preflight.interpreter(settings.python, here, settings.versions)
    return f"{settings.python}: " + ", ".join(f"{name} {version}" for name, version in found["versions"].items())


def sense(settings: Settings) -> str:
    settings.require_sensible()
    return " ".join(redact.hide(settings.extra_args)) or "nothing beside the engine's own"


def port(settings: Settings) -> str:
    if settings.port:
        preflight.require_port_free(settings.port)
    return str(settings.port or "any free one")


def device(settings: Settings) -> str:
    return preflight.require_device_memory(settings.target, settings.device, settings.tp_size)


def shared_memory(settings: Settings) -> str:
    folder, needed = preflight.dump_base(), dump_bytes(settings, targets.text_config(settings.target).hidden_size)
    preflight.require_room(folder, needed, "engine dump folder", "Enlarge it (Docker: --shm-size), or set SGLANG_HS_DUMP_DIR to a larger place.")
    return f"{folder}: {size(preflight.free_bytes(folder))} free, {size(needed)} needed"


def disk(settings: Settings, values: Mapping[str, Any], source: str) -> str:
    itemsize(settings.dtype)  # ParamError for one that there is not
    tokens, where, there = forecast_tokens(values, source)
    layers, dtype = settings.capture_layers or [], values["store_dtype"] if values.get("store_dtype") == FP8 else settings.dtype
    each = Layout(len(layers) + 1, targets.text_config(settings.target).hidden_size, dtype).row_bytes
    needed = max(0, int(each * tokens * plan.MARGIN) - there)
    preflight.require_room(runs.runs_dir(), needed, "disk", "Free some (python -m eagle3lib store reclaim), or set EAGLE3_RUNS to a larger disk.")
    free = size(preflight.free_bytes(runs.runs_dir()))
    return f"{free} free, at most {size(needed)} needed: {tokens:,} tokens ({where}) x {len(layers) + 1} states ({dtype})" + (
        f", {size(there)} of them stored already" if there else "")


def forecast_tokens(values: Mapping[str, Any], source: str) -> tuple[int, str, int]:
    """Tokens of the rows that the newest run of this params file prepared, else the most that the parameters allow; and what of
    their dump is on the disk already [bytes]."""
    for folder in sorted(run_folders(), key=lambda f: f.stat().st_mtime, reverse=True):
        if read_run(folder).get("params_file") == source and (folder / "prepared").is_dir():
            from eagle3lib.prepare import load_prepared

            return sum(load_prepared(folder)["n_tokens"]), f"prepared in {folder.name}", plan.written(folder / "store")
    return values["max_prompts"] * values["max_tokens"], "max_prompts x max_tokens" if values["max_prompts"] else "not known before 01_prepare", 0


def run_folders() -> list[Path]:
    base = runs.runs_dir()
    return [folder for folder in base.iterdir() if folder.is_dir() and not folder.is_symlink()] if base.is_dir() else []


def leftovers(clean: bool) -> str:
    """Servers of ours that nobody owns any more, in all run folders."""
    found, used, done = [], [], []
    for folder in [place for run in run_folders() for place in (run, *sorted(run.glob("engines/*")))]:  # see fleet.folder
        name = str(folder.relative_to(runs.runs_dir()))
        record = preflight.leftover(folder)
        if record and preflight.owned(record):
            used.append(f"{name} is in use by process {record['owner']['pid']}")
        elif record and clean:
            done += preflight.clean_leftover(folder)
        elif record:
            found.append(f"{name}: {preflight.describe_leftover(record)}")
    if found:
        raise Eagle3Error(f"{'; '.join(found)}. `doctor --clean` ends these processes and deletes these files.")
    return "; ".join(["cleaned: " + ", ".join(done)] * bool(done) + used) or "none"


def old_dumps() -> str:
    stores = [(folder / "store") for folder in run_folders() if (folder / "store").is_dir()]
    shown = []
    for store in sorted(stores, key=lambda s: s.stat().st_mtime):
        held = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
        shown.append(f"{runs.show_path(store)} {size(held)}, {duration(time.time() - store.stat().st_mtime)} old")
    return "; ".join(shown) or "none"
