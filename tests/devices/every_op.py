"""A small graph for each op of the table, in any size, and the layers of a mixture-of-experts model."""

import numpy as np

from workbench import OPS, Context, Flag, Usage, build, ops


def values(*ne, seed=0, low=-2.0, high=2.0):
    return np.random.default_rng(seed).uniform(low, high, ne[::-1]).astype(np.float32)


def _expert_ids(ctx, used, t, n_expert=8):
    rng = np.random.default_rng(1)
    return ctx.from_numpy(np.stack([rng.permutation(n_expert)[:used] for _ in range(t)]).astype(np.int32))


def _leaf(ctx, *ne, seed=0, **kw):
    return ctx.from_numpy(values(*ne, seed=seed, **kw))


def _positions(ctx, t, kind=np.int32):
    return ctx.from_numpy(np.arange(t, dtype=kind))


def _weights(ctx, kind, *ne):
    """A tensor of constant weights in a storage of its own."""
    own = Context(2**26, name="weights")
    w = own.new_tensor(kind, *ne).set(values(*ne, seed=7))
    w.storage.usage = Usage.WEIGHTS
    ctx.keep = [*getattr(ctx, "keep", []), own]
    return w


# name -> what builds the node in context c over rows of n elements and t of them
MAKERS = {
    "ADD": lambda c, n, t: ops.add(_leaf(c, n, t), _leaf(c, n, seed=1)),
    "SUB": lambda c, n, t: ops.sub(_leaf(c, n, t), _leaf(c, n, t, seed=1)),
    "MUL": lambda c, n, t: ops.mul(_leaf(c, n, t), _leaf(c, n // 2, seed=1)),
    "DIV": lambda c, n, t: ops.div(_leaf(c, n, t), _leaf(c, 1, t, seed=1, low=1.0)),
    "ADD_ID": lambda c, n, t: ops.add_id(_leaf(c, n, 2, t), _leaf(c, n, 8, seed=1), _expert_ids(c, 2, t)),
    "SQR": lambda c, n, t: ops.sqr(_leaf(c, n, t)),
    "SQRT": lambda c, n, t: ops.sqrt(_leaf(c, n, t, low=0.0)),
    "LOG": lambda c, n, t: ops.log(_leaf(c, n, t, low=0.1)),
    "SCALE": lambda c, n, t: ops.scale(_leaf(c, n, t), 0.3, 0.1),
    "FILL": lambda c, n, t: ops.fill(_leaf(c, n, t), 0.5),
    "CLAMP": lambda c, n, t: ops.clamp(_leaf(c, n, t), -1.0, 1.0),
    **{name: lambda c, n, t, name=name: ops.unary(name, _leaf(c, n, t)) for name, s in OPS.items() if s.op == "UNARY"},
    "SWIGLU": lambda c, n, t: ops.swiglu(_leaf(c, 2 * n, t)),
    "GEGLU": lambda c, n, t: ops.geglu_split(_leaf(c, n, t), _leaf(c, n, t, seed=1)),
    "REGLU": lambda c, n, t: ops.reglu_split(_leaf(c, n, t), _leaf(c, n, t, seed=1)),
    "SWIGLU_OAI": lambda c, n, t: ops.swiglu_oai(_leaf(c, n, t, high=9.0), _leaf(c, n, t, seed=1, low=-9.0)),
    "SUM": lambda c, n, t: ops.sum(_leaf(c, n, t)),
    "SUM_ROWS": lambda c, n, t: ops.sum_rows(_leaf(c, n, t)),
    "CUMSUM": lambda c, n, t: ops.cumsum(_leaf(c, n, t)),
    "MEAN": lambda c, n, t: ops.mean(_leaf(c, n, t)),
    "ARGMAX": lambda c, n, t: ops.argmax(_leaf(c, n, t)),
    "NORM": lambda c, n, t: ops.norm(_leaf(c, n, t)),
    "RMS_NORM": lambda c, n, t: ops.rms_norm(_leaf(c, n, t)),
    "L2_NORM": lambda c, n, t: ops.l2_norm(_leaf(c, n, t)),
    "DIAG_MASK_INF": lambda c, n, t: ops.diag_mask_inf(_leaf(c, n, t, 2), 3),
    "SOFT_MAX": lambda c, n, t: ops.soft_max_ext(_leaf(c, n, t, 4), _leaf(c, n, t, seed=1), 0.5, 2.0),
    "ROPE": lambda c, n, t: ops.rope(_leaf(c, n, 4, t), _positions(c, t), n),
    "ARGSORT": lambda c, n, t: ops.argsort(_leaf(c, n, t)),
    "TOP_K": lambda c, n, t: ops.top_k(_leaf(c, n, t), 5),
    "REPEAT": lambda c, n, t: ops.repeat(_leaf(c, n, 1), (n, t, 2, 1)),
    "CONCAT": lambda c, n, t: ops.concat(_leaf(c, n, t), _leaf(c, n, 3, seed=1), 1),
    "CROSS_ENTROPY_LOSS": lambda c, n, t: ops.cross_entropy_loss(_leaf(c, n, t), _leaf(c, n, t, seed=1, low=0.0)),
    "CPY": lambda c, n, t: ops.cast(_leaf(c, n, t), "f16"),
    "CONT": lambda c, n, t: ops.cont(ops.transpose(_leaf(c, n, t))),
    "DUP": lambda c, n, t: ops.dup(_leaf(c, n, t)),
    "GET_ROWS": lambda c, n, t: ops.get_rows(_leaf(c, n, 50), c.from_numpy(np.arange(t, dtype=np.int32) % 50)),
    "SET_ROWS": lambda c, n, t: ops.set_rows(_leaf(c, n, t + 9), _leaf(c, n, t, seed=1), _positions(c, t, np.int64)),
    "MUL_MAT": lambda c, n, t: ops.mul_mat(_weights(c, "f32", n, 2 * n), _leaf(c, n, t)),
    "MUL_MAT f16": lambda c, n, t: ops.mul_mat(_weights(c, "f16", n, 2 * n), _leaf(c, n, t)),
    "MUL_MAT q8_0": lambda c, n, t: ops.mul_mat(_weights(c, "q8_0", n, 2 * n), _leaf(c, n, t)),
    "MUL_MAT batched": lambda c, n, t: ops.mul_mat(_leaf(c, n, t, 2), ops.permute(_leaf(c, n, 4, t, seed=1), 0, 2, 1, 3)),
    "MUL_MAT_ID": lambda c, n, t: ops.mul_mat_id(_weights(c, "f32", n, 2 * n, 8), _leaf(c, n, 1, t), _expert_ids(c, 2, t)),
    "MUL_MAT_ID q8_0": lambda c, n, t: ops.mul_mat_id(_weights(c, "q8_0", n, 2 * n, 8), _leaf(c, n, 2, t), _expert_ids(c, 2, t)),
    "OUT_PROD": lambda c, n, t: ops.out_prod(_leaf(c, n, t), _leaf(c, n, t, seed=1)),
    "ACC": lambda c, n, t: ops.acc(_leaf(c, n, t), _leaf(c, n // 2, t, seed=1), offset=8),
    "REPEAT_BACK": lambda c, n, t: ops.repeat_back(_leaf(c, n, t, 2), (n // 2, 1)),
    "SILU_BACK": lambda c, n, t: ops.silu_back(_leaf(c, n, t), _leaf(c, n, t, seed=1)),
    "RMS_NORM_BACK": lambda c, n, t: ops.rms_norm_back(_leaf(c, n, t), _leaf(c, n, t, seed=1)),
    "SOFT_MAX_BACK": lambda c, n, t: ops.soft_max_back(_leaf(c, n, t), _leaf(c, n, t, seed=1, low=0.0), 0.5),
    "CROSS_ENTROPY_LOSS_BACK": lambda c, n, t: ops.cross_entropy_loss_back(_leaf(c, 1), _leaf(c, n, t), _leaf(c, n, t, seed=1, low=0.0)),
    "GET_ROWS_BACK": lambda c, n, t: ops.get_rows_back(_leaf(c, n, t), c.from_numpy(np.arange(t, dtype=np.int32) % 50), (n, 50)),
    "MUL_MAT_ID_BACK": lambda c, n, t: ops.mul_mat_id_back(_leaf(c, n, 2 * n, 8), _leaf(c, 2 * n, 2, t, seed=1), _expert_ids(c, 2, t)),
    "OUT_PROD_ID": lambda c, n, t: ops.out_prod_id(_leaf(c, n, 1, t), _leaf(c, 2 * n, 2, t, seed=1), _expert_ids(c, 2, t), 8),
    "OPT_STEP_ADAMW": lambda c, n, t: ops.opt_step_adamw(
        _leaf(c, n, t).mark(Flag.PARAM), *(_leaf(c, n, t, seed=s, low=0.0) for s in (1, 2, 3)),
        c.from_numpy(np.array([0.0, 0.9, 0.999, 1e-8, 0.1, 1.0, 1.0], np.float32))),
}  # fmt: skip


def moe_layer(c, n, t):
    """Router, top-2, gated experts, weighted sum: the nodes of llama.cpp's `build_moe_ffn`."""
    x = _leaf(c, n, t)
    probs = ops.soft_max(ops.mul_mat(_weights(c, "f32", n, 8), x))
    chosen = ops.argsort_top_k(probs, 2)
    w = ops.reshape(ops.get_rows(ops.reshape(probs, 1, 8, t), chosen), 2, t)
    w = ops.reshape(ops.div(w, ops.sum_rows(w)), 1, 2, t)
    cur = ops.reshape(x, n, 1, t)
    gate, up = (ops.mul_mat_id(_weights(c, "q8_0", n, 2 * n, 8), cur, chosen) for _ in range(2))
    y = ops.mul(ops.mul_mat_id(_weights(c, "q8_0", 2 * n, n, 8), ops.swiglu_split(gate, up), chosen), w)
    return ops.add(*(ops.view(y, n, t, nb=(y.nb[2],), offset=i * y.nb[1]) for i in range(2)))


def graph_of(make, n, t, mem_size=2**27):
    """(context, output, graph); what the graph reads has data."""
    ctx = Context(mem_size, name="test")
    with ctx.active():
        out = make(ctx, n, t).mark(Flag.OUTPUT)
    return ctx, out, build(out)
