"""Clock and memory of a simulated machine: work in virtual time, and buffers that the host cannot read."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.devices import cost
from workbench.devices.backend import Buffer, BufferType, HostBuffer
from workbench.errors import AllocationError, StorageError, shown
from workbench.tensors.storage import Usage, aligned_bytes
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace

FRESH = 0xFF


class Machine:
    """Virtual time: the clock of the host, and work of devices that has an end but did not happen yet.

    now: nanoseconds since the start. trace: where devices record their calls and what they were busy with, or None.
    eager: work happens when it is asked for, as with devices that compute at the call; then no wait is ever missing.
    without_wait: the n-th wait of host or device from now on is left out (1: the next), to see what it is good for.
    """

    def __init__(self, trace: Trace | None = None, eager: bool = False) -> None:
        self.now, self.eager = 0, eager
        self.trace, self.without_wait = trace, 0
        self.pinned: dict[int, int] = {}  # host memory that devices read without help: address -> bytes
        self.lock = threading.RLock()  # one thread at a time asks for work or lets it happen
        self._pending: list[tuple[int, int, object, Callable[[], Any]]] = []
        self._order = itertools.count()

    @property
    def n_pending(self) -> int:
        """Pieces of work that did not happen yet."""
        return len(self._pending)

    def ask(self, end: int, effect: Callable[[], Any], device: object = None) -> None:
        """Let `effect` happen when the clock reaches `end`; effects of one time happen in the order they were asked for."""
        with self.lock:
            if self.eager:
                effect()
            else:
                heapq.heappush(self._pending, (end, next(self._order), device, effect))

    def reach(self, time: int) -> None:
        """Move the host's clock to `time`, never back, and let everything happen that ends by then."""
        with self.lock:
            self.now = max(self.now, time)
            while self._pending and self._pending[0][0] <= self.now:
                heapq.heappop(self._pending)[3]()

    def cancel(self, device: object) -> None:
        """Forget what a device was asked for and has not done."""
        with self.lock:
            self._pending = [work for work in self._pending if work[2] is not device]
            heapq.heapify(self._pending)

    def spend(self, ns: int) -> None:
        """Let the host be busy for so long."""
        self.reach(self.now + ns)

    def leaves_out(self, call: str, name: str) -> bool:
        """Whether this is the wait that shall be left out."""
        self.without_wait, at = max(self.without_wait - 1, 0), self.without_wait
        if at == 1 and self.trace is not None:
            self.trace.add("left_out", self.now, call=call, name=name)
        return at == 1

    def is_pinned(self, data: np.ndarray) -> bool:
        """Whether an array lies in pinned memory, as a driver finds out: by its address."""
        start = data.ctypes.data
        return any(a <= start < a + n for a, n in self.pinned.items())


class DeviceBuffer:
    """Memory of a simulated device. Reading and writing from the host takes time; only its device sees the bytes."""

    is_host = False

    def __init__(self, buffer_type: SimulatedMemory, size: int, usage: Usage = Usage.ANY) -> None:
        self.buffer_type, self.size, self.usage = buffer_type, size, usage
        self.name, self.version, self.closed = buffer_type.name, 0, False
        self._bytes = aligned_bytes(size)
        self._bytes.fill(FRESH)

    def host_bytes(self) -> np.ndarray:
        """Always StorageError: the host cannot see this memory."""
        raise StorageError(f"host code asked for the bytes of {shown(self.name)}", "memory that the host can see",
                           "`.numpy()` or `read` copies them")  # fmt: skip

    def device_bytes(self) -> np.ndarray:
        """The memory as its device sees it."""
        if self.closed:
            raise StorageError(f"{shown(self.name)} was freed", "memory that is still there")
        return self._bytes

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Copy to the host, at once: what has not happened by now is not in it."""
        self._check(offset, nbytes)
        self.buffer_type.transfer(nbytes)
        return self.device_bytes()[offset : offset + nbytes].copy()

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy from the host, at once."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._check(offset, raw.size)
        self.buffer_type.transfer(raw.size, raw)
        self.device_bytes()[offset : offset + raw.size] = raw
        self.version += 1

    def copy_from(self, tensor: Tensor, copy: Tensor, trace: Trace | None) -> bool:
        """Copy between two buffers of devices without the host (`cpy_tensor` of a buffer); False where there is no such way."""
        if not self.buffer_type.copies_buffers:
            return False
        start = self.buffer_type.now
        self.buffer_type.transfer(tensor.nbytes)
        if trace is not None:
            trace.add("copy_buffer", start, self.buffer_type.now, memory=self.name, name=tensor.name, copy=copy.name, bytes=tensor.nbytes,
                      done=1)  # fmt: skip
        move_bytes(tensor, copy)
        return True

    def clear(self, value: int = 0) -> None:
        """Set every byte."""
        self.device_bytes().fill(value)
        self.version += 1

    def close(self) -> None:
        """Give the memory back: what is left there reads as NaN."""
        if not self.closed:
            self._bytes.fill(FRESH)
            self.closed = True
            self.buffer_type.released(self.size)

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise StorageError(f"bytes {offset}..{offset + nbytes} of {shown(self.name)}", f"a range within its {self.size:,} bytes")


class SimulatedMemory(BufferType):
    """A kind of memory of a simulated machine (`ggml_backend_buffer_type`).

    capacity: bytes in all, None for no limit. alloc_extra: bytes that every tensor takes beside its own. copies_buffers:
    whether its buffers can be filled from another device's without the host. used, peak: bytes handed out, now and at most.
    fail_allocation, fail_copy: the n-th allocation or blocking copy from now on fails (1: the next), for tests.
    """

    def __init__(self, machine: Machine, name: str, alignment: int = 128, max_size: int | None = None, is_host: bool = False,
                 capacity: int | None = None, alloc_extra: int = 0, copies_buffers: bool = False,
                 speed: cost.Speed = cost.GPU) -> None:  # fmt: skip
        super().__init__(name, alignment, max_size, is_host)
        self.machine, self.capacity, self.alloc_extra, self.speed = machine, capacity, alloc_extra, speed
        self.copies_buffers = copies_buffers
        self.used = self.peak = 0
        self.fail_allocation = self.fail_copy = 0

    @property
    def now(self) -> int:  # type: ignore[override]
        """The host's virtual time."""
        return self.machine.now

    def transfer(self, nbytes: int, data: np.ndarray | None = None) -> None:
        """Let the host wait for a blocking copy to or from this memory; `data`: the host's bytes (None: they are pinned)."""
        if self.fail_copy:
            self.fail_copy -= 1
            if not self.fail_copy:
                raise StorageError(f"a copy of {nbytes:,} bytes to or from {shown(self.name)} was made to fail", "success")
        pinned = data is None or self.speed.pageable is None or self.machine.is_pinned(data)
        self.machine.spend(self.speed.transfer_ns(nbytes, pinned))

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that a tensor takes here."""
        return tensor.nbytes + self.alloc_extra

    def alloc_buffer(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A fresh buffer full of 0xFF. Raises AllocationError where the device is full. `max_size` limits chunks only."""
        if self.fail_allocation:
            self.fail_allocation -= 1
            if not self.fail_allocation:
                raise AllocationError(f"an allocation of {size:,} bytes on {shown(self.name)} was made to fail", "success")
        if self.capacity is not None and self.used + size > self.capacity:
            raise AllocationError(f"{size:,} bytes were asked of {shown(self.name)}, which has {self.capacity - self.used:,} of "
                                  f"{self.capacity:,} bytes left", "room on the device",
                                  "fewer layers or experts there, a smaller batch or context")  # fmt: skip
        self.used += size
        self.peak = max(self.peak, self.used)
        if self.machine.trace is not None:
            self.machine.trace.add("alloc", self.machine.now, memory=self.name, bytes=size)
        return _PinnedBuffer(self, size, usage) if self.is_host else DeviceBuffer(self, size, usage)

    def released(self, size: int) -> None:
        """A buffer was given back."""
        self.used -= size
        if self.machine.trace is not None:
            self.machine.trace.add("release", self.machine.now, memory=self.name, bytes=size)


class _PinnedBuffer(HostBuffer):
    """Host memory of a simulated machine: visible to all, and 0xFF when fresh."""

    def __init__(self, buffer_type: SimulatedMemory, size: int, usage: Usage) -> None:
        super().__init__(buffer_type, size, usage)
        memory = self.host_bytes()
        memory.fill(FRESH)
        self._pinned, self._address = buffer_type.machine.pinned, memory.ctypes.data
        self._pinned[self._address] = size
        self._released = buffer_type.released

    def close(self) -> None:
        """Give the memory back."""
        if not self.closed:
            size = self.size
            super().close()
            self._pinned.pop(self._address, None)
            self._released(size)


def move_bytes(tensor: Tensor, copy: Tensor) -> None:
    """Copy a tensor's bytes between two memories, as devices see them."""
    source, target = tensor.require_data(), copy.require_data()
    target.device_bytes()[copy.offset : copy.offset + tensor.nbytes] = source.device_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
