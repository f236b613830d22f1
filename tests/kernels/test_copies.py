"""Copies, rows picked and rows written: exact, in every pair of types and any layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.errors import DTypeError, ParameterError, ShapeError
from workbench.execution import compute
from workbench.tensors import dtype, ops

PLAIN = ["f32", "f16", "bf16", "i32", "i64", "f64"]
TABLES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
NUMPY = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64, "f64": np.float64}


def rng(seed=0):
    return np.random.default_rng(seed)


def run(node):
    compute(wb.build(node))
    return node


def stored(kind, x):
    """What a tensor of this type holds of f32 `x`, by its own encoding."""
    with wb.Context() as ctx:
        return ctx.new_tensor(kind, *x.shape[::-1]).set(x).numpy().reshape(x.shape)


@pytest.mark.parametrize("to", [*PLAIN, "q8_0", "q4_0"])
@pytest.mark.parametrize("kind", [*PLAIN, "q8_0", "q4_0"])
def test_casts_convert_every_pair_of_types(kind, to):
    x = (rng().standard_normal((2, 3, 5, 64)) * 9).astype(np.float32)
    with wb.Context() as ctx:
        a = ctx.new_tensor(kind, 64, 5, 3, 2).set(x if kind not in ("i32", "i64") else np.trunc(x))
        node = run(ops.cast(a, to))
        assert node.src == (a, node) and node.dtype is dtype(to) and node.name == " (copy)"
        values = a.numpy().astype(np.float64)
        want = np.trunc(values).astype(NUMPY[to]) if to in ("i32", "i64") else stored(to, values.astype(np.float32))
        assert np.array_equal(node.numpy().reshape(want.shape), want)


@given(ne=st.tuples(*[st.integers(1, 6)] * 4), axes=st.permutations(range(4)), kind=st.sampled_from(["f32", "f16", "bf16", "i32"]))
def test_cont_and_dup_pack_permuted_tensors(ne, axes, kind):
    with wb.Context() as ctx:
        a = ctx.new_tensor(kind, *ne).set(np.arange(np.prod(ne)).reshape(ne[::-1]) % 250)
        view = ops.permute(a, *axes)
        want = view.array()
        for node in (ops.cont(view), ops.dup(view), ops.cpy(view, ctx.new_tensor(kind, *view.ne))):
            assert node.is_contiguous and np.array_equal(run(node).array(), want)
        flat = run(ops.cont(view, a.n_elements))
        assert np.array_equal(flat.array().ravel(), want.ravel())


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "i32"])
@pytest.mark.parametrize("to", ["f32", "f16", "bf16", "q4_0"])
def test_cpy_between_shapes_keeps_the_order_of_elements(kind, to):
    x = np.trunc(rng().standard_normal((4, 6, 64)) * 9).astype(np.float32)
    with wb.Context() as ctx:
        a = ops.permute(ctx.new_tensor(kind, 64, 6, 4).set(x), 0, 2, 1, 3)  # [64, 4, 6]: not packed
        into = ctx.new_tensor(to, 32, 48, name="into")
        node = run(ops.cpy(a, into))
        assert node.view_src is into and node.name == "into (copy of  (permuted))"
        want = stored(to, np.ascontiguousarray(stored(kind, x).astype(np.float32).transpose(1, 0, 2)).reshape(48, 32))
        assert np.array_equal(into.numpy(), want)


def test_cpy_writes_into_the_strides_of_a_view():
    with wb.Context() as ctx:
        into = ctx.new_tensor("f16", 4, 6).set(np.zeros((6, 4)))
        x = ctx.from_numpy(rng().standard_normal((4, 3)).astype(np.float16).astype(np.float32))
        run(ops.cpy(x, ops.slice_view(ops.transpose(into), (slice(None), slice(0, 6, 2)))))
        assert np.array_equal(into.numpy()[::2].T, x.numpy().astype(np.float16)) and not into.numpy()[1::2].any()


# ---- rows


@pytest.mark.parametrize("kind", [*TABLES, "i32"])
@given(m=st.integers(1, 9), r=st.integers(1, 300), b2=st.integers(1, 3), b3=st.integers(1, 2), packed=st.booleans())
def test_get_rows_picks_from_each_batch(kind, m, r, b2, b3, packed):
    with wb.Context() as ctx:
        n, gap = 32, 1 if packed else 2
        a = ctx.new_tensor(kind, n, m * gap, b2, b3).set(np.trunc(rng().standard_normal((b3, b2, m * gap, n)) * 99))
        a = ops.view(a, n, m, b2, b3, nb=(a.nb[1] * gap, *a.nb[2:]))
        rows = rng(1).integers(0, m, (b3, b2, r))
        node = run(ops.get_rows(a, ctx.new_tensor("i32", r, b2, b3).set(rows)))
        whole = np.array(a.numpy()).reshape(b3, b2, m, n)
        assert node.dtype.name == ("i32" if kind == "i32" else "f32")
        assert np.array_equal(node.array(), np.take_along_axis(whole, rows[..., None], 2))
        assert np.array_equal(node.spec.reference(node, whole, node.src[1].array()), node.array())


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize("index", ["i64", "i32"])
@given(r=st.integers(1, 8), b2=st.integers(1, 4), b3=st.integers(1, 2), source=st.sampled_from(["f32", "f16"]), data=st.data())
def test_set_rows_replaces_rows_and_nothing_else(kind, index, r, b2, b3, source, data):
    r2 = data.draw(st.sampled_from([d for d in range(1, b2 + 1) if b2 % d == 0]))
    with wb.Context() as ctx:
        n, m = 32, 9
        into = ctx.new_tensor(kind, n, m, b2, b3).set(rng().standard_normal((b3, b2, m, n)))
        x = ctx.new_tensor(source, n, r, b2, b3).set(rng(1).standard_normal((b3, b2, r, n)))
        rows = ctx.new_tensor(index, r, r2).set(np.argsort(rng(2).random((r2, m)))[:, :r])
        before = np.array(into.numpy()).reshape(b3, b2, m, n)
        node = ops.set_rows(into, x, rows)
        want = node.spec.reference(node, stored(kind, x.array().astype(np.float32)), rows.array(), before)
        assert node.src == (x, rows, into) and node.view_src is into
        run(node)
        assert np.array_equal(into.numpy().reshape(want.shape), want)


def test_single_elements_are_rows_too():
    """llama.cpp writes a transposed V cache as rows of one element."""
    with wb.Context() as ctx:
        into = ctx.new_tensor("f16", 1, 30_000).set(np.zeros((30_000, 1)))
        order = rng().permutation(30_000)[:20_000]
        x = ctx.from_numpy(rng().standard_normal((20_000, 1)).astype(np.float16).astype(np.float32))
        run(ops.set_rows(into, x, ctx.from_numpy(order.astype(np.int64), "i64")))
        assert np.array_equal(into.numpy()[order], x.numpy()) and np.count_nonzero(into.numpy()) == np.count_nonzero(x.numpy())


def test_rows_that_are_not_there_are_named_and_nothing_is_written():
    with wb.Context() as ctx:
        table = ctx.new_tensor("f32", 4, 3, name="table").set(np.zeros((3, 4)))
        x = ctx.from_numpy(np.ones((2, 4), np.float32))
        for bad in (3, -1):
            rows = ctx.from_numpy(np.array([0, bad]), "i32", name="picks")
            for node in (ops.get_rows(table, rows), ops.set_rows(table, x, rows)):
                with pytest.raises(ParameterError, match=f"row {bad} at index .* of 'picks'.*\n.*0 to 2"):
                    run(node)
        assert not table.numpy().any()


def test_what_does_not_fit_is_refused():
    with wb.Context() as ctx:
        def new(kind, *ne):
            return ctx.new_tensor(kind, *ne)

        for call, error in [
            (lambda: ops.cpy(new("f32", 4, 3), new("f32", 4, 4)), ShapeError),
            (lambda: ops.cast(new("f32", 33), "q8_0"), ShapeError),
            (lambda: ops.cont(new("f32", 4, 3), 5), ShapeError),
            (lambda: ops.get_rows(new("f32", 4, 3), new("i64", 2)), DTypeError),
            (lambda: ops.get_rows(new("f32", 4, 3, 2), new("i32", 2)), ShapeError),
            (lambda: ops.set_rows(new("f32", 4, 3), new("i32", 4, 2), new("i64", 2)), DTypeError),
            (lambda: ops.set_rows(new("f32", 4, 3), new("f32", 4, 2), new("f32", 2)), DTypeError),
            (lambda: ops.set_rows(new("f32", 4, 3), new("f32", 5, 2), new("i64", 2)), ShapeError),
            (lambda: ops.set_rows(new("f32", 4, 3), new("f32", 4, 2), new("i64", 3)), ShapeError),
            (lambda: ops.set_rows(ops.transpose(new("f32", 3, 4)), new("f32", 4, 2), new("i64", 2)), ShapeError),
        ]:  # fmt: skip
            with pytest.raises(error, match="expected: "):
                call()
