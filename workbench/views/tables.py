"""Tables with fixed number formats: HTML for the page, aligned text for terminals and plain readers."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.errors import shown


class Table:
    """Rows under headings with a caption that says what to see; naming it last in a cell shows it."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        raw = [list(row) for row in rows]
        self.columns, self.caption = [shown(c) for c in columns], shown(caption, 2000)
        self.rows = [[text(cell) for cell in row] for row in raw]
        self.right = [bool(raw) and all(isinstance(r[i], (int, float)) or r[i] is None for r in raw) for i in range(len(columns))]

    def html(self) -> str:
        """A real `<table>`: caption, headings with scope, numbers to the right; every text escaped."""
        def cells(tag: str, row: list[str], extra: str = "") -> str:
            sides = ["right" if right else "left" for right in self.right]
            return "".join(f'<{tag}{extra} style="text-align:{side}">{html.escape(cell)}</{tag}>' for cell, side in zip(row, sides))

        body = "".join(f"<tr>{cells('td', row)}</tr>" for row in self.rows)
        style = "text-align:left;caption-side:bottom;min-width:24em"
        caption = f'<caption style="{style}">{html.escape(self.caption)}</caption>' if self.caption else ""
        return f"<table>{caption}<thead><tr>{cells('th', self.columns, ' scope=col')}</tr></thead><tbody>{body}</tbody></table>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(_width(line[i]) for line in lines) for i in range(len(self.columns))]
        padded = [[" " * (w - _width(c)) + c if right else c + " " * (w - _width(c)) for c, w, right in zip(line, widths, self.right)]
                  for line in lines]
        out = ["  ".join(line).rstrip() for line in padded]
        return "\n".join([out[0], "-" * (sum(widths) + 2 * len(widths) - 2), *out[1:], *([self.caption] if self.caption else [])])


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> Table:
    """A `Table`; whole numbers get thousands separators, others four significant digits."""
    return Table(columns, rows, caption)


def side_by_side(rows: Iterable[tuple[str, float, float]], columns: tuple[str, str] = ("predicted", "executed"),
                 caption: str = "") -> Table:  # fmt: skip
    """Numbers meet: each row is (what, one, other), and the ratio other / one is added."""
    return Table(["", *columns, "ratio"], [[what, one, other, f"{other / one:.3f}" if one else "-"] for what, one, other in rows], caption)


class Stack:
    """Views below each other, as one."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def html(self) -> str:
        """All of them."""
        return "".join(part.html() for part in self.parts)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.parts))


def text(value: Any) -> str:
    """One value in the house format."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) or hasattr(value, "__float__"):
        return f"{int(value):,}" if float(value).is_integer() and not isinstance(value, float) else f"{float(value):.4g}"
    return shown(value, 400)


def _width(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in line)
