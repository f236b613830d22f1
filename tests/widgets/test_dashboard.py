"""The dashboard: every knob runs the simulation again, and the run before stays beside it."""

from time import process_time

import numpy as np
import pytest

from workbench import models
from workbench.errors import ParameterError
from workbench.expertflow import sources
from workbench.expertflow.costs import costs
from workbench.expertflow.observe import record
from workbench.expertflow.tuning import Bench, Settings
from workbench.widgets.dashboard import Dashboard


@pytest.fixture(scope="module")
def bench():
    trace = sources.load("tiny-mixtral").trace
    with models.load("tiny-mixtral-f16") as model:
        seen = record(model, trace.select(trace.sequences == 20))
    return Bench(seen, costs(kind="q4_0"), trace, n_tokens=48, request_tokens=2)


def test_every_knob_runs_it_again_and_keeps_the_run_before(bench):
    board = Dashboard(bench)
    assert board._board.memory["queues"] == 32 * 8 * 32 * 4096 * 4                # 32 layers of 8 queues, 32 rows of f32 each
    for i, (_, low, high, _) in enumerate(board.knobs):
        before, values = board.outcome, list(board.values)
        values[i] = high if values[i] != high else low
        board.values = values
        assert board.outcome is not before and board._board.before is before
        assert board.outcome.settings == board.settings(*values) != before.settings
        assert f"{board.outcome.stream.per_token:.1f}" in board.below and "<svg" in board.below
    assert "<svg" not in board.stored_html() and "<img alt=" in board.stored_html()
    assert "0x" not in board.stored_text()


def test_missing_experts_on_the_host(bench):
    """No load anybody waits for, where the host is quicker than the link; which knobs are idle is said."""
    board = Dashboard(bench, Settings(slots=3, link=6.0, hosted=True))
    out = board.outcome.stream
    assert out.hosted and not out.demand_loads and out.per_token < bench.run(Settings(slots=3, link=6.0)).stream.per_token
    assert "lru reads no forecast" in board.stored_text()
    assert "plec works as lru" in Dashboard(bench, Settings("plec")).stored_text()


def test_the_threshold_of_queues_that_wait(bench):
    """It changes what eight requests give, and nothing of a single stream; where nobody waits it is idle, which is said."""
    few, many, at_once, still = (bench.run(Settings(wait=wait, threshold=n)) for wait, n in ((-1, 1), (-1, 8), (0, 1), (0, 8)))
    assert few.served.causes() != many.served.causes() and few.stream.ledger == many.stream.ledger
    assert set(few.served.causes()) == {"pays"} and "idle" in many.served.causes()
    assert at_once.served.batches == still.served.batches
    assert "Nobody waits" in Dashboard(bench).stored_text() and "Nobody waits" not in Dashboard(bench, Settings(wait=5.0)).stored_text()
    with pytest.raises(ParameterError):
        bench.run(Settings(threshold=-1))


def test_a_move_is_answered_in_time(bench):
    """100 ms from a knob to the new HTML, in processor time; `python -m benchmarks dashboard` measures each knob."""
    board, took = Dashboard(bench, Settings("predicted", predictor="gate", fetch=4)), []
    for slots in (3, 5, 4, 6, 2, 7) * 2:
        start = process_time()
        board.values = [slots, *board.values[1:]]
        took.append(process_time() - start)
    assert np.median(took) < 0.1


def test_the_same_settings_give_the_same_run(bench):
    a, b = (bench.run(Settings("predicted", predictor="gate", window=2)) for _ in range(2))
    assert a.stream.ledger == b.stream.ledger and a.served.latencies == b.served.latencies


def test_perfect_forecasts_have_perfect_recall(bench):
    out = bench.run(Settings("predicted", predictor="oracle", window=3))
    assert out.recall == out.precision == 1.0
    assert bench.run(Settings()).recall != bench.run(Settings()).recall        # NaN: nothing was forecast


def test_a_slower_link_is_never_faster(bench):
    times = [bench.run(Settings(link=link)).stream.per_token for link in (6.0, 12.6, 25.2)]
    assert times == sorted(times, reverse=True)


def test_unknown_knobs(bench):
    with pytest.raises(ParameterError):
        bench.run(Settings(predictor="tea leaves"))
    with pytest.raises(ParameterError):
        bench.run(Settings(policy="fifo"))
