"""Random graphs over many ops, views included, for property tests."""

from __future__ import annotations

import random

from workbench.cgraph import CGraph
from workbench.errors import DTypeError, ParameterError, ShapeError
from workbench.tensors import Context, Flag, Tensor, ops

INF = float("inf")


def random_graph(seed: int, n: int = 40, no_alloc: bool = True) -> CGraph:
    """A graph of about `n` tensors; the same seed gives the same graph."""
    r = random.Random(seed)
    ctx = Context(mem_size=2**22, no_alloc=no_alloc, name=f"random {seed}")
    with ctx.active():
        pool = [ctx.new_tensor(r.choice(["f32", "f32", "f16"]), r.choice([4, 8]), r.choice([1, 4, 8]), name=r.choice(["", f"leaf {i}"])) for i in range(4)]
        for t in pool[:2]:
            t.mark(Flag.INPUT)
        rows = ctx.new_tensor("i32", 4, name="rows").mark(Flag.INPUT)
        for _ in range(n):
            try:
                pool.append(_node(r, r.choice(pool), r.choice(pool), rows))
            except (ShapeError, DTypeError, ParameterError):
                continue
            if r.random() < 0.1:
                pool[-1].mark(Flag.OUTPUT)
            if r.random() < 0.5:
                pool[-1].named(f"t{len(pool)}-{r.randrange(3)}")
        graph = CGraph(size=4 * n + 20, name=f"random {seed}")
        for t in (*r.sample(pool, 3), pool[-1]):
            graph.build_forward_expand(t)
    return graph


def _node(r: random.Random, a: Tensor, b: Tensor, rows: Tensor) -> Tensor:
    return r.choice(_MAKERS)(r, a, b, rows)


_MAKERS = [
    lambda r, a, b, rows: ops.add(a, b),
    lambda r, a, b, rows: ops.mul(a, b),
    lambda r, a, b, rows: ops.add(a, a),
    lambda r, a, b, rows: ops.mul_mat(a, b),
    lambda r, a, b, rows: ops.unary(r.choice(["SILU", "RELU", "EXP"]), a),
    lambda r, a, b, rows: ops.glu(r.choice(["SWIGLU", "GEGLU", "REGLU"]), a, swapped=r.random() < 0.5),
    lambda r, a, b, rows: ops.swiglu_split(a, b),
    lambda r, a, b, rows: ops.scale(a, r.random(), r.choice([0.0, 1.5])),
    lambda r, a, b, rows: ops.clamp(a, r.choice([-INF, -1.0]), r.choice([INF, 1.0])),
    lambda r, a, b, rows: ops.rms_norm(a, 1e-5),
    lambda r, a, b, rows: ops.soft_max_ext(a, r.choice([None, b]), 0.5, 0.0),
    lambda r, a, b, rows: ops.soft_max_ext(a, None, 0.5, 0.0, sinks=b),
    lambda r, a, b, rows: ops.sum_rows(a),
    lambda r, a, b, rows: ops.get_rows(a, rows),
    lambda r, a, b, rows: ops.concat(a, b, r.randrange(3)),
    lambda r, a, b, rows: ops.cast(a, r.choice(["f16", "f32"])),
    lambda r, a, b, rows: ops.cpy(a, b),
    lambda r, a, b, rows: ops.cont(a),
    lambda r, a, b, rows: ops.cont(ops.transpose(a)),
    lambda r, a, b, rows: ops.dup(a),
    lambda r, a, b, rows: ops.repeat(a, (a.ne[0], a.ne[1] * 2)),
    lambda r, a, b, rows: ops.reshape(a, a.n_elements),
    lambda r, a, b, rows: ops.reshape(a, 4, a.n_elements // 4),
    lambda r, a, b, rows: ops.permute(a, 0, 2, 1, 3),
    lambda r, a, b, rows: ops.transpose(a),
    lambda r, a, b, rows: ops.view(a, a.ne[0], a.ne[1] // 2, nb=(a.nb[1],), offset=a.nb[1] * (a.ne[1] // 2)),
    lambda r, a, b, rows: ops.slice_view(a, slice(0, max(a.shape[0] // 2, 1))),
    lambda r, a, b, rows: ops.argsort_top_k(a, 2),
    lambda r, a, b, rows: ops.diag_mask_inf(a, 1),
    lambda r, a, b, rows: ops.set_rows(b, a, rows),
    lambda r, a, b, rows: ops.rope(ops.reshape(a, 4, a.n_elements // 16, 4), rows, 4, 2),
]
