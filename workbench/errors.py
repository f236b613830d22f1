"""One small tree of exceptions.

Inner code raises the narrow fact; every message says what was found, what was expected and what to try.
ggml answers the same mistakes with `GGML_ASSERT` or `GGML_ABORT`, which end the process.
"""

from __future__ import annotations


def shown(text: object, limit: int = 80) -> str:
    """`text` made safe to print: control characters and lone surrogates escaped, cut at `limit` characters.

    Tensor names come from files of strangers and may hold any bytes. HTML is escaped by the views, not here.
    """
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def shown_path(path: object, limit: int = 200) -> str:
    """A path made safe to print; a long one loses its beginning, never the name of the file."""
    safe = shown(path, 2**16)
    return safe if len(safe) <= limit else "…" + safe[1 - limit :]


class WorkbenchError(Exception):
    """Base of all errors raised on purpose: what was found, what was expected, what to try."""

    def __init__(self, found: str, expected: str = "", hint: str = "") -> None:
        self.found, self.expected, self.hint = found, expected, hint
        lines = [found]
        if expected:
            lines.append(f"  expected: {expected}")
        if hint:
            lines.append(f"  try: {hint}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.found, self.expected, self.hint)


class ShapeError(WorkbenchError, ValueError):
    """Shapes or strides do not fit an op."""


class DTypeError(WorkbenchError, TypeError):
    """A storage type that an op or a device cannot handle."""


class ParameterError(WorkbenchError, ValueError):
    """A parameter outside its range."""


class ContextError(WorkbenchError, RuntimeError):
    """A context was used wrongly."""


class ContextFull(ContextError, MemoryError):
    """The arena has no room for another object (`ggml_new_object` returns NULL)."""


class ContextClosed(ContextError):
    """A tensor was used after its context was closed (in C: a dangling pointer)."""


class NoDataError(WorkbenchError, RuntimeError):
    """A tensor has no memory behind it: the "false success" of `no_alloc`."""


class StorageError(WorkbenchError, RuntimeError):
    """Bytes that cannot be read or written from here."""


class GraphError(WorkbenchError, ValueError):
    """A graph that cannot be built, imported or run."""


class GraphFull(GraphError):
    """More nodes or leafs than the graph's capacity (`GGML_ASSERT(cgraph->n_nodes < cgraph->size)`)."""


class AllocationError(WorkbenchError, MemoryError):
    """A device or a buffer has too little memory."""


class UnsupportedOp(WorkbenchError, NotImplementedError):
    """No backend at hand can run this op with these types."""


class FileFormatError(WorkbenchError, ValueError):
    """A file (GGUF, JSON, trace) that is not what it claims to be."""


class ModelError(WorkbenchError, ValueError):
    """A model whose metadata or tensors do not fit together, or a request that it cannot serve."""


class DependencyError(WorkbenchError, ImportError):
    """An optional package, program or device is missing."""
