"""The state that the lesson on pass 5 starts from: splits, inputs, plans of memory, hazards, optima. Public names only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from workbench.cgraph import CGraph
from workbench.devices.simulated import SimulatedDevice, simulated_machine
from workbench.errors import WorkbenchError
from workbench.lessons.recorded_splits import SPLITS, ggml
from workbench.lessons.schedule_cases import WIDTH, random_case
from workbench.lessons.schedule_states import PassLesson, Questions
from workbench.scheduler import Scheduler
from workbench.scheduler.optimum import fewest_bytes
from workbench.scheduler.passes import computed, is_weight
from workbench.scheduler.splits import GraphCopy
from workbench.scheduler.whatif import Case, Draft, tensors_of
from workbench.tensors import Flag, Tensor, ops
from workbench.trace import Trace
from workbench.views.run_data import run_data
from workbench.views.tables import Table, table


@dataclass(frozen=True)
class Deep:
    """A recipe of so many products, all of whose weights lie on the host."""

    n: int

    def __call__(self, d: Draft) -> Tensor:
        """The last product."""
        x = d.input("x", WIDTH, d.batch)
        for i in range(self.n):
            x = ops.mul_mat(d.weight(f"W{i}", WIDTH, WIDTH), x).named(f"y{i}")
        return x


def line(d: Draft) -> Tensor:
    """Three products, and the last two side by side."""
    return _three(d, False)


def fork(d: Draft) -> Tensor:
    """As many tensors of the same sizes, but the first product is needed until the end."""
    return _three(d, True)


def _three(d: Draft, early: bool) -> Tensor:
    made = [d.input("x", 16, d.batch)]
    for i in range(3):
        made.append(ops.mul_mat(d.weight(f"W{i}", 16, 16, on="GPU"), made[-1]).named(f"t{i + 1}"))
    return ops.concat(made[3], made[1 if early else 2], 0).named("y")


def seen_twice(d: Draft) -> list[Tensor]:
    """A product of the card, read through a view by the card and by the host."""
    a = ops.mul_mat(d.weight("W", 16, 16, on="GPU"), d.input("x", 16, d.batch)).named("a")
    v = ops.reshape(a, 8, 2 * d.batch).named("v")
    return [ops.relu(v).named("y"), ops.mul_mat(d.weight("W2", 8, 8), v).named("z")]


def view_between(d: Draft) -> Tensor:
    """A product of the card; the host multiplies it, and adds it once more, through a view."""
    a = ops.mul_mat(d.weight("W", 16, 16, on="GPU"), d.input("x", 16, d.batch)).named("a")
    b = ops.mul_mat(d.weight("W2", 16, 16), a).named("b")
    return ops.silu(ops.add(b, ops.reshape(a, 16, d.batch).named("v")).named("c")).named("e")


def bare_leaf(d: Draft) -> Tensor:
    """A leaf without a flag, which is read through a view only."""
    x = d.context.new_tensor("f32", 16, d.batch, name="x")
    half = ops.view(x, 16, d.batch // 2, nb=(x.nb[1],)).named("half")
    return ops.mul_mat(d.weight("W", 16, 16, on="GPU"), half).named("a")


class Lesson12(PassLesson):
    """Pass 5: where splits begin, what is copied in, and what that does to the plan of memory."""

    def case(self, name: str) -> Case:
        """A small case: of `schedule_cases`, or one whose splits real ggml was recorded on."""
        return SPLITS[name] if name in SPLITS else super().case(name)

    viewed = Case("a view between two nodes", view_between)

    def deep(self, n: int) -> Case:
        """So many products over weights on the host, for 32 tokens: the card takes them all."""
        return Case(f"{n} layers on the host", Deep(n), batch=32)

    def splits(self, case: Case) -> list[str]:
        """Each split as "GPU: A B C": its backend and the nodes that compute something."""
        out = case.outcome()
        return [f"{s.backend}: {' '.join(n.name for n in out.nodes[s.first : s.last] if not n.is_view)}" for s in out.splits]

    def begins(self, case: Case) -> list[str]:
        """Where each split begins: "GPU A", the first node that computes something."""
        return [f"{part.split(':')[0]} {part.split()[1]}" for part in self.splits(case)]

    def unknown(self, seed: int) -> Case:
        """A graph that nobody prepared: the `seed`-th drawn one with three to six splits, of which several need copies."""
        drawn = (random_case(i, chain=bool(i % 2)) for i in count(1000))
        return next(islice((c for c in drawn if 3 <= len(c.outcome().splits) <= 6), seed, None))

    def copied(self, case: Case) -> list[str]:
        """The inputs of all splits, in order."""
        return [name for s in case.outcome().splits for name, _ in s.inputs]

    def beside_ggml_splits(self) -> list[tuple[str, int, int, int]]:
        """For each recorded case: splits of real ggml, splits of ours, and how many agree in backend, nodes and inputs."""
        out = []
        for name, want in ggml().items():
            o = SPLITS[name].outcome()
            got = [[s.backend, [n.name for n in o.nodes[s.first : s.last]], [i for i, _ in s.inputs]] for s in o.splits]
            out.append((name, len(want), len(got), sum(a == b for a, b in zip(want, got))))
        return out

    def assigned(self, case: Case, caption: str = "") -> Table:
        """What pass 5 starts from: the sheet of the graph, with the backends of pass 4."""
        return self.sheet(case, "pass4", caption=caption)

    # ---- memory

    def memory(self, case: Case) -> list[int]:
        """Bytes of compute memory of each device."""
        scheduler, graph = case.scheduler_and_graph()
        return scheduler.measure(graph)

    def again(self, case: Case, **hand: str) -> tuple[Scheduler, list[str], int]:
        """Place a graph, reset, assign nodes by hand, and place it once more: the scheduler, the tensors by their position in the graph
        copy, and how often the plan of memory was made anew for the second time."""
        scheduler, graph = case.scheduler_and_graph()
        scheduler.alloc(graph)
        before = scheduler.n_reservations
        scheduler.reset()
        backends = {b.name: b for b in scheduler.backends}
        for node, device in hand.items():
            scheduler.set_backend(tensors_of(graph)[node], backends[device])
        scheduler.alloc(graph)
        return scheduler, [t.name for t in scheduler.graph_copy.nodes], scheduler.n_reservations - before

    def arrays(self, case: Case, caption: str = "", **hand: str) -> Table:
        """Both arrays of backend ids of the nodes, side by side, position by position, after `again`."""
        scheduler, names, new = self.again(case, **hand)
        (now, _), (before, _) = scheduler.backend_ids
        devices = [b.name for b in scheduler.backends]
        moved = {i: "other memory" if memory else "same memory" for kind, i, _, _, memory in scheduler.moved() if kind == "node"}
        rows = [(i, name, devices[before[i]] if i < len(before) else "none", devices[b], moved.get(i, ""))
                for i, (name, b) in enumerate(zip(names, now))]  # fmt: skip
        return table(["position", "tensor now", "id before", "id now", ""], rows,
                     caption or ("The plan of memory was made anew." if new else "The plan of memory was kept."))  # fmt: skip

    def graph_copy(self, case: Case) -> GraphCopy:
        """What the allocator sees of a case."""
        scheduler, graph = case.scheduler_and_graph()
        scheduler.split(graph)
        return scheduler.graph_copy

    # ---- hazards

    def on(self, backends: list[SimulatedDevice], recipe: Callable[[Draft], Any]) -> CGraph:
        """The graph of a recipe over these devices; weights of a device that is missing lie on the last one."""
        memories = {b.name: b.buffer_type for b in backends}
        draft = Draft(Case("hazard", recipe), {"GPU": backends[-1].buffer_type, **memories})
        with draft.context.active():
            made = recipe(draft)
            return draft.graph.build_forward_expand(*(t.mark(Flag.OUTPUT) for t in (made if isinstance(made, list) else [made])))

    def result(self, scheduler: Scheduler, graph: CGraph, **hand: int) -> list[np.ndarray]:
        """Run a graph with given inputs; its outputs."""
        scheduler.reset()
        for name, b in hand.items():
            scheduler.set_backend(tensors_of(graph)[name], b)
        scheduler.alloc(graph)
        for leaf in graph.leafs:
            if leaf.name == "x":
                leaf.set(np.arange(leaf.n_elements).reshape(leaf.shape) / 7 - 3)
        scheduler.compute(graph)
        return [t.numpy().copy() for t in graph.nodes if t.flags & Flag.OUTPUT]

    def hazard(self, which: str, quirks: str) -> str:
        """What becomes of one of ggml's three hazards: "right", "wrong" without a word, or why it stops or is refused."""
        runs: dict[str, tuple[list[Any], dict[str, int]]] = {
            "another graph, old plan": ([line, fork], {}), "a view assigned by hand": ([seen_twice], {"v": 1}),
            "a leaf without flag under a view": ([bare_leaf], {})}  # fmt: skip
        recipes, hand = runs[which]
        backends = simulated_machine()
        scheduler = Scheduler(backends, quirks=quirks)
        try:
            for recipe in recipes:
                got = self.result(scheduler, self.on(backends, recipe), **hand)
        except WorkbenchError as refused:
            return f"stops: {refused.found}" if quirks else f"refused: {refused.found}"
        plain = simulated_machine(0)
        want = self.result(Scheduler(plain), self.on(plain, recipes[-1]))
        return "right" if all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)) else "wrong, and nobody says so"

    # ---- how good

    def traced(self, case: Case, best: bool = False) -> tuple[int, int]:
        """Bytes that a run copies between devices, by its trace, and its virtual nanoseconds; best: placed by hand as the optimum says."""
        scheduler, graph = case.scheduler_and_graph()
        if best:
            for t, b in fewest_bytes(scheduler, graph).of.items():
                scheduler.set_backend(t, b)
        scheduler.alloc(graph)
        case.write_inputs(graph)
        scheduler.trace = trace = Trace("virtual")
        machine = scheduler.backends[0].machine  # type: ignore[attr-defined]
        start = machine.now
        scheduler.compute(graph)
        scheduler.trace = None
        return sum(m.bytes for m in run_data(trace).moves if m.source != m.target), machine.now - start

    def fewest(self, case: Case) -> int:
        """Bytes of the placement that moves the fewest."""
        return fewest_bytes(*case.scheduler_and_graph()).nbytes

    def random_cases(self, n: int) -> list[Case]:
        """Graphs of eight steps: chains and others, for 4 or 32 tokens."""
        return [random_case(i, chain=i < n // 2) for i in range(n)]

    # ---- exercises

    def drawn(self, *seeds: int) -> Questions:
        """The splits of unknown graphs, one by one, as "GPU A": backend and first node."""
        cases = [self.unknown(seed) for seed in seeds]
        parts = [(case, part) for case in cases for part in [*self.begins(case), "no more"]]
        return Questions([], [part for _, part in parts], [f"{case.name}, a split" for case, _ in parts])

    def parts(self, *answers: Any) -> list[Any]:
        """Splits as a learner types them, "GPU A, CPU C": one by one; [...] where one is missing."""
        return [...] if ... in answers else [" ".join(p.split()) for answer in answers for p in [*str(answer).split(","), "no more"]]

    def starts(self, *cases: Case) -> Questions:
        """For each case its nodes as (name, backend, is it a view?), and the first nodes of its splits."""
        q = Questions([], [], [])
        for case in cases:
            out = case.outcome()
            q.on.append(([(n.name, n.backend, n.is_view) for n in out.nodes],))
            q.expected.append([b.split()[1] for b in self.begins(case)])
            q.steps.append(case.name)
        return q

    def cuts(self, *cases: Case) -> Questions:
        """All of pass 5: (nodes that compute, backends of all tensors, who can read what, what is a weight), and the splits as
        [backend, first node, inputs]."""
        q = Questions([], [], [])
        for case in cases:
            scheduler, graph = case.scheduler_and_graph()
            scheduler.split(graph)
            a = scheduler.assignment
            of = {t: a.of[t] for t in (*graph.leafs, *graph.nodes)}
            q.on.append((computed(graph.nodes), of, a.reads, is_weight))
            work = set(computed(graph.nodes))
            firsts = [next(n.name for n in graph.nodes[s.first : s.last] if n in work) for s in scheduler.splits]
            q.expected.append([[s.backend, first, [t.name for t in s.inputs]] for s, first in zip(scheduler.splits, firsts)])
            q.steps.append(case.name)
        return q
