"""Lesson 25: the seed's case beside ours; every symptom shows and is mended; forecasts pay with misses on the host, and not without."""

from dataclasses import replace

import pytest

from workbench.errors import ParameterError
from workbench.expertflow.tuning import Settings
from workbench.lessons.tuning_states import Lesson25, reproduced


@pytest.fixture(scope="module")
def state():
    return Lesson25()


def test_what_counts_as_reproduced():
    cases = [(0.5, "yes"), (0.26, "yes"), (0.2, "more"), (0.8, "partly"), (0.99, "no"), (1.0, "no"), (2.0, "no")]
    assert [reproduced(0.5, ours) for ours, _ in cases] == [said for _, said in cases]
    assert reproduced(96 / 85, 96 / 85) == "yes" and reproduced(96 / 85, 0.8) == "no"


def test_every_number_of_the_case_stands_beside_ours(state):
    rows = {row[0]: row[1:] for row in state.verdicts()}
    assert all(len(row) == 5 for row in rows.values())
    theirs = " ".join(row[0] for row in rows.values())
    assert all(number in theirs for number in ("85 → 96%", "120 → 75 ms", "75 → 60 ms", "60 → 55 ms", "120 → 55 ms", "predictor, queue, pool"))
    assert rows["waste in these blocks"][1:3] == (f"{1 - 336 / 512:.1%} → {1 - 336 / 384:.1%}", f"{1 - 94.5 / 256:.1%} → {1 - 94.5 / 128:.1%}")
    assert rows["blocks 256 → 128 MB, one stream"][3:] == ("yes", "more") and rows["window 1 → 3, one stream"][3:] == ("no", "no")


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_every_symptom_shows_in_its_counter_and_its_knob_mends_it(state, kind):
    found = state.symptoms(kind)
    assert len({row.name for row in found}) == 7 and all(state.mends(row, kind) for row in found)
    assert not any(state.mends(row._replace(mended=row.shows), kind) for row in found)
    low, high = (found[0].read(state.run(s, kind)) for s in (found[0].shows, found[0].mended))
    assert low < 0.9 < high                                                      # the row's name says 90 %


@pytest.mark.parametrize("kind", ["f16", "q4_0"])
def test_forecasts_pay_with_misses_on_the_host_and_not_without(state, kind):
    gate = Settings("predicted", predictor="gate")
    lru, alone, hosted, both = (state.run(s, kind).stream.per_token for s in
                                (Settings(), gate, Settings(hosted=True), replace(gate, hosted=True)))  # fmt: skip
    assert both < 0.75 * lru < lru < min(alone, hosted)


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"merge": 0}, {"predictor": "crystal ball"}, {"link": 0}, {"link": -25.0},
                                   {"link": float("nan")}, {"wait": float("nan")}, {"wait": float("inf")}, {"hidden": -5}])
def test_knobs_that_do_not_exist(state, wrong):
    with pytest.raises(ParameterError):
        state.bench("q4_0").run(Settings(**wrong))
