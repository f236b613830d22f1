"""Cache policies: which expert goes when another one needs its slot, and which ones come before they are needed.

A `Cache` is a number of slots that may replace one another. `serve(steps)` takes the experts that are needed, step by step, and
yields what it decides as plain tuples (kind, key, cause): "hit", "load", "evict", and with predictions "demote" and "drop". It reads no
further than it has decided, so a replay drains a whole trace, a stepper takes one event at a time, and an engine feeds one
step at a time: there is one function for all three. `workbench.expertflow.cache` is the door with layers and experts instead of keys.

Experts that a step needs are never victims of the same step. Uses within one step count as equally recent; of equals the lowest
number goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np

from workbench.errors import ParameterError

Event = tuple[str, int, str]
"""kind, key, cause."""
Due = tuple[int, float]
"""When a predicted expert is needed: the step, and minus the probability."""
ALWAYS = 1 << 62
"""A window that holds every future."""


class Cache:
    """Slots that may replace one another (the base; a subclass says who goes first).

    resident: the keys that are in; uses, last: how often each key was used and at which access; busy: keys in use by a step that
    is still computed. Keys are whole numbers below n_keys.
    """

    cause = ""
    touch: Callable[[int], Any] | None = None

    def __init__(self, slots: int, n_keys: int) -> None:
        self.slots, self.now = slots, 0
        self.resident: dict[int, Any] = {}
        self.uses, self.last = [0] * n_keys, [0] * n_keys
        self.fetched: set[int] = set()
        self.busy: Collection[int] = ()

    def serve(self, steps: Iterable[Sequence[int]], together: bool = True, tell_hits: bool = True) -> Iterator[Event]:
        """A hit for each key that is in, a load for each that is not. The keys of a step are different, and needed at the same time; where
        they are not `together`, one after another, and steps mean nothing.

        Without `tell_hits` the hits are left out, which is faster: they are the accesses that were no loads.
        """
        resident, uses, last, fetched, slots = self.resident, self.uses, self.last, self.fetched, self.slots
        touch, admit, replace, now = self.touch, self.admit, self.replace, self.now
        try:
            for needed in steps:
                busy = needed if together else ()
                for key in needed:
                    uses[key] += 1
                    last[key] = now
                    now += 1
                    if key in resident:
                        if touch is not None:
                            touch(key)
                        if tell_hits:
                            yield "hit", key, "prefetched" if key in fetched else "resident"
                            fetched.discard(key)
                    elif len(resident) < slots:
                        admit(key)
                        yield "load", key, "missed"
                    else:
                        self.now = now
                        victim = replace(key, busy)
                        if victim is not None:
                            yield "evict", victim, self.cause
                        yield "load", key, "missed" if key in resident else "staged"
        finally:
            self.now = now

    def admit(self, key: int) -> None:
        """A free slot takes a key."""
        self.resident[key] = None

    def replace(self, new: int, busy: Collection[int]) -> int | None:
        """Put `new` in the place of the key that goes first, and return that; busy keys stay. None: `new` passes through."""
        raise NotImplementedError

    def resize(self, slots: int) -> Iterator[Event]:
        """From now on there are `slots`: who goes first by the policy is evicted until the rest fits. Busy keys stay."""
        while len(self.resident) > slots:
            victim = self.replace(-1, self.busy)  # -1 is nobody's key: it takes the place of the victim and leaves at once
            self.remove(-1)
            if victim is None:  # nobody may go by the policy: the highest of those that are not busy
                victim = max((key for key in self.resident if key not in self.busy), default=None)
            if victim is None:
                break
            self.remove(victim)
            yield "evict", victim, "fewer slots"
        self.slots = slots

    def remove(self, key: int) -> None:
        """A key is in no slot any more, for reasons from outside."""
        self.resident.pop(key, None)
        self.fetched.discard(key)

    def done(self, *keys: int) -> None:
        """Keys were computed with: their slots may be taken."""
        self.busy = [k for k in self.busy if k not in keys]

    def preload(self) -> Iterator[Event]:
        """What is loaded before anything is needed."""
        yield from ()

    def upcoming(self) -> Due | None:
        """When what an idle link should bring next will be needed; None: nothing."""
        return None

    def prefetch(self) -> Iterator[Event]:
        """The link is idle: at most one load."""
        yield from ()


class Recency(Cache):
    """LRU: the least recently used goes first."""

    cause = "least recently used"

    def __init__(self, slots: int, n_keys: int) -> None:
        super().__init__(slots, n_keys)
        self.resident: OrderedDict[int, None] = OrderedDict()
        self.touch = self.resident.move_to_end

    def replace(self, new: int, busy: Collection[int]) -> int | None:
        """The first in the order of use that is not busy."""
        resident = self.resident
        for key in resident:
            if key not in busy:
                break
        del resident[key]
        resident[new] = None
        return key


class Frequency(Cache):
    """LFU: the least often used goes first, of equals the least recently used.

    in_cache: a count ends with the eviction. weight: LRU+frequency instead, where each use ever made counts like so many accesses
    of recency (0 is LRU, and with a large weight it is LFU); counts then age, since every rank falls behind the present.
    The heap holds what each key's rank was; ranks only grow, so a key that comes up with an old rank is put back with its new one.
    """

    def __init__(self, slots: int, n_keys: int, in_cache: bool = False, weight: int | None = None) -> None:
        super().__init__(slots, n_keys)
        self.in_cache, self.weight = in_cache, weight
        self.cause = "least often used" if weight is None else "long unused and seldom used"
        self.heap: list[tuple[int, int, int]] = []

    def _rank(self, key: int) -> tuple[int, int, int]:
        at, uses = self.last[key], self.uses[key]
        return (uses if self.weight is None else at + self.weight * uses), at, key

    def admit(self, key: int) -> None:
        """A free slot takes a key."""
        self.resident[key] = None
        heappush(self.heap, self._rank(key))

    def replace(self, new: int, busy: Collection[int]) -> int | None:
        """The lowest rank that is not busy."""
        heap, last, uses, weight, resident, aside = self.heap, self.last, self.uses, self.weight, self.resident, None
        _, at, key = heap[0]
        while at != last[key] or key in busy:
            if at == last[key]:
                aside = [heappop(heap), *(aside or ())]
            else:
                at = last[key]
                heapreplace(heap, (uses[key] if weight is None else at + weight * uses[key], at, key))
            _, at, key = heap[0]
        at = last[new]
        heapreplace(heap, (uses[new] if weight is None else at + weight * uses[new], at, new))
        for entry in aside or ():
            heappush(heap, entry)
        del resident[key]
        resident[new] = None
        if self.in_cache:
            uses[key] = 0
        return key

    def remove(self, key: int) -> None:
        """A key is in no slot any more, for reasons from outside."""
        super().remove(key)
        self.heap = sorted(entry for entry in self.heap if entry[2] != key)


class HotSet(Cache):
    """A static hot set: `hot` stays for ever. Other experts pass through a staging buffer that is not counted among the slots."""

    def __init__(self, slots: int, n_keys: int, hot: Sequence[int]) -> None:
        super().__init__(0, n_keys)  # none is ever free
        self.hot = tuple(hot)[:slots]

    def preload(self) -> Iterator[Event]:
        """The hot set."""
        for key in self.hot:
            self.resident[key] = None
            yield "load", key, "hot set"

    def replace(self, new: int, busy: Collection[int]) -> int | None:
        """Nobody goes."""
        if new in self.hot:
            self.resident[new] = None
        return None

    def resize(self, slots: int) -> Iterator[Event]:
        """Fewer slots make a smaller hot set; more make no larger one."""
        for key in self.hot[slots:]:
            if key in self.resident:
                self.remove(key)
                yield "evict", key, "fewer slots"
        self.hot = self.hot[:slots]


class Belady(Cache):
    """Belady's optimum: who is needed last goes first. future: all keys in the order of their accesses.

    With `window`, an idle link also brings what is missing next, up to so many steps ahead (an oracle that prefetches).
    steps: the step of each access (default: every access is one).
    """

    cause = "needed last"

    def __init__(self, slots: int, n_keys: int, future: Sequence[int] | np.ndarray, steps: Sequence[int] | None = None,
                 window: int = 0) -> None:  # fmt: skip
        super().__init__(slots, n_keys)
        # An access by every key comes before the future and one after it, so that each has a next one.
        owner = np.concatenate([np.arange(n_keys), np.asarray(future, np.int64), np.arange(n_keys)])
        self.owner, self.minus = owner.tolist(), (-next_uses(owner)).tolist()
        self.end, self.steps, self.window = len(owner) - n_keys, steps, window
        self.now = self._pushed = self._seen = n_keys
        self.last = list(range(n_keys))
        self.heap: list[int] = []  # minus the next access of each key that was accessed, and older ones

    def _farthest(self, busy: Collection[int], after: int = -1, new: int = -1) -> int | None:
        """Take out the key that is needed last, where that is later than access `after`; neither a busy one nor `new`."""
        heap, owner, last, minus, resident = self.heap, self.owner, self.last, self.minus, self.resident
        for due in minus[self._pushed : self.now]:
            heappush(heap, due)
        self._pushed = self.now
        if len(heap) > 4 * self.slots + 64:
            heap[:] = sorted(minus[last[key]] for key in (*resident, new) if key >= 0)
        aside: list[int] = []
        while heap and -heap[0] > after:
            due = heappop(heap)
            key = owner[-due]
            if key == new or key in busy:
                aside.append(due)
            elif key in resident and minus[last[key]] == due:
                break
        else:
            due = 0
        for other in aside:
            heappush(heap, other)
        if not due:
            return None
        del resident[key]
        self.fetched.discard(key)
        return key

    def remove(self, key: int) -> None:
        """A key is in no slot any more, for reasons from outside: it may be needed before what was found missing."""
        super().remove(key)
        self._seen = self.now

    def replace(self, new: int, busy: Collection[int]) -> int | None:
        """The farthest next use that is not busy."""
        if new >= 0 and (self.now > self.end or self.owner[self.now - 1] != new):
            raise ParameterError(f"key {new} at access {self.now - self.owner[-1] - 2}", "the future that Belady's policy was given")
        key = self._farthest(busy, new=new)
        self.resident[new] = None
        return key

    def upcoming(self) -> Due | None:
        """The first access ahead whose key is missing."""
        at, owner, resident, end = max(self._seen, self.now), self.owner, self.resident, self.end
        while at < end and owner[at] in resident:
            at += 1
        self._seen = at
        step = self._step
        return (step(at), 0.0) if self.window and at < end and step(at) <= step(self.now) + self.window else None

    def _step(self, access: int) -> int:
        at = access - len(self.last)
        return at if self.steps is None else self.steps[at]

    def prefetch(self) -> Iterator[Event]:
        """The next key that is missing takes a free slot, or that of a key needed later still."""
        if self.upcoming() is None:
            return
        at = self._seen
        key, full = self.owner[at], len(self.resident) >= self.slots
        victim = self._farthest(self.busy, at) if full else None
        if victim is not None:
            yield "evict", victim, self.cause
        if victim is not None or not full:
            self.resident[key] = None
            heappush(self.heap, -at)
            self.fetched.add(key)
            yield "load", key, "predicted"


def next_uses(keys: np.ndarray) -> np.ndarray:
    """For each access the number of the next one with the same key; of the last one of a key, its own."""
    order = np.argsort(keys, kind="stable")
    after = np.arange(len(keys))
    same = keys[order[1:]] == keys[order[:-1]]
    after[order[:-1][same]] = order[1:][same]
    return after


class Planned(Recency):
    """Prediction-aware eviction (the seed's): what is not predicted goes first, by recency; then what is predicted latest, least likely.

    A prefetch takes a free slot, or one whose expert is not in use and not predicted as soon; where there is none it is dropped. A
    prefetch that the router then does not want is demoted: it goes first.
    """

    def __init__(self, slots: int, n_keys: int) -> None:
        super().__init__(slots, n_keys)
        self.plan: dict[int, Due] = {}
        self.visits: dict[int, dict[int, float]] = {}
        self.present: dict[int, float] = {}

    def predict(self, due: int, scores: Mapping[int, float]) -> Iterator[Event]:
        """At step `due` these keys will be needed, each with a probability. Takes the place of what was predicted for that step."""
        before, self.visits[due] = self.visits.get(due, {}), dict(scores)
        self.replan()
        yield from self._unwanted(before, (), "not predicted any more")

    def replan(self) -> None:
        """Who is wanted, soonest and most likely first."""
        self.plan = {}
        for due in sorted(self.visits):
            for minus, key in self._chosen(due):
                self.plan.setdefault(key, (due, minus))

    def _chosen(self, due: int) -> list[tuple[float, int]]:
        """Minus the probability of each key, and the key: the most likely first."""
        return sorted([(-score, key) for key, score in self.visits[due].items()])

    def route(self, due: int, needed: Collection[int], together: bool = True) -> Iterator[Event]:
        """The router has spoken: what was predicted for this step and is not needed goes behind all others.

        What is needed is in use from now on or, where experts come one by one, wanted for certain until it is done.
        """
        predicted, self.busy = self.visits.pop(due, {}), needed if together else ()
        if not together:
            self.visits[due] = self.present = dict.fromkeys(needed, 1.0)
        self.replan()
        yield from self._unwanted(predicted, needed, "not routed")

    def _unwanted(self, keys: Iterable[int], needed: Collection[int], cause: str) -> Iterator[Event]:
        for key in keys:
            if key in needed or key in self.plan:
                continue
            if key in self.fetched:
                self.resident.move_to_end(key, last=False)
                yield "demote", key, cause
            elif key not in self.resident:
                yield "drop", key, cause

    def done(self, *keys: int) -> None:
        """Keys were computed with: their slots may be taken."""
        super().done(*keys)
        if [key for key in keys if self.present.pop(key, None) is not None]:
            self.replan()

    def replace(self, new: int, busy: Collection[int]) -> int | None:
        """See the class; `new` is needed now."""
        key = self._spare(busy, (-1, 0.0))
        self.resident[new] = None
        return key

    def _spare(self, busy: Collection[int], after: Due) -> int | None:
        plan, latest = self.plan, None
        for key in self.resident:
            if key in busy:
                continue
            due = plan.get(key)
            if due is None:
                self.cause = "demoted" if key in self.fetched else "not predicted"
                break
            if due > after:
                latest, after = key, due
        else:
            if latest is None:
                return None
            key, self.cause = latest, "predicted latest"
        self.remove(key)
        return key

    def upcoming(self) -> Due | None:
        """The first of the plan that is missing."""
        for key, due in self.plan.items():
            if key not in self.resident:
                return due
        return None

    def prefetch(self) -> Iterator[Event]:
        """At most one load: of the first in the plan that is missing. Those for which there is no room are dropped."""
        for key, due in list(self.plan.items()):
            if key in self.resident:
                continue
            if len(self.resident) >= self.slots:
                victim = self._spare(self.busy, due)
                if victim is None:
                    del self.plan[key], self.visits[due[0]][key]
                    yield "drop", key, "no slot to spare"
                    continue
                yield "evict", victim, self.cause
            self.resident[key] = None
            self.fetched.add(key)
            yield "load", key, "predicted"
            return


class Allotted(Planned):
    """Predictive locality-aware caching (PLEC): slots are allotted to the layers ahead by what they are predicted to need.

    Layers take what they need in the order in which they come, so 4 slots meet needs of 3 and 2 with 3 and 1. A slot whose expert was
    computed with is free for the next in the plan, so nothing that waits for its turn is dropped.
    """

    def done(self, *keys: int) -> None:
        """Keys were computed with: their slots are for the next in the plan."""
        super().done(*keys)
        self.replan()

    def replan(self) -> None:
        """The plan holds as many as there are slots that nobody uses now."""
        due = sorted(self.visits)
        self.allotment = dict(zip(due, allot([len(self.visits[d]) for d in due], self.slots - len(self.busy))))
        super().replan()

    def _chosen(self, due: int) -> list[tuple[float, int]]:
        return super()._chosen(due)[: self.allotment[due]]


def allot(needs: Sequence[int], slots: int) -> list[int]:
    """Slots for each layer ahead, the next one first: what it needs, as long as there are slots."""
    out = []
    for n in needs:
        out.append(max(0, min(n, slots)))
        slots -= out[-1]
    return out
