"""Ops that treat each element by itself: arithmetic with broadcasting, unary functions, gated units."""

from __future__ import annotations

from workbench.errors import ShapeError
from workbench.tensors.context import result
from workbench.tensors.opspec import OpSpec, op, per_element
from workbench.tensors.tensor import Tensor

ADD = op("ADD", "a + b, b repeated over a", in_place=True)


def add(a: Tensor, b: Tensor) -> Tensor:
    """`a + b`; b is repeated where its extents divide a's (`ggml_add`). Raises ShapeError otherwise."""
    return _binary(ADD, a, b)


def _binary(spec: OpSpec, a: Tensor, b: Tensor) -> Tensor:
    if any(n % m for n, m in zip(a.ne, b.ne, strict=True) if m) or 0 in b.ne:
        raise ShapeError(f"{spec.name}: a.ne={a.ne} and b.ne={b.ne}", "each extent of b divides that of a (b is repeated over a)",
                         "swap the operands if a is the smaller one, or reshape b")  # fmt: skip
    return result(a.dtype, a.ne, op=spec.op, spec=spec, src=(a, b))
