"""What users of such schedulers meet: limits of input lists, shapes that decide, orders, experts elsewhere, pipelines."""

import numpy as np
import pytest

from tests.models.small import small_model
from tests.scheduler.graphs import chain_of_adds, context, filled, leaf, moe, values, weight
from workbench import Flag, Scheduler, Session, WholeTensor, build, ops, place_weights, simulated_machine
from workbench.devices.simulated import SimulatedDevice
from workbench.errors import GraphError
from workbench.scheduler import transfer
from workbench.trace import Trace


def on_gpu(scheduler, graph):
    scheduler.reset()
    for node in graph.nodes:
        scheduler.set_backend(node, 0)
    return [(s.backend, len(s.inputs)) for s in scheduler.split(graph)]


def test_a_list_of_thirty_inputs_is_full_and_grows_when_one_node_brings_two():
    scheduler = Scheduler(simulated_machine())
    chain = chain_of_adds(34)  # 35 operands
    assert on_gpu(scheduler, chain) == [(0, 30), (0, 5)]
    ctx = context()
    with ctx.active():  # 29 inputs, then a node that reads two foreign tensors
        y = leaf(ctx, 4)
        for _ in range(28):
            y = ops.add(y, leaf(ctx, 4))
        pair = build(y, ops.add(leaf(ctx, 4), leaf(ctx, 4)))
    assert on_gpu(scheduler, pair) == [(0, 31)]
    assert on_gpu(scheduler, chain) == [(0, 35)]  # the first split's list has grown and stays so
    assert on_gpu(Scheduler(simulated_machine()), chain) == [(0, 30), (0, 5)]


class NarrowProducts(SimulatedDevice):
    """A device whose products take at most 32 columns."""

    def why_unsupported(self, node):
        return "too many columns" if node.op == "MUL_MAT" and node.ne[1] > 32 else super().why_unsupported(node)


@pytest.mark.parametrize("columns, splits", [(32, 1), (33, 3)])
def test_one_more_column_turns_one_split_into_three(columns, splits):
    gpu, cpu = simulated_machine()
    scheduler = Scheduler([NarrowProducts(gpu.machine, "GPU", gpu.buffer_type), cpu])
    ctx = context()
    scale, w = (weight(gpu.buffer_type, ctx, v, name) for v, name in ((values(64), "scale"), (values(64, 64), "w")))
    with ctx.active():
        x = ops.mul(leaf(ctx, 64, columns, name="x"), scale)
        y = ops.mul(ops.rms_norm(ops.mul_mat(w, x)), scale)
    filled(scheduler, build(y.mark(Flag.OUTPUT)), x=values(columns, 64))
    assert len(scheduler.splits) == splits and np.isfinite(y.numpy()).all()


def test_the_order_of_nodes_decides_the_number_of_splits():
    scheduler = Scheduler(simulated_machine(deny_ops=["SQR"]))
    ctx = context()
    w = weight(scheduler.buffer_types[0], ctx, values(4, 4))
    with ctx.active():
        a = ops.mul_mat(w, leaf(ctx, 4, 2))
        b, c = ops.sqr(leaf(ctx, 4, 2)), ops.mul_mat(w, leaf(ctx, 4, 2))
    assert len(scheduler.split(build(a, c, b))) == 2 and len(scheduler.split(build(a, b, c))) == 3


def test_alternating_devices_make_as_many_splits_as_nodes():
    scheduler = Scheduler(simulated_machine())
    ctx = context(1200)
    with ctx.active():
        y = leaf(ctx, 4, name="x")
        for _ in range(500):
            y = ops.neg(y)
    graph = build(y.mark(Flag.OUTPUT))
    for i, node in enumerate(graph.nodes):
        scheduler.set_backend(node, i % 2)
    scheduler.alloc(graph)
    graph.find("x").set([1, 2, 3, 4])
    scheduler.compute(graph)
    assert len(scheduler.splits) == 500 and y.numpy().tolist() == [1, 2, 3, 4]


def moved(trace, name):
    """Bytes that reached a device under this name."""
    events = (trace.described(e) for e in trace.of("set_async", "set", "copy_async"))
    return sum(d["bytes"] for d in events if name in d["name"] and d.get("done", 1))


def run_moe(home, ids=(1, 1, 4, 6, 6, 4), gpus=2, **kw):
    """Run experts on the first GPU with the weights in memory number `home`; scheduler, result, bytes of weights moved."""
    scheduler = Scheduler(simulated_machine(gpus), **kw)
    graph, *_, y, w = moe(context(), scheduler.buffer_types[home])
    scheduler.set_backend(y, 0)
    scheduler.alloc(graph)
    graph.find("x").set(values(3, 1, 16, seed=1))
    graph.find("ids").set(np.array(ids, np.int32).reshape(3, 2))
    scheduler.trace = trace = Trace("virtual")
    scheduler.compute(graph)
    return scheduler, y.numpy(), moved(trace, "experts"), w


def test_experts_on_the_host_move_in_part_and_those_of_another_device_whole():
    expert = 600 * 16 * 4
    _, there, none, w = run_moe(0)
    _, from_host, part, _ = run_moe(2)
    _, from_gpu, whole, _ = run_moe(1)
    assert np.array_equal(there, from_host) and np.array_equal(there, from_gpu)
    assert (none, whole) == (0, w.nbytes)
    assert part == 3 * (expert + 512)  # experts 1, 4 and 6, each with some bytes of the next one
    _, y, neighbours, _ = run_moe(2, (3, 4, 5, 5, 4, 3))
    assert neighbours == 3 * expert + 512  # in one go
    assert run_moe(2, transfer=WholeTensor())[2] == w.nbytes


def test_splitting_or_reserving_twice_never_leaves_rewritten_sources():
    scheduler = Scheduler(simulated_machine())
    graph = chain_of_adds(5)
    sources = [n.src for n in graph.nodes]
    assert on_gpu(scheduler, graph) == [(0, 6)]
    for _ in range(2):
        assert [len(s.inputs) for s in scheduler.split(graph)] == [6] and len(scheduler.splitter.rewrites) == 6
    for _ in range(2):
        scheduler.reserve(graph)
        assert [n.src for n in graph.nodes] == sources and scheduler.is_reset
    scheduler.alloc(graph)
    with pytest.raises(GraphError, match="allocated already"):
        scheduler.alloc(graph)
    assert list(scheduler.decisions(graph)) and [n.src for n in graph.nodes] == sources
    other = chain_of_adds(2)
    with pytest.raises(GraphError, match="another graph"):
        scheduler.compute(other)
    Scheduler(simulated_machine()).split(graph)  # takes it over
    assert scheduler.graph is None
    scheduler.reset()
    scheduler.split(graph)
    scheduler.reset()
    assert [n.src for n in graph.nodes] == sources


def test_after_a_worst_case_reserve_prefill_and_decode_take_no_memory():
    machine = simulated_machine(2)
    with small_model(block_count=4) as model, place_weights(model, machine, overrides={r"blk\.0\..*_exps": "CPU"}) as placed:
        scheduler = Scheduler(machine)
        with Session(placed, n_ctx=256, n_batch=40, scheduler=scheduler) as session:
            before = [t.used for t in scheduler.buffer_types]
            for n in (40, 1, 1, 33, 1, 5, 1):
                session.decode(list(range(n)))
            assert scheduler.n_reallocations == 0 and [t.used for t in scheduler.buffer_types] == before
            splittings = scheduler.n_splittings
            session.decode([1])
            session.decode([2])
            assert scheduler.n_splittings == splittings  # a decode step builds, splits and places nothing


def pipeline(parallel, gpus, waiting=False, runs=8):
    """Two layers, one per GPU (or both on one); virtual time of some runs asked for without waiting, and bytes of memory."""
    backends = simulated_machine(gpus)
    scheduler = Scheduler(backends, parallel=parallel)
    ctx = context()
    ws = [weight(scheduler.buffer_types[i % gpus], ctx, values(256, 256), f"w{i}") for i in range(2)]
    with ctx.active():
        x = leaf(ctx, 256, 64, name="x")
        y = ops.mul_mat(ws[1], ops.mul_mat(ws[0], x)).mark(Flag.OUTPUT)
    graph, machine = build(y), backends[0].machine
    scheduler.reserve(graph)
    start = machine.now
    for _ in range(runs):
        scheduler.reset()
        scheduler.alloc(graph)
        x.set(values(64, 256))
        (scheduler.compute if waiting else scheduler.compute_async)(graph)
    scheduler.synchronize()
    return machine.now - start, sum(map(scheduler.buffer_size, range(gpus + 1))), y.numpy()


def test_four_copies_take_more_memory_and_gain_only_where_devices_can_overlap():
    (alone, bytes1, y1), (piped, bytes4, y4) = pipeline(False, 2), pipeline(True, 2)
    assert np.array_equal(y1, y4) and bytes4 > 2 * bytes1 and piped < 0.9 * alone
    assert pipeline(True, 2, waiting=True)[0] >= pipeline(False, 2, waiting=True)[0]  # one run at a time: nothing to overlap


def test_a_kernel_that_reads_past_the_last_used_expert_meets_numbers(monkeypatch):
    scheduler, *_ = run_moe(2)
    copy = scheduler.splits[0].copies[0][0]
    assert copy.nb[2] > 1024

    def behind(expert):
        start = copy.offset + (expert + 1) * copy.nb[2]
        return copy.storage.device_bytes()[start : start + 512].view(np.float32)

    assert all(np.isfinite(behind(e)).all() for e in (1, 4, 6))
    assert np.isnan(behind(2)).all()  # what was not brought is NaN
    monkeypatch.setattr(transfer, "PADDING", 0)
    scheduler, *_ = run_moe(2)
    copy = scheduler.splits[0].copies[0][0]
    assert np.isnan(behind(4)).all()


class Resident(WholeTensor):
    """Remembers that a weight was brought, and brings it no more. `safe`: as long as its copy is where it was."""

    def __init__(self, safe):
        self.safe, self.brought = safe, {}

    def move(self, route, target, split, position):
        weight, copy = split.inputs[position], split.copies[position][route.slot]
        where = (copy.storage, copy.offset)
        known = self.brought.get(weight)
        if known is not None and (not self.safe or known[0] is where[0] and known[1] == where[1]):
            return True
        self.brought[weight] = where
        return False


@pytest.mark.parametrize("safe", [False, True])
def test_a_residency_flag_that_outlives_its_buffer_shows_as_nan(safe):
    scheduler = Scheduler(simulated_machine(), transfer=Resident(safe))
    ctx = context()
    w = weight(scheduler.buffer_types[1], ctx, values(16, 16), "w")

    def product(n):
        with ctx.active():
            graph = build(ops.mul_mat(w, leaf(ctx, 16, n, name="x")).mark(Flag.OUTPUT))
        scheduler.reset()
        scheduler.set_backend(graph.nodes[0], 0)
        scheduler.alloc(graph)
        graph.leafs[-1].set(values(n, 16))
        scheduler.compute(graph)
        return np.isfinite(graph.nodes[0].numpy()).all()

    assert product(4)
    assert product(400) == safe  # a larger batch took other memory: fresh memory is 0xFF, and that is no number


def test_experts_of_the_first_layers_on_the_host_relieve_only_the_first_device():
    def used(overrides):
        machine = simulated_machine(2)
        with small_model(block_count=8) as model, place_weights(model, machine, 8, overrides):
            return [b.buffer_type.used for b in machine[:2]]

    everything, four = used(None), used({r"blk\.[0-3]\..*_exps": "CPU"})
    assert four[0] < everything[0] / 2 and four[1] == everything[1]
