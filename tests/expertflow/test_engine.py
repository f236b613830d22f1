"""The engine: outputs equal those of a model that is all there, bit for bit, and a card holds no expert outside its slots."""

from dataclasses import replace

import numpy as np
import pytest

from tests.expertflow.offloaded import Run
from workbench import models
from workbench.devices.cost import Speed
from workbench.devices.simulated import simulated_machine
from workbench.devices.simulated_memory import DeviceBuffer
from workbench.errors import ParameterError, StorageError
from workbench.expertflow import sources
from workbench.expertflow.cache import GRANULARITIES
from workbench.expertflow.engine import ExpertEngine
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.hosted import host_ns
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import expert_bytes, offload
from workbench.expertflow.pool import ExpertPool
from workbench.expertflow.replay import Stream
from workbench.expertflow.visits import expert_weights
from workbench.trace import Trace

NAMES = ["tiny-mixtral-f16", "tiny-mixtral-q8_0", "tiny-mixtral-q4_0", "tiny-deepseek-f16"]
PROMPT = "And God said unto Moses, Go in unto Pharaoh"


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    with models.load(request.param) as model:
        yield model


@pytest.fixture(scope="module")
def resident(model):
    run = Run(model, None)
    yield run.text(model.tokenizer.encode(PROMPT))
    run.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_logits_are_those_of_the_model_that_is_all_there(model, resident, share, granularity):
    run = Run(model, int(expert_bytes(model) * share), granularity=granularity)
    assert np.array_equal(run.text(model.tokenizer.encode(PROMPT)), resident)
    assert run.count("hit") and run.count("load") and run.count("evict")
    run.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_tokens_experts_are_enough_in_waves(model, resident, granularity):
    """The least budget: a prompt then runs its experts a few at a time."""
    k, size = model.hparams.n_expert_used, max(sum(w.nb[2] for w in merged) for merged in expert_weights(model).values())
    run = Run(model, k * (size + 3 * 256), granularity=granularity)
    assert run.pool.n_slots(min(run.pool.weights)) == k
    assert np.array_equal(run.text(model.tokenizer.encode(PROMPT)), resident) and run.counters.waves
    run.close()


POLICIES = ["lru", "lfu", "lfu_in_cache", "lru_frequency", "static", "predicted", "plec"]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_any_policy_and_any_forecast_give_the_same_bits(policy, scope, granularity):
    with models.load("tiny-deepseek-f16") as model:
        tokens = model.tokenizer.encode(PROMPT)
        whole = Run(model, None)
        resident = whole.text(tokens)
        whole.close()
        hot = np.arange(64).reshape(4, 16) % 7
        run = Run(model, 0.55, policy=policy, scope=scope, granularity=granularity, hot=hot,
                  forecast=Forecaster.of_gates(Gates.of(model), window=2))
        assert np.array_equal(run.text(tokens), resident)
        counts = run.counters
        if policy in ("predicted", "plec"):
            assert counts.prefetches and counts.prefetched_hits and 0 < counts.precision <= 1
        assert 0 < counts.hit_rate < 1
        run.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("host_below", ["auto", 2, 10**6])
def test_experts_computed_on_the_host_give_the_same_bits(model, resident, host_below, granularity):
    run = Run(model, expert_bytes(model) // 4, host_below=host_below, granularity=granularity)
    assert np.array_equal(run.text(model.tokenizer.encode(PROMPT)), resident)
    assert run.count("hosted")
    run.close()


def test_several_sequences_at_once(model):
    tokens = [model.tokenizer.encode(t) for t in ("def main(", "And it came to pass", "x = 1;")]
    out = []
    for budget in (None, expert_bytes(model) // 2):
        run = Run(model, budget, n_seq_max=3)
        logits = [run.session.decode_batch(list(enumerate(tokens)))]
        for _ in range(3):
            logits.append(run.session.decode_batch([(i, [int(row.argmax())]) for i, row in enumerate(logits[-1])]))
        out.append(np.array(logits))
        run.close()
    assert np.array_equal(*out)


def test_no_expert_lies_on_the_card_outside_its_slots(model, monkeypatch):
    """Every buffer that the card ever gave out is searched for pieces of experts."""
    buffers, make = [], DeviceBuffer.__init__

    def noted(self, *args, **kw):
        make(self, *args, **kw)
        buffers.append(self)

    monkeypatch.setattr(DeviceBuffer, "__init__", noted)
    run = Run(model, expert_bytes(model) // 2)
    run.text(model.tokenizer.encode(PROMPT), 2)
    pieces = [w.require_data().host_bytes()[w.offset + e * w.nb[2] :][:64].tobytes()
              for merged in expert_weights(model).values() for w in merged for e in range(w.ne[2])]
    slots = [slot.buffer for found in run.pool.classes.values() for slot in found]
    elsewhere = [b for b in buffers if b not in slots and b.buffer_type is run.card.buffer_type and not b.closed]
    assert elsewhere
    for b in elsewhere:
        memory = b.device_bytes().tobytes()
        assert not any(p in memory for p in pieces)
    memory = b"".join(b.device_bytes().tobytes() for b in slots)
    assert any(p in memory for p in pieces)                                    # the search finds what is there
    run.close()


def test_the_budget_holds_at_every_moment(model):
    budget = expert_bytes(model) // 4
    run = Run(model, budget)
    run.text(model.tokenizer.encode(PROMPT))
    assert run.pool.nbytes <= budget
    held, most = 0, 0
    for e in run.trace.of("load", "evict"):
        held += run.pool.expert_bytes(e.field("layer")) * (1 if e.kind == "load" else -1)
        most = max(most, held)
    assert 0 < most <= budget
    run.close()


def test_an_evicted_slot_reads_as_nan_bytes():
    with models.load("tiny-mixtral-f16") as model:
        run = Run(model, expert_bytes(model) // 2)
        run.text(model.tokenizer.encode(PROMPT), 1)
        (layer, e), slot = next(iter(run.pool.where.items()))
        run.pool.evict(layer, e)
        run.card.synchronize()
        assert (slot.buffer.device_bytes() == 0xFF).all() and slot.tag is None
        run.close()


@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_product_that_reads_another_experts_matrix_is_caught(granularity, m):
    with models.load("tiny-mixtral-f16") as model:
        run = Run(model, expert_bytes(model) // 2, granularity=granularity)
        tokens = model.tokenizer.encode(PROMPT)
        run.session.decode(tokens)
        for slot in run.pool.where.values():
            slot.tags[m] = (0, 99, slot.load)
        with pytest.raises(StorageError, match=r"expert \d of layer \d is read from a slot that holds"):
            run.session.decode(tokens[:1])
        run.close()


@pytest.mark.parametrize("m", [0, 1, 2])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_rearranged_weights_are_caught(granularity, m):
    """Bytes on the host and in a slot differ after a load: the slot is not a copy any more."""
    with models.load("tiny-mixtral-f16") as model:
        run = Run(model, expert_bytes(model), granularity=granularity)
        tokens = model.tokenizer.encode(PROMPT)
        run.session.decode(tokens)
        (layer, e), slot = next(iter(run.pool.where.items()))
        slot.buffer.device_bytes()[run.pool.offsets[layer][m]] ^= 1
        with pytest.raises(StorageError, match=f"the slot of expert {e} of layer {layer} differs"):
            run.session.reset()
            run.session.decode(tokens)
        run.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("fault", [{"fail_copy": 7}, {"fail_compute": 3}])
def test_after_a_failed_run_the_next_one_is_right(model, resident, fault, granularity):
    """A load that was asked for and never happened must not count as resident."""
    run = Run(model, expert_bytes(model) // 2, granularity=granularity)
    tokens = model.tokenizer.encode(PROMPT)
    run.session.decode(tokens[:3])
    run.session.reset()
    for name, value in fault.items():
        setattr(run.card, name, value)
    with pytest.raises(Exception, match="made to fail"):
        run.session.decode(tokens)
    run.card.fail_copy = run.card.fail_compute = 0
    run.session.reset()
    assert np.array_equal(run.text(tokens), resident)
    run.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_residency_outlives_a_reallocation(model, resident, granularity):
    """Another graph is split and placed in between; slots keep what they hold."""
    run = Run(model, expert_bytes(model), granularity=granularity)
    tokens = model.tokenizer.encode(PROMPT)
    run.text(tokens)
    loads = run.count("load")
    run.session.reset()
    assert np.array_equal(run.text(tokens), resident)
    assert run.count("load") == loads
    run.close()


def test_a_budget_below_a_tokens_experts_names_the_least_that_works():
    with models.load("tiny-mixtral-f16") as model:
        weights = expert_weights(model)
        with pytest.raises(ParameterError, match="245,760 bytes or more"):
            Run(model, 245_759)
        run = Run(model, 245_760)
        assert run.pool.n_slots(min(weights)) == 2
        run.close()


@pytest.mark.parametrize("policy", ["belady", "oracle"])
def test_a_future_that_the_slots_would_not_see_as_a_whole_is_refused(policy):
    with models.load("tiny-mixtral-f16") as model:
        with pytest.raises(ParameterError, match=f"policy {policy} with experts computed on the host"):
            offload(model, 0.5, policy=policy, host_below="auto", future=Stream(sources.load("tiny-mixtral").trace))


def test_all_experts_used_in_a_batch_gain_nothing_and_lose_what_each_copy_takes_to_start():
    """Each expert that is used, nearly all, is loaded once per batch, as ggml's copy of used experts does. That sends runs of experts at
    once, the engine each by itself: with experts this small the starts of copies are nearly half of its time. Without these it loses
    nothing where all have slots, and some of the time where a quarter has, for a load waits until its slot was read."""
    with models.load("tiny-mixtral-f16") as model:
        tokens, whole = model.tokenizer.encode(PROMPT * 20)[:256], expert_bytes(model)
        for starts in (10_000, 0):
            speed, times = replace(simulated_machine()[0].speed, link_ns=starts), []
            copied = Run(model, "copied", speed=speed)
            start, expected = copied.card.machine.now, copied.session.decode(tokens)
            took = copied.card.machine.now - start
            for budget in (whole, whole // 4):
                run = Run(model, budget, speed=speed)
                start = run.card.machine.now
                assert np.array_equal(run.session.decode(tokens), expected)
                times.append((run.card.machine.now - start) / took)
                used = {(e.field("layer"), e.field("expert")) for e in run.trace.of("load", "hit")}
                assert sum(e.field("bytes") for e in run.trace.of("load")) == sum(run.pool.expert_bytes(layer) for layer, _ in used)
                run.close()
            assert 1.5 < times[0] < times[1] < 2 if starts else 0.999 < times[0] < 1.001 < times[1] < 1.25
            copied.close()


def test_several_pools_of_sizes():
    """Layers whose experts differ in size get slots of their own, and share the budget by their bytes."""
    with models.load("tiny-mixtral-f16") as a, models.load("tiny-deepseek-f16") as b:
        weights = {0: expert_weights(a)[0], 1: expert_weights(b)[1]}
        run = Run(a, None)
        total = sum(w.nbytes for merged in weights.values() for w in merged)
        pool = ExpertPool(run.card, weights, total // 2)
        assert len(pool.classes) == 2 and pool.nbytes <= total // 2
        pool.load(0, 3)
        pool.load(1, 3)
        run.card.synchronize()
        for layer in (0, 1):
            assert pool.where[layer, 3].tag == (layer, 3, pool.where[layer, 3].load)
        with pytest.raises(StorageError):
            pool.load(0, 3)
        run.close()


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfu_in_cache", "lru_frequency", "predicted", "plec", "static"])
def test_a_pool_shrinks_and_grows_between_runs(policy):
    """Memory goes back to the device, experts are evicted by the policy, and results stay what they were."""
    with models.load("tiny-mixtral-f16") as model:
        tokens = model.tokenizer.encode(PROMPT)
        whole = Run(model, None)
        resident = whole.text(tokens)
        whole.close()
        run = Run(model, 0.5, policy=policy, hot=np.arange(48).reshape(6, 8))
        run.session.decode(tokens)
        run.session.reset()
        used, held = run.card.buffer_type.used, run.pool.nbytes
        given = -run.engine.resize(0, -10)
        assert given == 10 * run.pool.sizes[0] == held - run.pool.nbytes == used - run.card.buffer_type.used
        assert np.array_equal(run.text(tokens), resident)
        run.session.reset()
        run.engine.resize(0, 20)
        assert np.array_equal(run.text(tokens), resident)
        with pytest.raises(ParameterError):
            run.engine.resize(0, -1000)
        run.close()


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", ["lru", "lfu", "lfu_in_cache", "lru_frequency"])
def test_hits_of_a_run_are_those_of_a_replay_of_its_own_routes(policy, scope):
    """Token by token, as a replay reads a trace: the policy that the engine drives is the one that is replayed."""
    from workbench.expertflow.replay import replay

    for name in ("tiny-mixtral-f16", "tiny-deepseek-f16"):
        with models.load(name) as model:
            run = Run(model, 0.5, policy=policy, scope=scope, granularity=GRANULARITIES[scope == "global"], recording=True)
            for token in model.tokenizer.encode(PROMPT + ", and say unto him, Thus saith the LORD"):
                run.session.decode([token])
            routes, layers = run.session.routes, len(run.pool.weights)
            slots = run.engine.cache.slots_of(int(routes.layers[0]))
            found = replay(routes, policy, slots, scope)
            assert run.counters.hits == sum(found.hits) and run.counters.loads == sum(found.loads)
            assert run.counters.hit_rate == pytest.approx(found.hit_rate) and 0 < found.hit_rate < 1 and layers
            run.close()


# ---- loads by matrix, in virtual time


class Wrong:
    """A forecast of experts that will not be wanted: of the layers to come, those that the last step did not use."""

    guesses: dict = {}

    def __init__(self, layers, n_expert, k):
        self.layers, self.used, self.n_expert, self.k, self.nbytes = layers, {}, n_expert, k, 0

    def after(self, layer, ids, normed):
        self.used[layer] = set(ids.ravel().tolist())
        if layer + 1 in self.used:
            unused = [e for e in range(self.n_expert) if e not in self.used[layer + 1]]
            yield layer + 1, dict.fromkeys(unused[: self.k], 1.0)


def steps(model, n=24, **options):
    """Virtual nanoseconds and loads of each of `n` steps of one token, and the run."""
    run, out = offload(model, 0.5, trace=Trace("virtual"), **options), []
    machine = run.engine.pool.device.machine
    for token in model.tokenizer.encode(PROMPT * 3)[:n]:
        before = machine.now, run.counters.loads
        run.session.decode([token])
        out.append((machine.now - before[0], run.counters.loads - before[1]))
    return out, run


def test_by_matrix_no_step_is_slower_and_those_that_wait_for_loads_are_quicker(model):
    (whole, a), (parts, b) = (steps(model, granularity=g) for g in GRANULARITIES)
    assert a.counters == b.counters and {n > 0 for _, n in whole} == {True, False} or a.counters.loads
    for (slow, n), (quick, same) in zip(whole, parts, strict=True):
        assert n == same and (quick < slow if n else quick == slow)
    a.close()
    b.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_load_that_is_waited_for_stands_behind_one_piece_of_a_prefetch_at_most(granularity):
    """The link is slow and forecasts are wrong: nearly always a prefetch is under way when the router has spoken."""
    with models.load("tiny-mixtral-f16") as model:
        forecast, slow = Wrong(range(6), 8, 2), Speed(link=0.5)
        _, run = steps(model, granularity=granularity, policy="predicted", forecast=forecast,
                       backends=simulated_machine(offload_min_batch=1, speed=slow))
        piece, pool, count, trace = slow.transfer_ns(40_960), run.engine.pool, run.counters, run.trace
        longest = piece if granularity == "matrix" else 3 * piece
        copies = [e for e in trace.of("busy") if trace.strings[e.field("stream")] == "copies"]
        assert sum(e.field("bytes") for e in copies) == count.demand_bytes + count.speculative_bytes
        assert count.prefetches * pool.expert_bytes(0) >= count.speculative_bytes > 0
        waits, spoken, asked = [], False, None                                   # from the ids to the first copy of what they want
        for event in trace.events:
            spoken = event.kind == "sync" or spoken and event.kind in ("evict", "hit", "load", "set_async", "busy")
            if spoken and event.kind == "load":
                asked = event.start
            elif asked is not None and event.kind == "busy":
                waits.append(event.start - asked)
                asked = None
        assert (0 if granularity == "matrix" else piece) < max(waits) <= longest
        run.close()


def test_a_wait_that_is_left_out_is_an_error_or_no_matter(monkeypatch):
    """Whichever wait for a matrix is missing: a product that would read too early is refused."""
    with models.load("tiny-mixtral-f16") as model:
        token, refused = model.tokenizer.encode(PROMPT)[0], 0
        whole = Run(model, None)
        right = whole.session.decode([token])
        whole.close()
        for missing in range(12):
            run, waits = Run(model, 0.5, granularity="matrix"), []
            wait = run.card.wait_event

            def all_but_one(event, wait=wait, waits=waits, missing=missing):
                waits.append(event)
                if len(waits) != missing + 1:
                    wait(event)

            monkeypatch.setattr(run.card, "wait_event", all_but_one)
            try:
                assert np.array_equal(run.session.decode([token]), right)
            except StorageError as error:
                assert "is read from a slot that holds" in str(error)
                refused += 1
            assert len(waits) > missing
            run.close()
        assert 0 < refused


# ---- late experts


def test_an_expert_on_its_way_goes_to_the_host_where_the_rest_of_the_way_takes_longer():
    with models.load("tiny-mixtral-f16") as model:
        run = Run(model, 0.5, host_below="auto")
        pool, machine = run.pool, run.card.machine
        host = host_ns(run.backends[-1], pool.weights[2], 1)
        engine = ExpertEngine(pool, run.engine.cache, host_below="auto")
        engine._host = run.backends[-1]
        slot, end = pool.load(2, 5), run.card.copied_at
        assert pool.remaining(slot) == end - machine.now > host and engine._on_host(2, slot, 1)
        machine.spend(end - host - 1 - machine.now)
        assert engine._on_host(2, slot, 1)
        machine.spend(1)
        assert pool.remaining(slot) == host and not engine._on_host(2, slot, 1)
        machine.spend(host)
        assert pool.remaining(slot) == 0 and slot.there
        half = pool.take(2, 6)
        pool.send(half, 0)
        assert pool.remaining(half) == 3 * run.card.speed.transfer_ns(40_960)  # what was not asked for counts as well
        run.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_late_experts_are_computed_on_the_host_and_their_loads_serve_later(granularity):
    with models.load("tiny-mixtral-f16") as model:
        tokens = model.tokenizer.encode(PROMPT)
        whole = Run(model, None)
        resident = whole.text(tokens, 24)
        whole.close()
        run = Run(model, 0.75, policy="predicted", forecast=Forecaster.of_gates(Gates.of(model), 2), host_below="auto", granularity=granularity,
                  speed=Speed(link=1.5))
        assert np.array_equal(run.text(tokens, 24), resident)
        late, served, way = 0, 0, {}
        for e in run.trace.of("load", "evict", "hosted", "hit"):
            key = e.field("layer"), e.field("expert")
            if e.kind == "load":
                way[key] = "coming"
            elif e.kind == "evict":
                del way[key]
            elif e.kind == "hosted" and key in way:
                late, way[key] = late + 1, "late"
            elif e.kind == "hit" and way[key] == "late":
                served, way[key] = served + 1, "there"
        c = run.counters
        assert late and served and late <= c.late <= c.prefetches and c.hosted == run.count("hosted")
        run.close()
