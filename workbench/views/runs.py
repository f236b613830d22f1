"""A run as memory, as traffic and as splits: where each tensor lay and how long, which bytes went where, what each split cost."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from workbench.trace import Trace
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import Style, ink_on
from workbench.views.run_data import COPIES, WORK, Piece, Run, pieces, run_data
from workbench.views.step_drawing import draw_pieces
from workbench.views.tables import Table, table
from workbench.views.timelines import LOOKS, amount, byte_axis, covered, duration, legend, unit_of

LABELS = {"op": "result of a node", "weights": "W copy of weights", "activations": "A copy of activations", "inputs": "I input or its copy"}


def memory_map(trace: Trace, k: int | None = None, caption: str = "") -> Picture:
    """Compute memory of every device: address × time, in the order of the nodes; a new picture of the first `k` events.

    What lies above each other lives at the same time. Splits of the device are shaded.
    """
    run = run_data(trace, k)
    lying, n = pieces(run), max(len(run.graph.get("nodes", [])), 1)
    buffers = sorted({p.buffer for p in lying})
    figure = new_figure(9.4, 0.75 + 1.75 * max(len(buffers), 1))
    rows: Any = figure.subplots(max(len(buffers), 1), 1, squeeze=False, sharex=True)[:, 0]
    for axes, buffer in zip(rows, buffers):
        _draw_buffer(axes, run, buffer, [p for p in lying if p.buffer == buffer], n)
    rows[-1].set_xlabel("time: the node being computed", fontsize=8)
    if buffers:
        legend(figure, [(k, LABELS[k]) for k in LABELS if any(p.kind == k for p in lying)], loc="outside upper left")
    facts = _memory_facts(run, lying)
    said = "; ".join(f"{name}: {high:,} bytes for {count} tensors of {alone:,} bytes" for name, count, high, alone, *_ in facts)
    alt = f"Rectangles of address and time, one panel per device. {said or 'Nothing was placed'}."
    return picture(figure, alt, caption or _memory_conclusion(facts))


def memory_table(trace: Trace, k: int | None = None) -> Table:
    """The memory map as a table: what each device needs, and what is largest when most of it is in use."""
    run = run_data(trace, k)
    facts = _memory_facts(run, pieces(run))
    rows = [(name, count, high, alone, f"{alone / max(high, 1):.1f}", f"node {at}", used, largest)
            for name, count, high, alone, at, used, largest in facts]  # fmt: skip
    columns = ["memory", "tensors", "bytes", "one place each", "ratio", "fullest at", "bytes then", "largest then"]
    return table(columns, rows, _memory_conclusion(facts))


def _draw_buffer(axes: Any, run: Run, buffer: int, lying: list[Piece], n: int) -> None:
    chunks = {c: max(p.offset + p.bytes for p in lying if p.chunk == c) for c in sorted({p.chunk for p in lying})}
    base = {c: sum(size for d, size in chunks.items() if d < c) for c in chunks}
    high = sum(chunks.values())
    for s in run.splits:
        if s.backend == buffer:
            axes.axvspan(s.first, s.last, color="#ececec", lw=0, zorder=0)
            axes.axvline(s.first, color="#bbbbbb", lw=0.5, zorder=0)
    drawn = []
    for p in lying:
        fill, hatch = LOOKS[p.kind]
        short = p.name.split("#")[1] if p.name.count("#") > 1 else p.name
        names = (short, short.removeprefix("blk."))
        drawn.append((Style(fill, ink_on(fill), hatch), p.first, p.end, base[p.chunk] + p.offset, p.bytes, names))
    draw_pieces(axes, drawn, n, high, 0.07)
    axes.set(xlim=(0, n), ylim=(0, max(high, 1) * 1.02))
    axes.set_title(f"{run.device_name(buffer)}: {high:,} bytes", fontsize=8, loc="left", pad=2)
    byte_axis(axes.yaxis, high)
    axes.tick_params(labelsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _memory_facts(run: Run, lying: list[Piece]) -> list[tuple[str, int, int, int, int, int, str]]:
    """By device: name, tensors, bytes needed, bytes of all tensors; the node at which most is in use, how much, and the largest then."""
    out = []
    for buffer in sorted({p.buffer for p in lying}):
        mine = [p for p in lying if p.buffer == buffer]
        high = sum(max(p.offset + p.bytes for p in mine if p.chunk == c) for c in {p.chunk for p in mine})
        used: dict[int, int] = defaultdict(int)
        for at in {p.first for p in mine}:
            alive: dict[tuple[int, int], int] = {}
            for p in mine:
                if p.first <= at < p.end:  # where a node works in place, both have one place for a moment
                    alive[p.chunk, p.offset] = max(alive.get((p.chunk, p.offset), 0), p.bytes)
            used[at] = sum(alive.values())
        full = max(sorted(used), key=lambda at: used[at])
        largest = max((p for p in mine if p.first <= full < p.end), key=lambda p: p.bytes)
        said = f"{largest.name} ({amount(largest.bytes)})"
        out.append((run.device_name(buffer), len(mine), high, sum(p.bytes for p in mine), full, used[full], said))
    return out


def _memory_conclusion(facts: list[tuple[str, int, int, int, int, int, str]]) -> str:
    if not facts:
        return "Nothing was placed in compute memory."
    said = [f"{name} needs {amount(high)} instead of {amount(alone)} ({alone / max(high, 1):.3g} times as much), as places are used again"
            for name, _, high, alone, *_ in facts if alone > high]  # fmt: skip
    name, _, _, _, at, _, largest = max(facts, key=lambda f: f[2])
    return f"{'; '.join(said) or 'No place is used twice'}. The largest thing where {name} is fullest, at node {at}: {largest}."


# ---- traffic


def _ways(run: Run) -> dict[tuple[str, str], dict[str, int]]:
    """Bytes between memories, by kind; what stays in one memory is left out. "copies" counts the calls."""
    ways: dict[tuple[str, str], dict[str, int]] = {}
    for m in run.moves:
        if m.source != m.target:
            way = ways.setdefault((m.source, m.target), dict.fromkeys([*COPIES, "copies"], 0))
            way[m.kind] += m.bytes
            way["copies"] += 1
    return dict(sorted(ways.items(), key=lambda item: -sum(item[1][kind] for kind in COPIES)))


def traffic(trace: Trace, k: int | None = None, caption: str = "") -> Picture:
    """Bytes between devices in the first `k` events, one bar for each direction, by what was copied."""
    run = run_data(trace, k)
    ways = _ways(run)
    figure = new_figure(9.4, 0.75 + 0.4 * max(len(ways), 1))
    axes: Any = figure.add_subplot()
    most = max((sum(way[kind] for kind in COPIES) for way in ways.values()), default=1) or 1
    for y, way in enumerate(ways.values()):
        x = 0
        for kind in COPIES:
            fill, hatch = LOOKS[kind]
            line = 0.5 if way[kind] else 0
            (bar,) = axes.barh(y, way[kind], left=x, height=0.66, fc=fill, ec="#333333", lw=line, hatch=hatch)
            bar.set_hatch_linewidth(0.5)
            if way[kind] > 0.09 * most:
                axes.text(x + way[kind] / 2, y, f"{WORK[kind][0]} {amount(way[kind])}", ha="center", va="center", size=7.5,
                          color=ink_on(fill), bbox={"fc": fill, "ec": "none", "pad": 1.2})  # fmt: skip
            x += way[kind]
        axes.text(x + 0.008 * most, y, f"{amount(x)} in {way['copies']} copies", va="center", size=7.5)
    axes.set(xlim=(0, 1.17 * most), ylim=(max(len(ways), 1) - 0.5, -0.5))
    axes.set_yticks(range(len(ways)), [f"{a[:14]} → {b[:14]}" for a, b in ways], fontsize=8)
    byte_axis(axes.xaxis, most)
    axes.tick_params(labelsize=7.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if ways:
        legend(figure, [(kind, f"{WORK[kind][0]} {kind}") for kind in COPIES], loc="outside upper left")
    said = "; ".join(f"{a} to {b}: " + ", ".join(f"{way[kind]:,} bytes of {kind}" for kind in COPIES if way[kind])
                     for (a, b), way in ways.items())  # fmt: skip
    return picture(figure, f"Bars of bytes, one for each direction. {said or 'Nothing moved'}.", caption or _traffic_conclusion(run, ways))


def traffic_table(trace: Trace, k: int | None = None) -> Table:
    """The traffic as a table, with totals."""
    run = run_data(trace, k)
    ways = _ways(run)
    counts = [[*(way[kind] for kind in COPIES), sum(way[kind] for kind in COPIES), way["copies"]] for way in ways.values()]
    rows = [[a, b, *numbers] for (a, b), numbers in zip(ways, counts)]
    if len(rows) > 1:
        rows.append(["all", "", *map(sum, zip(*counts))])
    return table(["from", "to", *COPIES, "bytes", "copies"], rows, _traffic_conclusion(run, ways))


def _traffic_conclusion(run: Run, ways: dict[tuple[str, str], dict[str, int]]) -> str:
    total = sum(way[kind] for way in ways.values() for kind in COPIES)
    if not total:
        return "No byte went from one memory to another."
    (a, b), kind = max(((way, kind) for way in ways for kind in COPIES), key=lambda pair: ways[pair[0]][pair[1]])
    runs = f" in each of {run.runs} runs" if run.runs > 1 else ""
    each = total // max(run.runs, 1)
    return (f"{amount(each)} moved{runs}, in {sum(w['copies'] for w in ways.values()):,} copies in all. The largest part, "
            f"{ways[a, b][kind] / total:.0%}, are {kind} from {a} to {b}.")


# ---- splits


def split_table(trace: Trace, k: int | None = None) -> Table:
    """The splits of the last graph: backend, nodes, inputs, what was copied for them and how long it took in the last run, and why
    each one begins."""
    run = run_data(trace, k)
    rows, times = list[tuple[Any, ...]](), dict[int, int]()
    unit, name = unit_of(run.window[1] - run.window[0])
    for s in run.splits:
        spans = [x for x in run.spans if x.split == s.index and x.run == run.runs and x.kind != "wait"]
        copying, times[s.index] = covered((x.start, x.end) for x in spans if x.copy_name), covered((x.start, x.end) for x in spans)
        moved = sum(m.bytes for m in run.moves if m.split == s.index and m.run == run.runs and m.source != m.target)
        largest = max(s.inputs, key=lambda i: i[3], default=None)
        what = f"{largest[1]} ({amount(largest[3])})" if largest else ""
        nodes = f"{s.first} … {s.last - 1}" if s.last > s.first else str(s.first)
        rows.append((s.index, run.device_name(s.backend), nodes, len(s.inputs), s.bytes, moved, what, times[s.index] / unit,
                     copying / unit, s.cause))  # fmt: skip
    columns = ["split", "backend", "nodes", "inputs", "their bytes", "moved", "largest input", f"time, {name}", f"copying, {name}"]
    return table([*columns, "begins because"], rows, _split_conclusion(run, times))


def _split_conclusion(run: Run, times: dict[int, int]) -> str:
    if not run.splits:
        return "No graph was split."
    causes: dict[str, int] = defaultdict(int)
    for s in run.splits[1:]:
        weight, other = s.cause.startswith("the weight"), "another backend" in s.cause
        causes["for a weight that must be copied in" if weight else "because the backend changes" if other else s.cause] += 1
    said = ", ".join(f"{n} {why}" for why, n in sorted(causes.items(), key=lambda item: -item[1]))
    count = f"{len(run.splits)} splits" if len(run.splits) > 1 else "1 split"
    slow = max(times, key=lambda i: times[i])
    more = f" Split {slow} takes longest, {duration(times[slow])} of {duration(sum(times.values()))}." if times[slow] else ""
    return f"{count}{': after the first, ' + said if said else ''}.{more}"
