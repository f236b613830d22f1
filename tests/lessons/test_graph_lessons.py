"""Lessons 03 and 04: what their state says is judged by other means, and the judges in it can say no."""

import numpy as np
import pytest

from workbench.cgraph import build
from workbench.lessons import open_lesson
from workbench.lessons.graph_states import LLAMA_3_8B, described, eager
from workbench.tensors import Context, Flag
from workbench.widgets import Range


@pytest.fixture(scope="module")
def graphs():
    return open_lesson("03").state


@pytest.fixture(scope="module")
def plans():
    return open_lesson("04").state


def test_the_network_is_the_one_that_ggml_printed(graphs):
    for train, name in ((False, "mlp"), (True, "mlp_with_params")):
        graph = build(graphs.mlp(train=train).out)
        assert [t.name for t in graph.leafs] == graphs.recorded[name]["leafs"]
        assert [t.name if t.op == "NONE" else t.op for t in graph.nodes] == graphs.recorded[name]["nodes"]


def test_legal_sees_a_node_before_its_source(graphs):
    graph = build(graphs.mlp().out)
    assert graphs.legal(graph)
    graph.nodes[1:3] = graph.nodes[2:0:-1]
    assert not graphs.legal(graph)


def test_a_described_model_has_the_published_size(graphs, plans):
    step = graphs.dense_step(32)
    weights = [t for t in step.graph.leafs if t.name.endswith("weight")]
    assert sum(t.n_elements for t in weights) == 8_030_261_248                 # Llama 3 8B's parameters, as published
    assert len(step.graph.nodes) == graphs.recorded["log_8b"]["n_nodes"]
    batch = plans.dense_step(32, n_tokens=512).graph
    assert plans.measure(batch) == 512 * (LLAMA_3_8B.n_vocab + LLAMA_3_8B.n_embd) * 4


def test_the_two_functions_compute_the_same(plans):
    stack = plans.stack(n_blocks=2, n_tokens=3, width=64)
    with Context(2**20).active() as context:
        x = context.from_numpy(stack.values)
        out = described(x, [[context.from_numpy(a) for a in block] for block in stack.arrays])
    from workbench.execution import compute
    compute(build(out))
    assert np.allclose(out.numpy(), eager(stack.values, stack.arrays), atol=1e-4)


def test_arrays_are_counted_as_numpy_makes_them(plans):
    x = np.ones((2, 3), np.float32)
    assert plans.arrays_made(lambda a: a + 1, x) == [24]
    assert plans.arrays_made(lambda a: (a @ a.T) * 2 - 1, x) == [16, 16, 16]
    assert plans.arrays_made(lambda a: a[:1].T, x) == []                       # views make nothing
    stack = plans.stack()
    peak = plans.peak(eager, stack.values, stack.arrays) / 65536
    assert 0.1 < peak % 1 < 0.9, "the lesson prints its whole part, which must not hang on a few bytes"


def test_disjoint_sees_an_overlap(plans, monkeypatch):
    graph = plans.stack().graph
    assert plans.disjoint(graph)
    made = plans.decisions(graph)
    for i, d in enumerate(made):
        if d[0] == "place" and d[4]:
            made[i] = (*d[:4], d[4] - 32, d[5])
            break
    monkeypatch.setattr(plans, "decisions", lambda graph: made)
    assert not plans.disjoint(graph)


def test_most_alive_agrees_with_a_walk_over_all_nodes(plans):
    for graph in (plans.stack().graph, plans.step().graph, plans.step(n_tokens=64).graph):
        lives = plans.lifetimes(graph)
        by_hand = max(sum(size for first, last, size in lives if first <= i <= last) for i in range(len(graph.nodes)))
        assert plans.most_alive(graph) == by_hand
        without = plans.without_in_place(graph)
        assert plans.measure(without) >= by_hand


def test_keeping_results_costs_and_changes_nothing_else(plans):
    plain, kept = plans.step(n_tokens=8).graph, plans.keep(plans.step(n_tokens=8).graph, "l_out")
    assert plans.measure(kept) > plans.measure(plain)
    assert sum(bool(t.flags & Flag.OUTPUT) for t in kept.nodes) == sum(bool(t.flags & Flag.OUTPUT) for t in plain.nodes) + 6


def test_a_slider_keeps_the_last_run():
    seen = []
    slider = Range(value=2, max=5, label="n").compare(lambda n: seen.append(n) or {"n": n, "square": n * n}, "Squares.", first=1)
    assert [row[1:] for row in slider._view.rows] == [["1", "2"], ["1", "4"]]
    slider.value = 5
    assert [row[1:] for row in slider._view.rows] == [["2", "5"], ["4", "25"]]
    assert seen == [1, 2, 5] and "25" in slider.below and "Squares." in slider.stored_text()
