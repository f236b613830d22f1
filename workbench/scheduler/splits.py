"""Pass 5: cut the graph where the backend changes, and name what must be copied across (`ggml_backend_sched_split_graph`).

A node that reads a tensor which its backend cannot reach gets a copy as source instead. Other than in ggml, sources are only
changed while memory is planned and while splits run (`Splitter.rewritten`): a graph is never left rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.cgraph import CGraph
from workbench.cgraph.graph import next_uid
from workbench.devices.backend import Backend
from workbench.scheduler.passes import Assignment, computed, is_weight
from workbench.tensors.tensor import MAX_SRC, Flag, Tensor

SPLIT_INPUTS = 30
"""Inputs that a split lists before its list must grow (`GGML_SCHED_MAX_SPLIT_INPUTS`)."""
KEPT = Flag.INPUT | Flag.OUTPUT
"""Flags of what must keep its place for a whole run."""

Step = tuple[str, Any, int, Any]
"""A step of pass 5: ("split", Split, backend, cause), ("copy", original, backend, its copies, one per slot),
("input", original, backend, Split) or ("rewrite", node, source index j, copy)."""


@dataclass(eq=False, slots=True)
class Split:
    """A run of nodes for one backend (`ggml_backend_sched_split`): nodes first … last - 1 of the graph; `inputs` are the
    original tensors that are copied in before it runs, `copies` what they become, one per slot; `nodes` are what its backend
    computes, perhaps reordered by it; `uid` lets a backend recognise it."""

    backend: int
    first: int
    last: int
    inputs: list[Tensor] = field(default_factory=list)
    copies: list[list[Tensor]] = field(default_factory=list)
    nodes: list[Tensor] = field(default_factory=list)
    uid: int = field(default_factory=next_uid)


class Rewrite(NamedTuple):
    """Source `j` of `node` is `original`, and `copy` while the graph is split."""

    node: Tensor
    j: int
    original: Tensor
    copy: Tensor


@dataclass(eq=False)
class GraphCopy:
    """The scheduler's own order of nodes and leafs with the backend of each: what the allocator plans. Before each split
    stand, per input, a view that keeps the original alive and the copy itself."""

    nodes: list[Tensor] = field(default_factory=list)
    node_ids: list[int] = field(default_factory=list)
    leafs: list[Tensor] = field(default_factory=list)
    leaf_ids: list[int] = field(default_factory=list)

    def require_open(self) -> None:
        """Raise ContextClosed where a context of one of its tensors was closed."""
        for t in (*self.nodes, *self.leafs):
            t.require_alive()


class Splitter:
    """Pass 5 and the graph copy. One lives as long as its scheduler: the capacity of each split's input list is kept from
    graph to graph, and decides where a long list is cut.

    A copy is used again by later splits of the same backend. Where a node has written into the original since, it is stale:
    ggml uses it all the same (quirks="ggml"); without the quirk another copy is made.
    """

    def __init__(self, backends: list[Backend], n_copies: int = 1, quirks: str = "") -> None:
        self.backends, self.n_copies, self.quirks = backends, n_copies, quirks
        self._capacity: list[int] = []
        self._first = 0
        self._watching = False  # whether some node writes into another tensor
        self._begin(0)

    def _begin(self, slot: int) -> None:
        self.slot = slot
        self.splits: list[Split] = []
        self.rewrites: list[Rewrite] = []
        self.copies: dict[tuple[Tensor, int], list[Tensor]] = {}
        self.graph_inputs: list[Tensor] = []
        self._copied: dict[Tensor, list[tuple[Tensor, int]]] = {}  # owner of the memory -> keys of `copies`

    def preview(self) -> Splitter:
        """Another splitter in the same state, to look at decisions without making them."""
        twin = Splitter(self.backends, self.n_copies, self.quirks)
        twin._capacity, twin._first = [*self._capacity], self._first
        return twin

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """Let the nodes read the copies, and give them their own sources back."""
        changed = [(t, t.src, t.flags) for t in (*(r.node for r in self.rewrites), *self.graph_inputs)]
        try:
            for r in self.rewrites:
                r.node.src = (*r.node.src[: r.j], r.copy, *r.node.src[r.j + 1 :])
            for tensor in self.graph_inputs:
                tensor.flags |= KEPT
            yield
        finally:
            for tensor, src, flags in changed:
                tensor.src, tensor.flags = src, flags

    # ---- deciding

    def split(self, a: Assignment, graph: CGraph, slot: int = 0) -> Iterator[Step]:
        """Cut the graph for an assignment; `slot` is the copy in use. Yields each step as it makes it."""
        self._begin(slot)
        index = {node: i for i, node in enumerate(graph.nodes)}
        nodes = computed(graph.nodes)
        of, several = a.of, self.n_copies > 1
        self._watching = not self.quirks and any(n.view_src is not None for n in nodes)
        if nodes:
            self._first = of[nodes[0]]
        current = self._open(self._first, 0)
        yield "split", current, current.backend, "the first node"
        for node in nodes:
            b = of[node]
            cause = "the next node runs on another backend" if b != current.backend else self._why_cut(a, current, node)
            if cause:
                current.last = index[node]
                current = self._open(b, index[node])
                yield "split", current, b, cause
            for j, source in enumerate(node.src):
                if source is not None and (several or of[source] != b and not a.reads(b, source)):
                    yield from self._read(a, current, node, j, source)
            if node.view_src is not None and self._copied and not self.quirks:
                for key in self._copied.pop(node.view_src, ()):
                    del self.copies[key]
        current.last = len(graph.nodes)
        for split in self.splits:
            split.nodes = graph.nodes[split.first : split.last]

    def _open(self, backend: int, first: int) -> Split:
        self.splits.append(Split(backend, first, first))
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
            there = (s, split.backend) in self.copies
            if is_weight(s):
                return f"the weight {s.label} " + ("lies elsewhere; that its copy is there already is not asked" if there
                                                   else "must be copied in: earlier copies make room first")  # fmt: skip
            if not there:
                return f"its list of {len(split.inputs)} inputs is full"
        return ""

    def _read(self, a: Assignment, split: Split, node: Tensor, j: int, source: Tensor) -> Iterator[Step]:
        """Let `node` read its source j: as it is, or through a copy on the split's backend."""
        home, b = a.of[source], split.backend
        if self.n_copies > 1 and int(source.flags) & int(Flag.INPUT) and (source, home) not in self.copies:
            yield self._rotate(a, source, home)
        if self.n_copies > 1 and (home == b or a.reads(b, source)):
            return
        copies = self.copies.get((source, b))
        if copies is None:
            copies = self.copies[source, b] = [self._duplicate(source, b, c) for c in range(self.n_copies)]
            if self._watching:
                self._copied.setdefault(source.root(), []).append((source, b))
            yield self._made(a, source, b, copies)
            split.inputs.append(source)
            split.copies.append(copies)
            if len(split.inputs) > self._capacity[len(self.splits) - 1]:
                self._capacity[len(self.splits) - 1] *= 2
            yield "input", source, b, split
        self.rewrites.append(Rewrite(node, j, source, copies[self.slot]))
        yield "rewrite", node, j, copies[self.slot]

    def _rotate(self, a: Assignment, source: Tensor, home: int) -> Step:
        """With several slots an input of the user exists once per slot; the original serves as the one in use."""
        made = [source if c == self.slot else self._duplicate(source, home, c) for c in range(self.n_copies)]
        self.copies[source, home] = made
        self.graph_inputs.append(source)
        return self._made(a, source, home, made)

    @staticmethod
    def _made(a: Assignment, source: Tensor, backend: int, copies: list[Tensor]) -> Step:
        for copy in copies:
            a.of[copy], a.causes[copy] = backend, "4.cpy"
        return "copy", source, backend, copies

    def _duplicate(self, source: Tensor, backend: int, slot: int) -> Tensor:
        copy = Tensor(source.dtype, source.ne, source.nb).named(f"{self.backends[backend].name}#{source.name}#{slot}")
        if self.n_copies > 1:
            copy.flags |= KEPT
        return copy

    # ---- what the allocator sees

    def graph_copy(self, a: Assignment, graph: CGraph, kept: dict[Tensor, list[Tensor]] | None = None) -> GraphCopy:
        """Per split its inputs, each with a mark that keeps the original, then its nodes. `kept`: tensors whose memory must not
        be given away before the node that is the key; a backend may ask for that."""
        of, slot = a.of, self.slot
        nodes, node_ids, leafs, leaf_ids = list[Tensor](), list[int](), list[Tensor](), list[int]()
        for split in self.splits:
            for tensor, copies in zip(split.inputs, split.copies, strict=True):
                nodes += _keeper([tensor]), copies[slot]
                node_ids += of[tensor], split.backend
            for node in split.nodes:
                nodes.append(node)
                node_ids.append(of[node])
                if kept and node in kept:
                    for i in range(0, len(kept[node]), MAX_SRC):
                        nodes.append(_keeper(kept[node][i : i + MAX_SRC]))
                        node_ids.append(split.backend)
        if self.n_copies > 1:  # all slots are leafs, so that each has its place before anything runs
            rotated = [(of[t], self.copies[t, of[t]]) for t in self.graph_inputs]
            for b, copies in (*rotated, *((s.backend, c) for s in self.splits for c in s.copies)):
                leafs += copies
                leaf_ids += [b] * len(copies)
        leaf_ids += [of.get(leaf, -1) for leaf in graph.leafs]
        return GraphCopy(nodes, node_ids, leafs + graph.leafs, leaf_ids)


def _keeper(tensors: list[Tensor]) -> Tensor:
    """A view that has no op but sources: it uses `tensors` at this place, so their memory is not given away before."""
    t = tensors[0]
    return Tensor(t.dtype, t.ne, t.nb, src=(*tensors,), view_src=t).named(f"{t.name} (view)")
