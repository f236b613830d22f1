"""The same mixture-of-experts block four times: ours, a plain NumPy loop, real ggml and PyTorch.

Router d -> E, top-2 by softmax then renormalised, SwiGLU experts. Each peer takes the same weights and returns a callable
that computes the block once; `None` where its package is not installed (`pip install "moe-workbench[bench]"`).
"""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Run = Callable[[], np.ndarray]


@dataclass
class Block:
    """Sizes and weights of the block, f32 in NumPy's order: router (E, d); gate, up (E, f, d); down (E, d, f); x (t, d)."""

    n_tokens: int
    half: bool = False
    d: int = 512
    f: int = 1024
    n_expert: int = 8
    k: int = 2

    def __post_init__(self):
        rng = np.random.default_rng(0)
        make = lambda *shape: rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))  # noqa: E731
        self.router, self.x = make(self.n_expert, self.d), make(self.n_tokens, self.d) * 20
        stored = np.float16 if self.half else np.float32
        self.gate, self.up = (make(self.n_expert, self.f, self.d).astype(stored) for _ in range(2))
        self.down = make(self.n_expert, self.d, self.f).astype(stored)


def ours(block: Block, n_threads: int) -> Run:
    """Our own graph, planned once."""
    import workbench as wb
    from workbench import ops

    weights = wb.Context(2**28, name="weights")
    stored = [weights.from_numpy(w) for w in (block.router, block.gate, block.up, block.down)]
    for t in stored:
        t.storage.usage = wb.Usage.WEIGHTS
    router, gate, up, down = stored
    with wb.Context(2**22, no_alloc=True).active() as ctx:
        x = ctx.new_tensor("f32", block.d, block.n_tokens).mark(wb.Flag.INPUT)
        out = moe(ops, router, gate, up, down, x, block).mark(wb.Flag.OUTPUT)
        graph = wb.build(out)
    runner = wb.GraphRunner(wb.CpuBackend(n_threads=n_threads, dequant_cache_bytes=2**28))
    runner.prepare(graph)
    x.set(block.x)

    def run() -> np.ndarray:
        runner.run(graph)
        return out.numpy()

    return run


def moe(ops, router, gate, up, down, x, block):
    """llama.cpp's order of nodes, with our constructors."""
    k, t = block.k, block.n_tokens
    probs = ops.soft_max(ops.mul_mat(router, x))
    chosen = ops.argsort_top_k(probs, k)
    weights = ops.get_rows(ops.reshape(probs, 1, block.n_expert, t), chosen)
    weights = ops.reshape(weights, k, t)
    weights = ops.reshape(ops.div(weights, ops.sum_rows(weights)), 1, k, t)
    cur = ops.reshape(x, block.d, 1, t)
    hidden = ops.swiglu_split(ops.mul_mat_id(gate, cur, chosen), ops.mul_mat_id(up, cur, chosen))
    routed = ops.mul(ops.mul_mat_id(down, hidden, chosen), weights)
    total, *parts = (ops.view(routed, block.d, t, nb=(routed.nb[2],), offset=i * routed.nb[1]) for i in range(k))
    for part in parts:
        total = ops.add(total, part)
    return total


def plain_numpy(block: Block) -> Run:
    """The loop one would write: a product per used expert, weights cast where they are f16."""

    def run() -> np.ndarray:
        logits = block.x @ block.router.T
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        top = np.argsort(-p, axis=-1)[:, : block.k]
        w = np.take_along_axis(p, top, -1)
        w /= w.sum(-1, keepdims=True)
        out = np.zeros_like(block.x)
        for e in np.unique(top):
            rows, slot = np.nonzero(top == e)
            x = block.x[rows]
            g, u = x @ block.gate[e].astype(np.float32).T, x @ block.up[e].astype(np.float32).T
            out[rows] += w[rows, slot, None] * ((g / (1 + np.exp(-g)) * u) @ block.down[e].astype(np.float32).T)
        return out

    return run


def pytorch(block: Block, n_threads: int) -> Run | None:
    """PyTorch's eager loop over experts, weights in the stored type."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(n_threads)
    x, router, gate, up, down = (torch.from_numpy(a) for a in (block.x, block.router, block.gate, block.up, block.down))
    silu = torch.nn.functional.silu

    def run() -> np.ndarray:
        with torch.inference_mode():
            top = torch.softmax(x @ router.T, -1).topk(block.k, -1)
            w = top.values / top.values.sum(-1, keepdim=True)
            out = torch.zeros_like(x)
            for e in range(block.n_expert):
                rows, slot = torch.nonzero(top.indices == e, as_tuple=True)
                if len(rows):
                    h = x[rows].to(gate.dtype)
                    y = (silu(h @ gate[e].T) * (h @ up[e].T)) @ down[e].T
                    out.index_add_(0, rows, w[rows, slot, None] * y.float())
            return out.numpy()

    return run


class Ggml:
    """The few functions of real ggml that the block needs, through ctypes over llama-cpp-python's libraries."""

    POINTER = ctypes.c_void_p

    def __init__(self):
        import llama_cpp

        lib = pathlib.Path(llama_cpp.__file__).parent / "lib"
        self.base = ctypes.CDLL(str(next(lib.glob("libggml-base.so"))), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(next(lib.glob("libggml-cpu.so"))), ctypes.RTLD_GLOBAL)

    class Params(ctypes.Structure):
        """ggml_init_params."""

        _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]

    def start(self, nbytes):
        """A context of so many bytes; becomes the first argument of later calls."""
        init = self.base.ggml_init
        init.restype, init.argtypes = self.POINTER, [self.Params]
        self.ctx = init(self.Params(nbytes, None, False))

    def __getattr__(self, name):
        def call(*args):
            f = getattr(self.base, "ggml_" + name)
            f.restype = self.POINTER
            kinds = [ctypes.c_void_p if isinstance(a, Pointer) else ctypes.c_int64 for a in args]
            f.argtypes = [self.POINTER, *kinds]
            return Pointer(f(self.ctx, *args))

        return call

    def leaf(self, array):
        """A tensor with a copy of the array."""
        kind = {np.dtype(np.float32): 0, np.dtype(np.float16): 1}[array.dtype]
        ne = (ctypes.c_int64 * array.ndim)(*array.shape[::-1])
        new, get = self.base.ggml_new_tensor, self.base.ggml_get_data
        new.restype, new.argtypes = self.POINTER, [self.POINTER, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64)]
        get.restype, get.argtypes = self.POINTER, [self.POINTER]
        t = Pointer(new(self.ctx, kind, array.ndim, ne))
        ctypes.memmove(get(t), np.ascontiguousarray(array).ctypes.data, array.nbytes)
        return t

    def compute(self, out, n_threads, shape):
        """A callable that runs the graph of `out` once, and its result as an array."""
        graph = self.new_graph()
        expand = self.base.ggml_build_forward_expand
        expand.restype, expand.argtypes = None, [self.POINTER, self.POINTER]
        expand(graph, out)
        # ggml_graph_compute_with_ctx would take a new work buffer at each call: plan once, compute with the plan
        plan = self.cpu.ggml_graph_plan
        plan.restype, plan.argtypes = Plan, [self.POINTER, ctypes.c_int, self.POINTER]
        run_plan = self.cpu.ggml_graph_compute
        run_plan.restype, run_plan.argtypes = ctypes.c_int, [self.POINTER, ctypes.POINTER(Plan)]
        pool = self._pool(n_threads)
        cplan = plan(graph, n_threads, pool)
        work = np.empty(max(cplan.work_size, 1) + 64, np.uint8)
        cplan.work_data = work.ctypes.data
        data = self.base.ggml_get_data(out)
        result = np.frombuffer((ctypes.c_float * int(np.prod(shape))).from_address(data), np.float32).reshape(shape)

        def run() -> np.ndarray:
            assert run_plan(graph, ctypes.byref(cplan)) == 0 and work is not None
            return result

        return run

    def _pool(self, n_threads):
        """A thread pool that lives as long as the process (else ggml starts threads at each run)."""
        default = self.base.ggml_threadpool_params_default
        default.restype, default.argtypes = PoolParams, [ctypes.c_int]
        params = default(n_threads)
        new = self.cpu.ggml_threadpool_new
        new.restype, new.argtypes = self.POINTER, [ctypes.POINTER(PoolParams)]
        return new(ctypes.byref(params))


class Pointer(ctypes.c_void_p):
    """A ggml pointer, told apart from a number."""


class Plan(ctypes.Structure):
    """ggml_cplan."""

    _fields_ = [("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("n_threads", ctypes.c_int),
                ("threadpool", ctypes.c_void_p), ("abort", ctypes.c_void_p), ("abort_data", ctypes.c_void_p),
                ("use_ref", ctypes.c_bool)]  # fmt: skip


class PoolParams(ctypes.Structure):
    """ggml_threadpool_params."""

    _fields_ = [("cpumask", ctypes.c_bool * 512), ("n_threads", ctypes.c_int), ("prio", ctypes.c_int),
                ("poll", ctypes.c_uint32), ("strict_cpu", ctypes.c_bool), ("paused", ctypes.c_bool)]  # fmt: skip


def real_ggml(block: Block, n_threads: int) -> Run | None:
    """Real ggml's CPU back end, graph and plan made once."""
    try:
        g = Ggml()
    except (ImportError, StopIteration, OSError):
        return None
    size = sum(a.nbytes for a in (block.router, block.gate, block.up, block.down, block.x))
    g.start(size + block.n_tokens * block.k * (4 * block.f + 4 * block.d) * 4 + 2**22)
    router, gate, up, down, x = (g.leaf(a) for a in (block.router, block.gate, block.up, block.down, block.x))
    k, t, d = block.k, block.n_tokens, block.d
    probs = g.soft_max(g.mul_mat(router, x))
    chosen = g.argsort_top_k(probs, k)
    weights = g.reshape_2d(g.get_rows(g.reshape_3d(probs, 1, block.n_expert, t), chosen), k, t)
    weights = g.reshape_3d(g.div(weights, g.sum_rows(weights)), 1, k, t)
    cur = g.reshape_3d(x, d, 1, t)
    hidden = g.swiglu_split(g.mul_mat_id(gate, cur, chosen), g.mul_mat_id(up, cur, chosen))
    routed = g.mul(g.mul_mat_id(down, hidden, chosen), weights)
    first, second = (g.view_2d(routed, d, t, k * d * 4, i * d * 4) for i in range(2))
    return g.compute(g.add(first, second), n_threads, (t, d))
