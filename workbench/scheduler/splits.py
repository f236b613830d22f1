"""Pass 5: cut the graph where the backend changes, and name what must be copied across (`ggml_backend_sched_split_graph`).

A node that reads a tensor which its backend cannot reach gets a copy as source instead. The original sources are kept, so
that a graph can be given back as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from workbench.cgraph import CGraph
from workbench.devices.backend import Backend
from workbench.scheduler.passes import Assignment, computed, is_weight
from workbench.tensors.tensor import Flag, Tensor

SPLIT_INPUTS = 30
"""Inputs that a split lists before its list must grow (`GGML_SCHED_MAX_SPLIT_INPUTS`)."""

Event = tuple[str, object, object]
"""A step of pass 5: ("split", split, cause), ("input", split, tensor), ("copy", tensor, copy) or ("rewrite", node, j)."""


@dataclass(eq=False)
class Split:
    """A run of nodes for one backend (`ggml_backend_sched_split`): nodes first … last - 1 of the graph; `inputs` are the
    original tensors that are copied in before it runs; `nodes` are what its backend computes, perhaps reordered by it."""

    backend: int
    first: int
    last: int
    inputs: list[Tensor] = field(default_factory=list)
    nodes: list[Tensor] = field(default_factory=list)
    uid: int = 0


@dataclass(frozen=True)
class Rewrite:
    """Source `j` of `node` was `original` and is now `copy`."""

    node: Tensor
    j: int
    original: Tensor
    copy: Tensor

    def undo(self) -> None:
        """Give the node its own source back."""
        _set_source(self.node, self.j, self.original)


@dataclass(eq=False)
class GraphCopy:
    """The scheduler's own order of nodes and leafs with the backend of each: what the allocator plans. Before each split
    stand, per input, a view that keeps the original alive and the copy itself."""

    nodes: list[Tensor] = field(default_factory=list)
    node_ids: list[int] = field(default_factory=list)
    leafs: list[Tensor] = field(default_factory=list)
    leaf_ids: list[int] = field(default_factory=list)

    def add_node(self, tensor: Tensor, backend: int) -> None:
        """Append a node."""
        self.nodes.append(tensor)
        self.node_ids.append(backend)

    def add_leaf(self, tensor: Tensor, backend: int) -> None:
        """Append a leaf."""
        self.leafs.append(tensor)
        self.leaf_ids.append(backend)

    def require_open(self) -> None:
        """Raise ContextClosed where a context of one of its tensors was closed."""
        for context in {t.context for t in (*self.nodes, *self.leafs) if t.context is not None}:
            context.require_open()


class Splitter:
    """Pass 5 and the graph copy. One lives as long as its scheduler: the capacity of each split's input list is kept from
    graph to graph, and decides where a long list is cut."""

    def __init__(self, backends: list[Backend], n_copies: int = 1) -> None:
        self.backends, self.n_copies = backends, n_copies
        self._capacity: list[int] = []
        self._uid = 0
        self._begin(0)

    def _begin(self, slot: int) -> None:
        self.slot = slot
        self.splits: list[Split] = []
        self.rewrites: list[Rewrite] = []
        self.copies: dict[tuple[Tensor, int], list[Tensor]] = {}
        self.graph_inputs: list[Tensor] = []

    def copy_of(self, tensor: Tensor, backend: int, slot: int) -> Tensor:
        """The copy of a tensor for a backend in a pipeline slot (`tensor_copy`)."""
        return self.copies[tensor, backend][slot]

    def undo(self) -> None:
        """Give every node its original sources back."""
        for rewrite in reversed(self.rewrites):
            rewrite.undo()
        self.rewrites = []

    def split(self, a: Assignment, graph: CGraph, slot: int = 0) -> Iterator[Event]:
        """Cut the graph for an assignment; `slot` is the copy in use. Yields what it does as it does it."""
        self.undo()
        self._begin(slot)
        index = {node: i for i, node in enumerate(graph.nodes)}
        nodes = computed(graph.nodes)
        first = a.of[nodes[0]] if nodes else 0
        current = self._open(first, 0)
        yield "split", current, "the first node"
        for node in nodes:
            b = a.of[node]
            cause = "" if b == current.backend else "the next node runs on another backend"
            cause = cause or self._why_cut(a, current, node)
            if cause:
                current.last = index[node]
                current = self._open(b, index[node])
                yield "split", current, cause
            for j, source in enumerate(node.src):
                if source is not None:
                    yield from self._read(a, current, node, j, source)
        current.last = len(graph.nodes)
        for split in self.splits:
            split.nodes = graph.nodes[split.first : split.last]

    def _open(self, backend: int, first: int) -> Split:
        self._uid += 1
        self.splits.append(Split(backend, first, first, uid=self._uid))
        if len(self._capacity) < len(self.splits):
            self._capacity.append(SPLIT_INPUTS)
        return self.splits[-1]

    def _why_cut(self, a: Assignment, split: Split, node: Tensor) -> str:
        """The reason to start a new split although the backend stays the same, or ''."""
        if not split.inputs:
            return ""
        full = len(split.inputs) == self._capacity[len(self.splits) - 1]
        for s in node.src:
            if s is None or a.of[s] == split.backend or not (full or is_weight(s)):
                continue
            if a.reads(split.backend, s):
                continue
            if is_weight(s):
                return f"the weight {s.label} must be copied in: the memory of earlier copies can be used again"
            if (s, split.backend) not in self.copies:
                return f"its list of {len(split.inputs)} inputs is full"
        return ""

    def _read(self, a: Assignment, split: Split, node: Tensor, j: int, source: Tensor) -> Iterator[Event]:
        """Let `node` read its source j: as it is, or through a copy on the split's backend."""
        home = a.of[source]
        if self.n_copies > 1 and int(source.flags) & int(Flag.INPUT) and (source, home) not in self.copies:
            yield from self._rotate(a, source, home)
        if home == split.backend or a.reads(split.backend, source):
            return
        if (source, split.backend) not in self.copies:
            self.copies[source, split.backend] = [self._duplicate(source, split.backend, c) for c in range(self.n_copies)]
            for copy in self.copies[source, split.backend]:
                a.decide("pass5", copy, split.backend, "4.cpy")
                yield "copy", source, copy
            split.inputs.append(source)
            if len(split.inputs) > self._capacity[len(self.splits) - 1]:
                self._capacity[len(self.splits) - 1] *= 2
            yield "input", split, source
        copy = self.copy_of(source, split.backend, self.slot)
        self.rewrites.append(Rewrite(node, j, source, copy))
        _set_source(node, j, copy)
        yield "rewrite", node, j

    def _rotate(self, a: Assignment, source: Tensor, home: int) -> Iterator[Event]:
        """With several slots an input of the user exists once per slot; the original serves as the one in use."""
        made = [source if c == self.slot else self._duplicate(source, home, c) for c in range(self.n_copies)]
        self.copies[source, home] = made
        self.graph_inputs.append(source)
        for copy in made:
            copy.flags |= Flag.INPUT | Flag.OUTPUT  # kept for the whole run
            a.decide("pass5", copy, home, "4.cpy")  # the original too: it is one of the copies now
            yield "copy", source, copy

    def _duplicate(self, source: Tensor, backend: int, slot: int) -> Tensor:
        copy = Tensor(source.dtype, source.ne, source.nb).named(f"{self.backends[backend].name}#{source.name}#{slot}")
        if self.n_copies > 1:
            copy.flags |= Flag.INPUT | Flag.OUTPUT
        return copy

    def graph_copy(self, a: Assignment, graph: CGraph) -> GraphCopy:
        """The order that the allocator sees: per split its inputs, each with a mark that keeps the original, then its nodes."""
        out = GraphCopy()
        for split in self.splits:
            for tensor in split.inputs:
                out.add_node(_keeper(tensor), a.of[tensor])
                out.add_node(self.copy_of(tensor, split.backend, self.slot), split.backend)
            for node in split.nodes:
                out.add_node(node, a.of[node])
        if self.n_copies > 1:  # all slots are leafs, so that each has its place before anything runs
            for tensor in self.graph_inputs:
                for copy in self.copies[tensor, a.of[tensor]]:
                    out.add_leaf(copy, a.of[tensor])
            for split in self.splits:
                for tensor in split.inputs:
                    for copy in self.copies[tensor, split.backend]:
                        out.add_leaf(copy, split.backend)
        for leaf in graph.leafs:
            out.add_leaf(leaf, a.of.get(leaf, -1))
        return out


def _keeper(tensor: Tensor) -> Tensor:
    """A view that has no op but a source: it uses `tensor` at this place, so its memory is not given away before."""
    return Tensor(tensor.dtype, tensor.ne, tensor.nb, src=(tensor,), view_src=tensor, name=f"{tensor.name} (view)")


def _set_source(node: Tensor, j: int, source: Tensor) -> None:
    node.src = (*node.src[:j], source, *node.src[j + 1 :])
