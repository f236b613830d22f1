"""Ready steppers: expanding a graph forwards and backwards, packing its memory, the plan over threads, the calls of a run over devices."""

from __future__ import annotations

from typing import Any

from workbench.cgraph import CGraph
from workbench.devices import HOST_MEMORY, BufferType, Plan
from workbench.scheduler.waits import Make
from workbench.tensors import Tensor
from workbench.trace import Trace
from workbench.views.gradient_steps import backward_steps
from workbench.views.run_steps import run_steps
from workbench.views.steps import expand_steps, memory_steps, plan_steps
from workbench.widgets.missing_wait import MissingWait
from workbench.widgets.stepper import Stepper


def step_expand(*tensors: Tensor, graph: CGraph | None = None, title: str = "Expanding the graph", caption: str = "") -> Stepper:
    """Step through `build_forward_expand(*tensors)`: stack, visited set, nodes and leafs after each decision.

    Nothing is changed: neither names and flags of the tensors nor `graph`, which may hold something already.
    """
    return Stepper(expand_steps(*tensors, graph=graph, title=title), caption)


def step_backward(graph: Any, title: str = "Expanding backwards", caption: str = "", k: int = 0) -> Stepper:
    """Step through `build_backward_expand` of a graph (or a loss): what needs a gradient, and who gets one out of which node.

    Nothing is changed. k: the step shown first.
    """
    return Stepper(backward_steps(graph, title), caption, k=k)


def step_memory(graph: Any, buffer_type: BufferType = HOST_MEMORY, title: str = "Packing memory", caption: str = "") -> Stepper:
    """Step through the allocator's decisions for a graph that has no memory yet: address × time, with holes and reuse."""
    return Stepper(memory_steps(graph, buffer_type, title), caption)


def step_plan(plan: Plan, recorded: Trace | None = None, title: str = "", caption: str = "") -> Stepper:
    """Step through the tasks of a plan over its threads: simulated, or as `plan.run(record=Trace())` recorded them."""
    return Stepper(plan_steps(plan, recorded, title), caption)


def step_run(trace: Trace, title: str = "Calls of a run", caption: str = "", k: int = 0) -> Stepper:
    """Step through the calls that the host made in a recorded run, on the run's clock: copies, waits, events, launches, each with its
    cause; what is done, and what was only asked for; the bytes so far. What came too early in simulated time is marked.

    Keys beside those of all steppers: s, S for the next and previous split, k, K for the next and previous call of the same kind,
    + and - for the time that is shown. k: the step shown first.
    """
    return Stepper(run_steps(trace, title), caption, k=k)


def leave_out_wait(make: Make, caption: str = "", value: int = 1) -> MissingWait:
    """A slider over the waits of a run of simulated devices: the run is made and done again without the one that is chosen.

    Beside it stand what came too early, what is different in the results, and both runs on one clock (`views.missing_wait`).
    """
    return MissingWait(make, caption, value)
