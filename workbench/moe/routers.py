"""Routers: which experts a token goes to, and with which weight each of their results counts.

A router is a small matrix product over the experts, a gating function, and a choice of the k best. What the chosen
weights sum to differs from model to model, so each router declares it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from workbench.errors import ParameterError, ShapeError
from workbench.tensors import Tensor, ops

NameNode = Callable[[Tensor, str, int], Tensor]
"""Gives a node its name: `(tensor, what, layer) -> tensor` (`cb` in llama.cpp)."""

SMALLEST_NORMAL_F16 = 6.103515625e-05
"""Lower bound of the sum that weights are divided by: dividing by zero is avoided at the precision of f16."""

GATINGS: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda logits: ops.soft_max(logits)}
"""Gating functions by name (`llama_expert_gating_func_type`): logits of all experts to their scores."""


class Expander(Protocol):
    """Where nodes are put in order: a `CGraph`."""

    def build_forward_expand(self, tensor: Tensor) -> object:
        """Append what `tensor` needs (`ggml_build_forward_expand`)."""
        ...


@dataclass(frozen=True)
class Router:
    """How tokens choose experts (the arguments of `build_moe_ffn` in llama.cpp).

    n_expert: experts per layer; n_used: experts per token (k); gating: the function over all logits; normalise: divide the
    chosen weights by their sum (Mixtral); scale: factor on the weights, 0 or 1 for none (DeepSeek-V2: 16).
    """

    n_expert: int
    n_used: int
    gating: str = "softmax"
    normalise: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.n_used <= self.n_expert:
            raise ParameterError(f"{self.n_used} experts used of {self.n_expert}", "1 ≤ n_used ≤ n_expert")
        if self.gating not in GATINGS:
            raise ParameterError(f"gating {self.gating!r}", f"one of {', '.join(GATINGS)}")

    @property
    def scaled(self) -> bool:
        """True where the weights are multiplied by `scale`; 0 stands for "not given", as in llama.cpp."""
        return self.scale not in (0.0, 1.0)

    @property
    def weight_sum(self) -> float | None:
        """What the weights of a token sum to, or None where that depends on the token."""
        if self.normalise or (self.gating == "softmax" and self.n_used == self.n_expert):
            return self.scale if self.scaled else 1.0
        return None


@dataclass(frozen=True)
class Routing:
    """The nodes a router leaves: `experts` i32 [k, T], best first; `weights` f32 [1, k, T]; `logits`, `probs` [E, T]."""

    experts: Tensor
    weights: Tensor
    logits: Tensor
    probs: Tensor


def name_node(tensor: Tensor, what: str, layer: int) -> Tensor:
    """Name a node as llama.cpp does: `what-layer`, or `what` alone for nodes outside the layers (-1)."""
    return tensor.named(f"{what}-{layer}" if layer >= 0 else what)


def build_router(x: Tensor, gate_inp: Tensor, router: Router, *, graph: Expander | None = None,
                 name: NameNode = name_node, layer: int = 0) -> Routing:  # fmt: skip
    """The nodes from hidden states `x` [D, T] to chosen experts and weights, in llama.cpp's order and names.

    The weights are expanded into `graph` at once, before any expert: schedulers and fused kernels rely on that order.
    """
    if gate_inp.ne[:2] != (x.ne[0], router.n_expert):
        raise ShapeError(f"router matrix {gate_inp.label} with ne={gate_inp.ne}", f"ne=({x.ne[0]}, {router.n_expert})",
                         "one row per expert, as wide as the hidden state")  # fmt: skip
    n_tokens, k = x.ne[1], router.n_used
    logits = name(ops.mul_mat(gate_inp, x), "ffn_moe_logits", layer)
    probs = name(GATINGS[router.gating](logits), "ffn_moe_probs", layer)
    chosen = ops.argsort_top_k(probs, k)
    name(chosen.src[0], "ffn_moe_argsort", layer)  # type: ignore[arg-type]  # a view of the sort
    name(chosen, "ffn_moe_topk", layer)
    weights = name(ops.get_rows(ops.reshape(probs, 1, router.n_expert, n_tokens), chosen), "ffn_moe_weights", layer)
    if router.normalise:
        weights = ops.reshape(weights, k, n_tokens)
        total = name(ops.sum_rows(weights), "ffn_moe_weights_sum", layer)
        total = name(ops.clamp(total, SMALLEST_NORMAL_F16, float("inf")), "ffn_moe_weights_sum_clamped", layer)
        weights = name(ops.div(weights, total), "ffn_moe_weights_norm", layer)
        weights = ops.reshape(weights, 1, k, n_tokens)
    if router.scaled:
        weights = name(ops.scale(weights, router.scale), "ffn_moe_weights_scaled", layer)
    if graph is not None:
        graph.build_forward_expand(weights)
    return Routing(chosen, weights, logits, probs)
