"""Stored pictures of runs: a step of a run on its clock, the experts that are copied of a weight, what one missing wait did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Rectangle

from workbench.scheduler.transfer import ExpertCopy, expert_copies
from workbench.scheduler.waits import WAITS, Ran, differences
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.hazards import hazards
from workbench.views.run_data import Span
from workbench.views.run_steps import run_steps
from workbench.views.steps import Steps, state
from workbench.views.tables import Stack, Table, table
from workbench.views.timelines import WIDTH, draw_early, draw_lane, draw_mark, duration, legend, timeline, unit_of

DIFFERENCES = ["result", "numbers that differ", "no numbers any more", "largest difference"]
"""Columns of results that are not those of the whole run."""
USED, PAD = "#56B4E9", "#D55E00"


def draw_run(trace: Steps, k: int, caption: str) -> Picture:
    """Step `k` of `run_steps`: done work solid, what was only asked for pale, the host's clock as a line, below it the experts copied."""
    s, lanes = state(trace, k), trace["lanes"]
    wide = max(trace["end"] / 2 ** trace["zoom"], 1)
    begin = max(0, min(s["now"] - 0.55 * wide, trace["end"] - wide))
    scale, unit = unit_of(int(wide))
    strip = 0.85 if s["experts"] else 0
    figure = new_figure(WIDTH, 0.95 + 0.46 * len(lanes) + strip, layout=None)
    tall = figure.get_figheight()
    axes: Any = figure.add_axes((0.13, (0.45 + strip) / tall, 0.86, 0.46 * len(lanes) / tall))
    axes.set(xlim=(0, wide / scale), ylim=(len(lanes) - 0.5, -0.5))
    for lane in range(len(lanes)):
        axes.axhspan(lane - 0.42, lane + 0.42, color="#f4f4f4", lw=0, zorder=0)
        spans = [_span(trace, x) for x in s["spans"] if x[0] == lane and x[4] > begin and x[3] < begin + wide]
        draw_lane(axes, lane, spans, int(begin), int(begin + wide), scale)
    axes.axvspan((s["now"] - begin) / scale, wide / scale, color="white", alpha=0.62, lw=0, zorder=5)  # asked for, and not done
    for lane, mark, time in s["marks"]:
        if begin <= time <= begin + wide:
            draw_mark(axes, (time - begin) / scale, lane, list(trace["marks"])[mark])
    for lane, at, ready in s["hazards"]:
        if begin <= at <= begin + wide:
            draw_early(axes, (at - begin) / scale, (min(ready, begin + wide) - begin) / scale, lane)
    axes.axvline((s["now"] - begin) / scale, color="#D55E00", lw=1.8, zorder=6)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.set_xlabel(f"{trace['clock']} time in {unit}, from {duration(int(begin))} on; the line: the host", fontsize=8, labelpad=1)
    axes.tick_params(axis="both", length=0, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    used = {trace["kinds"][x[1]][0] for x in s["spans"]}
    legend(figure, [(key, f"{letter} {text}".strip()) for key, letter, text, *_ in trace["kinds"] if key in used], loc="upper left")
    if s["experts"]:
        name, n, size, *_ = s["experts"][0]
        below: Any = figure.add_axes((0.13, 0.02 / tall, 0.86, strip / tall))
        _strip(below, 0, n, size, [ExpertCopy(a, b, a * size, (b - a + 1) * size + pad, pad) for *_, a, b, pad in s["experts"]])
        below.set(xlim=(0, n), ylim=(1.6, -0.9))
        below.text(0, -0.62, f"{name}: {n} experts of {size:,} bytes, copied so far", size=7.5, va="center")
        below.axis("off")
    step = trace["steps"][k]
    ahead = sum(x[4] > s["now"] for x in s["spans"])
    said = f"{len(s['spans']) - ahead} pieces of work are done, {ahead} are asked for and not done."
    return picture(figure, f"{trace['title']}, step {k + 1} of {len(trace['steps'])}: {step['sentence']} {said}", caption)


def _span(trace: Steps, x: Sequence[int]) -> Span:
    copied = "copy" if x[7] >= 0 else ""
    return Span(("", ""), trace["kinds"][x[1]][0], trace["names"][x[2]], x[3], x[4], x[5], x[6], -1, 0, 0, copied)


def expert_picture(strips: Mapping[str, tuple[Sequence[int], int, int]], caption: str) -> Picture:
    """The copies of used experts by the runtime's rule: label -> (ids of the experts, experts in all, bytes of one), a strip for each."""
    figure, said = new_figure(WIDTH, 0.1 + 0.72 * len(strips), layout=None), []
    for row, (name, (ids, n, size)) in enumerate(strips.items()):
        copies = list(expert_copies(sorted(set(ids)), n, size)) if len(ids) else []
        axes: Any = figure.add_axes((0.2, 1 - (row + 1) / len(strips), 0.78, 0.92 / len(strips)))
        _strip(axes, 0, n, size, copies)
        axes.set(xlim=(0, n), ylim=(1.3, -0.1))
        axes.axis("off")
        axes.text(-0.012 * n, 0.3, name, ha="right", va="center", size=8.5)
        runs = "; ".join(f"expert{f's {c.first} to {c.last}' if c.last > c.first else f' {c.first}'}, padding {c.padding}" for c in copies)
        said.append(f"{name}: {len(copies)} copies, {sum(c.size for c in copies):,} bytes ({runs})")
    what = "Strips of experts; used ones are filled, each run has a bracket, its padding a sliver behind it."
    return picture(figure, f"{what} {'. '.join(said)}.", caption)


def _strip(axes: Any, y: float, n: int, size: int, copies: Sequence[ExpertCopy]) -> None:
    used = {e for c in copies for e in range(c.first, c.last + 1)}
    for e in range(n):
        axes.add_patch(Rectangle((e, y), 0.96, 0.6, fc=USED if e in used else "white", ec="#333333" if e in used else "#999999",
                                 lw=0.7, ls="-" if e in used else ":"))  # fmt: skip
        if n <= 32:
            weight = "bold" if e in used else "normal"
            axes.text(e + 0.48, y + 0.3, str(e), ha="center", va="center", size=8 if n <= 16 else 6.5, weight=weight)
    for c in copies:
        if c.padding:
            wide = max(c.padding / size, 0.005 * n)
            axes.add_patch(Rectangle((c.last + 0.98, y + 0.02), wide, 0.56, fc=PAD, ec="#333333", lw=0.4, hatch="////"))
        a, b, low = c.first + 0.03, c.last + 0.93, y + 0.66
        axes.plot([a, a, b, b], [low, low + 0.12, low + 0.12, low], color="#333333", lw=0.9)
        text = f"{c.size - c.padding:,}" + (f" + {c.padding}" if c.padding else "")
        if len(text) < 130 * (c.last - c.first + 2) / n:
            axes.text((c.first + c.last + 0.96) / 2, y + 1.0, text, ha="center", va="center", size=7.5)


# ---- one wait less


def missing_wait(whole: Ran, cut: Ran, caption: str = "") -> Stack:
    """What one missing wait did: which wait, what came too early, and what is different in the results; both runs on one clock."""
    said = table(DIFFERENCES, different_rows(whole, cut), said_of_missing(whole, cut, caption))
    without = timeline(cut.trace, caption=f"Without wait {cut.without}.")
    return Stack(said, timeline(whole.trace, caption="With all waits."), without)


def different_rows(whole: Ran, cut: Ran) -> list[list[str]]:
    """Rows under DIFFERENCES."""
    return [[d.name, f"{d.differing:,} of {d.of:,}", f"{d.nan:,}", f"{d.largest:.3g}"] for d in differences(whole, cut)]


def said_of_missing(whole: Ran, cut: Ran, caption: str = "") -> str:
    """The same in sentences."""
    early, wrong = hazards(cut.trace), differences(whole, cut)
    which = wait_sentences(whole)[cut.without - 1]
    zero = min((e.start for e in cut.trace.events if e.kind in ("run", *WAITS)), default=0)
    first = f" Too early: {early[0].says(lambda ns: duration(ns - zero))}" if early else " Nothing comes too early without it."
    stopped = f" The run stops: {cut.error}" if cut.error else ""
    quiet = "" if cut.error else " Nothing warned of it; only the numbers are wrong."
    end = quiet if wrong else " The results are the same, bit for bit."
    return f"Without wait {cut.without} (“{which}”).{first}{stopped}{end} {caption}".strip()


def wait_sentences(whole: Ran) -> list[str]:
    """The waits of a run in words, in the order of the calls."""
    steps = run_steps(whole.trace, most=10**6)["steps"]
    return [s["sentence"].split(" Too early")[0].rstrip(".") for s in steps if s["event"][0] in WAITS]


def waits_table(whole: Ran, cuts: Sequence[Ran], caption: str = "") -> Table:
    """Every wait that was left out in turn: what came too early, and whether a result changed."""
    says, rows = wait_sentences(whole), list[tuple[Any, ...]]()
    for cut in cuts:
        early, wrong = hazards(cut.trace), differences(whole, cut)
        first = f"{early[0].who}: {early[0].tensor} {early[0].kind}" if early else ""
        result = "the run stops" if cut.error else ", ".join(d.name for d in wrong) + " wrong" if wrong else "the same bits"
        rows.append((cut.without, says[cut.without - 1], first, result))
    return table(["wait", "what it is", "first too early without it", "results without it"], rows, caption)
