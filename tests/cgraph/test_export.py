"""Tables, DOT and statistics, also for names that strangers chose."""

from __future__ import annotations

import re
import subprocess

import pytest

from workbench.cgraph import build, statistics, to_dot
from workbench.errors import DependencyError
from workbench.tensors import Context, Flag, HostStorage, Usage, ops

HOSTILE = ['quote " end', "back\\slash\\", "line\nbreak", "\x1b[31mred", "<b>bold</b>", "&lt;&amp;", 'x"]; evil [label="', "{a|b}", "\udcff", "ünï"]


@pytest.fixture
def hostile():
    ctx = Context(no_alloc=True)
    with ctx.active():
        t = ctx.new_tensor("f32", 4)
        for name in HOSTILE:
            t = ops.sqr(t)
            t.name = name
    return build(t)


def test_table_of_a_small_graph():
    ctx = Context(no_alloc=True)
    with ctx.active():
        w, x = ctx.new_tensor("f16", 8, 2, name="w"), ctx.new_tensor("f32", 8, 3, 2, name="x").mark(Flag.INPUT)
        graph = build(ops.silu(ops.mul_mat(w, x)).named("y").mark(Flag.OUTPUT))
    assert [line.split() for line in graph.table().splitlines()] == [
        ["graph:", "size", "2,048"],
        ["2", "nodes"],
        "n0 [ 2, 3, 2] f32 MUL_MAT node_0 l0 l1".split(),
        "n1 [ 2, 3, 2] f32 SILU y n0 [output]".split(),
        ["2", "leafs"],
        "l0 [ 8, 2] f16 NONE w".split(),
        "l1 [ 8, 3, 2] f32 NONE x [input]".split(),
    ]


def test_names_cannot_break_the_text(hostile):
    for text in (hostile.table(), str(statistics(hostile)), repr(hostile)):
        assert all(c.isprintable() or c == "\n" for c in text) and len(text.splitlines()) <= 3 + len(HOSTILE) + 1
    dot = to_dot(hostile)
    assert all(c.isprintable() or c == "\n" for c in dot) and "&lt;" not in dot.replace("&amp;lt;", "")
    assert len(dot.splitlines()) == 3 + 11 + 10 + 1
    labels = re.findall(r'label=("(?:[^"\\]|\\.)*")', dot)
    assert len(labels) == 11 and re.fullmatch(r"[^\"]*", re.sub(r'"(?:[^"\\]|\\.)*"', "", dot))


def test_graphviz_reads_it(hostile):
    from workbench.views.graphs import dot

    try:
        program = dot()
    except DependencyError as e:
        pytest.skip(str(e))
    done = subprocess.run([program, "-Kdot", "-Tplain"], input=to_dot(hostile), capture_output=True, text=True, encoding="utf-8")
    kinds = [line.split()[0] for line in done.stdout.splitlines() if line.startswith(("node ", "edge "))]
    assert (kinds.count("node"), kinds.count("edge")) == (11, 10)


def layered():
    ctx = Context(no_alloc=True)
    with ctx.active():
        x = ctx.new_tensor("f32", 8, 2, name="x").mark(Flag.INPUT)
        h = x
        for il in range(3):
            w = ctx.new_tensor("f32", 8, 8, name=f"blk.{il}.ffn_gate.weight")
            gate = ops.mul_mat(w, h)  # unnamed: its weight says the layer
            act = ops.silu(gate)  # unnamed: as its source
            h = ops.add(act, h).named(f"l_out-{il}")
        out = ops.mul_mat(ctx.new_tensor("f32", 8, 32, name="output.weight"), ops.rms_norm(h, 1e-5).named("result_norm"))
        kv = ctx.new_tensor("f32", 8, 4, name="cache_k_l0")
        rows = ctx.new_tensor("i64", 2, name="rows").mark(Flag.INPUT)
        return build(out.named("result_output"), ops.set_rows(kv, h, rows))


def test_statistics_answer_the_seeds_questions():
    graph = layered()
    s = statistics(graph)
    assert (s.n_nodes, s.n_leafs) == (12, 7)
    assert s.ops["MUL_MAT"].count == 4 and s.ops["SILU"].count == 3
    assert s.ops["MUL_MAT"].flops == 3 * 2 * 8 * 8 * 2 + 2 * 8 * 32 * 2
    assert list(s.layers) == [None, 0, 1, 2] and {n: w.count for n, w in s.layers.items()} == {None: 2, 0: 4, 1: 3, 2: 3}
    assert s.layer_ops[1, "MUL_MAT"].count == 1 and s.layers[1] == s.layers[2]
    assert s.total.count == 12 and s.total.flops == sum(w.flops for w in s.layers.values())
    assert s.share("MUL_MAT") == s.ops["MUL_MAT"].flops / s.total.flops > 0.5 and s.share("EXP") == 0
    assert [(t.name, [u.name for u in users]) for t, users in s.repeated] == [
        ("x", ["node_0", "l_out-0"]), ("l_out-0", ["node_3", "l_out-1"]), ("l_out-1", ["node_6", "l_out-2"]),
        ("l_out-2", ["result_norm", "cache_k_l0 (view)"])]  # fmt: skip
    assert (s.weight_bytes, s.input_bytes, s.state_bytes) == (3 * 256 + 1024, 64 + 16, 128)
    assert s.activation_bytes == 9 * 64 + 64 + 256
    assert "used 2 times: x by node_0, l_out-0" in str(s)


def test_weights_are_what_lies_in_their_memory():
    ctx = Context(no_alloc=True)
    with ctx.active():
        a, b = ctx.new_tensor("f32", 4, name="a"), ctx.new_tensor("f32", 4, name="b")
        graph = build(ops.cpy(a, b))
    assert (statistics(graph).weight_bytes, statistics(graph).state_bytes) == (16, 16)
    b.place(HostStorage(64, usage=Usage.WEIGHTS))
    assert statistics(graph).weight_bytes == 32


@pytest.mark.parametrize("name, layer", [("ffn_moe_gate-3", 3), ("Qcur-12 (reshaped)", 12), ("blk.7.ffn_up.weight", 7), ("cache_k_l5 (view)", 5), ("result_norm", None),
                                         ("a-b", None), ("-1x", None), ("x-99999999999999999999", None)])  # fmt: skip
def test_layer_numbers(name, layer):
    ctx = Context(no_alloc=True)
    with ctx.active():
        graph = build(ops.sqr(ctx.new_tensor("f32", 4, name="x")).named(name))
    assert list(statistics(graph).layers) == [layer]
