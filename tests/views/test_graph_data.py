"""What the graph view says is what the graph is: neighbours, causes of the order, layout without overlaps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgraph.random_graphs import random_graph
from tests.views.graphs import HOSTILE, MODELS, mlp, model_step
from workbench.cgraph import CGraph, build
from workbench.errors import ParameterError
from workbench.tensors import Context, ops
from workbench.views import graph_data, layered_picture
from workbench.views.graph_data import CAUSES, all_ids, as_graph, walk_starts
from workbench.views.graph_layout import crossing_lines, graph_layout, stack


@pytest.mark.parametrize("name", MODELS)
def test_the_order_of_a_model_is_explained_by_a_walk_that_gives_it(name):
    graph = model_step(name).graph
    walk = [t for kind, t, _, _ in CGraph(size=10**6).decisions(*walk_starts(graph.nodes)) if kind == "node"]
    assert walk == graph.nodes  # the same objects in the same order
    data = graph_data(graph)
    assert (data["n_nodes"], data["n_leafs"]) == (len(graph.nodes), len(graph.leafs))
    assert CAUSES["by hand"] not in {r["cause"] for r in data["tensors"]}


@given(st.integers(0, 10**6))
def test_causes_name_a_later_user_and_the_right_source(seed):
    graph = random_graph(seed)
    data, ids = graph_data(graph), all_ids(graph)
    for t, i in ids.items():
        r = data["tensors"][i]
        assert (r["ne"], r["nb"], r["bytes"]) == ([*t.ne], [*t.nb], t.nbytes)
        assert [None if s is None else ids[s] for s in t.src] == r["src"]
        assert r["users"] == [ids[u] for u in graph.users(t) if u is not t]
        if "visited from" in r["cause"]:
            users = [u for u in r["users"] if f"visited from {data['tensors'][u]['tag']}" in r["cause"]]
            j = int(r["cause"].rsplit(" ", 1)[1])
            assert any(data["tensors"][u]["src"][j] == i and u > i for u in users)


def test_an_order_set_by_hand_says_so():
    context = Context(10**5, no_alloc=True)
    a = context.new_tensor("f32", 4, name="a")
    with context.active():
        b, c = ops.relu(a).named("b"), ops.silu(a).named("c")
        d = ops.add(b, c).named("d")
    graph = CGraph()
    for t in (d, b, c):
        graph.add_node(t)
    why = {r["name"]: r["why"] for r in graph_data(graph)["tensors"]}
    assert "stands before its source node 1 ‘b’, so this order cannot be computed" in why["d"]
    assert CAUSES["by hand"] in why["b"] and "first met" in why["a"]


@pytest.mark.parametrize("thing", [lambda: build(mlp()), mlp, lambda: [mlp()], lambda: model_step(MODELS[0])])
def test_what_can_be_shown(thing):
    assert as_graph(thing()).nodes


def test_what_cannot_be_shown():
    with pytest.raises(ParameterError, match="a dict"):
        as_graph({})


def test_showing_tensors_changes_nothing():
    y = mlp()
    names, flags = [t.name for t in build(y).nodes], y.flags
    z = mlp()
    data = graph_data(as_graph(z))
    assert z.name == "" and not z.flags
    assert [r["name"] for r in data["tensors"][data["n_leafs"]:]] == names  # they are called what the graph would call them
    assert flags


# ---- layout


def boxes_overlap(a, b):
    return a[1] < b[1] + b[3] and b[1] < a[1] + a[3] and a[2] < b[2] + b[4] and b[2] < a[2] + a[4]


def check_layout(data, chips=None):
    blocks = graph_layout(data, chips)
    drawn = [box for block in blocks for box in block["boxes"]]
    as_chip = {c for block in blocks for chips in block["chips"].values() for c in chips}
    assert sorted({box[0] for box in drawn} | as_chip) == list(range(len(data["tensors"])))
    for block in blocks:
        for k, a in enumerate(block["boxes"]):
            assert 0 <= a[1] and a[1] + a[3] <= block["w"] and 0 <= a[2] and a[2] + a[4] <= block["h"] + 0.1
            assert not any(boxes_overlap(a, b) for b in block["boxes"][k + 1:]), (a, block["name"])
        place = {box[0]: box for box in block["boxes"]}
        for s, i, j, points in block["lines"]:
            ys = points[1::2]
            assert ys == sorted(ys)  # lines go down
            if j >= 0:
                assert data["tensors"][i]["src"][j] == s and points[-1] == pytest.approx(place[i][2], abs=0.2)
    shown = {box[0] for box in drawn}
    wanted = sum(s in shown and s != i for i in shown for s in data["tensors"][i]["src"])
    assert sum(line[2] >= 0 for block in blocks for line in block["lines"]) == wanted
    return blocks


@given(st.integers(0, 10**6), st.sampled_from([True, False]))
def test_layouts_of_random_graphs(seed, chips):
    check_layout(graph_data(random_graph(seed)), chips)


@pytest.mark.parametrize("name", MODELS)
def test_layout_of_models(name):
    step = model_step(name)
    data = graph_data(step.graph)
    blocks = check_layout(data)
    layers = {s.layer for s in step.segments if s.layer >= 0}
    assert [b["name"] for b in blocks] == ["", *(f"layer {n}" for n in sorted(layers)), ""]
    assert {b - a for _, a, b in crossing_lines(data, blocks)} == {1}  # only neighbours feed each other
    places, width, height = stack(blocks, [1])
    assert places[1][2:] == (blocks[1]["w"], blocks[1]["h"]) and places[2][3] < 100
    assert height < stack(blocks, range(len(blocks)))[2]


def test_a_cast_which_is_its_own_source_and_a_cycle_can_be_drawn():
    context = Context(10**5, no_alloc=True)
    a = context.new_tensor("f32", 4, name="a")
    with context.active():
        b = ops.cast(ops.relu(a), "f16")
        c, d = ops.silu(a), ops.exp(a)
    check_layout(graph_data(build(b)), chips=False)
    c.src, d.src = (d,), (c,)
    graph = CGraph()
    for t in (c, d):
        graph.add_node(t)
    with pytest.raises(Exception, match="cycle"):
        graph_data(graph)


# ---- the stored picture


def test_the_picture_escapes_names_and_tells_the_nodes():
    y = mlp(HOSTILE).named("y <b>")
    made = layered_picture([y], "All nodes.")
    page = made.html()
    assert "<img src=x" not in page and "y &lt;b&gt;" in page and "\x1b" not in page
    assert made.alt.startswith("Compute graph: 5 nodes, 4 leafs")
    assert made.png[:4] == b"\x89PNG" and layered_picture([y], "All nodes.").png == made.png


def test_the_picture_follows_the_graph():
    context = Context(10**5, no_alloc=True)
    a = context.new_tensor("f32", 4, name="a")
    with context.active():
        one, other = layered_picture([ops.relu(a)], "x"), layered_picture([ops.silu(a)], "x")
    assert one.png != other.png and "RELU" in one.alt and "SILU" in other.alt


def test_a_tensor_used_by_a_long_chain_keeps_the_picture_small():
    context = Context(10**7, no_alloc=True)
    with context.active():
        x = ops.relu(context.new_tensor("f32", 4, name="a"))
        y = x
        for _ in range(400):
            y = ops.add(y, x)
    blocks = check_layout(graph_data(build(y)))
    assert sum(len(line[3]) for block in blocks for line in block["lines"]) < 30 * 400 + 60 * 60 * 4
