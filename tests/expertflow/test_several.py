"""Several devices, each with its own pool: the same bits as a model that is all there."""

import numpy as np
import pytest

from workbench import models
from workbench.devices.simulated import simulated_machine
from workbench.errors import ParameterError
from workbench.expertflow.several import offload_across
from workbench.models import place_weights
from workbench.scheduler import Scheduler


@pytest.mark.parametrize("name", ["tiny-mixtral-f16", "tiny-deepseek-f16"])
@pytest.mark.parametrize(("n", "budget"), [(2, 0.4), (2, 1.0), (3, 0.5)])
def test_bit_equal_to_a_model_that_is_all_there(name, n, budget):
    with models.load(name) as model:
        tokens = model.tokenizer.encode("And it came to pass, that the LORD said")
        cards = simulated_machine(1)
        placed = place_weights(model, cards)
        with models.Session(placed, scheduler=Scheduler(cards)) as whole, offload_across(model, budget, n, verify=True) as run:
            for part in (tokens, [5], [7], tokens[:3]):
                assert np.array_equal(run.session.decode(part), whole.decode(part))
            layers = [list(e.pool.weights) for e in run.engines]
            assert sorted(sum(layers, [])) == list(model.hparams.moe_layers) and all(layers)
            for engine, c in zip(run.engines, run.counters):
                assert c.loads > 0 and {layer for layer, _ in engine.pool.where} <= set(engine.pool.weights)
                computed = {s.backend for s in run.scheduler.splits for node in s.nodes if node.op == "MUL_MAT_ID"}
            assert computed == set(range(n))                        # every device computes its own experts
        placed.close()


@pytest.mark.parametrize("n", [0, -1, 7, 2.0])
def test_a_device_without_experts_is_refused(n):
    with models.load("tiny-mixtral-f16") as model, pytest.raises(ParameterError):
        offload_across(model, 0.5, n)


def test_a_budget_too_small_leaves_nothing_behind():
    with models.load("tiny-mixtral-f16") as model, pytest.raises(ParameterError, match="slots"):
        offload_across(model, 0.01, 2)
