"""Cache policies: against slow definitions and exhaustive search, event by event, and the paper's worked example."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expertflow.caching import optimum, random_trace, simulate, trace_of
from workbench.errors import ParameterError
from workbench.expertflow.cache import POLICIES, ExpertCache, grouped
from workbench.expertflow.policies import Belady, Frequency, Planned, Recency, allot, next_uses
from workbench.expertflow.replay import Forecast, Stream, cache_for, replay, walk

DEMAND = ("lru", "lfu", "lfu_in_cache", "lru_frequency", "belady")


@st.composite
def small(draw):
    n_expert = draw(st.integers(3, 6))
    k = min(draw(st.integers(1, 3)), n_expert - 1)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    trace = random_trace(rng, draw(st.integers(1, 2)), draw(st.integers(1, 30)), n_expert, k)
    return trace, draw(st.integers(k, n_expert)), draw(st.sampled_from(["together", "one_by_one"]))


# ---- one cache against its definition


@given(small())
@settings(max_examples=150)
def test_demand_policies_decide_as_their_definitions_say(case):
    trace, slots, residency = case
    for policy in DEMAND:
        result = replay(trace, policy, slots, "layer", residency)
        for layer in range(trace.n_layers):
            rows = trace.experts[layer].tolist()
            steps = rows if residency == "together" else [(x,) for row in rows for x in row]
            hits, loads = simulate(steps, slots, policy, weight=slots)
            assert result.hits[layer] == hits
            assert result.loads[layer] == len(loads)
            cache = cache_for(Stream(trace, residency), policy, slots)
            if policy != "belady":  # where several are needed equally late, either may go
                assert [e for _, kind, place, e, _ in walk(Stream(trace, residency), cache) if kind == "load" and place == layer] == loads


@given(small())
@settings(max_examples=80)
def test_draining_a_trace_and_feeding_it_step_by_step_are_the_same(case):
    trace, slots, residency = case
    for policy in ("lru", "lfu", "lfu_in_cache", "lru_frequency", "belady", "static"):
        for scope, n in (("layer", slots), ("global", slots * trace.n_layers)):
            stream, hot = Stream(trace, residency), trace.counts()
            cache = cache_for(stream, policy, n, scope, hot=hot)
            events = Counter()
            for _, kind, layer, _, _ in walk(stream, cache):
                events[kind, layer] += 1
            result = replay(trace, policy, n, scope, residency, hot=hot)
            assert result.hits == tuple(events["hit", i] for i in range(trace.n_layers))
            assert result.loads == tuple(events["load", i] for i in range(trace.n_layers))
            assert result.evicted == sum(n for (kind, _), n in events.items() if kind == "evict")


@given(small(), st.sampled_from(["layer", "global"]), st.sampled_from([0.0, 0.3, 1.0, 3.0]), st.integers(0, 3), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=120)
def test_what_never_happens(case, scope, link, ahead, across, seed):
    """Slots are never exceeded, nobody in use goes, nothing is loaded twice or evicted that is not there; every need is met."""
    trace, slots, residency = case
    total = slots * (trace.n_layers if scope == "global" else 1)
    forecast = noise(trace, ahead, across, seed)
    for policy in POLICIES:
        stream = Stream(trace, residency)
        cache = cache_for(stream, policy, total, scope, hot=trace.counts())
        held, met = set(), Counter()
        steps = list(stream)
        for step, kind, layer, expert, cause in walk(stream, cache, forecast, link):
            place, wanted = steps[step]
            key = (layer, expert)
            if kind == "hit":
                assert key in held and layer == place and expert in wanted
                met[step, expert] += 1
            elif kind == "load":
                assert key not in held
                if cause != "staged":
                    held.add(key)
                if cause in ("missed", "staged"):
                    assert layer == place and expert in wanted
                    met[step, expert] += 1
            elif kind == "evict":
                held.remove(key)
                if residency == "together" and layer == place:
                    assert expert not in wanted or (step, expert) in met
            elif kind == "demote":
                assert key in held
            else:
                assert kind == "drop" and key not in held
            for group in cache.groups:
                assert sum(layer in group.layers for layer, _ in held) <= group.slots
        assert met == Counter((s, e) for s, (_, wanted) in enumerate(steps) for e in wanted)
        assert {k: sorted(e for layer, e in held if layer == k) for k in range(trace.n_layers)} == cache.resident()


def noise(trace, ahead, across, seed):
    rng = np.random.default_rng(seed)
    shape = (trace.n_layers, trace.n_tokens, trace.n_expert)
    return Forecast("noise", np.where(rng.random(shape) < 0.4, rng.random(shape), 0), ahead, across)


def perfect(trace, ahead=9, across=True):
    wanted = np.zeros((trace.n_layers, trace.n_tokens, trace.n_expert))
    np.put_along_axis(wanted, trace.experts.astype(int), 1.0, 2)
    return Forecast("perfect", wanted, ahead, across)


# ---- bounds


@given(small(), st.sampled_from(["layer", "global"]))
@settings(max_examples=120)
def test_no_demand_policy_beats_belady(case, scope):
    trace, slots, residency = case
    total = slots * (trace.n_layers if scope == "global" else 1)
    hot = trace.counts()
    best = replay(trace, "belady", total, scope, residency).hits
    for policy in DEMAND:
        assert sum(replay(trace, policy, total, scope, residency).hits) <= sum(best)
    # a static set has a staging buffer besides, so k slots more, and does not pay for what is there from the start
    static = replay(trace, "static", total, scope, residency, hot=hot)
    assert sum(static.hits) - (sum(static.loads) - static.demand) <= sum(replay(trace, "belady", total + trace.k, scope, residency).hits)


@given(small(), st.sampled_from(["layer", "global"]), st.sampled_from([0.25, 0.5, 1.0, 2.0]), st.integers(0, 3), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=120)
def test_no_prefetching_beats_an_oracle_on_the_same_link(case, scope, link, ahead, across, seed):
    trace, slots, residency = case
    total = slots * (trace.n_layers if scope == "global" else 1)
    best = sum(replay(trace, "oracle", total, scope, residency, link=link).hits)
    assert best >= sum(replay(trace, "belady", total, scope, residency).hits)
    for forecast in (noise(trace, ahead, across, seed), perfect(trace, ahead, across)):
        for policy in ("predicted", "plec"):
            assert sum(replay(trace, policy, total, scope, residency, forecast=forecast, link=link).hits) <= best


@pytest.mark.parametrize("seed", range(120))
def test_belady_and_the_oracle_are_as_good_as_trying_everything(seed):
    rng = np.random.default_rng(seed)
    n_layers, k = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    n_expert = int(rng.integers(k + 1, 5 if n_layers == 1 else 4))
    trace = random_trace(rng, n_layers, int(rng.integers(3, 6)), n_expert, k)
    scope, residency = rng.choice(["layer", "global"]), rng.choice(["together", "one_by_one"])
    slots, link = int(rng.integers(k, n_expert)), float(rng.choice([0, 1 / 3, 0.5, 1, 2]))
    steps = [tuple(layer * n_expert + e for e in trace.experts[layer, t].tolist()) for t in range(trace.n_tokens) for layer in range(n_layers)]
    total = slots * n_layers if scope == "global" else slots
    best = optimum(steps, lambda g: total, (lambda key: key // n_expert) if scope == "layer" else (lambda key: 0), link, residency == "together")
    assert sum(replay(trace, "oracle" if link else "belady", total, str(scope), str(residency), link=link).hits) == best


def test_a_perfect_forecast_with_a_fast_link_misses_nothing_but_the_first_layer():
    trace = random_trace(np.random.default_rng(0), 4, 50, 8, 2)
    result = replay(trace, "plec", 8, "global", forecast=perfect(trace, 1, across=False), link=2.0)
    assert result.hits[1:] == (100, 100, 100) and result.hits[0] < 100
    assert result.wasted == result.dropped == result.demoted == 0


# ---- single policies


def events(cache, *steps):
    return [e for step in steps for e in cache.serve([step])]


def test_equals_go_by_recency_then_by_number():
    cache = Recency(3, 6)
    assert events(cache, [1, 4], [2], [3]) == [("load", 1, "missed"), ("load", 4, "missed"), ("load", 2, "missed"),
                                              ("evict", 1, "least recently used"), ("load", 3, "missed")]
    cache = Recency(2, 6)
    assert [e[1] for e in events(cache, [5], [1, 5], [0]) if e[0] == "evict"] == [1]  # 1 and 5 were used together: the lower goes


def test_what_a_step_needs_stays_even_where_it_would_go_first():
    cache = Frequency(2, 4)
    list(cache.serve([[0], [1], [1], [1]]))
    assert events(cache, [0, 2]) == [("hit", 0, "resident"), ("evict", 1, "least often used"), ("load", 2, "missed")]


def test_counts_survive_an_eviction_or_end_with_it():
    steps = [[0], [0], [1], [1], [1], [2], [0], [2]]  # 0 comes back with a count of 3, or of 1; 1 has 3
    gone = [[e[1] for e in Frequency(2, 3, in_cache=ends).serve(steps) if e[0] == "evict"] for ends in (False, True)]
    assert gone == [[0, 2, 1], [0, 2, 0]]


def test_recency_and_frequency_has_both_as_its_ends():
    rng = np.random.default_rng(3)
    steps = [[int(x)] for x in rng.zipf(1.4, 3000) % 12]
    count = lambda cache: sum(e[0] == "hit" for e in cache.serve(steps))  # noqa: E731
    assert count(Frequency(4, 12, weight=0)) == count(Recency(4, 12))
    assert count(Frequency(4, 12, weight=10**6)) == count(Frequency(4, 12))


def test_a_static_set_stays_and_others_pass_through():
    trace = trace_of([[[0], [1], [2], [0], [3], [1]]])
    cache = cache_for(Stream(trace), "static", 2, hot=np.array([[5, 4, 1, 0]]))
    assert [e[1:] for e in walk(Stream(trace), cache)] == [
        ("load", 0, 0, "hot set"), ("load", 0, 1, "hot set"), ("hit", 0, 0, "resident"), ("hit", 0, 1, "resident"),
        ("load", 0, 2, "staged"), ("hit", 0, 0, "resident"), ("load", 0, 3, "staged"), ("hit", 0, 1, "resident")]
    result = replay(trace, "static", 2, hot=np.array([[5, 4, 1, 0]]))
    assert (result.hits, result.loads, result.demand, result.evicted) == ((4,), (4,), 2, 0)
    cache.forget([(0, 1)])
    assert [e[1] for e in cache.caches[0].serve([[3], [1], [1]])] == [3, 1, 1] and cache.resident() == {0: [0, 1]}


def test_belady_refuses_another_future():
    cache = Belady(2, 5, [0, 1, 2, 0])
    with pytest.raises(ParameterError, match="future"):
        list(cache.serve([[0], [1], [3]]))
    with pytest.raises(ParameterError, match="future"):
        list(Belady(1, 3, [0]).serve([[0], [1]]))
    with pytest.raises(ParameterError, match="future"):
        ExpertCache("belady", 2, 1, 4)


@given(st.lists(st.integers(0, 5), max_size=40))
def test_next_uses(keys):
    found = next_uses(np.array(keys, int)).tolist()
    assert found == [next((j for j in range(i + 1, len(keys)) if keys[j] == key), i) for i, key in enumerate(keys)]


def test_the_heap_of_belady_does_not_grow_with_the_trace():
    keys = np.random.default_rng(0).integers(0, 50, 20_000)
    cache = Belady(10, 50, keys)
    largest = 0
    for i, _ in enumerate(cache.serve([[int(k)] for k in keys])):
        largest = max(largest, len(cache.heap)) if i % 97 == 0 else largest
    assert largest <= 4 * 10 + 64 + 50


# ---- predictions


def test_the_worked_example_of_the_paper():
    """2 layers of 4 experts, 4 slots; predicted are e12 e13 e14 in layer 1, e22 e23 in layer 2 (ExpertFlow, figure 5)."""
    cache = ExpertCache("plec", 4, [1, 2], 5, scope="global")
    assert list(cache.predict(1, {2: 0.9, 3: 0.8, 4: 0.7})) == list(cache.predict(2, {2: 0.9, 3: 0.8})) == []
    assert list(cache.caches[0].allotment.values()) == [3, 1]
    fetched = [e for _ in range(6) for e in cache.prefetch()]
    assert fetched == [("load", *expert, "predicted") for expert in ((1, 2), (1, 3), (1, 4), (2, 2))]
    assert [e[0] for e in cache.step(1, [2, 3, 4])] == ["hit"] * 3
    assert list(cache.prefetch()) == []  # every slot is in use, or holds what comes next
    cache.done(1, 2)
    assert list(cache.prefetch()) == [("evict", 1, 2, "not predicted"), ("load", 2, 3, "predicted")]
    cache.done(1, 3)
    cache.done(1, 4)
    assert list(cache.step(2, [2, 4])) == [("demote", 2, 3, "not routed"), ("hit", 2, 2, "prefetched"), ("evict", 2, 3, "demoted"),
                                           ("load", 2, 4, "missed")]
    assert cache.resident() == {1: [3, 4], 2: [2, 4]}


@pytest.mark.parametrize(("needs", "slots", "out"), [((3, 2), 4, [3, 1]), ((1, 1, 1), 2, [1, 1, 0]), ((0, 5), 3, [0, 3]), ((2, 2), 9, [2, 2]), ((), 3, []),
                                                     ((2, 1), 0, [0, 0])])
def test_allotment(needs, slots, out):
    assert allot(needs, slots) == out


def test_a_prefetch_without_a_slot_is_dropped_and_not_waited_for():
    cache = ExpertCache("predicted", 2, 3, 4, scope="global")
    list(cache.step(0, [0, 1]))  # both slots are in use
    list(cache.predict(1, {2: 0.9, 3: 0.5}))
    assert list(cache.prefetch()) == [("drop", 1, 2, "no slot to spare"), ("drop", 1, 3, "no slot to spare")]
    cache.done(0, 0)
    assert list(cache.prefetch()) == []  # it was dropped, so nobody waits for the slot
    list(cache.predict(2, {0: 0.4}))
    assert list(cache.prefetch()) == [("evict", 0, 0, "not predicted"), ("load", 2, 0, "predicted")]
    cache.done(0, 1)
    list(cache.predict(1, {2: 0.9}))
    assert list(cache.prefetch()) == [("evict", 0, 1, "not predicted"), ("load", 1, 2, "predicted")]


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "static"])
def test_slots_can_be_given_up_under_every_policy(policy):
    trace = random_trace(np.random.default_rng(5), 1, 30, 6, 1)
    stream = Stream(trace)
    cache, steps = cache_for(stream, policy, 5), list(stream)
    for layer, experts in steps[:15]:
        list(cache.step(layer, experts))
    there = set(cache.resident()[0])
    gone = [e for kind, _, e, _ in cache.shed(0, 2) if kind == "evict"]
    assert len(gone) == len(there) - 3 and set(cache.resident()[0]) == there - set(gone) and steps[14][1][0] not in gone
    for layer, experts in steps[15:]:
        list(cache.step(layer, experts))
        assert len(cache.resident()[0]) <= 3
    cache.widen(0, 1)


def test_what_is_lost_from_outside_is_fetched_again():
    trace = trace_of([[[0], [1], [0], [1], [2]]])
    cache = cache_for(Stream(trace), "oracle", 2)
    list(cache.step(0, [0]))
    assert [e[:3] for e in cache.prefetch()] == [("load", 0, 1)] and list(cache.prefetch()) == []
    cache.forget([(0, 0)])
    cache.done(0, 0)
    assert [e[:3] for e in cache.prefetch()] == [("load", 0, 0)]


def test_what_is_predicted_stays_and_the_latest_goes_first_of_it():
    cache = Planned(3, 9)
    list(cache.serve([[0], [1], [2]]))
    list(cache.predict(5, {0: 0.5, 1: 0.9}))
    list(cache.predict(6, {2: 0.9}))
    assert events(cache, [3]) == [("evict", 2, "predicted latest"), ("load", 3, "missed")]
    assert events(cache, [4]) == [("evict", 3, "not predicted"), ("load", 4, "missed")]
    list(cache.predict(5, {0: 0.5, 1: 0.9, 4: 0.1}))
    assert events(cache, [5]) == [("evict", 4, "predicted latest"), ("load", 5, "missed")]


def test_a_newer_prediction_demotes_what_an_older_one_brought():
    cache = ExpertCache("predicted", 2, 2, 4, scope="global")
    list(cache.step(0, [0]))
    list(cache.predict(1, {1: 0.9}))
    assert list(cache.prefetch()) == [("load", 1, 1, "predicted")]
    assert list(cache.predict(1, {2: 0.9, 3: 0.1})) == [("demote", 1, 1, "not predicted any more")]
    cache.done(0, 0)
    assert list(cache.prefetch()) == [("evict", 1, 1, "demoted"), ("load", 1, 2, "predicted")]


def test_one_by_one_the_rest_of_a_step_is_known_for_certain():
    cache = ExpertCache("predicted", 2, 1, 4, together=False)
    assert list(cache.route(0, [3, 1])) == []
    assert list(cache.need(0, [3])) == [("load", 0, 3, "missed")]
    assert list(cache.prefetch()) == [("load", 0, 1, "predicted")]  # while 3 is computed with
    cache.done(0, 3)
    assert list(cache.need(0, [1])) == [("hit", 0, 1, "prefetched")]


# ---- groups


def test_experts_of_unequal_size_do_not_share_slots():
    sizes = [100, 100, 300, 100]
    groups = grouped(4, 8, 16, "global", sizes)
    assert [(g.layers, g.slots) for g in groups] == [((0, 1, 3), 12), ((2,), 4)]
    assert [(g.layers, g.slots) for g in grouped(4, 8, {100: 5, 300: 2}, "global", sizes)] == [((0, 1, 3), 5), ((2,), 2)]
    trace = random_trace(np.random.default_rng(1), 4, 100, 8, 2)
    cache = cache_for(Stream(trace), "lru", 16, "global", sizes=sizes)
    held = set()
    for _, kind, layer, expert, _ in walk(Stream(trace), cache):
        (held.add if kind == "load" else held.discard)((layer, expert)) if kind in ("load", "evict") else None
        assert sum(layer == 2 for layer, _ in held) <= 4 and len(held) <= 16
    result = replay(trace, "lru", 16, "global", sizes=sizes)
    assert result.bytes_loaded == sum(n * s for n, s in zip(result.loads, sizes))
    alone = trace_of(trace.experts[2:3], 8)
    assert result.hits[2] == replay(alone, "lru", 4).hits[0]


@pytest.mark.parametrize(("slots", "more", "says"), [
    (0, {}, "0 slots"), (1, {"least": 2}, "at least 2"), (-3, {}, "-3 slots"), (True, {}, "True slots"), (2.5, {}, "2.5 slots"),
    (3, {"scope": "world"}, "scope 'world'"), (3, {"sizes": [1]}, "1 sizes"), ({1: 3}, {"scope": "global", "sizes": [1, 2]}, "0 slots for experts of 2 bytes")])
def test_slots_that_cannot_be(slots, more, says):
    with pytest.raises(ParameterError, match=says):
        grouped(2, 8, slots, **more)


def test_bad_requests_are_named():
    cache = ExpertCache("lru", 2, [3, 5], 4)
    for wanted, says in (((4, [0]), "layer 4"), ((3, [0, 0]), r"\[0, 0\]"), ((3, [4]), r"\[4\]"), ((3, [-1]), r"\[-1\]"), ((3, [0, 1, 2]), "3 experts")):
        with pytest.raises(ParameterError, match=says):
            list(cache.step(*wanted))
    with pytest.raises(ParameterError, match="policy 'mru'"):
        ExpertCache("mru", 2, 1, 4)
    with pytest.raises(ParameterError, match="sample"):
        ExpertCache("static", 2, 1, 4)
    list(cache.step(3, [0, 1]))
    cache.forget([(3, 1)])
    assert cache.resident() == {3: [0], 5: []}
