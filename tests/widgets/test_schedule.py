"""The scheduler stepper as Python sees it, and its JavaScript compared with Python's fold."""

import json

import pytest

from tests.views.graphs import MODELS, model_step
from tests.views.test_schedule_steps import random_split
from tests.widgets.test_graph_view import javascript
from workbench import models
from workbench.devices.simulated import simulated_machine
from workbench.errors import ParameterError
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler import Scheduler
from workbench.views import expand_steps, schedule_steps
from workbench.views.steps import state
from workbench.widgets import ScheduleStepper, step_schedule


def case(name):
    return CASES[name].scheduler_and_graph()


def offloaded(name, n_tokens=1):
    """A step of a shipped model with the attention on a GPU and the experts on the host."""
    model, devices = models.load(name), simulated_machine(1)
    placed = models.place_weights(model, devices, overrides={"_exps": "CPU"})
    return Scheduler(devices), models.build_step(placed, models.KVCache(model.hparams, 256, devices[0].buffer_type), n_tokens, 256, n_tokens)


def test_states_in_the_browser_are_those_of_python():
    traces = [schedule_steps(*random_split(seed)) for seed in range(12)] + [schedule_steps(*c.scheduler_and_graph()) for c in CASES.values()]
    traces.append(schedule_steps(*case("A B C | D | E F"), stages=["pass3", "pass5"]))
    files = ("common", "graph_scene", "step_pictures", "schedule_roll", "schedule")
    found = javascript(files, "given.map(t => t.steps.map((_, k) => stateAt(t, k)))", traces)
    for trace, states in zip(traces, found, strict=True):
        assert states == json.loads(json.dumps([state(trace, k) for k in range(len(trace["steps"]))]))


def test_the_score_is_the_same_in_both_languages():
    w = step_schedule(*case("attention, no softmax on the GPU"), predict=True)
    asked = [k for k, s in enumerate(w.trace["steps"]) if "ask" in s]
    w.answers = {str(k): [s["ask"]["is"] if i % 2 else "no", s["ask"]["right"] if i % 3 else 7]
                 for i, k in enumerate(asked) for s in [w.trace["steps"][k]]} | {str(asked[0]): None}  # fmt: skip
    n = len(asked)
    assert w.score == (n - 1, sum(i % 2 for i in range(1, n)), sum(i % 3 > 0 for i in range(1, n)))
    files = ("common", "graph_scene", "step_pictures", "schedule_roll", "schedule")
    assert javascript(files, "scoreOf(given.trace, given.answers)", {"trace": w.trace, "answers": w.answers}) == list(w.score)


def test_a_stored_page_shows_the_end_and_the_first_changes():
    w = step_schedule(*case("A B C | D | E F"), title="Six", caption="D alone is on the CPU.")
    page = w.stored_html()
    assert page.count("<figure") == 1 and "D alone is on the CPU." in page and "Split 1 on CPU from D" in page
    assert page.count("<tr>") == 13 and "the first 12 of 15 changes in 28 steps" in page
    assert "A reads the weight W, its source 0" in w.stored_text() and " at 0x" not in repr(w)


def test_a_stored_question_page_does_not_answer():
    w = step_schedule(*case("A B C | D | E F"), predict=True, stages=["pass2", "pass3"])
    page = w.stored_html()
    assert "A GPU; B none yet" in page and "takes GPU from" not in page + w.stored_text()


def test_two_runs_are_stored_both():
    w = step_schedule(*case("MLP, half on the host"), other=case("MLP, batch 32"), title="batch 4", other_title="batch 32")
    assert w.stored_html().count("<figure") == 2 and "A: batch 4." in w.stored_html() and set(w.pairs) == {"A", "B"}
    scheduler, graph = case("MLP, half on the host")
    same = step_schedule(scheduler, graph, other=scheduler)
    assert same.pairs["A"]["differs"] == [] and same.other["title"] == "the other run (B)"


def test_where_it_begins():
    scheduler, graph = case("A B C | D | E F")
    w = step_schedule(scheduler, graph, start="pass2")
    assert w.trace["steps"][w.k]["stage"] == "pass2_rest_up" and w.trace["steps"][w.k + 1]["stage"] == "pass3"
    with pytest.raises(ParameterError, match="kind 'expand'"):
        ScheduleStepper(expand_steps(graph.nodes[0]))
    with pytest.raises(ParameterError, match="pass9"):
        step_schedule(scheduler, graph, start="pass9")


def test_a_refusal_is_the_last_step():
    from workbench.scheduler.whatif import Change

    refused = CASES["A B C | D | E F"].changed(Change("deny", "SOFT_MAX", "CPU"))
    w = step_schedule(*refused.scheduler_and_graph())
    end = w.trace["steps"][-1]
    assert end["event"] == ["fail"] and "no backend supports 'D' = SOFT_MAX" in end["sentence"]
    assert "refuses" in w.stored_text() or len(w.trace["steps"]) > 12
    assert w.stored_html()


@pytest.mark.parametrize("name", MODELS)
def test_models_fit_a_page(name):
    scheduler, step = offloaded(name)
    w = step_schedule(scheduler, step)
    assert len(json.dumps(w.trace, allow_nan=False)) < 600_000 and len(w.stored_html()) < 100_000
    scheduler.split(step.graph)
    s = state(w.trace, len(w.trace["steps"]) - 1)
    assert len(s["splits"]) == len(scheduler.splits) >= 8
    assert len(step_schedule(Scheduler([simulated_machine(0)[0]]), model_step(name)).trace["steps"]) > 200
