"""`WhatIf`: change a case, let the real passes run again, see both runs, and ask why there is a border."""

from __future__ import annotations

from typing import Any

import traitlets

from workbench.errors import WorkbenchError
from workbench.scheduler.whatif import Case, Change, Outcome, WhyNot, why_not
from workbench.views.schedule_drawing import schedule_picture
from workbench.views.tables import Stack
from workbench.views.whatif import (
    ANSWER_COLUMNS,
    ANSWERS,
    case_data,
    compare_table,
    difference,
    outcome_table,
    why_not_lines,
    why_not_rows,
    why_not_title,
    why_not_view,
)
from workbench.widgets.base import FOLDER, Shown, script


class WhatIf(Shown):
    """A `Case` with controls: where a weight lies, which ops a device has, assignments by hand, batch, op_offload, pipeline slots.

    Every change runs the real passes again; the run before stays as A, and what differs is marked. A button for each split border asks
    why it is there: the answer is the smallest single change that takes it away (`whatif.why_not`). `case` is the present one.
    most: single changes that are tried for an answer at most.
    """

    _esm = script("graph_scene", "step_pictures", "schedule_roll", "whatif")
    _css = Shown._css + "".join((FOLDER / f"{name}.css").read_text("utf-8") for name in ("graph_view", "step_pictures", "schedule"))
    run = traitlets.Dict().tag(sync=True)
    last = traitlets.Dict().tag(sync=True)
    note = traitlets.Unicode("").tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    wish = traitlets.List().tag(sync=True)

    def __init__(self, case: Case, caption: str = "", most: int = 600) -> None:
        self.first = self.case = case
        self._caption, self._most = caption, most
        self._last: tuple[Case, Outcome] | None = None
        self._answer: WhyNot | None = None
        self._out, data = case_data(case)
        super().__init__(run=data, note=_start(self._out))
        self.observe(self._wished, names=["wish"])

    # ---- what can be asked of it

    def change(self, *changes: Change) -> WhatIf:
        """Make changes and run the passes again; one that they refuse is said in `note`, and the case stays. Returns the widget."""
        try:
            self._show(self.case.changed(*changes))
        except WorkbenchError as refused:
            self.note = f"Refused: {refused.found}." + (f" {refused.hint}." if refused.hint else "")
        return self

    def ask(self, border: int | str) -> WhatIf:
        """Ask why a split begins there: its number, or its first node. Returns the widget."""
        try:
            found = why_not(self.case, border, self._most)
        except WorkbenchError as refused:
            self.note = f"{refused.found}: {refused.expected}."
            return self
        self._answer = found
        ways = [[t.change.kind, t.change.what, t.change.value] for t in found.removing[:ANSWERS]]
        rows = [[str(x) if isinstance(x, str) else f"{x:,}" for x in row] for row in why_not_rows(found)]
        self.answer = {"title": why_not_title(found), "lines": [[*line] for line in why_not_lines(found)], "columns": ANSWER_COLUMNS,
                       "rows": rows, "ways": ways, "border": list(found.border)}  # fmt: skip
        return self

    def back(self) -> WhatIf:
        """Exchange this run and the last one. Returns the widget."""
        if self._last is not None:
            self._show(self._last[0])
        return self

    def _show(self, case: Case) -> None:
        out, data = case_data(case)
        self._answer = None
        with self.hold_trait_notifications():
            self.last, self.run, self.answer, self.note = self.run, data, {}, difference(self._out, out)
        self._last, self.case, self._out = (self.case, self._out), case, out

    def _wished(self, change: Any) -> None:
        """The page says [number, what, …]; the number only makes each wish another one."""
        _, kind, *rest = change["new"]
        if kind == "ask":
            self.ask(int(rest[0]))
        elif kind == "back":
            self.back()
        elif kind == "first":
            self._show(self.first)
        else:
            self.change(Change(str(kind), str(rest[0]), rest[1]))

    # ---- stored

    def _view(self) -> Stack:
        parts: list[Any] = [schedule_picture(*self.case.scheduler_and_graph(), caption=self._caption or self.note)]
        parts.append(outcome_table(self._out) if self._last is None else compare_table(self._last[1], self._out))
        return Stack(*parts, *([why_not_view(self._answer)] if self._answer is not None else []))

    def stored_text(self) -> str:
        """The splits, what differs from the run before, and the last answer."""
        return f"{self.case.name}\n{self._view()!r}"

    def stored_html(self) -> str:
        """The nodes with their backends and splits as a picture, and the same as tables."""
        return self._view().html()


def _start(out: Outcome) -> str:
    n = len(out.splits)
    return f"{n} split{'s' * (n != 1)}; {out.copied:,} bytes copied per run. Change something: this run stays as A."
