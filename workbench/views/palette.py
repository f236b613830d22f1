"""Colours that colour-blind readers can tell apart, each with a second channel: a number, a letter or a hatch."""

from __future__ import annotations

from dataclasses import dataclass

OKABE_ITO = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#4D4D4D")
"""For categories (experts, back ends, kinds of op): Okabe and Ito's palette, its black lightened for dark pages."""
QUANTITY = "viridis"
"""The colour map for quantities."""
HATCHES = ("", "///", "...", "xxx")


@dataclass(frozen=True)
class Style:
    """How one category looks: a fill, an ink that can be read on it, and a hatch once the colours repeat."""

    fill: str
    ink: str
    hatch: str


def style(index: int) -> Style:
    """The look of category `index` (expert 3, device 1, …)."""
    fill = OKABE_ITO[index % len(OKABE_ITO)]
    return Style(fill, ink_on(fill), HATCHES[index // len(OKABE_ITO) % len(HATCHES)])


def lighter(fill: str, share: float = 0.35) -> str:
    """`fill` mixed with white, for what belongs to a category but matters less."""
    return "#" + "".join(f"{round(255 + share * (int(fill[i : i + 2], 16) - 255)):02x}" for i in (1, 3, 5))


def ink_on(fill: str) -> str:
    """Black or white, whichever has more contrast on `fill` (WCAG's relative luminance)."""
    parts = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return "#000000" if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 else "#ffffff"
