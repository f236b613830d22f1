"""What every device offers: types of memory, pieces of it, and the ability to compute graphs.

A `Backend` runs kernels over its own array library `xp`; it sees tensors only through `operand`, so the same planner
and the same kernels serve the host, simulated devices and CUDA.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from workbench.errors import ParameterError, UnsupportedOp, shown
from workbench.tensors.storage import HostStorage, Storage, Usage
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace

if TYPE_CHECKING:
    from workbench.devices.plan import Plan
    from workbench.kernels.kernel import Kernel
    from workbench.kernels.weights import WeightSource

PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID"})
"""Ops that ask a weight source for their first operand."""


class DeviceType(enum.Enum):
    """What kind of device a backend drives (`ggml_backend_dev_type`)."""

    CPU = "CPU"
    GPU = "GPU"
    ACCEL = "ACCEL"


class Buffer(Storage, Protocol):
    """A piece of a device's memory (`ggml_backend_buffer`): a storage that knows its type and can be given back."""

    @property
    def buffer_type(self) -> BufferType:
        """Its kind of memory."""
        ...

    def clear(self, value: int = 0) -> None:
        """Set every byte (`ggml_backend_buffer_clear`)."""
        ...

    def close(self) -> None:
        """Give the memory back (`ggml_backend_buffer_free`)."""
        ...


class HostBuffer(HostStorage):
    """A buffer in ordinary host memory (`ggml_backend_cpu_buffer_type` makes such ones)."""

    def __init__(self, buffer_type: BufferType, memory: int | Any, usage: Usage = Usage.ANY, name: str = "") -> None:
        super().__init__(memory, name or buffer_type.name, usage)
        self.buffer_type = buffer_type

    def clear(self, value: int = 0) -> None:
        """Set every byte (`ggml_backend_buffer_clear`)."""
        self.host_bytes()[:] = value
        self.version += 1


class BufferType:
    """A kind of memory: its alignment, its largest piece, and who can see it (`ggml_backend_buffer_type`).

    max_size: bytes of the largest piece that a planner should ask for, None for no limit. Only the device refuses: as in ggml,
    a tensor that is larger gets a piece of its own. make(buffer_type, size, usage) takes the memory.
    """

    now = 0  # virtual time, where the memory belongs to a simulated machine

    def __init__(self, name: str, alignment: int = 32, max_size: int | None = None, is_host: bool = True,
                 make: Callable[[BufferType, int, Usage], Buffer] = HostBuffer) -> None:  # fmt: skip
        if alignment < 1 or alignment & (alignment - 1):
            raise ParameterError(f"alignment {alignment} of buffer type {shown(name)}", "a power of two")
        self.name, self.alignment, self.max_size, self.is_host = name, alignment, max_size, is_host
        self._make = make

    def alloc_size(self, tensor: Tensor) -> int:
        """Bytes that `tensor` takes here, padding not included (`ggml_backend_buft_get_alloc_size`)."""
        return tensor.nbytes

    def alloc_buffer(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A fresh buffer of `size` bytes (`ggml_backend_buft_alloc_buffer`). Raises AllocationError where there is no room."""
        return self._make(self, size, usage)

    def __repr__(self) -> str:
        limit = f", at most {self.max_size:,} bytes" if self.max_size is not None else ""
        return f"<BufferType {self.name}, aligned to {self.alignment}{limit}{', host' if self.is_host else ''}>"


class Event(Protocol):
    """A point in the work of a device that host and other devices can wait for (`ggml_backend_event`)."""

    name: str

    def record(self) -> None:
        """Mark the work asked for so far (`ggml_backend_event_record`)."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for the mark (`ggml_backend_event_synchronize`)."""
        ...

    @property
    def done(self) -> bool:
        """Whether the mark was reached, without waiting (`cudaEventQuery`)."""
        ...


HOST_MEMORY = BufferType("CPU", alignment=32)
"""Ordinary host memory (`ggml_backend_cpu_buffer_type`): tensors start at multiples of 32 bytes."""
HOST_HANDED_IN = BufferType("CPU_Mapped", alignment=32)
"""Host memory that someone else owns: an arena, a mapped file (`ggml_backend_cpu_buffer_from_ptr`)."""


def buffer_type_of(storage: Storage) -> BufferType:
    """The type of the memory behind a storage; arenas and mapped files count as host memory that was handed in."""
    return getattr(storage, "buffer_type", HOST_HANDED_IN)


def batch_size(node: Tensor) -> int:
    """Rows of work of an op, as the offload rule of ggml's GPU backends counts them (`get_op_batch_size`)."""
    if node.op == "GET_ROWS":
        return 0
    if node.op == "MUL_MAT":
        return node.ne[1]
    return node.ne[2] if node.op in ("MUL_MAT_ID", "ROPE") else node.n_rows


class NodeList(Protocol):
    """What a plan needs of a graph: its nodes, and that their contexts are open."""

    nodes: list[Tensor]

    def require_open(self) -> None:
        """Raise ContextClosed where a context was closed."""
        ...


def write_tensor(tensor: Tensor, data: np.ndarray, offset: int = 0, trace: Trace | None = None) -> None:
    """Write host bytes into a tensor at once (`ggml_backend_tensor_set`); `offset` counts from its first byte."""
    storage = tensor.require_data()
    if not data.nbytes:
        return
    kind = buffer_type_of(storage)
    start = kind.now
    storage.write(tensor.offset + offset, data)
    if trace is not None:
        trace.add("set", start, kind.now, memory=kind.name, name=tensor.name, offset=offset, bytes=data.nbytes)


def read_tensor(tensor: Tensor, trace: Trace | None = None) -> np.ndarray:
    """The bytes of a tensor, at once (`ggml_backend_tensor_get`)."""
    storage = tensor.require_data()
    kind = buffer_type_of(storage)
    start = kind.now
    data = storage.read(tensor.offset, tensor.nbytes)
    if trace is not None and tensor.nbytes:
        trace.add("get", start, kind.now, memory=kind.name, name=tensor.name, offset=0, bytes=tensor.nbytes)
    return data


def copy_tensor(tensor: Tensor, copy: Tensor, trace: Trace | None = None) -> None:
    """Copy between any two memories at once (`ggml_backend_tensor_copy`): through the host side where there is one, by
    the target's own hook where it has one, else out to the host and in again."""
    source, target = tensor.require_data(), copy.require_data()
    if source.is_host:
        write_tensor(copy, source.host_bytes()[tensor.offset : tensor.offset + tensor.nbytes], 0, trace)
    elif target.is_host:
        target.write(copy.offset, read_tensor(tensor, trace))
    else:
        hook = getattr(target, "copy_from", None)
        if hook is None or not hook(tensor, copy, trace):
            write_tensor(copy, read_tensor(tensor, trace), 0, trace)


class Backend:
    """A device together with the code that computes on it (`ggml_backend`).

    Subclasses set name, device_type, buffer_type and xp (the array library of the kernels) and override `operand`,
    `why_unsupported` and `work_memory`. Streams and events are abilities: without them the calls below wait or decline.
    trace: where its calls are recorded, or None.
    """

    name: str
    device_type: DeviceType
    buffer_type: BufferType
    xp: ModuleType = np
    n_threads = 1
    activation_rounding = "none"
    optimizes = False  # whether `optimize` has wishes
    lock: AbstractContextManager[Any] = nullcontext()  # held while a graph is computed
    turn: AbstractContextManager[Any] = nullcontext()  # held during a call of a scheduler: those of other threads wait
    trace: Trace | None = None

    def why_unsupported(self, node: Tensor) -> str:
        """The reason why this backend cannot compute `node`; empty where it can."""
        raise NotImplementedError

    def supports_op(self, node: Tensor) -> bool:
        """Whether this backend can compute `node` (`ggml_backend_supports_op`)."""
        return not self.why_unsupported(node)

    def require_op(self, node: Tensor) -> None:
        """Raise UnsupportedOp with op, types and reason where the backend cannot compute `node`."""
        if why := self.why_unsupported(node):
            types = ", ".join(s.dtype.name for s in node.sources())
            raise UnsupportedOp(f"{self.name} cannot compute {node.label}: {node.desc}({types}) -> {node.dtype}",
                                "an op and types it has a kernel for", why)  # fmt: skip

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether kernels here can work on memory of this type (`ggml_backend_supports_buft`)."""
        return buft is self.buffer_type or (buft.is_host and self.device_type is not DeviceType.GPU)

    def offload_op(self, node: Tensor) -> bool:
        """Whether it pays to compute `node` here although its weights lie on the host (`ggml_backend_offload_op`)."""
        return False

    def operand(self, tensor: Tensor) -> Any:
        """What a kernel gets for `tensor`: a 4-D array of `xp` over its memory, or `blocks.Rows` for block types."""
        raise NotImplementedError

    def operands(self, node: Tensor) -> tuple[Any, ...]:
        """The kernel's operands: one per source, None where an optional one is missing, weights of products as such."""
        first = self.weight_source if node.op in PRODUCTS else self.operand
        return tuple(None if s is None else (self.operand if j else first)(s) for j, s in enumerate(node.src))

    def weight_source(self, tensor: Tensor) -> WeightSource:
        """Where a product asks for the matrices of `tensor`: its memory itself may answer (a pool of experts), else `weights`."""
        answer = getattr(tensor.require_data(), "weight_source", None)
        return self.weights(tensor) if answer is None else answer(self)

    def weights(self, tensor: Tensor) -> WeightSource:
        """Where a product reads the matrices of `tensor` from."""
        raise NotImplementedError

    def kernel_options(self, node: Tensor) -> dict[str, Any]:
        """What the kernel of `node` is told beside the node's own parameters."""
        return {"rounding": self.activation_rounding} if node.op in PRODUCTS else {}

    def kernel(self, node: Tensor) -> Kernel:
        """The kernel that computes `node` here: the table's, unless a device has a better one."""
        assert node.spec is not None
        return node.spec.kernel

    def work_memory(self, nbytes: int) -> Any:
        """Scratch memory of at least `nbytes` bytes, a 1-D uint8 array of `xp`, shared by the plans of this backend."""
        raise NotImplementedError

    def run_tasks(self, tasks: Sequence[Sequence[Callable[[], Any]]]) -> None:
        """Run every task of one node; `tasks[w]` are the calls as worker `w` makes them (n_threads > 1 only)."""
        raise NotImplementedError

    @functools.cached_property
    def _plans(self) -> weakref.WeakKeyDictionary[Any, Plan]:
        return weakref.WeakKeyDictionary()

    def plan(self, graph: NodeList) -> Plan:
        """Bind every node of the graph to its kernel, once (`ggml_backend_graph_plan_create`)."""
        from workbench.devices.plan import Plan

        return Plan(self, graph)

    def compute(self, graph: NodeList) -> None:
        """Compute all nodes of a graph whose tensors have memory (`ggml_backend_graph_compute`)."""
        self.plan(graph).run()
        self.synchronize()

    # ---- asynchronous work: a backend without a stream does it at once

    def compute_async(self, graph: NodeList) -> None:
        """Ask for all nodes of a graph (`ggml_backend_graph_compute_async`)."""
        plan = self._plans.get(graph)
        if plan is None or not plan.fits():
            plan = self._plans[graph] = self.plan(graph)
        self._log_launch(graph.nodes)
        plan.execute()

    def set_async(self, tensor: Tensor, data: np.ndarray, offset: int = 0) -> None:
        """Ask for host bytes to be written at `offset` within the tensor (`ggml_backend_tensor_set_async`)."""
        self.synchronize()
        write_tensor(tensor, data, offset, self.trace)

    def get_async(self, tensor: Tensor) -> np.ndarray:
        """Ask for the tensor's bytes; they are there after `synchronize` (`ggml_backend_tensor_get_async`)."""
        self.synchronize()
        return read_tensor(tensor, self.trace)

    def copy_async(self, source: Backend, tensor: Tensor, copy: Tensor) -> bool:
        """Ask for a copy from another backend's memory into this one's; False where only a blocking copy can do it."""
        return False

    def then(self, effect: Callable[[], Any], copies: bool = False) -> None:
        """Let the host do something when this backend has got as far as it was asked to, or its copy stream.

        At once, where operands are chosen when work is asked for and not when it happens.
        """
        effect()

    def new_event(self, name: str) -> Event | None:
        """An event of this device, or None where it has none (`ggml_backend_event_new`)."""
        return None

    def wait_event(self, event: Event) -> None:
        """Let later work of this backend wait for an event of another one (`ggml_backend_event_wait`)."""
        event.synchronize()

    def synchronize(self, copies: bool = True) -> None:
        """Wait until everything asked of this backend is done (`ggml_backend_synchronize`); copies: its copy stream, too, if it has one."""

    def cancel(self) -> None:
        """Forget work that was asked for and did not happen yet: a run has failed."""

    def optimize(self, nodes: list[Tensor], keep: Callable[[Tensor, Tensor], None]) -> list[Tensor]:
        """The nodes of a split in the order that suits this device (`ggml_backend_graph_optimize`).

        keep(tensor, until): do not give the memory of `tensor` away before the node `until` (`add_alloc_dep`): a device that
        computes nodes side by side needs that.
        """
        return nodes

    def _log_launch(self, nodes: Sequence[Tensor]) -> None:
        if self.trace is not None:
            now = self.buffer_type.now
            self.trace.add("launch", now, device=self.name, count=len(nodes))
            for node in nodes:
                self.trace.add("queued", now, name=node.name)

    def memory_report(self) -> dict[str, int]:
        """Bytes this backend holds beside the buffers of tensors."""
        return {}

    def close(self) -> None:
        """Give back threads and memory (`ggml_backend_free`)."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.device_type.value})>"
