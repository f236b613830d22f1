"""Kernels that move values: copies between types and layouts, rows picked and rows written by index."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from workbench.kernels.blocks import CHUNK, Rows, chunk, chunks, decode, encode, take_rows
from workbench.kernels.kernel import Scratch, grain, kernel, require_within, scratch_bytes
from workbench.tensors.dtype import F32
from workbench.tensors.tensor import Tensor

FEW = CHUNK // 8
"""Elements of a piece for which NumPy may take memory of its own (index arrays, gathered rows); times the grain."""


# ---- CPY, CONT, DUP


def _copy_work(node: Tensor) -> int:
    """Scratch to pack a source of another shape, and an f32 stage between types that NumPy cannot convert."""
    a = node.src[0]
    assert a is not None
    in_place = a.is_contiguous and (not a.dtype.quantised or a.dtype is node.dtype)
    packing = 0 if a.ne == node.ne or in_place else a.n_elements
    staged = a.dtype is not node.dtype and F32 not in (a.dtype, node.dtype) and None in (a.dtype.numpy, node.dtype.numpy)
    stage = min(node.n_elements, max(chunk(), node.ne[0])) if staged else 0
    return scratch_bytes((packing, 8 if a.dtype.block_bytes == 8 else 4), (stage, 4))


@kernel("CPY", "CONT", "DUP", work=_copy_work)
def copy(xp: ModuleType, a: Any, into: Any = None, *, out: Any, scratch: Scratch) -> None:
    """`a` in logical order as the elements of `out`, converted to its type. (`into` is the tensor that `out` is a view of.)"""
    a = a if a.shape == out.shape else _reshaped(xp, a, out, scratch)
    if a.dtype == out.dtype:
        xp.copyto(_stored(out), _stored(a))
    elif out.dtype == np.float32:
        decode(xp, a, out)
    elif a.dtype == np.float32:
        encode(xp, a, out)
    elif isinstance(a, Rows) or isinstance(out, Rows):
        _convert_staged(xp, a, out, scratch.memory[-4 * min(math.prod(out.shape), max(chunk(), out.shape[-1])) :].view("f4"))
    else:
        xp.copyto(out, a, casting="unsafe")


def _reshaped(xp: ModuleType, a: Any, out: Any, scratch: Scratch) -> Any:
    """`a` under the shape of `out`: its own memory where it is packed, else a packed copy in scratch."""
    stored = _stored(a)
    if stored.flags.c_contiguous and (not isinstance(a, Rows) or a.dtype == out.dtype or a.dtype.block == 1):
        if isinstance(a, Rows):
            return Rows(a.dtype, stored.reshape(*out.shape[:-1], -1))
        return a.reshape(out.shape)
    n = math.prod(out.shape)
    packed = scratch.array((n,), "f4" if isinstance(a, Rows) else a.dtype).reshape(a.shape)
    decode(xp, a, packed) if isinstance(a, Rows) else xp.copyto(packed, a)
    return packed.reshape(out.shape)


def _convert_staged(xp: ModuleType, a: Any, out: Any, stage: Any) -> None:
    """Through f32, a piece at a time: for pairs of types of which neither is f32."""
    for i in chunks(out.shape):
        source, target = a[i], out[i]
        wide = stage[: math.prod(target.shape)].reshape(target.shape)
        decode(xp, source, wide)
        encode(xp, wide, target)


def _stored(a: Any) -> Any:
    return a.raw if isinstance(a, Rows) else a


# ---- GET_ROWS


def _get_rows_work(node: Tensor) -> int:
    return scratch_bytes((node.n_rows, 8))


@kernel("GET_ROWS", work=_get_rows_work)
def get_rows(xp: ModuleType, a: Any, rows: Any, *, out: Any, scratch: Scratch) -> None:
    """Row i of a batch of `out` is row `rows[i]` of the same batch of `a`. Raises IndexOutOfRange first."""
    n3, n2, m, n = a.shape
    require_within(rows, m, 1)
    if _stored(a).flags.c_contiguous:  # all batches at once, as rows of one table
        places = scratch.array((n3 * n2, rows.shape[-1]), "i8")
        xp.copyto(places.reshape(rows.shape), rows)
        if n3 * n2 > 1:
            places += xp.arange(n3 * n2)[:, None] * m
        _gather(xp, _table(a), places.reshape(-1), out.reshape(-1, n))
        return
    for batch in np.ndindex(n3, n2):
        _gather(xp, a[batch], rows[0][batch], out[batch])


def _table(a: Any) -> Any:
    stored = _stored(a).reshape(-1, _stored(a).shape[-1])
    return Rows(a.dtype, stored) if isinstance(a, Rows) else stored


def _gather(xp: ModuleType, table: Any, rows: Any, out: Any) -> None:
    stored, (n_rows, n) = _stored(table), out.shape
    if table.dtype == out.dtype and stored.flags.c_contiguous:
        take_rows(xp, stored, rows, out)
        return
    step = max(1, FEW * grain() // max(n, 1))
    for a in range(0, n_rows, step):
        picked = stored[rows[a : a + step]]
        to = out[a : a + step]
        if table.dtype == out.dtype:
            to[...] = picked
        else:
            decode(xp, Rows(table.dtype, picked) if isinstance(table, Rows) else picked, to)


# ---- SET_ROWS


@kernel("SET_ROWS")
def set_rows(xp: ModuleType, data: Any, rows: Any, into: Any, *, out: Any) -> None:
    """Row i of a batch of `data` replaces row `rows[i]` of `out`; batches of indices repeat. Raises IndexOutOfRange first."""
    n3, n2, m, n = data.shape
    require_within(rows, out.shape[2], 1)
    _, r3, r2, _ = rows.shape
    step = max(1, FEW * grain() // max(n, 1))
    for i3, i2 in np.ndindex(n3, n2):
        places, target, source = rows[0, i3 % r3, i2 % r2], _stored(out)[i3, i2], data[i3, i2]
        for a in range(0, m, step):
            part = slice(a, a + step)
            target[places[part]] = _encoded(xp, source[part], out) if isinstance(out, Rows) else source[part]


def _encoded(xp: ModuleType, x: Any, like: Rows) -> Any:
    """A few rows as the bytes that `like` stores."""
    raw = xp.empty((len(x), like.raw.shape[-1]), like.raw.dtype)
    encode(xp, x.astype(np.float32, copy=False), Rows(like.dtype, raw))
    return raw
