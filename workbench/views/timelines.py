"""Who did what when: a Gantt chart of a run with one lane per stream, and the same as a table.

Overlap is what lies above each other; a gap is explained by what the others did in the meantime.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.patches import Patch

from workbench.trace import Trace
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.hazards import hazards
from workbench.views.palette import OKABE_ITO, ink_on
from workbench.views.run_data import HOST, WORK, Run, Span, run_data
from workbench.views.tables import Table, table

LOOKS = {"expert product": (OKABE_ITO[2], ""), "product": (OKABE_ITO[4], ""), "op": (OKABE_ITO[1], ""), "weights": (OKABE_ITO[5], "///"),
         "activations": (OKABE_ITO[0], "..."), "inputs": (OKABE_ITO[3], "xxx"), "wait": ("#FFFFFF", "///")}  # fmt: skip
"""Colour and hatch of each key of WORK."""
WIDTH, LANE, ROOM = 9.4, 0.46, 1.25  # inches: the figure, a lane, the names of the lanes


class Gap(NamedTuple):
    """A time in which a device did nothing; `cause` says what happened meanwhile."""

    device: str
    start: int
    end: int
    cause: str


def timeline(trace: Trace, k: int | None = None, window: tuple[int, int] | None = None, caption: str = "") -> Picture:
    """The first `k` events of a run over time, one lane per device stream; `window` (from, to, in nanoseconds) shows a part of it."""
    run = run_data(trace, k)
    begin, end = window or run.window
    lanes = run.lanes
    figure = new_figure(WIDTH, 0.82 + LANE * max(len(lanes), 1), layout=None)
    tall = figure.get_figheight()
    axes: Any = figure.add_axes((ROOM / WIDTH, 0.42 / tall, 1 - (ROOM + 0.12) / WIDTH, LANE * max(len(lanes), 1) / tall))
    scale, unit = unit_of(end - begin)
    axes.set(xlim=(0, max(end - begin, 1) / scale), ylim=(max(len(lanes), 1) - 0.5, -0.5))
    axes.set_xlabel(f"{trace.clock if trace.clock != 'none' else ''} time in {unit}".strip(), fontsize=8, labelpad=1)
    axes.set_yticks(range(len(lanes)), [lane_name(lane, lanes) for lane in lanes], fontsize=8)
    axes.tick_params(axis="both", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for y in range(len(lanes)):
        axes.axhspan(y - 0.42, y + 0.42, color="#f4f4f4", lw=0, zorder=0)
    for y, lane in enumerate(lanes):
        draw_lane(axes, y, [s for s in run.spans if s.lane == lane and s.end > begin and s.start < end], begin, end, scale)
    for mark in run.marks:
        if mark.lane in lanes and begin <= mark.time <= end and mark.kind != "run":
            draw_mark(axes, (mark.time - begin) / scale, lanes.index(mark.lane), mark.kind)
    early = hazards(trace if k is None else trace[:k])
    for h in early:
        if h.lane in lanes and begin <= h.at <= end:
            draw_early(axes, (h.at - begin) / scale, (min(h.ready, end) - begin) / scale, lanes.index(h.lane))
    _draw_splits(axes, run, lanes, begin, end, scale)
    legend(figure, [(kind, f"{WORK[kind][0]} {WORK[kind][1]}".strip()) for kind in LOOKS if any(s.kind == kind for s in run.spans)],
           loc="upper left", bbox_to_anchor=(0.0, 1.015))  # fmt: skip
    said = "".join(f" Too early: {h.says(lambda ns: duration(ns - begin))}" for h in early[:3])
    return picture(figure, _alt(run, begin, end) + said, caption or _conclusion(run) + said)


def timeline_table(trace: Trace, k: int | None = None) -> Table:
    """The timeline as a table: what each lane did, how much of the whole time, and its longest gap with its cause."""
    run = run_data(trace, k)
    begin, end = run.window
    scale, unit = unit_of(end - begin)
    rows = []
    for lane in run.lanes:
        spans = [s for s in run.spans if s.lane == lane]
        busy, gap = covered((s.start, s.end) for s in spans if s.kind != "wait"), longest_gap(run, [lane])
        computes, copies = sum(not s.copy_name for s in spans if s.kind != "wait"), sum(bool(s.copy_name) for s in spans)
        rows.append((lane_name(lane, run.lanes), computes, copies,
                     sum(s.bytes for s in spans), busy / scale, f"{busy / max(end - begin, 1):.0%}",
                     sum(s.ns for s in spans if s.kind == "wait") / scale, gap.end / scale - gap.start / scale if gap else 0.0,
                     gap.cause if gap else ""))  # fmt: skip
    columns = ["lane", "computes", "copies", "bytes copied", f"busy, {unit}", "of the time", f"waits, {unit}"]
    return table([*columns, f"longest gap, {unit}", "meanwhile"], rows, _conclusion(run))


# ---- what follows from it


def longest_gap(run: Run, lanes: Sequence[tuple[str, str]] | None = None) -> Gap | None:
    """The longest time in which a device other than the host's (or one of `lanes`) did nothing, begin and end of the run included."""
    begin, end = run.window
    if lanes is None:
        hosts = {device for device, _, host in run.devices if host} | {HOST[0]}
        lanes = [lane for lane in run.lanes if lane[0] not in hosts] or [lane for lane in run.lanes if lane != HOST]
    longest = None
    for device in dict.fromkeys(lane[0] for lane in lanes):
        mine = [lane for lane in lanes if lane[0] == device]
        at = begin
        spans = sorted((s.start, s.end) for s in run.spans if s.lane in mine and s.kind != "wait")
        for start, stop in [*spans, (end, end)]:
            if longest is None or start - at > longest[2] - longest[1]:
                longest = (mine, at, start)
            at = max(at, stop)
    if longest is None or longest[2] <= longest[1]:
        return None
    mine, start, stop = longest
    return Gap(mine[0][0], start, stop, _cause(run, mine, start, stop))


def _cause(run: Run, mine: Sequence[tuple[str, str]], start: int, stop: int) -> str:
    """What filled most of a gap elsewhere."""
    doing: dict[str, list[tuple[int, int]]] = defaultdict(list)
    splits: dict[str, set[int]] = defaultdict(set)
    for s in run.spans:
        if s.lane in mine or s.kind == "wait" or s.end <= start or s.start >= stop:
            continue
        who = "the host" if s.lane == HOST else s.lane[0]
        what = f"{who} copied {s.kind}" if s.copy_name else f"{who} computed"
        doing[what].append((max(s.start, start), min(s.end, stop)))
        splits[what].add(s.split)
    if not doing:
        return "nothing was asked of anyone"
    shares = {what: covered(pieces) / (stop - start) for what, pieces in doing.items()}
    most = max(shares, key=lambda what: shares[what])
    numbers = sorted(splits[most] - {-1})
    of = f" (split {numbers[0]})" if len(numbers) == 1 else f" (splits {numbers[0]} to {numbers[-1]})" if numbers else ""
    return f"{most}{of} for {shares[most]:.0%} of it"


def covered(pieces: Iterable[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    total, at = 0, -(2**63)
    for start, end in sorted(pieces):
        total += max(end - max(start, at), 0)
        at = max(at, end)
    return total


def _conclusion(run: Run) -> str:
    begin, end = run.window
    if end <= begin:
        return "Nothing took any time."
    said = [f"{duration(end - begin)} in all."]
    names = list(dict.fromkeys(lane[0] for lane in run.lanes if lane != HOST))
    busy = []
    for n in names:
        spans = [s for s in run.spans if s.lane[0] == n and s.kind != "wait"]
        whole, copies = (covered((s.start, s.end) for s in some) / (end - begin) for some in (spans, [s for s in spans if s.copy_name]))
        busy.append(f"{n} {whole:.0%}" + (f" ({copies:.0%} with copies)" if copies else ""))
    said.append(f"Busy: {', '.join(busy)}.")
    waits = covered((s.start, s.end) for s in run.spans if s.kind == "wait")
    copying = covered((s.start, s.end) for s in run.spans if s.lane == HOST and s.kind != "wait")
    if waits or copying:
        said.append(f"The host copies in {copying / (end - begin):.0%} of the time and waits in {waits / (end - begin):.0%}.")
    gap = longest_gap(run)
    if gap is not None:
        said.append(f"The longest gap: {gap.device} idle for {duration(gap.end - gap.start)}; meanwhile {gap.cause}.")
    return " ".join(said)


def _alt(run: Run, begin: int, end: int) -> str:
    said = []
    for lane in run.lanes:
        spans = [s for s in run.spans if s.lane == lane and s.end > begin and s.start < end]
        kinds = {kind: sum(s.kind == kind for s in spans) for kind in WORK}
        counts = ", ".join(f"{n} × {WORK[kind][1]}" for kind, n in kinds.items() if n)
        said.append(f"{lane_name(lane, run.lanes)}: {counts or 'nothing'}")
    return f"Timeline of {duration(end - begin)}, one lane per stream. {'; '.join(said) or 'Nothing happened'}."


# ---- drawing


def draw_mark(axes: Any, x: float, lane: int, kind: str) -> None:
    """An event recorded ▲ or waited for ▼, or a wait that was left out ×."""
    shape, size, up = {"recorded": ("^", 3.5, 0.4), "left out": ("X", 8.0, 0.0)}.get(kind, ("v", 3.5, -0.4))
    axes.plot(x, lane + up, shape, color="black", ms=size, clip_on=False, zorder=7)


def draw_early(axes: Any, at: float, ready: float, lane: int) -> None:
    """Work that came at `at`, and should have come at `ready`."""
    axes.annotate("", (ready, lane), (at, lane), arrowprops={"arrowstyle": "->", "ls": "--", "color": "#D55E00", "lw": 1.4}, zorder=7)
    axes.text(at, lane, "!", size=12, weight="bold", ha="center", va="center", zorder=8, bbox={"fc": "white", "ec": "#D55E00", "pad": 1.2})


def draw_lane(axes: Any, y: int, spans: list[Span], begin: int, end: int, scale: float) -> None:
    """The spans of one lane between two times, by kind, with a name where there is room; `scale`: nanoseconds per unit of the axis."""
    per_inch = max(end - begin, 1) / (WIDTH - ROOM - 0.12)
    for kind, (colour, hatch) in LOOKS.items():
        bars = [((a - begin) / scale, (b - a) / scale) for a, b in _merged([s for s in spans if s.kind == kind], per_inch / 220)]
        if kind == "wait":
            axes.broken_barh(bars, (y - 0.2, 0.4), fc="white", ec="#9a9a9a", lw=0.5, hatch=hatch, zorder=1).set_hatch_linewidth(0.5)
        elif bars:
            drawn = axes.broken_barh(bars, (y - 0.4, 0.8), fc=colour, ec="#00000066" if hatch else "white", lw=0, hatch=hatch, zorder=2)
            drawn.set_hatch_linewidth(0.5)
            wide = [b for b in bars if b[1] * scale > per_inch / 25]
            axes.broken_barh(wide, (y - 0.4, 0.8), fc="none", ec="#333333", lw=0.5, zorder=3)
    for s in spans:
        room = (min(s.end, end) - max(s.start, begin)) / per_inch
        letter, says = WORK[s.kind][0], _label(s)
        text = next((t for t in (*says, letter) if t and room > 0.062 * max(map(len, t.split("\n"))) + 0.03), "")
        if text:
            colour, hatch = LOOKS[s.kind]
            axes.text(((max(s.start, begin) + min(s.end, end)) / 2 - begin) / scale, y, text, ha="center", va="center", size=6.5,
                      color=ink_on(colour), zorder=4, clip_on=True, weight="bold" if text == letter else "normal",
                      bbox={"fc": colour, "ec": "none", "pad": 1.1} if hatch else None)  # fmt: skip


def _merged(spans: list[Span], small: float) -> Iterator[tuple[int, int]]:
    """Stretches of one kind, those joined that lie closer than can be drawn."""
    at: tuple[int, int] | None = None
    for s in sorted(spans, key=lambda s: s.start):
        if at is not None and s.start - at[1] <= small and (s.end - s.start < 8 * small or at[1] - at[0] < 8 * small):
            at = at[0], max(at[1], s.end)
            continue
        if at is not None:
            yield at
        at = s.start, s.end
    if at is not None:
        yield at


def _label(s: Span) -> list[str]:
    """What a bar may say, the longest first."""
    if not s.copy_name:
        return [f"waits {s.name}", s.name] if s.kind == "wait" else [s.name]
    short, letter = s.name.removesuffix(".weight").removeprefix("blk."), WORK[s.kind][0]
    return [f"{letter} {short}\n{amount(s.bytes)}", f"{letter}\n{amount(s.bytes)}"]


def _draw_splits(axes: Any, run: Run, lanes: list[tuple[str, str]], begin: int, end: int, scale: float) -> None:
    """The number of each split above its first compute, where there is room for it."""
    free: dict[int, float] = {}
    room = (end - begin) / (WIDTH - ROOM) * 0.22
    first: dict[tuple[int, int], Span] = {}
    for s in run.spans:
        if s.split >= 0 and not s.copy_name and s.kind != "wait":
            first.setdefault((s.run, s.split), s)
    for (_, split), s in first.items():
        y = lanes.index(s.lane)
        if begin <= s.start <= end:
            axes.vlines((s.start - begin) / scale, y - 0.5, y - 0.38, color="black", lw=0.8, zorder=5, clip_on=False)
            if s.start >= free.get(y, begin):
                axes.text((s.start - begin) / scale, y - 0.41, f" {split}", size=5.5, ha="left", va="bottom", zorder=5, clip_on=False)
                free[y] = s.start + room


def legend(figure: Any, entries: Sequence[tuple[str, str]], **place: Any) -> None:
    """One line of keys of LOOKS with their labels."""
    handles = [Patch(fc=LOOKS[kind][0], ec="#555555", hatch=LOOKS[kind][1], lw=0.5, label=label) for kind, label in entries]
    if handles:
        figure.legend(handles=handles, ncols=len(handles), fontsize=7, frameon=False, handlelength=1.6, columnspacing=1.2,
                      handletextpad=0.4, **place)  # fmt: skip


def lane_name(lane: tuple[str, str], lanes: Sequence[tuple[str, str]]) -> str:
    """The device alone, where it has one stream."""
    single = sum(other[0] == lane[0] for other in lanes) == 1
    return lane[0][:14] if single else f"{lane[0][:10]} {lane[1][:10]}"


def byte_axis(axis: Any, most: int) -> None:
    """Ticks of an axis at round numbers of bytes, as `amount` tells them."""
    step = 1 << max((most // 3).bit_length() - 1, 0)
    axis.set_ticks(range(0, most + 1, step), [amount(n) for n in range(0, most + 1, step)])


def unit_of(ns: int) -> tuple[float, str]:
    """The unit in which `ns` nanoseconds are best told: its length and name."""
    return next(((size, name) for size, name in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")) if ns >= 2 * size), (1.0, "ns"))


def duration(ns: int) -> str:
    """A time with four digits and its unit."""
    scale, unit = unit_of(ns)
    return f"{ns / scale:.4g} {unit}"


def amount(n: int) -> str:
    """A number of bytes with three digits and its unit."""
    return next((f"{n / size:.3g} {name}" for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if n >= size), f"{n} B")

