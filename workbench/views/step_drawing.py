"""Stored pictures of folded steps: the state after some step, by default the last one that fits a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from workbench.views.figures import Picture, new_figure, picture
from workbench.views.graph_drawing import draw_graph, first_open
from workbench.views.palette import Style, style
from workbench.views.steps import Steps, state

TASKS = 24
"""Tasks in the stored picture of a plan."""


def steps_picture(trace: Steps, caption: str, k: int | None = None) -> Picture:
    """The state at step `k` (the last by default) of what `record_steps` returned."""
    last = len(trace["steps"]) - 1
    k = last if k is None else min(k, last)
    if trace["kind"] == "schedule":
        from workbench.views.schedule_drawing import draw_schedule

        return draw_schedule(trace, k, caption)
    if trace["kind"] == "run":
        from workbench.views.run_drawing import draw_run

        return draw_run(trace, k, caption)
    return {"expand": _expand, "backward": _expand, "packing": _packing, "plan": _plan, "list": _list}[trace["kind"]](trace, k, caption)


def _expand(trace: Steps, k: int, caption: str) -> Picture:
    s, graph = state(trace, k), trace["graph"]
    badges = {**{t: f"stack {i + 1}" for i, t in enumerate(s["stack"])},
              **{t: f"{kind} {i}" for kind in ("leaf", "node") for i, t in enumerate(s[kind + "s"])}}  # fmt: skip
    return draw_graph(graph["data"], graph["blocks"], first_open(graph["blocks"]), "op", caption, badges)


def _packing(trace: Steps, k: int, caption: str) -> Picture:
    s = state(trace, k)
    bases = [sum(trace["chunks"][:c]) for c in range(len(trace["chunks"]))]
    pieces = [*s["gone"], *([int(t), *place, max(s["at"], place[3]) + 1] for t, place in s["live"].items())]
    figure = new_figure(8.6, 4.4)
    axes = figure.add_subplot()
    wide, tall = trace["n_nodes"] + 1, sum(trace["chunks"])
    drawn = [(replace(style(t), hatch=""), start, end, bases[chunk] + offset, size, (trace["names"][t], trace["tags"][t].split()[-1]))
             for t, chunk, offset, size, start, end in pieces]  # fmt: skip
    draw_pieces(axes, drawn, wide, tall)
    high = sum(s["high"])
    axes.axhline(high, color="#D55E00", lw=1.3, ls="--")
    axes.set(xlim=(-1, trace["n_nodes"]), ylim=(0, max(high, 1) * 1.12), xlabel="time: the node being computed", ylabel="address in bytes")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=7.5)
    said = f"planned: {high:,} bytes; one place for each tensor would be {s['alone']:,} ({s['alone'] / max(high, 1):.1f} times as much)"
    axes.text(-0.8, high * 1.01, said, va="bottom", size=7.5)
    return picture(figure, f"{trace['title']}: rectangles of address and time; {said}.", caption)


def draw_pieces(axes: Any, pieces: Iterable[tuple[Style, int, int, int, int, Sequence[str]]], wide: int, tall: int,
                least: float = 0.03) -> None:  # fmt: skip
    """Rectangles of time × address (look, from, to, address, bytes, names) in axes of `wide` × `tall`; the first name with room
    is written where the height is more than the share `least`."""
    for look, start, end, y, size, names in pieces:
        box = Rectangle((start, y), end - start, size, fc=look.fill, ec="#222222", lw=0.6, hatch=look.hatch)
        axes.add_patch(box).set_hatch_linewidth(0.4)
        name = next((n for n in names if len(n) < (end - start) / max(wide, 1) / 0.0125), "")
        if name and size / max(tall, 1) > least:
            axes.text((start + end) / 2, y + size / 2, name, ha="center", va="center", size=6.5, color=look.ink,
                      bbox={"fc": look.fill, "ec": "none", "pad": 0.6} if look.hatch else None)  # fmt: skip


def _plan(trace: Steps, k: int, caption: str) -> Picture:
    tasks = state(trace, k)["tasks"]
    cut = next((i for i, t in enumerate(tasks) if len(trace["nodes"][t[0]]["parts"]) > 1), 0)  # around the first node that is cut
    tasks = tasks[max(0, cut - 4) :][:TASKS]
    figure = new_figure(8.6, 1.0 + 0.34 * trace["threads"])
    axes = figure.add_subplot()
    start, end = min(t[5] for t in tasks), max(t[6] for t in tasks)
    for job, part, thread, _, _, a, b in tasks:
        look, n = style(job), len(trace["nodes"][job]["parts"])
        axes.add_patch(Rectangle(((a - start) / 1e3, thread - 0.4), (b - a) / 1e3, 0.8, fc=look.fill, ec="#222222", lw=0.5))
        letters, which = (b - a) / (end - start) / 0.0092, f"{part + 1}/{n}"
        text = next((x for x in (f"{trace['nodes'][job]['name']} {which}", which) if len(x) < letters), "")
        axes.text(((a + b) / 2 - start) / 1e3, thread, text, ha="center", va="center", size=6.5, color=look.ink)
    axes.set(xlim=(0, max((end - start) / 1e3, 1e-3)), ylim=(trace["threads"] - 0.5, -0.5), xlabel="µs")
    axes.set_yticks(range(trace["threads"]), [f"thread {i}" for i in range(trace["threads"])], fontsize=7.5)
    nodes = trace["nodes"]
    said = "; ".join(f"{nodes[t[0]]['name']} {t[1] + 1} of {len(nodes[t[0]]['parts'])} on thread {t[2]}" for t in tasks)
    return picture(figure, f"{trace['title']}: tasks over threads. {said}.", caption)


def _list(trace: Steps, k: int, caption: str) -> Picture:
    steps: list[dict[str, Any]] = trace["steps"][max(0, k - 11) : k + 1]
    figure = new_figure(8.6, 0.3 + 0.24 * len(steps), layout=None)
    for i, step in enumerate(steps):
        figure.text(0.01, 1 - (i + 0.8) / (len(steps) + 0.6), step["sentence"][:130], size=8)
    return picture(figure, f"{trace['title']}: " + " ".join(s["sentence"] for s in steps), caption)
