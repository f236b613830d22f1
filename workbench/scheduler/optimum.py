"""The placement that moves the fewest bytes, computed exactly: what the five passes can be compared with.

What is counted is what pass 5 has copied in one run, if every tensor is copied whole: a source that a node's backend cannot read
where it lies is copied to that backend, once, however many nodes there read it. Weights and other tensors with memory stay where they
are, inputs of the user lie on the CPU, and what the user reads at the end is not counted. Free to choose is the backend of each
node, among those that support it and reach the memory it writes, but for assignments by hand. Among placements with equally few bytes
the one with the fewest changes of backend along the order is taken.

Two methods, which agree where both can be used. `by_states`: dynamic programming along the order of the nodes. A state is where the
tensors lie that are still to be read, and who has a copy; on a chain that is as many states as devices. `by_cut`: a minimum cut, for
two devices and graphs of any shape. For three and more devices and any shape the problem is hard (multiway cut), and `by_states` gives
up where there are too many states.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from workbench.cgraph import CGraph
from workbench.devices.backend import BufferType, buffer_type_of
from workbench.errors import GraphError, ParameterError, UnsupportedOp
from workbench.scheduler.passes import computed
from workbench.scheduler.scheduler import Scheduler
from workbench.tensors.tensor import Flag, Tensor

MOST_STATES = 50_000
"""Of `by_states` at one node; a graph of many tensors that live long on several devices has more."""


class Placement(NamedTuple):
    """The backend of every node that computes something. nbytes: copied in one run; changes: of backend, along the order."""

    nbytes: int
    changes: int
    of: dict[Tensor, int]


class _Choice(NamedTuple):
    """A tensor that can lie with one of several backends: a node, or a leaf without memory. reads: (source, its size)."""

    tensor: Tensor
    backends: list[int]
    reads: list[Tensor]
    is_node: bool


class Problem:
    """A graph on the devices of a scheduler as choices and their cost; both stay as they are.

    Raises UnsupportedOp where a node can run nowhere, and GraphError for a graph in which a node writes over what others read before:
    then how often a tensor is copied depends on the order.
    """

    def __init__(self, scheduler: Scheduler, graph: CGraph) -> None:
        self.backends, self.types = scheduler.backends, scheduler.buffer_types
        self._hand, self._last = scheduler.by_hand, len(scheduler.backends) - 1
        with scheduler.set_aside(graph):
            self._memory = {t: buffer_type_of(s) for t in (*graph.leafs, *graph.nodes) if (s := t.storage) is not None}
            nodes = computed(graph.nodes)
            self._require_written_first(nodes)
            self.choices: list[_Choice] = []
            met: set[Tensor] = {*nodes, *self._memory}
            for node in nodes:
                sources = [s for s in dict.fromkeys(node.sources()) if s is not node]
                for leaf in dict.fromkeys(s.root() for s in sources if s.root() not in met):
                    self.choices.append(_Choice(leaf, self._leaf(leaf), [], False))
                    met.add(leaf)
                self.choices.append(_Choice(node, self._able(node), sources, True))

    def _leaf(self, leaf: Tensor) -> list[int]:
        if leaf in self._hand:
            return [self._hand[leaf]]
        return [self._last] if leaf.flags & Flag.INPUT else [*range(len(self.backends))]

    def _able(self, node: Tensor) -> list[int]:
        if node in self._hand:
            return [self._hand[node]]
        able = [i for i, b in enumerate(self.backends) if b.supports_op(node)]
        if node in self._memory:
            able = [i for i in able if self.backends[i].supports_buft(self._memory[node])]
        if not able:
            raise UnsupportedOp(f"no backend can compute {node.label} = {node.desc}", "one that supports it and reaches its memory")
        return able

    def _require_written_first(self, nodes: list[Tensor]) -> None:
        read: set[Tensor] = set()
        for node in nodes:
            owner = node.root()
            if node.view_src is not None and (owner in read or owner not in self._memory):
                raise GraphError(f"{node.label} writes over {owner.label}, which has no memory yet or was read before",
                                 "nodes that write into memory of their own, or into a cache before it is read",
                                 "how often such a tensor is copied depends on when")  # fmt: skip
            read |= {s.root() for s in node.sources() if s.root() is not owner}

    def memory(self, tensor: Tensor, home: int) -> BufferType:
        """Where a tensor lies if the choice for the owner of its memory is `home`."""
        return self._memory.get(tensor) or self.types[home]

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether it has memory already."""
        return tensor in self._memory

    def copied(self, source: Tensor, home: int, reader: int) -> int:
        """Bytes that must be copied if `reader` is to read the source; `home`: the choice for the owner of its memory."""
        return 0 if self.backends[reader].supports_buft(self.memory(source, home)) else source.nbytes

    def cost(self, of: Mapping[Tensor, int]) -> Placement:
        """What a placement costs. `of`: the backend of every choice."""
        copies: dict[tuple[Tensor, int], int] = {}
        line = [of[c.tensor] for c in self.choices if c.is_node]
        for c in self.choices:
            for s in c.reads:
                b = of[c.tensor]
                copies[s, b] = self.copied(s, of.get(s.root(), -1), b)
        changes = sum(a != b for a, b in zip(line, line[1:]))
        return Placement(sum(copies.values()), changes, {c.tensor: of[c.tensor] for c in self.choices})


def fewest_bytes(scheduler: Scheduler, graph: CGraph) -> Placement:
    """The placement of a graph on a scheduler's devices that moves the fewest bytes.

    Raises ParameterError where there are more than two devices and the graph is too far from a chain.
    """
    problem = Problem(scheduler, graph)
    return by_cut(problem) if len(problem.backends) <= 2 else by_states(problem)


# ---- dynamic programming


def by_states(problem: Problem, most: int = MOST_STATES) -> Placement:
    """Dynamic programming along the order, for any number of devices."""
    last: dict[Tensor, int] = {}  # when something is read for the last time
    for i, c in enumerate(problem.choices):
        for s in c.reads:
            last[s] = last[s.root()] = i
    State = tuple[int, frozenset[tuple[Tensor, int]], frozenset[tuple[Tensor, int]]]
    Way = tuple[int, int, tuple[int, Any] | None]  # bytes, changes, chain of (choice, way before)
    best: dict[State, Way] = {(-1, frozenset(), frozenset()): (0, 0, None)}
    for i, c in enumerate(problem.choices):
        after: dict[State, Way] = {}
        for (before, homes, copies), (nbytes, changes, way) in best.items():
            home_of = dict(homes)
            for b in c.backends:
                new = {s: n for s in c.reads if (s, b) not in copies and (n := problem.copied(s, home_of.get(s.root(), -1), b))}
                homes_now = (*home_of.items(), *([] if problem.is_fixed(c.tensor) else [(c.tensor, b)]))
                state = (b if c.is_node else before, frozenset((t, h) for t, h in homes_now if last.get(t, -1) > i),
                         frozenset((t, h) for t, h in (*copies, *((s, b) for s in new)) if last[t] > i))  # fmt: skip
                cost = nbytes + sum(new.values()), changes + (c.is_node and before not in (-1, b))
                if state not in after or cost < after[state][:2]:
                    after[state] = (*cost, (b, way))
        if len(after) > most:
            raise ParameterError(f"more than {most:,} states at {c.tensor.label}", "a graph that is nearly a chain, or two devices",
                                 "a smaller graph")  # fmt: skip
        best = after
    nbytes, changes, way = min(best.values(), key=lambda w: w[:2])
    chosen: list[int] = []
    while way is not None:
        b, way = way
        chosen.append(b)
    return Placement(nbytes, changes, {c.tensor: b for c, b in zip(problem.choices, reversed(chosen), strict=True)})


# ---- minimum cut


def by_cut(problem: Problem) -> Placement:
    """A minimum cut between device 0 (the source's side) and device 1.

    A tensor p of n bytes that device 1 cannot read on device 0 becomes p -n-> a -inf-> each reader: if one reader stands on the side of
    device 1, so must a, and p on the other side pays n, once. The other way round likewise. Neighbours in the order are bound by a
    capacity of 1 each way, and bytes weigh more than all of those together.
    """
    choices = problem.choices
    if len(problem.backends) > 2:
        raise ParameterError(f"{len(problem.backends)} devices for a cut", "two", "by_states takes any number")
    if len(problem.backends) == 1:
        return problem.cost({c.tensor: 0 for c in choices})
    weight, place = len(choices) + 1, {c.tensor: i + 2 for i, c in enumerate(choices)}
    readers: dict[Tensor, list[int]] = defaultdict(list)
    for c in choices:
        for s in c.reads:
            readers[s].append(place[c.tensor])
    net = _Network(2 + len(choices))  # 0 and 1: the devices themselves
    for c in choices:
        for b in {0, 1} - {*c.backends}:  # not there: bound to the other one
            net.edge(*((0, place[c.tensor]) if b == 1 else (place[c.tensor], 1)), INFINITE)
    for s, users in readers.items():
        for reader in (0, 1):
            far = 1 - reader
            n = problem.copied(s, far, reader) * weight
            if not n:
                continue
            owner = far if problem.is_fixed(s) else place[s.root()]
            extra = net.node()
            ends = [(owner, extra, n), *((extra, u, INFINITE) for u in users)]
            for one, other, capacity in ends:
                net.edge(*((one, other) if reader == 1 else (other, one)), capacity)
    line = [place[c.tensor] for c in choices if c.is_node]
    for one, other in zip(line, line[1:]):
        net.edge(one, other, 1)
        net.edge(other, one, 1)
    side = net.source_side()
    return problem.cost({c.tensor: 0 if place[c.tensor] in side else 1 for c in choices})


INFINITE = 1 << 200


class _Network:
    """A flow network with the source 0 and the sink 1; Dinic's algorithm: blocking flows along shortest ways."""

    def __init__(self, n: int) -> None:
        self.ways: list[list[int]] = [[] for _ in range(n)]
        self.to: list[int] = []
        self.room: list[int] = []

    def node(self) -> int:
        self.ways.append([])
        return len(self.ways) - 1

    def edge(self, one: int, other: int, capacity: int) -> None:
        """An edge, and the one with no room that flow can be taken back by: numbers 2 k and 2 k + 1."""
        for start, end, room in ((one, other, capacity), (other, one, 0)):
            self.ways[start].append(len(self.to))
            self.to.append(end)
            self.room.append(room)

    def source_side(self) -> set[int]:
        """The nodes on the source's side of a minimum cut: those that a maximum flow leaves within reach."""
        while 1 in (level := self._levels()):
            tried = [0] * len(self.ways)
            while self._push(level, tried):
                pass
        return set(level)

    def _levels(self) -> dict[int, int]:
        level, queue = {0: 0}, deque([0])
        while queue:
            u = queue.popleft()
            for e in self.ways[u]:
                if self.room[e] and self.to[e] not in level:
                    level[self.to[e]] = level[u] + 1
                    queue.append(self.to[e])
        return level

    def _push(self, level: dict[int, int], tried: list[int]) -> int:
        """Push along one shortest way, found depth first; returns what was pushed. tried: edges of each node that lead nowhere."""
        way: list[int] = []
        u = 0
        while u != 1:
            edges = self.ways[u]
            while tried[u] < len(edges) and not (self.room[e := edges[tried[u]]] and level.get(self.to[e]) == level[u] + 1):
                tried[u] += 1
            if tried[u] < len(edges):
                way.append(edges[tried[u]])
                u = self.to[way[-1]]
            elif way:
                u = self.to[way.pop() ^ 1]
                tried[u] += 1
            else:
                return 0
        flow = min(self.room[e] for e in way)
        for e in way:
            self.room[e] -= flow
            self.room[e ^ 1] += flow
        return flow
