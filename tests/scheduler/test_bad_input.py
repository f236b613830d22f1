"""What goes wrong says what, where and what to change, and leaves the scheduler usable."""

import threading

import numpy as np
import pytest

from tests.scheduler.graphs import chain_of_adds, context, filled, leaf, moe, values, weight
from workbench import CpuBackend, Flag, Scheduler, Usage, build, ops, simulated_machine
from workbench.devices.backend import DeviceType
from workbench.devices.simulated import SimulatedDevice
from workbench.errors import (
    AllocationError,
    ContextClosed,
    GraphError,
    GraphFull,
    ParameterError,
    StorageError,
    UnsupportedOp,
    WorkbenchError,
)
from workbench.kernels.kernel import IndexOutOfRange


def works(scheduler):
    """The scheduler computes a graph that needs copies, and gets it right."""
    graph = chain_of_adds(3)
    scheduler.reset()
    scheduler.set_backend(graph.nodes[1], 0)
    scheduler.alloc(graph)
    for t in graph.leafs:
        t.set([1, 2, 3, 4])
    scheduler.compute(graph)
    assert scheduler.backends[0].machine.n_pending == 0
    return graph.nodes[-1].numpy().tolist() == [4, 8, 12, 16]


def test_an_op_that_no_backend_supports():
    gpu, cpu = simulated_machine(deny_ops=["SOFT_MAX"])
    bare = SimulatedDevice(gpu.machine, "CPU", cpu.buffer_type, DeviceType.CPU, deny_ops=["SOFT_MAX"])
    scheduler = Scheduler([gpu, bare])
    ctx = context()
    with ctx.active():
        graph = build(ops.soft_max(leaf(ctx, 4)).named("probs"))
    with pytest.raises(UnsupportedOp, match=r"no backend supports 'probs' = SOFT_MAX\n.*\n.*GPU: GPU is made without SOFT_MAX; CPU: CPU is"):
        scheduler.compute(graph)
    assert scheduler.graph is None and works(scheduler)


def test_a_result_placed_where_nothing_can_compute_it():
    scheduler = Scheduler(simulated_machine(deny_ops=["CPY"]))
    ctx = context()
    cache = weight(scheduler.buffer_types[0], ctx, values(2, 4), "cache")
    with ctx.active():
        graph = build(ops.cpy(leaf(ctx, 4, 2), cache).named("kept"))
    with pytest.raises(UnsupportedOp, match=r"'kept' lies in GPU, where no backend can compute CPY\n.*\n.*place it where"):
        scheduler.alloc(graph)
    assert works(scheduler)


def test_writers_without_a_common_backend():
    scheduler = Scheduler(simulated_machine(deny_ops=["SET_ROWS", "SQR"]))
    gpu, cpu = scheduler.backends
    cpu.deny_ops = frozenset(["CPY", "SQR", "NEG"])
    ctx = context()
    with ctx.active():
        table = ops.scale(leaf(ctx, 4, 2, name="x"), 2).named("table")
        a = ops.cpy(leaf(ctx, 4, 2, name="y"), table)
        b = ops.set_rows(table, leaf(ctx, 4, 1), leaf(ctx, 1, kind="i64"))
        graph = build(a, b)
    with pytest.raises(UnsupportedOp, match="'table' is written by .*no backend can compute all of that"):
        scheduler.split(graph)
    cpu.deny_ops = frozenset()
    assert works(scheduler)


def test_too_little_memory_when_planned_and_later():
    scheduler = Scheduler(simulated_machine(memory=20_000))
    gpu = scheduler.buffer_types[0]

    def product(n):
        ctx = context()
        w = weight(gpu, ctx, values(16, 16))
        with ctx.active():
            x = leaf(ctx, 16, n, name="x")
            return build(ops.mul_mat(w, ops.neg(x)).mark(Flag.OUTPUT)), w.storage

    large, w1 = product(1000)
    for step in (scheduler.reserve, scheduler.alloc, scheduler.compute):
        with pytest.raises(AllocationError, match=r"the graph needs .* bytes of GPU .*has 18,976 of 20,000 bytes left\n.*\n.*smaller batch"):
            step(large)
    assert not scheduler.is_allocated and gpu.used == w1.size
    small, _ = product(4)
    filled(scheduler, small, x=values(4, 16))
    with pytest.raises(AllocationError):  # a larger batch comes in the middle of things; what was there is gone
        filled(scheduler, large, x=values(1000, 16))
    filled(scheduler, small, x=values(4, 16))
    assert np.isfinite(small.nodes[-1].numpy()).all() and works(scheduler)
    assert Scheduler(simulated_machine(memory=20_000)).measure(large)[0] > 100_000


@pytest.mark.parametrize("wrong", [8, -1])
def test_ids_out_of_range(wrong):
    scheduler = Scheduler(simulated_machine(offload_min_batch=1))
    graph, x, ids, y, _ = moe(context(), scheduler.buffer_types[1])
    scheduler.alloc(graph)
    x.set(values(3, 1, 16))
    ids.set([[0, 1], [2, 3], [4, wrong]])
    with pytest.raises(ParameterError, match=rf"'ids' names expert {wrong}\n.*0 to 7: experts has 8"):
        scheduler.compute(graph)
    ids.set([[0, 1], [2, 3], [4, 5]])
    scheduler.compute(graph)  # it is still allocated
    assert np.isfinite(y.numpy()).all() and works(scheduler)


def test_rows_out_of_range_found_by_the_device():
    scheduler = Scheduler(simulated_machine())
    ctx = context()
    table = weight(scheduler.buffer_types[0], ctx, values(10, 4), "table")
    with ctx.active():
        rows = leaf(ctx, 2, kind="i32", name="rows")
        graph = build(ops.neg(ops.get_rows(table, rows)).mark(Flag.OUTPUT))
    scheduler.alloc(graph)
    rows.set([3, 10])
    with pytest.raises(IndexOutOfRange, match="row 10 .*'rows'"):
        scheduler.compute(graph)
    assert scheduler.backends[0].machine.n_pending == 0
    rows.set([3, 9])
    scheduler.compute(graph)
    assert np.array_equal(graph.nodes[-1].numpy(), -table.numpy()[[3, 9]]) and works(scheduler)


def test_a_graph_larger_than_the_scheduler():
    scheduler = Scheduler(simulated_machine(), graph_size=5)
    with pytest.raises(GraphFull, match=r"7 leafs\n.*at most 5.*\n.*graph_size"):
        scheduler.alloc(chain_of_adds(6))
    assert works(scheduler)


def test_a_closed_context():
    scheduler = Scheduler(simulated_machine())
    graph = chain_of_adds(3)
    filled(scheduler, graph, x=[1, 2, 3, 4])
    graph.nodes[0].context.close()
    with pytest.raises(ContextClosed, match="context 'graph' was closed"):
        scheduler.compute(graph)
    scheduler.reset()
    for step in (scheduler.alloc, scheduler.reserve, scheduler.split):
        with pytest.raises(ContextClosed, match="context 'graph' was closed"):
            step(graph)
    assert works(scheduler)


def test_assignments_that_could_only_give_garbage():
    scheduler = Scheduler(simulated_machine(deny_ops=["SQR"]))
    ctx = context()
    w = weight(scheduler.buffer_types[1], ctx, values(4, 4), "w")
    with ctx.active():
        x = leaf(ctx, 4, 4, name="x")
        view, square = ops.transpose(x), ops.sqr(x)
    with pytest.raises(ParameterError, match=r"is a view and has no computation\n.*\n.*assign 'x'"):
        scheduler.set_backend(view, 0)
    with pytest.raises(UnsupportedOp, match=r"GPU cannot compute .*SQR\n.*\n.*made without SQR"):
        scheduler.set_backend(square, 0)
    with pytest.raises(UnsupportedOp, match="'w' lies in CPU, which GPU does not work on"):
        scheduler.set_backend(w, 0)
    for nobody in (2, -1, CpuBackend()):
        with pytest.raises(ParameterError, match="0: GPU, 1: CPU"):
            scheduler.set_backend(square, nobody)
    assert scheduler.is_reset and works(scheduler)


def test_an_assignment_by_hand_survives_without_a_call_of_alloc():
    scheduler, graph = Scheduler(simulated_machine()), chain_of_adds(1)
    scheduler.set_backend(graph.nodes[0], 0)
    scheduler.compute(graph)  # ggml resets here, and the assignment is lost
    assert scheduler.backend_of(graph.nodes[0]).name == "GPU"


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda m: Scheduler([]), "a CPU as the last"),
        (lambda m: Scheduler(m[:1]), "a CPU as the last"),
        (lambda m: Scheduler(m, [m[0].buffer_type]), "one for each of 2"),
        (lambda m: Scheduler(m, [m[1].buffer_type] * 2), "memory that the backend works on"),
        (lambda m: Scheduler(m, graph_size=0), "1 or more"),
        (lambda m: Scheduler(m, quirks="none"), "'ggml'"),
    ],
)
def test_schedulers_that_cannot_be(make, expected):
    with pytest.raises(ParameterError, match=expected):
        make(simulated_machine())


def test_a_backend_that_reorders_a_split_wrongly():
    def backwards(nodes, keep):
        return nodes[::-1]

    scheduler = Scheduler(simulated_machine(optimizer=backwards))
    graph = chain_of_adds(3)
    for node in graph.nodes:
        scheduler.set_backend(node, 0)
    with pytest.raises(GraphError, match="GPU puts 'node_2' before 'node_1', which it reads"):
        scheduler.alloc(graph)
    scheduler.backends[0].optimizer = lambda nodes, keep: nodes[1:]
    with pytest.raises(GraphError, match="made 2 nodes of the 3"):
        scheduler.alloc(graph)
    scheduler.backends[0].optimizer = lambda nodes, keep: keep(nodes[0], graph.leafs[0]) or nodes
    with pytest.raises(GraphError, match="kept until 'x'"):
        scheduler.alloc(graph)
    scheduler.backends[0].optimizer = None
    assert works(scheduler)


# ---- devices that fail


def failing(scheduler, hook, owner, n):
    setattr(owner(scheduler), hook, n)
    graph, x, ids, y, _ = moe(context(), scheduler.buffer_types[-1], t=4)
    scheduler.reset()
    scheduler.set_backend(y, 0)
    scheduler.alloc(graph)
    x.set(values(4, 1, 16))
    ids.set([[0, 1], [3, 4], [6, 7], [0, 6]])
    scheduler.compute(graph)
    return y.numpy()


@pytest.mark.parametrize("hook, owner, n, ability", [
    ("fail_allocation", lambda s: s.buffer_types[0], 1, {}), ("fail_allocation", lambda s: s.buffer_types[-1], 2, {}),
    ("fail_copy", lambda s: s.backends[0], 1, {}), ("fail_copy", lambda s: s.backends[0], 2, {}),
    ("fail_copy", lambda s: s.buffer_types[0], 1, {}), ("fail_copy", lambda s: s.buffer_types[0], 2, {"async_io": False}),
    ("fail_compute", lambda s: s.backends[0], 1, {}),
])  # fmt: skip
def test_a_device_fails_once(hook, owner, n, ability):
    healthy = failing(Scheduler(simulated_machine()), "nothing", lambda s: s, 0)
    scheduler = Scheduler(simulated_machine(**ability))
    with pytest.raises((AllocationError, StorageError), match="was made to fail"):
        failing(scheduler, hook, owner, n)
    assert getattr(owner(scheduler), hook) == 0 and scheduler.backends[0].machine.n_pending == 0
    assert np.array_equal(failing(scheduler, hook, owner, 0), healthy) and works(scheduler)


def test_a_run_that_failed_can_be_run_again():
    scheduler = Scheduler(simulated_machine(2))
    ctx = context()
    ws = [weight(scheduler.buffer_types[i], ctx, values(8, 8)) for i in range(2)]
    with ctx.active():
        x = leaf(ctx, 8, 2, name="x")
        graph = build(ops.mul_mat(ws[1], ops.mul_mat(ws[0], x)).mark(Flag.OUTPUT))
    filled(scheduler, graph, x=values(2, 8))
    want = graph.nodes[-1].numpy()
    for n in (1, 2, 3):
        for device in scheduler.backends[:2]:
            device.fail_compute = 1 if n % 2 else 0
            device.fail_copy = n // 2
        with pytest.raises(WorkbenchError):
            scheduler.compute(graph)
        for device in scheduler.backends[:2]:
            device.fail_compute = device.fail_copy = 0
        x.set(values(2, 8))
        scheduler.compute(graph)
        assert np.array_equal(graph.nodes[-1].numpy(), want)


def test_weights_in_a_buffer_that_was_freed():
    scheduler = Scheduler(simulated_machine())
    graph, x, ids, _, w = moe(context(), scheduler.buffer_types[1])
    filled(scheduler, graph, ids=np.zeros((3, 2), np.int32))
    w.storage.close()
    with pytest.raises(StorageError, match="'experts' lies in CPU, which was freed"):
        scheduler.compute(graph)
    assert w.storage.usage is Usage.WEIGHTS and works(scheduler)


@pytest.mark.parametrize(("call", "expected"), [
    (lambda s, graph: s.alloc(None), "a NoneType\n.*a graph\n.*build"),
    (lambda s, graph: s.compute(graph.nodes[0]), "a Tensor\n.*a graph\n.*build"),
    (lambda s, graph: s.set_backend("node_0", 0), "'node_0' to be assigned\n.*a tensor\n.*graph.find"),
    (lambda s, graph: s.set_backend(graph.nodes[0], True), "backend True"),
    (lambda s, graph: Scheduler("GPU"), "'G' among the backends"),
])  # fmt: skip
def test_things_of_the_wrong_kind(call, expected):
    scheduler = Scheduler(simulated_machine())
    with pytest.raises(ParameterError, match=expected):
        call(scheduler, chain_of_adds(3))
    assert works(scheduler)


def test_the_same_ids_for_a_weight_with_fewer_experts():
    scheduler = Scheduler(simulated_machine(offload_min_batch=1))
    ctx = context()
    many, few = (weight(scheduler.buffer_types[-1], ctx, values(n, 8, 8), name) for n, name in ((6, "many"), (2, "few")))
    with ctx.active():
        x, ids = leaf(ctx, 8, 2, 3, name="x"), leaf(ctx, 2, 3, kind="i32", name="ids")
        graph = build(ops.mul_mat_id(few, ops.mul_mat_id(many, x, ids), ids))
    with pytest.raises(ParameterError, match="ids.* names expert 5\n.*0 to 1: few has 2 experts"):
        filled(scheduler, graph, x=values(3, 2, 8), ids=[[0, 1], [1, 0], [0, 5]])
    filled(scheduler, graph, x=values(3, 2, 8), ids=[[0, 1], [1, 0], [0, 0]])
    assert works(scheduler)


def test_threads_with_a_scheduler_each_on_the_same_devices():
    devices, wrong = simulated_machine(deny_ops=["NEG"]), []

    def work(seed):
        try:
            scheduler, ctx = Scheduler(devices), context()
            w, x = weight(devices[0].buffer_type, ctx, values(16, 16), "w"), leaf(ctx, 16, 16, name="x")
            with ctx.active():
                y = x
                for _ in range(4):
                    y = ops.neg(ops.mul_mat(w, ops.rms_norm(y)))
            graph, found = build(y.mark(Flag.OUTPUT)), set()
            for _ in range(15):
                filled(scheduler, graph, x=values(16, 16, seed=seed))
                found.add(y.numpy().tobytes())
            if len(found) != 1:
                wrong.append(seed)
        except Exception as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and devices[0].machine.n_pending == 0
