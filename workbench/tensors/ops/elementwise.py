"""Ops that treat each element by itself: arithmetic with repetition, unary functions, gated units.

FLOPs count each addition, product, comparison and elementary function (exp, tanh, …) as one operation.
"""

from __future__ import annotations

from workbench.errors import DTypeError, ParameterError, ShapeError, shown
from workbench.tensors.context import result
from workbench.tensors.ops.checks import can_repeat, require_contiguous, require_type
from workbench.tensors.opspec import OPS, OpSpec, op, per_element
from workbench.tensors.tensor import Tensor

# ---- arithmetic

ADD = op("ADD", "a + b, b repeated over a", in_place=True)
SUB = op("SUB", "a - b, b repeated over a", in_place=True)
MUL = op("MUL", "a * b, b repeated over a", in_place=True)
DIV = op("DIV", "a / b, b repeated over a", in_place=True)
ADD_ID = op("ADD_ID", "row (i, t) of a plus row ids[i, t] of b", in_place=True,
            moved=lambda node: 3 * node.nbytes + node.src[2].nbytes)  # fmt: skip

_PAIRS = {("f32", "f32"), ("f16", "f16"), ("f16", "f32")}


def add(a: Tensor, b: Tensor) -> Tensor:
    """`a + b` in a's type; b is repeated where its extents divide a's (`ggml_add`). Raises ShapeError, DTypeError."""
    return _binary(ADD, a, b)


def sub(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`; b is repeated over a (`ggml_sub`)."""
    return _binary(SUB, a, b)


def mul(a: Tensor, b: Tensor) -> Tensor:
    """`a * b` element by element; b is repeated over a (`ggml_mul`). Products of matrices are `mul_mat`."""
    return _binary(MUL, a, b)


def div(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`; b is repeated over a (`ggml_div`)."""
    return _binary(DIV, a, b)


def _binary(spec: OpSpec, a: Tensor, b: Tensor) -> Tensor:
    if not can_repeat(b, a.ne):
        raise ShapeError(f"{spec.name}: a.ne={a.ne} and b.ne={b.ne}", "each extent of b divides that of a (b is repeated over a)",
                         "swap the operands if a is the smaller one, or reshape b")  # fmt: skip
    if (a.dtype.name, b.dtype.name) not in _PAIRS:
        raise DTypeError(f"{spec.name}: types {a.dtype} and {b.dtype}", "f32 with f32, f16 with f16, or f16 with f32",
                         "ops.cast one of them")  # fmt: skip
    return result(a.dtype, a.ne, op=spec.op, spec=spec, src=(a, b))


def add_id(a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """Add a row of b, chosen by id, to each row of a: biases of routed experts (`ggml_add_id`).

    a [n, k, t] f32, b [n, experts] f32, ids [k, t] i32. Raises ShapeError, DTypeError.
    """
    for what, t, kind in (("a", a, "f32"), ("b", b, "f32"), ("ids", ids, "i32")):
        require_type("ADD_ID", what, t, kind)
    if (a.ne[0], a.ne[1], a.ne[2]) != (b.ne[0], ids.ne[0], ids.ne[1]):
        raise ShapeError(f"ADD_ID: a.ne={a.ne}, b.ne={b.ne}, ids.ne={ids.ne}", "a [n, k, t], b [n, experts], ids [k, t]",
                         "b has rows as long as a's, and ids one entry per row of a")  # fmt: skip
    return result(a.dtype, a.ne, op="ADD_ID", spec=ADD_ID, src=(a, b, ids))


# ---- functions of one element

SQR = op("SQR", "a²", in_place=True)
SQRT = op("SQRT", "√a", in_place=True)
LOG = op("LOG", "natural logarithm of a", in_place=True)
SCALE = op(
    "SCALE", "scale · a + bias", in_place=True, flops=lambda node: (1 + bool(node.params["bias"])) * node.n_elements
)
FILL = op("FILL", "one value everywhere", in_place=True, flops=per_element(0), moved=lambda node: node.nbytes)
CLAMP = op("CLAMP", "a limited to [min, max]", in_place=True, flops=per_element(2))

for _name, _summary, _flops in (
    ("ABS", "|a|", 1),
    ("NEG", "-a", 1),
    ("STEP", "1 where a > 0, else 0", 1),
    ("TANH", "tanh a", 1),
    ("RELU", "a where a > 0, else 0", 1),
    ("SIGMOID", "1 / (1 + exp(-a))", 4),
    ("GELU", "a/2 · (1 + tanh(√(2/π) · a · (1 + 0.044715 a²)))", 9),
    ("GELU_QUICK", "a / (1 + exp(-1.702 a))", 4),
    ("SILU", "a / (1 + exp(-a))", 4),
    ("EXP", "exp a", 1),
):
    op(_name, _summary, of="UNARY", in_place=True, flops=per_element(_flops))


def sqr(a: Tensor) -> Tensor:
    """The square of each element (`ggml_sqr`)."""
    return _same(SQR, a)


def sqrt(a: Tensor) -> Tensor:
    """The square root; NaN below zero (`ggml_sqrt`)."""
    return _same(SQRT, a)


def log(a: Tensor) -> Tensor:
    """The natural logarithm; -inf at zero, NaN below (`ggml_log`)."""
    return _same(LOG, a)


def _same(spec: OpSpec, a: Tensor) -> Tensor:
    require_type(spec.name, "a", a, "f32", "f16")
    require_contiguous(spec.name, a, a.has_contiguous_rows, "rows whose elements lie side by side")
    params = {"unary": spec.name} if spec.op == "UNARY" else {}
    return result(a.dtype, a.ne, op=spec.op, spec=spec, src=(a,), params=params)


def unary(kind: str, a: Tensor) -> Tensor:
    """The function named `kind` ("SILU", any case) of each element (`ggml_unary`). Raises ParameterError, ShapeError."""
    spec = OPS.get(str(kind).upper())
    if spec is None or spec.op != "UNARY":
        raise ParameterError(
            f"no unary function {shown(kind)!r}", "one of " + ", ".join(n for n, s in OPS.items() if s.op == "UNARY")
        )
    return _same(spec, a)


def abs(a: Tensor) -> Tensor:
    """The absolute value (`ggml_abs`)."""
    return unary("ABS", a)


def neg(a: Tensor) -> Tensor:
    """The negative (`ggml_neg`)."""
    return unary("NEG", a)


def step(a: Tensor) -> Tensor:
    """1 where a > 0, else 0 (`ggml_step`)."""
    return unary("STEP", a)


def tanh(a: Tensor) -> Tensor:
    """The hyperbolic tangent (`ggml_tanh`)."""
    return unary("TANH", a)


def relu(a: Tensor) -> Tensor:
    """a where it is positive, else 0 (`ggml_relu`)."""
    return unary("RELU", a)


def sigmoid(a: Tensor) -> Tensor:
    """1 / (1 + exp(-a)) (`ggml_sigmoid`)."""
    return unary("SIGMOID", a)


def gelu(a: Tensor) -> Tensor:
    """The Gaussian error unit in its tanh form (`ggml_gelu`, which rounds through an f16 table)."""
    return unary("GELU", a)


def gelu_quick(a: Tensor) -> Tensor:
    """a · sigmoid(1.702 a) (`ggml_gelu_quick`)."""
    return unary("GELU_QUICK", a)


def silu(a: Tensor) -> Tensor:
    """a · sigmoid(a) (`ggml_silu`)."""
    return unary("SILU", a)


def exp(a: Tensor) -> Tensor:
    """The exponential (`ggml_exp`)."""
    return unary("EXP", a)


def scale(a: Tensor, s: float, bias: float = 0.0) -> Tensor:
    """`s · a + bias` (`ggml_scale`, `ggml_scale_bias`). Raises ShapeError where a is neither packed nor evenly padded."""
    require_type("SCALE", "a", a, "f32")
    packed = a.nb[0] == a.dtype.block_bytes and a.nb[2] == a.nb[1] * a.ne[1] and a.nb[3] == a.nb[2] * a.ne[2]
    require_contiguous("SCALE", a, packed, "rows at even distances, without gaps elsewhere")
    return result(a.dtype, a.ne, op="SCALE", spec=SCALE, src=(a,), params={"scale": float(s), "bias": float(bias)})


def fill(a: Tensor, value: float) -> Tensor:
    """`value` everywhere, in the shape of a, which is not read (`ggml_fill`)."""
    require_type("FILL", "a", a, "f32", "f16")
    require_contiguous("FILL", a, a.is_contiguous, "packed memory")
    return result(a.dtype, a.ne, op="FILL", spec=FILL, src=(a,), params={"value": float(value)})


def clamp(a: Tensor, min: float, max: float) -> Tensor:
    """Each element limited to [min, max] (`ggml_clamp`). Raises ParameterError where min is above max."""
    require_type("CLAMP", "a", a, "f32", "f16")
    if not min <= max:
        raise ParameterError(f"CLAMP: min={min}, max={max}", "min at most max")
    return result(a.dtype, a.ne, op="CLAMP", spec=CLAMP, src=(a,), params={"min": float(min), "max": float(max)})


# ---- gated linear units

for _name, _summary, _flops in (
    ("SWIGLU", "silu(gate) · up", 5),
    ("GEGLU", "gelu(gate) · up", 10),
    ("REGLU", "relu(gate) · up", 2),
    ("SWIGLU_OAI", "g · sigmoid(alpha g) · (u + 1), g = gate up to limit, u = up within ± limit", 9),
):
    op(_name, _summary, of="GLU", flops=per_element(_flops))


def glu(kind: str, a: Tensor, b: Tensor | None = None, swapped: bool = False, **params: float) -> Tensor:
    """A gated linear unit, `kind` "SWIGLU", "GEGLU", "REGLU" or "SWIGLU_OAI" (`ggml_glu`, `ggml_glu_split`).

    With b: a is the activated gate, b the other factor. Without: each row of a holds both halves, the activated one
    first, or second where `swapped`. params: `alpha` and `limit` of SWIGLU_OAI. Raises ShapeError, ParameterError.
    """
    spec = OPS.get(str(kind).upper())
    if spec is None or spec.op != "GLU":
        raise ParameterError(f"no gated unit {shown(kind)!r}", "SWIGLU, GEGLU, REGLU or SWIGLU_OAI")
    own = {"alpha": 1.702, "limit": 7.0} if spec.name == "SWIGLU_OAI" else {}
    if unknown := params.keys() - own.keys():
        raise ParameterError(f"{spec.name}: parameter {shown(sorted(unknown)[0])}", f"one of {', '.join(own)}" if own else "none")
    for t in (a,) if b is None else (a, b):
        require_type(spec.name, "a", t, a.dtype.name if a.dtype.name in ("f32", "f16") else "f32")
        require_contiguous(spec.name, t, t.contiguous_from(1), "packed rows (gaps between rows are allowed)")
    if b is not None and a.ne != b.ne:
        raise ShapeError(f"{spec.name}: gate.ne={a.ne} and up.ne={b.ne}", "equal extents")
    if b is None and a.ne[0] % 2:
        raise ShapeError(f"{spec.name}: rows of {a.ne[0]} elements", "an even number: gate and up side by side")
    ne = a.ne if b is not None else (a.ne[0] // 2, *a.ne[1:])
    src = (a,) if b is None else (a, b)
    return result(a.dtype, ne, op="GLU", spec=spec, src=src, params={"glu": spec.name, "swapped": bool(swapped)} | own | params)


def swiglu(a: Tensor, swapped: bool = False) -> Tensor:
    """silu of one half of each row times the other half (`ggml_swiglu`, `ggml_swiglu_swapped`)."""
    return glu("SWIGLU", a, swapped=swapped)


def geglu(a: Tensor, swapped: bool = False) -> Tensor:
    """gelu of one half of each row times the other half (`ggml_geglu`)."""
    return glu("GEGLU", a, swapped=swapped)


def reglu(a: Tensor, swapped: bool = False) -> Tensor:
    """relu of one half of each row times the other half (`ggml_reglu`)."""
    return glu("REGLU", a, swapped=swapped)


def swiglu_split(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (`ggml_swiglu_split`)."""
    return glu("SWIGLU", gate, up)


def geglu_split(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up (`ggml_geglu_split`)."""
    return glu("GEGLU", gate, up)


def reglu_split(gate: Tensor, up: Tensor) -> Tensor:
    """relu(gate) · up (`ggml_reglu_split`)."""
    return glu("REGLU", gate, up)


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """The gated unit of gpt-oss, with clipped inputs (`ggml_swiglu_oai`)."""
    return glu("SWIGLU_OAI", gate, up, alpha=float(alpha), limit=float(limit))
