"""Several cards, each with its own pool, layers divided or experts too: the same bits as a model that is all there, and rows that cross."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.expertflow.offloaded import Run
from tests.models.architectures import write
from workbench import models
from workbench.devices.simulated import simulated_machine
from workbench.devices.simulated_memory import DeviceBuffer
from workbench.errors import AllocationError, ParameterError, StorageError
from workbench.expertflow import lanes
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import expert_bytes, offload
from workbench.expertflow.placement import Placement, place
from workbench.expertflow.pool import ExpertPool
from workbench.expertflow.several import offload_across
from workbench.expertflow.visits import expert_weights
from workbench.trace import Trace

TEXT = "And it came to pass, that the LORD said"
NAMES = ["tiny-mixtral-f16", "tiny-deepseek-f16"]


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    with models.load(request.param) as model:
        yield model


def spread(model, n, places=None, seed=0):
    """A placement by loads that somebody drew."""
    shape = len(expert_weights(model)), model.hparams.n_expert
    return place(np.random.default_rng(seed).integers(1, 100, shape), n, places)


def steps(session, tokens):
    """A prompt in one, tokens by themselves, and a few at once."""
    return [session.decode(part, outputs="all") for part in (tokens, [5], [7], [9], tokens[:3])]


@pytest.fixture(scope="module")
def resident(model):
    run = Run(model, None)
    yield steps(run.session, model.tokenizer.encode(TEXT))
    run.close()


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("n", "budget"), [(2, 0.4), (2, 1.0), (3, 0.5)])
def test_layers_divided(model, resident, n, budget):
    with offload_across(model, budget, n, verify=True) as run:
        assert same(steps(run.session, model.tokenizer.encode(TEXT)), resident)
        layers = [list(e.pool.weights) for e in run.engines]
        assert sorted(sum(layers, [])) == list(model.hparams.moe_layers) and all(layers)
        for engine, c in zip(run.engines, run.counters):
            assert c.loads > 0 and {layer for layer, _ in engine.pool.where} <= set(engine.pool.weights)
        computed = {s.backend for s in run.scheduler.splits for node in s.nodes if node.op == "MUL_MAT_ID"}
        assert computed == set(range(n)) and not run.traffic.rows.any()          # every card computes its own experts


@pytest.mark.parametrize("copies", ["local", "least"])
@pytest.mark.parametrize(("n", "budget", "replicas"), [(1, 0.3, 0), (2, 0.3, 0), (4, 0.5, 0), (2, 0.6, 4), (4, 1.0, 8)])
def test_experts_divided(model, resident, n, budget, replicas, copies):
    placed = spread(model, n, model.hparams.n_expert + replicas)
    with offload_across(model, budget, n, placement=placed, copies=copies, verify=True) as run:
        assert same(steps(run.session, model.tokenizer.encode(TEXT)), resident)
        assert sum(e.pool.nbytes for e in run.engines) <= expert_bytes(model) * budget + 1
        for d, engine in enumerate(run.engines):
            homes = {(layer, e) for i, layer in enumerate(run.among.layers) for e in np.flatnonzero(placed.on(i)[:, d])}
            assert set(engine.pool.where) <= homes and engine.counters.loads     # nobody loads what lives elsewhere
        assert (run.traffic.rows > 0).any() == (n > 1)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_placement_any_policy_and_any_forecast(model, resident, data):
    """Drawn by hand, not balanced by anybody; the budget, too."""
    hp, n = model.hparams, data.draw(st.integers(2, 4), "cards")
    extra = data.draw(st.integers(0, 2 * n), "replicas")
    each = -(-(hp.n_expert + extra) // n)
    rows = [data.draw(st.permutations([*range(hp.n_expert), *(i % hp.n_expert for i in range(each * n - hp.n_expert))]), "layer")
            for _ in hp.moe_layers]
    placed = Placement(np.array(rows), np.ones((len(rows), hp.n_expert)), n)
    ahead = data.draw(st.integers(0, 2), "window")
    with offload_across(model, data.draw(st.floats(0.3, 1.0), "budget"), n, placement=placed, verify=True,
                        policy=data.draw(st.sampled_from(["lru", "lfu", "predicted", "plec"]), "policy"),
                        copies=data.draw(st.sampled_from(["local", "least"]), "copies"),
                        granularity=data.draw(st.sampled_from(["expert", "matrix"]), "granularity"),
                        forecast=Forecaster.of_gates(Gates.of(model), ahead) if ahead else None) as run:
        assert same(steps(run.session, model.tokenizer.encode(TEXT)), resident)


def test_several_sequences_at_once(model):
    tokens = [model.tokenizer.encode(t) for t in ("def main(", "And it came to pass", "x = 1;")]
    out = []
    whole = Run(model, None, n_seq_max=3)
    with offload_across(model, 0.5, 2, placement=spread(model, 2), n_ctx=512, n_seq_max=3) as run:
        for session in (whole.session, run.session):
            logits = [session.decode_batch(list(enumerate(tokens)))]
            for _ in range(3):
                logits.append(session.decode_batch([(i, [int(row.argmax())]) for i, row in enumerate(logits[-1])]))
            out.append(np.array(logits))
    whole.close()
    assert np.array_equal(*out)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen2moe", "deepseek-v3"])
def test_other_kinds_of_experts(name, tmp_path):
    """Biases, a gate before the shared expert, groups."""
    pytest.importorskip("gguf")
    with models.load(write(name, tmp_path / "m.gguf")) as model:
        run, tokens = Run(model, None), [3, 1, 4, 1, 5, 9, 2, 6]
        expected = steps(run.session, tokens)
        run.close()
        with offload_across(model, 1.0, 2, placement=spread(model, 2), verify=True) as across:
            assert same(steps(across.session, tokens), expected) and across.traffic.rows.any()


# ---- what crosses


def crossed(run, routes, placed):
    """Rows there and back by the definition, token by token; for whole steps whose tokens are all at the layer's card."""
    rows = np.zeros((placed.n_devices,) * 2, int)
    for i, layer in enumerate(run.among.layers):
        home, on = run.among.homes[layer], placed.on(i)
        for token in routes[i].astype(int):
            where = [home if on[e, home] else int(np.flatnonzero(on[e])[0]) for e in token]
            for d in set(where) - {home}:
                rows[home, d] += 1
                rows[d, home] += where.count(d)
    return rows


@pytest.mark.parametrize("replicas", [0, 4])
def test_what_crosses_is_what_the_routes_say(model, replicas):
    placed, trace = spread(model, 4, model.hparams.n_expert + replicas), Trace("virtual")
    with offload_across(model, 0.5, 4, placement=placed, recording=True, n_seq_max=2, trace=trace) as run:
        steps(run.session, model.tokenizer.encode(TEXT))
        run.session.decode_batch([(0, [3]), (1, [4])])
        routes, got, wide = run.session.routes.experts, run.traffic, 4 * model.hparams.n_embd
        assert np.array_equal(got.rows, crossed(run, routes, placed)) and np.array_equal(got.nbytes, got.rows * wide)
        home = np.array([run.among.homes[layer] for layer in run.among.layers])
        there = sum(got.rows[h, d] for h in range(4) for d in range(4) if h != d)
        assert there == crossed(run, routes, placed).sum()
        visits = placed.crossings(routes.astype(int), home[:, None])             # the formula of lesson 26
        assert got.announced + got.unannounced == visits.sum() and got.announced == 0
        names = [b.name for b in run.scheduler.backends]
        copied = np.zeros((4, 4), int)
        for e in trace.of("copy_async"):                                          # what the cards say that they copied
            source, target, name, nbytes = (trace.described(e)[what] for what in ("device", "target", "copy", "bytes"))
            if "#" not in name:                                                   # those are the scheduler's, between layers
                copied[names.index(source), names.index(target)] += nbytes
        assert np.array_equal(copied, got.nbytes)


def test_rows_side_by_side_or_as_they_lie(model, resident, monkeypatch):
    """Whether rows are packed for the journey changes neither what crosses nor any bit, only the number of copies."""
    placed, found = spread(model, 4), []
    for few in (0, 10**6):
        monkeypatch.setattr(lanes, "FEW", few)
        trace = Trace("virtual")
        with offload_across(model, 0.5, 4, placement=placed, trace=trace) as run:
            assert same(steps(run.session, model.tokenizer.encode(TEXT)), resident)
            found.append((run.traffic.nbytes, len(list(trace.of("copy_async")))))
    assert np.array_equal(found[0][0], found[1][0]) and found[0][1] < found[1][1]


class Knowing(Forecaster):
    """A forecaster that knows what is to come, or its opposite. routes (L, T, k) of all steps in order."""

    def __init__(self, gates, routes, right=True):
        super().__init__(gates, [])
        self.routes, self.right, self.at = routes.astype(int), right, 0

    def after(self, layer, ids, normed):
        gates, now = self.gates, self.gates.layers.index(layer)
        if now + 1 < len(gates.layers):
            true = self.routes[now + 1, self.at : self.at + len(ids)]
            best = true if self.right else (true + gates.n_expert // 2) % gates.n_expert
            self.guesses[gates.layers[now + 1]] = best
            counts = np.bincount(best.ravel(), minlength=gates.n_expert) / len(ids)
            yield gates.layers[now + 1], {int(e): float(counts[e]) for e in np.flatnonzero(counts)}
        else:
            self.at += len(ids)


def test_journeys_announced(model):
    """Who knows what is to come announces every journey after the first layer, and loads are never waited for from the start there."""
    tokens, placed = model.tokenizer.encode(TEXT), spread(model, 2)
    with offload_across(model, 1.0, 2, placement=placed, recording=True) as run:
        expected = steps(run.session, tokens)
        routes, home = run.session.routes.experts, [run.among.homes[layer] for layer in run.among.layers]
    first = placed.crossings(routes.astype(int), np.array(home)[:, None])[0].sum()
    got = {}
    for right in (True, False):
        knowing = Knowing(Gates.of(model), routes, right)
        with offload_across(model, 0.5, 2, placement=placed, policy="plec", forecast=knowing, recording=True) as run:
            assert same(steps(run.session, tokens), expected)
            got[right] = run.traffic, run.counters
    traffic, counters = got[True]
    assert traffic.unannounced == first and traffic.in_vain == 0 and traffic.recall > 0.7
    assert all(c.prefetches and c.prefetched_hits for c in counters)             # each card loaded its own, ahead
    assert got[False][0].recall < traffic.recall and got[False][0].in_vain > 0
    assert sum(c.loads for c in counters) < sum(c.loads for c in got[False][1])


def test_forecasts_reach_the_card_of_the_next_layer(model, resident):
    """Layers divided: what the last layer of a card foretells is loaded by the next card."""
    with offload_across(model, 0.5, 2, policy="plec", forecast=Forecaster.of_gates(Gates.of(model))) as run:
        assert same(steps(run.session, model.tokenizer.encode(TEXT)), resident)
        assert all(c.prefetched_hits for c in run.counters) and not run.traffic.rows.any()


# ---- memory


def test_no_card_holds_an_expert_outside_its_slots(model, monkeypatch):
    """Every buffer that a card ever gave out is searched for pieces of experts; and at no moment does a pool hold more than its part."""
    buffers, make, take, most = [], DeviceBuffer.__init__, ExpertPool.take, {}

    def noted(self, *args, **kw):
        make(self, *args, **kw)
        buffers.append(self)

    def taken(self, *args):
        slot = take(self, *args)
        most[id(self)] = max(most.get(id(self), 0), self.held)
        return slot

    monkeypatch.setattr(DeviceBuffer, "__init__", noted)
    monkeypatch.setattr(ExpertPool, "take", taken)
    budget = expert_bytes(model) // 2
    with offload_across(model, budget, 2, placement=spread(model, 2)) as run:
        steps(run.session, model.tokenizer.encode(TEXT))
        pieces = [w.require_data().host_bytes()[w.offset + e * w.nb[2] :][:64].tobytes()
                  for merged in expert_weights(model).values() for w in merged for e in range(w.ne[2])]
        slots = [slot.buffer for e in run.engines for found in e.pool.classes.values() for slot in found]
        elsewhere = [b for b in buffers if b not in slots and not b.closed]
        for b in elsewhere:
            memory = b.device_bytes().tobytes()
            assert not any(p in memory for p in pieces)
        memory = b"".join(b.device_bytes().tobytes() for b in slots)
        assert any(p in memory for p in pieces)                                   # the search finds what is there
        assert all(0 < most[id(e.pool)] <= e.pool.nbytes <= budget // 2 for e in run.engines)
        used = [e.pool.device.buffer_type.used for e in run.engines]
        steps(run.session, model.tokenizer.encode(TEXT))
        assert [e.pool.device.buffer_type.used for e in run.engines] == used      # a steady state takes nothing more
    assert all(e.pool.device.buffer_type.used == 0 for e in run.engines)          # and all of it is given back


def test_a_failure_on_another_card_is_got_over(model, resident):
    tokens = model.tokenizer.encode(TEXT)
    for what in ("fail_compute", "fail_copy"):
        with offload_across(model, 0.5, 2, placement=spread(model, 2), verify=True) as run:
            setattr(run.engines[1].pool.device, what, 3)
            with pytest.raises((AllocationError, StorageError)):
                run.session.decode(tokens)
            assert same(steps(run.session, tokens), resident)


def test_a_callback_sees_every_node_whole(model):
    seen, tokens = [], model.tokenizer.encode(TEXT)
    whole = Run(model, None)
    with offload_across(model, 0.5, 2, placement=spread(model, 2), n_ctx=512) as run:
        for session in (whole.session, run.session):
            found = {}

            def look(node, ask, found=found):
                if not ask:
                    found[node.name] = np.array(node.numpy())
                return True

            session.scheduler.eval_callback = look
            session.decode(tokens, outputs="all")
            seen.append(found)
    whole.close()
    assert list(seen[0]) == list(seen[1]) and any("ffn_moe_up" in name for name in seen[0])
    assert not [name for name in seen[0] if seen[0][name].tobytes() != seen[1][name].tobytes()]


# ---- machines, and what is refused


def test_cards_of_presets(model, resident):
    tokens = model.tokenizer.encode(TEXT)
    for backends, n in (("rtx3090-pcie4", 2), ("two-rtx3090", None), ("a100,rtx3090-pcie3", 2), (simulated_machine(2, offload_min_batch=1), None)):
        with offload_across(model, 0.5, n, backends=backends, placement=spread(model, 2)) as run:
            assert len(run.engines) == 2 and same(steps(run.session, tokens), resident)
    with offload_across(model, 0.5, backends="rtx3090-pcie4") as run:
        assert len(run.engines) == 1
    for backends, n in (("two-rtx3090", 3), (simulated_machine(3), 2), ("cpu", None), (simulated_machine(2)[:2], 2), ("no-such-card", 2)):
        with pytest.raises(ParameterError):
            offload_across(model, 0.5, n, backends=backends)


def test_links_work_at_once_out_of_pinned_memory_only(model, resident):
    """A copy out of a mapped file keeps the host waiting (a card with a rate for such copies), and the other card's link with it."""
    at_once, tokens = {}, model.tokenizer.encode(TEXT)
    for mmap in (True, False):
        trace = Trace("virtual")
        with offload_across(model, 0.5, 2, backends="rtx3090-pcie4", placement=spread(model, 2), mmap=mmap, trace=trace) as run:
            assert same(steps(run.session, tokens), resident)
        busy = [(trace.described(e), e.start, e.end) for e in trace.of("busy")]
        a, b = ([(start, end) for e, start, end in busy if (e["device"], e["stream"]) == (card, "copies")] for card in ("GPU0", "GPU1"))
        at_once[mmap] = sum(min(x[1], y[1]) > max(x[0], y[0]) for x in a for y in b)
    assert at_once[True] == 0 < at_once[False]


@pytest.mark.parametrize("n", [0, -1, 7, 2.0, True])
def test_a_device_without_experts_is_refused(n):
    with models.load("tiny-mixtral-f16") as model, pytest.raises(ParameterError):
        offload_across(model, 0.5, n)


def test_placements_that_do_not_fit():
    with models.load("tiny-mixtral-f16") as model:
        loads = np.ones((6, 8))
        in_order = np.tile(np.arange(8), (6, 1))
        missing = in_order.copy()
        missing[2, 5] = 4
        for placed, n, said in ((Placement(in_order, loads, 4), 2, "on 4 devices"), (Placement(missing, loads, 2), 2, "expert 5 of expert layer 2"),
                                (Placement(in_order + 1, loads, 2), 2, "experts 1 to 8"), (Placement(in_order[:5], loads[:5], 2), 2, "5 layers"),
                                (Placement(np.tile(np.arange(9), (6, 1)) % 8, loads, 2), 2, "9 places")):  # fmt: skip
            with pytest.raises(ParameterError, match=said):
                offload_across(model, 0.5, n, placement=placed)
        with pytest.raises(ParameterError, match="8 experts on 16 devices"):
            place(loads, 16)
        with pytest.raises(ParameterError, match="copies"):
            offload_across(model, 0.5, 2, placement=Placement(in_order, loads, 2), copies="nearest")


def test_a_budget_too_small_leaves_nothing_behind():
    with models.load("tiny-mixtral-f16") as model:
        for placed in (None, Placement(np.tile(np.arange(8), (6, 1)), np.ones((6, 8)), 2)):
            machine = simulated_machine(2, offload_min_batch=1)
            with pytest.raises(ParameterError, match="GPU0's part of the budget(.|\n)*slots"):
                offload_across(model, 0.01, backends=machine, placement=placed)
            assert [card.buffer_type.used for card in machine[:2]] == [0, 0]


@pytest.mark.parametrize("open_one", [
    lambda model, cards: offload_across(model, 0.4, backends=cards, n_ctx=64),
    lambda model, cards: offload_across(model, 0.4, backends=cards, n_ctx=64, placement=spread(model, 2)),
    lambda model, cards: offload(model, 0.4, backends=cards, n_ctx=64)], ids=["layers divided", "experts divided", "one pool"])
@pytest.mark.parametrize("which", [0, 1])
def test_whatever_does_not_fit_nothing_stays_behind(model, open_one, which):
    """The n-th allocation on a card fails, for every n: weights, slots, the cache of keys and values, boards, results."""
    cards, failed = simulated_machine(2, offload_min_batch=1), 0
    while True:
        cards[which].buffer_type.fail_allocation = failed + 1
        try:
            run = open_one(model, cards)
        except AllocationError:
            failed += 1
            assert [card.buffer_type.used for card in cards] == [0, 0, 0]
        else:
            break
    cards[which].buffer_type.fail_allocation = 0
    run.close()
    assert failed > 2 and [card.buffer_type.used for card in cards] == [0, 0, 0]
