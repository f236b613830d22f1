"""Every router as a graph against its definition in plain NumPy; what equal, missing and absurd scores do; capacity and dropping."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.cgraph import CGraph, build
from workbench.devices import CpuBackend
from workbench.errors import ParameterError, ShapeError
from workbench.moe import ExpertWeights, Router, build_moe_ffn, build_router, presets, reference

SMALL = {
    "dense": presets.dense(6), "switch": presets.switch(6, 1.0), "switch unlimited": presets.switch(6, None), "gshard": presets.gshard(6, 1.0),
    "mixtral": presets.mixtral(6, 2), "olmoe": presets.olmoe(8, 3), "qwen2_moe": presets.qwen2_moe(6, 4), "qwen3_moe": presets.qwen3_moe(8, 3),
    "deepseek_moe": presets.deepseek_moe(9, 4), "deepseek_v2": presets.deepseek_v2(12, 3, 4, 2), "deepseek_v3": presets.deepseek_v3(12, 3, 4, 2),
    "gpt_oss": presets.gpt_oss(7, 3),
}  # fmt: skip


def routed(logits, router, selection_bias=None):
    """Experts, weights and kept choices that the graph computes from these logits (the router's matrix is the identity)."""
    logits = np.asarray(logits, np.float32)
    with wb.Context() as ctx:
        x = ctx.from_numpy(logits) if len(logits) else ctx.new_tensor("f32", router.n_expert, 0)
        gate = ctx.from_numpy(np.eye(router.n_expert, dtype="f4"))
        bias = None if selection_bias is None else ctx.from_numpy(np.asarray(selection_bias, "f4"))
        if not np.isfinite(logits).all():  # a product would spread NaN and inf over all experts
            x, spread = ctx.from_numpy(np.zeros_like(logits)), ctx.from_numpy(logits[0])
            assert len(logits) == 1
        else:
            spread = None
        r = build_router(x, gate, router, bias=spread, selection_bias=bias)
        CpuBackend().compute(build(r.weights))
        kept = r.kept.numpy().reshape(-1, router.n_used).copy() if r.kept is not None else None
        return r.experts.numpy().reshape(-1, router.n_used).copy(), r.weights.numpy().reshape(-1, router.n_used).copy(), kept


def test_every_preset_is_tried():
    assert {name.split()[0] for name in SMALL} == set(presets.PRESETS)
    for make in presets.PRESETS.values():
        assert isinstance(make(8) if make is presets.dense else make(), Router)


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=20)
@given(n_tokens=st.integers(1, 20), seed=st.integers(0, 999), biased=st.booleans())
def test_the_graph_is_the_definition(name, n_tokens, seed, biased):
    router, rng = SMALL[name], np.random.default_rng(seed)
    logits = rng.standard_normal((n_tokens, router.n_expert)).astype("f4") * 2
    bias = rng.standard_normal(router.n_expert).astype("f4") if biased else None
    experts, weights, _ = routed(logits, router, bias)
    wanted, expected = reference.route(logits, router, 0.0 if bias is None else bias)
    np.testing.assert_array_equal(experts, wanted)
    np.testing.assert_allclose(weights, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "total"), [
    ("dense", 1.0), ("mixtral", 1.0), ("qwen3_moe", 1.0), ("gpt_oss", 1.0), ("deepseek_v3", 2.5), ("switch", None), ("switch unlimited", None),
    ("gshard", None), ("olmoe", None), ("qwen2_moe", None), ("deepseek_moe", None), ("deepseek_v2", None)])  # fmt: skip
def test_the_declared_sum_is_the_sum(name, total):
    router = SMALL[name]
    assert router.weight_sum == total
    logits = np.random.default_rng(3).standard_normal((50, router.n_expert))
    sums = routed(logits, router)[1].sum(-1)
    if total is None:
        assert np.ptp(sums) > 0.01
    else:
        np.testing.assert_allclose(sums, total, rtol=1e-6)


def test_softmax_of_the_chosen_is_the_renormalised_softmax():
    logits = np.random.default_rng(0).standard_normal((40, 8)) * 3
    before, after = routed(logits, presets.mixtral(8, 3)), routed(logits, presets.gpt_oss(8, 3))
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_allclose(before[1], after[1], rtol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_of_equal_scores_the_lower_number_wins(name):
    router = SMALL[name]
    experts, _, _ = routed(np.zeros((3, router.n_expert)), router)
    assert experts.tolist() == [list(range(router.n_used))] * 3
    logits = np.array([[0, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 0][: router.n_expert]])
    experts, _, _ = routed(logits, router)
    np.testing.assert_array_equal(experts, reference.route(logits, router)[0])


NAN, INF = np.nan, np.inf
MIXTRAL, SIGMOID, OSS, GROUPS = Router(4, 2), Router(4, 2, "sigmoid"), presets.gpt_oss(4, 2), Router(4, 2, "sigmoid", True, 1.0, 2, 1)


@pytest.mark.parametrize(("router", "logits", "experts", "weights"), [
    (MIXTRAL, [-INF] * 4, [0, 1], [NAN, NAN]), (MIXTRAL, [NAN, 1, 2, 3], [0, 1], [NAN, NAN]), (MIXTRAL, [1, INF, 2, 3], [0, 1], [NAN, NAN]),
    (MIXTRAL, [-INF, 1, -INF, 1], [1, 3], [0.5, 0.5]), (MIXTRAL, [-INF, 5, -INF, -INF], [1, 0], [1, 0]),
    (SIGMOID, [-INF] * 4, [0, 1], [0, 0]), (SIGMOID, [NAN, 0, -INF, 0], [1, 3], [0.5, 0.5]), (SIGMOID, [NAN] * 4, [0, 1], [NAN, NAN]),
    (OSS, [-INF] * 4, [0, 1], [NAN, NAN]), (OSS, [NAN, 1, -INF, 1], [1, 3], [0.5, 0.5]),
    (GROUPS, [NAN, 9, 0, 0], [2, 3], [0.5, 0.5]), (GROUPS, [-INF] * 4, [0, 1], [0, 0])], ids=str)  # fmt: skip
def test_absurd_logits_have_a_defined_result(router, logits, experts, weights):
    got, w, _ = routed([logits], router)
    assert got.tolist() == [experts]
    np.testing.assert_array_equal(w, [weights])
    wanted, expected = reference.weigh(np.array(logits, float), router)
    assert wanted.tolist() == experts
    np.testing.assert_array_equal(expected, weights)


def test_a_token_of_nan_leaves_the_others_alone():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 6)).astype("f4")
    arrays = [rng.standard_normal(s).astype("f4") for s in ((4, 6), (4, 3, 6), (4, 3, 6), (4, 6, 3))]
    results = []
    for bad in (False, True):
        with wb.Context() as ctx:
            rows = x.copy()
            rows[2] = np.nan if bad else rows[2]
            gate, *w = map(ctx.from_numpy, arrays)
            out = build_moe_ffn(ctx.from_numpy(rows), gate, ExpertWeights(*w), MIXTRAL)
            CpuBackend().compute(build(out))
            results.append(out.numpy().copy())
    assert np.isnan(results[1][2]).all()
    others = [0, 1, 3, 4]
    np.testing.assert_allclose(results[1][others], results[0][others], rtol=1e-5)


@pytest.mark.parametrize("name", SMALL)
def test_no_tokens_are_no_rows(name):
    router = SMALL[name]
    experts, weights, _ = routed(np.zeros((0, router.n_expert)), router)
    assert experts.shape == weights.shape == (0, router.n_used)
    assert reference.route(np.zeros((0, router.n_expert)), router)[0].shape == (0, router.n_used)
    with wb.Context() as ctx:
        w = [ctx.from_numpy(np.ones(s, "f4")) for s in ((router.n_expert, 3, 8), (router.n_expert, 3, 8), (router.n_expert, 8, 3))]
        graph = CGraph()
        out = build_moe_ffn(ctx.new_tensor("f32", 8, 0), ctx.from_numpy(np.ones((router.n_expert, 8), "f4")), ExpertWeights(*w), router,
                            graph=graph)  # fmt: skip
        CpuBackend().compute(graph.build_forward_expand(out))
        assert out.numpy().shape == (0, 8)


# ---- groups

def test_groups_are_scored_by_their_best_or_by_their_two_best():
    logits = np.array([[5.0, -5, -5, 3, 3, -5]])                   # group 0 has the best expert, group 1 the best pair
    one, two = (Router(6, 1, "sigmoid", True, 1.0, 2, 1, best) for best in (1, 2))
    assert routed(logits, one)[0].tolist() == [[0]] and routed(logits, two)[0].tolist() == [[3]]


def test_masked_experts_are_never_chosen_although_scores_are_negative():
    """0 instead of -inf, as some versions have it, would prefer a masked expert to a chosen group's negative score."""
    router = presets.deepseek_v3(8, 3, 4, 2)
    bias = np.full(8, -2.0)                                        # sigmoid + bias lies between -2 and -1
    logits = np.random.default_rng(1).standard_normal((30, 8))
    experts, weights, _ = routed(logits, router, bias)
    biased = reference.sigmoid(logits) + bias
    for row, chosen, w, scores in zip(biased, experts, weights, reference.sigmoid(logits), strict=True):
        groups = set(np.argsort(-row.reshape(4, 2).sum(-1))[:2].tolist())
        assert {int(e) // 2 for e in chosen} <= groups
        np.testing.assert_allclose(w, 2.5 * scores[chosen] / scores[chosen].sum(), rtol=1e-5)   # of the unbiased scores
        zeros = np.where(np.isin(np.arange(8) // 2, list(groups)), row, 0.0)
        assert set(np.argsort(-zeros)[:3].tolist()) != set(chosen.tolist())


# ---- capacity

@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 7), st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.25, 2.0, 100.0]), st.integers(0, 99))
def test_dropping_is_the_definition_and_spares_no_expert(n_tokens, n_expert, k, factor, seed):
    k = min(k, n_expert)
    router = Router(n_expert, k, capacity_factor=factor)
    logits = np.random.default_rng(seed).standard_normal((n_tokens, n_expert))
    logits[:, 0] += 2                                              # one busy expert
    experts, weights, kept = routed(logits, router)
    free = routed(logits, Router(n_expert, k))[1]
    capacity = router.capacity(n_tokens)
    np.testing.assert_array_equal(kept, reference.keep(experts, n_expert, capacity))
    np.testing.assert_array_equal(weights, free * kept)
    loads = np.bincount(experts[kept == 1], minlength=n_expert)
    wanted = np.bincount(experts.ravel(), minlength=n_expert)
    np.testing.assert_array_equal(loads, np.minimum(wanted, capacity))


def test_first_choices_go_before_second_ones():
    logits = np.array([[3.0, 2, 0], [2.0, 3, 0], [0.0, 3, 2]])     # first: 0 1 1, second: 1 0 2
    router = Router(3, 2, capacity_factor=0.5)                     # one place each
    experts, _, kept = routed(logits, router)
    assert router.capacity(3) == 1 and experts.tolist() == [[0, 1], [1, 0], [1, 2]]
    assert kept.tolist() == [[1, 0], [1, 0], [0, 1]]


@pytest.mark.parametrize(("factor", "tokens", "capacity"), [
    (None, 10, None), (0.0, 10, 0), (1.0, 0, 0), (1.0, 8, 2), (1.0, 9, 3), (1.1, 40, 11), (1.25, 32, 10), (0.001, 8, 1)])
def test_capacity_is_rounded_up(factor, tokens, capacity):
    assert Router(4, 1, capacity_factor=factor).capacity(tokens) == capacity
    assert Router(8, 2, capacity_factor=factor).capacity(tokens) == capacity


@pytest.mark.parametrize("factor", [1e9, 1e300, 1.7e308])
def test_a_huge_capacity_drops_nothing(factor):
    logits = np.random.default_rng(0).standard_normal((40, 8))
    for k in (1, 2, 8):
        plain, large = (routed(logits, Router(8, k, capacity_factor=f))[:2] for f in (None, factor))
        assert all((a == b).all() for a, b in zip(plain, large, strict=True))
    with pytest.raises(ParameterError, match="-1 tokens"):
        Router(8, 2, capacity_factor=factor).capacity(-1)


def test_shapes_that_would_be_repeated_or_reshaped_are_refused():
    with wb.Context(no_alloc=True) as ctx:
        x, gate, deep = ctx.new_tensor("f32", 6, 5), ctx.new_tensor("f32", 6, 8), ctx.new_tensor("f32", 6, 5, 2)
        for n in (1, 2, 4):  # each divides 8
            for what in ("bias", "selection_bias"):
                with pytest.raises(ShapeError, match="a number for each expert"):
                    build_router(x, gate, Router(8, 2), **{what: ctx.new_tensor("f32", n)})
        with pytest.raises(ShapeError, match="one row per token"):
            build_router(deep, gate, Router(8, 2))
        wide = [ctx.new_tensor("f32", *ne) for ne in ((6, 3, 9), (6, 3, 9), (3, 6, 9))]
        with pytest.raises(ShapeError, match="9 experts"):
            build_moe_ffn(x, gate, ExpertWeights(*wide), Router(8, 2))


def test_with_no_capacity_the_layer_gives_nothing_and_the_residual_passes():
    rng = np.random.default_rng(0)
    with wb.Context() as ctx:
        x, gate, *w = (ctx.from_numpy(rng.standard_normal(s).astype("f4")) for s in ((9, 6), (4, 6), (4, 3, 6), (4, 3, 6), (4, 6, 3)))
        out = wb.ops.add(build_moe_ffn(x, gate, ExpertWeights(*w), presets.switch(4, 0.0)), x)
        CpuBackend().compute(build(out))
        np.testing.assert_array_equal(out.numpy(), x.numpy())


@pytest.mark.parametrize("wrong", [{"capacity_factor": -1.0}, {"capacity_factor": NAN}, {"capacity_factor": INF}, {"scale": NAN}, {"scale": INF},
                                   {"n_groups": 4, "n_groups_used": 2, "group_best": 0}, {"n_groups": 4, "n_groups_used": 2, "group_best": 3},
                                   {"n_used": 9}, {"n_groups": 3, "n_groups_used": 2}, {"n_groups": 0}, {"n_groups": -2},
                                   {"n_groups_used": 2}, {"n_used": 2.0}, {"n_expert": 8.5}, {"n_used": True}, {"scale": "2"}, {"scale": None},
                                   {"capacity_factor": "1"}, {"capacity_factor": True}, {"gating": ["softmax"]}], ids=str)  # fmt: skip
def test_impossible_routers_are_refused(wrong):
    with pytest.raises(ParameterError):
        Router(**{"n_expert": 8, "n_used": 2} | wrong)
