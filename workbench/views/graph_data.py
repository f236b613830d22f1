"""A graph as the plain data that its views draw: every tensor with its neighbours, and the cause of its place in the order.

`graph_data(graph)` is read by the browser (`graph_view.js`), by the stored picture and by the tables; nothing else about a
graph reaches them. Ids are places in `tensors`: leafs, then nodes, then tensors that the graph uses without holding them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from workbench.cgraph import CGraph
from workbench.cgraph.export import flag_names
from workbench.cgraph.statistics import layers_of
from workbench.errors import ParameterError, shown
from workbench.tensors import Flag, Tensor, Usage
from workbench.views.palette import OKABE_ITO, ink_on, style

MAX_SIZE = 2**31 - 1
CLASSES = [  # what an op does to numbers: letter, label, colour, ops
    ("M", "product with weights", OKABE_ITO[1], {"MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "MUL_MAT_ID_BACK", "OUT_PROD_ID"}),
    ("R", "chooses or fetches rows", OKABE_ITO[0], {"ARGSORT", "TOP_K", "GET_ROWS", "SET_ROWS", "ARGMAX", "GET_ROWS_BACK"}),
    ("N", "adds up or normalises rows", OKABE_ITO[6],
     {"SOFT_MAX", "SUM_ROWS", "CUMSUM", "RMS_NORM", "NORM", "L2_NORM", "MEAN", "SUM", "CROSS_ENTROPY_LOSS",
      "SOFT_MAX_BACK", "RMS_NORM_BACK", "REPEAT_BACK", "CROSS_ENTROPY_LOSS_BACK"}),
    ("V", "view: no work", "#FFFFFF", {"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}),
    ("C", "copies", OKABE_ITO[3], {"CPY", "CONT", "DUP", "CONCAT", "REPEAT"}),
    ("E", "element by element", "#D9D9D9", set()),
]  # fmt: skip
LEAFS = {"W": ("weights", OKABE_ITO[4]), "D": ("data without a flag", OKABE_ITO[4]), "I": ("input", OKABE_ITO[5]),
         "S": ("state: the graph writes into it", OKABE_ITO[7]), "P": ("parameter to be trained", OKABE_ITO[2])}  # fmt: skip
CHANNELS = ("op", "type", "storage", "bytes")
VIRIDIS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")
CAUSES = {
    "start": "the walk started here",
    "visited": "visited from {user} as source {j}",
    "by hand": "its place was set by hand: no walk gives this order",
    "leaf": "first met as source {j} of {user}, and recorded at once because it has no sources",
    "unused": "no node of this graph uses it",
    "outside": "not in this graph, only used by it",
}
"""Every reason for a tensor's place in the order; `{user}` and `{j}` are filled in."""


def as_graph(thing: Any) -> CGraph:
    """The graph in `thing`: a graph, a step of a model, a trace with a snapshot, or tensors to expand."""
    if isinstance(thing, CGraph):
        return thing
    inner = getattr(thing, "graph", None)
    if isinstance(inner, CGraph):
        return inner
    if inner:
        from workbench.cgraph.serial import from_dict

        return from_dict(inner)
    tensors = [thing] if isinstance(thing, Tensor) else thing
    if isinstance(tensors, (list, tuple)) and tensors and all(isinstance(t, Tensor) for t in tensors):
        graph = CGraph(size=MAX_SIZE)
        for kind, t, _, _ in graph.decisions(*tensors):
            if kind in ("leaf", "node"):
                (graph.leafs if kind == "leaf" else graph.nodes).append(t)
        return graph
    raise ParameterError(f"a {type(thing).__name__}", "a CGraph, a model's step, a trace with a graph, or tensors")


def all_ids(graph: CGraph) -> dict[Tensor, int]:
    """The ids of `graph_data`: leafs, nodes, and what the graph uses without holding it."""
    held = [*graph.leafs, *graph.nodes]
    return {t: i for i, t in enumerate(dict.fromkeys([*held, *(s for t in held for s in (*t.src, t.view_src) if s is not None)]))}


def graph_data(graph: CGraph, title: str = "") -> dict[str, Any]:
    """Everything the views say about `graph`, as plain data."""
    graph.require_open()
    ids = all_ids(graph)
    tensors, n_held = list(ids), len(graph.leafs) + len(graph.nodes)
    layers, causes = layers_of(graph), _causes(graph)
    written = {t.root() for t in graph.nodes if t.op in ("CPY", "SET_ROWS") and t.is_view}
    names = [_name(t, i, len(graph.leafs), n_held) for i, t in enumerate(tensors)]
    records: list[dict[str, Any]] = []
    for i, t in enumerate(tensors):
        tag = f"leaf {i}" if i < len(graph.leafs) else f"node {i - len(graph.leafs)}" if i < n_held else "outside"
        records.append({
            "tag": tag, "name": names[i], "op": t.desc if t.op != "NONE" else "", "type": t.dtype.name, "ne": [*t.ne], "nb": [*t.nb],
            "dims": t.n_dims, "bytes": t.nbytes, "params": {k: _param(v) for k, v in t.params.items() if v is not None},
            "src": [None if s is None else ids[s] for s in t.src], "users": [], "storage": _storage(t),
            "flags": [f for f in flag_names(t) if f != "compute"], "layer": layers.get(t), "class": _class(t, written),
            "view": None if t.view_src is None else [ids[t.view_src], t.view_offs], "cause": causes.get(t, ("outside", None, 0)),
        })  # fmt: skip
    for i, record in enumerate(records):
        for s in dict.fromkeys(record["src"]):
            if s is not None and s != i:
                records[s]["users"].append(i)
    for i, record in enumerate(records):
        kind, user, j = record["cause"]  # until here the words of `_causes`
        user_id = ids[user] if user is not None else None
        record["cause"] = CAUSES[kind].format(user="" if user_id is None else _said(records[user_id]), j=j)
        record["why"] = _why(i, records, len(graph.leafs))
    title = title or graph.name or "Compute graph"
    return {"title": shown(title), "tensors": records, "n_leafs": len(graph.leafs), "n_nodes": len(graph.nodes),
            "channels": {c: _channel(c, records) for c in CHANNELS}}  # fmt: skip


# ---- the order


def _causes(graph: CGraph) -> dict[Tensor, tuple[str, Tensor | None, int]]:
    """Who led the walk to each tensor: (cause, user, number of the source)."""
    causes: dict[Tensor, tuple[str, Tensor | None, int]] = {}
    order, at = list[Tensor](), dict[Tensor, int]()
    for kind, t, user, _ in CGraph(size=MAX_SIZE).decisions(*walk_starts(graph.nodes)):
        if user is not None and isinstance(user, Tensor):
            j = at[user] = next(j for j in range(at.get(user, -1) + 1, len(user.src)) if user.src[j] is t)
            if kind == "enter":
                causes[t] = ("visited" if _is_node(t) else "leaf", user, j)
        elif kind == "enter":
            causes[t] = ("start", None, 0)
        elif kind == "node":
            order.append(t)
    if order != graph.nodes:
        causes = {t: ("by hand", None, 0) for t in graph.nodes}
    for node in graph.nodes:
        for j, s in enumerate(node.src):
            if s is not None and s not in causes and not _is_node(s):
                causes[s] = ("leaf", node, j)
    return {**{t: ("unused", None, 0) for t in graph.leafs}, **causes}


def walk_starts(nodes: Sequence[Tensor]) -> list[Tensor]:
    """Tensors whose expansion, one after another, gives exactly this order, if any does.

    Read backwards from a finished walk: when a node is recorded, the sources that it led to are those recorded last.
    """
    trees: list[Tensor] = []
    for node in nodes:
        for s in reversed(node.src):
            if trees and trees[-1] is s:
                trees.pop()
        trees.append(node)
    return trees


def _is_node(t: Tensor) -> bool:
    return t.op != "NONE" or bool(t.flags & Flag.PARAM)


def _why(i: int, records: list[dict[str, Any]], n_leafs: int) -> str:
    """The cause of a tensor's place, as a sentence."""
    r = records[i]
    if r["tag"] == "outside" or i < n_leafs:
        return f"{r['cause']}."
    sources = list(dict.fromkeys(s for s in r["src"] if s is not None and s != i))
    late = [s for s in sources if s > i]
    if late:
        return f"stands before its source {_said(records[late[0]])}, so this order cannot be computed; {r['cause']}."
    before = ", ".join(records[s]["tag"] for s in sources)
    after = f"after its source{'s' * (len(sources) > 1)} {before}" if sources else "without sources"
    return f"{after}; {r['cause']}."


# ---- words and colours


def _name(t: Tensor, i: int, n_leafs: int, n_held: int) -> str:
    made = f"leaf_{i}" if i < n_leafs else f"node_{i - n_leafs}" if i < n_held else "unnamed"  # what the graph would call it
    return shown(t.name) if t.name else made


def _said(record: dict[str, Any]) -> str:
    plain = record["tag"].replace(" ", "_")
    return record["tag"] if record["name"] == plain else f"{record['tag']} ‘{record['name']}’"


def _storage(t: Tensor) -> str:
    if t.storage is None:
        return ""
    return shown(t.storage.name, 60) + (" (freed)" if t.storage.closed else "")


def _param(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shown(list(value) if isinstance(value, tuple) else value, 60)


def _class(t: Tensor, written: set[Tensor]) -> str:
    if t.op == "NONE":
        weights = t.storage is not None and t.storage.usage is Usage.WEIGHTS
        return "P" if t.flags & Flag.PARAM else "I" if t.flags & Flag.INPUT else "W" if weights else "S" if t in written else "D"
    return next((letter for letter, _, _, names in CLASSES if t.desc in names), "E")


def _channel(channel: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """How the tensors are told apart: which category each is in, and code, label and colours of the categories."""
    if channel == "op":
        looks = {**{c: (label, fill) for c, label, fill, _ in CLASSES}, **LEAFS}
        keys = [r["class"] for r in records]
        cats = {c: (c, *looks[c]) for c in looks if c in keys}
    elif channel == "bytes":
        keys = [min(max(int(math.log2(max(r["bytes"], 1))) - 4, 0) // 3, len(VIRIDIS) - 1) for r in records]
        edges = [0, *(2 ** (4 + 3 * i) for i in range(1, len(VIRIDIS)))]
        cats = {k: (size(edges[k]), f"from {size(edges[k])}", VIRIDIS[k]) for k in sorted(set(keys))}
    else:
        keys = [r[channel] for r in records]
        seen = list(dict.fromkeys(keys))
        codes = [k[:4] if channel == "type" else "-" if not k else chr(65 + i % 26) for i, k in enumerate(seen)]
        cats = {k: (codes[i], k or "no memory yet", style(i).fill if k else "#FFFFFF") for i, k in enumerate(seen)}
    number = {k: i for i, k in enumerate(cats)}
    return {"of": [number[k] for k in keys],
            "cats": [{"code": code, "label": label, "fill": fill, "ink": ink_on(fill)} for code, label, fill in cats.values()]}  # fmt: skip


def size(nbytes: int) -> str:
    """Bytes, short: "64", "2K", "1.5M"."""
    for unit in ("", "K", "M", "G"):
        if nbytes < 1024 or unit == "G":
            return f"{nbytes:.3g}{unit}"
        nbytes = nbytes / 1024  # type: ignore[assignment]
    return ""
