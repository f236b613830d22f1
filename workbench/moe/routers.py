"""Routers: which experts a token goes to, and with which weight each of their results counts.

A router is a small matrix product over the experts, a gating function, and a choice of the k best. What the chosen
weights sum to differs from model to model, so each router declares it. `presets` holds the routers of published models,
`reference` the same in plain NumPy.

Equal scores: the lower expert number wins, in each choice (of experts, of groups, within a group). NaN is worse than any
number. So a token always gets k different experts that exist; but where its logits are all -inf, or one is +inf or NaN, a soft
max over them is NaN, and so are this token's weights and its row of the result. Other tokens never notice. Under a sigmoid an
expert with NaN loses, and a token of only -inf gets weights of zero, which no division can bring to their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from workbench.errors import ParameterError, ShapeError, shown
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


def is_whole(n: object) -> bool:
    """Whether `n` is a whole number, and no truth value."""
    return isinstance(n, int | np.integer) and not isinstance(n, bool)


def is_number(x: object) -> bool:
    """Whether `x` is a finite number, and no truth value."""
    return isinstance(x, int | float | np.number) and not isinstance(x, bool | np.complexfloating) and math.isfinite(x)


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
    experts stand in groups of equal size, and only those of the best groups can be chosen (DeepSeek-V3: 8 and 4); group_best: a group
    is as good as so many of its best experts together (DeepSeek-V2: 1; V3 and llama.cpp: 2). capacity_factor: an expert takes so many
    times its fair share of the choices and drops the rest (Switch); None for all.
    """

    n_expert: int
    n_used: int
    gating: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    n_groups: int = 1
    n_groups_used: int = 1
    group_best: int = 2
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        for what in ("n_expert", "n_used", "n_groups", "n_groups_used", "group_best"):
            if not is_whole(n := getattr(self, what)):
                raise ParameterError(f"{what}={shown(n)}", "a whole number")
        if not 1 <= self.n_used <= self.n_expert:
            raise ParameterError(f"{self.n_used} experts used of {self.n_expert}", "1 ≤ n_used ≤ n_expert")
        if not isinstance(self.gating, str) or self.gating not in GATINGS:
            raise ParameterError(f"gating {shown(self.gating)!r}", f"one of {', '.join(GATINGS)}")
        if self.n_groups < 1 or self.n_groups == 1 != self.n_groups_used:
            raise ParameterError(f"{self.n_groups_used} of {self.n_groups} groups", "1 of 1 for no groups, or some of several")
        if self.n_groups > 1 and (self.n_expert % self.n_groups or not 1 <= self.n_groups_used < self.n_groups):
            raise ParameterError(f"{self.n_groups_used} of {self.n_groups} groups of {self.n_expert} experts",
                                 "groups of equal size, some but not all of them used")  # fmt: skip
        if self.n_groups > 1 and not 1 <= self.group_best <= self.n_expert // self.n_groups:
            raise ParameterError(f"{self.n_groups} groups of {self.n_expert} experts, whose {self.group_best} best make a score",
                                 "so many experts or more in each group, and at least 1")  # fmt: skip
        if self.n_groups > 1 and self.n_used > self.n_groups_used * (self.n_expert // self.n_groups):
            raise ParameterError(f"{self.n_used} experts of {self.n_groups_used} groups", "at most as many as there are in these groups")
        if not is_number(self.scale):
            raise ParameterError(f"a scale of {shown(self.scale)}", "a number: the factor on the weights")
        if self.capacity_factor is not None and not (is_number(self.capacity_factor) and self.capacity_factor >= 0):
            raise ParameterError(f"a capacity factor of {shown(self.capacity_factor)}",
                                 "zero (all is dropped) or more, or None for no limit")  # fmt: skip

    @property
    def scaled(self) -> bool:
        """True where the weights are multiplied by `scale`; 0 stands for "not given", as in llama.cpp."""
        return self.scale not in (0.0, 1.0)

    @property
    def weight_sum(self) -> float | None:
        """What the weights of a token sum to, or None where that depends on the token (or on others, who fill an expert)."""
        if self.capacity_factor is not None:
            return None
        if self.normalise or self.gating == "softmax_weight" or (self.gating == "softmax" and self.n_used == self.n_expert):
            return self.scale if self.scaled else 1.0
        return None

    def capacity(self, n_tokens: int) -> int | None:
        """Choices that one expert takes of a batch: capacity_factor · k · tokens / experts, rounded up; None for any number.

        The Switch paper leaves the rounding open. Up means that a factor of 1 drops nothing where the load is even. 2^53 stands for
        anything larger.
        """
        if self.capacity_factor is None:
            return None
        if not is_whole(n_tokens) or n_tokens < 0:
            raise ParameterError(f"{shown(n_tokens)} tokens", "a whole number, 0 or more")
        return math.ceil(round(min(self.capacity_factor * self.n_used * n_tokens / self.n_expert, 2.0**53), 9))


@dataclass(frozen=True)
class Routing:
    """The nodes a router leaves: `experts` i32 [k, T], best first; `weights` f32 [1, k, T]; `logits`, `probs` [E, T].

    kept f32 [1, k, T], where experts have a capacity (and there are tokens): 1 for a choice that was taken, 0 for one that was dropped.
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor
    probs: Tensor
    kept: Tensor | None = None


def name_node(tensor: Tensor, what: str, layer: int) -> Tensor:
    """Name a node as llama.cpp does: `what-layer`, or `what` alone for nodes outside the layers (-1)."""
    return tensor.named(f"{what}-{layer}" if layer >= 0 else what)


def build_router(x: Tensor, gate_inp: Tensor, router: Router, *, bias: Tensor | None = None, selection_bias: Tensor | None = None,
                 graph: Expander | None = None, name: NameNode = name_node, layer: int = 0) -> Routing:  # fmt: skip
    """The nodes from hidden states `x` [D, T] to chosen experts and weights, in llama.cpp's order and names.

    bias [E] is added to the logits; selection_bias [E] to the scores that experts are chosen by, not to their weights. The weights
    are expanded into `graph` at once, before any expert: schedulers and fused kernels rely on that order. A dropped choice has weight
    zero, so its token gets nothing from that expert: the residual sum around the layer passes it on as it was.
    """
    if gate_inp.ne[:2] != (x.ne[0], router.n_expert):
        raise ShapeError(f"router matrix {gate_inp.label} with ne={gate_inp.ne}", f"ne=({x.ne[0]}, {router.n_expert})",
                         "one row per expert, as wide as the hidden state")  # fmt: skip
    if x.ne[2:] != (1, 1):
        raise ShapeError(f"hidden states {x.label} with ne={x.ne}", f"ne=({x.ne[0]}, tokens)", "reshape them: one row per token")
    for what, t in (("bias", bias), ("selection bias", selection_bias)):
        if t is not None and t.ne != (router.n_expert, 1, 1, 1):  # a shorter one would be repeated
            raise ShapeError(f"{what} {t.label} with ne={t.ne}", f"ne=({router.n_expert},), a number for each expert")
    n_tokens, k = x.ne[1], router.n_used
    logits = name(ops.mul_mat(gate_inp, x), "ffn_moe_logits", layer)
    if bias is not None:
        logits = name(ops.add(logits, bias), "ffn_moe_logits_biased", layer)
    probs = name(GATINGS[router.gating](logits), "ffn_moe_probs", layer)
    scores = probs
    if selection_bias is not None:
        scores = name(ops.add(probs, selection_bias), "ffn_moe_probs_biased", layer)
    if router.n_groups > 1 and n_tokens:
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
    kept = None
    if n_tokens and (capacity := router.capacity(n_tokens)) is not None:
        kept = name(_within(capacity, chosen, router, probs), "ffn_moe_kept", layer)
        weights = name(ops.mul(weights, kept), "ffn_moe_weights_kept", layer)
    if graph is not None:
        graph.build_forward_expand(weights)
    return Routing(chosen, weights, logits, probs, kept)


def _best_groups(scores: Tensor, router: Router, name: NameNode, layer: int) -> Tensor:
    """The scores, -inf outside the best groups. A group is as good as its best experts together.

    -inf and not 0: with a selection bias scores may be negative, and an expert at 0 of a group that was not chosen would beat
    them. For the scores of a soft max, which are positive, either gives the same choice.
    """
    size, n_tokens = router.n_expert // router.n_groups, scores.ne[1]
    groups = ops.reshape(scores, size, router.n_groups, n_tokens)
    best = ops.argsort_top_k(groups, router.group_best)
    pairs = ops.get_rows(ops.reshape(groups, 1, size, router.n_groups, n_tokens), best)
    sums = ops.sum_rows(ops.reshape(pairs, *pairs.ne[1:]))
    kept = name(ops.argsort_top_k(ops.reshape(sums, *sums.ne[1:3]), router.n_groups_used), "ffn_moe_group_topk", layer)
    masked = ops.set_rows(ops.fill(groups, float("-inf")), ops.get_rows(groups, kept), kept)
    return name(ops.reshape(masked, router.n_expert, n_tokens), "ffn_moe_probs_masked", layer)


def _within(capacity: int, chosen: Tensor, router: Router, probs: Tensor) -> Tensor:
    """1 for each choice [1, k, T] that finds its expert with room, 0 for those that come too late.

    The first choices of all tokens go first, in the order of the tokens, then the second ones (GShard's algorithm 1; for
    k = 1 Switch's). A choice's place in the queue is a running sum over a table of all choices by all experts.
    """
    n_expert, n_tokens, k = router.n_expert, chosen.ne[1], router.n_used
    n = n_tokens * k
    queue = ops.cont(ops.view(chosen, 1, n_tokens, k, nb=(chosen.nb[1], chosen.nb[0])))
    nobody = ops.fill(ops.repeat(ops.reshape(probs, 1, n_expert, n_tokens), (1, n_expert, n_tokens, k)), 0.0)
    table = ops.set_rows(nobody, ops.fill(ops.get_rows(nobody, queue), 1.0), queue)
    places = ops.cumsum(ops.cont(ops.transpose(ops.reshape(table, n_expert, n))))
    place = ops.get_rows(ops.reshape(ops.cont(ops.transpose(places)), 1, n_expert, n), ops.reshape(queue, 1, n))
    fits = ops.step(ops.scale(place, -1.0, capacity + 0.5))
    return ops.reshape(ops.cont(ops.transpose(ops.reshape(fits, n_tokens, k))), 1, k, n_tokens)
