"""Where which scheme wins: a phase diagram over batch, link and memory, for one published model (all times from `costs.Costs`).

Ways to decode a step of n tokens with a mixture of experts: everything on the card; experts computed on the host; the used experts
copied anew each time (ggml's rule); a cache of experts, whose misses are copied while the device computes what it can; the experts used
most on the card and the others computed on the host (Fiddler's); the same, with some of these copied while the host computes the rest.
What forecasts add cannot be told from a hit rate: where it is measured, it comes from a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from workbench.expertflow.costs import Costs
from workbench.expertflow.replay import Stream, replay
from workbench.moe import RouteTrace

SCHEMES = ("resident", "host", "used experts", "cache", "hot", "shared", "forecast")


class Rates(NamedTuple):
    """What routes do at one batch: experts of a layer that a step uses, and which share of them is there: in a cache (the better of LRU
    and LFU), and in a set of the experts used most in other texts."""

    used: float
    cache: float
    hot: float


class Point(NamedTuple):
    """One place in the diagram: milliseconds of a step per scheme (None: does not fit, or was not measured), and the winner."""

    batch: int
    link: float
    memory: float
    times: dict[str, float | None]

    @property
    def winner(self) -> str:
        """The fastest that fits."""
        return min((t, s) for s, t in self.times.items() if t is not None)[1]


def measured(trace: RouteTrace, warm: RouteTrace, slots: int, batch: int) -> Rates:
    """Replays of a trace with so many sequences side by side and slots per layer. warm: other texts, in which experts are counted."""
    hits = {policy: replay(trace, policy, slots, residency="one_by_one", batch=batch, hot=warm.counts()).hit_rate
            for policy in ("lru", "lfu", "static")}  # fmt: skip
    stream = Stream(trace, batch=batch)
    return Rates(sum(stream.needed) / (stream.n_steps * trace.n_layers), max(hits["lru"], hits["lfu"]), hits["static"])


def step_times(costs: Costs, batch: int, capacity: int, rates: Rates) -> dict[str, float | None]:
    """Milliseconds of a decode step of `batch` tokens. capacity: bytes of the card for experts; rates: with a cache of that size."""
    shape = costs.shape
    n_expert, k, layers = shape.router.n_expert, shape.router.n_used, shape.n_moe
    used, rows = rates.used, max(1, round(batch * k / rates.used))
    before, each = costs.attention(batch) + costs.ids(batch), costs.expert(rows)
    misses, cold = used * (1 - rates.cache), used * (1 - rates.hot)
    waits = misses * costs.load + (each if misses else 0)

    def shared(copied: float) -> float:
        """So many of the cold experts copied, the others computed on the host, which is slower beside copies."""
        beside = costs.beside_copies(rows) if copied else costs.on_host(rows)
        card = max((used - cold + copied) * each, copied * costs.load + (each if copied else 0))
        return before + max(card, (cold - copied) * beside)

    fits = capacity >= layers * k * costs.expert_bytes
    times: dict[str, float | None] = {
        "resident": costs.attention(batch) + used * each if capacity >= layers * n_expert * costs.expert_bytes else None,
        "host": before + used * costs.on_host(rows),
        "used experts": before + used * costs.load + each,
        "cache": before + max(used * each, waits) if fits else None,
        "hot": shared(0) if fits else None,
        "shared": min(shared(min(n, cold)) for n in range(1, ceil(cold) + 1)) if fits and cold else None,
        "forecast": None,
    }
    return {s: None if t is None else (layers * t + costs.head(batch)) / 1e6 for s, t in times.items()}


def diagram(costs: Costs, batches: Sequence[int], links: Sequence[float], memories: Sequence[float], capacity: int,
            rates: Callable[[int], Rates], forecast: Callable[[Costs, int], float | None] = lambda *_: None) -> list[Point]:  # fmt: skip
    """All places: links (GB/s to the card) and memories (GB/s of the host), each for every batch. rates: by batch. forecast: milliseconds
    of a step with forecasts, of a run with these costs; None where there is none."""
    out = []
    for link in links:
        for memory in memories:
            changed = replace(costs, device=replace(costs.device, link=link), host=replace(costs.host, memory=memory))
            for n in batches:
                times = step_times(changed, n, capacity, rates(n)) | {"forecast": forecast(changed, n)}
                out.append(Point(n, link, memory, times))
    return out
