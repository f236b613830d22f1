"""Kernels that treat each element by itself. The planner may cut them along any axis."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from workbench.kernels.kernel import Scratch, grain, kernel, require_within
from workbench.kernels.pieces import cut, float_pieces, float_work, repeated

# ---- arithmetic: the plain ufunc where broadcasting says it all, else b repeated whole, or f16 met by f32


def _arithmetic(ufunc: str) -> Callable[..., None]:
    def run(xp: ModuleType, a: Any, b: Any, *, out: Any, scratch: Scratch) -> None:
        big, few = repeated(out, b) if b.shape != out.shape else (out.shape, out.shape)
        for y, x, z in float_pieces(xp, out.reshape(big), (a.reshape(big), b.reshape(few)), scratch):
            getattr(xp, ufunc)(x, z, y)

    return run


for _name, _ufunc in {"ADD": "add", "SUB": "subtract", "MUL": "multiply", "DIV": "divide"}.items():
    kernel(_name, ufunc=_ufunc, cut="elements", work=float_work(0))(_arithmetic(_ufunc))


@kernel("ADD_ID")
def add_id(xp: ModuleType, a: Any, b: Any, ids: Any, *, out: Any) -> None:
    """Row (t, i) of a plus row ids[t, i] of b."""
    rows, chosen = b[0, 0], ids[0, 0]
    require_within(chosen, len(rows), 2)
    for index in cut(chosen.shape, max(1, 4096 * grain() // max(1, a.shape[-1]))):
        biases = rows[chosen[index]]  # a copy of at most one piece: `take` has no unbuffered `out`
        for i3 in range(len(a)):
            xp.add(a[i3][index], biases, out[i3][index])


# ---- functions of one element


def _function(name: str) -> Callable[..., None]:
    def run(xp: ModuleType, a: Any, *, out: Any, unary: str = "") -> None:
        getattr(xp, name)(a, out)

    return run


for _name, _ufunc in {"SQR": "square", "SQRT": "sqrt", "LOG": "log", "ABS": "absolute", "NEG": "negative",
                      "TANH": "tanh", "EXP": "exp"}.items():  # fmt: skip
    kernel(_name, ufunc=_ufunc, cut="elements")(_function(_ufunc))


@kernel("RELU", cut="elements")
def relu(xp: ModuleType, a: Any, *, out: Any, unary: str = "") -> None:
    """a where a > 0, else 0: NaN gives 0, as in ggml."""
    xp.fmax(a, 0, out)


@kernel("STEP", cut="elements")
def step(xp: ModuleType, a: Any, *, out: Any, unary: str = "") -> None:
    """1 where a > 0, else 0 (NaN included)."""
    xp.sign(a, out)
    xp.fmax(out, 0, out)


@kernel("CLAMP", cut="elements")
def clamp(xp: ModuleType, a: Any, *, out: Any, min: float, max: float) -> None:
    """a limited to [min, max]; NaN gives max, as in ggml."""
    xp.fmin(a, max, out)
    xp.fmax(out, min, out)


@kernel("FILL", cut="elements")
def fill(xp: ModuleType, a: Any, *, out: Any, value: float) -> None:
    """The value everywhere."""
    out[...] = value


@kernel("SCALE", cut="elements", work=lambda node: 2 * float_work(1)(node) if node.params["bias"] else 0)
def scale(xp: ModuleType, a: Any, *, out: Any, scratch: Scratch, scale: float, bias: float) -> None:
    """scale · a, and with a bias scale · a + bias rounded once, as ggml's fused multiply-add does."""
    if not bias:
        xp.multiply(a, scale, out)
        return
    for index in cut(out.shape, scratch.memory.size // 8 - 16):
        wide = scratch.array(out[index].shape, "f8")
        wide[...] = a[index]
        wide *= float(xp.float32(scale))
        wide += float(xp.float32(bias))
        out[index] = wide


# ---- activations: each leaves its result in `y`, which may be `x`, with one temporary `t`


def _sigmoid(xp: ModuleType, x: Any, y: Any, t: Any) -> None:
    _one_plus_exp(xp, x, -1.0, t)
    xp.divide(1, t, y)


def _silu(xp: ModuleType, x: Any, y: Any, t: Any) -> None:
    _one_plus_exp(xp, x, -1.0, t)
    xp.divide(x, t, y)


def _gelu_quick(xp: ModuleType, x: Any, y: Any, t: Any) -> None:
    _one_plus_exp(xp, x, -1.702, t)
    xp.divide(x, t, y)


def _one_plus_exp(xp: ModuleType, x: Any, factor: float, t: Any) -> None:
    xp.multiply(x, factor, t)
    xp.exp(t, t)
    xp.add(t, 1, t)


def _gelu(xp: ModuleType, x: Any, y: Any, t: Any) -> None:
    xp.maximum(x, -10, out=y)  # below, the result is 0 in f32, and -inf times 0 would be NaN
    xp.square(y, t)
    xp.multiply(t, 0.044715, t)
    xp.add(t, 1, t)
    xp.multiply(t, y, t)
    xp.multiply(t, 0.7978845608028654, t)  # √(2/π)
    xp.tanh(t, t)
    xp.add(t, 1, t)
    xp.multiply(t, 0.5, t)
    xp.multiply(y, t, y)


def _relu(xp: ModuleType, x: Any, y: Any, t: Any) -> None:
    xp.fmax(x, 0, y)


def _unary(
    activation: Callable[..., None], xp: ModuleType, a: Any, *, out: Any, scratch: Scratch, unary: str = ""
) -> None:
    for y, x, t in float_pieces(xp, out, (a,), scratch, temporaries=1):
        activation(xp, x, y, t)


def _gated(
    activation: Callable[..., None],
    xp: ModuleType,
    a: Any,
    b: Any = None,
    *,
    out: Any,
    scratch: Scratch,
    glu: str,
    swapped: bool,
) -> None:
    """activation(gate) · up; gate and up are a and b, or the halves of a."""
    for y, g, u, t, active in float_pieces(xp, out, _halves(out, a, b, swapped), scratch, temporaries=2):
        activation(xp, g, active, t)
        xp.multiply(active, u, y)


def _halves(out: Any, a: Any, b: Any, swapped: bool) -> tuple[Any, Any]:
    """Gate and up: a and b, or the halves of a."""
    half = out.shape[-1]
    if b is not None:
        return a, b
    return (a[..., half:], a[..., :half]) if swapped else (a[..., :half], a[..., half:])


@kernel("SWIGLU_OAI", cut="elements", work=float_work(2))
def swiglu_oai(xp: ModuleType, a: Any, b: Any = None, *, out: Any, scratch: Scratch, glu: str, swapped: bool, alpha: float,
               limit: float) -> None:  # fmt: skip
    """g · sigmoid(alpha g) · (u + 1) of the clipped gate g and the clipped u."""
    for y, g, u, t, active in float_pieces(xp, out, _halves(out, a, b, swapped), scratch, temporaries=2):
        xp.minimum(g, limit, out=active)
        _one_plus_exp(xp, active, -alpha, t)
        xp.divide(active, t, active)
        xp.maximum(u, -limit, out=t)
        xp.minimum(t, limit, out=t)
        xp.add(t, 1, t)
        xp.multiply(active, t, y)


for _name, _activation in {"SIGMOID": _sigmoid, "GELU": _gelu, "GELU_QUICK": _gelu_quick, "SILU": _silu}.items():
    kernel(_name, cut="elements", work=float_work(1))(partial(_unary, _activation))

for _name, _activation in {"SWIGLU": _silu, "GEGLU": _gelu, "REGLU": _relu}.items():
    kernel(_name, cut="elements", work=float_work(2))(partial(_gated, _activation))
