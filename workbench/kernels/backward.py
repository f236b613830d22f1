"""Kernels that only training uses: gradients, sums into a part of a tensor, the step of AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from workbench.kernels.blocks import take_rows
from workbench.kernels.elementwise import _one_plus_exp
from workbench.kernels.kernel import Scratch, kernel, require_within, scratch_bytes
from workbench.kernels.pieces import cut, float_pieces, float_work, piece, repeated, row_pieces, row_work
from workbench.kernels.products import _groups, _rows_of_x
from workbench.tensors.tensor import Tensor

# ---- sums into tensors


@kernel("ACC")
def acc(xp: ModuleType, a: Any, b: Any, *, out: Any, nb: tuple[int, ...], offset: int) -> None:
    """a, then b added to the part of it at `offset` with strides `nb`."""
    out[...] = a
    if not b.size:
        return
    part = xp.lib.stride_tricks.as_strided(out.reshape(-1)[offset // 4 :], b.shape, (*nb[::-1], 4))
    xp.add(part, b, part)


@kernel("REPEAT_BACK")
def repeat_back(xp: ModuleType, a: Any, *, out: Any) -> None:
    """The sum over whole copies of the result's shape."""
    big, few = repeated(a, out)
    axes = tuple(i for i, (n, m) in enumerate(zip(big, few, strict=True)) if n != m)
    if axes:
        a.reshape(big).sum(axis=axes, keepdims=True, dtype="f4", out=out.reshape(few))
    else:
        out[...] = a


# ---- gradients of one op


@kernel("SILU_BACK", cut="elements", work=float_work(2))
def silu_back(xp: ModuleType, grad: Any, x: Any, *, out: Any, scratch: Scratch) -> None:
    """grad · s · (1 + x · (1 - s)) with the sigmoid s."""
    for y, g, a, s, t in float_pieces(xp, out, (grad, x), scratch, temporaries=2):
        _one_plus_exp(xp, a, -1.0, s)
        xp.divide(1, s, s)
        xp.subtract(1, s, t)
        xp.multiply(t, a, t)
        xp.add(t, 1, t)
        xp.multiply(t, s, t)
        xp.multiply(g, t, y)


@kernel("RMS_NORM_BACK", cut="rows", work=row_work(1, 2))
def rms_norm_back(xp: ModuleType, grad: Any, x: Any, *, out: Any, scratch: Scratch, eps: float) -> None:
    """(grad - x · dot / total) / √(total / n) with total = sum of x² + n · eps and dot = sum of grad · x."""
    for index, t, dot, total in row_pieces(x.shape, scratch, 1, 2):
        g, a, n = grad[index], x[index], x.shape[-1]
        xp.multiply(g, a, t)
        t.sum(axis=-1, keepdims=True, out=dot)
        xp.square(a, t)
        t.sum(axis=-1, keepdims=True, out=total)
        xp.add(total, n * eps, total)
        xp.divide(dot, total, dot)
        xp.divide(total, n, total)
        xp.sqrt(total, total)
        xp.multiply(a, dot, t)
        xp.subtract(g, t, t)
        xp.divide(t, total, out[index])


@kernel("SOFT_MAX_BACK", cut="rows", work=row_work(1, 1))
def soft_max_back(xp: ModuleType, grad: Any, y: Any, *, out: Any, scratch: Scratch, scale: float, max_bias: float) -> None:
    """scale · y · (grad - dot) with dot = sum of grad · y."""
    for index, t, dot in row_pieces(y.shape, scratch, 1, 1):
        xp.multiply(grad[index], y[index], t)
        t.sum(axis=-1, keepdims=True, out=dot)
        xp.subtract(grad[index], dot, t)
        xp.multiply(t, y[index], t)
        xp.multiply(t, scale, out[index])


@kernel("CROSS_ENTROPY_LOSS_BACK", work=row_work(1, 1, of=lambda node: node))
def cross_entropy_loss_back(xp: ModuleType, grad: Any, logits: Any, labels: Any, *, out: Any, scratch: Scratch) -> None:
    """grad / rows · (soft max · sum of labels - labels)."""
    rows = math.prod(logits.shape[:-1])
    for index, t, s in row_pieces(logits.shape, scratch, 1, 1) if logits.size else ():
        logits[index].max(axis=-1, keepdims=True, out=s)
        xp.subtract(logits[index], s, t)
        xp.exp(t, t)
        t.sum(axis=-1, keepdims=True, out=s)
        xp.divide(t, s, t)
        labels[index].sum(axis=-1, keepdims=True, out=s)
        xp.multiply(t, s, t)
        xp.subtract(t, labels[index], t)
        xp.multiply(t, grad[0, 0, 0, 0] / rows, out[index])


def _get_rows_back_work(node: Tensor) -> int:
    grad = next(node.sources())
    return scratch_bytes((grad.n_rows, 8), (max(grad.ne[0], min(grad.n_elements, piece())), 8))


@kernel("GET_ROWS_BACK", work=_get_rows_back_work)
def get_rows_back(xp: ModuleType, grad: Any, rows: Any, *, out: Any, scratch: Scratch) -> None:
    """Each row of grad added to the row of its batch that its index names, in order. Raises IndexOutOfRange first."""
    (n3, n2, m, n), n_rows = out.shape, math.prod(grad.shape[:-1])
    require_within(rows, m, 1)
    out[...] = 0
    room = max(n, min(n_rows * n, scratch.memory.size // 8 - n_rows - 16))
    places, elements = scratch.arrays(((n3 * n2, rows.shape[-1]), "i8"), ((room,), "i8"))
    xp.copyto(places.reshape(rows.shape), rows)
    if n3 * n2 > 1:
        places += xp.arange(n3 * n2)[:, None] * m
    places, flat, given = places.reshape(-1), out.reshape(-1), grad.reshape(n_rows, n)
    if n == 1:
        xp.add.at(flat, places, given.reshape(-1))
        return
    for (some,) in cut((n_rows,), room // n):  # elements by themselves: NumPy adds whole rows several times slower
        part = places[some]
        at = elements[: len(part) * n].reshape(len(part), n)
        xp.multiply(part[:, None], n, at)
        at += xp.arange(n)
        xp.add.at(flat, at.reshape(-1), given[some].reshape(-1))


# ---- gradients of products through expert ids


def _routed_work(node: Tensor) -> int:
    first, second, ids = node.src
    assert first is not None and second is not None and ids is not None
    n = ids.n_elements
    return scratch_bytes((n, 8), (n * first.ne[0], 4), (n * second.ne[0], 4))


def _routed(xp: ModuleType, scratch: Scratch, ids: Any, n_expert: int, widths: tuple[int, int]) -> Iterator[tuple[int, Any, Any, Any]]:
    """(expert, places, room for its rows of either width) for each used expert."""
    n = ids.size
    keys, first, second = scratch.arrays(((n,), "i8"), ((n, widths[0]), "f4"), ((n, widths[1]), "f4"))
    for e, places in _groups(xp, ids[0, 0], n_expert, keys, n):
        yield e, places, first[: len(places)], second[: len(places)]


@kernel("MUL_MAT_ID_BACK", work=_routed_work)
def mul_mat_id_back(xp: ModuleType, w: Any, grad: Any, ids: Any, *, out: Any, scratch: Scratch) -> None:
    """The rows of each expert gathered, multiplied with its matrix as it lies, and scattered."""
    (_, n_expert, n, k), given, results = w.shape, grad.reshape(-1, grad.shape[-1]), out.reshape(-1, w.shape[-1])
    for e, places, to, rows in _routed(xp, scratch, ids, n_expert, (k, n)):
        take_rows(xp, given, places, rows)
        xp.matmul(rows, w[0, e], out=to)
        results[places] = to


@kernel("OUT_PROD_ID", work=_routed_work)
def out_prod_id(xp: ModuleType, x: Any, grad: Any, ids: Any, *, out: Any, scratch: Scratch, n_expert: int) -> None:
    """The rows of x and grad of each expert gathered, and one product of them."""
    (_, t, n_rows, k), n, n_used = x.shape, grad.shape[-1], ids.shape[-1]
    inputs, given = x.reshape(t * n_rows, k), grad.reshape(t * n_used, n)
    out[...] = 0
    for e, places, rows, grads in _routed(xp, scratch, ids, n_expert, (k, n)):
        take_rows(xp, inputs, _rows_of_x(places, n_used, n_rows), rows)
        take_rows(xp, given, places, grads)
        xp.matmul(grads.swapaxes(0, 1), rows, out=out[0, e])


# ---- the optimiser


@kernel("OPT_STEP_ADAMW", cut="rows", work=float_work(2))
def opt_step_adamw(xp: ModuleType, w: Any, grad: Any, m: Any, v: Any, params: Any, *, out: Any, scratch: Scratch) -> None:
    """ggml's order of operations; `out` is the memory of w."""
    rate, beta1, beta2, eps, decay, start1, start2 = (params[0, 0, 0, i : i + 1] for i in range(7))
    for y, a, g, p, q, s, t in float_pieces(xp, out, (w, grad, m, v), scratch, temporaries=2):
        xp.multiply(p, beta1, p)
        xp.multiply(g, 1 - beta1, s)
        xp.add(p, s, p)
        xp.multiply(q, beta2, q)
        xp.square(g, s)
        xp.multiply(s, 1 - beta2, s)
        xp.add(q, s, q)
        xp.multiply(q, start2, s)
        xp.sqrt(s, s)
        xp.add(s, eps, s)
        xp.multiply(p, start1, t)
        xp.divide(t, s, t)
        xp.multiply(t, rate, t)
        xp.multiply(a, 1 - rate * decay, y)
        xp.subtract(y, t, y)
