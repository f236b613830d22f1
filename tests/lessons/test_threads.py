"""Lesson 05: its simulations against what can be known otherwise, the re-enacted threads, and the knobs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import devices, views, widgets
from workbench.lessons import open_lesson
from workbench.lessons.thread_states import Machine, critical_path, speed_ups
from workbench.tensors import Context, ops

FREE = Machine(flops=10.0, memory=1e9, memory_all=1e9, wake_ns=0.0, helper_ns=0.0, barrier_ns=0.0)


@pytest.fixture(scope="module")
def state():
    return open_lesson("05").state


def test_shapes_are_those_of_tinyllama(state):
    shapes = state.tinyllama.expected_tensors() | {"output.weight": (2048, 32000)}
    assert sum(math.prod(ne) for ne in shapes.values()) == 1_100_048_384


@pytest.mark.parametrize("n_tokens", [1, 512])
def test_simulation_without_overheads_is_arithmetic(state, n_tokens):
    works = state.works(state.layer(n_tokens))
    flops = sum(w.flops for w in works)
    assert state.simulate(works, 1, FREE) == pytest.approx(flops / 10)
    assert state.simulate_ggml(works, 1, FREE) == pytest.approx(flops / 10)
    widest = max(w.tasks for w in works)
    bound = sum(w.flops / w.tasks for w in works) / 10          # every task on a core of its own
    assert state.simulate(works, widest, FREE) == pytest.approx(bound) == pytest.approx(state.simulate(works, 1000, FREE))
    times = [state.simulate(works, n, FREE) for n in range(1, 20)]
    assert times == sorted(times, reverse=True)                 # free meetings never hurt


def test_memory_bounds_and_meetings_cost(state):
    works = state.works(state.layer(1))
    m = state.machine
    least = sum(w.moved for w in works) / m.memory_all
    assert all(state.simulate_ggml(works, n) >= least for n in (1, 4, 32))
    free = m._replace(wake_ns=0.0, helper_ns=0.0, barrier_ns=0.0)
    cut = sum(w.tasks > 1 for w in works)
    assert state.simulate(works, 2) - state.simulate(works, 2, free) == pytest.approx(cut * (m.wake_ns + m.helper_ns))
    assert state.simulate_ggml(works, 9) - state.simulate_ggml(works, 9, free) == pytest.approx(len(works) * 8 * m.barrier_ns)
    assert speed_ups(state.simulate, works, [1]) == [1.0]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(1, 4))
def test_reenacted_threads_enter_every_node_and_take_every_chunk_once(chunks, n_threads):
    log = open_lesson("05").state.ggml_threads(chunks, n_threads)
    assert sorted((me, at) for me, at, _ in log) == [(me, at) for me in range(n_threads) for at in range(len(chunks))]
    assert [sum(n for _, at, n in log if at == node) for node in range(len(chunks))] == chunks


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_makespan_lies_between_its_bounds(tasks, n_threads):
    span = open_lesson("05").state.makespan(tasks, n_threads)
    average, longest = sum(tasks) / n_threads, max(tasks)
    assert max(average, longest) <= span <= average + longest * (1 - 1 / n_threads) + 1e-9      # Graham, 1966
    assert span == sum(tasks) or n_threads > 1


def test_makespan_is_that_of_the_stepper(state):
    plan, _ = state.prepare(1, 3)
    events = [step["event"] for step in views.plan_steps(plan)["steps"]]
    for i, job in enumerate(plan.jobs):
        mine = [e for e in events if e[1] == i]
        assert max(e[7] for e in mine) - min(e[6] for e in mine) == state.makespan([e[7] - e[6] for e in mine], 3), job.node.name


def test_critical_path_of_a_diamond():
    with Context(2**16, no_alloc=True) as ctx:
        x = ctx.new_tensor("f32", 4)
        a, b = ops.silu(x), ops.sqr(x)
        c = ops.neg(b)
        y = ops.add(a, c)
        ends, chain = critical_path([a, b, c, y], {a: 5.0, b: 2.0, c: 2.0, y: 1.0})
        assert ends[y] == 6.0 and [id(t) for t in chain] == [id(a), id(y)]
        assert critical_path([a, b, c, y], {b: 1.0})[0][y] == 1.0


def test_prepared_runs_can_be_repeated_with_the_same_bits(state):
    plan, step = state.prepare(64, 2)
    plan.run()
    first = step.logits.numpy().tobytes()
    plan.run()
    assert step.logits.numpy().tobytes() == first and b"\0" * 64 not in first[:64]
    assert {job.node: job.parts for job in plan.jobs} == {job.node: devices.cut(job.node)[1] for job in plan.jobs}


def test_knobs_run_the_code_again_and_show_text_as_text():
    seen = []

    def run(*values):
        seen.append(values)
        return views.table(["<v>"], [[v] for v in values], "c")

    knobs = widgets.Knobs(knobs=[["<knob>", 0, 2, ["a", "<b>", "c"]], ["other", 1, 9, []]], values=[1, 5]).drive(run)
    assert seen == [(1, 5)] and "<b>" not in knobs.stored_html().replace("<div><b>", "") and "&lt;knob&gt;: &lt;b&gt;" in knobs.stored_html()
    knobs.values = [2, 5]
    assert seen[-1] == (2, 5) and "<knob>: c; other: 5" in knobs.stored_text() and "&lt;v&gt;" in knobs.below
