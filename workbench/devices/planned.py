"""Devices that only plan: what a simulated machine would do with memory that it does not have.

Their buffers have addresses and sizes but no bytes, and their kernels take time but compute nothing. Everything else is the code
that runs: the scheduler, the runtime with its copies and waits, the clock and the trace. So a model that is far larger than this
machine's memory is split, placed and timed within seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from workbench.devices.backend import HOST_HANDED_IN, Buffer, BufferType, NodeList
from workbench.devices.machines import BlasDevice, preset_machine
from workbench.devices.plan import needs_work
from workbench.devices.simulated import SimulatedDevice
from workbench.devices.simulated_memory import DeviceBuffer, Machine, SimulatedMemory
from workbench.errors import StorageError, shown
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Tensor

Routes = Callable[[Tensor], np.ndarray]
"""The experts that a tensor of ids would hold, (tokens, k)."""


class PlannedMachine(Machine):
    """Virtual time in which nothing happens. routes: what tensors of expert ids are taken to hold."""

    routes: Routes | None = None

    def ask(self, end: int, effect: Callable[[], Any], device: object = None) -> None:
        """Nothing will happen."""


class PlannedBuffer(DeviceBuffer):
    """Addresses without bytes: every byte of it is the same one, which reads as zero."""

    def __init__(self, buffer_type: BufferType, size: int, usage: Usage = Usage.ANY, name: str = "") -> None:
        self.buffer_type, self.size, self.usage, self.is_host = buffer_type, size, usage, buffer_type.is_host  # type: ignore[assignment]
        self.name, self.version, self.closed = name or buffer_type.name, 0, False
        self._byte = np.zeros(1, np.uint8)
        self._bytes = np.broadcast_to(self._byte, size)
        if self.is_host and isinstance(buffer_type, PlannedMemory):
            buffer_type.machine.pinned[self._byte.ctypes.data] = 1

    def host_bytes(self) -> np.ndarray:
        """As many zeros as there are bytes, none of which takes memory."""
        if not self.is_host:
            return super().host_bytes()
        return self.device_bytes()

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """Zeros, after the time that reading takes."""
        self._check(offset, nbytes)
        self._spend(nbytes, None)
        return self.device_bytes()[offset : offset + nbytes]

    def write(self, offset: int, data: np.ndarray) -> None:
        """Nothing, after the time that writing takes."""
        self._check(offset, data.nbytes)
        self._spend(data.nbytes, data)
        self.version += 1

    def _spend(self, nbytes: int, data: np.ndarray | None) -> None:
        if not self.is_host:
            self.buffer_type.transfer(nbytes, data)

    def copy_from(self, tensor: Tensor, copy: Tensor, trace: Any) -> bool:
        """Never: planned cards copy through the host or on their streams."""
        return False

    def clear(self, value: int = 0) -> None:
        """Nothing."""
        self.version += 1

    def close(self) -> None:
        """Give the addresses back."""
        if not self.closed:
            self.closed = True
            if isinstance(self.buffer_type, PlannedMemory):
                self.buffer_type.machine.pinned.pop(self._byte.ctypes.data, None)
                self.buffer_type.released(self.size)


class PlannedMemory(SimulatedMemory):
    """A kind of memory that hands out addresses and counts them; without a limit, so that a plan can say by how much it fails.

    limit: the capacity of the device that it stands for.
    """

    def __init__(self, *args: Any, capacity: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limit = capacity

    def alloc_buffer(self, size: int, usage: Usage = Usage.ANY) -> Buffer:
        """A fresh range of addresses."""
        self.used += size
        self.peak = max(self.peak, self.used)
        if self.machine.trace is not None:
            self.machine.trace.add("alloc", self.machine.now, memory=self.name, bytes=size)
        return PlannedBuffer(self, size, usage)


class _Planning:
    """What planned devices do in place of computing."""

    machine: Machine
    speed: Any

    def require_op(self, node: Tensor) -> None:
        """Everything can be planned."""

    def _bound(self, graph: NodeList) -> list[tuple[Tensor, Callable[[], Any], int]]:
        return [(n, _nothing, self.speed.compute_ns(n)) for n in graph.nodes if needs_work(n)]

    def get_async(self, tensor: Tensor) -> np.ndarray:
        """Expert ids as the machine's `routes` say, after the time that reading them takes."""
        raw = np.array(super().get_async(tensor))  # type: ignore[misc]
        routes = self.machine.routes if isinstance(self.machine, PlannedMachine) else None
        if routes is None or tensor.dtype.name != "i32":
            raise StorageError(f"a plan was asked what {tensor.label} holds", "expert ids, and routes to take them from",
                               "backends[0].machine.routes = …")  # fmt: skip
        np.ndarray(tensor.ne[1::-1], np.int32, raw, 0, tensor.nb[1::-1])[...] = routes(tensor)
        return raw


class PlannedDevice(_Planning, SimulatedDevice):
    """A device that takes time and computes nothing."""


class PlannedBlas(_Planning, BlasDevice):
    """The same for an accelerator on host memory."""


def _nothing() -> None:
    pass


def planned_machine(names: str, memory: int | None = None, **options: Any) -> list[SimulatedDevice]:
    """A machine of presets, as `preset_machine` makes it, that only plans."""
    return preset_machine(names, memory, kinds=(PlannedMachine, PlannedMemory, PlannedDevice, PlannedBlas), **options)


def planned_file(size: int, name: str) -> PlannedBuffer:
    """Stands for a mapped file of weights: pageable host memory that nobody ever reads."""
    return PlannedBuffer(HOST_HANDED_IN, size, Usage.WEIGHTS, f"file {shown(name)}")
