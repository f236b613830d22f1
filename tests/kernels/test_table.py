"""The op table is complete, and no kernel allocates memory that grows with the data."""

import tracemalloc

import numpy as np
import pytest

import workbench.kernels
from tests.kernels.running import bound, leaf
from workbench.kernels.kernel import NUMPY_BUFFER, Kernel
from workbench.tensors import OPS, Context, Flag, ops

assert workbench.kernels  # fills the columns


@pytest.mark.parametrize("spec", OPS.values(), ids=lambda s: s.name)
def test_every_column_is_filled_or_says_why_not(spec):
    for column in ("kernel", "reference", "backward"):
        filled = getattr(spec, column) is not None
        assert filled or spec.without.get(column), f"{spec.name} has no {column} and no reason for it"
    assert spec.is_view or spec.summary and isinstance(spec.kernel, Kernel)


N, ROWS = 1000, 200
LARGE = {
    **{n: lambda x, h, n=n: ops.unary(n, x) for n, s in OPS.items() if s.op == "UNARY"},
    **{n: lambda x, h, n=n: ops.glu(n, x) for n, s in OPS.items() if s.op == "GLU"},
    **{f"{n} f16": lambda x, h, n=n: ops.glu(n, h) for n, s in OPS.items() if s.op == "GLU"},
    "SILU f16": lambda x, h: ops.silu(h),
    "SILU gaps": lambda x, h: ops.silu(leaf(x.context, x.ne, layout="gaps")),
    "ADD row": lambda x, h: ops.add(x, leaf(x.context, (N,))),
    "ADD column": lambda x, h: ops.add(x, leaf(x.context, (1, ROWS))),
    "MUL gaps": lambda x, h: ops.mul(leaf(x.context, x.ne, layout="gaps"), leaf(x.context, (N,))),
    "DIV repeated": lambda x, h: ops.div(x, leaf(x.context, (N // 4, ROWS // 4))),
    "ADD f16 f32": lambda x, h: ops.add(h, x),
    "ADD_ID": lambda x, h: ops.add_id(ops.reshape(x, N, 2, ROWS // 2), x, x.context.from_numpy(np.zeros((ROWS // 2, 2), "i4"))),
    "SCALE": lambda x, h: ops.scale(x, 2.0, 1.0),
    "CLAMP": lambda x, h: ops.clamp(x, 0, 1),
    "SUM": lambda x, h: ops.sum(x),
    "SUM f16": lambda x, h: ops.sum(h),
    "SUM_ROWS": lambda x, h: ops.sum_rows(x),
    "CUMSUM": lambda x, h: ops.cumsum(x),
    "MEAN": lambda x, h: ops.mean(x),
    "ARGMAX": lambda x, h: ops.argmax(x),
    "NORM": lambda x, h: ops.norm(x),
    "RMS_NORM": lambda x, h: ops.rms_norm(leaf(x.context, x.ne, layout="gaps")),
    "L2_NORM": lambda x, h: ops.l2_norm(x),
    "DIAG_MASK_INF": lambda x, h: ops.diag_mask_inf(x, 1),
    "SOFT_MAX": lambda x, h: ops.soft_max(x),
    "SOFT_MAX mask": lambda x, h: ops.soft_max_ext(ops.reshape(x, N, ROWS // 4, 4), h, 0.5),
    "SOFT_MAX alibi": lambda x, h: ops.soft_max_ext(ops.reshape(x, N, ROWS // 4, 4), x, 0.5, 8.0),
    "ROPE": lambda x, h: ops.rope(ops.reshape(x, N // 10, 10, ROWS), x.context.new_tensor("i32", ROWS).set(np.arange(ROWS)), 80, 2),
    "ROPE f16": lambda x, h: ops.rope(ops.reshape(h, N // 10, 10, ROWS), x.context.new_tensor("i32", ROWS).set(np.arange(ROWS)), 80),
    "ARGSORT": lambda x, h: ops.argsort(x, "desc"),
    "TOP_K": lambda x, h: ops.top_k(x, 5),
    "REPEAT": lambda x, h: ops.repeat(x, (2 * N, 2 * ROWS)),
    "CONCAT": lambda x, h: ops.concat(x, x, 0),
    "CROSS_ENTROPY_LOSS": lambda x, h: ops.cross_entropy_loss(x, x),
    "ACC": lambda x, h: ops.acc(x, leaf(x.context, (N // 2, ROWS))),
    "REPEAT_BACK": lambda x, h: ops.repeat_back(x, (N // 2, 1)),
    "SILU_BACK": lambda x, h: ops.silu_back(x, leaf(x.context, x.ne, layout="gaps")),
    "RMS_NORM_BACK": lambda x, h: ops.rms_norm_back(x, x),
    "SOFT_MAX_BACK": lambda x, h: ops.soft_max_back(x, x),
    "CROSS_ENTROPY_LOSS_BACK": lambda x, h: ops.cross_entropy_loss_back(leaf(x.context, (1,)), x, x),
    "GET_ROWS_BACK": lambda x, h: ops.get_rows_back(x, x.context.from_numpy(np.zeros(ROWS, "i4")), (N, 7)),
    "MUL_MAT_ID_BACK": lambda x, h: ops.mul_mat_id_back(
        leaf(x.context, (50, N, 4)), ops.reshape(x, N, 2, ROWS // 2), x.context.from_numpy(np.tile(np.arange(2, dtype="i4"), (ROWS // 2, 1)))),
    "OUT_PROD_ID": lambda x, h: ops.out_prod_id(
        leaf(x.context, (50, 1, ROWS // 2)), ops.reshape(x, N, 2, ROWS // 2),
        x.context.from_numpy(np.tile(np.arange(2, dtype="i4"), (ROWS // 2, 1))), 4),
    "OPT_STEP_ADAMW": lambda x, h: ops.opt_step_adamw(x.mark(Flag.PARAM), x, leaf(x.context, x.ne), leaf(x.context, x.ne), leaf(x.context, (7,))),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_no_memory_grows_with_the_data(name):
    with Context(2**25) as ctx:
        step = bound(LARGE[name](leaf(ctx, (N, ROWS)), leaf(ctx, (N, ROWS), "f16")))
        with np.errstate(all="ignore"):
            np.setbufsize(NUMPY_BUFFER)  # as a plan does
            step()
            tracemalloc.start()
            step()
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak <= 64 * 1024


def test_every_op_has_a_public_constructor():
    """Graph files are read through them."""
    assert [name for name in OPS if name.lower() not in ops.__all__] == []
