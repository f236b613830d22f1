"""Memory as a map of cells: the addresses that a walk over a tensor touches, the objects of an arena, the bytes of a block.

The steps are those of the stepper with `kind="memory"`: a dictionary
`{"title", "kind", "unit", "per_row", "cells": [text], "legend", "steps": [{"label", "sentence", "change", "marks":
[[cell, text, note, look, pale]], "table"}]}`. A cell stands for `unit` bytes. What a step marks stays until a later step marks
the same cell; look -1 wipes it, `pale` lightens it. The browser draws the same dictionary; neither reads beyond step k.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from workbench.errors import ParameterError, shown
from workbench.tensors import Context, Tensor
from workbench.tensors.context import ALIGNMENT, OBJECT_BYTES, TENSOR_BYTES
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import lighter, style
from workbench.views.tables import text

MOST = 256  # steps and cells beyond this would teach nothing
WALK_CAUSES = {
    "start": "All indices are 0: the walk begins at the offset, byte {to}.",
    "along": "i0 grew by 1, so the address grew by nb[0] = {by} bytes, to {to}.",
    "carry": "i0 was at its end: it falls back to 0, i{d} grows, and the address changes by {by:+} bytes, to {to}.",
}
"""Every reason for a step of `address_steps`."""
ARENA_CAUSES = {
    "leaf": "{name}: a header, a description, and {data} bytes of data, because this arena holds data.",
    "result": "{name}, the result of {op}: its {data} bytes are taken now, at the call, long before anything is computed.",
    "view": "{name} is a view: a header and a description, but no data, for the bytes are those of {owner}.",
    "no_alloc": "{name}: a header and a description alone, because no_alloc leaves the {data} bytes of data to others.",
    "graph": "{name}: a graph is an object like any other; its lists take {size} bytes, full or empty.",
}
"""Every reason for a step of `arena_steps`."""


def address_steps(tensor: Tensor) -> dict[str, Any]:
    """The stepper's trace of a walk over all elements of a tensor, i0 fastest: where each index lies in its owner's memory.

    Colours follow i1. Raises ParameterError for more than 256 elements, and DTypeError where elements share blocks.
    """
    root, unit = tensor.root(), tensor.dtype.block_bytes
    memory, n = root.array().reshape(-1), tensor.n_elements
    if max(n, root.n_elements) > MOST:
        raise ParameterError(f"{tensor.label} with {max(n, root.n_elements):,} elements", f"at most {MOST}", "walk over a slice of it")
    used, steps, before = max(tensor.n_dims, 2), list[dict[str, Any]](), 0
    ranges = [range(tensor.ne[d]) for d in reversed(range(4))]
    for at in itertools.product(*ranges):
        i = at[::-1]
        address = tensor.view_offs + sum(a * b for a, b in zip(i, tensor.nb))
        grown = next((d for d in range(4) if i[d]), 0)
        cause = "start" if not steps else "along" if i[0] else "carry"
        value = text(memory[address // unit].item())
        index = ", ".join(map(str, i[:used]))
        steps.append({
            "label": index, "cause": cause, "change": cause != "along",
            "sentence": WALK_CAUSES[cause].format(to=address, by=address - before, d=grown) + f" There lies {value}.",
            "marks": [[address // unit, value, index.replace(" ", ""), i[1] % 8, False]],
            "table": [*([f"i{d}", str(i[d]), f"× nb[{d}] = {tensor.nb[d]}", str(i[d] * tensor.nb[d])] for d in range(used)),
                      ["", "", "offset", str(tensor.view_offs)], ["", "", "address", str(address)]],
        })  # fmt: skip
        before = address
    return {"title": f"Walk over {tensor.label}, ne = {list(tensor.ne[:used])}, nb = {list(tensor.nb[:used])}", "kind": "memory",
            "unit": unit, "per_row": root.ne[0], "cells": [text(v.item()) for v in memory], "steps": steps,
            "legend": [[d % 8, f"i1 = {d}"] for d in range(min(tensor.ne[1], 8))],
            "columns": ["", "index", "stride", "bytes"], "table": "index × stride, summed"}  # fmt: skip


def arena_steps(context: Context, per_row: int = 16) -> dict[str, Any]:
    """The stepper's trace of the objects of a context, in the order in which they were laid out; a cell is 16 bytes.

    Letters: H header, T description of a tensor, D data (d where padding follows in the same cell), G graph. Overhead is pale.
    """
    tensors, steps, rows = iter(context.tensors), list[dict[str, Any]](), list[list[str]]()
    if context.mem_size > 4 * MOST * ALIGNMENT:
        raise ParameterError(f"an arena of {context.mem_size:,} bytes", f"at most {4 * MOST * ALIGNMENT:,} to draw")
    for n, thing in enumerate(context.objects):
        t = next(tensors) if thing.kind == "tensor" else None
        name = shown((t.name if t is not None else thing.name) or f"object {n}", 24)
        data, letters = _content(t, thing.size)
        start, end_of_it = thing.offset - OBJECT_BYTES, thing.offset + thing.size
        cause, facts = "graph", {"name": name, "size": f"{thing.size:,}"}
        if t is not None:
            cause = "view" if t.is_view else "no_alloc" if context.no_alloc else "leaf" if t.op == "NONE" else "result"
            facts |= {"data": f"{t.nbytes:,}", "op": t.desc, "owner": shown(t.root().name, 24)}
        padding = thing.size - TENSOR_BYTES - data if t is not None else 0
        rows.append([name, f"{start:,}", f"{data:,}", str(padding), f"{end_of_it - start:,}"])
        end = f" {padding} bytes of padding end it, since objects start at multiples of {ALIGNMENT}." if padding else ""
        steps.append({
            "label": name, "cause": cause, "change": True, "sentence": ARENA_CAUSES[cause].format(**facts) + end,
            "marks": [[start // ALIGNMENT + i, letter, "", n % 8, letter not in "Dd"] for i, letter in enumerate(letters)],
            "table": [*map(list, rows), ["(free)", f"{end_of_it:,}", "", "", f"{context.mem_size - end_of_it:,}"]],
        })  # fmt: skip
    title = f"Arena ‘{shown(context.name)}’ of {context.mem_size:,} bytes"
    return {"title": title, "kind": "memory", "unit": ALIGNMENT, "per_row": per_row,
            "cells": [""] * (context.mem_size // ALIGNMENT), "steps": steps, "legend": [[n % 8, r[0]] for n, r in enumerate(rows)],
            "columns": ["object", "from", "data", "padding", "bytes"], "table": "objects so far"}  # fmt: skip


def _content(t: Tensor | None, size: int) -> tuple[int, str]:
    """Bytes of data in an object of the arena, and the letters of its cells."""
    if t is None:
        return 0, "HH" + "G" * (size // ALIGNMENT)
    data = t.nbytes if size > TENSOR_BYTES else 0
    letters = "HH" + "T" * (TENSOR_BYTES // ALIGNMENT) + "D" * (data // ALIGNMENT) + "d" * (data % ALIGNMENT > 0)
    return data, letters.ljust(2 + size // ALIGNMENT, "p")


def memory_state(trace: Mapping[str, Any], k: int) -> Iterator[tuple[int, str, str, int, bool, bool]]:
    """The cells of a memory trace after step `k`: (cell, text, note, look or -1, pale?, marked by this very step?)."""
    cells = {i: (words, "", -1, False) for i, words in enumerate(trace["cells"])}
    for step in trace["steps"][: k + 1]:
        for cell, *mark in step["marks"]:
            cells[cell] = tuple(mark) if mark[2] >= 0 else (trace["cells"][cell], "", -1, False)
    now = {mark[0] for mark in trace["steps"][k]["marks"]}
    return ((i, *cells[i], i in now) for i in sorted(cells))


def memory_picture(trace: Mapping[str, Any], caption: str, k: int | None = None) -> Picture:
    """A memory trace after step `k` (the last one by default): rows of cells with the address at the left."""
    k = len(trace["steps"]) - 1 if k is None else k
    wide, unit, count = trace["per_row"], trace["unit"], len(trace["cells"])
    tall, notes = -(-count // wide), any(mark[2] for step in trace["steps"] for mark in step["marks"])
    w, h = (0.62, 0.44) if notes else (0.36, 0.3)
    figure = new_figure(max(0.75 + w * wide, 4.2), 0.55 + h * tall, layout=None)
    width = figure.get_figwidth()
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.7, width - 0.7), ylim=(h * tall + 0.42, -0.13))
    axes.set_axis_off()
    outlined = []
    for i, words, note, look, pale, now in memory_state(trace, k):
        x, y = i % wide * w, i // wide * h
        drawn = style(max(look, 0))
        fill, ink = ("#ffffff", "#555555") if look < 0 else (lighter(drawn.fill), "#333333") if pale else (drawn.fill, drawn.ink)
        axes.add_patch(Rectangle((x, y), w * 0.96, h * 0.93, fc=fill, ec="#999999", lw=0.6))
        axes.text(x + w * 0.48, y + h * (0.34 if note else 0.48), words, ha="center", va="center", size=8 if notes else 6.5, color=ink,
                  weight="normal" if pale or look < 0 else "bold")  # fmt: skip
        axes.text(x + w * 0.48, y + h * 0.72, note, ha="center", va="center", size=5.8, color=ink)
        outlined += [(x, y)] if now and k < len(trace["steps"]) - 1 else []
    for x, y in outlined:
        axes.add_patch(Rectangle((x, y), w * 0.96, h * 0.93, fill=False, ec="black", lw=2))
    for row in range(tall):
        axes.text(-0.08, row * h + h * 0.47, f"{row * wide * unit:,}", ha="right", va="center", size=7, color="#333333")
    met = {mark[3] for step in trace["steps"][: k + 1] for mark in step["marks"]}
    _legend(axes, [(look, words) for look, words in trace["legend"] if look in met], h * tall + 0.2, width - 0.8)
    return picture(figure, _alt(trace, k), caption)


def _legend(axes: Any, entries: Sequence[tuple[int, str]], y: float, width: float) -> None:
    step = min(1.4, width / max(len(entries), 1))
    for n, (look, words) in enumerate(entries):
        axes.add_patch(Rectangle((n * step, y - 0.06), 0.13, 0.12, fc=style(look).fill, ec="#555555", lw=0.5))
        axes.text(n * step + 0.18, y, shown(words, int(step * 15)), va="center", size=6.8, color="#333333")


def _alt(trace: Mapping[str, Any], k: int) -> str:
    runs: list[list[Any]] = []  # cells of the same look that lie side by side
    for i, _, _, look, _, _ in memory_state(trace, k):
        if runs and runs[-1][2] == look and runs[-1][1] == i:
            runs[-1][1] = i + 1
        else:
            runs.append([i, i + 1, look])
    names, unit = dict(trace["legend"]), trace["unit"]
    said = [f"bytes {a * unit} to {b * unit - 1}: {shown(names.get(look, 'nothing marked'), 24)}" for a, b, look in runs if look >= 0]
    more = f"; and {len(said) - 16} more runs" if len(said) > 16 else ""
    return f"{shown(trace['title'], 200)}, as a map of memory in rows. {'; '.join(said[:16])}{more}."


class MemoryMap:
    """A memory trace after step `k` as a table: quick enough to be redrawn while a slider moves."""

    def __init__(self, trace: Mapping[str, Any], caption: str, k: int | None = None) -> None:
        self.trace, self.caption = trace, shown(caption, 2000)
        self.k = len(trace["steps"]) - 1 if k is None else k

    def html(self) -> str:
        """A table with the address of each row at its left; every text escaped."""
        wide, unit, rows = self.trace["per_row"], self.trace["unit"], list[str]()
        for i, words, note, look, _, _ in memory_state(self.trace, self.k):
            colours = f"background:{style(look).fill};color:{style(look).ink};" if look >= 0 else ""
            small = f"<br><small>{html.escape(note)}</small>" if note else ""
            cell = f'<td style="{colours}text-align:center;min-width:3em;line-height:1.2">{html.escape(words)}{small}</td>'
            rows += [f'<tr><th scope="row">{i * unit}</th>'] if i % wide == 0 else []
            rows.append(cell)
        caption = f'<caption style="text-align:left;caption-side:bottom">{html.escape(self.caption)}</caption>'
        return f"<table>{caption}<tbody>{''.join(rows)}</tbody></table>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        wide, unit = self.trace["per_row"], self.trace["unit"]
        cells = [f"{words} ({note})" if note else words for _, words, note, *_ in memory_state(self.trace, self.k)]
        most = max(map(len, cells))
        lines = [f"{i * unit:>6}  " + "  ".join(c.ljust(most) for c in cells[i : i + wide]).rstrip() for i in range(0, len(cells), wide)]
        return "\n".join([*lines, self.caption])


def byte_map(layouts: Mapping[str, Sequence[tuple[str, int]]], caption: str) -> Picture:
    """What the bytes of a few things are for: each a bar of parts (label, bytes), all on one scale, a tick at every byte."""
    most = max(sum(size for _, size in parts) for parts in layouts.values())
    figure = new_figure(7.6, 0.12 + 0.66 * len(layouts), layout=None)
    axes = figure.add_axes((0.085, 0, 0.905, 1), xlim=(0, most), ylim=(len(layouts) - 0.1, -0.08))
    axes.set_axis_off()
    for y, (name, parts) in enumerate(layouts.items()):
        axes.text(-0.012 * most, y + 0.25, name, ha="right", va="center", size=9, family="monospace")
        start, x = 0, 0.0
        for n, (label, size) in enumerate(parts):
            axes.add_patch(Rectangle((start, y), size, 0.5, fc=style(n).fill, ec="white", lw=0.8))
            axes.vlines(range(start + 1, start + size), y + 0.42, y + 0.5, color="white", lw=0.5)
            axes.text(start + size / 2, y + 0.24, str(size), ha="center", va="center", size=8, color=style(n).ink)
            axes.add_patch(Rectangle((x, y + 0.61), 0.013 * most, 0.15, fc=style(n).fill, ec="none"))
            axes.text(x + 0.02 * most, y + 0.69, label, va="center", size=7.5, color="#333333")
            start, x = start + size, x + (0.055 + 0.0108 * len(label)) * most
    words = "; ".join(f"{name}: " + ", ".join(f"{size} bytes {label}" for label, size in parts) for name, parts in layouts.items())
    return picture(figure, f"Bytes, drawn to scale. {words}.", caption)
