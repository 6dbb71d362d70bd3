"""report.html: one page that can be passed around, and the index of all runs.

Self-contained (it loads nothing), the verdict and the key numbers first, then every stage as its notebook showed it.
It is built from the run folder alone, so it can be rebuilt at any time, and of an unfinished run it shows what there is.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from eagle3lib import redact, runs
from eagle3lib.checks import show
from eagle3lib.compare import interval
from eagle3lib.console import duration, size
from eagle3lib.errors import Eagle3Error
from eagle3lib.experiment import read_run
from eagle3lib.folded import code_style, first_figure, notebook
from eagle3lib.manifest import flat
from eagle3lib.params import STAGES
from eagle3lib.report_style import CSS

LIMIT = 5_000_000  # bytes of a report
OUTPUT_LIMITS = (1_500_000, 400_000, 120_000, 30_000, 0)  # bytes of one output, the first that makes the page fit
DOES = {
    "prepare": "conversations become token ids and loss masks",
    "extract": "hidden states through the running server",
    "verify": "is the dump what it claims to be?",
    "train": "the draft, with training-time test",
    "evaluate": "real draft-and-verify on held-out prompts",
}

Show = Callable[[Any], str]
_PICTURE = re.compile(r"(data:[\w/+.-]+;base64,[A-Za-z0-9+/=\s]+)")
# metric, label, how to print, what it means; the first one leads
HEADLINES: tuple[tuple[str, str, Show, str], ...] = (
    ("evaluate.acceptance_length_measured", "acceptance length, measured", lambda v: f"{v:.2f}", "tokens a target forward, chain"),
    ("evaluate.acceptance_length_simulated", "acceptance length, simulated", lambda v: f"{v:.2f}", "teacher-forced, joint, chain"),
    ("evaluate.lossless", "output equals the target's own", lambda v: "yes" if v else "NO", "token by token, float32"),
    ("prepare.rows_kept", "training rows", show, "kept of those read"),
    ("prepare.supervised_tokens", "supervised tokens", show, "tokens of replies"),
    ("extract.tokens_per_s", "extraction", lambda v: f"{v:,.0f}", "tokens/s"),
    ("extract.bytes", "hidden states", size, "on disk"),
    ("train.tokens_per_s", "training", lambda v: f"{v:,.0f}", "tokens/s"),
    ("train.loss_last", "last training loss", lambda v: f"{v:.3g}", "weighted over TTT steps"),
    ("run.seconds", "run time", duration, "all stages"),
)


# ---- entry ----


def write(run: Path) -> Path:
    """Build <run>/report.html. Returns its path."""
    run = Path(run).resolve()
    for limit in OUTPUT_LIMITS:
        page = without_places(redact.hide(build(run, limit)))
        if len(page.encode()) < LIMIT:
            break
    runs.write_text(run / "report.html", page)
    return run / "report.html"


def without_places(text: str) -> str:
    """text without the paths of this machine: the repository's becomes relative, the user's home `~`. Pictures stay as they are."""
    known = [(place, short) for place, short in ((runs.repo_root(), ""), (Path.home(), "~/")) if len(place.parts) > 1]  # `/` is in everything
    parts = _PICTURE.split(text)
    for i in range(0, len(parts), 2):  # every other part is a picture
        for place, short in known:
            parts[i] = parts[i].replace(f"{place}/", short)
    return "".join(parts)


def write_index(base: Path) -> Path:
    """Build <base>/index.html: all runs of a folder with verdict and numbers, the latest first."""
    base = Path(base)
    folders = [p for p in base.iterdir() if p.is_dir() and not p.is_symlink() and ((p / "run.json").exists() or (p / "stages").exists())]
    rows = sorted(map(_row_or_excuse, folders), key=lambda row: row[0], reverse=True)
    head = ("run", "started", "verdict", "acceptance, measured", "simulated", "supervised tokens", "time")
    body = f"""<p class="kicker">EAGLE-3 draft training</p><h1>Runs</h1><p class="about">{len(rows)} runs, the latest first</p>
<div class="scroll">{_table(head, [row[1:] for row in rows])}</div>"""
    runs.write_text(base / "index.html", redact.hide(_page("Runs", body)))
    return base / "index.html"


def build(run: Path, output_limit: int = OUTPUT_LIMITS[0]) -> str:
    """The page of a run as text; outputs larger than output_limit bytes are replaced by a line."""
    about, metrics = read_run(run), runs.read_metrics(run)
    records = {stage: runs.read_record(run, stage) for stage in STAGES}
    state, title, text = verdict(about, records)
    parts = [
        _head(run, about, records),
        f'<div class="verdict {state}"><b>{esc(title)}</b>{f"<p>{esc(text)}</p>" if text else ""}</div>',
        _tiles(metrics, records),
        _strip(records, about),
        first_figure(run, "evaluate") if records["evaluate"].get("status") == "ok" else "",
        *(_stage(run, stage, records[stage], about, metrics, output_limit) for stage in STAGES if records[stage]),
        _provenance(run, about, records, metrics),
        "<footer>Written by eagle3lib. This page is self-contained: it loads nothing and can be passed on as it is.</footer>",
    ]
    return _page(f"{run.name}: {title}", "\n".join(parts))


def verdict(about: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> tuple[str, str, str]:
    """(state, title, sentence) of a run: the first stage that is not done decides."""
    checks = [c for r in records.values() for c in r.get("checks", [])]
    open_stages = [(s, r) for s, r in records.items() if r.get("status") != "ok"]
    if not open_stages:
        return "ok", "Passed", f"All {len(records)} stages are done, all {len(checks)} checks passed."
    stage, record = open_stages[0]
    status = record.get("status", "")
    error = record.get("error", "")
    if status in ("failed", "died", "interrupted"):
        word = {"failed": "Failed", "died": "Died", "interrupted": "Interrupted"}[status]
        return status, f"{word} in {stage}", error
    if status == "running" or about.get("status") == "running":
        return "running", f"Running: {stage}", "This page shows the stages that were done when it was written."
    return "unfinished", f"Unfinished: {stage} is next", error or "Not all stages have run."


# ---- parts of the page ----


def _head(run: Path, about: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> str:
    started = about.get("started") or next((r["started"] for r in records.values() if r.get("started")), "")
    told = about.get("params", {}).get("target", {}).get("value")
    target = told or next((r["params"].get("target") for r in records.values() if r.get("params")), "") or ""
    facts = [
        f"target <b>{esc(target)}</b>" if target else "",
        f"parameters {esc(about['params_file'])}" if about.get("params_file") else "",
        _day(started),
        f"commit {esc(about['git']['commit'][:10])}{' with uncommitted changes' if about['git']['changed'] else ''}"
        if about.get("git")
        else "",
    ]
    return f"""<p class="kicker">EAGLE-3 draft training report</p><h1>{esc(run.name)}</h1>
<p class="about">{" · ".join(filter(None, facts))}</p>"""


def _day(started: Any) -> str:
    try:
        return f"{datetime.fromisoformat(started):%d %B %Y, %H:%M} UTC" if started else ""
    except (TypeError, ValueError):
        return f"started {esc(_short(started))}"


def _tiles(metrics: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]]) -> str:
    tiles = []
    for n, (name, label, as_text, unit) in enumerate(HEADLINES):
        if metrics.get(name) is not None:
            value = f"{esc(as_text(metrics[name]))}{_interval(metrics, name)}<small>{unit}</small>"
            tiles.append(f'<div class="tile{" lead" if n == 0 else ""}"><dt>{label}</dt><dd>{value}</dd></div>')
    checks = [c["passed"] for r in records.values() if r.get("status") != "stale" for c in r.get("checks", [])]
    if checks:
        tiles.append(f'<div class="tile"><dt>checks passed</dt><dd>{sum(checks)}<small>of {len(checks)}</small></dd></div>')
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if tiles else ""


def _interval(metrics: Mapping[str, Any], name: str) -> str:
    bounds = interval(metrics, name)
    return f"<small>95 % interval {bounds[0]:.2f} to {bounds[1]:.2f}</small>" if bounds else ""


def _strip(records: Mapping[str, Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    items = []
    for stage, record in records.items():
        status = record.get("status", "none")
        link = f'<a href="#{stage}">{stage}</a>' if record else f"<a>{stage}</a>"
        items.append(
            f'<li class="{status}">{link}<span>{esc(_status(record))}{_time(record, about.get("stages", {}).get(stage, {}))}</span></li>'
        )
    return f'<ol class="strip">{"".join(items)}</ol>'


def _status(record: Mapping[str, Any]) -> str:
    return {"ok": "done", "stale": "out of date"}.get(record.get("status", ""), record.get("status", "not run"))


def _time(record: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    seconds = entry.get("seconds", record.get("seconds"))
    return f", {duration(seconds)}" if seconds is not None and record.get("status") != "stale" else ""


def _stage(run: Path, stage: str, record: Mapping[str, Any], about: Mapping[str, Any], metrics: Mapping[str, Any], limit: int) -> str:
    status = record["status"]
    heading = f'<section id="{stage}"><h2>{STAGES.index(stage) + 1} · {stage}<span class="chip {status}">{_status(record)}</span></h2>'
    if status == "stale":
        why = f"{record['stale_because']} ran again after it; its results were of other data and are left out."
        return f"{heading}<p>{esc(why)}</p></section>"
    checks = record.get("checks", [])
    body = notebook(run, stage, limit)
    shown = "class='checks'" in body or 'class="checks"' in body
    return f"""{heading}<p class="about">{_facts(stage, record, about.get("stages", {}).get(stage, {}))}</p>
{f'<p class="error">{esc(record["error"])}</p>' if record.get("error") else ""}
{_checks([c for c in checks if not c["passed"]])}
{body}
{"" if shown else _checks(checks)}
{_details("metrics", _metrics_table({k: v for k, v in metrics.items() if k.startswith(stage + ".")}))}
{_details("parameters", _params_table(record.get("params", {}), about.get("params", {})))}</section>"""


def _facts(stage: str, record: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """The line below a stage's heading."""
    checks = record.get("checks", [])
    facts = [
        DOES[stage],
        _time(record, entry).lstrip(", "),
        f"{size(entry['peak_memory'])} memory at most" if entry.get("peak_memory") else "",
        f"{sum(c['passed'] for c in checks)} of {len(checks)} checks passed" if checks else "",
    ]
    return " · ".join(filter(None, facts))


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for c in checks:
        word = '<span class="word ok">passed</span>' if c["passed"] else '<span class="word failed">FAILED</span>'
        remedy = f'<br><span class="error">{esc(c["remedy"])}</span>' if not c["passed"] else ""
        rows.append((word, esc(c["name"]), esc(show(c["measured"])), esc(show(c["limit"])), esc(c["protects"]) + remedy))
    table = _table(("", "check", "measured", "limit", "protects against"), rows)
    return f'<div class="scroll">{table}</div>' if rows else ""


def _metrics_table(metrics: Mapping[str, Any]) -> str:
    return (
        _table(("metric", "value"), [(f'<span class="mono">{esc(k)}</span>', esc(_short(v))) for k, v in metrics.items()])
        if metrics
        else ""
    )


def _params_table(values: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    rows = []
    for name, value in values.items():
        origin = settings.get(name, {}).get("origin", "") if name != "run_dir" else "runner"
        text = esc(_short(value))
        rows.append((f'<span class="mono">{esc(name)}</span>', f"<b>{text}</b>" if origin in ("file", "override") else text, origin))
    return _table(("parameter", "value", "origin"), rows) if rows else ""


def _short(value: Any) -> str:
    if isinstance(value, (list, dict)):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) < 300 else text[:300] + " ..."
    return show(value)


def _provenance(run: Path, about: Mapping[str, Any], records: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
    """Where the numbers come from: fingerprint of the hidden states, versions, machine."""
    newest: Mapping[str, Any] = next((r["versions"] for r in reversed(list(records.values())) if r.get("versions")), {})
    versions = about.get("versions") or newest
    machine = dict(about.get("machine", {}))
    if "memory" in machine:
        machine["memory"] = size(machine["memory"])
    blocks = [("Versions", versions), ("Machine", machine), ("Fingerprint of the hidden states", _fingerprint(run))]
    tables = "".join(f"<div><h3>{name}</h3>{_pairs(values)}</div>" for name, values in blocks if values)
    return f'<section id="provenance"><h2>Provenance</h2><div class="columns">{tables}</div></section>'


def _fingerprint(run: Path) -> dict[str, Any]:
    """The manifest of the run's store, flat: what makes a hidden state what it is."""
    for path in sorted(run.glob("*/store.json")):
        try:
            return flat(runs.read_json(path))
        except Eagle3Error:
            continue
    return {}


def _pairs(values: Mapping[str, Any], head: Sequence[str] = ()) -> str:
    return _table(head, [(f'<span class="mono">{esc(k)}</span>', esc(_short(v))) for k, v in values.items()])


def _details(summary: str, inner: str) -> str:
    return f"<details><summary>{summary}</summary>{inner}</details>" if inner else ""


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{h}</th>" for h in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{body}</tbody></table>"


def _page(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(title)}</title><style>{CSS}{code_style()}</style></head>
<body>
{body}
</body></html>
"""


def esc(value: Any) -> str:
    return html.escape(str(value))


# ---- index ----


def _row_or_excuse(folder: Path) -> tuple[str, ...]:
    """A folder that is damaged costs its own row only."""
    try:
        return _index_row(folder)
    except Exception as error:  # a record of any shape: whoever edited it, or whatever cut it off
        excuse = f'<span class="chip failed" style="margin:0" title="{esc(runs.one_line(error))}">cannot be read</span>'
        return ("", esc(folder.name), "", excuse, "", "", "", "")


def _index_row(folder: Path) -> tuple[str, ...]:
    """Sort key, then the cells of a run's row."""
    about, metrics = read_run(folder), runs.read_metrics(folder)
    records = {stage: runs.read_record(folder, stage) for stage in STAGES}
    state, title, text = verdict(about, records)
    started = about.get("started") or max((r.get("started", "") for r in records.values()), default="")

    def number(name: str, as_text: Show) -> str:
        return esc(as_text(metrics[name])) if metrics.get(name) is not None else ""

    name = f'<a href="{esc(folder.name)}/report.html">{esc(folder.name)}</a>' if (folder / "report.html").exists() else esc(folder.name)
    return (
        started,
        name,
        esc(started[:16].replace("T", " ")),
        f'<span class="chip {state}" style="margin:0" title="{esc(text)}">{esc(title)}</span>',
        number("evaluate.acceptance_length_measured", lambda v: f"{v:.2f}"),
        number("evaluate.acceptance_length_simulated", lambda v: f"{v:.2f}"),
        number("prepare.supervised_tokens", show),
        number("run.seconds", duration),
    )
