"""The slow definitions: what each op means, over whole arrays in f64, with no regard for speed or memory.

`fn(node, *sources) -> array`: sources come with four axes (ne3, ne2, ne1, ne0) as they are stored, absent ones as None;
`node.params` holds the parameters. Tests compare kernels with these, and lessons show them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from workbench.kernels.kernel import reference
from workbench.tensors.tensor import Tensor

Array = np.ndarray


def real(a: Array) -> Array:
    """The values in f64, where rounding does not matter."""
    return a.astype(np.float64)


def repeated_to(shape: tuple[int, ...], a: Array) -> Array:
    """Whole copies of `a` side by side: along each axis, index i reads i modulo the length of a."""
    return a[np.ix_(*[np.arange(n) % max(m, 1) for n, m in zip(shape, a.shape, strict=True)])]


# ---- arithmetic


@reference("ADD")
def add(node: Tensor, a: Array, b: Array) -> Array:
    """a + b."""
    return real(a) + repeated_to(a.shape, real(b))


@reference("SUB")
def sub(node: Tensor, a: Array, b: Array) -> Array:
    """a - b."""
    return real(a) - repeated_to(a.shape, real(b))


@reference("MUL")
def mul(node: Tensor, a: Array, b: Array) -> Array:
    """a · b."""
    return real(a) * repeated_to(a.shape, real(b))


@reference("DIV")
def div(node: Tensor, a: Array, b: Array) -> Array:
    """a / b."""
    return real(a) / repeated_to(a.shape, real(b))


@reference("ADD_ID")
def add_id(node: Tensor, a: Array, b: Array, ids: Array) -> Array:
    """Each row of a plus the row of b that its id names."""
    out = real(a)
    for t, i in np.ndindex(ids.shape[2:]):
        out[:, t, i] += b[0, 0, ids[0, 0, t, i]]
    return out


@reference("SCALE")
def scale(node: Tensor, a: Array) -> Array:
    """scale · a + bias."""
    return real(a) * float(np.float32(node.params["scale"])) + float(np.float32(node.params["bias"]))


@reference("CLAMP")
def clamp(node: Tensor, a: Array) -> Array:
    """a limited to [min, max]; NaN gives max."""
    low, high = np.float32(node.params["min"]), np.float32(node.params["max"])
    return np.fmax(np.fmin(real(a), high), low)


# ---- functions of one element


def _gelu(x: Array) -> Array:
    inner = np.where(np.abs(x) < 10, math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x), np.inf * np.sign(x))
    return np.where(x <= -10, 0.0, x / 2 * (1 + np.tanh(inner)))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "SQR": lambda x: x * x,
    "SQRT": np.sqrt,
    "LOG": np.log,
    "ABS": np.abs,
    "NEG": lambda x: -x,
    "STEP": lambda x: np.where(x > 0, 1.0, 0.0),
    "TANH": np.tanh,
    "RELU": lambda x: np.where(x > 0, x, 0.0),
    "SIGMOID": lambda x: 1 / (1 + np.exp(-x)),
    "GELU": _gelu,
    "GELU_QUICK": lambda x: x / (1 + np.exp(-1.702 * x)),
    "SILU": lambda x: x / (1 + np.exp(-x)),
    "EXP": np.exp,
}
"""The functions of one element by name; SWIGLU, GEGLU and REGLU use three of them."""


@reference(*FUNCTIONS)
def function(node: Tensor, a: Array) -> Array:
    """The function of each element."""
    return FUNCTIONS[node.desc](real(a))


@reference("FILL")
def fill(node: Tensor, a: Array) -> Array:
    """The value everywhere."""
    return np.full(a.shape, node.params["value"])


@reference("SWIGLU", "GEGLU", "REGLU", "SWIGLU_OAI")
def gated(node: Tensor, a: Array, b: Array | None = None) -> Array:
    """activation(gate) · up; SWIGLU_OAI clips both first."""
    gate, up = (real(a), real(b)) if b is not None else np.split(real(a), 2, axis=-1)
    if b is None and node.params["swapped"]:
        gate, up = up, gate
    if node.desc == "SWIGLU_OAI":
        limit = node.params["limit"]
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate / (1 + np.exp(-node.params["alpha"] * gate)) * (up + 1)
    return FUNCTIONS[{"SWIGLU": "SILU", "GEGLU": "GELU", "REGLU": "RELU"}[node.desc]](gate) * up


# ---- sums and norms


@reference("SUM")
def sum_all(node: Tensor, a: Array) -> Array:
    """The sum of everything."""
    return real(a).sum().reshape(1, 1, 1, 1)


@reference("SUM_ROWS")
def sum_rows(node: Tensor, a: Array) -> Array:
    """The sum of each row."""
    return real(a).sum(axis=-1, keepdims=True)


@reference("CUMSUM")
def cumsum(node: Tensor, a: Array) -> Array:
    """The sum of each row up to each place."""
    x = real(a)
    return np.stack([x[..., : i + 1].sum(axis=-1) for i in range(x.shape[-1])], axis=-1) if x.size else x


@reference("MEAN")
def mean(node: Tensor, a: Array) -> Array:
    """The sum of each row over its length."""
    return real(a).sum(axis=-1, keepdims=True) / np.float64(a.shape[-1])


@reference("ARGMAX")
def argmax(node: Tensor, a: Array) -> Array:
    """The last position of the largest value of each row."""
    return np.array([max(range(len(row)), key=lambda i: (row[i], i), default=0) for row in a[0, 0]]).reshape(
        1, 1, 1, -1
    )


@reference("NORM")
def norm(node: Tensor, a: Array) -> Array:
    """(a - mean) / √(variance + eps)."""
    x = real(a)
    x -= x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + node.params["eps"])


@reference("RMS_NORM")
def rms_norm(node: Tensor, a: Array) -> Array:
    """a / √(mean of a² + eps)."""
    x = real(a)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + node.params["eps"])


@reference("L2_NORM")
def l2_norm(node: Tensor, a: Array) -> Array:
    """a / max(√(sum of a²), eps)."""
    x = real(a)
    return x / np.maximum(np.sqrt((x**2).sum(axis=-1, keepdims=True)), node.params["eps"])


# ---- attention


@reference("DIAG_MASK_INF")
def diag_mask_inf(node: Tensor, a: Array) -> Array:
    """-inf where the column is beyond n_past + row."""
    column, row = np.arange(a.shape[-1]), np.arange(a.shape[-2])[:, None]
    return np.where(column > node.params["n_past"] + row, -np.inf, real(a))


@reference("SOFT_MAX")
def soft_max(node: Tensor, a: Array, mask: Array | None = None, sinks: Array | None = None) -> Array:
    """exp(x) / sum of exp(x) per row, x = scale · a + slope · mask; a sink is one more x that only the sum sees."""
    x = real(a) * node.params["scale"]
    if mask is not None:
        slopes = np.array([_slope(h, a.shape[1], node.params["max_bias"]) for h in range(a.shape[1])]).reshape(-1, 1, 1)
        x += slopes * repeated_to(a.shape, real(mask[:, :, : a.shape[2]]))
    extra = np.full((a.shape[1], 1, 1), -np.inf) if sinks is None else real(sinks).reshape(-1, 1, 1)
    highest = np.maximum(x.max(axis=-1, keepdims=True, initial=-np.inf), extra)
    e = np.exp(x - highest)
    return e / (e.sum(axis=-1, keepdims=True) + np.where(extra == -np.inf, 0, np.exp(extra - highest)))


def _slope(head: int, n_heads: int, max_bias: float) -> float:
    """ALiBi: a geometric series over the heads; heads beyond a power of two take the odd terms of one twice as fine."""
    if max_bias <= 0:
        return 1.0
    whole = 1
    while 2 * whole <= n_heads:
        whole *= 2
    return (
        2 ** (-max_bias * (head + 1) / whole)
        if head < whole
        else 2 ** (-max_bias * (2 * (head - whole) + 1) / (2 * whole))
    )


@reference("ROPE")
def rope(node: Tensor, a: Array, pos: Array, freq_factors: Array | None = None) -> Array:
    """Pair i of each row is turned by position · freq_base^(-2i/n_dims), as a complex number times cos + i sin."""
    p = node.params
    n, half = p["n_dims"], p["n_dims"] // 2
    angle = real(pos[0, 0, 0])[:, None] * p["freq_base"] ** (-2.0 * np.arange(half) / n)
    if freq_factors is not None:
        angle /= freq_factors[0, 0, 0, :half]
    kept, magnitude = _yarn(p, half)
    angle *= p["freq_scale"] * (1 - kept) + kept
    first, second = (slice(0, n, 2), slice(1, n, 2)) if p["mode"] == 0 else (slice(0, half), slice(half, n))
    out = real(a)
    turned = (out[..., first] + 1j * out[..., second]) * magnitude * np.exp(1j * angle)[:, None]
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def _yarn(p: dict, half: int) -> tuple[Array, float]:
    """Share of its own angle that each pair keeps (the rest is interpolated), and the factor on all lengths."""
    if not p["ext_factor"]:
        return np.zeros(half), p["attn_factor"]
    turns = np.array([p["beta_fast"], p["beta_slow"]])
    pair = 2 * half * np.log(p["n_ctx_orig"] / (turns * 2 * np.pi)) / (2 * np.log(p["freq_base"]))
    low, high = max(0, np.floor(pair[0])), min(2 * half - 1, np.ceil(pair[1]))
    ramp = 1 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0, 1)
    return ramp * p["ext_factor"], p["attn_factor"] * (1 + 0.1 * math.log(1 / p["freq_scale"]))


# ---- sorting


@reference("ARGSORT")
def argsort(node: Tensor, a: Array) -> Array:
    """The indices that sort each row; equal elements keep their order."""
    sign = 1 if node.params["order"] == "asc" else -1
    rows = [sorted(range(len(row)), key=lambda i: sign * row[i]) for row in a.reshape(-1, a.shape[-1])]
    return np.array(rows, np.int64).reshape(a.shape)


@reference("TOP_K")
def top_k(node: Tensor, a: Array) -> Array:
    """The indices of the k largest of each row; only the set means something."""
    rows = [sorted(range(len(row)), key=lambda i: -row[i])[: node.params["k"]] for row in a.reshape(-1, a.shape[-1])]
    return np.array(rows, np.int64).reshape(*a.shape[:-1], -1)


# ---- joining


@reference("REPEAT")
def repeat(node: Tensor, a: Array) -> Array:
    """Whole copies of a."""
    return repeated_to(node.ne[::-1], a)


@reference("CONCAT")
def concat(node: Tensor, a: Array, b: Array) -> Array:
    """a, then b, along a dimension of ne."""
    return np.concatenate([a, b], axis=3 - node.params["dim"])


# ---- loss


@reference("CROSS_ENTROPY_LOSS")
def cross_entropy_loss(node: Tensor, logits: Array, labels: Array) -> Array:
    """-mean over rows of the sum of labels · log soft max(logits)."""
    x = real(logits)
    x -= x.max(axis=-1, keepdims=True)
    log_p = x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return -np.mean((log_p * labels).sum(axis=-1)).reshape(1, 1, 1, 1)
