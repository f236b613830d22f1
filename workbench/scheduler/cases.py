"""Cases: a small graph on a small machine as one value, and changes of it, each answered by the real passes.

A `Case` is a recipe with settings, like a scheduler's command line: where each weight lies, which ops a device lacks, the batch,
op_offload, pipeline slots, assignments by hand. `changed` makes another one, `scheduler_and_graph` builds it anew, `outcome` says
what the passes decide. `Case.of` takes a graph that is there already, such as a model's decode step.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from workbench.cgraph import CGraph
from workbench.devices.backend import Backend, BufferType
from workbench.devices.cpu import CpuBackend
from workbench.devices.planned import PlannedBuffer
from workbench.devices.simulated import simulated_machine
from workbench.errors import GraphError, ParameterError, shown
from workbench.scheduler.passes import computed, is_weight
from workbench.scheduler.scheduler import MAX_COPIES, Scheduler
from workbench.tensors.context import TENSOR_OVERHEAD, Context
from workbench.tensors.opspec import OPS
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Flag, Tensor
from workbench.trace import Trace

Pairs = tuple[tuple[str, str], ...]

MOST_TENSORS = 1 << 16
"""That a recipe may make; room is only counted, so a small graph pays nothing for it."""


class Draft:
    """What a recipe builds with: the graph so far, the batch, inputs and weights by name."""

    def __init__(self, case: Case, memories: dict[str, BufferType]) -> None:
        self.batch, self._homes, self._memories = case.batch, dict(case.weights), memories
        self.context = Context(MOST_TENSORS * TENSOR_OVERHEAD, no_alloc=True, name=case.name)
        self.graph = CGraph(size=MOST_TENSORS, name=case.name)

    @property
    def devices(self) -> list[str]:
        """Their names, in the scheduler's order."""
        return [*self._memories]

    def input(self, name: str, *ne: int, kind: str = "f32") -> Tensor:
        """A leaf that the user fills before each run."""
        return self.context.new_tensor(kind, *ne, name=name).mark(Flag.INPUT)

    def weight(self, name: str, *ne: int, on: str = "CPU", kind: str = "f32") -> Tensor:
        """A weight in the memory of the device `on`, unless the case says otherwise; its values depend on its name only."""
        memory = self._memories[_known(self._homes.get(name, on), self._memories, "device")]
        t = self.context.new_tensor(kind, *ne, name=name)
        t.place(memory.alloc_buffer(memory.alloc_size(t), Usage.WEIGHTS))
        return t.set(_values(name, t.shape))


Recipe = Callable[[Draft], Tensor | Sequence[Tensor]]
"""Builds a graph: what it returns becomes the outputs. A function of a module, so that cases can be compared."""


@dataclass(frozen=True)
class Change:
    """One difference between two cases; the class methods make them. kind: a key of `_CHANGES`."""

    kind: str
    what: str
    value: Any

    @classmethod
    def move(cls, weight: str, device: str) -> Change:
        """The weight lies in the memory of `device`."""
        return cls("weight", weight, device)

    @classmethod
    def deny(cls, op: str, device: str) -> Change:
        """`device` has no kernel for `op` ("MUL_MAT", "SILU", …)."""
        return cls("deny", op, device)

    @classmethod
    def allow(cls, op: str, device: str) -> Change:
        """`device` has a kernel for `op`, whatever else it says."""
        return cls("allow", op, device)

    @classmethod
    def assign(cls, node: str, device: str) -> Change:
        """The node is assigned by hand (`ggml_backend_sched_set_tensor_backend`); device "": it is not."""
        return cls("assign", node, device)

    @classmethod
    def batch(cls, n: int) -> Change:
        """So many tokens at once."""
        return cls("batch", "", n)

    @classmethod
    def op_offload(cls, on: bool) -> Change:
        """Whether devices may take ops whose weights lie in host memory."""
        return cls("op_offload", "", on)

    @classmethod
    def parallel(cls, on: bool | int) -> Change:
        """Four pipeline slots instead of one, or as many as a number says (n_copies)."""
        return cls("parallel", "", on)

    def __str__(self) -> str:
        return _CHANGES[self.kind](self)


_CHANGES: dict[str, Callable[[Change], str]] = {
    "weight": lambda c: f"put the weight {c.what} on {c.value}",
    "deny": lambda c: f"take {c.what} away from {c.value}",
    "allow": lambda c: f"give {c.value} a kernel for {c.what}",
    "assign": lambda c: f"assign {c.what} to {c.value} by hand" if c.value else f"leave {c.what} to the passes",
    "batch": lambda c: f"a batch of {c.value}",
    "op_offload": lambda c: f"op_offload {'on' if c.value else 'off'}",
    "parallel": lambda c: f"n_copies = {MAX_COPIES if c.value is True else int(c.value) or 1}",
}  # fmt: skip


class Placed(NamedTuple):
    """A node after the passes: its place in the graph, backend, cause of the last decision, split; is_view: computes nothing."""

    place: int
    name: str
    op: str
    backend: str
    cause: str
    split: int
    is_view: bool


class Cut(NamedTuple):
    """A split: backend, its nodes first … last - 1, inputs with their bytes, and why it begins."""

    backend: str
    first: int
    last: int
    inputs: tuple[tuple[str, int], ...]
    cause: str


class Outcome(NamedTuple):
    """What the passes decided; leafs: names and backends of inputs and weights."""

    nodes: tuple[Placed, ...]
    splits: tuple[Cut, ...]
    leafs: tuple[tuple[str, str], ...]

    @property
    def copied(self) -> int:
        """Bytes of all inputs of splits: what a run copies where whole tensors are copied."""
        return sum(size for cut in self.splits for _, size in cut.inputs)

    def borders(self) -> list[tuple[str, str]]:
        """The computed nodes at both sides of each border between two splits."""
        work = [n for n in self.nodes if not n.is_view]
        return [(a.name, b.name) for a, b in zip(work, work[1:]) if a.split != b.split]


@dataclass(frozen=True)
class Case:
    """A graph, a machine and the settings of a scheduler, as one value.

    recipe: builds the graph. devices: as of `simulated_machine`: a number of GPUs, or presets ("laptop,blas,cpu"). weights: (name,
    device) where they lie elsewhere than the recipe says. denied, allowed: (op, device). assigned: (node, device) by hand.
    """

    name: str
    recipe: Recipe
    devices: int | str = 1
    batch: int = 4
    weights: Pairs = ()
    denied: Pairs = ()
    allowed: Pairs = ()
    assigned: Pairs = ()
    op_offload: bool = True
    parallel: bool | int = False
    quirks: str = ""

    @staticmethod
    def of(scheduler: Scheduler, graph: CGraph, name: str = "a graph") -> Case:
        """The case of a scheduler and a graph that exist: both stay as they are; what is built anew can be split, not run."""
        hand = tuple((key, scheduler.backends[b].name) for key, t in tensors_of(graph).items() if (b := scheduler.by_hand.get(t, -1)) >= 0)
        return Case(name, Taken(scheduler, graph), "", 0, assigned=hand, op_offload=scheduler.op_offload,
                    parallel=scheduler.n_copies > 1 and scheduler.n_copies, quirks=scheduler.quirks)  # fmt: skip

    # ---- other cases

    def changed(self, *changes: Change) -> Case:
        """The same case with some changes. Raises ParameterError where one makes no sense for it."""
        case = self
        for change in changes:
            case = case._changed(change)
        return case

    def _changed(self, c: Change) -> Case:
        if c.kind == "weight":
            return replace(self, weights=_with(self.weights, c.what, c.value))
        if c.kind == "assign":
            return replace(self, assigned=_with(self.assigned, c.what, c.value))
        if c.kind in ("deny", "allow"):
            _known(c.what, (*OPS, *(spec.op for spec in OPS.values())), "op")
            pair = (c.what, c.value)
            denied, allowed = (tuple(p for p in pairs if p != pair) for pairs in (self.denied, self.allowed))
            return replace(self, denied=(*denied, pair), allowed=allowed) if c.kind == "deny" else replace(
                self, denied=denied, allowed=(*allowed, pair))  # fmt: skip
        if c.kind == "batch" and (isinstance(self.recipe, Taken) or not isinstance(c.value, int) or c.value < 1):
            raise ParameterError(f"a batch of {c.value!r} for {shown(self.name)}", "a number of tokens, 1 or more",
                                 "a graph that was built elsewhere has a batch of its own")  # fmt: skip
        if c.kind == "batch" or c.kind == "op_offload" and isinstance(c.value, bool) or c.kind == "parallel" and isinstance(c.value, int):
            return replace(self, **{c.kind: c.value})
        raise ParameterError(f"the change {c.kind!r} to {c.value!r}", f"one of {', '.join(_CHANGES)}",
                             "op_offload is True or False, parallel also a number of slots")  # fmt: skip

    # ---- building

    def scheduler_and_graph(self, trace: Trace | None = None, asked_only: bool = False) -> tuple[Scheduler, CGraph]:
        """Both built anew, with the assignments by hand; nothing is split yet. asked_only: nothing will be, and a copy of a graph that was
        built elsewhere may be one that was asked about before.

        Raises UnsupportedOp or ParameterError for assignments that a scheduler refuses, and ParameterError for unknown names.
        """
        if isinstance(self.recipe, Taken):
            backends, graph = (self.recipe.known_twins if asked_only else self.recipe.twins)(self)
            types = [*self.recipe.buffer_types]
        else:
            backends, graph = self._built()
            types = [b.buffer_type for b in backends]
        scheduler = Scheduler(backends, types, max(len(graph.nodes), len(graph.leafs), 1), parallel=self.parallel,
                              op_offload=self.op_offload, quirks=self.quirks, trace=trace)  # fmt: skip
        if self.assigned:
            known = tensors_of(graph)
            for node, device in self.assigned:
                scheduler.set_backend(known[_known(node, known, "tensor")], _named(backends, device))
        return scheduler, graph

    def _built(self) -> tuple[list[Backend], CGraph]:
        backends: list[Backend] = [*simulated_machine(self.devices)]
        _able(backends, backends, self)
        draft = Draft(self, {b.name: b.buffer_type for b in backends})
        with draft.context.active():
            made = self.recipe(draft)
            graph = draft.graph.build_forward_expand(*(t.mark(Flag.OUTPUT) for t in ((made,) if isinstance(made, Tensor) else made)))
        known = tensors_of(graph)
        for weight, _ in self.weights:
            _known(weight, [k for k, t in known.items() if is_weight(t)], "weight")
        return backends, graph

    def write_inputs(self, graph: CGraph, seed: int = 0) -> None:
        """Fill the user's inputs of an allocated graph: numbers by name and seed; expert ids, rows and positions count up from 0."""
        for leaf in graph.leafs:
            if leaf.flags & Flag.INPUT:
                count = np.arange(leaf.n_elements).reshape(leaf.shape) % _choices(leaf, graph)
                leaf.set(_values(f"{leaf.name}{seed or ''}", leaf.shape) if leaf.dtype.name[0] != "i" else count)

    # ---- asking

    def outcome(self) -> Outcome:
        """What the real passes decide for this case. Raises what they raise."""
        return outcome_of(*self.scheduler_and_graph(asked_only=True))


def outcome_of(scheduler: Scheduler, graph: CGraph) -> Outcome:
    """What a scheduler would decide for a graph; changes nothing."""
    of, causes, cuts = dict(scheduler.by_hand), dict.fromkeys(scheduler.by_hand, "usr"), []
    for stage, subject, b, detail in scheduler.decisions(graph):
        if isinstance(subject, Tensor):
            if stage.startswith("pass"):
                of[subject], causes[subject] = b, detail
        else:
            cuts.append((subject, detail))
    name = [*(b.name for b in scheduler.backends), ""]
    keys = {t: key for key, t in tensors_of(graph).items()}
    splits = tuple(Cut(name[s.backend], s.first, s.last, tuple((keys[t], t.nbytes) for t in s.inputs), cause) for s, cause in cuts)
    split_of = [i for i, s in enumerate(splits) for _ in range(s.first, s.last)]
    work = set(computed(graph.nodes))
    nodes = tuple(Placed(i, keys[n], n.desc, name[of.get(n, -1)], causes.get(n, ""), split_of[i], n not in work)
                  for i, n in enumerate(graph.nodes))  # fmt: skip
    return Outcome(nodes, splits, tuple((keys[t], name[of.get(t, -1)]) for t in graph.leafs))


def tensors_of(graph: CGraph) -> dict[str, Tensor]:
    """Leafs and nodes by name; where several have the same, those after the first by "name @ place", as often as needed."""
    out: dict[str, Tensor] = {}
    for i, t in enumerate((*graph.leafs, *graph.nodes)):
        key = t.name or t.desc
        while key in out:
            key = f"{key} @ {i}"
        out[key] = t
    return out


# ---- a graph that is there already


class _Twin(Backend):
    """Answers the questions of the passes as another backend does, but for some ops; computes nothing."""

    def __init__(self, original: Backend) -> None:
        self.name, self.device_type, self.buffer_type = original.name, original.device_type, original.buffer_type
        self.supports_buft, self.offload_op = original.supports_buft, original.offload_op  # type: ignore[method-assign]


class Taken:
    """In place of a recipe: a copy of the descriptions of a graph, and the backends that are asked about it."""

    def __init__(self, scheduler: Scheduler, graph: CGraph) -> None:
        self.backends, self.buffer_types = tuple(scheduler.backends), tuple(scheduler.buffer_types)
        with scheduler.set_aside(graph):
            self._graph = _copied(graph)
        self._known: tuple[tuple[Pairs, ...], tuple[list[Backend], CGraph]] | None = None

    def __call__(self, draft: Draft) -> Tensor:
        """It is no recipe."""
        raise GraphError("a graph that was built elsewhere", "a case with a recipe")

    def known_twins(self, case: Case) -> tuple[list[Backend], CGraph]:
        """The same twins as the last time for a case with the same abilities and places; what a backend can do is asked once."""
        key, known = (case.weights, case.denied, case.allowed), self._known
        if known is None or known[0] != key:
            self._known = known = key, self.twins(case)
            for b in known[1][0]:
                b.why_unsupported = functools.cache(b.why_unsupported)  # type: ignore[method-assign]
        return known[1]

    def twins(self, case: Case) -> tuple[list[Backend], CGraph]:
        """Backends with other abilities, and a graph with other places of weights."""
        graph = _copied(self._graph)
        known = tensors_of(graph) if case.weights else {}
        for weight, device in case.weights:
            t = known[_known(weight, [k for k, t in known.items() if is_weight(t)], "weight")]
            kind = self.buffer_types[self.backends.index(_named(self.backends, device))]
            t.place(PlannedBuffer(kind, kind.alloc_size(t), Usage.WEIGHTS))
        twins: list[Backend] = [_Twin(b) for b in self.backends]
        _able(twins, self.backends, case)
        return twins, graph


def _copied(graph: CGraph) -> CGraph:
    """The same descriptions once more; memory is that of the originals."""
    twin: dict[Tensor, Tensor] = {}
    for t in (*graph.leafs, *graph.nodes):
        view = twin.get(t.view_src, t.view_src) if t.view_src is not None else None
        c = twin[t] = Tensor(t.dtype, t.ne, t.nb, op=t.op, spec=t.spec, params=t.params, view_src=view, view_offs=t.view_offs, name=t.name)
        c.flags, c._storage, c._offset = t.flags, t._storage, t._offset
        c.src = tuple(None if s is None else twin.get(s, s) for s in t.src)
    out = CGraph(size=graph.size, name=graph.name)
    out.leafs, out.nodes = [twin[t] for t in graph.leafs], [twin[t] for t in graph.nodes]
    out.visited = {twin[t]: n for t, n in graph.visited.items() if t in twin}
    return out


# ---- little things


def _able(backends: Sequence[Backend], like: Sequence[Backend], case: Case) -> None:
    """Let backends answer `why_unsupported` as others do, but for a case's denied and allowed ops."""
    for _, device in (*case.denied, *case.allowed):
        _named(backends, device)

    def answer(b: Backend, own: Callable[[Tensor], str], node: Tensor) -> str:
        pairs = ((node.op, b.name), (node.desc, b.name))
        if any(p in case.denied for p in pairs):
            return f"{b.name} is made without {node.desc}"
        return _kernels().why_unsupported(node) if any(p in case.allowed for p in pairs) else own(node)

    for b, original in zip(backends, like, strict=True):
        b.why_unsupported = functools.partial(answer, b, original.why_unsupported)  # type: ignore[method-assign]


@functools.lru_cache(1)
def _kernels() -> CpuBackend:
    return CpuBackend()


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)


def _choices(ids: Tensor, graph: CGraph) -> int:
    """How many rows or experts there are to choose from for whoever reads these numbers."""
    users = [(n, n.src[0]) for n in graph.nodes if ids in n.src]
    limits = [w.ne[2] if n.op == "MUL_MAT_ID" else w.ne[1] for n, w in users if n.op in ("MUL_MAT_ID", "GET_ROWS") and w is not None]
    return min(limits, default=ids.n_elements) or 1


def _known(name: str, names: Iterable[str], what: str) -> str:
    known = [*names]
    if name not in known:
        raise ParameterError(f"no {what} {shown(name)!r}", f"one of {', '.join(map(shown, known[:20]))}")
    return name


def _named(backends: Sequence[Backend], name: str) -> Backend:
    return {b.name: b for b in backends}[_known(name, [b.name for b in backends], "device")]


def _with(pairs: Pairs, key: str, value: str) -> Pairs:
    rest = tuple(p for p in pairs if p[0] != key)
    return (*rest, (key, value)) if value else rest
