"""A mixture-of-experts block against real ggml and PyTorch: what NumPy costs, and what caching decoded weights buys.

Then what routing costs beside the products it leads to, and how sorting tokens by expert grows.
"""

from __future__ import annotations

import gc
from time import perf_counter

import numpy as np

from benchmarks import peers
from benchmarks.harness import SETTLE, Table, compare, comparison, take_turns

TOKENS = (1, 32, 512)
AIM = {1: 0.65, 32: 0.9, 512: 1.5}
"""Speed against ggml on one thread that the block aims at."""
WHY = {
    False: "One token is one reading of two experts: BLAS's matrix-vector product reads slower than ggml's dot products, and each of "
           "the graph's nodes\n  is a call from Python. Many tokens are matrix products, where BLAS is ahead.",
    True: "One token: ggml multiplies f16 as it is stored; NumPy has no such product, so the workbench reads the decoded f32 of its "
          "cache, twice the bytes.\n  Without the cache it would have to decode them each time, as the NumPy loop does.",
}  # fmt: skip
"""Where the block loses against ggml, by whether weights are f16."""


def tables():
    for half in (False, True):
        for n_threads in (1, 2):
            yield _table(half, n_threads)
    yield _layers()
    yield _grouping()


def _table(half: bool, n_threads: int) -> Table:
    from threadpoolctl import threadpool_limits

    kind = "f16" if half else "f32"
    table = Table("MoE block, router 512 -> 8, top-2, SwiGLU 512 -> 1024 -> 512, "
                  f"{kind} weights, {n_threads} thread(s): ms (speed against ggml)",
                  ["tokens", "ggml", "workbench", "aim", "NumPy loop", "PyTorch"])  # fmt: skip
    for n_tokens in TOKENS:
        block = peers.Block(n_tokens, half)
        runs = {"ggml": peers.real_ggml(block, n_threads), "workbench": peers.ours(block, n_threads),
                "NumPy loop": peers.plain_numpy(block), "PyTorch": peers.pytorch(block, n_threads)}  # fmt: skip
        with threadpool_limits(n_threads):
            _agree(runs, 5e-3 if half else 1e-4)
            timing = take_turns(runs, seconds=4.0, settle=SETTLE if n_threads > 1 else 0.0)
        base = timing.get("ggml")
        cells = {name: f"{t.median * 1e3:.3f}" + (f" ({1 / t.ratio:.2f})" if base else "") for name, t in timing.items()}
        aim = f"{AIM[n_tokens]:.2f}" if n_threads == 1 else ""
        table.add(n_tokens, *(cells.get(n, "not installed") for n in ("ggml", "workbench")), aim,
                  *(cells.get(n, "not installed") for n in ("NumPy loop", "PyTorch")))  # fmt: skip
    table.notes.append(WHY[half])
    return table


def _agree(runs, tolerance: float) -> None:
    """All peers compute the same block; the looser bound is for f16, where ggml and PyTorch round activations."""
    results = {name: run().copy() for name, run in runs.items() if run is not None}
    expected = results["NumPy loop"]
    scale = np.abs(expected).max()
    for name, result in results.items():
        worst = np.abs(result.reshape(expected.shape) - expected).max() / scale
        assert worst < tolerance, f"{name} differs from NumPy by {worst:.1e} of the largest value"


# ---- a layer beside its bare products

def _layers() -> Table:
    """Router, choice, activation, weighted sum: all that a layer has beside its three MUL_MAT_IDs, in shares of these."""
    table = comparison("A routed layer against the MUL_MAT_ID products it contains, width 512, f32, 1 thread", "products", "layer")
    for f, n_expert, k in ((1024, 8, 2), (256, 64, 8)):
        for n_tokens in (32, 128, 512, 2048):
            products, layer = layer_and_products(peers.Block(n_tokens, f=f, n_expert=n_expert, k=k))
            compare(table, f"{n_tokens} tokens, {k} of {n_expert} experts of {f}", products, layer, 1.1, seconds=3.0)
    return table


def layer_and_products(block: peers.Block):
    """Two callables over the same weights and the same routes: the three products alone, and the whole layer as `moe` builds it."""
    import workbench as wb
    from workbench import moe, ops

    weights = wb.Context(2**30, name="weights")
    router, gate, up, down = (weights.from_numpy(w) for w in (block.router, block.gate, block.up, block.down))
    for t in (router, gate, up, down):
        t.storage.usage = wb.Usage.WEIGHTS
    kept = wb.Flag.INPUT | wb.Flag.OUTPUT
    with wb.Context(2**22, no_alloc=True).active() as ctx:
        x = ctx.new_tensor("f32", block.d, block.n_tokens).mark(kept)
        routing = moe.build_router(x, router, moe.Router(block.n_expert, block.k))
        moe.RouteRecorder.watch(routing)
        layer = wb.build(moe.build_experts(x, moe.ExpertWeights(gate, up, down), routing).mark(wb.Flag.OUTPUT))
        row, hidden = (ctx.new_tensor("f32", n, m, block.n_tokens).mark(kept) for n, m in ((block.d, 1), (block.f, block.k)))
        ids = ctx.new_tensor("i32", block.k, block.n_tokens).mark(kept)
        alone = [ops.mul_mat_id(w, a, ids).mark(wb.Flag.OUTPUT) for w, a in ((up, row), (gate, row), (down, hidden))]
        products = wb.build(*alone)
    runner = [wb.GraphRunner(wb.CpuBackend()) for _ in range(2)]
    plans = [r.prepare(g) for r, g in zip(runner, (products, layer))]
    x.set(block.x)
    row.set(block.x[:, None])
    hidden.set(np.random.default_rng(1).standard_normal((block.n_tokens, block.k, block.f), np.float32))
    plans[1].run()
    ids.set(np.ascontiguousarray(routing.experts.numpy().reshape(block.n_tokens, block.k)))
    return [(lambda plan=plan, keep=runner: plan.run()) for plan in plans]


# ---- sorting tokens by expert

SIZES = ((1_000, 8, 64), (10_000, 8, 64), (100_000, 8, 64), (1_000_000, 8, 64), (1_000, 16, 896), (10_000, 16, 896), (100_000, 16, 896),
         (1_000_000, 16, 896))  # fmt: skip


def _grouping() -> Table:
    """Routed rows sorted by expert, as MUL_MAT_ID does before its products: work that grows with tokens · k + experts."""
    from workbench.kernels.products import by_expert, id_type

    table = Table("Rows sorted by expert, for MUL_MAT_ID: the fastest of several runs",
                  ["tokens", "k", "experts", "time, ms", "ns per row or expert", "one mask per expert, ms"])  # fmt: skip
    for n_tokens, k, n_expert in SIZES:
        ids = np.random.default_rng(0).integers(0, n_expert, n_tokens * k).astype(id_type(n_expert))
        took = _fastest(lambda ids=ids, n=n_expert: by_expert(np, ids, n), 3 if n_tokens == 10**6 else 9)
        masks = ids.size * n_expert <= 5 * 10**8
        naive = _fastest(lambda ids=ids, n=n_expert: [np.flatnonzero(ids == e) for e in range(n)], 2) if masks else None
        table.add(f"{n_tokens:,}", k, n_expert, f"{took * 1e3:.2f}", f"{took * 1e9 / (ids.size + n_expert):.1f}",
                  f"{naive * 1e3:.1f}" if naive else "left out")  # fmt: skip
    table.notes.append("A radix sort of 16-bit ids: as many steps as rows, and a count per expert. Beyond the caches a step costs more.")
    return table


def _fastest(run, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        gc.collect()
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return min(times)
