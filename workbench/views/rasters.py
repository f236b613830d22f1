"""What happened when, as a raster: one lane per expert, device or slot, one column per step.

The steps are those of the stepper (`workbench.widgets.Stepper`): a dictionary
`{"title", "lanes": [name], "steps": [{"label", "sentence", "change", "marks": [[lane, text, strength]], "table"}]}`.
The browser draws the same dictionary; neither reads beyond step k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from workbench.errors import shown
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import QUANTITY, style

CAUSES = {
    "start": "{token} is the first token: the router gives its best scores to experts {experts}.",
    "same": "{token} keeps experts {experts}: the same ones have the best scores again.",
    "some new": "{token} → experts {experts}: {new} is new, because its score is now among the best.",
    "all new": "{token} → experts {experts}: all new, because the router scores this token quite differently.",
}
"""Every reason for a step of `route_steps`."""


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


def heat_picture(rows: Mapping[str, Sequence[float]], caption: str, alt: str, xlabel: str = "", top: float = 1.0, *,
                 columns: Sequence[str] | None = None, form: str = ".0%") -> Picture:  # fmt: skip
    """Shares as a heat map: one line per row, each value written into its cell, NaN as "–"; `top` is the end of the scale.

    columns: what to call them, instead of their numbers; form: how values are written.
    """
    figure = new_figure(6.4, 0.8 + 0.35 * len(rows))
    axes = figure.add_subplot(xlabel=xlabel)
    axes.imshow(list(rows.values()), cmap=QUANTITY, vmin=0, vmax=top, aspect="auto")
    axes.set_yticks(range(len(rows)), list(rows))
    for y, row in enumerate(rows.values()):
        for x, share in enumerate(row):
            said, light = ("–", False) if share != share else (format(share, form), share < 0.6 * top)
            axes.text(x, y, said, ha="center", va="center", color="white" if light else "black", fontsize=8)
    if columns is not None:
        axes.set_xticks(range(len(columns)), [shown(c, 20) for c in columns], fontsize=8)
    return picture(figure, alt, caption)


def route_steps(tokens: Sequence[Mapping[str, Any]], layer: int, n_expert: int, name: int | None = None) -> dict[str, Any]:
    """The stepper's trace of routed tokens {"text", "experts", "weights"}: which experts each one used in the layer with index `layer`.

    The cause of a step is one of CAUSES; "new" counts the experts that the token before did not use.
    """
    title = f"Experts of each token in layer {layer if name is None else name}"
    steps: list[dict[str, Any]] = []
    before: list[int] = []
    for token in tokens:
        experts, weights = token["experts"][layer], token["weights"][layer]
        new = [e for e in experts if e not in before]
        cause = "start" if not steps else "same" if not new else "all new" if len(new) == len(experts) else "some new"
        label = token["text"].replace("\n", "⏎")
        named = " and ".join(map(str, experts))
        steps.append({
            "label": label, "cause": cause, "change": bool(new), "new": len(new),
            "sentence": CAUSES[cause].format(token=f"‘{label}’", experts=named, new=" and ".join(map(str, new))),
            "marks": [[e, f"{w:.2f}"[1:] if w < 0.995 else "1.0", w] for e, w in zip(experts, weights)],
            "table": [[str(e), f"{w:.2f}", "new" if e in new else "stayed"] for e, w in zip(experts, weights)],
        })  # fmt: skip
        before = experts
    return {"title": title, "lanes": [f"expert {e}" for e in range(n_expert)], "columns": ["expert", "weight", ""],
            "table": "the experts of this token", "steps": steps}  # fmt: skip
