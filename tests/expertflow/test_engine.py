"""The engine: outputs equal those of a model that is all there, bit for bit, and a card holds no expert outside its slots."""

import numpy as np
import pytest

from tests.expertflow.offloaded import Run
from workbench import models
from workbench.devices.simulated import DeviceBuffer
from workbench.errors import ParameterError, StorageError
from workbench.expertflow.engine import expert_weights
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import expert_bytes
from workbench.expertflow.pool import ExpertPool

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


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_logits_are_those_of_the_model_that_is_all_there(model, resident, share):
    run = Run(model, int(expert_bytes(model) * share))
    assert np.array_equal(run.text(model.tokenizer.encode(PROMPT)), resident)
    assert run.count("hit") and run.count("load") and run.count("evict")
    run.close()


def test_a_tokens_experts_are_enough_in_waves(model, resident):
    """The least budget: a prompt then runs its experts a few at a time."""
    k, size = model.hparams.n_expert_used, max(sum(w.nb[2] for w in merged) for merged in expert_weights(model).values())
    run = Run(model, k * (size + 3 * 256))
    assert run.pool.n_slots(min(run.pool.weights)) == k
    assert np.array_equal(run.text(model.tokenizer.encode(PROMPT)), resident) and run.counters.waves
    run.close()


POLICIES = ["lru", "lfu", "lfu_in_cache", "lru_frequency", "static", "predicted", "plec"]


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("policy", POLICIES)
def test_any_policy_and_any_forecast_give_the_same_bits(policy, scope):
    with models.load("tiny-deepseek-f16") as model:
        tokens = model.tokenizer.encode(PROMPT)
        whole = Run(model, None)
        resident = whole.text(tokens)
        whole.close()
        hot = np.arange(64).reshape(4, 16) % 7
        run = Run(model, 0.55, policy=policy, scope=scope, hot=hot, forecast=Forecaster.of_gates(Gates.of(model), window=2))
        assert np.array_equal(run.text(tokens), resident)
        counts = run.counters
        if policy in ("predicted", "plec"):
            assert counts.prefetches and counts.prefetched_hits and 0 < counts.precision <= 1
        assert 0 < counts.hit_rate < 1
        run.close()


@pytest.mark.parametrize("host_below", ["auto", 2, 10**6])
def test_experts_computed_on_the_host_give_the_same_bits(model, resident, host_below):
    run = Run(model, expert_bytes(model) // 4, host_below=host_below)
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


def test_a_product_that_reads_another_experts_slot_is_caught():
    with models.load("tiny-mixtral-f16") as model:
        run = Run(model, expert_bytes(model) // 2)
        tokens = model.tokenizer.encode(PROMPT)
        run.session.decode(tokens)
        for slot in run.pool.where.values():
            slot.tags[0] = (0, 99, slot.load)
        with pytest.raises(StorageError, match=r"expert \d of layer \d is read from a slot that holds"):
            run.session.decode(tokens[:1])
        run.close()


def test_rearranged_weights_are_caught():
    """The bytes of two experts change places on the host after a load: the slot is not a copy any more."""
    with models.load("tiny-mixtral-f16") as model:
        run = Run(model, expert_bytes(model))
        tokens = model.tokenizer.encode(PROMPT)
        run.session.decode(tokens)
        (layer, e), slot = next(iter(run.pool.where.items()))
        slot.buffer.device_bytes()[0] ^= 1
        with pytest.raises(StorageError, match=f"the slot of expert {e} of layer {layer} differs"):
            run.session.reset()
            run.session.decode(tokens)
        run.close()


@pytest.mark.parametrize("fault", [{"fail_copy": 7}, {"fail_compute": 3}])
def test_after_a_failed_run_the_next_one_is_right(model, resident, fault):
    """A load that was asked for and never happened must not count as resident."""
    run = Run(model, expert_bytes(model) // 2)
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


def test_residency_outlives_a_reallocation(model, resident):
    """Another graph is split and placed in between; slots keep what they hold."""
    run = Run(model, expert_bytes(model))
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


def test_all_experts_used_in_a_batch_costs_little_more_than_copying_all():
    """No gain is left then: every expert is loaded once per batch, as a whole-tensor copy would do."""
    with models.load("tiny-mixtral-f16") as model:
        tokens = model.tokenizer.encode(PROMPT * 20)[:256]
        run = Run(model, expert_bytes(model) // 4)
        run.session.decode(tokens)
        loaded = sum(e.field("bytes") for e in run.trace.of("load"))
        used = {(e.field("layer"), e.field("expert")) for e in run.trace.of("load", "hit")}
        assert loaded == sum(run.pool.expert_bytes(layer) for layer, _ in used)
        run.close()


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
            run = Run(model, 0.5, policy=policy, scope=scope, recording=True)
            for token in model.tokenizer.encode(PROMPT + ", and say unto him, Thus saith the LORD"):
                run.session.decode([token])
            routes, layers = run.session.routes, len(run.pool.weights)
            slots = run.engine.cache.slots_of(int(routes.layers[0]))
            found = replay(routes, policy, slots, scope)
            assert run.counters.hits == sum(found.hits) and run.counters.loads == sum(found.loads)
            assert run.counters.hit_rate == pytest.approx(found.hit_rate) and 0 < found.hit_rate < 1 and layers
            run.close()
