"""Time per token from routes: the ledger adds up, hits are those of the replay, and limits are where arithmetic puts them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.devices.cost import DISKS
from workbench.errors import ParameterError
from workbench.expertflow.costs import costs
from workbench.expertflow.replay import Forecast, Stream, replay
from workbench.expertflow.timing import LOSSES, simulate
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


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["lru", "lfu", "predicted", "plec", "static", "oracle"]), st.integers(2, 8), st.sampled_from([1, 4]),
       st.sampled_from(["layer", "global"]), st.sampled_from([0, 2, "auto"]), st.sampled_from(["expert", "matrix"]),
       st.sampled_from([None, 2, 9]), st.sampled_from(["right", "random", "random of the token"]), st.booleans(), st.sampled_from([0, 5_000_000]))
def test_the_ledger_adds_up_and_no_stream_does_two_things_at_once(seed, policy, slots, batch, scope, host_below, granularity, host_slots, told,
                                                                  warm, thinking):  # fmt: skip
    trace, record = routes(seed), Trace("virtual")
    slots = max(slots, 8 if batch > 1 else 2)
    host_below = 0 if policy == "oracle" else host_below
    forecast = oracle(trace) if policy in ("predicted", "plec") else None
    if forecast and told != "right":
        wanted = np.random.default_rng(seed).random(forecast.wanted.shape)
        forecast = Forecast(told, wanted * (wanted > 0.7), ahead=told == "random")
    out = simulate(trace, COSTS, policy, slots * (3 if scope == "global" else 1), scope=scope, batch=batch, forecast=forecast, host_below=host_below,
                   granularity=granularity, host_slots=host_slots, hot=trace.counts() if warm or policy == "static" else None, thinking=thinking,
                   record=record)
    assert set(out.ledger) == set(LOSSES) and min(out.ledger.values()) >= 0
    assert sum(out.ledger.values()) == out.ns
    assert out.late <= out.useful <= out.prefetches and out.hits <= out.accesses <= out.hits + out.demand_loads + out.hosted
    moved = out.demand_loads + out.prefetches + out.hosted
    assert (out.disk_reads > 0) == (host_slots is not None and moved > 0) and (out.disk_reads or not out.ledger["disk"])
    if granularity == "expert" and host_slots is None:
        assert out.link_busy == (out.demand_loads + out.prefetches) * COSTS.load
    assert out.link_busy <= (out.demand_loads + out.prefetches) * (COSTS.load + 2 * COSTS.device.link_ns)
    spans = {}
    for e in record.of("busy"):
        spans.setdefault(record.described(e)["device"], []).append((e.start, e.end))
    for device, busy in spans.items():
        busy.sort()
        assert all(a[1] <= b[0] for a, b in zip(busy, busy[1:])), device
    assert sum(end - start for start, end in spans["device"]) == out.ledger["compute"]
    assert sum(end - start for start, end in spans.get("link", ())) == out.link_busy


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 7), st.sampled_from(["expert", "matrix"]), st.sampled_from([None, 4]),
       st.sampled_from(["slots", "link", "memory", "disk"]))
def test_on_demand_nothing_that_is_better_makes_a_run_slower(seed, slots, granularity, host_slots, better):
    """LRU keeps with more slots whatever it kept with fewer; and where nothing is fetched ahead, no load stands in another's way."""
    device, disk, how = COSTS.device, COSTS.disk, {"granularity": granularity, "host_slots": host_slots}
    quicker = {"slots": COSTS, "link": replace(COSTS, device=replace(device, link=2 * device.link)),
               "memory": replace(COSTS, device=replace(device, memory=2 * device.memory)),
               "disk": replace(COSTS, disk=replace(disk, rate=2 * disk.rate))}[better]
    before, after = simulate(routes(seed), COSTS, "lru", slots, **how), simulate(routes(seed), quicker, "lru", slots + (better == "slots"), **how)
    assert after.ns <= before.ns and after.demand_loads <= before.demand_loads
    assert before.ledger["late prefetch"] == before.ledger["wasted prefetch"] == 0


@pytest.mark.parametrize("policy", ["belady", "oracle"])
def test_a_future_that_the_slots_would_not_see_as_a_whole_is_refused(policy):
    with pytest.raises(ParameterError, match=f"policy {policy} with experts computed on the host"):
        simulate(routes(0), COSTS, policy, 4, host_below="auto")


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


def one(experts, n_layers=1):
    """A trace of one sequence: for each token the two experts of every layer."""
    ids = np.array([[row] * n_layers for row in experts], np.int32).transpose(1, 0, 2)
    n = len(experts)
    return RouteTrace(ids, np.full(ids.shape, np.nan, np.float32), np.arange(n_layers), np.zeros(n, int), np.arange(n), np.zeros(n, int), 8)


def before_experts(out):
    return int(COSTS.head(1) / out.scale) + COSTS.attention(1) + COSTS.ids(1)


def test_an_expert_that_would_come_too_late_is_computed_on_the_host_and_its_load_goes_on():
    """Token 1 needs expert 0, whose load began with the forecast, just before the router spoke; its other expert is there."""
    trace, wanted = one([(1, 2), (0, 1)]), np.zeros((1, 2, 8))
    wanted[0, 0, 1] = wanted[0, 1, 0] = 1.0
    out, waiting = (simulate(trace, COSTS, "predicted", 4, forecast=Forecast("", wanted, 0), host_below=n) for n in ("auto", 2))
    assert (out.hosted, waiting.hosted) == (2, 1) and out.hits == waiting.hits == 3
    assert out.prefetches == waiting.prefetches == 2 and out.link_busy == 2 * COSTS.load
    wait, there = COSTS.load - COSTS.ids(1) + COSTS.expert(1), COSTS.beside_copies(1)
    assert waiting.ns - out.ns == pytest.approx(wait - there, abs=5) and wait > there


def test_a_prefetch_is_late_where_somebody_waits_and_wasted_where_it_goes_unused():
    """By hand: experts 0 and 1 foretold, over a slow link and a very fast one; then expert 7, foretold too early: it has gone when it is wanted."""
    wanted = np.zeros((1, 1, 8))
    wanted[0, 0, :2] = 1.0
    fast = replace(COSTS, device=replace(COSTS.device, link=1e6, link_ns=0))
    slow, quick = (simulate(one([(0, 1)]), c, "predicted", 3, forecast=Forecast("", wanted, 0)) for c in (COSTS, fast))
    assert (slow.useful, slow.late, slow.demand_loads) == (1, 1, 1) and (quick.useful, quick.late, quick.demand_loads) == (2, 0, 0)
    early = np.zeros((1, 4, 8))
    early[0, 0, 7] = 1.0
    out = simulate(one([(0, 1), (2, 3), (0, 1), (7, 0)]), COSTS, "predicted", 3, forecast=Forecast("", early, 0))
    assert (out.prefetches, out.useful, out.late) == (1, 0, 0) and out.ledger["late prefetch"] == 0 < out.ledger["wasted prefetch"]


def test_the_host_is_slower_while_the_link_copies():
    """By hand: one token, expert 0 on the host, a useless load under way all the time."""
    wanted = np.zeros((1, 1, 8))
    wanted[0, 0, 7] = 1.0
    quiet, copying = (simulate(one([(0, 1)]), COSTS, "predicted", 4, forecast=Forecast("", w, 0), host_below="auto")
                      for w in (np.zeros((1, 1, 8)), wanted))
    assert quiet.ns == before_experts(quiet) + 2 * COSTS.on_host(1)
    share = 1 - COSTS.on_host(1) / COSTS.beside_copies(1)
    slowed = 2 * COSTS.on_host(1) + share * (COSTS.load - COSTS.ids(1))           # both reads of memory, at their rates
    assert copying.ns == pytest.approx(before_experts(copying) + slowed, abs=3)
    rest = COSTS.host.memory - COSTS.device.link
    assert COSTS.beside_copies(1) - COSTS.on_host(1) == pytest.approx(COSTS.expert_bytes * (1 / rest - 1 / COSTS.host.memory), abs=2)


def test_loads_by_matrix_by_hand():
    """Two missing experts: each product starts when its matrix is there, so only the last product of the last expert is not hidden."""
    out = simulate(one([(0, 1)]), COSTS, "lru", 2, granularity="matrix")
    piece = COSTS.device.transfer_ns(COSTS.expert_bytes // 3)
    assert out.ns == pytest.approx(before_experts(out) + 6 * piece + COSTS.expert(1) / 3, abs=3)


def test_a_demand_load_waits_for_a_matrix_of_a_prefetch_at_most():
    wrong = np.zeros((1, 1, 8))
    wrong[0, 0, 7] = 1.0
    whole, parts = (simulate(one([(0, 1)]), COSTS, "predicted", 4, forecast=Forecast("wrong", wrong, 0), granularity=g)
                    for g in ("expert", "matrix"))
    piece = COSTS.device.transfer_ns(COSTS.expert_bytes // 3)
    assert whole.ledger["wasted prefetch"] == COSTS.load - COSTS.ids(1) > piece >= parts.ledger["wasted prefetch"] > 0


def test_what_the_host_does_not_hold_is_read_from_disk_first():
    """Two tokens with the same experts: read once; with others between, and no room for four, each time. Also to be computed there."""
    for host_below in (0, "auto"):
        held, lost = (simulate(one([(0, 1), (2, 3), (0, 1)]), COSTS, "lru", 2, host_slots=n, host_below=host_below) for n in (4, 2))
        assert (held.disk_reads, lost.disk_reads) == (4, 6)
        assert lost.ns - held.ns == pytest.approx(2 * COSTS.read, rel=0.3)
    out = simulate(one([(0, 1)]), COSTS, "lru", 2, host_slots=2)
    assert out.ns == before_experts(out) + 2 * COSTS.read + COSTS.load + COSTS.expert(1)   # read, send; the first one is hidden
    assert out.ledger["disk"] + out.ledger["compulsory"] == 2 * COSTS.read + COSTS.load - COSTS.expert(1)
    sata = replace(COSTS, disk=DISKS["sata"])
    assert simulate(one([(0, 1)]), sata, "lru", 2, host_slots=2).ns > 5 * out.ns
    with pytest.raises(ParameterError, match="host_slots=1"):
        simulate(one([(0, 1)]), COSTS, "lru", 2, host_slots=1)
    with pytest.raises(ParameterError, match="granularity 'byte'"):
        simulate(one([(0, 1)]), COSTS, "lru", 2, granularity="byte")


def test_a_warm_start_that_nothing_disturbs_is_the_hot_set():
    trace, nothing = routes(4, 60), np.zeros((3, 60, 8))
    for scope, slots in (("layer", 4), ("global", 12)):
        how = {"scope": scope, "hot": trace.counts(), "host_below": "auto"}
        static = simulate(trace, COSTS, "static", slots, **how)
        for policy, forecast in (("lru", None), ("predicted", Forecast("", nothing, 1))):
            out = simulate(trace, COSTS, policy, slots, forecast=forecast, **how)
            assert (out.ns, out.hits, out.hosted, out.demand_loads) == (static.ns, static.hits, static.hosted, 0)
    cold = simulate(trace, COSTS, "lru", 8)
    assert simulate(trace, COSTS, "lru", 8, hot=trace.counts()).ledger["compulsory"] == 0 < cold.ledger["compulsory"]


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


def test_costs_by_hand():
    """Mixtral-8x7B in f16 on an RTX 3090 (80 % of 936 GB/s, PCIe 4: 25.2 GB/s) beside a desktop's memory (58.24 GB/s): bytes over rates, and starts."""
    kernel, copy, expert, rows = 5_000, 10_000, 3 * 4096 * 14336 * 2, 4 * 4096
    assert COSTS.load == pytest.approx(copy + expert / 25.2, abs=1)
    assert COSTS.expert(1) == pytest.approx(3 * kernel + expert / 748.8, abs=1)
    there_and_back = 2 * (copy + rows / 25.2)
    assert COSTS.on_host(1) == pytest.approx(3 * 3_000 + expert / 58.24 + there_and_back, abs=3)
    assert COSTS.beside_copies(1) == pytest.approx(3 * 3_000 + expert / (58.24 - 25.2) + there_and_back, abs=3)
    dense = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 4096)                                     # q, o; k, v; router
    assert COSTS.attention(1) == pytest.approx(20 * kernel + dense / 748.8, abs=1)
    assert COSTS.head(1) == pytest.approx(3 * kernel + 2 * 32_000 * 4096 / 748.8, abs=1)
    assert COSTS.look_ahead == pytest.approx(2 * kernel + 2 * 8 * 4096 / 748.8, abs=1)
    assert COSTS.read == pytest.approx(100_000 + expert / 7.0, abs=1)


def test_bytes_and_scale_are_those_of_the_named_configuration():
    mixtral = next(m for m in MODELS if m.name == "Mixtral-8x7B")
    assert COSTS.expert_bytes == 3 * 4096 * 14336 * 2
    out = simulate(Stream(routes(0)), COSTS, "lru", 2)
    assert out.scale == mixtral.n_moe / 3
    assert out.bytes_per_token == int(out.demand_loads * COSTS.expert_bytes * out.scale / 24)
