"""Cases and changes: built twice they are the same, taken from a graph that exists they are the same, and every answer of
`why_not` is checked against a scheduler that was set up by hand."""

import random
import time

import numpy as np
import pytest

from tests.scheduler import random_runs
from workbench import Scheduler, Usage, load, models, place_weights, simulated_machine
from workbench.devices.planned import PlannedBuffer
from workbench.errors import ParameterError, UnsupportedOp, WorkbenchError
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler.optimum import Problem, fewest_bytes
from workbench.scheduler.passes import computed, is_weight
from workbench.scheduler.whatif import Case, Change, candidates, outcome_of, tensors_of, why_not
from workbench.tensors import ops
from workbench.trace import Trace

ALL = list(CASES.values())
CHAIN = CASES["A B C | D | E F"]
CHANGES = [Change.move("W", "CPU"), Change.deny("SILU", "GPU"), Change.allow("SOFT_MAX", "GPU"), Change.assign("B", "CPU"),
           Change.batch(32), Change.op_offload(False), Change.parallel(True)]  # fmt: skip


def splits(outcome):
    return [(s.backend, [n.name for n in outcome.nodes[s.first : s.last]]) for s in outcome.splits]


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_a_case_is_a_value(case):
    assert hash(case) == hash(case.changed()) and case == case.changed() and case.name in repr(case)
    outcome = case.outcome()
    assert outcome == case.outcome() == Case.of(*case.scheduler_and_graph()).outcome()


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_the_outcome_is_what_the_scheduler_does_and_the_run_is_right(case):
    outcome, trace = case.outcome(), Trace("virtual")
    scheduler, graph = case.scheduler_and_graph(trace)
    scheduler.alloc(graph)
    case.write_inputs(graph)
    scheduler.compute(graph)
    assert [scheduler.backend_of(n).name for n in graph.nodes] == [n.backend for n in outcome.nodes]
    names = {t: key for key, t in tensors_of(graph).items()}
    assert [(s.first, s.last, *((names[t], t.nbytes) for t in s.inputs)) for s in scheduler.splits] == [
        (s.first, s.last, *s.inputs) for s in outcome.splits]  # fmt: skip
    assert [trace.described(e)["cause"] for e in trace.of("split")] == [s.cause for s in outcome.splits]
    result = graph.nodes[-1].numpy()
    assert np.isfinite(result).all()

    names_of_cpu = {"recipe": case.recipe, "batch": case.batch}
    on_cpu = Case("all on the CPU", **names_of_cpu, devices=case.devices, op_offload=False,
                  weights=tuple((k, "CPU") for k, t in tensors_of(graph).items() if is_weight(t)))  # fmt: skip
    plain, same = on_cpu.scheduler_and_graph()
    plain.alloc(same)
    on_cpu.write_inputs(same)
    plain.compute(same)
    assert np.array_equal(result, same.nodes[-1].numpy())  # equal bits: simulated devices compute exactly


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_building_and_splitting_again_is_quick(case):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        case.outcome()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1, f"{1000 * min(times):.0f} ms"


def test_each_change_does_what_it_says():
    by_change = {c.kind: CHAIN.changed(c) for c in CHANGES}
    assert splits(CHAIN.outcome()) == [("GPU", ["A", "B", "C"]), ("CPU", ["D"]), ("GPU", ["E", "F"])]
    assert splits(by_change["weight"].outcome()) == [("CPU", [*"ABCDEF"])]
    assert splits(by_change["deny"].outcome()) == [("GPU", ["A"]), ("CPU", ["B"]), ("GPU", ["C"]), ("CPU", ["D"]), ("GPU", ["E", "F"])]
    assert splits(by_change["allow"].outcome()) == [("GPU", [*"ABCDEF"])]
    assert splits(by_change["assign"].outcome()) == [("GPU", ["A"]), ("CPU", [*"BCDEF"])]
    assert by_change["batch"].outcome().copied == 8 * CHAIN.outcome().copied
    assert by_change["parallel"].scheduler_and_graph()[0].n_copies == 4
    two = CHAIN.changed(Change.parallel(2))
    assert two.scheduler_and_graph()[0].n_copies == 2 and Case.of(*two.scheduler_and_graph()).parallel == 2
    offload = CASES["MLP, batch 32"]
    assert splits(offload.outcome()) != splits(offload.changed(Change.op_offload(False)).outcome())
    assert CHAIN.changed(*CHANGES[:2], Change.move("W", "GPU"), Change.allow("SILU", "GPU")).outcome() == CHAIN.outcome()
    assert by_change["assign"].changed(Change.assign("B", "")) == CHAIN
    assert [str(c) for c in CHANGES] == ["put the weight W on CPU", "take SILU away from GPU", "give GPU a kernel for SOFT_MAX",
                                         "assign B to CPU by hand", "a batch of 32", "op_offload off", "n_copies = 4"]  # fmt: skip


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_a_change_has_the_same_effect_on_a_graph_that_was_taken(case):
    """Every single change, on the recipe built anew and on the copy of a graph that exists."""
    scheduler, graph = case.scheduler_and_graph()
    taken, before = Case.of(scheduler, graph), case.outcome()
    ways = [c for c, _ in candidates(scheduler, graph, before, before.nodes[0].name)]
    ways += [Change.deny(n.desc, b.name) for n in computed(graph.nodes) for b in scheduler.backends[:-1]]
    for change in dict.fromkeys(ways):
        assert _result(case.changed(change)) == _result(taken.changed(change)), str(change)


def _result(case):
    try:
        return case.outcome()
    except WorkbenchError as e:
        return type(e), e.found


def test_taking_a_graph_changes_nothing():
    case = CASES["MLP, batch 32"]
    trace = Trace("virtual")
    scheduler, graph = case.scheduler_and_graph(trace)
    scheduler.alloc(graph)
    case.write_inputs(graph)
    scheduler.compute(graph)
    events, result = len(trace.events), graph.nodes[-1].numpy().copy()
    state = [(t, t.storage, t.offset, t.src, t.flags, t.name) for t in (*graph.leafs, *graph.nodes)]
    taken = Case.of(scheduler, graph)
    assert taken.outcome() == case.outcome() and why_not(taken, 1).tried
    assert state == [(t, t.storage, t.offset, t.src, t.flags, t.name) for t in (*graph.leafs, *graph.nodes)]
    assert len(trace.events) == events and scheduler.trace is trace and scheduler.is_allocated
    case.write_inputs(graph)
    scheduler.compute(graph)
    assert np.array_equal(result, graph.nodes[-1].numpy())
    with pytest.raises(ParameterError, match="was built elsewhere"):
        taken.changed(Change.batch(2))


def test_assignments_by_hand_are_taken_along():
    scheduler, graph = CHAIN.scheduler_and_graph()
    scheduler.set_backend(graph.find("E"), 1)
    taken = Case.of(scheduler, graph)
    assert taken.assigned == (("E", "CPU"),) and taken.outcome() == CHAIN.changed(Change.assign("E", "CPU")).outcome()
    assert taken.changed(Change.assign("E", "")).outcome() == CHAIN.outcome()


@pytest.mark.parametrize("change, match", [
    (Change.move("V", "GPU"), "no weight 'V'\n.*one of W"), (Change.move("W", "TPU"), "no device 'TPU'\n.*GPU, CPU"),
    (Change.move("x", "GPU"), "no weight 'x'"), (Change.deny("SOFTMAX", "GPU"), "no op 'SOFTMAX'"),
    (Change.deny("SILU", "GPU7"), "no device 'GPU7'"), (Change.assign("Q", "GPU"), "no tensor 'Q'"), (Change.assign("A", "X"), "no device 'X'"),
    (Change.batch(0), "a batch of 0"), (Change.batch("many"), "a batch of 'many'"), (Change.op_offload(2), "op_offload"),
    (Change.parallel(9), "parallel=9"), (Change.parallel("many"), "parallel"),
    (Change("n_copies", "", 3), "n_copies"),
])  # fmt: skip
def test_changes_that_make_no_sense(change, match):
    with pytest.raises(ParameterError, match=match):
        CHAIN.changed(change).outcome()


def test_a_scheduler_refuses_what_it_always_refuses():
    with pytest.raises(UnsupportedOp, match="GPU cannot compute 'D'"):
        CHAIN.changed(Change.assign("D", "GPU")).outcome()
    assert splits(Case("as ggml", CHAIN.recipe, denied=CHAIN.denied, assigned=(("D", "GPU"),), quirks="ggml").outcome()) == [
        ("GPU", [*"ABCDEF"])]  # fmt: skip


# ---- why not?


def test_the_article_s_chain():
    for border in (1, "D", 2, "E"):
        answer = why_not(CHAIN, border)
        assert answer.best.change == Change.allow("SOFT_MAX", "GPU") and answer.left == 0
        assert (answer.best.splits, answer.best.copied, answer.best.shifted, answer.best.new) == (1, 1024, 1, ())
        assert CHAIN.changed(answer.best.change).outcome().borders() == []
        assert [(str(t.change), t.why) for t in answer.tried if t.verdict == "refused"] == [
            ("assign D to GPU by hand", "GPU cannot compute 'D' = SOFT_MAX")]  # fmt: skip
        assert "give GPU a kernel for SOFT_MAX" in str(answer) and "10 single changes" in str(answer)


def test_where_no_single_change_helps():
    case = CASES["MLP, half on the host"]
    answer = why_not(case, "down")
    assert answer.best is None and answer.removing == [] and "none takes the border away" in str(answer)
    assert {t.change.kind for t in answer.tried} == {"assign", "weight"} and answer.count("moves") == 4
    assert len(case.changed(Change.move("W2", "GPU"), Change.move("b2", "GPU")).outcome().splits) == 1


def test_borders_by_a_weight_and_by_a_full_list():
    weight = why_not(CASES["MLP, batch 32"], "down_b")
    assert weight.cause.startswith("the weight 'b2'") and weight.best.change == Change.move("b2", "GPU") and weight.best.moved == 256
    full = why_not(CASES["forty inputs"], 1)
    assert "list of 30 inputs is full" in full.cause and full.best is not None


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_every_verdict_holds_when_done_by_hand(case):
    """Each candidate is applied to a machine, a graph and a scheduler that were set up for it, without `changed`."""
    before = case.outcome()
    for number in range(1, len(before.splits)):
        answer = why_not(case, number)
        for tried in answer.tried[:60]:
            verdict = _by_hand(case, tried.change, before, answer.border)
            assert verdict == (tried.verdict, tried.splits, tried.copied), str(tried.change)
        key = [t.shifted for t in answer.removing]
        assert key == sorted(key) and (answer.best is None) == (answer.count("removes") == 0)


def _by_hand(case, change, before, border):
    scheduler, graph = case.scheduler_and_graph()
    t, b = graph.find(change.what), next(b for b in scheduler.backends if b.name == change.value)
    if "@" in change.what:
        t = tensors_of(graph)[change.what]
    if change.kind == "weight":
        t.place(PlannedBuffer(b.buffer_type, t.nbytes, Usage.WEIGHTS))
    elif change.kind == "allow":
        b.why_unsupported = lambda node, own=b.why_unsupported: "" if change.what in (node.op, node.desc) else own(node)
    else:
        try:
            scheduler.set_backend(t, b)
        except WorkbenchError:
            return "refused", 0, 0
    try:
        scheduler.split(graph)
    except WorkbenchError:
        return "refused", 0, 0
    owner = {n: i for i, s in enumerate(scheduler.splits) for n in graph.nodes[s.first : s.last]}
    one, other = (owner[tensors_of(graph)[name]] for name in border)
    n, copied = len(scheduler.splits), sum(t.nbytes for s in scheduler.splits for t in s.inputs)
    return "keeps" if one != other else "removes" if n < len(before.splits) else "moves", n, copied


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_on_random_machines(seed):
    """All answers about one border: complete, and each removal is one."""
    r = random.Random(seed)
    scheduler, graph = random_runs.machine_of(r), random_runs.graph_of(seed, 14)
    assigned = random_runs.place(r, scheduler, graph, random_runs.weights_of(r, graph), seed)
    random_runs.assign(scheduler, graph, assigned)
    case = Case.of(scheduler, graph)
    before = case.outcome()
    assert before == outcome_of(scheduler, graph)
    if not before.borders():
        with pytest.raises(ParameterError, match="there is one split only"):
            why_not(case, 1)
        return
    answer = why_not(case, r.randrange(1, len(before.splits)))
    work = computed(graph.nodes)
    lacking = {(n.desc, b.name) for n in work for b in scheduler.backends if n.spec and not b.supports_op(n)}
    assert {(t.change.what, t.change.value) for t in answer.tried if t.change.kind == "allow"} == lacking
    homes = {id(k) for k in scheduler.buffer_types}
    weights = [t for t in graph.leafs if is_weight(t)]
    assert sum(t.change.kind == "weight" for t in answer.tried) == sum(len(homes - {id(t.storage.buffer_type)}) for t in weights)
    free = [t for t in work if t.storage is None]
    assert sum(t.change.kind == "assign" for t in answer.tried) >= len(free) * (len(scheduler.backends) - 1)
    for t in answer.removing:
        after = case.changed(t.change).outcome()
        assert answer.border not in after.borders() and len(after.splits) < len(before.splits)
    partial = why_not(case, answer.border[1], most=3)
    assert partial.left == len(answer.tried) - 3 and f"Tried 3 of {len(answer.tried)}" in str(partial)


@pytest.mark.parametrize("name", ["tiny-mixtral-f16", "tiny-deepseek-f16"])
def test_a_shipped_model(name):
    with load(name) as model:
        backends = simulated_machine()
        with place_weights(model, backends, overrides={"_exps": "CPU"}) as placed:
            cache = models.KVCache(placed.hparams, 256, placed.layer_types)
            step = models.build_step(placed, cache, 1, 256, 1)
            scheduler = Scheduler(backends)
            case = Case.of(scheduler, step.graph)
            before = case.outcome()
            assert before == outcome_of(scheduler, step.graph) and len(before.splits) == 2 * len(model.hparams.moe_layers) + 2
            places = dict(before.leafs) | {n.name: n.backend for n in before.nodes}
            answer = why_not(case, 1, most=40)
            assert answer.left > 100 and len(answer.tried) == 40
            freed = case.changed(*(Change.move(k, "GPU") for k, t in tensors_of(step.graph).items() if is_weight(t)))
            assert len(freed.outcome().splits) == 1
            best, problem = fewest_bytes(scheduler, step.graph), Problem(scheduler, step.graph)
            real = problem.cost({c.tensor: next(i for i, b in enumerate(backends) if b.name == places[c.tensor.name]) for c in problem.choices})
            assert best.nbytes < real.nbytes == before.copied


@pytest.mark.parametrize("border", [0, 3, -1, "A", "nobody", None])
def test_borders_that_are_none(border):
    with pytest.raises(ParameterError, match="no border at .*\n.*1: D, 2: E"):
        why_not(CHAIN, border)


def _clashing(d):
    """The third tensor would be called "x @ 2", as the second one is."""
    return ops.soft_max(ops.mul_mat(d.weight("x @ 2", 64, 64, on="GPU"), d.input("x", 64, d.batch)).named("x")).named("y")


def test_names_that_look_like_places_lose_no_tensor():
    case = Case("clash", _clashing, denied=(("SOFT_MAX", "GPU"),))
    graph = case.scheduler_and_graph()[1]
    assert [*tensors_of(graph)] == ["x @ 2", "x", "x @ 2 @ 2", "y"]
    answer = why_not(case, "y")
    assert str(answer.best.change) == "assign x @ 2 @ 2 to CPU by hand" and len(case.outcome().splits) == 2
    assert case.changed(Change.assign("x @ 2 @ 2", "CPU")).outcome().nodes[0].backend == "CPU"


def _long(d):
    x = d.input("x", 16, d.batch)
    for i in range(1500):
        x = ops.add(ops.mul_mat(d.weight(f"W{i}", 16, 16, on="GPU"), x) if i % 3 == 0 else ops.silu(x), x)
    return x


def test_a_recipe_may_make_a_large_graph():
    """3,000 nodes, more than ggml's default capacity of a graph."""
    out = Case("long", _long).outcome()
    assert len(out.nodes) == 3000 and len(out.splits) == 1


def test_a_weight_read_twice_cuts_twice_and_is_copied_once():
    """As in ggml, whose rule asks where a weight lies, not whether its copy is there. The cause says so."""
    a, b = CASES["a weight used twice"].outcome().splits
    assert [name for name, _ in a.inputs] == ["W", "x"] and [name for name, _ in b.inputs] == ["W2"]
    assert b.cause.startswith("the weight 'W' lies elsewhere") and "must be copied in" not in b.cause
