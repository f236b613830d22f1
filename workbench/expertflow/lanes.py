"""Ways for rows between two cards: packed where there are many, counted, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from workbench.devices.backend import Backend, Buffer, BufferType, copy_tensor
from workbench.scheduler.runtime import Part
from workbench.scheduler.transfer import runs
from workbench.tensors.context import padded
from workbench.tensors.dtype import F32, I32
from workbench.tensors.ops.copies import GET_ROWS, SET_ROWS
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Flag, Tensor

FEW = 3
"""Up to so many runs of neighbouring rows are copied as they lie; more are laid side by side first."""


class Traffic:
    """What crossed the links between n cards. rows, nbytes: [from, to]. Rows sent for experts elsewhere are `announced` where a forecast
    had named card and token, else `unannounced`; in_vain: named and not sent."""

    def __init__(self, n: int) -> None:
        self.rows, self.nbytes = np.zeros((n, n), np.int64), np.zeros((n, n), np.int64)
        self.announced = self.unannounced = self.in_vain = 0

    def add(self, source: int, target: int, rows: int, nbytes: int) -> None:
        """Some rows went from card to card."""
        self.rows[source, target] += rows
        self.nbytes[source, target] += nbytes

    @property
    def recall(self) -> float:
        """Share of the rows sent that had been announced; NaN where none was sent."""
        sent = self.announced + self.unannounced
        return self.announced / sent if sent else float("nan")


class Board:
    """Memory for what is used by one layer after another: each takes it from the start."""

    def __init__(self, kind: BufferType) -> None:
        self.kind, self.uses = kind, list[list[Tensor]]()
        self.buffer: Buffer | None = None

    def place(self) -> None:
        """Give memory to the tensors of all uses, more than before only where one needs it."""
        uses, self.uses = self.uses, []
        size = max((sum(padded(t.nbytes, 256) for t in use) for use in uses), default=0)
        if size > (self.buffer.size if self.buffer is not None else 0):
            self.close()
            self.buffer = self.kind.alloc_buffer(size, Usage.COMPUTE)
        for use in uses:
            at = 0
            for t in use:
                t.place(self.buffer, at)
                at += padded(t.nbytes, 256)

    def close(self) -> None:
        """Give the memory back."""
        if self.buffer is not None:
            self.buffer.close()
            self.buffer = None


class Lane:
    """The way of some rows of a tensor on one card to the same rows of another on another card. n: rows of the tensors.

    packs: whether many rows may be laid side by side, by a kernel on each card, so that one copy takes them all. That needs memory:
    `packed` and `index` on both cards, `numbers` in pinned memory of the host.
    """

    def __init__(self, ends: Sequence[tuple[Backend, Tensor]], n: int, packs: bool = True) -> None:
        self.ends, self.width, self.packs = list(ends), ends[0][1].nbytes // n // F32.block_bytes, packs
        self.packed = [Tensor(F32, (self.width, n, 1, 1)).named(f"{t.name} packed") for _, t in ends]
        self.index, self.numbers = [Tensor(I32, (n, 1, 1, 1)).named("rows") for _ in ends], Tensor(I32, (n, 1, 1, 1))
        self._made: dict[tuple[Any, ...], Any] = {}

    def uses(self, end: int) -> list[Tensor]:
        """What needs memory at an end."""
        return [self.packed[end], self.index[end]] if self.packs else []

    def send(self, rows: np.ndarray) -> int:
        """Ask for these rows, in ascending order, to be sent. Returns their bytes."""
        (source, a), (target, b) = self.ends
        few = list(runs(rows.tolist()))
        if self.packs and len(few) > FEW:
            numbers = self.numbers.require_data().host_bytes()[self.numbers.offset :][: rows.size * I32.block_bytes]
            numbers[:] = rows.astype(np.int32).view(np.uint8)
            for (card, _), index in zip(self.ends, self.index, strict=True):
                card.set_async(index, numbers)
            pack, unpack = self._kept(("kernels", len(rows)), lambda: self._kernels(len(rows)))
            source.compute_async(pack)
            _copy(source, self._rows(self.packed[0], 0, len(rows)), target, self._rows(self.packed[1], 0, len(rows)))
            target.compute_async(unpack)
        else:
            for first, last in few:
                _copy(source, self._rows(a, first, last - first + 1), target, self._rows(b, first, last - first + 1))
        return rows.size * self.width * F32.block_bytes

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Descriptions of rows that come again; a tensor that is placed anew makes all plans look where theirs are."""
        if key not in self._made:
            if len(self._made) >= 64:
                self._made.clear()
            self._made[key] = make()
        return self._made[key]

    def _rows(self, t: Tensor, first: int, n: int) -> Tensor:
        def make() -> Tensor:
            piece = Tensor(F32, (self.width, n, 1, 1), name=t.name)
            piece.place(t.require_data(), t.offset + first * self.width * F32.block_bytes)
            return piece

        return cast(Tensor, self._kept((t, first, n), make))

    def _kernels(self, n: int) -> list[Part]:
        """Packing at one end and unpacking at the other."""
        parts = []
        for (_, t), packed, index, op in zip(self.ends, self.packed, self.index, (GET_ROWS, SET_ROWS), strict=True):
            whole, side, numbers = self._rows(t, 0, packed.ne[1]), self._rows(packed, 0, n), Tensor(I32, (n, 1, 1, 1))
            numbers.place(index.require_data(), index.offset)
            if op is GET_ROWS:
                node = Tensor(F32, side.ne, op=op.name, spec=op, src=(whole, numbers), name=t.name)
                node.place(side.require_data(), side.offset)
            else:
                node = Tensor(F32, whole.ne, op=op.name, spec=op, src=(side, numbers, whole), view_src=whole, name=t.name)
            parts.append(Part([node.mark(Flag.COMPUTE)]))
        return parts


def _copy(source: Backend, a: Tensor, target: Backend, b: Tensor) -> None:
    if not target.copy_async(source, a, b):
        source.synchronize()
        target.synchronize()
        copy_tensor(a, b, target.trace)
