"""The state of lesson 25: the seed's tuning case, the bench that re-enacts it, and its three listings as small functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from typing import Any

from workbench import models, widgets
from workbench.expertflow import sources, tuning
from workbench.expertflow.batching import Limits, TokenQueues
from workbench.expertflow.observe import record
from workbench.expertflow.timing import Costs, costs
from workbench.expertflow.tuning import Bench, Outcome, Settings

USED = 22e9
"""Bytes in use in the seed's case, of a card with 24 GB."""


class Lesson25:
    """English text through the tiny Mixtral's routers, with the bytes and operations of Mixtral-8x7B in f16 on an RTX 3090."""

    claims = (("as found", 85, 120), ("window 1 → 3 layers", 96, 75), ("queue 32 → 64 tokens", 96, 60), ("blocks 256 → 128 MB", 96, 55))
    """The seed's section 6.6: what was changed, prediction hits in %, ms per token."""
    knobs: dict[str, dict[str, Any]] = {"predictor": {"window": 3}, "queue": {"capacity": 8}, "pool": {"block": 128}}
    """What each change sets here. Eight requests cannot fill 32 places, so the queue goes from 4 to 8, the same ratio."""

    def costs(self, kind: str = "f16") -> Costs:
        """Mixtral-8x7B in a storage type."""
        return costs("Mixtral-8x7B", "rtx3090-pcie4", kind)

    def slots(self, kind: str = "f16") -> tuple[int, int]:
        """Expert slots that 22 GB leave beside the dense weights, and as many of them as the traced layers would have."""
        c = self.costs(kind)
        dense = (c.shape.total - c.shape.n_moe * c.shape.router.n_expert * c.shape.expert) * c.expert_bytes / c.shape.expert
        n = int((USED - dense) // c.expert_bytes)
        return n, n * self.trace.n_layers // c.shape.n_moe

    @cached_property
    def trace(self) -> Any:
        """The shipped routes of the tiny Mixtral."""
        return sources.load("tiny-mixtral").trace

    @cached_property
    def seen(self) -> Any:
        """One English sequence, with hidden states."""
        with models.load("tiny-mixtral-f16") as model:
            return record(model, self.trace.select(self.trace.sequences == 20))

    def bench(self, kind: str = "f16") -> Bench:
        """The bench for a storage type, made once."""
        if kind not in self._benches:
            self._benches[kind] = Bench(self.seen, self.costs(kind), self.trace)
        return self._benches[kind]

    @cached_property
    def _benches(self) -> dict[str, Bench]:
        return {}

    def found(self, kind: str = "f16") -> Settings:
        """The case as the seed found it: one layer of window, short queues, blocks of 256 MB."""
        return Settings("predicted", self.slots(kind)[1], "gate", 1, 2, capacity=4, wait=20.0, block=256, scope="global")

    def run(self, settings: Settings, kind: str = "f16") -> Outcome:
        """One outcome, kept: the six orders share most of theirs."""
        key = settings, kind
        if key not in self._runs:
            self._runs[key] = self.bench(kind).run(settings)
        return self._runs[key]

    @cached_property
    def _runs(self) -> dict[Any, Outcome]:
        return {}

    def in_order(self, order: Sequence[str], kind: str = "f16") -> Iterator[tuple[str, Outcome]]:
        """The outcome as found, then after each knob of `order`."""
        settings = self.found(kind)
        yield "as found", self.run(settings, kind)
        for knob in order:
            settings = replace(settings, **self.knobs[knob])
            yield knob, self.run(settings, kind)

    def mean_gain(self, knob: str, kind: str = "f16") -> float:
        """Milliseconds that a knob takes off a stream's token, averaged over all orders; of times rounded to microseconds."""
        total = 0.0
        for order in self.orders:
            ms = [round(out.stream.per_token, 3) for _, out in self.in_order(order, kind)]
            total += ms[order.index(knob)] - ms[order.index(knob) + 1]
        return total / len(self.orders)

    @property
    def orders(self) -> list[tuple[str, ...]]:
        """All six."""
        return list(permutations(self.knobs))

    def symptoms(self, kind: str = "q4_0") -> list[tuning.Symptom]:
        """The table of symptoms on this bench."""
        return tuning.symptoms(self.bench(kind))

    @staticmethod
    def served_now(came: Sequence[int], now: int, limit: int) -> bool:
        """What the queues of lesson 23 say about a queue whose tokens came at these times."""
        queues = TokenQueues(Limits(capacity=64, max_wait=limit, threshold=64), 1, 64)
        for token, at in enumerate(came):
            queues.add(token, 0, [0], at)
        return bool(queues.next(now, idle=False))

    def dashboard(self, kind: str = "q4_0") -> Any:
        """All knobs."""
        return widgets.Dashboard(self.bench(kind))


# ---- what the seed's three listings do, in our words


class TriggerClock:
    """Timeouts as the seed's `TokenBuffer` has them: counted from the last time a queue was served, and at most one queue per look."""

    def __init__(self, n_experts: int, limit: int) -> None:
        self.queues: list[list[int]] = [[] for _ in range(n_experts)]
        self.served, self.limit = [0] * n_experts, limit

    def add(self, expert: int, now: int) -> None:
        """A token arrives."""
        self.queues[expert].append(now)

    def look(self, now: int) -> tuple[int, list[int]] | None:
        """(expert, when its tokens came) of the first queue whose clock has run out."""
        for expert, queue in enumerate(self.queues):
            if queue and now - self.served[expert] > self.limit:
                self.queues[expert], self.served[expert] = [], now
                return expert, queue
        return None


class ReservedBytes:
    """Memory as the seed's monitor reads it: what a caching allocator has taken from the device, which it keeps when tensors are freed."""

    def __init__(self, total: int) -> None:
        self.total, self.allocated, self.reserved = total, 0, 0

    def take(self, n: int) -> None:
        """A tensor needs memory."""
        self.allocated += n
        self.reserved = max(self.reserved, self.allocated)

    def give(self, n: int) -> None:
        """A tensor is freed: its bytes stay reserved."""
        self.allocated -= n

    @property
    def ratio(self) -> float:
        """What the listing holds against 0.9 and 0.7."""
        return self.reserved / self.total
