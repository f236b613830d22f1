"""Memory: a general allocator that fragments against slots that cannot, the monitor's account, and what gives way."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import AllocationError, ParameterError
from workbench.expertflow.fragments import Arena, blocks, churn
from workbench.expertflow.monitor import GIVING, PARTS, Monitor, Pressure, Reading

MIB = 2**20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=60))
def test_an_arena_never_gives_bytes_twice_and_loses_none(steps):
    arena = Arena(16384)
    for i, (take, size) in enumerate(steps):
        if take and arena.fits(size):
            arena.place(i, size)
        elif take:
            with pytest.raises(AllocationError):
                arena.place(i, size)
        elif arena.places:
            arena.release(next(iter(arena.places)))
        spans = sorted((o, o + -(-s // 256) * 256) for o, s in arena.places.values())
        spans += [(o, o + s) for o, s in arena.holes]
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == arena.capacity
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:]))              # every byte is in use or in a hole, and once
        assert 0 <= arena.fragmentation < 1


def test_one_size_never_fails_and_two_sizes_do():
    rng = np.random.default_rng(0)
    keys = (rng.zipf(1.3, 4000) % 24).tolist()
    same = dict.fromkeys(range(24), 6 * MIB)
    mixed = {k: (6 if k % 2 else 10) * MIB for k in range(24)}
    assert not any(f for _, _, f in churn(keys, same, 60 * MIB))
    failures = [f for _, _, f in churn(keys, mixed, 60 * MIB) if f]
    assert len(failures) > 5
    assert all(f.free >= f.wanted > f.largest and f.evicted > 0 for f in failures)   # memory was free, and no hole large enough


def test_what_block_size_costs_mixtrals_expert():
    """336 MiB in blocks of 256 MiB and of 128 MiB: 34 % and 12.5 % wasted; in a slot of its size, none."""
    n, waste = blocks(336 * MIB, 256 * MIB)
    assert n == 2 and round(waste, 2) == 0.34
    assert blocks(336 * MIB, 128 * MIB) == (3, 0.125)
    assert blocks(336 * MIB, 336 * MIB) == (1, 0.0)
    with pytest.raises(ParameterError):
        blocks(1, 0)


def test_the_monitor_accounts_parts_and_sees_only_at_its_readings():
    monitor = Monitor(1000, period=100, cost=5)
    assert set(monitor.parts) == set(PARTS)
    monitor.account("weights", 600)
    assert monitor.look(0).ratio == 0.6
    monitor.account("kv", 500)                                                   # over the limit, between two readings
    monitor.account("kv", 100)
    assert monitor.look(50) is None
    assert monitor.look(120).parts["kv"] == 100
    assert monitor.overshoot == 100 and max(r.ratio for r in monitor.readings) < 1
    assert monitor.spent == 10
    for part, size in (("cash", 1), ("kv", -1)):
        with pytest.raises(ParameterError):
            monitor.account(part, size)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 400))
def test_a_shorter_period_costs_more_and_overshoots_no_more(period):
    """The same growth, answered by evicting at each reading: rare readings overshoot further, frequent ones cost more."""
    def run(period):
        monitor, used = Monitor(1000, period, cost=1), 500
        for t in range(2000):
            used += 3
            monitor.account("activations", used)
            reading = monitor.look(t)
            if reading is not None and reading.ratio > 0.9:
                used = 500
        return monitor.spent, monitor.overshoot

    (cost, over), (cost2, over2) = run(period), run(2 * period)
    assert cost >= cost2
    assert over <= 3 * period and over2 <= 6 * period                            # no more than grows between two readings
    if period > 200:
        assert over2 > 0                                                         # by then it went over the limit unseen


def pressure(**settings):
    return Pressure(shares={"queues": 0.1, "cache": 0.5, "window": 0.1}, settings={"queues": 64.0, "cache": 32.0, "window": 4.0},
                    least={"queues": 4, "cache": 8, "window": 1}, most={"queues": 64, "cache": 32, "window": 4}, **settings)


def read(ratio):
    return Reading(0, {}, ratio)


def test_the_part_most_above_its_share_gives_way():
    p = pressure()
    assert p.answer(read(0.95), {"queues": 300, "cache": 550, "window": 50}, 1000) == ("queues", "shrinks", 48.0)
    assert p.answer(read(0.95), {"queues": 100, "cache": 800, "window": 50}, 1000) == ("cache", "shrinks", 24.0)
    assert p.answer(read(0.95), {"queues": 10, "cache": 100, "window": 10}, 1000)[0] == "queues"     # none stands out: the order decides
    assert p.answer(read(0.8), {}, 1000) is None


def test_hysteresis_and_bounds():
    p = pressure()
    p.answer(read(0.95), {"cache": 900}, 1000)
    assert [p.answer(read(0.6), {}, 1000) for _ in range(2)] == [None, None]
    assert p.answer(read(0.6), {}, 1000) == ("cache", "widens", 32.0)            # after three quiet readings, not at once
    assert [p.answer(read(0.6), {}, 1000) for _ in range(5)] == [None] * 5       # nothing was shrunk: nothing grows beyond its setting
    for _ in range(100):
        answer = p.answer(read(0.99), {}, 1000)
    assert answer is None and all(p.settings[k] == p.least[k] for k in GIVING)


def test_between_the_marks_nothing_moves():
    """Usage that swings between 0.72 and 0.88 never triggers; one that a shrink brings just below 0.9 does not come straight back."""
    p = pressure()
    assert not any(p.answer(read(r), {"cache": 900}, 1000) for r in (0.72, 0.88) * 20)
    p.answer(read(0.91), {"cache": 900}, 1000)
    assert not any(p.answer(read(0.75), {"cache": 700}, 1000) for _ in range(20))


@pytest.mark.parametrize("wrong", [{"high": 0.6}, {"step": 1.0}, {"low": 0}])
def test_marks_that_make_no_sense(wrong):
    with pytest.raises(ParameterError):
        pressure(**wrong)


def test_storage_errors_grow_with_fewer_bits_and_are_zero_without():
    from workbench import models
    from workbench.expertflow.precision import storage_errors

    with models.load("tiny-mixtral-f16") as f16, models.load("tiny-mixtral-q8_0") as q8, models.load("tiny-mixtral-q4_0") as q4:
        tokens = f16.tokenizer.encode("And God said unto Moses, Go in unto Pharaoh, and say unto him")
        same, eight, four = (storage_errors(f16, other, tokens) for other in (f16, q8, q4))
    assert all(r.alone == r.accumulated == r.other_routes == 0 for r in same)
    assert all(0.001 < a.alone < 0.01 < b.alone < 0.15 for a, b in zip(eight, four))     # q8_0 rounds to 1/254, q4_0 to 1/16, of a block's largest
    assert all(b.nbytes < a.nbytes < a.reference_nbytes for a, b in zip(eight, four))


def test_storage_errors_need_one_model():
    from workbench import models
    from workbench.errors import ModelError
    from workbench.expertflow.precision import storage_errors

    with models.load("tiny-mixtral-f16") as a, models.load("tiny-deepseek-f16") as b, pytest.raises(ModelError):
        storage_errors(a, b, [1, 2, 3])


def test_memory_of_a_run_by_part():
    """The parts are what the device says it has given out, apart from its own alignment."""
    from tests.expertflow.offloaded import Run
    from workbench import models

    with models.load("tiny-mixtral-f16") as model:
        run = Run(model, 0.25)
        run.session.decode(model.tokenizer.encode("And God said"))
        parts = run.offloaded.memory()
        assert set(parts) == set(PARTS)
        used = run.card.buffer_type.used
        assert 0.98 * used <= sum(parts.values()) - parts["predictor"] <= used * 1.001
        run.close()
