"""The placement of fewest bytes: against all placements, the two methods against each other, against the five passes, and done by
the real runtime."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler import random_runs
from tests.scheduler.graphs import context, leaf, values, weight
from workbench import Flag, Scheduler, build, ops, simulated_machine
from workbench.errors import GraphError, ParameterError, UnsupportedOp
from workbench.lessons.schedule_cases import CASES, random_case
from workbench.scheduler.optimum import Problem, _Network, by_cut, by_states, fewest_bytes
from workbench.scheduler.passes import computed
from workbench.trace import Trace

SEEDS = st.integers(0, 10**6)


def brute_force(problem):
    """Bytes and changes of the best of all placements, counted by a loop of its own over the graph's nodes."""
    choices, best = problem.choices, None
    for way in itertools.product(*(c.backends for c in choices)):
        of = dict(zip((c.tensor for c in choices), way))
        copied, line = {}, []
        for c in choices:
            if c.tensor.op == "NONE":
                continue
            line.append(of[c.tensor])
            for s in c.tensor.sources():
                if s is not c.tensor:
                    kind = s.storage.buffer_type if s.storage is not None else problem.types[of[s.root()]]
                    if not problem.backends[of[c.tensor]].supports_buft(kind):
                        copied[s, of[c.tensor]] = s.nbytes
        found = sum(copied.values()), sum(a != b for a, b in zip(line, line[1:]))
        best = found if best is None else min(best, found)
    return best


def problem_of(case):
    return Problem(*case.scheduler_and_graph())


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, n=st.integers(1, 7), chain=st.booleans(), devices=st.sampled_from([1, 1, 2]))
def test_no_placement_is_better(seed, n, chain, devices):
    problem = problem_of(random_case(seed, n, chain, devices))
    wanted = brute_force(problem)
    assert by_states(problem)[:2] == wanted
    if devices == 1:
        assert by_cut(problem)[:2] == wanted
    placement = fewest_bytes(*random_case(seed, n, chain, devices).scheduler_and_graph())
    assert placement[:2] == wanted


@settings(deadline=None, max_examples=25)
@given(seed=SEEDS, n=st.integers(20, 60))
def test_states_and_cut_agree_on_long_chains(seed, n):
    problem = problem_of(random_case(seed, n))
    assert by_states(problem)[:2] == by_cut(problem)[:2]


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, n=st.integers(3, 16), chain=st.booleans(), devices=st.sampled_from([1, 1, 2]))
def test_the_passes_are_never_better_and_are_counted_alike(seed, n, chain, devices):
    case = random_case(seed, n, chain, devices)
    _never_better(*case.scheduler_and_graph())


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_lesson_cases(case):
    _never_better(*case.scheduler_and_graph())


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_on_random_machines(seed):
    r = random.Random(seed)
    scheduler, graph = random_runs.machine_of(r), random_runs.graph_of(seed, 12)
    assigned = random_runs.place(r, scheduler, graph, random_runs.weights_of(r, graph), seed)
    random_runs.assign(scheduler, graph, assigned)
    try:
        problem = Problem(scheduler, graph)
    except GraphError as e:
        assert "writes over" in e.found
        return
    if np.prod([len(c.backends) for c in problem.choices], dtype=float) < 20_000:
        assert by_states(problem)[:2] == brute_force(problem)
    _never_better(scheduler, graph)


def _never_better(scheduler, graph):
    problem = Problem(scheduler, graph)
    best = by_states(problem)
    if len(scheduler.backends) == 2:
        assert by_cut(problem)[:2] == best[:2]
    assert problem.cost(best.of) == best
    scheduler.split(graph)
    real = {c.tensor: scheduler.assignment.of[c.tensor] for c in problem.choices}
    copied = sum(t.nbytes for s in scheduler.splits for t in s.inputs)
    assert problem.cost(real).nbytes == copied
    assert best.nbytes <= copied


@pytest.mark.parametrize("seed", range(30))
def test_the_real_runtime_copies_so_many_bytes(seed):
    """All nodes are assigned by hand as the optimum says. What the runtime then copies, by its trace, and what it computes."""
    case = random_case(seed, 10, chain=seed % 2 == 0)
    best = fewest_bytes(*case.scheduler_and_graph())
    results = []
    for place in (True, False):
        scheduler, graph = case.scheduler_and_graph()
        if place:
            for t, b in zip(Problem(scheduler, graph).choices, best.of.values()):
                scheduler.set_backend(t.tensor, b)
        scheduler.alloc(graph)
        case.write_inputs(graph)
        scheduler.trace = trace = Trace("virtual")
        scheduler.compute(graph)
        scheduler.trace = None
        events = [trace.described(e) for kind in ("set", "set_async", "get", "copy_async") for e in trace.of(kind)]
        moved = sum(e["bytes"] for e in events if e.get("done", 1) and e.get("memory", "") != "CPU")
        assert moved == (best.nbytes if place else sum(t.nbytes for s in scheduler.splits for t in s.inputs))
        results.append([t.numpy() for t in graph.nodes if t.flags & Flag.OUTPUT])
    assert all(map(np.array_equal, *results))  # equal bits, wherever a node runs


def test_the_chain_of_the_article():
    """A B C | D | E F moves 3 × 1,024 bytes; after A the host could keep everything."""
    best = fewest_bytes(*CASES["A B C | D | E F"].scheduler_and_graph())
    assert best[:2] == (2048, 1) and list(best.of.values()) == [1, 0, 1, 1, 1, 1, 1]  # x, A … F


def test_weights_stay_and_memory_that_is_shared_costs_nothing():
    blas = CASES["MLP with BLAS"]
    problem = problem_of(blas)
    names = {c.tensor.name: c for c in problem.choices}
    assert names["down"].backends == [0, 1, 2] and names["up_b"].backends == [0, 2]
    assert problem.copied(names["down"].tensor.src[0], -1, 1) == 0 and problem.copied(names["down"].tensor.src[0], -1, 0) == 32768
    with pytest.raises(ParameterError, match="3 devices for a cut"):
        by_cut(problem)


def test_a_cache_is_written_where_it_lies():
    gpu, cpu = simulated_machine()
    ctx = context()
    cache = weight(gpu.buffer_type, ctx, values(8, 4), "cache")
    with ctx.active():
        rows, x = leaf(ctx, 2, kind="i64", name="rows"), leaf(ctx, 4, 2, name="x")
        kept = ops.set_rows(cache, ops.neg(x).named("n"), rows).named("kept")
        graph = build(ops.sqr(kept).named("y").mark(Flag.OUTPUT))
    scheduler = Scheduler([gpu, cpu])
    best = fewest_bytes(scheduler, graph)
    assert {t.name: b for t, b in best.of.items()} == {"rows": 1, "x": 1, "n": 0, "kept": 0, "y": 0}
    _never_better(scheduler, graph)
    with ctx.active():
        early = ops.sqr(cache).named("early")
        late = ops.set_rows(cache, ops.add(ops.neg(x), ops.get_rows(early, leaf(ctx, 2, kind="i32"))), rows).named("late")
    with pytest.raises(GraphError, match="'late' writes over 'cache', which has no memory yet or was read before"):
        fewest_bytes(scheduler, build(late))


def test_what_cannot_be_placed_or_is_too_wide():
    case = CASES["A B C | D | E F"]
    scheduler, graph = case.scheduler_and_graph()
    for b in scheduler.backends:
        b.why_unsupported = lambda node: "no" if node.op == "SOFT_MAX" else ""
    with pytest.raises(UnsupportedOp, match="no backend can compute 'D' = SOFT_MAX"):
        fewest_bytes(scheduler, graph)
    ctx = context()
    with ctx.active():
        many = [ops.neg(leaf(ctx, 4, name=f"x{i}")) for i in range(14)]
        graph = build(*(ops.add(a, b) for a in many for b in many if a is not b))
    with pytest.raises(ParameterError, match="more than 50,000 states"):
        fewest_bytes(Scheduler(simulated_machine(2)), graph)
    assert fewest_bytes(Scheduler(simulated_machine(1)), graph).nbytes == 0


@settings(deadline=None, max_examples=80)
@given(seed=SEEDS, n=st.integers(2, 7))
def test_the_cut_is_a_minimum_cut(seed, n):
    r, net = random.Random(seed), _Network(n)
    edges = [(a, b, r.randrange(9)) for a in range(n) for b in range(n) if a != b and r.random() < 0.5]
    for edge in edges:
        net.edge(*edge)

    def cut(side):
        return sum(c for a, b, c in edges if a in side and b not in side)

    sides = [{0, *s} for k in range(n - 1) for s in itertools.combinations(range(2, n), k)]
    side = net.source_side()
    assert 1 not in side and cut(side) == min(map(cut, sides))


def test_nothing_is_changed():
    case = CASES["MLP, half on the host"]
    scheduler, graph = case.scheduler_and_graph()
    scheduler.alloc(graph)
    case.write_inputs(graph)
    places = [(t.storage, t.offset) for t in (*graph.leafs, *graph.nodes)]
    assert fewest_bytes(scheduler, graph).nbytes == 3072 and len(computed(graph.nodes)) == 6
    assert places == [(t.storage, t.offset) for t in (*graph.leafs, *graph.nodes)] and scheduler.is_allocated
