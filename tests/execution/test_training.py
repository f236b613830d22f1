"""Training: the same bits wherever it runs, nothing made anew from step to step, and errors that say what is missing."""

import gc
import tracemalloc

import numpy as np
import pytest

from workbench import Context, CpuBackend, Flag, GraphRunner, Usage, build, moe, ops
from workbench.devices.backend import buffer_type_of
from workbench.devices.simulated import simulated_machine
from workbench.errors import ContextClosed, DTypeError, GraphError, NoDataError, ParameterError, ShapeError
from workbench.execution import AdamW, Trainer, new_parameter
from workbench.scheduler import Scheduler

RNG = np.random.default_rng


class Net:
    """An MLP of one hidden layer, or an expert layer, that learns a fixed function; its parameters lie in `homes`, in turn."""

    def __init__(self, kind="mlp", homes=(None,), d=6, f=16, t=10, seed=0, **trainer):
        rng, self.d, self.t = RNG(seed), d, t
        self.weights, self.work = Context(2**22, name="weights"), Context(2**20, no_alloc=True, name="work")
        self.x, self.y = (self.work.new_tensor("f32", n, t, name=name).mark(Flag.INPUT) for n, name in ((d, "x"), (3, "y")))
        made = iter(range(99))

        def param(*ne):
            i = next(made)
            w = new_parameter(self.weights, rng, *ne, name=f"w{i}")
            if (home := homes[i % len(homes)]) is not None:
                data = w.numpy().copy()
                w.place(home.alloc_buffer(w.nbytes, Usage.WEIGHTS))
                w.set(data)
            return w

        with self.work.active():
            h = self.x
            if kind == "moe":
                experts = moe.ExpertWeights(param(d, f, 4), param(d, f, 4), param(f, d, 4))
                h = moe.build_moe_ffn(h, param(d, 4), experts, moe.Router(4, 2))
            h = ops.silu(ops.add(ops.mul_mat(param(d, f), h), param(f)))
            out = ops.add(ops.mul_mat(param(f, 3), h), param(3))
            wrong = ops.sqr(ops.sub(out, self.y))
            self.loss = ops.scale(ops.sum(wrong), 1 / (3 * t)).named("loss")
        self.trainer = Trainer(self.loss, **trainer)

    def batches(self, n, seed=1):
        rng = RNG(seed)
        for _ in range(n):
            x = rng.standard_normal((self.t, self.d), np.float32)
            yield {self.x: x, self.y: np.stack([x[:, 0] * x[:, 1], np.abs(x[:, 2]), x.sum(-1)], 1)}

    def values(self):
        return [w.numpy().copy() for w in self.trainer.parameters]


def same(a, b):
    return len(a) == len(b) and all(x.tobytes() == y.tobytes() for x, y in zip(a, b))


@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_the_loss_falls(kind):
    net = Net(kind, optimiser=AdamW(0.01))
    losses = net.trainer.fit(net.batches(300))
    assert np.mean(losses[-20:]) < 0.2 * np.mean(losses[:5])
    assert net.trainer.n_steps == 300 and len(losses) == 300


@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_the_same_bits_on_any_number_of_threads(kind):
    runs = []
    for n_threads in (1, 2, 3):
        net = Net(kind, d=32, f=256, t=70, runner=GraphRunner(CpuBackend(n_threads)))
        runs.append((net.trainer.fit(net.batches(3)), net.values()))
    assert all(r[0] == runs[0][0] and same(r[1], runs[0][1]) for r in runs)


@pytest.mark.parametrize("kind", ["mlp", "moe"])
@pytest.mark.parametrize("place", ["host", "gpu", "alternating", "two gpus"])
def test_the_same_bits_through_a_scheduler_on_simulated_devices(kind, place):
    plain = Net(kind)
    losses = plain.trainer.fit(plain.batches(5))
    machine = simulated_machine(2 if place == "two gpus" else 1, offload_min_batch=4)
    cards = [b.buffer_type for b in machine[:-1]]
    homes = {"host": (None,), "gpu": cards, "alternating": (*cards, None), "two gpus": cards}[place]
    net = Net(kind, homes, runner=Scheduler(machine))
    assert net.trainer.fit(net.batches(5)) == losses
    assert same(net.values(), plain.values())
    if place != "host":
        for step in net.trainer.graph.nodes[-len(net.trainer.parameters) :]:
            w, _, m, v, _ = step.src
            assert buffer_type_of(m.storage) is buffer_type_of(v.storage) is buffer_type_of(w.storage)
    assert net.trainer.evaluate(next(net.batches(1))) == plain.trainer.evaluate(next(plain.batches(1)))
    more = next(net.batches(1, seed=5)), next(plain.batches(1, seed=5))
    assert net.trainer.step(more[0]) == plain.trainer.step(more[1])


@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_nothing_is_built_planned_or_kept_from_step_to_step(kind):
    net = Net(kind, d=64, f=128, t=256)
    trainer, batch = net.trainer, next(net.batches(1))
    for _ in range(3):
        trainer.step(batch)
    runner, before = trainer.runner, (len(trainer.graph), len(trainer._made.tensors), len(net.work.tensors))
    counts, nodes = (runner.n_plans, runner.n_reallocations), [*trainer.graph.nodes]
    tracemalloc.start()
    try:
        trainer.step(batch)
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        for _ in range(40):
            trainer.step(batch)
        peak = tracemalloc.get_traced_memory()[1]
        gc.collect()  # threadpoolctl leaves reference cycles
        end = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (runner.n_plans, runner.n_reallocations) == counts and trainer.graph.nodes == nodes
    assert before == (len(trainer.graph), len(trainer._made.tensors), len(net.work.tensors))
    assert peak - start <= 64 * 1024 + (64 * 2 * 256 if kind == "moe" else 0)
    assert end - start < 32 * 1024  # one result kept per step would be 40 times 64 KiB


def test_a_scheduler_splits_once():
    net = Net("moe", runner=Scheduler(simulated_machine(1)))
    net.trainer.fit(net.batches(2))
    s = net.trainer.runner
    counts = s.n_splittings, s.n_reservations, s.n_reallocations
    net.trainer.fit(net.batches(4))
    assert (s.n_splittings, s.n_reservations, s.n_reallocations) == counts


def test_evaluation_changes_nothing():
    net = Net()
    net.trainer.fit(net.batches(2))
    batch, before = next(net.batches(1, seed=9)), net.values()
    loss = net.trainer.evaluate(batch)
    assert same(net.values(), before) and net.trainer.evaluate(batch) == loss == net.trainer.step(batch)
    assert not same(net.values(), before) and net.trainer.evaluate(batch) < loss


@pytest.mark.parametrize("kind", ["mlp", "moe"])
def test_evaluation_may_come_first(kind):
    first, plain = Net(kind), Net(kind)
    batch = next(first.batches(1)), next(plain.batches(1))
    first.trainer.evaluate(batch[0])
    for _ in range(3):
        assert first.trainer.step(batch[0]) == plain.trainer.step(batch[1])
        first.trainer.evaluate(batch[0])
    assert same(first.values(), plain.values())


def test_a_reset_forgets_momenta_and_steps():
    def updates(reset):
        net = Net()
        net.trainer.step(next(net.batches(1, seed=7)))
        start = net.values()
        if reset:
            net.trainer.reset()
            assert net.trainer.n_steps == 0
        net.trainer.step(next(net.batches(1)))
        return [b - a for a, b in zip(start, net.values())]

    with_reset = updates(True)
    assert not same(with_reset, updates(False))
    rate = AdamW().rate  # the first step of Adam moves every number by the rate, whatever the gradient's size
    assert all(np.abs(np.abs(u[u != 0]) - rate).max() < 0.05 * rate for u in with_reset)


def test_the_rate_may_change_between_steps():
    net = Net()
    net.trainer.optimiser.rate = 0.0
    before = net.values()
    net.trainer.fit(net.batches(2))
    assert same(before, net.values())
    net.trainer.optimiser.rate = 0.1
    net.trainer.fit(net.batches(1))
    assert not same(before, net.values())


def test_results_asked_for_stay_readable():
    context = Context()
    x = context.from_numpy(np.arange(4, dtype="f4"))
    w = new_parameter(context, RNG(0), 4, 2, name="w")
    y = ops.mul_mat(w, x).named("y")
    start = w.numpy().copy()
    trainer = Trainer(ops.sum(ops.sqr(ops.exp(y))), y)
    assert trainer.inputs == []
    trainer.step({})
    np.testing.assert_allclose(y.numpy(), start @ np.arange(4), rtol=1e-6)
    assert repr(trainer).startswith("<Trainer ") and "8 numbers in 1 parameters" in repr(trainer)


# ---- mistakes


def one(*ne, **kw):
    context = Context(**kw)
    return context, new_parameter(context, RNG(0), *ne, name="w")


def test_mistakes_are_explained():
    context, w = one(3)
    unused = new_parameter(context, RNG(0), 3, name="unused")
    with pytest.raises(ShapeError, match="one number"):
        Trainer(ops.sqr(w))
    with pytest.raises(GraphError, match="no parameter"):
        Trainer(ops.sum(context.from_numpy([1.0, 2.0])))
    with pytest.raises(GraphError, match="'unused' has no part in the loss"):
        Trainer(ops.sum(ops.sqr(w)), ops.sqr(unused))
    with pytest.raises(GraphError, match="NORM"):
        Trainer(ops.sum(ops.norm(w)))
    with pytest.raises(DTypeError, match="f16"):
        Trainer(ops.sum(ops.cast(ops.cast(w, "f16"), "f32")))
    bare = Context(no_alloc=True).new_tensor("f32", 3, name="bare").mark(Flag.PARAM)
    with pytest.raises(NoDataError, match="'bare'"):
        Trainer(ops.sum(ops.sqr(bare)))
    for wrong in ({"rate": -1}, {"beta1": 1.0}, {"eps": 0.0}, {"decay": -0.1}, {"rate": float("nan")}):
        with pytest.raises(ParameterError):
            AdamW(**wrong)


def test_a_loss_in_the_memory_of_a_parameter_is_refused():
    """A step would write over it: what `step` returns would be the loss after the step, in place of the loss before."""
    _, w = one(1)
    bias = w.context.from_numpy([2.0, 3.0], name="bias").mark(Flag.PARAM)
    with w.context.active():
        for loss, also in ((w, []), (ops.view(bias, 1), []), (ops.sum(ops.sqr(bias)), [ops.reshape(bias, 1, 2)])):
            with pytest.raises(GraphError, match="lies in the memory of parameter"):
                Trainer(loss, *also)
            assert not any(t.flags & (Flag.LOSS | Flag.OUTPUT) for t in (loss, *also))  # as they were
        before = w.numpy().item()
        assert Trainer(ops.cont(w)).step({}) == pytest.approx(before)


def test_one_loss_is_trained_and_another_one_is_named():
    net = Net()
    with net.work.active():
        total = ops.scale(net.loss, 2.0).named("total")
    with pytest.raises(GraphError, match="'loss' is marked as a loss beside 'total'"):
        Trainer(total)
    net.loss.flags &= ~Flag.LOSS
    batch = next(net.batches(1))
    assert Trainer(total).step(batch) == pytest.approx(2 * net.trainer.evaluate(batch), rel=0.05)


def test_settings_changed_to_nonsense_are_found_before_the_step():
    for name, value in (("rate", float("nan")), ("rate", float("inf")), ("beta1", 1.0), ("eps", "small"), ("decay", -1.0)):
        net = Net()
        before, batch = net.values(), next(net.batches(1))
        setattr(net.trainer.optimiser, name, value)
        with pytest.raises(ParameterError, match="finite numbers"):
            net.trainer.step(batch)
        assert same(before, net.values()) and net.trainer.n_steps == 0


@pytest.mark.parametrize("runner", ["host", "two gpus"])
def test_a_closed_runner_takes_memory_again(runner):
    nets = [Net("moe", runner=None if runner == "host" else Scheduler(simulated_machine(2))) for _ in range(2)]
    for net in nets:
        net.trainer.fit(net.batches(1))
    nets[0].trainer.runner.close()
    assert nets[0].trainer.fit(nets[0].batches(2)) == nets[1].trainer.fit(nets[1].batches(2))
    assert same(nets[0].values(), nets[1].values())


def test_a_missing_input_is_named_and_nothing_moves():
    net = Net()
    batch = next(net.batches(1))
    before = net.values()
    with pytest.raises(ParameterError, match="no values for 'y'"):
        net.trainer.step({net.x: batch[net.x]})
    with pytest.raises(ShapeError, match="'x'"):
        net.trainer.step({**batch, net.x: np.zeros((3, 3))})
    assert same(before, net.values()) and np.isfinite(net.trainer.step(batch)) and net.trainer.n_steps == 1


def test_a_loss_that_is_not_finite_ends_it():
    net = Net()
    batch = next(net.batches(1))
    batch[net.x][0, 0] = np.inf
    with pytest.raises(ParameterError, match="step 1"):
        net.trainer.step(batch)


def test_a_closed_context_is_named():
    net = Net()
    batch = next(net.batches(1))
    net.trainer.step(batch)
    net.weights.close()
    with pytest.raises(ContextClosed, match="weights"):
        net.trainer.step(batch)


def test_the_graph_is_forward_gradients_steps_in_this_order():
    net = Net("moe")
    names = [t.op for t in net.trainer.graph.nodes]
    n = len(net.trainer.forward)
    assert names[:n] == [t.op for t in net.trainer.forward.nodes]
    k = len(net.trainer.parameters)
    assert names[-k:] == ["OPT_STEP_ADAMW"] * k and "OPT_STEP_ADAMW" not in names[:-k]
    assert build(net.loss).nodes == net.trainer.forward.nodes
