"""Lessons 10 and 11: their recorded cases are the recordings, their questions those of the real passes, their practice worth it."""

import json

import pytest

from workbench.lessons.placement_cases import OTHERS, RECORDED, ggml, loose_case
from workbench.lessons.placement_states import Asked, Lesson10, Lesson11
from workbench.scheduler import STAGES
from workbench.tensors import Flag


@pytest.fixture(scope="module")
def goldens(data):
    return {name: json.loads((data / f"goldens/sched/{name}.json").read_text("utf-8")) for name in RECORDED}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_cases_are_those_of_real_ggml(goldens, name):
    """The file of the lessons says what the recording says, and the case has its graph: names, ops, sources, flags, memory, devices."""
    golden, told = goldens[name], ggml()[name]
    expect = golden["expect"]
    assert told["stages"] == expect["stages"] and told["causes"] == (expect.get("causes") or {}) and told["error"] == expect["error"]
    assert told["splits"] == [[s["backend"], s["i_start"], s["i_end"], s["inputs"]] for s in expect.get("splits") or []]
    scheduler, graph = RECORDED[name].scheduler_and_graph()
    names = {t["id"]: t["name"] for t in golden["tensors"]}
    by_name = {t["name"]: t for t in golden["tensors"]}
    order = [i if isinstance(i, str) else names[i] for i in golden["graph"]["nodes"]]
    assert [t.name for t in graph.nodes] == order
    for t in (*graph.leafs, *graph.nodes):
        recorded = by_name[t.name]
        assert (t.op, [s.name for s in t.sources()]) == (recorded["op"], [names[i] for i in recorded.get("src") or []])
        assert bool(t.flags & Flag.INPUT) == ("input" in (recorded.get("flags") or ())) and (t.storage is not None) == bool(recorded.get("buffer"))
    assert len(scheduler.backends) == len(golden["backends"]) and scheduler.op_offload == (golden["op_offload"] or RECORDED[name].op_offload)
    assert {t.name: b for t, b in scheduler.by_hand.items()} == {names[t]: b for t, b in golden["user_assign"]}


@pytest.mark.parametrize("name", RECORDED)
def test_our_passes_decide_as_ggml_did(name):
    lesson, case = Lesson11(), RECORDED[name]
    for stage in STAGES:
        assert all(n == same for _, n, same in lesson.beside_ggml(stage))
    number = {b.name: i for i, b in enumerate(case.scheduler_and_graph()[0].backends)}
    if ggml()[name]["splits"]:
        assert [[number[c.backend], c.first, c.last, [t for t, _ in c.inputs]] for c in case.outcome().splits] == ggml()[name]["splits"]


@pytest.mark.parametrize("lesson", [Lesson10(), Lesson11()], ids=["10", "11"])
def test_practice_has_questions_and_is_the_same_every_time(lesson):
    kinds = set()
    for seed in range(6):
        case = lesson.practice(seed)
        stepper = lesson.stepper(case, lesson.stage, predict=True)
        asked = [s for s in stepper.trace["steps"] if "ask" in s]
        assert len({s["event"][1] for s in asked}) >= 2 and case == lesson.practice(seed)
        kinds |= {s["cause"] for s in asked}
    assert kinds >= ({"3.best", "3.upg"} if lesson.stage == "pass3" else {"4.vsrc", "4.cur"})


def test_what_can_be_asked_is_the_state_before_the_pass():
    for seed in range(20):
        case = loose_case(seed)
        for stage, before in (("pass3", "pass2_rest_up"), ("pass4", "pass3")):
            scheduler, graph = case.scheduler_and_graph()
            ask, names = Asked(scheduler, graph, stage), [*(b.name for b in scheduler.backends), "?"]
            assert {t.name: names[ask.backend(t)] for t in (*graph.leafs, *graph.nodes)} == {
                name: backend for name, (backend, _) in Lesson10().after(case, before).items()}


def test_hazards_hurt_with_the_quirk_alone():
    """What lesson 11 shows of results: garbage with quirks, the right ones without."""
    import numpy as np

    lesson = Lesson11()
    garbage = lesson.results(lesson.case("user_assign_view"))
    right = lesson.results(lesson.case("a view, not by hand"))
    assert np.isnan(garbage["y"]).all() and np.array_equal(garbage["z"], right["z"]) and not np.isnan(right["y"]).any()
    flagged, mended = (lesson.results(lesson.mended(lesson.case(f"{f}flagged_leaf_under_view"))) for f in ("", "un"))
    assert np.array_equal(flagged["a"], mended["a"])
    repaired = lesson.case("the host writes")
    assert lesson.is_settled(repaired) and not lesson.is_settled(lesson.quirky(repaired))


def test_every_case_of_these_lessons_is_settled_or_has_the_quirk():
    lesson = Lesson11()
    for case in (*RECORDED.values(), *OTHERS.values()):
        assert lesson.is_settled(case) or case.quirks == "ggml", case.name
