"""Graphs as JSON, our own format (ggml's `ggml_graph_export` wrote a binary one and is gone).

    {"format": "workbench.graph", "version": 1, "name": "", "size": 2048,
     "tensors": [{"name": "ffn_gate-0", "op": "MUL_MAT", "type": "f32", "ne": [64, 5, 1, 1], "nb": [4, 256, 1280, 1280],
                  "src": [3, 7], "params": {}, "flags": ["compute"], "view": [12, 256]}, …],
     "leafs": [ids], "nodes": [ids]}

The id of a tensor is its place in `tensors`; sources come before their users (only a cast is its own source), null is an
absent source. Every tensor is in `leafs` or `nodes`, except where `size` is 0: a part of a graph (`CGraph.view`).
`op` is the telling name of the op table ("SILU", not "UNARY"; "NONE" for a leaf); `view` is [owner of the memory, byte
offset] and missing where the tensor owns its memory. Tuples are lists; numbers that JSON lacks are {"float": "inf"},
"-inf" or "nan". Data is not part of it.

Reading runs nothing from the file: each node is made again by its op's constructor, and what the file says of its shape must
agree. So a file describes only what could also be built by hand, and needs memory in proportion to its length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from workbench.cgraph.export import flag_names
from workbench.cgraph.graph import CGraph, graph_nbytes
from workbench.errors import ContextError, FileFormatError, WorkbenchError, shown
from workbench.tensors import ops
from workbench.tensors.context import TENSOR_OVERHEAD, Context
from workbench.tensors.dtype import DTYPES
from workbench.tensors.opspec import OPS
from workbench.tensors.tensor import MAX_SRC, Flag, Tensor, extents

FORMAT, VERSION = "workbench.graph", 1
MAX_INT, MAX_SIZE, MAX_NAME = 2**63 - 1, 2**31 - 1, 4096
_FLAGS = {f.name.lower(): f for f in Flag if f.name}
_MADE: dict[str, Callable[..., Tensor]] = {  # rows whose constructor is not simply called with (*src, **params)
    "SCALE": lambda r, a, scale, bias: ops.scale(a, scale, bias),
    "SOFT_MAX": lambda r, a, mask=None, sinks=None, **p: ops.soft_max_ext(a, mask, p["scale"], p["max_bias"], sinks),
    "ROPE": lambda r, a, pos, factors=None, **p: ops.rope(a, pos, freq_factors=factors, **p),
    "SET_ROWS": lambda r, data, rows, target: ops.set_rows(target, data, rows),
    "CPY": lambda r, a, b: ops.cpy(a, b) if "view" in r else ops.cast(a, r["type"]),
    "CONT": lambda r, a: ops.cont(a, *r["ne"]),
    "REPEAT": lambda r, a: ops.repeat(a, r["ne"]),
    "REPEAT_BACK": lambda r, a: ops.repeat_back(a, r["ne"]),
    "GET_ROWS_BACK": lambda r, grad, rows: ops.get_rows_back(grad, rows, r["ne"]),
    **{op: lambda r, a, b, op=op, **p: getattr(ops, f"{op.lower()}_inplace" if "view" in r else op.lower())(a, b, **p)
       for op in ("ADD", "SUB", "ACC")},
    "RESHAPE": lambda r, a: ops.reshape(a, *r["ne"]),
    "PERMUTE": lambda r, a, axes: ops.permute(a, *axes),
}  # fmt: skip


# ---- writing


def to_dict(graph: CGraph) -> dict[str, Any]:
    """The graph as plain data for JSON (and for the snapshot of a `Trace`). Raises ContextClosed."""
    graph.require_open()
    tensors = all_tensors(graph)
    ids = {t: i for i, t in enumerate(tensors)}
    whole = len(tensors) == len(graph.leafs) + len(graph.nodes)
    return {"format": FORMAT, "version": VERSION, "name": graph.name, "size": graph.size if whole else 0,
            "tensors": [_record(t, ids) for t in tensors],
            "leafs": [ids[t] for t in graph.leafs], "nodes": [ids[t] for t in graph.nodes]}  # fmt: skip


def all_tensors(graph: CGraph) -> list[Tensor]:
    """Every tensor of the record, sources first, also those that stand outside a view; the id of a tensor is its place here."""
    walk = CGraph(size=MAX_SIZE).decisions(*graph.leafs, *graph.nodes)
    return [t for kind, t, _, _ in walk if kind in ("leaf", "node")]


def to_json(graph: CGraph) -> str:
    """The graph as JSON text; see the module's docstring for the format."""
    return json.dumps(to_dict(graph), separators=(",", ":"), allow_nan=False)


def _record(t: Tensor, ids: dict[Tensor, int]) -> dict[str, Any]:
    record = {"name": t.name, "op": t.desc, "type": t.dtype.name, "ne": [*t.ne], "nb": [*t.nb],
              "src": [None if s is None else ids[s] for s in t.src],
              "params": {k: _plain(v) for k, v in t.params.items()}, "flags": flag_names(t)}  # fmt: skip
    if t.view_src is not None:
        record["view"] = [ids[t.view_src], t.view_offs]
    return record


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value


# ---- reading


def from_json(text: str | bytes, context: Context | None = None) -> CGraph:
    """The graph that `to_json` wrote: tensors without data, in `context` or in a new one that holds only descriptions.

    Raises FileFormatError for anything that is not such a file; `context` is then as before.
    """
    try:
        data = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:  # UnicodeDecodeError is a ValueError
        raise FileFormatError(f"graph: not JSON: {shown(e)}", "the text that to_json wrote") from None
    return from_dict(data, context)


def from_dict(data: Any, context: Context | None = None) -> CGraph:
    """As `from_json`, from parsed JSON."""
    records = _checked_file(data)
    graph = _made(data, records, Context((TENSOR_OVERHEAD + 16) * len(records) + 16, no_alloc=True, name="graph file"))
    if context is None:
        return graph
    kept = _made(data, records, context)
    context.reserve("graph", graph_nbytes(kept.size), kept.name)
    return kept


def _whole(v: Any, most: int) -> bool:
    return isinstance(v, int) and not isinstance(v, bool) and 0 <= v <= most


def _wholes(v: Any, most: int, n: int | None = None) -> bool:
    return isinstance(v, list) and n in (None, len(v)) and all(_whole(x, most) for x in v)


def _text(v: Any, _: int = 0) -> bool:
    return isinstance(v, str) and len(v) <= MAX_NAME


_Rules = dict[str, tuple[Callable[[Any, int], bool], str]]
_FILE: _Rules = {  # what each field of the file must be; n is the number of tensors
    "format": (lambda v, n: v == FORMAT, f'"{FORMAT}"'),
    "version": (lambda v, n: _whole(v, VERSION) and v == VERSION, f"version {VERSION}"),
    "name": (_text, f"text of at most {MAX_NAME} characters"),
    "size": (lambda v, n: _whole(v, MAX_SIZE), f"a whole number up to {MAX_SIZE}"),
    "tensors": (lambda v, n: isinstance(v, list), "a list of objects"),
    "leafs": (lambda v, n: _wholes(v, n - 1), "a list of ids of tensors"),
    "nodes": (lambda v, n: _wholes(v, n - 1), "a list of ids of tensors"),
}
_TENSOR: _Rules = {  # what each field of tensor i must be
    "name": (_text, f"text of at most {MAX_NAME} characters"),
    "op": (lambda v, i: isinstance(v, str) and (v == "NONE" or v in OPS), "NONE or a name of the op table"),
    "type": (lambda v, i: isinstance(v, str) and v in DTYPES, "one of " + ", ".join(DTYPES)),
    "ne": (lambda v, i: _wholes(v, MAX_INT, 4), "four whole numbers"),
    "nb": (lambda v, i: _wholes(v, MAX_INT, 4), "four whole numbers"),
    "src": (lambda v, i: isinstance(v, list) and len(v) <= MAX_SRC and all(s is None or _whole(s, i) for s in v),
            f"at most {MAX_SRC} ids of earlier tensors (a later one would be a cycle)"),
    "params": (lambda v, i: isinstance(v, dict), "an object"),
    "flags": (lambda v, i: isinstance(v, list) and all(isinstance(f, str) and f in _FLAGS for f in v), "some of " + ", ".join(_FLAGS)),
    "view": (lambda v, i: _wholes(v, MAX_INT, 2) and v[0] < i, "[an earlier tensor that owns the memory, byte offset]"),
}  # fmt: skip


def _follow(rules: _Rules, data: Any, n: int, where: str, optional: tuple[str, ...] = ()) -> None:
    if not isinstance(data, dict) or set(data) | set(optional) != set(rules) | set(optional):
        _wrong(where, "an object with the fields " + ", ".join(rules))
    for field, (holds, expected) in rules.items():
        if field in data and not holds(data[field], n):
            _wrong(f"{where}: {field} {shown(data[field])}", expected)


def _checked_file(data: Any) -> list[dict[str, Any]]:
    tensors = data.get("tensors") if isinstance(data, dict) else None
    _follow(_FILE, data, len(tensors) if isinstance(tensors, list) else 0, "the file")
    for i, r in enumerate(data["tensors"]):
        _follow(_TENSOR, r, i, f"tensor {i}", optional=("view",))
    listed = data["leafs"] + data["nodes"]
    if len(set(listed)) != len(listed):
        _wrong("leafs and nodes", "each id once")
    if data["size"] and (len(listed) < len(data["tensors"]) or max(len(data["leafs"]), len(data["nodes"])) > data["size"]):
        _wrong(f"size {data['size']} for {len(data['tensors'])} tensors, {len(listed)} of them in leafs and nodes",
               "room for all, and all of them there (only a part of a graph has size 0)")  # fmt: skip
    return data["tensors"]


def _made(data: dict[str, Any], records: list[dict[str, Any]], context: Context) -> CGraph:
    made: list[Tensor] = []
    with context.active():
        for i, r in enumerate(records):
            t = _tensor(i, r, made, context)
            t.name = r["name"]
            for f in r["flags"]:
                t.flags |= _FLAGS[f]
            made.append(t)
    graph = CGraph(size=data["size"], name=data["name"])
    graph.context = context
    graph.leafs, graph.nodes = ([made[i] for i in data[part]] for part in ("leafs", "nodes"))
    graph.visited = dict.fromkeys((*graph.leafs, *graph.nodes), 0)
    _check_order(graph, made)
    return graph


def _tensor(i: int, r: dict[str, Any], made: list[Tensor], context: Context) -> Tensor:
    """The tensor of record i, made by the constructor of its op; what the record says besides must agree."""
    src = [None if s is None else made[s] if s < i else None for s in r["src"]]
    try:
        if r["op"] == "VIEW" or r["op"] == "NONE" and "view" in r:
            t = _view(r, src, made, context)
        elif r["op"] == "NONE":
            t = context.new_tensor(r["type"], *r["ne"])
        else:
            make = _MADE.get(r["op"]) or _by_name(r["op"])
            t = make(r, *src, **{k: _value(v) for k, v in r["params"].items()})
    except (WorkbenchError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as e:
        if isinstance(e, (FileFormatError, ContextError)):
            raise
        found = e.found if isinstance(e, WorkbenchError) else f"{r['op']} cannot be made of these sources and parameters"
        expected = getattr(e, "expected", "") or "what its constructor accepts"
        raise FileFormatError(f"graph: tensor {i} is wrong: {found}", expected) from None
    if len(t.src) != len(src) or any(s is not (t if r["src"][j] == i else src[j]) for j, s in enumerate(t.src)):
        _wrong(f"tensor {i}: src {shown(r['src'])}", f"the sources of {r['op']} in its order")
    says = {"type": t.dtype.name, "ne": [*t.ne], "nb": [*t.nb], "params": {k: _plain(v) for k, v in t.params.items()}}
    for field, value in says.items():
        if r[field] != value:
            _wrong(f"tensor {i}: {field} {shown(r[field])}", f"{shown(value)}, as {r['op']} of these sources has")
    if t.nbytes > MAX_INT:
        _wrong(f"tensor {i}: {t.nbytes:.3g} bytes", "less than 2**63")
    view = None if t.view_src is None else [t.view_src, t.view_offs]
    if view != ([made[r["view"][0]], r["view"][1]] if "view" in r else None):
        _wrong(f"tensor {i}: view {shown(r.get('view'))}", f"the memory that {r['op']} of these sources uses")
    return t


def _view(r: dict[str, Any], src: list[Tensor | None], made: list[Tensor], context: Context) -> Tensor:
    """A view by its record, since no constructor takes every stride; it must lie within the owner's bytes."""
    root, offset = r["view"] if "view" in r else (len(made), 0)
    owner = made[root]
    if owner.view_src is not None or r["type"] != owner.dtype.name or any(s is None or s.root() is not owner for s in src):
        raise ValueError
    spec, params = (OPS["VIEW"], r["params"]) if r["op"] == "VIEW" else (None, {})
    if spec and (len(src) != 1 or set(params) != {"offset"} or src[0].view_offs + params["offset"] != offset):  # type: ignore[union-attr]
        raise ValueError
    t = Tensor(owner.dtype, extents(r["ne"]), tuple(r["nb"]), op=r["op"], spec=spec, src=tuple(src), params={**params},
               view_src=owner, view_offs=offset)  # fmt: skip
    if t.ne[0] % owner.dtype.block or offset + t.nbytes > owner.nbytes:
        _wrong(f"a view of {t.nbytes:,} bytes at offset {offset:,}", f"whole blocks within the {owner.nbytes:,} bytes of {owner.label}")
    return context.add(t)


def _by_name(op: str) -> Callable[..., Tensor]:
    spec = OPS[op]
    if spec.op in ("UNARY", "GLU") and spec.op != op:
        make = ops.unary if spec.op == "UNARY" else ops.glu
        return lambda r, *src, **p: make(op, *src, **{k: v for k, v in p.items() if k != spec.op.lower()})
    constructor = getattr(ops, op.lower(), None)
    if op.lower() not in ops.__all__ or constructor is None:
        _wrong(f"op {op}", "an op that has a constructor")
    return lambda r, *src, **p: constructor(*src, **p)


def _check_order(graph: CGraph, made: list[Tensor]) -> None:
    done: set[Tensor] = set(graph.leafs)
    inside = graph.visited
    for t in (*graph.leafs, *graph.nodes):
        leaf = t.op == "NONE" and not t.flags & Flag.PARAM
        if leaf != (t in done):
            _wrong(f"{shown(t.name)} among the {'nodes' if leaf else 'leafs'}", "leafs: tensors without op that are no parameters")
        for s in t.sources():
            if s in inside:
                inside[s] += 1
    for t in graph.nodes:
        for s in t.sources():
            if s in inside and s not in done and s is not t:
                _wrong(f"node {shown(t.name)} before its source {shown(s.name)}", "nodes in the order of computation")
        done.add(t)


def _value(v: Any) -> Any:
    """A parameter as its constructor takes it."""
    if isinstance(v, dict) and set(v) == {"float"} and v["float"] in ("inf", "-inf", "nan"):
        return float(v["float"])
    if isinstance(v, list) and _wholes(v, MAX_INT):
        return tuple(v)
    if _text(v) or isinstance(v, float) or isinstance(v, int) and abs(v) <= MAX_INT:
        return v
    _wrong(f"parameter {shown(v)}", 'a number, a word, a list of whole numbers, or {"float": "inf"}, "-inf", "nan"')


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _wrong(what: str, expected: str) -> NoReturn:
    raise FileFormatError(f"graph: {what} is wrong", expected, "write the file again with to_json")
