"""The state that the lessons on passes 3 and 4 start from. Public names only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice

import numpy as np

from workbench.cgraph import CGraph
from workbench.devices.backend import DeviceType
from workbench.devices.simulated import SimulatedDevice
from workbench.devices.simulated_memory import Machine, SimulatedMemory
from workbench.lessons.placement_cases import OTHERS, RECORDED, ggml, loose_case
from workbench.lessons.schedule_states import PassLesson, Questions
from workbench.scheduler import STAGES, Assignment, Scheduler
from workbench.scheduler.passes import computed, passes
from workbench.scheduler.whatif import Case, Change
from workbench.tensors import Context, Flag, Tensor, Usage, ops


class Asked:
    """What a learner's pass may ask about one case, before a pass begins. of: backend of each tensor, -1 for none; it may be changed.

    n: the number of backends; nodes: all nodes in order, work: those that compute something.
    """

    def __init__(self, scheduler: Scheduler, graph: CGraph, stage: str) -> None:
        self.assignment = Assignment(scheduler.backends, scheduler.buffer_types, scheduler.op_offload)
        for t, b in scheduler.by_hand.items():
            self.assignment.decide("usr", t, b, "usr")
        for name, decisions in passes(self.assignment, graph, scheduler.quirks):
            if name == stage:
                break
            for _ in decisions:
                pass
        self.of = self.assignment.of
        self.n, self.nodes, self.work = len(scheduler.backends), list(graph.nodes), computed(graph.nodes)
        self.name = {t: t.name for t in (*graph.leafs, *graph.nodes)}
        self._types = scheduler.buffer_types

    def backend(self, t: Tensor) -> int:
        """The number of its backend, -1 for none."""
        return self.of.get(t, -1)

    def supports(self, b: int, node: Tensor) -> bool:
        """Whether backend b has a kernel for the node."""
        return self.assignment.supports(b, node)

    def reads(self, b: int, t: Tensor) -> bool:
        """Whether backend b can read the tensor where it lies or will lie; False as long as that is open."""
        return self.assignment.reads(b, t)

    def reads_results(self, b: int, other: int) -> bool:
        """Whether backend b can read the results of another one."""
        return self.assignment.reads_type(b, self._types[other])

    def same_memory(self, b: int, other: int) -> bool:
        """Whether the results of two backends lie in memory of the very same type."""
        return self._types[b] is self._types[other]


class LaterPass(PassLesson):
    """What lessons 10 and 11 share beyond the other lessons on passes."""

    stage = "pass3"
    recorded, by_ggml = RECORDED, staticmethod(ggml)

    def case(self, name: str) -> Case:
        """A small case by name."""
        found = RECORDED.get(name) or OTHERS.get(name)
        if found is None and name.startswith("drawn "):
            found = loose_case(int(name.split()[1]))
        return found if found is not None else super().case(name)

    def quirky(self, case: Case) -> Case:
        """The same case with quirks="ggml"."""
        return replace(case, quirks="ggml")

    def mended(self, case: Case) -> Case:
        """The same case without."""
        return replace(case, quirks="")

    def drawn(self, n: int, least: int = 2, quirks: str = "") -> list[Case]:
        """The first `n` cases of `loose_case` in which this lesson's pass decides at least so many tensors."""
        worth = (c for i in count() for c in [loose_case(i, quirks)] if len({t for t, _, _ in self.decided(c, self.stage)}) >= least)
        return list(islice(worth, n))

    def practice(self, seed: int, devices: int = 1, chain: bool = True) -> Case:
        """A graph that nobody prepared, and that leaves this lesson's pass something to do."""
        return self.drawn(seed + 1, 3)[-1]

    def asked(self, case: Case) -> Asked:
        """What can be asked about a case, before this lesson's pass."""
        return Asked(*case.scheduler_and_graph(), self.stage)

    def model_without(self, *denied: str, n_tokens: int = 1) -> Case:
        """One step of the tiny Mixtral, all of it on a GPU that lacks some ops."""
        return self.model_case(n_tokens, experts="").changed(*(Change.deny(op, "GPU") for op in denied))

    def results(self, case: Case, leaf: str = "") -> dict[str, np.ndarray]:
        """Run a case and return its outputs by name, and what a leaf holds afterwards. Leafs without a flag are written as inputs are."""
        scheduler, graph = case.scheduler_and_graph()
        scheduler.alloc(graph)
        loose = [t for t in graph.leafs if t.storage is not None and t.storage.usage is not Usage.WEIGHTS and not t.flags & Flag.INPUT]
        for t in loose:
            t.flags |= Flag.INPUT  # for a moment: `write_inputs` fills what is marked
        case.write_inputs(graph)
        for t in loose:
            t.flags &= ~Flag.INPUT
        scheduler.compute(graph)
        kept = [t for t in (*graph.leafs, *graph.nodes) if t.flags & Flag.OUTPUT or t.name == leaf]
        return {t.name: t.numpy().copy() for t in kept}


class Lesson10(LaterPass):
    """Pass 3: who can read most, and who may move up."""

    UNIFIED = "one memory, two kinds of it"
    PAPER = ("a copy used twice", "drawn 335", "drawn 168")
    """The graphs of the exercise on paper."""

    def practice(self, seed: int, devices: int = 1, chain: bool = True) -> Case:
        """A graph that nobody prepared; in those with odd seeds somebody moves up."""
        if seed % 2 == 0:
            return super().practice(seed // 2)
        found = ((c, self.decided(c, "pass3")) for i in count(160) for c in [loose_case(i)])
        moving = (c for c, made in found if "3.upg" in {cause for _, _, cause in made} and len({t for t, _, _ in made}) > 1)
        return next(islice(moving, seed // 2, None))

    def counted(self, case: Case, node: str) -> list[tuple[str, str, int, int]]:
        """For each backend before pass 3: (backend, whether it supports the node, sources it can read, bytes of those)."""
        ask = self.asked(case)
        names = [b.name for b in case.scheduler_and_graph()[0].backends]
        t = next(t for t in ask.nodes if t.name == node)
        read = {b: [s for s in t.src if s is not None and ask.reads(b, s)] for b in range(ask.n)}
        return [(names[b], "yes" if ask.supports(b, t) else "no", len(read[b]), sum(s.nbytes for s in read[b])) for b in range(ask.n)]

    def unified(self) -> Case:
        """A GPU and a CPU that read each other's memory, though it is of two types; the GPU cannot multiply. Weights are the CPU's."""
        machine = Machine()
        host, own = SimulatedMemory(machine, "CPU", 32, is_host=True), SimulatedMemory(machine, "GPU", 128)
        gpu = SimulatedDevice(machine, "GPU", own, reads=["CPU"], deny_ops=["MUL_MAT"])
        cpu = SimulatedDevice(machine, "CPU", host, DeviceType.CPU, reads=["GPU"])
        context = Context(10**5, no_alloc=True, name="unified")
        weights = [context.new_tensor("f32", 64, 64, name=f"W{i}") for i in range(3)]
        for w in weights:
            w.place(host.alloc_buffer(w.nbytes, Usage.WEIGHTS))
        graph = CGraph()
        with context.active():
            x = context.new_tensor("f32", 64, 4, name="x").mark(Flag.INPUT)
            for i, w in enumerate(weights):
                x = ops.silu(ops.mul_mat(w, x).named(f"product{i}")).named(f"act{i}")
            graph.build_forward_expand(x.mark(Flag.OUTPUT))
        return Case.of(Scheduler([gpu, cpu]), graph, self.UNIFIED)

    def best(self, *cases: Case) -> Questions:
        """Each node that pass 3 finds open: (node, what can be asked), and the number of the backend that it gets."""
        questions = Questions([], [], [])
        for case in cases:
            open_nodes = [t.name for ask in [self.asked(case)] for t in ask.work if ask.backend(t) == -1]
            for name in open_nodes:  # asked as pass 3 does: what it decided before counts
                ask, wanted = self._until(case, name)
                node = next(t for t in ask.work if t.name == name)
                questions.on.append((node, ask))
                questions.expected.append(wanted)
                questions.steps.append(f"{case.name}: {name} = {node.desc}({', '.join(s.name for s in node.sources())})")
        return questions

    def _until(self, case: Case, name: str) -> tuple[Asked, int]:
        """What can be asked when pass 3 comes to a node, and what it decides."""
        scheduler, graph = case.scheduler_and_graph()
        ask = Asked(scheduler, graph, "pass3")
        final: dict[str, int] = {}
        before: dict[Tensor, int] = {}
        for _, t, b, _ in (d for d in scheduler.decisions(graph) if d[0] == "pass3"):
            if t.name != name and name not in final:
                before[t] = b
            final[t.name] = b
        ask.of.update(before)
        return ask, final[name]

    def pass3(self, *cases: Case) -> Questions:
        """All of pass 3: (what can be asked,), and the number of the backend of each node that computes something, in order."""
        questions = Questions([], [], [])
        for case in cases:
            number = {b.name: i for i, b in enumerate(case.scheduler_and_graph()[0].backends)}
            questions.on.append((self.asked(case),))
            questions.expected.append([number[name] for name in self.names(case, "pass3")])
            questions.steps.append(case.name)
        return questions


class Lesson11(LaterPass):
    """Pass 4: views and sources, and what ggml leaves to its callers."""

    stage = "pass4"
    PAPER = ("views", "drawn 6", "drawn 11")
    """The graphs of the exercise on paper."""

    def open(self, case: Case) -> dict[str, int]:
        """What is still open when pass 4 begins, by kind."""
        scheduler, graph = case.scheduler_and_graph()
        after = self._assignment(scheduler, graph)
        tensors = [t for t in (*graph.leafs, *graph.nodes) if after.of.get(t, -1) == -1]
        work = {*computed(graph.nodes)}
        kinds = ["nodes that compute" if t in work else "leafs" if t.op == "NONE" else "views" for t in tensors]
        return {k: kinds.count(k) for k in ("nodes that compute", "views", "leafs")}

    @staticmethod
    def _assignment(scheduler: Scheduler, graph: CGraph) -> Assignment:
        return Asked(scheduler, graph, "pass4").assignment

    def left(self, case: Case) -> list[str]:
        """The tensors that are open when pass 4 begins: leafs, then nodes, each in order."""
        return [name for name, (backend, _) in self.after(case, "pass3").items() if backend == "?"]

    def split_of(self, case: Case) -> dict[str, str]:
        """In whose split each node stands, by name."""
        out = case.outcome()
        return {n.name: out.splits[n.split].backend for n in out.nodes}

    def is_settled(self, case: Case) -> bool:
        """Whether every tensor has a backend, and every view one that reads the memory it shows."""
        scheduler, graph = case.scheduler_and_graph()
        a = Assignment(scheduler.backends, scheduler.buffer_types, scheduler.op_offload)
        for d in scheduler.decisions(graph):
            if d[0] in STAGES:
                a.of[d[1]] = d[2]
        tensors = [*graph.leafs, *graph.nodes]
        return all(a.of.get(t, -1) >= 0 for t in tensors) and all(a.reads(a.of[t], t.root()) for t in tensors if t.view_src is not None)

    def one_by_one(self, *cases: Case) -> Questions:
        """Each tensor that pass 4 settles: (tensor, the node it stands at, of), and (backend, cause)."""
        questions = Questions([], [], [])
        for case in cases:
            for t, node, of, wanted in self._moments(case):
                questions.on.append((t, node, of))
                questions.expected.append(wanted)
                questions.steps.append(f"{case.name}: {t.name}, while at {node.name} = {node.desc}")
        return questions

    def _moments(self, case: Case) -> Iterator[tuple[Tensor, Tensor, Callable[[Tensor], int], tuple[int, str]]]:
        scheduler, graph = case.scheduler_and_graph()
        a, at = self._assignment(scheduler, graph), 0
        for _, t, b, cause in (d for d in scheduler.decisions(graph) if d[0] == "pass4"):
            at = next(i for i, n in enumerate(graph.nodes) if i >= at and (t in (n, n.view_src) or t in n.src))
            if cause in ("4.vsrc", "4.cur"):
                then = dict(a.of)
                yield t, graph.nodes[at], lambda s, then=then: then.get(s, -1), (b, cause)  # type: ignore[misc]
            a.of[t] = b

    def pass4(self, *cases: Case) -> Questions:
        """All of pass 4 as ggml has it: (what can be asked,), and its decisions (name, backend, cause), in order."""
        questions = Questions([], [], [])
        for case in map(self.quirky, cases):
            scheduler, graph = case.scheduler_and_graph()
            questions.on.append((self.asked(case),))
            questions.expected.append([[t.name, b, cause] for _, t, b, cause in
                                       (d for d in scheduler.decisions(graph) if d[0] == "pass4")])  # fmt: skip
            questions.steps.append(case.name)
        return questions
