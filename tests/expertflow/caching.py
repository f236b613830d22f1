"""Slow definitions of what the cache policies do, by the text of their definitions, and small random traces."""

import itertools
from fractions import Fraction
from functools import lru_cache

import numpy as np

from workbench.moe import RouteTrace


def trace_of(experts, n_expert=None, sequences=None):
    """experts: (layers, tokens, k)."""
    experts = np.asarray(experts)
    n_layers, n, _ = experts.shape
    sequences = np.zeros(n, np.int32) if sequences is None else np.asarray(sequences, np.int32)
    positions = np.concatenate([np.arange((sequences == s).sum()) for s in dict.fromkeys(sequences.tolist())] or [[]]).astype(np.int32)
    return RouteTrace(experts.astype(np.uint16), np.full(experts.shape, np.nan, np.float32), np.arange(n_layers), np.zeros(n, np.int32),
                      positions, sequences, int(experts.max(initial=0)) + 1 if n_expert is None else n_expert)


def random_trace(rng, n_layers=1, n_tokens=20, n_expert=6, k=2):
    p = 1 / np.arange(1, n_expert + 1) ** rng.random()
    score = np.log(p) + rng.gumbel(size=(n_layers, n_tokens, n_expert))
    return trace_of(np.argsort(-score, -1)[..., :k], n_expert)


def simulate(steps, slots, policy, weight=0):
    """Hits and loads of one cache, as `models/tools/make_traces.py` writes it: hits are counted first, no key of a step is evicted for
    another, of equals the lowest goes. `lru_frequency` ranks by time and uses; `lfu_in_cache` forgets counts with the eviction."""
    after, ahead = [None] * len(steps), {}
    for i in range(len(steps) - 1, -1, -1):
        after[i] = {x: ahead.get(x, len(steps)) for x in steps[i]}
        ahead.update(dict.fromkeys(steps[i], i))
    last, count, when, cache, hits, loads, now = {}, {}, {}, set(), 0, [], 0
    rank = {"lru": lambda x: last[x], "lfu": lambda x: (count[x], last[x]), "lfu_in_cache": lambda x: (count[x], last[x]),
            "lru_frequency": lambda x: (last[x] + weight * count[x], last[x]), "belady": lambda x: -when[x]}[policy]
    for i, need in enumerate(steps):
        hits += sum(x in cache for x in need)
        for x in sorted(need):
            count[x], last[x], now = count.get(x, 0) + 1, now, now + 1
        when.update(after[i])
        for x in sorted(need):
            if x not in cache:
                if len(cache) >= slots:
                    gone = min(sorted(cache - set(need)), key=rank)
                    cache.remove(gone)
                    if policy == "lfu_in_cache":
                        count[gone] = 0
                cache.add(x)
                loads.append(x)
    return hits, loads


def optimum(steps, slots_of, group_of, rate, together):
    """The most hits that any choice of evictions and prefetches can reach: all of them are tried.

    steps: tuples of keys; group_of: key -> group; slots_of: group -> slots. After key number j was computed with, floor((j+1) rate) -
    floor(j rate) loads may be made; keys of the step that are still to be computed with stay.
    """
    rate, universe = Fraction(rate).limit_denominator(1000), sorted({k for s in steps for k in s})
    starts = [0, *itertools.accumulate(map(len, steps))]

    def room(resident, key):
        return sum(group_of(k) == group_of(key) for k in resident) < slots_of(group_of(key))

    def ways(resident, key, busy):
        """Every way to put a key in."""
        if key in resident:
            return [resident]
        if room(resident, key):
            return [resident | {key}]
        return [resident - {v} | {key} for v in resident - busy if group_of(v) == group_of(key)]

    @lru_cache(None)
    def step(i, resident):
        if i == len(steps):
            return 0
        if not together:
            return key(i, 0, resident)
        needed, found = frozenset(steps[i]), {resident}
        for k in steps[i]:
            found = {new for old in found for new in ways(old, k, needed)}
        return len(needed & resident) + max(links(i, 0, new) for new in found)

    @lru_cache(None)
    def key(i, j, resident):
        if j == len(steps[i]):
            return step(i + 1, resident)
        k = steps[i][j]
        if together:
            return links(i, j, resident)
        return (k in resident) + max(links(i, j, new) for new in ways(resident, k, frozenset()))

    def links(i, j, resident):
        n = starts[i] + j
        return load(i, j, resident, int((n + 1) * rate) - int(n * rate))

    @lru_cache(None)
    def load(i, j, resident, left):
        if not left:
            return key(i, j + 1, resident)
        busy = frozenset(steps[i][j:]) if together else frozenset(steps[i][j : j + 1])
        return max([load(i, j, resident, left - 1)] + [load(i, j, new, left - 1) for k in universe if k not in resident
                                                       for new in ways(resident, k, busy)])

    return step(0, frozenset())
