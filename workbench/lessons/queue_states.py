"""The state that lesson 23 starts from: recorded routes served in virtual time, queues to step through, real sequences side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from workbench import models
from workbench.expertflow import sources
from workbench.expertflow.batching import Batch, Limits, Readings, TokenQueues
from workbench.expertflow.offload import offload
from workbench.expertflow.regroup import distinct, paths_of, regroup, saved
from workbench.expertflow.segments import SegmentServer
from workbench.expertflow.serving import Served, serve
from workbench.expertflow.timing import Costs, costs
from workbench.moe import RouteTrace
from workbench.views.tables import text

PROMPTS = ("def main(", "And it came to pass", "x = 1;", "The LORD", "for i in", "if (a", "1 2 3", "return")

Event = tuple[str, Any, dict[int, int], list[int]]
"""What happened, to whom, tokens in each queue afterwards, tokens joined."""


class Side(NamedTuple):
    """Sequences that decoded side by side: expert batches, tokens in them on average, loads, the largest difference from one graph for
    all as a share of the largest logit, and how many of how many tokens would continue alike."""

    batches: int
    mean: float
    loads: int
    apart: float
    alike: int
    of: int


class Regrouped(NamedTuple):
    """Two batches of one token each of four sequences: experts they need in all, and what came out, as in `Side`."""

    distinct: int
    batches: list[list[int]]
    apart: float
    alike: int
    of: int


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

    def decoded(self, limits: Limits, steps: int = 3) -> Side:
        """Eight sequences through token queues and an engine with half of the experts, beside one graph for all."""
        model, apart, alike = self.model, 0.0, 0
        prompts = [(seq, model.tokenizer.encode(p)) for seq, p in enumerate(PROMPTS)]
        with models.Session(model, n_seq_max=8, n_ctx=512) as whole, offload(model, 0.5, n_seq_max=8, n_ctx=512) as run:
            logits = whole.decode_batch(prompts)
            run.session.decode_batch(prompts)
            before, server = run.counters.loads, SegmentServer(run, limits)
            for _ in range(steps):
                tokens = {seq: int(row.argmax()) for seq, row in enumerate(logits)}
                found = server.step(tokens)
                logits = whole.decode_batch([(seq, [t]) for seq, t in tokens.items()])
                apart = max(apart, *(_apart(found[seq], row) for seq, row in enumerate(logits)))
                alike += sum(int(found[seq].argmax() == row.argmax()) for seq, row in enumerate(logits))
            sizes = [n for _, _, n, _ in server.batches]
            assert sum(sizes) == steps * 8 * 6 * 2 and not server.queues.n_waiting
            return Side(len(sizes), float(np.mean(sizes)), run.counters.loads - before, apart, alike, steps * 8)

    # ---- regrouping

    @lru_cache(8)  # noqa: B019
    def trace(self, name: str, how: str) -> RouteTrace:
        """Routes in the order in which batches are cut: "text", one text after another; "requests", a token of each in turn."""
        trace = sources.load(name).trace
        if how == "requests":
            return trace.select(np.lexsort((trace.sequences, trace.positions))[:2048])
        return trace.select(np.flatnonzero(trace.positions < 32))

    @lru_cache(64)  # noqa: B019
    def saved(self, name: str, how: str, size: int) -> float:
        """Share of different experts that regrouping saves."""
        return saved(self.trace(name, how), size)

    def regrouped(self, again: bool) -> Regrouped:
        """One token of each of eight sequences in two batches of four, as they came or regrouped by routes, through a real session;
        compared with all eight in one batch."""
        model = self.model
        prompts = [(seq, model.tokenizer.encode(p)) for seq, p in enumerate(PROMPTS)]
        with models.Session(model, n_seq_max=8, n_ctx=512, recording=True) as whole, models.Session(model, n_seq_max=8, n_ctx=512) as parts:
            step = [(seq, [int(row.argmax())]) for seq, row in enumerate(whole.decode_batch(prompts))]
            parts.decode_batch(prompts)
            whole.clear_routes()
            wanted = whole.decode_batch(step)
            paths = paths_of(whole.routes)
            halves = regroup(paths) if again else (np.arange(4), np.arange(4, 8))
            found: dict[int, np.ndarray] = {}
            for half in halves:
                found.update(zip(half.tolist(), parts.decode_batch([step[i] for i in half.tolist()]), strict=True))
            apart = max(_apart(found[i], row) for i, row in enumerate(wanted))
            alike = sum(int(found[i].argmax() == row.argmax()) for i, row in enumerate(wanted))
            return Regrouped(distinct(paths, halves), [half.tolist() for half in halves], apart, alike, len(wanted))


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def causes(served: Served) -> str:
    """How many batches for which reason, as text."""
    return ", ".join(f"{n} {cause}" for cause, n in sorted(served.causes().items())) or text("none")
