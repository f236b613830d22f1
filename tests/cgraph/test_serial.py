"""Graphs as JSON: round trips, and files that strangers altered."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgraph.random_graphs import random_graph
from workbench.cgraph import CGraph, build, from_dict, from_json, to_dict, to_json
from workbench.cgraph.graph import graph_nbytes
from workbench.errors import ContextClosed, ContextFull, FileFormatError
from workbench.tensors import Context, Flag, ops

FIELDS = ("name", "op", "desc", "dtype", "ne", "nb", "params", "flags", "view_offs")


def described(graph):
    """Everything a graph says about its tensors, with references as indices."""
    listed = [*graph.leafs, *graph.nodes]
    index = {t: i for i, t in enumerate(listed)}
    return [({f: getattr(t, f) for f in FIELDS}, [None if s is None else index[s] for s in t.src],
             index[t.view_src] if t.view_src is not None else None, graph.use_count(t)) for t in listed]  # fmt: skip


@given(st.integers(0, 10**6))
def test_round_trip(seed):
    graph = random_graph(seed)
    again = from_json(to_json(graph))
    assert described(again) == described(graph)
    assert (len(again.leafs), len(again.nodes), again.size, again.name) == (len(graph.leafs), len(graph.nodes), graph.size, graph.name)
    assert to_json(again) == to_json(graph)
    assert all(t.storage is None and t.context.no_alloc for t in again.nodes)


def test_every_op_was_among_the_random_ones():
    met = {t.desc for seed in range(60) for t in random_graph(seed).nodes}
    assert {"CLAMP", "CPY", "SET_ROWS", "ROPE", "SOFT_MAX", "GEGLU", "PERMUTE", "VIEW", "REPEAT", "CONCAT", "ARGSORT"} <= met


def test_infinities_and_odd_names():
    ctx = Context(no_alloc=True)
    with ctx.active():
        t = ops.clamp(ctx.new_tensor("f32", 4), float("-inf"), float("inf")).named("ü")
        t.src[0].name = '"\x00\udcff<b>'
    text = to_json(build(t))
    json.loads(text, parse_constant=pytest.fail)
    again = from_json(text)
    assert again.nodes[0].params == {"min": float("-inf"), "max": float("inf")} and again.leafs[0].name == '"\x00\udcff<b>'

def test_parameters_and_parts_of_graphs():
    ctx = Context(no_alloc=True)
    with ctx.active():
        w = ctx.new_tensor("f32", 4, name="w").mark(Flag.PARAM)
        graph = build(ops.sqr(ops.mul(w, ctx.new_tensor("f32", 4))))
    assert described(from_json(to_json(graph))) == described(graph)
    part = from_json(to_json(graph.view(2, 3)))
    assert [t.desc for t in part.nodes] == ["SQR"] and part.leafs == [] and part.nodes[0].src[0].desc == "MUL"


def test_into_a_context():
    graph = random_graph(5)
    ctx = Context(2**22, no_alloc=True)
    again = from_json(to_json(graph), ctx)
    assert again.nodes[0].context is ctx and again.context is ctx and ctx.objects[-1].size >= graph_nbytes(graph.size)
    used = ctx.used_mem
    broken = to_dict(graph)
    broken["tensors"][-1]["ne"][0] += 1
    with pytest.raises(FileFormatError):
        from_dict(broken, ctx)
    assert ctx.used_mem == used  # checked before anything is taken
    with pytest.raises(ContextFull):
        from_json(to_json(graph), Context(500))
    graph.nodes[0].context.close()
    with pytest.raises(ContextClosed):
        to_json(graph)


def small():
    ctx = Context(no_alloc=True)
    with ctx.active():
        a, b = ctx.new_tensor("f32", 4, 2, name="a").mark(Flag.INPUT), ctx.new_tensor("f32", 4, name="b")
        c = ops.add(a, b).named("c")
        return to_dict(build(ops.soft_max(c[0:1].named("v")).named("d")))


def altered(path, value):
    data = small()
    at = data
    for key in path[:-1]:
        at = at[key]
    if value is KeyError:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return data


A, C, V, D = 0, 2, 3, 4  # ids of small()


@pytest.mark.parametrize("path, value, says", [
    (["format"], "other", "format"), (["version"], 2, "version 2"), (["version"], True, "version"), (["size"], -1, "size -1"),
    (["size"], 2**70, "size"), (["size"], 2, "nodes"), (["size"], "8", "size"), (["extra"], 1, "fields"), (["name"], 5, "name"),
    (["tensors"], {}, "tensors"), (["tensors", A], [], "tensor 0"), (["tensors", C, "src"], KeyError, "tensor 2"),
    (["tensors", C, "op"], "EVAL", "op EVAL"), (["tensors", C, "op"], ["ADD"], "op"), (["tensors", C, "type"], "f8", "type f8"),
    (["tensors", C, "ne"], [4, 2], "ne"), (["tensors", C, "ne", 0], 4.0, "ne [4.0"), (["tensors", C, "ne", 0], -4, "ne [-4"),
    (["tensors", C, "ne", 0], 2**80, "ne"), (["tensors", C, "ne", 0], True, "ne [True"), (["tensors", C, "ne", 0], 8, "ne"),
    (["tensors", C, "nb", 1], 8, "nb"), (["tensors", C, "type"], "f16", "type"), (["tensors", A, "nb", 1], 32, "nb"),
    (["tensors", C, "src", 0], 4, "src [4"), (["tensors", C, "src", 0], 2, "ADD cannot"), (["tensors", C, "src", 0], -1, "src [-1"),
    (["tensors", C, "src"], [0, None], "tensor 2"), (["tensors", C, "src"], [0], "tensor 2"), (["tensors", C, "src"], [0] * 11, "src"),
    (["tensors", C, "src"], [1, 0], "ADD"), (["tensors", A, "src"], [0], "src [0]"), (["tensors", C, "params", "x"], 1, "ADD cannot"),
    (["tensors", D, "params"], {}, "SOFT_MAX cannot"), (["tensors", D, "params", "scale"], {"float": "1"}, "parameter"),
    (["tensors", D, "params", "scale"], "1", "params"), (["tensors", D, "params", "scale"], None, "parameter None"),
    (["tensors", D, "params", "scale"], 10**400, "parameter"), (["tensors", A, "flags"], ["hot"], "flags"),
    (["tensors", A, "flags"], "input", "flags"), (["tensors", V, "view"], [C, 17], "VIEW cannot"),
    (["tensors", V, "params", "offset"], 4, "VIEW cannot"), (["tensors", V, "view"], [A, 0], "VIEW cannot"),
    (["tensors", V, "view"], [V, 0], "view [3, 0]"), (["tensors", V, "view"], [C], "view"), (["tensors", V, "view"], KeyError, "VIEW cannot"),
    (["tensors", V, "ne", 1], 3, "bytes at offset 0"), (["tensors", V, "nb", 0], 2**62, "bytes at offset 0"),
    (["tensors", V, "ne"], [2**62, 2**62, 2**62, 2**62], "tensor 3"), (["tensors", A, "ne"], [2**62, 1, 1, 1], "tensor 0"),
    (["tensors", D, "view"], [A, 0], "view"), (["tensors", A, "name"], "x" * 5000, "name"), (["nodes"], [2, 3, 4, 4], "each id once"),
    (["nodes"], [0, 2, 3, 4], "each id once"), (["nodes"], [3, 2, 4], "order"), (["nodes", 0], 99, "nodes [99"),
    (["leafs"], [2, 0, 1], "each id once"), (["leafs"], [0, "1"], "leafs"), (["leafs"], None, "leafs"), (["tensors", A, "view"], [0, 0], "view [0, 0]"),
])  # fmt: skip
def test_what_is_wrong_is_named(path, value, says):
    assert from_dict(small()).nodes[-1].name == "d"
    with pytest.raises(FileFormatError) as e:
        from_dict(altered(path, value))
    assert says in str(e.value) and e.value.expected and len(str(e.value)) < 500


def test_leafs_and_nodes_change_places():
    data = small()
    data["leafs"], data["nodes"] = data["nodes"][:1], data["leafs"] + data["nodes"][1:]
    with pytest.raises(FileFormatError, match="among"):
        from_dict(data)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe\x00", "[" * 200_000, "null", "7", '{"format":', '{"a":NaN}', "1" * 10_000, '"workbench.graph"'])
def test_not_a_graph(text):
    with pytest.raises(FileFormatError):
        from_json(text)


def test_absurd_sizes_cost_nothing():
    data = small()
    data["size"] = 2**31 - 1
    data["tensors"][A].update(ne=[2**40, 1, 1, 1], nb=[4, 2**42, 2**42, 2**42])
    text = json.dumps(data)
    tracemalloc.start()
    with pytest.raises(FileFormatError):
        from_json(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(text)


JUNK = [None, True, -1, 0, 1, 3, 2**31, 2**63, 2**200, 1.5, float("inf"), "", "ADD", "VIEW", "f16", [], [0], [[]], {}, {"float": "nan"}, {"a": 1}]


def places(data, path=()):
    for key, value in list(data.items()) if isinstance(data, dict) else list(enumerate(data)):
        yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*path, key))


def alter(data, path, r, original):
    at = data
    for key in path[:-1]:
        at = at[key]
    how, key = r.randrange(4), path[-1]
    if how == 0:
        at.pop(key)
    else:
        at[key] = [r.choice(JUNK), copy.deepcopy(r.choice(original["tensors"])), None][how - 1] if how < 3 else at[key] + r.choice([-1, 1, 4, 1000])


@pytest.mark.parametrize("seed", range(8))
def test_altered_files(seed):
    """Any alteration is refused with FileFormatError, or what comes out is a sound graph."""
    r = random.Random(seed)
    original = to_dict(random_graph(seed, 25))
    where = list(places(original))
    refused = 0
    for _ in range(150):
        data = copy.deepcopy(original)
        for path in r.sample(where, r.choice([1, 1, 1, 2, 5])):
            try:
                alter(data, path, r, original)
            except (TypeError, KeyError, IndexError, AttributeError):
                continue  # an earlier alteration took the place away
        try:
            graph = from_dict(data)
        except FileFormatError:
            refused += 1
        else:
            assert isinstance(graph, CGraph) and described(from_json(to_json(graph))) == described(graph)
    assert refused > 90


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_altered_text(at, junk):
    text = json.dumps(small()).encode()
    at %= len(text)
    try:
        graph = from_json(text[:at] + junk + text[at + len(junk) :])
    except FileFormatError:
        return
    assert described(from_json(to_json(graph))) == described(graph)
