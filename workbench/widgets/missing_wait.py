"""`MissingWait`: a slider over the waits of a run; the run again without the chosen one, beside the whole run."""

from __future__ import annotations

from typing import Any

import traitlets

from workbench.scheduler.waits import Make, outcome, waits
from workbench.views.run_drawing import DIFFERENCES, different_rows, missing_wait, said_of_missing, wait_sentences
from workbench.views.run_steps import run_steps
from workbench.widgets.base import FOLDER, Shown, script

AHEAD = 60
"""Calls of a run up to which all waits are tried beforehand: then the slider works on a page without a kernel, too."""


class MissingWait(Shown):
    """The waits of a run of simulated devices, and what happens without each. `value`: the wait that is left out, from 1.

    `cuts`: by number (as text) the run without this wait: its steps, what is said of it, and the rows of results that differ.
    """

    _esm = script("graph_scene", "step_pictures", "run_picture", "missing_wait")
    _css = Shown._css + "".join((FOLDER / f"{name}.css").read_text("utf-8") for name in ("graph_view", "step_pictures"))
    value = traitlets.Int(1).tag(sync=True)
    names = traitlets.List().tag(sync=True)
    columns = traitlets.List(DIFFERENCES).tag(sync=True)
    whole = traitlets.Dict().tag(sync=True)
    cuts = traitlets.Dict().tag(sync=True)

    def __init__(self, make: Make, caption: str = "", value: int = 1) -> None:
        self._make, self._whole, self._caption = make, outcome(make), caption
        names = [f"{n}: {said}" for n, said in enumerate(wait_sentences(self._whole), 1)]
        steps = run_steps(self._whole.trace, "With all waits")
        super().__init__(value=value, names=names, whole=steps)
        few = len(steps["steps"]) <= AHEAD
        self._try(*(range(1, len(waits(self._whole.trace)) + 1) if few else [value]))
        self.observe(lambda change: self._try(change["new"]), names=["value"])

    def _try(self, *numbers: int) -> None:
        new = {str(n): self._without(n) for n in numbers if str(n) not in self.cuts}
        if new:
            self.cuts = {**self.cuts, **new}

    def _without(self, n: int) -> dict[str, Any]:
        cut = outcome(self._make, n)
        return {"steps": run_steps(cut.trace, f"Without wait {n}"), "said": said_of_missing(self._whole, cut, self._caption),
                "rows": different_rows(self._whole, cut)}  # fmt: skip

    def stored_text(self) -> str:
        """The chosen wait, and what happens without it."""
        return f"leave out wait: {self.names[self.value - 1]}\n{self._view()!r}"

    def stored_html(self) -> str:
        """The same, with both runs as pictures."""
        return self._view().html()

    def _view(self) -> Any:
        return missing_wait(self._whole, outcome(self._make, self.value), self._caption)

