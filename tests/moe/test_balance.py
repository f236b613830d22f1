"""Measures of balance by hand, losses as graphs against plain NumPy, and gradients through them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgraph.exact import evaluate, slopes
from workbench import Context, Flag, Router, build, compute, moe, ops
from workbench.errors import ParameterError, ShapeError
from workbench.moe import balance

COUNTS = st.lists(st.integers(0, 50), min_size=2, max_size=12).filter(any)


def test_measures_at_their_ends():
    even, one = [5, 5, 5, 5], [20, 0, 0, 0]
    assert balance.load_entropy(even) == pytest.approx(1) and balance.load_entropy(one) == 0
    assert balance.variation(even) == 0 and balance.variation(one) == pytest.approx(np.sqrt(3))
    assert balance.max_violation(even) == 0 and balance.max_violation(one) == 3
    assert balance.dropped_fraction(one, 5) == 0.75 and balance.dropped_fraction(even, 5) == 0
    assert balance.max_violation([even, one]).tolist() == [0, 3]
    assert balance.counts_of([[2, 0], [2, 1]], 4).tolist() == [1, 1, 2, 0]
    assert balance.load_entropy([7]) == 1 and balance.variation([7]) == balance.max_violation([7]) == 0  # one expert is an even load
    assert balance.counts_of([], 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("measure", [balance.load_entropy, balance.variation, balance.max_violation, lambda c: balance.dropped_fraction(c, 1),
                                     lambda c: balance.bias_step(c, 0.1)])  # fmt: skip
@pytest.mark.parametrize("counts", [[0, 0], [[1, 2], [0, 0]], [], 3, [-1, 2], [np.nan, 1], [np.inf, 1]], ids=str)
def test_counts_that_are_none_are_refused(measure, counts):
    with pytest.raises(ParameterError, match="counts"):
        measure(counts)


def test_ids_rates_and_capacities_that_are_none_are_refused():
    for ids in ([0, 4], [-1], [0.5], [True]):
        with pytest.raises(ParameterError, match="expert ids"):
            balance.counts_of(ids, 4)
    for wrong in (-1, np.nan):
        with pytest.raises(ParameterError):
            balance.dropped_fraction([1, 2], wrong)
        with pytest.raises(ParameterError):
            balance.bias_step([1, 2], wrong)


@given(counts=COUNTS, factor=st.integers(2, 9))
def test_measures_do_not_depend_on_how_many_tokens_there_are(counts, factor):
    many = [factor * c for c in counts]
    for measure in (balance.load_entropy, balance.variation, balance.max_violation):
        assert measure(many) == pytest.approx(measure(counts))
        assert measure(counts[::-1]) == pytest.approx(measure(counts))
    assert 0 <= balance.load_entropy(counts) <= 1 + 1e-12 and 0 <= balance.max_violation(counts) <= len(counts) - 1 + 1e-9


def test_dropped_fraction_is_what_a_router_with_a_capacity_drops():
    router = Router(4, 2, capacity_factor=1.0)
    with Context() as ctx:
        x = ctx.from_numpy(np.random.default_rng(0).standard_normal((40, 6)).astype("f4"))
        r = moe.build_router(x, ctx.from_numpy(np.random.default_rng(1).standard_normal((4, 6)).astype("f4")), router)
        compute(build(r.weights, r.experts))
        counts = balance.counts_of(r.experts.numpy(), 4)
        assert 1 - r.kept.numpy().mean() == pytest.approx(balance.dropped_fraction(counts, router.capacity(40))) and counts.max() > 20


# ---- losses


def routed(ctx, n_expert, k, t, seed, gating="softmax", param=False):
    rng = np.random.default_rng(seed)
    x = ctx.from_numpy(rng.standard_normal((t, 5)).astype("f4"))
    w = ctx.from_numpy(rng.standard_normal((n_expert, 5)).astype("f4") * 2, name="w")
    router = Router(n_expert, k, gating)
    return router, w.mark(Flag.PARAM) if param else w, lambda: moe.build_router(x, w, router)


def plain(logits, ids, gating):
    n_expert = logits.shape[-1]
    e = np.exp(logits - logits.max(-1, keepdims=True))
    probs = e / e.sum(-1, keepdims=True)
    if gating == "sigmoid":
        s = 1 / (1 + np.exp(-logits))
        probs = s / s.sum(-1, keepdims=True)
    share = np.bincount(ids.ravel(), minlength=n_expert) / ids.size
    return n_expert * (share * probs.mean(0)).sum(), share


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax_weight"])
@given(n_expert=st.integers(2, 7), t=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_load_balancing_loss_is_its_formula(gating, n_expert, t, seed, data):
    k = data.draw(st.integers(1, n_expert))
    with Context() as ctx:
        router, _, make = routed(ctx, n_expert, k, t, seed, gating)
        r = make()
        load, loss = balance.build_load(r, router), balance.load_balancing_loss(r, router)
        compute(build(load, loss, r.logits, r.experts))
        want, share = plain(r.logits.numpy().reshape(t, n_expert).astype(float), r.experts.numpy(), gating)
        np.testing.assert_allclose(load.numpy().ravel(), share, atol=1e-6)
        assert loss.numpy().item() == pytest.approx(want, rel=1e-5)


@given(n_expert=st.integers(1, 7), t=st.integers(1, 20), seed=st.integers(0, 99), size=st.sampled_from([1.0, 50.0]))
def test_z_loss_is_its_formula(n_expert, t, seed, size):
    with Context() as ctx:
        x = np.random.default_rng(seed).standard_normal((t, n_expert)).astype("f4") * size
        loss = balance.z_loss(ctx.from_numpy(x))
        compute(build(loss))
        big = x.max(-1).astype(float)
        want = ((big + np.log(np.exp(x - big[:, None]).sum(-1))) ** 2).mean()
        assert loss.numpy().item() == pytest.approx(want, rel=2e-5)


@pytest.mark.parametrize("gating", ["softmax", "sigmoid", "softmax_weight"])
@pytest.mark.parametrize("k", [1, 2])
def test_gradients_of_both_losses(gating, k):
    with Context() as ctx:
        router, w, make = routed(ctx, 4, k, 6, 3, gating, param=True)
        r = make()
        total = ops.add(balance.load_balancing_loss(r, router), ops.scale(balance.z_loss(r.logits), 0.1)).mark(Flag.LOSS)
        graph = build(total)
        forward = [*graph.nodes]
        graph.build_backward_expand()
        want = slopes(forward, total, w)
        assert np.abs(evaluate(graph.nodes)[graph.grad(w)] - want).max() < 1e-6 * (1 + np.abs(want).max())
        compute(graph)
        assert np.abs(graph.grad(w).array() - want).max() < 1e-3 * (1 + np.abs(want).max())


def test_no_gradient_passes_the_count():
    with Context() as ctx:
        router, w, make = routed(ctx, 4, 2, 6, 0, param=True)
        r = make()
        loss = ops.sum(ops.mul(balance.build_load(r, router), ctx.from_numpy(np.arange(4, dtype="f4")[:, None]))).mark(Flag.LOSS)
        with pytest.raises(Exception, match="no parameter of the graph has a part in the loss"):
            build(loss, r.weights).build_backward_expand()


@given(counts=COUNTS, rate=st.floats(1e-4, 0.1))
def test_bias_goes_up_where_the_load_is_low(counts, rate):
    step, mean = balance.bias_step(counts, rate), np.mean(counts)
    assert step.dtype == np.float32
    for c, s in zip(counts, step):
        assert s == pytest.approx(rate if c < mean else -rate if c > mean else 0, rel=1e-6)


def test_scores_that_are_all_zero_have_a_loss_and_a_slope():
    """Sigmoids of -200 are 0 in f32, and so is their sum: a share of nothing is 0, not NaN."""
    router = Router(4, 2, "sigmoid")
    with Context() as ctx:
        x = ctx.from_numpy(np.array([[-200.0] * 4, [1, 0, 2, -1]], "f4")).mark(Flag.PARAM)
        r = moe.build_router(x, ctx.from_numpy(np.eye(4, dtype="f4")), router)
        loss = ops.cont(balance.load_balancing_loss(r, router)).mark(Flag.LOSS)
        graph = build(loss).build_backward_expand()
        graph.reset()
        compute(graph)
        p = 1 / (1 + np.exp(-np.array([1.0, 0, 2, -1])))
        assert loss.numpy().item() == pytest.approx(4 * (0.5 * p[0] + 0.25 * p[1] + 0.25 * p[2]) / p.sum() / 2, rel=1e-5)
        slope = graph.grad(x).numpy()
        assert np.isfinite(slope).all() and (slope[0] == 0).all() and slope[1].any()


def test_losses_of_no_tokens_are_refused():
    with Context() as ctx:
        router = Router(4, 2)
        r = moe.build_router(ctx.new_tensor("f32", 6, 0), ctx.new_tensor("f32", 6, 4), router)
        for loss in (lambda: balance.load_balancing_loss(r, router), lambda: balance.z_loss(r.logits)):
            with pytest.raises(ShapeError, match="of no tokens"):
                loss()
