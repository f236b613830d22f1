"""The routers of published models, by name. In the formulas z = W x are a token's logits and top_k the k largest.

The default numbers are those of the models named. `Router.weight_sum` is the sum that each docstring declares.
"""

from __future__ import annotations

from workbench.moe.routers import Router


def dense(n_expert: int) -> Router:
    """w = softmax(z) over all experts, all of them used: sum 1 (Jacobs et al. 1991; without a sort: `layers.build_dense_moe`)."""
    return Router(n_expert, n_expert, normalise=False)


def switch(n_expert: int = 128, capacity_factor: float | None = 1.25) -> Router:
    """w = max softmax(z), one expert; beyond its capacity a token is dropped. The sum is the w of the token, or 0
    (Switch Transformer, 2101.03961). Dividing by the sum would make every w a 1, from which no router can learn."""
    return Router(n_expert, 1, normalise=False, capacity_factor=capacity_factor)


def gshard(n_expert: int = 2048, capacity_factor: float | None = 2.0) -> Router:
    """w = p / (p1 + p2) over the two best of p = softmax(z): sum 1, less what is dropped (GShard, 2006.16668).

    Left out: GShard sends a token to its second expert only at random, in proportion to that expert's weight.
    """
    return Router(n_expert, 2, capacity_factor=capacity_factor)


def mixtral(n_expert: int = 8, n_used: int = 2) -> Router:
    """w = p / sum of p over top_k of p = softmax(z), which equals softmax over top_k(z): sum 1 (Mixtral, 2401.04088)."""
    return Router(n_expert, n_used)


def olmoe(n_expert: int = 64, n_used: int = 8) -> Router:
    """w = top_k of softmax(z) as they are: the sum, below 1, depends on the token (OLMoE, 2409.02060)."""
    return Router(n_expert, n_used, normalise=False)


def qwen2_moe(n_expert: int = 60, n_used: int = 4) -> Router:
    """w = top_k of softmax(z) as they are (Qwen1.5-MoE and Qwen2-MoE; beside them one shared expert with a gate of its own)."""
    return Router(n_expert, n_used, normalise=False)


def qwen3_moe(n_expert: int = 128, n_used: int = 8) -> Router:
    """w = p / sum of p over top_k of p = softmax(z): sum 1 (Qwen3-MoE)."""
    return Router(n_expert, n_used)


def deepseek_moe(n_expert: int = 64, n_used: int = 6) -> Router:
    """w = top_k of softmax(z) as they are (DeepSeekMoE, 2401.06066, and V2-Lite; beside them shared experts without a gate)."""
    return Router(n_expert, n_used, normalise=False)


def deepseek_v2(n_expert: int = 160, n_used: int = 6, n_groups: int = 8, n_groups_used: int = 3, scale: float = 16.0) -> Router:
    """w = 16 · top_k of p = softmax(z), among the 3 groups of 8 whose best p is largest; no fixed sum (DeepSeek-V2, 2405.04434)."""
    return Router(n_expert, n_used, "softmax", False, scale, n_groups, n_groups_used, group_best=1)


def deepseek_v3(n_expert: int = 256, n_used: int = 8, n_groups: int = 8, n_groups_used: int = 4, scale: float = 2.5) -> Router:
    """w = 2.5 · s / sum of s over the chosen, s = sigmoid(z): sum 2.5 (DeepSeek-V3, 2412.19437).

    Chosen are the k largest s + b among the 4 groups of 8 whose two best s + b together are largest. The bias b, `selection_bias`
    of `build_router`, takes part in choosing alone: the weights are those of s.
    """
    return Router(n_expert, n_used, "sigmoid", True, scale, n_groups, n_groups_used)


def gpt_oss(n_expert: int = 128, n_used: int = 4) -> Router:
    """w = softmax over top_k(z + b), where b is the `bias` of the router's product: sum 1 (gpt-oss)."""
    return Router(n_expert, n_used, "softmax_weight", False)


PRESETS = {f.__name__: f for f in (dense, switch, gshard, mixtral, olmoe, qwen2_moe, qwen3_moe, deepseek_moe, deepseek_v2, deepseek_v3,
                                   gpt_oss)}  # fmt: skip
"""All of them by name."""
