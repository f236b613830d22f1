"""Steps: the state at step k depends on the first k events only, and the last state is what the real code did."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgraph.random_graphs import random_graph
from tests.views.graphs import MODELS, mlp, planned_step
from workbench import models
from workbench.cgraph import CGraph, build
from workbench.devices import HOST_MEMORY, BufferType
from workbench.errors import ParameterError
from workbench.execution import GraphAllocator
from workbench.models.session import fill_inputs
from workbench.tensors import Context, Flag, ops
from workbench.trace import Trace
from workbench.views import expand_steps, memory_steps, plan_steps, record_steps, steps_picture
from workbench.views.steps import CAUSES, state


def all_states(trace):
    return [state(trace, k) for k in range(len(trace["steps"]))]


def check_prefix(trace):
    """Forward and back: what lies behind k does not matter, and asking twice gives the same."""
    states = all_states(trace)
    for k in range(0, len(states), max(1, len(states) // 12)):
        cut = {**trace, "steps": trace["steps"][: k + 1]}
        other = copy.deepcopy(cut)
        other["steps"].append({"event": trace["steps"][0]["event"]})
        assert state(cut, k) == state(other, k) == states[k]
    return states


# ---- expanding


@given(st.integers(0, 10**6))
def test_expansion_ends_with_the_graph(seed):
    graph = random_graph(seed)
    roots = [t for t in graph.nodes if not graph.users(t)]
    trace = expand_steps(*roots)
    again = build(*roots, size=10**4)
    ids = {name: [r["tag"] for r in trace["graph"]["data"]["tensors"]] for name in ("tags",)}["tags"]
    last = check_prefix(trace)[-1]
    assert [ids[i] for i in last["nodes"]] == [f"node {i}" for i in range(len(again.nodes))]
    assert [trace["graph"]["data"]["tensors"][i]["op"] for i in last["nodes"]] == [t.desc if t.op != "NONE" else "" for t in again.nodes]
    assert len(last["leafs"]) == len(again.leafs) and last["stack"] == []
    assert len(last["visited"]) == len(set(last["visited"])) == len(again.nodes) + len(again.leafs)


def test_expansion_of_the_mlp_by_hand():
    trace = expand_steps(mlp())
    names = [r["name"] for r in trace["graph"]["data"]["tensors"]]
    first = state(trace, 0)
    assert [names[i] for i in first["stack"]] == ["node_4"] and trace["steps"][0]["cause"] == "start"
    kinds = [s["event"][0] for s in trace["steps"]]
    assert kinds.count("node") == 5 and kinds.count("leaf") == 4 and kinds.count("seen") == 1  # x again, for the residual
    last = state(trace, len(kinds) - 1)
    assert [names[i] for i in last["leafs"]] == ["w2", "w1", "x", "b1"]
    assert [names[i] for i in last["nodes"]] == [f"node_{i}" for i in range(5)]


def test_stepping_changes_neither_graph_nor_tensors():
    y = mlp()
    graph = CGraph()
    before = expand_steps(y, graph=graph)
    assert (graph.nodes, graph.leafs, y.name, int(y.flags)) == ([], [], "", 0)
    graph.build_forward_expand(y)
    assert expand_steps(y)["steps"][1:3] == before["steps"][1:3]
    assert [s["cause"] for s in expand_steps(y, graph=graph)["steps"]] == ["seen start"]


def test_expanding_into_a_graph_that_holds_something():
    y = mlp()
    graph = build(y.src[0])
    trace = expand_steps(y, graph=graph)
    assert len(state(trace, 0)["nodes"]) == len(graph.nodes) == 4
    assert [s["cause"] for s in trace["steps"]] == ["start", "seen", "seen", "node"]


# ---- packing


def overlapping(live):
    places = sorted((c, o, o + n) for c, o, n, _ in live.values() if n)
    return any(a[0] == b[0] and a[2] > b[1] for a, b in zip(places, places[1:]))


@given(st.integers(0, 10**6))
def test_packing_ends_with_what_the_allocator_reserves(seed):
    graph = random_graph(seed)
    trace = memory_steps(graph)
    states = check_prefix(trace)
    assert sum(states[-1]["high"]) == sum(GraphAllocator(HOST_MEMORY).measure(graph))
    assert not any(overlapping(s["live"]) for s in states)
    assert [s["at"] for s in states] == sorted(s["at"] for s in states)  # time never runs back
    for t, _, _, _, start, end in states[-1]["gone"]:
        assert start < end or trace["steps"][-1]["event"][-1] >= start, trace["names"][t]


@given(st.integers(0, 10**6))
def test_holes_in_the_sentences_are_free_and_large_enough(seed):
    trace = memory_steps(random_graph(seed))
    for k, step in enumerate(trace["steps"]):
        if step["cause"] == "hole":
            kind, t, chunk, offset, size, _ = step["event"]
            hole = int(step["sentence"].split("smallest has ")[1].split(",  ")[0].split(", at")[0].replace(",", ""))
            around = [(o, o + n) for i, (c, o, n, _) in state(trace, k)["live"].items() if c == chunk and int(i) != t and n]
            assert hole >= size and not any(a < offset + hole and offset < b for a, b in around)


def test_packing_of_a_model_saves_most():
    model = models.load(MODELS[0])
    trace = memory_steps(models.build_step(model, models.KVCache(model.hparams, 256, HOST_MEMORY), 64, 256, 64))
    last = state(trace, len(trace["steps"]) - 1)
    assert sum(last["high"]) * 4 < last["alone"]


def test_a_graph_with_memory_has_nothing_to_pack():
    with pytest.raises(ParameterError, match="has memory already"):
        memory_steps(build(mlp(no_alloc=False).src[0].src[1].src[0].src[0]))


# ---- the plan


def test_every_task_once_and_no_thread_twice_at_a_time():
    _, _, plan, runner = planned_step()
    trace = plan_steps(plan)
    last = check_prefix(trace)[-1]
    done = {(job, part): (first, stop) for job, part, _, first, stop, _, _ in last["tasks"]}
    assert done == {(i, k): (p.start, p.stop) for i, job in enumerate(plan.jobs) for k, p in enumerate(job.parts)}
    assert len(last["tasks"]) == len(done)
    assert {t[2] for t in last["tasks"]} == set(range(4))
    for thread in range(4):
        spans = sorted((t[5], t[6]) for t in last["tasks"] if t[2] == thread)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    assert {s["cause"] for s in trace["steps"]} == {"whole", "chunk", "last"}
    runner.close()
    runner.backend.close()


def test_a_recorded_run_tells_its_tasks_and_computes_the_same():
    step, cache, plan, runner = planned_step()
    at, seq = np.arange(256), np.zeros(256, int)
    cells, record, logits = cache.take(seq, at), Trace(), []
    for told in (None, record):
        fill_inputs(step, cache, at, at, seq, cells, at)  # a run takes the memory of its inputs
        plan.run(record=told)
        logits.append(step.logits.numpy().copy())
    assert np.array_equal(*logits)
    trace = plan_steps(plan, record)
    told = sorted((s["event"][1], s["event"][2]) for s in trace["steps"])
    assert told == [(i, k) for i, job in enumerate(plan.jobs) for k in range(len(job.parts))]
    assert Trace.from_json(record.to_json()).events == record.events
    assert all(s["event"][7] >= s["event"][6] >= 0 for s in trace["steps"])
    runner.close()
    runner.backend.close()


# ---- any generator


def test_steps_of_any_generator():
    def decide():
        yield from (("open", 3), ("skip", 1), ("close", 3))

    trace = record_steps(decide(), lambda d: None if d[0] == "skip" else {"event": [*d], "sentence": f"{d[0]} {d[1]}", "cause": d[0]}, "Doors")
    assert state(trace, 1) == {"events": [["open", 3], ["close", 3]]}
    assert "open 3" in steps_picture(trace, "two").alt
    with pytest.raises(ParameterError, match="no decisions"):
        record_steps([], lambda d: None, "Nothing")


class Padded(BufferType):
    """Memory in which results of SCALE take more room than they have bytes."""

    def alloc_size(self, tensor):
        return tensor.nbytes + 256 * (tensor.op == "SCALE")


def test_what_a_smaller_child_gives_back_is_free():
    context = Context(10**6, no_alloc=True)
    with context.active():
        y = ops.relu(ops.scale(context.new_tensor("f32", 64, name="x").mark(Flag.OUTPUT), 2.0).named("wide")).named("narrow")
    kind = Padded("padded", alignment=32)
    trace = memory_steps(build(y), kind)
    last = state(trace, len(trace["steps"]) - 1)
    assert [s["cause"] for s in trace["steps"]].count("shrink") == 1
    assert next(s["sentence"] for s in trace["steps"] if s["cause"] == "shrink") == "narrow needs less than wide had: 256 bytes at 512 become free."
    assert last["high"] == GraphAllocator(kind).measure(build(y)) == [768]


def test_every_cause_occurs_and_no_other():
    context = Context(10**6, no_alloc=True)
    with context.active():
        a = context.new_tensor("f32", 4096, name="a").mark(Flag.INPUT)
        keep = ops.relu(a).mark(Flag.OUTPUT)
        wide = ops.soft_max(ops.scale(keep, 2.0))
        less = ops.add(wide, wide)
        small = ops.scale(ops.sum(less), 2.0)
        late = ops.relu(ops.scale(ops.add(ops.repeat(small, (1000,)), ops.repeat(small, (1000,))), 2.0))
    traces = [expand_steps(late), expand_steps(a, a), *(memory_steps(random_graph(seed)) for seed in range(60)), memory_steps(build(late), Padded("padded", alignment=32))]
    _, _, plan, runner = planned_step()
    traces.append(plan_steps(plan))
    seen = {s["cause"] for t in traces for s in t["steps"]}
    assert seen == set(CAUSES)
    runner.close()


def test_pictures_of_the_last_state():
    _, _, plan, runner = planned_step()
    for trace in (expand_steps(mlp()), memory_steps(build(mlp())), plan_steps(plan)):
        made = steps_picture(trace, "caption")
        assert trace["title"] in made.alt and len(made.png) > 2000
        assert steps_picture(trace, "caption", 0).png != made.png
    runner.close()
