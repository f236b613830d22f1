"""MUL_MAT_ID in few calls: whichever way it goes, the result is that of the product by expert, but for rounding."""

import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.test_products import check, filled, rng
from workbench.errors import ParameterError
from workbench.kernels import grouped
from workbench.kernels.products import by_expert, id_type
from workbench.kernels.weights import weights_of
from workbench.tensors import Context, ops

WAYS = {"by_place": {"FEW_PLACES": 10**6}, "padded": {"FEW_PLACES": 0, "FEW_GROUPS": 1}, "in_turn": {"FEW_PLACES": 0, "PADDED": 0}}


def node_of(ctx, kind, k, n, n_expert, n_rows, used, t, seed=0, skewed=False):
    ids = rng(seed).integers(0, n_expert, (t, used)) // (n_expert if skewed else 1)
    x = filled(ctx, "f32", k, n_rows, t, seed=seed)
    return ops.mul_mat_id(filled(ctx, kind, k, n, n_expert, seed=seed), x, ctx.from_numpy(ids.astype(np.int32)))


def run(node, rounding="none"):
    w, x, ids = node.src
    out = np.full(node.ne[::-1], np.nan, np.float32)
    grouped.mul_mat_id(np, weights_of(w), x.array(), ids.array(), out=out, rounding=rounding)
    return out


@given(st.sampled_from(["f32", "f16", "bf16", "q8_0", "q4_K"]), st.integers(1, 9), st.integers(1, 3), st.booleans(), st.integers(1, 40),
       st.booleans(), st.sampled_from(sorted(WAYS)), st.integers(0, 99))  # fmt: skip
def test_every_way_gives_the_products_by_expert(kind, n_expert, used, one_row, t, skewed, way, seed):
    with Context(2**22) as ctx, patch.multiple(grouped, **WAYS[way]):
        node = node_of(ctx, kind, 256, 5, n_expert, 1 if one_row else used, used, t, seed, skewed)
        check(node, run(node), 3e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_way_meant_is_the_way_taken(way):
    with Context(2**22) as ctx, patch.multiple(grouped, **WAYS[way]), patch.object(grouped, way, side_effect=RuntimeError("taken")):
        with pytest.raises(RuntimeError, match="taken"):
            run(node_of(ctx, "f32", 8, 5, 4, 1, 2, 16))


def test_inputs_are_rounded_as_by_ggml():
    with Context(2**22) as ctx:
        node = node_of(ctx, "q8_0", 32, 5, 4, 1, 2, 6)
        from workbench import CpuBackend, build
        from workbench.execution import compute

        compute(build(node), CpuBackend(activation_rounding="ggml"))
        np.testing.assert_allclose(run(node, "ggml"), node.array(), rtol=1e-5, atol=1e-5)
        assert np.abs(run(node) - node.array()).max() > 1e-4


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_expert_that_does_not_exist_is_found_first(way, wrong):
    with Context(2**22) as ctx, patch.multiple(grouped, **WAYS[way]):
        node = node_of(ctx, "f32", 8, 5, 4, 1, 2, 6)
        node.src[2].array()[0, 0, 3, 1] = wrong
        with pytest.raises(ParameterError, match=f"expert {wrong} at index"):
            run(node)


@pytest.mark.parametrize(("tokens", "k", "n_expert"), [(1_000_000, 2, 896), (50_000, 16, 896), (1000, 1, 70_000), (0, 2, 8)])
def test_rows_are_sorted_by_expert_in_memory_that_grows_with_them_alone(tokens, k, n_expert):
    """Up to a million tokens: places ascend within each expert, nothing is lost, and no table of rows by experts is made."""
    ids = rng(0).integers(0, n_expert, tokens * k).astype(id_type(n_expert))
    by_expert(np, ids, n_expert)
    tracemalloc.start()
    places, counts = by_expert(np, ids, n_expert)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 32 * (tokens * k + n_expert) + 10_000
    assert counts.shape == (n_expert,) and counts.sum() == tokens * k
    keys = ids[places].astype(np.int64) * max(tokens * k, 1) + places
    assert (np.diff(keys) > 0).all()
    assert np.array_equal(np.repeat(np.arange(n_expert), counts), ids[places])
