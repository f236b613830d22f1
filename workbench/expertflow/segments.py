"""Token queues over real tensors: several requests decode side by side, and each expert computes for whoever waits for it.

A layer is two kinds of graph: attention with the router, for the requests that are ready for it; and one expert's network, for the tokens
in its queue. Both run through the scheduler, with the engine bringing experts into their slots; a token's k results are added up in
the order of its router's choice. Rows are computed in other company than in one graph for all, so results agree closely, not bit for bit.

Between two graphs everything may change: limits follow what was measured, requests are withdrawn, and a run's forecaster says what
the next layers will want, so that a link that nobody needs brings it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from workbench.cgraph import CGraph
from workbench.devices.backend import Backend
from workbench.errors import ModelError, ParameterError
from workbench.expertflow.batching import Announced, Batch, Limits, Readings, TokenQueues
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.monitor import Monitor
from workbench.expertflow.offload import Offloaded
from workbench.models.session import bucket
from workbench.models.transformer import Builder
from workbench.moe import ExpertWeights, Routing, build_experts, build_ffn
from workbench.tensors import Context, Flag, Tensor
from workbench.tensors.context import TENSOR_OVERHEAD


class _Attention(NamedTuple):
    """The graph of a layer up to its router. x: what comes in; residual, normed; chosen, weights of the router, and what a shared expert
    gives (None: there is none); out: what leaves a layer without experts."""

    graph: CGraph
    builder: Builder
    x: Tensor
    residual: Tensor
    normed: Tensor
    chosen: Tensor | None
    weights: Tensor | None
    shared: Tensor | None
    out: Tensor | None


class _Expert(NamedTuple):
    """The graph of one expert for some tokens."""

    graph: CGraph
    x: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor


@dataclass
class Request:
    """A sequence on its way: its tokens so far, where it stands, and what its layer has given until now."""

    seq: int
    token: int
    layer: int = 0
    state: Any = None  # (D,) what enters the layer
    hidden: Any = None  # (residual, normed, experts, weights, shared) of the layer it is in
    results: Any = None  # (k, D)
    cell: int = -1
    position: int = 0


class SegmentServer:
    """Decodes several sequences through token queues.

    run: a model with an expert budget, its sequences filled with prompts already (`run.session.decode`). limits: of the queues; their
    clock counts actions, so max_wait is a number of attention and expert graphs. adapt: expert graphs after which the threshold follows
    the measured times of loads and batches (0: never), and with a `monitor` the capacity follows the device's free memory. between: called
    before each graph. batches: (layer, expert, tokens, cause) of each expert graph. The run's forecaster, if it has one, announces experts.
    """

    def __init__(self, run: Offloaded, limits: Limits, threshold: int = 2, *, adapt: int = 0, monitor: Monitor | None = None,
                 between: Callable[[], object] = lambda: None) -> None:  # fmt: skip
        self.run, self.session, self.model = run, run.session, run.session.model
        hp = self.model.hparams
        if not hp.moe_layers or hp.traits.late_rows or hp.window:
            raise ModelError(f"{self.model.name} ({hp.arch})", "a mixture of experts of the llama or deepseek form without sliding windows")
        self.announced, self.readings, self.adapt, self.monitor, self.between = Announced(), Readings(), adapt, monitor, between
        self.queues = TokenQueues(limits, hp.n_expert_used, threshold, self._is_there, self.announced.wanted)
        self.now = self.took = 0  # actions; nanoseconds of the last graph
        self.batches: list[tuple[int, int, int, str]] = []
        self.forecast: Forecaster | None = None  # the run's, during a step
        self._on_way: dict[int, Request] = {}
        self._withdrawn: set[int] = set()
        self._changing, self._stepping = threading.Lock(), threading.Lock()
        self._attentions: dict[tuple[int, int, int], _Attention] = {}
        self._experts: dict[tuple[int, int], _Expert] = {}

    def _is_there(self, layer: int, expert: int) -> bool:
        return (layer, expert) in self.run.engine.pool.where

    def step(self, tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """One more token of each sequence (sequence -> token id); the logits (n_vocab,) of each that was not withdrawn. Where anything
        fails, none has it: their cells of the cache are given back. Raises ParameterError while another step runs."""
        if not tokens:
            raise ParameterError("no sequence to decode", "at least one: {sequence: token}")
        if not self._stepping.acquire(blocking=False):
            raise ParameterError("a step while another runs", "one after the other", "a step takes any number of sequences")
        try:
            return self._step(tokens)
        finally:
            self._stepping.release()

    def _step(self, tokens: dict[int, int]) -> dict[int, np.ndarray]:
        session, engine = self.session, self.run.engine
        at = [session.n_past(seq) for seq in tokens]
        cells = session.cache.take(np.array(list(tokens)), np.array(at)).tolist()
        self._on_way = {seq: Request(seq, t, cell=c, position=p) for (seq, t), c, p in zip(tokens.items(), cells, at, strict=True)}
        self.forecast, engine.forecast = engine.forecast, None  # an expert's graph does not know whom its tokens belong to
        try:
            for r, row in zip(self._on_way.values(), self._embedded(list(tokens.values())), strict=True):
                r.state = row
            self._all_layers()
            left = list(self._on_way.values())
            logits = self._logits(np.stack([r.state for r in left])) if left else ()
            with self._changing:  # from here on it is too late to withdraw
                self._leave()
                found = {r.seq: row for r, row in zip(left, logits, strict=True) if r.seq in self._on_way}
                self._on_way = {}
        finally:
            engine.forecast, self._withdrawn = self.forecast, set(self._on_way)
            self._leave()  # where anything failed: all that are left
            self._withdrawn = set()
        for seq in found:
            session._next[seq] += 1
        return found

    def cancel(self, seq: int) -> bool:
        """Withdraw a sequence's token from the step that runs, from `between` or from another thread: before the next graph it leaves all
        queues and gives its cell back, and the sequence is as before the step. False where it is not on its way."""
        with self._changing:
            if seq in self._on_way:
                self._withdrawn.add(seq)
            return seq in self._on_way

    def _leave(self) -> None:
        """Whoever was withdrawn goes."""
        for seq in self._withdrawn & self._on_way.keys():
            self.session.cache.give_back(np.array([self._on_way.pop(seq).cell]))
            self.queues.cancel(seq)
            self.announced.forget(seq)

    def _all_layers(self) -> None:
        n_layer = self.model.hparams.n_layer
        while self._changed() and any(r.layer < n_layer for r in self._on_way.values()):
            if self._serve(idle=False):
                continue
            ready = [r for r in self._on_way.values() if r.layer < n_layer and r.hidden is None]
            if ready:
                layer = max((r.layer for r in ready), key=lambda i: (sum(r.layer == i for r in ready), -i))
                self._attend([r for r in ready if r.layer == layer], layer)
            elif not self._serve(idle=True):
                raise ModelError("tokens wait and no queue is served", "one of both")
            self.now += 1

    def _changed(self) -> bool:
        """Between two graphs: somebody else has a say, and whoever was withdrawn goes. Whether anybody is left."""
        self.between()
        with self._changing:
            self._leave()
        return bool(self._on_way)

    # ---- experts

    def _serve(self, idle: bool) -> bool:
        batches = self.queues.next(self.now, idle)
        for i, batch in enumerate(batches):
            if i:
                self._changed()
            if left := tuple(w for w in batch.tokens if w.token in self._on_way):
                self._compute(batch._replace(tokens=left))
            self.now += 1
        return bool(batches)

    def _compute(self, batch: Batch) -> None:
        waiting = [(w, self._on_way[w.token]) for w in batch.tokens]
        n, counters = len(waiting), self.run.counters
        e = self._expert_graph(batch.layer, bucket(n))
        rows = np.zeros(e.x.shape if e.x.ne[1] > 1 else (1, e.x.ne[0]), np.float32)
        weights = np.zeros(len(rows), np.float32)
        for i, (w, r) in enumerate(waiting):
            rows[i], weights[i] = r.hidden[1], r.hidden[3][w.rank]
        rows[n:] = rows[0]
        ids = np.full((len(rows), 1), batch.expert, np.int32)
        loads, ahead = counters.loads, counters.prefetches
        [out] = self._run(e.graph, {e.x: rows, e.ids: ids, e.weights: weights.reshape(-1, 1, 1)}, e.out)
        for i, (w, r) in enumerate(waiting):
            r.results[w.rank] = out.reshape(len(rows), -1)[i]
        self.batches.append((batch.layer, batch.expert, n, batch.cause))
        if counters.prefetches == ahead:  # else the time is that of another load besides
            if counters.loads > loads:
                self.readings.loaded(n, self.took)
            else:
                self.readings.batches.append((n, self.took))
        if self.adapt and len(self.batches) % self.adapt == 0:
            self._adapt()
        for seq in self.queues.done(w.token for w, _ in waiting):
            self._join(self._on_way[seq])

    def _adapt(self) -> None:
        """The threshold from the readings; the capacity from what the account leaves for queues, those there are included."""
        hp, limits, monitor = self.model.hparams, self.queues.limits, self.monitor
        row, queues = 4 * hp.n_embd, len(hp.moe_layers) * hp.n_expert
        free = limits.capacity * row * queues
        if monitor is not None:
            mine = {"queues": self.queues.n_waiting * row, "predictor": self.forecast.nbytes if self.forecast is not None else 0}
            for part, nbytes in {**self.run.memory(), **mine}.items():
                monitor.account(part, nbytes)
            free = max(0, monitor.limit - monitor.used + monitor.parts["queues"])
        self.queues.adapt(self.readings.limits(limits, free, row, queues))

    # ---- forecasts

    def expected(self, r: Request, layer: int, normed: np.ndarray) -> Iterable[tuple[int, Mapping[int, float]]]:
        """What a request's layers to come will want, said after its router in `layer` read `normed` (D,): (layer, expert -> share)."""
        return () if self.forecast is None else self.forecast.after(layer, np.array([r.hidden[2]]), normed[None])

    def _prefetch(self) -> None:
        """While a graph computes, an idle link brings the expert that most tokens are announced for; those that somebody waits for stay."""
        engine, wanted = self.run.engine, self.announced.missing(self._is_there)
        if wanted is not None:
            engine.fetch(*wanted, [key for key in self.queues.queues if self._is_there(*key)])

    @staticmethod
    def _join(r: Request) -> None:
        """Add up as the graph of a whole layer does: results best first, the shared expert, the residual stream."""
        residual, _, _, _, shared = r.hidden
        out = r.results[0]
        for more in (*r.results[1:], *(() if shared is None else (shared,))):
            out = out + more
        r.state, r.hidden, r.layer = out + residual, None, r.layer + 1

    def _expert_graph(self, layer: int, n: int) -> _Expert:
        if (layer, n) not in self._experts:
            hp, whole = self.model.hparams, self.model.experts(layer)
            ctx = Context(64 * TENSOR_OVERHEAD, no_alloc=True, name=f"experts of layer {layer}, {n} tokens")
            x = ctx.new_tensor("f32", hp.n_embd, n, name="tokens").mark(Flag.INPUT)
            ids = ctx.new_tensor("i32", 1, n, name="expert").mark(Flag.INPUT)
            weights = ctx.new_tensor("f32", 1, 1, n, name="weights").mark(Flag.INPUT)
            graph = CGraph()
            with ctx.active():
                one = ExpertWeights(whole.gate, whole.up, whole.down)
                out = build_experts(x, one, Routing(ids, weights, x, x), graph=graph, layer=layer)
            graph.build_forward_expand(out.mark(Flag.OUTPUT))
            self._experts[layer, n] = _Expert(graph, x, ids, weights, out)
        return self._experts[layer, n]

    # ---- attention

    def _attend(self, requests: Sequence[Request], layer: int) -> None:
        """The attention of a layer for all requests that are ready for it; their tokens then stand in queues."""
        n, cache = bucket(len(requests)), self.session.cache
        a = self._attention_graph(layer, n, cache.n_kv())
        filled = [*requests, *[requests[0]] * (n - len(requests))]  # rows that fill up repeat the first: they write the same cell
        seqs, positions, cells = (np.array([getattr(r, what) for r in filled]) for what in ("seq", "position", "cell"))
        mask = np.empty((n, a.builder.n_kv), np.float32)
        cache.fill_mask(mask, seqs, positions)
        inputs, values = a.builder.inputs, {a.x: np.stack([r.state for r in filled])}
        v_idxs = cache.v_indices(cells)
        for name, value in {"pos": positions, "k_idxs": cells, "v_idxs": v_idxs, "mask": mask, "out_ids": np.arange(n)}.items():
            leaf = getattr(inputs, name, None)
            if leaf in a.graph.leafs:
                values[leaf] = value
        wanted = [t for t in (a.residual, a.normed, a.chosen, a.weights, a.shared, a.out) if t is not None]
        found = dict(zip(wanted, self._run(a.graph, values, *wanted), strict=True))
        rows = {t: v.reshape(n, -1) for t, v in found.items()}
        for i, r in enumerate(requests):
            if a.out is not None:
                r.state, r.layer = rows[a.out][i].copy(), layer + 1
                continue
            assert a.chosen is not None and a.weights is not None
            shared = rows[a.shared][i].copy() if a.shared is not None else None
            chosen = rows[a.chosen][i].astype(int).tolist()
            r.hidden = rows[a.residual][i].copy(), rows[a.normed][i].copy(), chosen, rows[a.weights][i].copy(), shared
            r.results = np.zeros((len(chosen), self.model.hparams.n_embd), np.float32)
            self.queues.add(r.seq, layer, chosen, self.now)
            self.announced.arrived(r.seq, layer)
            for target, scores in self.expected(r, layer, r.hidden[1]):
                if target > layer:  # of this token, not of the next
                    self.announced.say(r.seq, target, scores)

    def _attention_graph(self, layer: int, n: int, n_kv: int) -> _Attention:
        key = layer, n, n_kv
        if key in self._attentions:
            return self._attentions[key]
        b = Builder(self.model, self.session.cache, n, n_kv, n)
        x = b.leaf("layer input", "f32", self.model.hparams.n_embd, n)
        hidden, shared, out = b.attention(x, layer), None, None
        if hidden.routing is None:
            out = b.experts(hidden, layer)
        elif (network := self.model.experts(layer).shared) is not None:
            with b.context.active():
                shared = build_ffn(hidden.normed, network, layer=layer)
            b.graph.build_forward_expand(shared)
        routing = hidden.routing
        a = _Attention(b.graph, b, x, hidden.residual, hidden.normed, routing.experts if routing else None,
                       routing.weights if routing else None, shared, out)  # fmt: skip
        for t in (a.residual, a.normed, a.shared, a.out):
            if t is not None:
                t.mark(Flag.OUTPUT)
        for t in (a.chosen, a.weights):
            if t is not None:
                t.root().mark(Flag.OUTPUT)
        self._attentions[key] = a
        return a

    # ---- both ends

    def _embedded(self, tokens: Sequence[int]) -> np.ndarray:
        b = Builder(self.model, self.session.cache, len(tokens), 256, 1)
        x = b.embedding()
        x.mark(Flag.OUTPUT)
        return self._run(b.graph, {b.inputs.tokens: np.array(tokens)}, x)[0].reshape(len(tokens), -1).copy()

    def _logits(self, states: np.ndarray) -> np.ndarray:
        n = len(states)
        b = Builder(self.model, self.session.cache, n, 256, n)
        x = b.leaf("last state", "f32", states.shape[1], n)
        logits = b.output(x)
        return self._run(b.graph, {x: states}, logits)[0].reshape(n, -1).copy()

    def _run(self, graph: CGraph, values: dict[Tensor, np.ndarray], *wanted: Tensor) -> list[np.ndarray]:
        scheduler, device = self.run.scheduler, self.run.engine.pool.device
        scheduler.reset()
        scheduler.alloc(graph)
        begun = self._clock(device)
        for leaf, value in values.items():
            leaf.set(value)
        scheduler.compute_async(graph)
        with scheduler._runtime.giving_up():
            if self.run.engine.prefetches and self.announced.sums:
                self._prefetch()
            scheduler._runtime.synchronize(copies=False)
        out = [t.numpy() for t in wanted]
        self.took = self._clock(device) - begun
        return out

    @staticmethod
    def _clock(device: Backend) -> int:
        """Nanoseconds: virtual on a simulated machine, real elsewhere."""
        return device.buffer_type.now or time.perf_counter_ns()
