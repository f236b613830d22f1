"""What a planned graph costs over the same NumPy calls made by hand, and what importing the workbench costs."""

import subprocess
import sys

import numpy as np
import threadpoolctl

import workbench as wb
from benchmarks.harness import SETTLE, Table, compare, comparison, duration, take_turns
from workbench import ops

N = 10_000


def tables():
    yield tiny_ops()
    yield products()
    yield imports()


def _chain(make, width):
    """A chain of N nodes; returns its plan and (result, source, operand) per node as one-dimensional arrays."""
    ctx = wb.Context(2**26)
    with ctx.active():
        y, b = (ctx.from_numpy(np.full(width, v, np.float32)) for v in (0.0, 1e-3))
        for i in range(N):
            y = make(i, y, b)
        graph = wb.build(y)
    flat = [(t.array()[0, 0, 0], t.src[0].array()[0, 0, 0], b.array()[0, 0, 0]) for t in graph.nodes]
    return wb.CpuBackend().plan(graph), flat


def tiny_ops():
    table = comparison(f"{N:,} tiny ops in a row, one thread, nothing recorded", "NumPy by hand")
    for width in (8, 64, 512):
        plan, flat = _chain(lambda i, y, b: ops.add(y, b), width)

        def adds(flat=flat):
            for c, a, b in flat:
                np.add(a, b, out=c)

        compare(table, f"add of {width}", adds, plan.run, 1.5)
    mixed = (ops.add, ops.mul, lambda y, b: ops.neg(y), lambda y, b: ops.sqr(y))
    plan, flat = _chain(lambda i, y, b: mixed[i % 4](y, b), 64)

    def calls():
        for i in range(0, N, 4):
            (c, a, b), (d, _, _), (e, _, _), (f, _, _) = flat[i : i + 4]
            np.add(a, b, out=c)
            np.multiply(c, b, out=d)
            np.negative(d, out=e)
            np.square(e, out=f)

    compare(table, "add, mul, neg, sqr of 64", calls, plan.run, 1.5)
    plan, flat, x = _tiny_products(16)

    def matmuls():
        for c, a, b in flat:
            np.matmul(a, b, out=c)

    compare(table, "mul_mat 16 x 16, one token", matmuls, plan.run, 1.5)
    table.notes.append("The same tensors in the same memory. A plan holds the calls ready, a loop has to look them up.")
    return table


def _tiny_products(n):
    ctx = wb.Context(2**25)
    with ctx.active():
        w, y = ctx.from_numpy(np.eye(n, dtype=np.float32)), ctx.from_numpy(np.ones((1, n), np.float32))
        for _ in range(N):
            y = ops.mul_mat(w, y)
        graph = wb.build(y)
    flat = [(t.array()[0, 0], t.src[1].array()[0, 0], w.numpy().T) for t in graph.nodes]
    return wb.CpuBackend().plan(graph), flat, w


def products():
    table = comparison("Products n x n x n, f32, as many BLAS threads for NumPy as threads for us", "np.matmul")
    for n in (512, 1024):
        for n_threads in (1, 2):
            ctx = wb.Context(2**26)
            rng = np.random.default_rng(0)
            with ctx.active():
                w, x = (ctx.from_numpy(rng.standard_normal((n, n), np.float32)) for _ in range(2))
                graph = wb.build(ops.mul_mat(w, x))
            plan = wb.CpuBackend(n_threads).plan(graph)
            weights, rows, out = w.numpy().T, x.numpy(), np.empty((n, n), np.float32)

            def by_hand(rows=rows, weights=weights, out=out):
                np.matmul(rows, weights, out=out)

            with threadpoolctl.threadpool_limits(n_threads, user_api="blas"):
                compare(table, f"{n}, {n_threads} thread{'s' * (n_threads > 1)}", by_hand, plan.run,
                        1.03 if n_threads == 1 else None, seconds=3.0, rounds=15,
                        settle=SETTLE if n_threads > 1 else 0.0)  # fmt: skip
    table.notes.append("Each product is cut into the same parts for any number of threads, which costs 2 to 4 % on one.")
    return table


def imports():
    table = Table("Importing, in a fresh process each time", ["what", "time", "over NumPy", "limit", ""])
    peers = {"numpy": "import numpy", "workbench": "import workbench",
             "workbench, and building and running a graph": "import workbench as wb; wb.ops, wb.compute"}  # fmt: skip
    found = take_turns({name: _fresh(code) for name, code in peers.items()}, seconds=0, rounds=9)
    base = found["numpy"].median
    for name, t in found.items():
        over = t.median - base
        limit = "0.30 s" if name != "numpy" else ""
        table.add(name, duration(t.median), f"{over:+.3f} s" if limit else "", limit, ("ok" if over <= 0.3 else "above") if limit else "")
    return table


def _fresh(code):
    def run():
        subprocess.run([sys.executable, "-c", code], check=True)

    return run
