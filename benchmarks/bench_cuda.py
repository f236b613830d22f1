"""A card: the mixture-of-experts block against PyTorch on the same card, copies against the link, copies beside computing, and experts
through a pool against all there.

Without a card each table says why it is empty. Results of the block are compared with NumPy's before they are timed.
"""

from __future__ import annotations

import datetime

import numpy as np

from benchmarks import peers
from benchmarks.harness import Table, duration, take_turns
from workbench import Context, CpuBackend, Flag, Scheduler, Session, Usage, build, load, ops, place_weights
from workbench.devices.cuda import CudaBackend, why_not
from workbench.execution import GraphRunner
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import Offloaded, offload
from workbench.trace import Trace

TOKENS = (1, 32, 512, 4096)
SIZES = {"8 experts": {}, "64 small experts, top-8": {"n_expert": 64, "k": 8, "f": 256}}
COPY = 2**28


def tables():
    if why := why_not():
        yield Table("CUDA: nothing measured", ["why"], [[why]])
        return
    for name, sizes in SIZES.items():
        yield moe_table(name, sizes)
    yield copy_table()
    yield overlap_table()
    yield pool_table()


def card() -> str:
    """Name, driver and date, for records."""
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    return f"{name}, CuPy {cupy.__version__}, driver {cupy.cuda.runtime.driverGetVersion()}, {datetime.date.today()}"


# ---- the block


def ours(block: peers.Block, backend: CudaBackend) -> peers.Run:
    """Our graph with weights and input on the card."""
    ctx = Context(2**22, no_alloc=True, name="block")

    def there(array: np.ndarray):
        t = ctx.new_tensor(array.dtype, *array.shape[::-1])
        t.place(backend.buffer_type.alloc_buffer(t.nbytes, Usage.WEIGHTS))
        return t.set(array)

    weights = [there(w) for w in (block.router, block.gate, block.up, block.down)]
    x = there(block.x)
    with ctx.active():
        out = peers.moe(ops, *weights, x, block).mark(Flag.OUTPUT)
        graph = build(out)
    runner = GraphRunner(backend)
    runner.prepare(graph)

    def run() -> np.ndarray:
        runner.run(graph)
        backend.synchronize()
        return out

    return run


def pytorch(block: peers.Block) -> peers.Run | None:
    """PyTorch's eager loop over experts, on the card; `take` brings the result to the host."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    x, router, gate, up, down = (torch.from_numpy(a).cuda() for a in (block.x, block.router, block.gate, block.up, block.down))
    silu = torch.nn.functional.silu

    def run():
        with torch.inference_mode():
            top = torch.softmax(x @ router.T, -1).topk(block.k, -1)
            w = top.values / top.values.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for e in torch.unique(top.indices).tolist():
                rows, slot = torch.nonzero(top.indices == e, as_tuple=True)
                h = x[rows].to(gate.dtype)
                y = (silu(h @ gate[e].T) * (h @ up[e].T)) @ down[e].T
                out.index_add_(0, rows, w[rows, slot, None] * y.float())
            torch.cuda.synchronize()
            return out.cpu

    return run


def moe_table(name: str, sizes: dict) -> Table:
    """Times of one block, for each number of tokens."""
    table = Table(f"MoE block of {name} on {card()}, f32 weights", ["tokens", "PyTorch", "workbench", "speed against PyTorch"])
    for n in TOKENS:
        block = peers.Block(n, **sizes)
        backend = CudaBackend()
        runs = {"PyTorch": pytorch(block), "workbench": ours(block, backend)}
        expected = peers.plain_numpy(block)()
        for peer in (p for p, run in runs.items() if run is not None):
            done = runs[peer]()
            result = (done.numpy() if peer == "workbench" else done().numpy()).reshape(expected.shape)
            worst = np.abs(result - expected).max() / np.abs(expected).max()
            assert worst < 1e-3, f"{peer} differs from NumPy by {worst:.1e} of the largest value"
        timing = take_turns(runs, seconds=2.0)
        speed = f"{1 / timing['workbench'].ratio:.2f}" if "PyTorch" in timing else ""
        table.add(n, *(duration(timing[p].median) if p in timing else "not installed" for p in runs), speed)
    return table


# ---- copies


def copies(backend: CudaBackend) -> dict[str, float]:
    """Bytes per second of each way to bring COPY bytes to the card; the first is CuPy's own, the link's measured peak."""
    ctx = Context(2**20, no_alloc=True)
    t = ctx.new_tensor("i8", COPY)
    t.place(backend.buffer_type.alloc_buffer(COPY))
    pinned, pageable = backend.host_buffer_type.alloc_buffer(COPY).host_bytes(), np.zeros(COPY, np.uint8)
    pinned[:] = 1

    def raw():
        t.storage.pointer(0).copy_from_host_async(pinned.ctypes.data, COPY, backend.stream)
        backend.stream.synchronize()

    def asked(call, *args):
        def run():
            call(*args)
            backend.synchronize()

        return run

    timing = take_turns({"cudaMemcpyAsync, pinned": raw, "set_async, pinned": asked(backend.set_async, t, pinned),
                         "set_async, pageable (staged)": asked(backend.set_async, t, pageable),
                         "write, pageable": asked(t.storage.write, 0, pageable), "get_async": asked(backend.get_async, t)})  # fmt: skip
    return {name: COPY / time.fastest for name, time in timing.items()}


def copy_table() -> Table:
    """Speed of copies."""
    table = Table(f"Copies of {COPY / 2**20:.0f} MiB on {card()}", ["way", "GB/s", "of the peak"])
    speeds = copies(CudaBackend())
    peak = next(iter(speeds.values()))
    for name, speed in speeds.items():
        table.add(name, f"{speed / 1e9:.1f}", f"{speed / peak:.0%}")
    return table


def overlap_table() -> Table:
    """A product and a prefetch alone, and both at once."""
    backend = CudaBackend()
    ctx = Context(2**20, no_alloc=True)
    w, x = (ctx.new_tensor("f32", 4096, 4096) for _ in range(2))
    slot = ctx.new_tensor("i8", COPY)
    for t in (w, x, slot):
        t.place(backend.buffer_type.alloc_buffer(t.nbytes))
        t.storage.clear()
    with ctx.active():
        out = x
        for _ in range(8):
            out = ops.mul_mat(w, out)
        graph = build(out.mark(Flag.OUTPUT))
    runner = GraphRunner(backend)
    runner.prepare(graph)
    pinned = backend.host_buffer_type.alloc_buffer(COPY).host_bytes()

    def both(compute: bool, copy: bool):
        def run():
            if compute:
                backend.compute_async(graph)
            if copy:
                backend.prefetch(slot, pinned)
            backend.synchronize()

        return run

    timing = take_turns({"compute": both(True, False), "copy": both(False, True), "both": both(True, True)})
    table = Table(f"A copy beside products on {card()}", ["what", "time"])
    for name, t in timing.items():
        table.add(name, duration(t.median))
    alone = timing["compute"].median + timing["copy"].median
    hidden = (alone - timing["both"].median) / min(timing["compute"].median, timing["copy"].median)
    table.notes.append(f"hidden: {hidden:.0%} of the shorter one")
    return table


# ---- experts through a pool


def pool_table(n_tokens: int = 16, seconds: float = 2.0) -> Table:
    """A model all there, and with its experts in slots: all of them (what a pool costs), and half of them with and without forecasts."""
    table = Table(f"Experts through a pool on {card()}: tiny-mixtral-f16, a token at a time",
                  ["experts", "per token", "of resident", "MB on demand", "MB ahead", "late", "link while it copies, GB/s"])  # fmt: skip
    with load("tiny-mixtral-f16") as model:
        ahead = {"policy": "predicted", "forecast": Forecaster.of_gates(Gates.of(model), 1)}
        ways = {"all in slots": (1.0, False, {}), "half, mapped file": (0.5, True, {}), "half, pinned": (0.5, False, {}),
                "half, pinned, gate 1 ahead": (0.5, False, ahead)}  # fmt: skip
        pooled = {name: offload(model, share, backends=_machine(), n_ctx=256, mmap=mapped, **more)
                  for name, (share, mapped, more) in ways.items()}  # fmt: skip
        backends = _machine()
        placed = place_weights(model, backends)
        resident = Session(placed, n_ctx=256, scheduler=Scheduler(backends))
        sessions = {"resident": resident, **{name: run.session for name, run in pooled.items()}}
        timing = take_turns({name: lambda s=s: _text(s, n_tokens) for name, s in sessions.items()}, seconds)
        for name, t in timing.items():
            moved = _moved(pooled[name], n_tokens) if name in pooled else [""] * 4
            table.add(name, duration(t.median / n_tokens), f"{1 / t.ratio:.2f}", *moved)
        for thing in (*pooled.values(), resident, placed):
            thing.close()
    table.notes.append("Experts of 120 KiB: a copy is latency. MB: of one such text; late: fetched ahead, and waited for all the same.")
    return table


def _machine() -> list:
    return [CudaBackend(offload_min_batch=1), CpuBackend()]


def _text(session: Session, n_tokens: int) -> None:
    session.reset()
    for token in range(40, 40 + n_tokens):
        session.decode([token])


def _moved(run: Offloaded, n_tokens: int) -> list[str]:
    """Bytes on demand and ahead, late experts, and the link's speed, of one more text."""
    before, run.scheduler.trace = dict(vars(run.counters)), Trace()
    _text(run.session, n_tokens)
    run.engine.pool.device.synchronize()
    copies = [(e.field("bytes"), e.end - e.start) for e in run.trace.of("busy") if run.trace.described(e)["stream"] == "copies"]
    nbytes, ns = (sum(column) for column in zip(*copies, strict=True)) if copies else (0, 1)
    demand, ahead, late = (vars(run.counters)[what] - before[what] for what in ("demand_bytes", "speculative_bytes", "late"))
    return [f"{demand / 1e6:.1f}", f"{ahead / 1e6:.1f}", str(late), f"{nbytes / ns:.2f}" if nbytes else ""]
