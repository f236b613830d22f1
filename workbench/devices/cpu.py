"""The CPU: kernels over NumPy, host memory, one plan per graph, threads for large nodes (`ggml_backend_cpu`)."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.devices.backend import HOST_MEMORY, Backend, DeviceType
from workbench.devices.threads import Workers
from workbench.errors import ParameterError
from workbench.kernels.blocks import operand
from workbench.kernels.kernel import Step
from workbench.kernels.weights import DequantCache, WeightSource, weights_of
from workbench.tensors.storage import aligned_bytes
from workbench.tensors.tensor import Tensor

DEQUANT_CACHE_BYTES = 64 * 2**20
"""Room for weights kept as f32 after they were decoded once."""
ROUNDINGS = ("none", "ggml")
TAKES_BLOCKS = {"MUL_MAT": (1, 2), "MUL_MAT_ID": (1, 2), "GET_ROWS": (1,), "SET_ROWS": (0, 3), "CPY": (0, 1, 2), "CONT": (0, 1),
                "DUP": (0, 1)}  # fmt: skip
"""Where bf16 and block types may stand: 0 the result, 1 the first source, and so on."""


def why_no_kernel(node: Tensor) -> str:
    """The reason why no kernel of the table computes `node`; empty where one does."""
    spec = node.spec
    if node.op == "NONE" or (spec and spec.is_view):
        return ""
    if spec is None or spec.kernel is None:
        return (spec.without.get("kernel", "") if spec else "") or f"there is no kernel for {node.desc} yet"
    takes = TAKES_BLOCKS.get(node.op, ())
    for i, t in enumerate((node, *node.src)):
        if t is None or t.dtype.numpy is not None:
            continue
        if i not in takes:
            return f"{node.desc} does not read or write {t.dtype}: cast {t.label} to f32 first"
        if t.dtype.decode is None:
            return f"{t.dtype} cannot be decoded here: store {t.label} in f16, q8_0 or another type that `gguf` decodes"
    return ""


class CpuBackend(Backend):
    """The CPU as a device (`ggml_backend_cpu_init`). One backend computes one graph at a time.

    n_threads: threads that share large nodes; results are the same bits for any number. activation_rounding: "none", or
    "ggml" to round the right side of products to the weight's partner type first, as ggml does for speed.
    dequant_cache_bytes: room for decoded f16 and quantised weights; 0 decodes them at each use.
    """

    device_type = DeviceType.CPU
    buffer_type = HOST_MEMORY
    xp = np

    def __init__(self, n_threads: int = 1, activation_rounding: str = "none",
                 dequant_cache_bytes: int = DEQUANT_CACHE_BYTES, name: str = "CPU") -> None:  # fmt: skip
        if not isinstance(n_threads, int) or n_threads < 1:
            raise ParameterError(f"n_threads={n_threads!r}", "1 or more", "os.cpu_count() says how many the machine runs at once")
        if activation_rounding not in ROUNDINGS:
            raise ParameterError(f"activation_rounding={activation_rounding!r}", f"one of {ROUNDINGS}")
        if dequant_cache_bytes < 0:
            raise ParameterError(f"dequant_cache_bytes={dequant_cache_bytes}", "0 or more")
        self.name, self.n_threads, self.activation_rounding = name, n_threads, activation_rounding
        self.dequant_cache = DequantCache(dequant_cache_bytes)
        self.lock = threading.RLock()
        self._workers = Workers(n_threads)
        self._work = np.empty(0, np.uint8)
        self._work_pieces: list[weakref.ref[np.ndarray]] = []

    def why_unsupported(self, node: Tensor) -> str:
        """The reason why the CPU cannot compute `node`; empty where it can."""
        return why_no_kernel(node)

    def operand(self, tensor: Tensor) -> Any:
        """The tensor's memory as a 4-D NumPy view; `blocks.Rows` for bf16 and quantised types."""
        return operand(tensor)

    def weights(self, tensor: Tensor) -> WeightSource:
        """Where a product reads `tensor` from: its own memory, or decoded through the cache."""
        return weights_of(tensor, self.dequant_cache)

    def run_tasks(self, tasks: Sequence[Sequence[Step]]) -> None:
        """Let the threads share the tasks of one node."""
        self._workers.run(tasks)

    def work_memory(self, nbytes: int) -> np.ndarray:
        """The work buffer, at least `nbytes` long (`ggml_cplan.work_data`); plans of one backend share it."""
        if self._work.size < nbytes:
            self._work = aligned_bytes(nbytes)
            self._work_pieces = [r for r in self._work_pieces if r() is not None] + [weakref.ref(self._work)]
        return self._work

    def memory_report(self) -> dict[str, int]:
        """Bytes this backend holds beside the buffers of tensors."""
        pieces = [a for r in self._work_pieces if (a := r()) is not None]
        return {"work buffer": sum(a.size for a in pieces), "dequantised weights": self.dequant_cache.used}

    def close(self) -> None:
        """End the threads, give the work buffer and decoded weights back; the backend can still be used."""
        self._workers.close()
        self._work = np.empty(0, np.uint8)
        self.dequant_cache.clear()
