"""What an expert cache did, to look at: which experts were in slots when, why each went, and hit rates over the number of slots.

Events are those of `expertflow.replay.walk`: (step, kind, layer's place, expert, cause); a step is one layer for one token or batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from workbench.errors import ParameterError, shown
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import OKABE_ITO
from workbench.views.steps import Steps, record_steps

if TYPE_CHECKING:
    from workbench.expertflow.replay import Result, StepEvent

CAUSES = {
    "hit resident": "{who} needs {e}, which is in a slot: a hit.",
    "hit prefetched": "{who} needs {e}, which a prediction brought in time: a hit.",
    "load missed": "{who} needs {e}, which is in no slot: it is loaded, and the token waits.",
    "load staged": "{who} needs {e}, which is not in the hot set: it passes through and takes no slot.",
    "load predicted": "The link is idle, and {e} is the next that is predicted and missing: it is loaded ahead.",
    "load hot set": "{e} is in the hot set: it is loaded before the first token.",
    "evict least recently used": "{e} goes: of those not in use, its last use is the longest ago ({ago}).",
    "evict least often used": "{e} goes: of those not in use, it was used least often ({uses}; of equals the longest unused).",
    "evict long unused and seldom used": "{e} goes: last use {ago}, {uses}; together the lowest rank.",
    "evict needed last": "{e} goes: of those not in use, it will be needed last, or never.",
    "evict not predicted": "{e} goes: it is not predicted, and of those its last use is the longest ago ({ago}).",
    "evict demoted": "{e} goes first: it was brought by a prediction that the router did not confirm.",
    "evict predicted latest": "{e} goes: all others not in use are predicted, it is the latest and least likely of them.",
    "evict fewer slots": "{e} goes: there are fewer slots now.",
    "demote not routed": "The router does not want {e}, which was brought for this step: it goes behind all others.",
    "demote not predicted any more": "A newer prediction leaves out {e}, which was brought on the older one: it goes behind all others.",
    "drop not routed": "The router does not want {e}, which had not been brought yet: the wish is dropped.",
    "drop not predicted any more": "A newer prediction leaves out {e}, which had not been brought yet: the wish is dropped.",
    "drop no slot to spare": "{e} is predicted, but every slot is in use or holds what is needed sooner: it is dropped, not waited for.",
}
"""Every reason for a step of `cache_steps`."""
SIGNS = {"hit": "●", "load": "↓", "ahead": "⇣", "evict": "✗", "demote": "▽", "drop": "–"}
DASHES, MARKERS = ("-", "--", "-.", ":"), "osD^vPX*"


class _Held:
    """Who is in a slot, since when, and how it was used: a fold over events."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], bool] = {}  # brought ahead and not used yet
        self.uses: dict[tuple[int, int], int] = {}
        self.last: dict[tuple[int, int], int] = {}

    def feed(self, event: StepEvent) -> None:
        step, kind, layer, expert, cause = event
        key = layer, expert
        if kind in ("hit", "load"):
            ahead = cause in ("predicted", "hot set")
            if cause != "staged":
                self.held[key] = ahead
            if not ahead:
                self.uses[key], self.last[key] = self.uses.get(key, 0) + 1, step
        elif kind == "evict":
            self.held.pop(key, None)

    def facts(self, key: tuple[int, int], step: int, n_layers: int) -> dict[str, str]:
        n, ago = self.uses.get(key, 0), (step - self.last[key]) // n_layers if key in self.last else None
        times = "never used" if not n else "used once" if n == 1 else f"used {n} times"
        return {"uses": times, "ago": "never" if ago is None else "in this token" if not ago else f"{ago} token{'s' * (ago > 1)} ago"}


def cache_steps(events: Iterable[StepEvent], layers: Sequence[int], n_expert: int, title: str = "Cache decisions", *,
                tokens: Sequence[str] | None = None, most: int = 300) -> Steps:  # fmt: skip
    """The stepper's trace of the first `most` events: a lane for each expert, filled while it is in a slot, and the cause of each decision.

    layers: how those of the trace are called; tokens: what to call the tokens, by number.
    """
    held, n = _Held(), len(layers)
    lanes = {(layer, e): f"L{name} e{e}" if n > 1 else f"expert {e}" for layer, name in enumerate(layers) for e in range(n_expert)}
    place = {key: i for i, key in enumerate(lanes)}

    def describe(event: StepEvent) -> dict[str, Any]:
        step, kind, layer, expert, cause = event
        key, token = (layer, expert), step // n
        name = repr(tokens[token]) if tokens is not None and token < len(tokens) else f"token {token}"
        of = f" of layer {layers[layer]}" if n > 1 else ""
        facts = {"who": f"{name.capitalize() if tokens is None else name}, layer {layers[layer]},", "e": f"expert {expert}{of}"}
        said = CAUSES[f"{kind} {cause}"].format(**facts, **held.facts(key, step, n))
        held.feed(event)
        label = lanes[key] if n > 1 else tokens[token] if tokens is not None and token < len(tokens) else str(token)
        sign = SIGNS["ahead" if cause in ("predicted", "hot set") else kind]
        marks = [[place[k], "·", 0.3] for k in held.held if k != key] + [[place[key], sign, 1]]
        rows = [[lanes[k], held.facts(k, step, n)["ago"], held.facts(k, step, n)["uses"], "brought ahead" if ahead else ""]
                for k, ahead in sorted(held.held.items(), key=lambda item: (held.last.get(item[0], -1), item[0]))]  # fmt: skip
        return {"event": [kind, step, layer, expert], "label": f"{sign} {label}", "cause": cause,
                "sentence": said[0].upper() + said[1:], "change": kind not in ("hit", "load"), "marks": marks, "table": rows}  # fmt: skip

    return record_steps(_first(events, most), describe, title, "", lanes=list(lanes.values()),
                        columns=["in a slot", "last use", "so far", ""], table="longest unused first")  # fmt: skip


def _first(events: Iterable[StepEvent], most: int) -> Iterator[StepEvent]:
    for i, event in enumerate(events):
        if i == most:
            return
        yield event


def residency_picture(events: Iterable[StepEvent], layers: Sequence[int], n_expert: int, caption: str, *, first: int = 0, count: int = 60,
                      title: str = "Experts in slots") -> Picture:  # fmt: skip
    """Layer × expert × time: a panel per layer, a row per expert, a column per token; filled where the expert is in a slot afterwards.

    ● a hit, ▾ a load that was waited for, ▴ one made ahead. Shown are `count` tokens from token `first` on.
    """
    n, held = len(layers), _Held()
    inside, marks = np.zeros((n, n_expert, count), bool), dict[str, list[tuple[int, int, int]]]()
    now = 0
    for event in events:
        step, kind, layer, expert, cause = event
        for token in range(now, min(step // n, first + count)):
            _snapshot(inside, held, token - first)
        now = step // n
        if now >= first + count:
            break
        if now >= first:
            sign = "ahead" if kind == "load" and cause in ("predicted", "hot set") else kind
            marks.setdefault(sign, []).append((layer, expert, now - first))
        held.feed(event)
    else:
        for token in range(now, first + count):
            _snapshot(inside, held, token - first)
    figure = new_figure(8.6, 0.9 + 0.16 * n * n_expert + 0.1 * n)
    panels = figure.subplots(n, 1, squeeze=False, sharex=True)[:, 0]
    looks = {"hit": ("o", OKABE_ITO[4], 9), "load": ("v", OKABE_ITO[5], 26), "ahead": ("^", OKABE_ITO[2], 26)}
    for layer, axes in enumerate(panels):
        axes.imshow(np.where(inside[layer], 0.82, 1.0), cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="none",
                    extent=(first - 0.5, first + count - 0.5, n_expert - 0.5, -0.5))  # fmt: skip
        for sign, (marker, colour, size) in looks.items():
            points = [(first + t, e) for place, e, t in marks.get(sign, ()) if place == layer]
            if points:
                axes.scatter(*zip(*points), s=size, marker=marker, color=colour, linewidths=0)
        axes.set_yticks(range(0, n_expert, max(1, n_expert // 8)))
        axes.tick_params(labelsize=6.5, length=0)
        axes.set_ylabel(f"layer {layers[layer]}", fontsize=7.5)
    panels[-1].set_xlabel("token", fontsize=8)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    names = {"hit": "needed, and there", "load": "loaded when needed", "ahead": "loaded ahead"}
    handles = [Patch(fc="#d1d1d1", label="in a slot"), *(Line2D([], [], ls="", marker=looks[s][0], color=looks[s][1], label=names[s])
               for s in looks if s in marks)]  # fmt: skip
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=7.5, frameon=False)
    hits, loads, ahead = (len(marks.get(sign, ())) for sign in looks)
    ends = (f"layer {name} {', '.join(map(str, np.flatnonzero(inside[i, :, -1]))) or 'none'}" for i, name in enumerate(layers))
    alt = (f"{title}: {n} layers of {n_expert} experts over tokens {first} to {first + count - 1}; {hits} hits, {loads} loads when "
           f"needed, {ahead} ahead. Experts in slots at the end: {'; '.join(ends)}")  # fmt: skip
    return picture(figure, alt + ".", caption)


def _snapshot(inside: np.ndarray, held: _Held, column: int) -> None:
    if column >= 0:
        for layer, expert in held.held:
            inside[layer, expert, column] = True


def hit_rate_picture(results: Sequence[Result], caption: str, *, chance: int | None = None, title: str = "") -> Picture:
    """Hit rate over slots, a curve per policy and forecast; the optimum in black. chance: experts that share the slots, for a dotted
    line of what slots filled at random would hit."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for r in results:
        name = r.policy + (f", {r.forecast}" if r.forecast else "") + (f", link {r.link:g}" if r.link else "")
        curves.setdefault(name, []).append((r.slots, r.hit_rate))
    if not curves:
        raise ParameterError("no results to draw", "those of a sweep over slots")
    figure = new_figure(6.6, 3.6)
    most = max(r.slots for r in results)
    where = "slots per layer" if results[0].scope == "layer" else "slots in one pool"
    axes: Any = figure.add_subplot(xlabel=where, ylabel="hit rate", title=shown(title))
    for i, (name, points) in enumerate(curves.items()):
        best = name in ("belady", "oracle")
        axes.plot(*zip(*sorted(points)), DASHES[i % 4], marker=MARKERS[i % len(MARKERS)], ms=4.5, label=name, lw=2 if best else 1.5,
                  color="#000000" if best else OKABE_ITO[(0, 4, 5, 2, 6, 1, 7)[i % 7]])  # fmt: skip
    if chance:
        axes.plot([0, most], [0, most / chance], ":", color="#777777", label="filled at random")
    axes.set(ylim=(0, 1), xlim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(color="#dddddd", lw=0.6)
    axes.legend(fontsize=8)
    said = "; ".join(f"{name}: " + ", ".join(f"{x} slots {y:.1%}" for x, y in sorted(points)) for name, points in curves.items())
    return picture(figure, f"{title or 'Hit rate over slots'}. {said}.", caption)
