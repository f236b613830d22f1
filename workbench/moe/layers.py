"""Expert layers: the feed-forward networks a token is sent through, and how their results are combined.

The nodes are those of llama.cpp's `build_moe_ffn` and `build_ffn`, in its order and with its names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.errors import ParameterError, ShapeError
from workbench.moe.routers import Expander, NameNode, Router, Routing, build_router, name_node
from workbench.tensors import Tensor, ops

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor] | None, Callable[[Tensor, Tensor], Tensor], str]] = {
    "silu": (ops.silu, ops.swiglu_split, "swiglu"),
    "relu": (ops.relu, ops.reglu_split, "reglu"),
    "gelu": (ops.gelu, ops.geglu_split, "geglu"),
    "swiglu_oai": (None, ops.swiglu_oai, "swiglu_oai"),
}
"""By name: the function between two matrices (none: a gate is needed), the gated unit between three, and the name of that node."""


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward network: `down @ (silu(gate @ x) * (up @ x))`, matrices [D, F], [D, F], [F, D].

    Without a gate it has two matrices: `down @ relu(up @ x)` (T5 and Switch). activation: see ACTIVATIONS.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    activation: str = "silu"


@dataclass(frozen=True)
class ExpertWeights:
    """The merged matrices of all experts of a layer, [D, F, E], [D, F, E], [F, D, E], and those of the shared expert.

    gate: None for experts of two matrices. shared_gate [D]: its product with a token says, through a sigmoid, how much the shared
    expert counts (Qwen2). biases: of gate, up and down, [F, E], [F, E], [D, E]. activation: see ACTIVATIONS; gpt-oss's is "swiglu_oai".
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    shared: FeedForward | None = None
    shared_gate: Tensor | None = None
    biases: tuple[Tensor | None, Tensor, Tensor] | None = None
    activation: str = "silu"


def _activate(gate: Tensor | None, up: Tensor, kind: str, name: NameNode, prefix: str, layer: int) -> Tensor:
    if kind not in ACTIVATIONS:
        raise ParameterError(f"activation {kind!r}", f"one of {', '.join(ACTIVATIONS)}")
    alone, gated, called = ACTIVATIONS[kind]
    if gate is not None:
        return name(gated(gate, up), prefix + called, layer)
    if alone is None:
        raise ParameterError(f"activation {kind!r} without a gate", "a gate matrix beside up and down")
    return name(alone(up), prefix + kind, layer)


def build_ffn(x: Tensor, weights: FeedForward, *, name: NameNode = name_node, layer: int = 0) -> Tensor:
    """A dense network over `x` [D, T] (`build_ffn` in llama.cpp); the result is left unnamed, as there."""
    up = name(ops.mul_mat(weights.up, x), "ffn_up", layer)
    gate = name(ops.mul_mat(weights.gate, x), "ffn_gate", layer) if weights.gate is not None else None
    return ops.mul_mat(weights.down, _activate(gate, up, weights.activation, name, "ffn_", layer))


def build_shared(x: Tensor, experts: ExpertWeights, *, name: NameNode = name_node, layer: int = 0) -> Tensor:
    """The shared expert alone, which every token passes: a plain network, weighted where the layer has a gate for it."""
    assert experts.shared is not None
    share = _share(x, experts.shared_gate, name, layer) if experts.shared_gate is not None else None
    shared = name(build_ffn(x, experts.shared, name=name, layer=layer), "ffn_shexp", layer)
    return shared if share is None else name(ops.mul(shared, share), "ffn_shexp_out", layer)


def _share(x: Tensor, gate: Tensor, name: NameNode, layer: int) -> Tensor:
    """How much the shared expert counts for each token: a sigmoid, built as silu(z) / z."""
    z = name(ops.mul_mat(gate, x), "ffn_shexp_gate_inp", layer)
    return name(ops.div(ops.silu(z), z), "ffn_shexp_gate", layer)


Product = Callable[[Tensor, Tensor, str], Tensor]
"""Matrices of all experts [n, m, E] times rows [n, 1 or k, T] -> [m, k, T]: row (i, t) is multiplied by the i-th expert of token t.
The node that multiplies gets the name given."""


def build_experts(x: Tensor, experts: ExpertWeights, routing: Routing, *, graph: Expander | None = None,
                  name: NameNode = name_node, layer: int = 0) -> Tensor:  # fmt: skip
    """Send `x` [D, T] through the chosen experts and add their weighted results; then the shared expert, if any.

    The sum is a chain of k - 1 additions over strided views, not a reduction.
    """
    ids = routing.experts
    return _build(x, experts, lambda matrices, rows, what: name(ops.mul_mat_id(matrices, rows, ids), what, layer),
                  lambda rows, bias: ops.add_id(rows, bias, ids), routing.weights, graph, name, layer)  # fmt: skip


def build_all_experts(x: Tensor, experts: ExpertWeights, probs: Tensor, *, graph: Expander | None = None,
                      name: NameNode = name_node, layer: int = 0) -> Tensor:  # fmt: skip
    """Send `x` [D, T] through all E experts and weigh each result by `probs` [E, T]: the dense form, without sort or ids.

    Its products are plain MUL_MATs over all matrices at once. llama.cpp has no such graph: it always routes.
    """
    n_expert, n_tokens = experts.up.ne[2], x.ne[1]
    if probs.ne[:2] != (n_expert, n_tokens):
        raise ShapeError(f"probs.ne={probs.ne} for {n_expert} experts and {n_tokens} tokens", f"({n_expert}, {n_tokens})")

    def product(matrices: Tensor, rows: Tensor, what: str) -> Tensor:
        n, m, e = matrices.ne[:3]
        if rows.ne[1] == 1:  # the same row for all experts: to it they are one matrix of E · m rows
            wide = ops.mul_mat(ops.reshape(matrices, n, m * e), ops.reshape(rows, n, n_tokens))
            return ops.reshape(name(wide, what, layer), m, e, n_tokens)
        return ops.permute(name(ops.mul_mat(matrices, ops.permute(rows, 0, 2, 1, 3)), what, layer), 0, 2, 1, 3)

    weights = ops.reshape(probs, 1, n_expert, n_tokens)
    return _build(x, experts, product, ops.add, weights, graph, name, layer)


def _build(x: Tensor, experts: ExpertWeights, product: Product, add_bias: Callable[[Tensor, Tensor], Tensor], weights: Tensor,
           graph: Expander | None, name: NameNode, layer: int) -> Tensor:  # fmt: skip
    """What both forms share: up, gate, activation, down; the weighted sum; the shared expert."""
    expand = graph.build_forward_expand if graph is not None else lambda tensor: None
    width, n_tokens = x.ne[:2]
    row = ops.reshape(x, width, 1, n_tokens)  # one row, read by all k experts of the token
    biases = experts.biases or (None, None, None)

    def through(matrices: Tensor | None, rows: Tensor, what: str, bias: Tensor | None) -> Tensor | None:
        if matrices is None:
            return None
        out = product(matrices, rows, f"ffn_moe_{what}")
        return out if bias is None else name(add_bias(out, bias), f"ffn_moe_{what}_biased", layer)

    up, gate = through(experts.up, row, "up", biases[1]), through(experts.gate, row, "gate", biases[0])
    assert up is not None
    hidden = _activate(gate, up, experts.activation, name, "ffn_moe_", layer)
    results = through(experts.down, hidden, "down", biases[2])
    assert results is not None
    results = name(ops.mul(results, weights), "ffn_moe_weighted", layer)
    expand(results)
    steps = [i * results.nb[1] if n_tokens else 0 for i in range(results.ne[1])]
    parts = [ops.view(results, width, n_tokens, nb=(results.nb[2],), offset=at) for at in steps]
    for part in parts:  # all views stand before the first addition
        expand(part)
    out = parts[0]
    for part in parts[1:]:
        out = ops.add(out, part)
        expand(out)
    if len(parts) == 1:
        out = ops.cont(out)  # what follows expects packed rows
    name(out, "ffn_moe_out", layer)
    if experts.shared is None:
        return out
    return name(ops.add(out, build_shared(x, experts, name=name, layer=layer)), "ffn_out", layer)


def build_moe_ffn(x: Tensor, gate_inp: Tensor, experts: ExpertWeights, router: Router, *, bias: Tensor | None = None,
                  selection_bias: Tensor | None = None, graph: Expander | None = None, name: NameNode = name_node,
                  layer: int = 0) -> Tensor:  # fmt: skip
    """A whole expert layer over `x` [D, T]: router `gate_inp` [D, E], chosen experts, combination (`build_moe_ffn`)."""
    if experts.up.ne[2] != router.n_expert:
        raise ShapeError(f"{experts.up.ne[2]} experts in {experts.up.label}", f"{router.n_expert}, as in the router")
    routing = build_router(x, gate_inp, router, bias=bias, selection_bias=selection_bias, graph=graph, name=name, layer=layer)
    return build_experts(x, experts, routing, graph=graph, name=name, layer=layer)


def build_dense_moe(x: Tensor, gate_inp: Tensor, experts: ExpertWeights, *, graph: Expander | None = None, name: NameNode = name_node,
                    layer: int = 0) -> Tensor:  # fmt: skip
    """A dense expert layer: `y = sum over all experts e of softmax(W x)[e] · expert_e(x)`, with `gate_inp` = W [D, E].

    `build_moe_ffn` with `presets.dense` is the same by the other road: sorted ids and MUL_MAT_ID.
    """
    probs = name(ops.soft_max(name(ops.mul_mat(gate_inp, x), "ffn_moe_logits", layer)), "ffn_moe_probs", layer)
    if graph is not None:
        graph.build_forward_expand(probs)
    return build_all_experts(x, experts, probs, graph=graph, name=name, layer=layer)
