"""Training: loss, gradients and optimiser as one graph, built once and run for every batch (`ggml_opt`).

The order within a run is that of the graph: forward nodes, gradients, one OPT_STEP_ADAMW per parameter. From step to step only data
changes: the batch, and seven numbers for AdamW. Parameters and momenta stay where they are, in memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from workbench.cgraph import CGraph, build
from workbench.devices.backend import HOST_MEMORY, buffer_type_of
from workbench.errors import GraphError, ParameterError, shown
from workbench.execution.run import GraphRunner
from workbench.tensors import ops
from workbench.tensors.context import Context, padded
from workbench.tensors.tensor import Flag, Tensor


@dataclass
class AdamW:
    """Settings of the optimiser (`ggml_opt_optimizer_params`); they may be changed between steps."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0

    def __post_init__(self) -> None:
        numbers = self.rate, self.beta1, self.beta2, self.eps, self.decay
        if not (all(isinstance(x, int | float | np.number) and math.isfinite(x) for x in numbers) and self.rate >= 0
                and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.eps > 0 and self.decay >= 0):  # fmt: skip
            raise ParameterError(f"{self}", "finite numbers: rate and decay of 0 or more, betas from 0 to below 1, eps above 0")

    def numbers(self, step: int) -> tuple[float, ...]:
        """The seven numbers that OPT_STEP_ADAMW reads in step 1, 2, …; corrections are those of the betas as f32 holds them.

        Raises ParameterError where a setting was changed to what the optimiser cannot use.
        """
        self.__post_init__()
        start1, start2 = (1 / (1 - float(np.float32(beta)) ** step) for beta in (self.beta1, self.beta2))
        return self.rate, self.beta1, self.beta2, self.eps, self.decay, start1, start2


def new_parameter(context: Context, rng: np.random.Generator, *ne: int, name: str = "", scale: float | None = None) -> Tensor:
    """A parameter of normal numbers; scale: their standard deviation, by default 1/√ne0, which keeps the size of a product."""
    values = rng.standard_normal(ne[::-1], np.float32) * np.float32(1 / math.sqrt(ne[0]) if scale is None else scale)
    return context.from_numpy(values, name=name).mark(Flag.PARAM)


class Trainer:
    """A graph that computes a loss, its gradients and a step of AdamW (`ggml_opt_context`).

    loss: one number, made of parameters (flagged PARAM, with data) and inputs. also: other results to compute, kept readable.
    runner: a GraphRunner, or a Scheduler; a GraphRunner on the CPU by default. Inputs are leafs without memory of their own: each step
    wants them all.

    Raises what `build_backward_expand` raises, and GraphError for a parameter that has no part in the loss.
    """

    def __init__(self, loss: Tensor, *also: Tensor, optimiser: AdamW | None = None, runner: Any = None) -> None:
        self.loss, self.optimiser, self.n_steps = loss, optimiser or AdamW(), 0
        self.runner: Any = runner or GraphRunner()
        self.forward, self.graph = build(loss, *also), build(loss, *also)
        flags = [(t, t.flags) for t in (loss, *also)]
        try:
            self._build(loss, *also)
        except BaseException:
            for t, before in flags:
                t.flags = before
            raise

    def _build(self, loss: Tensor, *also: Tensor) -> None:
        """The graph of a step. Flags are set here; who calls it takes them back where it fails."""
        if other := next((t for t in self.graph.nodes if t.flags & Flag.LOSS and t is not loss), None):
            raise GraphError(f"{other.label} is marked as a loss beside {loss.label}", "one loss, which is returned and made smaller",
                             "train the sum, ops.add, with the flag on it alone: t.flags &= ~Flag.LOSS takes one away")  # fmt: skip
        for t in (loss, *also):
            if t.root().flags & Flag.PARAM:
                raise GraphError(f"{t.label} lies in the memory of parameter {t.root().label}, which a step writes", "memory of its own",
                                 "ops.cont of it")  # fmt: skip
            t.mark(Flag.OUTPUT)
        loss.mark(Flag.LOSS)
        self.graph.size = 2**31 - 1
        self._made = Context(2**31, no_alloc=True, name="gradients")  # descriptions: no memory is taken
        self._numbers, seed = self._small("adamw", 7), self._small(f"grad for {loss.name}", 1)
        self.graph.build_backward_expand({loss: seed}, self._made)
        self.parameters = [t for t in self.graph.nodes if t.flags & Flag.PARAM]
        self._add_steps()
        self.graph.size = max(2048, len(self.graph.nodes), len(self.graph.leafs))
        self.inputs = [t for t in self.graph.leafs if t.storage is None]
        self.graph.reset()

    def _add_steps(self) -> None:
        for w in self.parameters:
            if self.graph.grad(w) is None:
                raise GraphError(f"parameter {w.label} has no part in the loss", "parameters that the loss depends on",
                                 "leave its flag PARAM away, or use it")  # fmt: skip
            m, v = self._momenta(w)
            with self._made.active():
                step = ops.opt_step_adamw(w, self.graph.grad(w), m, v, self._numbers)  # type: ignore[arg-type]
            self.graph.build_forward_expand(step.named(f"AdamW step for {w.name}"))

    def _small(self, name: str, n: int) -> Tensor:
        """A few numbers in memory of their own: the backend's, or the host's where a scheduler brings them to its devices."""
        kind = self.runner.backend.buffer_type if isinstance(self.runner, GraphRunner) else HOST_MEMORY
        t = self._made.new_tensor("f32", n, name=name)
        t.place(kind.alloc_buffer(t.nbytes))
        return t

    def _momenta(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors like `w`, in the same kind of memory."""
        storage = w.require_data()
        kind = buffer_type_of(storage)
        size = padded(w.nbytes, kind.alignment)
        buffer = kind.alloc_buffer(2 * size, storage.usage)
        m, v = (self._made.new_tensor("f32", *w.ne, name=f"{what} of {w.name}") for what in "mv")
        m.place(buffer, 0)
        v.place(buffer, size)
        return m, v

    # ---- running

    def step(self, values: Mapping[Tensor, Any]) -> float:
        """One step on a batch, given as input -> array; the loss before the step. Raises ParameterError where it is not finite."""
        loss = self._run(self.graph, values, self.optimiser.numbers(self.n_steps + 1))
        self.n_steps += 1
        if not math.isfinite(loss):
            raise ParameterError(f"the loss is {loss} at step {self.n_steps}", "a finite loss; the parameters are spoilt now",
                                 "start anew with a smaller rate, or look for infinite inputs")  # fmt: skip
        return loss

    def fit(self, batches: Iterable[Mapping[Tensor, Any]]) -> list[float]:
        """A step for each batch; the losses."""
        return [self.step(values) for values in batches]

    def evaluate(self, values: Mapping[Tensor, Any]) -> float:
        """The loss on a batch, and what `also` computes; the parameters stay as they are."""
        if isinstance(self.runner, GraphRunner):
            self.runner.prepare(self.graph)  # both graphs use its places: those of the forward graph alone would be given away twice
        return self._run(self.forward, values)

    def _run(self, graph: CGraph, values: Mapping[Tensor, Any], numbers: tuple[float, ...] = ()) -> float:
        if missing := [t for t in self.inputs if t not in values]:
            raise ParameterError(f"no values for {', '.join(t.label for t in missing)}", "a value for each input, at every step: "
                                 "their memory is used again within a run")  # fmt: skip
        run = self._ready(graph)
        for t, value in values.items():
            t.set(value)
        if numbers:
            self._numbers.set(numbers)
        run()
        return float(self.loss.numpy().item())

    def _ready(self, graph: CGraph) -> Callable[[], Any]:
        """What runs the graph, which has its memory now."""
        runner = self.runner
        if isinstance(runner, GraphRunner):
            runner.prepare(graph)
            return partial(runner.run, graph)
        if runner.graph is not graph or not runner.is_allocated:
            runner.reset()
            runner.alloc(graph)
        return partial(runner.compute, graph)

    def reset(self) -> None:
        """Forget the momenta and the number of steps; the parameters stay (`ggml_opt_reset`)."""
        self.graph.reset()
        self.n_steps = 0

    def __repr__(self) -> str:
        n = sum(t.n_elements for t in self.parameters)
        return (f"<Trainer {shown(self.loss.name)!r}: {n:,} numbers in {len(self.parameters)} parameters, {len(self.forward)} nodes "
                f"forward, {len(self.graph)} in all, {self.n_steps} steps>")  # fmt: skip
