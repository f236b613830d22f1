"""Token queues over real tensors: several requests decode side by side, and each expert computes for whoever waits for it.

A layer is two kinds of graph: attention with the router, for the requests that are ready for it; and one expert's network, for the tokens
in its queue. Both run through the scheduler, with the engine bringing experts into their slots; a token's k results are added up in
the order of its router's choice. Rows are computed in other company than in one graph for all, so results agree closely, not bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from workbench.cgraph import CGraph
from workbench.errors import ModelError, ParameterError
from workbench.expertflow.batching import Batch, Limits, TokenQueues
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
    clock counts actions, so max_wait is a number of attention and expert graphs. batches: (layer, expert, tokens, cause) of each
    expert graph.
    """

    def __init__(self, run: Offloaded, limits: Limits, threshold: int = 2) -> None:
        self.run, self.session, self.model = run, run.session, run.session.model
        hp = self.model.hparams
        if not hp.moe_layers or hp.traits.late_rows or hp.window:
            raise ModelError(f"{self.model.name} ({hp.arch})", "a mixture of experts of the llama or deepseek form without sliding windows")
        self.queues = TokenQueues(limits, hp.n_expert_used, threshold, lambda layer, e: (layer, e) in run.engine.pool.where)
        self.now = 0
        self.batches: list[tuple[int, int, int, str]] = []
        self._attentions: dict[tuple[int, int, int], _Attention] = {}
        self._experts: dict[tuple[int, int], _Expert] = {}

    def step(self, tokens: dict[int, int]) -> dict[int, np.ndarray]:
        """One more token of each sequence (sequence -> token id); the logits (n_vocab,) of each. All of them or none: where anything
        fails, their cells of the cache are given back."""
        if not tokens:
            raise ParameterError("no sequence to decode", "at least one: {sequence: token}")
        session, requests = self.session, [Request(seq, token) for seq, token in tokens.items()]
        at = np.array([session.n_past(r.seq) for r in requests])
        cells = session.cache.take(np.array([r.seq for r in requests]), at)
        try:
            rows = self._embedded([r.token for r in requests])
            for r, cell, position, row in zip(requests, cells.tolist(), at.tolist(), rows, strict=True):
                r.cell, r.position, r.state = cell, position, row
            self._all_layers(requests)
            logits = self._logits(np.stack([r.state for r in requests]))
        except BaseException:
            session.cache.give_back(cells)
            for r in requests:
                self.queues.cancel(r.seq)
            raise
        for r in requests:
            session._next[r.seq] += 1
        return {r.seq: row for r, row in zip(requests, logits, strict=True)}

    def _all_layers(self, requests: Sequence[Request]) -> None:
        by_seq, n_layer = {r.seq: r for r in requests}, self.model.hparams.n_layer
        while any(r.layer < n_layer for r in requests):
            if self._serve(by_seq, idle=False):
                continue
            ready = [r for r in requests if r.layer < n_layer and r.hidden is None]
            if ready:
                layer = max((r.layer for r in ready), key=lambda i: (sum(r.layer == i for r in ready), -i))
                self._attend([r for r in ready if r.layer == layer], layer)
            elif not self._serve(by_seq, idle=True):
                raise ModelError("tokens wait and no queue is served", "one of both")
            self.now += 1

    # ---- experts

    def _serve(self, by_seq: dict[int, Request], idle: bool) -> bool:
        batches = self.queues.next(self.now, idle)
        for batch in batches:
            self._compute(batch, by_seq)
            self.now += 1
        return bool(batches)

    def _compute(self, batch: Batch, by_seq: dict[int, Request]) -> None:
        waiting = [(w, by_seq[w.token]) for w in batch.tokens]
        n = len(waiting)
        e = self._expert_graph(batch.layer, bucket(n))
        rows = np.zeros(e.x.shape if e.x.ne[1] > 1 else (1, e.x.ne[0]), np.float32)
        weights = np.zeros(len(rows), np.float32)
        for i, (w, r) in enumerate(waiting):
            rows[i], weights[i] = r.hidden[1], r.hidden[3][w.rank]
        rows[n:] = rows[0]
        ids = np.full((len(rows), 1), batch.expert, np.int32)
        [out] = self._run(e.graph, {e.x: rows, e.ids: ids, e.weights: weights.reshape(-1, 1, 1)}, e.out)
        for i, (w, r) in enumerate(waiting):
            r.results[w.rank] = out.reshape(len(rows), -1)[i]
        self.batches.append((batch.layer, batch.expert, n, batch.cause))
        for seq in self.queues.done(w.token for w, _ in waiting):
            self._join(by_seq[seq])

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
        scheduler = self.run.scheduler
        scheduler.reset()
        scheduler.alloc(graph)
        for leaf, value in values.items():
            leaf.set(value)
        scheduler.compute(graph)
        return [t.numpy() for t in wanted]
