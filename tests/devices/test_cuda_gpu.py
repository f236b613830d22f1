"""The CUDA backend on a card; skipped, with the reason, where there is none. Times: `python -m benchmarks cuda`."""

import random

import numpy as np
import pytest

from benchmarks import bench_cuda, peers
from tests.devices.every_op import MAKERS
from tests.devices.test_cuda import on
from tests.parity.__main__ import main
from tests.scheduler import random_runs
from workbench import Context, CpuBackend, CudaBackend, Flag, Scheduler, Session, build, load, ops, place_weights
from workbench.devices.cuda import why_not
from workbench.errors import AllocationError
from workbench.execution import GraphRunner
from workbench.trace import Trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why := why_not()), reason=why or "there is a card")]


def test_goldens_of_all_ops(data, capsys):
    assert main(["ops", str(data / "goldens" / "ops"), "--device", "cuda"]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("grain", [1, 128])
@pytest.mark.parametrize("name", MAKERS)
def test_every_op_agrees_with_the_cpu(name, grain):
    want = on(CpuBackend, MAKERS[name], 64, 5)
    np.testing.assert_allclose(on(lambda: CudaBackend(grain=grain), MAKERS[name], 64, 5), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"n_gpu_layers": 1}, {"overrides": {"_exps": "CPU"}}], ids=["all", "one layer", "experts on the host"])
@pytest.mark.parametrize("name", ["tiny-mixtral-f16", "tiny-mixtral-q8_0", "tiny-mixtral-q4_0", "tiny-deepseek-f16"])
def test_logits_of_shipped_models(name, options):
    tokens = list(np.random.default_rng(0).integers(0, 1000, 40))
    with load(name) as model:
        with Session(model, n_ctx=256) as session:
            want = session.decode(tokens, outputs="all"), session.decode([9])
        backends = [CudaBackend(), CpuBackend()]
        with place_weights(model, backends, **options) as placed, Session(placed, n_ctx=256, scheduler=Scheduler(backends)) as session:
            got = session.decode(tokens, outputs="all"), session.decode([9])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_on_cuda_and_cpu(seed):
    r = random.Random(seed)
    scheduler = Scheduler([CudaBackend(offload_min_batch=r.choice([1, 4])), CpuBackend()], parallel=seed % 2 == 0)
    graph = random_runs.graph_of(seed)
    weights = random_runs.weights_of(r, graph)
    random_runs.assign(scheduler, graph, random_runs.place(r, scheduler, graph, weights, seed))
    want = next(random_runs.on_the_cpu(seed, (1,), weights))
    scheduler.alloc(graph)
    random_runs.write(graph, 1)
    scheduler.compute(graph)
    for a, b in zip(random_runs.results(graph), want, strict=True):
        np.testing.assert_allclose(np.frombuffer(a, np.float32), np.frombuffer(b, np.float32), rtol=1e-3, atol=1e-3)


def test_copy_and_compute_overlap_in_the_timeline():
    backend = CudaBackend()
    backend.trace = Trace()
    with Context(2**20, no_alloc=True).active() as ctx:
        x = ctx.new_tensor("f32", 4096, 4096)
        slot = ctx.new_tensor("i8", 2**27)
        for t in (x, slot):
            t.place(backend.buffer_type.alloc_buffer(t.nbytes))
            t.storage.clear()
        out = x
        for _ in range(8):
            out = ops.mul_mat(x, out)
        graph = build(out.mark(Flag.OUTPUT))
    GraphRunner(backend).prepare(graph)
    pinned = backend.host_buffer_type.alloc_buffer(slot.nbytes).host_bytes()
    backend.compute(graph)
    backend.compute_async(graph)
    backend.prefetch(slot, pinned)
    backend.synchronize()
    spans = {(backend.trace.described(e)["stream"]): e for e in backend.trace.of("busy")}
    compute, copy = spans["compute"], spans["copies"]
    assert max(compute.start, copy.start) < min(compute.end, copy.end)


def test_pinned_copies_use_the_link():
    speeds = bench_cuda.copies(CudaBackend())
    assert speeds["set_async, pinned"] > 0.5 * speeds["cudaMemcpyAsync, pinned"] > 1e9


@pytest.mark.parametrize("sizes", bench_cuda.SIZES.values(), ids=bench_cuda.SIZES.keys())
@pytest.mark.parametrize("n_tokens", bench_cuda.TOKENS)
def test_a_moe_block_agrees_with_numpy_and_pytorch(n_tokens, sizes):
    block = peers.Block(n_tokens, **sizes)
    want = peers.plain_numpy(block)()
    got = [bench_cuda.ours(block, CudaBackend())().numpy()]
    if (torch := bench_cuda.pytorch(block)) is not None:
        got.append(torch()().numpy())
    for result in got:
        np.testing.assert_allclose(result.reshape(want.shape), want, atol=1e-3 * np.abs(want).max())


def test_a_card_with_a_limit_refuses_what_is_too_large():
    backend = CudaBackend(limit=2**20)
    with pytest.raises(AllocationError, match="within the limit"):
        backend.buffer_type.alloc_buffer(2**21)
    assert backend.buffer_type.alloc_buffer(2**19).size == 2**19
