"""Stored pictures of an assignment: the nodes in order with a row for each backend, or the graph in layers."""

from __future__ import annotations

from typing import Any

from matplotlib.patches import Rectangle

from workbench.scheduler import Scheduler
from workbench.views.figures import Picture, drawable, new_figure, picture
from workbench.views.graph_drawing import draw_graph, first_open
from workbench.views.schedule_steps import NONE, RULES, schedule_steps, stages_of
from workbench.views.steps import Steps, state

WIDE = 26
"""More nodes than this are drawn without names."""


def schedule_picture(scheduler: Scheduler, graph: Any, stage: str | None = None, caption: str = "", title: str = "",
                     layers: bool = False) -> Picture:  # fmt: skip
    """Where every node is after `stage` ("pass1", "pass2", "pass2_gpu_up", …; by default after pass 5, with splits and copies).

    A column for each node in order, a row for each backend; layers=True draws the graph in layers instead, coloured and
    lettered by backend. Nothing is changed.
    """
    steps = schedule_steps(scheduler, graph, title)
    return draw_schedule(steps, len(steps["steps"]) - 1 if stage is None else last_of(steps, stage), caption, layers)


def last_of(steps: Steps, stage: str) -> int:
    """The last step of a stage, or of the stages before it where it had none."""
    names = list(RULES)
    until = max(names.index(s) for s in stages_of([stage]))
    return max((k for k, s in enumerate(steps["steps"]) if names.index(s["stage"]) <= until), default=0)


def draw_schedule(steps: Steps, k: int, caption: str, layers: bool = False) -> Picture:
    """The state of `schedule_steps` at step `k`."""
    s = state(steps, k)
    if not layers:
        return _roll(steps, s, caption)
    graph = steps["graph"]
    data = {**graph["data"], "channels": {"backend": {**graph["data"]["channels"]["backend"],
            "of": [b if b >= 0 else len(steps["backends"]) for b in s["of"]]}}}  # fmt: skip
    badges = {steps["order"][first]: f"split {i}" for i, (_, first, _) in enumerate(s["splits"])}
    return draw_graph(data, graph["blocks"], first_open(graph["blocks"]), "backend", caption or conclusion(steps, s), badges)


def conclusion(steps: Steps, s: dict[str, Any]) -> str:
    """What the state comes to, in one sentence."""
    looks, order = steps["backends"], steps["order"]
    on = [sum(s["of"][t] == b for t in order) for b in range(-1, len(looks))]
    said = ", ".join(f"{n} on {name}" for n, name in zip([*on[1:], on[0]], [*(b["name"] for b in looks), "none yet"]) if n)
    cut = f"; {len(s['splits'])} split{'s' * (len(s['splits']) != 1)} with {len(s['copies'])} copies" if s["splits"] else ""
    return f"{len(order)} nodes: {said}{cut}."


# ---- columns and rows


def _roll(steps: Steps, s: dict[str, Any], caption: str) -> Picture:
    data, looks, order = steps["graph"]["data"]["tensors"], steps["backends"], steps["order"]
    every = [*looks, NONE][: len(looks) + any(s["of"][t] < 0 for t in order)]
    named, rows, n = len(order) <= WIDE, len(every), max(len(order), 6)
    letters = max((len(_short(steps["names"][t])) for t in order), default=1)
    slanted = named and letters * 0.075 > 7.6 / n
    head = (0.2 if not slanted else 0.2 + 0.052 * letters) if named else 0.05
    leafs = max((len(_leafs_of(data, t)) for t in order), default=0)
    foot = (0.35 + 0.6 * leafs if named else 0.3) + (1.0 if s["splits"] else 0)  # in rows: leafs, splits
    tall, wide = head + 0.34 * (rows + foot), 8.6
    figure = new_figure(wide, tall, layout=None)
    right = (0.052 * letters + 0.05) / wide if slanted else 0.01
    axes = figure.add_axes((0.115, 0.0, 0.885 - right, 1 - head / tall))
    axes.set(xlim=(-0.5, n - 0.5), ylim=(rows - 0.5 + foot, -0.5))
    axes.set_axis_off()
    for b, look in enumerate(every):
        axes.axhspan(b - 0.5, b + 0.5, color="#f4f4f4" if b % 2 else "#ffffff", lw=0)
        axes.text(-0.5 - 0.012 * n, b, drawable(f"{look['code']}  {look['name']}"[:18]), ha="right", va="center", size=7.5)
    for x, t in enumerate(order):
        b, view = s["of"][t] if s["of"][t] >= 0 else rows - 1, data[t]["class"] == "V"
        _cell(axes, x, b, every[b], 0.84, 0.4 if view else 0.76, (6.5 if view else 8) if named else 0)
        if named:
            axes.text(x, -0.58, drawable(_short(steps["names"][t])), ha="left" if slanted else "center", va="bottom", size=7,
                      rotation=45 if slanted else 0, rotation_mode="anchor", style="italic" if view else "normal")  # fmt: skip
            _leafs(axes, steps, s, x, t, rows, n)
    _splits(axes, steps, s, rows + foot - 1.35, n)
    said = "; ".join(f"{steps['names'][t]} {(looks[s['of'][t]] if s['of'][t] >= 0 else NONE)['name']}" for t in order[:40])
    names = [", ".join(steps["names"][t] for t in inputs) or "none" for _, _, inputs in s["splits"][:12]]
    cuts = "".join(f" Split {i} on {looks[b]['name']} from {steps['names'][order[f]]}, inputs: {inputs}."
                   for i, ((b, f, _), inputs) in enumerate(zip(s["splits"], names)))  # fmt: skip
    return picture(figure, f"{steps['title']}: nodes in order, a row for each backend. {said}.{cuts}", caption or conclusion(steps, s))


def _cell(axes: Any, x: float, y: float, look: dict[str, str], w: float, h: float, size: float) -> None:
    axes.add_artist(Rectangle((x - w / 2, y - h / 2), w, h, fc=look["fill"], ec="#333333", lw=0.6 if size else 0.2))  # limits are set
    if size:
        axes.text(x, y, look["code"], ha="center", va="center_baseline", size=size, color=look["ink"], weight="bold")


def _short(name: str) -> str:
    return name if len(name) <= 22 else name[:21] + "…"


def _leafs_of(data: list[dict[str, Any]], t: int) -> list[int]:
    return [i for i in dict.fromkeys(data[t]["src"]) if i is not None and not data[i]["op"]][:3]


def _leafs(axes: Any, steps: Steps, s: dict[str, Any], x: int, t: int, rows: int, n: int) -> None:
    """Under a node the leafs it reads, each with the letter of where it is."""
    data, looks, room = steps["graph"]["data"]["tensors"], steps["backends"], int(92 / n) - 3
    for k, i in enumerate(_leafs_of(data, t)):
        y, name = rows - 0.2 + 0.6 * k, steps["names"][i].removesuffix(".weight")
        fits = name if len(name) <= room else name[: room - 1] + "…" if room > 3 else ""
        left = x - 0.0045 * n * len(fits)
        _cell(axes, left, y, looks[s["of"][i]] if s["of"][i] >= 0 else NONE, 0.014 * n, 0.5, 5.5)
        axes.text(left + 0.011 * n, y, drawable(fits), ha="left", va="center_baseline", size=6.5, color="#333333")


def _splits(axes: Any, steps: Steps, s: dict[str, Any], y: float, n: int) -> None:
    """A thick line before each split, its number, and how many tensors are copied in."""
    ends = [*(f for _, f, _ in s["splits"][1:]), len(steps["order"])]
    for i, ((b, first, inputs), end) in enumerate(zip(s["splits"], ends)):
        look, wide = steps["backends"][b], (end - first) / n
        if i:
            axes.plot([first - 0.5] * 2, [-0.5, y + 0.8], color="#000000", lw=1.6)
        axes.add_patch(Rectangle((first - 0.44, y + 0.05), end - first - 0.12, 0.68, fc=look["fill"], ec="#333333", lw=0.6))
        text = f"split {i} · {look['name']} · inputs: {len(inputs)}" if wide > 0.24 else f"split {i}" if wide > 0.07 else str(i)
        if wide > 0.012:
            axes.text((first + end - 1) / 2, y + 0.39, drawable(text), ha="center", va="center_baseline", size=7, color=look["ink"])
