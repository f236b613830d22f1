"""What scheduling costs: splitting per node, and a scheduled run of one split over the plain CPU run."""

import time

import numpy as np

import workbench as wb
from benchmarks.harness import Table, compare, comparison
from workbench import ops

SIZES = (1_000, 10_000, 100_000)
LIMIT_US, LIMIT_GROWTH = 10.0, 2.0


def tables():
    yield splitting()
    yield one_split()


def _layers(ctx, n, w, out_of):
    """About n nodes: a product with its norm, activation, two views and a residual sum, again and again."""
    x = ctx.new_tensor("f32", 64, 4, name="x").mark(wb.Flag.INPUT)
    y, made = x, 0
    while made < n:
        z = ops.silu(ops.mul_mat(w[made * len(w) // n % len(w)], ops.rms_norm(y, 1e-5)))
        y = ops.add(ops.reshape(ops.reshape(z, 256), 64, 4), y)
        made += 6
    return y


def _chain(ctx, n, w, out_of):
    """n nodes that change the device every `out_of` nodes."""
    y = ctx.new_tensor("f32", 64, 4, name="x").mark(wb.Flag.INPUT)
    for _ in range(n):
        y = ops.neg(y)
    return y


def _split_us(make, n, gpus, out_of, rounds=5):
    """Microseconds of processor time per node, the best of some rounds, and the number of splits."""
    backends = wb.simulated_machine(gpus)
    ctx = wb.Context(mem_size=1000 * n + 10**6, no_alloc=True)
    weights = []
    for b in backends[:-1]:
        w = ctx.new_tensor("f32", 64, 64)
        w.place(b.buffer_type.alloc_buffer(w.nbytes, wb.Usage.WEIGHTS))
        weights.append(w)
    with ctx.active():
        graph = wb.build(make(ctx, n, weights, out_of))
    scheduler = wb.Scheduler(backends, graph_size=2 * n)
    best = np.inf
    for _ in range(rounds):
        scheduler.reset()
        if out_of:
            for i, node in enumerate(graph.nodes):
                scheduler.set_backend(node, i // out_of % 2)
        start = time.process_time()
        scheduler.split(graph)
        best = min(best, time.process_time() - start)
    return best / len(graph.nodes) * 1e6, len(scheduler.splits)


def splitting():
    table = Table("Assigning and cutting a graph, recording off: µs of processor time per node",
                  ["graph", *(f"{n:,} nodes" for n in SIZES), "splits", "growth", "limit", ""])  # fmt: skip
    cases = (("layers on one GPU", _layers, 1, 0), ("layers on two GPUs", _layers, 2, 0), ("device changes every 10 nodes", _chain, 1, 10),
             ("device changes at every node", _chain, 1, 1))  # fmt: skip
    for name, make, gpus, out_of in cases:
        found = [_split_us(make, n, gpus, out_of) for n in SIZES]
        times = [us for us, _ in found]
        growth = times[-1] / times[0]
        fine = max(times) <= LIMIT_US and growth <= LIMIT_GROWTH
        limit = f"{LIMIT_US:.0f} µs, {LIMIT_GROWTH:.0f}x"
        table.add(name, *(f"{us:.2f}" for us in times), f"{found[-1][1]:,}", f"{growth:.2f}", limit, "ok" if fine else "above")
    table.notes.append("real ggml: 0.06 µs per node at 10,000 nodes, 0.25 µs at 100,000")
    return table


def one_split():
    table = comparison("A scheduled run of one split over the plain CPU run of the same graph", "GraphRunner", "Scheduler")
    for width, n in ((8, 1000), (64, 300), (256, 100)):
        runs = []
        for plain in (True, False):
            ctx = wb.Context(mem_size=2000 * n, no_alloc=True)
            with ctx.active():
                y = x = ctx.new_tensor("f32", width, 4, name="x").mark(wb.Flag.INPUT)
                for _ in range(n):
                    y = ops.add(ops.silu(ops.rms_norm(y, 1e-5)), y)
                graph = wb.build(y.mark(wb.Flag.OUTPUT))
            runner = wb.GraphRunner() if plain else wb.Scheduler([wb.CpuBackend()], graph_size=4 * n)
            (runner.prepare if plain else runner.alloc)(graph)
            x.set(np.ones((4, width), np.float32))
            runs.append((lambda r=runner, g=graph: r.run(g)) if plain else (lambda r=runner, g=graph: r.compute(g)))
        compare(table, f"{3 * n} nodes of {width} x 4", *runs, 1.1)
    return table
