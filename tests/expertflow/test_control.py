"""A run that answers pressure: it lives where one that does not runs out of memory, its results stay the same, and room comes back."""

import numpy as np
import pytest

from workbench import models
from workbench.devices.simulated import simulated_machine
from workbench.errors import AllocationError, ParameterError
from workbench.expertflow.control import Controller
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import offload
from workbench.models import KVCache, Session

LIMIT = 9 * 2**20


def crowd(model, period, scope="global", joined=(3, 7, 11, 15, 19), **options):
    """36 tokens while other conversations open caches on the same card and close them again: (logits, controller, slots)."""
    backends = simulated_machine("rtx3090-pcie4", LIMIT, offload_min_batch=1)
    card, others, out, slots = backends[0].buffer_type, [], [], []
    forecast = Forecaster.of_gates(Gates.of(model), 2)
    with offload(model, 0.75, policy="predicted", forecast=forecast, scope=scope, n_ctx=256, n_batch=64, backends=backends, scrub=True,
                 verify=True) as run:  # fmt: skip
        control = Controller(run, LIMIT, period, **options)
        out.append(run.session.decode(model.tokenizer.encode("And God said unto Moses")))
        try:
            for i in range(36):
                if i in joined:
                    others.append(KVCache(model.hparams, 256, card))
                if i == 22:
                    while others:
                        others.pop().close()
                control.step({"kv": sum(c.nbytes for c in others)})
                slots.append(sum(g.slots for g in run.engine.cache.groups))
                assert sum(map(len, run.engine.pool.classes.values())) == slots[-1]           # cache and pool agree at every moment
                assert control.monitor.used == pytest.approx(card.used, rel=0.02)             # the account is the device's
                assert card.used <= LIMIT
                out.append(run.session.decode([int(out[-1].argmax())]))
        finally:
            for cache in others:
                cache.close()
    assert card.used == 0
    return np.array(out), control, slots


@pytest.fixture(scope="module")
def model():
    with models.load("tiny-mixtral-f16") as m:
        yield m


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_the_cache_gives_way_and_comes_back_and_no_logit_changes(model, scope):
    logits, control, slots = crowd(model, 1_000_000, scope)
    with Session(model, 256) as whole:
        expected = [whole.decode(model.tokenizer.encode("And God said unto Moses"))]
        for _ in range(36):
            expected.append(whole.decode([int(expected[-1].argmax())]))
    assert np.array_equal(logits, np.array(expected))
    assert {(a.part, a.does) for a in control.answers} == {("cache", "shrinks"), ("cache", "widens")}
    assert min(slots) < slots[0] and slots[-1] > min(slots) and min(slots) >= 2
    assert all(a.nbytes < 0 and a.reading.ratio > 0.9 for a in control.answers if a.does == "shrinks")
    assert all(a.nbytes > 0 and a.reading.ratio < 0.7 for a in control.answers if a.does == "widens")


def test_without_readings_the_same_run_ends(model):
    with pytest.raises(AllocationError):
        crowd(model, 10**12)


def test_the_window_gives_way_where_it_holds_most_and_queues_where_nothing_stands_out(model):
    told = []
    _, control, slots = crowd(model, 1_000_000, joined=(3, 7, 11), shares={"cache": 0.9, "window": 0.0}, queues=(8, told.append))
    assert control.answers[0][1:3] == ("window", "shrinks") and len(set(slots)) == 1
    assert len(control.run.engine.forecast.predictors) < 2 and not told
    _, control, slots = crowd(model, 1_000_000, joined=(3, 7, 11), shares={"cache": 0.9, "window": 0.9}, queues=(8, told.append))
    assert [a.part for a in control.answers[:2]] == ["queues"] * 2 and told[:2] == [6, 4]
    with pytest.raises(ParameterError):
        crowd(model, 0)


def test_others_bytes_are_of_parts_that_there_are(model):
    with offload(model, 0.5) as run:
        control = Controller(run, LIMIT, 1)
        control.step({"queues": 4096})
        assert control.monitor.parts == run.memory() | {"queues": 4096}
        with pytest.raises(ParameterError, match="zebra"):
            control.step({"zebra": 1})
