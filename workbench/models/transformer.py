"""The graphs of the transformer models (`llm_graph_context` and the model builders in llama.cpp).

A graph is made of segments: the embedding; per layer attention with the router, then experts with their combination; and the
output. Each segment is a method that takes tensors and adds its nodes, so it can be built alone (its inputs are then leafs
that somebody fills) or all in a row. In a row they are, node for node, the graph that llama.cpp builds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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


class Inputs:
    """The leafs that are filled before each run, as attributes: tokens, pos: ids and positions [T]; k_idxs, v_idxs: the cache
    cells that K and V go to; mask: which cells each token sees [n_kv, T]; out_ids: the rows that logits are wanted for.

    Names with _swa serve the layers with a sliding window, where there are any; compressed attention has no v_idxs.
    """

    tokens: Tensor
    pos: Tensor
    k_idxs: Tensor
    v_idxs: Tensor
    mask: Tensor
    out_ids: Tensor

    def __init__(self, **leafs: Tensor) -> None:
        vars(self).update(leafs)

    def of(self, name: str, windowed: bool) -> Tensor:
        """One of k_idxs, v_idxs, mask for a layer with or without a window."""
        leaf: Tensor = getattr(self, f"{name}_swa" if windowed else name)
        return leaf


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
        size = max(2048, hp.n_layer * (96 + 2 * hp.n_expert_used))
        self.context = Context(2 * size * TENSOR_OVERHEAD, no_alloc=True, name=f"graph of {n_tokens} tokens")
        self.graph = CGraph(size=size, name=f"{hp.arch} {n_tokens} tokens")
        self.inputs = Inputs(
            tokens=self.leaf("inp_tokens", "i32", n_tokens),
            pos=self.leaf("inp_pos", "i32", n_tokens),
            **self._attention_inputs(""),
            **(self._attention_inputs("_swa") if hp.window else {}),
            out_ids=self.leaf("out_ids", "i32", n_outputs),
        )

    def _attention_inputs(self, suffix: str) -> dict[str, Tensor]:
        """The leafs of layers with (`_swa`) or without a window; in llama.cpp their names are the same."""
        n, n_v = self.n_tokens, self.hp.n_embd_v
        return ({f"k_idxs{suffix}": self.leaf("attn_inp_k_idxs", "i64", n)}
                | ({f"v_idxs{suffix}": self.leaf("attn_inp_v_idxs", "i64", n * n_v)} if n_v else {})
                | {f"mask{suffix}": self.leaf("attn_inp_kq_mask", "f32", self.n_kv, n)})  # fmt: skip

    def leaf(self, name: str, kind: str, *ne: int) -> Tensor:
        """A tensor that is filled from outside before each run."""
        return self.context.new_tensor(kind, *ne, name=name).mark(Flag.INPUT)

    def boundary(self, layer: int) -> Hidden:
        """Leafs in place of the attention segment of `layer`, so that its experts can be built and run alone."""
        n = self.n_outputs if self._picks_rows(layer) else self.n_tokens
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

    def _picks_rows(self, layer: int) -> bool:
        """Whether only the rows wanted leave the attention of a layer."""
        return layer == self.hp.n_layer - 1 and not self.hp.traits.late_rows

    def attention(self, x: Tensor, layer: int) -> Hidden:
        """Attention over the cache, the residual sum, its norm and the router; in the last layer only for the rows wanted."""
        model, traits = self.model, self.hp.traits
        with self.context.active():
            attend = self._attend_compressed if traits.mla else self._attend
            out = attend(self._norm(x, "attn_norm", layer), layer)
            if self._picks_rows(layer):
                out, x = ops.get_rows(out, self.inputs.out_ids), ops.get_rows(x, self.inputs.out_ids)
            residual = name_node(ops.add(out, x), "ffn_inp", layer)
            if traits.oss:
                normed = self._norm(residual, "post_attention_norm", layer, "attn_post_norm")
            else:
                normed = self._norm(residual, "ffn_norm", layer)
            routing = None
            if layer in self.hp.moe_layers:
                routing = build_router(normed, model.weight("ffn_gate_inp", layer), self.hp.router, bias=model.bias("ffn_gate_inp", layer),
                                       selection_bias=model.bias("exp_probs_b", layer), graph=self.graph, layer=layer)  # fmt: skip
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
            if self.hp.traits.late_rows:
                x = ops.get_rows(x.mark(Flag.OUTPUT), self.inputs.out_ids)
            x = self._norm(x, "output_norm", -1, "result_norm").mark(Flag.OUTPUT)
            logits = name_node(ops.mul_mat(self.model.output, x), "result_output", -1).mark(Flag.OUTPUT)
        self.graph.build_forward_expand(logits)
        return logits

    # ---- parts

    def _norm(self, x: Tensor, weight: str, layer: int, name: str = "") -> Tensor:
        x = name_node(ops.rms_norm(x, self.hp.rms_eps), "norm", layer)
        return name_node(ops.mul(x, self.model.weight(weight, layer if layer >= 0 else None)), name or weight, layer)

    def _attend(self, x: Tensor, layer: int) -> Tensor:
        """Attention over whole keys and values."""
        hp, inputs, expand, windowed = self.hp, self.inputs, self.graph.build_forward_expand, self.hp.windowed(layer)
        q, k, v = (self._heads(x, what, heads, layer) for what, heads in (("q", hp.n_head), ("k", hp.n_head_kv), ("v", hp.n_head_kv)))
        q, k = self._rope(q, "Qcur", layer), self._rope(k, "Kcur", layer)
        name_node(v, "Vcur", layer)
        for part in (q, k, v) if hp.window else (q, v, k):  # in this order, although K was built before V
            expand(part)
        expand(self.cache.write_k(layer, k, inputs.of("k_idxs", windowed)))
        expand(self.cache.write_v(layer, v, inputs.of("v_idxs", windowed)))
        k, v = self.cache.read_k(layer, self.n_kv), self.cache.read_v(layer, self.n_kv)
        sinks = self.model.weight("attn_sinks", layer) if hp.traits.oss else None
        return self._weighed(q, k, ops.permute(v, 0, 2, 1, 3), layer, sinks)

    def _attend_compressed(self, x: Tensor, layer: int) -> Tensor:
        """Multi-head latent attention: K and V of all heads are one short row per token, and the matrix that would unfold K goes to
        the queries instead."""
        hp, model, expand, n = self.hp, self.model, self.graph.build_forward_expand, self.n_tokens
        heads, rank, rot = hp.n_head, hp.n_lora_kv, hp.n_rot
        plain = hp.n_embd_head - rot
        if hp.n_lora_q:
            q = name_node(ops.mul_mat(model.weight("attn_q_a", layer), x), "q", layer)
            q = name_node(ops.mul_mat(model.weight("attn_q_b", layer), self._norm(q, "attn_q_a_norm", layer, "q")), "q", layer)
        else:
            q = name_node(ops.mul_mat(model.weight("attn_q", layer), x), "q", layer)
        q = name_node(ops.reshape(q, hp.n_embd_head, heads, n), "q", layer)
        both = name_node(ops.mul_mat(model.weight("attn_kv_a_mqa", layer), x), "kv_cmpr_pe", layer)
        kv = name_node(ops.view(both, rank, n, nb=(both.nb[1],)), "kv_cmpr", layer)
        k_turned = name_node(ops.view(both, rot, 1, n, nb=(both.nb[1], both.nb[1]), offset=4 * rank), "k_pe", layer)
        k_turned = self._turned(k_turned, "k_pe", layer)
        kv = self._norm(kv, "attn_kv_a_norm", layer, "kv_cmpr")
        q_plain = name_node(ops.view(q, plain, heads, n, nb=q.nb[1:3]), "q_nope", layer)
        q_turned = name_node(ops.view(q, rot, heads, n, nb=q.nb[1:3], offset=4 * plain), "q_pe", layer)
        q_turned = self._turned(q_turned, "q_pe", layer)
        q_plain = name_node(ops.permute(q_plain, 0, 2, 1, 3), "q_nope_perm", layer)
        q_plain = name_node(ops.mul_mat(model.weight("attn_k_b", layer), q_plain), "q_nope_absorbed", layer)
        q_plain = name_node(ops.permute(q_plain, 0, 2, 1, 3), "q_nope_absorbed_perm", layer)
        q = name_node(ops.concat(q_plain, q_turned, 0), "Qcur", layer)
        v = name_node(ops.reshape(kv, rank, 1, n), "kv_cmpr_reshape", layer)
        k = name_node(ops.concat(v, k_turned, 0), "Kcur", layer)
        for part in (q, name_node(v, "Vcur", layer), k):
            expand(part)
        expand(self.cache.write_k(layer, k, self.inputs.k_idxs))
        k = self.cache.read_k(layer, self.n_kv)
        v = ops.permute(ops.view(k, rank, *k.ne[1:], nb=k.nb[1:]), 0, 2, 1, 3)
        return self._weighed(q, k, v, layer, unfold=model.weight("attn_v_b", layer))

    def _weighed(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None, unfold: Tensor | None = None) -> Tensor:
        """softmax(K·Q) · V and the output matrix (`build_attn_mha`); unfold: what makes whole values of compressed ones."""
        hp, model = self.hp, self.model
        q = ops.view(q, *q.ne, nb=(q.nb[1], q.nb[2], q.nb[2] * q.ne[2]))
        q, k = ops.permute(q, 0, 2, 1, 3), ops.permute(k, 0, 2, 1, 3)
        kq = name_node(ops.mul_mat(k, q, prec_acc=PREC_F32), "kq", layer)
        mask = self.inputs.of("mask", hp.windowed(layer))
        kq = name_node(ops.soft_max_ext(kq, mask, hp.kq_scale, sinks=sinks), "kq_soft_max", layer)
        if unfold is not None:
            v = name_node(ops.cont(ops.transpose(v)), "v_cont", layer)
        kqv = name_node(ops.mul_mat(v, kq), "kqv", layer)
        if unfold is not None:
            kqv = name_node(ops.mul_mat(unfold, kqv), "kqv_mla", layer)
        kqv = ops.permute(kqv, 0, 2, 1, 3)
        out = ops.cont(kqv, kqv.ne[0] * kqv.ne[1], self.n_tokens)
        self.graph.build_forward_expand(out)
        out = ops.mul_mat(model.weight("attn_output", layer), name_node(out, "kqv_out", layer))
        bias = model.bias("attn_output", layer)
        out = out if bias is None else ops.add(out, bias)
        return name_node(out, "attn_out", layer) if hp.traits.names_attention else out

    def _heads(self, x: Tensor, what: str, n_head: int, layer: int) -> Tensor:
        """Q, K or V as [head, heads, T], with bias and norm where the model has them."""
        name, normed = f"{what.upper()}cur", self.hp.traits.qk_norm if what in "qk" else ""
        out = name_node(ops.mul_mat(self.model.weight(f"attn_{what}", layer), x), name, layer)
        if (bias := self.model.bias(f"attn_{what}", layer)) is not None:
            out = name_node(ops.add(out, bias), name, layer)
        if normed == "whole":
            out = self._norm(out, f"attn_{what}_norm", layer, f"{name}_normed")
        out = ops.reshape(out, self.hp.n_embd_head, n_head, self.n_tokens)
        if self.hp.traits.qk_norm != "whole":
            name_node(out, name, layer)
        if normed == "per head":
            out = self._norm(out, f"attn_{what}_norm", layer, f"{name}_normed")
        return out

    def _rope(self, x: Tensor, name: str, layer: int) -> Tensor:
        return self._turned(x, name, layer, self.model.weights.get("rope_freqs.weight"))

    def _turned(self, x: Tensor, name: str, layer: int, freq_factors: Tensor | None = None) -> Tensor:
        """RoPE with the model's numbers."""
        hp = self.hp
        extent, attention, fast, slow = hp.yarn
        x = ops.rope(x, self.inputs.pos, hp.n_rot, hp.traits.rope_mode, freq_factors, n_ctx_orig=hp.n_ctx_orig, freq_base=hp.rope_freq_base,
                     freq_scale=hp.rope_freq_scale, ext_factor=extent, attn_factor=attention, beta_fast=fast, beta_slow=slow)  # fmt: skip
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
