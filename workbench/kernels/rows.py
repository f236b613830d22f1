"""Kernels that look along rows or join them: sums, norms, soft max, rotation, sorting, repetition.

Sums are NumPy's pairwise ones along a row: in f32 they err by about 1e-7 of the sum of magnitudes, whatever its length,
and the bits of a row do not depend on how many rows are computed together.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from workbench.kernels.kernel import Scratch, grain, kernel, scratch_bytes
from workbench.kernels.pieces import cut, piece, repeated, row_pieces, row_work
from workbench.tensors.tensor import Tensor

# ---- sums


@kernel("SUM", work=lambda node: scratch_bytes((next(node.sources()).n_rows, 4)))
def sum_all(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch) -> None:
    """The sum of the sums of the rows."""
    rows = scratch.array((*a.shape[:-1], 1))
    a.sum(axis=-1, dtype="f4", keepdims=True, out=rows)
    out[...] = rows.sum()


@kernel("SUM_ROWS", cut="rows")
def sum_rows(xp: ModuleType, a: Any, *, out: Any) -> None:
    """The sum of each row."""
    a.sum(axis=-1, keepdims=True, out=out)


@kernel("CUMSUM", cut="rows")
def cumsum(xp: ModuleType, a: Any, *, out: Any) -> None:
    """Running sums along each row."""
    xp.cumsum(a, axis=-1, out=out)


@kernel("MEAN", cut="rows")
def mean(xp: ModuleType, a: Any, *, out: Any) -> None:
    """The sum of each row over its length."""
    a.sum(axis=-1, keepdims=True, out=out)
    xp.divide(out, a.shape[-1], out)


@kernel("ARGMAX", work=row_work(1, 2))  # a reversed row, and an int64 (as long as two f32) per row
def argmax(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch) -> None:
    """The last index of the maximum: the first one of the reversed row."""
    rows, n = a[0, 0], a.shape[-1]
    if n == 0:
        out[...] = 0
        return
    for index in cut(rows.shape[:-1], max(1, (scratch.memory.size - 128) // (4 * n + 8))):
        some = rows[index]
        backwards, first = scratch.arrays((some.shape, "f4"), (some.shape[:-1], "i8"))
        backwards[...] = some[..., ::-1]
        backwards.argmax(axis=-1, out=first)
        xp.subtract(n - 1, first, first)
        out[0, 0, 0][index] = first


# ---- norms


@kernel("NORM", cut="rows", work=row_work(1, 1))
def norm(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch, eps: float) -> None:
    """(a - mean) / √(variance + eps)."""
    for index, t, s in row_pieces(a.shape, scratch, 1, 1):
        y = out[index]
        a[index].sum(axis=-1, keepdims=True, out=s)
        xp.divide(s, a.shape[-1], s)
        xp.subtract(a[index], s, y)
        _root_mean_square(xp, y, t, s, eps)
        xp.divide(y, s, y)


@kernel("RMS_NORM", cut="rows", work=row_work(1, 1))
def rms_norm(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch, eps: float) -> None:
    """a / √(mean of a² + eps)."""
    for index, t, s in row_pieces(a.shape, scratch, 1, 1):
        _root_mean_square(xp, a[index], t, s, eps)
        xp.divide(a[index], s, out[index])


@kernel("L2_NORM", cut="rows", work=row_work(1, 1))
def l2_norm(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch, eps: float) -> None:
    """a / max(√(sum of a²), eps)."""
    for index, t, s in row_pieces(a.shape, scratch, 1, 1):
        xp.square(a[index], t)
        t.sum(axis=-1, keepdims=True, out=s)
        xp.sqrt(s, s)
        xp.maximum(s, eps, out=s)
        xp.divide(a[index], s, out[index])


def _root_mean_square(xp: ModuleType, x: Any, t: Any, s: Any, eps: float) -> None:
    xp.square(x, t)
    t.sum(axis=-1, keepdims=True, out=s)
    xp.divide(s, x.shape[-1], s)
    xp.add(s, eps, s)
    xp.sqrt(s, s)


# ---- attention


@kernel("DIAG_MASK_INF")
def diag_mask_inf(xp: ModuleType, a: Any, *, out: Any, n_past: int) -> None:
    """-inf where the column is beyond n_past + row."""
    out[...] = a
    for j in range(out.shape[2]):
        out[:, :, j, n_past + j + 1 :] = -math.inf


def _may_alias(node: Tensor, mask: Tensor | None) -> bool:
    """The allocator may give a result the memory of any source of the same layout, the mask's too."""
    return mask is not None and mask.ne == node.ne and mask.dtype is node.dtype


def _soft_max_work(node: Tensor) -> int:
    mask = node.src[1] if len(node.src) > 1 else None
    per_head = node.ne[0] * node.ne[1] * node.ne[3] if node.params["max_bias"] > 0 or _may_alias(node, mask) else 0
    return scratch_bytes((per_head, 4), (node.n_rows, 4), (node.n_rows, 4), (node.ne[2], 4))


@kernel("SOFT_MAX", cut="rows", work=_soft_max_work)
def soft_max(
    xp: ModuleType,
    a: Any,
    mask: Any = None,
    sinks: Any = None,
    *,
    out: Any,
    scratch: Scratch,
    scale: float,
    max_bias: float,
) -> None:
    """exp(x - max x) / sum of exp(x - max x) with x = scale · a + slope · mask; sinks join maximum and sum."""
    batch, heads, rows, n = out.shape
    by_head = mask is not None and (max_bias > 0 or (mask.shape, mask.dtype) == (out.shape, out.dtype))
    one_head, per_row = (batch, rows, n) if by_head else (0,), (batch, heads, rows, 1)
    t, highest, total, sink = scratch.arrays((one_head, "f4"), (per_row, "f4"), (per_row, "f4"), ((heads, 1, 1), "f4"))
    if sinks is not None:
        sink[...] = sinks.reshape(heads, 1, 1)
    if by_head:
        _logits_by_head(xp, a, mask, out, t, scale, max_bias)
    else:
        xp.multiply(a, scale, out)
        if mask is not None:
            big, few = repeated(out, mask[:, :, :rows])
            xp.add(out.reshape(big), mask[:, :, :rows].reshape(few), out.reshape(big))
    if not out.size:
        return
    out.max(axis=-1, keepdims=True, out=highest)
    if sinks is not None:
        xp.maximum(highest, sink, out=highest)
    xp.subtract(out, highest, out)
    xp.exp(out, out)
    out.sum(axis=-1, keepdims=True, out=total)
    if sinks is not None:
        xp.subtract(sink, highest, highest)
        xp.exp(highest, highest)
        xp.add(total, highest, total)
    xp.divide(out, total, out)


def alibi_slope(head: int, n_heads: int, max_bias: float) -> float:
    """How much a head's mask counts: powers of 2^(-max_bias/2^⌊log2 heads⌋), interleaved for heads beyond a power of two."""
    if max_bias <= 0:
        return 1.0
    whole = 2 ** int(math.log2(n_heads))
    return (
        2.0 ** (-max_bias / whole * (head + 1))
        if head < whole
        else 2.0 ** (-max_bias / 2 / whole * (2 * (head - whole) + 1))
    )


def _logits_by_head(xp: ModuleType, a: Any, mask: Any, out: Any, t: Any, scale: float, max_bias: float) -> None:
    """Head by head, the mask's part first: `out` may be the memory of `a` or of the mask."""
    heads, rows = out.shape[1:3]
    for h in range(heads):
        some = mask[:, h % mask.shape[1], :rows]
        big, few = repeated(t, some)
        slope = alibi_slope(h, heads, max_bias)
        xp.multiply(some.reshape(few), slope, t.reshape(big), dtype="f4")  # of an f16 mask, too: the slope is no f16 number
        xp.multiply(a[:, h], scale, out[:, h])
        xp.add(out[:, h], t, out[:, h])


# ---- rotary positions


def _rope_floats(half: int, others: int, narrow: bool) -> int:
    """Floats of scratch per token: cos, sin and angle per pair, and two temporaries per element (f16: copies too)."""
    return 3 * half + (6 if narrow else 2) * half * others


def _rope_work(node: Tensor) -> int:
    half, others = node.params["n_dims"] // 2, node.ne[1] * node.ne[3]
    tokens = min(node.ne[2], max(1, piece() // 4 // max(1, half * others)))
    return 4 * tokens * _rope_floats(half, others, node.dtype.name != "f32") + 64 * 9


@kernel("ROPE", work=_rope_work)
def rope(
    xp: ModuleType,
    a: Any,
    pos: Any,
    freq_factors: Any = None,
    *,
    out: Any,
    scratch: Scratch,
    n_dims: int,
    mode: int,
    **params: Any,
) -> None:
    """Turn each pair (x0, x1) by its angle: x0' = x0·cos - x1·sin, x1' = x0·sin + x1·cos."""
    half, narrow = n_dims // 2, a.dtype != "f4"
    first, second = (slice(0, n_dims, 2), slice(1, n_dims, 2)) if mode == 0 else (slice(0, half), slice(half, n_dims))
    per_token = 4 * _rope_floats(half, a.shape[0] * a.shape[2], narrow)
    for (some,) in cut(a.shape[1:2], max(1, (scratch.memory.size - 64 * 9) // per_token)):
        x, y = a[:, some], out[:, some]
        table, pairs = ((x.shape[1], 1, half), "f4"), ((*x.shape[:-1], half), "f4")
        cos, sin, angle, *t = scratch.arrays(*[table] * 3, *[pairs] * (6 if narrow else 2))
        _angles(xp, pos[..., some], freq_factors, cos, sin, angle, n_dims, **params)
        halves = x[..., first], x[..., second], y[..., first], y[..., second]
        if narrow:
            t[2][...], t[3][...] = halves[:2]
            _turn(xp, t[2:6], cos, sin, t[0], t[1])
            halves[2][...], halves[3][...] = t[4:6]
        else:
            _turn(xp, halves, cos, sin, t[0], t[1])
    if n_dims < a.shape[-1]:
        out[..., n_dims:] = a[..., n_dims:]


def _turn(xp: ModuleType, halves: Any, cos: Any, sin: Any, t0: Any, t1: Any) -> None:
    """(x0, x1) to (y0, y1), which may be the same memory: both products with sin come first."""
    x0, x1, y0, y1 = halves
    xp.multiply(x0, sin, t0)
    xp.multiply(x1, sin, t1)
    xp.multiply(x0, cos, y0)
    xp.subtract(y0, t1, y0)
    xp.multiply(x1, cos, y1)
    xp.add(y1, t0, y1)


def _angles(xp: ModuleType, pos: Any, freq_factors: Any, cos: Any, sin: Any, angle: Any, n_dims: int, *, n_ctx_orig: int, freq_base: float,
            freq_scale: float, ext_factor: float, attn_factor: float, beta_fast: float, beta_slow: float) -> None:  # fmt: skip
    """cos and sin of position · freq_base^(-2i/n_dims) per (token, pair i), multiplied up in f32 from pair to pair as ggml does."""
    angle[...] = float(xp.float32(freq_base)) ** (-2.0 / n_dims)
    angle[..., 0] = pos.reshape(-1, 1)
    xp.cumprod(angle, axis=-1, out=angle)
    if freq_factors is not None:
        xp.divide(angle, freq_factors[0, 0, 0, : angle.shape[-1]], angle)
    magnitude = attn_factor
    if ext_factor:  # YaRN: fast pairs keep their angle, slow ones are interpolated, between them a ramp
        low, high = yarn_range(n_dims, n_ctx_orig, freq_base, beta_fast, beta_slow)
        kept = [ext_factor * (1 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))) for i in range(angle.shape[-1])]
        xp.multiply(angle, xp.asarray([freq_scale * (1 - k) + k for k in kept], "f4"), angle)
        magnitude *= 1 + 0.1 * math.log(1 / freq_scale)
    elif freq_scale != 1:
        xp.multiply(angle, freq_scale, angle)
    xp.cos(angle, cos)
    xp.sin(angle, sin)
    if magnitude != 1:
        xp.multiply(cos, magnitude, cos)
        xp.multiply(sin, magnitude, sin)


def yarn_range(
    n_dims: int, n_ctx_orig: int, freq_base: float, beta_fast: float, beta_slow: float
) -> tuple[float, float]:
    """First and last pair of YaRN's ramp: those that turn beta_fast and beta_slow times within the training context."""

    def pair(turns: float) -> float:
        return n_dims * math.log(n_ctx_orig / (turns * 2 * math.pi)) / (2 * math.log(freq_base))

    return max(0, math.floor(pair(beta_fast))), min(n_dims - 1, math.ceil(pair(beta_slow)))


# ---- sorting


@kernel("ARGSORT", cut="rows", work=row_work(1, 0))
def argsort(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch, order: str) -> None:
    """The indices that sort each row; equal elements keep their order."""
    for index, sorted_by in _sorting(xp, a, scratch, order):
        out[index] = sorted_by


@kernel("TOP_K", cut="rows", work=row_work(1, 0))
def top_k(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch, k: int) -> None:
    """The k largest; ggml exchanges the first two to show that the order means nothing, and so does this."""
    for index, sorted_by in _sorting(xp, a, scratch, "desc"):
        y = out[index]
        y[...] = sorted_by[..., :k]
        if k > 1:
            y[..., 0], y[..., 1] = sorted_by[..., 1], sorted_by[..., 0]


def _sorting(xp: ModuleType, a: Any, scratch: Scratch, order: str) -> Any:
    """Few rows at a time, since `argsort` cannot write its int64 indices into memory that is there already."""
    few = max(1, min(scratch.memory.size // 4, 1024 * grain()) // max(1, a.shape[-1]))
    for index in cut(a.shape[:-1], few):
        keys = a[index]
        if order == "desc":
            t = scratch.array(keys.shape)
            xp.negative(keys, t)
            keys = t
        yield index, xp.argsort(keys, axis=-1, kind="stable")


# ---- joining


@kernel("REPEAT")
def repeat(xp: ModuleType, a: Any, *, out: Any) -> None:
    """Whole copies of a."""
    big, few = repeated(out, a)
    out.reshape(big)[...] = a.reshape(few)


@kernel("CONCAT")
def concat(xp: ModuleType, a: Any, b: Any, *, out: Any, dim: int) -> None:
    """a, then b, along dimension `dim` of ne."""
    lead = (slice(None),) * (3 - dim)
    n = a.shape[3 - dim]
    out[(*lead, slice(0, n))] = a
    out[(*lead, slice(n, None))] = b


# ---- loss


@kernel("CROSS_ENTROPY_LOSS", work=lambda node: row_work(2, 2)(node) + scratch_bytes((next(node.sources()).n_rows, 4)))
def cross_entropy_loss(xp: ModuleType, logits: Any, labels: Any, *, out: Any, scratch: Scratch) -> None:
    """-mean over rows of the sum of labels · (x - max - log sum exp(x - max))."""
    rows = math.prod(logits.shape[:-1])
    losses = scratch.array((*logits.shape[:-1], 1))
    losses[...] = 0
    rest = Scratch(scratch.memory[scratch_bytes((rows, 4)) :])
    for index, x, e, s, m in row_pieces(logits.shape, rest, 2, 2) if logits.size else ():
        logits[index].max(axis=-1, keepdims=True, out=m)
        xp.subtract(logits[index], m, x)
        xp.exp(x, e)
        e.sum(axis=-1, keepdims=True, out=s)
        xp.log(s, s)
        xp.subtract(x, s, x)
        xp.multiply(x, labels[index], x)
        x.sum(axis=-1, keepdims=True, out=losses[index])
    out[...] = losses.sum()
    xp.divide(out, -rows, out)
