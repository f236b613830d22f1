"""A small expert layer that is trained while one waits, on a task in which experts can specialise.

Tokens come from clusters, and what is wanted of a token is a linear map of its place within its cluster: each cluster has its own.
One small network cannot learn eight maps; eight experts can, if the router sends each cluster to another one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from workbench.cgraph import build, statistics
from workbench.errors import ParameterError, shown
from workbench.execution import AdamW, GraphRunner, Trainer, new_parameter
from workbench.moe import balance
from workbench.moe.layers import ExpertWeights, FeedForward, build_experts, build_ffn
from workbench.moe.routers import Router, Routing, build_router, is_number, is_whole
from workbench.tensors import Context, Flag, Tensor, ops


@dataclass(frozen=True)
class ClusterTask:
    """Tokens x = centre of a cluster + u, and wanted results y = (√(1 - common) · A_cluster + √common · A_all) u.

    u is normal, so 1 is the mean square of y: the loss of a network that always answers zero. spread: length of the centres.
    common: the share of the task that is the same in all clusters.
    """

    n_clusters: int = 8
    width: int = 16
    spread: float = 5.0
    common: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        _require_counts(n_clusters=self.n_clusters, width=self.width)
        if not (is_number(self.spread) and is_number(self.common) and 0 <= self.common <= 1):
            raise ParameterError(f"spread={shown(self.spread)}, common={shown(self.common)}", "a number, and a share from 0 to 1")

    @cached_property
    def _made(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, 1])
        centres = rng.standard_normal((self.n_clusters, self.width))
        maps = rng.standard_normal((self.n_clusters + 1, self.width, self.width)) / np.sqrt(self.width)
        centres *= self.spread / np.linalg.norm(centres, axis=1, keepdims=True)
        return centres, np.sqrt(1 - self.common) * maps[1:] + np.sqrt(self.common) * maps[0]

    def batch(self, rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """n tokens: x (n, width), y (n, width), and the cluster of each (n,)."""
        centres, maps = self._made
        cluster, u = rng.integers(0, self.n_clusters, n), rng.standard_normal((n, self.width))
        return (centres[cluster] + u).astype(np.float32), np.einsum("ti,tij->tj", u, maps[cluster]).astype(np.float32), cluster


@dataclass(frozen=True)
class Remedy:
    """What is done for balance: factors on the load-balancing loss and the z-loss, and the step of the selection bias."""

    aux: float = 0.0
    z: float = 0.0
    bias: float = 0.0

    def __post_init__(self) -> None:
        if not all(is_number(x) and x >= 0 for x in (self.aux, self.z, self.bias)):
            raise ParameterError(f"{self}", "numbers, 0 or more")


REMEDIES = {"none": Remedy(), "load-balancing loss": Remedy(aux=0.2), "z-loss": Remedy(z=1e-3), "selection bias": Remedy(bias=0.01)}
"""What the recorded runs compare. Switch uses a factor of 0.01 beside a loss of about 3; here the loss of the task is below 1, the runs are
short, and 0.2 is needed. 0.001 is ST-MoE's factor. DeepSeek-V3's bias moves by 0.001 in far longer runs."""


@dataclass
class _Net:
    """One graph over a model's parameters: inputs, result, the task's loss, and the routing where there is one."""

    x: Tensor
    y: Tensor
    out: Tensor
    loss: Tensor
    routing: Routing | None


class ClusterModel:
    """An expert layer (or, without a router, a dense network) on a ClusterTask, trained by a graph that is built once.

    hidden: width of each expert; shared: width of a shared expert, 0 for none. The same seed gives the same start, batches and run.
    losses: the task's loss at each step; counts: choices per expert at each step.
    """

    def __init__(self, task: ClusterTask, router: Router | None, hidden: int = 16, *, shared: int = 0, remedy: Remedy = Remedy(),
                 seed: int = 0, n_tokens: int = 256, rate: float = 3e-3) -> None:  # fmt: skip
        if router is None and (remedy != Remedy() or shared):
            raise ParameterError(f"{remedy} and shared={shared} without a router", "a router, or a dense network without either")
        _require_counts(hidden=hidden, n_tokens=n_tokens, shared=shared or 1)
        self.task, self.router, self.remedy, self.n_tokens = task, router, remedy, n_tokens
        self.losses, self.counts = list[float](), list[np.ndarray]()
        self._batches, rng, d = np.random.default_rng([seed, 2]), np.random.default_rng([seed, 3]), task.width
        n_expert = router.n_expert if router else 1
        self._weights = weights = Context(2**15 + 16 * d * (n_expert * (hidden + 1) + shared), name="parameters")

        def matrices(f: int, *experts: int) -> dict[str, Any]:
            shapes = {"gate": (d, f), "up": (d, f), "down": (f, d)}
            return {name: new_parameter(weights, rng, *ne, *experts, name=name) for name, ne in shapes.items()}

        self._alone = FeedForward(**matrices(shared or hidden)) if shared or router is None else None
        self.experts = ExpertWeights(**matrices(hidden, n_expert), shared=self._alone) if router else None
        self._gate = new_parameter(weights, rng, d, n_expert, name="router") if router else None
        self._bias = weights.from_numpy(np.zeros(n_expert, np.float32), name="selection bias") if remedy.bias else None
        self._work = Context(2**20, no_alloc=True, name="training")
        self._net = net = self._build(self._work, n_tokens)
        with self._work.active():
            loss = self._with_remedies(net)
        self.trainer = Trainer(loss, net.loss, *([net.routing.experts] if net.routing else []), optimiser=AdamW(rate))

    def _build(self, context: Context, n: int, routes: Tensor | None = None) -> _Net:
        """The nodes over n tokens; routes [k, n]: experts that are used in place of the chosen ones, with their weights."""
        with context.active():
            x, y = (context.new_tensor("f32", self.task.width, n, name=name).mark(Flag.INPUT) for name in "xy")
            if self.router is None:
                routing, out = None, build_ffn(x, self._alone)  # type: ignore[arg-type]
            else:
                routing = build_router(x, self._gate, self.router, selection_bias=self._bias)  # type: ignore[arg-type]
                used = routing if routes is None else replace(routing, experts=routes)
                out = build_experts(x, self.experts, used)  # type: ignore[arg-type]
            loss = ops.scale(ops.sum(ops.sqr(ops.sub(out, y))), 1 / y.n_elements).named("loss of the task")
            return _Net(x, y, out, loss, routing)

    def _with_remedies(self, net: _Net) -> Tensor:
        loss = net.loss
        if net.routing is not None and self.router is not None and self.remedy.aux:
            loss = ops.add(loss, ops.scale(balance.load_balancing_loss(net.routing, self.router), self.remedy.aux))
        if net.routing is not None and self.remedy.z:
            loss = ops.add(loss, ops.scale(balance.z_loss(net.routing.logits), self.remedy.z))
        return (ops.scale(loss, 1.0) if loss is net.loss else loss).named("loss")

    def train(self, n_steps: int) -> ClusterModel:
        """So many steps, each on a fresh batch; returns the model."""
        net = self._net
        for _ in range(n_steps):
            x, y, _ = self.task.batch(self._batches, self.n_tokens)
            self.trainer.step({net.x: x, net.y: y})
            self.losses.append(net.loss.numpy().item())
            if net.routing is not None and self.router is not None:
                self.counts.append(balance.counts_of(net.routing.experts.numpy(), self.router.n_expert))
            if self._bias is not None:
                self._bias.set(self._bias.numpy() + balance.bias_step(self.counts[-1], self.remedy.bias))
        return self

    # ---- looking at the result

    @property
    def selection_bias(self) -> np.ndarray:
        """The bias of each expert as it stands, zeros where there is none."""
        return np.zeros(self.router.n_expert if self.router else 1, np.float32) if self._bias is None else self._bias.numpy().copy()

    def load(self, last: int = 50) -> np.ndarray:
        """Choices per expert over the last steps. Raises ParameterError before the first one, and without a router."""
        if not self.counts or last < 1:
            raise ParameterError(f"the last {last} of {len(self.counts)} steps with a router", "1 or more: train first")
        return np.sum(self.counts[-last:], axis=0)

    def flops_per_token(self) -> float:
        """Floating-point operations of the forward pass, counted from its graph."""
        return statistics(build(self._net.out)).total.flops / self.n_tokens

    def test(self, n: int = 2048, routes: str = "chosen", seed: int = 99) -> dict[str, Any]:
        """Loss, logits (n, E), expert ids (n, k) and clusters of n tokens that training did not see; parameters stay as they are.

        routes: "chosen" by the router, or "random": experts drawn for each token, all different, with the weights of the chosen ones.
        """
        if routes not in ("chosen", "random") or routes == "random" and self.router is None:
            raise ParameterError(f"routes={routes!r}", '"chosen", or "random" where there is a router')
        _require_counts(n=n)
        rng = np.random.default_rng([seed, 4])
        x, y, clusters = self.task.batch(rng, n)
        context = Context(2**20, no_alloc=True, name="test")
        given: dict[Tensor, Any] = {}
        ids = None
        if routes == "random" and self.router is not None:
            drawn = rng.random((n, self.router.n_expert)).argsort(axis=1)[:, : self.router.n_used]
            ids = context.new_tensor("i32", self.router.n_used, n, name="random routes").mark(Flag.INPUT)
            given[ids] = drawn
        net = self._build(context, n, ids)
        seen = [net.routing.experts, net.routing.logits] if net.routing else []
        runner, graph = GraphRunner(), build(*(t.mark(Flag.OUTPUT) for t in (net.loss, *seen)))
        runner.prepare(graph)
        for t, value in {net.x: x, net.y: y, **given}.items():
            t.set(value)
        runner.run(graph)
        experts, logits = (t.numpy().reshape(n, -1).copy() for t in seen) if seen else (None, None)
        return {"loss": net.loss.numpy().item(), "experts": drawn if given else experts, "logits": logits, "clusters": clusters}


def report(model: ClusterModel) -> dict[str, float]:
    """Numbers of a trained model: its load over the last 50 steps, and tokens it did not see."""
    load, seen = model.load(), model.test()
    logits = seen["logits"].astype(float)
    log_sum = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    return {"loss": seen["loss"], "entropy": float(balance.load_entropy(load)), "variation": float(balance.variation(load)),
            "max violation": float(balance.max_violation(load)), "least over mean": float(load.min() / load.mean()),
            "dropped at 1.25": float(balance.dropped_fraction(load, 1.25 * load.mean())),
            "specialisation": specialisation(seen["clusters"], seen["experts"]),
            "mean square of log sum exp": float((log_sum**2).mean())}  # fmt: skip


def specialisation(clusters: np.ndarray, experts: np.ndarray) -> float:
    """What a token's first expert says about its cluster: mutual information over the entropy of the clusters, from 0 to 1.

    With a single cluster there is nothing to say: 0.
    """
    _require_counts(tokens=len(clusters))
    table = np.zeros((clusters.max() + 1, experts.max() + 1))
    np.add.at(table, (clusters, experts.reshape(len(clusters), -1)[:, 0]), 1 / len(clusters))
    a, b = table.sum(1, keepdims=True), table.sum(0, keepdims=True)
    known = table[table > 0] * np.log(table[table > 0] / (a * b)[table > 0])
    whole = float(-(a[a > 0] * np.log(a[a > 0])).sum())
    return float(known.sum()) / whole if (a > 0).sum() > 1 else 0.0


def _require_counts(**counts: int) -> None:
    for name, n in counts.items():
        if not is_whole(n) or n < 1:
            raise ParameterError(f"{name}={shown(n)}", "a whole number, 1 or more")


def equal_hidden(model: ClusterModel) -> int:
    """The hidden width of a dense network that takes at least as many operations per token as `model`."""
    return math.ceil(model.flops_per_token() / (6 * model.task.width + 5))  # three products, and SWIGLU
