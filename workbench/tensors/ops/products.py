"""Matrix products: plain, through expert ids, and as a sum of outer products.

ggml stores a weight with its rows along dimension 0, so a product reads two rows and writes one number:
`mul_mat(w[k, n], x[k, t]) -> [n, t]` is NumPy's `x @ w.T`. Results are always f32.
"""

from __future__ import annotations

from workbench.errors import DTypeError, ShapeError
from workbench.tensors.context import result
from workbench.tensors.dtype import F32, I32, DType
from workbench.tensors.opspec import OpSpec, op
from workbench.tensors.tensor import Tensor


def _dot_flops(node: Tensor) -> int:
    """A multiplication and an addition per element of the summed dimension."""
    return 2 * node.n_elements * node.src[0].ne[0]  # type: ignore[union-attr]


def _outer_flops(node: Tensor) -> int:
    return 2 * node.n_elements * node.src[0].ne[1]  # type: ignore[union-attr]


def _expert_bytes(node: Tensor) -> int:
    """Only used experts are read; as many as there are ids, at most all of them."""
    w, x, ids = node.src
    assert w is not None and x is not None and ids is not None
    return node.nbytes + x.nbytes + ids.nbytes + min(w.ne[2], ids.n_elements) * w.nb[2]


MUL_MAT = op("MUL_MAT", "dot products of rows of a with rows of b", flops=_dot_flops)
MUL_MAT_ID = op("MUL_MAT_ID", "rows of b with the rows of the expert that ids names", flops=_dot_flops, moved=_expert_bytes)
OUT_PROD = op("OUT_PROD", "sum of outer products of rows of a and b", flops=_outer_flops)


def mul_mat(a: Tensor, b: Tensor, *, prec_acc: int = 0) -> Tensor:
    """`a[k, n]`, `b[k, t]` -> `[n, t]`; dimensions 2 and 3 of `a` repeat into those of `b` (`ggml_mul_mat`).

    `a` may have any storage type, `b` is f32 (or f16, bf16). Raises ShapeError where k differs or batches do not divide.
    prec_acc: 10 asks devices with faster, coarser sums for sums in f32 (`ggml_prec_set_acc`); ours always are.
    """
    _check_weight(MUL_MAT, a, b)
    if a.ne[0] != b.ne[0]:
        raise ShapeError(f"MUL_MAT: a.ne={a.ne} and b.ne={b.ne}", f"equal ne[0]: a row of a ({a.ne[0]}) meets a row of b ({b.ne[0]})",
                         _advice(a, b))  # fmt: skip
    _check_batches(MUL_MAT, a, b)
    return result(F32, (a.ne[1], *b.ne[1:]), op="MUL_MAT", spec=MUL_MAT, src=(a, b), params={"prec_acc": prec_acc} if prec_acc else {})


def mul_mat_id(w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    """`w[k, n, experts]`, `x[k, 1 or n_used, t]`, `ids[n_used, t]` (i32) -> `[n, n_used, t]` (`ggml_mul_mat_id`).

    Row (i, t) of the result is the matrix of expert `ids[i, t]` times row `(i mod x.ne[1], t)` of x.
    """
    _check_weight(MUL_MAT_ID, w, x)
    if ids.dtype is not I32:
        raise DTypeError(f"MUL_MAT_ID: ids are {ids.dtype}", "i32 expert numbers", "the result of top_k or argsort is i32")
    if w.ne[3] != 1 or x.ne[3] != 1 or ids.ne[2:] != (1, 1):
        raise ShapeError(f"MUL_MAT_ID: w.ne={w.ne}, x.ne={x.ne}, ids.ne={ids.ne}",
                         "w [k, n, experts], x [k, 1 or n_used, t], ids [n_used, t]")  # fmt: skip
    if w.ne[0] != x.ne[0]:
        raise ShapeError(f"MUL_MAT_ID: w.ne={w.ne} and x.ne={x.ne}",
                         f"equal ne[0]: a row of an expert ({w.ne[0]}) meets a row of x ({x.ne[0]})",
                         _advice(w, x))  # fmt: skip
    if ids.ne[1] != x.ne[2]:
        raise ShapeError(f"MUL_MAT_ID: ids.ne={ids.ne} and x.ne={x.ne}", f"a list of experts per token: ids.ne[1] == x.ne[2] = {x.ne[2]}",
                         f"reshape x to [{x.ne[0]}, 1, tokens]")  # fmt: skip
    if x.ne[1] == 0 or ids.ne[0] % x.ne[1]:
        raise ShapeError(f"MUL_MAT_ID: x.ne[1]={x.ne[1]} rows per token for {ids.ne[0]} used experts",
                         "1 row, or a divisor of the experts used")  # fmt: skip
    return result(F32, (w.ne[1], ids.ne[0], x.ne[2], 1), op="MUL_MAT_ID", spec=MUL_MAT_ID, src=(w, x, ids))


def out_prod(a: Tensor, b: Tensor) -> Tensor:
    """`a[m, k]`, `b[n, k]` -> `[m, n]`, the sum over k of outer products of rows; f32 (`ggml_out_prod`)."""
    if a.dtype is not F32 or b.dtype is not F32:
        raise DTypeError(f"OUT_PROD of {a.dtype} and {b.dtype}", "f32 operands", "cast(a, 'f32')")
    if a.ne[1] != b.ne[1]:
        raise ShapeError(f"OUT_PROD: a.ne={a.ne} and b.ne={b.ne}", "equal ne[1]: rows meet in pairs")
    _check_batches(OUT_PROD, a, b)
    _check_not_transposed(OUT_PROD, a)
    return result(F32, (a.ne[0], b.ne[0], *b.ne[2:]), op="OUT_PROD", spec=OUT_PROD, src=(a, b))


def _check_weight(spec: OpSpec, w: Tensor, x: Tensor) -> None:
    _check_not_transposed(spec, w)
    for t, name in (w, "first"), (x, "second"):
        if _is_whole_number(t.dtype) or (name == "second" and t.dtype.quantised):
            raise DTypeError(f"{spec.name}: the {name} operand {t.label} is {t.dtype}",
                             "floating-point or quantised weights times f32, f16 or bf16 rows",
                             f"cast(x, 'f32') for the {name} operand")  # fmt: skip


def _check_batches(spec: OpSpec, a: Tensor, b: Tensor) -> None:
    if any(m == 0 or n % m for n, m in zip(b.ne[2:], a.ne[2:], strict=True)):
        raise ShapeError(f"{spec.name}: a.ne={a.ne} and b.ne={b.ne}", "ne[2] and ne[3] of a divide those of b (a is repeated over b)",
                         "swap the operands if b is the smaller one")  # fmt: skip


def _check_not_transposed(spec: OpSpec, a: Tensor) -> None:
    if a.is_transposed:
        raise ShapeError(f"{spec.name}: the first operand {a.label} is transposed, nb={a.nb}", "rows along dimension 0 (nb[0] <= nb[1])",
                         "cont(a) first")  # fmt: skip


def _advice(w: Tensor, x: Tensor) -> str:
    if w.ne[1] == x.ne[0]:
        return "cont(transpose(a)) as the first operand: ggml multiplies rows with rows"
    return "the first operand is the weight [k, n], the second the input [k, t]; ne is NumPy's shape reversed"


def _is_whole_number(dt: DType) -> bool:
    return dt.numpy is not None and dt.numpy.kind == "i"
