"""Time per token from routes: the ledger adds up, hits are those of the replay, and limits are where arithmetic puts them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ParameterError
from workbench.expertflow.replay import Forecast, Stream, replay
from workbench.expertflow.timing import LOSSES, costs, simulate
from workbench.moe import RouteTrace
from workbench.moe.configs import MODELS
from workbench.trace import Trace

COSTS = costs("Mixtral-8x7B")


def routes(seed, n_tokens=24, n_layers=3, n_expert=8, k=2, skew=1.0):
    rng = np.random.default_rng(seed)
    favour = rng.gumbel(size=(n_layers, 1, n_expert)) * skew
    ids = np.argsort(-(favour + rng.gumbel(size=(n_layers, n_tokens, n_expert))), -1)[..., :k].astype(np.int32)
    return RouteTrace(ids, np.full(ids.shape, np.nan, np.float32), np.arange(n_layers), np.zeros(n_tokens, int),
                      np.arange(n_tokens) % 6, np.arange(n_tokens) // 6, n_expert)


def oracle(trace, ahead=1):
    wanted = np.zeros((trace.n_layers, trace.n_tokens, trace.n_expert))
    np.put_along_axis(wanted, trace.experts.astype(int), 1.0, 2)
    return Forecast("oracle", wanted, ahead)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["lru", "lfu", "predicted", "plec", "oracle"]), st.integers(2, 8), st.sampled_from([1, 4]),
       st.sampled_from(["layer", "global"]), st.sampled_from([0, 2, "auto"]))
def test_the_ledger_adds_up_and_no_time_is_negative(seed, policy, slots, batch, scope, host_below):
    trace = routes(seed)
    slots = max(slots, 8 if batch > 1 else 2)
    forecast = oracle(trace) if policy in ("predicted", "plec") else None
    out = simulate(trace, COSTS, policy, slots * (3 if scope == "global" else 1), scope=scope, batch=batch, forecast=forecast, host_below=host_below)
    assert set(out.ledger) == set(LOSSES) and min(out.ledger.values()) >= 0
    assert sum(out.ledger.values()) == out.ns
    assert out.useful <= out.prefetches and out.hits <= out.accesses
    assert out.link_busy == (out.demand_loads + out.prefetches) * COSTS.load


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["lru", "lfu", "lfu_in_cache", "belady"]), st.integers(2, 7))
def test_hits_are_those_of_the_replay(seed, policy, slots):
    trace = routes(seed)
    counted = replay(trace, policy, slots)
    out = simulate(trace, COSTS, policy, slots)
    assert (out.hits, out.accesses, out.demand_loads) == (sum(counted.hits), sum(counted.accesses), sum(counted.loads))


def test_with_room_for_all_only_first_loads_are_waited_for():
    trace = routes(1)
    out = simulate(trace, COSTS, "lru", 8)
    first = len({(layer, e) for layer, ids in enumerate(trace.experts) for e in ids.ravel().tolist()})
    assert out.demand_loads == first
    assert out.ledger["compulsory"] > 0 and not any(out.ledger[k] for k in LOSSES if k not in ("compute", "compulsory", "ids"))


def test_demand_loads_of_one_token_by_hand():
    """Two missing experts of one layer: the first is computed while the second is on its way."""
    trace = routes(3, n_tokens=1, n_layers=1)
    out = simulate(trace, COSTS, "lru", 2)
    c = COSTS
    head = int(c.head(1) / out.scale)
    expected = head + c.attention(1) + c.ids(1) + max(c.load + c.expert(1), 2 * c.load) + c.expert(1)
    assert out.ns == expected
    assert out.ledger["compulsory"] == expected - head - c.attention(1) - c.ids(1) - 2 * c.expert(1)


def test_belady_has_no_policy_losses_and_is_never_slower_than_demand_policies_in_loads():
    trace = routes(7, 60)
    best = simulate(trace, COSTS, "belady", 4)
    assert best.ledger["policy"] == 0
    for policy in ("lru", "lfu", "lru_frequency"):
        assert simulate(trace, COSTS, policy, 4).demand_loads >= best.demand_loads


def test_prefetching_hides_loads_where_computing_takes_long_enough():
    """On a fast link nothing but the first layer of a token is waited for: of that nothing is known before it begins."""
    trace = routes(11, 40)
    fast = replace(COSTS, device=replace(COSTS.device, link=10_000.0, link_ns=0))
    demand, ahead = (simulate(trace, fast, p, 4, forecast=f) for p, f in (("lru", None), ("predicted", oracle(trace))))
    assert ahead.ns < demand.ns and ahead.useful > 0
    assert ahead.ledger["late prefetch"] < 1 / 3 * sum(demand.ledger[k] for k in ("capacity", "policy", "compulsory"))


def test_wrong_forecasts_cost_time_and_are_charged_to_them():
    trace = routes(5, 40)
    wrong = np.zeros((3, 40, 8))
    used = oracle(trace).wanted > 0
    for layer in range(3):
        for t in range(40):
            wrong[layer, t, np.flatnonzero(~used[layer, t])[:2]] = 1.0
    out = simulate(trace, COSTS, "predicted", 4, forecast=Forecast("wrong", wrong, 1))
    assert out.ledger["wasted prefetch"] > 0 and out.useful < out.prefetches / 2
    assert out.ns > simulate(trace, COSTS, "predicted", 4, forecast=oracle(trace)).ns


def test_a_configuration_must_have_the_experts_of_the_trace():
    with pytest.raises(ParameterError, match="2 of 8 experts"):
        simulate(routes(0), costs("LLaMA-MoE-v1-3.5B"))


def test_the_record_is_the_run():
    trace, record = routes(2), Trace("virtual")
    out = simulate(trace, COSTS, "predicted", 4, forecast=oracle(trace), record=record)
    loads = [e for e in record.of("load")]
    assert len(loads) == out.demand_loads + out.prefetches
    busy = [record.described(e) | {"start": e.start, "end": e.end} for e in record.of("busy")]
    for device in ("device", "link"):
        spans = sorted((b["start"], b["end"]) for b in busy if b["device"] == device)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))              # a stream does one thing at a time
    assert sum(b["end"] - b["start"] for b in busy if b["device"] == "device") == out.ledger["compute"]


def test_bytes_and_scale_are_those_of_the_named_configuration():
    mixtral = next(m for m in MODELS if m.name == "Mixtral-8x7B")
    assert COSTS.expert_bytes == 3 * 4096 * 14336 * 2
    out = simulate(Stream(routes(0)), COSTS, "lru", 2)
    assert out.scale == mixtral.n_moe / 3
    assert out.bytes_per_token == int(out.demand_loads * COSTS.expert_bytes * out.scale / 24)
