"""What every device offers: types of memory, pieces of it, and the ability to compute graphs.

A `Backend` runs kernels over its own array library `xp`; it sees tensors only through `operand`, so the same planner
and the same kernels serve the host, simulated devices and CUDA.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from workbench.errors import AllocationError, ParameterError, UnsupportedOp, shown
from workbench.tensors.storage import HostStorage, Storage, Usage
from workbench.tensors.tensor import Tensor

if TYPE_CHECKING:
    from workbench.cgraph import CGraph
    from workbench.devices.plan import Plan
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

    buffer_type: BufferType

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

    max_size: bytes of the largest buffer, None for no limit. make(buffer_type, size, usage) takes the memory.
    """

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
        """A fresh buffer of `size` bytes (`ggml_backend_buft_alloc_buffer`). Raises AllocationError."""
        if self.max_size is not None and size > self.max_size:
            raise AllocationError(f"{size:,} bytes of {self.name} in one buffer", f"at most {self.max_size:,}",
                                  "use several buffers")  # fmt: skip
        return self._make(self, size, usage)

    def __repr__(self) -> str:
        limit = f", at most {self.max_size:,} bytes" if self.max_size is not None else ""
        return f"<BufferType {self.name}, aligned to {self.alignment}{limit}{', host' if self.is_host else ''}>"


HOST_MEMORY = BufferType("CPU", alignment=32)
"""Ordinary host memory (`ggml_backend_cpu_buffer_type`): tensors start at multiples of 32 bytes."""
HOST_HANDED_IN = BufferType("CPU_Mapped", alignment=32)
"""Host memory that someone else owns: an arena, a mapped file (`ggml_backend_cpu_buffer_from_ptr`)."""


def buffer_type_of(storage: Storage) -> BufferType:
    """The type of the memory behind a storage; arenas and mapped files count as host memory that was handed in."""
    return getattr(storage, "buffer_type", HOST_HANDED_IN)


class Backend:
    """A device together with the code that computes on it (`ggml_backend`).

    Subclasses set name, device_type, buffer_type and xp (the array library of the kernels) and override `operand`,
    `why_unsupported` and `work_memory`. `can_async` and `can_events` say whether the device has streams and events.
    """

    name: str
    device_type: DeviceType
    buffer_type: BufferType
    xp: ModuleType = np
    n_threads = 1
    activation_rounding = "none"
    lock: AbstractContextManager[Any]  # held while a graph is computed
    can_async = False
    can_events = False

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
        found = [None if s is None else self.operand(s) for s in node.src]
        if node.op in PRODUCTS and node.src[0] is not None:
            found[0] = self.weights(node.src[0])
        return tuple(found)

    def weights(self, tensor: Tensor) -> WeightSource:
        """Where a product reads the matrices of `tensor` from."""
        raise NotImplementedError

    def kernel_options(self, node: Tensor) -> dict[str, Any]:
        """What the kernel of `node` is told beside the node's own parameters."""
        return {"rounding": self.activation_rounding} if node.op in PRODUCTS else {}

    def work_memory(self, nbytes: int) -> Any:
        """Scratch memory of at least `nbytes` bytes, a 1-D uint8 array of `xp`, shared by the plans of this backend."""
        raise NotImplementedError

    def run_tasks(self, tasks: Sequence[Sequence[Callable[[], Any]]]) -> None:
        """Run every task of one node; `tasks[w]` are the calls as worker `w` makes them (n_threads > 1 only)."""
        raise NotImplementedError

    def plan(self, graph: CGraph) -> Plan:
        """Bind every node of the graph to its kernel, once (`ggml_backend_graph_plan_create`)."""
        from workbench.devices.plan import Plan

        return Plan(self, graph)

    def compute(self, graph: CGraph) -> None:
        """Compute all nodes of a graph whose tensors have memory (`ggml_backend_graph_compute`)."""
        self.plan(graph).run()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until everything asked of this backend is done (`ggml_backend_synchronize`)."""

    def memory_report(self) -> dict[str, int]:
        """Bytes this backend holds beside the buffers of tensors."""
        return {}

    def close(self) -> None:
        """Give back threads and memory (`ggml_backend_free`)."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.device_type.value})>"
