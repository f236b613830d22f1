"""The disk: experts that the host's memory does not hold come later, and nothing else changes."""

import numpy as np
import pytest

from tests.expertflow.offloaded import Run
from workbench import models
from workbench.devices.cost import DISKS
from workbench.errors import ParameterError
from workbench.expertflow.cache import GRANULARITIES
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.hosted import HostBlock
from workbench.expertflow.observe import Gates

PROMPT = "And God said unto Moses, Go in unto Pharaoh"


@pytest.fixture(scope="module")
def model():
    with models.load("tiny-mixtral-f16") as model:
        yield model


def least_recent(trace, slots):
    """Reads of a memory that keeps the experts wanted last, by a list: every load and every expert computed on the host wants one."""
    held, reads = [], 0
    for e in trace.of("load", "hosted"):
        key = e.field("layer"), e.field("expert")
        reads += key not in held
        held = ([k for k in held if k != key] + [key])[-slots:]
    return reads


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("slots", [1, 20, 48])
def test_reads_are_those_of_a_memory_of_so_many_experts_and_bits_stay(model, slots, granularity):
    tokens = model.tokenizer.encode(PROMPT)
    whole = Run(model, None)
    resident = whole.text(tokens)
    whole.close()
    run = Run(model, 0.25, host_slots=slots, granularity=granularity)
    assert np.array_equal(run.text(tokens), resident)
    disk = run.pool.disk
    loads = {(e.field("layer"), e.field("expert")) for e in run.trace.of("load")}
    assert disk.reads == least_recent(run.trace, slots) and (slots < 48 or disk.reads == len(loads))
    assert disk.ns == disk.reads * DISKS["nvme-pcie4"].read_ns(122_880)
    run.close()


@pytest.mark.parametrize("more", [{}, {"host_below": 2}, {"policy": "predicted"}])
def test_no_copy_begins_and_no_expert_is_computed_before_it_was_read(model, more, monkeypatch):
    forecast = Forecaster.of_gates(Gates.of(model), 2) if more.get("policy") else None
    times, seen = [], []
    for slots in (None, 3):
        run = Run(model, 0.25, host_slots=slots, forecast=forecast, **more)
        pool, card = run.pool, run.card

        def sent(slot, m, send=pool.send, pool=pool, card=card):
            nbytes, read = send(slot, m), pool.disk and pool.disk._held[slot.holds]
            if read:
                seen.append("copy")
                assert card.copied_at - card.speed.transfer_ns(nbytes) >= read.time
            return nbytes

        def computed(block, experts, compute=HostBlock.compute, pool=pool):
            if pool.disk:
                seen.append("host")
                assert all(pool.disk._held[key].done for key in list(pool.disk._held)[-min(3, len(experts)) :])
            compute(block, experts)

        monkeypatch.setattr(pool, "send", sent)
        monkeypatch.setattr(HostBlock, "compute", computed)
        run.text(model.tokenizer.encode(PROMPT)[:3])
        times.append(card.machine.now)
        run.close()
        monkeypatch.undo()
    assert times[1] > times[0] and "copy" in seen and ("host" in seen) == ("host_below" in more)


@pytest.mark.parametrize("more", [{"host_slots": 0}, {"host_slots": True}, {"host_slots": 4, "disk": "tape"}])
def test_wrong_disks_are_refused(model, more):
    with pytest.raises(ParameterError):
        Run(model, 0.5, **more)
