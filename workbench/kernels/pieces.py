"""Cutting arrays into pieces, so that temporaries stay small and in the processor's cache.

A kernel asks for scratch of one piece (`float_work`, `row_work`) and then fills whatever it was given: a device with
more room hands out more scratch and gets fewer, larger pieces. Results do not depend on the size of a piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from workbench.kernels.kernel import Scratch, grain
from workbench.tensors.tensor import Tensor

PIECE = 16384
"""Elements of a piece on the CPU: a few f32 arrays of this size fit the second-level cache."""


def piece() -> int:
    """Elements of a piece on the device that plans just now."""
    return PIECE * grain()


_PADDING = 64  # `Scratch.arrays` pads each array to this many bytes


def cut(shape: Sequence[int], limit: int) -> Iterator[tuple[Any, ...]]:
    """Indices that cut an array of this shape into pieces of at most `limit` elements, along the slowest axes."""
    size = math.prod(shape)
    if size <= limit:
        if size:
            yield (slice(None),) if shape else ()
        return
    axis = next(i for i in range(len(shape)) if math.prod(shape[i + 1 :]) <= limit)
    step = max(1, limit // math.prod(shape[axis + 1 :]))
    for lead in _every(shape[:axis]):
        for start in range(0, shape[axis], step):
            yield (*lead, slice(start, start + step))


def _every(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for i in range(shape[0]):
        for rest in _every(shape[1:]):
            yield (i, *rest)


# ---- element by element in f32


def float_work(temporaries: int) -> Callable[[Tensor], int]:
    """Scratch for `float_pieces`: the temporaries, and an f32 copy of each f16 operand and of an f16 result."""

    def work(node: Tensor) -> int:
        count = temporaries + sum(t.dtype.name != "f32" for t in (node, *node.sources()))
        return count * (4 * min(piece(), node.n_elements) + _PADDING)

    return work


def float_pieces(
    xp: ModuleType, out: Any, operands: Sequence[Any], scratch: Scratch, temporaries: int = 0
) -> Iterator[list[Any]]:
    """Piece by piece [result, operands…, temporaries…], all f32; an f16 result is rounded once, after the loop's body.

    Operands are broadcast to the shape of `out`. The result may be the memory of an operand: read before writing it.
    """
    arrays = [out, *(a if a.shape == out.shape else xp.broadcast_to(a, out.shape) for a in operands)]
    narrow = [a.itemsize < 4 for a in arrays]
    count = temporaries + sum(narrow)
    limit = max(1, (scratch.memory.size // count - _PADDING) // 4) if count else out.size
    if count == temporaries and out.size <= limit:  # what small graphs mostly do, without the detours below
        yield [*arrays, *scratch.arrays(*((out.shape, "f4"),) * temporaries)]
        return
    for index in cut(out.shape, limit):
        stored = [a[index] for a in arrays]
        spare = iter(scratch.arrays(*[(stored[0].shape, "f4")] * count))
        wide = [next(spare) if n else a for a, n in zip(stored, narrow, strict=True)]
        for a, w, n in zip(stored[1:], wide[1:], narrow[1:], strict=True):
            if n:
                w[...] = a
        yield [*wide, *spare]
        if narrow[0]:
            stored[0][...] = wide[0]


# ---- row by row


def row_work(temporaries: int, values: int, of: Callable[[Tensor], Tensor] = lambda node: next(node.sources())) -> Callable[[Tensor], int]:
    """Scratch for `row_pieces`: `temporaries` as long as a row of the first source (of `of(node)`), and `values` numbers per row."""

    def work(node: Tensor) -> int:
        a = of(node)
        rows = min(a.n_rows, max(1, piece() // max(1, a.ne[0])))
        return 4 * rows * (temporaries * a.ne[0] + values) + _PADDING * (temporaries + values)

    return work


def row_pieces(shape: Sequence[int], scratch: Scratch, temporaries: int, values: int) -> Iterator[list[Any]]:
    """Piece by piece [index, temporaries (rows, n)…, values (rows, 1)…] for rows of the last axis; all f32."""
    n = shape[-1]
    room = scratch.memory.size - _PADDING * (temporaries + values)
    for index in cut(shape[:-1], max(1, room // (4 * max(1, temporaries * n + values)))):
        rows = len(range(*index[-1].indices(shape[len(index) - 1])))
        lead = (rows, *shape[len(index) : -1])
        yield [index, *scratch.arrays(*[((*lead, n), "f4")] * temporaries, *[((*lead, 1), "f4")] * values)]


# ---- repetition


def repeated(out: Any, small: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes under which `small`, repeated whole along each axis (`ggml_can_repeat`), is broadcast over `out`.

    An axis of n = r·m elements over which m are repeated becomes two: r (1 in `small`) and m.
    """
    big: list[int] = []
    few: list[int] = []
    for n, m in zip(out.shape, small.shape, strict=True):
        plain = m in (1, n)
        big += [n] if plain else [n // m, m]
        few += [m] if plain else [1, m]
    return tuple(big), tuple(few)
