"""The state that lesson 23 starts from: recorded routes served in virtual time, queues to step through, real sequences side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from workbench import models
from workbench.expertflow import sources
from workbench.expertflow.batching import FOREVER, Batch, Limits, Readings, TokenQueues
from workbench.expertflow.costs import Costs, costs
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.network import shipped_predictors
from workbench.expertflow.observe import Gates, Seen, record, split
from workbench.expertflow.offload import offload
from workbench.expertflow.predictors import GateAhead, Oracle, OrElse, Predictor
from workbench.expertflow.regroup import Needed, distinct, needed, predicted_paths, regroup
from workbench.expertflow.replay import Forecast, forecast_of
from workbench.expertflow.scoring import top
from workbench.expertflow.segments import Request, SegmentServer
from workbench.expertflow.serving import Served, serve
from workbench.moe import RouteTrace
from workbench.views.tables import text

PROMPTS = ("def main(", "And it came to pass", "x = 1;", "The LORD", "for i in", "if (a", "1 2 3", "return")

Event = tuple[str, Any, dict[int, int], list[int]]
"""What happened, to whom, tokens in each queue afterwards, tokens joined."""
Decoded = tuple[dict[int, int], list[np.ndarray]]
"""A step: sequence -> token id, and the logits of each sequence."""


class Side(NamedTuple):
    """Sequences that decoded side by side: expert batches, tokens in them on average, loads that a batch waited for and those ahead of it,
    virtual milliseconds of a step, the largest difference from one graph for all as a share of the largest logit, and how many of how many
    tokens would continue alike."""

    batches: int
    mean: float
    loads: int
    ahead: int
    ms: float
    apart: float
    alike: int
    of: int


class Regrouped(NamedTuple):
    """Two batches of one token each of four sequences: experts they need in all, loads, and what came out, as in `Side`."""

    distinct: int
    loads: int
    batches: list[list[int]]
    apart: float
    alike: int
    of: int


class Withdrawn(NamedTuple):
    """A step that one sequence left: cells of the KV cache in use before and after, tokens of each sequence before and after, places that
    are taken in queues, and the largest difference of the others, as in `Side`."""

    cells: tuple[int, int]
    past: list[tuple[int, int]]
    places: int
    apart: float


class Lesson23:
    """Token scheduling: routes of the tiny Mixtral, times of Mixtral-8x7B in f16 on an RTX 3090 behind PCIe 4."""

    slots = 24

    @cached_property
    def routes(self) -> RouteTrace:
        """96 sequences of six kinds of text: 6 layers, 2 of 8 experts."""
        return sources.load("tiny-mixtral").trace

    @cached_property
    def costs(self) -> Costs:
        """Nanoseconds of the named configuration."""
        return costs("Mixtral-8x7B", "rtx3090-pcie4")

    @lru_cache(128)  # noqa: B019 - one state per lesson
    def served(self, limits: Limits, n_requests: int = 8, n_tokens: int = 4, slots: int = slots) -> Served:
        """Requests side by side: the first `n_tokens` tokens of one sequence each, of all six kinds of text in turn."""
        return self.serve(limits, n_requests, n_tokens, slots)

    def serve(self, limits: Limits, n_requests: int, n_tokens: int = 4, slots: int = slots, **more: Any) -> Served:
        """The same, run anew; more: see `serving.serve`."""
        return serve(self.routes, self.costs, limits, slots, n_requests=n_requests, n_tokens=n_tokens, sequences=self._mixed, **more)

    @cached_property
    def _mixed(self) -> list[int]:
        return np.arange(96).reshape(6, 16).T.ravel().tolist()  # 16 sequences of each kind follow each other in the trace

    # ---- queues, step by step

    def choices(self, n: int, layer: int = 5) -> list[list[int]]:
        """The experts of one token each of `n` sequences."""
        rows = [int(np.flatnonzero(self.routes.sequences == s)[3]) for s in self._mixed[:n]]
        return self.routes.experts[layer, rows].astype(int).tolist()

    def walk(self, limits: Limits, threshold: int, resident: Sequence[int], n: int = 6) -> Iterator[Event]:
        """One token after the other comes, a millisecond apart, and queues are served whenever the rules say so; then nothing else is
        left to do. Yields ("add", (token, experts), lengths, []) and ("serve", batch, lengths, tokens joined)."""
        queues = TokenQueues(limits, 2, threshold, lambda layer, e: e in resident)

        def served(now: int, idle: bool) -> Iterator[Event]:
            while batches := queues.next(now, idle):
                for batch in batches:
                    joined = queues.done(w.token for w in batch.tokens)
                    yield "serve", batch, {e: size for (_, e), size in queues.lengths().items()}, joined

        for token, experts in enumerate(self.choices(n)):
            queues.add(token, 5, experts, token * 1_000_000)
            yield "add", (token, experts), {e: size for (_, e), size in queues.lengths().items()}, []
            yield from served(token * 1_000_000, False)
        yield from served(n * 1_000_000, True)
        assert not queues.n_waiting and not queues.missing

    def steps(self, limits: Limits, threshold: int, resident: Sequence[int], title: str) -> dict[str, Any]:
        """`walk` for a stepper."""
        because = {"waited": "its oldest token has waited as long as it may", "full": "it is full", "idle": "nothing else is left to do",
                   "merged": "it is short like the queue before it, and goes along",
                   "pays": "it is long enough for a load", "there": "its expert is in a slot"}
        out = []
        for kind, what, lengths, joined in self.walk(limits, threshold, resident):
            table = [[str(e), str(lengths.get(e, 0)), "in a slot" if e in resident else ""] for e in range(8)]
            if kind == "add":
                token, experts = what
                out.append({"label": f"token {token}", "cause": "two queues", "change": False, "table": table,
                            "sentence": f"Token {token} wants experts {experts[0]} and {experts[1]}: it stands in both queues.",
                            "marks": [[e, str(lengths[e]), 0.4] for e in experts]})  # fmt: skip
                continue
            assert isinstance(what, Batch)
            cause = "there" if what.cause == "pays" and what.expert in resident else what.cause
            who = ", ".join(str(w.token) for w in what.tokens)
            after = f" Joined, and on their way: {', '.join(map(str, joined))}." if joined else " Nobody is complete yet."
            out.append({"label": f"expert {what.expert}", "cause": cause, "change": True, "table": table,
                        "sentence": f"Expert {what.expert} computes for {who}: {because[cause]}.{after}",
                        "marks": [[what.expert, f"×{len(what.tokens)}", 1.0]]})  # fmt: skip
        return {"title": title, "lanes": [f"expert {e}" for e in range(8)], "columns": ["expert", "waiting", ""],
                "table": "the queues after this step", "steps": out}  # fmt: skip

    # ---- the threshold

    def pipeline(self, tokens: int, n: int = 40) -> tuple[int, int]:
        """`n` batches of `tokens` tokens, each of an expert that must be loaded, with two slots: (ns in all, ns that the device waited)."""
        link = now = stalled = 0
        ends = [0, 0]
        for i in range(n):
            link = max(link, ends[i % 2]) + self.costs.load  # the slot is free when the batch before last has read it
            stalled += max(0, link - now) if i else 0
            now = max(now, link) + self.costs.expert(tokens)
            ends[i % 2] = now
        return now, stalled

    def readings(self, sizes: Sequence[int]) -> Readings:
        """What one would have measured from batches of these sizes."""
        out = Readings()
        out.loads.append(self.costs.load)
        out.batches.extend((n, self.costs.expert(n)) for n in sizes)
        return out

    # ---- real sequences

    @cached_property
    def model(self) -> models.Model:
        """The really trained model."""
        return models.load("tiny-mixtral-f16")

    @cached_property
    def plain(self) -> tuple[list[Decoded], RouteTrace]:
        """Three steps of eight sequences, in one graph each: tokens and logits of each step, and their routes."""
        with models.Session(self.model, n_seq_max=8, n_ctx=512, recording=True) as whole:
            logits, steps = whole.decode_batch(self.prompts), list[Decoded]()
            whole.clear_routes()
            for _ in range(3):
                tokens = {seq: int(row.argmax()) for seq, row in enumerate(logits)}
                logits = whole.decode_batch([(seq, [t]) for seq, t in tokens.items()])
                steps.append((tokens, logits))
            return steps, whole.routes

    @cached_property
    def prompts(self) -> list[tuple[int, list[int]]]:
        """Eight beginnings of texts, by sequence."""
        return [(seq, self.model.tokenizer.encode(p)) for seq, p in enumerate(PROMPTS)]

    def decoded(self, limits: Limits, forecast: str = "none") -> Side:
        """The same eight sequences through token queues and an engine with half of the experts; forecast: "none", "gate" (one layer
        ahead) or "true"."""
        steps, routes = self.plain
        gate = Forecaster.of_gates(Gates.of(self.model)) if forecast == "gate" else None
        with offload(self.model, 0.5, n_seq_max=8, n_ctx=512) as run:
            run.session.decode_batch(self.prompts)
            server = Told(run, limits, routes) if forecast == "true" else SegmentServer(run, limits)
            run.engine.forecast, counters = gate, run.counters
            loads, begun, found = counters.loads, run.engine.pool.device.buffer_type.now, list[dict[int, np.ndarray]]()
            for tokens, _ in steps:
                found.append(server.step(tokens))
            ms = (run.engine.pool.device.buffer_type.now - begun) / len(steps) / 1e6
            sizes = [n for _, _, n, _ in server.batches]
            assert sum(sizes) == len(steps) * 8 * 6 * 2 and not server.queues.n_waiting
            pairs = [(step[seq], row) for step, (_, logits) in zip(found, steps, strict=True) for seq, row in enumerate(logits)]
            return Side(len(sizes), float(np.mean(sizes)), counters.loads - loads, counters.prefetches, ms,
                        max(_apart(*p) for p in pairs), sum(int(a.argmax() == b.argmax()) for a, b in pairs), len(pairs))  # fmt: skip

    def withdrawn(self, seq: int, graph: int) -> Withdrawn:
        """One step of the eight, of which one sequence is withdrawn before a graph of this number, with its token in queues."""
        (tokens, logits), graphs = self.plain[0][0], count()
        with offload(self.model, 0.5, n_seq_max=8, n_ctx=512) as run:
            run.session.decode_batch(self.prompts)

            def between() -> None:
                if next(graphs) == graph:
                    assert any(w.token == seq for q in server.queues.queues.values() for w in q) and server.cancel(seq)

            server, session = SegmentServer(run, Limits(8, FOREVER), between=between), run.session
            cells, past = session.cache.n_used, [session.n_past(s) for s in range(8)]
            found = server.step(tokens)
            apart = max(_apart(row, logits[s]) for s, row in found.items())
            both = [(n, session.n_past(s)) for s, n in enumerate(past)]
            return Withdrawn((cells, session.cache.n_used), both, server.queues.n_waiting, apart)

    @cached_property
    def forecasts(self) -> tuple[RouteTrace, dict[str, Forecast | None]]:
        """The first tokens of 32 sequences, and what is said of their next layers: nothing, by the gate one layer ahead, or the truth."""
        trace = self.routes.select(np.isin(self.routes.sequences, self._mixed[:32]) & (self.routes.positions < 4))
        seen = record(self.model, trace)
        true = forecast_of(Oracle(), seen, top(2))
        return seen.routes, {"none": None, "gate": forecast_of(GateAhead(1), seen, top(2)), "true": replace(true, ahead=1)}

    def announced(self, limits: Limits, n: int, forecast: str, prefetch: bool = True, slots: int = slots) -> Served:
        """As `served`, with a forecast."""
        routes, forecasts = self.forecasts
        return serve(routes, self.costs, limits, slots, n_requests=n, n_tokens=4, sequences=self._mixed, forecast=forecasts[forecast],
                     prefetch=prefetch)  # fmt: skip

    # ---- regrouping

    @lru_cache(2)  # noqa: B019
    def seen(self, name: str) -> tuple[Seen, dict[str, np.ndarray]]:
        """Beginnings of the sequences that no predictor was fitted on, with the routes that each predictor says of them.

        "gate" looks one layer ahead, so it knows a layer's routes when the layer before it runs; "network" reads tokens, as the paper's.
        """
        trace = sources.load(name).trace
        _, held_out = split(trace)
        with models.load(f"{name}-f16") as model:
            seen = record(model, trace.select(np.isin(trace.sequences, held_out) & (trace.positions < 86)))
        shipped = shipped_predictors(name)
        by: dict[str, Predictor] = {"gate": OrElse(GateAhead(1), shipped["frequency"]), "network": shipped["network"]}
        return seen, {how: predicted_paths(forecast_of(p, seen, top(trace.k))) for how, p in by.items()}

    @lru_cache(128)  # noqa: B019
    def needed(self, name: str, cut: str, size: int, by: str = "true") -> Needed:
        """Different experts per layer and batch, before and after regrouping by true or predicted routes. cut: "text", batches are cut
        out of one text after another; "requests", they hold a token of each in turn."""
        if name == "switch-base-8":
            trace, predicted = sources.load(name).trace, dict[str, np.ndarray]()
        else:
            seen, predicted = self.seen(name)
            trace = seen.routes
        rows = np.lexsort((trace.sequences, trace.positions))[:2048] if cut == "requests" else np.flatnonzero(trace.positions < 32)
        return needed(trace.select(rows), size, predicted[by][rows] if by != "true" else None)

    def regrouped(self, by: str = "") -> Regrouped:
        """One token of each of eight sequences in two batches of four, as they came ("") or regrouped by routes ("true", "gate",
        "network"), through an engine with half of the experts; compared with all eight in one batch."""
        (tokens, wanted), paths = self.plain[0][0], self._paths
        halves = regroup(paths[by]) if by else (np.arange(4), np.arange(4, 8))
        with offload(self.model, 0.5, n_seq_max=8, n_ctx=512) as run:
            run.session.decode_batch(self.prompts)
            before, found = run.counters.loads, dict[int, np.ndarray]()
            for half in map(np.ndarray.tolist, halves):
                found.update(zip(half, run.session.decode_batch([(i, [tokens[i]]) for i in half]), strict=True))
            apart = max(_apart(found[i], row) for i, row in enumerate(wanted))
            alike = sum(int(found[i].argmax() == row.argmax()) for i, row in enumerate(wanted))
            return Regrouped(distinct(paths["true"], halves), run.counters.loads - before, [half.tolist() for half in halves], apart, alike,
                             len(wanted))  # fmt: skip

    @cached_property
    def _paths(self) -> dict[str, np.ndarray]:
        """True and predicted routes of the first step's tokens."""
        tokens = self.plain[0][0][0]
        seen = record(self.model, [[*prompt, tokens[seq]] for seq, prompt in self.prompts])
        shipped, last = shipped_predictors("tiny-mixtral"), np.cumsum(np.unique(seen.routes.sequences, return_counts=True)[1]) - 1
        by: dict[str, Predictor] = {"true": Oracle(), "gate": OrElse(GateAhead(1), shipped["frequency"]), "network": shipped["network"]}
        return {how: predicted_paths(forecast_of(p, seen, top(2)))[last] for how, p in by.items()}


class Told(SegmentServer):
    """A server that knows the next layer's routes: as good as a forecast can be."""

    def __init__(self, run: Any, limits: Limits, routes: RouteTrace) -> None:
        super().__init__(run, limits)
        self.routes = routes

    def expected(self, r: Request, layer: int, normed: np.ndarray) -> Iterable[tuple[int, dict[int, float]]]:
        """The truth about the next layer."""
        if layer + 1 < self.model.hparams.n_layer:
            [at] = np.flatnonzero((self.routes.sequences == r.seq) & (self.routes.positions == r.position))
            yield layer + 1, dict.fromkeys(self.routes.experts[layer + 1, at].tolist(), 1.0)


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def causes(served: Served) -> str:
    """How many batches for which reason, as text."""
    return ", ".join(f"{n} {cause}" for cause, n in sorted(served.causes().items())) or text("none")
