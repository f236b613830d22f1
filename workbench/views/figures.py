"""One way to show a picture: HTML with alt text and a caption, and the PNG beside it for readers that drop HTML.

JupyterLab gives image outputs no alt text, so the picture travels inside `<img alt=…>`. Nothing here touches pyplot:
widget callbacks run on other threads, and pyplot's current figure is shared between them.
"""

from __future__ import annotations

import base64
import html
import io
from functools import lru_cache
from typing import Any, Literal

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.text import Text

from workbench.errors import shown

DPI = 110
COLOURS = 96  # a palette of this size keeps text smooth and a picture under about 25 KB


class Picture:
    """A finished picture with its description; naming it last in a cell shows it."""

    def __init__(self, png: bytes, alt: str, caption: str, width: int) -> None:
        self.png, self.alt, self.caption, self.width = png, shown(alt, 2000), shown(caption, 2000), width

    def html(self) -> str:
        """The `<figure>` with the picture inside, free of outside references."""
        data = base64.b64encode(self.png).decode()
        return (f'<figure style="margin:0.5em 0;max-width:{self.width}px">'
                f'<img alt="{html.escape(self.alt)}" style="max-width:100%;background:#fff" width="{self.width}" '
                f'src="data:image/png;base64,{data}">'
                f"<figcaption>{html.escape(self.caption)}</figcaption></figure>")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, str], dict[str, Any]]:
        bundle = {"text/html": self.html(), "image/png": base64.b64encode(self.png).decode(), "text/plain": repr(self)}
        return bundle, {"image/png": {"alt": self.alt, "needs_background": "light", "width": self.width}}

    def __repr__(self) -> str:
        return f"[Picture: {self.alt}]\n{self.caption}"


def new_figure(width: float = 7.6, height: float = 3.2, layout: Literal["constrained"] | None = "constrained") -> Figure:
    """An empty white figure in inches, with a canvas of its own."""
    figure = Figure((width, height), dpi=DPI, facecolor="white", layout=layout)
    FigureCanvasAgg(figure)
    return figure


def picture(figure: Figure, alt: str, caption: str) -> Picture:
    """Freeze a figure. `alt` says what is to be seen, `caption` states what follows from it."""
    from PIL import Image

    for text in figure.findobj(Text):  # names come from files: no dollar starts a formula, no control character is drawn
        text.set_parse_math(False)
        text.set_text(drawable(text.get_text()))
    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", metadata={"Software": None})
    image = Image.open(raw).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return Picture(small.getvalue(), alt, caption, image.width)


def drawable(text: str) -> str:
    """`text` with every character that the font lacks shown as a box; line breaks stay."""
    known = _glyphs()
    return "\n".join("".join(c if ord(c) in known else "□" for c in shown(line, 400)) for line in text.split("\n"))


@lru_cache(1)
def _glyphs() -> frozenset[int]:
    return frozenset(get_font(findfont(FontProperties())).get_charmap())
