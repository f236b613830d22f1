"""A workbench for learning how large models are scheduled onto hardware.

Nothing is loaded before it is used, so `import workbench` is quick and `python -m workbench lab` runs on a bare Python.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # public name -> the room that holds it
    **dict.fromkeys(["Context", "DType", "Flag", "Tensor", "Usage", "dtype", "OPS"], "workbench.tensors"),
    "ops": "workbench.tensors.ops",
    **dict.fromkeys(["CGraph", "build", "build_backward_expand", "statistics"], "workbench.cgraph"),
    **dict.fromkeys(["Backend", "BufferType", "CpuBackend", "CudaBackend"], "workbench.devices"),
    **dict.fromkeys(["AdamW", "GraphAllocator", "GraphRunner", "Trainer", "compute"], "workbench.execution"),
    **dict.fromkeys(["SimulatedDevice", "simulated_machine"], "workbench.devices.simulated"),
    **dict.fromkeys(["Machine", "SimulatedMemory"], "workbench.devices.simulated_memory"),
    **dict.fromkeys(["Scheduler", "UsedExperts", "WeightTransfer", "WholeTensor"], "workbench.scheduler"),
    **dict.fromkeys(["GGUFFile", "Model", "Sampler", "Session", "Tokenizer", "generate", "load", "open_gguf"], "workbench.models"),
    **dict.fromkeys(["PlacedModel", "place_weights"], "workbench.models"),
    "plan_schedule": "workbench.models.planning",
    **dict.fromkeys(["RouteTrace", "Router", "build_moe_ffn"], "workbench.moe"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        importlib.import_module("workbench.kernels")  # fills the kernel columns of the op table and the type table
        home = importlib.import_module(_HOMES[name])
        value = home if _HOMES[name].rpartition(".")[2] == name else getattr(home, name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'workbench' has no attribute {name!r}; public names: {', '.join(sorted(_HOMES))}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
