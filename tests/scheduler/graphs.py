"""Small graphs for tests of the scheduler: contexts without memory, leafs that are filled before a run."""

import numpy as np

from workbench import Context, Flag, Usage, build, ops


def context(n=200):
    return Context(mem_size=500 * n + 5000, no_alloc=True, name="graph")


def leaf(ctx, *ne, kind="f32", name=""):
    return ctx.new_tensor(kind, *ne, name=name).mark(Flag.INPUT)


def weight(kind, ctx, values, name="", dtype="f32"):
    """A weight in memory of this buffer type."""
    t = ctx.new_tensor(dtype, *values.shape[::-1], name=name)
    t.place(kind.alloc_buffer(kind.alloc_size(t), Usage.WEIGHTS))
    return t.set(values)


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def chain_of_adds(n, first=1):
    """x0 + x1 + … over n + first foreign operands; the first node may read several at once."""
    ctx = context()
    with ctx.active():
        y = leaf(ctx, 4, name="x")
        for i in range(n):
            y = ops.add(y, leaf(ctx, 4, name=f"x{i}"))
    return build(y.mark(Flag.OUTPUT))


def moe(ctx, home, n_expert=8, used=2, t=3, d=16, f=600, ids=None):
    """Experts over t tokens, their ids an input; the weight [d, f, E] lies in `home`."""
    w = weight(home, ctx, values(n_expert, f, d), name="experts")
    with ctx.active():
        x = leaf(ctx, d, 1, t, name="x")
        chosen = leaf(ctx, used, t, kind="i32", name="ids")
        y = ops.mul_mat_id(w, x, chosen).named("y").mark(Flag.OUTPUT)
    return build(y), x, chosen, y, w


def filled(scheduler, graph, **given):
    """Allocate, write leafs by name, compute."""
    scheduler.reset()
    scheduler.alloc(graph)
    for name, data in given.items():
        graph.find(name).set(data)
    scheduler.compute(graph)
