"""An NVIDIA card through CuPy (`ggml_backend_cuda`): the same kernels over device arrays, in streams, with pinned copies.

CuPy is imported when a `CudaBackend` is made and not before; `why_not` says in one sentence why none can be made. As in ggml,
one stream takes a backend's work and its copies in order; a second one serves `prefetch`, which brings weights over while the
first computes. Several cards are written for and untested.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from workbench.devices.backend import Backend, BufferType, DeviceType, Event, NodeList, batch_size
from workbench.devices.cpu import ROUNDINGS, why_no_kernel
from workbench.devices.cuda_memory import CudaBuffer, CudaMemory, PinnedMemory, Staging, copy_between
from workbench.devices.plan import Plan
from workbench.errors import DependencyError, ParameterError, StorageError, shown
from workbench.kernels import grouped
from workbench.kernels.blocks import Rows
from workbench.kernels.kernel import HABITS, Habits, Kernel
from workbench.kernels.weights import DecodedWeights, DequantCache, WeightSource, blas_can_read
from workbench.tensors.dtype import BF16
from workbench.tensors.tensor import Tensor

GRAIN = 128
"""Pieces of work are so many times larger than the CPU's: each costs some 10 µs to ask for, and there is memory for them."""
OFFLOAD_MIN_BATCH = 32
"""Batch from which weights in host memory are brought over; GGML_OP_OFFLOAD_MIN_BATCH changes it, as in ggml."""
DEQUANT_CACHE_BYTES = 2**30
CHECKS = 256
"""Looks at indices that are kept apart between two waits."""
INDICES = {"GET_ROWS": 1, "SET_ROWS": 1, "ADD_ID": 2, "MUL_MAT_ID": 2}
"""Which source of an op holds indices."""


def why_not(device: int = 0) -> str:
    """Why there is no CUDA device of this number, in one sentence; empty where there is one. Without a card nothing is imported."""
    if "cupy" not in sys.modules:
        if sys.platform == "darwin":
            return "there is no CUDA on macOS"
        if why := _why_no_driver():
            return why
        if importlib.util.find_spec("cupy") is None:
            return "CuPy is not installed in this Python: `python -m workbench lab --with-cuda` adds it"
    try:
        cupy = importlib.import_module("cupy")
        if not cupy.is_available():
            return "CuPy finds no NVIDIA driver or no device"
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as e:  # a broken installation fails in many ways
        return f"CuPy does not work here: {type(e).__name__}: {shown(str(e) or 'no reason given', 200)}"
    return "" if 0 <= device < count else f"there is no CUDA device {device}: this machine has {count}"


def _why_no_driver() -> str:
    """Ask NVIDIA's driver itself, which takes no package."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        driver = ctypes.CDLL(name)
    except OSError:
        return f"there is no NVIDIA driver on this machine ({name} cannot be loaded)"
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no device"
    return ""


# ---- events and the backend


class CudaEvent:
    """A mark in the work of a card (`cudaEvent`)."""

    def __init__(self, backend: CudaBackend, name: str) -> None:
        self.backend, self.name = backend, name
        with backend.cupy.cuda.Device(backend.device):
            self.mark = backend.cupy.cuda.Event(disable_timing=True)

    def record(self) -> None:
        """Mark the work asked for so far."""
        self.backend.note("event_record", device=self.backend.name, event=self.name)
        self.mark.record(self.backend.stream)

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        self.backend.note("event_sync", event=self.name)
        self.mark.synchronize()

    @property
    def done(self) -> bool:
        """Whether the mark was reached."""
        return bool(self.mark.done)


class CudaBackend(Backend):
    """A CUDA device (`ggml_backend_cuda_init`). Raises DependencyError where there is none: `why_not` says why.

    device: its number. limit: most bytes of its memory (default: what CuPy's own pool may hold). activation_rounding: see
    `CpuBackend`. dequant_cache_bytes: room there for decoded weights (default: a quarter of the limit, at most 1 GiB). grain: how many
    times larger than on the CPU pieces of work are; 1 makes the CPU's own cuts. offload_min_batch: batch from which it offers to
    compute with weights that lie in host memory.
    """

    device_type = DeviceType.GPU

    def __init__(self, device: int = 0, limit: int | None = None, activation_rounding: str = "none", *,
                 dequant_cache_bytes: int | None = None, grain: int = GRAIN,
                 offload_min_batch: int | None = None) -> None:  # fmt: skip
        if why := why_not(device):
            raise DependencyError(f"no CUDA device: {why}", "an NVIDIA card with its driver, and CuPy",
                                  "CpuBackend(); every lesson runs without a GPU")  # fmt: skip
        if activation_rounding not in ROUNDINGS:
            raise ParameterError(f"activation_rounding={activation_rounding!r}", f"one of {ROUNDINGS}")
        self.cupy = self.xp = importlib.import_module("cupy")
        self.device, self.name, self.activation_rounding, self.grain = device, f"CUDA{device}", activation_rounding, grain
        if offload_min_batch is None:
            offload_min_batch = int(os.environ.get("GGML_OP_OFFLOAD_MIN_BATCH", OFFLOAD_MIN_BATCH))
        self.offload_min_batch = offload_min_batch
        self.buffer_type = self.memory = CudaMemory(self.cupy, device, limit)
        self.host_buffer_type = PinnedMemory(self.cupy)
        if dequant_cache_bytes is None:
            bound = self.memory.limit
            dequant_cache_bytes = DEQUANT_CACHE_BYTES if bound is None else min(DEQUANT_CACHE_BYTES, bound // 4)
        self.dequant_cache = DequantCache(dequant_cache_bytes, self._empty_or_none)
        self.memory.spare = self.dequant_cache.clear
        cuda = self.cupy.cuda
        with cuda.Device(device):
            self.stream, self.copy_stream = cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)
            self._copied = cuda.Event(disable_timing=True)
        self._guard = threading.RLock()
        self._staging = Staging(self.cupy)
        self._in_flight: list[Any] = []  # host arrays that a copy on the stream reads from or writes to
        self._fetching: deque[tuple[CudaEvent, np.ndarray]] = deque()  # the same of the copy stream, each until its event
        self._work: Any = None
        self._wrong: Any = None  # one flag per look at indices
        self._checks: list[tuple[int, str, int]] = []  # address of the indices, what they name, limit
        self._readers: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._looks = self.cupy.ElementwiseKernel(
            "T index, int64 limit", "raw int32 wrong", "if (index < 0 || index >= limit) wrong[0] = 1", "workbench_within"
        )
        self._clock: tuple[Any, int] | None = None
        self._spans: list[tuple[dict[str, Any], Any, Any]] = []

    # ---- what it can do

    def why_unsupported(self, node: Tensor) -> str:
        """The reason why this device cannot compute `node`; empty where it can."""
        if why := why_no_kernel(node):
            return why
        for t in (node, *node.sources()):
            size = t.dtype.block_bytes if t.dtype.block == 1 else 1
            if any(n % size for n in (t.view_offs, *t.nb)):
                return f"{t.label} starts or strides at bytes that are no multiple of {size}: a GPU reads aligned values only"
        return ""

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether kernels here can work on memory of this type: this card's only."""
        return isinstance(buft, CudaMemory) and buft.device == self.device

    def offload_op(self, node: Tensor) -> bool:
        """Whether the batch is large enough to bring the weights over (`ggml_backend_cuda_device_offload_op`)."""
        return batch_size(node) >= self.offload_min_batch

    # ---- kernels

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:  # type: ignore[override]
        """Held while a graph is planned or computed: device, stream, pool and habits are this backend's."""
        return self._here()

    @contextlib.contextmanager
    def _here(self) -> Iterator[None]:
        cuda = self.cupy.cuda
        with self._guard, cuda.Device(self.device), self.stream, cuda.using_allocator(self.memory.take):
            token = HABITS.set(Habits(self.grain, self._check_later))
            try:
                yield
            finally:
                HABITS.reset(token)

    def kernel(self, node: Tensor) -> Kernel:
        """The table's kernel; products by expert are grouped."""
        return grouped.MUL_MAT_ID if node.op == "MUL_MAT_ID" and self.grain > 1 else super().kernel(node)

    def operand(self, tensor: Tensor) -> Any:
        """The tensor's memory as a 4-D CuPy array; `blocks.Rows` for bf16 and quantised types."""
        storage = tensor.require_data()
        if not isinstance(storage, CudaBuffer) or storage.buffer_type.device != self.device:
            raise StorageError(f"{tensor.label} lies in {shown(storage.name)}", f"memory of {self.name}",
                               "Scheduler([cuda, cpu]) copies what a device cannot see")  # fmt: skip
        memory, kind = storage.pointer(tensor.offset), tensor.dtype
        if kind.numpy is not None or kind is BF16:
            array = self.cupy.ndarray(tensor.ne[::-1], kind.numpy or np.uint16, memory, tensor.nb[::-1])
            return array if kind.numpy is not None else Rows(kind, array)
        shape = (*tensor.ne[:0:-1], kind.row_bytes(tensor.ne[0]))
        return Rows(kind, self.cupy.ndarray(shape, np.uint8, memory, (*tensor.nb[:0:-1], 1)))

    def weights(self, tensor: Tensor) -> WeightSource:
        """Where a product reads `tensor` from: its own memory, or decoded through the cache."""
        direct = blas_can_read(tensor)
        shelf = None if direct else self.dequant_cache.shelf(tensor)
        return DecodedWeights(self.cupy, self.operand(tensor), tensor.dtype, direct, shelf)

    def work_memory(self, nbytes: int) -> Any:
        """The work buffer, at least `nbytes` long; plans of this backend share it."""
        if self._work is None or self._work.size < nbytes:
            with self._here():
                self._work = self.cupy.empty((nbytes,), np.uint8)
        return self._work

    def _empty_or_none(self, shape: tuple[int, ...], dtype: Any) -> Any:
        memory = self.memory.take_if_free(math.prod(shape) * np.dtype(dtype).itemsize)
        return None if memory is None else self.cupy.ndarray(shape, dtype, memory)

    def plan(self, graph: NodeList) -> Plan:
        """Bind every node of the graph to its kernel, once, with pieces of this device's size."""
        with self._here():
            plan = Plan(self, graph)
        for job in plan.jobs:
            if job.node.op in INDICES:
                self._readers[job.operands[INDICES[job.node.op]].data.ptr] = job.node
        return plan

    # ---- indices are looked at by the device, and reported at the next wait

    def _check_later(self, indices: Any, limit: int, operand: int, what: str) -> None:
        if not indices.size:
            return
        if self._wrong is None:
            self._wrong = self.cupy.zeros((CHECKS,), np.int32)
        slot = min(len(self._checks), CHECKS - 1)
        self._looks(indices, limit, self._wrong[slot:])
        self._checks[slot:] = [(indices.data.ptr, what, limit)]

    def _raise_wrong(self) -> None:
        checks, self._checks = self._checks, []
        if not checks:
            return
        with self._here():
            wrong = np.flatnonzero(self.cupy.asnumpy(self._wrong[: len(checks)]))
            if not wrong.size:
                return
            self._wrong[...] = 0
        address, what, limit = checks[wrong[0]]
        node = self._readers.get(address)
        named = f"{node.src[INDICES[node.op]].label}, a source of {node.label}," if node is not None else "an index operand"  # type: ignore[union-attr]
        raise ParameterError(f"{named} names a {what} that does not exist (found after the run)", f"0 to {limit - 1}: there are {limit}")

    # ---- its streams

    def note(self, kind: str, **fields: Any) -> None:
        """Record a call."""
        if self.trace is not None:
            self.trace.add(kind, self.memory.now, **fields)

    @contextlib.contextmanager
    def _timed(self, name: str, stream: Any, copied: int | None = None) -> Iterator[None]:
        """What is asked of `stream` inside, as one stretch of the timeline, where calls are recorded; `copied`: bytes of a copy."""
        if self.trace is None:
            yield
            return
        if self._clock is None:
            zero = self.cupy.cuda.Event()
            zero.record(stream)
            zero.synchronize()
            self._clock = zero, self.memory.now
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        start.record(stream)
        yield
        end.record(stream)
        lane, work = "copies" if stream is self.copy_stream else "compute", "compute" if copied is None else "copy"
        self._spans.append(({"stream": lane, "work": work, "name": name, "bytes": copied or 0}, start, end))

    def _note_spans(self) -> None:
        spans, self._spans = self._spans, []
        if self.trace is None or self._clock is None:
            return
        zero, at = self._clock
        for fields, start, end in spans:
            if not end.done:  # a copy that is still on its way
                self._spans.append((fields, start, end))
                continue
            times = [at + round(self.cupy.cuda.get_elapsed_time(zero, mark) * 1e6) for mark in (start, end)]
            self.trace.add("busy", *times, device=self.name, **fields)

    def compute_async(self, graph: NodeList) -> None:
        """Ask for all nodes of a graph."""
        with self._here(), self._timed(graph.nodes[0].name if graph.nodes else "", self.stream):
            super().compute_async(graph)

    def set_async(self, tensor: Tensor, data: np.ndarray, offset: int = 0) -> None:
        """Ask for host bytes to be written: from pinned memory when the card gets to it, from other memory copied aside now."""
        self.note("set_async", device=self.name, name=tensor.name, offset=offset, bytes=data.nbytes)
        with self.cupy.cuda.Device(self.device), self._timed(tensor.name, self.stream, data.nbytes):
            self._in_flight.append(self._send(tensor, data, offset, self.stream))

    def prefetch(self, tensor: Tensor, data: np.ndarray, offset: int = 0, after: Event | None = None) -> CudaEvent:
        """`set_async` on the copy stream, beside what the backend computes: after `after`, up to the event that is returned.

        Nothing else keeps the two apart: `after` says when the memory is no longer read, and `wait_event` of the result stands before
        the first use.
        """
        self.note("set_async", device=self.name, name=tensor.name, offset=offset, bytes=data.nbytes)
        done = CudaEvent(self, f"{self.name} has {tensor.name}")
        with self.cupy.cuda.Device(self.device):
            if isinstance(after, CudaEvent):
                self.copy_stream.wait_event(after.mark)
            with self._timed(tensor.name, self.copy_stream, data.nbytes):
                raw = self._send(tensor, data, offset, self.copy_stream)
            done.mark.record(self.copy_stream)
        self._fetching.append((done, raw))
        return done

    def _send(self, tensor: Tensor, data: np.ndarray, offset: int, stream: Any) -> np.ndarray:
        storage = tensor.require_data()
        assert isinstance(storage, CudaBuffer)
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        storage._check(tensor.offset + offset, raw.size)
        target = storage.pointer(tensor.offset + offset)
        if self.host_buffer_type.holds(raw):
            target.copy_from_host_async(raw.ctypes.data, raw.size, stream)
        else:
            self._staging.send(raw, target, stream)
        storage.version += 1
        return raw

    def get_async(self, tensor: Tensor) -> np.ndarray:
        """Ask for the tensor's bytes, into pinned memory; they are there after `synchronize`."""
        self.note("get_async", device=self.name, name=tensor.name, offset=0, bytes=tensor.nbytes)
        storage, n = tensor.require_data(), tensor.nbytes
        assert isinstance(storage, CudaBuffer)
        out = np.frombuffer(self.cupy.cuda.alloc_pinned_memory(max(n, 1)), np.uint8, n)
        self._in_flight.append(out)
        with self.cupy.cuda.Device(self.device), self._timed(tensor.name, self.stream, n):
            if n:
                storage.pointer(tensor.offset).copy_to_host_async(out.ctypes.data, n, self.stream)
        return out

    def copy_async(self, source: Backend, tensor: Tensor, copy: Tensor) -> bool:
        """Ask for a copy from another card's memory, or within this one's: on the source's stream, and this one waits for it."""
        done = isinstance(source, CudaBackend) and isinstance(tensor.storage, CudaBuffer) and isinstance(copy.storage, CudaBuffer)
        names = {"device": source.name, "target": self.name, "name": tensor.name, "copy": copy.name}
        self.note("copy_async", **names, bytes=tensor.nbytes, done=int(done))
        if not done:
            return False
        assert isinstance(source, CudaBackend)
        with self.cupy.cuda.Device(source.device), source._timed(copy.name, source.stream, tensor.nbytes):
            copy_between(self.cupy, tensor, copy, source.stream)
        if source is not self:
            source._copied.record(source.stream)
            self.stream.wait_event(source._copied)
        return True

    def new_event(self, name: str) -> CudaEvent:
        """An event of this device."""
        return CudaEvent(self, name)

    def wait_event(self, event: Event) -> None:
        """Let later work here wait for an event of this or another card; for others the host waits."""
        self.note("event_wait", device=self.name, event=event.name)
        if isinstance(event, CudaEvent):
            self.stream.wait_event(event.mark)
        else:
            event.synchronize()

    def synchronize(self, copies: bool = True) -> None:
        """Let the host wait until the device is done; without `copies`, what `prefetch` asked for may still be on its way.

        Raises ParameterError where indices of a graph were out of range.
        """
        self.note("sync", device=self.name)
        self.stream.synchronize()
        if copies:
            self.copy_stream.synchronize()
        self._in_flight.clear()
        while self._fetching and self._fetching[0][0].done:
            self._fetching.popleft()
        self._note_spans()
        self._raise_wrong()

    def cancel(self) -> None:
        """Wait for what was asked for: a card cannot forget it."""
        self.stream.synchronize()
        self.copy_stream.synchronize()
        self._in_flight.clear()
        self._fetching.clear()
        self._spans.clear()
        if self._checks:
            self._checks.clear()
            with self._here():
                self._wrong[...] = 0

    # ---- memory

    def memory_report(self) -> dict[str, int]:
        """Bytes this backend holds beside the buffers of tensors."""
        with self.cupy.cuda.Device(self.device):
            pool = {"pool, in use": self.memory.pool.used_bytes(), "pool, kept": self.memory.pool.free_bytes()}
        return {"work buffer": 0 if self._work is None else self._work.size, "dequantised weights": self.dequant_cache.used, **pool}

    def close(self) -> None:
        """Give work buffer and decoded weights back; the backend can still be used."""
        self.cancel()
        self._work = None
        self.dequant_cache.clear()
        with self.cupy.cuda.Device(self.device):
            self.memory.pool.free_all_blocks()
