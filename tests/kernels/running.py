"""Run the kernel of one node, without graph, allocator or plan; and read the recorded cases of real ggml."""

import json
from functools import cache
from pathlib import Path

import numpy as np

from workbench.kernels.kernel import Scratch
from workbench.tensors import Context, Tensor, dtype, ops
from workbench.tensors.storage import HostStorage

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "ops"


@cache
def cases() -> list[dict]:
    return json.loads((GOLDENS / "cases.json").read_text())["cases"]


@cache
def arrays() -> dict:
    return dict(np.load(GOLDENS / "cases.npz"))


def recorded(ctx: Context, spec: dict | None) -> Tensor | None:
    """A leaf over the recorded memory of a source or result, with its strides and offset."""
    if spec is None:
        return None
    t = ctx.add(Tensor(dtype(spec["type"]), tuple(spec["ne"]), tuple(spec["nb"]), context=ctx))
    t.place(HostStorage(np.ascontiguousarray(arrays()[spec["key"]]).view(np.uint8)), spec["offset"])
    return t


def scratch_for(node: Tensor, share: int = 1) -> dict:
    kernel = node.spec.kernel
    return {"scratch": Scratch(np.full(kernel.work(node) // share, 0xFF, np.uint8))} if kernel.work else {}


def run(node: Tensor, out: np.ndarray | None = None, operands: list | None = None) -> np.ndarray:
    """Bind and run the kernel; `out` is the node's own memory unless given."""
    out = node.array() if out is None else out
    operands = [s and s.array() for s in node.src] if operands is None else operands
    with np.errstate(all="ignore"):
        node.spec.kernel.bind(np, operands, out, node.params, **scratch_for(node))()
    return out


def definition(node: Tensor) -> np.ndarray:
    """What the slow reference says."""
    with np.errstate(all="ignore"):
        return node.spec.reference(node, *[s and s.array() for s in node.src])


def build(case: dict, src: list) -> Tensor:
    """The node of a recorded case."""
    p, op = case["params"], case["op"]
    if "unary" in p:
        return ops.unary(p["unary"], *src)
    if "glu" in p:
        return ops.glu(p["glu"], *src, swapped=p.get("swapped", False))
    if op == "repeat":
        return ops.repeat(src[0], p["ne"])
    if op in ("soft_max", "soft_max_ext"):
        return ops.soft_max_ext(src[0], src[1] if len(src) > 1 else None, **p)
    if op == "rope":
        return ops.rope(src[0], src[1], freq_factors=src[2] if len(src) > 2 else None, **p)
    if op == "scale":
        return ops.scale(src[0], p["scale"], p["bias"])
    return getattr(ops, op)(*src, **p)
