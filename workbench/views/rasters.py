"""What happened when, as a raster: one lane per expert, device or slot, one column per step.

The steps are those of the stepper (`workbench.widgets.Stepper`): a dictionary
`{"title", "lanes": [name], "steps": [{"label", "sentence", "change", "marks": [[lane, text, strength]], "table"}]}`.
The browser draws the same dictionary; neither reads beyond step k.
"""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Rectangle

from workbench.errors import shown
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import style


def raster_picture(trace: dict[str, Any], caption: str, k: int | None = None, axis: str = "") -> Picture:
    """The first `k` + 1 steps of a stepper's trace (all of them by default)."""
    steps = trace["steps"][: len(trace["steps"]) if k is None else k + 1]
    lanes = trace["lanes"]
    figure = new_figure(1.6 + 0.27 * max(len(steps), 12), 1.1 + 0.25 * len(lanes))
    axes = figure.add_subplot()
    for x, step in enumerate(steps):
        if step.get("change"):
            axes.axvline(x - 0.5, color="#888888", lw=0.7, ls=":", zorder=0)
        for lane, text, strength in step["marks"]:
            look = style(lane)
            axes.add_patch(Rectangle((x - 0.46, lane - 0.42), 0.92, 0.84, fc=look.fill, ec="#333333", lw=0.5, hatch=look.hatch))
            axes.text(x, lane, text, ha="center", va="center", size=6.5, color=look.ink, weight="bold" if strength > 0.5 else "normal")
    axes.set(xlim=(-0.6, max(len(steps), 1) - 0.4), ylim=(len(lanes) - 0.4, -0.6))
    axes.set_xticks(range(len(steps)), [shown(s["label"], 12) for s in steps], rotation=90, fontsize=7, family="monospace")
    axes.set_yticks(range(len(lanes)), [shown(lane, 20) for lane in lanes], fontsize=7.5)
    axes.set_xlabel(axis, fontsize=8)
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    used = "; ".join(f"{shown(s['label'], 20)!r}: {', '.join(str(lanes[m[0]]) for m in s['marks'])}" for s in steps)
    return picture(figure, f"{shown(trace['title'], 200)}. Column by column: {used}.", caption)
