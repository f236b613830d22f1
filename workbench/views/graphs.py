"""A compute graph, or a part of one, as a picture: dot computes the layout, matplotlib draws it.

Only sizes go to dot, never names, so nothing in a name can be taken for dot's language.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path as Curve

from workbench.errors import DependencyError, shown
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import OKABE_ITO, ink_on

if TYPE_CHECKING:
    from workbench.tensors import Tensor

LAYOUT = {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}
KINDS = [  # what an op does to numbers: label, colour, ops; everything else works element by element
    ("product with weights", OKABE_ITO[1], {"MUL_MAT", "MUL_MAT_ID", "OUT_PROD"}),
    ("chooses or fetches rows", OKABE_ITO[0], {"ARGSORT", "TOP_K", "GET_ROWS", "SET_ROWS", "ARGMAX", *LAYOUT}),
    ("adds up or normalises rows", OKABE_ITO[6], {"SOFT_MAX", "SUM_ROWS", "CUMSUM", "RMS_NORM", "NORM", "L2_NORM", "MEAN", "SUM"}),
    ("element by element", "#E8E8E8", set()),
]  # fmt: skip
BOX = (1.95, 0.54)  # inches


def graph_picture(nodes: Iterable[Tensor], caption: str, alt: str = "", hide_views: bool = True) -> Picture:
    """Draw `nodes` (a graph's, or some of them) top to bottom, each with its op, shape and the weights it reads.

    `hide_views` leaves out the views that ggml names by itself, such as "Qcur-0 (reshaped)"; edges pass through them.
    """
    parts = [t for t in nodes if not (hide_views and t.op in LAYOUT and t.name.endswith(")"))]
    ids = {id(t): i for i, t in enumerate(parts)}
    edges: set[tuple[int, int]] = set()
    outside: list[Tensor] = []
    for t in parts:
        for source in map(lambda s: _through(s, ids), t.sources()):
            if id(source) not in ids and source.op != "NONE":
                ids[id(source)] = len(parts) + len(outside)
                outside.append(source)
            if id(source) in ids:
                edges.add((ids[id(source)], ids[id(t)]))
    places, curves, (width, height) = _layout(len(parts) + len(outside), sorted(edges))
    figure = new_figure(max(width + 0.2, 5.6), height + 0.5, layout=None)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    left = (figure.get_figwidth() - width) / 2
    axes.set(xlim=(-left, figure.get_figwidth() - left), ylim=(-0.42, figure.get_figheight() - 0.42))
    axes.set_axis_off()
    for points in curves:
        curve = Curve(points, [Curve.MOVETO] + [Curve.CURVE4] * (len(points) - 1))
        axes.add_patch(FancyArrowPatch(path=curve, arrowstyle="-|>", mutation_scale=8, lw=1, color="#555555"))
    for (x, y), t in zip(places, [*parts, *outside]):
        _box(axes, x, y, t, t in outside)
    used = [k for k in KINDS if any(_kind(t) is k for t in parts)]
    close = {"columnspacing": 0.9, "handlelength": 1.3} if len(used) > 3 and figure.get_figwidth() < 6.2 else {}
    axes.legend(handles=[Patch(fc=c, ec="#555555", label=label) for label, c, _ in used], loc="lower center", ncols=4,
                fontsize=6.5, frameon=False, borderaxespad=0.2, **close)  # fmt: skip
    steps = "; ".join(f"{shown(t.name)} is {t.desc} of {' and '.join(shown(_through(s, ids).name) for s in t.sources())}" for t in parts)
    return picture(figure, alt or f"Compute graph of {len(parts)} nodes, top to bottom. {steps}.", caption)


def _through(t: Tensor, ids: dict[int, int]) -> Tensor:
    while id(t) not in ids and t.op in LAYOUT and t.src and t.src[0] is not None:
        t = t.src[0]
    return t


def _kind(t: Tensor) -> tuple[str, str, set[str]]:
    return next((k for k in KINDS if t.op in k[2]), KINDS[-1])


def _box(axes: Any, x: float, y: float, t: Tensor, outside: bool) -> None:
    w, h = BOX
    fill = "#ffffff" if outside else _kind(t)[1]
    axes.add_patch(FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=0.07", fc=fill,
                                  ec="#555555", lw=1, ls="--" if outside else "-"))  # fmt: skip
    shape = "×".join(map(str, t.ne[: t.n_dims]))
    weights = [s.name for s in t.sources() if s.op == "NONE"]
    lines = [(shown(t.name, 34), 7.5, "bold"), ("from above" if outside else f"{t.desc}  {t.dtype} {shape}", 6.5, "normal")]
    if weights and not outside:
        lines.append((shown("reads " + ", ".join(weights), 40), 5.8, "normal"))
    for i, (line, size, weight) in enumerate(lines):
        axes.text(x, y + (len(lines) / 2 - 0.5 - i) * 0.16, line, ha="center", va="center", size=size, weight=weight, color=ink_on(fill))


def _layout(n: int, edges: list[tuple[int, int]]) -> tuple[list[tuple[float, float]], list[list[tuple[float, float]]], tuple[float, float]]:
    head = f'node [shape=box fixedsize=true label="" width={BOX[0]} height={BOX[1]}];'
    lines = [f"n{i};" for i in range(n)] + [f"n{a} -> n{b};" for a, b in edges]
    source = "\n".join(["digraph { ranksep=0.26; nodesep=0.2; edge [arrowhead=none];", head, *lines, "}"])
    done = subprocess.run([dot(), "-Kdot", "-Tplain"], input=source, capture_output=True, text=True, timeout=60, check=True)
    places = [(0.0, 0.0)] * n
    curves, size = [], (1.0, 1.0)
    for line in done.stdout.splitlines():
        what, *rest = line.split()
        if what == "graph":
            size = (float(rest[1]), float(rest[2]))
        elif what == "node":
            places[int(rest[0][1:])] = (float(rest[1]), float(rest[2]))
        elif what == "edge":
            numbers = list(map(float, rest[3 : 3 + 2 * int(rest[2])]))
            curves.append(list(zip(numbers[::2], numbers[1::2])))
    return places, curves, size


def dot() -> str:
    """The full path of the program that computes layouts: graphviz-pure of this environment, else a `dot` on the PATH."""
    pure = Path(sysconfig.get_path("scripts")) / ("graphviz-pure.exe" if sys.platform == "win32" else "graphviz-pure")
    found = str(pure) if pure.is_file() else shutil.which("graphviz-pure") or shutil.which("dot")
    if not found:
        raise DependencyError("no program to lay out graphs", "graphviz-pure or dot", "pip install graphviz-pure")
    return found
