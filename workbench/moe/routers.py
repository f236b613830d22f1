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

GATINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: ops.soft_max(logits),
    "sigmoid": lambda logits: ops.sigmoid(logits),
    "softmax_weight": lambda logits: logits,
}
"""Gating functions by name (`llama_expert_gating_func_type`): logits of all experts to their scores. With "softmax_weight" experts
are chosen by their logits, and the chosen ones share the weight by a soft max of their own (gpt-oss)."""


class Expander(Protocol):
    """Where nodes are put in order: a `CGraph`."""

    def build_forward_expand(self, tensor: Tensor) -> object:
        """Append what `tensor` needs (`ggml_build_forward_expand`)."""
        ...


@dataclass(frozen=True)
class Router:
    """How tokens choose experts (the arguments of `build_moe_ffn` in llama.cpp).

    n_expert: experts per layer; n_used: experts per token (k); gating: the function over all logits; normalise: divide the
    chosen weights by their sum (Mixtral); scale: factor on the weights, 0 or 1 for none (DeepSeek-V2: 16). n_groups, n_groups_used:
    experts stand in groups of equal size, and only those of the best groups can be chosen (DeepSeek-V3: 8 and 4).
    """

    n_expert: int
    n_used: int
    gating: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.n_used <= self.n_expert:
            raise ParameterError(f"{self.n_used} experts used of {self.n_expert}", "1 ≤ n_used ≤ n_expert")
        if self.gating not in GATINGS:
            raise ParameterError(f"gating {self.gating!r}", f"one of {', '.join(GATINGS)}")
        if self.n_groups > 1 and (self.n_expert % self.n_groups or not 1 <= self.n_groups_used < self.n_groups):
            raise ParameterError(f"{self.n_groups_used} of {self.n_groups} groups of {self.n_expert} experts",
                                 "groups of equal size, some but not all of them used")  # fmt: skip
        if self.n_groups > 1 and self.n_expert // self.n_groups < 2:
            raise ParameterError(f"{self.n_groups} groups of {self.n_expert} experts", "two experts or more in each: they make its score")
        if self.n_groups > 1 and self.n_used > self.n_groups_used * (self.n_expert // self.n_groups):
            raise ParameterError(f"{self.n_used} experts of {self.n_groups_used} groups", "at most as many as there are in these groups")

    @property
    def scaled(self) -> bool:
        """True where the weights are multiplied by `scale`; 0 stands for "not given", as in llama.cpp."""
        return self.scale not in (0.0, 1.0)

    @property
    def weight_sum(self) -> float | None:
        """What the weights of a token sum to, or None where that depends on the token."""
        if self.normalise or self.gating == "softmax_weight" or (self.gating == "softmax" and self.n_used == self.n_expert):
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


def build_router(x: Tensor, gate_inp: Tensor, router: Router, *, bias: Tensor | None = None, selection_bias: Tensor | None = None,
                 graph: Expander | None = None, name: NameNode = name_node, layer: int = 0) -> Routing:  # fmt: skip
    """The nodes from hidden states `x` [D, T] to chosen experts and weights, in llama.cpp's order and names.

    bias [E] is added to the logits; selection_bias [E] to the scores that experts are chosen by, not to their weights. The weights
    are expanded into `graph` at once, before any expert: schedulers and fused kernels rely on that order.
    """
    if gate_inp.ne[:2] != (x.ne[0], router.n_expert):
        raise ShapeError(f"router matrix {gate_inp.label} with ne={gate_inp.ne}", f"ne=({x.ne[0]}, {router.n_expert})",
                         "one row per expert, as wide as the hidden state")  # fmt: skip
    n_tokens, k = x.ne[1], router.n_used
    logits = name(ops.mul_mat(gate_inp, x), "ffn_moe_logits", layer)
    if bias is not None:
        logits = name(ops.add(logits, bias), "ffn_moe_logits_biased", layer)
    probs = name(GATINGS[router.gating](logits), "ffn_moe_probs", layer)
    scores = probs
    if selection_bias is not None:
        scores = name(ops.add(probs, selection_bias), "ffn_moe_probs_biased", layer)
    if router.n_groups > 1:
        scores = _best_groups(scores, router, name, layer)
    chosen = ops.argsort_top_k(scores, k)
    name(chosen.src[0], "ffn_moe_argsort", layer)  # type: ignore[arg-type]  # a view of the sort
    name(chosen, "ffn_moe_topk", layer)
    weights = name(ops.get_rows(ops.reshape(probs, 1, router.n_expert, n_tokens), chosen), "ffn_moe_weights", layer)
    if router.gating == "softmax_weight":
        weights = ops.soft_max(ops.reshape(weights, k, n_tokens))
        weights = name(ops.reshape(weights, 1, k, n_tokens), "ffn_moe_weights_softmax", layer)
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


def _best_groups(scores: Tensor, router: Router, name: NameNode, layer: int) -> Tensor:
    """The scores, -inf outside the best groups. A group is as good as its two best experts together."""
    size, n_tokens = router.n_expert // router.n_groups, scores.ne[1]
    groups = ops.reshape(scores, size, router.n_groups, n_tokens)
    best = ops.argsort_top_k(groups, 2)
    pairs = ops.get_rows(ops.reshape(groups, 1, size, router.n_groups, n_tokens), best)
    sums = ops.sum_rows(ops.reshape(pairs, *pairs.ne[1:]))
    kept = name(ops.argsort_top_k(ops.reshape(sums, *sums.ne[1:3]), router.n_groups_used), "ffn_moe_group_topk", layer)
    masked = ops.set_rows(ops.fill(groups, float("-inf")), ops.get_rows(groups, kept), kept)
    return name(ops.reshape(masked, router.n_expert, n_tokens), "ffn_moe_probs_masked", layer)
