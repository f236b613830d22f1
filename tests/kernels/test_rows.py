"""Kernels along rows against real ggml's recorded results and against their slow definitions."""

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

RECORDED = {"sum", "sum_rows", "mean", "argmax", "norm", "rms_norm", "l2_norm", "diag_mask_inf", "soft_max", "soft_max_ext", "rope",
            "argsort", "top_k", "argsort_top_k", "repeat", "concat", "cross_entropy_loss"}  # fmt: skip
LAYOUTS = st.sampled_from(["packed", "gaps", "swapped"])
SEEDS = st.integers(0, 99)


def node_of(case: dict, src: list) -> Tensor:
    op, p = case["op"], case["params"]
    if op == "repeat":
        return ops.repeat(src[0], p["ne"])
    if op.startswith("soft_max"):
        return ops.soft_max_ext(src[0], src[1] if len(src) > 1 else None, **p)
    if op == "rope":
        return ops.rope(src[0], src[1], freq_factors=src[2] if len(src) > 2 else None, **p)
    return getattr(ops, op)(*src, **p)


@pytest.mark.parametrize("case", [c for c in cases() if c["op"] in RECORDED], ids=lambda c: c["id"])
def test_kernel_and_definition_as_recorded(case):
    with Context() as ctx:
        src, want = sources_and_result(ctx, case)
        node = node_of(case, src)
        if node.op == "VIEW":
            node = node.src[0]  # the sort behind `argsort_top_k`
        k = want.shape[-1]
        for got in (run(node), definition(node)):
            if case["op"] == "top_k":
                assert [set(r) for r in got.reshape(-1, k)] == [set(r) for r in want.reshape(-1, k)]
            elif "ties" in case["id"] and node.op == "ARGSORT":  # std::sort leaves the order of equal values open
                a = src[0].array()
                np.testing.assert_array_equal(np.take_along_axis(a, got, -1), np.take_along_axis(a, want, -1))
            elif case["op"] == "rope":  # ggml multiplies angles up in f32: 3e-4 of a row at positions of thousands
                agrees(got, want, node, absolute=tolerance_of_rope(node) * np.linalg.norm(want.astype(float), axis=-1, keepdims=True))
            else:
                agrees(got[..., :k], want, node, absolute=magnitude(node))


def tolerance_of_rope(node: Tensor) -> float:
    yarn, far = node.params["ext_factor"] != 0, int(node.src[1].array().max()) > 500
    return 1e-3 if yarn else 3e-4 if far else 1e-3 if node.dtype.name == "f16" else 1e-5


def magnitude(node: Tensor) -> float:
    """1e-6 of what is summed up."""
    return 1e-6 * (1 + float(np.abs(node.src[0].array()).sum(dtype=float))) if node.op in ("SUM", "SUM_ROWS", "MEAN", "CUMSUM") else 2e-6


ALONG_ROWS = {
    "SUM": lambda x, r: ops.sum(x),
    "SUM_ROWS": lambda x, r: ops.sum_rows(x),
    "CUMSUM": lambda x, r: ops.cumsum(x),
    "MEAN": lambda x, r: ops.mean(x),
    "NORM": lambda x, r: ops.norm(x, 1e-5),
    "RMS_NORM": lambda x, r: ops.rms_norm(x, 1e-6),
    "L2_NORM": lambda x, r: ops.l2_norm(x, 1e-6),
    "DIAG_MASK_INF": lambda x, r: ops.diag_mask_inf(x, int(r.integers(0, 4))),
    "ARGSORT": lambda x, r: ops.argsort(x, str(r.choice(["asc", "desc"]))),
    "REPEAT": lambda x, r: ops.repeat(x, [int(n * r.integers(1, 4)) for n in x.ne]),
}


@pytest.mark.parametrize("name", ALONG_ROWS)
@given(shape=shapes(), layout=LAYOUTS, seed=SEEDS)
def test_ops_of_one_tensor(name, shape, layout, seed):
    with Context() as ctx:
        node = ALONG_ROWS[name](leaf(ctx, shape, seed=seed, layout=layout), np.random.default_rng(seed))
        agrees(run(node), definition(node), node, absolute=magnitude(node))
        if node.spec.in_place:
            same_bits_in_place(node)
        same_bits_in_parts(node)


@pytest.mark.parametrize("n", [3000, 9000, 50_000])
@pytest.mark.parametrize("name", ["SUM_ROWS", "MEAN", "NORM", "RMS_NORM", "L2_NORM", "SOFT_MAX"])
@pytest.mark.parametrize("layout", ["packed", "gaps"])
def test_long_rows_are_exact_and_do_not_depend_on_their_neighbours(name, n, layout):
    with Context(2**24) as ctx:
        x = leaf(ctx, (n, 5), seed=n, layout=layout)
        x.array()[...] += 1000 if name in ("SUM_ROWS", "MEAN") else 3
        make = {**ALONG_ROWS, "SOFT_MAX": lambda x, r: ops.soft_max(x if layout == "packed" else ops.reshape(leaf(ctx, (n, 5)), n, 5))}[name]
        node = make(x, None)
        got, want = run(node), definition(node)
        assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()
        same_bits_in_parts(node)


@given(n=st.integers(1, 30), rows=st.integers(1, 5), k=st.integers(1, 4), seed=SEEDS)
def test_largest_elements(n, rows, k, seed):
    rng = np.random.default_rng(seed)
    with Context() as ctx:
        ties = ctx.from_numpy(rng.integers(0, 4, (rows, n)).astype("f4"))
        node = ops.argmax(ties)
        agrees(run(node), definition(node), node)
        same_bits_in_parts(node)
        k = min(k, n)
        node = ops.top_k(leaf(ctx, (n, rows), seed=seed), k)
        np.testing.assert_array_equal(np.sort(run(node), -1), np.sort(definition(node), -1))
        first = ops.argsort_top_k(leaf(ctx, (n, rows), seed=seed), k)
        run(first.src[0])
        assert first.op == "VIEW" and first.nb[1] == 4 * n
        np.testing.assert_array_equal(first.array(), definition(first.src[0])[..., :k])


def test_argsort_keeps_the_order_of_equals_and_takes_infinities():
    with Context() as ctx:
        x = ctx.from_numpy(np.array([1, np.inf, 1, -np.inf, 1], "f4"))
        assert run(ops.argsort(x)).ravel().tolist() == [3, 0, 2, 4, 1]
        assert run(ops.argsort(x, "desc")).ravel().tolist() == [1, 0, 2, 4, 3]


# ---- soft max


@st.composite
def soft_max_cases(draw):
    n, rows, heads, batch = draw(shapes(20))
    mask = draw(st.sampled_from([None, "f32", "f16"]))
    divisor = st.sampled_from([h for h in range(1, heads + 1) if heads % h == 0])
    mask_ne = (n, rows + draw(st.integers(0, 2)), draw(divisor), draw(st.sampled_from([1, batch])))
    return (n, rows, heads, batch), mask, mask_ne, draw(st.sampled_from([0.0, 8.0])) if mask else 0.0, draw(st.booleans())


@given(case=soft_max_cases(), seed=SEEDS)
def test_soft_max(case, seed):
    ne, kind, mask_ne, max_bias, with_sinks = case
    with Context() as ctx:
        mask = leaf(ctx, mask_ne, kind, seed) if kind else None
        if mask:
            mask.array()[np.random.default_rng(seed).random(mask.array().shape) < 0.3] = -np.inf
        sinks = leaf(ctx, ne[2:3], seed=seed) if with_sinks else None
        node = ops.soft_max_ext(leaf(ctx, ne, seed=seed + 1), mask, 0.3, max_bias, sinks)
        got, want = run(node), definition(node)
        agrees(got, want, node, absolute=1e-7)
        same_bits_in_place(node)
        if mask and mask.ne == node.ne and kind == "f32":
            same_bits_in_place(node, 1)
        same_bits_in_parts(node)


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_slopes_that_are_no_f16_numbers(kind):
    """From the ninth head on ALiBi's slopes are roots of two: a product with an f16 mask must not round them."""
    with Context() as ctx:
        node = ops.soft_max_ext(leaf(ctx, (33, 5, 9, 2), seed=1), leaf(ctx, (33, 6, 1, 1), kind, seed=2), 0.9, 8.0)
        agrees(run(node), definition(node), node, absolute=1e-7)


def test_soft_max_of_a_row_without_anything_to_see_is_nan():
    with Context() as ctx:
        node = ops.soft_max(ctx.from_numpy(np.array([[0, 0], [-np.inf, -np.inf], [-np.inf, 700]], "f4")))
        np.testing.assert_array_equal(run(node)[0, 0], [[0.5, 0.5], [np.nan, np.nan], [0, 1]])


# ---- rope


@given(
    heads=st.integers(1, 3), tokens=st.integers(1, 4), batch=st.integers(1, 2), pairs=st.integers(1, 8), rest=st.integers(0, 5),
    mode=st.sampled_from([0, 2]), kind=st.sampled_from(["f32", "f16"]), yarn=st.booleans(), factors=st.booleans(),
    layout=LAYOUTS, seed=SEEDS,
)  # fmt: skip
def test_rope(heads, tokens, batch, pairs, rest, mode, kind, yarn, factors, layout, seed):
    scaling = {"ext_factor": 0.7, "n_ctx_orig": 64, "freq_scale": 0.25, "attn_factor": 1.1} if yarn else {"freq_scale": 0.5}
    with Context() as ctx:
        pos = ctx.from_numpy(np.random.default_rng(seed).integers(0, 200, tokens).astype("i4"))
        ff = leaf(ctx, (pairs,), seed=seed) if factors else None
        if ff:
            ff.array()[...] = np.abs(ff.array()) + 1
        node = ops.rope(leaf(ctx, (2 * pairs + rest, heads, tokens, batch), kind, seed, layout), pos, 2 * pairs, mode, ff, **scaling)
        agrees(run(node), definition(node), node, absolute=5e-3 if kind == "f16" else 3e-4)
        same_bits_in_place(node)
        same_bits_in_parts(node)


def test_rope_multiplies_angles_up_as_ggml_does():
    with Context() as ctx:
        pos = np.array([0, 1, 77_777], "i4")
        node = ops.rope(ctx.from_numpy(np.tile(np.array([1, 0], "f4"), (3, 1, 32))), ctx.from_numpy(pos), 64)
        angle = [pos.astype("f4")]
        for _ in range(31):
            angle.append(angle[-1] * np.float32(10000 ** (-1 / 32)))
        turned = run(node)[0, :, 0]
        np.testing.assert_allclose(turned[:, ::2], np.cos(np.array(angle, float)).T, atol=3e-7)
        np.testing.assert_allclose(turned[:, 1::2], np.sin(np.array(angle, float)).T, atol=3e-7)


# ---- joining, loss


@given(shape=shapes(8), dim=st.integers(0, 3), more=st.integers(1, 4), kind=st.sampled_from(["f32", "f16", "i32"]), layout=LAYOUTS)
def test_concat(shape, dim, more, kind, layout):
    with Context() as ctx:
        other = [*shape[:dim], more, *shape[dim + 1 :]]
        node = ops.concat(leaf(ctx, shape, kind, 0, layout), leaf(ctx, other, kind, 1, "transposed"), dim)
        np.testing.assert_array_equal(run(node), definition(node))


@given(shape=shapes(), seed=SEEDS)
def test_cross_entropy_loss(shape, seed):
    with Context() as ctx:
        labels = leaf(ctx, shape, seed=seed)
        labels.set(np.abs(labels.numpy()))
        node = ops.cross_entropy_loss(leaf(ctx, shape, seed=seed + 1), labels)
        agrees(run(node), definition(node), node, absolute=1e-5)
        same_bits_in_parts(node)


# ---- edges


@pytest.mark.parametrize("ne", [(0, 3), (3, 0), (4, 2, 0)])
def test_empty_tensors_compute_nothing(ne):
    with Context() as ctx:
        x = leaf(ctx, ne)
        for make in ALONG_ROWS.values():
            node = make(x, np.random.default_rng(0))
            assert run(node).shape == node.ne[::-1]
        for node in (ops.soft_max(x), ops.silu(x), ops.add(x, x), ops.swiglu_split(x, x), ops.concat(x, x, 1), ops.cross_entropy_loss(x, x)):
            assert run(node).shape == node.ne[::-1]
        assert run(ops.sum(x)).item() == 0


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda a, p: ops.argmax(ops.reshape(a, 2, 3, 4)), ShapeError, "matrix"),
        (lambda a, p: ops.sum_rows(p), DTypeError, "f32"),
        (lambda a, p: ops.rms_norm(a, -1.0), ParameterError, "zero or more"),
        (lambda a, p: ops.diag_mask_inf(a, -1), ParameterError, "zero or more"),
        (lambda a, p: ops.soft_max(ops.transpose(a)), ShapeError, "cont"),
        (lambda a, p: ops.soft_max_ext(a, ops.view(a, 6, 2), 1.0), ShapeError, "one row per query"),
        (lambda a, p: ops.soft_max_ext(a, None, 1.0, 8.0), ParameterError, "ALiBi"),
        (lambda a, p: ops.soft_max_ext(a, None, 1.0, sinks=a), ShapeError, "one logit per head"),
        (lambda a, p: ops.rope(a, p, 5), ParameterError, "even"),
        (lambda a, p: ops.rope(a, p, 6, mode=8), ParameterError, "NeoX"),
        (lambda a, p: ops.rope(a, p, 6), ShapeError, "a position per token"),
        (lambda a, p: ops.rope(a, a, 6), DTypeError, "i32"),
        (lambda a, p: ops.rope(ops.reshape(a, 6, 1, 4), p, 6, freq_factors=ops.view(a, 2)), ShapeError, "one per pair"),
        (lambda a, p: ops.rope(ops.reshape(a, 6, 1, 4), p, 6, ext_factor=1.0), ParameterError, "n_ctx_orig"),
        (lambda a, p: ops.argsort(a, "up"), ParameterError, "desc"),
        (lambda a, p: ops.top_k(a, 7), ParameterError, "1 to 6"),
        (lambda a, p: ops.argsort_top_k(a, 0), ParameterError, "1 to 6"),
        (lambda a, p: ops.repeat(a, (9, 4)), ShapeError, "multiples"),
        (lambda a, p: ops.concat(a, p, 0), DTypeError, "f32"),
        (lambda a, p: ops.concat(a, ops.view(a, 5, 4), 1), ShapeError, "except along dimension 1"),
        (lambda a, p: ops.concat(a, a, 4), ParameterError, "fastest"),
        (lambda a, p: ops.cross_entropy_loss(a, ops.view(a, 6, 2)), ShapeError, "probabilities"),
    ],
)
def test_mistakes_are_explained(make, error, words):
    with Context() as ctx:
        with pytest.raises(error) as caught:
            make(leaf(ctx, (6, 4)), ctx.new_tensor("i32", 4))
        assert words in str(caught.value)


def test_in_place_is_allowed_where_ggml_allows_it():
    allowed = {n for n, s in OPS.items() if s.in_place}
    assert allowed == {n for n, s in OPS.items() if s.op in {
        "SCALE", "DIAG_MASK_INF", "ADD", "ADD_ID", "SUB", "MUL", "DIV", "SQR", "SQRT", "LOG", "UNARY", "ROPE", "RMS_NORM", "CLAMP", "SOFT_MAX", "FILL",
        "SILU_BACK", "RMS_NORM_BACK", "SOFT_MAX_BACK"}}  # fmt: skip
