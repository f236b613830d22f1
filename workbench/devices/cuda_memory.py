"""Memory of NVIDIA cards and pinned memory of the host, through CuPy: pieces of it, and copies between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

from workbench.devices.backend import Buffer, BufferType, HostBuffer
from workbench.errors import AllocationError, StorageError, shown
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace

ALIGNMENT = 128
"""Where tensors start (`ggml_backend_cuda_buffer_type_get_alignment`)."""
STAGING_SLOTS, STAGING_BYTES = 8, 2**21
"""Pinned memory that pageable host bytes pass through, so that a copy does not hold up the caller."""


class CudaMemory(BufferType):
    """Memory of a card (`ggml_backend_cuda_buffer_type`), taken from a pool of CuPy's.

    limit: most bytes that the pool may hold; None: it is CuPy's own default pool, with the limit that it has (`set_limit`,
    CUPY_GPU_MEMORY_LIMIT) and beside the arrays that others make. What kernels need for a moment comes from the same pool.
    spare: gives memory back that can be done without, and is asked before anything is refused.
    """

    spare: Callable[[], None] | None = None

    def __init__(self, cupy: ModuleType, device: int = 0, limit: int | None = None) -> None:
        super().__init__(f"CUDA{device}", ALIGNMENT, is_host=False)
        self.cupy, self.device = cupy, device
        self._started = time.perf_counter_ns()
        with cupy.cuda.Device(device):
            self.pool = cupy.get_default_memory_pool() if limit is None else cupy.cuda.MemoryPool()
            if limit is not None:
                self.pool.set_limit(size=limit)
            self.stream = cupy.cuda.Stream(non_blocking=True)  # for blocking copies: they wait for nothing else

    @property
    def limit(self) -> int | None:
        """Most bytes that the pool may hold at present, None for all there are."""
        with self.cupy.cuda.Device(self.device):
            return self.pool.get_limit() or None

    @property
    def now(self) -> int:  # type: ignore[override]
        """Nanoseconds since this memory was made."""
        return time.perf_counter_ns() - self._started

    def alloc_buffer(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A fresh buffer; its contents are undefined. Raises AllocationError where the card or the limit is too small."""
        with self.cupy.cuda.Device(self.device) as device:
            device.synchronize()  # as `cudaMalloc` may: memory of the pool can still be in use by work that was asked for
            return CudaBuffer(self, self.take(size), size, usage)

    def take(self, size: int) -> Any:
        """A piece of the pool; it goes back when nothing refers to it. Raises AllocationError where the card or the limit is too small."""
        memory = self.take_if_free(size)
        if memory is None and self.spare is not None:
            self.spare()
            memory = self.take_if_free(size)
        if memory is not None:
            return memory
        free, total = self.cupy.cuda.runtime.memGetInfo()
        limit = self.limit
        room = free if limit is None else min(free, limit - self.pool.total_bytes())
        bound = f"{total:,} bytes" if limit is None else f"the limit of {limit:,} bytes"
        raise AllocationError(f"{size:,} bytes asked for on {self.name}, {room:,} are free within {bound}", "room on the device",
                              "fewer layers or experts there, a smaller batch or context")  # fmt: skip


    def take_if_free(self, size: int) -> Any:
        """A piece of the pool, or None where there is no room."""
        for _ in range(2):
            with contextlib.suppress(self.cupy.cuda.memory.OutOfMemoryError):
                return self.pool.malloc(max(size, 1))
            self.pool.free_all_blocks()  # pieces of other sizes that are kept for later
        return None


class CudaBuffer:
    """A piece of a card's memory. Host code copies; only kernels see the bytes."""

    is_host = False

    def __init__(self, buffer_type: CudaMemory, memory: Any, size: int, usage: Usage) -> None:
        self.buffer_type, self.size, self.usage = buffer_type, size, usage
        self.name, self.version, self.closed = buffer_type.name, 0, False
        self._memory = memory
        borrowed = buffer_type.cupy.cuda.UnownedMemory(memory.ptr, size, None, buffer_type.device)
        self._start = buffer_type.cupy.cuda.MemoryPointer(borrowed, 0)

    def host_bytes(self) -> np.ndarray:
        """Always StorageError: the host cannot see this memory."""
        raise StorageError(f"host code asked for the bytes of {shown(self.name)}", "memory that the host can see",
                           "`.numpy()` or `read` copies them")  # fmt: skip

    def device_bytes(self) -> Any:
        """The memory as a CuPy array of bytes."""
        return self.buffer_type.cupy.ndarray((self.size,), np.uint8, self.pointer(0))

    def pointer(self, offset: int) -> Any:
        """Where a byte lies (a `cupy.cuda.MemoryPointer`). It borrows: arrays there do not keep the memory when the buffer is closed."""
        if self.closed:
            raise StorageError(f"{shown(self.name)} was freed", "memory that is still there")
        return self._start + offset

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Copy to the host, at once: work that was asked for and is not done is not in it."""
        self._check(offset, nbytes)
        out = np.empty(nbytes, np.uint8)
        if nbytes:
            with self._blocking_copy() as stream:
                self.pointer(offset).copy_to_host_async(out.ctypes.data, nbytes, stream)
        return out

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy from the host, at once."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._check(offset, raw.size)
        if raw.size:
            with self._blocking_copy() as stream:
                self.pointer(offset).copy_from_host_async(raw.ctypes.data, raw.size, stream)
        self.version += 1

    def copy_from(self, tensor: Tensor, copy: Tensor, trace: Trace | None) -> bool:
        """Copy between two buffers of cards without the host (`cpy_tensor` of a buffer); False for other memory."""
        source = tensor.require_data()
        if not isinstance(source, CudaBuffer):
            return False
        if trace is not None:
            now = self.buffer_type.now
            trace.add("copy_buffer", now, memory=self.name, name=tensor.name, copy=copy.name, bytes=tensor.nbytes, done=1)
        with self._blocking_copy() as stream:
            copy_between(self.buffer_type.cupy, tensor, copy, stream)
        return True

    def clear(self, value: int = 0) -> None:
        """Set every byte."""
        with self._blocking_copy() as stream:
            self.pointer(0).memset_async(value, self.size, stream)
        self.version += 1

    def close(self) -> None:
        """Give the memory back, when the device is done with it."""
        if not self.closed:
            with self.buffer_type.cupy.cuda.Device(self.buffer_type.device) as device:
                device.synchronize()
            self._memory, self.closed = None, True

    @contextlib.contextmanager
    def _blocking_copy(self) -> Iterator[Any]:
        stream = self.buffer_type.stream
        with self.buffer_type.cupy.cuda.Device(self.buffer_type.device):
            yield stream
            stream.synchronize()

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise StorageError(f"bytes {offset}..{offset + nbytes} of {shown(self.name)}", f"a range within its {self.size:,} bytes")


class PinnedMemory(BufferType):
    """Host memory that a card copies from by itself (`ggml_backend_cuda_host_buffer_type`)."""

    def __init__(self, cupy: ModuleType) -> None:
        super().__init__("CUDA_Host", 32)
        self.cupy = cupy
        self._ranges: dict[int, int] = {}  # address -> bytes

    def alloc_buffer(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A fresh pinned buffer. Raises AllocationError where the system gives none."""
        cuda = self.cupy.cuda
        try:
            memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(max(size, 1)), 0)  # its own: the pool rounds up to powers of two
        except (cuda.runtime.CUDARuntimeError, MemoryError) as e:
            raise AllocationError(f"{size:,} bytes of pinned memory asked for: {shown(e)}", "less than the system lets be pinned",
                                  "ordinary host memory, which is copied through a smaller pinned piece") from None  # fmt: skip
        self._ranges[memory.ptr] = size
        return _PinnedBuffer(self, memory, size, usage)

    def holds(self, data: np.ndarray) -> bool:
        """Whether an array lies in pinned memory of this kind."""
        start, end = data.ctypes.data, data.ctypes.data + data.nbytes
        return any(a <= start and end <= a + n for a, n in self._ranges.items())

    def released(self, address: int) -> None:
        """A buffer was given back."""
        self._ranges.pop(address, None)


class _PinnedBuffer(HostBuffer):
    def __init__(self, buffer_type: PinnedMemory, memory: Any, size: int, usage: Usage) -> None:
        super().__init__(buffer_type, np.frombuffer(memory, np.uint8, size), usage)
        self._pinned, self._address = buffer_type, memory.ptr

    def close(self) -> None:
        """Give the memory back. Copies from it must be done (`CudaBackend.synchronize`)."""
        super().close()
        self._pinned.released(self._address)


def copy_between(cupy: ModuleType, tensor: Tensor, copy: Tensor, stream: Any) -> None:
    """Ask a stream to copy a tensor between two buffers, of one card or of two."""
    source, target = tensor.require_data(), copy.require_data()
    assert isinstance(source, CudaBuffer) and isinstance(target, CudaBuffer)
    here, there = source.pointer(tensor.offset), target.pointer(copy.offset)
    if source.buffer_type.device == target.buffer_type.device:
        there.copy_from_device_async(here, tensor.nbytes, stream)
    else:
        devices = target.buffer_type.device, source.buffer_type.device
        cupy.cuda.runtime.memcpyPeerAsync(there.ptr, devices[0], here.ptr, devices[1], tensor.nbytes, stream.ptr)
    target.version += 1


class Staging:
    """Pinned slots in a ring: pageable bytes are copied into one, and the card copies from there while the caller goes on."""

    def __init__(self, cupy: ModuleType) -> None:
        self.cupy = cupy
        self._slots: list[tuple[Any, np.ndarray, Any]] = []  # the one used longest ago stands first

    def send(self, raw: np.ndarray, target: Any, stream: Any) -> None:
        """Copy host bytes to a device pointer through the slots."""
        for start in range(0, raw.size, STAGING_BYTES):
            some = raw[start : start + STAGING_BYTES]
            memory, view, done = self._slot()
            done.synchronize()  # the slot's last copy
            np.copyto(view[: some.size], some)
            (target + start).copy_from_host_async(memory.ptr, some.size, stream)
            done.record(stream)

    def _slot(self) -> tuple[Any, np.ndarray, Any]:
        if len(self._slots) < STAGING_SLOTS:
            memory = self.cupy.cuda.alloc_pinned_memory(STAGING_BYTES)
            slot = memory, np.frombuffer(memory, np.uint8, STAGING_BYTES), self.cupy.cuda.Event(disable_timing=True)
        else:
            slot = self._slots.pop(0)
        self._slots.append(slot)
        return slot
