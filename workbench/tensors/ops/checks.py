"""What constructors ask of their operands, each with an error that teaches."""

from __future__ import annotations

from workbench.errors import DTypeError, ShapeError
from workbench.tensors.opspec import Cost
from workbench.tensors.tensor import Tensor


def require_type(op: str, what: str, t: Tensor, *allowed: str, hint: str = "") -> None:
    """Raise DTypeError unless `t` is stored as one of the `allowed` types."""
    if t.dtype.name not in allowed:
        raise DTypeError(f"{op}: {what} is {t.label} of type {t.dtype}", " or ".join(allowed),
                         hint or f'ops.cast({what}, "{allowed[0]}") first')  # fmt: skip


def require_contiguous(op: str, t: Tensor, ok: bool, expected: str = "a contiguous tensor") -> None:
    """Raise ShapeError unless `ok`: the layout of `t` fits."""
    if not ok:
        raise ShapeError(f"{op}: {t.label} has ne={t.ne} and nb={t.nb}", expected, "ops.cont(a) first")


def can_repeat(small: Tensor, ne: tuple[int, ...]) -> bool:
    """True where whole copies of `small` fill the extents `ne` (`ggml_can_repeat`)."""
    if 0 in small.ne:
        return 0 in ne
    return not any(n % m for n, m in zip(ne, small.ne, strict=True))


def per_source(n: int) -> Cost:
    """`n` floating-point operations per element of the first source."""
    return lambda node: n * next(node.sources()).n_elements
