"""`Stepper`: walk through recorded steps, forwards and backwards, with the cause of each in one sentence."""

from __future__ import annotations

from typing import Any

import traitlets

from workbench.errors import ParameterError, shown
from workbench.views.memory import memory_picture
from workbench.views.rasters import raster_picture
from workbench.views.step_drawing import steps_picture
from workbench.views.tables import table
from workbench.widgets.base import FOLDER, Shown, script

STORED = 32
"""Steps in the stored picture; more would be too small to read."""


class Stepper(Shown):
    """Steps of a trace, "table" and "columns" for the table beside the picture included.

    The forms are described in `workbench.views.rasters`, `workbench.views.memory` and `workbench.views.steps`.

    Keys: ← → Home End Space, n and p for the next and the previous change. `k` is the step shown. What is drawn for
    step k depends on the first k + 1 steps only.
    """

    _esm = script("memory", "graph_scene", "step_pictures", "run_picture", "stepper")
    _css = Shown._css + "".join((FOLDER / f"{name}.css").read_text("utf-8") for name in ("graph_view", "step_pictures"))
    trace = traitlets.Dict().tag(sync=True)
    k = traitlets.Int(0).tag(sync=True)

    def __init__(self, trace: dict[str, Any], caption: str = "", **kwargs: Any) -> None:
        if not trace.get("steps"):
            raise ParameterError("a trace without steps", "at least one step to show")
        self._caption = caption
        super().__init__(trace=trace, **kwargs)

    def stored_text(self) -> str:
        """Every change as a line."""
        return repr(self._changes())

    def stored_html(self) -> str:
        """The first steps as a picture, and the first changes as rows."""
        caption = self._caption or self.trace["title"]
        kind = self.trace.get("kind")
        at = self.k if kind == "run" and self.k else None
        seen = (memory_picture(self.trace, caption) if kind == "memory" else steps_picture(self.trace, caption, at) if kind
                else raster_picture(self.trace, caption, STORED - 1))  # fmt: skip
        return seen.html() + self._changes().html()

    def _changes(self) -> Any:
        rows = [(i + 1, s["label"], s["sentence"]) for i, s in enumerate(self.trace["steps"]) if s.get("change") or i == 0]
        return table(["step", "", "what changed"], rows[:12], f"{shown(self.trace['title'])}: "
                     f"{'the first 12 of ' * (len(rows) > 12)}{len(rows)} changes in {len(self.trace['steps'])} steps.")
