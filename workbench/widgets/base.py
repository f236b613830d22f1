"""What all widgets share: files of JavaScript and CSS inside the package, and a stored form for pages without a kernel."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.views.palette import style

FOLDER = Path(__file__).parent
LOOKS = [[style(i).fill, style(i).ink] for i in range(8)]


def script(*names: str) -> str:
    """The module of a widget: the helpers that all share, then its own files. No network, no build step."""
    return "\n".join((FOLDER / f"{part}.js").read_text("utf-8") for part in ("common", *names))


class Shown(anywidget.AnyWidget):
    """A widget that also stores what it shows, as HTML and as text without object addresses."""

    _css = (FOLDER / "widgets.css").read_text("utf-8")
    looks = traitlets.List(LOOKS).tag(sync=True)

    def stored_text(self) -> str:
        """The state in words, for terminals and stored pages."""
        return type(self).__name__

    def stored_html(self) -> str:
        """The state as HTML for stored pages."""
        return f"<pre>{html.escape(self.stored_text())}</pre>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        return {**data, "text/html": self.stored_html(), "text/plain": self.stored_text()}, metadata

    def __repr__(self) -> str:
        return self.stored_text()
