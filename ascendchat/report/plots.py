"""Curves as SVG: the only importer of matplotlib.

    text = draw([Panel("loss", [PlotCurve("base", steps, values)])])

Text stays text, so that the reader's fonts show it, Chinese included.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendchat.errors import UserError

COLOURS = (
    "#0b62a8",
    "#b3470a",
    "#1a7f37",
    "#8a2f8f",
    "#8c6d00",
    "#444444",
)  # readable on white, also without red or green
MAX_POINTS = 600  # of a curve: more make a file large and nothing clearer
SMOOTHING_SHARE = 0.02  # reach of the moving average on either side, as a share of a curve's points
COLUMNS, WIDTH, HEIGHT = 3, 3.9, 2.5  # panels beside each other; inches of one


@dataclass(frozen=True)
class PlotCurve:
    """One line of a panel; `low` and `high` are the borders of a band around it."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dots: bool = False  # few points, such as validations
    exact: bool = False  # no noise to smooth


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str
    curves: list[PlotCurve] = field(default_factory=list)
    from_zero: bool = False


def downsampled(steps: Sequence[float], values: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Average neighbouring points, so that at most MAX_POINTS are left."""
    x, y = np.asarray(steps, dtype=np.float64), np.asarray(values, dtype=np.float64)
    width = -(-len(x) // MAX_POINTS)
    if width <= 1:
        return x, y
    parts = np.arange(0, len(x), width)
    counts = np.diff(np.append(parts, len(x)))
    return np.add.reduceat(x, parts) / counts, np.add.reduceat(y, parts) / counts


def moving_average(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of each value with those around it; fewer at the ends."""
    reach = max(1, round(len(values) * SMOOTHING_SHARE))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    place = np.arange(len(values))
    first, last = np.maximum(place - reach, 0), np.minimum(place + reach + 1, len(values))
    means: NDArray[np.float64] = (sums[last] - sums[first]) / (last - first)
    return means


def draw(panels: Sequence[Panel]) -> str:
    """Draw all panels as one SVG."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("plots need matplotlib; install it: pip install matplotlib") from None
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "ascendchat",
        "font.size": 8.0,
        "font.family": "sans-serif",
    }
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's fonts have it
        figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
        figure.get_layout_engine().set(hspace=0.08, wspace=0.04)  # type: ignore[union-attr, call-arg]
        FigureCanvasSVG(figure)
        for place, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, place + 1)
            fill(axes, panel)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def fill(ax: Any, panel: Panel) -> None:
    """Draw the curves of a panel."""
    for number, curve in enumerate(panel.curves):
        colour = COLOURS[number % len(COLOURS)]
        x, y = downsampled(curve.steps, curve.values)
        if curve.low:
            low, high = (downsampled(curve.steps, border)[1] for border in (curve.low, curve.high))
            ax.fill_between(x, low, high, color=colour, alpha=0.2, lw=0)
        if curve.dots or len(x) < 20:
            ax.plot(x, y, "o-", color=colour, label=curve.label, lw=1.2, ms=3)
        else:
            if not curve.exact:
                ax.plot(x, y, color=colour, alpha=0.25, lw=0.8)
            ax.plot(x, y if curve.exact else moving_average(y), color=colour, label=curve.label, lw=1.4)
    ax.set_title(panel.title, fontsize=9)
    ax.grid(alpha=0.25, lw=0.5)
    ax.set_xlim(left=0)  # so that two validations stand where they were made, below the loss
    if panel.from_zero:
        ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
    if len(panel.curves) > 1 or any(curve.label for curve in panel.curves):
        ax.legend(frameon=False, fontsize=7)
