"""Where products get their weights from.

A product never indexes its first operand itself. It asks a `WeightSource` for the rows of a matrix or of an expert and
gets f32 that BLAS can read. f32 tensors answer with slices of their own memory; other types are decoded, either into
scratch of the asking task or, once, into a `DequantCache`. A pool of expert slots can stand behind the same protocol,
so expert ids are never rewritten.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from workbench.kernels.blocks import Rows, decode, operand, take_rows
from workbench.kernels.kernel import grain
from workbench.tensors.dtype import F32, DType
from workbench.tensors.storage import Storage, Usage
from workbench.tensors.tensor import Tensor

CELL = 2**19
"""Elements decoded at a time: 2 MiB of f32, about what a processor's own caches hold until the product has read it."""


class WeightSource(Protocol):
    """What a product asks for its weights (the `src0` of `ggml_mul_mat` and `ggml_mul_mat_id`).

    shape: (ne3, ne2, rows, k). direct: True where answers are slices of f32 memory, so that `into` is not needed.
    A source may have `only`: the experts that MUL_MAT_ID shall compute with now; rows of the others stay as they are.
    """

    dtype: DType
    shape: tuple[int, ...]
    direct: bool

    def matrix(self, i3: Any, i2: Any, part: slice, into: Any = None) -> Any:
        """Rows `part` of the matrices at (i3, i2), integers or slices, as f32; `into` is scratch for decoding."""
        ...

    def expert(self, e: int, part: slice = slice(None), into: Any = None) -> Any:
        """Rows `part` of the matrix of expert `e`, f32 (rows, k). `part` lies within one of `cells`."""
        ...


def cell_rows(k: int) -> int:
    """Rows of one cell: the grid, by weight shape alone, in which matrices are decoded and cached."""
    return max(64, CELL * grain() // max(k, 1) // 64 * 64)


def cells(part: slice, rows: int, k: int) -> tuple[slice, ...]:
    """`part` of `rows` rows cut at the borders of the grid."""
    return _cells(*part.indices(rows)[:2], cell_rows(k))


@lru_cache(1024)
def _cells(start: int, stop: int, step: int) -> tuple[slice, ...]:
    borders = [start, *range((start // step + 1) * step, stop, step), stop]
    return tuple(slice(a, b) for a, b in pairwise(borders) if a < b)


def blas_can_read(t: Tensor) -> bool:
    """f32 with elements of a row side by side and rows that do not overlap: no copy is needed."""
    return t.dtype is F32 and t.nb[0] == 4 and t.nb[1] % 4 == 0 and t.nb[1] >= 4 * t.ne[0]


class DecodedWeights:
    """The weights of a tensor (a `WeightSource`).

    rows: what `blocks.operand` gives for it, in the memory of any array library `xp`. shelf: where decoded cells stay.
    """

    def __init__(self, xp: ModuleType, rows: Any, dtype: DType, direct: bool, shelf: Shelf | None = None) -> None:
        self.xp, self.rows, self.dtype, self.direct, self.shelf = xp, rows, dtype, direct, shelf
        self.shape = rows.shape

    def matrix(self, i3: Any, i2: Any, part: slice, into: Any = None) -> Any:
        """See `WeightSource.matrix`."""
        if self.direct:
            return self.rows[i3, i2, part]
        if self.shelf is not None and not isinstance(i2, slice):
            step = cell_rows(self.shape[-1])
            first = part.start // step * step
            cell = self.shelf.find((i3, i2, first))
            if cell is None:
                cell = self._decoded((i3, i2, first), step)
            if cell is not None:
                return cell[part.start - first : part.stop - first]
        rows = self.rows[i3, i2, part]
        out = into[: math.prod(rows.shape)].reshape(rows.shape)
        decode(self.xp, rows, out)
        return out

    def expert(self, e: int, part: slice = slice(None), into: Any = None) -> Any:
        """See `WeightSource.expert`."""
        return self.matrix(0, e, part, into)

    def gather(self, experts: Any, into: Any) -> Any:
        """The matrices of the experts (an index array of `xp`), f32 (experts, rows, k), in `into`: one copy, no loop."""
        stored = self.rows.raw[0] if isinstance(self.rows, Rows) else self.rows[0]
        if self.direct:
            take_rows(self.xp, stored, experts, into)
        else:
            picked = stored[experts]
            decode(self.xp, Rows(self.dtype, picked) if isinstance(self.rows, Rows) else picked, into)
        return into

    def _decoded(self, key: tuple[int, int, int], step: int) -> Any:
        """The whole cell, decoded now and kept; None where it may not or cannot stay."""
        assert self.shelf is not None
        i3, i2, first = key
        whole = self.rows[i3, i2, first : first + step]
        return self.shelf.add(key, whole.shape, lambda out: decode(self.xp, whole, out))


def weights_of(tensor: Tensor, cache: DequantCache | None = None, memory: Any = None) -> DecodedWeights:
    """The weight source of a tensor in host memory (or in `memory`); decoded cells of constant weights stay in `cache`."""
    direct = blas_can_read(tensor)
    shelf = None if direct or cache is None else cache.shelf(tensor)
    return DecodedWeights(np, operand(tensor, memory), tensor.dtype, direct, shelf)


class Shelf:
    """The part of a cache that belongs to one tensor's bytes."""

    def __init__(self, cache: DequantCache, storage: Storage) -> None:
        self._cache, self._storage = cache, weakref.ref(storage)
        self._cells: dict[tuple[int, int, int], tuple[int, np.ndarray]] = {}  # -> (version of the storage, f32)

    def _version(self) -> int:
        storage = self._storage()
        return storage.version if storage is not None and not storage.closed else -1

    def find(self, key: tuple[int, int, int]) -> np.ndarray | None:
        """The decoded cell, or None where it was never decoded or the storage has been written since."""
        held = self._cells.get(key)
        if held is None or held[0] != self._version():
            self._cache.misses += 1
            return None
        self._cache.hits += 1
        return held[1]

    def add(self, key: tuple[int, int, int], shape: tuple[int, ...], decode_to: Any) -> np.ndarray | None:
        """Decode a cell that stays, or None: no room in the budget, or another thread is at it just now."""
        version, cache = self._version(), self._cache
        with cache.lock:
            held = self._cells.pop(key, None)
            if held is not None and held[0] in (version, _DECODING):
                self._cells[key] = held
                return held[1] if held[0] == version else None
            cell = held[1] if held is not None else cache.take_room(shape)
            if cell is None:
                return None
            self._cells[key] = (_DECODING, cell)
        try:
            decode_to(cell)
        except BaseException:
            with cache.lock:
                del self._cells[key]
                cache.used -= cell.nbytes
            raise
        self._cells[key] = (version, cell)
        return cell

    def clear(self) -> None:
        """Give all room back (the storage is closed or gone, or others need it), but that of cells which are being decoded."""
        with self._cache.lock:
            kept = {key: held for key, held in self._cells.items() if held[0] == _DECODING}
            self._cache.used -= sum(cell.nbytes for key, (_, cell) in self._cells.items() if key not in kept)
            self._cells = kept


_DECODING = -2


class DequantCache:
    """Decoded f32 copies of constant weights within a budget of bytes.

    Nothing like it exists in ggml, whose kernels multiply f16 and quantised blocks directly; NumPy would decode them
    anew for every product. First come, first kept: a model larger than the budget is walked through in a circle, and
    replacing old cells by new ones would then never hit. Room comes back when a storage is closed. Only storages of
    `Usage.WEIGHTS` are cached; a write to one (`storage.version`) makes its cells stale. Safe to ask from many threads.
    empty(shape, dtype): makes an array of the library that decodes; None where the device has no room.
    """

    def __init__(self, budget_bytes: int, empty: Callable[..., Any] = np.empty) -> None:
        self.budget, self.used, self.hits, self.misses = budget_bytes, 0, 0, 0
        self._empty = empty
        self.lock = threading.RLock()
        self._shelves: dict[tuple[Any, ...], Shelf] = {}

    def shelf(self, tensor: Tensor) -> Shelf | None:
        """The shelf for a tensor's bytes, shared by all tensors of the same bytes and layout; None for changing data."""
        storage = tensor.require_data()
        if storage.usage is not Usage.WEIGHTS or self.budget <= 0:
            return None
        key = (id(storage), tensor.offset, tensor.dtype, tensor.ne, tensor.nb)
        with self.lock:
            found = self._shelves.get(key)
            if found is None or found._storage() is not storage:
                found = self._shelves[key] = Shelf(self, storage)
                weakref.finalize(storage, _drop, weakref.ref(self), key)
            return found

    def take_room(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """Memory for a cell within the budget, or None. The caller holds the lock."""
        nbytes = 4 * math.prod(shape)
        if self.used + nbytes > self.budget:
            for shelf in [s for s in self._shelves.values() if s._version() < 0]:
                shelf.clear()
            if self.used + nbytes > self.budget:
                return None
        room = self._empty(shape, np.float32)
        self.used += nbytes if room is not None else 0
        return room

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            for shelf in self._shelves.values():
                shelf.clear()

    def __repr__(self) -> str:
        return f"<DequantCache {self.used:,} of {self.budget:,} bytes, {self.hits} hits, {self.misses} misses>"


def _drop(cache: weakref.ref[DequantCache], key: tuple[Any, ...]) -> None:
    """A storage is gone. It must not keep the cache alive, which belongs to a backend."""
    if (held := cache()) is not None and (shelf := held._shelves.pop(key, None)) is not None:
        shelf.clear()
