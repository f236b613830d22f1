"""Ops that only training uses: gradients of other ops, sums into a part of a tensor, and the step of an optimiser.

`cgraph.gradients` puts them into graphs. In each, `grad` is the gradient of the loss with respect to the forward op's result.
ACC, REPEAT_BACK, …_BACK and OPT_STEP_ADAMW are ggml's; MUL_MAT_ID_BACK and OUT_PROD_ID are ours, since ggml cannot train through
MUL_MAT_ID.
"""

from __future__ import annotations

from workbench.errors import ParameterError, ShapeError
from workbench.tensors.context import result
from workbench.tensors.dtype import F32
from workbench.tensors.ops.checks import can_repeat, per_source, require_contiguous, require_type
from workbench.tensors.ops.elementwise import ADD, SUB
from workbench.tensors.opspec import OpSpec, bytes_touched, op, packed_bytes, per_element
from workbench.tensors.tensor import Extents, Flag, Tensor, extents

# ---- sums into tensors


def add_inplace(a: Tensor, b: Tensor) -> Tensor:
    """`a + b`, written into `a`; the result is a view of `a` (`ggml_add_inplace`)."""
    return _into(ADD, a, b)


def sub_inplace(a: Tensor, b: Tensor) -> Tensor:
    """`a - b`, written into `a` (`ggml_sub_inplace`)."""
    return _into(SUB, a, b)


def _into(spec: OpSpec, a: Tensor, b: Tensor) -> Tensor:
    require_type(spec.name, "a", a, "f32")
    require_type(spec.name, "b", b, "f32")
    if not can_repeat(b, a.ne):
        raise ShapeError(f"{spec.name}: a.ne={a.ne} and b.ne={b.ne}", "each extent of b divides that of a (b is repeated over a)")
    return result(a.dtype, a.ne, a.nb, op=spec.op, spec=spec, src=(a, b), view_src=a, name=f"{a.name} (view)")


ACC = op("ACC", "a, and b added to a part of it", flops=lambda node: _added(node).n_elements,
         moved=lambda node: 2 * node.nbytes + 3 * _added(node).nbytes)  # fmt: skip


def _added(node: Tensor) -> Tensor:
    b = node.src[1]
    assert b is not None
    return b


def acc(a: Tensor, b: Tensor, nb: tuple[int, ...] = (), offset: int = 0) -> Tensor:
    """A copy of `a` with `b` added to the part that lies at `offset`, b's extents apart by `nb` bytes (`ggml_acc`).

    nb: distances along dimensions 1, 2, 3 within `a`, as in `view`; those of `a` where left out. `a` is packed. Raises ShapeError.
    """
    nb = tuple(nb) if nb else a.nb[1:]
    return result(F32, a.ne, op="ACC", spec=ACC, src=(a, b), params=_part_of(a, b, nb, offset))


def acc_inplace(a: Tensor, b: Tensor, nb: tuple[int, ...] = (), offset: int = 0) -> Tensor:
    """As `acc`, written into `a` (`ggml_acc_inplace`)."""
    nb = tuple(nb) if nb else a.nb[1:]
    return result(F32, a.ne, op="ACC", spec=ACC, src=(a, b), params=_part_of(a, b, nb, offset), view_src=a, name=f"{a.name} (view)")


def _part_of(a: Tensor, b: Tensor, nb: tuple[int, ...], offset: int) -> dict[str, object]:
    require_type("ACC", "a", a, "f32")
    require_type("ACC", "b", b, "f32")
    require_contiguous("ACC", a, a.is_contiguous)
    if len(nb) != 3 or any(n % 4 or n < 0 for n in (*nb, offset)):
        raise ShapeError(f"ACC: nb={nb} and offset={offset}", "three distances and an offset, multiples of 4 bytes")
    reach = offset + Tensor(F32, b.ne, (4, *nb)).nbytes
    if reach > a.nbytes:
        raise ShapeError(f"ACC: b.ne={b.ne} at nb={nb}, offset={offset} reaches byte {reach:,}", f"the {a.nbytes:,} bytes of {a.label}")
    end = 4
    for n, step in sorted(zip(b.ne, (4, *nb), strict=True), key=lambda pair: pair[1]):
        if n > 1 and step < end and b.n_elements:
            raise ShapeError(f"ACC: b.ne={b.ne} at nb={nb}: its elements share places of {a.label}", "a place for each",
                             "ops.cont of the tensor that is viewed, or ops.repeat instead of a view without distance")  # fmt: skip
        end += (n - 1) * step
    return {"nb": nb, "offset": offset}


REPEAT_BACK = op("REPEAT_BACK", "the copies that REPEAT would make, added up", flops=per_source(1))


def repeat_back(a: Tensor, b: Tensor | tuple[int, ...] | list[int]) -> Tensor:
    """Sums of `a` over the copies of b's extents that fill it (`ggml_repeat_back`): the gradient of REPEAT and of repeated operands."""
    ne: Extents = b.ne if isinstance(b, Tensor) else extents(b)
    require_type("REPEAT_BACK", "a", a, "f32")
    if any(m == 0 or n % m for n, m in zip(a.ne, ne, strict=True)):
        raise ShapeError(f"REPEAT_BACK: a.ne={a.ne} to ne={ne}", "extents that divide those of a")
    return result(F32, ne, op="REPEAT_BACK", spec=REPEAT_BACK, src=(a,))


# ---- gradients of one op

SILU_BACK = op("SILU_BACK", "grad · s · (1 + x · (1 - s)), s = 1 / (1 + exp(-x))", in_place=True, flops=per_element(9))
RMS_NORM_BACK = op("RMS_NORM_BACK", "(grad - x · sum(grad · x) / sum(x² + eps)) / √(mean of x² + eps) per row", in_place=True,
                   flops=per_element(8))  # fmt: skip
SOFT_MAX_BACK = op("SOFT_MAX_BACK", "scale · y · (grad - sum(grad · y)) per row, y = soft max", in_place=True, flops=per_element(5))
CROSS_ENTROPY_LOSS_BACK = op("CROSS_ENTROPY_LOSS_BACK", "grad / rows · (soft max(logits) · sum(labels) - labels)", flops=per_element(8))
GET_ROWS_BACK = op("GET_ROWS_BACK", "row i of grad added to the row that rows[i] names", flops=per_source(1),
                   moved=lambda node: bytes_touched(node) + packed_bytes(next(node.sources())))  # fmt: skip


def silu_back(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of `silu(x)` (`ggml_silu_back`)."""
    return _like(SILU_BACK, grad, x)


def rms_norm_back(grad: Tensor, x: Tensor, eps: float = 1e-5) -> Tensor:
    """The gradient of `rms_norm(x, eps)` (`ggml_rms_norm_back`)."""
    return _like(RMS_NORM_BACK, grad, x, eps=float(eps))


def soft_max_back(grad: Tensor, y: Tensor, scale: float = 1.0, max_bias: float = 0.0) -> Tensor:
    """The gradient of `y = soft_max_ext(x, …, scale)` with respect to x (`ggml_soft_max_ext_back`).

    A mask or sinks change y and nothing else; max_bias only scales the mask.
    """
    return _like(SOFT_MAX_BACK, grad, y, scale=float(scale), max_bias=float(max_bias))


def _like(spec: OpSpec, grad: Tensor, x: Tensor, **params: float) -> Tensor:
    require_type(spec.name, "grad", grad, "f32")
    require_type(spec.name, "x", x, "f32")
    if grad.ne != x.ne:
        raise ShapeError(f"{spec.name}: grad.ne={grad.ne}, x.ne={x.ne}", "equal extents")
    return result(F32, grad.ne, op=spec.op, spec=spec, src=(grad, x), params=dict(params))


def cross_entropy_loss_back(grad: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The gradient of `cross_entropy_loss(logits, labels)` with respect to the logits (`ggml_cross_entropy_loss_back`).

    ggml takes for granted that the labels of a row sum to 1; here the sum counts, so that any labels get their true gradient.
    """
    for what, t in (("grad", grad), ("logits", logits), ("labels", labels)):
        require_type("CROSS_ENTROPY_LOSS_BACK", what, t, "f32")
    if grad.n_elements != 1 or logits.ne != labels.ne:
        raise ShapeError(f"CROSS_ENTROPY_LOSS_BACK: grad.ne={grad.ne}, logits.ne={logits.ne}, labels.ne={labels.ne}",
                         "a gradient of one number, logits and labels of equal extents")  # fmt: skip
    return result(F32, logits.ne, op="CROSS_ENTROPY_LOSS_BACK", spec=CROSS_ENTROPY_LOSS_BACK, src=(grad, logits, labels))


def get_rows_back(grad: Tensor, rows: Tensor, like: Tensor | tuple[int, ...] | list[int]) -> Tensor:
    """The gradient of `get_rows(like, rows)` with respect to the table: zero where no row was read (`ggml_get_rows_back`).

    grad [n, r, b2, b3], rows [r, b2, b3] -> the extents [n, m, b2, b3] of `like`. ggml takes one batch only. With a grad of ones it
    counts how often each row was named.
    """
    ne: Extents = like.ne if isinstance(like, Tensor) else extents(like)
    require_type("GET_ROWS_BACK", "grad", grad, "f32")
    require_type("GET_ROWS_BACK", "rows", rows, "i32")
    require_contiguous("GET_ROWS_BACK", grad, grad.is_contiguous)
    if grad.ne[1:] != rows.ne[:3] or rows.ne[3] != 1 or (grad.ne[0], *grad.ne[2:]) != (ne[0], *ne[2:]):
        raise ShapeError(f"GET_ROWS_BACK: grad.ne={grad.ne}, rows.ne={rows.ne}, table ne={ne}",
                         "grad [n, r, b2, b3], rows [r, b2, b3], table [n, m, b2, b3]")  # fmt: skip
    return result(F32, ne, op="GET_ROWS_BACK", spec=GET_ROWS_BACK, src=(grad, rows))


# ---- gradients of products through expert ids


def _row_flops(node: Tensor) -> int:
    """A multiplication and an addition for each element of each routed row and matrix row."""
    first, second, ids = node.src
    assert first is not None and second is not None and ids is not None
    return 2 * ids.n_elements * first.ne[0] * second.ne[0]


MUL_MAT_ID_BACK = op("MUL_MAT_ID_BACK", "rows of grad with the columns of the expert that ids names", flops=_row_flops)
OUT_PROD_ID = op("OUT_PROD_ID", "for each expert, outer products of the rows of x and grad that ids sends to it, added up",
                 flops=_row_flops)  # fmt: skip


def mul_mat_id_back(w: Tensor, grad: Tensor, ids: Tensor) -> Tensor:
    """The gradient of `mul_mat_id(w, x, ids)` with respect to x, before rows that several experts read are added up.

    w[k, n, experts], grad[n, n_used, t], ids[n_used, t] -> [k, n_used, t]. Ours: ggml has no gradient of MUL_MAT_ID.
    """
    _check_routed("MUL_MAT_ID_BACK", grad, ids)
    require_type("MUL_MAT_ID_BACK", "w", w, "f32")
    if w.ne[1] != grad.ne[0] or w.ne[3] != 1:
        raise ShapeError(f"MUL_MAT_ID_BACK: w.ne={w.ne}, grad.ne={grad.ne}", f"experts with {grad.ne[0]} rows each")
    return result(F32, (w.ne[0], *grad.ne[1:]), op="MUL_MAT_ID_BACK", spec=MUL_MAT_ID_BACK, src=(w, grad, ids))


def out_prod_id(x: Tensor, grad: Tensor, ids: Tensor, n_expert: int) -> Tensor:
    """The gradient of `mul_mat_id(w, x, ids)` with respect to the weights: what OUT_PROD is to MUL_MAT, expert by expert.

    x[k, 1 or n_used, t], grad[n, n_used, t], ids[n_used, t] -> [k, n, n_expert], zero for experts that got no row. Ours, not ggml's.
    """
    _check_routed("OUT_PROD_ID", grad, ids)
    require_type("OUT_PROD_ID", "x", x, "f32")
    require_contiguous("OUT_PROD_ID", x, x.is_contiguous)
    if x.ne[2:] != grad.ne[2:] or x.ne[1] == 0 or ids.ne[0] % x.ne[1]:
        raise ShapeError(f"OUT_PROD_ID: x.ne={x.ne}, grad.ne={grad.ne}", "as many tokens, and 1 row of x per token, or a divisor of n_used")
    if not n_expert > 0:
        raise ParameterError(f"OUT_PROD_ID: n_expert={n_expert}", "1 or more")
    return result(F32, (x.ne[0], grad.ne[0], int(n_expert), 1), op="OUT_PROD_ID", spec=OUT_PROD_ID, src=(x, grad, ids),
                  params={"n_expert": int(n_expert)})  # fmt: skip


def _check_routed(name: str, grad: Tensor, ids: Tensor) -> None:
    require_type(name, "grad", grad, "f32")
    require_type(name, "ids", ids, "i32")
    require_contiguous(name, grad, grad.is_contiguous)
    if grad.ne[1:3] != ids.ne[:2] or grad.ne[3] != 1 or ids.ne[2:] != (1, 1):
        raise ShapeError(f"{name}: grad.ne={grad.ne}, ids.ne={ids.ne}", "grad [n, n_used, t] and ids [n_used, t]")


# ---- the optimiser

OPT_STEP_ADAMW = op("OPT_STEP_ADAMW", "m, v: running means of grad, grad²; w = w · (1 - lr · decay) - lr · m' / (√v' + eps)",
                    flops=per_element(14), moved=lambda node: 7 * node.nbytes)  # fmt: skip


def opt_step_adamw(w: Tensor, grad: Tensor, m: Tensor, v: Tensor, params: Tensor) -> Tensor:
    """One step of AdamW that writes the parameter `w` and its momenta `m`, `v`; a view of `w` (`ggml_opt_step_adamw`).

    params [7] f32: learning rate, beta1, beta2, eps, weight decay, 1 / (1 - beta1^t), 1 / (1 - beta2^t) for step t = 1, 2, …: the last
    two correct the start of the running means (m', v'). Raises ParameterError for a tensor that is not flagged as a parameter.
    """
    for what, t in (("w", w), ("grad", grad), ("m", m), ("v", v), ("params", params)):
        require_type("OPT_STEP_ADAMW", what, t, "f32")
    if not w.flags & Flag.PARAM:
        raise ParameterError(f"OPT_STEP_ADAMW of {w.label}", "a parameter", "w.mark(Flag.PARAM) before the graph is built")
    if not w.ne == grad.ne == m.ne == v.ne or params.ne != (7, 1, 1, 1):
        raise ShapeError(f"OPT_STEP_ADAMW: ne of w {w.ne}, grad {grad.ne}, m {m.ne}, v {v.ne}, params {params.ne}",
                         "four times the same, and 7 parameters")  # fmt: skip
    return result(F32, w.ne, w.nb, op="OPT_STEP_ADAMW", spec=OPT_STEP_ADAMW, src=(w, grad, m, v, params), view_src=w,
                  name=f"{w.name} (view)")  # fmt: skip
