"""The dashboard's picture: one outcome of the tuning bench beside the one before, drawn as quickly as a slider moves.

Pictures of matplotlib take longer than a redraw may. So the live view is SVG text made here, each part with a role and a label; what is
stored with a notebook is made by `dashboard_picture`, as pictures and a table.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.views.expert_time import LOSS_LOOKS, ledger_picture
from workbench.views.figures import Picture
from workbench.views.palette import OKABE_ITO
from workbench.views.tables import Table, table

if TYPE_CHECKING:
    from workbench.expertflow.tuning import Outcome

WIDTH = 640
SHOWN_TOKENS = 48
LANES = ("device", "link", "host")


class Board:
    """What a dashboard shows: `html()` for a live widget, the text for everywhere else. note: stands below the counters."""

    def __init__(self, now: Outcome, before: Outcome, bounds: Mapping[str, float], memory: Mapping[str, int], limit: int,
                 note: str = "") -> None:  # fmt: skip
        self.now, self.before, self.bounds, self.memory, self.limit, self.note = now, before, bounds, memory, limit, note

    def table(self) -> Table:
        """The counters of both runs."""
        rows = [(*row, "≠" if row[1] != row[2] else "") for row in _rows(self.before, self.now)]
        return table(["", "A: run before", "B: this run", "differs"], rows, f"{self.now.stream.costs.name}. {self.note}")

    def html(self) -> str:
        """Everything, as one piece of HTML."""
        parts = self.table().html(), _ledgers(self), _hits(self), _timeline(self.now), _memory(self), _residency(self.now)
        return f'<div class="wb-board">{"".join(parts)}</div>'

    def __repr__(self) -> str:
        return repr(self.table())


def dashboard_picture(board: Board) -> Picture:
    """The ledgers of both runs as a picture, for stored pages."""
    a, b = board.before.stream, board.now.stream
    caption = f"{a.per_token:.1f} ms per token before, {b.per_token:.1f} now."
    return ledger_picture({"A: before": a, "B: now": b}, caption)


def _rows(a: Outcome, b: Outcome) -> Iterator[tuple[str, Any, Any]]:
    for name, read in (
        ("ms per token, one stream", lambda o: f"{o.stream.per_token:.1f}"), ("hit rate", lambda o: f"{o.stream.hit_rate:.1%}"),
        ("device idle", lambda o: f"{o.stream.stalled:.0%}"),
        ("MiB over the link per token", lambda o: round(o.stream.bytes_per_token / 2**20)),
        ("recall, precision of the forecast", lambda o: "" if np.isnan(o.recall) else f"{o.recall:.0%}, {o.precision:.0%}"),
        ("slots per layer", lambda o: o.slots), ("tokens/s, several requests", lambda o: f"{o.served.throughput:.1f}"),
        ("ms per token of a request, median and worst of 100", lambda o: f"{o.served.latency():.0f}, {o.served.latency(0.99):.0f}"),
        ("tokens per expert batch", lambda o: f"{o.served.batch:.2f}"),
    ):  # fmt: skip
        yield name, read(a), read(b)


def _figure(height: int, title: str, said: str, parts: Sequence[str]) -> str:
    return (f'<figure style="margin:6px 0"><figcaption>{html.escape(title)}</figcaption><svg role="img" aria-label="{html.escape(said)}" '
            f'viewBox="0 0 {WIDTH} {height}" width="100%" style="max-width:{WIDTH}px;background:#fff;display:block" '
            f'font-family="sans-serif" font-size="10">{"".join(parts)}</svg></figure>')  # fmt: skip


def _bar(x: float, y: float, width: float, height: float, fill: str, title: str = "", stroke: str = "#fff") -> str:
    inside = f"<title>{html.escape(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}" stroke="{stroke}">{inside}</rect>'


def _letter(x: float, y: float, text: str) -> str:
    """Dark on a white rim, so that it can be read on any colour."""
    rim = 'stroke="#fff" stroke-width="2.5" paint-order="stroke"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="#111" {rim}>{html.escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#111">{html.escape(text)}</text>'


def _ledgers(board: Board) -> str:
    runs = {"A": board.before.stream, "B": board.now.stream}
    most = max(r.per_token for r in runs.values())
    parts, said = [], []
    for i, (name, run) in enumerate(runs.items()):
        x, y = 90.0, 6 + i * 26
        parts.append(_text(84, y + 14, f"{name} {run.per_token:.1f} ms", "end"))
        for n, (cause, (colour, _)) in enumerate(LOSS_LOOKS.items()):
            ms = run.ledger[cause] * run.scale / run.n_tokens / 1e6
            width = ms / most * (WIDTH - 100)
            parts.append(_bar(x, y, width, 20, colour, f"{cause} {ms:.1f} ms"))
            if width > 16:
                parts.append(_letter(x + width / 2, y + 14, "abcdefghi"[n]))
            x += width
        said.append(f"{name}: " + ", ".join(f"{c} {v * run.scale / run.n_tokens / 1e6:.1f} ms" for c, v in run.ledger.items() if v))
    x = 4.0
    for n, (cause, (colour, _)) in enumerate(LOSS_LOOKS.items()):
        if any(run.ledger[cause] for run in runs.values()):
            parts += [_bar(x, 62, 9, 9, colour), _text(x + 12, 71, f"{'abcdefghi'[n]} {cause}")]
            x += 30 + 5.6 * len(cause)
    return _figure(78, "Time per token by cause", "Time per token by cause. " + "; ".join(said), parts)


def _hits(board: Board) -> str:
    rates = {**board.bounds, "now": board.now.stream.hit_rate}
    parts = []
    for i, (name, rate) in enumerate(rates.items()):
        y = 4 + 17 * i
        fill = OKABE_ITO[5] if name == "now" else OKABE_ITO[4] if name != "belady" else "#333333"
        width = rate * (WIDTH - 140)
        parts += [_text(84, y + 11, name, "end"), _bar(90, y, width, 13, fill), _text(94 + width, y + 11, f"{rate:.1%}")]
    title = f"Hit rate of this run, and of three policies with {board.now.slots} slots that fetch nothing ahead"
    return _figure(8 + 17 * len(rates), title, "Hit rates: " + ", ".join(f"{n} {r:.1%}" for n, r in rates.items()), parts)


def _residency(outcome: Outcome) -> str:
    """Layer × expert × token: grey while in a slot, a mark where it was loaded."""
    trace = outcome.record
    costs = outcome.stream.costs
    n_expert, layers = costs.shape.router.n_expert, round(costs.shape.n_moe / outcome.stream.scale)
    steps, held, loads = 0, dict[tuple[int, int], int](), list[tuple[int, int, int]]()
    spans: list[tuple[int, int, int, int]] = []
    for event in trace.of("busy", "load", "evict"):
        if event.kind == "busy":
            steps += trace.strings[event.field("name")] == "head"
            if steps > SHOWN_TOKENS:
                break
            continue
        key = event.field("layer"), event.field("expert")
        token = max(0, steps - 1)
        if event.kind == "load":
            held[key] = token
            loads.append((*key, token))
        elif key in held:
            spans.append((*key, held.pop(key), token))
    spans += [(*key, since, min(steps, SHOWN_TOKENS)) for key, since in held.items()]
    h = max(2.0, min(6.0, 190 / (layers * n_expert)))
    w = (WIDTH - 60) / SHOWN_TOKENS
    parts = [_text(44, (layer * (n_expert * h + 4)) + n_expert * h / 2 + 6, f"layer {layer}", "end") for layer in range(layers)]
    place = lambda layer, e: layer * (n_expert * h + 4) + e * h + 4  # noqa: E731
    parts += [_bar(50 + a * w, place(layer, e), (b - a) * w, h - 0.5, "#c9c9c9", "", "none") for layer, e, a, b in spans]
    parts += [_bar(50 + t * w, place(layer, e), max(w * 0.35, 1.5), h - 0.5, OKABE_ITO[5], "", "none") for layer, e, t in loads]
    shown_tokens = min(steps, SHOWN_TOKENS)
    title = f"Experts in slots (grey) and loads (orange) over the first {shown_tokens} tokens"
    said = f"Residency: {len(loads)} loads of experts in the first {shown_tokens} tokens"
    return _figure(int(layers * (n_expert * h + 4) + 4), title, said, parts)


def _timeline(outcome: Outcome, tokens: int = 3) -> str:
    """The device, the link and the host over the first tokens; gaps of the device are stalls."""
    trace, spans, seen = outcome.record, list[tuple[int, int, int]](), 0
    for event in trace.of("busy"):
        seen += trace.strings[event.field("name")] == "head"
        if seen > tokens:
            break
        device = trace.strings[event.field("device")]
        spans.append((LANES.index(device), event.start, event.end))
    end = max((e for lane, _, e in spans if lane == 0), default=1)
    parts = [_text(44, 16 + 20 * i, name, "end") for i, name in enumerate(LANES)]
    for lane, start, stop in spans:
        if start < end:
            x = 50 + start / end * (WIDTH - 60)
            width = (min(stop, end) - start) / end * (WIDTH - 60)
            parts.append(_bar(x, 4 + 20 * lane, max(width - 0.3, 0.4), 16, OKABE_ITO[(2, 5, 1)[lane]], "", "none"))
    busy = sum(e - s for lane, s, e in spans if lane == 0) / end
    title = f"The first {tokens} tokens: {end / 1e6:.0f} ms in the traced layers, of which the device works {busy:.0%}; gaps are stalls"
    return _figure(64, title, f"Timeline of {tokens} tokens: the device works {busy:.0%} of the time, gaps are stalls", parts)


def _memory(board: Board) -> str:
    parts, x, said = [], 4.0, []
    for i, (name, size) in enumerate(board.memory.items()):
        width = size / board.limit * (WIDTH - 10)
        parts.append(_bar(x, 4, width, 18, OKABE_ITO[i % 8], f"{name} {size / 2**30:.2f} GiB"))
        if width > 7 * len(name):
            parts.append(_text(x + 3, 17, name))
        x += width
        said.append(f"{name} {size / 2**30:.1f} GiB" if size > 2**28 else f"{name} {size / 2**20:.1f} MiB")
    parts.append(_bar(4, 4, WIDTH - 10, 18, "none", "", "#111"))
    title = f"Memory of {board.limit / 2**30:.0f} GiB: " + ", ".join(said)
    return _figure(26, title, title, parts)
