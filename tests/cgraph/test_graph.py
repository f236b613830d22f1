"""Building graphs: order and flags of real ggml, capacity, atomic failure, the walk as decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgraph.random_graphs import random_graph
from tests.parity import sched_case
from workbench.cgraph import CGraph, build
from workbench.cgraph.graph import graph_nbytes, hash_size
from workbench.errors import ContextClosed, ContextFull, GraphError, GraphFull, ParameterError
from workbench.tensors import Context, Flag, Tensor, ops


@pytest.fixture
def ctx():
    context = Context(2**26, no_alloc=True)
    with context.active():
        yield context


def test_order_of_real_ggml(data):
    cases = list(sched_case.load([data / "goldens/sched"]))
    assert len(cases) == 111
    for case in cases:
        for part in (case, *(run for run in case["expect"].get("more_runs", ()) if "tensors" in run)):
            made = sched_case.tensors(part["tensors"], sched_case.buffer_types(case))
            graph = sched_case.expanded(part["graph"], made, case["graph_size"])
            ids = {t: i for i, t in enumerate(made)}
            assert [ids[t] for t in graph.nodes] == part["graph"]["nodes"], case["name"]
            assert [ids[t] for t in graph.leafs] == part["graph"]["leafs"], case["name"]


@pytest.mark.parametrize(  # ggml_graph_overhead_custom(size, false) of ggml d99724f2
    "size, overhead",
    [(0, 160), (1, 176), (2, 240), (3, 320), (7, 464), (10, 752), (33, 1488), (100, 4864), (1000, 41040), (2048, 82608),
     (4096, 165216), (8192, 330192), (10000, 557488), (123457, 5153984)],
)  # fmt: skip
def test_bytes_in_the_arena(size, overhead):
    ctx = Context(2**23)
    CGraph(ctx, size=size)
    assert ctx.used_mem == overhead
    assert ctx.objects[-1].kind == "graph" and ctx.objects[-1].size >= graph_nbytes(size)


def test_hash_sizes_end_with_odd_numbers():
    assert [hash_size(n) for n in (0, 2, 3, 4096, 4097)] == [2, 2, 3, 4099, 4099]
    assert hash_size(2**40) == 2**40 + 1


def test_an_arena_too_small_for_a_graph():
    with pytest.raises(ContextFull, match="82,608"):
        CGraph(Context(80_000))
    with pytest.raises(ParameterError):
        CGraph(size=-1)


def mlp(ctx):
    """The seed's MLP, with weights whose shapes fit."""
    x, w1, b1, w2, b2 = (ctx.new_tensor("f32", *ne, name=n) for n, ne in
                         [("x", (8, 1)), ("w1", (8, 32)), ("b1", (32, 1)), ("w2", (32, 8)), ("b2", (8, 1))])  # fmt: skip
    h1 = ops.silu(ops.add(ops.mul_mat(w1, x), b1))
    return ops.add(ops.mul_mat(w2, h1), b2)


def test_nodes_and_leafs(ctx):
    graph = CGraph(ctx)
    out = mlp(ctx)
    assert graph.build_forward_expand(out) is graph
    assert [t.name for t in graph.leafs] == ["w2", "w1", "x", "b1", "b2"]
    assert [t.desc for t in graph.nodes] == ["MUL_MAT", "ADD", "SILU", "MUL_MAT", "ADD"]
    assert [t.name for t in graph.nodes] == [f"node_{i}" for i in range(5)]
    assert all(t.flags == Flag.COMPUTE for t in graph.nodes) and not any(t.flags for t in graph.leafs)
    assert graph.find("node_3") is graph.nodes[3] and graph.find("x") is graph.leafs[2] and graph.find("y") is None
    assert len(graph) == 5 and repr(graph) == "<CGraph 5 nodes, 5 leafs, size=2,048>"


def test_expanding_again_adds_only_what_is_new(ctx):
    out = mlp(ctx)
    graph = build(out)
    before = [*graph.nodes], [*graph.leafs], {**graph.visited}
    graph.build_forward_expand(out)
    assert before == (graph.nodes, graph.leafs, graph.visited)
    more = ops.silu(out)
    graph.build_forward_expand(more, more)
    assert graph.nodes == [*before[0], more] and more.name == "node_5" and graph.use_count(out) == 1


def test_uses(ctx):
    a = ctx.new_tensor("f32", 4)
    b, c = ops.add(a, a), ops.sqr(a)
    graph = build(b, c)
    assert graph.use_count(a) == 3 and graph.users(a) == [b, c] and graph.users(c) == []
    d = ops.add(c, a)
    graph.build_forward_expand(d)
    assert graph.users(a) == [b, c, d] and graph.use_count(a) == 4 and graph.use_count(ctx.new_tensor("f32", 1)) == 0


def test_a_cast_is_its_own_source(ctx):
    t = ops.cast(ctx.new_tensor("f32", 4), "f16")
    graph = build(t)
    assert graph.nodes == [t] and graph.use_count(t) == 1 and graph.users(t) == [t]


def test_parameters_are_nodes(ctx):
    w = ctx.new_tensor("f32", 4).mark(Flag.PARAM)
    x = ctx.new_tensor("f32", 4)
    graph = build(ops.mul(w, x))
    assert graph.nodes[0] is w and w.name == "node_0" and graph.leafs == [x] and not w.flags & Flag.COMPUTE


def test_order_without_computing(ctx):
    a = ops.sqr(ctx.new_tensor("f32", 4))
    b = ops.sqr(a)
    graph = CGraph().build_forward_expand(b, compute=False)
    assert graph.nodes == [a, b] and not (a.flags | b.flags) & Flag.COMPUTE
    graph.build_forward_expand(ops.add(b, b))
    assert a.flags & b.flags & Flag.COMPUTE


def test_full_graphs_say_what_to_do(ctx):
    t = ctx.new_tensor("f32", 4)
    graph = CGraph(ctx, size=4, name="step")
    for _ in range(4):
        t = ops.sqr(t)
    graph.build_forward_expand(t)
    state = [*graph.nodes], [*graph.leafs], {**graph.visited}
    new = [t]
    for _ in range(3):
        new.append(ops.sqr(new[-1]))
    with pytest.raises(GraphFull) as e:
        graph.build_forward_expand(new[-1])
    for part in ("'step' is full", "size=4", "4 nodes were there", "3 more", "CGraph(size=7)", "clear()", "build("):
        assert part in str(e.value)
    assert state == (graph.nodes, graph.leafs, graph.visited)
    assert all(not s.name and not s.flags for s in new[1:])  # nothing half done
    graph.clear()
    assert graph.build_forward_expand(t) and len(graph.nodes) == 4
    x = ctx.new_tensor("f32", 1)
    with pytest.raises(GraphFull, match="leafs"):
        CGraph(size=0).build_forward_expand(x)
    with pytest.raises(GraphFull):
        graph.add_node(new[1])


def test_one_failing_result_of_several_adds_none(ctx):
    graph = CGraph(size=2)
    a = ctx.new_tensor("f32", 4)
    with pytest.raises(GraphFull):
        graph.build_forward_expand(ops.sqr(a), ops.sqr(ops.sqr(a)))
    assert not graph.nodes and not graph.visited


def test_closed_contexts_are_named():
    here, there = Context(name="weights"), Context(name="compute")
    w = here.new_tensor("f32", 4, name="w")
    with there.active():
        t = ops.sqr(w.reshape(2, 2))
    graph = CGraph(there, name="g")
    here.close()
    with pytest.raises(ContextClosed, match=r"'w.*'weights'"):
        graph.build_forward_expand(t)
    assert not graph.visited
    there.close()
    for use in (graph.clear, lambda: graph.build_forward_expand(w), graph.copy, lambda: graph.add_node(w), graph.require_alive):
        with pytest.raises(ContextClosed, match="graph 'g'.*'compute'"):
            use()


def test_cycles_are_found(ctx):
    a = ctx.new_tensor("f32", 4, name="a")
    b = ops.sqr(a).named("b")
    c = ops.add(b, a).named("c")
    b.src = (c,)
    graph = CGraph()
    with pytest.raises(GraphError, match="cycle of 2 tensors: 'c' <- 'b' <- 'c'"):
        graph.build_forward_expand(c)
    assert not graph.visited


def test_long_chains():
    ctx = Context(2**26, no_alloc=True)
    with ctx.active():
        t = ctx.new_tensor("f32", 1)
        for _ in range(100_000):
            t = ops.sqr(t)
    graph = CGraph(size=100_000).build_forward_expand(t)
    assert len(graph.nodes) == 100_000 and graph.nodes[-1] is t and t.name == "node_99999"


def test_the_walk_decision_by_decision(ctx):
    a = ctx.new_tensor("f32", 4, name="a")
    b = ops.sqr(a).named("b")
    c = ops.add(b, a).named("c")
    graph = CGraph()
    walk = graph.expansion(c)
    seen = [next(walk) for _ in range(3)]
    walk.close()  # abandoned: nothing has happened
    assert not graph.nodes and not graph.visited and not b.flags
    told = [(kind, t.name, d.name if isinstance(d, Tensor) else d, depth) for kind, t, d, depth in graph.expansion(c)]
    assert told == [("enter", "c", None, 1), ("enter", "b", "c", 2), ("enter", "a", "b", 3), ("leaf", "a", 0, 3),
                    ("node", "b", 0, 2), ("seen", "a", "c", 1), ("node", "c", 1, 1)]  # fmt: skip
    assert [d[:2] for d in seen] == [("enter", c), ("enter", b), ("enter", a)] and graph.nodes == [b, c]
    assert [d[0] for d in graph.expansion(c)] == ["seen"]


@given(st.integers(0, 10**6))
def test_each_tensor_once_after_its_sources(seed):
    graph = random_graph(seed)
    listed = [*graph.leafs, *graph.nodes]
    assert len(set(listed)) == len(listed) and set(listed) == set(graph.visited)
    place = {t: i for i, t in enumerate(listed)}
    assert all(s is t or place[s] < place[t] for t in listed for s in t.sources())
    assert all(graph.use_count(t) == sum(s is t for u in listed for s in u.src) for t in listed)
    assert all((t.op == "NONE") == (i < len(graph.leafs)) for t, i in place.items())


def test_views_and_copies_of_graphs(ctx):
    graph = CGraph(ctx, size=8).build_forward_expand(mlp(ctx))
    part = graph.view(1, 3)
    assert part.nodes == graph.nodes[1:3] and part.leafs == [] and part.visited is graph.visited and part.size == 0
    twin = graph.copy(size=20)
    assert twin.size == 20 and (twin.nodes, twin.leafs, twin.visited) == (graph.nodes, graph.leafs, graph.visited)
    twin.clear()
    assert len(graph.nodes) == 5 and graph.copy(ctx).size == 8 and ctx.objects[-1].kind == "graph"
    with pytest.raises(GraphFull):
        graph.copy(size=4)
    with pytest.raises(ParameterError):
        graph.view(3, 9)
