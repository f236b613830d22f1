"""Run the kernel of one node without graph, allocator or plan, and compare it with its definition or with real ggml."""

import json
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from workbench.kernels import pieces
from workbench.kernels.kernel import Scratch, Step
from workbench.tensors import Context, HostStorage, Tensor, dtype, ops

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "ops"

# ---- leaves


def leaf(ctx: Context, ne: tuple[int, ...], kind: str = "f32", seed: int = 0, layout: str = "packed", special: bool = False) -> Tensor:
    """Random values; "gaps" lies within a larger tensor, "swapped" has axes 1 and 2 exchanged, "transposed" 0 and 1."""
    ne = (*ne, 1, 1, 1)[:4]
    if layout == "gaps":
        big = leaf(ctx, (ne[0] + 3, ne[1] + 1, *ne[2:]), kind, seed, special=special)
        return ops.view(big, *ne, nb=big.nb[1:])
    if layout == "swapped":
        return ops.permute(leaf(ctx, (ne[0], ne[2], ne[1], ne[3]), kind, seed, special=special), 0, 2, 1, 3)
    if layout == "transposed":
        return ops.transpose(leaf(ctx, (ne[1], ne[0], *ne[2:]), kind, seed, special=special))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(ne[::-1]) * 3
    if special and x.size:
        x.flat[rng.integers(0, x.size, 4)] = rng.choice([0.0, -0.0, np.inf, -np.inf, np.nan, 1e4, -1e4], 4)
    return ctx.new_tensor(kind, *ne).set(np.trunc(x) if kind[0] == "i" else x)


def shapes(longest: int = 40) -> st.SearchStrategy:
    """Extents, ne0 first."""
    return st.tuples(st.integers(1, longest), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2))


# ---- running


def bound(node: Tensor, operands: list | None = None, out: np.ndarray | None = None) -> Step:
    """The kernel's call; scratch is filled with NaN bits, so that reading before writing shows."""
    kernel = node.spec.kernel
    operands = [s and s.array() for s in node.src] if operands is None else operands
    extra = {"scratch": Scratch(np.full(kernel.work(node), 0xFF, np.uint8))} if kernel.work else {}
    return kernel.bind(np, operands, node.array() if out is None else out, node.params, **extra)


def run(node: Tensor, operands: list | None = None, out: np.ndarray | None = None) -> np.ndarray:
    """Compute the node into its own memory, or into `out`."""
    out = node.array() if out is None else out
    with np.errstate(all="ignore"):
        bound(node, operands, out)()
    return out


def definition(node: Tensor) -> np.ndarray:
    """What the slow reference says."""
    with np.errstate(all="ignore"):
        return node.spec.reference(node, *[s and s.array() for s in node.src])


def same_bits_in_place(node: Tensor, operand: int = 0) -> None:
    """The result in the memory of an operand of its layout has the same bits as elsewhere."""
    elsewhere = run(node).copy()
    operands = [s and s.array().copy() for s in node.src]
    assert operands[operand].shape == elsewhere.shape
    run(node, operands, operands[operand])
    assert operands[operand].tobytes() == elsewhere.tobytes()


def same_bits_in_parts(node: Tensor) -> None:
    """Neither the planner's cut into tasks nor the size of the pieces of scratch changes a bit."""
    whole = run(node).copy()
    with patch.object(pieces, "PIECE", 16):
        assert run(node).tobytes() == whole.tobytes()
    arrays = [*[s and s.array() for s in node.src], np.empty_like(whole)]
    axis = 2 if node.spec.kernel.cut == "rows" else int(np.argmax(whole.shape))
    n = whole.shape[axis]
    if node.spec.kernel.cut is None or any(a is not None and a.shape[axis] not in (1, n) for a in arrays):
        return
    for some in (slice(0, n // 3), slice(n // 3, n)):
        part = [a if a is None or a.shape[axis] == 1 else a[(slice(None),) * axis + (some,)] for a in arrays]
        if part[-1].size:
            run(node, part[:-1], part[-1])
    assert n == 1 or arrays[-1].tobytes() == whole.tobytes()


# ---- comparing

RELATIVE = {"f32": 1e-6, "f16": 1e-3}
COARSER = {**dict.fromkeys(["EXP", "LOG", "TANH", "SIGMOID", "SILU", "GELU_QUICK", "SWIGLU", "SWIGLU_OAI"], 2e-6), "GELU": 1e-5, "GEGLU": 1e-5}
TABLE = {"GELU": 1e-3, "GELU_QUICK": 1e-3, "GEGLU": 5e-3}
"""ggml reads these from a table of f16 values at f16 places; GEGLU multiplies that error by the other factor."""


def agrees(got: np.ndarray, want: np.ndarray, node: Tensor, absolute: float | np.ndarray = 1e-6, table: bool = False) -> None:
    """Equal inf and NaN, and close elsewhere; integers are equal."""
    if node.dtype.numpy.kind == "i":
        np.testing.assert_array_equal(got, want)
        return
    with np.errstate(over="ignore"):
        want = want.astype(node.dtype.numpy).astype(np.float64)
    relative = max(RELATIVE[node.dtype.name], COARSER.get(node.desc, 0), TABLE.get(node.desc, 0) if table else 0)
    absolute = max(absolute, relative) if table else absolute
    with np.errstate(invalid="ignore"):
        fine = (got == want) | (np.isnan(got) & np.isnan(want)) | (np.abs(got - want) <= absolute + relative * np.abs(want))
    if not fine.all():
        i = tuple(int(axis[0]) for axis in (~fine).nonzero())
        raise AssertionError(f"{node} {node.params}: {(~fine).sum()} differ, the first at {i}: {got[i]!r}, expected {want[i]!r}")


# ---- recorded cases


@cache
def cases() -> list[dict]:
    return json.loads((GOLDENS / "cases.json").read_text())["cases"]


@cache
def _arrays() -> dict:
    return dict(np.load(GOLDENS / "cases.npz"))


def recorded(ctx: Context, spec: dict | None) -> Tensor | None:
    """A leaf over the recorded memory of a source or result, with its strides and offset."""
    if spec is None:
        return None
    t = ctx.add(Tensor(dtype(spec["type"]), tuple(spec["ne"]), tuple(spec["nb"]), context=ctx))
    t.place(HostStorage(np.ascontiguousarray(_arrays()[spec["key"]]).view(np.uint8)), spec["offset"])
    return t


def sources_and_result(ctx: Context, case: dict) -> tuple[list[Tensor | None], np.ndarray]:
    """The sources of a case as leaves, and what real ggml computed."""
    return [recorded(ctx, s) for s in case["src"]], recorded(ctx, case["dst"]).array()
