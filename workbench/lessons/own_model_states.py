"""The state that lesson 27 starts from: one GGUF, opened, planned, recorded, replayed and set beside published configurations."""

from __future__ import annotations

import os
from collections import Counter
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.cgraph import CGraph
from workbench.devices import CpuBackend
from workbench.expertflow import sources
from workbench.expertflow.costs import Costs, costs
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.hindcast import Row, hindcast
from workbench.expertflow.network import shipped_predictors
from workbench.expertflow.observe import Gates, Seen, record
from workbench.expertflow.offload import expert_bytes, offload
from workbench.expertflow.predictors import (
    Frequency,
    GateAhead,
    Oracle,
    OrElse,
    Predictor,
    PreviousLayer,
    PreviousToken,
)
from workbench.expertflow.regimes import Point, Rates, diagram, measured
from workbench.expertflow.replay import Forecast, Result, Stream, forecast_of, replay
from workbench.expertflow.scoring import Score, evaluate, mean, top
from workbench.expertflow.timing import Timed, simulate
from workbench.expertflow.verdict import Verdict, verdict
from workbench.expertflow.visits import expert_weights
from workbench.models.fitting import Fit, fit
from workbench.models.planning import EXPERTS, SchedulePlan, plan_schedule
from workbench.moe import RouteTrace, configs
from workbench.tensors import Tensor
from workbench.trace import Trace
from workbench.views import token_way

SAMPLES = ("python", "english", "c", "chinese", "maths", "numeric")
PIECE = 64
"""Tokens of a piece of text; of each sample the first piece warms up, the second one is judged."""
CARD = "rtx3090-pcie4"


class Case(NamedTuple):
    """A forecast for some tokens: experts named and used by each, and its (recall, precision)."""

    named: list[set[int]]
    used: list[set[int]]
    score: tuple[float, float]


class Own:
    """A GGUF with experts, and what it does with six samples of text."""

    def __init__(self, which: str | os.PathLike[str]) -> None:
        self.which, self.model, self.file = which, models.load(which), models.open_gguf(which)
        self.layers = list(expert_weights(self.model))

    # ---- the file

    def facts(self) -> list[tuple[str, Any]]:
        """What the header says, in bytes where it can be counted."""
        hp, experts = self.model.hparams, expert_bytes(self.model)
        types = Counter(w.dtype.name for merged in expert_weights(self.model).values() for w in merged)
        return [("architecture", hp.arch), ("layers, with experts", f"{hp.n_layer}, {len(self.layers)}"), ("experts", hp.n_expert),
                ("used per token", hp.n_expert_used), ("types of experts", ", ".join(sorted(types))),
                ("bytes", self.model.nbytes), ("of these, experts", experts),
                ("of these, for one token", experts * hp.n_expert_used // hp.n_expert),
                ("bytes of an expert", experts // (len(self.layers) * hp.n_expert))]  # fmt: skip

    @lru_cache(maxsize=4)  # noqa: B019 — one model, a few sizes
    def graph(self, n_tokens: int = 1) -> CGraph:
        """The graph of a step."""
        cache = models.KVCache(self.model.hparams, 256, CpuBackend().buffer_type)
        return models.build_step(self.model, cache, n_tokens, cache.n_ctx, 1).graph

    def experts_part(self) -> list[Tensor]:
        """The choice of experts, and their products, in the first layer that has any."""
        names = [f"ffn_moe_{what}-{self.layers[0]}" for what in ("topk", "gate", "up", "gate_up", "swiglu", "down")]
        return [t for t in self.graph().nodes if t.name in names]

    @cached_property
    def plan(self) -> SchedulePlan:
        """Where everything would lie on a card with its experts on the host, and its splits; from the header alone."""
        return plan_schedule(self.which, f"{CARD},cpu", overrides={EXPERTS: "CPU"}, batch=PIECE, context=256)

    def card(self, share: float) -> int:
        """Bytes of a card that has room for a share of the experts, beside all else that must lie there."""
        fixed = sum(n.nbytes for n in self.fitted(self.model.nbytes)[0].needs if n.what.startswith(("dense", "KV", "compute")))
        return int(fixed + share * expert_bytes(self.model))

    @lru_cache(maxsize=256)  # noqa: B019
    def fitted(self, vram: int, ram_speed: float = 58e9, link: float = 25e9) -> tuple[Fit, Verdict | None]:
        """The bounds of `fit`, and whether an expert cache would pay."""
        found = fit(self.file, vram, 64 * self.model.nbytes, link, context=256, batch=PIECE, ram_speed=ram_speed)
        return found, verdict(found)

    # ---- its routes

    @cached_property
    def seen(self) -> Seen:
        """The model over two pieces of each sample."""
        pieces = []
        for name in SAMPLES:
            text = (paths.models_dir() / "samples" / f"{name}.txt").read_text("utf-8")[: 16 * PIECE]
            tokens = self.model.tokenizer.encode(text)[: 2 * PIECE]
            pieces += [tokens[:PIECE], tokens[PIECE:]]
        return record(self.model, pieces)

    @cached_property
    def warm(self) -> Seen:
        """The first pieces."""
        return self.seen.sequences(np.arange(0, 2 * len(SAMPLES), 2))

    @cached_property
    def judged(self) -> Seen:
        """The second pieces."""
        return self.seen.sequences(np.arange(1, 2 * len(SAMPLES), 2))

    @cached_property
    def shares(self) -> tuple[int, int]:
        """Slots per layer for a quarter and for half of the experts, at least those of one token."""
        hp = self.model.hparams
        return max(hp.n_expert // 4, hp.n_expert_used), max(hp.n_expert // 2, hp.n_expert_used)

    @lru_cache(maxsize=64)  # noqa: B019
    def replayed(self, policy: str, slots: int) -> Result:
        """The judged routes under a policy."""
        return replay(self.judged.routes, policy, slots)

    @lru_cache(maxsize=8)  # noqa: B019
    def scores(self, fetch: int) -> dict[str, Score]:
        """Each predictor, fitted on the first pieces and judged on the second, when it fetches so many experts per token."""
        kinds: list[Predictor] = [Frequency(), PreviousLayer(), PreviousToken(), GateAhead(2), GateAhead(1)]
        return {p.name: mean(evaluate(p.fit(self.warm), self.judged, top(fetch))) for p in kinds}

    @cached_property
    def way(self) -> dict[str, Any]:
        """One decoded token with half of the experts in slots and the gate looking two layers ahead, as steps."""
        forecast = Forecaster.of_gates(Gates.of(self.model), 2)
        with offload(self.model, 0.5, policy="predicted", forecast=forecast, n_ctx=256, n_batch=PIECE, backends=CARD) as run:
            run.session.decode(self.judged.routes.tokens[:16])
            run.scheduler.trace = trace = Trace("virtual")
            run.session.decode(self.judged.routes.tokens[16:17])
            return token_way(trace)

    # ---- times, of a published configuration

    def published(self, kind: str = "f16") -> Costs:
        """Costs of the published model with as many experts of which as many are used. Raises LookupError where there is none."""
        shape = self.model.hparams.n_expert, self.model.hparams.n_expert_used
        for m in configs.MODELS:
            if (m.router.n_expert, m.router.n_used) == shape:
                return costs(m.name, CARD, kind)
        raise LookupError(f"no published configuration with {shape[1]} of {shape[0]} experts in moe.configs: times need one")

    @lru_cache(maxsize=4)  # noqa: B019
    def ledgers(self, slots: int, kind: str = "f16") -> dict[str, Timed]:
        """The judged routes with the published model's costs: schemes that can run, then two bounds that know the future."""
        c, stream, hot = self.published(kind), Stream(self.judged.routes), self.warm.routes.counts()
        gate = self._forecast(GateAhead(1))
        return {"LRU, on demand": simulate(stream, c, "lru", slots), "LFU, on demand": simulate(stream, c, "lfu", slots),
                "gate 1 ahead": simulate(stream, c, "predicted", slots, forecast=gate),
                "all on the CPU": simulate(stream, c, "lru", slots, host_below=10**9),
                "hot ones stay, others on the CPU": simulate(stream, c, "static", slots, hot=hot, host_below="auto"),
                "bound: Belady": simulate(stream, c, "belady", slots),
                "bound: oracle, prefetching": simulate(stream, c, "oracle", slots)}  # fmt: skip

    def perfect(self, slots: int, kind: str = "f16") -> Timed:
        """The same with a forecast that is always right, one layer ahead, instead of the gate's."""
        return simulate(Stream(self.judged.routes), self.published(kind), "predicted", slots, forecast=self._forecast(Oracle(), ahead=1))

    @lru_cache(maxsize=16)  # noqa: B019
    def hybrids(self, slots: int, ram: int | None = None) -> dict[str, Timed]:
        """Forecasts that name one expert of each layer, with misses computed on the CPU; the hot set is in the slots at the start.
        ram: bytes of experts that the host's memory holds (default: all of them)."""
        c = self.published()
        said = {"token before": (PreviousToken(), None, 0), "gate 1 ahead": (OrElse(GateAhead(1), Frequency()), None, c.look_ahead),
                "always right, 1 ahead": (Oracle(), 1, 0)}  # fmt: skip
        held = None if ram is None else ram * len(self.layers) // (c.shape.n_moe * c.expert_bytes)

        def run(predictor: Predictor, ahead: int | None, thinking: int) -> Timed:
            forecast = self._forecast(predictor.fit(self.warm), 1, ahead)
            return simulate(Stream(self.judged.routes), c, "predicted", slots, forecast=forecast, hot=self.warm.routes.counts(),
                            host_below="auto", thinking=thinking, host_slots=held)  # fmt: skip

        return {name: run(*one) for name, one in said.items()}

    def _forecast(self, predictor: Predictor, named: int | None = None, ahead: int | None = None) -> Forecast:
        found = forecast_of(predictor, self.judged, top(named or self.model.hparams.n_expert_used))
        return found if ahead is None else Forecast(found.name, found.wanted, ahead)

    def layer_kinds(self) -> list[tuple[str, int]]:
        """Nodes of the graph by op, most first."""
        return Counter(t.desc for t in self.graph().nodes).most_common()


class Lesson27:
    """Your own model."""

    @lru_cache(maxsize=2)  # noqa: B019
    def open(self, which: str | os.PathLike[str]) -> Own:
        """A shipped model by name, or a file. Raises FileFormatError and ModelError for what is no mixture of experts."""
        return Own(which)

    @cached_property
    def hindcast(self) -> list[Row]:
        """Published figures beside the cost model's."""
        return hindcast()

    def regimes(self, batches: tuple[int, ...], links: tuple[float, ...], memories: tuple[float, ...], kind: str = "q4_0") -> list[Point]:
        """The phase diagram of Mixtral-8x7B with half of its experts on an RTX 3090, with hits and forecasts measured on the tiny
        Mixtral's routes: one token after another, or side by side."""
        c = costs("Mixtral-8x7B", CARD, kind)
        return diagram(c, batches, links, memories, c.shape.n_moe * 4 * c.expert_bytes, self.rates, _with_forecast)

    def rates(self, batch: int) -> Rates:
        """Hit rates with slots for half of the experts, by replay; more sequences than 32 count as 32: nearly all are in use."""
        return _rates(min(batch, 32))

    def published_points(self) -> list[tuple[int, float, str]]:
        """Where measurements were made: tokens in a step, the link as the hindcast found it, what was run."""
        links = {r.what.split(", ")[1]: float(r.note.removeprefix("fitted: ").split(" ")[0]) for r in self.hindcast
                 if r.note.startswith("fitted") and r.what.startswith("2-bit") and r.what.endswith("naive")}  # fmt: skip
        pr = next(r.note for r in self.hindcast if r.note.startswith("fitted") and "llama.cpp" in r.source)
        out = [(1, link, f"Mixtral-offloading on a {card}: a cache") for card, link in links.items()]
        return [*out, (512, float(pr.removeprefix("fitted: ").split(" ")[0]), "llama.cpp PR 15346: used experts copied")]

    def forecast(self, own: Own, layer: int, n: int) -> Case:
        """What the router of the layer before names for a layer, the n best, over 16 tokens; and how `scoring` judges it."""
        first = np.arange(16)
        m, gate = own.layers.index(layer), GateAhead(1)
        chosen = top(n)(gate.scores(own.judged, m), m)
        score = next(s for s in evaluate(gate, own.judged, top(n), first) if s.layer == layer)
        named, used = ([set(np.flatnonzero(row).tolist()) for row in rows[:16]] for rows in (chosen, own.judged.used(m)))
        return Case(named, used, (score.recall, score.precision))

    def level(self, own: Own, link: float, memory: float) -> float:
        """The least hit rate at which the bound of a cache is that of experts on the host, both from `fit`; found by trying."""
        found, _ = own.fitted(2 * own.model.nbytes // 3, memory, link)
        host = next(b for b in found.bounds if b.over == "memory of the host")  # the host computes all experts
        copied = next(b for b in found.bounds if b.over == "link")
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            ahead = copied.bandwidth / (host.nbytes * (1 - middle)) >= host.tokens_per_second
            low, high = (low, middle) if ahead else (middle, high)
        return round(low, 9)


@lru_cache(1)
def _texts() -> tuple[RouteTrace, RouteTrace]:
    """The first 64 tokens of the tiny Mixtral's recorded sequences: 8 to 15 of each domain, and 0 to 7, in which experts are counted."""
    whole = sources.load("tiny-mixtral").trace
    trace = whole.select(whole.positions < PIECE)
    return trace.select(trace.sequences % 16 >= 8), trace.select(trace.sequences % 16 < 8)


@lru_cache(16)
def _rates(batch: int) -> Rates:
    return measured(*_texts(), 4, batch)


@lru_cache(1)
def _gate() -> tuple[Stream, Forecast]:
    """Held-out routes, and what the gate ahead says of them, or of the first layer the counts of other texts."""
    routes, shipped = _texts()[0], shipped_predictors("tiny-mixtral")
    with models.load("tiny-mixtral-f16") as model:
        seen = record(model, routes.select(routes.sequences % 16 == 12))
    return Stream(seen.routes), forecast_of(OrElse(GateAhead(1), shipped["frequency"]), seen, top(1))


def _with_forecast(c: Costs, batch: int) -> float | None:
    """Milliseconds of a token with the gate ahead and its misses on the host. A batch needs all experts: there is nothing to foretell."""
    stream, gate = _gate()
    return None if batch > 1 else simulate(stream, c, "predicted", 4, forecast=gate, host_below="auto", thinking=c.look_ahead,
                                           hot=_texts()[1].counts()).per_token  # fmt: skip
