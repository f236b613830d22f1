"""Where which scheme wins: a phase diagram over batch, link and memory, for one published model (all times from `timing.Costs`).

Four ways to decode a step of n tokens with a mixture of experts: everything on the card; experts computed on the host; the used experts
copied anew each time (ggml's rule); a cache of experts, whose misses are copied while the device computes what it can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.expertflow.timing import Costs
from workbench.moe.configs import expected_distinct

SCHEMES = ("resident", "host", "used experts", "cache")


class Point(NamedTuple):
    """One place in the diagram: milliseconds of a step per scheme (None: does not fit), and the winner."""

    batch: int
    link: float
    memory: float
    times: dict[str, float | None]

    @property
    def winner(self) -> str:
        """The fastest that fits."""
        return min((t, s) for s, t in self.times.items() if t is not None)[1]


def step_times(costs: Costs, batch: int, capacity: int, hit_rate: float, distinct: float | None = None) -> dict[str, float | None]:
    """Milliseconds of a decode step of `batch` tokens.

    capacity: bytes of the card for experts; hit_rate: of a cache of that size. distinct: experts of a layer that a batch uses (default:
    as if routes were drawn at random). A cache computes what is there while the misses come; the first miss is waited for.
    """
    shape = costs.shape
    n_expert, k, layers = shape.router.n_expert, shape.router.n_used, shape.n_moe
    used = expected_distinct(n_expert, k, batch) if distinct is None else distinct
    rows = max(1, round(batch * k / used))
    before, each = costs.attention(batch) + costs.ids(batch), costs.expert(rows)
    misses = used * (1 - hit_rate)
    waits = misses * costs.load + (each if misses else 0)
    times: dict[str, float | None] = {
        "resident": costs.attention(batch) + used * each if capacity >= layers * n_expert * costs.expert_bytes else None,
        "host": before + used * costs.on_host(rows),
        "used experts": before + used * costs.load + each,
        "cache": before + max(used * each, waits) if capacity >= layers * k * costs.expert_bytes else None,
    }
    return {s: None if t is None else (layers * t + costs.head(batch)) / 1e6 for s, t in times.items()}


def diagram(costs: Costs, batches: Sequence[int], links: Sequence[float], memories: Sequence[float], capacity: int,
            hit_rate: Callable[[int], float]) -> list[Point]:  # fmt: skip
    """All places: links (GB/s to the card) and memories (GB/s of the host), each for every batch. hit_rate: of the cache, by batch."""
    out = []
    for link in links:
        for memory in memories:
            changed = replace(costs, device=replace(costs.device, link=link), host=replace(costs.host, memory=memory))
            out += [Point(n, link, memory, step_times(changed, n, capacity, hit_rate(n))) for n in batches]
    return out
