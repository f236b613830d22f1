"""Simulated devices: they really compute, in memory of their own and in virtual time.

Host code cannot read their memory, and fresh or freed memory is 0xFF everywhere, which reads as NaN. Work that was asked
for becomes real when the virtual clock reaches its end, in the order of virtual time and not of the calls: whoever forgets to wait reads
old bytes. Results are exact; times are the same on every machine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from workbench.devices import cost
from workbench.devices.backend import (
    HOST_HANDED_IN,
    HOST_MEMORY,
    Backend,
    BufferType,
    DeviceType,
    Event,
    NodeList,
    batch_size,
)
from workbench.devices.cpu import CpuBackend
from workbench.devices.simulated_memory import FRESH, Machine, SimulatedMemory, move_bytes
from workbench.errors import AllocationError, StorageError, shown
from workbench.kernels.blocks import operand
from workbench.kernels.weights import WeightSource, weights_of
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace


class SimulatedEvent:
    """A mark in the work of a simulated device."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device, self.name, self.time = device, name, 0

    def record(self) -> None:
        """Mark the work asked for so far."""
        self.device.note("event_record", device=self.device.name, event=self.name)
        self.time = self.device.free_at

    def synchronize(self) -> None:
        """Let the host wait for the mark."""
        if self.device.machine.leaves_out("event_sync", self.name):
            return
        self.device.note("event_sync", max(self.time, self.device.machine.now), event=self.name)
        self.device.machine.reach(self.time)

    @property
    def done(self) -> bool:
        """Whether the host's clock has come to the mark."""
        return self.time <= self.device.machine.now


class SimulatedDevice(Backend):
    """A device that exists in virtual time only, computing with the real kernels (`ggml_backend`).

    deny_ops, allow_ops (None: all), deny_types: what it supports, by op or telling name and by type. reads: names of the
    buffer types it works on, its own included. offload_min_batch: batch from which it offers to compute ops whose weights lie in host
    memory; None: never. waits: whether it has a stream that one can wait for; without one every call returns when the work is
    done, as on a CPU. async_copy, async_io, events: which asynchronous abilities it has. optimizer: its `optimize`.
    fail_compute, fail_copy: the n-th launch or asynchronous copy from now on fails (1: the next), for tests.
    """

    def __init__(self, machine: Machine, name: str, memory: BufferType, device_type: DeviceType = DeviceType.GPU, *,
                 reads: Collection[str] = (), deny_ops: Collection[str] = (), allow_ops: Collection[str] | None = None,
                 deny_types: Collection[str] = (), offload_min_batch: int | None = None, async_copy: bool = True,
                 async_io: bool = True, waits: bool | None = None, events: bool = True, speed: cost.Speed | None = None,
                 optimizer: Callable[[list[Tensor], Callable[[Tensor, Tensor], None]], list[Tensor]] | None = None,
                 activation_rounding: str = "none") -> None:  # fmt: skip
        self.machine, self.name, self.buffer_type, self.device_type = machine, name, memory, device_type
        self.reads_types = frozenset(reads) | {memory.name}
        self.deny_ops, self.deny_types = frozenset(deny_ops), frozenset(deny_types)
        self.allow_ops = None if allow_ops is None else frozenset(allow_ops)
        self.offload_min_batch = offload_min_batch
        self.offers: Callable[[Tensor], bool] | None = None  # asked besides, where several devices share what lies on the host
        self.async_copy, self.async_io, self.events = async_copy, async_io, events
        self.waits = device_type is not DeviceType.CPU if waits is None else waits
        self.speed = speed or (cost.CPU if device_type is DeviceType.CPU else cost.GPU)
        self.activation_rounding = activation_rounding
        self.optimizer = optimizer
        self.free_at = 0  # when the work asked for so far is done
        self.copied_at = 0  # the same of the copy stream
        self._open_at = 0  # from when on others may copy into its memory: when the awaited events are reached
        self.fail_compute = self.fail_copy = 0
        self.lock = self.turn = machine.lock
        self._kernels = CpuBackend(activation_rounding=activation_rounding, dequant_cache_bytes=0)
        self._calls: weakref.WeakKeyDictionary[Any, list[tuple[Tensor, Callable[[], Any], int]]] = weakref.WeakKeyDictionary()

    # ---- what it can do

    def why_unsupported(self, node: Tensor) -> str:
        """The reason why this device cannot compute `node`; empty where it can."""
        names = {node.op, node.desc}
        if names & self.deny_ops:
            return f"{self.name} is made without {node.desc}"
        if node.op == "NONE" or (node.spec is not None and node.spec.is_view):
            return ""
        if self.allow_ops is not None and not names & self.allow_ops:
            return f"{self.name} is made for {', '.join(sorted(self.allow_ops))} only"
        for t in (node, *node.sources()):
            if t.dtype.name in self.deny_types:
                return f"{self.name} is made without {t.dtype}"
        return self._kernels.why_unsupported(node)

    def require_op(self, node: Tensor) -> None:
        """Raise UnsupportedOp only where there is no kernel: not to ask for what a device does not support is the
        scheduler's business."""
        self._kernels.require_op(node)

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether it works on memory of this type."""
        return buft.name in self.reads_types

    def offload_op(self, node: Tensor) -> bool:
        """Whether the batch is large enough to bring the weights over (`ggml_backend_cuda_device_offload_op`)."""
        enough = self.offload_min_batch is not None and batch_size(node) >= self.offload_min_batch
        return enough and (self.offers is None or self.offers(node))

    # ---- kernels

    def operand(self, tensor: Tensor) -> Any:
        """The tensor's memory as this device sees it."""
        return operand(tensor, tensor.require_data().device_bytes())

    def weights(self, tensor: Tensor) -> WeightSource:
        """Where a product reads `tensor` from."""
        return weights_of(tensor, None, tensor.require_data().device_bytes())

    def work_memory(self, nbytes: int) -> np.ndarray:
        """Scratch memory; as on a real card it is not part of the capacity."""
        return self._kernels.work_memory(nbytes)

    # ---- its stream

    @property
    def trace(self) -> Trace | None:
        """Where calls are recorded: the devices of a machine share it."""
        return self.machine.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.machine.trace = trace

    def note(self, kind: str, end: int | None = None, **fields: Any) -> None:
        """Record a call, and when the host goes on after it."""
        if self.trace is not None:
            self.trace.add(kind, self.machine.now, end, **fields)

    def _ask(self, ns: int, name: str, effect: Callable[[], Any], copied: int | None = None) -> None:
        """Put work of `ns` nanoseconds behind what was asked for so far; `copied`: the bytes of a copy."""
        self.free_at = self._busy("compute", max(self.free_at, self.machine.now), ns, name, effect, copied)
        if not self.waits:  # no stream: the host does the work itself, or stands beside it
            self.machine.reach(self.free_at)

    def _busy(self, stream: str, start: int, ns: int, name: str, effect: Callable[[], Any], copied: int | None) -> int:
        if self.trace is not None:
            work = "compute" if copied is None else "copy"
            self.trace.add("busy", start, start + ns, device=self.name, stream=stream, work=work, name=name, bytes=copied or 0)
        self.machine.ask(start + ns, effect, self)
        return start + ns

    def compute_async(self, graph: NodeList) -> None:
        """Ask for all nodes; each happens when the clock reaches its end."""
        if self.fail_compute:
            self.fail_compute -= 1
            if not self.fail_compute:
                raise AllocationError(f"a computation on {shown(self.name)} was made to fail", "success")
        calls = self._bound(graph)
        self._log_launch(graph.nodes)
        self.machine.reach(self.machine.now)
        share = getattr(graph, "share", 1.0)
        for node, call, ns in calls:
            self._ask(int(ns * share) if node.op == "MUL_MAT_ID" else ns, node.name, call)

    def _bound(self, graph: NodeList) -> list[tuple[Tensor, Callable[[], Any], int]]:
        """Each node that needs work, the call that does it, and how long it takes."""
        plan = self._plans.get(graph)
        if plan is None or not plan.fits():
            plan = self.plan(graph)
            self._calls[graph] = [(node, call, self.speed.compute_ns(node)) for node, call in plan.calls()]
            self._plans[graph] = plan  # last: whoever is interrupted before that starts anew
        return self._calls[graph]

    def then(self, effect: Callable[[], Any], copies: bool = False) -> None:
        """Let the host do something at the time that the compute stream, or the copy stream, has reached by then."""
        self.machine.ask(max(self.copied_at if copies else self.free_at, self.machine.now), effect, self)
        self.machine.reach(self.machine.now)

    def set_async(self, tensor: Tensor, data: np.ndarray, offset: int = 0) -> None:
        """Ask for host bytes to be written; they are read when the transfer happens, not now."""
        if not self.async_io:
            return super().set_async(tensor, data, offset)
        pinned, ns, effect = self._writing(tensor, data, offset)
        self._ask(ns, tensor.name, effect, data.nbytes)
        if not pinned:  # the driver copies through its own pinned buffer, and the host with it
            self.machine.reach(self.free_at)
        return None

    def prefetch(self, tensor: Tensor, data: np.ndarray, offset: int = 0, after: Event | None = None) -> SimulatedEvent:
        """`set_async` on the copy stream, beside what the device computes: after `after`, up to the event that is returned.

        As with `CudaBackend.prefetch` nothing else keeps the two apart: `after` says when the memory is no longer read, and `wait_event`
        of the result stands before the first use.
        """
        done = SimulatedEvent(self, f"{self.name} has {tensor.name}")
        pinned, ns, effect = self._writing(tensor, data, offset)
        start = max(self.copied_at, self.machine.now, after.time if isinstance(after, SimulatedEvent) else 0)
        done.time = self.copied_at = self._busy("copies", start, ns, tensor.name, effect, data.nbytes)
        if not (pinned and self.waits):
            self.machine.reach(self.copied_at)
        return done

    def _writing(self, tensor: Tensor, data: np.ndarray, offset: int) -> tuple[bool, int, Callable[[], Any]]:
        """A copy out of host memory: whether that is pinned, the time it takes, and what does it."""
        self._count_copy(tensor)
        self.note("set_async", device=self.name, name=tensor.name, offset=offset, bytes=data.nbytes)
        start = tensor.offset + offset
        target = tensor.require_data().device_bytes()[start : start + data.nbytes]
        pinned = self.speed.pageable is None or self.machine.is_pinned(data)
        return pinned, self.speed.transfer_ns(data.nbytes, pinned), lambda: np.copyto(target, data)

    def get_async(self, tensor: Tensor) -> np.ndarray:
        """Ask for the bytes of a tensor; the array is filled when the transfer happens."""
        if not self.async_io:
            return super().get_async(tensor)
        self.note("get_async", device=self.name, name=tensor.name, offset=0, bytes=tensor.nbytes)
        source = tensor.require_data().device_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        out = np.full(tensor.nbytes, FRESH, np.uint8)
        self._ask(self.speed.transfer_ns(tensor.nbytes), tensor.name, lambda: np.copyto(out, source), tensor.nbytes)
        return out

    def copy_async(self, source: Backend, tensor: Tensor, copy: Tensor) -> bool:
        """Ask for a copy between two devices, as CUDA makes it: the stream of the source does it, and this device's later
        work waits for it. Nothing but an awaited event keeps it from starting while this device still reads what it overwrites."""
        if not self.async_copy:
            return False
        done = isinstance(source, SimulatedDevice) and source.async_copy
        self.note("copy_async", device=source.name, target=self.name, name=tensor.name, copy=copy.name, bytes=tensor.nbytes, done=done)
        if done:
            assert isinstance(source, SimulatedDevice)
            self._count_copy(copy)
            source.free_at = max(source.free_at, self._open_at)
            ns = max(d.speed.transfer_ns(tensor.nbytes) for d in (self, source))  # the slower of two links
            source._ask(ns, copy.name, lambda: move_bytes(tensor, copy), tensor.nbytes)
            self.free_at = max(self.free_at, source.free_at)
        return done

    def _count_copy(self, tensor: Tensor) -> None:
        if self.fail_copy:
            self.fail_copy -= 1
            if not self.fail_copy:
                raise StorageError(f"the copy of {tensor.label} to {shown(self.name)} was made to fail", "success")

    def new_event(self, name: str) -> Event | None:
        """An event, where the device has them."""
        return SimulatedEvent(self, name) if self.events else None

    def wait_event(self, event: Event) -> None:
        """Let later work here wait for an event."""
        if self.machine.leaves_out("event_wait", event.name):
            return
        self.note("event_wait", device=self.name, event=event.name)
        assert isinstance(event, SimulatedEvent)
        self.free_at = max(self.free_at, event.time)
        self._open_at = max(self._open_at, event.time)

    @property
    def optimizes(self) -> bool:  # type: ignore[override]
        """Whether it has an optimizer."""
        return self.optimizer is not None

    def optimize(self, nodes: list[Tensor], keep: Callable[[Tensor, Tensor], None]) -> list[Tensor]:
        """The order of a split's nodes, by the device's optimizer."""
        return self.optimizer(nodes, keep) if self.optimizer else nodes

    def cancel(self) -> None:
        """Forget what it was asked for."""
        self.machine.cancel(self)
        self.free_at = self.copied_at = self.machine.now

    def synchronize(self, copies: bool = True) -> None:
        """Let the host wait until the device is done; without `copies`, what `prefetch` asked for may still be on its way."""
        if self.waits and not self.machine.leaves_out("sync", self.name):
            done = max(self.free_at, self.copied_at if copies else 0, self.machine.now) + self.speed.sync_ns
            self.note("sync", done, device=self.name)
            self.machine.reach(done)


def simulated_machine(gpus: int | str = 1, memory: int | None = None, *, host_memory: int | None = None, offload_min_batch: int | None = 32,
                      trace: Trace | None = None, **abilities: Any) -> list[SimulatedDevice]:  # fmt: skip
    """A machine with GPUs of `memory` bytes each (None: no limit) and a CPU: the backends for a `Scheduler`, the CPU last.

    offload_min_batch: batch from which a GPU takes ops whose weights lie on the host. abilities: further keywords of
    SimulatedDevice for the GPUs (deny_ops, async_copy, speed, …). `backends[0].machine` is the clock.

    With names in place of a number, as "rtx3090-pcie4" or "laptop,cpu", devices and host are those of presets: see
    `machines.preset_machine`.
    """
    if isinstance(gpus, str):
        from workbench.devices.machines import preset_machine

        return preset_machine(gpus, memory, host_memory=host_memory, offload_min_batch=offload_min_batch, trace=trace, **abilities)
    machine = Machine(trace)
    names = ["GPU"] if gpus == 1 else [f"GPU{i}" for i in range(gpus)]
    kinds = [SimulatedMemory(machine, name, capacity=memory) for name in names]
    cards = [SimulatedDevice(machine, k.name, k, offload_min_batch=offload_min_batch, **abilities) for k in kinds]
    host = SimulatedMemory(machine, HOST_MEMORY.name, HOST_MEMORY.alignment, is_host=True, capacity=host_memory, speed=cost.CPU)
    cpu = SimulatedDevice(machine, "CPU", host, DeviceType.CPU, reads=[HOST_HANDED_IN.name], events=False, async_copy=False, async_io=False)
    return [*cards, cpu]
