"""Expert layers: the feed-forward networks a token is sent through, and how their results are combined.

The nodes are those of llama.cpp's `build_moe_ffn` and `build_ffn`, in its order and with its names.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.moe.routers import Expander, NameNode, Router, Routing, build_router, name_node
from workbench.tensors import Tensor, ops


@dataclass(frozen=True)
class FeedForward:
    """A gated feed-forward network: `down @ (silu(gate @ x) * (up @ x))`, matrices [D, F], [D, F], [F, D]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class ExpertWeights:
    """The merged matrices of all experts of a layer, [D, F, E], [D, F, E], [F, D, E], and those of the shared expert.

    shared_gate [D]: its product with a token says, through a sigmoid, how much the shared expert counts (Qwen2). biases: of gate,
    up and down, [F, E], [F, E], [D, E], with the clipped unit SWIGLU_OAI (gpt-oss).
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    shared: FeedForward | None = None
    shared_gate: Tensor | None = None
    biases: tuple[Tensor, Tensor, Tensor] | None = None


def build_ffn(x: Tensor, weights: FeedForward, *, name: NameNode = name_node, layer: int = 0) -> Tensor:
    """A dense SwiGLU network over `x` [D, T] (`build_ffn` in llama.cpp); the result is left unnamed, as there."""
    up = name(ops.mul_mat(weights.up, x), "ffn_up", layer)
    gate = name(ops.mul_mat(weights.gate, x), "ffn_gate", layer)
    hidden = name(ops.swiglu_split(gate, up), "ffn_swiglu", layer)
    return ops.mul_mat(weights.down, hidden)


def build_experts(x: Tensor, experts: ExpertWeights, routing: Routing, *, graph: Expander | None = None,
                  name: NameNode = name_node, layer: int = 0) -> Tensor:  # fmt: skip
    """Send `x` [D, T] through the chosen experts and add their weighted results; then the shared expert, if any.

    The sum is a chain of k - 1 additions over strided views, not a reduction.
    """
    expand = graph.build_forward_expand if graph is not None else lambda tensor: None
    width, n_tokens = x.ne[:2]
    ids, k = routing.experts, routing.experts.ne[0]
    row = ops.reshape(x, width, 1, n_tokens)  # one row, read by all k experts of the token
    gate_bias, up_bias, down_bias = experts.biases or (None, None, None)

    def product(matrices: Tensor, x: Tensor, what: str, bias: Tensor | None) -> Tensor:
        out = name(ops.mul_mat_id(matrices, x, ids), f"ffn_moe_{what}", layer)
        return out if bias is None else name(ops.add_id(out, bias, ids), f"ffn_moe_{what}_biased", layer)

    up = product(experts.up, row, "up", up_bias)
    gate = product(experts.gate, row, "gate", gate_bias)
    if experts.biases is None:
        hidden = name(ops.swiglu_split(gate, up), "ffn_moe_swiglu", layer)
    else:
        hidden = name(ops.swiglu_oai(gate, up), "ffn_moe_swiglu_oai", layer)
    results = product(experts.down, hidden, "down", down_bias)
    results = name(ops.mul(results, routing.weights), "ffn_moe_weighted", layer)
    expand(results)
    parts = [ops.view(results, width, n_tokens, nb=(results.nb[2],), offset=i * results.nb[1]) for i in range(k)]
    for part in parts:  # all views stand before the first addition
        expand(part)
    out = parts[0]
    for part in parts[1:]:
        out = ops.add(out, part)
        expand(out)
    if k == 1:
        out = ops.cont(out)  # what follows expects packed rows
    name(out, "ffn_moe_out", layer)
    if experts.shared is None:
        return out
    share = _share(x, experts.shared_gate, name, layer) if experts.shared_gate is not None else None
    shared = name(build_ffn(x, experts.shared, name=name, layer=layer), "ffn_shexp", layer)
    if share is not None:
        shared = name(ops.mul(shared, share), "ffn_shexp_out", layer)
    return name(ops.add(out, shared), "ffn_out", layer)


def _share(x: Tensor, gate: Tensor, name: NameNode, layer: int) -> Tensor:
    """How much the shared expert counts for each token: a sigmoid, built as silu(z) / z."""
    z = name(ops.mul_mat(gate, x), "ffn_shexp_gate_inp", layer)
    return name(ops.div(ops.silu(z), z), "ffn_shexp_gate", layer)


def build_moe_ffn(x: Tensor, gate_inp: Tensor, experts: ExpertWeights, router: Router, *, graph: Expander | None = None,
                  name: NameNode = name_node, layer: int = 0) -> Tensor:  # fmt: skip
    """A whole expert layer over `x` [D, T]: router `gate_inp` [D, E], chosen experts, combination (`build_moe_ffn`)."""
    routing = build_router(x, gate_inp, router, graph=graph, name=name, layer=layer)
    return build_experts(x, experts, routing, graph=graph, name=name, layer=layer)
