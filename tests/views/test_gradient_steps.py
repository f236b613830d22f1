"""The backward walk as steps: nothing is changed, the last state is the graph that the walk makes."""

import pytest

from tests.cgraph.test_gradients import Maker, network
from tests.views.test_steps import check_prefix
from workbench import moe
from workbench.cgraph import build
from workbench.errors import GraphError, ParameterError
from workbench.tensors import ops
from workbench.views import backward_steps, steps_picture
from workbench.views.gradient_steps import SENTENCES
from workbench.views.steps import state


def experts():
    m = Maker(1)
    layer = moe.ExpertWeights(m.param(3, 4, 4), m.param(3, 4, 4), m.param(4, 3, 4))
    return m.loss(moe.build_moe_ffn(m.leaf(3, 5), m.param(3, 4), layer, moe.Router(4, 2)))


def several_uses():
    m = Maker(2)
    x = m.param(4, 2)
    y = ops.sub(ops.sqr(x), ops.slice_view(x, slice(0, 1)))
    return build(m.loss(ops.add(y, x)), ops.exp(m.param(2)), ops.exp(m.leaf(2)))


@pytest.mark.parametrize("make", [lambda: build(network()[1]), lambda: build(experts()), several_uses])
def test_the_last_state_is_the_graph(make):
    graph = make()
    before = [*graph.nodes], [*graph.leafs], [t.name for t in graph.nodes]
    trace = backward_steps(graph)
    assert before == (graph.nodes, graph.leafs, [t.name for t in graph.nodes]) and not graph.grads
    assert trace == backward_steps(graph)
    last = check_prefix(trace)[-1]
    names = [r["name"] for r in trace["graph"]["data"]["tensors"]]
    graph.build_backward_expand()
    assert [names[i] for i in last["nodes"]] == [t.name for t in graph.nodes]
    assert {names[t]: names[g] for t, g in last["grads"]} == {t.name: g.name for t, g in graph.grads.items()}
    assert all(s["cause"] in SENTENCES and "{" not in s["sentence"] for s in trace["steps"])


def test_every_reason_is_met():
    traces = [backward_steps(build(network()[1])), backward_steps(build(experts())), backward_steps(several_uses())]
    assert {s["cause"] for t in traces for s in t["steps"]} >= set(SENTENCES) - {"unreached"}


@pytest.mark.parametrize("k", [0, 12, 99])
def test_pictures_of_any_step(k):
    trace = backward_steps(build(network()[1]))
    picture = steps_picture(trace, "A caption that says something.", k)
    assert picture.alt and state(trace, min(k, len(trace["steps"]) - 1))["now"] >= 0


def test_mistakes_are_explained():
    m, loss = network()
    loss.flags &= 0
    with pytest.raises(ParameterError, match="loss.mark"):
        backward_steps(build(loss))
    m = Maker()
    with pytest.raises(GraphError, match="NORM"):
        backward_steps(build(m.loss(ops.norm(m.param(3)))))
