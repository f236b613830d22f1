"""Writes GGUF files by hand, right or wrong in any field: what the writer of the `gguf` package refuses to write."""
from __future__ import annotations

import struct
from pathlib import Path

from workbench.models.gguf import GGUFFile
from workbench.tensors import HostStorage, Usage

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARRAY, U64, I64, F64 = range(13)
FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(raw, length=None):
    """A string: its length (or a lie about it) and its bytes."""
    raw = raw.encode() if isinstance(raw, str) else raw
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def value(kind, x):
    return text(x) if kind == STR else struct.pack("<" + FORMATS[kind], x)


def key(name, kind, x):
    return text(name) + struct.pack("<I", kind) + value(kind, x)


def array(name, kind, items, count=None):
    head = text(name) + struct.pack("<IIQ", ARRAY, kind, len(items) if count is None else count)
    return head + b"".join(value(kind, x) for x in items)


def tensor(name, ne, kind=0, offset=0, n_dims=None):
    head = text(name) + struct.pack("<I", len(ne) if n_dims is None else n_dims)
    return head + struct.pack(f"<{len(ne)}Q", *ne) + struct.pack("<IQ", kind, offset)


def gguf(keys=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, n_keys=None, n_tensors=None, alignment=32):
    """A whole file; the counts may lie."""
    head = magic + struct.pack("<IQQ", version, len(tensors) if n_tensors is None else n_tensors,
                               len(keys) if n_keys is None else n_keys)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def parsed(raw, name="crafted.gguf"):
    """The file parsed from memory, by the parser that `open_gguf` uses."""
    return GGUFFile(HostStorage(raw, name, Usage.WEIGHTS), Path(name))
