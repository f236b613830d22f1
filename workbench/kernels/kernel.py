"""What a kernel is, and how the work of one node is cut.

A kernel is a plain function `fn(xp, *operands, out, **params)` over an array namespace `xp` (NumPy or CuPy). Arrays come
with all four dimensions in NumPy's order (ne3, ne2, ne1, ne0). Rules:

- `out` may be the very memory of an operand with the same layout (ggml's in-place reuse): read before you overwrite.
- No allocation that grows with the data: temporaries come from `scratch`, whose size `work(node)` states in bytes.
- `params` are the node's op parameters by name. Types without a NumPy dtype come as `blocks.Rows`, absent sources as None.
- What suits the device (`Habits`) may be asked: the CPU wants pieces that fit its caches, a GPU few and large ones.
- inf and NaN are results, not mistakes: whoever runs kernels does so under `np.errstate(all="ignore")`
  and `np.setbufsize(NUMPY_BUFFER)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import workbench.tensors.ops  # noqa: F401 - makes the rows whose columns this room fills
from workbench.errors import ParameterError
from workbench.tensors.opspec import OPS
from workbench.tensors.tensor import Tensor

Step = Callable[[], Any]

NUMPY_BUFFER = 4096
"""Elements that NumPy buffers per operand which it converts or gathers (`np.setbufsize`, set by whoever runs kernels).
Its own 8192 would allow three operands 96 KB, more than a steady-state run may take."""


class Habits(NamedTuple):
    """What suits a device.

    grain: how many times larger than the CPU's caches allow pieces of work may be. check(indices, limit, operand, what): is told
    of indices whose range matters, by devices that cannot look at them now without waiting; None: they are looked at.
    """

    grain: int = 1
    check: Callable[[Any, int, int, str], None] | None = None


CPU_HABITS = Habits()
HABITS: ContextVar[Habits] = ContextVar("habits", default=CPU_HABITS)
"""The habits of the device that plans or computes just now; a device other than the CPU sets them."""


def grain() -> int:
    """The factor on the size of pieces: 1 on the CPU."""
    return HABITS.get().grain


class Scratch:
    """A piece of the work buffer (`ggml_compute_params.wdata`) from which a kernel carves its temporaries."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self._carved: dict[tuple[tuple[tuple[int, ...], Any], ...], list[Any]] = {}

    def arrays(self, *wanted: tuple[tuple[int, ...], Any]) -> list[Any]:
        """One array per (shape, dtype), side by side, 64-byte aligned; their contents are undefined.

        The same wish is answered with the same arrays, so that a plan that runs again makes none.
        """
        found = self._carved.get(wanted)
        if found is None:
            found = self._carved[wanted] = list(self._carve(wanted))
        return found

    def _carve(self, wanted: tuple[tuple[tuple[int, ...], Any], ...]) -> Iterator[Any]:
        at = 0
        for shape, dt in wanted:
            nbytes = math.prod(shape) * _itemsize(dt)
            if at + nbytes > self.memory.size:
                raise AssertionError(f"scratch of {self.memory.size} bytes is too small: {wanted}")
            yield self.memory[at : at + nbytes].view(dt).reshape(shape)
            at += -(-nbytes // 64) * 64

    def array(self, shape: tuple[int, ...], dt: Any = "f4") -> Any:
        """One array of this shape."""
        return self.arrays((shape, dt))[0]


def scratch_bytes(*wanted: tuple[int, int]) -> int:
    """Work bytes for arrays of (elements, bytes per element), padded as `Scratch.arrays` lays them out."""
    return sum(-(-n * size // 64) * 64 for n, size in wanted)


def _itemsize(dt: Any) -> int:
    import numpy as np

    return np.dtype(dt).itemsize


class IndexOutOfRange(ParameterError):
    """An id that names no row or expert, found before anything was computed. `named` says whose it is."""

    def __init__(self, operand: int, what: str, indices: Any, limit: int, label: str = "the index operand") -> None:
        self.operand, self.what, self.indices, self.limit = operand, what, indices, limit
        wrong = ((indices < 0) | (indices >= limit)).nonzero()
        place = tuple(int(axis[0]) for axis in wrong)
        super().__init__(f"{what} {int(indices[place])} at index {list(place)} of {label}", f"0 to {limit - 1}: there are {limit}")

    def named(self, node: Tensor) -> IndexOutOfRange:
        """The same error with the names of tensor and node."""
        source = node.src[self.operand]
        label = f"{source.label if source else '?'}, a source of {node.label}"
        return IndexOutOfRange(self.operand, self.what, self.indices, self.limit, label)

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return ParameterError, (self.found, self.expected, self.hint)


def require_within(indices: Any, limit: int, operand: int, what: str = "row") -> None:
    """Raise IndexOutOfRange for an index below 0 or at `limit` or above, or leave that to the device."""
    check = HABITS.get().check
    if check is not None:
        check(indices, limit, operand, what)
    elif indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < limit:
        raise IndexOutOfRange(operand, what, indices, limit)


@dataclass(frozen=True)
class Kernel:
    """A kernel with what the planner must know about it.

    work: bytes of scratch one task needs for this node. cut: which axis of the work may be cut into tasks:
    "elements" (any axis), "rows" (axis 2: ne1), "columns" (the kernel takes `part`, a slice of weight rows; they are
    the last axis of `out`), None (one task). Cutting `out` along an axis cuts the operands that are as long there and keeps
    those of length 1; any other length forbids it. ufunc: name of the NumPy ufunc that is the whole kernel wherever types
    are equal and broadcasting suffices; it is then called directly. plain: like `fn`, but gives a cheaper call that does
    the same here, or None. parts: for "columns", the slices that are one task each, a function of shapes alone
    (and of the nanoseconds a task should take at least, where given).
    """

    fn: Callable[..., Any]
    work: Callable[[Tensor], int] | None = None
    cut: str | None = None
    ufunc: str = ""
    plain: Callable[..., Step | None] | None = None
    parts: Callable[..., list[slice]] | None = None

    def bind(self, xp: ModuleType, operands: Sequence[Any], out: Any, params: dict[str, Any], **extra: Any) -> Step:
        """A call without arguments that computes `out`; made once, run for each pass over the graph."""
        if self.cut == "elements":
            *operands, out = _simplest([*operands, out])
        if self.ufunc and all(a.dtype == out.dtype and _broadcasts(a.shape, out.shape) for a in operands):
            return partial(getattr(xp, self.ufunc), *operands, out)
        if self.plain and (step := self.plain(xp, *operands, out=out, **params, **extra)):
            return step
        return partial(self.fn, xp, *operands, out=out, **params, **extra)


def _simplest(arrays: list[Any]) -> list[Any]:
    """The same elements in fewer dimensions, which costs NumPy less: one if all are packed alike, else no leading ones."""
    shape = arrays[-1].shape
    if all(a.shape == shape and a.flags.c_contiguous for a in arrays):
        return [a.reshape(-1) for a in arrays]
    ones = next((i for i in range(len(shape)) if any(a.shape[i] != 1 for a in arrays)), len(shape) - 1)
    return [a[(0,) * ones] for a in arrays]


def _broadcasts(small: tuple[int, ...], big: tuple[int, ...]) -> bool:
    return all(m in (1, n) for m, n in zip(small, big, strict=True))


def kernel(*names: str, **planning: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Fill the `kernel` column of the named rows with the decorated function."""

    def fill(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OPS[name].kernel = Kernel(fn, **planning)
        return fn

    return fill


def reference(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Fill the `reference` column: `fn(node, *source_arrays) -> array`, the slow definition over ne and nb."""

    def fill(fn: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OPS[name].reference = fn
        return fn

    return fill
