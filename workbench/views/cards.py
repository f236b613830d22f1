"""A short message in a box, as the reveals and the checks of the lessons give it."""

from __future__ import annotations

import html
from typing import Any

from workbench.errors import shown
from workbench.views.palette import OKABE_ITO

TONES = {"right": ("✓", OKABE_ITO[2]), "wrong": ("✗", OKABE_ITO[5]), "open": ("?", OKABE_ITO[4]), "note": ("·", OKABE_ITO[7])}


class Card:
    """A title and (label, text) lines; the tone is a sign as well as a colour."""

    def __init__(self, tone: str, title: str, lines: list[tuple[str, str]]) -> None:
        self.tone, self.title = tone, shown(title, 2000)
        self.lines = [(shown(label), shown(body, 4000)) for label, body in lines if body]

    @property
    def passed(self) -> bool:
        """True for a right answer."""
        return self.tone == "right"

    def html(self) -> str:
        """The box; every text escaped."""
        sign, colour = TONES[self.tone]
        lines = [(html.escape(label), html.escape(body)) for label, body in self.lines]
        rows = "".join(f'<div style="margin-top:0.25em"><b>{label}</b>: {body}</div>' for label, body in lines)
        return (f'<div style="border-left:5px solid {colour};padding:0.4em 0.9em;margin:0.4em 0;max-width:46em">'
                f"<div><b>{sign} {html.escape(self.title)}</b></div>{rows}</div>")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return "\n".join([f"{TONES[self.tone][0]} {self.title}", *(f"  {label}: {body}" for label, body in self.lines)])
