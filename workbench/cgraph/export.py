"""A graph as text: a table (`ggml_graph_print`) and the DOT language of Graphviz (`ggml_graph_dump_dot`)."""

from __future__ import annotations

from workbench.cgraph.graph import CGraph
from workbench.errors import shown
from workbench.tensors.tensor import Flag, Tensor


def flag_names(tensor: Tensor) -> list[str]:
    """The flags that are set, in lower case."""
    flags = int(tensor.flags)
    return [f.name.lower() for f in Flag if flags & f and f.name]


def table(graph: CGraph) -> str:
    """One line per node and leaf: index, extents, type, op, name, sources, and flags apart from "compute"."""
    known = {t: f"{kind}{i}" for kind, part in (("n", graph.nodes), ("l", graph.leafs)) for i, t in enumerate(part)}
    lines = [f"{shown(graph.name) or 'graph'}: size {graph.size:,}"]
    for kind, part in (("node", graph.nodes), ("leaf", graph.leafs)):
        lines.append(f"{len(part):,} {kind}s")
        for i, t in enumerate(part):
            ne = ", ".join(f"{n:5d}" for n in t.ne[: max(t.n_dims, 2)])
            flags = " ".join(f"[{f}]" for f in flag_names(t) if f != "compute")
            sources = " ".join(known.get(s, "-") if s is not None else "." for s in t.src)
            lines.append(f"  {kind[0]}{i:<4d} [{ne:>26s}] {t.dtype.name:5s} {t.desc:18s} {shown(t.name):28s} {sources} {flags}".rstrip())
    return "\n".join(lines)


def to_dot(graph: CGraph) -> str:
    """The graph in DOT: leafs pink, parameters yellow, views grey; `dot -Tsvg` draws it.

    Tensors get ids of our own, and their names stand only inside quoted labels, so nothing in a name is taken for DOT or HTML.
    """
    ids = {t: f"t{i}" for i, t in enumerate((*graph.leafs, *graph.nodes))}
    lines = ["digraph G {", "  rankdir=TB; newrank=true;", "  node [shape=box, style=filled, fillcolor=white];"]
    for t, key in ids.items():
        what = "leaf" if t.op == "NONE" else t.desc
        ne = ", ".join(map(str, t.ne[: max(t.n_dims, 2)]))
        lines.append(f"  {key} [label={_quoted(shown(t.name), f'{what} {t.dtype.name} [{ne}]')}{_colour(t)}];")
    for t, key in ids.items():
        for j, s in enumerate(t.src):
            if s in ids:
                lines.append(f'  {ids[s]} -> {key} [label="{j}"];' if len(t.src) > 1 else f"  {ids[s]} -> {key};")
    return "\n".join([*lines, "}", ""])


def _colour(t: Tensor) -> str:
    flags = int(t.flags)
    colour = "yellow" if flags & Flag.PARAM else "pink" if t.op == "NONE" else "gray90" if t.spec and t.spec.is_view else ""
    return (f", fillcolor={colour}" if colour else "") + (", penwidth=2" if flags & Flag.OUTPUT else "")


def _quoted(*parts: str) -> str:
    """A quoted DOT string: backslashes, quotes and the ampersand of HTML entities mean themselves."""
    safe = [p.replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for p in parts]
    return '"' + "\\n".join(safe) + '"'
