"""Balance: how evenly a router spreads tokens over its experts, and what training can do about it.

Measures are plain functions of how often each expert was chosen. Losses are graph builders: they add a number to the loss that is lowest
when the load is even (`load_balancing_loss`) or when logits stay small (`z_loss`). The selection bias of DeepSeek-V3 needs no loss.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from workbench.errors import ParameterError, ShapeError, shown
from workbench.moe.routers import Router, Routing
from workbench.tensors import Tensor, ops

# ---- measures, of counts (…, E): choices per expert


def counts_of(experts: Any, n_expert: int) -> np.ndarray:
    """How often each expert stands in an array of expert ids. Raises ParameterError for ids that are none of them."""
    ids = np.asarray(experts).ravel()
    if ids.size and (ids.dtype.kind not in "iu" or not 0 <= ids.min() <= ids.max() < n_expert):
        raise ParameterError(f"expert ids of {ids.dtype} from {ids.min()} to {ids.max()}", f"whole numbers from 0, below {n_expert}")
    return np.bincount(ids.astype(np.int64), minlength=n_expert)


def _counted(counts: Any) -> np.ndarray:
    """Counts (…, E) as f64: at least one expert, and at least one choice in each row."""
    c = np.asarray(counts, float)
    if not c.ndim or not c.shape[-1] or not (np.isfinite(c).all() and (c >= 0).all()):
        raise ParameterError(f"counts of shape {c.shape}: {shown(c)}", "choices per expert, (…, E), each 0 or more")
    if not (c.sum(-1) > 0).all():
        raise ParameterError("counts without any choice", "at least one token per row")
    return c


def _shares(counts: Any) -> np.ndarray:
    c = _counted(counts)
    return c / c.sum(-1, keepdims=True)


def load_entropy(counts: Any) -> Any:
    """Entropy of the load over its largest value, log E: 1 where all get the same (one expert too), 0 where one of several gets all."""
    p = _shares(counts)
    if p.shape[-1] == 1:
        return p.sum(-1)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(-1) / np.log(p.shape[-1])


def variation(counts: Any) -> Any:
    """Standard deviation of the load over its mean (coefficient of variation): 0 where the load is even."""
    p = _shares(counts)
    return p.std(-1) / p.mean(-1)


def max_violation(counts: Any) -> Any:
    """How far the fullest expert is above the mean, over the mean (MaxVio, arXiv 2408.15664): 0 where the load is even."""
    p = _shares(counts)
    return p.max(-1) / p.mean(-1) - 1


def dropped_fraction(counts: Any, capacity: float) -> Any:
    """The share of choices that experts with room for `capacity` each cannot take (Switch)."""
    c = _counted(counts)
    if not capacity >= 0:
        raise ParameterError(f"a capacity of {shown(capacity)}", "0 or more")
    return np.maximum(c - capacity, 0).sum(-1) / c.sum(-1)


# ---- losses, as nodes


def build_load(routing: Routing, router: Router) -> Tensor:
    """The share of all choices that each expert got, [1, E], counted in the graph. No gradient passes it: a count has no slope."""
    n = routing.experts.n_elements
    share = ops.fill(ops.reshape(routing.weights, 1, n), 1 / n)
    return ops.get_rows_back(share, ops.reshape(ops.cont(routing.experts), n), (1, router.n_expert))


def _of_tokens(t: Tensor, loss: str) -> Tensor:
    if not t.ne[1]:
        raise ShapeError(f"{loss} of no tokens", "a mean needs at least one")
    return t


def load_balancing_loss(routing: Routing, router: Router) -> Tensor:
    """E · sum over experts of (share of choices · mean probability): 1 where both are even, up to E where one expert gets all.

    Switch's loss (arXiv 2101.03961, eq. 4) for k = 1; for k choices the shares still sum to 1, so the `load_balancing_loss_func` of
    `transformers` is k times as large. Scores that are no probabilities (a sigmoid) are divided by their sum, as DeepSeek-V3 does.
    """
    probs = _of_tokens(routing.probs, "load_balancing_loss")
    if router.gating == "softmax_weight":
        probs = ops.soft_max(probs)
    elif router.gating != "softmax":
        probs = ops.div(probs, ops.clamp(ops.sum_rows(probs), 1e-20, float("inf")))  # not 0 / 0 where all sigmoids are 0
    mean = ops.scale(ops.repeat_back(probs, (router.n_expert, 1)), router.n_expert / probs.ne[1])
    return ops.sum(ops.mul(ops.reshape(mean, 1, router.n_expert), build_load(routing, router))).named("load_balancing_loss")


def z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of (log sum exp of the logits)², which keeps logits small (ST-MoE, arXiv 2202.08906, eq. 5).

    For the largest logit l with probability p, log sum exp is l - log p, which neither overflows nor divides by zero.
    """
    n_expert, n = _of_tokens(logits, "z_loss").ne[:2]
    best = ops.reshape(ops.argmax(logits), 1, n)
    largest, p = (ops.get_rows(ops.reshape(t, 1, n_expert, n), best) for t in (logits, ops.soft_max(logits)))
    return ops.mean(ops.reshape(ops.sqr(ops.sub(largest, ops.log(p))), n)).named("z_loss")


def bias_step(counts: Any, rate: float) -> np.ndarray:
    """What is added to the selection bias after a step, ±rate: up for experts below the mean load, down for those above.

    Balance without a loss (DeepSeek-V3, arXiv 2408.15664): the bias decides who is chosen, never with which weight.
    """
    c = _counted(counts)
    if not 0 <= rate < np.inf:
        raise ParameterError(f"a rate of {shown(rate)}", "a number, 0 or more")
    return (rate * np.sign(c.mean(-1, keepdims=True) - c)).astype(np.float32)
