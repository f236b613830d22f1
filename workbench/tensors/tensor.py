"""`Tensor`: the description of an array and of the op that makes it (`ggml_tensor`).

A tensor holds no numbers. It says how many elements lie along each dimension (`ne`, fastest first), how many bytes
apart they are (`nb`), which op computes it from which sources, and where its bytes live (a storage and an offset).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.errors import ContextClosed, DTypeError, NoDataError, ParameterError, ShapeError, StorageError, shown
from workbench.tensors.dtype import DType
from workbench.tensors.storage import Storage

if TYPE_CHECKING:
    from workbench.tensors.context import Context
    from workbench.tensors.opspec import OpSpec

MAX_DIMS, MAX_SRC, MAX_NAME = 4, 10, 64

Extents = tuple[int, ...]
"""Elements per dimension, fastest first, always four: (ne0, ne1, ne2, ne3)."""
Strides = tuple[int, ...]
"""Bytes between neighbours per dimension, in the same order."""


class Moves:
    """Counts placements of tensors in the whole process: a plan looks for moved tensors only where the count has grown."""

    count = 0


class Flag(enum.IntFlag):
    """What a tensor is for (`ggml_tensor_flag`)."""

    INPUT = 1
    OUTPUT = 2
    PARAM = 4
    LOSS = 8
    COMPUTE = 16


_NO_FLAG = Flag(0)


def extents(ne: tuple[int, ...] | list[int]) -> Extents:
    """`ne` filled up to four dimensions with ones. Raises ShapeError for more than four, or for negative or broken ones."""
    if not 1 <= len(ne) <= MAX_DIMS:
        raise ShapeError(f"{len(ne)} dimensions", f"1 to {MAX_DIMS}", "merge dimensions with reshape")
    for n in ne:
        if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 0:
            raise ShapeError(f"ne={tuple(ne)!r}", "whole numbers, zero or more")
    full = [int(n) for n in ne] + [1] * (MAX_DIMS - len(ne))
    if math.prod(full) >= 2**63:
        raise ShapeError(f"ne={tuple(ne)}: {math.prod(full):.3g} elements", "fewer than 2**63")
    return tuple(full)


def contiguous_strides(dt: DType, ne: Extents) -> Strides:
    """`nb` of a densely packed tensor: nb[0] is a block, nb[1] a row, and so on."""
    nb1 = dt.row_bytes(ne[0])
    return dt.block_bytes, nb1, nb1 * ne[1], nb1 * ne[1] * ne[2]


class Tensor:
    """The description of an array and of the op that computes it (`ggml_tensor`).

    Left out: `extra` (a back end's private pointer). `ne` and `nb` are in ggml's order; `shape` is NumPy's.
    """

    __slots__ = ("dtype", "ne", "nb", "op", "params", "src", "view_src", "view_offs", "flags", "name",
                 "_storage", "_offset", "context", "spec", "__weakref__")  # fmt: skip

    def __init__(self, dtype: DType, ne: Extents, nb: Strides | None = None, *, context: Context | None = None,
                 op: str = "NONE", spec: OpSpec | None = None, src: tuple[Tensor | None, ...] = (),
                 params: dict[str, Any] | None = None, view_src: Tensor | None = None, view_offs: int = 0,
                 name: str = "") -> None:  # fmt: skip
        if view_src is not None and view_src.view_src is not None:  # views collapse: the owner of the memory is named
            view_offs, view_src = view_offs + view_src.view_offs, view_src.view_src
        self.dtype, self.ne, self.nb = dtype, ne, nb or contiguous_strides(dtype, ne)
        self.op, self.spec, self.src, self.params = op, spec, src, params or {}
        self.view_src: Tensor | None = view_src
        self.view_offs: int = view_offs
        self.flags, self.name, self.context = _NO_FLAG, name, context
        self._storage: Storage | None = None
        self._offset = 0

    # ---- what it is

    @property
    def desc(self) -> str:
        """The op by its telling name: `SILU` where `op` is `UNARY` (`ggml_op_desc`)."""
        return self.spec.name if self.spec else self.op

    @property
    def n_dims(self) -> int:
        """Dimensions up to the last one that is not of length 1, at least 1 (`ggml_n_dims`, which also passes over empty ones)."""
        return max((i + 1 for i in range(MAX_DIMS) if self.ne[i] != 1), default=1)

    @property
    def shape(self) -> tuple[int, ...]:
        """NumPy's order: slowest dimension first, without the trailing ones of `ne`."""
        return tuple(reversed(self.ne[: self.n_dims]))

    @property
    def n_elements(self) -> int:
        """Elements in all (`ggml_nelements`)."""
        return math.prod(self.ne)

    @property
    def n_rows(self) -> int:
        """Rows of ne0 elements (`ggml_nrows`)."""
        return self.ne[1] * self.ne[2] * self.ne[3]

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to behind the last one, gaps included (`ggml_nbytes`)."""
        (n0, n1, n2, n3), (b0, b1, b2, b3), dt = self.ne, self.nb, self.dtype
        if not (n0 and n1 and n2 and n3):
            return 0
        first = dt.row_bytes(n0) if dt.quantised else (n0 - 1) * b0 + dt.block_bytes
        return first + (n1 - 1) * b1 + (n2 - 1) * b2 + (n3 - 1) * b3

    @property
    def is_view(self) -> bool:
        """True where the memory belongs to another tensor."""
        return self.view_src is not None

    @property
    def is_contiguous(self) -> bool:
        """Densely packed in ggml's order (`ggml_is_contiguous`); dimensions of length 1 do not count."""
        return self.contiguous_from(0)

    def contiguous_from(self, n: int) -> bool:
        """Packed except that dimensions up to `n` may have gaps (`ggml_is_contiguous_0/1/2`)."""
        step = self.dtype.block_bytes
        if self.ne[0] != self.dtype.block and self.nb[0] != step:
            return False
        step = self.dtype.row_bytes(self.ne[0])
        for i in range(1, MAX_DIMS):
            if i > n:
                if self.ne[i] != 1 and self.nb[i] != step:
                    return False
                step *= self.ne[i]
            else:
                step = self.ne[i] * self.nb[i]
        return True

    @property
    def is_permuted(self) -> bool:
        """True where the strides do not grow with the dimension (`ggml_is_permuted`)."""
        return any(a > b for a, b in zip(self.nb, self.nb[1:], strict=False))

    @property
    def is_transposed(self) -> bool:
        """True where dimension 1 is faster than dimension 0 (`ggml_is_transposed`)."""
        return self.nb[0] > self.nb[1]

    @property
    def has_contiguous_rows(self) -> bool:
        """Elements of a row lie side by side (`ggml_is_contiguous_rows`)."""
        return self.ne[0] == self.dtype.block or self.nb[0] == self.dtype.block_bytes

    def sources(self) -> Iterator[Tensor]:
        """The sources that are there, in order; a tensor may be its own source (`cast`)."""
        return (s for s in self.src if s is not None)

    def root(self) -> Tensor:
        """The tensor that owns the memory: itself, or what it is a view of."""
        return self.view_src or self

    # ---- where its bytes are

    @property
    def storage(self) -> Storage | None:
        """The storage that holds the bytes, or None: nothing is allocated yet (`tensor->buffer`)."""
        return self.root()._storage

    @property
    def offset(self) -> int:
        """Byte offset of the first element in the storage."""
        return self.root()._offset + self.view_offs

    def place(self, storage: Storage | None, offset: int = 0) -> None:
        """Give the tensor its memory (`ggml_backend_tensor_alloc`). Only the owner can be placed, never a view."""
        if self.view_src is not None:
            raise StorageError(f"{self.label} is a view", "a tensor that owns its memory",
                               f"place {self.view_src.label} instead")  # fmt: skip
        if storage is not None and (offset < 0 or offset + self.nbytes > storage.size):
            raise StorageError(f"{self.label} at {offset:,} needs {self.nbytes:,} bytes",
                               f"room within the {storage.size:,} bytes of {storage.name}")  # fmt: skip
        self._storage, self._offset = storage, offset
        Moves.count += 1

    def require_alive(self) -> None:
        """Raise ContextClosed where the context of this tensor, or of the owner of its memory, was closed."""
        for t in (self, self.root()):
            if t.context is not None and t.context.closed:
                raise ContextClosed(f"tensor {t.label} was used after its context '{shown(t.context.name)}' was {t.context.fate}",
                                    "a tensor of an open context", "keep the context open as long as a graph uses its tensors")  # fmt: skip

    def require_data(self) -> Storage:
        """The storage, or a clear error: closed context, nothing allocated, closed buffer."""
        self.require_alive()
        storage = self.storage
        if storage is None:
            raise NoDataError(f"tensor {self.label} has no data", "memory behind it before it is read or computed",
                              "its context has no_alloc=True: allocate the graph, place the tensor in a buffer, "
                              "or use no_alloc=False")  # fmt: skip
        if storage.closed:
            raise StorageError(f"tensor {self.label} lies in {storage.name}, which was freed", "a buffer that is still open")
        return storage

    def array(self, memory: Any = None) -> np.ndarray:
        """All four dimensions as a NumPy view (ne3, ne2, ne1, ne0), strides kept, no copy. Host memory, plain types only.

        `memory`: the bytes of the storage as a device sees them, for devices whose memory is a NumPy array. bf16 comes as
        uint16 bit patterns. Raises DTypeError for quantised types: see `raw_rows`.
        """
        storage = self.require_data()
        dt = self.dtype.numpy or (np.dtype("<u2") if self.dtype.name == "bf16" else None)
        if dt is None:
            raise DTypeError(f"{self.label} is stored as {self.dtype}", "a type with one element per block",
                             "`.numpy()` dequantises a copy")  # fmt: skip
        if memory is None and not storage.is_host:
            raise StorageError(f"{self.label} lies in {storage.name}, which the host cannot see", "host memory",
                               "`.numpy()` copies it")  # fmt: skip
        return np.ndarray(self.ne[::-1], dt, storage.host_bytes() if memory is None else memory, self.offset, self.nb[::-1])

    def raw_rows(self, memory: Any = None) -> np.ndarray:
        """The stored bytes as a uint8 view (ne3, ne2, ne1, bytes per row), no copy; rows must be contiguous."""
        storage = self.require_data()
        shape = (*self.ne[:0:-1], self.dtype.row_bytes(self.ne[0]))
        memory = storage.host_bytes() if memory is None else memory
        return np.ndarray(shape, np.uint8, memory, self.offset, (*self.nb[:0:-1], 1))

    def numpy(self) -> np.ndarray:
        """The values in NumPy's `shape`: a view where possible, else a copy (device memory, bf16, quantised: as f32)."""
        storage = self.require_data()
        if not storage.is_host:
            return self._fetched(storage).numpy()
        if self.dtype.numpy is not None:
            return self.array().reshape(self.shape) if self.is_contiguous else _drop_ones(self.array(), self.n_dims)
        if self.dtype.decode is None:
            raise DTypeError(f"{self.label} is stored as {self.dtype}, which cannot be decoded here",
                             "a type that `gguf` dequantises", "import workbench (its kernels hold the block formats)")  # fmt: skip
        out = np.empty(self.ne[::-1], np.float32)
        self.dtype.decode(self.array() if self.dtype.name == "bf16" else self.raw_rows(), out)
        return out.reshape(self.shape)

    def _fetched(self, storage: Storage) -> Tensor:
        from workbench.tensors.storage import HostStorage

        copy = Tensor(self.dtype, self.ne, self.nb)
        copy.place(HostStorage(storage.read(self.offset, self.nbytes)))
        return copy

    def set(self, values: Any) -> Tensor:
        """Copy `values` (anything NumPy takes, in NumPy's `shape`) into the tensor; returns it.

        Values are converted to the tensor's type, quantised types included (`ggml_backend_tensor_set`).
        Raises ShapeError where the number of elements differs.
        """
        storage = self.require_data()
        x = np.asarray(values)
        if x.size != self.n_elements:
            raise ShapeError(f"{x.size} values {x.shape} for {self.label}",
                             f"{self.n_elements} values, NumPy shape {self.shape}")  # fmt: skip
        if x.ndim and x.size > 1 and tuple(n for n in x.shape if n > 1) != tuple(n for n in self.shape if n > 1):
            raise ShapeError(f"values of shape {x.shape} for {self.label}", f"NumPy shape {self.shape} (ne reversed)",
                             "transpose the array, or reshape it if its elements are in the right order")  # fmt: skip
        x = self._fitting(x).reshape(self.ne[::-1])
        if self.dtype.numpy is not None and storage.is_host:
            if self.is_contiguous:
                storage.write(self.offset, x)
            else:
                self.array()[...] = x
                storage.version += 1
            return self
        if not self.is_contiguous:
            raise StorageError(f"{self.label} has gaps and lies in {storage.name}", "a contiguous tensor",
                               "set its owner")  # fmt: skip
        storage.write(self.offset, self._encoded(x))
        return self

    def _fitting(self, x: np.ndarray) -> np.ndarray:
        """`x` in the tensor's NumPy type (f32 where it has none); ParameterError where a whole number would become another one."""
        to = self.dtype.numpy or np.dtype(np.float32)
        if x.dtype == to:
            return x
        with np.errstate(over="ignore", invalid="ignore"):  # too large for f16 or f32: inf, as in ggml
            y = x.astype(to)
            if to.kind == "i" and not (y == x).all():
                raise ParameterError(f"values from {x.min()} to {x.max()} for {self.label}, stored as {self.dtype}",
                                     f"whole numbers from {np.iinfo(to).min} to {np.iinfo(to).max}")  # fmt: skip
        return y

    def _encoded(self, x: np.ndarray) -> np.ndarray:
        if self.dtype.numpy is not None:
            return x
        if self.dtype.encode is None:
            raise DTypeError(f"{self.label} is stored as {self.dtype}, which cannot be encoded here",
                             "f32, f16, bf16, q8_0, q4_0, …",
                             "quantise offline and write the raw blocks with `storage.write`")  # fmt: skip
        raw = np.empty((*self.ne[:0:-1], self.dtype.row_bytes(self.ne[0])), np.uint8)
        self.dtype.encode(x, raw)
        return raw

    # ---- flags and names

    def mark(self, flag: Flag) -> Tensor:
        """Set a flag (`ggml_set_input`, `ggml_set_output`, `ggml_set_param`, `ggml_set_loss`); returns the tensor.

        An output that is a view makes an output of the owner of its memory, too: else later nodes would get that memory.
        """
        if flag & Flag.PARAM and self.op != "NONE":
            raise ShapeError(f"{self.label} is computed by {self.op}", "a tensor without op as parameter")
        if flag & Flag.LOSS and self.n_elements != 1:
            raise ShapeError(f"{self.label} with ne={self.ne} as loss", "one number", "ops.sum, or ops.mean of one row, makes one")
        self.flags |= flag
        if self.view_src is not None:
            self.view_src.flags |= flag & Flag.OUTPUT
        return self

    def named(self, name: str) -> Tensor:
        """Set the name, cut to 63 bytes as ggml cuts it (`ggml_set_name`); returns the tensor."""
        short = name.isascii() and len(name) < MAX_NAME
        self.name = name if short else name.encode("utf-8", "surrogatepass")[: MAX_NAME - 1].decode("utf-8", "ignore")
        return self

    @property
    def label(self) -> str:
        """The name, safe to print; an unnamed tensor by its op and shape."""
        return f"'{shown(self.name)}'" if self.name else f"({self.desc} {self.dtype} {list(self.ne[: self.n_dims])})"

    def __repr__(self) -> str:
        ne = "x".join(map(str, self.ne[: self.n_dims]))
        what = self.desc if self.op != "NONE" else "leaf"
        name = f" '{shown(self.name)}'" if self.name else ""
        view = f" view of {self.view_src.label}+{self.view_offs}" if self.view_src is not None else ""
        flags = f" [{'|'.join(f.name.lower() for f in Flag if f in self.flags and f.name)}]" if self.flags else ""
        return f"<Tensor{name} {self.dtype} ne={ne} {what}{view}{flags}>"

    # ---- sugar: the operators of NumPy (see workbench.tensors.ops)

    def __add__(self, other: Tensor) -> Tensor:
        return _ops().add(self, other) if isinstance(other, Tensor) else NotImplemented

    def __sub__(self, other: Tensor) -> Tensor:
        return _ops().sub(self, other) if isinstance(other, Tensor) else NotImplemented

    def __mul__(self, other: Tensor | float) -> Tensor:
        if isinstance(other, int | float | np.number):
            return _ops().scale(self, other)
        return _ops().mul(self, other) if isinstance(other, Tensor) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, other: Tensor) -> Tensor:
        return _ops().div(self, other) if isinstance(other, Tensor) else NotImplemented

    def __matmul__(self, other: Tensor) -> Tensor:
        """`w @ x`: `mul_mat(w, x)`."""
        return _ops().mul_mat(self, other) if isinstance(other, Tensor) else NotImplemented

    def __iter__(self) -> Iterator[Tensor]:
        """Views along the slowest dimension, as NumPy does it."""
        return (self[i] for i in range(self.shape[0]))

    def __neg__(self) -> Tensor:
        return _ops().neg(self)

    __array_ufunc__ = None  # NumPy must not take `array * tensor` for an array of tensors

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`np.asarray(t)`: the values."""
        return np.array(self.numpy(), dtype, copy=copy)

    @property
    def T(self) -> Tensor:
        """The transposed view (`ggml_transpose`)."""
        return _ops().transpose(self)

    def reshape(self, *ne: int) -> Tensor:
        """The same memory under other extents, fastest first (`ggml_reshape_*d`)."""
        return _ops().reshape(self, *ne)

    def __getitem__(self, index: Any) -> Tensor:
        """A slice without a copy, in NumPy's order of dimensions: `t[2:4]`, `t[:, 0]` (`ggml_view_*d`)."""
        return _ops().slice_view(self, index)


def _drop_ones(a: np.ndarray, n_dims: int) -> np.ndarray:
    return a[(0,) * (MAX_DIMS - n_dims)]


def _ops() -> Any:
    from workbench.tensors import ops

    return ops
