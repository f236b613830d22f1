"""Token queues: no token is lost, doubled or overtaken within its sequence, nobody starves, and each rule does what it says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ParameterError
from workbench.expertflow.batching import (
    FOREVER,
    LATENCY,
    THROUGHPUT,
    Announced,
    Limits,
    Readings,
    TokenQueues,
    worthwhile,
)
from workbench.expertflow.costs import costs


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0, 7, 50, FOREVER]), st.integers(1, 3))
def test_every_token_is_served_once_by_each_of_its_experts_and_joined_once(seed, k, capacity, threshold, max_wait, merge):
    rng = np.random.default_rng(seed)
    queues = TokenQueues(Limits(capacity, max_wait, threshold, merge), k, threshold)
    served, joined, now, wanted = {}, [], 0, {}
    arriving = iter(range(30))
    todo = 30
    while todo or queues.n_waiting:
        for _ in range(int(rng.integers(0, 4))):
            token = next(arriving, None)
            if token is not None:
                todo -= 1
                wanted[token] = (int(rng.integers(3)), rng.permutation(6)[:k].tolist())
                queues.add(token, *wanted[token], now)
        for batch in queues.next(now, idle=rng.random() < 0.3 or not todo):
            assert len(batch.tokens) <= capacity
            assert [w.since for w in batch.tokens] == sorted(w.since for w in batch.tokens)      # first come, first served
            for w in batch.tokens:
                served.setdefault(w.token, []).append((batch.layer, batch.expert, w.rank))
            together = queues.done(w.token for w in batch.tokens)
            assert all(len(served[token]) == k for token in together)                           # not before its last result
            joined += together
        now += int(rng.integers(1, 5))
    assert sorted(joined) == list(range(30))
    for token, (layer, experts) in wanted.items():
        assert sorted(served[token]) == sorted((layer, e, r) for r, e in enumerate(experts))
    assert not queues.missing and not queues.queues


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(5, 60))
def test_a_rare_expert_is_served_within_its_bound(seed, max_wait):
    """One popular expert is always fuller; the other one's token still goes when it has waited as long as it may."""
    rng = np.random.default_rng(seed)
    queues = TokenQueues(Limits(64, max_wait, 1000), 1, 1000)
    queues.add(0, 0, [5], 0)
    for now in range(0, 400):
        queues.add(now + 1, 0, [int(rng.integers(0, 2))], now)
        for batch in queues.next(now, idle=False):
            if batch.expert == 5:
                assert batch.cause == "waited" and now <= max_wait + 2       # at most the two older queues go first, one per call
                return
    raise AssertionError("starved")


def test_rules_in_order():
    resident = {(0, 1)}
    queues = TokenQueues(Limits(capacity=3, max_wait=100, threshold=2), 1, 2, lambda layer, e: (layer, e) in resident)
    queues.add(0, 0, [0], 0)
    assert queues.next(10, idle=False) == []                                     # one token, not resident, nobody idle: it waits
    queues.add(1, 0, [1], 20)
    [batch] = queues.next(30, idle=False)
    assert (batch.expert, batch.cause) == (1, "pays")                            # resident: nothing to wait for
    queues.add(2, 0, [0], 40)
    [batch] = queues.next(40, idle=False)
    assert (batch.expert, batch.cause, len(batch.tokens)) == (0, "pays", 2)
    queues.add(3, 0, [4], 50)
    assert queues.next(149, idle=False) == [] and queues.due() == 150
    assert queues.next(150, idle=False)[0].cause == "waited"
    queues.add(4, 0, [4], 200)
    assert queues.next(200, idle=True)[0].cause == "idle"


def test_the_wait_counts_from_the_oldest_token_and_not_from_the_last_trigger():
    """The seed's listing resets its clock at each trigger, and at the start: a queue that fills late would wait too short, one refilled too long."""
    queues = TokenQueues(Limits(max_wait=100, threshold=50), 1, 50)
    queues.add(0, 0, [0], 1000)
    assert queues.next(1050, False) == []                                        # the listing would say: long overdue since time 0
    queues.add(1, 0, [0], 1090)
    assert queues.due() == 1100 and len(queues.next(1100, False)[0].tokens) == 2


def test_all_expired_queues_are_served_not_only_the_first():
    queues = TokenQueues(Limits(max_wait=10, threshold=50), 1, 50)
    for token, e in enumerate((3, 1, 2)):
        queues.add(token, 0, [e], token)
    assert [queues.next(100, False)[0].expert for _ in range(3)] == [3, 1, 2]    # the oldest first
    assert queues.next(100, False) == []


def test_short_queues_of_a_layer_are_merged():
    queues = TokenQueues(Limits(merge=3, max_wait=0, threshold=8), 1, 8)
    for token, (layer, e) in enumerate([(0, 0), (0, 1), (1, 2), (0, 3), (0, 4)]):
        queues.add(token, layer, [e], 0)
    batches = queues.next(0, False)
    assert len(batches) == 3 and {b.layer for b in batches} == {0} and [b.cause for b in batches[1:]] == ["merged"] * 2


def test_predicted_experts_come_first_among_equals():
    queues = TokenQueues(Limits(threshold=1), 1, 1, wanted=lambda layer, e: {4: 0.9}.get(e, 0.1))
    for token, e in enumerate((2, 4)):
        queues.add(token, 0, [e], 0)
    assert queues.next(0, False)[0].expert == 4


def test_a_withdrawn_request_leaves_nothing_behind():
    queues = TokenQueues(Limits(threshold=9), 2, 9)
    queues.add(7, 0, [1, 2], 0)
    queues.add(8, 0, [2, 3], 0)
    [first] = queues.next(0, idle=True)
    queues.cancel(7)
    assert 7 not in queues.missing and all(w.token != 7 for q in queues.queues.values() for w in q)
    queues.done(w.token for w in first.tokens)                                   # a late result of it is dropped
    while batches := queues.next(0, idle=True):
        for b in batches:
            queues.done(w.token for w in b.tokens)
    assert not queues.missing and not queues.queues


def test_the_threshold_is_where_computing_takes_longer_than_loading():
    c = costs("Mixtral-8x7B")
    b = worthwhile(c)
    assert c.expert(b) > c.load >= c.expert(b - 1)
    assert worthwhile(c, most=4) == 4                                            # where even that is not enough
    assert b > 100                                                               # the seed: "some tens or hundreds"


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"max_wait": -1}, {"max_wait": float("inf")}, {"max_wait": float("nan")}, {"capacity": 2.5},
                                   {"threshold": 0}, {"merge": 0}])  # fmt: skip
def test_limits_that_make_no_sense(wrong):
    with pytest.raises(ParameterError):
        Limits(**wrong)


@pytest.mark.parametrize("k, threshold", [(0, 1), (2, 0), (2, -3)])
def test_queues_that_make_no_sense(k, threshold):
    with pytest.raises(ParameterError):
        TokenQueues(LATENCY, k, threshold)


def test_classes_and_bad_tokens():
    assert LATENCY.max_wait == 0 and THROUGHPUT.max_wait == FOREVER
    queues = TokenQueues(LATENCY, 2, 1)
    queues.add(0, 0, [1, 2], 0)
    for wrong in ((0, 0, [3, 4]), (1, 0, [1]), (1, 0, [1, 1])):
        with pytest.raises(ParameterError):
            queues.add(*wrong, 0)


def test_what_was_announced_stands_until_the_token_is_there():
    said = Announced()
    said.say(1, 3, {0: 0.9, 5: 0.5})
    said.say(2, 3, {5: 0.75})
    said.say(1, 4, {7: 1.0})
    assert said.wanted(3, 5) == 1.25 and said.wanted(3, 1) == 0 and said.missing(lambda *key: False) == (3, 5)
    assert said.missing(lambda layer, e: (layer, e) == (3, 5)) == (4, 7)
    said.arrived(1, 3)
    assert said.sums == {(3, 5): 0.75, (4, 7): 1.0}
    said.forget(1)
    assert said.sums == {(3, 5): 0.75}
    said.arrived(2, 3)
    assert said.missing(lambda *key: False) is None


def test_a_load_is_what_a_batch_takes_beyond_one_without():
    readings = Readings()
    readings.loaded(4, 900)                                          # nothing to compare with yet
    assert not readings.loads
    readings.batches.append((2, 300))
    readings.loaded(4, 900)                                          # one size only: taken as flat
    readings.batches.append((6, 500))                                # 200 + 50 n
    readings.loaded(4, 900)
    assert list(readings.loads) == [600, 500]


def test_limits_follow_what_was_measured():
    readings, base = Readings(), Limits(32, 5, None)
    assert readings.threshold() is None and readings.limits(base, 10**6, 100, 10).threshold is None
    readings.loads.extend([1000, 1000, 9000])                        # one slow load: the median stays
    readings.batches.extend([(1, 150), (3, 250), (10, 600)])         # 100 + 50 n
    assert readings.threshold() == 19                                # 100 + 50 * 19 = 1050 > 1000 >= 100 + 50 * 18
    found = readings.limits(base, free=8000, row_bytes=100, n_queues=10)
    assert (found.threshold, found.capacity, found.max_wait) == (19, 8, 5)
    assert readings.limits(base, 0, 100, 10).capacity == 1
    flat = Readings()
    flat.loads.append(1000)
    flat.batches.extend([(1, 200), (8, 200)])
    assert flat.threshold(64) == 64
    flat.loads.append(1)
    flat.loads.append(1)
    assert flat.threshold(64) == 1


def test_new_limits_leave_everybody_where_they_are():
    q = TokenQueues(Limits(32, FOREVER), 1, 9)
    for token in range(4):
        q.add(token, 0, [0], 0)
    assert q.next(0, False) == []
    q.adapt(Limits(2, FOREVER, 3))
    batches = q.next(1, False)
    assert [w.token for w in batches[0].tokens] == [0, 1] and batches[0].cause == "full" and q.n_waiting == 2
