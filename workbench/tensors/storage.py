"""Where the bytes of a tensor live.

`Storage` is the protocol that every buffer implements, host or device (`ggml_backend_buffer`). A tensor only knows a
storage and an offset into it; host code reads `host_bytes()` and device code hands out its own array type.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol, runtime_checkable

import numpy as np

from workbench.errors import AllocationError, StorageError


class Usage(enum.Enum):
    """What a buffer is for (`ggml_backend_buffer_usage`)."""

    ANY = "any"
    WEIGHTS = "weights"
    COMPUTE = "compute"


@runtime_checkable
class Storage(Protocol):
    """Bytes somewhere (`ggml_backend_buffer`)."""

    name: str
    size: int
    usage: Usage
    is_host: bool
    version: int  # grows with each write from outside a graph run: caches of derived data compare it
    closed: bool

    def host_bytes(self) -> np.ndarray:
        """The whole memory as a 1-D uint8 array without a copy. Raises StorageError where host code cannot see it."""
        ...

    def device_bytes(self) -> Any:
        """The whole memory as a 1-D uint8 array of the device's own array library."""
        ...

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """A host copy of `nbytes` bytes (`ggml_backend_tensor_get`)."""
        ...

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy host bytes in (`ggml_backend_tensor_set`)."""
        ...


def aligned_bytes(size: int, alignment: int = 64) -> np.ndarray:
    """A fresh uint8 array whose address is a multiple of `alignment`. Raises AllocationError."""
    try:
        raw = np.empty(size + alignment, np.uint8)
    except (MemoryError, ValueError) as e:
        raise AllocationError(f"{size:,} bytes of host memory asked for", "less than is free", str(e)) from None
    start = -raw.ctypes.data % alignment
    return raw[start : start + size]


class HostStorage:
    """Host memory: an array made here, or memory handed in (bytes, bytearray, mmap, NumPy array)."""

    is_host = True

    def __init__(self, memory: int | Any, name: str = "host", usage: Usage = Usage.ANY) -> None:
        if isinstance(memory, int):
            self._bytes = aligned_bytes(memory)
        else:
            self._bytes = np.frombuffer(memory, np.uint8)
        self.name, self.usage, self.version, self.closed = name, usage, 0, False
        self.size = self._bytes.size

    def host_bytes(self) -> np.ndarray:
        """The memory itself as uint8, no copy. Raises StorageError after `close`."""
        if self.closed:
            raise StorageError(f"{self.name} is closed", "open memory", "keep the buffer open while tensors use it")
        return self._bytes

    device_bytes = host_bytes

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """A copy of `nbytes` bytes from `offset`."""
        self._check(offset, nbytes)
        return self.host_bytes()[offset : offset + nbytes].copy()

    def write(self, offset: int, data: np.ndarray) -> None:
        """Copy the bytes of `data` to `offset`; the version grows."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._check(offset, raw.size)
        memory = self.host_bytes()
        if not memory.flags.writeable:
            raise StorageError(f"{self.name} is read-only", "writable memory", "copy the tensor into a buffer first")
        memory[offset : offset + raw.size] = raw
        self.version += 1

    def close(self) -> None:
        """Give the memory back; later use is an error, never stale bytes."""
        self._bytes, self.closed = np.empty(0, np.uint8), True

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise StorageError(f"bytes {offset}..{offset + nbytes} of {self.name}",
                               f"a range within its {self.size:,} bytes")  # fmt: skip

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.size:,} bytes, {self.usage.value})"
