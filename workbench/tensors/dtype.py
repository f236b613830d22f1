"""Storage types with their exact block bytes (`ggml_type` and `ggml_type_traits`).

A type stores `block` elements in `block_bytes` bytes. Plain types have blocks of one element; quantised types share a
scale among the 32 or 256 elements of a block, so a row must be a whole number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from workbench.errors import DTypeError, ShapeError, shown


@dataclass(eq=False)
class DType:
    """One storage type (`ggml_type`). Instances are singletons: compare with `is` or `==`.

    `numpy` is the NumPy type of one element, or None where NumPy has none (bf16 and the quantised types). The columns
    `decode(raw, out)` (row bytes to f32) and `encode(x, raw)` (f32 to row bytes) are filled by `kernels.blocks`.
    """

    name: str
    id: int
    block: int
    block_bytes: int
    numpy: np.dtype | None = None
    decode: Callable[..., None] | None = field(default=None, repr=False)
    encode: Callable[..., None] | None = field(default=None, repr=False)

    @property
    def quantised(self) -> bool:
        """True where elements share blocks (`ggml_is_quantized`)."""
        return self.block > 1

    @property
    def bits(self) -> float:
        """Bits per element, scales included."""
        return 8 * self.block_bytes / self.block

    def row_bytes(self, ne0: int) -> int:
        """Bytes of a row of `ne0` elements (`ggml_row_size`). Raises ShapeError where blocks do not divide it."""
        if ne0 % self.block:
            raise ShapeError(
                f"a row of {ne0} elements in {self.name}",
                f"a multiple of {self.block}: {self.name} stores blocks of {self.block} elements",
                f"pad the row to {-(-ne0 // self.block) * self.block} elements, or keep this tensor in f16",
            )
        return ne0 // self.block * self.block_bytes

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], DType], tuple[str]]:
        return dtype, (self.name,)


def _table() -> dict[str, DType]:
    plain = {"f32": (0, "<f4"), "f16": (1, "<f2"), "i8": (24, "<i1"), "i16": (25, "<i2"), "i32": (26, "<i4"),
             "i64": (27, "<i8"), "f64": (28, "<f8")}  # fmt: skip
    blocks = {  # name: (ggml id, elements per block, bytes per block)
        "bf16": (30, 1, 2),
        "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24),
        "q8_0": (8, 32, 34), "q8_1": (9, 32, 40),
        "q2_K": (10, 256, 84), "q3_K": (11, 256, 110), "q4_K": (12, 256, 144), "q5_K": (13, 256, 176),
        "q6_K": (14, 256, 210), "q8_K": (15, 256, 292),
        "iq2_xxs": (16, 256, 66), "iq2_xs": (17, 256, 74), "iq3_xxs": (18, 256, 98), "iq1_s": (19, 256, 50),
        "iq4_nl": (20, 32, 18), "iq3_s": (21, 256, 110), "iq2_s": (22, 256, 82), "iq4_xs": (23, 256, 136),
        "iq1_m": (29, 256, 56), "tq1_0": (34, 256, 54), "tq2_0": (35, 256, 66), "mxfp4": (39, 32, 17),
        "nvfp4": (40, 64, 36), "q1_0": (41, 128, 18),
    }  # fmt: skip
    types = {n: DType(n, i, 1, np.dtype(d).itemsize, np.dtype(d)) for n, (i, d) in plain.items()}
    return types | {n: DType(n, i, block, size) for n, (i, block, size) in blocks.items()}


DTYPES: dict[str, DType] = _table()
_BY_NAME = {n.lower(): t for n, t in DTYPES.items()}
_BY_ID = {t.id: t for t in DTYPES.values()}
_BY_NUMPY = {t.numpy: t for t in DTYPES.values() if t.numpy is not None}

F32, F16, BF16 = DTYPES["f32"], DTYPES["f16"], DTYPES["bf16"]
I8, I16, I32, I64, F64 = DTYPES["i8"], DTYPES["i16"], DTYPES["i32"], DTYPES["i64"], DTYPES["f64"]
Q8_0, Q4_0, Q4_K, Q6_K = DTYPES["q8_0"], DTYPES["q4_0"], DTYPES["q4_K"], DTYPES["q6_K"]

DTypeLike = DType | str | np.dtype | type


def dtype(which: DTypeLike | int) -> DType:
    """The storage type for a name ("q8_0", any case), a ggml id, a NumPy type or a DType. Raises DTypeError."""
    if isinstance(which, DType):
        return which
    if isinstance(which, int) and not isinstance(which, bool):
        if which in _BY_ID:
            return _BY_ID[which]
        raise DTypeError(f"ggml type id {which}", f"one of {sorted(_BY_ID)}", "see `DTYPES`; a newer ggml may know it")
    if which is None:
        raise DTypeError("no storage type given", "one of " + ", ".join(DTYPES))
    if isinstance(which, str):
        if which.lower() in _BY_NAME:
            return _BY_NAME[which.lower()]
    else:
        try:
            native = np.dtype(which).newbyteorder("<")  # type: ignore[arg-type]
        except TypeError:
            native = None
        if native in _BY_NUMPY:
            return _BY_NUMPY[native]
    raise DTypeError(f"no storage type {shown(which)!r}", "one of " + ", ".join(DTYPES), 'for example "f32" or "q8_0"')
