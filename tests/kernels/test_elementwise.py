"""Element-wise kernels against real ggml's recorded results and against their slow definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.running import (
    agrees,
    cases,
    definition,
    leaf,
    run,
    same_bits_in_parts,
    same_bits_in_place,
    shapes,
    sources_and_result,
)
from workbench.errors import DTypeError, ParameterError, ShapeError
from workbench.tensors import OPS, Context, Tensor, ops

FUNCTIONS = [*(n for n, s in OPS.items() if s.op == "UNARY"), "SQR", "SQRT", "LOG"]
GATED = [n for n, s in OPS.items() if s.op == "GLU"]
ARITHMETIC = ["ADD", "SUB", "MUL", "DIV"]
RECORDED = {n.lower() for n in [*FUNCTIONS, *GATED, *ARITHMETIC, "ADD_ID", "SCALE", "CLAMP"]}
LAYOUTS = st.sampled_from(["packed", "gaps", "swapped"])
SEEDS = st.integers(0, 99)


def function(name: str, a: Tensor) -> Tensor:
    return ops.unary(name, a) if OPS[name].op == "UNARY" else getattr(ops, name.lower())(a)


@pytest.mark.parametrize("case", [c for c in cases() if c["op"] in RECORDED], ids=lambda c: c["id"])
def test_kernel_and_definition_as_recorded(case):
    with Context() as ctx:
        src, want = sources_and_result(ctx, case)
        name, p = case["op"].upper(), dict(case["params"])
        if name in FUNCTIONS:
            node = function(name, *src)
        elif name in GATED:
            node = ops.glu(name, *src, swapped=p.get("swapped", False))
        elif name == "SCALE":
            node = ops.scale(src[0], p["scale"], p["bias"])
        else:
            node = getattr(ops, case["op"])(*src, **p)
        agrees(run(node), want, node, table=True)
        agrees(definition(node), want, node, table=True)


@pytest.mark.parametrize("name", FUNCTIONS)
@given(shape=shapes(), layout=LAYOUTS, kind=st.sampled_from(["f32", "f16"]), seed=SEEDS)
def test_functions(name, shape, layout, kind, seed):
    with Context() as ctx:
        node = function(name, leaf(ctx, shape, kind, seed, layout, special=True))
        agrees(run(node), definition(node), node)
        same_bits_in_place(node)
        same_bits_in_parts(node)


@pytest.mark.parametrize("name", ARITHMETIC)
@given(data=st.data(), shape=shapes(), kinds=st.sampled_from(["f32 f32", "f16 f16", "f16 f32"]), seed=SEEDS)
def test_arithmetic_repeats_the_second_operand(name, data, shape, kinds, seed):
    small = [data.draw(st.sampled_from([m for m in range(1, n + 1) if n % m == 0])) for n in shape]
    first, second = kinds.split()
    with Context() as ctx:
        a = leaf(ctx, shape, first, seed, data.draw(LAYOUTS))
        b = leaf(ctx, small, second, seed + 1, data.draw(LAYOUTS | st.just("transposed")))
        node = getattr(ops, name.lower())(a, b)
        agrees(run(node), definition(node), node)
        same_bits_in_place(node)
        if a.ne == b.ne and a.dtype is b.dtype:
            same_bits_in_place(node, 1)
        same_bits_in_parts(node)


@pytest.mark.parametrize("name", GATED)
@given(shape=shapes(), split=st.booleans(), swapped=st.booleans(), kind=st.sampled_from(["f32", "f16"]), seed=SEEDS)
def test_gated_units(name, shape, split, swapped, kind, seed):
    with Context() as ctx:
        n, *rest = shape
        if split:
            node = ops.glu(name, leaf(ctx, shape, kind, seed), leaf(ctx, shape, kind, seed + 1))
            same_bits_in_place(node, 1)
        else:
            node = ops.glu(name, leaf(ctx, (2 * n, *rest), kind, seed), swapped=swapped)
        agrees(run(node), definition(node), node)
        same_bits_in_parts(node)


@given(shape=shapes(), k=st.integers(1, 3), seed=SEEDS)
def test_add_id_adds_the_named_rows(shape, k, seed):
    n, experts, tokens, batch = shape
    with Context() as ctx:
        ids = ctx.from_numpy(np.random.default_rng(seed).integers(0, experts, (tokens, k)).astype("i4"))
        node = ops.add_id(leaf(ctx, (n, k, tokens, batch), seed=seed), leaf(ctx, (n, experts), seed=seed + 1), ids)
        agrees(run(node), definition(node), node)
        same_bits_in_place(node)


@given(shape=shapes(), s=st.floats(-3, 3, width=32), t=st.floats(-3, 3, width=32), seed=SEEDS)
def test_scale_and_clamp(shape, s, t, seed):
    with Context() as ctx:
        scaled = ops.scale(leaf(ctx, shape, seed=seed), s, t)
        clamped = ops.clamp(leaf(ctx, shape, seed=seed, layout="gaps", special=True), min(s, t), max(s, t))
        for node in (scaled, clamped):
            agrees(run(node), definition(node), node)
            same_bits_in_place(node)
            same_bits_in_parts(node)


def test_a_tiny_add_is_the_bare_ufunc_over_the_plainest_arrays():
    with Context() as ctx:
        a, b = leaf(ctx, (3, 4, 5)), leaf(ctx, (3,))
        for node, seen in ((ops.add(a, a), [(60,)] * 3), (ops.add(a, b), [(5, 4, 3), (1, 1, 3), (5, 4, 3)])):
            step = OPS["ADD"].kernel.bind(np, [s.array() for s in node.src], node.array(), {})
            assert step.func is np.add and not step.keywords
            assert [x.shape for x in step.args] == seen


def test_an_id_that_names_no_row_is_an_error():
    with Context() as ctx:
        node = ops.add_id(leaf(ctx, (4, 2, 3)), leaf(ctx, (4, 5)), ctx.from_numpy(np.full((3, 2), 5, "i4")))
        with pytest.raises(ParameterError, match="row 5"):
            run(node)


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda a, row, h: ops.add(row, a), ShapeError, "swap the operands"),
        (lambda a, row, h: ops.mul(a, h), DTypeError, "f16 with f32"),
        (lambda a, row, h: ops.unary("sine", a), ParameterError, "SILU"),
        (lambda a, row, h: ops.silu(ops.transpose(a)), ShapeError, "cont"),
        (lambda a, row, h: ops.swiglu(ops.reshape(a, 3, 8)), ShapeError, "even"),
        (lambda a, row, h: ops.swiglu_split(a, row), ShapeError, "equal extents"),
        (lambda a, row, h: ops.swiglu_split(a, h), DTypeError, "f32"),
        (lambda a, row, h: ops.glu("SILU", a), ParameterError, "SWIGLU"),
        (lambda a, row, h: ops.clamp(a, 2, 1), ParameterError, "at most"),
        (lambda a, row, h: ops.scale(ops.transpose(a), 2.0), ShapeError, "cont"),
        (lambda a, row, h: ops.add_id(a, row, a), DTypeError, "i32"),
        (lambda a, row, h: ops.add_id(a, row, a.context.new_tensor("i32", 3)), ShapeError, "one entry per row"),
    ],
)
def test_mistakes_are_explained(make, error, words):
    with Context() as ctx:
        with pytest.raises(error) as caught:
            make(leaf(ctx, (6, 4)), leaf(ctx, (6,)), leaf(ctx, (6, 4), "f16"))
        assert words in str(caught.value)
