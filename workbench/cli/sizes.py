"""Sizes and speeds on the command line: "24GiB", "24G", "12.6GB/s"; and back again."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
          "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip


def size(text: str) -> int:
    """Bytes: G and GiB are 2**30, GB is 10**9."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: 24GiB, 24G and 24GB are")
    n = float(found[1]) * _UNITS[found[2].upper()]
    if n >= 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than any memory")
    return int(n)


def rate(text: str) -> float:
    """Bytes per second, for speeds in units of 10**9: 25, 25G and 25GB/s are the same."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(G|GB)?(/s)?", text.strip(), re.IGNORECASE)
    if found is None or not 1e-6 <= float(found[1]) < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed: 25GB/s, 25G and 25 are")
    return float(found[1]) * 1e9


def bytes_text(n: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, one in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n) >= one:
            return f"{n / one:,.2f} {unit}"
    return f"{n:,.0f} B"


def speed_text(x: float) -> str:
    """Three digits, or all before the point."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def columns(rows: Sequence[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    """Rows as aligned columns, indented."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
            for row in rows]  # fmt: skip
