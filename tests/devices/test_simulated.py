"""Simulated devices: memory of their own that is 0xFF when fresh and when freed, work that happens when the clock reaches it."""

import numpy as np
import pytest

from tests.scheduler.graphs import context, leaf, values, weight
from workbench import (
    Context,
    CpuBackend,
    Machine,
    SimulatedDevice,
    SimulatedMemory,
    Usage,
    build,
    ops,
    simulated_machine,
)
from workbench.devices.backend import copy_tensor
from workbench.devices.cost import Speed
from workbench.errors import AllocationError, StorageError
from workbench.trace import Trace

FRESH = np.uint32(0xFFFFFFFF)


def device(**kw):
    machine = Machine()
    return SimulatedDevice(machine, "GPU", SimulatedMemory(machine, "GPU"), **kw)


def placed(memory, ctx, *ne, name="t"):
    t = ctx.new_tensor("f32", *ne, name=name)
    t.place(memory.alloc_buffer(t.nbytes))
    return t


def test_memory_is_the_devices_own():
    gpu = device()
    buffer = gpu.buffer_type.alloc_buffer(16)
    with pytest.raises(StorageError, match="memory that the host can see"):
        buffer.host_bytes()
    assert (buffer.read(0, 16).view(np.uint32) == FRESH).all()
    buffer.write(4, np.array([1, 2], np.float32))
    assert buffer.read(4, 8).view(np.float32).tolist() == [1, 2] and buffer.version == 1
    for bad in ((12, 8), (-1, 4)):
        with pytest.raises(StorageError, match="within its 16 bytes"):
            buffer.read(*bad)
    raw = buffer.device_bytes()
    buffer.close()
    assert (raw == 0xFF).all() and gpu.buffer_type.used == 0
    with pytest.raises(StorageError, match="was freed"):
        buffer.read(0, 4)
    buffer.close()
    assert gpu.buffer_type.used == 0  # once


def test_pinned_memory_is_seen_by_the_host_and_fresh_all_the_same():
    pinned = SimulatedMemory(Machine(), "pinned", is_host=True, capacity=64)
    buffer = pinned.alloc_buffer(64)
    assert (buffer.host_bytes() == 0xFF).all()
    with pytest.raises(AllocationError, match=r"1 bytes were asked of pinned, which has 0 of 64 bytes left"):
        pinned.alloc_buffer(1)
    buffer.close()
    assert pinned.used == 0 and pinned.peak == 64


def chain(gpu, n=3):
    ctx = context()
    x = placed(gpu.buffer_type, ctx, 64, name="x").set(np.ones(64))
    with ctx.active():
        y = x
        for _ in range(n):
            y = ops.scale(y, 2.0)
    for node in (graph := build(y)).nodes:
        node.place(gpu.buffer_type.alloc_buffer(node.nbytes))
    return graph


def test_work_happens_when_the_clock_reaches_its_end():
    gpu = device(speed=Speed(launch_ns=1000))
    graph = chain(gpu)
    start = gpu.machine.now
    gpu.compute_async(graph)
    assert gpu.machine.now == start and gpu.machine.n_pending == 3
    ends = []
    while gpu.machine.n_pending:
        gpu.machine.spend(500)
        ends.append([np.isfinite(n.storage.device_bytes().view(np.float32)).all() for n in graph.nodes])
    assert ends[0] == [False] * 3 and ends[2] == [True, False, False] and ends[-1] == [True] * 3  # in order, one after the other
    assert graph.nodes[-1].numpy()[0] == 8
    assert gpu.free_at == start + sum(gpu.speed.compute_ns(n) for n in graph.nodes)


def test_results_and_times_are_the_same_every_time():
    found = []
    for _ in range(2):
        gpu = device()
        graph = chain(gpu, 10)
        gpu.compute(graph)
        found.append((gpu.machine.now, graph.nodes[-1].numpy().tobytes()))
    assert found[0] == found[1]


def test_who_does_not_wait_reads_old_bytes():
    gpu = device()
    graph = chain(gpu, 2)
    out = gpu.get_async(graph.nodes[-1])
    gpu.compute_async(graph)
    late = gpu.get_async(graph.nodes[-1])
    assert (late.view(np.uint32) == FRESH).all()
    gpu.synchronize()
    assert late.view(np.float32)[0] == 4 and (out.view(np.uint32) == FRESH).all()  # the first was asked for too early


def test_host_bytes_are_read_when_the_transfer_happens():
    gpu = device()
    t = placed(gpu.buffer_type, context(), 4)
    data = np.ones(4, np.float32)
    gpu.set_async(t, data.view(np.uint8))
    data[:] = 7  # too early
    gpu.synchronize()
    assert t.numpy().tolist() == [7] * 4


def test_an_event_marks_what_was_asked_for_so_far():
    one, two = simulated_machine(2)[:2]
    graph = chain(one, 3)
    event = one.new_event("done")
    one.compute_async(graph)
    event.record()
    copy = placed(two.buffer_type, context(), 64)
    two.wait_event(event)
    assert two.copy_async(one, graph.nodes[-1], copy)
    assert one.machine.now < event.time <= two.free_at
    event.synchronize()
    assert one.machine.now == event.time and graph.nodes[-1].storage.device_bytes().view(np.float32)[0] == 8
    two.synchronize()
    assert copy.numpy()[0] == 8
    assert device(events=False).new_event("none") is None


def test_a_copy_between_devices_runs_behind_the_sources_work_and_before_the_targets():
    one, two = simulated_machine(2)[:2]
    graph, copy = chain(one), None
    copy = placed(two.buffer_type, context(), 64)
    one.compute_async(graph)
    assert two.copy_async(one, graph.nodes[-1], copy)
    two.synchronize()
    assert copy.numpy()[0] == 8
    assert not device().copy_async(CpuBackend(), graph.nodes[-1], copy) and not device(async_copy=False).copy_async(one, graph.nodes[0], copy)


@pytest.mark.parametrize("through", [True, False])
def test_blocking_copies_between_any_two_memories(through):
    machine = Machine()
    trace = machine.trace = Trace("virtual")
    kinds = [SimulatedMemory(machine, "A", copies_buffers=through), SimulatedMemory(machine, "B", copies_buffers=through),
             SimulatedMemory(machine, "H", is_host=True)]  # fmt: skip
    for a in kinds:
        for b in kinds:
            if a is not b:
                ctx = context()
                source, target = placed(a, ctx, 5).set(range(5)), placed(b, ctx, 5)
                at = len(trace)
                copy_tensor(source, target, trace)
                assert target.numpy().tolist() == [0, 1, 2, 3, 4]
                calls = [e.kind for e in trace.events[at:]]
                both_far = not a.is_host and not b.is_host
                assert calls == (["copy_buffer"] if through else ["get", "set"]) if both_far else [["set"], ["get"]][b.is_host]


def test_what_a_device_supports_and_why_not():
    gpu = device(deny_ops=["SILU", "MUL_MAT"], deny_types=["f16"])
    few = device(allow_ops=["ADD"])
    ctx = context()
    with ctx.active():
        x, h = leaf(ctx, 4, 4), leaf(ctx, 4, 4, kind="f16")
        silu, gelu, product, sum_, half, view = ops.silu(x), ops.gelu(x), ops.mul_mat(x, x), ops.add(x, x), ops.cast(h, "f32"), ops.transpose(h)
    assert [gpu.supports_op(n) for n in (silu, gelu, product, sum_, half, view)] == [False, True, False, True, False, True]
    assert [few.supports_op(n) for n in (silu, sum_, view)] == [False, True, True]
    assert gpu.why_unsupported(half) == "GPU is made without f16" and few.why_unsupported(silu) == "GPU is made for ADD only"


def test_offload_depends_on_the_batch():
    gpu = device(offload_min_batch=32)
    ctx = context()
    with ctx.active():
        w = ctx.new_tensor("f32", 8, 8)
        assert [gpu.offload_op(ops.mul_mat(w, leaf(ctx, 8, n))) for n in (31, 32)] == [False, True]
        assert not gpu.offload_op(ops.get_rows(w, leaf(ctx, 99, kind="i32"))) and not device().offload_op(ops.mul_mat(w, leaf(ctx, 8, 99)))


def test_a_machine_for_learners():
    backends = simulated_machine(2, memory=1000)
    assert [b.name for b in backends] == ["GPU0", "GPU1", "CPU"] and [b.name for b in simulated_machine(0)] == ["CPU"]
    with pytest.raises(AllocationError):
        backends[1].buffer_type.alloc_buffer(1001)
    weight(backends[0].buffer_type, context(), values(4, 4))
    assert [b.buffer_type.used for b in backends] == [64, 0, 0]


def test_cancelled_work_does_not_happen():
    one, two = simulated_machine(2)[:2]
    graphs = chain(one), chain(two)
    one.compute_async(graphs[0])
    two.compute_async(graphs[1])
    one.cancel()
    two.synchronize()
    one.synchronize()
    assert np.isnan(graphs[0].nodes[-1].numpy()).all() and graphs[1].nodes[-1].numpy()[0] == 8
    assert graphs[0].nodes[0].storage.usage is Usage.ANY


def test_a_wait_without_copies_leaves_the_copy_stream_alone():
    gpu = simulated_machine()[0]
    with Context(no_alloc=True) as ctx:
        t = ctx.new_tensor("i8", 2**20)
        t.place(gpu.buffer_type.alloc_buffer(t.nbytes))
        done = gpu.prefetch(t, np.ones(2**20, np.uint8))
        gpu.synchronize(copies=False)
        assert gpu.machine.n_pending == 1 and not done.done and set(t.storage.device_bytes()) == {0xFF}
        gpu.synchronize()
        assert gpu.machine.n_pending == 0 and done.done and set(t.storage.device_bytes()) == {1}
