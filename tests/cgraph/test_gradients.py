"""Backward graphs against finite differences, with the errors and the promises around them."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cgraph.exact import evaluate, slopes
from workbench import moe
from workbench.cgraph import CGraph, backward_expansion, build, build_backward_expand, from_json, to_json
from workbench.cgraph.graph import graph_nbytes
from workbench.errors import ContextFull, DTypeError, GraphError, GraphFull, ShapeError
from workbench.execution import compute
from workbench.tensors import OPS, Context, Flag, ops

SEEDS = st.integers(0, 999)


class Maker:
    """Leafs of random values in one context; parameters are remembered."""

    def __init__(self, seed=0, mem_size=2**22, no_alloc=False):
        self.ctx, self.rng, self.params = Context(mem_size, no_alloc=no_alloc), np.random.default_rng(seed), []

    def values(self, *ne, low=-2.0, high=2.0):
        return self.rng.uniform(low, high, ne[::-1]).astype("f4")

    def leaf(self, *ne, **kw):
        return self.ctx.from_numpy(self.values(*ne, **kw))

    def param(self, *ne, **kw):
        t = self.leaf(*ne, **kw).mark(Flag.PARAM).named(f"p{len(self.params)}")
        self.params.append(t)
        return t

    def ids(self, used, t, n):
        return self.ctx.from_numpy(np.stack([self.rng.permutation(n)[:used] for _ in range(t)]).astype("i4"))

    def weighted(self, node):
        """A sum in which each element of `node` has another share."""
        return ops.sum(ops.mul(node if node.is_contiguous else ops.cont(node), self.leaf(*node.ne)))

    def loss(self, node):
        return self.weighted(node).mark(Flag.LOSS)


def judge(m, loss, tolerance=2e-3):
    """Gradients as executed and as defined, against finite differences."""
    graph = build(loss)
    forward = [*graph.nodes]
    graph.build_backward_expand()
    exact = evaluate(graph.nodes)
    compute(graph)
    for p in m.params:
        if (grad := graph.grad(p)) is None:
            assert np.abs(slopes(forward, loss, p)).max() < 1e-9, p
            continue
        assert grad.ne == p.ne
        want = slopes(forward, loss, p)
        scale = 1e-3 + np.abs(want).max()
        assert np.abs(exact[grad] - want).max() <= 1e-6 * scale + 1e-8, (p, exact[grad], want)
        assert np.abs(grad.array() - want).max() <= tolerance * scale, (p, grad.array(), want)
    return graph


# ---- every op that has a rule

POSITIVE = {"low": 0.5, "high": 2.0}
ONE = {
    "DUP": lambda m, a: ops.dup(a()),
    "ADD": lambda m, a: ops.add(a(), a()),
    "SUB": lambda m, a: ops.sub(a(), a()),
    "MUL": lambda m, a: ops.mul(a(), a()),
    "DIV": lambda m, a: ops.div(a(), a(**POSITIVE)),
    "SQR": lambda m, a: ops.sqr(a()),
    "SQRT": lambda m, a: ops.sqrt(a(**POSITIVE)),
    "LOG": lambda m, a: ops.log(a(**POSITIVE)),
    "SCALE": lambda m, a: ops.scale(a(), -1.7, 0.3),
    "CLAMP": lambda m, a: ops.clamp(a(), -1.0, 0.5),
    "FILL": lambda m, a: ops.mul(ops.fill(x := a(), 2.0), x),
    "ABS": lambda m, a: ops.abs(a()),
    "NEG": lambda m, a: ops.neg(a()),
    "STEP": lambda m, a: ops.mul(ops.step(x := a()), x),
    "TANH": lambda m, a: ops.tanh(a()),
    "RELU": lambda m, a: ops.relu(a()),
    "SIGMOID": lambda m, a: ops.sigmoid(a()),
    "GELU": lambda m, a: ops.gelu(a()),
    "GELU_QUICK": lambda m, a: ops.gelu_quick(a()),
    "SILU": lambda m, a: ops.silu(a()),
    "EXP": lambda m, a: ops.exp(a()),
    "SWIGLU": lambda m, a: ops.swiglu_split(a(), a()),
    "GEGLU": lambda m, a: ops.geglu_split(a(), a()),
    "REGLU": lambda m, a: ops.reglu_split(a(), a()),
    "SWIGLU_OAI": lambda m, a: ops.swiglu_oai(a(), a(), 1.702, 1.0),
    "SUM": lambda m, a: ops.sum(a()),
    "MEAN": lambda m, a: ops.mean(a()),
    "SUM_ROWS": lambda m, a: ops.sum_rows(a()),
    "REPEAT": lambda m, a: ops.repeat(x := a(), tuple(2 * n for n in x.ne)),
    "REPEAT_BACK": lambda m, a: ops.repeat_back(x := a(), (x.ne[0], 1, 1, x.ne[3])),
    "CONCAT": lambda m, a: ops.concat(a(), a(), int(m.rng.integers(4))),
    "RMS_NORM": lambda m, a: ops.rms_norm(a(), 1e-3),
    "SOFT_MAX": lambda m, a: ops.soft_max_ext(x := a(), m.leaf(x.ne[0], x.ne[1]), 0.7),
    "CONT": lambda m, a: ops.cont(ops.permute(a(), 2, 0, 1, 3)),
    "CPY": lambda m, a: ops.cpy(ops.sqr(x := a()), m.leaf(*x.ne)),
    "RESHAPE": lambda m, a: ops.reshape(x := a(), x.n_elements),
    "PERMUTE": lambda m, a: ops.permute(a(), *m.rng.permutation(4).tolist()),
    "TRANSPOSE": lambda m, a: ops.transpose(a()),
    "VIEW": lambda m, a: ops.slice_view(x := a(), tuple(slice(int(m.rng.integers(n)), None, int(m.rng.integers(1, 3))) for n in x.shape[:-1])),
}  # fmt: skip
OTHERS = {"ADD_ID", "CROSS_ENTROPY_LOSS", "MUL_MAT", "MUL_MAT_ID", "GET_ROWS"}


def test_every_rule_is_tried():
    assert {*ONE, *OTHERS} == {name for name, s in OPS.items() if s.backward is not None}


@pytest.mark.parametrize("name", ONE)
@settings(max_examples=12)
@given(ne=st.tuples(*[st.integers(1, n) for n in (5, 4, 2, 2)]), seed=SEEDS)
def test_one_op(name, ne, seed):
    m = Maker(seed)
    node = ONE[name](m, lambda **kw: m.param(*ne, **kw))
    judge(m, m.loss(node))


@pytest.mark.parametrize("name", ["ADD", "SUB", "MUL", "DIV"])
@settings(max_examples=12)
@given(small=st.tuples(*[st.integers(1, n) for n in (3, 2, 2, 2)]), times=st.tuples(*[st.integers(1, 3)] * 4), seed=SEEDS)
def test_repeated_operands(name, small, times, seed):
    m = Maker(seed)
    a, b = m.param(*(n * r for n, r in zip(small, times))), m.param(*small, **POSITIVE)
    judge(m, m.loss(getattr(ops, name.lower())(a, b)))


@pytest.mark.parametrize("name", ["SWIGLU", "GEGLU", "REGLU", "SWIGLU_OAI"])
@pytest.mark.parametrize("swapped", [False, True])
def test_both_halves_in_one_row(name, swapped):
    m = Maker(3)
    judge(m, m.loss(ops.glu(name, m.param(6, 3, 2), swapped=swapped)))


@settings(max_examples=25)
@given(k=st.integers(1, 4), n=st.integers(1, 4), t=st.integers(1, 3), w2=st.integers(1, 2), w3=st.integers(1, 2), r2=st.integers(1, 3),
       r3=st.integers(1, 2), seed=SEEDS)  # fmt: skip
def test_mul_mat(k, n, t, w2, w3, r2, r3, seed):
    m = Maker(seed)
    judge(m, m.loss(ops.mul_mat(m.param(k, n, w2, w3), m.param(k, t, w2 * r2, w3 * r3))))


def test_mul_mat_of_transposed_and_permuted_inputs():
    m = Maker(1)
    x = m.param(3, 4)
    judge(m, m.loss(ops.mul_mat(m.param(4, 2), ops.transpose(x))))
    m = Maker(2)
    judge(m, m.loss(ops.mul_mat(ops.permute(m.param(3, 2, 4), 0, 2, 1, 3), ops.permute(m.param(3, 2, 5), 0, 2, 1, 3))))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_gradient_passes_frozen_weights_of_another_type(kind):
    m = Maker(4)
    w = m.ctx.new_tensor(kind, 32, 3).set(m.values(32, 3))
    x = m.param(32, 2)
    graph = build(m.loss(ops.mul_mat(w, x)))
    loss = graph.nodes[-1]
    graph.build_backward_expand()
    compute(graph)
    weights = next(s for s in loss.src[0].src if s.op == "NONE")
    np.testing.assert_allclose(graph.grad(x).numpy(), weights.numpy() @ w.numpy().astype("f4"), rtol=1e-5)


@settings(max_examples=25)
@given(k=st.integers(1, 4), n=st.integers(1, 4), t=st.integers(1, 4), experts=st.integers(1, 4), seed=SEEDS, data=st.data())
def test_mul_mat_id_and_biases(k, n, t, experts, seed, data):
    used = data.draw(st.integers(1, experts))
    rows = data.draw(st.sampled_from([d for d in range(1, used + 1) if used % d == 0]))
    m = Maker(seed)
    ids = m.ids(used, t, experts)
    out = ops.mul_mat_id(m.param(k, n, experts), m.param(k, rows, t), ids)
    judge(m, m.loss(ops.add_id(out, m.param(n, experts), ids)))


@settings(max_examples=25)
@given(n=st.integers(1, 4), rows=st.integers(1, 5), r=st.integers(1, 6), b2=st.integers(1, 2), b3=st.integers(1, 2), seed=SEEDS)
def test_get_rows(n, rows, r, b2, b3, seed):
    m = Maker(seed)
    which = m.ctx.new_tensor("i32", r, b2, b3).set(m.rng.integers(0, rows, (b3, b2, r)))
    judge(m, m.loss(ops.get_rows(m.param(n, rows, b2, b3), which)))


@settings(max_examples=25)
@given(n=st.integers(1, 6), rows=st.integers(1, 4), sums_to_one=st.booleans(), seed=SEEDS)
def test_cross_entropy(n, rows, sums_to_one, seed):
    m = Maker(seed)
    p = m.values(n, rows, low=0.0)
    labels = m.ctx.from_numpy(p / p.sum(-1, keepdims=True) if sums_to_one else p)
    judge(m, ops.cross_entropy_loss(m.param(n, rows), labels).mark(Flag.LOSS))


# ---- whole networks


@settings(max_examples=15)
@given(d=st.integers(1, 4), f=st.integers(1, 4), t=st.integers(1, 5), act=st.sampled_from(["RELU", "SILU", "GELU", "TANH"]), seed=SEEDS)
def test_mlp_with_norm_and_residual(d, f, t, act, seed):
    m = Maker(seed)
    x = ops.rms_norm(m.leaf(d, t), 1e-3)
    h = ops.unary(act, ops.add(ops.mul_mat(m.param(d, f), ops.mul(x, m.param(d))), m.param(f)))
    y = ops.add(ops.mul_mat(m.param(f, d), h), x)
    judge(m, ops.cross_entropy_loss(y, m.ctx.from_numpy(m.rng.dirichlet(np.ones(d), t).astype("f4"))).mark(Flag.LOSS))


ROUTERS = {
    "mixtral": dict(gating="softmax", normalise=True),
    "switch": dict(gating="softmax", normalise=False),
    "deepseek-v3": dict(gating="sigmoid", normalise=True, scale=2.5),
    "gpt-oss": dict(gating="softmax_weight", normalise=False),
}


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_expert_layer(kind, k, shared):
    """Routers, experts and the shared expert as llama.cpp builds them; no gradient passes the choice itself."""
    m = Maker(k)
    d, f, n_expert, t = 3, 4, 4, 5
    own = moe.FeedForward(m.param(d, f), m.param(d, f), m.param(f, d)) if shared else None
    experts = moe.ExpertWeights(m.param(d, f, n_expert), m.param(d, f, n_expert), m.param(f, d, n_expert), own)
    x = m.param(d, t)
    y = moe.build_moe_ffn(x, m.param(d, n_expert), experts, moe.Router(n_expert, k, **ROUTERS[kind]))
    judge(m, m.loss(y))


def test_the_same_tensor_in_several_places_adds_up():
    m = Maker(5)
    x = m.param(3, 2)
    y = ops.mul(ops.add(x, x), ops.sub(ops.sqr(x), ops.slice_view(x, slice(0, 1))))
    judge(m, ops.add(m.weighted(y), ops.add(m.weighted(ops.neg(x)), ops.sum(x))).mark(Flag.LOSS))


def test_two_losses_count_both():
    m = Maker(6)
    x = m.param(4)
    first, second = m.loss(ops.sqr(x)), m.loss(ops.exp(x))
    graph = build(first, second).build_backward_expand()
    compute(graph)
    want = slopes(graph.nodes[: graph.nodes.index(second) + 1], first, x) + slopes(graph.nodes, second, x)
    np.testing.assert_allclose(graph.grad(x).array(), want, rtol=1e-3)


def test_a_graph_that_needs_a_gradient_nowhere_has_none_there():
    m = Maker(7)
    x, w = m.leaf(3, 2), m.param(3, 4)
    scores = ops.soft_max(ops.mul_mat(w, x))
    unused = ops.rms_norm(ops.sqr(x))
    loss = m.loss(ops.mul_mat(ops.cont(ops.transpose(scores)), ops.cont(ops.transpose(ops.sqr(scores)))))
    graph = build(loss, unused)
    walked = list(backward_expansion(graph))
    assert graph.grad(x) is None and graph.grad(unused) is None and graph.grad(w) is not None
    assert {(d[0], d[2]) for d in walked if d[0] == "skip" and d[1] is unused} == {("skip", "constant")}
    side = ops.exp(ops.mul_mat(m.param(3, 1), x))
    walked = list(backward_expansion(build(m.loss(ops.mul_mat(w, x)), side)))
    assert [d[2] for d in walked if d[1] is side and d[0] == "skip"] == ["unreached"]


# ---- the walk itself


def network(m=None, **kw):
    m = m or Maker(8, **kw)
    h = ops.relu(ops.add(ops.mul_mat(m.param(5, 7), m.leaf(5, 3)), m.param(7)))
    logits = ops.add(ops.mul_mat(m.param(7, 3), h), m.param(3))
    return m, ops.cross_entropy_loss(logits, m.ctx.from_numpy(np.eye(3, dtype="f4"))).mark(Flag.LOSS)


def test_decisions_tell_everything_and_lead_to_the_same_graph():
    m, loss = network()
    graph = build(loss)
    before = len(graph.nodes)
    walked = list(backward_expansion(graph))
    assert [d for d in walked if d[0] == "seed"] == [("seed", loss, graph.grad_acc(loss))]
    added = sum(d[5] for d in walked if d[0] == "grad")
    assert added == len(graph.nodes) - before
    assert [d[1] for d in walked if d[0] == "visit"] == [t for t in reversed(graph.nodes[:before]) if t.op != "NONE"]
    last = {}
    for d in walked:
        if d[0] == "grad":
            last[d[1]] = d[2]
    assert all(graph.grad(t) is g for t, g in last.items())
    assert all(g.name.startswith("grad for ") for g in last.values())


def test_an_abandoned_walk_leaves_the_graph_as_it_was():
    m, loss = network()
    graph = build(loss)
    before = [*graph.nodes], [*graph.leafs], dict(graph.visited)
    walk = backward_expansion(graph)
    while next(walk)[0] != "grad":
        pass
    walk.close()
    assert before == ([*graph.nodes], [*graph.leafs], graph.visited) and not graph.grads and not graph.grad_accs
    graph.build_backward_expand()
    compute(graph)
    assert graph.grad(m.params[0]) is not None


def test_values_of_the_forward_pass_do_not_change():
    m, loss = network()
    compute(build(loss))
    plain = loss.numpy().copy()
    m, loss = network()
    graph = build(loss).build_backward_expand()
    compute(graph)
    assert loss.numpy() == plain and graph.grad_acc(loss).numpy() == 1


def test_accumulators_add_up_over_runs_until_a_reset():
    m, loss = network()
    x = m.param(4)
    total = ops.add(loss, m.weighted(ops.sub(ops.sqr(x), ops.slice_view(x, slice(1, 2))))).mark(Flag.LOSS)
    loss.flags &= ~Flag.LOSS
    plain = build(total).build_backward_expand()
    compute(plain)
    want = {p: plain.grad(p).numpy().copy() for p in m.params}
    graph = build(total)
    graph.build_backward_expand({p: m.ctx.new_tensor("f32", *p.ne) for p in m.params})
    graph.reset()
    for n in (1, 2, 3):
        compute(graph)
        for p, g in want.items():
            np.testing.assert_allclose(graph.grad_acc(p).numpy(), n * g, rtol=1e-5, atol=1e-6)
            assert graph.grad(p).root() is graph.grad_acc(p)
    graph.reset()
    assert all(not graph.grad_acc(p).numpy().any() for p in m.params) and graph.grad_acc(total).numpy() == 1


def test_a_backward_graph_survives_json():
    m, loss = network()
    x = m.param(4, 2)
    more = m.loss(ops.get_rows(ops.reshape(ops.slice_view(x, slice(0, 1)), 1, 4), m.ids(2, 1, 4)))
    graph = build(loss, more)
    graph.build_backward_expand({m.params[0]: m.ctx.new_tensor("f32", 5, 7)})
    w = m.params[1]
    with m.ctx.active():
        graph.build_forward_expand(ops.opt_step_adamw(w, graph.grad(w), m.leaf(*w.ne), m.leaf(*w.ne), m.leaf(7)))
    text = to_json(graph)
    again = from_json(text)
    assert to_json(again) == text
    assert {"ACC", "GET_ROWS_BACK", "REPEAT_BACK", "OPT_STEP_ADAMW", "OUT_PROD"} <= {r["op"] for r in json.loads(text)["tensors"]}
    assert [t.op for t in again.nodes] == [t.op for t in graph.nodes]
    assert any(t.op == "ADD" and t.is_view for t in again.nodes) == any(t.op == "ADD" and t.is_view for t in graph.nodes)


def test_gradients_take_the_room_that_ggml_takes():
    for size in (16, 2048):
        at_once, later = Context(2**20), Context(2**20)
        CGraph(at_once, size, grads=True)
        assert at_once.used_mem == 32 + -(-graph_nbytes(size, True) // 16) * 16
        graph = CGraph(later, size)
        graph.room_for_gradients()
        graph.room_for_gradients()
        assert 0 <= later.used_mem - at_once.used_mem <= 64  # an object of its own


def test_new_tensors_go_to_the_context_of_the_loss_or_the_one_asked_for():
    weights, work, other = Context(2**16), Context(2**16), Context(2**16)
    w = weights.from_numpy(np.ones((2, 3), "f4")).mark(Flag.PARAM)
    with work.active():
        loss = ops.sum(ops.sqr(ops.mul_mat(w, work.from_numpy(np.ones((1, 3), "f4"))))).mark(Flag.LOSS)
    before = weights.used_mem
    graph = build(loss).build_backward_expand()
    assert weights.used_mem == before and graph.grad(w).context is work
    assert build(loss).build_backward_expand(context=other).grad(w).context is other


# ---- mistakes


def scalar(m, t):
    return ops.sum(t).mark(Flag.LOSS)


def in_place(m):
    a = ops.sqr(m.param(3))
    return scalar(m, ops.add_inplace(a, m.param(3)))


def overlapping(m):
    return scalar(m, ops.cont(ops.view(ops.sqr(m.param(4)), 4, 3, nb=(0,))))


MISTAKES = {
    "no loss": (lambda m: ops.sum(m.param(3)), GraphError, "no loss"),
    "no parameter": (lambda m: scalar(m, m.leaf(3)), GraphError, "no parameter"),
    "parameter not in the loss": (lambda m: build(scalar(m, m.leaf(3)), ops.sqr(m.param(3))), GraphError, "no parameter of the graph has a part"),
    "no rule": (lambda m: scalar(m, ops.norm(ops.sqr(m.param(4).named("w")))), GraphError, "NORM, on the way from the loss to 'w': ggml has none either"),
    "rope": (lambda m: scalar(m, ops.rope(m.param(4, 1, 1), m.ids(1, 1, 1), 4)), GraphError, "attention is not trained here"),
    "mask": (lambda m: scalar(m, ops.soft_max_ext(m.param(4), m.param(4), 1.0)), GraphError, "masks and sinks"),
    "labels": (lambda m: ops.cross_entropy_loss(m.leaf(4), m.param(4)).mark(Flag.LOSS), GraphError, "labels are given"),
    "in place": (in_place, GraphError, "works in place"),
    "half": (lambda m: scalar(m, ops.cast(ops.cast(m.param(4), "f16"), "f32")), DTypeError, "f32 from the parameters to the loss"),
    "f16 parameter": (lambda m: scalar(m, ops.cast(m.ctx.new_tensor("f16", 4).mark(Flag.PARAM), "f32")), DTypeError, "f16 would need a gradient"),
    "overlap": (overlapping, ShapeError, "share places"),
    "view of a permuted tensor": (lambda m: scalar(m, ops.cont(ops.view(ops.transpose(m.param(4, 2)), 2, 2))), GraphError, "not packed"),
    "through OUT_PROD": (lambda m: scalar(m, ops.out_prod(m.param(2, 3), m.leaf(4, 3))), GraphError, "ggml has none either"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained_and_nothing_is_lost(name):
    make, error, words = MISTAKES[name]
    m = Maker(9)
    made = make(m)
    graph = made if isinstance(made, CGraph) else build(made)
    before = [*graph.nodes], [*graph.leafs], dict(graph.visited)
    with pytest.raises(error) as caught:
        build_backward_expand(graph)
    assert words in str(caught.value)
    assert before == (graph.nodes, graph.leafs, graph.visited) and not graph.grads


@pytest.mark.parametrize("what", ["the parameter", "a view of it", "none", "shared", "of a stranger"])
def test_accumulators_are_tensors_of_their_own(what):
    m = Maker(9)
    a, b, own = m.param(3), m.param(3), m.leaf(3)
    graph = build(scalar(m, ops.mul(a, b)))
    accs = {"the parameter": {a: a}, "a view of it": {a: ops.view(b, 3)}, "none": {a: None}, "shared": {a: own, b: own}, "of a stranger": {m.leaf(3): own}}
    before = [*graph.nodes], [*graph.leafs]
    with pytest.raises(GraphError, match="accumulator"):
        build_backward_expand(graph, accs[what])
    assert before == (graph.nodes, graph.leafs) and not graph.grads


def test_a_loss_is_one_number():
    m = Maker(10)
    with pytest.raises(ShapeError, match="one number"):
        m.param(3).mark(Flag.LOSS)
    t = ops.sqr(m.param(3))
    t.flags |= Flag.LOSS
    with pytest.raises(ShapeError, match="one number"):
        build(t).build_backward_expand()


def test_gradients_of_gradients_are_refused():
    _, loss = network()
    graph = build(loss).build_backward_expand()
    n = len(graph.nodes)
    with pytest.raises(GraphError, match="has gradients already"):
        graph.build_backward_expand()
    assert len(graph.nodes) == n and graph.grads
    graph.clear()
    graph.build_forward_expand(loss)
    assert graph.build_backward_expand().grads


def test_too_little_room_is_no_half_graph():
    m, loss = network()
    graph = build(loss, size=12)
    with pytest.raises(GraphFull):
        graph.build_backward_expand()
    assert len(graph.nodes) == 10 and not graph.grads
    small = Context(1500, no_alloc=True)
    with pytest.raises(ContextFull):
        build(loss).build_backward_expand(context=small)
    with pytest.raises(ShapeError, match="accumulator"):
        build(loss).build_backward_expand({m.params[0]: m.leaf(3)})


def test_ids_outside_the_experts_are_found_in_the_backward_pass_too():
    m = Maker(11)
    ids = m.ids(1, 2, 3)
    graph = build(m.loss(ops.mul_mat_id(m.param(2, 2, 3), m.param(2, 1, 2), ids))).build_backward_expand()
    ids.set([[0], [3]])
    with pytest.raises(Exception, match="expert 3"):
        compute(graph)
