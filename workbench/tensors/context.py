"""`Context`: the arena in which tensors and graphs are laid out (`ggml_context`).

Accounting is ggml's to the byte: each object has a header of 32 bytes, a tensor takes 336 bytes and, unless `no_alloc`
is set, its data behind it; everything is padded to 16 bytes. Closing the context ends the life of all of it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.errors import ContextClosed, ContextError, ContextFull, ParameterError, shown
from workbench.tensors.dtype import DType, DTypeLike, dtype
from workbench.tensors.storage import HostStorage
from workbench.tensors.tensor import Extents, Moves, Strides, Tensor, contiguous_strides, extents

OBJECT_BYTES, TENSOR_BYTES, ALIGNMENT = 32, 336, 16
TENSOR_OVERHEAD = OBJECT_BYTES + TENSOR_BYTES
"""Bytes that one tensor costs without its data (`ggml_tensor_overhead`)."""

_active: contextvars.ContextVar[Context | None] = contextvars.ContextVar("workbench_context", default=None)


def padded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to the alignment (`GGML_PAD`)."""
    return -(-nbytes // alignment) * alignment


class ArenaObject(NamedTuple):
    """One object of the arena (`ggml_object`): kind, offset of its content, bytes of its content, name."""

    kind: str
    offset: int
    size: int
    name: str


class Context:
    """An arena for tensors and graphs (`ggml_init` / `ggml_free`).

    mem_size: bytes of the arena. memory: an own writable buffer to use instead (`mem_buffer`). no_alloc: only
    descriptions are stored; data comes later from a buffer (a graph allocator, a device).
    `with Context(...) as ctx:` makes it the place of new ops inside the block and closes it at the end.
    """

    def __init__(self, mem_size: int = 16 * 2**20, memory: Any = None, no_alloc: bool = False,
                 name: str = "context") -> None:  # fmt: skip
        if not isinstance(mem_size, int | np.integer) or isinstance(mem_size, bool) or mem_size < 0:
            raise ParameterError(f"mem_size={mem_size!r}", "a whole number of bytes, zero or more")
        self.name, self.no_alloc, self.closed, self.fate = name, no_alloc, False, "closed"
        self._storage: HostStorage | None = None
        if memory is not None:
            try:
                self._storage = HostStorage(memoryview(memory), name)
            except (TypeError, ValueError, BufferError) as e:  # no buffer, or one with gaps
                raise ContextError(f"the memory handed in is no contiguous piece of memory: {e}",
                                   "bytearray(n) or np.empty(n, np.uint8)") from None  # fmt: skip
            if not self._storage.host_bytes().flags.writeable:
                raise ContextError("the memory handed in is read-only", "writable memory",
                                   "bytearray(n) or np.empty(n, np.uint8)")  # fmt: skip
        self.mem_size = self._storage.size if self._storage else padded(max(mem_size, ALIGNMENT))
        self._used = 0
        self.objects: list[ArenaObject] = []
        self.tensors: list[Tensor] = []
        self._token: list[contextvars.Token] = []

    # ---- room

    @property
    def used_mem(self) -> int:
        """Bytes in use (`ggml_used_mem`)."""
        return self._used

    def reserve(self, kind: str, nbytes: int, name: str = "") -> int:
        """Take `nbytes` (padded to 16) for an object; returns the offset of its content (`ggml_new_object`).

        Raises ContextFull with the bytes that were asked for and the ones left, ContextClosed after `close`.
        """
        self.require_open()
        size = padded(nbytes)
        if self._used + OBJECT_BYTES + size > self.mem_size:
            raise ContextFull(
                f"context '{shown(self.name)}' is full: {kind} '{shown(name)}' needs {OBJECT_BYTES + size:,} bytes, "
                f"{self.mem_size - self._used:,} of {self.mem_size:,} are left",
                "room for every tensor and graph that is made in it",
                f"Context(mem_size={self._used + OBJECT_BYTES + size}) or more, or no_alloc=True: data lives in a buffer",
            )
        offset = self._used + OBJECT_BYTES
        self.objects.append(ArenaObject(kind, offset, size, name))
        self._used = offset + size
        return offset

    def reset(self) -> None:
        """Forget all objects and start anew in the same memory (`ggml_reset`)."""
        self.require_open()
        gone = Context(ALIGNMENT, name=self.name)  # the bytes will be reused: old tensors must not read them
        gone.closed, gone.fate = True, "reset"
        for t in self.tensors:
            t.context = gone
        Moves.count += 1
        self._used, self.objects, self.tensors = 0, [], []

    def close(self) -> None:
        """End the life of every tensor and graph made here (`ggml_free`). Closing twice is allowed."""
        self.closed = True
        if self._storage:
            self._storage.close()

    def require_open(self) -> None:
        """Raise ContextClosed after `close`."""
        if self.closed:
            raise ContextClosed(f"context '{shown(self.name)}' is closed", "an open context", "make a new Context")

    # ---- tensors

    def new_tensor(self, kind: DTypeLike, *ne: int, name: str = "") -> Tensor:
        """A leaf of type `kind` and extents `ne` (fastest first; `ggml_new_tensor_*d`)."""
        dt = dtype(kind)
        return self.add(Tensor(dt, extents(ne), context=self).named(name))

    def add(self, tensor: Tensor) -> Tensor:
        """Take room for a tensor made by an op, and for its data unless it is a view or `no_alloc` is set."""
        owns_data = tensor.view_src is None and not self.no_alloc
        if owns_data and self._storage is None:  # a no_alloc arena never needs real memory; others take it with the first data
            self.require_open()
            self._storage = HostStorage(self.mem_size, self.name)
        offset = self.reserve("tensor", TENSOR_BYTES + (tensor.nbytes if owns_data else 0), tensor.name or tensor.desc)
        if owns_data:
            tensor.place(self._storage, offset + TENSOR_BYTES)
        tensor.context = self
        self.tensors.append(tensor)
        return tensor

    def from_numpy(self, values: Any, kind: DTypeLike | None = None, name: str = "") -> Tensor:
        """A leaf with a copy of `values`; `ne` is the NumPy shape reversed. Python floats become f32, ints i32."""
        x = np.asarray(values)
        if kind is None:
            kind = {np.dtype(np.float64): "f32", np.dtype(np.int64): "i32"}.get(x.dtype, x.dtype)
            if np.asarray(values).dtype == np.int64 and isinstance(values, np.ndarray):
                kind = "i64"
        ne = x.shape[::-1] or (1,)
        return self.new_tensor(kind, *ne, name=name).set(x)

    # ---- which context new ops go to

    @contextlib.contextmanager
    def active(self) -> Iterator[Context]:
        """Inside the block new ops go to this context; it stays open afterwards."""
        self.require_open()
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)

    def __enter__(self) -> Context:
        self.require_open()
        self._token.append(_active.set(self))
        return self

    def __exit__(self, *exc: object) -> None:
        _active.reset(self._token.pop())
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._used:,} of {self.mem_size:,} bytes, {len(self.objects)} objects"
        return f"<Context '{shown(self.name)}' {state}{', no_alloc' if self.no_alloc else ''}>"


def context_for(sources: Sequence[Tensor | None]) -> Context:
    """Where the result of an op goes: the active context, else the one of the first source that has one.

    Raises ContextError where there is none.
    """
    chosen = _active.get() or next((s.context for s in sources if s is not None and s.context is not None), None)
    if chosen is None:
        raise ContextError("no context for the result of this op", "an active context", "with Context(...) as ctx: …")
    return chosen


def result(kind: DType, ne: Extents, nb: Strides | None = None, **fields: Any) -> Tensor:
    """A tensor made by an op, laid out in the context that `context_for` picks (used by `ops`)."""
    ctx = context_for(fields.get("src", ()))
    return ctx.add(Tensor(kind, ne, nb or contiguous_strides(kind, ne), context=ctx, **fields))
