"""The state that lesson 05 starts from: layers to plan and to run, and what threads cost on a recorded machine."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.devices import HOST_MEMORY, CpuBackend, Plan, cut
from workbench.devices.plan import needs_work
from workbench.devices.threads import Workers
from workbench.execution import GraphRunner
from workbench.lessons.graph_states import DescribedModel, GraphLesson
from workbench.models.session import fill_inputs
from workbench.tensors import Flag, Tensor, Usage

TINYLLAMA = models.HParams("llama", n_vocab=32000, n_ctx_train=2048, n_embd=2048, n_layer=22, n_head=32, n_head_kv=4, n_rot=64,
                           n_ff=5632, rms_eps=1e-5)  # fmt: skip
"""The published numbers of TinyLlama-1.1B, a dense model of 1,100,048,384 parameters."""
HALF = dataclasses.replace(TINYLLAMA, n_vocab=256, n_embd=1024, n_layer=1, n_head=16, n_head_kv=2, n_ff=2816)
"""One layer of half TinyLlama's width: small enough to run on anything, too large for a processor's caches."""
PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")


class Machine(NamedTuple):
    """A processor by its rates, in one nanosecond: f32 operations and bytes read by one core, bytes read by all cores together;
    and in nanoseconds: waking our threads once, each thread beside the caller, and ggml's barrier for each such thread."""

    flops: float
    memory: float
    memory_all: float
    wake_ns: float
    helper_ns: float
    barrier_ns: float


class Work(NamedTuple):
    """What one node costs and how it is cut: tasks that may run side by side."""

    node: Tensor
    flops: int
    moved: int
    tasks: int

    def ns(self, m: Machine, at_once: int = 1) -> float:
        """Time without overheads on `at_once` cores that take tasks in turns: bound by arithmetic or by memory (a roofline)."""
        share = -(-self.tasks // at_once) / self.tasks  # of the work, on the core that has most of it
        return max(self.flops * share / m.flops, self.moved * share / m.memory, self.moved / m.memory_all)


class Lesson05(GraphLesson):
    """Threads and the plan: TinyLlama by its shapes, half a layer of it that runs, lesson 00's model, a recorded machine."""

    tinyllama = TINYLLAMA

    @cached_property
    def recorded(self) -> dict[str, Any]:
        """What was measured once, and where: `models/metrics/lesson05_threads.json`."""
        return json.loads((paths.models_dir() / "metrics" / "lesson05_threads.json").read_text("utf-8"))

    @property
    def machine(self) -> Machine:
        """The recorded machine, with the memory of an assumed one with more cores."""
        return Machine(**self.recorded["machine"])

    def layer(self, n_tokens: int) -> list[Tensor]:
        """The nodes of one layer of TinyLlama, as llama.cpp builds them, from descriptions alone."""
        hp = dataclasses.replace(TINYLLAMA, n_layer=2)  # in the last layer, rows that nobody wants are left out
        n_kv = -(-n_tokens // 256) * 256
        step = models.build_step(DescribedModel(hp, "f32"), models.KVCache(hp, n_kv), n_tokens, n_kv, n_tokens)
        return [t for s in step.segments if s.layer == 0 for t in step.graph.nodes[s.first : s.last]]

    def moe_layer(self) -> list[Tensor]:
        """The nodes of layer 2 of lesson 00's model, for one token."""
        step = self.step()
        return [t for s in step.segments if s.layer == 2 for t in step.graph.nodes[s.first : s.last]]

    @cached_property
    def model(self) -> DescribedModel:
        """One layer of half the width, with numbers in it: always the same ones."""
        model, rng = DescribedModel(HALF, "f32"), np.random.default_rng(5)
        buffer, at = HOST_MEMORY.alloc_buffer(sum(t.nbytes for t in model.weights.values()), Usage.WEIGHTS), 0
        for t in model.weights.values():
            t.place(buffer, at)
            t.set((rng.random(t.shape, np.float32) - 0.5) * np.float32(3 / t.ne[0]) ** 0.5 if t.ne[1] > 1 else np.ones(t.shape, np.float32))
            at += t.nbytes
        return model

    def prepare(self, n_tokens: int, n_threads: int = 1) -> tuple[Plan, models.StepGraph]:
        """A text of `n_tokens` through that layer: planned for these threads on a backend of its own, inputs filled."""
        hp, runner = self.model.hparams, GraphRunner(CpuBackend(n_threads))
        cache = models.KVCache(hp, n_tokens, HOST_MEMORY)
        step = models.build_step(self.model, cache, n_tokens, cache.n_ctx, n_tokens)
        for leaf in vars(step.inputs).values():
            leaf.mark(Flag.OUTPUT)  # else a later node takes over its memory, and a second run would read that
        plan = runner.prepare(step.graph)
        at, seq = np.arange(n_tokens), np.zeros(n_tokens, np.int64)
        fill_inputs(step, cache, at % hp.n_vocab, at, seq, cache.take(seq, at), at)
        self._kept = [*getattr(self, "_kept", ()), runner, cache]  # a plan does not keep the compute memory it is bound to
        return plan, step

    def works(self, nodes: Iterable[Tensor], task_ns: int | None = None) -> list[Work]:
        """Cost and cut of each node that needs work; `task_ns` is the least size of a task, where not the plan's own."""
        return [Work(t, t.spec.flops(t), t.spec.moved(t), len(cut(t, task_ns)[1])) for t in nodes if needs_work(t) and t.spec]

    def simulate(self, works: Iterable[Work], n_threads: int, machine: Machine | None = None) -> float:
        """Nanoseconds of a run with our plan: one node after another, threads woken only where a node has several tasks."""
        m, total = machine or self.machine, 0.0
        for w in works:
            at_once = min(n_threads, w.tasks)
            total += w.ns(m, at_once) + (m.wake_ns + m.helper_ns * (at_once - 1) if at_once > 1 else 0)
        return total

    def simulate_ggml(self, works: Iterable[Work], n_threads: int, machine: Machine | None = None) -> float:
        """The same in ggml's way: products are cut for any number of threads, other nodes by rows, a barrier after each."""
        m, total = machine or self.machine, 0.0
        for w in works:
            at_once = n_threads if w.node.op in PRODUCTS else min(n_threads, w.node.n_rows)
            total += w._replace(tasks=at_once).ns(m, at_once) + m.barrier_ns * (n_threads - 1)
        return total

    def ggml_threads(self, nodes: Sequence[int], n_threads: int) -> list[tuple[int, int, int]]:
        """Re-enact ggml's threads on nodes of so many chunks: (thread, node, chunks it took there), in order of node and thread.

        Each thread walks all nodes; in each it takes chunks from a counter, then waits at a barrier for the others.
        """
        barrier, log = threading.Barrier(n_threads), list[tuple[int, int, int]]()
        counters = [itertools.count().__next__ for _ in nodes]

        def walk(me: int) -> None:
            for at, chunks in enumerate(nodes):
                took = 0
                while counters[at]() < chunks:
                    took += 1
                log.append((me, at, took))
                barrier.wait()

        threads = [threading.Thread(target=walk, args=(i,)) for i in range(n_threads)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return sorted(log, key=lambda entry: entry[1::-1])

    def makespan(self, tasks: Sequence[float], n_threads: int) -> float:
        """When the last of these tasks ends, if each free thread takes the next one."""
        free = [0.0] * n_threads
        for ns in tasks:
            heapq.heapreplace(free, free[0] + ns)
        return max(free)

    def wake_us(self, n_threads: int, rounds: int = 300) -> float:
        """Measured here: microseconds for waking `n_threads` - 1 threads for tasks that do nothing, and waiting for them."""
        workers, tasks = Workers(n_threads), [[_nothing] * n_threads] * n_threads
        times = [_elapsed(lambda: workers.run(tasks)) for _ in range(rounds)]
        workers.close()
        return min(times) / 1000

    def best_ms(self, plan: Plan, rounds: int = 3) -> float:
        """Measured here: the fastest of a few runs, in milliseconds."""
        return min(_elapsed(plan.run) for _ in range(rounds)) / 1e6


def speed_ups(simulate: Callable[[Sequence[Work], int], float], works: Sequence[Work], counts: Iterable[int]) -> list[float]:
    """How much faster than on one thread, for each number of threads."""
    alone = simulate(works, 1)
    return [alone / simulate(works, n) for n in counts]


def critical_path(nodes: Sequence[Tensor], costs: Mapping[Tensor, float]) -> tuple[dict[Tensor, float], list[Tensor]]:
    """When each node would end if it started as soon as its sources are there; and the chain that takes longest.

    A node without an entry in `costs` costs nothing.
    """
    ends: dict[Tensor, float] = {}
    before: dict[Tensor, Tensor | None] = {}
    for t in nodes:
        before[t] = max((s for s in t.sources() if s in ends), key=ends.__getitem__, default=None)
        ends[t] = costs.get(t, 0.0) + (ends[before[t]] if before[t] is not None else 0.0)  # type: ignore[index]
    chain = [max(ends, key=ends.__getitem__)]
    while (source := before[chain[-1]]) is not None:
        chain.append(source)
    return ends, chain[::-1]


def _nothing() -> None:
    return None


def _elapsed(call: Callable[[], Any]) -> int:
    start = perf_counter_ns()
    call()
    return perf_counter_ns() - start
