"""Figures: one style, axes with units, a title that states the finding, a text alternative for those who cannot see it.

Every function draws, shows and closes one figure. Colours are Okabe and Ito's (jfly.uni-koeln.de/color), which
colour-blind readers can tell apart; line styles and labels repeat what colour says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000"
CYCLE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK)
MARKERS = "osD^v<>"
STYLE: Any = {
    "figure.dpi": 110, "figure.figsize": (7.2, 3.4), "figure.constrained_layout.use": True, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "axes.titlelocation": "left", "axes.titlesize": 11,
    "axes.titleweight": "bold", "font.size": 9.5, "legend.frameon": False,
}


def figure(columns: int = 1, height: float = 3.4) -> tuple[Figure, list[Axes]]:
    plt.rcParams.update(STYLE)  # not a context: legends and texts that come later follow the style as well
    fig, axes = plt.subplots(1, columns, figsize=(7.2 if columns == 1 else 9.6, height), squeeze=False)
    return fig, list(axes[0])


def title(ax: Axes, text: str) -> None:
    """The finding, left-aligned and bold; two lines at most."""
    ax.set_title(text, loc="left", fontsize=10.5, fontweight="bold", wrap=True)


def show(fig: Figure, alt: str) -> None:
    """Show once, with `alt` as the image's text alternative, and free the memory."""
    from IPython.display import display

    display(fig, metadata={"image/png": {"alt": alt}})
    plt.close(fig)


# prepare -----------------------------------------------------------------------------------------------------------


def token_histogram(n_tokens: Sequence[int], n_supervised: Sequence[int]) -> None:
    """Tokens a row beside supervised tokens a row."""
    tokens, supervised = np.asarray(n_tokens), np.asarray(n_supervised)
    fig, (ax,) = figure()
    bins = np.linspace(0, tokens.max() + 1, 31).tolist()
    ax.hist(tokens, bins, color=BLUE, alpha=0.75, label="whole row")
    ax.hist(supervised, bins, histtype="step", color=VERMILION, linewidth=1.8, label="supervised (reply)")
    text = (f"{len(tokens):,} rows of {np.median(tokens):.0f} tokens (median, {tokens.max():,} at most); "
            f"{supervised.sum() / tokens.sum():.0%} of {tokens.sum():,} tokens are supervised")
    title(ax, text)
    ax.set(xlabel="tokens a row", ylabel="rows")
    ax.legend()
    show(fig, f"Histogram of row lengths. {text}.")


def replies_histogram(replies: Sequence[tuple[int, int]]) -> None:
    """replies: (trained replies a row, rows)."""
    number, rows = (np.array(column) for column in zip(*replies, strict=True))
    fig, (ax,) = figure(height=2.6)
    bars = ax.bar(number, rows, width=0.6, color=BLUE)
    ax.bar_label(bars, labels=[f"{n:,}" for n in rows], padding=2)
    text = f"{(number * rows).sum():,} trained replies in {rows.sum():,} rows, {number.max()} in the longest conversation"
    title(ax, text)
    ax.set(xlabel="trained replies (assistant turns) a row", ylabel="rows", ylim=(0, rows.max() * 1.15), xlim=(-0.5, number.max() + 1.5))
    ax.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    show(fig, f"Histogram of assistant turns a row. {text}.")


def accounting_waterfall(lines: Sequence[tuple[str, int, int]]) -> None:
    """lines: (name, rows added or taken away, rows that are left then), from the records read to the rows kept."""
    names, change, left = (list(column) for column in zip(*lines, strict=True))
    fig, (ax,) = figure(height=0.9 + 0.32 * len(lines))
    colours = [BLUE if i in (0, len(lines) - 1) else GREEN if change[i] > 0 else VERMILION for i in range(len(lines))]
    begins = [left[i] - max(change[i], 0) if colours[i] != BLUE else 0 for i in range(len(lines))]
    bars = ax.barh(range(len(lines)), [abs(n) for n in change], left=begins, color=colours)
    ax.bar_label(bars, labels=[f"{n:,}" if colours[i] == BLUE else f"{n:+,}" for i, n in enumerate(change)], padding=3)
    ax.set_yticks(range(len(lines)), names)
    ax.invert_yaxis()
    most = max(range(len(lines)), key=lambda i: -change[i])
    text = f"{left[-1]:,} rows are kept of {left[0]:,} records" + (f"; most are lost to: {names[most]}" if change[most] < 0 else "; none is lost")
    title(ax, text)
    ax.set(xlabel="rows", xlim=(0, max(left) * 1.15 or 1))
    each = "; ".join(f"{name}: {n:+,}" for name, n in zip(names[1:-1], change[1:-1], strict=True))
    show(fig, f"Waterfall of the accounting. {text}. {each}.")


def coverage_curve(sizes: Sequence[int], shares: Sequence[float], chosen: int) -> None:
    """Share of supervised tokens that a draft vocabulary of N most frequent tokens covers."""
    share = float(np.interp(chosen, sizes, shares))
    fig, (ax,) = figure()
    ax.plot(sizes, np.asarray(shares) * 100, color=BLUE, marker="o", markersize=4)
    ax.axvline(chosen, color=VERMILION, linestyle="--")
    ax.annotate(f"{chosen:,} tokens", (chosen, min(shares) * 100), color=VERMILION, rotation=90, va="bottom", ha="right")
    text = f"A draft vocabulary of {chosen:,} tokens covers {share:.2%} of the supervised tokens"
    title(ax, text)
    ax.set(xlabel="draft vocabulary [tokens]", ylabel="supervised tokens covered [%]", xscale="log")
    show(fig, f"Coverage against draft vocabulary size. {text}.")


# extract -----------------------------------------------------------------------------------------------------------


def dump_sizes(sample_bytes: Sequence[int], predicted: int, written: int) -> None:
    """Bytes a sample, and the total on disk beside the forecast made before the run."""
    fig, (left, right) = figure(2)
    left.hist(np.asarray(sample_bytes) / 1e6, 30, color=BLUE)
    title(left, f"A sample takes {np.median(sample_bytes) / 1e6:.2f} MB (median)")
    left.set(xlabel="dump size of a sample [MB]", ylabel="samples")
    bars = right.barh(["forecast", "written"], [predicted / 1e6, written / 1e6], color=[SKY, BLUE])
    right.bar_label(bars, fmt="%.1f MB", padding=3)
    right.set(xlabel="size on disk [MB]", xlim=(0, max(predicted, written) / 1e6 * 1.25))
    off = written / predicted - 1
    title(right, f"What was written is within {abs(off):.2%} of the forecast")
    show(fig, f"Dump sizes: {len(sample_bytes)} samples; forecast {predicted / 1e6:.1f} MB, written {written / 1e6:.1f} MB, {off:+.2%}.")


def throughput(course: Sequence[tuple[float, int, float]], foretold: float) -> None:
    """Extracted tokens and the level of shared memory over time; course: (seconds, tokens stored, level 0..1), foretold: tokens/s."""
    t, n, level = np.asarray(course, float).T
    fig, (left, right) = figure(2, 2.8)
    left.plot(t, n, color=BLUE, label="stored")
    if foretold:
        left.plot(t, np.minimum(t * foretold, n[-1]), color=ORANGE, linestyle="--", label="forecast by the warm-up")
    left.yaxis.set_major_formatter(EngFormatter())
    rate = n[-1] / max(t[-1], 1e-9)
    text = f"{n[-1]:,.0f} tokens in {t[-1]:.0f} s: {rate:,.0f} tokens/s"
    title(left, text)
    left.set(xlabel="time since the first request [s]", ylabel="tokens stored", ylim=(0, None))
    left.legend()
    right.plot(t, level * 100, color=PURPLE)
    full = f"Shared memory was at most {level.max():.0%} full"
    title(right, full)
    right.set(xlabel="time since the first request [s]", ylabel="shared memory in use [%]", ylim=(0, 100))
    show(fig, f"Cumulative tokens and shared memory over time. {text}; the warm-up foretold {foretold:,.0f}. {full}.")


# verify ------------------------------------------------------------------------------------------------------------


def parity(errors: Mapping[str, Mapping[int, float]]) -> None:
    """errors[stream][k]: median per-token relative error of a dumped stream against float32 r_k, for neighbouring k."""
    if not errors:
        print("No stream was compared with float32 (parity_rows 0).")
        return
    fig, (ax,) = figure()
    worst = max(min(errors[s].values()) for s in errors)
    for n, (stream, by_layer) in enumerate(errors.items()):
        layers = sorted(by_layer)
        ax.plot(layers, [by_layer[k] for k in layers], color=CYCLE[n], marker=MARKERS[n], label=f"dumped as {stream}")
    text = f"Each dumped stream is the layer it says: error at most {worst:.3f} there, {_nearest_wrong(errors):.2f} or more next to it"
    title(ax, text)
    ax.set(xlabel="residual stream r_k of the float32 reference [layer]", ylabel="median relative error a token", yscale="log")
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
    show(fig, f"Error of each dumped stream against neighbouring layers of the reference. {text}.")


def _nearest_wrong(errors: Mapping[str, Mapping[int, float]]) -> float:
    return min(sorted(by_layer.values())[1] for by_layer in errors.values())


def norm_profile(norms: Mapping[str, Sequence[float]]) -> None:
    """Median norm of each stream by position in the row; the first token's outlier is expected in Llama models."""
    fig, (ax,) = figure()
    for n, (stream, values) in enumerate(norms.items()):
        ax.plot(np.arange(len(values)), values, color=CYCLE[n], label=stream, linewidth=1.3)
    first = {s: v[0] / np.median(v) for s, v in norms.items()}
    most = max(first, key=lambda s: first[s])
    text = f"Norms are steady along the row; token 0 of {most} is {first[most]:,.0f} times the median (an attention sink)" if first[most] > 3 else \
        "Norms are steady along the row"
    title(ax, text)
    ax.set(xlabel="position in the row [token]", ylabel="median norm", yscale="log")
    ax.legend(ncols=4)
    show(fig, f"Median norm of each stream by position. {text}.")


def cosines(by_pair: Mapping[str, Sequence[float]]) -> None:
    """Cosine between neighbouring captured streams at the same token: how far the layers between them turn the stream."""
    fig, (ax,) = figure(height=2.8)
    bins = np.linspace(-0.25, 1, 51)
    for n, (pair, values) in enumerate(by_pair.items()):
        ax.hist(np.clip(values, -0.25, 1), bins.tolist(), histtype="step", color=CYCLE[n], linewidth=1.8, linestyle=("-", "--", "-.")[n % 3],
                density=True, label=f"{pair}: median {np.median(values):.2f}")
    closest = max(by_pair, key=lambda pair: np.median(by_pair[pair]))
    text = f"The streams differ: the closest, {closest}, have a median cosine of {np.median(by_pair[closest]):.2f}"
    title(ax, text)
    ax.set(xlabel="cosine between two streams at one token", ylabel="density of tokens")
    ax.legend(loc="upper left")
    show(fig, f"Cosines between neighbouring captured streams. {text}.")


# evaluate ----------------------------------------------------------------------------------------------------------


def acceptance_bars(sets: Mapping[str, Mapping[str, Any]], shape: str) -> None:
    """Measured acceptance length a set with its 95 % interval, the simulated and the served figure beside it, baseline 1.0.

    sets[name]: measured, low, high, simulated, rounds, and where it was served: served, served_low, served_high.
    """
    fig, (ax,) = figure()
    names = list(sets)
    x = np.arange(len(names))
    measured = np.array([sets[n]["measured"] for n in names])
    spread = np.array([[sets[n]["measured"] - sets[n]["low"], sets[n]["high"] - sets[n]["measured"]] for n in names]).T
    ax.bar(x, measured, 0.55, color=BLUE, yerr=np.maximum(spread, 0), capsize=4, label="measured (95 % interval)")
    ax.plot(x, [sets[n]["simulated"] for n in names], "D", color=ORANGE, markeredgecolor=BLACK, label="simulated (teacher-forced, joint)")
    if served := [(i, sets[n]) for i, n in enumerate(names) if "served" in sets[n]]:
        reach = np.array([[max(s["served"] - s["served_low"], 0), max(s["served_high"] - s["served"], 0)] for _, s in served]).T
        ax.errorbar([i + 0.18 for i, _ in served], [s["served"] for _, s in served], yerr=reach, color=VERMILION, marker="s", linestyle="",
                    capsize=4, label="served by SGLang")
    for i in range(len(names)):
        ax.annotate(f"{measured[i]:.2f}", (x[i] - 0.24, 0.04), color="white", fontweight="bold")
    ax.axhline(1.0, color=BLACK, linestyle="--", linewidth=1)
    ax.annotate("1.0: no draft", (len(names) - 0.5, 1.0), ha="right", va="bottom")
    ax.set_xticks(x, [f"{n}\n{sets[n]['rounds']:,} rounds" for n in names])
    top = max([*(measured + spread[1]), *(s["served_high"] for _, s in served)])
    ax.set(xlabel="evaluation set", ylabel="acceptance length [tokens a round]", ylim=(0, max(2.0, top * 1.3)))
    best = max(names, key=lambda n: sets[n]["measured"])
    text = f"{measured.mean():.2f} tokens a target forward on average, {sets[best]['measured']:.2f} on {best} ({shape})"
    title(ax, text)
    ax.legend(loc="upper right", ncols=3, fontsize=8)
    each = (f"{n}: measured {s['measured']:.2f} ({s['low']:.2f} to {s['high']:.2f}), simulated {s['simulated']:.2f}"
            + (f", served {s['served']:.2f}" if "served" in s else "") for n, s in sets.items())
    show(fig, f"Acceptance length by set. {text}. {'; '.join(each)}.")


def survival(sets: Mapping[str, Sequence[float]], intervals: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """sets[name][k]: share of rounds in which draft tokens 1..k+1 were all accepted; intervals[name]: (low, high) of the same."""
    fig, (ax,) = figure(height=3.0)
    for n, (name, values) in enumerate(sets.items()):
        position, (low, high) = np.arange(1, len(values) + 1), intervals[name]
        ax.plot(position, np.asarray(values) * 100, color=CYCLE[n], marker=MARKERS[n], label=name)
        ax.fill_between(position, np.asarray(low) * 100, np.asarray(high) * 100, color=CYCLE[n], alpha=0.15, linewidth=0)
    first = np.mean([v[0] for v in sets.values()])
    title(ax, f"The first drafted token is accepted in {first:.0%} of the rounds")
    ax.set(xlabel="draft position", ylabel="rounds accepted up to here [%]", ylim=(0, None))
    ax.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    ax.legend(title="bands: 95 % intervals over prompts", title_fontsize=8)
    show(fig, "Share of rounds accepted up to each draft position: " + "; ".join(
        f"{n}: " + ", ".join(f"{v:.0%}" for v in values) for n, values in sets.items()) + ".")


def acceptance_by_length(contexts: Mapping[str, Any], replies: Mapping[str, Any], shape: str) -> None:
    """Measured acceptance with its 95 % interval in buckets of context length and of reply length; values: acceptance.Acceptance."""
    fig, axes = figure(2)
    for ax, found, what in zip(axes, (contexts, replies), ("context of a round", "whole reply"), strict=True):
        x, lengths = np.arange(len(found)), np.array([f.length for f in found.values()])
        spread = np.array([[f.length - f.low, f.high - f.length] for f in found.values()]).T
        ax.errorbar(x, lengths, yerr=np.maximum(spread, 0), color=BLUE, marker="o", capsize=4, linestyle="")
        ax.axhline(1.0, color=BLACK, linestyle="--", linewidth=1)
        ax.set_xticks(x, [f"{name}\n{f.rounds:,} rounds" for name, f in found.items()], fontsize=8)
        told = [f.high for f in found.values() if f.prompts > 1] or [lengths.max()]  # a single prompt's interval is all that can be
        ax.set(xlabel=f"{what} [tokens]", ylabel=f"acceptance length ({shape})", ylim=(0.9, max(*told, lengths.max()) + 0.1))
        first, last = list(found)[0], list(found)[-1]
        title(ax, f"By {what}: {found[first].length:.2f} at {first}, {found[last].length:.2f} at {last}" if len(found) > 1 else
              f"By {what}: all at {first}, {found[first].length:.2f}")
    each = "; ".join(f"{n}: {f.length:.2f} ({f.low:.2f} to {f.high:.2f})" for found in (contexts, replies) for n, f in found.items())
    show(fig, f"Measured acceptance length by context and by reply length, {shape}. {each}.")
