"""Token scheduling: tokens of several requests wait for each other in queues, one per expert (the seed's sections 3.3 and 4.3).

The unit is a micro-batch of several requests in one layer. A token with k experts stands in k queues of its layer and is joined from
their results before its sequence goes on; a sequence has one token on its way at a time, so a single stream finds nobody to wait for.

`TokenQueues` only decides. Who computes, and what time it is, is somebody else's business: `serving` runs it over recorded routes with the
costs of a published model, `segments` over real tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from workbench.errors import ParameterError
from workbench.expertflow.costs import Costs

FOREVER = 1 << 62


class Waiting(NamedTuple):
    """A token in a queue: its number, which of its k experts this is, and since when it waits."""

    token: int
    rank: int
    since: int


class Batch(NamedTuple):
    """Tokens that one expert computes together, and why now: "waited", "full", "pays" or "idle"."""

    layer: int
    expert: int
    tokens: tuple[Waiting, ...]
    cause: str


@dataclass(frozen=True)
class Limits:
    """When a queue is served.

    capacity: tokens in a queue; one that is full is served at once. max_wait: nanoseconds that a token may wait, counted from the
    oldest in the queue. threshold: tokens from which an expert that is not resident is worth its load (None: from the costs, see
    `worthwhile`). merge: most queues of a layer that are served in one go where all are short.
    """

    capacity: int = 32
    max_wait: int = 10_000_000
    threshold: int | None = None
    merge: int = 1

    def __post_init__(self) -> None:
        numbers = (self.capacity, 1), (self.max_wait, 0), (self.merge, 1), (1 if self.threshold is None else self.threshold, 1)
        if not all(isinstance(n, int | np.integer) and n >= least for n, least in numbers):
            raise ParameterError(f"capacity={self.capacity}, max_wait={self.max_wait}, threshold={self.threshold}, merge={self.merge}",
                                 "whole numbers: a capacity, a threshold and a number of queues of 1 or more, a wait of 0 ns or more",
                                 "max_wait=batching.FOREVER waits as long as there is something else to do")  # fmt: skip


LATENCY = Limits(capacity=8, max_wait=0)
"""Nobody waits: a queue is served as soon as the device is free (the seed's latency class)."""
THROUGHPUT = Limits(capacity=64, max_wait=FOREVER, merge=4)
"""Waiting is free: queues fill up as long as there is anything else to do (the seed's throughput class)."""


def worthwhile(costs: Costs, most: int = 4096) -> int:
    """The fewest tokens B with B · T_compute(B) > T_load, where T_compute(B) is the time per token in a batch of B (the seed's rule).

    B · T_compute(B) is the time of the whole batch, so this is the batch whose computation hides the next load. At most `most`, where
    even that is not enough.
    """
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if costs.expert(middle) > costs.load else (middle + 1, high)
    return low


class Readings:
    """Measured times of loads and batches, the last `window` of each, and the limits that follow from them (adaptation at run time)."""

    def __init__(self, window: int = 64) -> None:
        self.loads: deque[float] = deque(maxlen=window)  # ns
        self.batches: deque[tuple[int, float]] = deque(maxlen=window)  # (tokens, ns)

    def loaded(self, n: int, ns: float) -> None:
        """A batch of `n` tokens took `ns`, the load of its expert included: what is beyond a batch without one was the load."""
        if self.batches:
            start, slope = self._line()
            self.loads.append(max(0.0, ns - start - slope * n))

    def _line(self) -> tuple[float, float]:
        """A straight line through the batches: nanoseconds of one without tokens, and of each token more."""
        n, ns = np.array(self.batches, float).T
        slope = float(np.cov(n, ns, bias=True)[0, 1] / n.var()) if n.var() else 0.0
        return float(ns.mean() - slope * n.mean()), slope

    def threshold(self, most: int = 4096) -> int | None:
        """The fewest tokens whose batch takes longer than a load: the median load, and a straight line through the batches.

        None before there is a load and batches of two sizes; `most` where larger batches take no longer, as far as measured.
        """
        if not self.loads or len({n for n, _ in self.batches}) < 2:
            return None
        (start, slope), load = self._line(), float(np.median(self.loads))
        if load < start + slope:
            return 1
        return most if slope <= 0 else max(1, min(most, int((load - start) / slope) + 1))

    def limits(self, base: Limits, free: int, row_bytes: int, n_queues: int) -> Limits:
        """`base` with the threshold that was measured, and a capacity for which `free` bytes have room in all queues; never below 1."""
        return replace(base, threshold=self.threshold() or base.threshold, capacity=max(1, free // (row_bytes * n_queues)))


class Announced:
    """What forecasts say of tokens on their way: the experts that layers to come will be asked for. It stands until the token is there
    or withdrawn, so that queues of announced experts, and these experts, can get resources first (the seed's section 3.3)."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, int], Mapping[int, float]] = {}  # (token, layer) -> expert -> probability
        self._sums: dict[tuple[int, int], float] | None = None

    def say(self, token: int, layer: int, scores: Mapping[int, float]) -> None:
        """A token will want these experts of a layer, each with a probability."""
        self._said[token, layer], self._sums = scores, None

    def arrived(self, token: int, layer: int) -> None:
        """The layer's router has spoken: what was said of it is past."""
        if self._said.pop((token, layer), None) is not None:
            self._sums = None

    def forget(self, token: int) -> None:
        """The token does not come."""
        self._said, self._sums = {key: said for key, said in self._said.items() if key[0] != token}, None

    @property
    def sums(self) -> dict[tuple[int, int], float]:
        """Tokens expected at each (layer, expert)."""
        if self._sums is None:
            self._sums = {}
            for (_, layer), scores in self._said.items():
                for expert, p in scores.items():
                    self._sums[layer, expert] = self._sums.get((layer, expert), 0.0) + p
        return self._sums

    def wanted(self, layer: int, expert: int) -> float:
        """Tokens expected there."""
        return self.sums.get((layer, expert), 0.0)

    def missing(self, there: Callable[[int, int], bool]) -> tuple[int, int] | None:
        """The (layer, expert) that most tokens are expected at, of those that are not there; None where all are."""
        found = [(-n, key) for key, n in self.sums.items() if not there(*key)]
        return min(found)[1] if found else None


class TokenQueues:
    """A queue for each expert of each layer, and the rules by which they are served.

    k: experts of a token; resident: asked whether (layer, expert) is in a slot; wanted: asked how likely it is to be used soon, for which
    of two equals comes first. longest_wait, waited: of the tokens served so far, the longest, and all of them together.
    """

    def __init__(self, limits: Limits, k: int, threshold: int, resident: Callable[[int, int], bool] = lambda layer, expert: False,
                 wanted: Callable[[int, int], float] = lambda layer, expert: 0.0) -> None:  # fmt: skip
        self.limits, self.k, self.resident, self.wanted = limits, k, resident, wanted
        self.threshold = limits.threshold or threshold
        if k < 1 or self.threshold < 1:
            raise ParameterError(f"k={k}, threshold={self.threshold}", "1 or more experts of a token, and tokens that are worth a load")
        self.queues: dict[tuple[int, int], deque[Waiting]] = {}
        self.missing: dict[int, int] = {}  # token -> results still to come
        self.longest_wait = self.waited = 0

    def adapt(self, limits: Limits) -> None:
        """Other limits from now on, those of `Readings` for example; whoever waits stays where it is."""
        self.limits, self.threshold = limits, limits.threshold or self.threshold

    @property
    def n_waiting(self) -> int:
        """Places in queues that are taken."""
        return sum(map(len, self.queues.values()))

    def lengths(self) -> dict[tuple[int, int], int]:
        """Tokens in each queue that has any."""
        return {key: len(q) for key, q in self.queues.items()}

    def add(self, token: int, layer: int, experts: Sequence[int], now: int) -> None:
        """A token stands in the queues of its experts. Raises ParameterError for one that waits already, or for other than k experts."""
        if token in self.missing or len(set(experts)) != self.k:
            raise ParameterError(f"token {token} with experts {list(experts)}", f"{self.k} different experts, and one layer at a time",
                                 "a token goes on when it was joined")  # fmt: skip
        self.missing[token] = self.k
        for rank, expert in enumerate(experts):
            self.queues.setdefault((layer, int(expert)), deque()).append(Waiting(token, rank, now))

    def cancel(self, token: int) -> None:
        """A request is withdrawn: its token leaves all queues, and late results of it are dropped."""
        self.missing.pop(token, None)
        for key in list(self.queues):
            left = deque(w for w in self.queues[key] if w.token != token)
            if left:
                self.queues[key] = left
            else:
                del self.queues[key]

    def done(self, tokens: Iterable[int]) -> list[int]:
        """Results of one expert are there; the tokens whose last result that was, which are joined now."""
        joined = []
        for token in tokens:
            if token not in self.missing:
                continue  # withdrawn meanwhile
            self.missing[token] -= 1
            if not self.missing[token]:
                del self.missing[token]
                joined.append(token)
        return joined

    def due(self) -> int:
        """When the next token has waited as long as it may; FOREVER where nobody waits for that."""
        if self.limits.max_wait >= FOREVER or not self.queues:
            return FOREVER
        return min(q[0].since for q in self.queues.values()) + self.limits.max_wait

    def next(self, now: int, idle: bool) -> list[Batch]:
        """What to serve now: one queue, or several short ones of a layer; nothing where waiting is better.

        Whoever has waited too long comes first, the oldest of them; then full queues; then those that pay: of resident experts, or as
        long as the threshold; what is wanted soon first, then the longest. idle: nothing else can be done, so waiting gains nothing.
        """
        queues = self.queues
        if not queues:
            return []
        oldest = min(queues, key=lambda key: (queues[key][0].since, key))
        if self.limits.max_wait < FOREVER and now - queues[oldest][0].since >= self.limits.max_wait:
            return self._serve(oldest, "waited", now)
        full = [key for key in queues if len(queues[key]) >= self.limits.capacity]
        pays = [key for key in queues if len(queues[key]) >= (1 if self.resident(*key) else self.threshold)]
        for keys, cause in ((full, "full"), (pays, "pays"), (list(queues) if idle else [], "idle")):
            if keys:
                return self._serve(min(keys, key=self._place), cause, now)
        return []

    def _place(self, key: tuple[int, int]) -> tuple[float, ...]:
        """Lowest first: resident, wanted soon, long, old."""
        queue = self.queues[key]
        return (not self.resident(*key), -self.wanted(*key), -len(queue), queue[0].since, *key)

    def _serve(self, first: tuple[int, int], cause: str, now: int) -> list[Batch]:
        keys = [first]
        if self.limits.merge > 1 and len(self.queues[first]) < self.threshold:
            short = [key for key in self.queues if key[0] == first[0] and key != first and len(self.queues[key]) < self.threshold]
            keys += sorted(short, key=lambda key: (-len(self.queues[key]), key))[: self.limits.merge - 1]
        return [self._take(key, cause if key == first else "merged", now) for key in keys]

    def _take(self, key: tuple[int, int], cause: str, now: int) -> Batch:
        queue = self.queues[key]
        tokens = tuple(queue.popleft() for _ in range(min(len(queue), self.limits.capacity)))
        if not queue:
            del self.queues[key]
        waits = [now - w.since for w in tokens]
        self.longest_wait, self.waited = max([self.longest_wait, *waits]), self.waited + sum(waits)
        return Batch(*key, tokens, cause)
