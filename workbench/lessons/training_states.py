"""The state that lesson 06 starts from: a small network that learns which of eight numbers is the largest. Public names only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from workbench import paths
from workbench.cgraph import CGraph, build
from workbench.devices import BufferType, CpuBackend
from workbench.devices.simulated import simulated_machine
from workbench.execution import AdamW, GraphAllocator, Trainer, compute, new_parameter
from workbench.scheduler import Scheduler
from workbench.tensors import Context, Flag, Tensor, Usage, ops

RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Learning rates of the knob."""


@dataclass
class Network:
    """A network with its loss. context: where its activations are described."""

    context: Context
    x: Tensor
    labels: Tensor
    logits: Tensor
    loss: Tensor
    parameters: list[Tensor]

    def graph(self) -> CGraph:
        """The forward graph, as it is expanded from the loss."""
        return build(self.loss)

    def find(self, name: str) -> Tensor:
        """A parameter by its name."""
        return next(w for w in self.parameters if w.name == name)


class Lesson06:
    """Gradients: networks of any depth on one task, checked, measured and trained."""

    def network(self, widths: tuple[int, ...] = (8, 32, 8), n_tokens: int = 64, act: str = "relu", seed: int = 6, homes: Any = (),
                with_data: bool = False) -> Network:  # fmt: skip
        """w x + b and an activation per layer, cross entropy at the end. Always the same numbers for a seed.

        homes: buffer types in which the parameters lie in turn (the host's memory by default). with_data: inputs and results have memory at
        once, and the inputs a batch.
        """
        rng = np.random.default_rng(seed)
        weights = Context(sum(4 * (a + 1) * b + 1000 for a, b in zip(widths, widths[1:])), name="parameters")
        work = Context(2**24 if with_data else 2**18, no_alloc=not with_data, name="activations")
        shapes = [(f"{what}{i + 1}", ne) for i, (a, b) in enumerate(zip(widths, widths[1:])) for what, ne in (("w", (a, b)), ("b", (b,)))]
        made = [new_parameter(weights, rng, *ne, name=name, scale=None if len(ne) > 1 else 0.0) for name, ne in shapes]
        for i, t in enumerate(made if homes else ()):
            _move(t, homes[i % len(homes)])
        with work.active():
            x = work.new_tensor("f32", widths[0], n_tokens, name="x").mark(Flag.INPUT)
            labels = work.new_tensor("f32", widths[-1], n_tokens, name="labels").mark(Flag.INPUT)
            h = x
            for i in range(0, len(made), 2):
                h = ops.add(ops.mul_mat(made[i], h).named(f"w{i // 2 + 1} h"), made[i + 1]).named(f"layer {i // 2 + 1}")
                h = ops.unary(act, h).named(f"hidden {i // 2 + 1}") if i + 2 < len(made) else h.named("logits")
            loss = ops.cross_entropy_loss(h, labels).named("loss").mark(Flag.LOSS)
        net = Network(work, x, labels, h, loss, made)
        if with_data:
            for t, values in next(self.batches(net)).items():
                t.set(values)
        return net

    def batches(self, net: Network, seed: int = 1) -> Iterator[dict[Tensor, np.ndarray]]:
        """Rows of random numbers, and which of them is the largest as a row with a single 1; without end."""
        rng, (n, t) = np.random.default_rng(seed), net.x.ne[:2]
        while True:
            x = rng.standard_normal((t, n), np.float32)
            yield {net.x: x, net.labels: np.eye(net.labels.ne[0], dtype=np.float32)[x[:, : net.labels.ne[0]].argmax(1)]}

    def trainer(self, net: Network | None = None, rate: float = 1e-2, **settings: Any) -> tuple[Network, Trainer]:
        """A network and what trains it."""
        net = net or self.network()
        return net, Trainer(net.loss, net.logits, optimiser=AdamW(rate), **settings)

    def run(self, rate: float, n_steps: int = 60) -> tuple[list[float], float]:
        """The losses of a new network trained at this rate, and its share of right answers afterwards; a loss may become infinite."""
        net, trainer = self.trainer(rate=rate)
        with np.errstate(all="ignore"):
            losses = [trainer.step(batch) for batch, _ in zip(self.batches(net), range(n_steps))]
        return losses, self.right_answers(net, trainer)

    def right_answers(self, net: Network, trainer: Trainer, n_batches: int = 4) -> float:
        """The share of right answers on batches that training did not see."""
        found = []
        for batch, _ in zip(self.batches(net, seed=99), range(n_batches)):
            trainer.evaluate(batch)
            found.append((net.logits.numpy().argmax(1) == batch[net.labels].argmax(1)).mean())
        return float(np.mean(found))

    # ---- judging gradients

    def gradients(self, net: Network) -> dict[str, np.ndarray]:
        """The gradient of each parameter, by a backward graph that is run once."""
        graph = net.graph().build_backward_expand()
        graph.reset()
        compute(graph)
        return {w.name: graph.grad(w).numpy().copy() for w in net.parameters}  # type: ignore[union-attr]

    def slope(self, net: Network, name: str, index: tuple[int, ...], h: float) -> float:
        """(loss(w + h) - loss(w - h)) / 2h for one element of a parameter: two runs of the forward graph."""
        w, graph, ends = net.find(name), net.graph(), []
        start = w.numpy()[index]
        for moved in (start + np.float32(h), start - np.float32(h)):
            w.numpy()[index] = moved
            compute(graph)
            ends.append(float(net.loss.numpy().item()))
        w.numpy()[index] = start
        return (ends[0] - ends[1]) / (2 * h)

    def slope_error(self, net: Network, h: float, n: int = 12) -> float:
        """How far slopes with step h are from the gradients: the median of some elements of w1, over the largest gradient."""
        grad = self.gradients(net)["w1"]
        places = [(i % grad.shape[0], (3 * i) % grad.shape[1]) for i in range(n)]
        return float(np.median([abs(self.slope(net, "w1", p, h) - grad[p]) for p in places]) / np.abs(grad).max())

    # ---- counting

    def added(self, n_layers: int, act: str = "relu") -> int:
        """Nodes that the backward walk adds to a network of so many layers."""
        graph = self.network((8,) * (n_layers + 1), act=act).graph()
        before = len(graph.nodes)
        return len(graph.build_backward_expand(context=Context(2**20, no_alloc=True)).nodes) - before

    def memory(self, n_layers: int, n_tokens: int = 256, width: int = 64) -> tuple[int, int]:
        """Planned bytes of the results of a network: forward alone, and with gradients and optimiser."""
        net = self.network((width,) * (n_layers + 1), n_tokens)
        _, trainer = self.trainer(net)
        return self._planned(trainer.forward), self._planned(trainer.graph)

    def _planned(self, graph: CGraph) -> int:
        """Compute memory of a graph; leafs and parameters lie elsewhere."""
        types = (CpuBackend.buffer_type, BufferType("elsewhere"))
        return GraphAllocator(types).measure(graph, [int(t.op == "NONE") for t in graph.nodes], [1] * len(graph.leafs))[0]

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """What real ggml made of the same network: `models/metrics/lesson06_ggml.json`."""
        return json.loads((paths.models_dir() / "metrics" / "lesson06_ggml.json").read_text("utf-8"))

    # ---- one op at a time

    def soft_max_case(self, n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(y, grad of y, grad of x) of y = soft max(x) in a graph: what the program itself says."""
        rng, context = np.random.default_rng(seed), Context(2**14)
        x = context.from_numpy(rng.standard_normal(n).astype("f4"), name="x").mark(Flag.PARAM)
        share = context.from_numpy(rng.standard_normal(n).astype("f4"))
        y = ops.soft_max(x)
        graph = build(ops.sum(ops.mul(y, share)).mark(Flag.LOSS)).build_backward_expand()
        compute(graph)
        return y.numpy().copy(), share.numpy().copy(), graph.grad(x).numpy().copy()  # type: ignore[union-attr]

    def adamw_case(self, gradients: list[float], rate: float = 0.1, decay: float = 0.0, start: float = 1.0) -> float:
        """A single parameter after one OPT_STEP_ADAMW per gradient."""
        context, settings = Context(2**14), AdamW(rate, decay=decay)
        w, g, m, v = (context.from_numpy([value], name=name) for name, value in (("w", start), ("grad", 0.0), ("m", 0.0), ("v", 0.0)))
        numbers = context.new_tensor("f32", 7)
        graph = build(ops.opt_step_adamw(w.mark(Flag.PARAM), g, m, v, numbers))
        for t, value in enumerate(gradients, 1):
            g.set([value])
            numbers.set(settings.numbers(t))
            compute(graph)
        return float(w.numpy().item())

    # ---- devices

    def on_devices(self, n_steps: int = 5) -> tuple[list[float], list[np.ndarray], Scheduler]:
        """Losses, parameters and scheduler of a run with weights on a simulated GPU and biases on the host."""
        machine = simulated_machine(1, offload_min_batch=10**9)
        net = self.network(homes=(machine[0].buffer_type, machine[-1].buffer_type))
        net, trainer = self.trainer(net, runner=Scheduler(machine))
        losses = [trainer.step(batch) for batch, _ in zip(self.batches(net), range(n_steps))]
        return losses, [w.numpy().copy() for w in net.parameters], trainer.runner

    def here(self, n_steps: int = 5) -> tuple[list[float], list[np.ndarray]]:
        """The same on the CPU alone."""
        net, trainer = self.trainer()
        losses = [trainer.step(batch) for batch, _ in zip(self.batches(net), range(n_steps))]
        return losses, [w.numpy().copy() for w in net.parameters]

    def without_in_place(self, graph: CGraph) -> CGraph:
        """The same graph, in which no op may work in place."""
        for t in graph.nodes:
            if t.spec is not None:
                t.spec = dataclasses.replace(t.spec, in_place=False)
        return graph


def _move(t: Tensor, kind: BufferType) -> None:
    """A parameter to memory of another kind."""
    values = t.numpy().copy()
    t.place(kind.alloc_buffer(t.nbytes, Usage.WEIGHTS))
    t.set(values)
