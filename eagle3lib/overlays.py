"""Figures over several runs, for the compare notebook. Style and helpers are those of `plots`.

At most NAMED runs get a colour and a name, the best by the chosen metric; the others are drawn in grey behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from eagle3lib.compare import Comparison, curve, interval, progress
from eagle3lib.plots import BLACK, BLUE, CYCLE, MARKERS, ORANGE, figure, show, title

NAMED = 6
GREY = "#B0B0B0"
LINES = ("-", "--", "-.", ":")
MOST = 40  # runs in the chart of one metric


def metric_by_run(compared: Comparison) -> None:
    """The chosen metric of every run that has it, with its 95 % interval, the best on top."""
    shown = compared.ranking[:MOST]
    fig, (ax,) = figure(height=1.5 + 0.3 * max(len(shown), 2))
    for place, n in enumerate(shown):
        value, bounds = compared.metrics[n][compared.metric], interval(compared.metrics[n], compared.metric)
        colour = BLUE if place == 0 else BLACK
        if bounds:
            ax.plot(bounds, (place, place), color=colour, linewidth=2, alpha=0.6)
        ax.plot([value], [place], "D" if place == 0 else "o", color=colour)
        ax.annotate(f"{value:.4g}", (value, place), (6, 5), textcoords="offset points", color=colour, fontsize=8)
    if "acceptance_length" in compared.metric:
        ax.axvline(1.0, color=ORANGE, linestyle="--")
        ax.annotate("1.0: no draft", (1.0, -0.6), (3, 0), textcoords="offset points", fontsize=8, color="#8a5f00")
    ax.set_yticks(range(len(shown)), [compared.names[n] for n in shown])
    ax.set(xlabel=_axis(compared.metric), ylabel="run", ylim=(max(len(shown), 2) - 0.5, -0.8))
    ax.margins(x=0.12)
    left_out = f" ({len(compared.ranking) - MOST} more are not drawn)" if len(compared.ranking) > MOST else ""
    text = f"{compared.verdict()}{left_out}".capitalize() if not compared.best else f"Best of {len(compared.ranking)}: {compared.best}{left_out}"
    title(ax, text)
    values = ", ".join(f"{compared.names[n]} {compared.cell(compared.metric, n)}" for n in shown)
    show(fig, f"{compared.metric} by run, with 95 % intervals. {text}. {values}.")


def training_curves(compared: Comparison) -> None:
    """Training loss and hit rate of TTT step 0 of every run over its optimizer steps, smoothed."""
    fig, (left, right) = figure(2)
    losses = _overlay(left, compared, lambda n: curve(compared.folders[n], "loss"), smooth=True)
    hits = _overlay(right, compared, lambda n: _first_hits(compared, n), smooth=True)
    left.set(xlabel="optimizer step", ylabel="training loss, smoothed\n[nats, weighted over TTT steps]")
    right.set(xlabel="optimizer step", ylabel="hit rate of TTT step 0,\nsmoothed [%]")
    lowest = min(losses, key=lambda n: losses[n]) if losses else None
    text = "No run has training curves" if lowest is None else f"Lowest loss at the end: {losses[lowest]:.3g}\n{compared.names[lowest]}"
    most = max(hits, key=lambda n: hits[n]) if hits else None
    title(left, text)
    title(right, "No run has hit rates" if most is None else f"Most hits at the end: {hits[most]:.0f} %\n{compared.names[most]}")
    _legend(right)
    ends = ", ".join(f"{compared.names[n]} {loss:.3g}" for n, loss in losses.items())
    show(fig, f"Training curves of {len(losses)} runs, overlaid. {_line(text)}. Losses at the end: {ends}.")


def acceptance_progress(compared: Comparison) -> None:
    """Held-out acceptance length (simulated, chain) of every run against the tokens and the hours that it was trained for."""
    points = {n: progress(compared.folders[n]) for n in range(len(compared.names))}
    fig, (left, right) = figure(2)
    last = _overlay(left, compared, lambda n: (points[n][0], points[n][2]), markers=True)
    _overlay(right, compared, lambda n: (points[n][1], points[n][2]), markers=True)
    left.xaxis.set_major_formatter(EngFormatter())
    left.set(xlabel="tokens trained on, every epoch counted", ylabel="held-out acceptance length\n[tokens a round, simulated]")
    right.set(xlabel="training time [hours]", ylabel="held-out acceptance length\n[tokens a round, simulated]")
    best = max(last, key=lambda n: last[n]) if last else None
    text = "No run tried its draft while training" if best is None else f"Highest at its end: {last[best]:.2f}\n{compared.names[best]}"
    title(left, text)
    title(right, "The same against hours of training")
    _legend(right)
    ends = ", ".join(f"{compared.names[n]} {last[n]:.2f} after {points[n][0][-1]:,.0f} tokens and {points[n][1][-1]:.2f} h" for n in last)
    show(fig, f"Held-out acceptance length against training tokens and hours. {_line(text)}. {ends}.")


def _first_hits(compared: Comparison, n: int) -> tuple[list[float], list[float]]:
    steps, hits = curve(compared.folders[n], "hits")
    known = [(s, 100 * h[0]) for s, h in zip(steps, hits, strict=True) if isinstance(h, list) and h and h[0] is not None]
    return [s for s, _ in known], [h for _, h in known]


def _overlay(
    ax: Axes,
    compared: Comparison,
    of: Callable[[int], tuple[list[float], list[float]]],
    smooth: bool = False,
    markers: bool = False,
) -> dict[int, float]:
    """Draw a line a run; returns the last value of each that has one. The named ones lie on top."""
    order = [*compared.ranking, *(n for n in range(len(compared.names)) if n not in compared.ranking)]
    last: dict[int, float] = {}
    for place, n in reversed(list(enumerate(order))):
        x, y = of(n)
        if not x:
            continue
        drawn = _smoothed(y) if smooth else np.asarray(y, float)
        named = place < NAMED
        style: dict[str, Any] = {"color": GREY, "linewidth": 0.8}
        if named:
            style = {"color": CYCLE[place], "linestyle": LINES[place % 4], "linewidth": 1.8}
        label = compared.names[n] if named else f"{len(order) - NAMED} others" if place == NAMED else None
        ax.plot(x, drawn, marker=MARKERS[place] if markers and named else "", label=label, **style)
        last[n] = float(drawn[-1])
    return dict(sorted(last.items()))


def _smoothed(values: list[float]) -> np.ndarray:
    """Trailing mean over a twentieth of the run."""
    sums, width = np.cumsum([0.0, *values]), max(1, len(values) // 20)
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def _legend(ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        ax.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(0, -0.22), fontsize=8)


def _line(text: str) -> str:
    return text.replace("\n", ", ")


def _axis(metric: str) -> str:
    units = {"acceptance_length": "tokens a round", "seconds": "s", "bytes": "bytes", "tokens_per_s": "tokens/s", "loss": "nats", "_ms": "ms"}
    unit = next((u for word, u in units.items() if word in metric), "")
    return f"{metric} [{unit}]" if unit else metric
