"""Matrix products. All arithmetic is in `_multiply`, which hands BLAS what it can read without copying.

The bits of a result depend on shapes and storage types alone: work is cut by `columns` and `cells`, and `_multiply` cuts
again by shape, whether the weights were cached or not and whichever thread is at work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from workbench.kernels.blocks import decode, round_input, rounds_input, take_rows
from workbench.kernels.kernel import IndexOutOfRange, Scratch, Step, grain, kernel, scratch_bytes
from workbench.kernels.weights import CELL, DecodedWeights, WeightSource, blas_can_read, cell_rows, cells
from workbench.tensors.tensor import Tensor

WHOLE = slice(None)

# ---- how work is cut

SMALL_PRODUCT, SMALL_TILE = 1_000_000, 1024
"""Up to this many multiplications, and results, OpenBLAS multiplies without repacking its operands first: for a few
tokens that is up to seven times faster, so products are cut to that size."""
TASK_NS, MAX_TASKS = 64_000, 8
"""A task should take this long, or waking a thread costs more than it saves."""


def columns(node: Tensor, task_ns: int = TASK_NS) -> list[slice]:
    """Rows of the weights that are one task each: a function of shapes alone. Large products lose at most 3 % by it."""
    w = node.src[0]
    assert w is not None
    n, k, t = node.ne[0], w.ne[0], node.n_rows
    estimate = n * k * max(t * 0.02, 0.1)  # ns: multiplications of a matrix product, or one reading of the weights
    most = n // 128 if t < 64 else min(n // 256, 1 + max(n, 1024) // 1024)  # BLAS repacks x for each part
    tasks = min(MAX_TASKS, int(estimate) // task_ns, most)
    step = -(-n // (max(tasks, 1) * 64)) * 64
    return [slice(a, min(a + step, n)) for a in range(0, n, step)]


def _multiply(xp: ModuleType, x: Any, w: Any, out: Any) -> None:
    """`out = x @ w.T` over the last two axes."""
    (t, k), n = x.shape[-2:], w.shape[-2]
    step = _tile(t, k, n)
    if step >= n:
        xp.matmul(x, w.swapaxes(-1, -2), out=out)
        return
    for a in range(0, n, step):
        xp.matmul(x, w[..., a : a + step, :].swapaxes(-1, -2), out=out[..., a : a + step])


def _tile(t: int, k: int, n: int) -> int:
    """Rows of the weights to multiply in one call."""
    if grain() > 1:
        return n
    step = min(SMALL_TILE, SMALL_PRODUCT // max(k, 1)) // t if t > 1 else n
    return (step // 64 * 64 or step // 16 * 16) if 16 <= step < n else n


def decode_room(shape: tuple[int, ...], direct: bool) -> int:
    """Elements of scratch in which weights (ne3, ne2, rows, k) are decoded: one cell, or a stack of small matrices."""
    n3, n2, n, k = shape
    return 0 if direct else min(n3 * n2 * n * k, max(CELL * grain(), min(n, cell_rows(k)) * k))


def _pieces(w: WeightSource, part: slice) -> tuple[slice, ...]:
    """Rows of the weights that are asked for at a time."""
    return (part,) if w.direct else cells(part, *w.shape[2:])


# ---- MUL_MAT


def _mul_mat_work(node: Tensor) -> int:
    w, x = node.src[:2]
    assert w is not None and x is not None
    copied = rounds_input(w.dtype) or not blas_can_read(x)
    return scratch_bytes((decode_room(w.ne[::-1], blas_can_read(w)), 4), (x.n_elements if copied else 0, 4))


def _one_call(xp: ModuleType, w: WeightSource, x: Any, *, out: Any, part: slice = WHOLE, **_: Any) -> Step | None:
    """`matmul` itself, where nothing is decoded, copied, rounded or cut: a third of the time of a tiny product."""
    if not (isinstance(w, DecodedWeights) and w.direct and blas_layout(x) and {*w.shape[:2], *x.shape[:2]} == {1}):
        return None
    rows = w.matrix(0, 0, part)
    if _tile(x.shape[2], x.shape[3], len(rows)) < len(rows):
        return None
    return partial(xp.matmul, x[0, 0], rows.swapaxes(0, 1), out=out[0, 0, :, part])


@kernel("MUL_MAT", work=_mul_mat_work, cut="columns", parts=columns, plain=_one_call)
def mul_mat(xp: ModuleType, w: WeightSource, x: Any, *, out: Any, scratch: Scratch, part: slice = WHOLE,
            rounding: str = "none", prec_acc: int = 0) -> None:  # fmt: skip
    """Rows `part` of the weights times all rows of x; dimensions 2 and 3 of w repeat into those of x."""
    rounds = rounding == "ggml" and rounds_input(w.dtype)
    copied = rounds or not blas_layout(x)
    room, copy = scratch.arrays(((decode_room(w.shape, w.direct),), "f4"), (x.shape if copied else (0,), "f4"))
    if copied:
        x = _packed(xp, w, x, copy, rounds)
    (n3, n2, n, k), (b3, b2, t, _) = w.shape, x.shape
    if n3 == n2 == b3 == b2 == 1:  # NumPy is quicker with two dimensions than with six
        for rows in _pieces(w, part):
            _multiply(xp, x[0, 0], w.matrix(0, 0, rows, room), out[0, 0, :, rows])
        return
    x = x.reshape(n3, b3 // n3, n2, b2 // n2, t, k)
    out = out.reshape(n3, b3 // n3, n2, b2 // n2, t, n)
    for i3, i2, rows in _stacks(w, part):
        stack = w.matrix(i3, i2, rows, room)[:, None, :, None]
        _multiply(xp, x[i3, :, i2], stack, out[i3, :, i2, :, :, rows])


def _stacks(w: WeightSource, part: slice) -> Iterator[tuple[slice, slice, slice]]:
    """Which matrices (along ne3, along ne2) are multiplied in one call, and which of their rows."""
    n3, n2, n, k = w.shape
    if w.direct:
        yield WHOLE, WHOLE, part
        return
    start, stop, _ = part.indices(n)
    at_once = max(1, CELL * grain() // max(1, (stop - start) * k))
    for i3 in range(n3):
        for i2 in range(0, n2, at_once):
            for rows in cells(part, n, k):
                yield slice(i3, i3 + 1), slice(i2, i2 + at_once), rows


def _packed(xp: ModuleType, w: WeightSource, x: Any, copy: Any, rounds: bool) -> Any:
    """x as packed f32 in `copy`, rounded where asked for."""
    decode(xp, x, copy)
    if rounds:
        round_input(xp, w.dtype, copy)
    return copy


def blas_layout(x: Any) -> bool:
    """`blas_can_read` for an array."""
    if getattr(x, "raw", None) is not None or x.dtype != np.float32:
        return False
    row, element = x.strides[-2:]
    return bool(element == 4 and row % 4 == 0 and row >= 4 * x.shape[-1])


# ---- MUL_MAT_ID


def _mul_mat_id_work(node: Tensor) -> int:
    w, x, ids = node.src
    assert w is not None and x is not None and ids is not None
    copied = 0 if blas_can_read(x) and x.is_contiguous else x.n_elements
    widest = max(p.stop - p.start for p in columns(node))
    t, k, direct = x.ne[2], x.ne[0], blas_can_read(w)
    return scratch_bytes((decode_room((1, 1, w.ne[1], k), direct), 4), (copied, 4), (t * k, 4), (t * widest, 4), (ids.n_elements, 8))


@kernel("MUL_MAT_ID", work=_mul_mat_id_work, cut="columns", parts=columns)
def mul_mat_id(xp: ModuleType, w: WeightSource, x: Any, ids: Any, *, out: Any, scratch: Scratch, part: slice = WHOLE,
               rounding: str = "none") -> None:  # fmt: skip
    """Tokens are grouped by expert; each used expert makes one product with the rows that are routed to it.

    A row by itself is multiplied where it lies; several are gathered, multiplied and scattered.
    """
    (_, n_expert, n, k), (_, t, n_rows, _), n_used = w.shape, x.shape, ids.shape[-1]
    start, stop, _ = part.indices(n)
    copied = not (blas_layout(x) and x.flags.c_contiguous)
    room, copy, gathered, product, keys = scratch.arrays(
        ((decode_room((1, 1, n, k), w.direct),), "f4"), (x.shape if copied else (0,), "f4"),
        ((t, k), "f4"), ((t, stop - start), "f4"), ((t * n_used,), id_type(n_expert)),
    )  # fmt: skip
    if copied:
        x = _packed(xp, w, x, copy, False)
    x, results = x.reshape(t * n_rows, k), out.reshape(t * n_used, n)[:, part]
    rounds = rounding == "ggml" and rounds_input(w.dtype)
    only = getattr(w, "only", None)
    for e, places in _groups(xp, ids[0, 0], n_expert, keys, t):
        if only is not None and e not in only:
            continue
        m, rows_of_x = len(places), _rows_of_x(places, n_used, n_rows)
        if m == 1:
            p, r = int(places[0]), int(rows_of_x[0])
            rows, to = x[r : r + 1], results[p : p + 1]
        else:
            rows, to = gathered[:m], product[:m]
            take_rows(xp, x, rows_of_x, rows)
        if rounds:
            rows = _packed(xp, w, rows, gathered[:1], False) if m == 1 else rows
            round_input(xp, w.dtype, rows)
        if w.direct:
            _multiply(xp, rows, w.expert(e, part), to)
        else:
            for cell in cells(part, n, k):
                _multiply(xp, rows, w.expert(e, cell, room), to[:, cell.start - start : cell.stop - start])
        if m > 1:
            results[places] = to


def _groups(xp: ModuleType, ids: Any, n_expert: int, keys: Any, at_most: int) -> Iterable[tuple[int, Any]]:
    """(expert, places) for each used expert, lowest first; place t * n_used + i is the i-th choice of token t.

    Raises IndexOutOfRange before anything is computed. A token that names an expert twice may split a group, so that
    none has more rows than there are tokens.
    """
    if at_most == 1:  # one token in a hurry
        few = [(e, (place,)) for place, e in enumerate(ids.tolist()[0])]
        if not 0 <= min(few)[0] <= max(few)[0] < n_expert:
            raise IndexOutOfRange(2, "expert", ids, n_expert)
        return few
    if not 0 <= int(ids.min()) <= int(ids.max()) < n_expert:
        raise IndexOutOfRange(2, "expert", ids, n_expert)
    xp.copyto(keys.reshape(ids.shape), ids, casting="unsafe")
    places, counts = by_expert(xp, keys, n_expert)
    ends = xp.cumsum(counts).tolist()
    starts = [0, *ends[:-1]]
    return ((e, places[a : min(a + at_most, ends[e])]) for e in range(n_expert) for a in range(starts[e], ends[e], at_most))


def id_type(n_expert: int) -> str:
    """The narrowest type for ids of so many experts: NumPy sorts 16 bits by radix, in as many steps as there are rows."""
    return "u2" if n_expert <= 2**16 else "i4"


def by_expert(xp: ModuleType, ids: Any, n_expert: int) -> tuple[Any, Any]:
    """Places of `ids` (1-d, of `id_type`) sorted by expert, in order within each; and how many rows each expert has.

    Work and memory grow with rows + experts, not with their product.
    """
    return xp.argsort(ids, kind="stable"), xp.bincount(ids, minlength=n_expert)


def _rows_of_x(places: Any, n_used: int, n_rows: int) -> Any:
    """Rows of x, which has `n_rows` for each token, that belong to these places."""
    if n_rows == n_used:
        return places
    if len(places) == 1:
        return (int(places[0]) // n_used * n_rows + int(places[0]) % n_used % n_rows,)
    rows = places // n_used
    return rows if n_rows == 1 else rows * n_rows + places % n_used % n_rows


# ---- OUT_PROD


@kernel("OUT_PROD")
def out_prod(xp: ModuleType, a: Any, b: Any, *, out: Any) -> None:
    """Row pairs multiplied outward and summed: `b.T @ a` for each batch; a repeats into the batches of b."""
    (a3, a2, k, m), (b3, b2, _, n) = a.shape, b.shape
    a = a.reshape(a3, 1, a2, 1, k, m)
    b = b.reshape(a3, b3 // a3, a2, b2 // a2, k, n)
    xp.matmul(b.swapaxes(-1, -2), a, out=out.reshape(a3, b3 // a3, a2, b2 // a2, n, m))
