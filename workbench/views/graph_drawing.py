"""The stored picture of a graph view: the same boxes and lines that the browser draws, from the same data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.collections import PatchCollection
from matplotlib.patches import FancyBboxPatch, Patch, PathPatch, Rectangle
from matplotlib.path import Path as Curve

from workbench.views.figures import DPI, Picture, drawable, new_figure, picture
from workbench.views.graph_data import CLASSES, LEAFS, as_graph, graph_data
from workbench.views.graph_layout import (
    CHIP_ROW,
    FOLDED,
    GAP_BLOCKS,
    HEAD,
    NAME_ROW,
    crossing_lines,
    graph_layout,
    stack,
)
from workbench.views.palette import ink_on

STRIP = 28
PX = 72 / DPI  # points per pixel


def layered_picture(thing: Any, caption: str, opened: Sequence[int] | None = None, channel: str = "op", title: str = "",
                    chips: bool | None = None) -> Picture:  # fmt: skip
    """The graph in `thing` (see `as_graph`) in layers from top to bottom; `opened` are the blocks drawn open.

    Without `opened` the first layer of a model is open, and the others are one box each. channel: what the colours and
    letters say: "op", "type", "storage" or "bytes".
    """
    data = graph_data(as_graph(thing), title)
    blocks = graph_layout(data, chips)
    return draw_graph(data, blocks, first_open(blocks) if opened is None else opened, channel, caption)


def first_open(blocks: Sequence[dict[str, Any]]) -> list[int]:
    """The first layer, which is enough to see how each is built."""
    return [i for i, b in enumerate(blocks) if b["name"]][:1]


def for_page(data: dict[str, Any], blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the browser draws: a graph's data and layout, with the sizes and looks that the pictures of Python use too."""
    looks = {**{c: (label, fill) for c, label, fill, _ in CLASSES}, **LEAFS}
    classes = {c: {"label": label, "fill": fill, "ink": ink_on(fill)} for c, (label, fill) in looks.items()}
    sizes = {"folded": FOLDED, "gap": GAP_BLOCKS, "chip": CHIP_ROW, "strip": STRIP}
    return {"data": data, "blocks": blocks, "sizes": sizes, "classes": classes}


def draw_graph(data: dict[str, Any], blocks: Sequence[dict[str, Any]], opened: Sequence[int], channel: str, caption: str,
               badges: dict[int, str] | None = None) -> Picture:  # fmt: skip
    """The picture from data and layout; `badges` are short texts in the corner of boxes."""
    places, width, height = stack(blocks, opened)
    look, margin = data["channels"][channel], 8
    total = max(width, 520) + 2 * margin
    columns = max(1, int(total / 230))
    legend = 16 + 16 * -(-len(look["cats"]) // columns)
    figure = new_figure(total / DPI, (height + 2 * margin + legend) / DPI, layout=None)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    left = -(total - width) / 2
    axes.set(xlim=(left, left + total), ylim=(height + margin + legend, -margin))
    axes.set_axis_off()
    for path in _between(data, blocks, places, opened):
        axes.add_patch(PathPatch(path, fc="none", ec="#777777", lw=1))
    for block, (x, y, w, h), is_open in zip(blocks, places, (i in opened or not b["name"] for i, b in enumerate(blocks))):
        if is_open:
            _open_block(axes, data, block, (x, y, w, h), look, badges or {})
        else:
            _folded_block(axes, block, x, y)
    handles = [Patch(fc=c["fill"], ec="#333333", lw=0.5, label=drawable(f"{c['code']}  {c['label']}"[:44])) for c in look["cats"]]
    axes.legend(handles=handles, loc="lower center", ncols=columns, fontsize=6.5, frameon=False,
                borderaxespad=0.3, handlelength=1.2, columnspacing=1.4)  # fmt: skip
    shut = [b["name"] for i, b in enumerate(blocks) if b["name"] and i not in opened]
    folded = f" Folded to one box each: {', '.join(shut)}." if shut else ""
    shown_ids = [box[0] for i, b in enumerate(blocks) if i in opened or not b["name"] for box in b["boxes"]]
    said = "; ".join(_sentence(data, i) for i in shown_ids[:40])
    return picture(figure, f"{data['title']}: {data['n_nodes']} nodes, {data['n_leafs']} leafs, top to bottom.{folded} {said}.", caption)


def _sentence(data: dict[str, Any], i: int) -> str:
    r = data["tensors"][i]
    made = f" = {r['op']} of {', '.join(data['tensors'][s]['name'] for s in r['src'] if s is not None)}" if r["op"] else ""
    return f"{r['tag']} {r['name']}{made}"


def _open_block(axes: Any, data: dict[str, Any], block: dict[str, Any], place: tuple[float, float, float, float], look: dict[str, Any],
                badges: dict[int, str]) -> None:  # fmt: skip
    x, y, w, h = place
    if block["name"]:
        axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=8", fc="#f6f6f6", ec="#999999", lw=1))
        _text(axes, x + 12, y + 15, f"{block['name']}: {block['folded']}", 11, weight="bold")
    for line in block["lines"]:
        axes.add_patch(PathPatch(curve(line[3], x, y), fc="none", ec="#666666", lw=1, zorder=1.5))
    cards, strips = [], []
    for i, bx, by, bw, bh in block["boxes"]:
        r, cat = data["tensors"][i], look["cats"][look["of"][i]]
        bx, by = bx + x, by + y
        cards.append(Rectangle((bx, by), bw, bh))
        chips = block["chips"].get(str(i), [])
        top = by + CHIP_ROW * len(chips)
        strips.append((Rectangle((bx, top), STRIP, bh - CHIP_ROW * len(chips)), cat["fill"]))
        for k, chip in enumerate(chips):
            leaf = look["cats"][look["of"][chip]]
            strips.append((Rectangle((bx, by + k * CHIP_ROW), STRIP, CHIP_ROW), leaf["fill"]))
            _text(axes, bx + STRIP / 2, by + (k + 0.5) * CHIP_ROW, leaf["code"], 8.5, color=leaf["ink"], ha="center", weight="bold")
            _text(axes, bx + STRIP + 5, by + (k + 0.5) * CHIP_ROW, _cut(data["tensors"][chip]["name"], 25), 9, color="#333333")
        _text(axes, bx + STRIP / 2, (top + by + bh) / 2, cat["code"], 10, color=cat["ink"], ha="center", weight="bold")
        name, line = box_lines(r)
        if i in badges:
            _text(axes, bx + bw - 3, by - 7, badges[i], 9, ha="right", weight="bold", color="#00614a")
        if r["class"] == "V":
            _text(axes, bx + STRIP + 5, (top + by + bh) / 2, _cut(f"{r['op'].lower()} {dims(r)}", 25), 9.5, style="italic")
        else:
            _text(axes, bx + STRIP + 5, top + NAME_ROW / 2 + 1, _cut(name, 22), 11, weight="bold")
            _text(axes, bx + STRIP + 5, top + NAME_ROW + 7, _cut(line, 27), 9.5)
    axes.add_collection(PatchCollection(cards, facecolor="white", edgecolor="#555555", lw=0.8, zorder=2))
    axes.add_collection(PatchCollection([s for s, _ in strips], facecolor=[c for _, c in strips], edgecolor="#555555", lw=0.6, zorder=2.5))


def _folded_block(axes: Any, block: dict[str, Any], x: float, y: float) -> None:
    w, h = FOLDED
    axes.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=8", fc="white", ec="#333333", lw=1.2, zorder=2))
    _text(axes, x + 12, y + 16, f"{block['name']}: {block['folded']}", 11, weight="bold")
    at, total = x + 12, sum(n for _, n in block["counts"])
    for letter, n in block["counts"]:
        wide = (w - 24) * n / total
        fill = next((f for c, _, f, _ in CLASSES if c == letter), "#FFFFFF")
        axes.add_patch(Rectangle((at, y + HEAD + 6), wide, 22, fc=fill, ec="#333333", lw=0.6, zorder=2.5))
        _text(axes, at + wide / 2, y + HEAD + 17, f"{letter} {n}" if wide > 24 else letter, 9, color=ink_on(fill), ha="center")
        at += wide


def _between(data: dict[str, Any], blocks: Sequence[dict[str, Any]], places: list[Any], opened: Sequence[int]) -> list[Curve]:
    """Lines from block to block, from where each leaves to where it enters."""
    def port(b: int, side: str, tensor: int) -> tuple[float, float]:
        x, y, w, h = places[b]
        is_open = b in opened or not blocks[b]["name"]
        return (x + blocks[b][side][str(tensor)] if is_open else x + w / 2), (y if side == "ins" else y + h)

    return [curve([*port(a, "outs", t), *port(b, "ins", t)]) for t, a, b in crossing_lines(data, blocks)]


def curve(points: Sequence[float], dx: float = 0, dy: float = 0) -> Curve:
    """A smooth line through points, upright at each."""
    xy = [(points[k] + dx, points[k + 1] + dy) for k in range(0, len(points), 2)]
    vertices, codes = [xy[0]], [Curve.MOVETO]
    for (x0, y0), (x1, y1) in zip(xy, xy[1:]):
        middle = (y0 + y1) / 2
        vertices += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Curve.CURVE4] * 3
    return Curve(vertices, codes)


def dims(record: dict[str, Any]) -> str:
    """The extents that count: 160×2."""
    return "×".join(map(str, record["ne"][: record["dims"]]))


def box_lines(record: dict[str, Any]) -> tuple[str, str]:
    """The two lines of a box."""
    return record["name"], f"{record['op'] or 'leaf'} {record['type']} {dims(record)}"


def _cut(text: str, n: int) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"


def _text(axes: Any, x: float, y: float, text: str, px: float, **kwargs: Any) -> None:
    axes.text(x, y, drawable(text), size=px * PX, va="center_baseline", zorder=3, **kwargs)


