"""Ready steppers: expanding a graph, packing its memory, the plan over threads, the calls of a run over devices."""

from __future__ import annotations

from typing import Any

from workbench.cgraph import CGraph
from workbench.devices import HOST_MEMORY, BufferType, Plan
from workbench.tensors import Tensor
from workbench.trace import Trace
from workbench.views.run_steps import run_steps
from workbench.views.steps import expand_steps, memory_steps, plan_steps
from workbench.widgets.stepper import Stepper


def step_expand(*tensors: Tensor, graph: CGraph | None = None, title: str = "Expanding the graph", caption: str = "") -> Stepper:
    """Step through `build_forward_expand(*tensors)`: stack, visited set, nodes and leafs after each decision.

    Nothing is changed: neither names and flags of the tensors nor `graph`, which may hold something already.
    """
    return Stepper(expand_steps(*tensors, graph=graph, title=title), caption)


def step_memory(graph: Any, buffer_type: BufferType = HOST_MEMORY, title: str = "Packing memory", caption: str = "") -> Stepper:
    """Step through the allocator's decisions for a graph that has no memory yet: address × time, with holes and reuse."""
    return Stepper(memory_steps(graph, buffer_type, title), caption)


def step_plan(plan: Plan, recorded: Trace | None = None, title: str = "", caption: str = "") -> Stepper:
    """Step through the tasks of a plan over its threads: simulated, or as `plan.run(record=Trace())` recorded them."""
    return Stepper(plan_steps(plan, recorded, title), caption)


def step_run(trace: Trace, title: str = "Calls of a run", caption: str = "") -> Stepper:
    """Step through the calls that the host made in a recorded run: copies, waits, launches, each with its cause and the bytes so far."""
    return Stepper(run_steps(trace, title), caption)
