"""Pictures of time and memory: what they say is what was computed."""

import pytest

from workbench import models, views
from workbench.errors import ParameterError
from workbench.expertflow import sources
from workbench.expertflow.costs import costs
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.hindcast import hindcast
from workbench.expertflow.monitor import Monitor
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import offload
from workbench.expertflow.regimes import Rates, diagram
from workbench.expertflow.timing import simulate
from workbench.trace import Trace

COSTS = costs(kind="q4_0")


@pytest.fixture(scope="module")
def runs():
    trace = sources.load("tiny-mixtral").trace
    trace = trace.select(trace.sequences == 0)
    return {p: simulate(trace, COSTS, p, 4) for p in ("lru", "belady")}


def test_the_ledger_names_configuration_and_totals(runs):
    shown = views.ledger_picture(runs, "c")
    assert all(f"{name}: {run.per_token:.1f} ms" in shown.alt for name, run in runs.items())
    text = repr(views.ledger_table(runs))
    assert "capacity" in text and f"{runs['lru'].per_token:.1f}" in text and "late prefetch" not in text
    with pytest.raises(ParameterError):
        views.ledger_picture({}, "c")


def test_the_phase_diagram_counts_every_place():
    points = diagram(COSTS, (1, 8), (8, 30), (20, 200), COSTS.shape.n_moe * 4 * COSTS.expert_bytes, lambda n: Rates(8.0, 0.6, 0.5))
    alt = views.regime_picture(points, "c", "t", [(3, 12.6, "somebody's card")]).alt
    assert "in how many of 4 places" in alt and "somebody's card" in alt


def test_memory_by_part_names_the_highest_reading():
    monitor = Monitor(1000, 1)
    for t, kv in enumerate((100, 650, 300)):
        monitor.account("weights", 200)
        monitor.account("kv", kv)
        monitor.look(t)
    assert "the highest is 85%" in views.parts_picture(monitor.readings, 1000, "c").alt
    with pytest.raises(ParameterError):
        views.parts_picture([], 1000, "c")


def test_the_hindcast_shows_every_error():
    rows = hindcast()[:6]
    text = repr(views.hindcast_table(rows))
    assert all(f"{r.error:+.0%}" in text for r in rows)


def test_a_tokens_way_has_all_nine_steps_in_order():
    with models.load("tiny-mixtral-f16") as model, offload(model, 0.5, policy="predicted", forecast=Forecaster.of_gates(Gates.of(model), 2)) as run:
        run.session.decode(model.tokenizer.encode("And God said"))
        run.scheduler.trace = trace = Trace("virtual")
        run.session.decode([5])
        way = views.token_way(trace)
        numbers = [s["event"][1] for s in way["steps"]]
        assert set(numbers) == set(range(1, 10)) and numbers[0] == 1 and numbers[-1] == 9
        assert numbers.count(4) == model.hparams.n_layer and numbers.count(8) == model.hparams.n_layer - 1
        loads = sum(n == 6 and "is sent" in s["sentence"] for n, s in zip(numbers, way["steps"]))
        ahead = sum(n == 3 for n in numbers)
        kinds = [e for e in trace.of("load")]
        assert loads + ahead == len(kinds) and ahead > 0
    with pytest.raises(ParameterError):
        views.token_way(Trace("virtual"))
