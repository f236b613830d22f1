"""Expert layers against a loop over tokens; node lists against llama.cpp: tests/parity/test_graph.py."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.cgraph import CGraph, build
from workbench.devices import CpuBackend
from workbench.errors import ParameterError, ShapeError
from workbench.moe import ExpertWeights, FeedForward, Router, build_moe_ffn, build_router


def silu(x):
    return x / (1 + np.exp(-x))


def by_hand(x, gate_inp, w, router, shared=None):
    """One token at a time, one expert at a time, in f64."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        logits = gate_inp @ row
        p = np.exp(logits - logits.max())
        p /= p.sum()
        chosen = np.argsort(-p, kind="stable")[: router.n_used]
        weights = p[chosen] / (p[chosen].sum() if router.normalise else 1) * (router.scale or 1)
        for e, weight in zip(chosen, weights, strict=True):
            gate, up, down = (m[e] for m in w)
            out[t] += weight * (down @ (silu(gate @ row) * (up @ row)))
        if shared:
            gate, up, down = shared
            out[t] += down @ (silu(gate @ row) * (up @ row))
    return out


@settings(max_examples=25)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9), st.booleans(), st.sampled_from([0.0, 1.0, 2.5]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_a_layer_is_the_weighted_sum_over_the_chosen_experts(n_expert, k, n_tokens, normalise, scale, with_shared, with_graph, seed):
    router = Router(n_expert, min(k, n_expert), normalise=normalise, scale=scale)
    rng, d, f = np.random.default_rng(seed), 8, 12
    x, gate_inp = rng.standard_normal((n_tokens, d)), rng.standard_normal((n_expert, d))
    w = [rng.standard_normal((n_expert, *s)) for s in ((f, d), (f, d), (d, f))]
    shared = [rng.standard_normal(s) for s in ((f, d), (f, d), (d, f))] if with_shared else None
    with wb.Context() as ctx:
        def leaf(a):
            return ctx.from_numpy(a.astype("f4"))

        experts = ExpertWeights(*map(leaf, w), FeedForward(*map(leaf, shared)) if shared else None)
        graph = CGraph() if with_graph else None
        out = build_moe_ffn(leaf(x), leaf(gate_inp), experts, router, graph=graph, layer=3)
        graph = graph.build_forward_expand(out) if with_graph else build(out)
        assert out.name == ("ffn_out-3" if with_shared else "ffn_moe_out-3")
        CpuBackend().compute(graph)
        np.testing.assert_allclose(out.numpy().reshape(n_tokens, d), by_hand(x, gate_inp, w, router, shared), rtol=1e-4, atol=1e-4)


def chosen_by_hand(logits, router, selection_bias):
    """Experts and weights of one token, in f64, by DeepSeek-V3's and gpt-oss's own description."""
    scores = {"softmax": lambda: np.exp(logits) / np.exp(logits).sum(), "sigmoid": lambda: 1 / (1 + np.exp(-logits)),
              "softmax_weight": lambda: logits}[router.gating]()  # fmt: skip
    by = scores + selection_bias
    if router.n_groups > 1:
        groups = by.reshape(router.n_groups, -1)
        kept = np.argsort(-np.sort(groups, -1)[:, -2:].sum(-1), kind="stable")[: router.n_groups_used]
        by = np.where(np.isin(np.arange(len(by)) // groups.shape[1], kept), by, -np.inf)
    chosen = np.argsort(-by, kind="stable")[: router.n_used]
    weights = scores[chosen]
    if router.gating == "softmax_weight":
        weights = np.exp(weights) / np.exp(weights).sum()
    return chosen, weights / (weights.sum() if router.normalise else 1) * (router.scale or 1)


@settings(max_examples=30)
@given(st.sampled_from(["softmax", "sigmoid", "softmax_weight"]), st.sampled_from([(1, 1), (4, 2), (2, 1)]), st.integers(1, 4), st.booleans(),
       st.booleans(), st.booleans(), st.integers(1, 5), st.integers(0, 99))  # fmt: skip
def test_routers_choose_and_weigh_as_described(gating, groups, k, normalise, biased, selection_biased, n_tokens, seed):
    router = Router(8, k, gating, normalise and gating != "softmax_weight", 2.5, *groups)
    rng = np.random.default_rng(seed)
    x, gate_inp, bias, selection = rng.standard_normal((n_tokens, 6)), rng.standard_normal((8, 6)), rng.standard_normal(8), rng.standard_normal(8)
    with wb.Context() as ctx:
        leafs = [ctx.from_numpy(a.astype("f4")) for a in (x, gate_inp, bias, selection)]
        routing = build_router(leafs[0], leafs[1], router, bias=leafs[2] if biased else None, selection_bias=leafs[3] if selection_biased else None)
        CpuBackend().compute(build(routing.weights, routing.experts))
        experts, weights = routing.experts.numpy().reshape(n_tokens, k), routing.weights.numpy().reshape(n_tokens, k)
    for row, got, w in zip(x, experts, weights, strict=True):
        chosen, expected = chosen_by_hand(gate_inp @ row + biased * bias, router, selection_biased * selection)
        assert got.tolist() == chosen.tolist()
        np.testing.assert_allclose(w, expected, rtol=1e-4)
        assert router.weight_sum is None or abs(w.sum() - router.weight_sum) < 1e-4


@pytest.mark.parametrize("wrong", [
    {"gating": "tanh"}, {"n_groups": 3, "n_groups_used": 1}, {"n_groups": 4, "n_groups_used": 4}, {"n_groups": 8, "n_groups_used": 2},
    {"n_groups": 4, "n_groups_used": 1, "n_used": 3}, {"n_groups": 4, "n_groups_used": 0}], ids=str)  # fmt: skip
def test_impossible_routers_are_refused(wrong):
    with pytest.raises(ParameterError):
        Router(**{"n_expert": 8, "n_used": 2} | wrong)


@pytest.mark.parametrize(("router", "total"), [
    (Router(8, 2), 1.0), (Router(8, 2, scale=2.5), 2.5), (Router(8, 2, normalise=False), None), (Router(4, 4, normalise=False), 1.0),
    (Router(4, 4, normalise=False, scale=16.0), 16.0), (Router(8, 2, scale=0.0), 1.0),
])
def test_a_router_declares_what_its_weights_sum_to(router, total):
    assert router.weight_sum == total
    with wb.Context() as ctx:
        rng = np.random.default_rng(1)
        x = ctx.from_numpy(rng.standard_normal((5, 8)).astype("f4"))
        routing = build_router(x, ctx.from_numpy(rng.standard_normal((router.n_expert, 8)).astype("f4")), router)
        CpuBackend().compute(build(routing.weights))
        sums = routing.weights.numpy().reshape(5, -1).sum(-1)
        assert np.allclose(sums, total, rtol=1e-5) if total else np.ptp(sums) > 0.01


def test_wrong_routers_are_refused():
    for wrong in ({"n_used": 3, "n_expert": 2}, {"n_used": 0, "n_expert": 2}, {"n_used": 1, "n_expert": 2, "gating": "tanh"}):
        with pytest.raises(ParameterError):
            Router(**wrong)
    with wb.Context(no_alloc=True) as ctx, pytest.raises(ShapeError, match=r"\(8, 4\)"):
        build_router(ctx.new_tensor("f32", 8, 5), ctx.new_tensor("f32", 8, 3, name="gate"), Router(4, 2))
