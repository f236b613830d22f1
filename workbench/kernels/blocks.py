"""Storage types as bytes: decoding rows to f32, encoding f32 as rows, and rounding inputs as ggml's products do.

Filling the columns `decode(raw, out, xp)` and `encode(x, raw, xp)` of the type table is this module's work. `raw` holds
the bytes of whole rows along its last axis (for bf16 it may also be an array of uint16 patterns with any strides).
Temporaries are bounded: large inputs are treated in chunks, larger ones where the device likes that (`grain`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from workbench.errors import DTypeError
from workbench.kernels.kernel import grain
from workbench.kernels.pieces import cut
from workbench.tensors.dtype import BF16, DTYPES, F16, DType
from workbench.tensors.tensor import Tensor

CHUNK = 2**15
"""Elements treated at a time where temporaries are needed (they stay far below 64 KiB and in the first-level cache)."""

Index = tuple[Any, ...]


def chunk() -> int:
    """CHUNK on the device that plans or computes just now."""
    return CHUNK * grain()


class Rows:
    """Rows of a type that the array library has no dtype for: the operand of a kernel.

    raw: uint8 (ne3, ne2, ne1, bytes per row); for bf16 uint16 (ne3, ne2, ne1, ne0) with any strides.
    """

    __slots__ = ("dtype", "raw", "shape")

    def __init__(self, dtype: DType, raw: Any) -> None:
        self.dtype, self.raw = dtype, raw
        n = raw.shape[-1] * raw.dtype.itemsize // dtype.block_bytes * dtype.block
        self.shape: tuple[int, ...] = (*raw.shape[:-1], n)

    def __getitem__(self, index: Any) -> Rows:
        """The rows at `index` (over the dimensions before the last), sharing memory."""
        return Rows(self.dtype, self.raw[index])


def operand(tensor: Tensor, memory: Any = None) -> Any:
    """What a kernel gets for a tensor in host memory (or in `memory`): an array of a plain type, else `Rows`."""
    if tensor.dtype.numpy is not None:
        return tensor.array(memory)
    return Rows(tensor.dtype, tensor.array(memory) if tensor.dtype is BF16 else tensor.raw_rows(memory))


def decode(xp: ModuleType, src: Any, out: Any) -> None:
    """An operand of any type as f32 in `out` of the same element shape."""
    if isinstance(src, Rows):
        src.dtype.decode(src.raw, out, xp)  # type: ignore[misc] # filled for every type below
    elif src.dtype == np.float16:
        _decode_f16(src, out, xp)
    else:
        out[...] = src


def encode(xp: ModuleType, x: Any, dst: Any) -> None:
    """f32 `x` stored in an operand of any type and the same element shape."""
    if isinstance(dst, Rows):
        dst.dtype.encode(x, dst.raw, xp)  # type: ignore[misc]
    else:
        with np.errstate(over="ignore", invalid="ignore"):  # f16 overflows to inf, as in ggml
            xp.copyto(dst, x, casting="unsafe")


def chunks(shape: tuple[int, ...], limit: int = CHUNK) -> Iterator[Index]:
    """Indices that cut an array into pieces of whole rows with about `limit` elements, times the grain of the device."""
    limit *= grain()
    return cut(shape[:-1], max(1, limit // max(shape[-1], 1))) if len(shape) > 1 else iter([(slice(None),)])


def take_rows(xp: ModuleType, a: Any, rows: Any, out: Any) -> None:
    """Rows of `a` gathered into `out`. NumPy would buffer the result in case an index is wrong; ours are checked."""
    if xp is np:
        np.take(a, rows, axis=0, out=out, mode="clip")
    else:
        xp.take(a, rows, axis=0, out=out)


# ---- f16 and bf16


def _decode_f16(x: Any, out: Any, xp: ModuleType = np) -> None:
    """f16 to f32 by shifting bits, about 0.35 ns an element where NumPy's own cast takes 2.

    The exponent of f16 lands in the exponent field of f32 with a bias of 15 instead of 127; multiplying by 2**112
    mends it, subnormal numbers included. Infinities and NaN need the true cast.
    """
    if x.dtype != np.float16:
        x = x.view("<f2")
    if xp is not np or not x.size:
        out[...] = x
        return
    bits = x.view(np.int16)
    if bits.max() >= 0x7C00 or bits.view(np.uint16).max() >= 0xFC00:
        np.copyto(out, x)
        return
    wide = out.view(np.int32)
    np.copyto(wide, bits)  # the sign bit spreads over the upper half; the mask keeps one of its copies
    np.left_shift(wide, 13, out=wide)
    np.bitwise_and(wide, -0x70002000, out=wide)
    np.multiply(out, np.float32(2.0**112), out=out)


def _decode_bf16(raw: Any, out: Any, xp: ModuleType = np) -> None:
    """bf16 is the upper half of an f32."""
    wide = out.view(np.uint32)
    xp.copyto(wide, raw.view("<u2") if raw.dtype == np.uint8 else raw)
    xp.left_shift(wide, 16, out=wide)


def _encode_bf16(x: Any, raw: Any, xp: ModuleType = np) -> None:
    """Round to the nearest, ties to even; a NaN stays a (quiet) NaN."""
    raw = raw.view("<u2") if raw.dtype == np.uint8 else raw
    for i in chunks(x.shape, CHUNK // 4):
        raw[i] = _bf16_bits(xp, xp.ascontiguousarray(x[i])) >> 16


def _bf16_bits(xp: ModuleType, x: Any) -> Any:
    """`x` rounded to bf16, as f32 bit patterns whose lower half is to be ignored."""
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    nan = x != x
    if nan.any():
        rounded[nan] = bits[nan] | 0x400000
    return rounded


# ---- blocks of 32 with an f16 scale: own code, three times as fast as gguf's


def _blocks(raw: Any, size: int) -> tuple[Any, Any]:
    """Scales as f32 (…, blocks, 1) and the remaining bytes (…, blocks, size - 2)."""
    b = raw.reshape(*raw.shape[:-1], -1, size)
    return b[..., :2].view("<f2").astype(np.float32), b[..., 2:]


def _decode_q8_0(raw: Any, out: Any, xp: ModuleType = np) -> None:
    for i in chunks(out.shape, 2 * CHUNK):
        d, codes = _blocks(raw[i], 34)
        to = out[i].reshape(codes.shape)
        xp.copyto(to, codes.view(np.int8))
        xp.multiply(to, d, out=to)


def _decode_q4_0(raw: Any, out: Any, xp: ModuleType = np) -> None:
    """Low halves of 16 bytes are elements 0 to 15, high halves 16 to 31; 8 stands for zero. Halves are taken eight at a time."""
    room = xp.empty((2, max(chunk(), out.shape[-1]) // 2), np.uint8)
    for i in chunks(out.shape):
        d, pairs = _blocks(raw[i], 18)
        low, high = halves = room[:, : pairs.size]
        xp.copyto(high.reshape(pairs.shape), pairs)
        xp.bitwise_and(high.view("u8"), 0x0F0F0F0F0F0F0F0F, out=low.view("u8"))
        xp.right_shift(high.view("u8"), 4, out=high.view("u8"))
        xp.bitwise_and(high.view("u8"), 0x0F0F0F0F0F0F0F0F, out=high.view("u8"))
        codes = halves.view(np.int8)
        codes -= 8
        to = out[i].reshape(*d.shape[:-1], 32)
        xp.copyto(to[..., :16], codes[0].reshape(pairs.shape))
        xp.copyto(to[..., 16:], codes[1].reshape(pairs.shape))
        xp.multiply(to, d, out=to)


def _encode_q8_0(x: Any, raw: Any, xp: ModuleType = np) -> None:
    """Scale: the largest magnitude / 127; codes rounded half away from zero (`quantize_row_q8_0_ref`)."""
    for i in chunks(x.shape, CHUNK // 8):
        b = x[i].reshape(*x[i].shape[:-1], -1, 32)
        d = xp.abs(b).max(-1, keepdims=True) / np.float32(127)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            y = b * xp.where(d == 0, np.float32(0), 1 / d)
            codes = xp.rint(y)  # ties went to even: move those that lie further from zero
            codes += xp.sign(y) * (xp.abs(y) - xp.abs(codes) == 0.5)
            to = raw[i].reshape(*b.shape[:-1], 34)
            to[..., :2] = d.astype("<f2").view(np.uint8)
            to[..., 2:] = codes.astype(np.int8).view(np.uint8)


# ---- every other block type: gguf's own code


def _gguf(name: str, direction: str) -> Callable[..., Any]:
    from gguf import GGMLQuantizationType, quants  # slow to import: 0.16 s

    kind = getattr(GGMLQuantizationType, name.upper(), None)

    def convert(array: Any) -> Any:
        try:
            return getattr(quants, direction)(array, kind)
        except NotImplementedError:
            raise DTypeError(f"{direction} of {name}: gguf has no code for it", "a type that the `gguf` package handles",
                             "convert the model to q8_0, q4_0, q4_K or f16 with llama.cpp's `llama-quantize`") from None  # fmt: skip

    return convert


def _decode_by_gguf(name: str, raw: Any, out: Any, xp: ModuleType = np) -> None:
    dequantize = _gguf(name, "dequantize")
    for i in chunks(out.shape):
        out[i] = _on_host(xp, dequantize, raw[i])


def _encode_by_gguf(name: str, x: Any, raw: Any, xp: ModuleType = np) -> None:
    quantize = _gguf(name, "quantize")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for i in chunks(x.shape, CHUNK // 8):
            raw[i] = _on_host(xp, quantize, xp.asarray(x[i], np.float32))


def _on_host(xp: ModuleType, convert: Callable[..., Any], array: Any) -> Any:
    """gguf computes with NumPy only: arrays of other libraries go there and back."""
    if xp is np:
        return convert(np.ascontiguousarray(array))
    return xp.asarray(convert(xp.asnumpy(xp.ascontiguousarray(array))))


def _decode_plain(kind: np.dtype, raw: Any, out: Any, xp: ModuleType = np) -> None:
    out[...] = raw.view(kind)


def _encode_plain(kind: np.dtype, x: Any, raw: Any, xp: ModuleType = np) -> None:
    encode(xp, x, raw.view(kind))


_OWN = {"f16": _decode_f16, "bf16": _decode_bf16, "q8_0": _decode_q8_0, "q4_0": _decode_q4_0}
_OWN_ENCODE = {"bf16": _encode_bf16, "q8_0": _encode_q8_0}

for _name, _t in DTYPES.items():
    _t.decode = _OWN.get(_name) or (partial(_decode_plain, _t.numpy) if _t.numpy else partial(_decode_by_gguf, _name))
    _t.encode = _OWN_ENCODE.get(_name) or (partial(_encode_plain, _t.numpy) if _t.numpy else partial(_encode_by_gguf, _name))


# ---- activation_rounding="ggml"


def _round_f16(xp: ModuleType, x: Any) -> None:
    flat = x.reshape(-1)
    with np.errstate(over="ignore"):
        for a in range(0, flat.size, step := chunk() // 4):
            flat[a : a + step] = flat[a : a + step].astype(np.float16)


def _round_bf16(xp: ModuleType, x: Any) -> None:
    flat = x.reshape(-1)
    for a in range(0, flat.size, step := chunk() // 4):
        part = flat[a : a + step]
        xp.bitwise_and(_bf16_bits(xp, part), 0xFFFF0000, out=part.view(np.uint32))


def _round_int8(block: int, half_scale: bool, xp: ModuleType, x: Any) -> None:
    """Blocks become 8-bit codes times a scale and are decoded at once (`quantize_row_q8_0`, `quantize_row_q8_K`)."""
    blocks = x.reshape(-1, block)
    with np.errstate(over="ignore", invalid="ignore"):
        for a in range(0, len(blocks), step := chunk() // block):
            b = blocks[a : a + step]
            amax = xp.maximum(b.max(-1, keepdims=True), -b.min(-1, keepdims=True))
            b *= np.float32(127) / xp.maximum(amax, np.float32(1e-30))  # a block that small decodes to zero anyway
            xp.rint(b, out=b)
            amax /= np.float32(127)
            b *= amax.astype(np.float16) if half_scale else amax


_Q8_0, _Q8_K = partial(_round_int8, 32, True), partial(_round_int8, 256, False)
_ROUND: dict[DType, Callable[[ModuleType, Any], None]] = {F16: _round_f16, BF16: _round_bf16}
_ROUND |= {t: _Q8_K if t.block == 256 else _Q8_0 for t in DTYPES.values() if t.quantised}


def rounds_input(weights: DType) -> bool:
    """Whether ggml rounds the second operand of a product with weights of this type."""
    return weights in _ROUND


def round_input(xp: ModuleType, weights: DType, x: Any) -> None:
    """Round packed f32 rows in place to the type that ggml multiplies such weights with (`vec_dot_type`)."""
    if weights in _ROUND and x.size:
        _ROUND[weights](xp, x)
