"""The state that the lessons on graphs and their memory start from. Public names only."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.cgraph import CGraph, build
from workbench.devices import BufferType, CpuBackend
from workbench.devices.threads import SINGLE_THREADED_BLAS
from workbench.errors import GraphFull
from workbench.execution import GraphAllocator, GraphRunner
from workbench.models.session import fill_inputs
from workbench.tensors import Context, Flag, Tensor, ops
from workbench.tensors.context import TENSOR_OVERHEAD

LLAMA_3_8B = models.HParams("llama", n_vocab=128256, n_ctx_train=8192, n_embd=4096, n_layer=32, n_head=32, n_head_kv=8, n_rot=128,
                            n_ff=14336, rms_eps=1e-5, rope_freq_base=500000.0, n_embd_head_k=128, n_embd_head_v=128)  # fmt: skip
"""The published numbers of Llama 3 8B, a dense model."""


class Mlp(NamedTuple):
    """The two-layer network of lessons 03 and 04: its tensors, in the order in which they were made."""

    x: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    hidden: Tensor
    out: Tensor


def build_mlp(context: Context, train: bool = False) -> Mlp:
    """out = w2 silu(w1 x + b1) + b2, from 8 numbers over 32 to 8; `train` marks weights and biases as parameters."""
    made = [context.new_tensor("f32", *ne, name=name) for name, ne in
            {"x": (8, 1), "w1": (8, 32), "b1": (32, 1), "w2": (32, 8), "b2": (8, 1)}.items()]  # fmt: skip
    for t in made[1:] if train else ():
        t.mark(Flag.PARAM)
    x, w1, b1, w2, b2 = made
    with context.active():
        hidden = ops.silu(ops.add(ops.mul_mat(w1, x).named("w1 x"), b1).named("w1 x + b1")).named("hidden")
        out = ops.add(ops.mul_mat(w2, hidden).named("w2 hidden"), b2).named("out")
    return Mlp(x, w1, b1, w2, b2, hidden, out)


class DescribedModel(models.Model):
    """A model of descriptions alone: every weight has a shape and a type, none has bytes. Enough to build and plan its graphs."""

    def __init__(self, hp: models.HParams, kind: str = "f16") -> None:
        want = hp.expected_tensors() | {"output.weight": (hp.n_embd, hp.n_vocab)}
        self.hparams, self.name = hp, f"{hp.n_layer} layers, described"
        self.context = Context(TENSOR_OVERHEAD * len(want), no_alloc=True, name=self.name)
        self.weights = {name: self.context.new_tensor("f32" if len(ne) == 1 else kind, *ne, name=name) for name, ne in want.items()}

    def close(self) -> None:
        """Nothing to give back but the descriptions."""
        self.context.close()


class GraphLesson:
    """What lessons 03 and 04 share."""

    @cached_property
    def shipped(self) -> dict[str, models.Model]:
        """The shipped models of this lesson: a Mixtral of 6 layers of 8 experts, a DeepSeek of 5 whose first is dense."""
        return {name: models.load(name) for name in ("tiny-mixtral-f16", "tiny-deepseek-f16")}

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """What ggml and llama.cpp said about the same graphs: `models/metrics/lesson03_ggml.json`."""
        return json.loads((paths.models_dir() / "metrics" / "lesson03_ggml.json").read_text("utf-8"))

    def mlp(self, context: Context | None = None, train: bool = False) -> Mlp:
        """The two-layer network, in a context of its own unless one is given."""
        return build_mlp(context or Context(2**16, name="mlp"), train)

    def legal(self, graph: CGraph) -> bool:
        """Whether every node stands behind all of its sources."""
        place = {t: i for i, t in enumerate(graph.nodes)}
        return all(place[s] < i for t, i in place.items() for s in t.sources() if s in place)

    def step(self, name: str = "tiny-mixtral-f16", n_tokens: int = 1, n_layer: int | None = None) -> models.StepGraph:
        """The graph of one step of a shipped model, or of its first layers: 256 visible cells of the cache, one row of logits."""
        model = copy.copy(self.shipped[name])
        model.hparams = dataclasses.replace(model.hparams, n_layer=n_layer or model.hparams.n_layer)
        return models.build_step(model, models.KVCache(model.hparams, 256, CpuBackend.buffer_type), n_tokens, 256, 1)

    def dense_step(self, n_layer: int = 32, n_tokens: int = 1, n_kv: int = 512) -> models.StepGraph:
        """The graph of a model with the shapes of Llama 3 8B, from descriptions alone; all rows of logits are wanted."""
        hp = dataclasses.replace(LLAMA_3_8B, n_layer=n_layer)
        return models.build_step(DescribedModel(hp), models.KVCache(hp, n_kv), n_tokens, n_kv, n_tokens)


class Lesson03(GraphLesson):
    """The graph: the article's network, one step of both shipped models, a large model from descriptions."""

    def residual(self) -> tuple[Tensor, Tensor]:
        """y = v h + h with h = silu(w x): (y, h)."""
        context = Context(2**14, name="residual")
        x, w, v = (context.from_numpy(np.linspace(-1, 1, n).reshape(shape), name=name) for name, n, shape in
                   (("x", 4, (4,)), ("w", 16, (4, 4)), ("v", 16, (4, 4))))  # fmt: skip
        h = ops.silu(ops.mul_mat(w, x).named("w x")).named("h")
        return ops.add(ops.mul_mat(v, h).named("v h"), h).named("y"), h

    def doublings(self, n: int) -> Tensor:
        """x + x, n times over."""
        x = Context(2**14, name="doublings").from_numpy([1.0], name="x")
        for _ in range(n):
            x = ops.add(x, x)
        return x

    def scores(self) -> Tensor:
        """The attention scores of the exercise: p = soft_max(k q), y = p + s."""
        with Context(2**14, no_alloc=True, name="scores").active() as context:
            x, wq, wk = (context.new_tensor("f32", 8, n, name=name) for name, n in (("x", 4), ("wq", 8), ("wk", 8)))
            q, k = ops.mul_mat(wq, x).named("q"), ops.mul_mat(wk, x).named("k")
            s = ops.mul_mat(k, q).named("s")
            return ops.add(ops.soft_max(s).named("p"), s).named("y")

    def executions(self, graph: CGraph) -> Counter[Tensor]:
        """How often a run of the graph computed each node, as its plan reports it."""
        ran: Counter[Tensor] = Counter()

        class Count:
            def node(self, i: int, start_ns: int, end_ns: int) -> None:
                ran[graph.nodes[i]] += 1

        GraphRunner().run(graph, Count())
        return ran

    def layer_size(self, step: models.StepGraph, layer: int) -> int:
        """Nodes of one layer of a step."""
        return sum(s.last - s.first for s in step.segments if s.layer == layer)

    def is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is marked as a parameter, to be trained."""
        return bool(tensor.flags & Flag.PARAM)

    def fits(self, n_runs: int) -> bool:
        """Whether a graph of the default size takes `n_runs` expansions of the network."""
        try:
            self.grow("none", n_runs)
        except GraphFull:
            return False
        return True

    def grow(self, remedy: str, n_runs: int, size: int = 2048) -> tuple[CGraph, Context]:
        """Expand the network `n_runs` times: "none", "clear" or "new" graph for each run, or "keep" all and only write x."""
        context = Context(2**22, no_alloc=True, name="runs")
        weights = build_mlp(context)
        graph = CGraph(size=size)
        for run in range(n_runs):
            if remedy == "clear":
                graph.clear()
            if remedy == "new":
                graph = CGraph(size=size)
            if remedy != "keep" or run == 0:
                with context.active():
                    hidden = ops.silu(ops.add(ops.mul_mat(weights.w1, weights.x), weights.b1))
                    graph.build_forward_expand(ops.add(ops.mul_mat(weights.w2, hidden), weights.b2))
        return graph, context


# fmt: off
def eager(x: np.ndarray, blocks: Iterable[Sequence[np.ndarray]]) -> np.ndarray:
    """Call by call, in NumPy: every operation makes a new array."""
    for w, b, v in blocks:
        h = x @ w.T + b
        h = h / (1 + np.exp(-h))                            # silu
        x = h @ v.T + x
    return x


def described(x: Tensor, blocks: Iterable[Sequence[Tensor]]) -> Tensor:
    """The same as a graph: every operation makes a description."""
    for w, b, v in blocks:
        h = ops.silu(ops.add(ops.mul_mat(w, x), b))
        x = ops.add(ops.mul_mat(v, h), x)
    return x
# fmt: on


@dataclass
class Stack:
    """Residual blocks of the same width: weights and input as arrays, and the graph over the same numbers, without memory yet."""

    values: np.ndarray
    arrays: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    x: Tensor
    out: Tensor
    graph: CGraph


class _Counted(np.ndarray):
    """An array whose operations note each new array that they make."""

    made: list[int]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [i.view(np.ndarray) if isinstance(i, _Counted) else i for i in inputs]
        result = getattr(ufunc, method)(*plain, **kwargs).view(_Counted)
        result.made = self.made
        self.made.append(result.nbytes)
        return result

    def __array_finalize__(self, parent: Any) -> None:
        self.made = getattr(parent, "made", [])


class Lesson04(GraphLesson):
    """Static or eager: a stack of residual blocks both ways, and allocators that only measure."""

    def stack(self, n_blocks: int = 4, n_tokens: int = 64, width: int = 256) -> Stack:
        """Always the same numbers. One activation takes n_tokens · width · 4 bytes, 64 KiB by default."""
        rng = np.random.default_rng(4)

        def draw(*shape: int, scale: float = 1) -> np.ndarray:
            return rng.standard_normal(shape, np.float32) * np.float32(scale)

        arrays = [(draw(width, width, scale=1 / 16), draw(width), draw(width, width, scale=1 / 16)) for _ in range(n_blocks)]
        weights = Context(n_blocks * (8 * width * (width + 1) + 2**11), name="weights")
        tensors = [[weights.from_numpy(a) for a in block] for block in arrays]
        with Context(2**16, no_alloc=True, name="activations").active() as context:
            x = context.new_tensor("f32", width, n_tokens, name="x").mark(Flag.INPUT)
            out = described(x, tensors).mark(Flag.OUTPUT)
        graph = build(out)
        for i, t in enumerate(graph.nodes):
            t.name = f"{('wx', '+b', 'silu', 'vh', 'sum')[i % 5]} {i // 5}"
        return Stack(draw(n_tokens, width), arrays, x, out, graph)

    def arrays_made(self, run: Callable[..., Any], x: np.ndarray, *args: Any) -> list[int]:
        """Bytes of each array that NumPy makes in `run(x, …)`."""
        counted = x.view(_Counted)
        counted.made = []
        run(counted, *args)
        return counted.made

    def peak(self, run: Callable[..., Any], *args: Any) -> int:
        """Most bytes that `run` holds at once beyond what was there before, as tracemalloc sees it."""
        run(*args)  # the first run of anything also fills caches
        tracemalloc.start()
        try:
            run(*args)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            run(*args)
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    def milliseconds(self, run: Callable[[], Any], n: int = 15) -> float:
        """Median time of a call, with BLAS on one thread, as a plan runs it."""
        times = []
        with SINGLE_THREADED_BLAS:
            for _ in range(n):
                start = perf_counter()
                run()
                times.append(1000 * (perf_counter() - start))
        return sorted(times)[n // 2]

    def measure(self, graph: CGraph) -> int:
        """Bytes of compute memory for a graph whose weights and cache lie elsewhere."""
        return GraphAllocator(self._types).measure(graph, *self._ids(graph))[0]

    def decisions(self, graph: CGraph) -> list[tuple[Any, ...]]:
        """What the allocator decides about the compute memory of a graph."""
        made = GraphAllocator(self._types).decisions(graph, *self._ids(graph))
        return [d for d in made if not (d[0] in ("place", "free") and d[2] == 1)]

    _types = (CpuBackend.buffer_type, BufferType("elsewhere"))

    def _ids(self, graph: CGraph) -> tuple[list[int], list[int]]:
        return [0] * len(graph.nodes), [int(not t.flags & Flag.INPUT) for t in graph.leafs]

    def crossing(self, step: models.StepGraph, kind: str) -> list[tuple[Tensor, bool]]:
        """Each use of a result by a node on the other side, if segments of this kind ran elsewhere: (source, used there?)."""
        nodes = step.graph.nodes
        there = {t for part in step.segments if part.kind == kind for t in nodes[part.first : part.last]}
        return [(s, t in there) for t in nodes for s in t.sources() if s.op != "NONE" and (s in there) != (t in there)]

    def disjoint(self, graph: CGraph) -> bool:
        """Whether no two tensors that are alive at the same time share a byte."""
        live: dict[Tensor, tuple[int, int]] = {}
        for kind, t, *rest in self.decisions(graph):
            if kind == "place":
                start, end = rest[2], rest[2] + rest[3]
                if any(start < b and a < end for a, b in live.values()):
                    return False
                live[t] = (start, end)
            elif kind == "reuse":
                live[t] = live.pop(rest[0])
            elif kind == "free":
                live.pop(t)
        return True

    def lifetimes(self, graph: CGraph) -> list[tuple[int, int, int]]:
        """(first node, last node, bytes) of each result: from its own computation to its last use; inputs from the start."""
        last = {t.root(): len(graph.nodes) for t in graph.nodes if t.flags & Flag.OUTPUT}
        for i, node in enumerate(graph.nodes):
            for s in node.sources():
                last[s.root()] = max(i, last.get(s.root(), 0))
        first = {t: 0 for t in graph.leafs if t.flags & Flag.INPUT} | {t: i for i, t in enumerate(graph.nodes) if t.view_src is None}
        return [(i, last.get(t, i), t.nbytes) for t, i in first.items()]

    def without_in_place(self, graph: CGraph) -> CGraph:
        """The same graph, in which no op may work in place."""
        for t in graph.nodes:
            if t.spec is not None:
                t.spec = dataclasses.replace(t.spec, in_place=False)
        return graph

    def keep(self, graph: CGraph, name: str) -> CGraph:
        """The same graph with every node whose name begins with `name` marked as an output."""
        for t in graph.nodes:
            if t.name.startswith(name):
                t.mark(Flag.OUTPUT)
        return graph

    def events(self, graph: CGraph) -> list[tuple[str, int, int]]:
        """The allocator's requests as ("take", block, bytes) and ("free", block, bytes); a result in place keeps the block."""
        blocks: dict[Tensor, int] = {}
        out = []
        for kind, t, *rest in self.decisions(graph):
            if kind in ("place", "free"):
                block = blocks.setdefault(t, len(blocks)) if kind == "place" else blocks[t]
                out.append(("take" if kind == "place" else "free", block, -(-rest[3] // 32) * 32))
            elif kind == "reuse":
                blocks[t] = blocks[rest[0]]
        return out

    def most_alive(self, graph: CGraph) -> int:
        """The most bytes alive at one node, counted up and down along the lives."""
        change: Counter[int] = Counter()
        for first, last, size in self.lifetimes(graph):
            change[first] += size
            change[last + 1] -= size
        return max(itertools.accumulate(change[i] for i in sorted(change)))

    def offsets(self, graph: CGraph) -> list[int]:
        """Where the allocator puts each block that is taken, in order."""
        return [d[4] for d in self.decisions(graph) if d[0] == "place"]

    @cached_property
    def long_run(self) -> list[dict[str, int]]:
        """The counters of a session after a prompt of 12 tokens and after each of 300 new ones: it crosses 256 cells on the way."""
        model, rows = self.shipped["tiny-mixtral-f16"], []
        with models.Session(model, n_ctx=512) as session:
            for tokens in (model.tokenizer.encode("And God said unto Moses, Go in unto"), *([5],) * 300):
                session.decode(tokens)
                rows.append({"tokens": session.n_past(), "n_kv": session.cache.n_kv(), "builds": session.n_graph_builds,
                             "reuses": session.n_graph_reuses, "plans": session.n_plans})  # fmt: skip
        return rows

    def steps_built(self, n_prompt: int, n_new: int) -> int:
        """Graphs that a session builds for `n_new` single tokens behind a prompt of `n_prompt`."""
        with models.Session(self.shipped["tiny-mixtral-f16"], n_ctx=768) as session:
            session.decode([5] * n_prompt)
            before = session.n_graph_builds
            for _ in range(n_new):
                session.decode([5])
            return session.n_graph_builds - before

    def shares(self) -> dict[str, float]:
        """Milliseconds of a decode step of the Mixtral: building its graph, placing it, planning it, and running it."""
        model, backend = self.shipped["tiny-mixtral-f16"], CpuBackend()
        cache = models.KVCache(model.hparams, 256, backend.buffer_type)
        build = lambda: models.build_step(model, cache, 1, 256, 1)  # noqa: E731
        step, allocator, zero = build(), GraphAllocator(backend.buffer_type), np.zeros(1, np.int64)
        allocator.alloc(step.graph)
        plan, cells = backend.plan(step.graph), cache.take(zero, zero)

        def run() -> None:
            fill_inputs(step, cache, zero, zero, zero, cells, zero)
            plan.run()

        bare = build().graph  # without memory, so that placing it is work
        parts = {"build": build, "place": lambda: self.measure(bare), "plan": lambda: backend.plan(step.graph), "run": run}
        return {name: self.milliseconds(part) for name, part in parts.items()}

    def shares_8b(self, bytes_per_second: float) -> dict[str, float]:
        """The same for Llama 3 8B: building and placing measured, planning taken to grow with the nodes, running as reading the weights."""
        step, small = self.dense_step(), self.shares()
        read = sum(t.nbytes for t in step.graph.leafs if t.name.endswith("weight") and t.op == "NONE")
        build_ms = self.milliseconds(self.dense_step, 3)
        return {"build": build_ms, "place": self.milliseconds(lambda: self.measure(step.graph), 3),
                "plan": small["plan"] * len(step.graph.nodes) / 318, "run": 1000 * read / bytes_per_second}  # fmt: skip
