"""The state that lesson 14 starts from: the tiny Mixtral over several cards, and a pipeline of products whose times are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.cgraph import build
from workbench.devices.cost import Speed
from workbench.devices.simulated import simulated_machine
from workbench.errors import ParameterError
from workbench.lessons.run_states import RunLesson
from workbench.models.planning import plan_schedule
from workbench.models.session import fill_inputs
from workbench.scheduler import Scheduler
from workbench.scheduler.waits import Make
from workbench.scheduler.whatif import Case, Draft
from workbench.tensors import Tensor, ops
from workbench.trace import Trace
from workbench.views.run_data import Run, nbytes, run_data


class Piped(NamedTuple):
    """Several batches of a prompt over several cards: trace, virtual time, logits of the last row, compute memory per device."""

    trace: Trace
    ns: int
    logits: np.ndarray
    memory: dict[str, int]

    @property
    def run(self) -> Run:
        """What the trace says."""
        return run_data(self.trace)


class Lesson14(RunLesson):
    """Pipeline parallelism: the tiny Mixtral over two or three cards, batch after batch."""

    published = {512: (3936.45, 4505.63), 1024: (4269.13, 5140.05), 2048: (3996.18, 5324.33), 4096: (3148.68, 4974.44)}
    """llama.cpp pull request 4918 (January 2024): Llama 7B Q4_0 on a 3090 Ti and a 3080, micro-batches of 256 tokens; tokens per second
    by length of the prompt, before and after."""

    def prompt(self, n_batches: int, slots: int = 4, cards: int = 2, shares: Sequence[float] = (3, 4), n_tokens: int = 32,
               wait: bool = False) -> Piped:  # fmt: skip
        """`n_batches` batches of `n_tokens` tokens through the Mixtral, one after another, without waiting between them unless `wait`.

        slots: of the pipeline (1: none). shares: how the layers and the output are divided. A run is kept: the same call gives it again.
        """
        key = n_batches, slots, cards, tuple(shares), n_tokens, wait
        if key not in self._runs:
            self._runs[key] = self._prompt(*key)
        return self._runs[key]

    @cached_property
    def _runs(self) -> dict[Any, Piped]:
        return {}

    def _prompt(self, n_batches: int, slots: int, cards: int, shares: Sequence[float], n_tokens: int, wait: bool) -> Piped:
        backends = simulated_machine(cards)
        placed = models.place_weights(self.model, backends, shares=shares)
        scheduler, machine = Scheduler(backends, parallel=slots), backends[0].machine
        n_ctx = -(-n_batches * n_tokens // 256) * 256
        cache = models.KVCache(self.model.hparams, n_ctx, placed.layer_types)
        steps = [models.build_step(placed, cache, n_tokens, n_ctx, 1) for _ in range(n_batches)]
        scheduler.reserve(steps[0].graph)
        scheduler.trace, start = Trace("virtual"), machine.now
        tokens = self.tokens(n_batches * n_tokens)
        for i, step in enumerate(steps):
            at, seq = np.arange(i * n_tokens, (i + 1) * n_tokens), np.zeros(n_tokens, np.int64)
            scheduler.reset()
            scheduler.alloc(step.graph)
            fill_inputs(step, cache, tokens[at], at, seq, cache.take(seq, at), np.array([n_tokens - 1]))
            scheduler.compute_async(step.graph)
            if wait:
                scheduler.synchronize()
        scheduler.synchronize()
        memory = {b.name: scheduler.buffer_size(i) for i, b in enumerate(backends)}
        return Piped(scheduler.trace, machine.now - start, steps[-1].logits.numpy().copy(), memory)

    @staticmethod
    def stages(piped: Piped) -> dict[str, float]:
        """Nanoseconds that each card works for one batch."""
        spans, runs = piped.run.spans, piped.run.runs
        return {d: sum(s.ns for s in spans if s.lane[0] == d) / runs for d in piped.memory if d != "CPU"}

    @staticmethod
    def busy(piped: Piped) -> dict[str, float]:
        """The share of the time in which each card works."""
        return {d: ns * piped.run.runs / piped.ns for d, ns in Lesson14.stages(piped).items()}

    @staticmethod
    def copies(piped: Piped) -> dict[tuple[str, str], list[str]]:
        """The copies that the last graph made: (original, device) -> their names, one for each slot."""
        out: dict[tuple[str, str], list[str]] = {}
        trace, names = piped.trace, [d for d, _, _ in piped.run.devices]
        begin = max(i for i, e in enumerate(trace.events) if e.kind == "backend")
        for e in trace.events[begin:]:
            if e.kind == "copy":
                d = trace.described(e)
                original = (trace.graph or {})["tensors"][d["tensor"]]["name"]
                out.setdefault((original, names[int(d["backend"])]), []).append(str(d["copy"]))
        return out

    @staticmethod
    def bytes_per_slot(piped: Piped) -> dict[str, int]:
        """What one slot more takes on each device: every tensor that has a copy for each slot, rounded up to the memory's alignment."""
        sizes = {t["name"]: nbytes(t) for t in (piped.trace.graph or {})["tensors"]}
        align = {kind.name: kind.alignment for kind in (b.buffer_type for b in simulated_machine(len(piped.memory) - 1))}
        out = dict.fromkeys(piped.memory, 0)
        for name, device in Lesson14.copies(piped):
            out[device] += -(-sizes[name] // align[device]) * align[device]
        return out

    def planned(self, cards: int, n_gpu_layers: int, n_layer: int, overrides: Sequence[str]) -> bool:
        """Whether the planner pipelines the Mixtral with these options."""
        if n_layer != self.model.hparams.n_layer:
            raise ParameterError(f"{n_layer} layers", f"{self.model.hparams.n_layer}, as the Mixtral has")
        devices = "two-rtx3090" if cards == 2 else "rtx3090-pcie4"
        return bool(self.plan(devices, n_gpu_layers=n_gpu_layers, overrides=dict.fromkeys(overrides, "CPU")).pipelined)

    def plan(self, devices: str = "two-rtx3090", **options: Any) -> Any:
        """What the planner says of the Mixtral on a machine, with llama.cpp's options (`workbench schedule`)."""
        return plan_schedule(str(paths.models_dir() / "tiny-mixtral-f16.gguf"), devices, batch=64, context=256, **options)

    def chain(self, n_batches: int, work: Sequence[int], slots: int = 4, link_ns: int = 0, wait: bool = False) -> Make:
        """A run of `n_batches` batches over as many cards as there are numbers in `work`: nanoseconds that each card takes for one batch.

        Each card makes one product; the last one keeps the result of every batch in a memory of its own, as a cache does. link_ns: what
        each copy takes. wait: after each batch.
        """

        def make() -> tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]:
            free = Speed(launch_ns=0, flops=1e12, memory=1e12, link=1e12, link_ns=link_ns)
            backends = simulated_machine(len(work), offload_min_batch=None)
            for b, ns in zip(backends, [*work[:-1], work[-1] // 2, 0]):  # the last card also keeps the result
                b.speed = replace(free, launch_ns=ns)
                b.buffer_type.speed = free  # type: ignore[attr-defined]
            case, last = Case("chain", _Cards(len(work)), len(work)), backends[-2].buffer_type
            draft = Draft(case, {b.name: b.buffer_type for b in backends})
            kept = draft.context.new_tensor("f32", 8, 4 * n_batches, name="kept")
            kept.place(last.alloc_buffer(kept.nbytes))
            graphs = []
            with draft.context.active():
                for i in range(n_batches):
                    y = _Cards(len(work))(draft)
                    graphs.append(build(ops.cpy(y, ops.view(kept, 8, 4, nb=(kept.nb[1],), offset=i * 4 * kept.nb[1])).named("keep")))
            scheduler = Scheduler(backends, parallel=slots)

            def run() -> Mapping[str, np.ndarray]:
                for i, graph in enumerate(graphs):
                    scheduler.reset()
                    scheduler.alloc(graph)
                    case.write_inputs(graph, seed=i)
                    scheduler.compute_async(graph)
                    if wait:
                        scheduler.synchronize()
                scheduler.synchronize()
                return {f"batch {i}": rows for i, rows in enumerate(np.split(kept.numpy(), n_batches))}

            return scheduler, run

        return make

    @staticmethod
    def took(trace: Trace) -> int:
        """Nanoseconds from the first run to the end of the last work on a card."""
        return max(e.end for e in trace.of("busy", "sync")) - next(e.start for e in trace.of("run"))

    @staticmethod
    def starts(trace: Trace) -> list[list[int]]:
        """When each card begins with each batch: one list for each card, in nanoseconds from the first."""
        begun: dict[str, dict[int, int]] = {}
        for s in run_data(trace).spans:
            if s.lane[0].startswith("GPU") and not s.copy_name:
                begun.setdefault(s.lane[0], {}).setdefault(s.run, s.start)
        zero = min(at for runs in begun.values() for at in runs.values())
        return [[at - zero for at in runs.values()] for _, runs in sorted(begun.items())]


@dataclass(frozen=True)
class _Cards:
    """A recipe: one step on each card, which reads an input of the user as well."""

    cards: int

    def __call__(self, d: Draft) -> Tensor:
        x = d.input("x", 8, d.batch)
        y = x
        for i in range(self.cards):
            y = ops.mul_mat(d.weight(f"W{i}", 8, 8, on=f"GPU{i}" if self.cards > 1 else "GPU"), y).named(f"y{i}")
        return y

