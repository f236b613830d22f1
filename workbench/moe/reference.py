"""Routers and expert layers in plain NumPy, one token and one expert at a time, in f64: the definitions that the graphs are held against.

Arrays are in NumPy's order: x [T, D], router matrix [E, D], experts' matrices [E, F, D] (gate, up) and [E, D, F] (down).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workbench.moe.routers import SMALLEST_NORMAL_F16, Router

Array = np.ndarray


def softmax(z: Array) -> Array:
    """exp(z) / sum of exp(z); NaN everywhere if all are -inf or one is NaN or +inf."""
    with np.errstate(all="ignore"):
        e = np.exp(np.asarray(z, np.float64) - np.max(z))
        return e / e.sum()


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z))."""
    with np.errstate(all="ignore"):
        return 1 / (1 + np.exp(-np.asarray(z, np.float64)))


SCORES: dict[str, Callable[[Array], Array]] = {"softmax": softmax, "sigmoid": sigmoid, "softmax_weight": np.asarray}
"""Scores of all experts by the name of the gating; with "softmax_weight" they are the logits themselves."""


def best(scores: Array, k: int) -> Array:
    """Indices of the k largest, best first; of equal ones the lower index first, NaN last."""
    return np.argsort(-np.asarray(scores), kind="stable")[:k]


def choose(scores: Array, router: Router) -> Array:
    """The experts of one token by the scores of all; with groups, only members of the best groups can be chosen."""
    if router.n_groups > 1:
        groups = np.reshape(scores, (router.n_groups, -1))
        value = np.array([group[best(group, router.group_best)].sum() for group in groups])
        kept = best(value, router.n_groups_used)
        scores = np.where(np.isin(np.arange(router.n_groups), kept)[:, None], groups, -np.inf).ravel()
    return best(scores, router.n_used)


def weigh(z: Array, router: Router, selection_bias: Array | float = 0.0) -> tuple[Array, Array]:
    """Experts and weights of one token from its logits (`build_router` without capacity)."""
    scores = SCORES[router.gating](z)
    chosen = choose(scores + selection_bias, router)
    weights = scores[chosen]  # never of the biased scores
    if router.gating == "softmax_weight":
        weights = softmax(weights)
    if router.normalise:
        weights = weights / np.fmax(weights.sum(), SMALLEST_NORMAL_F16)
    return chosen, weights * (router.scale if router.scaled else 1.0)


def keep(experts: Array, n_expert: int, capacity: int | None) -> Array:
    """Which choices [T, k] find room: all first choices in the order of the tokens, then all second ones."""
    taken, kept = np.zeros(n_expert, int), np.ones(experts.shape, bool)
    for rank in range(experts.shape[1]):
        for t, e in enumerate(experts[:, rank]):
            kept[t, rank] = capacity is None or taken[e] < capacity
            taken[e] += 1
    return kept


def route(logits: Array, router: Router, selection_bias: Array | float = 0.0) -> tuple[Array, Array]:
    """Experts [T, k] and weights [T, k] of all tokens from logits [T, E]; the weight of a dropped choice is 0."""
    rows = [weigh(z, router, selection_bias) for z in logits]
    experts = np.array([e for e, _ in rows], int).reshape(-1, router.n_used)
    weights = np.array([w for _, w in rows], float).reshape(-1, router.n_used)
    return experts, weights * keep(experts, router.n_expert, router.capacity(len(logits)))


def unit(gate: Array | None, up: Array, activation: str = "silu") -> Array:
    """The part between the matrices: act(gate) · up, or act(up) where there is no gate; gpt-oss clips and adds 1 (SWIGLU_OAI)."""
    if activation == "swiglu_oai":
        assert gate is not None
        gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    x = up if gate is None else gate
    curve = {"silu": lambda: x * sigmoid(x), "relu": lambda: np.maximum(x, 0),
             "gelu": lambda: x / 2 * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))}[activation]()  # fmt: skip
    return curve if gate is None else curve * up


def ffn(x: Array, gate: Array | None, up: Array, down: Array, activation: str = "silu",
        biases: Sequence[Array | float] = (0, 0, 0)) -> Array:  # fmt: skip
    """One network, or one expert, over a row x [D] or rows [T, D]."""
    g = None if gate is None else x @ gate.T + biases[0]
    return unit(g, x @ up.T + biases[1], activation) @ down.T + biases[2]


def moe(x: Array, experts: Array, weights: Array, gate: Array | None, up: Array, down: Array, activation: str = "silu",
        biases: Sequence[Array] | None = None) -> Array:  # fmt: skip
    """The routed part of a layer: for each token the sum over its chosen experts of weight times result."""
    out = np.zeros((len(x), down.shape[1]))
    for t, row in enumerate(np.asarray(x, np.float64)):
        for e, weight in zip(experts[t], weights[t], strict=True):
            own = (0, 0, 0) if biases is None else [b[e] for b in biases]
            out[t] += weight * ffn(row, None if gate is None else gate[e], up[e], down[e], activation, own)
    return out
