"""Running graphs: the order prepare, set, run; reuse; and a steady state that takes no memory."""

import gc
import tracemalloc

import numpy as np
import pytest

from tests.devices.every_op import MAKERS, graph_of, moe_layer, values
from workbench import Context, Flag, build, ops
from workbench.devices import CpuBackend
from workbench.errors import ContextClosed, NoDataError
from workbench.execution import GraphRunner, compute


def _described(n=8, t=4):
    """A graph whose context has no data: (context, input, output, graph)."""
    ctx = Context(no_alloc=True, name="compute")
    with ctx.active():
        x = ctx.new_tensor("f32", n, t, name="x").mark(Flag.INPUT)
        y = ops.rms_norm(ops.sqr(x), 1e-6).mark(Flag.OUTPUT)
    return ctx, x, y, build(y)


# ---- one call


def test_compute_needs_only_a_graph_with_data():
    with Context() as ctx:
        a = ctx.from_numpy(np.arange(4, dtype=np.float32))
        y = ops.add(a, a)
        assert compute(build(y)) is None
        assert list(y.numpy()) == [0, 2, 4, 6]


def test_compute_gives_memory_to_nodes_but_never_to_inputs():
    data, described = Context(), Context(no_alloc=True)
    a = data.from_numpy(np.arange(4, dtype=np.float32))
    with described.active():
        y = ops.neg(a)
        compute(build(y))
        assert list(y.numpy()) == [0, -1, -2, -3]
        x = described.new_tensor("f32", 4, name="x")
        graph = build(ops.neg(x))
        with pytest.raises(NoDataError, match=r"leaf 'x' has no data\n.*\n.*prepare\(graph\), then x.set"):
            compute(graph)
        assert x.storage is None


def test_compute_uses_the_backend_it_is_given_and_leaves_it_open():
    cpu = CpuBackend(2, activation_rounding="ggml")
    with Context() as ctx:
        w = ctx.new_tensor("f16", 2, 1).set([[1.0, 1.0]])
        y = ops.mul_mat(w, ctx.from_numpy(np.array([[1.0001, 2.0]], np.float32)))
        compute(build(y), cpu)
        assert y.numpy().item() == 3.0  # 1.0001 is 1 in f16
        compute(build(y), n_threads=2)
        assert y.numpy().item() == pytest.approx(3.0001)


# ---- prepare, set, run


def test_prepare_set_run():
    _, x, y, graph = _described()
    runner = GraphRunner()
    runner.prepare(graph)
    assert np.isnan(x.numpy()).all(), "an input that nobody wrote must not look like data"
    x.set(values(8, 4))
    runner.run(graph)
    square = values(8, 4) ** 2
    assert np.allclose(y.numpy(), square / np.sqrt((square**2).mean(-1, keepdims=True) + 1e-6), rtol=1e-6)


def test_the_wrong_orders_are_errors_that_say_the_right_one():
    _, x, _, graph = _described()
    with pytest.raises(NoDataError, match="'x'"):
        x.set(values(8, 4))
    with pytest.raises(NoDataError, match=r"runner.prepare\(graph\), then x.set\(values\), then runner.run\(graph\)"):
        GraphRunner().run(graph)


def test_a_forgotten_input_gives_nan():
    _, _, y, graph = _described()
    runner = GraphRunner()
    runner.prepare(graph)
    runner.run(graph)
    assert np.isnan(y.numpy()).all()


def test_forgotten_row_numbers_are_an_error():
    with Context(no_alloc=True).active() as ctx:
        table, rows = ctx.new_tensor("f32", 4, 3).mark(Flag.INPUT), ctx.new_tensor("i32", 2, name="rows").mark(Flag.INPUT)
        graph = build(ops.get_rows(table, rows))
        runner = GraphRunner()
        runner.prepare(graph)
        table.set(values(4, 3))
        with pytest.raises(ValueError, match="'rows'"):
            runner.run(graph)


# ---- reuse


def test_the_same_graph_again_rebuilds_nothing():
    _, x, y, graph = _described()
    runner = GraphRunner()
    for i in range(5):
        assert runner.prepare(graph) is runner.prepare(graph)
        x.set(values(8, 4, seed=i))
        runner.run(graph)
    assert (runner.n_plans, runner.n_reallocations, runner.allocator.n_reserved) == (1, 1, 1)


def test_a_grown_graph_is_planned_anew():
    with Context() as ctx:
        a = ctx.from_numpy(np.ones(4, np.float32))
        graph = build(ops.neg(a))
        runner = GraphRunner()
        runner.run(graph)
        z = ops.scale(graph.nodes[-1], 3.0)
        graph.build_forward_expand(z)
        runner.run(graph)
        assert runner.n_plans == 2 and list(z.numpy()) == [-3] * 4


def test_graphs_take_turns_and_a_larger_one_moves_the_smaller():
    runner = GraphRunner()
    cases = [_described(t=t) for t in (2, 64, 4)]
    for turn in range(3):
        for _, x, y, graph in cases:
            runner.prepare(graph)
            x.set(values(*x.ne[:2], seed=turn))
            runner.run(graph)
            square = values(*x.ne[:2], seed=turn) ** 2
            assert np.allclose(y.numpy(), square / np.sqrt((square**2).mean(-1, keepdims=True) + 1e-6), rtol=1e-6)
    assert runner.n_reallocations == 2 and runner.n_plans == 4  # the first graph lost its memory to the second, once


def test_running_after_a_larger_graph_took_the_memory_is_an_error():
    (_, x, _, small), (*_, large) = _described(t=2), _described(t=64)
    runner = GraphRunner()
    runner.prepare(small)
    x.set(values(8, 2))
    runner.prepare(large)
    with pytest.raises(NoDataError, match="'x' has no data any more"):
        runner.run(small)


def test_inputs_placed_elsewhere_are_followed():
    ctx, x, y, graph = _described()
    runner = GraphRunner()
    runner.prepare(graph)
    x.place(runner.backend.buffer_type.alloc_buffer(x.nbytes))
    x.set(np.full((4, 8), 2.0))
    runner.run(graph)
    assert runner.n_plans == 2 and np.allclose(y.numpy(), 1)


def test_a_closed_context_is_an_error_even_for_a_graph_that_ran():
    ctx, x, y, graph = _described()
    runner = GraphRunner()
    runner.prepare(graph)
    x.set(values(8, 4))
    runner.run(graph)
    ctx.close()
    with pytest.raises(ContextClosed, match=r"'x'.*'compute'"):
        runner.run(graph)


def test_forgotten_graphs_leave_no_plans():
    runner = GraphRunner()
    for _ in range(3):
        ctx, x, y, graph = _described()
        runner.prepare(graph)
    del ctx, x, y, graph
    gc.collect()
    assert len(runner._plans) == 0


def test_memory_report():
    _, out, graph = graph_of(MAKERS["MUL_MAT q8_0"], 64, 5)
    with Context(no_alloc=True).active():
        graph = build(ops.neg(out))
    runner = GraphRunner(CpuBackend(dequant_cache_bytes=2**20))
    runner.run(graph)
    report = runner.memory_report()
    assert report["compute buffers"] == runner.allocator.buffer_size() == out.nbytes
    assert report["dequantised weights"] == 64 * 128 * 4 and report["work buffer"] > 0
    runner.close()
    assert runner.memory_report()["compute buffers"] == 0


# ---- a steady state grows nothing


def _traced_peak(run):
    run()
    tracemalloc.start()
    try:
        run()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        run()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("size", [(32, 3), (256, 70), (512, 600)], ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_a_run_takes_no_memory(name, size, n_threads):
    """DESIGN's bound: 64 KB, and 64 bytes for each routed (token, expert)."""
    n, t = size
    _, _, graph = graph_of(MAKERS[name], n, t, mem_size=2**28)
    cpu = CpuBackend(n_threads)
    runner = GraphRunner(cpu)
    routed = 2 * t if name.startswith("MUL_MAT_ID") else 0
    assert _traced_peak(lambda: runner.run(graph)) <= 64 * 1024 + 64 * routed
    cpu.close()


@pytest.mark.parametrize("rounding", ["none", "ggml"])
@pytest.mark.parametrize("cache", [0, 2**26])
@pytest.mark.parametrize("t", [1, 64, 500])
def test_an_expert_layer_takes_no_memory(t, cache, rounding):
    _, _, graph = graph_of(moe_layer, 256, t)
    runner = GraphRunner(CpuBackend(dequant_cache_bytes=cache, activation_rounding=rounding))
    assert _traced_peak(lambda: runner.run(graph)) <= 64 * 1024 + 64 * 2 * t


def test_a_view_that_is_an_output_keeps_its_memory():
    with Context(1 << 20, no_alloc=True) as ctx:
        x = ctx.new_tensor("f32", 8, name="x")
        kept = ops.reshape(ops.sqr(x), 4, 2).mark(Flag.OUTPUT)
        assert kept.root().flags & Flag.OUTPUT
        y = kept
        for _ in range(5):
            y = ops.neg(ops.cont(y))
        runner, graph = GraphRunner(), build(kept, y)
        runner.prepare(graph)
        x.set(np.arange(8))
        runner.run(graph)
        assert np.array_equal(kept.numpy().ravel(), np.arange(8) ** 2)
