"""Training curves: one figure, redrawn in place while training runs, and kept as it ended.

Its size is bounded for any number of steps: at most HISTORY of them are kept, evenly thinned.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from eagle3lib.plots import BLACK, BLUE, CYCLE, GREEN, MARKERS, ORANGE, SKY, STYLE, VERMILION, title
from eagle3lib.steplog import MetricsLog

HISTORY = 4000
Record = Mapping[str, Any]


class Live:
    """Collects training records and redraws one figure in place: live in JupyterLab, one tidy figure in batch."""

    def __init__(self, every_s: float = 10.0):
        self.every_s, self._drawn, self._handle = every_s, time.monotonic(), None
        self.history: list[Record] = []
        self.heldout: list[Record] = []
        self._every = 1

    def __call__(self, record: Record) -> None:
        """Take a line of metrics.jsonl: a step (loss, hits) or a measurement on held-out rows (acceptance_length)."""
        if record.get("acceptance_length") is not None:
            self.heldout.append(record)
        elif record.get("loss") is not None and record["step"] % self._every == 0:
            self.history.append(record)
        if len(self.history) > HISTORY:
            self.history, self._every = self.history[::2], 2 * self._every
        if time.monotonic() - self._drawn > self.every_s:
            self.draw()

    def draw(self) -> None:
        from IPython.display import display

        if not self.history:
            return
        fig, alt = training_curves(self.history, self.heldout)
        shown = {"metadata": {"image/png": {"alt": alt}}}
        if self._handle is None:
            self._handle = display(fig, display_id=True, **shown)
        else:
            self._handle.update(fig, **shown)
        plt.close(fig)
        self._drawn = time.monotonic()


def png(run: Path) -> dict[str, bytes]:
    """The curves of a run as a file for a model card: {"training.png": bytes}; empty when the run has none."""
    live = Live(every_s=float("inf"))
    for record in MetricsLog(run / "metrics.jsonl").read():
        live(record)
    if not live.history:
        return {}
    figure, _ = training_curves(live.history, live.heldout)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    plt.close(figure)
    return {"training.png": file.getvalue()}


def training_curves(history: Sequence[Record], heldout: Sequence[Record] = ()) -> tuple[Figure, str]:
    """Loss, hit rate of each TTT step, learning rate and speed over training steps; with `heldout`, acceptance over steps and by length.

    history: records of steps. heldout: records of measurements. The figure and its text alternative.
    """
    panels = [_loss, _hits, _rate, _speed] + ([_acceptance, _buckets] if heldout else [])
    order = [0, 1, 3, 4, 2, 5] if heldout else [0, 1, 2, 3]
    with plt.rc_context({**STYLE, "legend.fontsize": 8}):
        fig, axes = plt.subplots(2, len(panels) // 2, figsize=(9.6 if len(panels) == 4 else 13.2, 6.4), layout="constrained")
        found = [panel(axes.flat[place], history, heldout) for panel, place in zip(panels, order, strict=True)]
    last = history[-1]
    left = f", about {_minutes(last['left_s'])} left" if last.get("left_s") else ""
    fig.suptitle(f"Step {last['step']:,}{left}", fontsize=10, x=0.01, ha="left")
    return fig, f"Training curves over {last['step']:,} steps. " + ". ".join(found) + "."


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _steps(ax: Axes, history: Sequence[Record], ylabel: str) -> list[int]:
    ax.set(xlabel="optimizer step", ylabel=ylabel)
    ax.xaxis.set_major_formatter(EngFormatter())
    return [r["step"] for r in history]


def _loss(ax: Axes, history: Sequence[Record], _: Sequence[Record]) -> str:
    steps, loss = _steps(ax, history, "loss of all TTT steps [nats]"), np.array([r["loss"] for r in history], float)
    ends = max(1, len(loss) // 20)
    ax.plot(steps, loss, color=SKY, linewidth=0.8, label="each step")
    ax.plot(steps, smooth(loss), color=BLUE, linewidth=2, label="smoothed")
    first, last = loss[:ends].mean(), loss[-ends:].mean()
    found = f"Loss {'falls' if last < first else 'does not fall: it goes'} from {first:.2f} to {last:.2f}"
    title(ax, found)
    ax.legend()
    return found


def _hits(ax: Axes, history: Sequence[Record], _: Sequence[Record]) -> str:
    steps, hits = _steps(ax, history, "hit rate, smoothed [%]"), np.array([r["hits"] for r in history], float)
    for k in range(hits.shape[1]):
        ax.plot(steps, smooth(hits[:, k]) * 100, color=CYCLE[k % 7], linestyle=("-", "--", "-.", ":")[k % 4], label=f"step {k}")
    ax.set_ylim(None, 1.25 * ax.get_ylim()[1])  # room for the legend
    ax.legend(ncols=4, title="TTT", loc="upper left")
    last = [smooth(hits[:, k])[-1] for k in (0, -1)]
    found = f"Hit rate {last[0]:.0%} at step 0, {last[1]:.0%} at step {hits.shape[1] - 1}"
    title(ax, found)
    return found


def _rate(ax: Axes, history: Sequence[Record], _: Sequence[Record]) -> str:
    lr = [r.get("lr", np.nan) for r in history]
    ax.plot(_steps(ax, history, "learning rate"), lr, color=ORANGE)
    found = f"Learning rate now {lr[-1]:.1e}"
    title(ax, found)
    return found


def _speed(ax: Axes, history: Sequence[Record], _: Sequence[Record]) -> str:
    speed = np.array([r.get("tokens_per_s", np.nan) for r in history], float)
    ax.plot(_steps(ax, history, "tokens/s"), smooth(speed), color=GREEN)
    ax.yaxis.set_major_formatter(EngFormatter())
    ax.set_ylim(0, None)
    waits = [r["wait_share"] for r in history if r.get("wait_share") is not None]
    typical = np.nanmedian(speed) if np.isfinite(speed).any() else 0.0
    found = f"{typical:,.0f} tokens/s" + (f", {np.mean(waits):.1%} waiting for data" if waits else "")
    title(ax, found)
    return found


def _acceptance(ax: Axes, _: Sequence[Record], heldout: Sequence[Record]) -> str:
    steps, length = _steps(ax, heldout, "acceptance length [tokens a round]"), [r["acceptance_length"] for r in heldout]
    low, high = (np.array([(r.get("heldout") or {}).get(name, r["acceptance_length"]) for r in heldout], float) for name in ("low", "high"))
    ax.fill_between(steps, low, high, color=BLUE, alpha=0.15, linewidth=0, label="95 % interval")
    ax.plot(steps, length, color=BLUE, marker="o", markersize=4)
    best = int(np.argmax(length))
    ax.plot(steps[best], length[best], "D", color=VERMILION, label="kept")
    ax.axhline(1.0, color=BLACK, linestyle="--", linewidth=1)
    ax.legend(loc="lower right")
    found = f"Held-out acceptance {length[best]:.2f} (simulated, chain)"
    title(ax, found)
    return found


def _buckets(ax: Axes, _: Sequence[Record], heldout: Sequence[Record]) -> str:
    best = max(heldout, key=lambda r: r["acceptance_length"])
    buckets, names = best.get("buckets") or {}, list[str]()
    for n, (kind, by_length) in enumerate(buckets.items()):
        names += [b for b in by_length if b not in names]
        names.sort(key=lambda b: int(b.rstrip("+").split("-")[0]))
        at = [names.index(b) + 0.12 * (2 * n - 1) for b in by_length]
        value = np.array([[b["length"], b["length"] - b["low"], b["high"] - b["length"]] for b in by_length.values()])
        ax.errorbar(at, value[:, 0], np.maximum(value[:, 1:].T, 0), fmt=MARKERS[n], color=CYCLE[n], capsize=3, label=f"by {kind}")
    ax.axhline(1.0, color=BLACK, linestyle="--", linewidth=1)
    ax.set_xticks(range(len(names)), names, rotation=20)
    ax.set(xlabel="length [tokens]", ylabel="acceptance length [tokens a round]", xlim=(-0.5, max(len(names), 1) - 0.5))
    if names:
        ax.legend()
    values = [b["length"] for by_length in buckets.values() for b in by_length.values()]
    found = f"By length: between {min(values):.2f} and {max(values):.2f}" if values else "Acceptance by length: not measured"
    title(ax, found)
    return found


def smooth(values: np.ndarray) -> np.ndarray:
    """Trailing mean over a twentieth of the run; gaps (NaN) are left out of it."""
    width = max(1, len(values) // 20)
    known = np.isfinite(values)
    low = np.maximum(np.arange(1, len(values) + 1) - width, 0)
    sums, counts = (np.cumsum(np.concatenate([[0.0], v])) for v in (np.where(known, values, 0.0), known))
    with np.errstate(invalid="ignore"):
        return (sums[1:] - sums[low]) / (counts[1:] - counts[low])
