"""Interactive views. Each is one JavaScript file over state in traits; without a kernel its stored text remains.

`Dashboard` is loaded at its first use: it brings all of `expertflow` with it.
"""

from typing import TYPE_CHECKING, Any

from workbench.widgets.base import Shown
from workbench.widgets.controls import Knobs, Live, Question, Range
from workbench.widgets.graph_view import GraphView
from workbench.widgets.missing_wait import MissingWait
from workbench.widgets.prompt_player import PromptPlayer
from workbench.widgets.schedule import ScheduleStepper, step_schedule
from workbench.widgets.stepper import Stepper
from workbench.widgets.steps import leave_out_wait, step_backward, step_expand, step_memory, step_plan, step_run
from workbench.widgets.whatif import WhatIf

if TYPE_CHECKING:
    from workbench.widgets.dashboard import Dashboard

__all__ = ["Dashboard", "GraphView", "Knobs", "Live", "MissingWait", "PromptPlayer", "Question", "Range", "ScheduleStepper",
           "Shown", "Stepper", "WhatIf", "leave_out_wait", "step_backward", "step_expand", "step_memory", "step_plan",
           "step_run", "step_schedule"]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "Dashboard":
        from workbench.widgets.dashboard import Dashboard
        return Dashboard
    raise AttributeError(f"module 'workbench.widgets' has no attribute {name!r}; public names: {', '.join(__all__)}")
