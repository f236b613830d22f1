"""Decoding the block types that large models mostly come in, for any array library: q4_K, q5_K, q6_K and mxfp4.

The same bits as gguf's own code, which NumPy alone can run: here a GPU decodes what lies in its memory; the CPU takes about
as long as with gguf, and temporaries are bounded. A superblock has 256 elements in 8 or 16 groups, each with a small integer as
scale beside one f16 for all.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from workbench.kernels.blocks import CHUNK, chunks
from workbench.tensors.dtype import DTYPES


def _scales_and_mins(xp: ModuleType, packed: Any) -> tuple[Any, Any]:
    """Twelve bytes hold eight 6-bit scales and eight 6-bit minima: the first four of each whole, the rest in nibbles and spare bits."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = xp.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=1)
    minima = xp.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=1)
    return scales, minima


def _nibbles(xp: ModuleType, pairs: Any) -> Any:
    """Low halves of runs of 32 bytes, then their high halves: (n, runs, 32) to (n, runs, 2, 32)."""
    codes = xp.empty((*pairs.shape[:2], 2, pairs.shape[2]), np.uint8)
    xp.bitwise_and(pairs, 15, out=codes[:, :, 0])
    xp.right_shift(pairs, 4, out=codes[:, :, 1])
    return codes


def _decode_k4_k5(fifth_bits: bool, raw: Any, out: Any, xp: ModuleType = np) -> None:
    """scale · code - minimum, in eight groups of 32; q5_K keeps the fifth bits of the codes apart, bit g of each byte for group g."""
    size = 176 if fifth_bits else 144
    for i in chunks(out.shape, CHUNK // 2):
        blocks = raw[i].reshape(-1, size)
        both = blocks[:, :4].view("<f2").astype(np.float32)
        scales, minima = _scales_and_mins(xp, blocks[:, 4:16])
        codes = _nibbles(xp, blocks[:, size - 128 :].reshape(-1, 4, 32)).reshape(-1, 8, 32)
        if fifth_bits:
            for group in range(8):
                codes[:, group] |= ((blocks[:, 16:48] >> group) & 1) << 4
        to = out[i].reshape(-1, 8, 32)
        xp.multiply(codes, (both[:, :1] * scales)[..., None], out=to)
        xp.subtract(to, (both[:, 1:] * minima)[..., None], out=to)


def _decode_q6_k(raw: Any, out: Any, xp: ModuleType = np) -> None:
    """scale · (code - 32), in sixteen groups of 16. Each half block: 64 bytes of low nibbles, 32 bytes of upper pairs of bits."""
    for i in chunks(out.shape, CHUNK // 2):
        blocks = raw[i].reshape(-1, 210)
        n = len(blocks)
        low = blocks[:, :128].reshape(n, 2, 2, 32)
        upper = blocks[:, 128:192].reshape(n, 2, 1, 32)
        codes = xp.empty((n, 2, 4, 32), np.uint8)
        xp.bitwise_and(low, 15, out=codes[:, :, :2])
        xp.right_shift(low, 4, out=codes[:, :, 2:])
        for quarter in range(4):
            codes[:, :, quarter] |= ((upper[:, :, 0] >> (2 * quarter)) & 3) << 4
        signed = codes.view(np.int8)
        signed -= 32
        scales = blocks[:, 192:208].view(np.int8) * blocks[:, 208:].view("<f2").astype(np.float32)
        xp.multiply(signed.reshape(n, 16, 16), scales[..., None], out=out[i].reshape(n, 16, 16))


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The sixteen values of a 4-bit float, doubled."""


def _decode_mxfp4(raw: Any, out: Any, xp: ModuleType = np) -> None:
    """Blocks of 32 such values with a power of two: its exponent is a byte, halved since the values are doubled."""
    table = xp.asarray(_E2M1, np.float32)
    for i in chunks(out.shape, CHUNK // 8):
        blocks = raw[i].reshape(-1, 17)
        exponent = blocks[:, :1].astype(np.int32)
        bits = xp.where(exponent < 2, 0x200000 << xp.minimum(exponent, 1), (exponent - 1) << 23)
        codes = _nibbles(xp, blocks[:, 1:].reshape(-1, 1, 16)).reshape(-1, 32)
        xp.multiply(table[codes], bits.astype(np.int32).view(np.float32), out=out[i].reshape(-1, 32))


DTYPES["q4_K"].decode = partial(_decode_k4_k5, False)
DTYPES["q5_K"].decode = partial(_decode_k4_k5, True)
DTYPES["q6_K"].decode = _decode_q6_k
DTYPES["mxfp4"].decode = _decode_mxfp4
