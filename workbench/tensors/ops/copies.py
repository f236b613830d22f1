"""Ops that move values: copies between types and layouts, rows picked and rows written by index."""

from __future__ import annotations

import math

from workbench.errors import DTypeError, ShapeError
from workbench.tensors.context import result
from workbench.tensors.dtype import F16, F32, I32, I64, DType, DTypeLike, dtype
from workbench.tensors.opspec import op
from workbench.tensors.tensor import Tensor, extents


def _no_flops(node: Tensor) -> int:
    return 0


def _rows_read(node: Tensor) -> int:
    """The picked rows, their indices and the result; not the whole table."""
    table, rows = node.src
    assert table is not None and rows is not None
    return node.nbytes + rows.nbytes + node.n_rows * table.dtype.row_bytes(table.ne[0])


def _rows_written(node: Tensor) -> int:
    data, rows = node.src[:2]
    assert data is not None and rows is not None
    return data.nbytes + rows.nbytes + data.n_rows * node.dtype.row_bytes(node.ne[0])


CPY = op("CPY", "a written into b, converted to b's type", flops=_no_flops)
CONT = op("CONT", "a, packed", flops=_no_flops)
DUP = op("DUP", "a copy of a", flops=_no_flops)
GET_ROWS = op("GET_ROWS", "the rows of a that the indices name", flops=_no_flops, moved=_rows_read)
SET_ROWS = op("SET_ROWS", "rows written into a at the places that the indices name", flops=_no_flops, moved=_rows_written)


def cpy(a: Tensor, b: Tensor) -> Tensor:
    """`a` written into `b`, converted to b's type; the result is a view of `b` (`ggml_cpy`).

    Shapes may differ: elements go in logical order. Raises ShapeError where their number differs.
    """
    if a.n_elements != b.n_elements:
        raise ShapeError(f"CPY: a.ne={a.ne} into b.ne={b.ne}", f"equally many elements ({a.n_elements} and {b.n_elements} were found)")
    name = f"{b.name} (copy of {a.name})" if b.name else f"{a.name} (copy)"
    return result(b.dtype, b.ne, b.nb, op="CPY", spec=CPY, src=(a, b), view_src=b, name=name)


def cast(a: Tensor, kind: DTypeLike) -> Tensor:
    """`a` in another storage type, packed (`ggml_cast`). As in ggml, the node is its own source 1."""
    t = result(_rows_of_blocks(a, dtype(kind)), a.ne, op="CPY", spec=CPY, src=(a,), name=f"{a.name} (copy)")
    t.src = (a, t)
    return t


def cont(a: Tensor, *ne: int) -> Tensor:
    """`a` packed, under other extents where `ne` is given (`ggml_cont`, `ggml_cont_*d`)."""
    full = extents(ne) if ne else a.ne
    if math.prod(full) != a.n_elements:
        raise ShapeError(f"CONT of {a.label}: ne={a.ne} to ne={full}", f"{a.n_elements} elements")
    return result(a.dtype, full, op="CONT", spec=CONT, src=(a,), name=f"{a.name} (cont)")


def dup(a: Tensor) -> Tensor:
    """A packed copy of `a` (`ggml_dup`)."""
    return result(a.dtype, a.ne, op="DUP", spec=DUP, src=(a,))


def get_rows(a: Tensor, rows: Tensor) -> Tensor:
    """Rows of `a` by i32 index -> f32 (i32 rows stay i32); each batch has its own indices (`ggml_get_rows`).

    `a[n, m, b2, b3]`, `rows[r, b2, b3]` -> `[n, r, b2, b3]`.
    """
    if rows.dtype is not I32:
        raise DTypeError(f"GET_ROWS: indices are {rows.dtype}", "i32 row numbers")
    if a.ne[2] != rows.ne[1] or a.ne[3] != rows.ne[2] or rows.ne[3] != 1:
        raise ShapeError(f"GET_ROWS: a.ne={a.ne}, rows.ne={rows.ne}",
                         f"rows of ne [n, {a.ne[2]}, {a.ne[3]}, 1]: indices for each batch of a")  # fmt: skip
    return result(I32 if a.dtype is I32 else F32, (a.ne[0], *rows.ne[:3]), op="GET_ROWS", spec=GET_ROWS, src=(a, rows))


def set_rows(dst: Tensor, src: Tensor, rows: Tensor) -> Tensor:
    """Row i of `src` (f32, f16) replaces row `rows[i]` of `dst`; the result is a view of `dst` (`ggml_set_rows`).

    Sources stand in ggml's order (src, rows, dst). Batches of `rows` (i64, i32) repeat over those of `src`.
    """
    if src.dtype not in (F32, F16) or rows.dtype not in (I64, I32):
        raise DTypeError(f"SET_ROWS: rows of {src.dtype} with {rows.dtype} indices", "f32 or f16 rows with i64 or i32 indices")
    if dst.ne[0] != src.ne[0] or dst.ne[2:] != src.ne[2:]:
        raise ShapeError(f"SET_ROWS: dst.ne={dst.ne}, src.ne={src.ne}", "equal row lengths ne[0] and batches ne[2], ne[3]")
    if rows.ne[0] != src.ne[1] or rows.ne[3] != 1 or any(m == 0 or n % m for n, m in zip(src.ne[2:], rows.ne[1:3], strict=True)):
        raise ShapeError(f"SET_ROWS: rows.ne={rows.ne} for src.ne={src.ne}",
                         f"{src.ne[1]} indices; rows.ne[1] and ne[2] divide the batches of src")  # fmt: skip
    if not (dst.has_contiguous_rows and src.has_contiguous_rows):
        raise ShapeError(f"SET_ROWS: nb of dst {dst.nb}, of src {src.nb}", "elements of a row side by side", "cont(src) first")
    return result(dst.dtype, dst.ne, dst.nb, op="SET_ROWS", spec=SET_ROWS, src=(src, rows, dst), view_src=dst, name=f"{dst.name} (view)")


def _rows_of_blocks(a: Tensor, kind: DType) -> DType:
    kind.row_bytes(a.ne[0])  # raises where blocks do not divide the row
    return kind
