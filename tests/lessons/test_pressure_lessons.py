"""What lessons 24 and 27 start from: the map of holes is the arena, the replayed monitor is the real one, bounds are those of `fit`."""

import numpy as np
import pytest

from workbench.errors import WorkbenchError
from workbench.expertflow.fragments import churn
from workbench.lessons.memory_pressure_states import CELL, Lesson24
from workbench.lessons.own_model_states import Lesson27
from workbench.views.memory import memory_state

MIB = 2**20


@pytest.fixture(scope="module")
def pressure():
    return Lesson24()


@pytest.fixture(scope="module")
def own():
    return Lesson27().open("tiny-mixtral-f16")


def test_the_map_of_holes_is_the_arena_at_every_step(pressure):
    steps = pressure.hole_steps()
    for k, (_, arena, failure) in zip(range(len(steps["steps"])), churn(pressure.keys(60), pressure.sizes(), 8 * pressure.kinds["f16"])):
        looks = {i: look for i, _, _, look, _, _ in memory_state(steps, k)}
        taken = {c for at, n in arena.places.values() for c in range(at // CELL, -(-(at + n) // CELL))}
        assert {i for i, look in looks.items() if look >= 0} == taken
        assert steps["steps"][k]["change"] == (failure is not None)
    assert sum(s["cause"] == "failure" for s in steps["steps"]) == 2


def test_an_arena_from_its_pieces(pressure):
    arena = pressure.arena(100, [(70, 30), (20, 10)])
    assert arena.holes == [(0, 20), (30, 40)] and arena.fits(40) and not arena.fits(41)


def test_a_replayed_monitor_answers_as_the_real_run_did(pressure):
    run, replayed = pressure.crowd(), pressure.watched(2_000_000)
    assert [(a.does, a.setting) for a in run.answers] == [(what, slots) for _, what, slots in replayed.answers]
    assert [r.ratio for r in run.readings] == pytest.approx([r.ratio for r in replayed.readings])
    assert np.array_equal(run.logits, pressure.resident_logits)
    assert pressure.crowd(False).error and len(pressure.crowd(False).logits) < len(run.logits)


def test_reserved_never_widens(pressure):
    said = [what for _, what, _ in pressure.watched(2_000_000, reserved=True).answers]
    assert set(said) == {"shrinks"}
    used = [n for _, n, _ in pressure.given_back(12)]
    assert used[1] == used[0] - 12 * pressure.kinds["f16"] and used[2] == used[0]


def test_a_card_has_room_for_the_share_that_was_asked_for(own):
    for share in (0.3, 0.7):
        found, said = own.fitted(own.card(share))
        assert found.fits == "split" and f"{share:.0%} of the experts" in said.bound.way


def test_break_even_is_where_the_bounds_meet(own):
    state = Lesson27()
    assert state.level(own, 25e9, 50e9) == pytest.approx(0.5)
    assert state.level(own, 60e9, 50e9) == 0


def test_ledgers_order_what_must_be_ordered(own):
    runs = {name: run.per_token for name, run in own.ledgers(own.shares[1]).items()}
    assert runs["bound: Belady"] <= min(runs["LRU, on demand"], runs["LFU, on demand"])
    assert runs["bound: oracle, prefetching"] <= runs["bound: Belady"]
    assert own.perfect(own.shares[1]).per_token <= runs["gate 1 ahead"]


def test_what_is_no_mixture_is_refused():
    with pytest.raises(WorkbenchError):
        Lesson27().open("no-such-model.gguf")
