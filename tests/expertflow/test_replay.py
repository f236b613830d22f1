"""Replays of recorded traces: published figures, the shipped tables of the models, forecasts, sweeps, what is refused."""

import csv
import io
import os
import time
from collections import OrderedDict

import numpy as np
import pytest

from tests.expertflow.caching import random_trace, trace_of
from tests.expertflow.test_policies import perfect
from workbench.errors import DependencyError, ParameterError, ShapeError
from workbench.expertflow import scoring, sources
from workbench.expertflow.cache import Group
from workbench.expertflow.predictors import Frequency, Oracle, PreviousLayer, PreviousToken
from workbench.expertflow.replay import (
    Forecast,
    Stream,
    cache_for,
    forecast_of,
    known_before,
    replay,
    seen_routes,
    side_by_side,
    walk,
)
from workbench.expertflow.sweep import Progress, jobs, sweep, worth
from workbench.paths import models_dir


@pytest.fixture(scope="module")
def switch():
    return sources.load("switch-base-8").trace


# ---- judges

@pytest.mark.parametrize(("slots", "lru", "lfu", "belady"), [(12, 0.2744186, 0.35658915, 0.5411), (18, 0.350, 0.498, 0.667), (24, 0.491, 0.611, 0.764),
                                                             (36, 0.741, 0.811, 0.895)])
def test_switch_trace_in_one_pool(switch, slots, lru, lfu, belady):
    found = [replay(switch, policy, slots, "global").hit_rate for policy in ("lru", "lfu", "belady")]
    digits = 8 if slots == 12 else 3
    assert found[:2] == [pytest.approx(x, abs=0.51 * 10**-digits) for x in (lru, lfu)]
    assert found[2] == pytest.approx(belady, abs=5e-4)


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
def test_the_models_own_tables_are_reproduced(name):
    """LRU, LFU and Belady to the last digit, for both orders and residencies; random as the expectation."""
    trace, found, n = sources.load(name).trace, {}, 0
    mixed = np.arange(96).reshape(6, 16).T.ravel()
    orders = {"by_domain": trace, "mixed": trace.select(np.concatenate([np.flatnonzero(trace.sequences == s) for s in mixed]))}
    with (models_dir() / "metrics" / f"{name}_cache.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            layer = trace.layers.tolist().index(int(row["layer"]))
            assert float(row["random"]) == int(row["capacity"]) / trace.n_expert
            for policy in ("lru", "lfu", "belady"):
                case = row["order"], row["residency"], int(row["capacity"]), policy
                if case not in found:
                    found[case] = replay(orders[case[0]], policy, case[2], "layer", case[1])
                result = found[case]
                assert round(result.hits[layer] / result.accesses[layer], 5) == float(row[policy]), (case, layer)
                n += 1
    assert n == {"tiny-mixtral": 216, "tiny-deepseek": 144}[name]


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
def test_the_pinned_rows_are_those_of_some_hot_set(name):
    """The training text that chose the pinned experts is not shipped; their number and hit rate are, and a hot set that has it exists."""
    import itertools

    trace = sources.load(name).trace
    shares = trace.counts() / trace.n_tokens / trace.k
    with (models_dir() / "metrics" / f"{name}_cache.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["order"] == "mixed" or row["residency"] == "one_by_one":
                continue
            layer, slots = trace.layers.tolist().index(int(row["layer"])), int(row["capacity"])
            sets = [c for c in itertools.combinations(range(trace.n_expert), slots) if abs(shares[layer, list(c)].sum() - float(row["pinned"])) < 6e-6]
            assert sets
            hot = np.zeros((trace.n_layers, trace.n_expert))
            hot[layer, list(sets[0])] = 1
            result = replay(trace, "static", slots, hot=hot)
            assert round(result.hits[layer] / result.accesses[layer], 5) == float(row["pinned"])


def test_mixtral_over_100_000_tokens():
    """6.4 million accesses, in seconds on a quiet machine; here only that they are counted, and that memory does not explode."""
    trace = sources.synthetic("skewed-static", 100_000, 32, 8, 2)
    result = replay(trace, "lru", 4)
    assert sum(result.accesses) == 6_400_000 and 0.5 < result.hit_rate < 0.9 and result.evicted > 10**6


def test_speed_is_linear_and_near_a_plain_loop():
    """Ratios within one process, the best of several: a busy machine slows both sides."""
    rng = np.random.default_rng(0)
    trace = trace_of(rng.permuted(np.tile(np.arange(16), (4, 40_000, 1)), axis=2)[..., :2], 16)
    part = trace.select(slice(10_000))
    flat = trace.experts.ravel().tolist()

    def plain():
        cache = OrderedDict()
        for key in flat:
            if key in cache:
                cache.move_to_end(key)
            else:
                if len(cache) >= 8:
                    cache.popitem(False)
                cache[key] = None

    def best(run, times=5):
        out = []
        for _ in range(times):
            t = time.process_time()
            run()
            out.append(time.process_time() - t)
        return min(out)

    loop = best(plain)
    for policy, most in (("lru", 9), ("lfu", 14), ("belady", 18)):
        whole = best(lambda p=policy: replay(trace, p, 8))
        assert whole < most * loop, f"{policy}: {whole / loop:.1f} times a plain loop"
        assert whole < 8 * best(lambda p=policy: replay(part, p, 8)), policy


# ---- steps

def test_sequences_side_by_side():
    trace = trace_of([[[0, 1], [2, 3], [1, 2], [0, 3], [4, 0]]], sequences=[0, 0, 1, 1, 2])
    assert side_by_side(trace, 2).tolist() == [0, 1, 0, 1, 2]
    assert side_by_side(trace, 3).tolist() == [0, 1, 0, 1, 0]
    assert [e for _, e in Stream(trace, batch=2)] == [[0, 1, 2], [0, 2, 3], [0, 4]]
    stream = Stream(trace, "one_by_one", batch=3)
    assert stream.needed == (7,) and stream.most == 4
    assert list(stream.steps(Group((0,), 4))) == [[0, 1, 2, 4], [0, 2, 3]]
    late = trace.select(np.array([1, 3, 4]))  # positions 1, 1, 0
    assert sorted(map(len, (e for _, e in Stream(late, batch=3)))) == [2, 3]


def test_groups_see_their_layers_in_the_order_of_a_run():
    trace = trace_of([[[0, 1], [2, 0]], [[1, 2], [0, 1]], [[2, 1], [1, 0]]])
    stream = Stream(trace)
    assert list(stream.steps(Group((0, 2), 4))) == [(0, 1), (4, 5), (0, 2), (3, 4)]
    keys, steps = stream.accesses(Group((0, 2), 4))
    assert keys.tolist() == [0, 1, 4, 5, 0, 2, 3, 4] and steps.tolist() == [0, 0, 2, 2, 3, 3, 5, 5]
    assert [e for _, e in Stream(trace, "one_by_one")] == [[0, 1], [1, 2], [2, 1], [2, 0], [0, 1], [1, 0]]
    batched = trace_of(trace.experts, 3, sequences=[0, 1])
    keys, steps = Stream(batched, batch=2).accesses(Group((0, 2), 4))
    assert keys.tolist() == [0, 1, 2, 3, 4, 5] and steps.tolist() == [0, 0, 0, 2, 2, 2]


def test_a_scan_longer_than_the_cache_leaves_lru_nothing():
    """A batch that uses all of 8 experts touches them in ascending order; with 6 slots LRU throws away what comes next, always."""
    trace = trace_of(np.tile(np.arange(8).reshape(1, 4, 2), (1, 100, 1)), 8, sequences=np.tile(np.arange(4), 100))
    trace.positions[:] = np.arange(400) // 4
    hits = {p: replay(trace, p, 6, residency="one_by_one", batch=4, hot=trace.counts()).hit_rate for p in ("lru", "lfu", "static", "belady")}
    assert hits["lru"] == hits["lfu"] == 0 and hits["static"] == 0.75 and 0.7 < hits["belady"] < 0.75


# ---- forecasts

def test_what_is_known_before_each_step():
    trace = random_trace(np.random.default_rng(0), 3, 4, 5, 1)
    stream = Stream(trace)
    told = lambda ahead, across: [[t for t, _ in known_before(stream, perfect(trace, ahead, across))(s)] for s in range(12)]  # noqa: E731
    assert told(0, False) == [[s % 3] for s in range(12)]
    assert told(1, False) == [[0, 1], [2], [], [0, 1], [2], [], [0, 1], [2], [], [0, 1], [2], []]
    assert told(9, False) == [[0, 1, 2], [], []] * 4
    assert told(1, True) == [[0, 1], [2], [0]] + [[1], [2], [0]] * 2 + [[1], [2], []]
    scores = dict(known_before(stream, perfect(trace, 1, False))(3))
    assert scores[1] == {int(trace.experts[1, 1, 0]): 1.0}


def test_predictors_become_forecasts():
    trace = random_trace(np.random.default_rng(0), 3, 40, 6, 2)
    seen = seen_routes(trace)
    oracle = forecast_of(Oracle(), seen, scoring.top(2))
    assert ((oracle.wanted > 0) == (perfect(trace).wanted > 0)).all() and (oracle.ahead, oracle.across) == (2, True)
    below = forecast_of(PreviousLayer().fit(seen), seen, scoring.top(3))
    assert (below.ahead, below.across) == (1, False) and not below.wanted[0].any() and ((below.wanted[1:] > 0).sum(-1) == 3).all()
    assert forecast_of(PreviousToken().fit(seen), seen, scoring.top(1)).across
    frequent = forecast_of(Frequency().fit(seen), seen, scoring.top(2))
    assert (np.sort(np.argsort(-seen_routes(trace).used(0).mean(0), kind="stable")[:2]) == np.flatnonzero(frequent.wanted[0, 7])).all()


def test_counts_of_a_walk_with_a_forecast():
    trace = random_trace(np.random.default_rng(1), 3, 60, 6, 2)
    wrong = Forecast("wrong", np.roll(perfect(trace).wanted, 1, axis=1), 2, True)
    result = replay(trace, "predicted", 6, "global", forecast=wrong, link=1.0)
    events = list(walk(Stream(trace), cache_for(Stream(trace), "predicted", 6, "global"), wrong, 1.0))
    kinds = [(kind, cause) for _, kind, _, _, cause in events]
    assert result.speculative == kinds.count(("load", "predicted")) > 0
    assert result.wasted == result.speculative - kinds.count(("hit", "prefetched")) > 0
    assert sum(result.loads) == result.speculative + result.demand == sum(k == "load" for k, _ in kinds)
    assert result.demoted == sum(k == "demote" for k, _ in kinds) > 0 and result.dropped == sum(k == "drop" for k, _ in kinds)
    lru = replay(trace, "lru", 6, "global", forecast=wrong, link=1.0)
    assert (lru.forecast, lru.link) == ("", 0.0) and lru == replay(trace, "lru", 6, "global")


# ---- sweeps

def test_sweeps_give_the_same_in_processes_as_here(switch):
    todo = jobs(policy=["lru", "lfu", "belady"], slots=[12, 24], scope="global")
    assert len(todo) == 6 and todo[1] == {"policy": "lru", "slots": 24, "scope": "global"}
    told = []
    here = sweep(switch, todo, tell=lambda done, of: told.append((done, of)))
    assert told == [(i, 6) for i in range(1, 7)] and here == [replay(switch, **job) for job in todo]
    assert sweep(switch, todo, workers=2) == here
    with pytest.raises(ParameterError, match="fifo"):
        sweep(switch, jobs(policy=["lru", "fifo"], slots=12, scope="global"), workers=2)
    assert worth(switch, todo) == 1 and worth(sources.load("tiny-mixtral").trace, todo * 10) == min(60, os.cpu_count())
    for workers in (0, 1.5, True):
        with pytest.raises(ParameterError, match="workers"):
            sweep(switch, todo, workers=workers)


def test_dask_is_asked_for_by_address(switch, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(DependencyError, match="moe-workbench"):
        sweep(switch, jobs(policy="lru", slots=12), dask="tcp://127.0.0.1:1")


def test_a_bar_is_drawn_on_terminals_alone():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    bar = Progress("replays", out, width=10)
    bar(1, 4)
    bar(4, 4)
    assert out.getvalue() == "\rreplays [##........] 1 of 4\rreplays [##########] 4 of 4\n"
    quiet = io.StringIO()
    Progress("replays", quiet)(1, 4)
    assert quiet.getvalue() == ""


# ---- what is refused

@pytest.mark.parametrize(("how", "says"), [
    ({"slots": 0}, "0 slots"), ({"slots": 1}, "at least 2"), ({"policy": "mru"}, "policy 'mru'"), ({"residency": "apart"}, "residency 'apart'"),
    ({"batch": 2}, "batch of 2"), ({"batch": 0}, "batch of 0"), ({"link": -1}, "link of -1"), ({"link": float("nan")}, "link of nan"), ({"link": "1"}, "link of 1"),
    ({"policy": "plec"}, "without predictions"), ({"policy": "static"}, "without a sample"), ({"scope": "all"}, "scope 'all'"), ({"sizes": [1, 2]}, "2 sizes")])
def test_requests(how, says):
    trace = random_trace(np.random.default_rng(0), 1, 10, 5, 2)
    with pytest.raises(ParameterError, match=says):
        replay(trace, **{"policy": "lru", "slots": 3, **how})


def test_traces_and_forecasts_that_cannot_be():
    trace = random_trace(np.random.default_rng(0), 2, 10, 5, 2)
    with pytest.raises(ShapeError, match="0 tokens"):
        replay(trace.select(slice(0)))
    twice = trace_of([[[1, 1], [0, 2]]])
    with pytest.raises(ShapeError, match="twice"):
        replay(twice)
    wanted = perfect(trace).wanted
    wanted[0, 0, 0] = np.nan
    with pytest.raises(ShapeError, match="NaN"):
        Forecast("bad", wanted, 1)
    with pytest.raises(ShapeError, match="3, 10, 5"):
        replay(trace, "plec", 4, forecast=Forecast("other", np.zeros((3, 10, 5)), 1))
    with pytest.raises(ShapeError, match="layers ahead"):
        Forecast("bad", np.zeros((1, 1)), 1)
    with pytest.raises(ParameterError, match="at least 4"):
        replay(trace_of(trace.experts, 5, sequences=np.repeat([0, 1], 5)), slots=2, batch=2)
