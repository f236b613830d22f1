"""Reading GGUF files: an own parser of the header over mmap, with lazy arrays (`gguf_init_from_file`).

Opening costs a walk over the header and nothing else: strings, arrays and tensor data stay in the file until they are
asked for. Files come from strangers, so every count and length is checked against the bytes that are left before
anything is read or allocated, and what ggml refuses is refused here.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from workbench import paths
from workbench.errors import ContextError, DTypeError, FileFormatError, ModelError, shown, shown_path
from workbench.tensors.context import Context, padded
from workbench.tensors.dtype import DTYPES, DType
from workbench.tensors.storage import HostStorage, Usage
from workbench.tensors.tensor import MAX_DIMS, MAX_NAME, Extents, Tensor

MAX_KEYS, MAX_KEY_BYTES, MAX_TENSORS = 2**14, 2**16 - 1, 2**16
MAX_ELEMENTS = 2**21
"""Most array elements in all of the metadata; a walk over so many strings takes 0.2 s."""
MAX_TEXT = 2**26
"""Most bytes of one string, or of all strings of one array, in the metadata."""

# value types (`gguf_type`): id -> name, NumPy type of one element
_KINDS: dict[int, tuple[str, str]] = {
    0: ("u8", "<u1"), 1: ("i8", "<i1"), 2: ("u16", "<u2"), 3: ("i16", "<i2"), 4: ("u32", "<u4"), 5: ("i32", "<i4"),
    6: ("f32", "<f4"), 7: ("bool", "?"), 8: ("str", ""), 9: ("array", ""), 10: ("u64", "<u8"), 11: ("i64", "<i8"),
    12: ("f64", "<f8"),
}  # fmt: skip
_SIZES = {i: np.dtype(t).itemsize if t else 8 for i, (_, t) in _KINDS.items()}  # a string takes 8 bytes at least
_BY_ID = {t.id: t for t in DTYPES.values()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_LEAST_KEY, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4  # fewest bytes that one of each can take
_ALTERED = "the file is damaged, cut off or altered: download or copy it again"
_REQUIRED: Any = object()


class TensorInfo(NamedTuple):
    """One line of the tensor table (`gguf_tensor_info`); `offset` counts from the start of the file."""

    name: str
    dtype: DType
    ne: Extents
    offset: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        """Elements in all."""
        return math.prod(self.ne)


class GGUFArray:
    """An array of the metadata, read from the file when asked (`gguf_get_arr_data`, `gguf_get_arr_str`).

    `type` is the type of its elements: "str", "i32", "f32", …
    """

    def __init__(self, storage: HostStorage, kind: int, offset: int, count: int) -> None:
        self.type, self._numpy = _KINDS[kind]
        self._storage, self._offset, self._count = storage, offset, count
        self._starts: np.ndarray | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if not -self._count <= index < self._count:
            raise IndexError(f"index {index} in an array of {self._count}")
        if self._numpy:
            return self.numpy()[index].item()
        if self._starts is None:  # a table of where each string starts: 8 bytes a string, only once it is needed
            self._starts = np.fromiter((start for start, _ in self._spans()), np.int64, self._count)
        start, memory = int(self._starts[index]), self._storage.host_bytes().data
        return _text(memory[start : start + _U64.unpack_from(memory, start - 8)[0]])

    def __iter__(self) -> Iterator[Any]:
        if self._numpy:
            return iter(self.numpy().tolist())
        memory = self._storage.host_bytes().data
        return (_text(memory[start:end]) for start, end in self._spans())

    def _spans(self) -> Iterator[tuple[int, int]]:
        memory, end = self._storage.host_bytes().data, self._offset
        for _ in range(self._count):
            start = end + 8
            end = start + _U64.unpack_from(memory, end)[0]
            yield start, end

    def numpy(self) -> np.ndarray:
        """The numbers as a read-only NumPy view of the file, no copy. Raises DTypeError for strings."""
        if not self._numpy:
            raise DTypeError("an array of strings", "numbers", "list(array), or array[i] for a single one")
        return np.frombuffer(self._storage.host_bytes(), self._numpy, self._count, self._offset)

    def __repr__(self) -> str:
        return f"<GGUFArray of {self._count:,} {self.type}>"


class Metadata(Mapping[str, Any]):
    """The key-value pairs of the header; values are read from the file when asked for (`gguf_find_key`, `gguf_get_val_*`)."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[GGUFArray, bool]] = {}  # a single value is an array of one

    def __getitem__(self, key: str) -> Any:
        value, is_array = self._values[key]
        return value if is_array else value[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def kind(self, key: str) -> str:
        """The type of a value as stored: "u32", "str", …, for an array "array of str" (`gguf_get_kv_type`)."""
        value, is_array = self._values[key]
        return f"array of {value.type}" if is_array else value.type


class GGUFFile:
    """An open GGUF file (`gguf_context`): header read, data mapped; made by `open_gguf`.

    version, alignment, data_offset: as in the header. metadata: key -> value. tensors: name -> TensorInfo, in the order
    of the file. storage: the whole file as read-only memory for weights, never copied.
    """

    def __init__(self, storage: HostStorage, path: Path, mapping: mmap.mmap | None = None) -> None:
        self.path, self.storage, self._mapping = path, storage, mapping
        self._written = _state(path) if mapping is not None else None
        self.metadata = Metadata()
        self.tensors: dict[str, TensorInfo] = {}
        self.version = self.alignment = self.data_offset = 0
        _Header(storage.host_bytes().data, self).read()

    def meta(self, key: str, default: Any = _REQUIRED, kind: type | None = None) -> Any:
        """The value of a key, checked: `kind` is int, float, bool, str or GGUFArray (int for float is fine).

        Raises ModelError naming the key where it is missing (and no default is given) or of another kind.
        """
        if key not in self.metadata:
            if default is _REQUIRED:
                raise ModelError(f"{shown(self.path.name)} has no key '{shown(key)}'", "a model whose header gives it",
                                 f"`python -m workbench info {shown_path(self.path)} --metadata` lists what there is")  # fmt: skip
            return default
        value, what = self.metadata[key], f"key '{shown(key)}' of {shown(self.path.name)}"
        if kind is float and type(value) is int:
            value = float(value)
        if kind is not None and type(value) is not kind:
            raise ModelError(f"{what} is {self.metadata.kind(key)}: {shown(value)}", f"a value of type {kind.__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelError(f"{what} is {value}", "a finite number")
        return value

    def hparam(self, name: str, default: Any = _REQUIRED, kind: type | None = int) -> Any:
        """A hyper-parameter: `meta` with the architecture in front (`hparam("block_count")` is "llama.block_count")."""
        return self.meta(f"{self.architecture}.{name}", default, kind)

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises ModelError where the file has none."""
        return self.meta("general.architecture", kind=str)

    @property
    def name(self) -> str:
        """`general.name`, else the name of the file."""
        return self.meta("general.name", self.path.stem, str)

    def tensor(self, name: str, context: Context | None = None) -> Tensor:
        """A leaf for a tensor of the file, placed in `storage`; in `context` (no_alloc) if one is given.

        Raises ModelError where the file has no such tensor.
        """
        if name not in self.tensors:
            raise ModelError(f"{shown(self.path.name)} has no tensor '{shown(name)}'", f"one of its {len(self.tensors)} tensors",
                             f"`python -m workbench info {shown_path(self.path)} --tensors` lists them")  # fmt: skip
        if context is not None and not context.no_alloc:
            raise ContextError(f"tensor '{shown(name)}' lies in its file", "a context made with no_alloc=True")
        info = self.tensors[name]
        leaf = Tensor(info.dtype, info.ne) if context is None else context.new_tensor(info.dtype, *info.ne)
        leaf.name = name  # as it is in the file: its length was checked, and `named` would drop bytes that are not UTF-8
        leaf.place(self.storage, info.offset)
        return leaf

    def require_unchanged(self) -> None:
        """Raise FileFormatError where the file was cut or written since it was opened.

        Its pages are shared with whoever writes: numbers would change under a run, and reading a page that was cut off ends
        the process (SIGBUS). A new file in the same place is another file and does no harm.
        """
        if self._mapping is not None and not self.storage.closed:
            now = _state(self.path)
            if self._mapping.size() < self.storage.size or now != self._written and now[0] == self._written[0]:  # type: ignore[index]
                raise FileFormatError(f"{shown(self.path.name)} was changed while it was open", "a file that nobody writes to",
                                      "open the model again, once it is whole")  # fmt: skip

    def close(self) -> None:
        """Give the mapping back (once no NumPy view of it is left); later use of tensors is an error."""
        self.storage.close()
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # somebody still holds a view: the pages go with the last one
                self._mapping.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        held = f"{len(self.metadata)} keys, {len(self.tensors)} tensors, {self.storage.size:,} bytes"
        return f"<GGUFFile '{shown(self.path.name)}' v{self.version}, {held}>"


class _Header:
    """A cursor over the header. Nothing is read past the end, and what a count claims must fit into what is left."""

    def __init__(self, memory: memoryview, file: GGUFFile) -> None:
        self.memory, self.file, self.pos, self.end = memory, file, 0, len(memory)
        self.elements = 0

    def read(self) -> None:
        file = self.file
        file.version = self._magic()
        n_tensors = self.count("number of tensors", _LEAST_TENSOR, MAX_TENSORS)
        n_keys = self.count("number of keys", _LEAST_KEY, MAX_KEYS)
        for i in range(n_keys):
            self._pair(i)
        self._refuse_parts()
        file.alignment = self._alignment()
        table = [self._tensor(i) for i in range(n_tensors)]
        file.data_offset = padded(self.pos, file.alignment)
        self._lay_out(table)

    # ---- primitives

    def bad(self, found: str, expected: str = "", hint: str = _ALTERED) -> NoReturn:
        raise FileFormatError(f"{shown(self.file.path.name)}: {found}", expected, hint)

    def take(self, nbytes: int, what: str) -> int:
        """Step over `nbytes`; returns where they begin."""
        start, left = self.pos, self.end - self.pos
        if nbytes > left:
            self.bad(f"{what} at byte {start:,} takes {nbytes:,} bytes, but {left:,} are left", f"at most {left:,}")
        self.pos = start + nbytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.memory, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.memory, self.take(8, what))[0]

    def count(self, what: str, least: int, most: int) -> int:
        """A count of things that take at least `least` bytes each."""
        n = self.u64(what)
        fit = min((self.end - self.pos) // least, most)
        if n > fit:
            self.bad(f"{what}: {n:,}", f"at most {fit:,}: no model needs more than {most:,}, and {self.end - self.pos:,} bytes are left")
        return n

    def string(self, what: str, most: int) -> str:
        n = self.u64(f"length of {what}")
        if n > most:
            self.bad(f"{what} at byte {self.pos:,} is {n:,} bytes long", f"at most {most}")
        start = self.take(n, what)
        return _text(self.memory[start : self.pos])

    # ---- sections

    def _magic(self) -> int:
        if bytes(self.memory[:4]) != b"GGUF":
            self.bad(*_looks_like(bytes(self.memory[:64]), self.file.path))
        self.pos = 4
        version = self.u32("version")
        if version & 0xFFFF == 0:
            self.bad(f"version {version:#x}: a big-endian file, or a damaged one", "little endian, version 2 or 3",
                     "convert it with `gguf-convert-endian FILE little` (package gguf)")  # fmt: skip
        if version == 1:
            self.bad("GGUF version 1", "version 2 or 3", "it was in use for some weeks of 2023: fetch a newer conversion")
        if version > 3:
            self.bad(f"GGUF version {version}", "version 2 or 3", "a newer workbench may read it, if the file is not damaged")
        return version

    def _pair(self, i: int) -> None:
        values = self.file.metadata._values
        key = self.string(f"key {i}", MAX_KEY_BYTES)
        if not key or key in values:
            state = f"'{shown(key)}' occurs twice" if key else "is empty"
            self.bad(f"key {i} {state}", "each key once, and not empty")
        what, n = f"value of '{shown(key)}'", 1
        kind = self._kind(what)
        if is_array := kind == 9:
            kind = self._kind(f"elements in {what}")
            if kind == 9:
                self.bad(f"{what} is an array of arrays", "an array of numbers, bools or strings", "ggml refuses nested arrays, too")
            n = self.count(f"elements in {what}", _SIZES[kind], MAX_ELEMENTS - self.elements)
            self.elements += n
        start = self._strings(n, what) if kind == 8 else self._numbers(kind, n, what)
        values[key] = GGUFArray(self.file.storage, kind, start, n), is_array

    def _kind(self, what: str) -> int:
        kind = self.u32(f"type of {what}")
        if kind not in _KINDS:
            self.bad(f"{what} has type {kind}", f"0 to {max(_KINDS)}")
        return kind

    def _numbers(self, kind: int, n: int, what: str) -> int:
        """Step over `n` numbers or bools; returns where they begin."""
        start = self.take(n * _SIZES[kind], what)
        if kind == 7:
            values = np.frombuffer(self.memory[start : self.pos], np.uint8)
            if n and values.max() > 1:
                self.bad(f"{what}, a bool, is {values.max()}", "0 or 1")
        return start

    def _strings(self, n: int, what: str) -> int:
        """Step over `n` strings, as fast as Python can: a vocabulary may hold 250,000; returns where they begin."""
        start = pos = self.pos
        unpack, memory = _U64.unpack_from, self.memory
        try:
            for _ in range(n):
                pos += 8 + unpack(memory, pos)[0]
        except (struct.error, OverflowError):  # the position is behind the end of the file
            pos = self.end + 1
        if pos > self.end:
            self.bad(f"a string in {what} reaches past the end of the file", f"{n:,} strings within {self.end - start:,} bytes")
        if pos - start > MAX_TEXT:
            self.bad(f"{what}: {pos - start:,} bytes of text", f"at most {MAX_TEXT:,}")
        self.pos = pos
        return start

    def _refuse_parts(self) -> None:
        n = self.file.metadata.get("split.count")
        if type(n) is int and n > 1:
            self.bad(f"a part of a model split into {n} files", "a model in one file",
                     "merge the parts first: `llama-gguf-split --merge FIRST_PART.gguf MERGED.gguf`")  # fmt: skip

    def _alignment(self) -> int:
        metadata, key = self.file.metadata, "general.alignment"
        if key not in metadata:
            return 32
        if metadata.kind(key) != "u32":
            self.bad(f"{key} has type {metadata.kind(key)}", "u32")
        alignment = metadata[key]
        if alignment == 0 or alignment & (alignment - 1):
            self.bad(f"{key} is {alignment:,}", "a power of two")
        return alignment

    def _tensor(self, i: int) -> tuple[str, DType, Extents, int]:
        name = self.string(f"name of tensor {i}", MAX_NAME - 1)
        what = f"tensor '{shown(name)}'"
        n_dims = self.u32(f"dimensions of {what}")
        if n_dims > MAX_DIMS:
            self.bad(f"{what} has {n_dims:,} dimensions", f"at most {MAX_DIMS}")
        sizes = [self.u64(f"extents of {what}") for _ in range(n_dims)] + [1] * (MAX_DIMS - n_dims)
        ne: Extents = (sizes[0], sizes[1], sizes[2], sizes[3])
        if math.prod(n or 1 for n in ne) >= 2**58:  # strides in bytes stay within 63 bits, for empty tensors, too
            self.bad(f"{what} has ne={ne}", "extents whose product is below 2**58")
        return name, self._dtype(what, ne), ne, self.u64(f"offset of {what}")

    def _dtype(self, what: str, ne: Extents) -> DType:
        dt = _BY_ID.get(kind := self.u32(f"type of {what}"))
        if dt is None:
            known = ", ".join(f"{t.id} ({t})" for t in _BY_ID.values())
            if kind in (4, 5, 31, 32, 33, 36, 37, 38):
                self.bad(f"{what} has ggml type id {kind}, which ggml has removed", f"one of {known}", "fetch a newer conversion")
            self.bad(f"{what} has ggml type id {kind}", f"one of {known}", f"a newer workbench may know the type; else {_ALTERED}")
        if ne[0] % dt.block:
            self.bad(f"{what} has rows of {ne[0]:,} elements in {dt}", f"a multiple of {dt.block}, the block of {dt}")
        return dt

    def _lay_out(self, table: list[tuple[str, DType, Extents, int]]) -> None:
        """The data lies end to end in the order of the table, each tensor padded to the alignment, as ggml demands it."""
        file, room = self.file, self.end - self.file.data_offset
        expected = 0
        for name, dt, ne, offset in table:
            what = f"tensor '{shown(name)}'"
            if name in file.tensors:
                self.bad(f"{what} occurs twice", "each name once")
            if offset != expected:
                self.bad(f"data of {what} at offset {offset:,} of the data section",
                         f"offset {expected:,}: tensors follow each other, aligned to {file.alignment}")  # fmt: skip
            nbytes = dt.row_bytes(ne[0]) * ne[1] * ne[2] * ne[3]
            if offset + nbytes > room:
                self.bad(f"data of {what} ({dt}, ne={ne}) takes {nbytes:,} bytes, {max(room - offset, 0):,} are left",
                         "the whole tensor in the file")  # fmt: skip
            file.tensors[name] = TensorInfo(name, dt, ne, file.data_offset + offset, nbytes)
            expected = padded(offset + nbytes, file.alignment)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file, or one of the shipped models by its name ("tiny-mixtral-f16"); `with` closes it.

    Raises FileFormatError for anything that is not a whole, well-formed GGUF file of version 2 or 3.
    """
    path = find_model(path)
    mapping = _map(path)
    storage = HostStorage(mapping, f"file {path.name}", Usage.WEIGHTS)
    try:
        return GGUFFile(storage, path, mapping)
    except FileFormatError:
        storage.close()
        raise


def find_model(which: str | os.PathLike[str]) -> Path:
    """The file that is meant: a path, or the name of a shipped model with or without `.gguf`. Raises FileFormatError."""
    path, name = Path(which), os.fspath(which)
    if name and "\0" not in name and os.path.lexists(path):
        return path
    shipped = shipped_models()
    if name.removesuffix(".gguf") in shipped:
        return shipped[name.removesuffix(".gguf")]
    raise FileFormatError(f"no file '{shown_path(name)}'", "the path of a GGUF file, or the name of a shipped model",
                          f"shipped models: {', '.join(shipped) or 'none here'}")  # fmt: skip


def shipped_models() -> dict[str, Path]:
    """The models that come with the workbench: name -> file."""
    try:
        return {f.stem: f for f in sorted(paths.models_dir().glob("*.gguf"))}
    except FileNotFoundError:
        return {}


def _map(path: Path) -> mmap.mmap:
    def bad(found: str, hint: str = "") -> NoReturn:
        raise FileFormatError(f"{shown_path(path)}: {found}", "a readable GGUF file", hint)

    try:
        about = path.stat()
        if stat.S_ISDIR(about.st_mode):
            files = sorted(f.name for f in path.glob("*.gguf"))[:5]
            bad("a folder", f"one of the files in it: {', '.join(map(shown, files))}" if files else "")
        if not stat.S_ISREG(about.st_mode):
            bad("a device or a pipe", "copy it into a file first")
        if not about.st_size:
            bad("an empty file", "download or copy it again")
        with path.open("rb") as f:
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        bad(f"cannot be opened: {e.strerror or e}", "check its permissions" if isinstance(e, PermissionError) else "")


def _state(path: Path) -> tuple[tuple[int, int], int, int]:
    """Which file this is, its size, and when it was written."""
    try:
        about = path.stat()
    except OSError:
        return (0, 0), 0, 0  # removed: what is mapped stays
    return (about.st_dev, about.st_ino), about.st_size, about.st_mtime_ns


_MAGICS: list[tuple[bytes, str, str]] = [
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "`git lfs pull` in its repository"),
    (b"PK\x03\x04", "a zip archive, or a PyTorch checkpoint", "convert it with llama.cpp's convert_hf_to_gguf.py"),
    (b"\x80", "a Python pickle (a PyTorch checkpoint?); it is not opened, since a pickle can run code", "fetch a GGUF file of the model"),
    (b"\x89HDF", "an HDF5 file", "fetch a GGUF file of the model"),
    (b"FUGG", "a GGUF file with its bytes swapped", "convert it with `gguf-convert-endian` (package gguf)"),
    *((m, "a ggml file from before GGUF (2023)", "fetch a newer conversion of the model") for m in (b"lmgg", b"tjgg", b"fmgg", b"algg")),
    *((m, "a compressed file", "unpack it first") for m in (b"\x1f\x8b", b"\xfd7zXZ", b"(\xb5/\xfd", b"7z\xbc\xaf", b"BZh")),
    *((m, "a web page, perhaps of a failed download", "download the file itself") for m in (b"<!DOCTYPE", b"<!doctype", b"<html")),
]  # fmt: skip


def _looks_like(start: bytes, path: Path) -> tuple[str, str, str]:
    """What a file that does not begin with GGUF seems to be: found, expected, what to try."""
    expected = "a GGUF file: its first four bytes are 'GGUF'"
    for magic, found, hint in _MAGICS:
        if start.startswith(magic):
            return f"looks like {found}", expected, hint
    if start[8:9] == b"{" and start[5:8] == b"\0\0\0":
        return "looks like a safetensors file", expected, "convert the model with llama.cpp's convert_hf_to_gguf.py"
    if not start.strip(b"\0"):
        return "begins with zero bytes", expected, "an interrupted download? fetch it again"
    with contextlib.suppress(UnicodeDecodeError):
        if all(c.isprintable() or c.isspace() for c in start[:60].decode("utf-8", "strict" if len(start) < 60 else "ignore")):
            return f"looks like text: '{shown(start.decode('utf-8', 'replace'), 40)}'", expected, "name the .gguf file of the model"
    return f"begins with the bytes {start[:8].hex(' ')}", expected, "name the .gguf file of the model"


def _text(raw: Any) -> str:
    """Bytes as text; bytes that are not UTF-8 are kept as surrogates and shown escaped."""
    return bytes(raw).decode("utf-8", "surrogateescape")
