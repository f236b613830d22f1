"""Whether an expert cache would pay for a model on a card: the ExpertFlow line of `fit`.

The hit rate of a cache depends on the router and cannot be read from a file. So it is taken from the recorded routes that come nearest,
at the same share of experts in slots, and the line says so.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from workbench.errors import ParameterError
from workbench.expertflow import sources
from workbench.expertflow.replay import replay
from workbench.models.fitting import Bound, Fit
from workbench.moe import RouteTrace

SAMPLES = ("tiny-mixtral", "tiny-deepseek")


class Verdict(NamedTuple):
    """How fast a cache of experts could be at most, with misses that cross the link, and with misses computed on the host (None: it cannot
    run); and the verdict in a sentence."""

    bound: Bound | None
    hybrid: Bound | None
    sentence: str


def verdict(found: Fit) -> Verdict | None:
    """The verdict for a model whose experts do not all fit on the card; None where they do, there are none, or nothing fits.

    Bounds like the others of `fit`: bytes of the misses over the link, or through the host's memory, everything else hidden. Forecasts
    only decide what is a miss, and a copy reads the host's memory as well: so they stay below the second one with these hits.
    """
    needs = {need.what.split(",")[0].split(" (")[0]: need.nbytes for need in found.needs}
    experts, active = needs["all experts"], needs["experts of one token"]
    if found.fits != "split" or not experts or not active:
        return None
    room = next(c.available - c.needed for c in found.checks if c.question.startswith("all except"))
    host, memory = max((b.tokens_per_second, b.bandwidth) for b in found.bounds if b.over == "memory of the host")
    if room < active:
        return Verdict(None, None, "ExpertFlow: the card has no room for the experts of a token in every layer: no cache of them can run.")
    share = min(room / experts, 1.0)
    name, policy, hits = _recorded(share, active / experts)
    copied = next(b for b in found.bounds if b.over == "link")
    dense_seconds = 1 / copied.tokens_per_second - copied.nbytes / copied.bandwidth
    missed = active * (1 - hits)

    def bound(way: str, bandwidth: float, over: str) -> Bound:
        return Bound(way, 1 / max(missed / bandwidth + dense_seconds, 1e-12), missed, bandwidth, over)

    way = f"a cache of {share:.0%} of the experts, {hits:.0%} hits ({policy} on {name}'s recorded routes)"
    alone = bound(way, copied.bandwidth, "link")
    hybrid = bound("the same cache, its misses computed on the host", memory, "memory of the host")
    needed = 1 - max(0.0, (1 / host - dense_seconds)) * copied.bandwidth / active
    could, both, does = (_speed(t) for t in (alone.tokens_per_second, hybrid.tokens_per_second, host))
    pays = ["pays" if b.tokens_per_second > host else "does not pay" for b in (alone, hybrid)]
    more = f" (it would take {needed:.0%} hits to draw level)" if pays[0] != "pays" and needed < 1 else ""
    return Verdict(alone, hybrid, f"ExpertFlow: a cache whose misses cross the link {pays[0]}: at most {could} tokens/s, experts computed "
                   f"on the host {does}{more}. With its misses computed on the host it {pays[1]}: at most {both}.")  # fmt: skip


@lru_cache(maxsize=64)
def _recorded(share: float, density: float) -> tuple[str, str, float]:
    """The shipped trace whose k / E is nearest, and the better of LRU's and LFU's hit rates on a part of it, with one pool of this
    share of its experts."""
    if not 0 < share <= 1:
        raise ParameterError(f"a share of {share} of the experts", "above 0, at most 1")
    traces = {name: _trace(name) for name in SAMPLES}
    name = min(SAMPLES, key=lambda n: abs(traces[n].k / traces[n].n_expert - density))
    trace = traces[name]
    slots = max(trace.k, int(share * trace.n_layers * trace.n_expert))
    hits, policy = max((replay(trace, policy, slots, "global").hit_rate, policy.upper()) for policy in ("lru", "lfu"))
    return name, policy, hits


@lru_cache(maxsize=len(SAMPLES))
def _trace(name: str) -> RouteTrace:
    """A part of a shipped trace, read once."""
    trace = sources.load(name).trace
    return trace.select(trace.sequences % 8 == 0)


def _speed(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.3g}"
