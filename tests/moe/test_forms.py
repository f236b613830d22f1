"""The forms of an expert layer: dense, sparse and shared; two matrices or three; biases; other storage types."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from workbench.cgraph import build
from workbench.devices import CpuBackend
from workbench.errors import ParameterError, ShapeError
from workbench.moe import (
    ExpertWeights,
    FeedForward,
    Router,
    build_all_experts,
    build_dense_moe,
    build_experts,
    build_ffn,
    build_moe_ffn,
    build_router,
    build_shared,
    presets,
    reference,
)

D, F = 32, 64
FORMS = st.sampled_from([("silu", True), ("relu", True), ("gelu", True), ("swiglu_oai", True), ("silu", False), ("relu", False), ("gelu", False)])


class Layer:
    """Random matrices of a layer, as arrays (`a`) and as leafs of a context (`weights`)."""

    def __init__(self, ctx, n_expert, activation="silu", gated=True, biased=False, shared=False, share=False, kind="f32", seed=0):
        self.rng, self.ctx, self.kind = np.random.default_rng(seed), ctx, kind
        self.a = {"up": (n_expert, F, D), "down": (n_expert, D, F)} | ({"gate": (n_expert, F, D)} if gated else {})
        self.a = {k: self.draw(*s) for k, s in self.a.items()}
        self.biases = [self.draw(n_expert, n) if gated or i else None for i, n in enumerate((F, F, D))] if biased else None
        self.router, self.activation = self.draw(n_expert, D), activation
        common = FeedForward(*(self.leaf(self.draw(*s)) for s in ((F, D), (F, D), (D, F))), activation) if shared else None
        self.weights = ExpertWeights(self.leaf(self.a.get("gate")), self.leaf(self.a["up"]), self.leaf(self.a["down"]), common,
                                     self.leaf(self.draw(D)) if share else None,
                                     tuple(None if b is None else ctx.from_numpy(b) for b in self.biases) if biased else None, activation)

    def draw(self, *shape):
        return (self.rng.standard_normal(shape) / np.sqrt(shape[-1])).astype("f4")

    def leaf(self, array):
        if array is None:
            return None
        t = self.ctx.from_numpy(array)
        if array.ndim == 3 and self.kind != "f32":
            stored = self.ctx.new_tensor(self.kind, *t.ne).set(array)
            array[...] = stored.numpy()                            # what is left of them in that type
            return stored
        return t

    def expected(self, x, experts, weights):
        biases = None if self.biases is None else [np.zeros((len(self.a["up"]), 1)) if b is None else b for b in self.biases]
        return reference.moe(x, experts, weights, self.a.get("gate"), self.a["up"], self.a["down"], self.activation, biases)


def computed(out):
    CpuBackend().compute(build(out))
    return out.numpy().copy()


@settings(max_examples=40)
@given(FORMS, st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.booleans(), st.booleans(), st.integers(0, 99))
def test_every_form_is_the_definition(form, n_expert, k, n_tokens, biased, dense, seed):
    with wb.Context(2**23) as ctx:
        layer = Layer(ctx, n_expert, *form, biased=biased, seed=seed)
        router = presets.dense(n_expert) if dense else Router(n_expert, min(k, n_expert))
        rows = layer.draw(n_tokens, D) * 4
        x = ctx.from_numpy(rows) if n_tokens else ctx.new_tensor("f32", D, 0)
        gate = ctx.from_numpy(layer.router)
        out = build_dense_moe(x, gate, layer.weights) if dense else build_moe_ffn(x, gate, layer.weights, router)
        expected = layer.expected(rows, *reference.route(rows @ layer.router.T, router))
        np.testing.assert_allclose(computed(out).reshape(n_tokens, D), expected, rtol=1e-4, atol=3e-5 if form[0] != "gelu" else 2e-3)


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_0"])
def test_dense_is_top_k_with_all_experts(kind):
    with wb.Context(2**23) as ctx:
        layer = Layer(ctx, 6, kind=kind)
        x, gate = ctx.from_numpy(layer.draw(20, D) * 3), ctx.from_numpy(layer.router)
        dense, sorted_ = build_dense_moe(x, gate, layer.weights), build_moe_ffn(x, gate, layer.weights, presets.dense(6))
        np.testing.assert_allclose(computed(dense), computed(sorted_), rtol=1e-5, atol=1e-5)
        ops = [t.op for t in build(dense).nodes]
        assert "MUL_MAT_ID" not in ops and "ARGSORT" not in ops and ops.count("MUL_MAT") == 4


@pytest.mark.parametrize("form", [("silu", True), ("relu", False), ("swiglu_oai", True)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_dense_with_a_gate_of_one_is_sparse(form, shared):
    """A gate that is exactly 1 for one expert and 0 for the rest: what the others compute is multiplied by zero."""
    with wb.Context(2**23) as ctx:
        layer = Layer(ctx, 5, *form, biased=True, shared=shared)
        rows = layer.draw(30, D) * 3
        x, picks = ctx.from_numpy(rows), layer.rng.integers(0, 5, 30)
        probs = ctx.from_numpy(np.eye(5, dtype="f4")[picks])
        dense = build_all_experts(x, layer.weights, probs)
        routing = build_router(probs, ctx.from_numpy(np.eye(5, dtype="f4")), Router(5, 1))       # k = 1, renormalised: weight 1
        sparse = build_experts(x, layer.weights, routing)
        np.testing.assert_allclose(computed(dense), computed(sparse), rtol=1e-5, atol=1e-5)
        assert np.array_equal(routing.experts.numpy().ravel(), picks)


@pytest.mark.parametrize("share", [False, True])
def test_shared_without_routed_is_a_plain_network(share):
    """Routed experts whose last matrix is zero add nothing; what is left has the bits of `build_ffn`, weighted where there is a gate."""
    with wb.Context(2**23) as ctx:
        layer = Layer(ctx, 4, shared=True, share=share)
        layer.weights.down.array()[...] = 0
        rows = layer.draw(17, D)
        x, gate = ctx.from_numpy(rows), ctx.from_numpy(layer.router)
        whole = computed(build_moe_ffn(x, gate, layer.weights, Router(4, 2)))
        plain = computed(build_ffn(x, layer.weights.shared))
        assert np.array_equal(whole, computed(build_shared(x, layer.weights)))
        if share:
            plain = plain * reference.sigmoid(rows @ layer.weights.shared_gate.numpy())[:, None]
            np.testing.assert_allclose(whole, plain, rtol=1e-5, atol=1e-6)
        else:
            assert np.array_equal(whole, plain)


def test_a_shared_expert_is_added_to_the_routed_ones_in_both_forms():
    with wb.Context(2**23) as ctx:
        layer = Layer(ctx, 4, shared=True)
        x, gate = ctx.from_numpy(layer.draw(9, D)), ctx.from_numpy(layer.router)
        alone = ExpertWeights(layer.weights.gate, layer.weights.up, layer.weights.down)
        shared = computed(build_shared(x, layer.weights))
        for form in (build_dense_moe, lambda *a: build_moe_ffn(*a, Router(4, 2))):
            np.testing.assert_allclose(computed(form(x, gate, layer.weights)), computed(form(x, gate, alone)) + shared, rtol=1e-5, atol=1e-6)


def test_forms_that_cannot_be_are_refused():
    with wb.Context(2**22) as ctx:
        x = ctx.from_numpy(np.ones((3, D), "f4"))
        for layer, what in ((Layer(ctx, 2, "swiglu_oai", gated=False), "without a gate"), (Layer(ctx, 2, "tanh"), "'tanh'")):
            with pytest.raises(ParameterError, match=what):
                build_dense_moe(x, ctx.from_numpy(layer.router), layer.weights)
        layer = Layer(ctx, 2)
        with pytest.raises(ShapeError, match="2 experts and 3 tokens"):
            build_all_experts(x, layer.weights, ctx.from_numpy(np.ones((3, 4), "f4")))
        with pytest.raises(ShapeError):
            build_moe_ffn(ctx.from_numpy(np.ones((3, D + 1), "f4")), ctx.from_numpy(layer.router), layer.weights, Router(2, 1))
