"""Figures draw whatever the stages hand them, state a finding, and carry a text alternative."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import pytest
from IPython import display as ipython_display

from eagle3lib import plots

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
    lambda: plots.coverage_curve([1024, 4096], [0.9, 0.99], 2048),
    lambda: plots.coverage_curve([320], [1.0], 256),
    lambda: plots.dump_sizes([1e6, 2e6], 3_000_000, 3_000_100),
    lambda: plots.throughput([(0.0, 100, 0.1)], 0.0),
    lambda: plots.parity({"r_2": {1: 0.5, 2: 0.01, 3: 0.4}, "last": {7: 0.9, 8: 0.02}}),
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
    live = plots.Live()
    for record in [*HISTORY, {"step": 59, "acceptance_length": 1.4}]:
        live(record)
    live.draw()


def test_a_live_figure_is_drawn_once_and_then_updated(monkeypatch):
    updates, handles = [], []

    class Handle:
        def update(self, fig, **_):
            updates.append(fig)

    monkeypatch.setattr(ipython_display, "display", lambda fig, **_: handles.append(Handle()) or handles[-1])
    live = plots.Live(every_s=0)
    for record in HISTORY[:5]:
        live(record)
    assert len(handles) == 1 and len(updates) == 4
