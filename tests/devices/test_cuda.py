"""The CUDA backend over a stand-in for CuPy: its own logic, with NumPy's results. On a card: test_cuda_gpu.py.

With grain=1 the pieces of work are the CPU's, and results are the same bits; larger pieces and grouped products agree but for rounding.
"""

import ast
import inspect
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.devices import fake_cupy
from tests.devices.every_op import MAKERS, graph_of, moe_layer, values
from tests.models import architectures
from tests.parity import ops as parity
from tests.scheduler import random_runs
from workbench import (
    OPS,
    Context,
    CpuBackend,
    Flag,
    Scheduler,
    Session,
    Tensor,
    Usage,
    build,
    load,
    moe,
    ops,
    place_weights,
)
from workbench.devices import HOST_MEMORY, BufferType, cuda, cuda_memory
from workbench.devices.calibrate import Calibrator
from workbench.devices.cost import devices_of
from workbench.devices.cuda import CudaBackend, why_not
from workbench.errors import AllocationError, DependencyError, ParameterError, StorageError
from workbench.execution import GraphRunner, Trainer, compute, new_parameter
from workbench.trace import Trace


@pytest.fixture
def fake(monkeypatch):
    return fake_cupy.install(monkeypatch)


def bring(graph, backend):
    """Every leaf and parameter that has data goes to the backend's memory."""
    for t in (*graph.leafs, *(t for t in graph.nodes if t.op == "NONE")):
        if t.view_src is None and t.storage is not None:
            data, usage = t.storage.read(t.offset, t.nbytes), t.storage.usage
            t.place(backend.buffer_type.alloc_buffer(t.nbytes, usage))
            t.storage.write(0, data)


def on(make_backend, make, n, t):
    ctx, out, graph = graph_of(make, n, t)
    backend = make_backend()
    if not backend.buffer_type.is_host:
        bring(graph, backend)
        for node in graph.nodes:  # made with memory of the context
            if node.view_src is None and node.op != "NONE":
                node.place(None)
    compute(graph, backend)
    return out.numpy().copy()


def host(n=8, seed=0):
    return np.random.default_rng(seed).integers(0, 255, n, np.uint8)


def tensor(ctx, backend, n=64, kind="f32"):
    t = ctx.new_tensor(kind, n, name="t")
    t.place(backend.buffer_type.alloc_buffer(t.nbytes))
    return t


# ---- results


@pytest.mark.parametrize("name", MAKERS)
def test_every_op_has_the_bits_of_the_cpu(fake, name):
    want = on(CpuBackend, MAKERS[name], 64, 5)
    assert on(lambda: CudaBackend(grain=1), MAKERS[name], 64, 5).tobytes() == want.tobytes()
    np.testing.assert_allclose(on(CudaBackend, MAKERS[name], 64, 5), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("t", [1, 5, 200])
def test_a_moe_layer_agrees_with_the_cpu_whatever_groups_it_makes(fake, t):
    got, want = on(CudaBackend, moe_layer, 64, t), on(CpuBackend, moe_layer, 64, t)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_goldens_of_all_ops(fake, data):
    cases, arrays = parity.read(data / "goldens" / "ops")
    judged = [c for c in cases if c["op"] != "backward_mlp"]
    wrong = {c["id"]: found for c in judged if (found := parity.differences(c, arrays, "cuda"))}
    assert not wrong and len(judged) > 300


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_on_cuda_and_cpu_have_the_bits_of_the_cpu(fake, seed):
    r = random.Random(seed)
    backends = [CudaBackend(0, grain=1, offload_min_batch=r.choice([1, 4])), CudaBackend(1, grain=1), CpuBackend()]
    backends = backends[r.choice([0, 1]) :]
    types = [b.buffer_type for b in backends[:-1]] + [r.choice([HOST_MEMORY, backends[0].host_buffer_type])]  # as llama.cpp: pinned
    scheduler = Scheduler(backends, types, parallel=seed % 2 == 0)
    graph = random_runs.graph_of(seed)
    weights = random_runs.weights_of(r, graph)
    assigned = random_runs.place(r, scheduler, graph, weights, seed)
    random_runs.assign(scheduler, graph, assigned)
    for data, want in zip((1, 2), random_runs.on_the_cpu(seed, (1, 2), weights), strict=True):
        scheduler.alloc(graph)
        random_runs.write(graph, data)
        scheduler.compute(graph)
        assert random_runs.results(graph) == want
        scheduler.reset()
        random_runs.assign(scheduler, graph, assigned)


@pytest.mark.parametrize(("options", "exact"), [
    ({}, True), ({"n_gpu_layers": 1}, True), ({"overrides": {"_exps": "CPU"}}, True), ({"overrides": {"_exps": "CPU"}}, False),
], ids=["all layers", "one layer", "experts on the host", "experts on the host, large pieces"])  # fmt: skip
def test_logits_of_a_model_on_cuda_and_cpu(fake, options, exact):
    tokens = [0, 308, 621, 1346, 545, 12, 77]
    with load("tiny-mixtral-f16") as model:
        with Session(model, n_ctx=256) as session:
            want = session.decode(tokens, outputs="all"), session.decode([9])
        backends = [CudaBackend(grain=1 if exact else 128, offload_min_batch=4), CpuBackend()]
        with place_weights(model, backends, **options) as placed, Session(placed, n_ctx=256, scheduler=Scheduler(backends)) as session:
            got = session.decode(tokens, outputs="all"), session.decode([9])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b) if exact else np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2moe", "gpt-oss", "deepseek-v3"])
@pytest.mark.parametrize("grain", [1, 128])
def test_logits_of_other_architectures(fake, name, grain, tmp_path):
    with load(architectures.write(name, tmp_path / f"{name}.gguf")) as model:
        with Session(model, n_ctx=256) as session:
            want = session.decode(architectures.TOKENS, outputs="all")
        backends = [CudaBackend(grain=grain), CpuBackend()]
        with place_weights(model, backends) as placed, Session(placed, n_ctx=256, scheduler=Scheduler(backends)) as session:
            got = session.decode(architectures.TOKENS, outputs="all")
    np.testing.assert_array_equal(got, want) if grain == 1 else np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("kind", ["q4_K", "q5_K", "q6_K", "mxfp4"])
def test_the_types_of_large_models_are_decoded_on_the_card(fake, kind, monkeypatch):
    def make(c, n, t):
        w = c.new_tensor(kind, 256, 32, 4)
        w.storage.write(w.offset, np.random.default_rng(0).integers(0, 120, w.nbytes, np.uint8))
        return ops.mul_mat_id(w, c.from_numpy(values(256, 1, t, seed=1)), c.from_numpy(np.arange(2 * t, dtype=np.int32).reshape(t, 2) % 4))

    want = on(CpuBackend, make, 256, 3)
    monkeypatch.setattr(fake, "asnumpy", None)  # nothing goes to the host
    got = on(lambda: CudaBackend(grain=1), make, 256, 3)
    assert got.tobytes() == want.tobytes() and np.isfinite(want).all()


def test_types_that_only_gguf_decodes_go_through_the_host(fake):
    def make(c, n, t):
        w = c.new_tensor("q5_0", 64, 32).set(values(64, 32))
        return ops.mul_mat(w, c.from_numpy(values(64, t, seed=1)))

    np.testing.assert_allclose(on(CudaBackend, make, 64, 3), on(CpuBackend, make, 64, 3), atol=1e-5)


def test_decoded_weights_stay_within_their_budget_and_the_limit(fake):
    with Context(no_alloc=True) as ctx:
        backend = CudaBackend(dequant_cache_bytes=64 * 64 * 4, limit=2**20)
        x = tensor(ctx, backend)
        nodes = []
        for i in range(2):
            w = ctx.new_tensor("f16", 64, 64, name=f"w{i}")
            w.place(backend.buffer_type.alloc_buffer(w.nbytes, Usage.WEIGHTS))
            w.set(values(64, 64))
            nodes.append(ops.mul_mat(w, x).mark(Flag.OUTPUT))
        x.set(np.ones(64))
        compute(build(*nodes), backend)
        assert backend.memory_report()["dequantised weights"] == 64 * 64 * 4
        backend.close()
        assert backend.memory_report()["dequantised weights"] == 0


# ---- memory


def test_memory_of_the_card_is_not_for_the_host(fake):
    buffer = CudaBackend().buffer_type.alloc_buffer(100)
    assert not buffer.is_host and buffer.size == 100
    with pytest.raises(StorageError, match="host code asked"):
        buffer.host_bytes()
    buffer.clear(3)
    buffer.write(10, np.arange(5, dtype=np.uint8))
    assert buffer.read(9, 7).tolist() == [3, 0, 1, 2, 3, 4, 3] and buffer.version == 2
    with pytest.raises(StorageError, match="bytes 98..103"):
        buffer.read(98, 5)
    buffer.close()
    with pytest.raises(StorageError, match="freed"):
        buffer.read(0, 1)


def test_a_full_card_says_how_much_is_left(fake):
    backend = CudaBackend(limit=1000)
    kept = backend.buffer_type.alloc_buffer(900)
    with pytest.raises(AllocationError, match=r"200 bytes asked for on CUDA0, 100 are free within the limit of 1,000 bytes"):
        backend.buffer_type.alloc_buffer(200)
    kept.close()
    assert backend.buffer_type.alloc_buffer(200).size == 200


def test_memory_that_a_backend_works_on_is_its_cards(fake):
    here, there = CudaBackend(0), CudaBackend(1)
    assert here.supports_buft(CudaBackend(0).buffer_type) and not here.supports_buft(there.buffer_type)
    assert not here.supports_buft(HOST_MEMORY) and not here.supports_buft(here.host_buffer_type)
    with Context() as ctx, pytest.raises(StorageError, match=r"'x' lies in .*\n.*memory of CUDA0"):
        here.operand(ctx.new_tensor("f32", 4, name="x"))


def test_pinned_memory_is_host_memory(fake):
    kind = CudaBackend().host_buffer_type
    buffer = kind.alloc_buffer(100)
    assert kind.is_host and isinstance(kind, BufferType) and kind.holds(buffer.host_bytes()[10:20]) and not kind.holds(host())
    buffer.write(0, np.arange(100, dtype=np.uint8))
    assert CpuBackend().supports_buft(kind) and buffer.host_bytes()[99] == 99
    inside = buffer.host_bytes()
    buffer.close()
    assert not kind.holds(inside)


# ---- streams, events, copies


def test_bytes_that_were_asked_for_are_there_after_a_wait(fake):
    backend = CudaBackend()
    with Context() as ctx:
        t = tensor(ctx, backend, 8, "i8")
        t.storage.write(0, np.arange(8, dtype=np.uint8))
        got = backend.get_async(t)
        assert set(got) == {0xFF}
        backend.synchronize()
        assert got.tolist() == list(range(8))


def test_pageable_bytes_may_change_after_the_call_and_pinned_ones_only_after_a_wait(fake):
    backend = CudaBackend()
    with Context() as ctx:
        a, b = tensor(ctx, backend, 8, "i8"), tensor(ctx, backend, 8, "i8")
        pageable, pinned = host(), backend.host_buffer_type.alloc_buffer(8).host_bytes()
        pinned[:] = before = pageable.copy()
        backend.set_async(a, pageable)
        backend.set_async(b, pinned)
        pageable[:] = pinned[:] = 7
        backend.synchronize()
        assert a.storage.read(0, 8).tolist() == before.tolist()
        assert set(b.storage.read(0, 8)) == {7}


def test_large_pageable_copies_pass_through_a_ring_of_pinned_slots(fake, monkeypatch):
    monkeypatch.setattr(cuda_memory, "STAGING_BYTES", 16)
    backend = CudaBackend()
    with Context() as ctx:
        t = tensor(ctx, backend, 1000, "i8")
        data = host(900)
        backend.set_async(t, data, 50)
        backend.synchronize()
        assert t.storage.read(50, 900).tobytes() == data.tobytes() and len(backend._staging._slots) == cuda_memory.STAGING_SLOTS


def test_a_prefetch_runs_beside_the_stream_and_needs_its_event(fake):
    def run(wait):
        backend = CudaBackend(grain=1)
        with Context() as ctx:
            t = tensor(ctx, backend)
            t.set(np.zeros(64))
            y = ops.scale(t, 2.0).mark(Flag.OUTPUT)
            y.place(backend.buffer_type.alloc_buffer(y.nbytes))
            source = backend.host_buffer_type.alloc_buffer(t.nbytes)
            source.write(0, np.ones(64, np.float32))
            done = backend.prefetch(t, source.host_bytes())
            if wait:
                backend.wait_event(done)
            backend.compute_async(build(y))
            backend.synchronize()
            return set(y.numpy())

    assert run(wait=True) == {2.0} and run(wait=False) == {0.0}


def test_a_prefetch_waits_for_those_that_still_read(fake):
    backend = CudaBackend()
    with Context() as ctx:
        a, b = tensor(ctx, backend, 8, "i8"), tensor(ctx, backend, 8, "i8")
        a.storage.write(0, np.zeros(8, np.uint8))
        assert backend.copy_async(backend, a, b)
        read = backend.new_event("read")
        read.record()
        done = backend.prefetch(a, host(), after=read)
        done.synchronize()
        assert set(b.storage.read(0, 8)) == {0} and a.storage.read(0, 8).tolist() == host().tolist()


def test_two_cards_copy_without_the_host_and_the_target_waits(fake):
    one, two = CudaBackend(0), CudaBackend(1)
    with Context() as ctx:
        a, b = tensor(ctx, one, 8, "i8"), tensor(ctx, two, 8, "i8")
        one.set_async(a, host())
        assert two.copy_async(one, a, b)
        two.synchronize()
        assert b.storage.read(0, 8).tolist() == host().tolist()
        assert not two.copy_async(CpuBackend(), a, b)
        c = tensor(ctx, one, 8, "i8")
        assert c.storage.copy_from(b, c, None) and c.storage.read(0, 8).tolist() == host().tolist()


def test_work_and_copies_are_stretches_of_the_timeline(fake):
    backend = CudaBackend()
    backend.trace = Trace()
    with Context() as ctx:
        t = tensor(ctx, backend)
        y = ops.sqr(t).mark(Flag.OUTPUT).named("y")
        y.place(backend.buffer_type.alloc_buffer(y.nbytes))
        backend.set_async(t, np.ones(64, np.float32))
        backend.compute_async(build(y))
        backend.prefetch(t, np.ones(64, np.float32))
        backend.synchronize()
    fields = [backend.trace.described(e) | {"time": e.end - e.start} for e in backend.trace.events if e.kind == "busy"]
    assert [(f["device"], f["stream"], f["work"], f["name"], f["bytes"]) for f in fields] == [
        ("CUDA0", "compute", "copy", "t", 256), ("CUDA0", "compute", "compute", "y", 0), ("CUDA0", "copies", "copy", "t", 256)]  # fmt: skip
    assert all(f["time"] > 0 for f in fields)


# ---- what it supports, and errors


def test_a_card_can_be_calibrated(fake, tmp_path):
    calibrator = Calibrator(CudaBackend(), scale=1)
    calibrator.round()
    (tmp_path / "mine.toml").write_text(calibrator.result().to_toml("this-gpu"), "utf-8")
    calibrator.close()
    (p,) = devices_of(str(tmp_path / "mine.toml"))
    assert (p.kind, p.capacity, p.speed.unpacked) == ("GPU", 2**31, False) and p.speed.starts and p.speed.link_ns > 0


def test_batches_from_32_on_are_offered_to_the_device_whose_weights_are_not_there(fake, monkeypatch):
    with Context() as ctx:
        w, big, small = (ctx.new_tensor("f32", 8, n) for n in (4, 32, 31))
        many, few = ops.mul_mat(w, big), ops.mul_mat(w, small)
        rows = ops.get_rows(w, ctx.new_tensor("i32", 64))
        experts = ops.mul_mat_id(ctx.new_tensor("f32", 8, 4, 2), ctx.new_tensor("f32", 8, 1, 32), ctx.new_tensor("i32", 2, 32))
        assert [CudaBackend().offload_op(n) for n in (many, few, rows, experts)] == [True, False, False, True]
        monkeypatch.setenv("GGML_OP_OFFLOAD_MIN_BATCH", "8")
        assert CudaBackend().offload_op(few)


def test_what_lies_at_odd_bytes_is_not_for_a_gpu(fake):
    with Context() as ctx:
        x = ctx.new_tensor("f32", 16, name="x")
        assert CudaBackend().supports_op(ops.sqr(ops.view(x, 4, offset=4)))
        assert "aligned" in CudaBackend().why_unsupported(ops.sqr(ops.view(x, 4, offset=2)))
        w = ctx.new_tensor("q8_0", 32, 4)
        assert CudaBackend().supports_op(ops.mul_mat(w, ctx.new_tensor("f32", 32)))
        assert "'q'" in CudaBackend().why_unsupported(Tensor(x.dtype, x.ne, op="ADD", spec=OPS["ADD"], src=(x, w.named("q"))))


@pytest.mark.parametrize("name", ["GET_ROWS", "SET_ROWS", "ADD_ID", "MUL_MAT_ID"])
def test_a_wrong_index_is_named_at_the_next_wait(fake, name):
    backend = CudaBackend()
    with Context() as ctx:
        i = ctx.new_tensor("i32", 2, 3, name="i") if name in ("ADD_ID", "MUL_MAT_ID") else ctx.new_tensor("i64" if name == "SET_ROWS" else "i32", 3, name="i")
        a = ctx.new_tensor("f32", 8, 4, *([5] if name == "MUL_MAT_ID" else []))
        node = {"GET_ROWS": lambda: ops.get_rows(a, i), "SET_ROWS": lambda: ops.set_rows(a, ctx.new_tensor("f32", 8, 3), i),
                "ADD_ID": lambda: ops.add_id(ctx.new_tensor("f32", 8, 2, 3), a, i),
                "MUL_MAT_ID": lambda: ops.mul_mat_id(a, ctx.new_tensor("f32", 8, 2, 3), i)}[name]().mark(Flag.OUTPUT).named("node")  # fmt: skip
        graph = build(node)
        bring(graph, backend)
        if node.view_src is None:
            node.place(backend.buffer_type.alloc_buffer(node.nbytes))
        limit = 5 if name == "MUL_MAT_ID" else 4
        for wrong in (-1, limit):
            i.set(np.full(i.shape, wrong))
            try:
                backend.compute_async(graph)
            except IndexError:  # NumPy underneath finds it at once; CuPy reads another row
                pass
            with pytest.raises(ParameterError, match=rf"'i', a source of 'node', names a \w+ that does not exist.*\n.*0 to {limit - 1}"):
                backend.synchronize()
        i.set(np.zeros(i.shape))
        backend.compute(graph)


def test_without_a_card_one_sentence_says_why(monkeypatch):
    fake_cupy.install(monkeypatch, n_devices=0)
    assert why_not() == "CuPy finds no NVIDIA driver or no device"
    with pytest.raises(DependencyError, match="no CUDA device: CuPy finds no"):
        CudaBackend()
    fake_cupy.install(monkeypatch, n_devices=2)
    assert why_not() == "" and why_not(2) == "there is no CUDA device 2: this machine has 2"


def test_without_a_driver_nothing_is_imported():
    code = """if 1:
        import ctypes, sys
        from workbench.devices import cuda
        def none(name): raise OSError(name)
        ctypes.CDLL = none
        print(cuda.why_not(), "cupy" in sys.modules)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"(there is no NVIDIA driver on this machine \(\S+ cannot be loaded\)|there is no CUDA on macOS) False\n", run.stdout)


def test_settings_are_checked(fake):
    with pytest.raises(ParameterError):
        CudaBackend(activation_rounding="some")


# ---- the stand-in offers nothing that CuPy lacks


def test_every_name_in_the_backend_is_in_cupy():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    found, missing = set(), set()
    for node in (n for m in (cuda, cuda_memory) for n in ast.walk(ast.parse(inspect.getsource(m)))):
        chain, at = [], node
        while isinstance(at, ast.Attribute):
            chain.insert(0, at.attr)
            at = at.value
        if isinstance(at, ast.Name) and chain:
            chain.insert(0, at.id)
        root = next((i for i, n in enumerate(chain) if n in ("cupy", "cuda")), None)
        if root is None or len(chain) == root + 1:
            continue
        names = chain[root + 1 :] if chain[root] == "cupy" else chain[root:]
        owner, path = cupy, []
        for name in names:
            path.append(name)
            owner = getattr(owner, name, None)
            if owner is None:
                missing.add(".".join(path))
                break
            found.add(".".join(path))
    assert {"cuda.MemoryPool", "cuda.runtime.memcpyPeerAsync", "ElementwiseKernel", "cuda.memory.OutOfMemoryError"} <= found
    assert not missing


def test_what_the_stand_in_offers_is_in_cupy():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    missing = []

    def look(name, ours, theirs):
        if theirs is None:
            missing.append(name)
        elif isinstance(ours, type) and name != "ndarray":
            for method, function in vars(ours).items():
                if not method.startswith("_") and not (issubclass(ours, np.ndarray) or method in ("ticks",)):
                    look(f"{name}.{method}", function, getattr(theirs, method, None))
            look_at_names(name, ours.__init__, theirs)
        elif callable(ours):
            look_at_names(name, ours, theirs)

    def look_at_names(name, ours, theirs):
        mine = [p for p in inspect.signature(ours).parameters.values() if p.name not in ("self", "args", "kwargs")]
        try:
            known = set(inspect.signature(theirs).parameters)
            known = known if not known & {"args", "kwargs"} else None
        except ValueError:
            known = None
        text = (theirs.__doc__ or "").strip()
        for p in mine:
            if known is not None and p.name not in known or known is None and not re.search(rf"\b{p.name}\b", text):
                missing.append(f"{name}({p.name})")

    for name, ours in fake_cupy.OWN.items():
        look(name, ours, getattr(cupy, name, None))
    for name, ours in fake_cupy.CUDA.items():
        look(f"cuda.{name}", ours, getattr(cupy.cuda, name, None))
    for name in ("memory.OutOfMemoryError", "runtime.getDeviceCount", "runtime.memGetInfo", "runtime.memcpyPeerAsync", "runtime.CUDARuntimeError"):
        owner, _, attribute = name.partition(".")
        assert hasattr(getattr(cupy.cuda, owner), attribute)
    assert hasattr(cupy.cuda.MemoryPointer, "ptr") and hasattr(cupy.cuda.PinnedMemoryPointer, "ptr") and callable(cupy.is_available)
    assert not missing


# ---- training


def test_training_on_the_device_has_the_bits_of_the_cpu(fake):
    """Parameters, momenta and the optimiser's numbers lie in the card's memory; only batches come over, and the loss goes back."""

    def run(backend):
        rng, weights, work = np.random.default_rng(0), Context(2**16), Context(2**18, no_alloc=True)
        x, y = (work.new_tensor("f32", n, 16, name=name).mark(Flag.INPUT) for n, name in ((8, "x"), (4, "y")))
        made = [new_parameter(weights, rng, *ne) for ne in ((8, 4), (8, 8, 4), (8, 8, 4), (8, 8, 4), (8, 4), (4,))]
        for w in made if not backend.buffer_type.is_host else ():
            values = w.numpy().copy()
            w.place(backend.buffer_type.alloc_buffer(w.nbytes))
            w.set(values)
        router, gate, up, down, head, bias = made
        with work.active():
            h = moe.build_moe_ffn(x, router, moe.ExpertWeights(gate, up, down), moe.Router(4, 2))
            loss = ops.cross_entropy_loss(ops.add(ops.mul_mat(head, h), bias), y)
        trainer = Trainer(loss, runner=GraphRunner(backend))
        batches = [{x: rng.standard_normal((16, 8), np.float32), y: np.eye(4, dtype="f4")[rng.integers(0, 4, 16)]} for _ in range(4)]
        return trainer.fit(batches), [w.numpy().tobytes() for w in made]

    assert run(CudaBackend(grain=1)) == run(CpuBackend())
