"""Where the time of moving experts goes, who holds memory when, which scheme wins where: pictures and tables of `expertflow`'s results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from workbench.errors import ParameterError, shown
from workbench.trace import Trace
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import OKABE_ITO, ink_on
from workbench.views.steps import Steps, record_steps
from workbench.views.tables import Table, table
from workbench.views.timelines import duration

if TYPE_CHECKING:
    from workbench.expertflow.hindcast import Row
    from workbench.expertflow.monitor import Reading
    from workbench.expertflow.regimes import Point
    from workbench.expertflow.timing import Timed

LOSS_LOOKS = {"compute": (OKABE_ITO[2], ""), "compulsory": (OKABE_ITO[7], "..."), "capacity": (OKABE_ITO[5], "///"),
              "policy": (OKABE_ITO[0], "\\\\\\"), "late prefetch": (OKABE_ITO[4], "xx"), "wasted prefetch": (OKABE_ITO[6], "++"),
              "ids": (OKABE_ITO[3], ""), "host": (OKABE_ITO[1], "--"), "disk": ("#AA4499", "oo")}  # fmt: skip
SCHEME_LOOKS = {"resident": ("R", OKABE_ITO[2]), "host": ("H", OKABE_ITO[1]), "used experts": ("U", OKABE_ITO[0]),
                "cache": ("C", OKABE_ITO[4]), "hot": ("S", OKABE_ITO[5]), "shared": ("B", OKABE_ITO[6]),
                "forecast": ("F", OKABE_ITO[3])}  # fmt: skip
PART_LOOKS = ((OKABE_ITO[7], ""), (OKABE_ITO[5], "///"), (OKABE_ITO[3], "..."), (OKABE_ITO[6], "xx"), (OKABE_ITO[4], "\\\\"),
              (OKABE_ITO[1], ""))  # fmt: skip


def ledger_picture(runs: Mapping[str, Timed], caption: str) -> Picture:
    """Milliseconds per token of each run, stacked by cause. The configuration's name stands below the axis."""
    if not runs:
        raise ParameterError("no runs to draw", "at least one result of `timing.simulate`")
    figure = new_figure(8.2, 1.25 + 0.36 * len(runs))
    axes: Any = figure.add_subplot(xlabel=f"ms per token, {', '.join(dict.fromkeys(r.costs.name for r in runs.values()))}")
    used = {cause for r in runs.values() for cause, ns in r.ledger.items() if ns}
    for y, run in enumerate(runs.values()):
        at = 0.0
        for cause, (colour, hatch) in LOSS_LOOKS.items():
            width = run.ledger[cause] * run.scale / run.n_tokens / 1e6
            axes.barh(y, width, left=at, height=0.66, color=colour, hatch=hatch, ec="white", lw=0.4)
            at += width
        axes.text(at, y, f" {at:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(runs)), [shown(name, 40) for name in runs], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.09)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = [Patch(fc=c, hatch=h, ec="white", label=cause) for cause, (c, h) in LOSS_LOOKS.items() if cause in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), fontsize=7.5, frameon=False)
    said = "; ".join(f"{name}: {run.per_token:.1f} ms, of which " + ", ".join(
        f"{cause} {ms:.1f}" for cause, ms, _ in run.rows() if ms >= 0.05) for name, run in runs.items())  # fmt: skip
    return picture(figure, f"Time per token by cause. {said}.", caption)


def ledger_table(runs: Mapping[str, Timed], caption: str = "") -> Table:
    """The same as numbers, with what was loaded."""
    causes = [c for c in LOSS_LOOKS if any(r.ledger[c] for r in runs.values())]
    rows = [(name, *(round(r.ledger[c] * r.scale / r.n_tokens / 1e6, 1) for c in causes), round(r.per_token, 1), f"{r.hit_rate:.1%}",
             round(r.bytes_per_token / 2**20)) for name, r in runs.items()]  # fmt: skip
    return table(["", *causes, "ms per token", "hits", "MiB per token"], rows, caption)


def regime_picture(points: Sequence[Point], caption: str, title: str, marks: Sequence[tuple[int, float, str]] = ()) -> Picture:
    """The phase diagram: batch across, link upwards, a panel for each speed of the host's memory; colour and letter name the winner.

    marks: published points (batch, link in GB/s, what), drawn in each panel with a number.
    """
    memories = list(dict.fromkeys(p.memory for p in points))
    batches, links = (sorted({getattr(p, what) for p in points}) for what in ("batch", "link"))
    figure = new_figure(1.2 + 2.4 * len(memories), 1.5 + 0.27 * len(links))
    for axes, memory in zip(figure.subplots(1, len(memories), squeeze=False, sharey=True)[0], memories):
        for p in (p for p in points if p.memory == memory):
            letter, colour = SCHEME_LOOKS[p.winner]
            x, y = batches.index(p.batch), links.index(p.link)
            axes.add_patch(_cell(x, y, colour))
            axes.text(x, y, letter, ha="center", va="center", fontsize=7, color=ink_on(colour))
        for i, (batch, link, _) in enumerate(marks, 1):
            at = _between(batches, batch), _between(links, link)
            axes.plot(*at, "o", ms=11, mfc="white", mec="black", zorder=4)
            axes.text(*at, str(i), ha="center", va="center", fontsize=7, zorder=5)
        axes.set(title=f"host memory {memory:g} GB/s", xlabel="tokens in a step")
        axes.set(xlim=(-0.5, len(batches) - 0.5), ylim=(-0.5, len(links) - 0.5))
        axes.title.set_fontsize(8)
        axes.set_xticks(range(len(batches)), batches, fontsize=7)
        axes.set_yticks(range(len(links)), [f"{link:g}" for link in links], fontsize=7)
        axes.tick_params(length=0)
    figure.axes[0].set_ylabel("link, GB/s", fontsize=8)
    used = [s for s in SCHEME_LOOKS if any(p.winner == s for p in points)]
    handles = [Patch(fc=SCHEME_LOOKS[s][1], label=f"{SCHEME_LOOKS[s][0]}  {s}") for s in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    counts = "; ".join(f"host memory {m:g} GB/s: " + ", ".join(f"{s} {sum(p.winner == s for p in points if p.memory == m)}" for s in used)
                       for m in memories)  # fmt: skip
    noted = " ".join(f"{i}: {what}, {batch} tokens, {link:g} GB/s." for i, (batch, link, what) in enumerate(marks, 1))
    of = len(batches) * len(links)
    return picture(figure, f"{title}. Which scheme is fastest, in how many of {of} places each. {counts}. {noted}", caption)


def _cell(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fc=colour, ec="white", lw=0.6)


def _between(values: Sequence[float], wanted: float) -> float:
    """The place of a value among sorted ones, between two where it is none of them."""
    if wanted <= values[0]:
        return 0.0
    for i, (a, b) in enumerate(zip(values, values[1:])):
        if wanted <= b:
            return i + (wanted - a) / (b - a)
    return len(values) - 1.0


def parts_picture(readings: Sequence[Reading], limit: int, caption: str, unit: tuple[float, str] = (1e6, "ms")) -> Picture:
    """Memory by part over time, as a monitor read it, with the limit and the marks at 0.9 and 0.7 of it."""
    if not readings:
        raise ParameterError("no readings to draw", "those of a `Monitor`")
    figure = new_figure(8.2, 3.2)
    axes: Any = figure.add_subplot(xlabel=f"time in {unit[1]}", ylabel="share of the memory")
    times = [r.time / unit[0] for r in readings]
    below = [0.0] * len(readings)
    for (colour, hatch), part in zip(PART_LOOKS, readings[0].parts):
        if not any(r.parts[part] for r in readings):
            continue
        top = [b + r.parts[part] / limit for b, r in zip(below, readings)]
        axes.fill_between(times, below, top, step="post", facecolor=colour, hatch=hatch, edgecolor="white", lw=0, label=part)
        below = top
    for mark, style, name in ((1.0, "-", "limit"), (0.9, "--", "shrink above"), (0.7, ":", "widen below")):
        axes.axhline(mark, color="black", lw=1, ls=style)
        axes.text(times[-1], mark, f" {name}", fontsize=7, va="center")
    axes.set(xlim=(times[0], times[-1] or 1), ylim=(0, max(1.08, max(below) * 1.05)))
    axes.legend(fontsize=7.5, loc="lower left", ncols=3)
    highest = max(readings, key=lambda r: r.ratio)
    said = ", ".join(f"{k} {v / limit:.0%}" for k, v in highest.parts.items() if v)
    alt = f"Memory by part over {len(readings)} readings; the highest is {highest.ratio:.0%} of the limit: {said}."
    return picture(figure, alt, caption)


def hindcast_table(rows: Sequence[Row], caption: str = "") -> Table:
    """Published beside ours, with the error and what was fitted or stands in. A source is named where it begins."""
    new = [i == 0 or r.source != rows[i - 1].source for i, r in enumerate(rows)]
    lines = [(r.source if first else "", r.what, f"{r.published:g} {r.unit}", f"{r.ours:.4g}", f"{r.error:+.0%}", r.note)
             for first, r in zip(new, rows)]  # fmt: skip
    return table(["source", "what", "published", "ours", "error", "note"], lines, caption)


# ---- one token's way

NINE = {1: "the embedding makes a hidden state of the token", 2: "a forecast names experts of layers to come",
        3: "experts that are likely are loaded ahead", 4: "the router chooses", 5: "the host learns the choice, and who waits for whom",
        6: "who is in a slot, and who must be loaded", 7: "the experts compute, and their results join the stream", 8: "the next layer",
        9: "the logits"}  # fmt: skip
"""The nine steps of the seed's section 4.5, in our words."""


def token_way(trace: Trace, title: str = "One token's way through nine steps", most: int = 400) -> Steps:
    """The record of one decoded token under an expert budget, as steps: each event with the number of the seed's step that it belongs to.

    trace: of one `session.decode([token])`, made with a trace and a forecast. Raises ParameterError where no expert moved.
    """
    layer, ahead = -1, False
    way: list[tuple[int, str, int]] = []
    for event in trace.events:
        if len(way) == most:
            break
        fields = trace.described(event)
        ahead = (ahead or event.kind == "predict") and event.kind != "get_async"  # loads between a forecast and the next router
        said = _said(event.kind, fields, ahead)
        if said is None:
            continue
        number, sentence = said
        if number == 4 and way and way[-1][0] != 4:
            layer += 1
            if layer:
                way.append((8, f"Layer {layer} begins.", event.start))
        way.append((number, sentence, event.start))
    if not any(n == 6 for n, _, _ in way):
        raise ParameterError("a trace in which no expert was asked for", "the record of a decoded token under an expert budget")

    def describe(item: tuple[int, str, int]) -> dict[str, Any]:
        number, sentence, at = item
        return {"event": ["step", number, duration(at - way[0][2])], "label": f"step {number}", "cause": str(number), "change": True,
                "sentence": f"{number} · {NINE[number]}: {sentence}"}  # fmt: skip

    return record_steps(way, describe, title, "list", nine=[NINE[n] for n in sorted(NINE)])


def _said(kind: str, fields: Mapping[str, Any], ahead: bool) -> tuple[int, str] | None:
    """The step that an event belongs to, and what to say of it."""
    name = str(fields.get("name", ""))
    if kind == "queued":
        if name == "embd":
            return 1, "the row of the token is taken from the embedding."
        if name.startswith("ffn_moe_topk"):
            return 4, f"{name} picks the k best of the router's scores."
        if name.startswith("ffn_moe_up"):
            return 7, f"{name} multiplies with the matrices in the slots."
        if name.startswith("ffn_moe_out") or name.startswith("l_out"):
            return 7, f"{name} adds the results."
        return (9, "the output matrix makes the logits.") if name == "result_output" else None
    if kind == "get_async" and "topk" in name:
        return 5, "the ids are read, which waits for the router."
    if kind == "predict":
        return 2, f"expert {fields['expert']} of layer {fields['layer']} is likely."
    if kind == "load":
        return (3 if ahead else 6), f"expert {fields['expert']} of layer {fields['layer']} is sent, {fields['bytes']:,} bytes."
    if kind in ("hit", "evict", "hosted"):
        what = {"hit": "is in a slot", "evict": "gives its slot up", "hosted": "is computed on the host"}[kind]
        return 6, f"expert {fields['expert']} of layer {fields['layer']} {what}."
    return None
