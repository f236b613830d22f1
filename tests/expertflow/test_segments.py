"""Token queues over real tensors: eight sequences side by side give what one graph for all gives, within rounding."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.devices import fake_cupy
from workbench import CpuBackend, models
from workbench.devices.cost import Speed
from workbench.devices.cuda import CudaBackend
from workbench.devices.simulated import simulated_machine
from workbench.errors import ModelError, ParameterError
from workbench.expertflow.batching import FOREVER, LATENCY, Limits
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.monitor import Monitor
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import offload
from workbench.expertflow.segments import SegmentServer

PROMPTS = ["def main(", "And it came to pass", "x = 1;", "The LORD", "for i in", "if (a", "1 2 3", "return"]


@pytest.mark.parametrize("limits", [LATENCY, Limits(8, 6, 2), Limits(4, FOREVER, 3, merge=3)], ids=["latency", "waits", "throughput"])
@pytest.mark.parametrize("name", ["tiny-mixtral-f16", "tiny-deepseek-f16"])
def test_eight_sequences_agree_with_one_graph_for_all(name, limits):
    with models.load(name) as model, models.Session(model, n_seq_max=8, n_ctx=512) as whole, offload(model, 0.5, n_seq_max=8, n_ctx=512) as run:
        prompts = list(enumerate(model.tokenizer.encode(p) for p in PROMPTS))
        logits = whole.decode_batch(prompts)
        run.session.decode_batch(prompts)
        server = SegmentServer(run, limits)
        for _ in range(3):
            tokens = {seq: int(row.argmax()) for seq, row in enumerate(logits)}
            found = server.step(tokens)
            logits = whole.decode_batch([(seq, [t]) for seq, t in tokens.items()])
            for seq, row in enumerate(logits):
                assert np.abs(found[seq] - row).max() <= 1e-4 * np.abs(row).max() and found[seq].argmax() == row.argmax()
        k = model.hparams.n_expert_used
        assert sum(n for _, _, n, _ in server.batches) == 3 * 8 * k * len(model.hparams.moe_layers)
        assert max(n for _, _, n, _ in server.batches) > 1 and not server.queues.n_waiting and not server.queues.missing


def test_a_failed_step_leaves_everything_as_it_was():
    with models.load("tiny-mixtral-f16") as model, offload(model, 0.5, n_seq_max=2) as run:
        for seq, text in enumerate(("def main(", "And it came")):
            run.session.decode(model.tokenizer.encode(text), seq)
        server, card = SegmentServer(run, LATENCY), run.engine.pool.device
        before = server.step({0: 5, 1: 6})
        used, past = run.session.cache.n_used, [run.session.n_past(s) for s in (0, 1)]
        card.fail_compute = 9
        with pytest.raises(Exception, match="made to fail"):
            server.step({0: 7, 1: 8})
        card.fail_compute = 0
        assert (run.session.cache.n_used, [run.session.n_past(s) for s in (0, 1)]) == (used, past)
        assert not server.queues.missing and not server.queues.n_waiting
        again = server.step({0: 7, 1: 8})
        assert all(np.isfinite(row).all() for row in (*before.values(), *again.values()))


def test_bad_input():
    with models.load("tiny-mixtral-f16") as model, offload(model, 0.5) as run:
        server = SegmentServer(run, LATENCY)
        with pytest.raises(ParameterError):
            server.step({})
        with pytest.raises(ParameterError):
            server.step({3: 1})
        with pytest.raises(ParameterError):
            server.step({0: 10**6})


def test_models_that_segments_do_not_serve():
    class Run:
        session = type("S", (), {"model": type("M", (), {"name": "none", "hparams": type("H", (), {
            "moe_layers": (), "arch": "llama", "window": 0, "traits": type("T", (), {"late_rows": False})})})})

    with pytest.raises(ModelError):
        SegmentServer(Run(), LATENCY)


# ---- what may change between two graphs


@pytest.fixture(scope="module")
def model():
    with models.load("tiny-mixtral-f16") as m:
        yield m


@pytest.fixture(scope="module")
def plain(model):
    """Three steps of eight sequences in one graph each: (tokens, logits) of each step, and the routes."""
    with models.Session(model, n_seq_max=8, n_ctx=512, recording=True) as whole:
        logits, steps = whole.decode_batch(list(enumerate(map(model.tokenizer.encode, PROMPTS)))), []
        whole.clear_routes()
        for _ in range(3):
            tokens = {seq: int(row.argmax()) for seq, row in enumerate(logits)}
            logits = whole.decode_batch([(seq, [t]) for seq, t in tokens.items()])
            steps.append((tokens, logits))
        return steps, whole.routes


@contextmanager
def served(model, limits=LATENCY, kind=SegmentServer, speed=None, strict=True, backends=None, **more):
    options = {name: more.pop(name) for name in ("forecast", "prefetches", "policy") if name in more}
    backends = backends or simulated_machine(1, offload_min_batch=1, **({"speed": speed} if speed else {}))
    with offload(model, 0.5, n_seq_max=8, n_ctx=512, backends=backends, scrub=strict, verify=strict, **options) as run:
        run.session.decode_batch(list(enumerate(map(model.tokenizer.encode, PROMPTS))))
        yield kind(run, limits, **more)


def assert_close(found, wanted):
    for seq, row in found.items():
        assert np.abs(row - wanted[seq]).max() <= 1e-4 * np.abs(wanted[seq]).max() and row.argmax() == wanted[seq].argmax()


@pytest.mark.parametrize(("speed", "rises"), [(Speed(link=0.02), True), (Speed(link=1e6, link_ns=0), False)], ids=["slow link", "fast link"])
def test_the_threshold_follows_what_was_measured_and_no_result_changes(model, plain, speed, rises):
    with served(model, Limits(8, FOREVER), speed=speed, strict=False, adapt=8) as server:
        assert server.queues.threshold == 2
        for tokens, logits in plain[0]:
            assert_close(server.step(tokens), logits)
        load = server.run.engine.pool.device.speed.transfer_ns
        exact = sum(load(w.nb[2]) for w in server.run.engine.pool.weights[0])
        assert np.median(server.readings.loads) == pytest.approx(exact, rel=0.1, abs=3_000)
        assert server.queues.threshold > 8 if rises else server.queues.threshold == 1
        assert server.queues.limits.capacity == 8                                # nobody keeps an account: it stays


def test_the_capacity_follows_the_account_of_free_memory(model, plain):
    with served(model, Limits(8, FOREVER), adapt=4) as server:
        hp, used = model.hparams, sum(server.run.memory().values())
        server.monitor = Monitor(used + 2 * 4 * hp.n_embd * 48, 1)                 # room for two rows in each queue, and what grows
        for tokens, logits in plain[0][:2]:
            assert_close(server.step(tokens), logits)
        assert server.queues.limits.capacity <= 2 and max(n for _, _, n, _ in server.batches[4:]) <= 2
        assert server.monitor.parts["cache"] == server.run.engine.pool.nbytes


class Told(SegmentServer):
    """Knows the next layer's routes."""

    routes = None

    def expected(self, r, layer, normed):
        if layer + 1 < self.model.hparams.n_layer:
            [at] = np.flatnonzero((self.routes.sequences == r.seq) & (self.routes.positions == r.position))
            yield layer + 1, dict.fromkeys(self.routes.experts[layer + 1, at].tolist(), 1.0)


@pytest.mark.parametrize("policy", ["lru", "predicted"])
def test_announced_experts_are_there_when_their_tokens_come(model, plain, policy):
    steps, Told.routes = plain
    found = {}
    for name, kind, more in (("none", SegmentServer, {}), ("gate", SegmentServer, {"forecast": Forecaster.of_gates(Gates.of(model))}),
                             ("true", Told, {}), ("named only", Told, {"prefetches": 0})):  # fmt: skip
        with served(model, kind=kind, policy=policy, **more) as server:
            before, begun = server.run.counters.loads, server.run.engine.pool.device.machine.now
            for tokens, logits in steps[:2]:
                assert_close(server.step(tokens), logits)
            assert not server.announced.sums and server.run.engine.forecast is more.get("forecast")
            found[name] = server.run.counters.loads - before, server.run.engine.pool.device.machine.now - begun
    loads, ns = zip(*(found[name] for name in ("true", "gate", "none")))
    assert loads[0] < loads[1] < loads[2] / 2 and ns[0] < ns[1] < ns[2] and found["named only"] == found["none"]


def test_on_a_card_the_clock_measures_and_results_stay(monkeypatch, model, plain):
    """Over the stand-in for CuPy: real time instead of virtual time."""
    fake_cupy.install(monkeypatch)
    backends = [CudaBackend(grain=1, offload_min_batch=1), CpuBackend()]
    with served(model, Limits(8, FOREVER), backends=backends, strict=False, forecast=Forecaster.of_gates(Gates.of(model)), adapt=4) as server:
        for at, (tokens, logits) in enumerate(plain[0][:2]):
            server.between = lambda at=at: at == 1 and server.cancel(6)
            found = server.step(tokens)
            assert_close(found, logits)
        assert set(found) == set(range(8)) - {6}
        assert_nothing_left(server)
        assert server.run.counters.prefetches > 0 and server.readings.batches and all(ns > 0 for _, ns in server.readings.batches)


# ---- withdrawn while its tokens wait


def state_of(server):
    session = server.session
    return session.cache.n_used, [session.n_past(seq) for seq in range(8)], session.cache.seq.tolist()


def assert_nothing_left(server, failed=False):
    queues, engine = server.queues, server.run.engine
    assert not queues.queues and not queues.missing and not server.announced.sums and not server._on_way and not server._withdrawn
    assert failed or all(not cache.busy for cache in engine.cache.caches)        # after a failure the next run frees them
    assert {e for layer in engine.cache.resident().items() for e in ((layer[0], x) for x in layer[1])} == set(engine.pool.where)


@settings(max_examples=12, deadline=None)
@given(st.dictionaries(st.integers(0, 7), st.integers(0, 90), min_size=1, max_size=8), st.booleans(),
       st.sampled_from([LATENCY, Limits(8, 6, 2), Limits(4, FOREVER, 3, merge=3)]))
def test_a_request_withdrawn_at_any_time_leaves_nothing_and_changes_nobody_else(model, plain, when, forecast, limits):
    """when: sequence -> number of the graph before which it is withdrawn; a step has about 60 to 110."""
    steps, _ = plain
    with served(model, limits, forecast=Forecaster.of_gates(Gates.of(model)) if forecast else None) as server:
        count, told = 0, set()

        def between():
            nonlocal count
            for seq, at in when.items():
                if at == count:
                    assert server.cancel(seq)
                    told.add(seq)
            count += 1

        before = state_of(server)
        server.between = between
        tokens, logits = steps[0]
        found = server.step(tokens)
        assert set(found) == set(tokens) - told
        assert_close(found, logits)
        assert_nothing_left(server)
        used, past, _ = state_of(server)
        assert used == before[0] + len(found) and past == [n + (seq in found) for seq, n in enumerate(before[1])]
        server.between = lambda: None
        again = server.step({seq: tokens[seq] for seq in told}) if told else {}     # as if nothing had been
        assert_close(again, logits)
        assert not server.cancel(0)                                                # nothing is on its way


def test_a_step_within_a_step_is_refused_and_nothing_of_the_first_is_lost(model, plain):
    (tokens, logits), refused = plain[0][0], []

    def between():
        with pytest.raises(ParameterError, match="one after the other"):
            server.step({5: 7})
        refused.append(server.now)

    with served(model, between=between) as server:
        used = server.session.cache.n_used
        found = server.step(tokens)
        assert refused and set(found) == set(tokens) and server.session.cache.n_used == used + len(tokens)
        assert_close(found, logits)
        assert_nothing_left(server)


def test_another_thread_withdraws(model, plain):
    tokens, logits = plain[0][0]
    with served(model, Limits(8, FOREVER)) as server:
        go, gone = threading.Event(), threading.Event()

        def other():
            go.wait(30)
            assert server.cancel(3)
            gone.set()

        def between():
            if server.queues.n_waiting > 4:
                go.set()
                gone.wait(30)

        server.between = between
        thread = threading.Thread(target=other)
        thread.start()
        found = server.step(tokens)
        thread.join()
        assert set(found) == set(tokens) - {3}
        assert_close(found, logits)
        assert_nothing_left(server)


def test_a_prefetch_that_fails_leaves_everything_as_it_was(model, plain):
    (tokens, logits), Told.routes = plain[0][0], plain[1]
    with served(model, kind=Told) as server:
        before, device, done = state_of(server), server.run.engine.pool.device, server._prefetch

        def failing():
            device.fail_copy = 2 * (server.run.counters.prefetches == 3)
            done()

        server._prefetch = failing
        with pytest.raises(Exception, match="made to fail"):
            server.step(tokens)
        device.fail_copy, server._prefetch = 0, done
        assert state_of(server) == before
        assert_nothing_left(server, failed=True)
        assert_close(server.step(tokens), logits)


def test_a_withdrawn_request_and_a_failure_in_the_same_step(model, plain):
    tokens, logits = plain[0][0]
    with served(model) as server:
        before, card = state_of(server), server.run.engine.pool.device
        calls = iter(range(10**6))

        def between():
            at = next(calls)
            if at == 5:
                server.cancel(2)
            card.fail_compute = at == 8

        server.between = between
        with pytest.raises(Exception, match="made to fail"):
            server.step(tokens)
        card.fail_compute, server.between = 0, lambda: None
        assert state_of(server) == before
        assert_nothing_left(server, failed=True)
        assert_close(server.step(tokens), logits)
