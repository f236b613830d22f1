"""The state that the lessons on the first two passes start from. Public names only."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from itertools import count, islice
from typing import Any, NamedTuple

from workbench import models
from workbench.cgraph import CGraph
from workbench.devices.backend import buffer_type_of
from workbench.devices.simulated import simulated_machine
from workbench.lessons.recorded_cases import RECORDED, ggml
from workbench.lessons.schedule_cases import CASES, random_case
from workbench.scheduler import STAGES, Assignment, Scheduler
from workbench.scheduler.passes import assign_by_memory, computed, is_weight, passes
from workbench.scheduler.whatif import Case, Draft, tensors_of
from workbench.tensors import Flag, Tensor, Usage, ops
from workbench.trace import Trace
from workbench.views.run_data import run_data
from workbench.views.schedule_steps import RULES
from workbench.views.tables import Table, table
from workbench.widgets import ScheduleStepper, step_schedule

Walk = tuple[str, list[str], dict[str, int], Callable[[int, str], bool], int, list[tuple[str, int]]]
"""A sweep: its stage, the nodes in its order, what is decided before, who supports whom, the CPU's number, and its real decisions."""


class Asked:
    """The questions of lesson 07, put to the backends of one scheduler. cpu: the number of the last backend; given: by hand."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._a = Assignment(scheduler.backends, scheduler.buffer_types, scheduler.op_offload)
        self.cpu, self.given = self._a.last, dict(scheduler.by_hand)

    def is_weight(self, t: Tensor | None) -> bool:
        """Whether a source is there, and lies in a buffer of weights."""
        return t is not None and is_weight(t)

    def reader(self, owner: Tensor, node: Tensor) -> int:
        """The first backend that works on the memory of `owner` and supports `node`; -1 for none."""
        return self._a.by_memory(owner, node)

    def offers(self, node: Tensor) -> int:
        """The first backend before the CPU that supports `node` and offers to compute it, wherever its weight lies; -1 for none."""
        a = self._a
        able = (b for b in range(a.last) if a.op_offload and a.supports(b, node) and a.backends[b].offload_op(node))
        return next(able, -1)


class Questions(NamedTuple):
    """An exercise, decision by decision: what to call the learner's function with, what the real passes say, a name for each."""

    on: list[tuple[Any, ...]]
    expected: list[Any]
    steps: list[str]


def kinds_of_sources(d: Draft) -> list[Tensor]:
    """What may and may not draw a node to its memory: all on the GPU."""
    n = 64
    x, w = d.input("x", n, d.batch), d.weight("W", n, n, on="GPU")
    cache = d.weight("cache", n, n, on="GPU")
    assert cache.storage is not None
    cache.storage.usage = Usage.ANY
    half = ops.view(w, n, n // 2, nb=(w.nb[1],)).named("half of W")
    turned = ops.rope(ops.reshape(x, 16, 4, d.batch).named("x (heads)"), d.input("pos", d.batch, kind="i32"), 16,
                      freq_factors=d.weight("factors", 8, on="GPU"))  # fmt: skip
    return [ops.mul_mat(w, x).named("product"), ops.add(x, d.weight("b", n, on="GPU")).named("bias"),
            ops.mul(x, d.weight("g", n, on="GPU")).named("norm scale"), ops.mul_mat(cache, x).named("over the cache"),
            ops.mul_mat(half, x).named("with a view"), turned.named("rope")]  # fmt: skip


class PassLesson:
    """What the lessons on the passes share: small cases by name, what is decided up to a stage, practice drawn from a seed."""

    unseen = ("a copy used twice", "views", "MLP with BLAS")
    """The graphs of the exercises that are done on paper."""
    recorded, by_ggml = RECORDED, staticmethod(ggml)
    """Cases that real ggml was recorded on, and what it decided."""

    def case(self, name: str) -> Case:
        """A small case: of `schedule_cases`, or one that real ggml was recorded on."""
        return RECORDED[name] if name in RECORDED else CASES[name]

    def practice(self, seed: int, devices: int = 1, chain: bool = True) -> Case:
        """A graph of eight steps that nobody prepared: the `seed`-th of those that leave pass 1 three nodes open, and use two backends."""
        drawn = (random_case(i, chain=chain, devices=devices) for i in count())
        return next(islice(filter(self._is_worthwhile, drawn), seed, None))

    def _is_worthwhile(self, case: Case) -> bool:
        names = self.names(case, "pass1")
        return names.count("?") >= 3 and len({*names}) >= 3

    def decided(self, case: Case, stage: str) -> list[tuple[str, str, str]]:
        """The decisions of a stage ("pass2": of all its sweeps), in order: (tensor, backend or "?", cause)."""
        scheduler, graph = case.scheduler_and_graph()
        names, key = [*(b.name for b in scheduler.backends), "?"], _keys(graph)
        return [(key[d[1]], names[d[2]], d[3]) for d in scheduler.decisions(graph) if d[0].startswith(stage)]

    def after(self, case: Case, stage: str) -> dict[str, tuple[str, str]]:
        """Each tensor's backend and cause when this stage is done, in order; ("?", "") where nothing is decided."""
        scheduler, graph = case.scheduler_and_graph()
        names, key = [*(b.name for b in scheduler.backends), "?"], _keys(graph)
        out = dict.fromkeys(key.values(), ("?", "")) | {key[t]: (names[b], "usr") for t, b in scheduler.by_hand.items() if t in key}
        last = STAGES.index(stage)
        for d in scheduler.decisions(graph):
            if d[0] in STAGES and STAGES.index(d[0]) <= last:
                out[key[d[1]]] = names[d[2]], d[3]
        return out

    def typed(self, *answers: Any) -> list[Any]:
        """Backends as a learner types them, word by word; [...] where one is missing."""
        return [...] if ... in answers else [word for answer in answers for word in str(answer).split()]

    def computing(self, case: Case) -> list[Tensor]:
        """The nodes that compute something, in order: views are none."""
        return computed(case.scheduler_and_graph()[1].nodes)

    def nodes(self, case: Case) -> list[str]:
        """Their names, unique ones as in `after`."""
        graph = case.scheduler_and_graph()[1]
        key = _keys(graph)
        return [key[t] for t in computed(graph.nodes)]

    def names(self, case: Case, stage: str) -> list[str]:
        """The backend of each of those nodes when this stage is done, "?" for none."""
        after = self.after(case, stage)
        return [after[name][0] for name in self.nodes(case)]

    def sheet(self, case: Case, *stages: str, caption: str = "") -> Table:
        """All that one needs for a prediction: nodes in order, what they read and in whose memory that lies, who cannot compute them; and
        what is decided after some stages."""
        scheduler, graph = case.scheduler_and_graph()
        backends = scheduler.backends
        after, key = [self.after(case, s) for s in stages], _keys(graph)

        def reads(s: Tensor) -> str:
            if s.storage is None:
                return f"{s.name} (input)" if s.flags & Flag.INPUT else s.name
            kind = buffer_type_of(s.storage)
            return f"{s.name} [{', '.join(b.name for b in backends if b.supports_buft(kind))}]"

        rows = [(t.name, t.desc, ", ".join(map(reads, t.sources())), " ".join(b.name for b in backends if not b.supports_op(t)),
                 *(" ".join(done[key[t]]) for done in after)) for t in graph.nodes]  # fmt: skip
        told = f"Backends: {', '.join(b.name for b in backends)}. In brackets: who works on the memory of a weight. {case.batch} tokens."
        return table(["node", "op", "reads", "cannot", *(f"after {RULES[s][0]}" for s in stages)], rows, caption or told)

    def stepper(self, case: Case, *stages: str, other: Case | None = None, **options: Any) -> ScheduleStepper:
        """A stepper over these stages of a case, or of two."""
        scheduler, graph = case.scheduler_and_graph()
        options.setdefault("title", case.name)
        beside = other.scheduler_and_graph() if other is not None else None
        return step_schedule(scheduler, graph, stages=stages or None, other=beside, **options)

    def beside_ggml(self, *stages: str) -> list[tuple[str, int, int]]:
        """For each recorded case: how many assignments real ggml was recorded with after these stages, and how many of ours agree."""
        out = []
        for name, case in self.recorded.items():
            number = {b.name: i for i, b in enumerate(case.scheduler_and_graph()[0].backends)} | {"?": -1}
            pairs = [(number[self.after(case, s)[t][0]], b) for s in stages for t, b in self.by_ggml()[name]["stages"][s].items()]
            out.append((name, len(pairs), sum(a == b for a, b in pairs)))
        return out

    @cached_property
    def mixtral(self) -> models.Model:
        """The tiny Mixtral of lesson 00."""
        return models.load("tiny-mixtral-f16")

    def model_case(self, n_tokens: int = 1, experts: str = "CPU", gpus: int = 1, host_cache: bool = False) -> Case:
        """One step of the tiny Mixtral over GPUs and a CPU, its experts on the device that is named; "": with their layer, as the cache
        is unless the host has it."""
        devices = simulated_machine(gpus)
        placed = models.place_weights(self.mixtral, devices, overrides={"_exps": experts} if experts else {})
        memory = devices[-1].buffer_type if host_cache else placed.layer_types
        step = models.build_step(placed, models.KVCache(placed.hparams, 256, memory), n_tokens, 256, 1)
        return Case.of(Scheduler(devices), step.graph, f"tiny-mixtral, {n_tokens} tokens at once")

    def executed(self, case: Case) -> list[tuple[str, str, int]]:
        """What a real run of a case copies: (tensor, kind, bytes)."""
        trace = Trace("virtual")
        scheduler, graph = case.scheduler_and_graph(trace)
        scheduler.alloc(graph)
        case.write_inputs(graph)
        scheduler.compute(graph)
        return [(m.name, m.kind, m.bytes) for m in run_data(trace).moves]


class Lesson08(PassLesson):
    """Pass 1: who is decided by memory, by being an input, by a weight."""

    sources = Case("kinds of sources", kinds_of_sources)
    without_rope = Case("kinds of sources, no rope", lambda d: kinds_of_sources(d)[:-1])
    is_weight = staticmethod(lambda t: t is not None and is_weight(t))

    def quiet(self, seed: int) -> Case:
        """A practice graph in which nobody makes an offer."""
        return dataclasses.replace(self.practice(seed), op_offload=False)

    def stuck(self) -> tuple[Scheduler, CGraph]:
        """The chain, with the result of D already placed on the GPU, which cannot compute D."""
        scheduler, graph = self.case("A B C | D | E F").scheduler_and_graph()
        d, kind = graph.nodes[3], scheduler.buffer_types[0]
        d.place(kind.alloc_buffer(d.nbytes))
        return scheduler, graph

    def rules(self, *cases: Case) -> Questions:
        """What pass 1 says about each tensor, in its order: (backend, cause), or "open"."""
        on, expected, steps = [], [], []
        for case in cases:
            scheduler, graph = case.scheduler_and_graph()
            a = Assignment(scheduler.backends, scheduler.buffer_types, scheduler.op_offload)
            for t, b in scheduler.by_hand.items():
                a.decide("usr", t, b, "usr")
            made = {t: (b, cause) for _, t, b, cause in assign_by_memory(a, graph)} | {t: (b, "usr") for t, b in scheduler.by_hand.items()}
            asked = Asked(scheduler)
            for t in (*graph.leafs, *graph.nodes):
                on.append((t, asked))
                expected.append(made.get(t, "open"))
                steps.append(f"{case.name}: {t.name} = {t.desc}({', '.join(s.name for s in t.sources())})")
        return Questions(on, expected, steps)


class Lesson09(PassLesson):
    """Pass 2: what the four sweeps spread, and what they leave."""

    SWEEPS = ("pass2_gpu_down", "pass2_gpu_up", "pass2_rest_down", "pass2_rest_up")

    def _walks(self, case: Case) -> Iterator[Walk]:
        """The four sweeps of a case."""
        scheduler, graph = case.scheduler_and_graph()
        a = Assignment(scheduler.backends, scheduler.buffer_types, scheduler.op_offload)
        for t, b in scheduler.by_hand.items():
            a.decide("usr", t, b, "usr")
        nodes = computed(graph.nodes)
        by_name = {t.name: t for t in nodes}

        def supports(b: int, name: str) -> bool:
            return a.supports(b, by_name[name])

        for stage, decisions in passes(a, graph):
            if stage in self.SWEEPS:
                before = {t.name: a.of.get(t, -1) for t in nodes}
                walk = [t.name for t in (nodes if stage.endswith("down") else nodes[::-1])]
                yield stage, walk, before, supports, a.last, [(t.name, b) for _, t, b, _ in decisions]
            else:
                deque(decisions, maxlen=0)

    def sweeps(self, function: Callable[..., Any], *cases: Case) -> tuple[Callable[[str, int], Any], Questions]:
        """A learner's `sweep(nodes, of, supports, skip)` beside the real ones, decision by decision: a function that gives the i-th of
        one sweep, and the questions to it."""
        made: dict[str, Callable[[], list[Any]]] = {}
        questions = Questions([], [], [])
        for case in cases:
            for stage, walk, before, supports, last, real in self._walks(case):
                name = f"{case.name}, {RULES[stage][0]}"
                skip = last if "gpu" in stage else None
                made[name] = cache(partial(lambda *args: list(function(*args)), walk, before, supports, skip))
                for i, decision in enumerate([*real, "no more"]):
                    questions.on.append((name, i))
                    questions.expected.append(decision)
                    questions.steps.append(f"{name}: decision {i + 1}")

        def nth(name: str, i: int) -> Any:
            decisions = made[name]()
            return tuple(decisions[i]) if i < len(decisions) else "no more"

        return nth, questions

    def pass2(self, *cases: Case) -> Questions:
        """All four sweeps at once: (names, backends before, supports, number of the CPU), and the backends afterwards, in order."""
        questions = Questions([], [], [])
        for case in cases:
            walks = [*self._walks(case)]
            _, nodes, before, supports, last, _ = walks[0]
            after = before | {name: b for *_, real in walks for name, b in real}
            questions.on.append((nodes, dict(before), supports, last))
            questions.expected.append([after[name] for name in nodes])
            questions.steps.append(case.name)
        return questions

    def random_cases(self, n: int) -> list[Case]:
        """Graphs of eight steps over one GPU and a CPU, chains and others."""
        return [random_case(i, chain=bool(i % 2)) for i in range(n)]

    def supported(self, case: Case, backend: str) -> list[bool]:
        """For each node that computes something, whether this backend can."""
        scheduler, graph = case.scheduler_and_graph()
        one = next(b for b in scheduler.backends if b.name == backend)
        return [one.supports_op(t) for t in computed(graph.nodes)]

    def by_stage(self, case: Case) -> dict[str, dict[str, int]]:
        """How many nodes that compute something each stage decides for good, by backend."""
        scheduler, graph = case.scheduler_and_graph()
        work, names = set(computed(graph.nodes)), [*(b.name for b in scheduler.backends), ""]
        final = {d[1]: (d[0], names[d[2]]) for d in scheduler.decisions(graph) if d[0] in STAGES and d[1] in work}
        out: dict[str, dict[str, int]] = {s: dict.fromkeys(names[:-1], 0) for s in STAGES}
        for stage, name in final.values():
            out[stage][name] += 1
        return out


def _keys(graph: CGraph) -> dict[Tensor, str]:
    return {t: name for name, t in tensors_of(graph).items()}
