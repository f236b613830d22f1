"""`ScheduleStepper`: walk through the scheduler's decisions, predict them, and lay two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import traitlets

from workbench.errors import ParameterError, shown
from workbench.scheduler import Scheduler
from workbench.views.schedule_drawing import draw_schedule, last_of
from workbench.views.schedule_pairs import pairing
from workbench.views.schedule_steps import schedule_steps
from workbench.views.steps import Steps
from workbench.views.tables import Stack, table
from workbench.widgets.base import FOLDER, Shown, script

ROWS = 12


class ScheduleStepper(Shown):
    """Steps of `views.schedule_steps`: the nodes in order with a row for each backend, the graph, and a table of all stages.

    other: the steps of a second run; where it differs is marked, and x steps through it instead. predict: asks for backend and cause
    before each decision is shown, where the steps hold questions. `k` is the step shown, `answers` what was said, by step.
    Keys: ← → Home End Space; n p the next and the previous change, Page Up and Page Down a pass; m b the next and the previous
    match of the chosen cause and node; d D a difference.
    """

    _esm = script("graph_scene", "step_pictures", "schedule_roll", "schedule")
    _css = Shown._css + "".join((FOLDER / f"{name}.css").read_text("utf-8") for name in ("graph_view", "step_pictures", "schedule"))
    trace = traitlets.Dict().tag(sync=True)
    other = traitlets.Dict().tag(sync=True)
    pairs = traitlets.Dict().tag(sync=True)
    side = traitlets.Unicode("A").tag(sync=True)
    k = traitlets.Int(0).tag(sync=True)
    opened = traitlets.List().tag(sync=True)
    predict = traitlets.Bool(False).tag(sync=True)
    answers = traitlets.Dict().tag(sync=True)

    def __init__(self, steps: Steps, caption: str = "", other: Steps | None = None, **kwargs: Any) -> None:
        for given in (steps, *([other] if other is not None else [])):
            if given.get("kind") != "schedule":
                raise ParameterError(f"steps of kind {given.get('kind')!r}", "those of views.schedule_steps",
                                     "widgets.Stepper shows other steps")  # fmt: skip
        self._caption = caption
        pairs = {"A": pairing(steps, other), "B": pairing(other, steps)} if other is not None else {}
        super().__init__(trace=steps, other=other or {}, pairs=pairs, **kwargs)

    @property
    def score(self) -> tuple[int, int, int]:
        """Decisions predicted, backends right, causes right."""
        said = [(self.trace["steps"][int(k)], a) for k, a in self.answers.items() if a]
        said = [(step, a) for step, a in said if "ask" in step]
        return len(said), sum(a[0] == step["ask"]["is"] for step, a in said), sum(a[1] == step["ask"]["right"] for step, a in said)

    def stored_text(self) -> str:
        """Every change as a line."""
        return repr(self._changes())

    def stored_html(self) -> str:
        """The last state as a picture, and the first changes as rows; in prediction mode nothing beyond the first question."""
        return self._pictures().html() + self._changes().html()

    def _pictures(self) -> Stack:
        runs = [steps for steps in (self.trace, self.other) if steps]
        key = next((max(i - 1, 0) for i, s in enumerate(self.trace["steps"]) if "ask" in s), 0) if self.predict else None
        return Stack(*(draw_schedule(steps, len(steps["steps"]) - 1 if key is None else key, self._caption if steps is runs[-1] else
                                     f"A: {steps['title']}.") for steps in runs))  # fmt: skip

    def _changes(self) -> Any:
        steps = self.trace["steps"]
        asked = next((i for i, s in enumerate(steps) if "ask" in s), len(steps)) if self.predict else len(steps)
        rows = [(i + 1, s["label"], s["sentence"]) for i, s in enumerate(steps[:asked]) if s["change"] or i == 0]
        said = f"{f'the first {ROWS} of ' * (len(rows) > ROWS)}{len(rows)} changes in {len(steps)} steps"
        said = said if asked == len(steps) else "what comes before the first question"
        return table(["step", "", "why"], rows[:ROWS], f"{shown(self.trace['title'])}: {said}.")


def step_schedule(scheduler: Scheduler, graph: Any, *, stages: Sequence[str] | None = None, start: str | None = None,
                  other: Scheduler | tuple[Scheduler, Any] | None = None, predict: bool = False, title: str = "",
                  caption: str = "", other_title: str = "") -> ScheduleStepper:  # fmt: skip
    """Step through what `scheduler` decides about `graph`; both stay as they are.

    stages: only these ("pass2", "pass2_gpu_up", …); what comes before has happened. start: the stage after which to begin. other: a
    scheduler, or one with its graph, for a second run beside this one, called `other_title`. predict: ask before showing.
    """
    second = (other, graph) if isinstance(other, Scheduler) else other
    steps = schedule_steps(scheduler, graph, title, stages, questions=predict)
    k = last_of(steps, start) if start is not None else 0
    beside = schedule_steps(second[0], second[1], other_title or f"{title or 'the other run'} (B)", stages) if second is not None else None
    return ScheduleStepper(steps, caption, beside, k=k, predict=predict)
