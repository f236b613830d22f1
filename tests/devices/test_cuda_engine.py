"""Experts through a pool on a CUDA card, over the stand-in for CuPy and, where there is one, on a card.

With grain=1 the pieces of work are the CPU's and results are the bits of the resident run on the same backend. Larger pieces gather
resident experts into one product, which a pool does not: those agree within 1e-4, and on a card within 2e-3.
"""

import importlib
import itertools

import numpy as np
import pytest

from benchmarks import bench_cuda
from benchmarks.harness import take_turns
from tests.devices import fake_cupy
from workbench import CpuBackend, Scheduler, Session, load, place_weights
from workbench.devices.cuda import CudaBackend, CudaEvent, why_not
from workbench.devices.simulated import simulated_machine
from workbench.errors import AllocationError
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import offload
from workbench.expertflow.pool import SlotView

TOKENS = [0, 308, 621, 1346, 545, 12, 77]
CARD = pytest.param("card", marks=[pytest.mark.gpu, pytest.mark.skipif(bool(why := why_not()), reason=why or "there is a card")])


@pytest.fixture(params=["stand-in", CARD])
def cupy(request, monkeypatch):
    return fake_cupy.install(monkeypatch) if request.param == "stand-in" else importlib.import_module("cupy")


@pytest.fixture(scope="module", params=["tiny-mixtral-q4_0", "tiny-deepseek-f16"])
def model(request):
    with load(request.param) as model:
        yield model


@pytest.fixture(scope="module")
def mixtral():
    with load("tiny-mixtral-f16") as model:
        yield model


def card(grain=1, limit=None):
    return [CudaBackend(grain=grain, limit=limit, offload_min_batch=1), CpuBackend()]


def text(session, n=3):
    """Logits of a prompt, and of the `n` greedy tokens after it."""
    out = [session.decode(TOKENS, outputs="all")]
    for _ in range(n):
        out.append(session.decode([int(out[-1][-1].argmax())])[None])
    return np.concatenate(out)


def resident(model, grain):
    backends = card(grain)
    with place_weights(model, backends) as placed, Session(placed, n_ctx=256, scheduler=Scheduler(backends)) as session:
        return text(session)


def offloaded(model, backends, budget=0.5, window=0, **options):
    forecast = Forecaster.of_gates(Gates.of(model), window) if window else None
    return offload(model, budget, backends=backends, n_ctx=256, n_batch=32, forecast=forecast, **options)


@pytest.mark.parametrize("options", [{}, {"budget": 0.3, "scope": "layer"}, {"policy": "predicted", "window": 2, "mmap": False},
                                     {"host_below": 2}, {"budget": "100%", "mmap": False}], ids=str)  # fmt: skip
@pytest.mark.parametrize("grain", [1, 128])
def test_logits_are_those_of_the_resident_run_and_counters_those_of_a_simulated_card(cupy, model, grain, options):
    want, backends = resident(model, grain), card(grain)
    stand_in = cupy.cuda.Device is fake_cupy.Device
    with offloaded(model, backends, verify=True, scrub=True, **options) as run:
        np.testing.assert_allclose(text(run.session), want, rtol=0, atol=2e-3 if not stand_in else 0 if grain == 1 else 1e-4)
        counters = run.counters
    with offloaded(model, simulated_machine(offload_min_batch=1), **options) as run:
        text(run.session)
        if "window" in options:  # how much is brought ahead is a matter of time
            assert counters.prefetches and counters.hits + counters.loads == run.counters.hits + run.counters.loads
        else:
            assert counters == run.counters and counters.loads and counters.hits


class Watch:
    """Who reads and overwrites slots in which order, as it is asked of the two streams."""

    def __init__(self, monkeypatch):
        self.clock, self.reads, self.overwrites = itertools.count(1), 0, 0
        self.read, self.marked, self.sent = {}, {}, {}  # buffer, event, (buffer, offset) -> when
        self.copies_after = self.waited_for = 0  # as far as the copy stream waits for products, and products for copies
        for owner, name in ((SlotView, "expert"), (CudaEvent, "record"), (CudaBackend, "prefetch"), (CudaBackend, "wait_event")):
            real, does = getattr(owner, name), getattr(self, name)
            monkeypatch.setattr(owner, name, lambda *a, real=real, does=does, **kw: does(real, *a, **kw))

    def expert(self, real, view, e, *more):
        buffer = view.table[e][0].buffer
        assert self.sent[buffer, view.pool.offsets[view.layer][view.m]] <= self.waited_for, "a product does not wait for its load"
        self.read[buffer], self.reads = next(self.clock), self.reads + 1
        return real(view, e, *more)

    def record(self, real, event):
        self.marked[event] = next(self.clock)
        real(event)

    def prefetch(self, real, backend, tensor, data, offset=0, after=None):
        self.copies_after = max(self.copies_after, self.marked.get(after, 0))
        if tensor.storage in self.read:
            self.overwrites += 1
            assert self.read[tensor.storage] < self.copies_after, "a load does not wait for the readers of its slot"
        done = real(backend, tensor, data, offset, after)
        self.marked[done] = self.sent[tensor.storage, tensor.offset] = next(self.clock)
        return done

    def wait_event(self, real, backend, event):
        self.waited_for = max(self.waited_for, self.marked[event])
        real(backend, event)


@pytest.mark.parametrize("options", [{}, {"policy": "predicted", "window": 2, "scrub": True}, {"budget": 0.26}], ids=str)
def test_no_slot_is_overwritten_while_it_is_read_nor_read_before_it_is_written(cupy, model, options, monkeypatch):
    with offloaded(model, card(), **options) as run:
        watch = Watch(monkeypatch)
        text(run.session)
    assert watch.reads > 50 and watch.overwrites > 20


def test_nobody_waits_for_the_copy_stream_while_a_token_is_computed(cupy, mixtral, monkeypatch):
    waits, real = [], CudaBackend.synchronize
    with offloaded(mixtral, card(), policy="predicted", window=2, mmap=False) as run:
        monkeypatch.setattr(CudaBackend, "synchronize", lambda self, copies=True: (waits.append(copies), real(self, copies)))
        for token in TOKENS:  # the first one also places the graph
            waits.clear()
            run.session.decode([token])
        assert set(waits) == {False} and run.counters.prefetches


def test_pinned_experts_go_to_the_card_without_a_detour(cupy, mixtral, monkeypatch):
    backends = card()
    with offloaded(mixtral, backends, mmap=False) as run:
        monkeypatch.setattr(backends[0]._staging, "send", None)
        pool = run.engine.pool
        slot = pool.load(layer := min(pool.weights), 3)
        backends[0].synchronize()
        weight = pool.weights[layer][0]
        assert slot.buffer.read(0, weight.nb[2]).tobytes() == mixtral.weights[weight.name].numpy()[3].tobytes()


# ---- one limit


def parts(run, backend):
    """Bytes on the card by part."""
    report = backend.memory_report()
    return {**run.memory(), "work": report["work buffer"], "decoded": report["dequantised weights"]}


def test_all_memory_of_a_run_is_within_the_limit_of_its_pool(cupy, mixtral):
    limit, backends = 16_000_000, card(limit=16_000_000)
    others = cupy.get_default_memory_pool().used_bytes()
    with offloaded(mixtral, backends) as run:
        text(run.session)
        found = parts(run, backends[0])
        used = backends[0].memory.pool.used_bytes()
        assert sum(found.values()) <= used <= backends[0].memory.pool.total_bytes() <= limit
        assert used - sum(found.values()) < 100_000 and all(found[p] for p in ("weights", "cache", "activations", "kv", "work"))
    assert cupy.get_default_memory_pool().used_bytes() == others  # nothing was taken elsewhere


def test_without_a_limit_of_its_own_it_shares_that_of_cupys_pool(cupy, mixtral):
    pool, before = cupy.get_default_memory_pool(), cupy.get_default_memory_pool().get_limit()
    mine = cupy.zeros((4_000_000,), np.uint8)
    try:
        pool.set_limit(size=pool.used_bytes() + 4_000_000)
        backends = card()
        with pytest.raises(AllocationError, match="within the limit of"):
            offloaded(mixtral, backends, budget="100%")
        with pytest.raises(AllocationError):
            backends[0].buffer_type.alloc_buffer(4_000_001)
        del mine
        assert backends[0].buffer_type.alloc_buffer(4_000_001).size == 4_000_001
    finally:
        pool.set_limit(size=before)


def test_decoded_weights_make_room_for_what_is_needed(cupy, mixtral):
    """With room for what must be there and little more, copies of weights that were decoded once are given up, and the run goes on."""
    backends = card()
    with offloaded(mixtral, backends) as run:
        want = text(run.session)
        needed = parts(run, backends[0])
    backends = card(limit=sum(n for part, n in needed.items() if part != "decoded") + 300_000)
    with offloaded(mixtral, backends) as run:
        np.testing.assert_array_equal(text(run.session), want)
        assert parts(run, backends[0])["decoded"] < needed["decoded"]


def test_a_budget_that_does_not_fit_is_refused_with_both_parts(cupy, mixtral):
    for limit in (3_000_000, 5_000_000):  # slots, then the KV cache find no room
        backends = card(limit=limit)
        with pytest.raises(AllocationError, match=r"slots of [\d,]+ bytes for experts beside [\d,]+ bytes of weights on CUDA0"):
            offloaded(mixtral, backends)
        assert backends[0].memory.pool.used_bytes() == 0


def test_what_is_closed_or_shrunk_goes_back_at_once(cupy, mixtral):
    """Although plans of its graphs and the engine's views are still there."""
    backends = card(limit=2**26)
    run = offloaded(mixtral, backends)
    text(run.session)
    used, size = backends[0].memory.pool.used_bytes(), run.engine.pool.sizes[0]
    run.engine.resize(0, -10)
    assert used - backends[0].memory.pool.used_bytes() >= 10 * size
    run.close()
    backends[0].close()
    assert backends[0].memory.pool.used_bytes() < 100_000 and run.session is not None


def test_the_benchmark_of_pools_counts_what_moves(cupy, monkeypatch):
    monkeypatch.setattr(bench_cuda, "card", lambda: "a card")
    monkeypatch.setattr(bench_cuda, "take_turns", lambda runs, seconds: take_turns(runs, seconds, rounds=1))
    rows = {row[0]: row[1:] for row in bench_cuda.pool_table(n_tokens=10, seconds=0.0).rows}
    assert list(rows) == ["resident", "all in slots", "half, mapped file", "half, pinned", "half, pinned, gate 1 ahead"]
    assert rows["all in slots"][2:4] == ["0.0", "0.0"] and float(rows["half, pinned"][2]) > 0  # experts that are there stay there
    assert float(rows["half, pinned, gate 1 ahead"][3]) > 0 and all(float(rows[r][5]) > 0 for r in [*rows][2:])
