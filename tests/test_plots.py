"""Figures draw whatever the stages hand them, state a finding, and carry a text alternative."""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")

import pytest
from IPython import display as ipython_display

from eagle3lib import curves, plots

HISTORY = [{"step": n, "loss": 10.0 / n, "hits": [0.5, 0.3, None if n % 2 else 0.2]} for n in range(1, 60)]
BARS = {"a": {"measured": 1.2, "low": 1.1, "high": 1.3, "simulated": 1.25, "rounds": 300},
        "b": {"measured": 1.0, "low": 1.0, "high": 1.0, "simulated": 1.0, "rounds": 3}}


@pytest.fixture
def shown(monkeypatch):
    """What display() was called with: [(figure, alt text)]."""
    calls = []
    monkeypatch.setattr(ipython_display, "display", lambda fig, **k: calls.append((fig, k["metadata"]["image/png"]["alt"])))
    return calls


@pytest.mark.parametrize("draw", [
    lambda: plots.token_histogram([10, 20, 30], [5, 8, 9]),
    lambda: plots.replies_histogram([(1, 4), (3, 2)]),
    lambda: plots.accounting_waterfall([("records read", 10, 10), ("split", 3, 13), ("empty reply", -5, 8), ("rows kept", 8, 8)]),
    lambda: plots.accounting_waterfall([("records read", 10, 10), ("rows kept", 10, 10)]),
    lambda: plots.coverage_curve([1024, 4096], [0.9, 0.99], 2048),
    lambda: plots.coverage_curve([320], [1.0], 256),
    lambda: plots.dump_sizes([1e6, 2e6], 3_000_000, 3_000_100),
    lambda: plots.throughput([(0.0, 100, 0.1)], 0.0),
    lambda: plots.parity({"r_2": {1: 0.5, 2: 0.01, 3: 0.4}, "last": {7: 0.9, 8: 0.02}}),
    lambda: plots.cosines({"r_2 and r_4": [0.1, 0.5], "r_4 and last": [0.9, 0.95]}),
    lambda: plots.norm_profile({"r_2": [100.0, 1.0, 1.1, 1.0], "last": [1.0, 1.0, 1.0, 1.0]}),
    lambda: plots.acceptance_bars(BARS, 5),
    lambda: plots.survival({"a": [0.2, 0.1], "b": [0.0, 0.0]}, {"a": ([0.1, 0.0], [0.3, 0.2]), "b": ([0.0, 0.0], [0.0, 0.0])}),
    lambda: _drawn_live(),
])
def test_every_figure_has_labels_a_finding_and_a_text_alternative(shown, draw):
    draw()
    (figure, alt), = shown
    figure.canvas.draw()
    for ax in figure.axes:
        assert ax.get_xlabel() and (ax.get_ylabel() or ax.get_yticklabels()), alt
        assert ax.get_title(loc="left"), alt
    assert len(alt) > 40 and alt[0].isupper()
    assert not matplotlib.pyplot.get_fignums(), "a figure is left open"


def _drawn_live():
    live = curves.Live()
    bucket = {"length": 1.3, "low": 1.2, "high": 1.4, "rows": 9}
    buckets = {"context": {"64-127": bucket, "128-255": bucket}, "reply": {"0-63": bucket, "4096+": bucket}}
    heldout = {"step": 59, "acceptance_length": 1.4, "heldout": {"low": 1.3, "high": 1.5}, "buckets": buckets}
    for record in [*HISTORY, {"step": 30, "acceptance_length": 1.2}, heldout]:
        live(record)
    live.draw()


def test_the_history_stays_bounded_and_even_for_any_number_of_steps(monkeypatch):
    monkeypatch.setattr(curves, "HISTORY", 50)
    live = curves.Live(every_s=float("inf"))
    for n in range(1, 5001):
        live({"step": n, "loss": 1.0, "hits": [0.5]})
    steps = [r["step"] for r in live.history]
    assert 20 <= len(steps) <= 50 and steps[-1] > 4700 and steps[0] < 300
    assert max(b - a for a, b in zip(steps, steps[1:], strict=False)) <= 2 * (5000 // 20)


def test_a_run_gives_its_curves_as_a_picture_for_the_card(tmp_path):
    assert curves.png(tmp_path) == {}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in HISTORY))
    assert curves.png(tmp_path)["training.png"].startswith(b"\x89PNG")


def test_a_live_figure_is_drawn_once_and_then_updated(monkeypatch):
    updates, handles = [], []

    class Handle:
        def update(self, fig, **_):
            updates.append(fig)

    monkeypatch.setattr(ipython_display, "display", lambda fig, **_: handles.append(Handle()) or handles[-1])
    live = curves.Live(every_s=0)
    for record in HISTORY[:5]:
        live(record)
    assert len(handles) == 1 and len(updates) == 4
