"""Plans: what they check, how they cut work, and that every number of threads gives the same bits."""

import numpy as np
import pytest

from tests.devices.every_op import MAKERS, graph_of, moe_layer
from workbench import OPS, CGraph, Context, Flag, build, ops
from workbench.devices import HOST_MEMORY, CpuBackend, cut
from workbench.devices import plan as planning
from workbench.devices.threads import SINGLE_THREADED_BLAS
from workbench.errors import ContextClosed, GraphError, NoDataError, StorageError
from workbench.kernels.kernel import Kernel


@pytest.fixture
def ctx():
    with Context(2**24, name="here") as c:
        yield c


def test_a_graph_is_computed(ctx):
    a, b = ctx.from_numpy(np.arange(6, dtype=np.float32).reshape(2, 3)), ctx.from_numpy(np.ones((2, 3), np.float32))
    y = ops.scale(ops.add(a, b), 2.0)
    CpuBackend().compute(build(y))
    assert (y.numpy() == 2 * (a.numpy() + 1)).all()


def test_a_smaller_operand_is_repeated_as_ggml_does(ctx):
    a, b = ctx.from_numpy(np.zeros((3, 8), np.float32)), ctx.from_numpy(np.arange(4, dtype=np.float32))
    y = ops.add(a, b)
    CpuBackend().compute(build(y))
    assert (y.numpy() == np.tile(np.arange(4), (3, 2))).all()


def test_views_and_nodes_only_ordered_need_no_work(ctx):
    a = ctx.from_numpy(np.ones((4, 4), np.float32))
    wanted, ordered = ops.cont(ops.transpose(a)), ops.sqr(a)
    graph = build(wanted).build_forward_expand(ordered, compute=False)
    plan = CpuBackend().plan(graph)
    assert [graph.nodes[job.at].desc for job in plan.jobs] == ["CONT"]
    assert [plan.n_tasks(i) for i in range(len(graph.nodes))] == [0, 1, 0]


def test_infinities_are_results_not_warnings(ctx):
    y = ops.log(ctx.from_numpy(np.zeros(4, np.float32)))
    CpuBackend().compute(build(y))
    assert np.isneginf(y.numpy()).all()


# ---- what must not be computed


def test_no_data_is_an_error_that_names_the_tensor():
    with Context(no_alloc=True, name="described") as ctx:
        x = ctx.new_tensor("f32", 4, name="tokens")
        with pytest.raises(NoDataError, match="'tokens' has no data"):
            CpuBackend().plan(build(ops.neg(x)))


@pytest.mark.parametrize("when", ["before the plan", "before the run"])
def test_a_closed_context_is_named_with_the_tensor(when):
    weights, work = Context(name="weights"), Context(name="work")
    w = weights.from_numpy(np.ones(4, np.float32), name="norm.weight")
    with work.active():
        graph = build(ops.mul(work.from_numpy(np.ones(4, np.float32)), w))
    plan = None if when == "before the plan" else CpuBackend().plan(graph)
    weights.close()
    with pytest.raises(ContextClosed, match=r"'norm.weight'.*'weights'"):
        plan.run() if plan else CpuBackend().plan(graph)


def test_a_graph_ends_with_its_own_context(ctx):
    home = Context(name="graphs")
    graph = CGraph(home).build_forward_expand(ops.neg(ctx.from_numpy(np.ones(4, np.float32))))
    plan = CpuBackend().plan(graph)
    home.close()
    with pytest.raises(ContextClosed, match="'graphs'"):
        plan.run()


def test_a_reset_context_ends_its_tensors():
    ctx = Context()
    with ctx.active():
        graph = build(ops.neg(ctx.from_numpy(np.ones(4, np.float32))))
    plan = CpuBackend().plan(graph)
    ctx.reset()
    with pytest.raises(ContextClosed):
        plan.run()


def test_moved_and_freed_memory_is_noticed():
    with Context(no_alloc=True) as ctx:
        x = ctx.new_tensor("f32", 4, name="x")
        y = ops.neg(x)
        first, second, other = (HOST_MEMORY.alloc_buffer(64) for _ in range(3))
        x.place(first)
        y.place(other)
        plan = CpuBackend().plan(build(y))
        x.set([1, 2, 3, 4])
        plan.run()
        assert list(y.numpy()) == [-1, -2, -3, -4]
        x.place(second)
        with pytest.raises(GraphError, match="other memory"):
            plan.run()
        x.place(first)
        plan.run()
        first.close()
        with pytest.raises(StorageError, match="'x'"):
            plan.run()


# ---- cutting


def test_parts_are_multiples_of_64_and_cover_everything():
    for name, make in MAKERS.items():
        _, _, graph = graph_of(make, 256, 700)
        for job in CpuBackend(n_threads=3).plan(graph).jobs:
            assert [p.start for p in job.parts[1:]] == [p.stop for p in job.parts[:-1]], name
            assert job.parts[0].start == 0 and job.parts[-1].stop == job.out.shape[job.axis], name
            assert all(p.start % 64 == 0 for p in job.parts), name
            assert cut(job.node) == (job.axis, job.parts), name


def test_a_lower_limit_cuts_finer_and_a_higher_one_not_at_all_without_memory():
    with Context(no_alloc=True) as ctx:
        w, x = ctx.new_tensor("f32", 512, 2048), ctx.new_tensor("f32", 512, 4)
        for node, counts in ((ops.mul_mat(w, x), [1, 8, 1]), (ops.silu(ctx.new_tensor("f32", 2048, 512)), [16, 16, 1])):
            assert [len(cut(node, ns)[1]) for ns in (None, 1000, 10**9)] == counts


@pytest.mark.parametrize("name", MAKERS)
def test_the_cut_depends_on_the_shape_alone_and_so_do_the_bits(name):
    _, out, graph = graph_of(MAKERS[name], 256, 700)
    results, cuts = [], []
    for n_threads in (1, 2, 3, 4):
        cpu = CpuBackend(n_threads)
        plan = cpu.plan(graph)
        out.raw_rows()[...] = 0xFF if not out.is_view else out.raw_rows()
        plan.run()
        results.append(out.raw_rows().tobytes())
        cuts.append([job.parts for job in plan.jobs])
        cpu.close()
    assert results == results[:1] * 4 and cuts == cuts[:1] * 4


def test_every_op_of_the_table_is_tried_and_the_large_ones_are_cut():
    tried = {name.split()[0] for name in MAKERS}
    assert tried == {name for name, spec in OPS.items() if spec.kernel}
    for name, make in MAKERS.items():
        _, out, graph = graph_of(make, 256, 1600)
        if out.spec.kernel.cut:
            assert CpuBackend().plan(graph).n_tasks(len(graph.nodes) - 1) > 1, name


@pytest.mark.parametrize("name", [n for n in MAKERS if OPS[n.split()[0]].kernel.cut in ("elements", "rows")])
def test_cutting_elements_or_rows_changes_no_bit(name, monkeypatch):
    _, out, graph = graph_of(MAKERS[name], 256, 700)
    cpu = CpuBackend()
    cpu.compute(graph)
    cut = out.raw_rows().tobytes()
    monkeypatch.setattr(planning, "MAX_TASKS", 1)
    cpu.compute(graph)
    assert out.raw_rows().tobytes() == cut


@pytest.mark.parametrize("t", [1, 32, 300])
def test_an_expert_layer_has_the_same_bits_on_any_number_of_threads(t):
    _, out, graph = graph_of(moe_layer, 256, t)
    results = []
    for n_threads in (1, 2, 3, 4):
        CpuBackend(n_threads, dequant_cache_bytes=2**20 * n_threads).compute(graph)
        results.append(out.numpy().tobytes())
    assert results == results[:1] * 4


def test_threads_share_one_work_buffer_of_their_number():
    _, _, graph = graph_of(MAKERS["MUL_MAT f16"], 256, 700)
    sizes = {n: CpuBackend(n).plan(graph).work_size for n in (1, 2)}
    assert sizes[2] == 2 * sizes[1] > 0


def test_table_and_counts(ctx):
    y = ops.mul_mat(ctx.from_numpy(np.ones((5, 3), np.float32)), ctx.from_numpy(np.ones((2, 3), np.float32))).named("y")
    (row,) = CpuBackend().plan(build(y)).table()
    assert (row.node, row.op, row.tasks) == ("y", "MUL_MAT", 1)
    assert row.flops == 2 * 3 * 5 * 2 and row.moved == 4 * (15 + 6 + 10)


# ---- recording and failing


class Times(list):
    def node(self, i, start, end):
        self.append((i, start, end))


def test_recording_tells_every_node_once_in_order(ctx):
    x = ctx.from_numpy(np.ones(4, np.float32))
    graph = build(ops.cont(ops.transpose(ops.sqr(x))))
    times = Times()
    CpuBackend().plan(graph).run(times)
    assert [i for i, _, _ in times] == [0, 2]
    assert all(start <= end for _, start, end in times) and times[0][2] <= times[1][1]


def _failing(error, calls):
    def fn(xp, a, *, out, unary):
        calls.append(1)
        if len(calls) == 3:
            raise error
        out[...] = a

    return Kernel(fn, cut="rows")


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("error", [ZeroDivisionError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("record", [None, Times()])
def test_after_a_failure_the_node_is_named_and_all_can_be_used_again(monkeypatch, n_threads, error, record):
    _, out, graph = graph_of(MAKERS["NEG"], 512, 2000)
    calls = []
    monkeypatch.setattr(OPS["NEG"], "kernel", _failing(error, calls))
    cpu = CpuBackend(n_threads)
    plan = cpu.plan(graph)
    assert plan.n_tasks(0) > 3
    before = _blas_threads()
    with pytest.raises(type(error)) as caught:
        plan.run(record)
    assert any("computed node 0: 'node_0' = NEG" in note for note in caught.value.__notes__)
    assert _blas_threads() == before
    plan.run(record)
    assert (out.numpy() == graph.leafs[0].numpy()).all()
    cpu.close()


# ---- BLAS


def _blas_threads():
    return [lib.num_threads for lib in SINGLE_THREADED_BLAS.controller().lib_controllers]


def test_blas_has_one_thread_inside_a_run_and_its_own_number_outside(ctx):
    y = ops.mul_mat(ctx.from_numpy(np.ones((8, 8), np.float32)), ctx.from_numpy(np.ones((8, 8), np.float32)))
    plan = CpuBackend().plan(build(y))
    seen = []
    with SINGLE_THREADED_BLAS.controller().limit(limits=2):
        outside = _blas_threads()
        plan.run(type("Look", (), {"node": lambda self, *_: seen.append(_blas_threads())})())
        assert _blas_threads() == outside
    assert seen == [[1] * len(outside)]


@pytest.mark.parametrize("name", ["MUL_MAT", "MUL_MAT_ID", "OUT_PROD", "MUL_MAT_ID_BACK", "OUT_PROD_ID"])
def test_every_op_that_calls_blas_is_known_to_do_so(name):
    _, _, graph = graph_of(MAKERS[name], 64, 5)
    plan = CpuBackend().plan(graph)
    assert plan._blas is SINGLE_THREADED_BLAS


def test_nested_limits_are_restored_by_the_last_one():
    with SINGLE_THREADED_BLAS.controller().limit(limits=2):
        outside = _blas_threads()
        with SINGLE_THREADED_BLAS:
            with SINGLE_THREADED_BLAS:
                pass
            assert set(_blas_threads()) <= {1}
        assert _blas_threads() == outside


def test_an_interrupt_on_the_way_in_leaves_no_run_with_several_threads(monkeypatch):
    with SINGLE_THREADED_BLAS.controller().limit(limits=2):
        outside = _blas_threads()
        with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
            m.setattr(SINGLE_THREADED_BLAS.controller(), "limit", lambda **_: (_ for _ in ()).throw(KeyboardInterrupt))
            SINGLE_THREADED_BLAS.__enter__()
        with SINGLE_THREADED_BLAS:
            assert set(_blas_threads()) <= {1}
        assert _blas_threads() == outside


def test_an_input_may_be_shared_by_plans_of_one_backend(ctx):
    """Two plans use the same work buffer; the larger one does not spoil the smaller one's scratch."""
    cpu = CpuBackend(2)
    x = ctx.from_numpy(np.linspace(-3, 3, 64, dtype=np.float32))
    small, big = ops.silu(x), ops.silu(ctx.from_numpy(np.linspace(-3, 3, 2**16, dtype=np.float32)))
    first = cpu.plan(build(small.mark(Flag.OUTPUT)))
    second = cpu.plan(build(big))
    first.run()
    expected = small.numpy().copy()
    second.run()
    first.run()
    assert (small.numpy() == expected).all() and np.allclose(expected, x.numpy() / (1 + np.exp(-x.numpy())), atol=1e-6)
