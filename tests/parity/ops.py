"""`python -m tests.parity ops DIR [--device cuda]`: results of single ops against recorded ones of real ggml.

DIR holds `cases.json` and `cases.npz` (format and tolerances: tests/data/goldens/ops/SCHEMA.md). Each case becomes a
graph of one node over the recorded memory and runs through the workbench's own CPU execution. Products with f16, bf16
and quantised weights are run with both values of `activation_rounding`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import workbench as wb
from tests.parity.report import BadInput, Report
from workbench import ops
from workbench.devices import CpuBackend
from workbench.devices.cuda import CudaBackend, why_not
from workbench.execution import compute
from workbench.tensors import OPS, Flag, HostStorage, Tensor, Usage, dtype
from workbench.tensors.tensor import contiguous_strides

Arrays = dict[str, np.ndarray]
DEVICES = {"cpu": CpuBackend, "cuda": CudaBackend}


def main(args: list[str]) -> int:
    """Judge every case of a folder."""
    report = Report("ops")
    device = args[2] if args[1:2] == ["--device"] and len(args) == 3 else "cpu" if len(args) == 1 else ""
    if device not in DEVICES:
        return report.bad("DIR with cases.json and cases.npz is needed, then perhaps --device cpu or --device cuda")
    if device == "cuda" and (why := why_not()):
        return report.bad(f"no CUDA device: {why}")
    try:
        cases, arrays = read(Path(args[0]))
    except (BadInput, OSError, ValueError, zipfile.BadZipFile) as e:
        return report.bad(e)
    for case in cases:
        judge = backward_differences if case["op"] == "backward_mlp" else differences
        try:
            found = judge(case, arrays, device)
        except Exception as e:
            found = [f"{type(e).__name__}: {' '.join(str(e).split())}"]
        report.case(case["id"], found)
    return report.close()


def read(folder: Path) -> tuple[list[dict[str, Any]], Arrays]:
    """Cases and arrays of a folder. Raises BadInput where they are not what SCHEMA.md says."""
    try:
        document = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadInput(f"{folder / 'cases.json'}: {e}") from None
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list):
        raise BadInput(f"{folder / 'cases.json'}: no list of cases")
    for i, case in enumerate(cases):
        missing = {"id", "op", "params", "src", "dst"} - set(case) if isinstance(case, dict) else {"everything"}
        if missing:
            raise BadInput(f"{folder / 'cases.json'}: case {i} lacks {', '.join(sorted(missing))}")
    with np.load(folder / "cases.npz", allow_pickle=False) as archive:
        return cases, dict(archive)


# ---- from a case to a node


def source(ctx: wb.Context, spec: dict[str, Any] | None, arrays: Arrays) -> Tensor | None:
    """A tensor over a copy of the recorded memory: the owner of all of it where it covers it, else a view into it."""
    if spec is None:
        return None
    kind, memory = dtype(spec["type"]), arrays[spec["key"]]
    stored = memory.dtype.itemsize if not kind.quantised else kind.block_bytes
    if stored != kind.block_bytes:
        raise ValueError(f"{spec['key']} holds {memory.dtype}, not {kind}")
    ne, nb, n = tuple(spec["ne"]), tuple(spec["nb"]), memory.nbytes // kind.block_bytes * kind.block
    whole = nb == contiguous_strides(kind, ne) and spec["offset"] == 0 and int(np.prod(ne)) == n
    root = ctx.new_tensor(kind, *(ne if whole else (n,)), name=spec["key"])
    root.place(HostStorage(bytearray(memory.tobytes()), spec["key"], Usage.WEIGHTS))
    if whole:
        return root
    view = Tensor(kind, ne, nb, op="VIEW", spec=OPS["VIEW"], src=(root,), view_src=root, view_offs=spec["offset"])
    if spec["offset"] < 0 or spec["offset"] + view.nbytes > memory.nbytes:
        raise ValueError(f"ne, nb and offset of {spec['key']} reach beyond its memory")
    return ctx.add(view)


def node_of(ctx: wb.Context, case: dict[str, Any], src: list[Tensor | None]) -> Tensor:
    """The node that the workbench's constructor makes of the sources and the recorded parameters."""
    op, p = case["op"], case["params"]
    if "unary" in p:
        return ops.unary(p["unary"], *src)
    if "glu" in p:
        return ops.glu(p["glu"], *src, swapped=p.get("swapped", False))
    if op == "cpy":
        into = ctx.new_tensor(p["dst_type"], *p.get("dst_ne", case["src"][0]["ne"]), name="destination")
        node = ops.cpy(src[0], into)
        into.place(HostStorage(into.nbytes))
        return node
    if op == "repeat":
        return ops.repeat(src[0], p["ne"])
    if op in ("soft_max", "soft_max_ext"):
        mask, sinks = [*src[1:], None, None][:2]
        return ops.soft_max_ext(src[0], mask, **p, sinks=sinks)
    if op == "rope":
        return ops.rope(src[0], src[1], freq_factors=src[2] if len(src) > 2 else None, **p)
    if op == "scale":
        return ops.scale(src[0], p["scale"], p["bias"])
    return getattr(ops, op)(*src, **p)


def run(node: Tensor, rounding: str, device: str = "cpu") -> np.ndarray:
    """The whole memory of the node's owner after the run, as the recorded array holds it."""
    if node.op != "VIEW":
        node.mark(Flag.OUTPUT)
    run_graph(wb.build(node), rounding, device)
    return memory(node)


def run_graph(graph: wb.CGraph, rounding: str, device: str) -> None:
    """Compute a graph once; what has data is brought to the device."""
    backend = DEVICES[device](activation_rounding=rounding, dequant_cache_bytes=0 if rounding == "ggml" else 2**20)
    if not backend.buffer_type.is_host:
        for root in dict.fromkeys(t.root() for n in graph.nodes for t in (n, *n.sources()) if t.root()._storage is not None):
            buffer = backend.buffer_type.alloc_buffer(root.nbytes, root.require_data().usage)
            buffer.write(0, root.require_data().read(root.offset, root.nbytes))
            root.place(buffer)
    compute(graph, backend)


def memory(node: Tensor) -> np.ndarray:
    """The whole memory of the node's owner, as the recorded array holds it."""
    owner = node.root()
    raw = owner.require_data().read(owner.offset, owner.nbytes)
    return raw.view(owner.dtype.numpy or ("<u2" if owner.dtype is dtype("bf16") else np.uint8))


# ---- training


def backward_graph(ctx: wb.Context, case: dict[str, Any], arrays: Arrays) -> tuple[wb.CGraph, dict[str, Tensor], int]:
    """(graph with gradients, its named tensors, nodes before gradients) of a case: a network of two layers and its loss."""
    t = {s["name"]: source(ctx, s, arrays).named(s["name"]) for s in case["src"]}
    for name in case["grads"]:
        t[name].mark(Flag.PARAM)
    hidden = ops.unary(case["params"]["act"], ops.add(ops.mul_mat(t["w1"], t["x"]), t["b1"]))
    t["logits"] = ops.add(ops.mul_mat(t["w2"], hidden), t["b2"]).mark(Flag.OUTPUT)
    t["loss"] = ops.cross_entropy_loss(t["logits"], t["labels"]).mark(Flag.LOSS | Flag.OUTPUT)
    graph = wb.build(t["loss"])
    n = len(graph.nodes)
    graph.build_backward_expand()
    for seed in graph.grad_accs.values():
        seed.place(HostStorage(4))
    graph.reset()
    for name in case["grads"]:
        t[f"grad {name}"] = graph.grad(t[name]).mark(Flag.OUTPUT)
    return graph, t, n


def backward_differences(case: dict[str, Any], arrays: Arrays, device: str = "cpu") -> list[str]:
    """What differs in order, loss, logits and gradients, one line per field."""
    with wb.Context(2**20, no_alloc=True) as ctx:
        graph, t, n = backward_graph(ctx, case, arrays)
        made = [node.op for node in graph.nodes]
        found = [f"n_forward_nodes: got {n}, recorded {case['n_forward_nodes']}"] if n != case["n_forward_nodes"] else []
        if made != case["ops"]:
            i = next((i for i, (a, b) in enumerate(zip(made, case["ops"])) if a != b), min(len(made), len(case["ops"])))
            found.append(f"ops: got {len(made)} nodes, recorded {len(case['ops'])}, the first difference at {i}: got {made[i : i + 1]}, "
                         f"recorded {case['ops'][i : i + 1]}")  # fmt: skip
        run_graph(graph, "none", device)
        wanted = {"loss": case["dst"], "logits": case["logits"], **{f"grad {k}": v for k, v in case["grads"].items()}}
        for name, spec in wanted.items():
            ours, theirs = memory(t[name]), arrays[spec["key"]]
            if list(t[name].ne) != spec["ne"]:
                found.append(f"{name} ne: got {list(t[name].ne)}, recorded {spec['ne']}")
                continue
            allowed = np.full(theirs.shape, (1e-4 if name.startswith("grad") else 1e-5) * np.abs(theirs).max())
            found += [f"{name} data: {line}" for line in mismatch(~(np.abs(ours - theirs) <= allowed), ours, theirs, allowed)]
    return found


# ---- comparing


def differences(case: dict[str, Any], arrays: Arrays, device: str = "cpu") -> list[str]:
    """What differs, one line per field."""
    found: list[str] = []
    both = case["op"] in ("mul_mat", "mul_mat_id") and case["src"][0]["type"] != "f32"
    for rounding in ("none", "ggml") if both else ("none",):
        with wb.Context(2**20, no_alloc=True) as ctx:
            node = node_of(ctx, case, [source(ctx, s, arrays) for s in case["src"]])
            wrong = [f"dst {field}: got {ours}, recorded {case['dst'].get(field)}" for field, ours in described(node).items()
                     if case["dst"].get(field) != ours]  # fmt: skip
            recorded = arrays[case["dst"]["key"]]
            if recorded.nbytes != node.root().nbytes:
                wrong.append(f"dst data: got {node.root().nbytes} bytes, recorded {recorded.nbytes}")
            if wrong:
                return wrong
            lines = data_differences(case, arrays, run(node, rounding, device), rounding)
        found += [f"dst data{f' (activation_rounding={rounding})' if both else ''}: {line}" for line in lines]
    return found


def described(node: Tensor) -> dict[str, Any]:
    """The fields of `dst` that the constructor decides."""
    return {"type": node.dtype.name, "ne": list(node.ne), "nb": list(node.nb), "offset": node.view_offs}


def data_differences(case: dict[str, Any], arrays: Arrays, got: np.ndarray, rounding: str) -> list[str]:
    """At most one line about the values of the result."""
    want, kind = arrays[case["dst"]["key"]], case["dst"]["type"]
    if got.dtype != want.dtype:
        return [f"got {got.dtype}, recorded {want.dtype}"]
    if case["op"] in SORTED:
        return sorted_differences(case, arrays, got, want)
    if kind not in ("f32", "f16", "bf16"):
        return mismatch(got != want, got, want, np.zeros(got.shape))
    ours, theirs = real(got, kind), real(want, kind)
    with np.errstate(invalid="ignore"):
        allowed = np.where(np.isfinite(theirs), np.ravel(allowance(case, arrays, theirs, rounding)), 0.0)
        wrong = ~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs)) | (np.abs(ours - theirs) <= allowed))
    if kind != "f32" and case["op"] not in EXACT:
        wrong = unforgiven(wrong, got, want)
    return mismatch(wrong, ours, theirs, allowed)


def unforgiven(wrong: np.ndarray, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """One element in a hundred may be one unit off: f32 results that differ by 1e-7 may round to different neighbours."""
    patterns = got.view(np.int16).astype(int), want.view(np.int16).astype(int)
    neighbours = wrong & (np.abs(patterns[0] - patterns[1]) == 1)
    return wrong & ~neighbours if neighbours.sum() <= max(1, wrong.size // 100) else wrong


def sorted_differences(case: dict[str, Any], arrays: Arrays, got: np.ndarray, want: np.ndarray) -> list[str]:
    """Indices must be those recorded; among equal values any order is right, and top_k promises only a set."""
    x = values(case["src"][0], arrays)
    x = x.reshape(-1, x.shape[-1])
    ours, theirs = got.reshape(len(x), -1), want.reshape(len(x), -1)
    if ((ours < 0) | (ours >= x.shape[1])).any():
        return [f"indices from {ours.min()} to {ours.max()}, rows have {x.shape[1]} elements"]
    if case["op"] == "top_k":
        ours, theirs = np.sort(ours), np.sort(theirs)
    if any(len(set(row)) < len(row) for row in ours.tolist()):
        return ["an index stands twice in a row"]
    picked, recorded = np.take_along_axis(x, ours, 1), np.take_along_axis(x, theirs, 1)
    if case["op"] == "top_k":
        picked, recorded = np.sort(picked), np.sort(recorded)
    return mismatch((picked != recorded).ravel(), ours.ravel(), theirs.ravel(), np.zeros(ours.size))


def mismatch(wrong: np.ndarray, got: np.ndarray, want: np.ndarray, allowed: np.ndarray) -> list[str]:
    """A line about the worst of the wrong elements."""
    if not wrong.any():
        return []
    with np.errstate(invalid="ignore"):
        error = np.nan_to_num(np.abs(got.astype(float) - want.astype(float)), nan=np.inf)
    i = int(np.where(wrong, error, -1.0).argmax())
    return [f"{int(wrong.sum())} of {wrong.size} elements, worst at {i}: got {got[i]}, recorded {want[i]}, allowed {allowed[i]:.3g}"]


# ---- values and tolerances (the last table of SCHEMA.md)

EXACT = ("cpy", "cont", "dup", "get_rows", "set_rows", "repeat", "concat")
SORTED = ("argsort", "argsort_top_k", "top_k")
PRODUCTS = ("mul_mat", "mul_mat_id", "out_prod")
SUMS: dict[str, Callable[..., Any]] = {"sum": np.sum, "sum_rows": lambda a: a.sum(-1, keepdims=True), "mean": lambda a: a.mean(-1, keepdims=True)}
GELUS = ("gelu", "gelu_quick", "geglu")
TRANSCENDENTAL = ("exp", "log", "tanh", "sigmoid", "silu", "swiglu")
STORED = {"f16": 5e-4, "bf16": 4e-3}
UNROUNDED = {"f32": 1e-6, "f16": 5e-3, "bf16": 5e-3, "q8_0": 2e-2, "q4_0": 2e-2, "q4_K": 5e-3, "q6_K": 5e-3}
SMALL_POSITION = 100


def allowance(case: dict[str, Any], arrays: Arrays, want: np.ndarray, rounding: str) -> Any:
    """The error that each element of the result may have."""
    op, dst = case["op"], case["dst"]
    if op in EXACT:
        return np.zeros(want.shape)
    want = want.reshape(dst["ne"][::-1])
    size, src = np.abs(want), [s and np.abs(values(s, arrays)) for s in case["src"]]
    if op in PRODUCTS:
        kind = case["src"][0]["type"]
        share = UNROUNDED[kind] if rounding == "none" or kind.endswith("_K") else 1e-6
        return share * MAGNITUDES[op](*src)
    if op == "rope":
        far = src[1].max(initial=0) > SMALL_POSITION
        share = 1e-3 if case["params"]["ext_factor"] else 3e-4 if far else 1e-5
        limit = share * np.sqrt((want**2).sum(-1, keepdims=True)) + 0 * size
    elif op in GELUS:  # ggml's table rounds input and output to f16, 2**-11 each: gelu/c0 is 1.9e-3 off the formula at 4.27
        limit = 1e-3 * np.maximum(size, 1)
    elif op in SUMS:
        limit = 1e-6 * SUMS[op](src[0]) + 1e-7 + 0 * size
    elif op == "cross_entropy_loss":
        limit = 1e-5 * size
    elif op in TRANSCENDENTAL:
        limit = 2e-6 * size + np.finfo(np.float32).tiny
    else:
        limit = 1e-6 * size + 1e-7
    return limit + STORED.get(dst["type"], 0) * size


def batches(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.repeat(b.shape[0] // a.shape[0], 0).repeat(b.shape[1] // a.shape[1], 1)


def id_magnitudes(w: np.ndarray, x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    t, n_used = ids.shape[2:]
    chosen = w[0][ids[0, 0].astype(int)]  # (tokens, choices, n, k)
    return np.einsum("tcnk,tck->tcn", chosen, np.broadcast_to(x[0], (t, x.shape[2], x.shape[3])).repeat(n_used // x.shape[2], 1))


MAGNITUDES: dict[str, Callable[..., np.ndarray]] = {
    "mul_mat": lambda a, b: np.einsum("uvik,uvjk->uvji", batches(a, b), b),
    "mul_mat_id": id_magnitudes,
    "out_prod": lambda a, b: np.einsum("uvki,uvkj->uvji", batches(a, b), b),
}


def values(spec: dict[str, Any], arrays: Arrays) -> np.ndarray:
    """The described elements as f64 (ne3, ne2, ne1, ne0), decoded by `gguf` where they are in blocks."""
    ne, nb, memory, kind = spec["ne"][::-1], spec["nb"][::-1], arrays[spec["key"]], spec["type"]
    if memory.dtype == np.uint8:
        from gguf import GGMLQuantizationType, quants

        row = dtype(kind).row_bytes(ne[3])
        raw = np.lib.stride_tricks.as_strided(memory[spec["offset"] :], (*ne[:3], row), (*nb[:3], 1))
        return quants.dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[kind.upper()]).astype(np.float64)
    return real(np.ndarray(ne, memory.dtype, memory, spec["offset"], nb), kind)


def real(stored: np.ndarray, kind: str) -> np.ndarray:
    """Stored elements as f64; bf16 comes as uint16 patterns."""
    return ((stored.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else stored).astype(np.float64)
