"""Experts as they lie on the host. In fewer bits: the bits of a resident model of that storage, fewer bytes to move, a stated error. In
pinned memory: prefetches that overlap. And what is given back where something does not fit."""

import numpy as np
import pytest

from tests.expertflow.offloaded import Run
from tests.models.architectures import write
from workbench import models
from workbench.devices.simulated import simulated_machine
from workbench.errors import AllocationError, ModelError, ParameterError
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates, record
from workbench.expertflow.offload import expert_bytes, offload
from workbench.expertflow.precision import STORAGES, StoredModel, logit_error, storage_errors, store_experts
from workbench.expertflow.visits import expert_weights
from workbench.expertflow.warm_up import forecaster

F16, Q8_0 = 122_880, 65_280
"""Bytes of one expert of tiny-mixtral: 3 matrices of 128 x 160 numbers, 2 bytes each, or 34 for 32."""


@pytest.fixture(scope="module")
def model():
    with models.load("tiny-mixtral-f16") as model:
        yield model


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenizer.encode("And God said unto Moses, Go in unto Pharaoh, and say unto him")


def matrices(model):
    return [w for merged in expert_weights(model).values() for w in merged]


@pytest.mark.parametrize("storage", ["f16", "int8", "q4_0"])
def test_logits_are_those_of_a_resident_model_of_the_same_storage(model, tokens, storage):
    with store_experts(model, storage) as stored:
        whole = Run(stored, None)
        wanted = whole.text(tokens)
        whole.close()
    for share in (0.25, 0.5, 0.75):
        run = Run(model, share, storage=storage)
        assert np.array_equal(run.text(tokens), wanted)
        assert run.counters.loads and run.pool.nbytes <= share * expert_bytes(run.offloaded.host)
        run.offloaded.close()
    assert model.weights["token_embd.weight"].numpy().any()                               # the original is open


def test_pinned_int8_experts_with_forecasts_and_misses_on_the_host(model, tokens):
    """All at once: what `run --expert-storage int8 --no-mmap --predictor gate,frequency --host-below auto` does."""
    with store_experts(model, "int8") as stored:
        whole = Run(stored, None)
        wanted = whole.text(tokens)
        whole.close()
    seen = record(model, [tokens])
    for host_below in ("auto", 2):
        ahead = forecaster("gate,frequency", seen.gates, 2, seen=seen)
        run = Run(model, 0.25, storage="int8", mmap=False, policy="predicted", forecast=ahead, host_below=host_below)
        assert np.array_equal(run.text(tokens), wanted)
        assert run.counters.hosted and run.counters.prefetches and 0 < ahead.recall < 1
        run.offloaded.close()


@pytest.mark.parametrize("storage", ["q8_0", "q4_0"])
def test_blocks_are_those_of_the_gguf_package(model, storage):
    gguf = pytest.importorskip("gguf")
    with store_experts(model, storage) as stored:
        for was, now in zip(matrices(model), matrices(stored)):
            wanted = gguf.quants.quantize(was.numpy().astype(np.float32), gguf.GGMLQuantizationType[storage.upper()])
            assert now.require_data().host_bytes().tobytes() == wanted.tobytes()


def test_int8_halves_the_bytes_that_move(model, tokens):
    counts, slots = [], 14
    for storage, size in (("f16", F16), ("int8", Q8_0)):
        run = Run(model, slots * size, storage=storage)
        run.text(tokens, 24)
        assert sum(map(len, run.pool.classes.values())) == slots
        assert run.counters.demand_bytes == run.counters.loads * size
        counts.append(run.counters)
        run.offloaded.close()
    assert counts[1].demand_bytes / counts[0].demand_bytes == pytest.approx(34 / 64, rel=0.1)  # a token may go another way


def test_the_same_budget_holds_more_experts(model):
    budgets = [Run(model, 24 * F16, storage=storage) for storage in ("f16", "q8_0")]
    assert [run.pool.n_slots(0) for run in budgets] == [24, 24 * F16 // Q8_0]
    for run in budgets:
        run.offloaded.close()


def test_the_error_is_that_of_the_rounded_weights(model, tokens):
    """Rounding to a step d is off by d / sqrt(12) on average. Three matrices with independent errors make sqrt(3) of it, and less where
    terms of a sum agree more than their errors do."""
    with store_experts(model, "q8_0") as stored:
        step = [np.abs(w.numpy().astype(np.float32)).reshape(-1, 32).max(1) / 127 for w in matrices(model)]
        size = [np.sqrt(np.mean(np.square(w.numpy().astype(np.float32)))) for w in matrices(model)]
        rounding = np.mean([np.sqrt(np.mean(d * d) / 12) / s for d, s in zip(step, size)])
        errors = storage_errors(model, stored, tokens)
        assert all(0.4 * rounding < e.alone < 3**0.5 * rounding for e in errors)
        assert 0 < logit_error(model, stored, tokens) < 0.01
    with store_experts(model, "f16") as same:
        assert logit_error(model, same, tokens) == 0 == max(e.alone for e in storage_errors(model, same, tokens))
        assert matrices(same) == matrices(model)


@pytest.mark.parametrize(("name", "storage", "says"), [
    ("tiny-mixtral-f16", "int4", "int4"), ("tiny-mixtral-q4_0", "f16", "does not come back"), ("tiny-mixtral-q8_0", "f16", "8.5 bits")])
def test_what_makes_no_sense_is_refused(name, storage, says):
    with models.load(name) as model, pytest.raises(ParameterError, match=says):
        store_experts(model, storage)


def test_what_does_not_go_into_a_type_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    with models.load(write("qwen2moe", tmp_path / "a.gguf")) as narrow, pytest.raises(ModelError, match="rows of 24 numbers"):
        store_experts(narrow, "q8_0")
    with models.load(write("mixtral-yarn", tmp_path / "b.gguf")) as model:
        with store_experts(model, "q8_0") as stored:                                       # from f32, with rows of exactly one block
            assert {w.dtype.name for w in matrices(stored)} == {"q8_0"}
        monkeypatch.setitem(STORAGES, "f16", 0.1)
        with pytest.raises(ModelError, match="that f16 can hold"):
            store_experts(model, "f16")


def test_closing_gives_the_converted_experts_back_and_nothing_else(model):
    stored = store_experts(model, "q8_0")
    assert isinstance(stored, StoredModel) and stored.nbytes < model.nbytes
    stored.close()
    stored.close()
    assert all(w.storage.closed for w in matrices(stored)) and not any(w.storage.closed for w in matrices(model))


# ---- pinned, and what does not fit


def test_prefetches_from_pinned_memory_overlap_those_from_the_mapped_file_do_not(model, tokens):
    """The same moves and bits; on the same card the run from pinned memory is over sooner, and its weights on the card are no more."""
    logits, spent, counts, weights = [], [], [], []
    for mmap in (True, False):
        forecast = Forecaster.of_gates(Gates.of(model), 2)
        with offload(model, 0.5, policy="predicted", forecast=forecast, backends="rtx3090-pcie4", mmap=mmap, n_ctx=256, n_batch=64) as run:
            memory = run.engine.pool.device.buffer_type
            logits.append([run.session.decode([t]) for t in tokens])
            spent.append(memory.now)
            counts.append((run.counters.loads, run.counters.prefetches))
            weights.append(run.memory()["weights"])
    assert np.array_equal(*logits) and counts[0] == counts[1] and min(counts[0]) > 0 and weights[0] == weights[1]
    assert spent[1] < 0.97 * spent[0]


@pytest.mark.parametrize("memory", [2_000_000, 7_000_000])
def test_what_does_not_fit_names_both_parts_and_gives_everything_back(model, memory):
    """Without room for the slots, and without room for the KV cache and the intermediate results beside them."""
    backends = simulated_machine(1, memory, offload_min_batch=1)
    with pytest.raises(AllocationError, match=r"slots of 2,949,120 bytes for experts beside [\d,]+ bytes of weights on GPU") as e:
        offload(model, 24 * F16, backends=backends, storage="f16", n_ctx=4096)
    assert "n_ctx" in str(e.value) and backends[0].buffer_type.used == 0


@pytest.mark.parametrize("cards", [1, 2])
def test_memory_by_part_is_all_that_the_cards_hold(cards):
    with models.load("tiny-mixtral-f16") as model:
        machine = simulated_machine(cards, offload_min_batch=1)
        with offload(model, 0.5, backends=machine, n_ctx=256) as run:
            assert sum(run.memory().values()) == sum(card.buffer_type.used for card in machine[:-1])
