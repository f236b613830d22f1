"""The slow definitions of products and copies, in f64 over whole arrays; see `reference`.

Sources have the axes (ne3, ne2, ne1, ne0) and hold values: bf16 and quantised ones come decoded.
"""

from __future__ import annotations

import numpy as np

from workbench.kernels.kernel import reference
from workbench.kernels.reference import Array, real
from workbench.tensors.tensor import Tensor


def repeated_batches(a: Array, b: Array) -> Array:
    """Each matrix of `a` as often in a row as `b` has matrices for it (its batch index is divided, not taken modulo)."""
    return real(a).repeat(b.shape[0] // a.shape[0], 0).repeat(b.shape[1] // a.shape[1], 1)


@reference("MUL_MAT")
def mul_mat(node: Tensor, a: Array, b: Array) -> Array:
    """Element [i, j] is the dot product of row i of a and row j of b."""
    return np.einsum("uvik,uvjk->uvji", repeated_batches(a, b), real(b))


@reference("MUL_MAT_ID")
def mul_mat_id(node: Tensor, w: Array, x: Array, ids: Array) -> Array:
    """Row (i, t) is the matrix of expert ids[i, t] times row i (or the only row) of token t."""
    out = np.empty(node.ne[::-1])
    for t, i in np.ndindex(out.shape[1:3]):
        out[0, t, i] = real(w[0, ids[0, 0, t, i]]) @ real(x[0, t, i % x.shape[2]])
    return out


@reference("OUT_PROD")
def out_prod(node: Tensor, a: Array, b: Array) -> Array:
    """The outer products of row k of a and row k of b, summed over k."""
    return np.einsum("uvki,uvkj->uvji", repeated_batches(a, b), real(b))


@reference("CPY", "CONT", "DUP")
def copy(node: Tensor, a: Array, into: Array | None = None) -> Array:
    """The elements of a in order, under the shape and in the type of the result."""
    whole = node.dtype.numpy is not None and node.dtype.numpy.kind == "i"
    return (np.trunc(a) if whole else a).reshape(node.ne[::-1])


@reference("GET_ROWS")
def get_rows(node: Tensor, a: Array, rows: Array) -> Array:
    """Row i of a batch is row rows[i] of the same batch of a."""
    out = np.empty(node.ne[::-1])
    for i3, i2, i in np.ndindex(out.shape[:3]):
        out[i3, i2, i] = a[i3, i2, rows[0, i3, i2, i]]
    return out


@reference("SET_ROWS")
def set_rows(node: Tensor, data: Array, rows: Array, into: Array) -> Array:
    """`into`, except that row rows[i] of a batch is row i of data; batches of indices repeat."""
    out = real(into)
    for i3, i2, i in np.ndindex(data.shape[:3]):
        out[i3, i2, rows[0, i3 % rows.shape[1], i2 % rows.shape[2], i]] = data[i3, i2, i]
    return out
