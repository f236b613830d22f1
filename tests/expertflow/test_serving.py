"""Serving in virtual time: what holds for any limits, and what waiting does and does not gain."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ParameterError
from workbench.expertflow import sources
from workbench.expertflow.batching import FOREVER, LATENCY, THROUGHPUT, Limits
from workbench.expertflow.costs import costs
from workbench.expertflow.predictors import Oracle
from workbench.expertflow.replay import forecast_of, seen_routes
from workbench.expertflow.scoring import top
from workbench.expertflow.serving import _Server, serve

COSTS = costs("Mixtral-8x7B", kind="q4_0")
ROUTES = sources.load("tiny-mixtral").trace
TRUE = replace(forecast_of(Oracle(), seen_routes(ROUTES), top(2)), ahead=1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([0, 10**6, 10**7, FOREVER]), st.integers(1, 40), st.integers(1, 4), st.integers(1, 48),
       st.sampled_from([0, 10**7]), st.sampled_from(["lru", "lfu"]))
def test_every_request_gets_its_tokens(n, tokens, max_wait, capacity, merge, slots, every, policy):
    out = serve(ROUTES, COSTS, Limits(capacity, max_wait, None, merge), slots, n_requests=n, n_tokens=tokens, every=every, policy=policy)
    assert out.n_tokens == len(out.latencies) == n * tokens and min(out.latencies) > 0
    assert sum(size for size, _ in out.batches) == n * tokens * ROUTES.n_layers * ROUTES.k      # each token by each of its experts, once
    assert max(size for size, _ in out.batches) <= min(capacity, n)
    assert out.ns >= out.busy and out.loads >= len({e for layer in ROUTES.experts for e in layer[:1].ravel().tolist()}) // 2


def test_a_single_stream_gains_nothing_from_waiting():
    fast, slow = (serve(ROUTES, COSTS, limits, 24, n_requests=1) for limits in (LATENCY, Limits(32, 50_000_000)))
    assert slow.batch == fast.batch == 1.0
    assert slow.throughput <= fast.throughput * 1.02


def test_several_streams_share_loads():
    one, many = (serve(ROUTES, COSTS, LATENCY, 24, n_requests=n) for n in (1, 32))
    assert many.batch > 3 and many.loads_per_token < one.loads_per_token / 2
    assert many.throughput > 2 * one.throughput and many.latency() > one.latency()      # throughput is paid for with latency


def test_nobody_waits_much_longer_than_the_limit():
    """Overdue queues go oldest first, so a token waits at most for one load and one batch of each other queue besides."""
    limit, n = 20_000_000, 8
    out = serve(ROUTES, COSTS, Limits(64, limit), 24, n_requests=n)
    assert out.longest_wait <= limit + n * ROUTES.k * (COSTS.load + COSTS.expert(n)) + COSTS.attention(n) + COSTS.ids(n)


def test_waiting_for_ever_can_be_slower_than_not_waiting():
    assert serve(ROUTES, COSTS, THROUGHPUT, 24, n_requests=32).throughput < serve(ROUTES, COSTS, LATENCY, 24, n_requests=32).throughput


@pytest.mark.parametrize("wrong", [{"n_requests": 0}, {"n_requests": 1000}, {"n_tokens": 0}, {"every": -1}, {"every": float("nan")},
                                   {"n_requests": 2, "sequences": [3, 1000]}, {"withdraw": {8: 0}}, {"withdraw": {-1: 10**6}}])
def test_bad_requests(wrong):
    with pytest.raises(ParameterError):
        serve(ROUTES, COSTS, LATENCY, 24, **wrong)


def test_a_configuration_must_fit_the_trace():
    with pytest.raises(ParameterError):
        serve(ROUTES, costs("LLaMA-MoE-v1-3.5B"), LATENCY, 24)


def test_capacity_follows_free_memory():
    row, queues = 2 * COSTS.shape.d, ROUTES.n_layers * ROUTES.n_expert
    out = serve(ROUTES, COSTS, Limits(64, FOREVER), 24, n_requests=16, n_tokens=6, adapt=4, free=2 * row * queues)
    assert out.n_tokens == 96 and max(n for n, _ in out.batches[8:]) <= 2


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.integers(0, 11), st.integers(0, 6 * 10**8), max_size=12), st.sampled_from([0, 10**7, FOREVER]), st.integers(1, 4),
       st.integers(1, 48), st.sampled_from([0, 10**8]), st.booleans())
def test_a_request_withdrawn_at_any_time_leaves_nothing(withdraw, max_wait, merge, slots, every, forecast):
    told = TRUE if forecast else None
    server = _Server(ROUTES, COSTS, Limits(32, max_wait, None, merge), slots, 12, 3, every, "lru", None)
    server.forecast, server.withdraw = told, dict(withdraw)
    out = server.run()
    assert not server.queues.queues and not server.queues.missing and not server.announced.sums
    assert not (server.prepared or server.loading or server.arrivals)
    assert 36 - 3 * out.withdrawn <= out.n_tokens <= 36 - out.withdrawn and out.withdrawn <= len(withdraw)
    whole = 12 - out.withdrawn
    assert sum(n for n, _ in out.batches) >= whole * 3 * ROUTES.n_layers * ROUTES.k
    assert out.longest_wait >= 0 and len(out.latencies) == out.n_tokens


def test_withdrawn_before_its_attention():
    server = _Server(ROUTES, COSTS, LATENCY, 24, 3, 2, 0, "lru", None)
    server._news()                                                                # all three are there
    server.withdraw = {1: 0}
    server._news()
    assert server.prepared == {0: [0, 2]}
    assert (server.run().n_tokens, server.out.withdrawn) == (4, 1)


def test_withdrawn_before_it_comes_it_takes_nothing():
    few = serve(ROUTES, COSTS, LATENCY, 24, n_requests=4, n_tokens=3)
    many = serve(ROUTES, COSTS, LATENCY, 24, n_requests=8, n_tokens=3, withdraw=dict.fromkeys(range(4, 8), 0))
    assert (many.n_tokens, many.ns, many.loads, many.withdrawn) == (few.n_tokens, few.ns, few.loads, 4)


def test_with_all_requests_withdrawn_there_is_nothing_to_average():
    out = serve(ROUTES, COSTS, LATENCY, 24, n_requests=2, withdraw={0: 0, 1: 0})
    assert (out.withdrawn, out.n_tokens, out.ns, out.throughput, out.causes()) == (2, 0, 0, 0.0, {})
    assert np.isnan([out.latency(), out.latency(0.95), out.batch, out.loads_per_token, out.wait]).all()


def test_forecasts_shorten_waits_of_one_stream_and_a_wrong_one_costs():
    right, wrong = TRUE, replace(TRUE, wanted=np.roll(TRUE.wanted, 3, 2))
    plain, helped, misled = (serve(ROUTES, COSTS, LATENCY, 40, n_requests=1, forecast=f) for f in (None, right, wrong))
    assert plain.prefetches == 0 and helped.useful == helped.prefetches > 0
    assert helped.throughput > plain.throughput > misled.throughput and misled.useful < misled.prefetches
    named = serve(ROUTES, COSTS, LATENCY, 40, n_requests=1, forecast=right, prefetch=False)
    assert named.ns == plain.ns                                                  # a single token: there are no equals to choose from
    with pytest.raises(ParameterError):
        serve(ROUTES, COSTS, LATENCY, 40, forecast=replace(right, wanted=right.wanted[:, :9]))
