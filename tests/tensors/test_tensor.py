"""Descriptions of arrays against NumPy's own idea of shapes, strides and slices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from workbench.errors import DTypeError, ParameterError, ShapeError, StorageError
from workbench.tensors import Flag

extents = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def filled(ne, kind="f32"):
    x = np.arange(np.prod(ne)).reshape(ne[::-1])
    return wb.Context(1 << 20).new_tensor(kind, *ne, name="x").set(x), x


@given(extents)
def test_shape_strides_and_bytes_are_numpys(ne):
    t, x = filled(ne)
    x = x.astype("<f4")
    assert t.nb[: len(ne)] == x.strides[::-1] and t.nbytes == x.nbytes and t.n_elements == x.size
    assert t.array().tobytes() == x.tobytes() and t.is_contiguous


@given(extents, st.permutations(range(4)))
def test_permute_is_the_inverse_of_numpys_transpose(ne, axes):
    t, x = filled(ne)
    full = x.reshape(t.ne[::-1])
    p = wb.ops.permute(t, *axes)
    # axis i of ggml becomes axis axes[i]; ggml's axis i is NumPy's axis 3 - i
    order = [0] * 4
    for i, target in enumerate(axes):
        order[3 - target] = 3 - i
    assert np.array_equal(p.array(), full.transpose(order))
    packed = np.ascontiguousarray(full.transpose(order))
    assert p.is_contiguous == (all(s == q for s, q, n in zip(p.nb[::-1], packed.astype("<f4").strides, packed.shape) if n > 1))


@given(extents, st.permutations(range(4)))
def test_permuted_means_that_strides_do_not_grow(ne, axes):
    p = wb.ops.permute(filled(ne)[0], *axes)
    assert p.is_permuted == (sorted(p.nb) != list(p.nb))
    assert p.is_transposed == (p.nb[1] < p.nb[0])


@given(extents, st.data())
def test_slices_are_numpys_and_share_memory(ne, data):
    t, x = filled(ne)
    x = x.reshape(t.shape)
    index = tuple(
        data.draw(st.one_of(st.integers(-n, n - 1), st.builds(slice, st.none() | st.integers(0, n), st.none() | st.integers(0, n), st.none() | st.integers(1, 3))))
        for n in t.shape[: data.draw(st.integers(1, len(t.shape)))]
    )  # fmt: skip
    s = t[index]
    assert np.array_equal(s.array().reshape(-1), x[index].reshape(-1))
    assert s.view_src is t


def test_views_of_views_name_the_owner():
    t, x = filled([4, 6])
    v = t[2:5][1]
    assert v.view_src is t and v.view_offs == 3 * 16 and v.numpy().tolist() == x[3].tolist()
    v.set([9, 9, 9, 9])
    assert t.numpy()[3].tolist() == [9, 9, 9, 9]


@pytest.mark.parametrize("build", [
    lambda t: t.reshape(5, 5), lambda t: t.T.reshape(24), lambda t: wb.ops.view(t, 4, 7), lambda t: wb.ops.view(t, 4, offset=96),
    lambda t: wb.ops.view(t, 4, offset=-16), lambda t: t[7], lambda t: t[0, 0, 0, 0, 0], lambda t: t["a"],
    lambda t: wb.ops.permute(t, 0, 1, 2, 2), lambda t: t[::-1],
])  # fmt: skip
def test_views_that_do_not_fit_are_refused(build):
    with pytest.raises(ValueError, match="expected"):
        build(filled([4, 6])[0])


@pytest.mark.parametrize("ne", [(), (1, 2, 3, 4, 5), (-1,), (2.5,), (True,), (2**40, 2**40)])
def test_extents_that_cannot_be(ne):
    with pytest.raises(ShapeError):
        wb.Context().new_tensor("f32", *ne)


def test_set_checks_the_number_and_order_of_values():
    t, x = filled([4, 6])
    with pytest.raises(ShapeError, match="transpose"):
        t.set(x.T)
    with pytest.raises(ShapeError, match="24 values"):
        t.set(x[1:])
    t.T.set(x.T + 1)
    assert np.array_equal(t.numpy(), x + 1)


def test_only_an_owner_can_be_placed():
    t, _ = filled([4, 6])
    with pytest.raises(StorageError, match="'x'"):
        t[1].place(t.storage, 0)
    with pytest.raises(StorageError, match="room"):
        wb.Context(no_alloc=True).new_tensor("f32", 8).place(wb.Context(0) and t.storage, t.storage.size - 4)


def test_repr_is_short_and_without_addresses():
    t, _ = filled([4, 6])
    assert repr(t.mark(Flag.INPUT)) == "<Tensor 'x' f32 ne=4x6 leaf [input]>"
    assert repr(t.T) == "<Tensor 'x (transposed)' f32 ne=6x4 TRANSPOSE view of 'x'+0>"
    assert repr(t.named("<b>\x1b[31m")) == "<Tensor '<b>\\x1b[31m' f32 ne=4x6 leaf [input]>"


def test_bf16_and_quantised_tensors_round_trip_through_numpy():
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    for kind, error in [("bf16", 4e-3), ("f16", 5e-4), ("q8_0", 5e-3), ("q4_0", 0.08)]:
        t = wb.Context().from_numpy(x, kind)
        assert np.abs(t.numpy() - x).max() <= error, kind
    with pytest.raises(DTypeError, match="one element per block"):
        t.array()


def test_a_name_is_cut_as_ggml_cuts_it():
    t = filled([1])[0].named("é" * 40)
    assert t.name == "é" * 31
    assert filled([1])[0].named("a\ud800b").name == "ab"


@pytest.mark.parametrize("kind, values", [("i32", [2**40]), ("i32", [1.5]), ("i32", [np.nan]), ("i8", [300]), ("i64", [2.0**63])])
def test_a_whole_number_never_becomes_another_one(kind, values):
    t = wb.Context(1 << 12).new_tensor(kind, 1).set([7])
    with pytest.raises(ParameterError, match="whole numbers from"):
        t.set(values)
    assert t.numpy().tolist() == [7]


def test_too_large_for_f16_is_infinite_without_a_warning():
    assert wb.Context(1 << 12).new_tensor("f16", 2).set([1e9, 2]).numpy().tolist() == [np.inf, 2]


def test_an_empty_slice_has_numpys_shape():
    t, x = filled([4, 3, 2])
    assert t[0:0].numpy().shape == x[0:0].shape and t[:, 1:1].numpy().shape == x[:, 1:1].shape


def test_a_view_never_steps_back():
    t, _ = filled([4, 6])
    for nb, offset in (((-16,), 32), ((16,), -4), ((8.0,), 0), ((16, 16, 16, 16), 0)):
        with pytest.raises(ShapeError, match="none below zero"):
            wb.ops.view(t, 4, 2, nb=nb, offset=offset)


def test_operators_with_strangers():
    t, x = filled([4, 6])
    assert np.array_equal(np.asarray(t), x) and [np.array_equal(row, y) for row, y in zip(t, x)] == [True] * 6
    for wrong in (lambda: t + 1, lambda: t @ x, lambda: x * t, lambda: t / 2, lambda: t * "a"):
        with pytest.raises(TypeError):
            wrong()
    assert (2 * t).desc == "SCALE" and (-t).desc == "NEG"
