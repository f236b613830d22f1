"""The graphs of the transformer models (`llm_graph_context` and the model builders in llama.cpp).

A graph is made of segments: the embedding; per layer attention with the router, then experts with their combination; and the
output. Each segment is a method that takes tensors and adds its nodes, so it can be built alone (its inputs are then leafs
that somebody fills) or all in a row. In a row they are, node for node, the graph that llama.cpp builds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from workbench.cgraph import CGraph
from workbench.models.kv_cache import KVCache
from workbench.models.model import Model
from workbench.moe import Routing, build_experts, build_ffn, build_router, name_node
from workbench.tensors import Context, Flag, Tensor, ops
from workbench.tensors.context import TENSOR_OVERHEAD

PREC_F32 = 10
"""`GGML_PREC_F32`: products of keys and queries are to be summed in f32, whatever a device would prefer."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a graph: kind is embedding, attention, experts or output; its nodes are first … last - 1."""

    kind: str
    layer: int
    first: int
    last: int


@dataclass(frozen=True)
class Hidden:
    """What goes from the attention segment of a layer to its experts: the residual stream (`ffn_inp`), the same normalised
    (`ffn_norm`), and the router's choice (None in a layer without experts)."""

    residual: Tensor
    normed: Tensor
    routing: Routing | None


@dataclass(eq=False)
class Inputs:
    """The leafs that are filled before each run: token ids and positions [T], the cache cells that K and V go to, which cells
    each token sees [n_kv, T], and the rows that logits are wanted for."""

    tokens: Tensor
    pos: Tensor
    k_idxs: Tensor
    v_idxs: Tensor
    mask: Tensor
    out_ids: Tensor


@dataclass(eq=False)
class StepGraph:
    """The graph of one step: T tokens, n_kv visible cells, n_outputs rows of logits."""

    context: Context
    graph: CGraph
    inputs: Inputs
    logits: Tensor
    segments: list[Segment] = field(default_factory=list)
    routings: list[Routing] = field(default_factory=list)


class Builder:
    """Adds the segments of a model to a graph (`llm_graph_context`). `n_tokens`, `n_kv`, `n_outputs` fix its shape."""

    def __init__(self, model: Model, cache: KVCache, n_tokens: int, n_kv: int, n_outputs: int) -> None:
        hp = model.hparams
        self.model, self.hp, self.cache = model, hp, cache
        self.n_tokens, self.n_kv, self.n_outputs = n_tokens, n_kv, n_outputs
        size = max(2048, hp.n_layer * (64 + 2 * hp.n_expert_used))
        self.context = Context(2 * size * TENSOR_OVERHEAD, no_alloc=True, name=f"graph of {n_tokens} tokens")
        self.graph = CGraph(size=size, name=f"{hp.arch} {n_tokens} tokens")
        self.inputs = Inputs(
            tokens=self.leaf("inp_tokens", "i32", n_tokens),
            pos=self.leaf("inp_pos", "i32", n_tokens),
            k_idxs=self.leaf("attn_inp_k_idxs", "i64", n_tokens),
            v_idxs=self.leaf("attn_inp_v_idxs", "i64", n_tokens * hp.n_embd_kv),
            mask=self.leaf("attn_inp_kq_mask", "f32", n_kv, n_tokens),
            out_ids=self.leaf("out_ids", "i32", n_outputs),
        )

    def leaf(self, name: str, kind: str, *ne: int) -> Tensor:
        """A tensor that is filled from outside before each run."""
        return self.context.new_tensor(kind, *ne, name=name).mark(Flag.INPUT)

    def boundary(self, layer: int) -> Hidden:
        """Leafs in place of the attention segment of `layer`, so that its experts can be built and run alone."""
        n = self.n_outputs if layer == self.hp.n_layer - 1 else self.n_tokens
        residual, normed = (self.leaf(f"{what}-{layer}", "f32", self.hp.n_embd, n) for what in ("ffn_inp", "ffn_norm"))
        if layer not in self.hp.moe_layers:
            return Hidden(residual, normed, None)
        e, k = self.hp.n_expert, self.hp.n_expert_used
        logits, probs = (self.leaf(f"ffn_moe_{what}-{layer}", "f32", e, n) for what in ("logits", "probs"))
        ids, weights = self.leaf(f"ffn_moe_topk-{layer}", "i32", k, n), self.leaf(f"ffn_moe_weights-{layer}", "f32", 1, k, n)
        return Hidden(residual, normed, Routing(ids, weights, logits, probs))

    # ---- segments

    def embedding(self) -> Tensor:
        """Token ids to hidden states [D, T]."""
        with self.context.active():
            x = name_node(ops.get_rows(self.model.weight("token_embd"), self.inputs.tokens), "embd", -1)
        self.graph.build_forward_expand(x)
        return x

    def attention(self, x: Tensor, layer: int) -> Hidden:
        """Attention over the cache, the residual sum, its norm and the router; in the last layer only for the rows wanted."""
        with self.context.active():
            out = self._attend(self._norm(x, "attn_norm", layer), layer)
            if layer == self.hp.n_layer - 1:
                out, x = ops.get_rows(out, self.inputs.out_ids), ops.get_rows(x, self.inputs.out_ids)
            residual = name_node(ops.add(out, x), "ffn_inp", layer)
            normed = self._norm(residual, "ffn_norm", layer)
            routing = None
            if layer in self.hp.moe_layers:
                routing = build_router(normed, self.model.weight("ffn_gate_inp", layer), self.hp.router, graph=self.graph, layer=layer)
        self.graph.build_forward_expand(normed)
        return Hidden(residual, normed, routing)

    def experts(self, hidden: Hidden, layer: int) -> Tensor:
        """The feed-forward part: experts (or one dense network), combined and added to the residual stream."""
        with self.context.active():
            if hidden.routing is not None:
                out = build_experts(hidden.normed, self.model.experts(layer), hidden.routing, graph=self.graph, layer=layer)
            else:
                out = name_node(build_ffn(hidden.normed, self.model.feed_forward(layer), layer=layer), "ffn_out", layer)
            out = name_node(ops.add(out, hidden.residual), "l_out", layer)
        self.graph.build_forward_expand(out)
        return out

    def output(self, x: Tensor) -> Tensor:
        """The last norm and the logits [n_vocab, n_outputs]."""
        with self.context.active():
            x = self._norm(x, "output_norm", -1, "result_norm").mark(Flag.OUTPUT)
            logits = name_node(ops.mul_mat(self.model.output, x), "result_output", -1).mark(Flag.OUTPUT)
        self.graph.build_forward_expand(logits)
        return logits

    # ---- parts

    def _norm(self, x: Tensor, weight: str, layer: int, name: str = "") -> Tensor:
        x = name_node(ops.rms_norm(x, self.hp.rms_eps), "norm", layer)
        return name_node(ops.mul(x, self.model.weight(weight, layer if layer >= 0 else None)), name or weight, layer)

    def _attend(self, x: Tensor, layer: int) -> Tensor:
        hp, expand = self.hp, self.graph.build_forward_expand
        q, k, v = (self._heads(x, what, heads, layer) for what, heads in (("q", hp.n_head), ("k", hp.n_head_kv), ("v", hp.n_head_kv)))
        q, k = self._rope(q, "Qcur", layer), self._rope(k, "Kcur", layer)
        for part in (q, v, k):  # in this order, although K was built before V
            expand(part)
        expand(self.cache.write_k(layer, k, self.inputs.k_idxs))
        expand(self.cache.write_v(layer, v, self.inputs.v_idxs))
        k, v = self.cache.read_k(layer, self.n_kv), self.cache.read_v(layer, self.n_kv)
        q = ops.view(q, *q.ne, nb=(q.nb[1], q.nb[2], q.nb[2] * q.ne[2]))
        q, k, v = (ops.permute(part, 0, 2, 1, 3) for part in (q, k, v))
        scale = float(np.float32(1) / np.sqrt(np.float32(hp.n_embd_head)))
        kq = name_node(ops.mul_mat(k, q, prec_acc=PREC_F32), "kq", layer)
        kq = name_node(ops.soft_max_ext(kq, self.inputs.mask, scale), "kq_soft_max", layer)
        kqv = ops.permute(name_node(ops.mul_mat(v, kq), "kqv", layer), 0, 2, 1, 3)
        out = ops.cont(kqv, hp.n_embd, self.n_tokens)
        expand(out)
        out = ops.mul_mat(self.model.weight("attn_output", layer), name_node(out, "kqv_out", layer))
        return name_node(out, "attn_out", layer) if hp.arch == "llama" else out  # llama.cpp names it in one of the two only

    def _heads(self, x: Tensor, what: str, n_head: int, layer: int) -> Tensor:
        name = f"{what.upper()}cur"
        out = name_node(ops.mul_mat(self.model.weight(f"attn_{what}", layer), x), name, layer)
        return name_node(ops.reshape(out, self.hp.n_embd_head, n_head, self.n_tokens), name, layer)

    def _rope(self, x: Tensor, name: str, layer: int) -> Tensor:
        hp = self.hp
        x = ops.rope(x, self.inputs.pos, hp.n_rot, 0, self.model.weights.get("rope_freqs.weight"), n_ctx_orig=hp.n_ctx_orig,
                     freq_base=hp.rope_freq_base, freq_scale=hp.rope_freq_scale)  # fmt: skip
        return name_node(x, name, layer)


def build_step(model: Model, cache: KVCache, n_tokens: int, n_kv: int, n_outputs: int) -> StepGraph:
    """All segments in a row: the graph that llama.cpp builds for one batch (`llama_model::build_graph`)."""
    b = Builder(model, cache, n_tokens, n_kv, n_outputs)
    segments: list[Segment] = []
    routings: list[Routing] = []

    def ended(kind: str, layer: int = -1) -> None:
        segments.append(Segment(kind, layer, segments[-1].last if segments else 0, len(b.graph.nodes)))

    x = b.embedding()
    ended("embedding")
    for layer in range(model.hparams.n_layer):
        hidden = b.attention(x, layer)
        ended("attention", layer)
        x = b.experts(hidden, layer)
        ended("experts", layer)
        if hidden.routing is not None:
            routings.append(hidden.routing)
    logits = b.output(x)
    ended("output")
    return StepGraph(b.context, b.graph, b.inputs, logits, segments, routings)
