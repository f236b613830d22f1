"""Decisions to look at, states, counters, the trace, callbacks, the hook by which a backend orders its nodes."""

import json

import numpy as np
import pytest

from tests.parity import sched_case
from tests.scheduler.graphs import chain_of_adds, context, filled, leaf, values, weight
from workbench import CpuBackend, Flag, Scheduler, build, ops, simulated_machine
from workbench.errors import GraphError
from workbench.scheduler import CAUSES, STAGES, cause_in_words
from workbench.trace import Trace


def mixed(scheduler):
    """x -> GPU (w) -> CPU -> GPU."""
    ctx = context()
    w = weight(scheduler.buffer_types[0], ctx, values(8, 8), "w")
    with ctx.active():
        x = leaf(ctx, 8, 2, name="x")
        a = ops.mul_mat(w, x).named("a")
        b = ops.sqr(a).named("b")
        c = ops.mul_mat(w, b).named("c").mark(Flag.OUTPUT)
    scheduler.set_backend(b, 1)
    return build(c), x, a, b, c


def test_decisions_are_those_that_split_makes_and_change_nothing():
    scheduler = Scheduler(simulated_machine())
    graph, x, a, b, c = mixed(scheduler)
    scheduler.trace = trace = Trace("virtual")
    flags, sources = [t.flags for t in graph.nodes], [t.src for t in graph.nodes]
    steps = list(scheduler.decisions(graph))
    assert not len(trace) and scheduler.graph is None and [t.src for t in graph.nodes] == sources and [t.flags for t in graph.nodes] == flags
    assert [(s[0], s[1].name, s[2], s[3]) for s in steps[:3]] == [("pass1", "w", 0, "1.dst"), ("pass1", "x", 1, "1.inp"), ("pass1", "a", 0, "1.wgt0")]
    assert [s[0] for s in steps if s[0] not in STAGES] == ["split", "copy", "input", "rewrite"] * 3
    cuts = [(s[1].first, s[2], s[3]) for s in steps if s[0] == "split"]
    assert cuts == [(0, 0, "the first node"), (1, 1, "the next node runs on another backend"), (2, 0, "the next node runs on another backend")]
    scheduler.split(graph)
    recorded = [trace.described(e) for e in trace.of("assign")]
    names = [t["name"] for t in trace.graph["tensors"]]
    assert [(d["stage"], names[d["tensor"]], d["backend"], d["cause"]) for d in recorded if d["stage"] != "usr"] == [
        (s[0], s[1].name, s[2], s[3]) for s in steps if s[0] in STAGES]  # fmt: skip
    assert [trace.described(e)["stage"] for e in trace.of("stage")] == ["usr", *STAGES, "pass5"]
    assert [names[e.field("node")] for e in trace.of("rewrite")] == ["a", "b", "c"]


def test_every_cause_of_the_recorded_cases_has_a_sentence(data):
    met = set()
    for path in (data / "goldens/sched").glob("*.json"):
        met |= set(json.loads(path.read_text())["expect"].get("causes", {}).values())
    assert all(cause_in_words(c) for c in met) and {c.rstrip("0123") for c in met} <= set(CAUSES) and len(met) > 8


def test_the_trace_is_complete_and_survives_json(data):
    case = json.loads((data / "goldens/sched/moe_transformer_block.json").read_text())
    scheduler = sched_case.scheduler(case, trace=(trace := Trace("virtual")))
    made = sched_case.tensors(case["tensors"], scheduler.case_types)
    scheduler.alloc(graph := sched_case.expanded(case["graph"], made, case["graph_size"]))
    sched_case.write_leafs(case["tensors"], made, 0)
    scheduler.compute(graph)
    again = Trace.from_json(trace.to_json())
    assert again.events == trace.events and again.graph == json.loads(json.dumps(trace.graph))
    splits = [trace.described(e) for e in trace.of("split")]
    assert [(d["backend"], d["first"]) for d in splits] == [(s.backend, s.first) for s in scheduler.splits]
    assert len(list(trace.of("input"))) == sum(len(s.inputs) for s in scheduler.splits)
    launches = [e.field("count") for e in trace.of("launch")]
    assert launches == [len(s.nodes) for s in scheduler.splits] and sum(launches) == len(graph.nodes)
    times = [e.start for e in trace.events if e.kind in ("launch", "sync", "set", "get", "copy_async", "set_async")]
    assert times == sorted(times) and times[-1] > times[0]
    busy = [(d["name"], e.end - e.start) for e in trace.of("busy") if (d := trace.described(e))["work"] == "compute"]
    assert {n for n, _ in busy} == {n.name for n in graph.nodes if not n.spec.is_view} and all(ns > 0 for _, ns in busy)
    copied = len(trace)
    scheduler.trace = None
    scheduler.compute(graph)
    assert len(trace) == copied  # recording off


def test_states_and_counters():
    scheduler = Scheduler(simulated_machine())
    graph, x, *_, c = mixed(scheduler)
    assert not scheduler.is_reset and not scheduler.is_allocated  # something is assigned
    scheduler.compute(graph)
    assert scheduler.is_allocated and scheduler.graph is graph
    counted = scheduler.n_splittings, scheduler.n_reservations, scheduler.n_reallocations
    assert counted == (1, 1, 1)
    for _ in range(3):
        scheduler.compute(graph)
    assert (scheduler.n_splittings, scheduler.n_reservations, scheduler.n_reallocations) == counted
    uids = [s.uid for s in scheduler.splits]
    assert len({*uids, graph.uid}) == 4
    scheduler.reset()
    assert scheduler.is_reset and not scheduler.is_allocated and scheduler.splits == [] and scheduler.graph is None
    with pytest.raises(GraphError, match="'c' has no backend"):
        scheduler.backend_of(c)
    scheduler.alloc(graph)  # b is not assigned by hand any more
    assert len(scheduler.splits) == 1 and scheduler.splits[0].uid not in uids
    sizes = [scheduler.buffer_size(b) for b in scheduler.backends]
    assert sizes[0] > 0 and scheduler.buffer_size(0) == sizes[0] == scheduler.measure(graph)[0]
    scheduler.close()
    assert scheduler.buffer_size(0) == 0 and scheduler.buffer_types[1].used == 0


def test_a_longer_graph_of_other_places_is_planned_anew_and_a_smaller_batch_is_not():
    scheduler = Scheduler(simulated_machine())

    def batch(n, by_hand):
        ctx = context()
        with ctx.active():
            graph = build(ops.neg(ops.sqr(leaf(ctx, 8, n, name="x"))).mark(Flag.OUTPUT))
        scheduler.reset()
        scheduler.set_backend(graph.nodes[0], by_hand)
        scheduler.alloc(graph)
        return scheduler.n_reservations, scheduler.n_reallocations

    assert batch(8, 0) == (1, 1) and batch(4, 0) == (1, 1) and batch(16, 0) == (2, 2)
    assert batch(16, 1)[0] == 3  # the same sizes elsewhere
    assert batch(8, 1) == (3, scheduler.n_reallocations)


def test_the_debug_print():
    scheduler = Scheduler(simulated_machine())
    graph, *_ = mixed(scheduler)
    scheduler.split(graph)
    short, long = scheduler.debug(1).splitlines(), scheduler.debug().splitlines()
    assert short[0] == "## SPLIT #0: GPU # 1 inputs: ['x' 64 bytes]" and len(short) == 3 and len(long) == 6
    assert long[3] == "node #  1 (SQR): 'b' 64 bytes [CPU usr] use=1: 'CPU#a#0' [CPU 4.cpy]"


def test_an_eval_callback_gets_ranges_and_ends_its_split_early():
    scheduler = Scheduler(simulated_machine())
    graph, x, a, b, c = mixed(scheduler)
    seen = []

    def callback(node, ask):
        if ask:
            return node is b
        seen.append(node.numpy().copy())
        return go_on

    scheduler.eval_callback = callback
    for go_on in (True, False):
        scheduler.reset()
        scheduler.set_backend(b, 1)
        scheduler.alloc(graph)
        x.set(values(2, 8))
        assert scheduler.compute(graph) is go_on
    want = (values(2, 8) @ values(8, 8).T) ** 2
    assert np.allclose(seen[0], want, rtol=1e-5) and np.array_equal(seen[0], seen[1])


def test_several_slots_turn_and_stand_still_after_a_wait():
    scheduler = Scheduler(simulated_machine(), parallel=True)
    graph = chain_of_adds(2)
    slots, places = [], []
    for _ in range(6):
        scheduler.reset()
        scheduler.set_backend(graph.nodes[0], 0)
        scheduler.alloc(graph)
        slots.append(scheduler.slot)
        places.append(graph.leafs[0].offset)
    assert slots == [0, 1, 2, 3, 0, 1] and len(set(places)) == 4 and places[0] == places[4]
    scheduler.synchronize()  # while allocated: the turn goes on
    scheduler.reset()
    scheduler.synchronize()
    scheduler.alloc(graph)
    assert scheduler.slot == 0


def test_a_backend_may_order_its_nodes_and_keep_memory():
    ctx = context()
    with ctx.active():
        x = leaf(ctx, 64, name="x")
        a, b = ops.exp(x).named("a"), ops.neg(x).named("b")
        y = ops.sqr(ops.sum(ops.scale(a, 2)))
        graph = build(b, ops.add(ops.sum(ops.neg(b)), y).mark(Flag.OUTPUT))
    seen = []

    def side_by_side(nodes, keep):
        seen.append([n.name for n in nodes])
        keep(a, nodes[-1])  # until the end
        return sorted(nodes, key=nodes.index)

    sizes = []
    for optimizer in (None, side_by_side):
        scheduler = Scheduler(simulated_machine(optimizer=optimizer))
        for node in graph.nodes:
            scheduler.set_backend(node, 0)
        scheduler.alloc(graph)
        x.set(values(64))
        scheduler.compute(graph)
        sizes.append(scheduler.buffer_size(0))
        marks = [t for t in scheduler.graph_copy.nodes if t.op == "NONE" and a in t.src]
        assert len(marks) == (optimizer is not None)
    assert seen == [[n.name for n in graph.nodes]] and scheduler.graph_copy.nodes[-1].src == (a,)
    assert sizes[1] > sizes[0]


def test_one_backend_alone_and_a_real_cpu_beside_a_simulated_gpu():
    ctx = context()
    with ctx.active():
        graph = build(ops.neg(leaf(ctx, 4, name="x")).mark(Flag.OUTPUT))
    alone = Scheduler([CpuBackend()])
    filled(alone, graph, x=[1, 2, 3, 4])
    assert graph.nodes[0].numpy().tolist() == [-1, -2, -3, -4] and len(alone.splits) == 1
    both = Scheduler([simulated_machine()[0], CpuBackend()])
    both.set_backend(graph.nodes[0], 0)
    both.alloc(graph)
    graph.leafs[0].set([5, 6, 7, 8])
    both.compute(graph)
    assert graph.nodes[0].numpy().tolist() == [-5, -6, -7, -8] and not graph.nodes[0].storage.is_host


def test_a_stale_copy_is_not_used_again():
    """A table is read on the GPU, changed on the CPU, and read on the GPU again: ggml reads the first copy twice."""
    found = []
    for quirks in ("ggml", ""):
        scheduler = Scheduler(simulated_machine(), quirks=quirks)
        ctx = context()
        with ctx.active():
            table, new, row = leaf(ctx, 4, 2, name="table"), leaf(ctx, 4, 1, name="new"), leaf(ctx, 1, kind="i64", name="row")
            first = ops.neg(table).mark(Flag.OUTPUT)
            change = ops.set_rows(table, new, row)
            second = ops.sqr(table).mark(Flag.OUTPUT)
        graph = build(first, change, second)
        scheduler.set_backend(first, 0)
        scheduler.set_backend(second, 0)
        filled_by_hand(scheduler, graph, table=[[1] * 4, [2] * 4], new=[[5] * 4], row=[0])
        found.append(second.numpy().tolist())
    assert found == [[[1] * 4, [4] * 4], [[25] * 4, [4] * 4]]


def filled_by_hand(scheduler, graph, **given):
    scheduler.alloc(graph)
    for name, data in given.items():
        graph.find(name).set(np.array(data, graph.find(name).dtype.numpy))
    scheduler.compute(graph)


def test_a_weight_read_with_two_sets_of_ids_is_copied_whole():
    """ggml brings only the experts of the first set and uses the same copy for the second."""
    found = []
    for quirks in ("ggml", ""):
        scheduler = Scheduler(simulated_machine(), quirks=quirks)
        ctx = context()
        w = weight(scheduler.buffer_types[1], ctx, values(6, 4, 4), "w")
        with ctx.active():
            x, i, j = leaf(ctx, 4, 1, 1, name="x"), leaf(ctx, 1, 1, kind="i32", name="i"), leaf(ctx, 1, 1, kind="i32", name="j")
            a, b = (ops.mul_mat_id(w, x, ids).mark(Flag.OUTPUT) for ids in (i, j))
        graph = build(a, b)
        for node in graph.nodes:
            scheduler.set_backend(node, 0)
        filled_by_hand(scheduler, graph, x=values(1, 1, 4), i=[[0]], j=[[5]])
        found.append((np.isfinite(a.numpy()).all(), np.isfinite(b.numpy()).all()))
    assert found == [(True, False), (True, True)]
