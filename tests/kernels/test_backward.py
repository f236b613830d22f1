"""Kernels of training against their slow definitions, and AdamW against the textbook."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.running import agrees, definition, leaf, run, same_bits_in_parts, same_bits_in_place, shapes
from workbench.errors import DTypeError, ParameterError, ShapeError
from workbench.tensors import Context, Flag, ops

SEEDS = st.integers(0, 99)
LAYOUTS = st.sampled_from(["packed", "gaps", "swapped"])


def ids(ctx, used, t, n_expert, seed, repeats=False):
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, n_expert, (t, used)) if repeats else np.argsort(rng.random((t, n_expert)))[:, :used]
    return ctx.from_numpy(chosen.astype(np.int32))


@given(shape=shapes(), seed=SEEDS, layout=LAYOUTS)
def test_gradients_along_rows_and_elements(shape, seed, layout):
    with Context() as ctx:
        grad, x = leaf(ctx, shape, seed=seed, layout=layout), leaf(ctx, shape, seed=seed + 1)
        y = ctx.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(shape[0]), shape[:0:-1]).astype("f4").reshape(shape[::-1]))
        for node in (ops.silu_back(grad, x), ops.rms_norm_back(grad, x, 1e-3), ops.soft_max_back(grad, y, 0.7)):
            agrees(run(node), definition(node), node, absolute=1e-5)
            same_bits_in_parts(node)
            if layout == "packed":
                same_bits_in_place(node)
                same_bits_in_place(node, 1)


@given(shape=shapes(), seed=SEEDS)
def test_cross_entropy_loss_back(shape, seed):
    with Context() as ctx:
        labels = leaf(ctx, shape, seed=seed)
        node = ops.cross_entropy_loss_back(leaf(ctx, (1,), seed=seed), leaf(ctx, shape, seed=seed + 1), labels)
        agrees(run(node), definition(node), node, absolute=1e-5)
        same_bits_in_parts(node)


def test_infinite_inputs_of_silu_have_a_slope():
    with Context() as ctx:
        x = ctx.from_numpy(np.array([100, -100, 1e30, -1e30, 0], "f4"))
        np.testing.assert_array_equal(run(ops.silu_back(ctx.from_numpy(np.ones(5, "f4")), x)).ravel(), [1, 0, 1, 0, 0.5])


@given(small=shapes(6), times=st.tuples(*[st.integers(1, 3)] * 4), seed=SEEDS, layout=LAYOUTS)
def test_repeat_back(small, times, seed, layout):
    with Context() as ctx:
        a = leaf(ctx, tuple(n * r for n, r in zip(small, times)), seed=seed, layout=layout)
        node = ops.repeat_back(a, small)
        agrees(run(node), definition(node), node, absolute=1e-5)


@given(shape=shapes(9), seed=SEEDS, data=st.data())
def test_acc_adds_to_any_view(shape, seed, data):
    with Context() as ctx:
        a = leaf(ctx, shape, seed=seed)
        keys = tuple(data.draw(st.integers(0, n - 1) | st.builds(lambda i, s: slice(i, None, s), st.integers(0, n - 1), st.integers(1, 3)))
                     for n in a.shape)  # fmt: skip
        part = ops.slice_view(a, (*keys[:-1], slice(keys[-1] if isinstance(keys[-1], int) else keys[-1].start, None)))
        b = leaf(ctx, part.ne, seed=seed + 1)
        node = ops.acc(a, b, part.nb[1:], part.view_offs)
        agrees(run(node), definition(node), node)
        into = ops.acc_inplace(a, b, part.nb[1:], part.view_offs)
        assert into.root() is a
        want = run(node).tobytes()
        assert run(into).tobytes() == want == a.array().tobytes()


@given(n=st.integers(1, 9), m=st.integers(1, 7), r=st.integers(0, 12), b2=st.integers(1, 3), b3=st.integers(1, 2), seed=SEEDS)
def test_get_rows_back(n, m, r, b2, b3, seed):
    with Context() as ctx:
        rows = ctx.new_tensor("i32", r, b2, b3).set(np.random.default_rng(seed).integers(0, m, (b3, b2, r)))
        node = ops.get_rows_back(leaf(ctx, (n, r, b2, b3), seed=seed), rows, (n, m, b2, b3))
        agrees(run(node), definition(node), node, absolute=1e-5)
        same_bits_in_parts(node)


def test_get_rows_back_counts_and_refuses_rows_that_are_not_there():
    with Context() as ctx:
        rows = ctx.from_numpy(np.array([2, 0, 2, 2], "i4"))
        ones = ctx.from_numpy(np.ones((4, 1), "f4"))
        assert run(ops.get_rows_back(ones, rows, (1, 4))).ravel().tolist() == [1, 0, 3, 0]
        with pytest.raises(ParameterError, match="row 2"):
            run(ops.get_rows_back(ones, rows, (1, 2)))


@given(k=st.integers(1, 9), n=st.integers(1, 9), t=st.integers(1, 9), n_expert=st.integers(1, 6), repeats=st.booleans(), seed=SEEDS,
       data=st.data())  # fmt: skip
def test_products_through_ids(k, n, t, n_expert, repeats, seed, data):
    used = data.draw(st.integers(1, n_expert))
    rows = data.draw(st.sampled_from([d for d in range(1, used + 1) if used % d == 0]))
    with Context() as ctx:
        chosen = ids(ctx, used, t, n_expert, seed, repeats)
        w, grad, x = leaf(ctx, (k, n, n_expert)), leaf(ctx, (n, used, t), seed=1), leaf(ctx, (k, rows, t), seed=2)
        for node in (ops.mul_mat_id_back(w, grad, chosen), ops.out_prod_id(x, grad, chosen, n_expert)):
            assert node.ne == ((k, used, t, 1) if node.op == "MUL_MAT_ID_BACK" else (k, n, n_expert, 1))
            agrees(run(node), definition(node), node, absolute=1e-4)
            assert node.spec.flops(node) == 2 * used * t * n * k


@given(shape=shapes(), seed=SEEDS, steps=st.integers(1, 4), rate=st.floats(1e-4, 0.5), decay=st.floats(0, 0.5))
def test_adamw_is_the_textbooks(shape, seed, steps, rate, decay):
    """w' = (1 - lr·decay) w - lr · m̂ / (√v̂ + eps), on whole arrays in f64."""
    b1, b2, eps = 0.9, 0.999, 1e-8
    with Context() as ctx:
        w, m, v = leaf(ctx, shape, seed=seed).mark(Flag.PARAM), leaf(ctx, shape), leaf(ctx, shape)
        m.array()[...], v.array()[...] = 0, 0
        exact, em, ev = w.array().astype(float), 0.0, 0.0
        params = ctx.new_tensor("f32", 7)
        for t in range(1, steps + 1):
            g = leaf(ctx, shape, seed=seed + t)
            params.set([rate, b1, b2, eps, decay, 1 / (1 - b1**t), 1 / (1 - b2**t)])
            node = ops.opt_step_adamw(w, g, m, v, params)
            assert node.root() is w
            run(node)
            em, ev = b1 * em + (1 - b1) * g.array().astype(float), b2 * ev + (1 - b2) * g.array().astype(float) ** 2
            exact = exact * (1 - rate * decay) - rate * (em / (1 - b1**t)) / (np.sqrt(ev / (1 - b2**t)) + eps)
            np.testing.assert_allclose(w.array(), exact, rtol=2e-6, atol=2e-5 * rate * t + 1e-6)
        np.testing.assert_allclose(m.array(), em, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(v.array(), ev, rtol=1e-4, atol=1e-6)  # 1 - 0.999 in f32, as in ggml


@given(rows=st.integers(1, 300), seed=SEEDS)
def test_adamw_in_parts(rows, seed):
    with Context(2**22) as ctx:
        params = ctx.from_numpy(np.array([0.1, 0.9, 0.99, 1e-8, 0.1, 10, 100], "f4"))
        results = []
        for parts in ([slice(0, rows)], [slice(0, rows // 3), slice(rows // 3, rows)]):
            t = [leaf(ctx, (65, rows), seed=seed + i) for i in range(4)]
            t[3].array()[...] = np.abs(t[3].array())
            node = ops.opt_step_adamw(t[0].mark(Flag.PARAM), *t[1:], params)
            for part in parts:
                arrays = [a.array()[:, :, part] for a in t]
                if arrays[0].size:
                    run(node, [*arrays, params.array()], arrays[0])
            results.append(b"".join(a.array().tobytes() for a in (t[0], t[2], t[3])))
        assert results[0] == results[1]


@pytest.mark.parametrize(
    "make, error, words",
    [
        (lambda a, i, w: ops.acc(a, w), ShapeError, "reaches byte"),
        (lambda a, i, w: ops.acc(ops.transpose(a), a), ShapeError, "cont"),
        (lambda a, i, w: ops.acc(a, ops.view(a, 6, 2), (0, 96, 96)), ShapeError, "share places"),
        (lambda a, i, w: ops.acc(a, a, (4, 8)), ShapeError, "three distances"),
        (lambda a, i, w: ops.acc(a, a, offset=3), ShapeError, "multiples of 4"),
        (lambda a, i, w: ops.acc(a, i), DTypeError, "f32"),
        (lambda a, i, w: ops.add_inplace(a, ops.view(a, 5)), ShapeError, "divides"),
        (lambda a, i, w: ops.sub_inplace(a, i), DTypeError, "f32"),
        (lambda a, i, w: ops.repeat_back(a, (4, 4)), ShapeError, "divide"),
        (lambda a, i, w: ops.silu_back(a, w), ShapeError, "equal extents"),
        (lambda a, i, w: ops.soft_max_back(a, i), DTypeError, "f32"),
        (lambda a, i, w: ops.cross_entropy_loss_back(a, a, a), ShapeError, "one number"),
        (lambda a, i, w: ops.get_rows_back(a, i, (5, 9)), ShapeError, "table"),
        (lambda a, i, w: ops.get_rows_back(a, a, (6, 9)), DTypeError, "i32"),
        (lambda a, i, w: ops.mul_mat_id_back(w, a, ops.view(i, 3)), ShapeError, "n_used"),
        (lambda a, i, w: ops.mul_mat_id_back(w, ops.reshape(a, 12, 1, 2), ops.view(i, 1, 2)), ShapeError, "12 rows"),
        (lambda a, i, w: ops.out_prod_id(w, ops.reshape(a, 12, 1, 2), ops.view(i, 1, 2), 3), ShapeError, "as many tokens"),
        (lambda a, i, w: ops.out_prod_id(ops.reshape(a, 12, 1, 2), ops.reshape(a, 12, 1, 2), ops.view(i, 1, 2), 0), ParameterError, "1 or more"),
        (lambda a, i, w: ops.opt_step_adamw(a, a, a, a, ops.view(a, 7)), ParameterError, "Flag.PARAM"),
        (lambda a, i, w: ops.opt_step_adamw(a.mark(Flag.PARAM), a, a, a, a), ShapeError, "7 parameters"),
    ],
)
def test_mistakes_are_explained(make, error, words):
    with Context() as ctx:
        with pytest.raises(error) as caught:
            make(leaf(ctx, (6, 4)), ctx.new_tensor("i32", 4), leaf(ctx, (6, 5, 4)))
        assert words in str(caught.value)


@pytest.mark.parametrize("ne", [(0, 3), (3, 0), (4, 2, 0)])
def test_empty_tensors_compute_nothing(ne):
    with Context() as ctx:
        x = leaf(ctx, ne)
        for node in (ops.silu_back(x, x), ops.rms_norm_back(x, x), ops.soft_max_back(x, x), ops.acc(x, x),
                     ops.cross_entropy_loss_back(leaf(ctx, (1,)), x, x)):  # fmt: skip
            assert run(node).shape == node.ne[::-1]
        assert run(ops.get_rows_back(leaf(ctx, (4, 0)), ctx.new_tensor("i32", 0), (4, 3))).sum() == 0
