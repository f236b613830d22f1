"""Curves side by side, and work on lanes over time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from workbench.errors import shown
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import OKABE_ITO, style

LINES = ((OKABE_ITO[4], "-"), (OKABE_ITO[5], "--"), (OKABE_ITO[2], "-."), (OKABE_ITO[7], ":"))
POINTS = "osD^"
Curve = tuple[Sequence[float], Sequence[float]]


def line_picture(panels: Mapping[str, Mapping[str, Curve]], caption: str, alt: str, xlabel: str, ylabel: str = "",
                 ticks: Sequence[float] | None = None) -> Picture:  # fmt: skip
    """Curves label -> (x, y) in one panel per title, on logarithmic axes; a curve of one x is drawn as points.

    Curves differ by colour and by dash, points by shape. `ticks`: where both axes are marked, instead of at powers of ten.
    """
    figure = new_figure(7.4, 3.0)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels.items()):
        lines, points = iter(LINES), iter(POINTS)
        for label, (x, y) in curves.items():
            if len(set(x)) == 1:
                axes.plot(x, y, next(points), color="#333333", label=label)
            else:
                colour, dash = next(lines)
                axes.plot(x, y, dash, color=colour, label=label, lw=1.8)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel if axes.get_subplotspec().is_first_col() else "", xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            if ticks:
                axis.set_major_locator(FixedLocator(ticks))
                axis.set_minor_locator(NullLocator())
        axes.grid(color="#dddddd", lw=0.6)
    axes.legend(fontsize=8)
    return picture(figure, alt, caption)


def curves_picture(panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], caption: str, alt: str, xlabel: str = "step",
                   ylabel: str = "loss", every: int = 1, log: bool = True) -> Picture:  # fmt: skip
    """Runs over steps, one panel per title: label -> runs (seeds), drawn as the median with a band from the lowest to the highest.

    every: steps between two points. Curves differ by colour and by dash; the labels stand in the legend in their order.
    """
    figure = new_figure(7.4, 3.1)
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False, sharey=True)[0], panels.items()):
        for (colour, dash), (label, runs) in zip(itertools.cycle(LINES), curves.items()):
            values = np.asarray(runs, float)
            x = every * (1 + np.arange(values.shape[-1]))
            axes.plot(x, np.median(values, 0), dash, color=colour, label=shown(label, 60), lw=1.7)
            if len(values) > 1:
                axes.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.15, lw=0)
        axes.set(title=shown(title), xlabel=xlabel, ylabel=ylabel if axes.get_subplotspec().is_first_col() else "",
                 yscale="log" if log else "linear")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(color="#dddddd", lw=0.6)
        if len(curves) > 1:
            axes.legend(fontsize=7.5)
    return picture(figure, alt, caption)


def lane_picture(spans: Sequence[tuple[int, float, float, str]], lanes: Sequence[str], caption: str, alt: str, xlabel: str) -> Picture:
    """Pieces of work (lane, start, end, name) over time; a name is written where it has room."""
    figure = new_figure(7.4, 0.75 + 0.42 * len(lanes))
    end = max(span[2] for span in spans)
    axes: Any = figure.add_subplot(xlabel=xlabel, xlim=(0, end), ylim=(len(lanes) - 0.5, -0.5))
    axes.set_yticks(range(len(lanes)), lanes)
    for lane, start, stop, name in spans:
        look = style(lane)
        axes.broken_barh([(start, stop - start)], (lane - 0.4, 0.8), fc=look.fill, ec="white", lw=0.8)
        if stop - start > 0.011 * end * len(name):
            axes.text((start + stop) / 2, lane, shown(name, 40), ha="center", va="center", size=8, color=look.ink)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return picture(figure, alt, caption)
