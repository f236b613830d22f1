"""Ops that look along rows or join them: sums, norms, soft max, rotation of positions, sorting, repetition."""

from __future__ import annotations

import math

from workbench.errors import DTypeError, ParameterError, ShapeError
from workbench.tensors.context import result
from workbench.tensors.dtype import F32, I32
from workbench.tensors.ops.checks import can_repeat, per_source, require_contiguous, require_type
from workbench.tensors.ops.layout import view
from workbench.tensors.opspec import OpSpec, op, per_element
from workbench.tensors.tensor import Extents, Tensor, extents

# ---- sums

SUM = op("SUM", "sum of all elements", flops=per_source(1))
SUM_ROWS = op("SUM_ROWS", "sum of each row", flops=per_source(1))
CUMSUM = op("CUMSUM", "sum of each row up to and including each element", flops=per_source(1))
MEAN = op("MEAN", "mean of each row", flops=per_source(1))
ARGMAX = op("ARGMAX", "index of the largest element of each row, the last of equals", flops=per_source(1))


def sum(a: Tensor) -> Tensor:
    """The sum of all elements, [1] (`ggml_sum`)."""
    require_type("SUM", "a", a, "f32", "f16")
    return result(a.dtype, (1, 1, 1, 1), op="SUM", spec=SUM, src=(a,))


def sum_rows(a: Tensor) -> Tensor:
    """The sum of each row, [1, ne1, ne2, ne3] (`ggml_sum_rows`)."""
    require_type("SUM_ROWS", "a", a, "f32")
    return result(a.dtype, (1, *a.ne[1:]), op="SUM_ROWS", spec=SUM_ROWS, src=(a,))


def cumsum(a: Tensor) -> Tensor:
    """Running sums along each row, of a's extents (`ggml_cumsum`)."""
    require_type("CUMSUM", "a", a, "f32")
    return result(a.dtype, a.ne, op="CUMSUM", spec=CUMSUM, src=(a,))


def mean(a: Tensor) -> Tensor:
    """The mean of each row, [1, ne1, ne2, ne3] in f32 (`ggml_mean`)."""
    require_type("MEAN", "a", a, "f32")
    return result(F32, (1, *a.ne[1:]), op="MEAN", spec=MEAN, src=(a,))


def argmax(a: Tensor) -> Tensor:
    """The index of the largest element of each row of a matrix, [ne1] i32; the last of equal ones (`ggml_argmax`)."""
    require_type("ARGMAX", "a", a, "f32")
    if a.ne[2:] != (1, 1):
        raise ShapeError(f"ARGMAX: a.ne={a.ne}", "a matrix", "reshape it to [ne0, rows]")
    return result(I32, (a.ne[1], 1, 1, 1), op="ARGMAX", spec=ARGMAX, src=(a,))


# ---- norms

NORM = op("NORM", "(a - mean) / √(variance + eps) per row", flops=per_element(5))
RMS_NORM = op("RMS_NORM", "a / √(mean of a² + eps) per row", in_place=True, flops=per_element(3))
L2_NORM = op("L2_NORM", "a / max(√(sum of a²), eps) per row", flops=per_element(3))


def norm(a: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row shifted to mean 0 and scaled to variance 1: layer norm without weights (`ggml_norm`)."""
    return _norm(NORM, a, eps)


def rms_norm(a: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row divided by its root mean square (`ggml_rms_norm`)."""
    return _norm(RMS_NORM, a, eps)


def l2_norm(a: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row divided by its length, at least eps (`ggml_l2_norm`)."""
    return _norm(L2_NORM, a, eps)


def _norm(spec: OpSpec, a: Tensor, eps: float) -> Tensor:
    require_type(spec.name, "a", a, "f32")
    if not eps >= 0:
        raise ParameterError(f"{spec.name}: eps={eps}", "zero or more")
    return result(a.dtype, a.ne, op=spec.op, spec=spec, src=(a,), params={"eps": float(eps)})


# ---- attention

DIAG_MASK_INF = op("DIAG_MASK_INF", "-inf where column > n_past + row", in_place=True, flops=lambda node: 0)
SOFT_MAX = op("SOFT_MAX", "exp(x) / sum of exp(x) per row, x = scale · a + slope · mask", in_place=True,
              flops=lambda node: (6 + 2 * (len(node.src) > 1 and node.src[1] is not None)) * node.n_elements)  # fmt: skip
ROPE = op("ROPE", "pairs of each row turned by position · freq_base^(-2i/n_dims)", in_place=True,
          flops=lambda node: 3 * node.params["n_dims"] * node.n_rows + 3 * node.params["n_dims"] // 2 * node.ne[2])  # fmt: skip


def diag_mask_inf(a: Tensor, n_past: int) -> Tensor:
    """-inf where a position looks at a later one; `n_past` positions come before row 0 (`ggml_diag_mask_inf`)."""
    require_type("DIAG_MASK_INF", "a", a, "f32")
    if n_past < 0:
        raise ParameterError(f"DIAG_MASK_INF: n_past={n_past}", "zero or more")
    return result(a.dtype, a.ne, op="DIAG_MASK_INF", spec=DIAG_MASK_INF, src=(a,), params={"n_past": int(n_past)})


def soft_max(a: Tensor) -> Tensor:
    """Soft max of each row; a row of only -inf gives NaN (`ggml_soft_max`)."""
    return soft_max_ext(a, None, 1.0, 0.0)


def soft_max_ext(
    a: Tensor, mask: Tensor | None, scale: float, max_bias: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    """Soft max of `scale · a + slope · mask` (`ggml_soft_max_ext`, `ggml_soft_max_add_sinks`).

    mask [ne0, at least ne1, m2, m3] f32 or f16, repeated over dimensions 2 and 3. max_bias above 0 turns on ALiBi: the
    slope falls with the head (dimension 2); otherwise it is 1. sinks [heads]: one more logit per head that takes part in
    the sum only. Raises ShapeError, DTypeError, ParameterError.
    """
    require_type("SOFT_MAX", "a", a, "f32")
    require_contiguous("SOFT_MAX", a, a.is_contiguous)
    if mask is not None:
        require_type("SOFT_MAX", "mask", mask, "f32", "f16")
        require_contiguous("SOFT_MAX", mask, mask.is_contiguous)
        fits = (
            mask.ne[0] == a.ne[0]
            and mask.ne[1] >= a.ne[1]
            and all(m and n % m == 0 for n, m in zip(a.ne[2:], mask.ne[2:], strict=True))
        )
        if not fits:
            raise ShapeError(f"SOFT_MAX: a.ne={a.ne}, mask.ne={mask.ne}", "a mask with rows as long as a's, at least as many of "
                             "them, and dimensions 2 and 3 that divide a's", "the mask is [n_kv, n_tokens]: one row per query")  # fmt: skip
    elif max_bias > 0:
        raise ParameterError(
            f"SOFT_MAX: max_bias={max_bias} without a mask", "a mask: ALiBi scales it by a slope per head"
        )
    if sinks is not None:
        require_type("SOFT_MAX", "sinks", sinks, "f32")
        if sinks.ne != (a.ne[2], 1, 1, 1):
            raise ShapeError(
                f"SOFT_MAX: sinks.ne={sinks.ne} for {a.ne[2]} heads", f"({a.ne[2]}, 1, 1, 1): one logit per head"
            )
    return result(a.dtype, a.ne, op="SOFT_MAX", spec=SOFT_MAX, src=_trimmed(a, mask, sinks),
                  params={"scale": float(scale), "max_bias": float(max_bias)})  # fmt: skip


def rope(a: Tensor, pos: Tensor, n_dims: int, mode: int = 0, freq_factors: Tensor | None = None, *, n_ctx_orig: int = 0,
         freq_base: float = 10000.0, freq_scale: float = 1.0, ext_factor: float = 0.0, attn_factor: float = 1.0,
         beta_fast: float = 32.0, beta_slow: float = 1.0) -> Tensor:  # fmt: skip
    """Rotary position embedding of a [ne0, heads, tokens] at positions pos [tokens] (`ggml_rope_ext`).

    The first n_dims elements of each row form pairs: neighbours in mode 0 (normal), halves in mode 2 (NeoX). freq_factors
    [n_dims/2] divide the angles. ext_factor other than 0 turns on YaRN. Raises ShapeError, DTypeError, ParameterError.
    """
    require_type("ROPE", "a", a, "f32", "f16")
    require_type("ROPE", "pos", pos, "i32")
    if mode not in (0, 2):
        raise ParameterError(f"ROPE: mode={mode}", "0 (normal: neighbours turn together) or 2 (NeoX: halves)")
    if not (0 < n_dims <= a.ne[0] and n_dims % 2 == 0):
        raise ParameterError(f"ROPE: n_dims={n_dims} for rows of {a.ne[0]}", f"an even number from 2 to {a.ne[0]}")
    if pos.ne != (a.ne[2], 1, 1, 1):
        raise ShapeError(f"ROPE: pos.ne={pos.ne} for a.ne={a.ne}", f"({a.ne[2]}, 1, 1, 1): a position per token of a")
    if ext_factor and n_ctx_orig <= 0:
        raise ParameterError(f"ROPE: ext_factor={ext_factor} with n_ctx_orig={n_ctx_orig}",
                             "n_ctx_orig above 0: YaRN needs the length of the training context")  # fmt: skip
    if freq_factors is not None:
        require_type("ROPE", "freq_factors", freq_factors, "f32")
        if freq_factors.ne[0] < n_dims // 2:
            raise ShapeError(f"ROPE: {freq_factors.ne[0]} frequency factors", f"{n_dims // 2}: one per pair")
    params = {"n_dims": int(n_dims), "mode": int(mode), "n_ctx_orig": int(n_ctx_orig), "freq_base": float(freq_base),
              "freq_scale": float(freq_scale), "ext_factor": float(ext_factor), "attn_factor": float(attn_factor),
              "beta_fast": float(beta_fast), "beta_slow": float(beta_slow)}  # fmt: skip
    return result(a.dtype, a.ne, op="ROPE", spec=ROPE, src=_trimmed(a, pos, freq_factors), params=params)


def _trimmed(*src: Tensor | None) -> tuple[Tensor | None, ...]:
    """Absent sources keep their place (ggml's NULL) unless nothing follows them."""
    return src if src[-1] is not None else _trimmed(*src[:-1])


# ---- sorting

ARGSORT = op("ARGSORT", "indices that sort each row", flops=lambda node: _comparisons(node, node.ne[0]))
TOP_K = op(
    "TOP_K",
    "indices of the k largest of each row, in no particular order",
    flops=lambda node: _comparisons(node, node.ne[0]),
)


def _comparisons(node: Tensor, kept: int) -> int:
    return next(node.sources()).n_elements * math.ceil(math.log2(max(kept, 2)))


def argsort(a: Tensor, order: str = "asc") -> Tensor:
    """The indices that sort each row, i32; `order` "asc" or "desc" (`ggml_argsort`)."""
    require_type("ARGSORT", "a", a, "f32")
    if order not in ("asc", "desc"):
        raise ParameterError(f"ARGSORT: order={order!r}", '"asc" or "desc"')
    return result(I32, a.ne, op="ARGSORT", spec=ARGSORT, src=(a,), params={"order": order})


def top_k(a: Tensor, k: int) -> Tensor:
    """The indices of the k largest elements of each row, [k, ne1, ne2, ne3] i32, unordered (`ggml_top_k`)."""
    require_type("TOP_K", "a", a, "f32")
    return result(I32, (_checked_k("TOP_K", a, k), *a.ne[1:]), op="TOP_K", spec=TOP_K, src=(a,), params={"k": int(k)})


def argsort_top_k(a: Tensor, k: int) -> Tensor:
    """The indices of the k largest elements, largest first: ARGSORT and a VIEW of its first k (`ggml_argsort_top_k`)."""
    k = _checked_k("ARGSORT", a, k)
    order = argsort(a, "desc")
    return view(order, k, *order.ne[1:], nb=order.nb[1:])


def _checked_k(name: str, a: Tensor, k: int) -> int:
    if not 0 < k <= a.ne[0]:
        raise ParameterError(f"{name}: k={k} of rows with {a.ne[0]} elements", f"1 to {a.ne[0]}")
    return int(k)


# ---- joining

REPEAT = op("REPEAT", "whole copies of a, side by side", flops=lambda node: 0)
CONCAT = op("CONCAT", "a, then b, along one dimension", flops=lambda node: 0)


def repeat(a: Tensor, b: Tensor | tuple[int, ...] | list[int]) -> Tensor:
    """Copies of a that fill the extents of b (a tensor, or ne itself) (`ggml_repeat`, `ggml_repeat_4d`)."""
    ne: Extents = b.ne if isinstance(b, Tensor) else extents(b)
    if not can_repeat(a, ne):
        raise ShapeError(f"REPEAT: a.ne={a.ne} to ne={ne}", "extents that are multiples of a's")
    if a.dtype.numpy is None or a.dtype.name in ("i8", "i64", "f64"):
        raise DTypeError(f"REPEAT of {a.label}, stored as {a.dtype}", "f32, f16, i32 or i16")
    return result(a.dtype, ne, op="REPEAT", spec=REPEAT, src=(a,))


def concat(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """a and b behind each other along dimension `dim` of ne (`ggml_concat`). Raises ShapeError, DTypeError."""
    if dim not in (0, 1, 2, 3):
        raise ParameterError(f"CONCAT: dim={dim}", "0, 1, 2 or 3 (0 is the fastest)")
    require_type("CONCAT", "b", b, a.dtype.name)
    if a.dtype.numpy is None:
        raise DTypeError(f"CONCAT of {a.label}, stored as {a.dtype}", "a type with one element per block")
    if any(a.ne[i] != b.ne[i] for i in range(4) if i != dim):
        raise ShapeError(f"CONCAT along {dim}: a.ne={a.ne}, b.ne={b.ne}", f"equal extents except along dimension {dim}")
    ne = tuple(n + (b.ne[i] if i == dim else 0) for i, n in enumerate(a.ne))
    return result(a.dtype, ne, op="CONCAT", spec=CONCAT, src=(a, b), params={"dim": int(dim)})


# ---- loss

CROSS_ENTROPY_LOSS = op(
    "CROSS_ENTROPY_LOSS", "-sum of labels · log soft max(logits), per row, averaged over rows", flops=per_source(7)
)


def cross_entropy_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy between soft max(logits) and labels of the same shape, averaged over rows (`ggml_cross_entropy_loss`)."""
    for what, t in (("logits", logits), ("labels", labels)):
        require_type("CROSS_ENTROPY_LOSS", what, t, "f32")
    if logits.ne != labels.ne:
        raise ShapeError(f"CROSS_ENTROPY_LOSS: logits.ne={logits.ne}, labels.ne={labels.ne}", "equal extents",
                         "labels are probabilities per class, not class numbers")  # fmt: skip
    return result(logits.dtype, (1, 1, 1, 1), op="CROSS_ENTROPY_LOSS", spec=CROSS_ENTROPY_LOSS, src=(logits, labels))
