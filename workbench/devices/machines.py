"""Machines made of presets, such as "rtx3090-pcie4,rtx3090-pcie4" or "laptop,blas,cpu"."""

from __future__ import annotations

from typing import Any

from workbench.devices import cost
from workbench.devices.backend import HOST_HANDED_IN, HOST_MEMORY, DeviceType
from workbench.devices.simulated import SimulatedDevice
from workbench.devices.simulated_memory import Machine, SimulatedMemory
from workbench.errors import ParameterError, shown
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace

HOST = "cpu"
"""The host of machines that name none."""
MOST_CARDS = 15  # GGML_SCHED_MAX_BACKENDS less the host


class BlasDevice(SimulatedDevice):
    """An accelerator that shares the host's memory and computes large dense products only (`ggml_backend_blas`)."""

    def why_unsupported(self, node: Tensor) -> str:
        """The rule of ggml's BLAS backend: packed f32 activations, and at least 32 of everything."""
        if node.op == "MUL_MAT":
            weights, x = node.src[:2]
            assert weights is not None and x is not None
            if not (weights.is_contiguous and x.is_contiguous and x.dtype.name == "f32"):
                return f"{self.name} multiplies packed matrices, the right one in f32"
            if min(node.ne[0], node.ne[1], x.ne[0]) < 32:
                return f"{self.name} leaves products with less than 32 rows, columns or terms to the CPU"
        return super().why_unsupported(node)


def preset_names(text: str) -> list[cost.Preset]:
    """The presets that a text names, as devices stand in a scheduler: cards, accelerators, the host last; that is "cpu" where
    none is named. Raises ParameterError where one is unknown or there are two hosts."""
    named = [p for word in text.split(",") for p in cost.devices_of(word.strip())]
    found = sorted(named, key=lambda p: cost.KINDS.index(p.kind))
    if sum(p.kind == "CPU" for p in found) > 1 or sum(p.kind == "BLAS" for p in found) > 1 or len(found) > MOST_CARDS:
        raise ParameterError(
            f"devices {shown(text)!r}", f"at most {MOST_CARDS} devices, one accelerator and one CPU among them"
        )
    return found if found[-1].kind == "CPU" else [*found, cost.preset(HOST)]


def preset_machine(names: str, memory: int | None = None, *, host_memory: int | None = None, offload_min_batch: int | None = 32,
                   trace: Trace | None = None, kinds: Any = (Machine, SimulatedMemory, SimulatedDevice, BlasDevice),
                   **abilities: Any) -> list[SimulatedDevice]:  # fmt: skip
    """The backends of a machine of presets, for a `Scheduler`.

    memory: bytes of each card instead of the preset's; host_memory: of the host (None: no limit). kinds: the classes to make them of.
    """
    make_machine, make_memory, make_device, make_blas = kinds
    wanted = preset_names(names)
    cards = sum(p.kind == "GPU" for p in wanted)
    machine = make_machine(trace)
    host_speed = wanted[-1].speed
    host = make_memory(
        machine, HOST_MEMORY.name, HOST_MEMORY.alignment, is_host=True, capacity=host_memory, speed=host_speed
    )
    beside: dict[str, Any] = {"reads": [HOST_HANDED_IN.name], "events": False, "async_copy": False, "async_io": False}
    out: list[SimulatedDevice] = []
    for i, p in enumerate(wanted):
        if p.kind == "GPU":
            name = "GPU" if cards == 1 else f"GPU{i}"
            kind = make_memory(machine, name, capacity=memory or p.capacity or None, speed=p.speed)
            out.append(
                make_device(machine, name, kind, offload_min_batch=offload_min_batch, **{"speed": p.speed, **abilities})
            )
        elif p.kind == "BLAS":
            out.append(
                make_blas(
                    machine, "BLAS", host, DeviceType.ACCEL, allow_ops=["MUL_MAT"], waits=False, speed=p.speed, **beside
                )
            )
        else:
            out.append(make_device(machine, "CPU", host, DeviceType.CPU, speed=p.speed, **beside))
    return out
