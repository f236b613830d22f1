"""Interactive views. Each is one JavaScript file over state in traits; without a kernel its stored text remains."""

from workbench.widgets.base import Shown
from workbench.widgets.controls import Question, Range
from workbench.widgets.prompt_player import PromptPlayer
from workbench.widgets.stepper import Stepper

__all__ = ["PromptPlayer", "Question", "Range", "Shown", "Stepper"]
