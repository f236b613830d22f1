"""Ops that only describe the same bytes anew: view, reshape, permute, transpose, slices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workbench.errors import ParameterError, ShapeError
from workbench.tensors.context import result
from workbench.tensors.opspec import op
from workbench.tensors.tensor import MAX_DIMS, Tensor, contiguous_strides, extents

_VIEW: dict[str, Any] = {
    "is_view": True,
    "flops": lambda node: 0,
    "moved": lambda node: 0,
    "without": {"kernel": "a view computes nothing", "reference": "a view computes nothing"},
}
VIEW = op("VIEW", "other extents and strides over the same bytes", **_VIEW)
RESHAPE = op("RESHAPE", "other extents over the same packed bytes", **_VIEW)
PERMUTE = op("PERMUTE", "axes in another order", **_VIEW)
TRANSPOSE = op("TRANSPOSE", "axes 0 and 1 exchanged", **_VIEW)


def view(a: Tensor, *ne: int, nb: tuple[int, ...] = (), offset: int = 0) -> Tensor:
    """A view with extents `ne`, strides `nb` for dimensions 1, 2, 3 (bytes; packed where missing) and a byte offset.

    Raises ShapeError where it would reach beyond `a` (`ggml_view_1d` … `ggml_view_4d`).
    """
    full = extents(ne)
    if len(nb) > 3 or any(not isinstance(b, int | np.integer) or b < 0 for b in (*nb, offset)):
        raise ShapeError(f"a view of {a.label} with nb={nb!r} at offset {offset!r}",
                         "up to three distances in bytes, and an offset; none below zero")  # fmt: skip
    strides = list(contiguous_strides(a.dtype, full))
    for i in range(1, MAX_DIMS):
        strides[i] = nb[i - 1] if i <= len(nb) else strides[i - 1] * full[i - 1] if i > 1 else strides[1]
    t = Tensor(a.dtype, full, tuple(strides))
    if offset < 0 or offset + t.nbytes > a.nbytes:
        raise ShapeError(f"a view of {t.nbytes} bytes at offset {offset} of {a.label}, which has {a.nbytes} bytes",
                         "a range inside the tensor")  # fmt: skip
    return result(a.dtype, full, tuple(strides), op="VIEW", spec=VIEW, src=(a,), view_src=a, view_offs=offset,
                  params={"offset": offset}, name=_suffixed(a, "view"))  # fmt: skip


def reshape(a: Tensor, *ne: int) -> Tensor:
    """`a` under other extents (fastest first), as many elements; `a` must be contiguous (`ggml_reshape_*d`)."""
    full = extents(ne)
    if not a.is_contiguous:
        raise ShapeError(f"reshape of {a.label} with nb={a.nb}", "a contiguous tensor", "ops.cont(a) first")
    if math.prod(full) != a.n_elements:
        raise ShapeError(f"reshape of {a.label}: ne={a.ne} to ne={full}", f"{a.n_elements} elements")
    return result(a.dtype, full, op="RESHAPE", spec=RESHAPE, src=(a,), view_src=a, name=_suffixed(a, "reshaped"))


def permute(a: Tensor, *axes: int) -> Tensor:
    """Axis `i` of `a` becomes axis `axes[i]` of the result (`ggml_permute`; NumPy's transpose says it the other way)."""
    if set(map(type, axes)) != {int} or sorted(axes) != list(range(MAX_DIMS)):
        raise ParameterError(f"permute axes {axes}", "each of 0, 1, 2, 3 once")
    ne, nb = [0] * MAX_DIMS, [0] * MAX_DIMS
    for i, target in enumerate(axes):
        ne[target], nb[target] = a.ne[i], a.nb[i]
    return result(a.dtype, tuple(ne), tuple(nb), op="PERMUTE", spec=PERMUTE, src=(a,), view_src=a,
                  params={"axes": tuple(axes)}, name=_suffixed(a, "permuted"))  # fmt: skip


def transpose(a: Tensor) -> Tensor:
    """Axes 0 and 1 exchanged, no copy (`ggml_transpose`)."""
    ne, nb = (a.ne[1], a.ne[0], *a.ne[2:]), (a.nb[1], a.nb[0], *a.nb[2:])
    return result(a.dtype, ne, nb, op="TRANSPOSE", spec=TRANSPOSE, src=(a,), view_src=a, name=_suffixed(a, "transposed"))


def slice_view(a: Tensor, index: Any) -> Tensor:
    """`a[index]` in NumPy's order of dimensions: integers and slices with a positive step; a view, never a copy."""
    keys = index if isinstance(index, tuple) else (index,)
    if len(keys) > a.n_dims:
        raise ShapeError(f"{len(keys)} indices for {a.label}", f"at most {a.n_dims}: NumPy shape {a.shape}")
    ne, nb, offset = list(a.ne), list(a.nb), 0
    dropped = []
    for position, key in enumerate(keys):
        axis = a.n_dims - 1 - position
        if isinstance(key, slice):
            if key.step == 0:
                raise ParameterError("slice step 0", "a step of 1 or more")
            start, stop, step = key.indices(a.ne[axis])
            if step < 1:
                raise ParameterError(f"slice step {step}", "a step of 1 or more")
            ne[axis], nb[axis], first = len(range(start, stop, step)), a.nb[axis] * step, start
        elif isinstance(key, int | np.integer) and not isinstance(key, bool) and -a.ne[axis] <= key < a.ne[axis]:
            first = int(key) % a.ne[axis]
            ne[axis] = 1
            dropped.append(axis)
        else:
            raise ShapeError(f"index {key!r} along axis {position} of {a.label}",
                             f"an integer within {a.ne[axis]} or a slice")  # fmt: skip
        if axis == 0 and a.dtype.quantised and (ne[0], first) != (a.ne[0], 0):
            raise ShapeError(f"a slice within rows of {a.dtype}", "whole rows: their elements share blocks")
        offset += first * a.nb[axis]
    kept = [i for i in range(MAX_DIMS) if i not in dropped]
    ne, nb = [ne[i] for i in kept] + [1] * len(dropped), [nb[i] for i in kept]
    nb += [nb[-1] * ne[len(kept) - 1] if kept else a.nbytes] * len(dropped)
    return result(a.dtype, tuple(ne), tuple(nb), op="VIEW", spec=VIEW, src=(a,), view_src=a, view_offs=offset,
                  params={"offset": offset}, name=_suffixed(a, "view"))  # fmt: skip


def _suffixed(a: Tensor, what: str) -> str:
    """ggml names a view after its source, even an unnamed one."""
    return f"{a.name} ({what})"
