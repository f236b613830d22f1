"""The scheduler's decisions as steps: they end where `split` ends, their sentences are true, and nothing is changed by looking."""

import copy
import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parity import sched_case
from tests.scheduler.random_runs import assign, graph_of, machine_of, place, weights_of
from tests.views.graphs import HOSTILE, MODELS, model_step
from workbench import Flag, Scheduler, build, ops
from workbench.cgraph import CGraph
from workbench.devices import CpuBackend
from workbench.devices.simulated import simulated_machine
from workbench.errors import ParameterError, WorkbenchError
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler import STAGES
from workbench.tensors import Context
from workbench.views import schedule_picture, schedule_steps, steps_picture
from workbench.views.schedule_drawing import draw_schedule, last_of
from workbench.views.schedule_pairs import pairing
from workbench.views.schedule_quiz import RIGHT, WRONG
from workbench.views.schedule_steps import CAUSES, RULES
from workbench.views.steps import state

SEEDS = st.integers(0, 10**6)


def random_split(seed, **kw):
    """A scheduler and a graph with weights and assignments by hand, not split yet."""
    r = random.Random(seed)
    scheduler, graph = machine_of(r, **kw), graph_of(seed)
    weights = weights_of(r, graph)
    assign(scheduler, graph, place(r, scheduler, graph, weights, seed))
    return scheduler, graph


def last(steps):
    return state(steps, len(steps["steps"]) - 1)


def agrees_with_split(steps, scheduler, graph):
    """The last state is the assignment, the causes, the splits with their inputs, the copies and the rewrites of `split`."""
    scheduler.split(graph)
    s, a = last(steps), scheduler.assignment
    tensors = [*graph.leafs, *graph.nodes]
    assert s["of"][: len(tensors)] == [a.of.get(t, -1) for t in tensors]
    rotated = scheduler.splitter.graph_inputs                  # the original is one of its copies then, and so called
    assert all(a.causes[t] == "4.cpy" for t in rotated)
    told = {int(t): max(stages.items(), key=lambda item: int(item[0]))[1] for t, stages in s["table"].items()}
    assert {i: steps["causes"][cause] for i, (_, cause) in told.items() if i < len(tensors) and tensors[i] not in rotated} == {
        i: a.causes[t] for i, t in enumerate(tensors) if t in a.causes and t not in rotated}
    ids = {t: i for i, t in enumerate(tensors)}
    assert s["splits"] == [[p.backend, p.first, [ids[t] for t in p.inputs]] for p in scheduler.splits]
    assert s["rewrites"] == [[ids[r.node], r.j, ids[r.original]] for r in scheduler.splitter.rewrites]
    assert {tuple(c) for c in s["copies"]} >= {(ids[t], b) for t, b in scheduler.splitter.copies}
    assert not s["failed"]


@given(SEEDS)
def test_the_last_state_is_what_split_decides(seed):
    scheduler, graph = random_split(seed)
    agrees_with_split(schedule_steps(scheduler, graph), scheduler, graph)


def test_recorded_cases_of_real_ggml(data):
    """Of every recorded case: what real ggml decided, or a last step that says why it is refused."""
    n = refused = 0
    for case in sched_case.load([data / "goldens/sched"]):
        scheduler = sched_case.scheduler(case)
        made = sched_case.tensors(case["tensors"], scheduler.case_types)
        graph = sched_case.expanded(case["graph"], made, case["graph_size"])
        for tensor, backend in case["user_assign"]:
            scheduler.set_backend(made[tensor], backend)
        steps = schedule_steps(scheduler, graph, case["name"])
        recorded = case["expect"].get("stages", {})
        for stage in STAGES if "pass4" in recorded else ():
            s = state(steps, last_of(steps, stage))
            name = [t.name for t in (*graph.leafs, *graph.nodes)]
            found = {k: s["of"][name.index(k)] for k in recorded[stage]}
            assert found == recorded[stage], (case["name"], stage)
            n += len(found)
        try:
            scheduler.split(graph)
        except WorkbenchError as why:
            refused += 1
            assert steps["steps"][-1]["event"] == ["fail"] and str(why).split("\n")[0].split(",")[0][:40] in steps["steps"][-1]["sentence"]
        else:
            agrees_with_split(steps, scheduler, graph)
    assert n > 5000 and refused >= 2


@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_lessons(name):
    scheduler, graph = CASES[name].scheduler_and_graph()
    agrees_with_split(schedule_steps(scheduler, graph), scheduler, graph)


@given(SEEDS)
def test_a_state_depends_on_the_steps_before_it_alone(seed):
    steps = schedule_steps(*random_split(seed))
    states = [state(steps, k) for k in range(len(steps["steps"]))]
    for k in range(0, len(states), max(1, len(states) // 9)):
        cut = {**steps, "steps": copy.deepcopy(steps["steps"][: k + 1])}
        assert state(cut, k) == state(steps, k) == states[k]


@given(SEEDS)
def test_looking_changes_nothing(seed):
    scheduler, graph = random_split(seed)
    before = [(t.src, t.flags, t.storage, t.name) for t in (*graph.leafs, *graph.nodes)]
    first = schedule_steps(scheduler, graph, questions=True)
    assert [(t.src, t.flags, t.storage, t.name) for t in (*graph.leafs, *graph.nodes)] == before
    assert scheduler.splits == [] and first == schedule_steps(scheduler, graph, questions=True)


def test_a_graph_with_memory_gives_the_same_steps():
    scheduler, graph = CASES["A B C | D | E F"].scheduler_and_graph()
    before = schedule_steps(scheduler, graph)
    scheduler.alloc(graph)
    places = [t.storage for t in graph.nodes]
    assert all(places) and schedule_steps(scheduler, graph) == before
    assert [t.storage for t in graph.nodes] == places and scheduler.is_allocated
    other, _ = CASES["A B C | D | E F"].scheduler_and_graph()     # another scheduler would take the graph over
    assert schedule_steps(other, graph)["steps"][-1]["sentence"] and [t.storage for t in graph.nodes] == places


# ---- sentences


@given(SEEDS)
def test_sentences_name_who_decided(seed):
    """What a sentence claims is checked against the state before its step."""
    steps = schedule_steps(*random_split(seed))
    of, names = [-1] * len(steps["names"]), steps["names"]
    data, looks = steps["graph"]["data"]["tensors"], [b["name"] for b in steps["backends"]]
    work = [t for t in steps["order"] if data[t]["class"] != "V"]
    for step in steps["steps"]:
        kind, *rest = step["event"]
        if kind == "assign":
            t, b, stage, _ = rest
            assert names[t] in step["sentence"]
            if b >= 0:
                assert looks[b] in step["sentence"]
            if step["cause"] == "2.sup" and RULES[list(RULES)[stage]][0].startswith("2 "):
                way, near, i = 1 if "after it" in step["sentence"] else -1, step["by"], work.index(t)
                j = i + way
                while of[work[j]] == -1:
                    j += way
                assert work[j] == near and of[near] == b and f"from {names[near]}, the next" in step["sentence"]
                over = re.search(r"over (\d+) that", step["sentence"])
                assert (int(over[1]) if over else 0) == abs(j - i) - 1
            if step["cause"].startswith("1.wgt"):
                assert data[t]["src"][int(step["cause"][5:])] == step["by"] and not data[step["by"]]["op"]
            if step["cause"] == "4.cur" and "by" in step and b >= 0:
                assert of[step["by"]] == b and (t in data[step["by"]]["src"] or data[step["by"]]["view"][0] == t)
            if step["cause"] == "4.vsrc" and b >= 0:
                assert of[step["by"]] == b
            of[t] = b


def test_every_cause_occurs_and_no_other(data):
    runs = [schedule_steps(*random_split(seed)) for seed in (*range(160), 271, 401, 437, 488)] + [schedule_steps(*random_split(seed, quirks="ggml")) for seed in range(20)]
    for case in sched_case.load([data / "goldens/sched"]):
        scheduler = sched_case.scheduler(case, quirks="")
        made = sched_case.tensors(case["tensors"], scheduler.case_types)
        for tensor, backend in case["user_assign"]:
            try:
                scheduler.set_backend(made[tensor], backend)
            except WorkbenchError:
                pass
        runs.append(schedule_steps(scheduler, sched_case.expanded(case["graph"], made, case["graph_size"])))
    runs += [schedule_steps(*case.scheduler_and_graph()) for case in CASES.values()]
    sentences = [step["sentence"] for run in runs for step in run["steps"]]
    for cause, text in CAUSES.items():
        if cause.startswith("stage"):
            continue
        pattern = re.compile(".*?".join(re.escape(part) for part in re.split(r"\{\w+\}", text)) + "$", re.S)
        assert any(pattern.match(s) for s in sentences), cause
    assert not any("{" in s for s in sentences)


def test_stages_can_be_chosen():
    case = CASES["attention, no softmax on the GPU"].scheduler_and_graph
    everything = schedule_steps(*case())
    some = schedule_steps(*case(), stages=["pass2", "pass3"])
    assert {s["stage"] for s in some["steps"]} == {*STAGES[1:6]}
    assert last(some) == state(everything, last_of(everything, "pass3"))
    assert state(some, 0) == state(everything, last_of(everything, "pass1") + 1)
    assert schedule_steps(*case(), stages="pass5")["steps"][0]["event"] == ["stage", len(RULES) - 1]
    for wrong in (["pass6"], [], "pass2_"):
        with pytest.raises(ParameterError, match="pass2"):
            schedule_steps(*case(), stages=wrong)


def test_each_stage_is_announced_once():
    steps = schedule_steps(*CASES["A B C | D | E F"].scheduler_and_graph())["steps"]
    assert [s["stage"] for s in steps if s["event"][0] == "stage"] == [*STAGES, "pass5"]
    assert [s["stage"] for s in steps if s["cause"] == "stage empty"] == ["pass2_gpu_up", "pass2_rest_down", "pass2_rest_up", "pass4"]


def test_what_is_no_schedule_is_refused():
    context = Context(10**5, no_alloc=True)
    with context.active():
        y = ops.relu(context.new_tensor("f32", 4).mark(Flag.INPUT))
    with pytest.raises(ParameterError, match="Scheduler"):
        schedule_steps(None, build(y))
    with pytest.raises(ParameterError, match="CGraph"):
        schedule_steps(Scheduler([CpuBackend()]), 3)
    with pytest.raises(ParameterError, match="without nodes"):
        schedule_steps(Scheduler([CpuBackend()]), CGraph())
    assert schedule_steps(Scheduler([CpuBackend()]), [y])["steps"]       # tensors are enough


def test_a_graph_of_views_alone_and_names_of_strangers():
    context = Context(10**5, no_alloc=True)
    with context.active():
        y = ops.reshape(context.new_tensor("f32", 4, name=HOSTILE).mark(Flag.INPUT), 2, 2).named("{t}")
    steps = schedule_steps(Scheduler([CpuBackend()]), [y], questions=True)
    assert [s["event"][0] for s in steps["steps"] if s["stage"] == "pass5"] == ["stage", "split"]
    assert not any(c in "".join(s["sentence"] for s in steps["steps"]) for c in "\x1b\n")
    assert "{t}" in "".join(s["sentence"] for s in steps["steps"]) and schedule_picture(Scheduler([CpuBackend()]), [y]).png


def test_tensors_of_one_name_are_told_apart():
    scheduler = Scheduler(simulated_machine(1))
    steps = schedule_steps(scheduler, model_step(MODELS[0]))
    assert len(set(steps["names"])) == len(steps["names"])
    assert "Qcur-0 (MUL_MAT)" in steps["names"] and "l_out-0" in steps["names"]


# ---- pictures


def test_pictures_say_what_they_show():
    scheduler, graph = CASES["A B C | D | E F"].scheduler_and_graph()
    cut = schedule_picture(scheduler, graph)
    assert "Split 1 on CPU from D, inputs: C." in cut.alt and cut.caption == "6 nodes: 5 on GPU, 1 on CPU; 3 splits with 3 copies."
    early = schedule_picture(scheduler, graph, "pass1", "Only A is decided.")
    assert "A GPU; B none yet" in early.alt and early.caption == "Only A is decided." and early.png != cut.png
    assert "D none yet" in schedule_picture(scheduler, graph, "pass2").alt
    layered = schedule_picture(scheduler, graph, layers=True)
    assert layered.png != cut.png and "GPU" in layered.caption
    with pytest.raises(ParameterError, match="pass7"):
        schedule_picture(scheduler, graph, "pass7")


def test_pictures_of_large_graphs_are_small():
    steps = schedule_steps(Scheduler(simulated_machine(1)), model_step(MODELS[1]))
    for layers in (False, True):
        assert len(draw_schedule(steps, len(steps["steps"]) - 1, "", layers).png) < 60_000
    assert steps_picture(steps, "x").alt == draw_schedule(steps, len(steps["steps"]) - 1, "x").alt


# ---- questions


@given(SEEDS)
def test_questions_have_one_right_answer_and_named_wrong_ones(seed):
    steps = schedule_steps(*random_split(seed), questions=True)
    plain = schedule_steps(*random_split(seed))
    assert [{k: v for k, v in s.items() if k != "ask"} for s in steps["steps"]] == plain["steps"]
    for step in steps["steps"]:
        if (ask := step.get("ask")) is None:
            assert step["event"][0] not in ("assign",) or step["cause"] in ("usr", "4.own", "4.rest", "4.vsrc")
            continue
        assert ask["is"] == (step["event"][1] if step["event"][0] != "assign" else step["event"][2]) or step["event"][0] == "split"
        assert [v for _, v in ask["choices"]].count(ask["is"]) == 1 and len({v for _, v in ask["choices"]}) == len(ask["choices"])
        texts = [text for text, _, _ in ask["options"]]
        assert len(set(texts)) == len(texts) >= 2
        right = ask["options"][ask["right"]]
        assert right[1:] == ["", ""] and all(name in WRONG and why for text, name, why in ask["options"] if text != right[0])
        if step["event"][0] == "split":
            assert ask["is"] == step["event"][2]


def test_every_misconception_and_every_reason_is_asked_somewhere():
    seen, reasons = set(), set()
    runs = [schedule_steps(*random_split(seed), questions=True) for seed in range(120)]
    runs += [schedule_steps(*case.scheduler_and_graph(), questions=True) for case in CASES.values()]
    runs.append(schedule_steps(Scheduler(simulated_machine(1)), model_step(MODELS[0]), questions=True))
    for ask in (s["ask"] for run in runs for s in run["steps"] if "ask" in s):
        seen |= {name for _, name, _ in ask["options"]} - {""}
        reasons.add(ask["options"][ask["right"]][0])
    assert seen == set(WRONG)
    for key, text in RIGHT.items():
        pattern = re.compile(".*?".join(re.escape(part) for part in re.split(r"\{\w+\}", text)) + "$", re.S)
        assert any(pattern.match(r) for r in reasons), key


def test_questions_are_not_answered_by_their_place():
    places = [s["ask"]["right"] for case in CASES.values() for s in schedule_steps(*case.scheduler_and_graph(), questions=True)["steps"] if "ask" in s]
    assert max(places.count(i) for i in range(4)) < 0.5 * len(places)


# ---- two runs


def test_two_runs_are_matched_by_name_and_their_differences_found():
    a = schedule_steps(*CASES["MLP, half on the host"].scheduler_and_graph())
    b = schedule_steps(*CASES["MLP, batch 32"].scheduler_and_graph())
    pairs = pairing(a, b)
    assert [b["names"][t] for t in pairs["match"]] == a["names"]
    assert pairs["at"] == sorted(pairs["at"]) and pairs["at"][-1] == len(b["steps"]) - 1
    labels = [a["steps"][k]["label"] for k in pairs["differs"]]
    assert labels[:2] == ["down → CPU", "down_b → CPU"] and "up → GPU" not in labels
    assert b["steps"][pairs["same"][pairs["differs"][0]]]["label"] == "down → GPU"
    for k, step in enumerate(a["steps"]):                     # at the end of a stage both runs have ended it
        if k + 1 < len(a["steps"]) and a["steps"][k + 1]["stage"] != step["stage"]:
            s = state(b, pairs["at"][k])
            assert s == state(b, last_of(b, step["stage"]))


@given(SEEDS)
def test_a_run_does_not_differ_from_itself(seed):
    a, b = (schedule_steps(*random_split(seed)) for _ in range(2))
    pairs = pairing(a, b)
    n = len(a["steps"])
    assert pairs == {"match": list(range(len(a["names"]))), "at": list(range(n)), "same": list(range(n)), "differs": []}


@given(SEEDS, SEEDS)
def test_differences_are_those_of_the_tables(seed, other):
    """Other settings, the same graph: the steps marked are those whose cell is another, or has no counterpart."""
    a = schedule_steps(*random_split(seed))
    r = random.Random(other)
    scheduler = machine_of(r)
    b = schedule_steps(scheduler, graph_of(seed))
    pairs, names = pairing(a, b), [[x["name"] for x in run["backends"]] for run in (a, b)]
    theirs = last(b)["table"]
    for k, step in enumerate(a["steps"]):
        if step["event"][0] == "assign":
            _, t, backend, stage, _ = step["event"]
            later = any(s["event"][:2] == ["assign", t] and s["event"][3] == stage for s in a["steps"][k + 1 :])
            cell = theirs.get(str(pairs["match"][t]), {}).get(str(stage))
            same = cell is not None and (["?", *names[1]][cell[0] + 1] == ["?", *names[0]][backend + 1])
            if not later and not same:
                assert k in pairs["differs"]


def test_graphs_may_differ_too():
    a = schedule_steps(*CASES["attention"].scheduler_and_graph())
    b = schedule_steps(*CASES["A B C | D | E F"].scheduler_and_graph())
    pairs = pairing(a, b)
    assert pairs["match"].count(-1) == len(a["names"]) - 1         # only x is in both
    assert len(pairs["differs"]) >= len(a["order"])
    assert list(itertools.pairwise(pairs["at"])) == [(x, y) for x, y in itertools.pairwise(pairs["at"]) if x <= y]
