"""The small controls of the lessons: a question, and a slider with a real label (that of ipywidgets has no accessible name)."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from workbench.errors import shown
from workbench.views.tables import Table, table
from workbench.widgets.base import Shown, script


class Question(Shown):
    """One question: `options` [(key, text)] to choose from, or a number to enter; `answer` holds the key or the number."""

    _esm = script("controls")
    kind = traitlets.Unicode("question").tag(sync=True)
    ask = traitlets.Unicode().tag(sync=True)
    options = traitlets.List().tag(sync=True)
    answer = traitlets.Unicode("").tag(sync=True)

    def stored_text(self) -> str:
        """The question and its options."""
        return "\n".join([shown(self.ask, 2000), *(f"  {key}) {shown(text, 2000)}" for key, text in self.options)])

    def stored_html(self) -> str:
        """The same as a list."""
        items = "".join(f"<div>{html.escape(key)}) {html.escape(text)}</div>" for key, text in self.options)
        return f'<div style="border-left:5px solid #0072B2;padding:0.4em 0.9em"><b>{html.escape(self.ask)}</b>{items}</div>'


class Range(Shown):
    """A labelled slider over whole numbers; `below` is HTML under it, made by `workbench.views`.

    `names`, one for each value from `min` on, replace the number beside the slider.
    """

    _esm = script("controls")
    kind = traitlets.Unicode("range").tag(sync=True)
    value = traitlets.Int(0).tag(sync=True)
    min = traitlets.Int(0).tag(sync=True)
    max = traitlets.Int(10).tag(sync=True)
    step = traitlets.Int(1).tag(sync=True)
    label = traitlets.Unicode("value").tag(sync=True)
    names = traitlets.List().tag(sync=True)
    below = traitlets.Unicode("").tag(sync=True)

    def drive(self, run: Callable[[int], Any]) -> Range:
        """Call `run(value)` now and after every move, and show the view it returns below. Returns the slider."""
        def redraw(change: Any = None) -> None:
            self._view = run(self.value)
            self.below = self._view.html()

        redraw()
        self.observe(redraw, names=["value"])
        return self

    def compare(self, run: Callable[[int], Mapping[str, Any]], caption: str = "", first: int | None = None) -> Range:
        """As `drive`, for a `run` that returns named facts: this run (B) stands beside the one before (A), at first that of `first`."""
        last = run(self.min if first is None else first)

        def view(value: int) -> Table:
            nonlocal last
            before, last = last, run(value)
            return table(["", "A: last run", "B: this run"], [(k, before.get(k), v) for k, v in last.items()], caption)

        return self.drive(view)

    def stored_text(self) -> str:
        """Label, value, and the view below."""
        name = self.names[self.value - self.min] if self.names else self.value
        view = getattr(self, "_view", None)
        return f"{self.label}: {shown(name)}" + (f"\n{view!r}" if view is not None else "")

    def stored_html(self) -> str:
        """Label, value, and the view below."""
        return f"<div><b>{html.escape(self.stored_text().splitlines()[0])}</b></div>{self.below}"


class Live(Shown):
    """A place for a view that code draws again and again while a later cell runs; `waiting` stands there until the first one."""

    _esm = script("controls")
    kind = traitlets.Unicode("knobs").tag(sync=True)
    knobs = traitlets.List().tag(sync=True)
    values = traitlets.List().tag(sync=True)
    below = traitlets.Unicode("").tag(sync=True)

    def __init__(self, waiting: str) -> None:
        self._said = waiting
        super().__init__(below=f"<p>{html.escape(waiting)}</p>")

    def draw(self, view: Any) -> None:
        """Show a view of `workbench.views` in the place of the one before."""
        self._said, self.below = repr(view), view.html()

    def stored_text(self) -> str:
        """The view, in words."""
        return self._said

    def stored_html(self) -> str:
        """The view."""
        return self.below


class Knobs(Shown):
    """Several labelled sliders over one view: `knobs` [[label, min, max, names]], a value for each in `values`.

    `names`, one for each value from min on, replace the number beside a slider; `below` is HTML under all of them.
    """

    _esm = script("controls")
    kind = traitlets.Unicode("knobs").tag(sync=True)
    knobs = traitlets.List().tag(sync=True)
    values = traitlets.List().tag(sync=True)
    below = traitlets.Unicode("").tag(sync=True)

    def drive(self, run: Callable[..., Any]) -> Knobs:
        """Call `run(*values)` now and after every move, and show the view it returns below. Returns the knobs."""
        def redraw(change: Any = None) -> None:
            self._view = run(*self.values)
            self.below = self._view.html()

        redraw()
        self.observe(redraw, names=["values"])
        return self

    def _settings(self) -> str:
        return "; ".join(f"{label}: {shown(names[value - low] if names else value)}"
                         for (label, low, _, names), value in zip(self.knobs, self.values))

    def stored_text(self) -> str:
        """Every label with its value, and the view below."""
        view = getattr(self, "_view", None)
        return self._settings() + (f"\n{view!r}" if view is not None else "")

    def stored_html(self) -> str:
        """The same as HTML."""
        return f"<div><b>{html.escape(self._settings())}</b></div>{self.below}"
