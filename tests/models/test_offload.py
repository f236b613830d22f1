"""The shipped models over several devices: wherever weights lie, the logits are those of the CPU alone, bit for bit."""

import numpy as np
import pytest

from tests.models.small import small_model
from workbench import Scheduler, Session, load, place_weights, simulated_machine
from workbench.errors import AllocationError, ParameterError
from workbench.models import shipped_models

PROMPT, STEPS = list(range(5, 41)), [9, 8, 7]
MODELS = ["tiny-mixtral-f16", "tiny-mixtral-q8_0", "tiny-mixtral-q4_0", "tiny-deepseek-f16"]


def logits(session):
    return [session.decode(PROMPT, outputs="all"), *(session.decode([t]) for t in STEPS)]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    with load(request.param) as opened:
        with Session(opened, n_ctx=256, n_batch=48) as session:
            opened.expected = logits(session)
        yield opened


def over(model, machine, *where, **kw):
    """(logits, scheduler) with weights placed as `where` says."""
    with place_weights(model, machine, *where) as placed:
        scheduler = Scheduler(machine, **kw)
        with Session(placed, n_ctx=256, n_batch=48, scheduler=scheduler) as session:
            found = logits(session)
        scheduler.close()
    assert all(b.buffer_type.used == 0 for b in machine)
    return found, scheduler


def same(a, b):
    return len(a) == len(b) and all(map(np.array_equal, a, b))


def test_all_shipped_models_are_tested():
    assert sorted(shipped_models()) == sorted(MODELS)


def test_any_number_of_layers_on_a_gpu(model):
    for n in range(model.hparams.n_layer + 2):
        found, _ = over(model, simulated_machine(), n)
        assert same(found, model.expected), n


@pytest.mark.parametrize("gpus, overrides, kw", [
    (2, None, {}), (2, None, {"parallel": True}), (2, {r"blk\.[01]\..*_exps": "CPU"}, {}), (1, {"_exps": "CPU"}, {}),
    (1, {"_exps": "CPU"}, {"op_offload": False}), (2, {"attn": "CPU"}, {}),
])  # fmt: skip
def test_two_gpus_and_experts_on_the_host(model, gpus, overrides, kw):
    assert same(over(model, simulated_machine(gpus), None, overrides, **kw)[0], model.expected)


def test_a_gpu_without_some_ops(model):
    machine = simulated_machine(deny_ops=["SOFT_MAX", "SET_ROWS", "ARGSORT"], async_copy=False, async_io=False)
    with pytest.raises(Exception, match="where no backend can compute SET_ROWS"):  # its part of the KV cache lies there
        over(model, machine)
    found, _ = over(model, simulated_machine(deny_ops=["SOFT_MAX", "ARGSORT"]))
    assert same(found, model.expected)


def test_what_lies_where():
    machine = simulated_machine(2)
    with small_model(block_count=4) as model:
        with place_weights(model, machine, overrides={"_exps": "CPU", "attn_q": "GPU1"}) as placed:
            homes = {name: b.name for name, b in placed.homes.items()}
            assert homes["token_embd.weight"] == "CPU" and homes["output.weight"] == homes["blk.3.attn_k.weight"] == "GPU1"
            assert homes["blk.0.attn_k.weight"] == "GPU0" and homes["blk.0.attn_q.weight"] == "GPU1"
            assert homes["blk.0.ffn_up_exps.weight"] == "CPU"
            assert placed.weights["blk.0.ffn_up_exps.weight"] is model.weights["blk.0.ffn_up_exps.weight"]  # mapped, not copied
            away = placed.weights["blk.0.attn_k.weight"]
            assert np.array_equal(away.numpy(), model.weights["blk.0.attn_k.weight"].numpy())
            assert [t.name for t in placed.layer_types] == ["GPU0", "GPU0", "GPU0", "GPU1"] and "GPU1" in repr(placed)
        with place_weights(model, machine, 2, shares=[1, 1]) as placed:  # the last layer and the output
            assert [placed.homes[f"blk.{i}.attn_norm.weight"].name for i in range(4)] == ["CPU", "CPU", "CPU", "GPU0"]
            assert placed.homes["output.weight"].name == "GPU1"
    assert [b.buffer_type.used for b in machine] == [0, 0, 0]


def test_an_output_tied_to_the_embedding_is_copied_to_its_device():
    machine = simulated_machine()
    with small_model(tied=True) as model:
        with Session(model, n_ctx=256) as session:
            want = session.decode([1, 2, 3])
        for n in (0, 1, None):
            with place_weights(model, machine, n) as placed:
                assert ("output.weight" in placed.weights) == (n != 0)
                with Session(placed, n_ctx=256, scheduler=Scheduler(machine)) as session:
                    assert np.array_equal(session.decode([1, 2, 3]), want)


@pytest.mark.parametrize("bad, why", [({"n_gpu_layers": -1}, "0 to 3"), ({"overrides": {"x": "TPU"}}, "GPU, CPU"), ({"overrides": {"(": "CPU"}}, "regular"),
                                      ({"shares": [1, 1]}, "each of 1"), ({"shares": [0]}, "not all zero")])  # fmt: skip
def test_bad_wishes(bad, why):
    with small_model() as model, pytest.raises(ParameterError, match=why):
        place_weights(model, simulated_machine(), **bad)


def test_a_model_that_does_not_fit_leaves_nothing_behind():
    machine = simulated_machine(memory=20_000)
    with small_model() as model:
        with pytest.raises(AllocationError, match=r"GPU, which has .* of 20,000 bytes left\n.*\n.*fewer layers or experts"):
            place_weights(model, machine)
        assert machine[0].buffer_type.used == 0
        with place_weights(model, machine, 1) as placed, pytest.raises(ParameterError, match="one or the other"):
            Session(placed, scheduler=Scheduler(machine), backend=machine[0])
