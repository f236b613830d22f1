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
    """How fast a cache of experts could be at most (None: it cannot run), and the verdict in a sentence."""

    bound: Bound | None
    sentence: str


def verdict(found: Fit) -> Verdict | None:
    """The verdict for a model whose experts do not all fit on the card; None where they do, there are none, or nothing fits.

    A bound like the others of `fit`: bytes of the misses over the link, everything else hidden.
    """
    needs = {need.what.split(",")[0].split(" (")[0]: need.nbytes for need in found.needs}
    experts, active = needs["all experts"], needs["experts of one token"]
    if found.fits != "split" or not experts or not active:
        return None
    room = next(c.available - c.needed for c in found.checks if c.question.startswith("all except"))
    host = max(b.tokens_per_second for b in found.bounds if b.over == "memory of the host")
    if room < active:
        return Verdict(None, "ExpertFlow: the card has no room for the experts of a token in every layer, so no cache of them can run.")
    share = min(room / experts, 1.0)
    name, hits = _recorded(share, active / experts)
    copied = next(b for b in found.bounds if b.over == "link")
    dense_seconds = 1 / copied.tokens_per_second - copied.nbytes / copied.bandwidth
    missed = active * (1 - hits)
    seconds = max(missed / copied.bandwidth + dense_seconds, 1e-12)
    bound = Bound(f"a cache of {share:.0%} of the experts, {hits:.0%} hits (LFU on {name}'s recorded routes)", 1 / seconds, missed,
                  copied.bandwidth, "link")  # fmt: skip
    pays = bound.tokens_per_second > host
    needed = 1 - max(0.0, (1 / host - dense_seconds)) * copied.bandwidth / active
    could, does = (_speed(t) for t in (bound.tokens_per_second, host))
    more = "" if pays else f" It would take {needed:.0%} hits to draw level." if needed < 1 else ""
    return Verdict(bound, f"ExpertFlow: {'pays' if pays else 'does not pay'}: an expert cache could reach {could} "
                   f"tokens/s, experts computed on the host {does}.{more}")  # fmt: skip


def _recorded(share: float, density: float) -> tuple[str, float]:
    """The shipped trace whose k / E is nearest, and LFU's hit rate on a part of it, one pool with this share of its experts."""
    if not 0 < share <= 1:
        raise ParameterError(f"a share of {share} of the experts", "above 0, at most 1")
    traces = {name: _trace(name) for name in SAMPLES}
    name = min(SAMPLES, key=lambda n: abs(traces[n].k / traces[n].n_expert - density))
    trace = traces[name]
    slots = max(trace.k, int(share * trace.n_layers * trace.n_expert))
    return name, replay(trace, "lfu", slots, "global").hit_rate


@lru_cache(maxsize=len(SAMPLES))
def _trace(name: str) -> RouteTrace:
    """A part of a shipped trace, read once."""
    trace = sources.load(name).trace
    return trace.select(trace.sequences % 8 == 0)


def _speed(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.3g}"
