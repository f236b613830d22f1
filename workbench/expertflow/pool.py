"""The pool: slots on a device that hold whole experts, taken once and used again for ever.

An expert is its matrices side by side in one slot, and they come one after another. Weights that are copied into a graph's splits get
a `SlotView` as memory, so no compute buffer holds an expert; products ask it for `expert(e)` and are answered with the slot, so ids are
never rewritten. Each answer checks the tag (layer, expert, load) of the matrix: other bytes can never be read in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.devices.backend import Backend, Buffer, BufferType, Event
from workbench.errors import ParameterError, StorageError, shown
from workbench.expertflow.disk import DiskTier
from workbench.kernels.weights import DecodedWeights, blas_can_read
from workbench.tensors.dtype import dtype
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Tensor

Expert = tuple[int, int]
"""Layer and number of an expert."""
Tag = tuple[int, int, int]
"""Layer and number of an expert, and the number of the load that brought it."""
FRESH = 0xFF
ALIGNMENT = 256
"""Slots, and the matrices in them, start at multiples of this many bytes."""


@dataclass(eq=False, slots=True)
class Slot:
    """Room for one expert. holds: whose bytes will be there when all that was asked for has happened, and load: the number of the
    load that brings them; unsent: its matrices that were not asked for yet; tags: whose bytes are there now, by matrix (of `n`); ready:
    by matrix, the ends of copies that nobody has waited for; read: the end of the last product that reads what will be overwritten;
    ahead: the load was asked for before anybody wanted the expert, and nobody has since; matrices: its room as tensors, by weight."""

    buffer: Buffer
    size: int
    holds: Expert | None = None
    load: int = 0
    unsent: list[int] = field(default_factory=list)
    tags: dict[int, Tag] = field(default_factory=dict)
    n: int = 0
    ready: dict[int, Event] = field(default_factory=dict)
    read: Event | None = None
    ahead: bool = False
    matrices: dict[Tensor, Tensor] = field(default_factory=dict)

    @property
    def tag(self) -> Tag | None:
        """Whose bytes are there now, from the first matrix to the last; None where they are not one expert's."""
        return self.tags[0] if len(self.tags) == self.n and len(set(self.tags.values())) == 1 else None

    @property
    def there(self) -> bool:
        """Whether all that was asked for has happened, as far as the host can see (its last copy is the last to end)."""
        return not self.unsent and (not self.ready or next(reversed(self.ready.values())).done)


class ExpertPool:
    """Slots for the experts of some layers on one device. Each is a piece of memory of its own, so a pool can give some back.

    Their type of memory is the pool's own (`kind`), but the bytes count against the device's limit like all others.

    weights: layer -> merged matrices [k, n, E] on the host, which together are its experts. budget: bytes. Layers whose experts
    have one size share the slots of a class; classes share the budget by the bytes of their experts, and each has `least` slots.
    scrub: write 0xFF over what is evicted; verify: compare what a
    product reads with the host's bytes. Raises ParameterError, with the least budget that works.
    """

    def __init__(self, device: Backend, weights: Mapping[int, Sequence[Tensor]], budget: int, *, least: int = 1,
                 scrub: bool = False, verify: bool = False) -> None:  # fmt: skip
        self.device, self.scrub, self.verify = device, scrub, verify
        self.weights = {layer: tuple(merged) for layer, merged in weights.items()}
        self.offsets = {layer: _offsets(merged) for layer, merged in self.weights.items()}
        self.sizes = {layer: offsets[-1] for layer, offsets in self.offsets.items()}
        counts = _slots(self.sizes, {layer: merged[0].ne[2] for layer, merged in self.weights.items()}, budget, least)
        memory = device.buffer_type
        self.kind = BufferType(f"{device.name} experts", memory.alignment, memory.max_size, memory.is_host,
                               lambda _, size, usage: memory.alloc_buffer(size, usage))  # fmt: skip
        self.classes: dict[int, list[Slot]] = {size: [] for size in counts}
        self._free: dict[int, list[Slot]] = {size: [] for size in counts}  # the last one is the next to be taken
        self._views: dict[Tensor, SlotView] = {}
        try:
            for size, n in counts.items():
                self.grow(size, n)
        except BaseException:
            self._give_back()
            raise
        self.where: dict[Expert, Slot] = {}
        self.n_loads = 0
        self.link: Event | None = None  # the end of the last copy that was asked for
        self.disk: DiskTier | None = None  # where experts come from that the host's memory does not hold
        self._views = {w: SlotView(self, layer, m) for layer, merged in self.weights.items() for m, w in enumerate(merged)}
        self.views = {layer: [self._views[w] for w in merged] for layer, merged in self.weights.items()}

    # ---- what it holds

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(size * len(slots) for size, slots in self.classes.items())

    @property
    def held(self) -> int:
        """Bytes of the slots that hold an expert, or will when all loads have happened."""
        return sum(slot.size for slot in self.where.values())

    def n_slots(self, layer: int) -> int:
        """Slots that the experts of a layer can use."""
        return len(self.classes[self.sizes[layer]])

    def expert_bytes(self, layer: int) -> int:
        """Bytes that move when an expert of a layer is loaded."""
        return sum(w.nb[2] for w in self.weights[layer])

    def view(self, weight: Tensor) -> SlotView | None:
        """The memory for copies of `weight`, or None for a weight that is none of the pool's."""
        return self._views.get(weight)

    # ---- moving

    def take(self, layer: int, expert: int) -> Slot:
        """Give an expert a free slot; its matrices are still to be sent. Raises StorageError where no slot is free: evict first."""
        free = self._free[self.sizes[layer]]
        if not free or (layer, expert) in self.where:
            raise StorageError(f"expert {expert} of layer {layer} to be loaded", "a free slot, and the expert in none yet")
        slot = self.where[layer, expert] = free.pop()
        self.n_loads += 1
        slot.holds, slot.load, slot.unsent = (layer, expert), self.n_loads, list(range(len(self.weights[layer])))
        slot.ready.clear()
        return slot

    def send(self, slot: Slot, m: int) -> int:
        """Ask for matrix `m` of a slot's expert on the copy stream, after the last product that reads what was there. Returns its bytes."""
        assert slot.holds is not None
        layer, expert = slot.holds
        weight, tag = self.weights[layer][m], (layer, expert, slot.load)
        nbytes, first = weight.nb[2], len(slot.unsent) == len(self.weights[layer])
        start = weight.offset + expert * nbytes
        if first and self.disk is not None:
            read = self.disk.want(layer, expert, self.expert_bytes(layer))
            slot.read = max((read, slot.read or read), key=lambda event: getattr(event, "time", 0))
        self._send(slot, m, self.matrix(slot, layer, m), weight.require_data().host_bytes()[start : start + nbytes])
        slot.unsent.remove(m)

        def arrived() -> None:
            if first:  # what was there before is gone
                slot.tags, slot.n = {}, len(self.weights[layer])
            slot.tags[m] = tag

        self.device.then(arrived, copies=True)
        return nbytes

    def load(self, layer: int, expert: int) -> Slot:
        """Take a slot and send all of an expert."""
        slot = self.take(layer, expert)
        for m in range(len(self.weights[layer])):
            self.send(slot, m)
        return slot

    def _send(self, slot: Slot, m: int, place: Tensor, data: np.ndarray) -> None:
        """Ask for a copy into a slot; later ones come after it, so only the first has to wait for those who read what was there."""
        after, slot.read = slot.read, None
        prefetch = getattr(self.device, "prefetch", None)
        if prefetch is None:
            self.device.set_async(place, data)
        else:
            self.link = slot.ready[m] = prefetch(place, data, 0, after)

    def remaining(self, slot: Slot) -> int:
        """Nanoseconds until all of a slot's expert is there, by the clock of a simulated device; 0 on one that does not know."""
        now, speed = self.device.buffer_type.now, getattr(self.device, "speed", None)
        ends = [self.link, *slot.ready.values()] if slot.unsent else slot.ready.values()
        unsent = sum(speed.transfer_ns(self.weights[slot.holds[0]][m].nb[2]) for m in slot.unsent) if speed and slot.holds else 0
        return max((getattr(e, "time", now) - now for e in ends), default=0) + unsent

    def evict(self, layer: int, expert: int) -> None:
        """Take an expert's slot back. Its bytes stay there until the next load, or, scrubbed, until nobody reads them any more."""
        slot = self._vacate((layer, expert))
        if self.scrub:
            whole = Tensor(dtype("i8"), (slot.size, 1, 1, 1)).named("evicted slot")
            whole.place(slot.buffer)
            self._send(slot, 0, whole, np.full(slot.size, FRESH, np.uint8))
            self.device.then(lambda: setattr(slot, "tags", {}), copies=True)

    def _vacate(self, expert: Expert) -> Slot:
        slot = self.where.pop(expert)
        slot.holds, slot.unsent = None, []
        self._free[slot.size].append(slot)
        return slot

    def matrix(self, slot: Slot, layer: int, m: int) -> Tensor:
        """Matrix `m` [k, n] of the expert in a slot, as a tensor."""
        weight = self.weights[layer][m]
        if weight not in slot.matrices:
            t = slot.matrices[weight] = Tensor(weight.dtype, (*weight.ne[:2], 1, 1), (*weight.nb[:3], weight.nb[2])).named(weight.name)
            t.place(slot.buffer, self.offsets[layer][m])
        return slot.matrices[weight]

    def grow(self, size: int, n: int) -> None:
        """Take `n` more slots of a class. Raises AllocationError where the device has no room; those taken before stay."""
        for _ in range(n):
            self.classes[size].append(Slot(self.kind.alloc_buffer(size, Usage.WEIGHTS), size))
            self._free[size].insert(0, self.classes[size][-1])

    def shrink(self, size: int, n: int) -> int:
        """Give `n` slots of a class back to the device, empty ones, when all work on them is done. Returns the bytes given back.

        Raises StorageError where fewer are empty: evict first.
        """
        free = self._free[size]
        if len(free) < n:
            raise StorageError(f"{n} slots to be given back, of which {len(free)} are empty", "empty slots", "evict experts first")
        self.device.synchronize()
        for slot in [free.pop() for _ in range(n)]:
            self.classes[size].remove(slot)
            for view in self._views.values():
                view.forget(slot)
            slot.buffer.close()
        return n * size

    def forget_unfinished(self) -> list[Expert]:
        """After a run that failed: give the slots back whose loads did not happen; whose they were to be. Nobody is busy any more."""
        lost = [e for e, slot in self.where.items() if slot.tag != (*e, slot.load)]
        for expert in lost:
            self._vacate(expert)
        for slots in self.classes.values():
            for slot in slots:
                slot.read = None
                slot.ready.clear()
        self.link = None
        return lost

    def close(self) -> None:
        """Give the memory back."""
        self.where.clear()
        self._give_back()
        for view in self._views.values():
            view.closed = True

    def _give_back(self) -> None:
        for slots in self.classes.values():
            for slot in slots:
                slot.buffer.close()
            slots.clear()
        for free in self._free.values():
            free.clear()


_NO_SLOT: tuple[Slot | None, int] = (None, 0)


class SlotView:
    """The memory of a merged weight as a graph sees it, of which only some experts exist, in slots (a `Storage`)."""

    is_host, version, closed = False, 0, False
    usage = Usage.WEIGHTS

    def __init__(self, pool: ExpertPool, layer: int, m: int) -> None:
        weight = pool.weights[layer][m]
        self.pool, self.layer, self.m, self.weight = pool, layer, m, weight
        self.name, self.size, self.buffer_type = f"slots of {weight.name}", weight.nbytes, pool.kind
        self.shape, self.dtype, self.direct = weight.ne[::-1], weight.dtype, blas_can_read(weight)
        self.table: Mapping[int, tuple[Slot, int]] = {}
        self.only: Collection[int] | None = None
        self._decoded: dict[Slot, DecodedWeights] = {}

    def host_bytes(self) -> np.ndarray:
        """Always StorageError: a merged weight exists on the host alone."""
        raise StorageError(f"the bytes of {shown(self.name)} in one piece", "one expert at a time: `expert(e)`")

    device_bytes = host_bytes

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Always StorageError."""
        return self.host_bytes()

    def write(self, offset: int, data: np.ndarray) -> None:
        """Always StorageError."""
        self.host_bytes()

    # ---- the weight source of products

    def weight_source(self, device: Backend) -> SlotView:
        """What a product asks on `device`; it must be the pool's."""
        if device is not self.pool.device:
            raise StorageError(f"{device.name} reads {shown(self.name)}", f"{self.pool.device.name}, whose memory that is")
        return self

    def bind(self, table: Mapping[int, tuple[Slot, int]], only: Collection[int] | None) -> None:
        """From now on: which load of which slot answers for each expert, and which experts are computed with."""
        self.table, self.only = table, only

    def expert(self, e: int, part: slice = slice(None), into: Any = None) -> Any:
        """Rows of an expert's matrix. Raises StorageError where its bytes are not there now, or not these."""
        slot, load = self.table.get(e, _NO_SLOT)
        tag = slot.tags.get(self.m) if slot is not None else None
        if slot is None or tag != (self.layer, e, load):
            held = "no slot" if slot is None else f"a slot that holds {tag or 'nothing'}"
            raise StorageError(f"expert {e} of layer {self.layer} is read from {held}", f"its own bytes, of load {load}",
                               "a product was asked for before its experts were there: wait for the load")  # fmt: skip
        if self.pool.verify:
            self._verify(slot, e)
        rows = self._decoded.get(slot)
        if rows is None:
            place = self.pool.matrix(slot, self.layer, self.m)
            device = self.pool.device
            rows = self._decoded[slot] = DecodedWeights(device.xp, device.operand(place), self.dtype, self.direct)
        return rows.matrix(0, 0, part, into)

    def forget(self, slot: Slot) -> None:
        """A slot is given back to the device."""
        self._decoded.pop(slot, None)

    def matrix(self, i3: Any, i2: Any, part: slice, into: Any = None) -> Any:
        """Only MUL_MAT_ID reads from slots."""
        raise StorageError(f"matrices of {shown(self.name)} as a stack", "one expert at a time: `expert(e)`")

    def _verify(self, slot: Slot, e: int) -> None:
        start = self.pool.offsets[self.layer][self.m]
        there = slot.buffer.device_bytes()[start : start + self.weight.nb[2]]
        start = self.weight.offset + e * self.weight.nb[2]
        xp = self.pool.device.xp
        if not xp.array_equal(there, xp.asarray(self.weight.require_data().host_bytes()[start : start + self.weight.nb[2]])):
            raise StorageError(f"the slot of expert {e} of layer {self.layer} differs from {shown(self.weight.name)}", "a copy",
                               "were the weights rearranged, or the file replaced, after the load?")  # fmt: skip


def _offsets(merged: Sequence[Tensor]) -> tuple[int, ...]:
    """Where each matrix of an expert starts in its slot, and the size of the slot."""
    at = [0]
    for w in merged:
        at.append(-(-(at[-1] + w.nb[2]) // ALIGNMENT) * ALIGNMENT)
    return tuple(at)


def _slots(sizes: Mapping[int, int], experts: Mapping[int, int], budget: int, least: int) -> dict[int, int]:
    """Slots of each size class: shares of the budget by the bytes of all its experts, rounded down, at least `least`."""
    total: dict[int, int] = {}
    most: dict[int, int] = {}
    for layer, size in sizes.items():
        total[size] = total.get(size, 0) + size * experts[layer]
        most[size] = most.get(size, 0) + experts[layer]
    needed = sum(size * least for size in total)
    if budget < needed:
        raise ParameterError(f"an expert budget of {budget:,} bytes", f"{needed:,} bytes or more",
                             f"{least} slots for experts of {', '.join(f'{size:,}' for size in total)} bytes must fit")  # fmt: skip
    counts = {size: max(least, min(most[size], budget * total[size] // (sum(total.values()) * size))) for size in total}
    while sum(size * n for size, n in counts.items()) > budget:  # `least` was more than a small class's share
        size = max((s for s in counts if counts[s] > least), key=lambda s: s * counts[s])
        counts[size] -= 1
    return counts
