"""The tuning bench: every knob of ExpertFlow over one recorded text, answered by real runs in virtual time.

One stream shows cache, forecast and link (`timing`); several requests beside each other show queues (`serving`). Symptoms, the
counter that shows each, and the knob that helps are a table, and each row comes with settings that reproduce it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from workbench.errors import ParameterError, shown
from workbench.expertflow.batching import FOREVER, Limits
from workbench.expertflow.costs import Costs
from workbench.expertflow.fragments import blocks
from workbench.expertflow.observe import Seen
from workbench.expertflow.predictors import Frequency, GateAhead, Oracle, OrElse, Predictor
from workbench.expertflow.replay import Forecast, Stream, forecast_of, replay
from workbench.expertflow.scoring import top
from workbench.expertflow.serving import Served, serve
from workbench.expertflow.timing import Timed, simulate
from workbench.moe import RouteTrace
from workbench.trace import Trace

PREDICTORS = ("none", "frequency", "gate", "oracle")
RECORDED = 48
"""Tokens of a stream whose events a run keeps: to take all down would take longer than to draw them."""


@dataclass(frozen=True)
class Settings:
    """All knobs. slots: of each layer, or with scope "global" of all traced layers together; predictor: one of PREDICTORS; window: layers
    ahead; fetch: experts named per token; capacity, wait (ms, negative for ever), merge: of the queues; link: GB/s; block: MiB of the
    pool's blocks, 0 for slots of an expert's size; hidden: width of a network that predicts, 0 for a gate that is there already; hosted:
    a single stream's missing experts are computed on the host where that is quicker than a load; threshold: tokens that are worth a load
    to a queue, 0 for as many as hide it (`batching.worthwhile`)."""

    policy: str = "lru"
    slots: int = 4
    predictor: str = "none"
    window: int = 1
    fetch: int = 2
    capacity: int = 32
    wait: float = 0.0
    merge: int = 1
    link: float = 25.2
    block: int = 0
    scope: str = "layer"
    hidden: int = 0
    hosted: bool = False
    threshold: int = 0


class Outcome(NamedTuple):
    """What one setting gave: a single stream, several requests, recall and precision of the forecast (NaN without one), the record of
    the stream's first tokens, and the slots that the memory really holds."""

    settings: Settings
    stream: Timed
    served: Served
    recall: float
    precision: float
    record: Trace
    slots: int


@dataclass
class Bench:
    """One recorded text and one published configuration.

    seen: a run of the model, with hidden states for its gates; long: a trace with as many sequences as there are requests. Forecasts
    are made once per predictor, window and width.
    """

    seen: Seen
    costs: Costs
    long: RouteTrace
    n_tokens: int = 96
    n_requests: int = 8
    request_tokens: int = 3
    _forecasts: dict[tuple[str, int, int], Forecast] = field(default_factory=dict)
    _bounds: dict[int, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        routes = self.seen.routes
        self.stream = Stream(routes.select(np.arange(routes.n_tokens) < self.n_tokens))
        self.part = self._cut()

    def _cut(self) -> Seen:
        n = self.stream.trace.n_tokens
        return replace(self.seen, routes=self.stream.trace, states=self.seen.states[:, :n], inputs=self.seen.inputs[:, :n])

    def run(self, settings: Settings) -> Outcome:
        """Run it, with as many slots as a token has experts at least. Raises ParameterError for knobs that do not exist or make no
        sense."""
        if settings.predictor not in PREDICTORS:
            raise ParameterError(f"predictor {shown(settings.predictor)!r}", f"one of {', '.join(PREDICTORS)}")
        if not (0 < settings.link < np.inf and settings.wait < np.inf and settings.hidden >= 0):
            raise ParameterError(f"link={settings.link} GB/s, wait={settings.wait} ms, hidden={settings.hidden}",
                                 "a link above 0, a width of 0 or more, and numbers", "wait=-1 waits for ever")  # fmt: skip
        k, n_expert = self.stream.trace.k, self.stream.trace.n_expert
        n_layers = self.stream.trace.n_layers if settings.scope == "global" else 1
        slots = settings.slots if not settings.block else self._in_blocks(settings)
        slots = max(k, min(slots, n_expert * n_layers))
        costs = replace(self.costs, device=replace(self.costs.device, link=settings.link))
        wanted = self.forecast(settings)
        record = Trace("virtual")
        policy = settings.policy if wanted is not None or settings.policy not in ("predicted", "plec") else "lru"
        stream = simulate(self.stream, costs, policy, slots, scope=settings.scope, forecast=wanted, record=record, recorded=RECORDED,
                          host_below="auto" if settings.hosted else 0, thinking=costs.predictor(settings.hidden))  # fmt: skip
        limits = Limits(settings.capacity, FOREVER if settings.wait < 0 else int(settings.wait * 1e6),
                        settings.threshold or None, settings.merge)  # fmt: skip
        pool = slots if settings.scope == "global" else slots * self.stream.trace.n_layers
        served = serve(self.long, costs, limits, pool, n_requests=self.n_requests, n_tokens=self.request_tokens,
                       policy="lfu" if policy == "lfu" else "lru")  # fmt: skip
        return Outcome(settings, stream, served, *self._judged(wanted), record, slots)

    def _in_blocks(self, settings: Settings) -> int:
        """Slots of a pool that hands out whole blocks: memory for `slots` experts of their own size holds fewer."""
        mib = 2**20
        n, _ = blocks(self.costs.expert_bytes, settings.block * mib)
        return settings.slots * self.costs.expert_bytes // (n * settings.block * mib)

    def forecast(self, settings: Settings) -> Forecast | None:
        """What the predictor wants, with the window as the layers it is known ahead."""
        if settings.predictor == "none":
            return None
        key = settings.predictor, settings.window, settings.fetch
        if key not in self._forecasts:
            gates = GateAhead(settings.window) if settings.predictor == "gate" else None
            predictor: Predictor = Oracle() if settings.predictor == "oracle" else Frequency()
            if gates is not None:
                predictor = OrElse(gates, predictor)
            predictor.fit(self.seen)
            wanted = forecast_of(predictor, self.part, top(min(settings.fetch, self.part.routes.n_expert)))
            self._forecasts[key] = wanted if gates is not None else replace(wanted, ahead=settings.window)
        return self._forecasts[key]

    def _judged(self, wanted: Forecast | None) -> tuple[float, float]:
        if wanted is None:
            return float("nan"), float("nan")
        used = np.zeros(wanted.wanted.shape, bool)
        np.put_along_axis(used, self.stream.trace.experts.astype(int), True, 2)
        named = wanted.wanted > 0
        both = (used & named).sum()
        return float(both / used.sum()), float(both / max(1, named.sum()))

    def bounds(self, slots: int) -> dict[str, float]:
        """Hit rates of LRU, LFU and Belady with these slots per layer."""
        if slots not in self._bounds:
            self._bounds[slots] = {p: replay(self.stream.trace, p, slots).hit_rate for p in ("lru", "lfu", "belady")}
        return self._bounds[slots]


class Symptom(NamedTuple):
    """A row of the table: what one sees, the counter that tells, the knob, and settings that show it and settings that mend it."""

    name: str
    counter: str
    knob: str
    shows: Settings
    mended: Settings

    def read(self, outcome: Outcome) -> float:
        """The counter's value in an outcome."""
        return COUNTERS[self.counter](outcome)


COUNTERS: Mapping[str, Any] = {
    "recall": lambda o: o.recall,
    "precision": lambda o: o.precision,
    "loads per token": lambda o: (o.stream.demand_loads + o.stream.prefetches) * o.stream.scale / o.stream.n_tokens,
    "full queues": lambda o: o.served.causes().get("full", 0) / len(o.served.batches),
    "tokens per batch": lambda o: o.served.batch,
    "slots": lambda o: float(o.slots),
    "ms behind late prefetches": lambda o: o.stream.ledger["late prefetch"] * o.stream.scale / o.stream.n_tokens / 1e6,
    "ms of the predictor": lambda o: o.stream.costs.predictor(o.settings.hidden) * o.stream.costs.shape.n_moe / 1e6,
    "longest wait": lambda o: o.served.longest_wait / 1e6,
}
"""What one reads off a run, by name."""


def symptoms(bench: Bench) -> list[Symptom]:
    """The table for this bench: each row's first settings show the symptom; with its second ones the counter is better, if not always
    the time."""
    k = bench.stream.trace.k
    block = 256 if bench.costs.expert_bytes > 2**28 else max(1, round(bench.costs.expert_bytes / 2**20 * 0.76))
    ahead = Settings("predicted", predictor="gate", window=1, fetch=k)
    return [
        Symptom("latency jumps, recall below 90 %", "recall", "predictor, fetch more", ahead,
                replace(ahead, fetch=min(3 * k, bench.stream.trace.n_expert))),
        Symptom("recall is fine, loads are many and late", "ms behind late prefetches", "window of 2 to 4 layers",
                replace(ahead, predictor="oracle"), replace(ahead, predictor="oracle", window=3)),
        Symptom("queues are full", "full queues", "capacity", Settings(capacity=1, wait=50), Settings(capacity=32, wait=50)),
        Symptom("queues starve: tokens wait long", "longest wait", "a shorter wait, merging", Settings(wait=-1, merge=4), Settings(wait=0)),
        Symptom("a load fails with memory free", "slots", "smaller blocks, or slots of an expert's size", Settings(block=block),
                Settings()),
        Symptom("the predictor is slow", "ms of the predictor", "share the router's own products", replace(ahead, hidden=8192), ahead),
        Symptom("predictor fetches what nobody uses", "precision", "fetch fewer",
                replace(ahead, fetch=min(4 * k, bench.stream.trace.n_expert)), replace(ahead, fetch=k)),
    ]  # fmt: skip
