"""The state that lesson 22 starts from: recorded and drawn routes, forecasts for them, and the paper's worked example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from workbench import models
from workbench.expertflow import network, observe, scoring, sources
from workbench.expertflow.cache import ExpertCache
from workbench.expertflow.offload import offload
from workbench.expertflow.replay import Forecast, Result, StepEvent, Stream, cache_for, forecast_of, replay, walk
from workbench.expertflow.visits import Counters
from workbench.moe import RouteTrace

HELD_OUT = 12
"""Of each domain's 16 recorded sequences, the first one that no predictor was fitted on."""


class Lesson22:
    """The expert cache: one held-out text of each domain through the tiny Mixtral, and traces that bring policies down."""

    published = {"lru": 0.2744186, "lfu": 0.35658915, "reuse": 0.18224299}
    """By Labeeb2339/stratamoe-lab of its recording of Switch-base-8: hit rates of one pool of 12 slots, and its immediate reuse rate."""
    plec = {"batch 4": (0.9190, 0.7661), "batch 16": (0.8591, 0.5837)}
    """Hit ratios that the ExpertFlow paper prints (arXiv 2410.17954v2, figure 10): Switch-32, 16 experts in the cache; PLEC, then LRU."""

    @cached_property
    def trace(self) -> RouteTrace:
        """1,536 tokens: a held-out sequence of each of six domains, through 6 layers of 8 experts, 2 per token."""
        whole = sources.load("tiny-mixtral").trace
        return whole.select(whole.sequences % 16 == HELD_OUT)

    @cached_property
    def words(self) -> list[str]:
        """The texts of these tokens."""
        return [self.model.tokenizer.token_text(int(t)) for t in self.trace.tokens]

    @cached_property
    def model(self) -> models.Model:
        """The model that made them."""
        return models.load("tiny-mixtral-f16")

    @cached_property
    def switch(self) -> RouteTrace:
        """Recorded from google/switch-base-8: 215 tokens, 6 layers of 8 experts, 1 per token (stratamoe-lab, Apache 2.0)."""
        return sources.load("switch-base-8").trace

    @cached_property
    def requests(self) -> RouteTrace:
        """24 held-out sequences through the tiny DeepSeek, the first 64 tokens of each: 4 layers of 16 experts, 4 per token."""
        whole = sources.load("tiny-deepseek").trace
        return whole.select((whole.sequences % 16 >= HELD_OUT) & (whole.positions < 64))

    @cached_property
    def scan(self) -> RouteTrace:
        """Experts 0 … 7, 0 … 7, and so on, one after another."""
        return made([[[e]] for e in list(range(8)) * 100])

    @cached_property
    def drawn(self) -> dict[str, RouteTrace]:
        """Two kinds of synthetic routes, with the statistics of a model of 896 experts, 16 per token: 1,200 tokens, 3 layers."""
        return {kind: sources.load(f"{kind}:tokens=1200,layers=3").trace for kind in ("skewed-static", "local-drifting")}

    def layer(self, which: int, n_tokens: int = 256) -> RouteTrace:
        """One layer alone, the first tokens of `trace`."""
        t = self.trace.select(slice(n_tokens))
        return RouteTrace(t.experts[which : which + 1], t.weights[which : which + 1], t.layers[which : which + 1], t.tokens, t.positions,
                          t.sequences, t.n_expert)  # fmt: skip

    @staticmethod
    def used_again(trace: RouteTrace) -> float:
        """Of the experts that a token uses, the share that the token before it used in the same layer."""
        sets = [list(map(set, layer.tolist())) for layer in trace.experts]
        return sum(len(a & b) for layer in sets for a, b in zip(layer, layer[1:])) / ((trace.n_tokens - 1) * trace.n_layers * trace.k)

    # ---- events

    def events(self, trace: RouteTrace, policy: str, slots: int, scope: str = "layer", forecast: Forecast | None = None,
               link: float = 0.0) -> list[StepEvent]:  # fmt: skip
        """Every decision in the order of a run; checked: no more experts than slots, none loaded that is there."""
        cache = cache_for(Stream(trace), policy, slots, scope, hot=trace.counts())
        out, held = list(walk(Stream(trace), cache, forecast, link)), set[tuple[int, int]]()
        for _, kind, layer, expert, _ in out:
            if kind == "load":
                assert (layer, expert) not in held
                held.add((layer, expert))
            elif kind == "evict":
                held.remove((layer, expert))
            assert all(sum(of in group.layers for of, _ in held) <= group.slots for group in cache.groups)
        return out

    def evictions(self, policy: str = "lru", which: int = 4, n_tokens: int = 60) -> Iterator[tuple[dict[int, int], set[int], int]]:
        """Of one layer with 4 slots: when each expert in a slot was used last, which are in use, and which one went."""
        trace = self.layer(which, n_tokens)
        last: dict[int, int] = {}
        held: set[int] = set()
        for step, kind, _, expert, _ in self.events(trace, policy, 4):
            if kind == "evict":
                needed = set(trace.experts[0, step].tolist())
                yield {e: last[e] for e in sorted(held)}, needed & held, expert
                held.remove(expert)
            else:
                held.add(expert)
                last[expert] = step

    @staticmethod
    def example() -> tuple[ExpertCache, list[StepEvent]]:
        """The paper's worked example: 2 layers of 4 experts (1 to 4), 4 slots; predicted are 2, 3 and 4 in layer 1, 2 and 3 in layer 2;
        the router then wants 2 and 4 in layer 2."""
        cache = ExpertCache("plec", 4, [1, 2], 5, scope="global")
        out: list[StepEvent] = []

        def note(step: int, events: Iterable[tuple[str, int, int, str]]) -> None:
            out.extend((step, kind, layer - 1, expert, cause) for kind, layer, expert, cause in events)

        note(0, cache.predict(1, {2: 0.9, 3: 0.8, 4: 0.7}))
        note(0, cache.predict(2, {2: 0.9, 3: 0.8}))
        for _ in range(4):
            note(0, cache.prefetch())
        note(0, cache.step(1, [2, 3, 4]))
        cache.done(1, 2)
        note(0, cache.prefetch())
        cache.done(1, 3)
        cache.done(1, 4)
        note(1, cache.step(2, [2, 4]))
        return cache, out

    @staticmethod
    def hits(policy: str, needed: Sequence[int], slots: int) -> int:
        """Hits of a policy on experts that come one by one."""
        return sum(replay(made([[[e]] for e in needed]), policy, slots).hits)

    # ---- a run

    text = "def area(radius):\n    return 3.14159 * radius ** 2\n"
    expert_bytes = 122_880
    """Of an expert of the tiny Mixtral in f16: three matrices of 128 x 160 numbers."""

    def run(self, policy: str) -> tuple[Counters, RouteTrace, int]:
        """`text` read token by token with 24 slots on a simulated card: the engine's counters, the routes, the bytes of all loads."""
        with offload(self.model, 0.5, policy=policy, recording=True) as run:
            for token in self.model.tokenizer.encode(self.text):
                run.session.decode([token])
            return run.counters, run.session.routes, run.counters.demand_bytes

    # ---- forecasts

    def forecast(self, name: str, fetch: int = 2) -> Forecast:
        """What a predictor that was fitted on other texts says of `trace`, the `fetch` best of each layer."""
        return forecast_of(network.shipped_predictors("tiny-mixtral")[name], self._seen, scoring.top(fetch))

    def pool_of_24(self, policy: str, forecast: str = "", fetch: int = 2, link: float = 0.5) -> Result:
        """A replay of `trace` with one pool of 24 slots for all layers."""
        known = self.forecast(forecast, fetch) if forecast else None
        return replay(self.trace, policy, 24, "global", forecast=known, link=link)

    @cached_property
    def _seen(self) -> observe.Seen:
        return observe.record(self.model, self.trace)

    def path(self, n_tokens: int = 256) -> tuple[RouteTrace, Forecast]:
        """The first tokens, and a forecast that knows the whole path of a token, right, as soon as the token is there."""
        trace = self.trace.select(slice(n_tokens))
        wanted = np.zeros((trace.n_layers, trace.n_tokens, trace.n_expert), np.float32)
        np.put_along_axis(wanted, trace.experts.astype(np.int64), 1, 2)
        return trace, Forecast("the whole path", wanted, trace.n_layers - 1)

    def part(self, forecast: Forecast, n_tokens: int = 96) -> tuple[RouteTrace, Forecast]:
        """The first tokens of `trace`, and of a forecast for it."""
        return self.trace.select(slice(n_tokens)), Forecast(forecast.name, forecast.wanted[:, :n_tokens], forecast.ahead, forecast.across)


def made(rows: Sequence[Sequence[Sequence[int]]]) -> RouteTrace:
    """A trace of one sequence from [tokens][layers][k]."""
    experts = np.moveaxis(np.array(rows, np.uint8), 1, 0)
    at: Any = np.arange(experts.shape[1], dtype=np.int32)
    unknown = np.full(experts.shape, np.nan, np.float32)
    return RouteTrace(experts, unknown, np.arange(len(experts)), at * 0, at, at * 0, int(experts.max()) + 1)
