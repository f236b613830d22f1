"""`CGraph`: tensors in the order in which they can be computed (`ggml_cgraph`).

Leafs carry data (inputs, weights), nodes are computed. `build_forward_expand` walks from a result back through its
sources, depth first, and records each tensor after all of its sources: `nodes` is a topological order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from workbench.errors import ContextClosed, GraphError, GraphFull, ParameterError, shown
from workbench.tensors.context import Context
from workbench.tensors.tensor import Flag, Tensor

DEFAULT_SIZE = 2048
"""Capacity of a graph where none is asked for (`GGML_DEFAULT_GRAPH_SIZE`)."""

STRUCT_BYTES, POINTER_BYTES, COUNT_BYTES, BITSET_BYTES = 96, 8, 4, 4
_PRIMES = (2, 3, 5, 11, 17, 37, 67, 131, 257, 521, 1031, 2053, 4099, 8209, 16411, 32771, 65537, 131101, 262147, 524309,
           1048583, 2097169, 4194319, 8388617, 16777259, 33554467, 67108879, 134217757, 268435459, 536870923,
           1073741827, 2147483659)  # fmt: skip
_FLAGS = [Flag(i) for i in range(2 * Flag.COMPUTE)]  # `|` of an IntFlag takes longer than the rest of a visit
_COMPUTE, _PARAM = int(Flag.COMPUTE), int(Flag.PARAM)

Decision = tuple[str, Tensor, Any, int]
"""One step of an expansion: (kind, tensor, detail, depth of the walk). See `CGraph.expansion`."""


def hash_size(n: int) -> int:
    """Slots of ggml's hash set for `n` tensors: the next prime behind a power of two (`ggml_hash_size`)."""
    return next((p for p in _PRIMES if p >= n), n | 1)


def graph_nbytes(size: int, grads: bool = False) -> int:
    """Bytes a graph of this capacity takes in a context, without the object's header; grads: with the places of gradients and
    of their accumulators (`ggml_graph_nbytes`)."""
    slots = hash_size(2 * size)  # leafs and nodes share the set
    nbytes = STRUCT_BYTES + 2 * size * POINTER_BYTES + slots * COUNT_BYTES
    nbytes += -nbytes % POINTER_BYTES + slots * POINTER_BYTES * (3 if grads else 1)
    return nbytes + -(-slots // 32) * BITSET_BYTES


_uids = itertools.count(1)


def next_uid() -> int:
    """A number that no other graph has (`ggml_graph_next_uid`)."""
    return next(_uids)


class CGraph:
    """Nodes and leafs in the order of computation (`ggml_cgraph`, made by `ggml_new_graph_custom`).

    context: the arena that pays for it and whose closing ends it; without one the graph is an object of its own.
    size: capacity, in nodes and in leafs each. grads: take room for gradients at once, not when they are first built.
    `visited` maps each tensor met to the number of its uses in the graph. `grads` and `grad_accs` map tensors to their gradients and to
    what those are added to. `uid`: 0, or a number by which a backend recognises the same graph again.
    """

    def __init__(self, context: Context | None = None, size: int = DEFAULT_SIZE, name: str = "", grads: bool = False) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ParameterError(f"a graph of size {size!r}", "a whole number of nodes, zero or more")
        if context is not None:
            context.reserve("graph", graph_nbytes(size, grads), name)
        self.context, self.size, self.name, self.uid = context, size, name, 0
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.visited: dict[Tensor, int] = {}
        self.grads: dict[Tensor, Tensor] = {}
        self.grad_accs: dict[Tensor, Tensor] = {}
        self._has_room = grads
        self._users: dict[Tensor, list[Tensor]] = {}
        self._users_of = 0  # nodes that `_users` has seen

    # ---- building

    def build_forward_expand(self, *tensors: Tensor, compute: bool = True) -> CGraph:
        """Add `tensors` and all they depend on, in order, skipping what is there already; returns the graph.

        Unnamed nodes become `node_<i>`, unnamed leafs `leaf_<i>`. compute=False only fixes the order: the nodes are
        not flagged to be computed (`ggml_build_forward_order`). Raises GraphFull beyond the capacity, ContextClosed
        and GraphError (a cycle); the graph is then as it was before.
        """
        for _ in self.expansion(*tensors, compute=compute):
            pass
        return self

    def expansion(self, *tensors: Tensor, compute: bool = True) -> Iterator[Decision]:
        """The walk of `build_forward_expand`, one decision at a time: tuples (kind, tensor, detail, depth).

        "enter": met for the first time, detail is the tensor that uses it (None at the start); its sources come next.
        "seen": met before, detail is the user; nothing is added. "leaf" / "node": recorded, detail is the index.
        The graph itself changes only after the last decision: an abandoned or failed walk leaves no trace.
        """
        self.require_open()
        old, done, revisited = self.visited, dict[Tensor, bool](), list[Tensor]()
        nodes, leafs = list[Tensor](), list[Tensor]()
        n_nodes, n_leafs, size = len(self.nodes), len(self.leafs), self.size
        user: Any = None
        rest: Iterator[Tensor | None] = iter(tensors)
        path, rests = list[Any](), list[Iterator[Tensor | None]]()  # the users above `user`, and what is left of their sources
        while True:
            for t in rest:
                if t is None:
                    continue
                if t in done:
                    if not done[t] and t is not user:  # a cast is its own source, which is no cycle
                        raise _cycle(t, [*path, user])
                    yield "seen", t, user, len(path)
                elif t in old:
                    revisited.append(t)
                    yield "seen", t, user, len(path)
                else:
                    if t.context is not None and t.context.closed:
                        t.require_alive()
                    done[t] = False
                    path.append(user)
                    rests.append(rest)
                    user, rest = t, iter(t.src)
                    yield "enter", t, path[-1], len(rests)
                    break
            else:
                if user is None:
                    break
                t = user
                done[t] = True
                user, rest = path.pop(), rests.pop()
                if t.op == "NONE" and not int(t.flags) & _PARAM:
                    if n_leafs >= size:
                        raise self._full("leafs", tensors)
                    leafs.append(t)
                    n_leafs += 1
                    yield "leaf", t, n_leafs - 1, len(path) + 1
                else:
                    if n_nodes >= size:
                        raise self._full("nodes", tensors)
                    nodes.append(t)
                    n_nodes += 1
                    yield "node", t, n_nodes - 1, len(path) + 1
        self._commit(done, nodes, leafs, revisited if compute else (), compute)

    def decisions(self, *tensors: Tensor) -> Iterator[Decision]:
        """The decisions of `expansion`, to look at: the graph, names and flags stay as they are."""
        left = sum(t is not None for t in tensors)
        for kind, t, detail, depth in self.expansion(*tensors):
            yield kind, t, detail, depth
            left -= depth == ("leaf", "node").count(kind) and kind != "enter"  # one of `tensors` is done
            if not left:
                return

    def _commit(self, met: Iterable[Tensor], nodes: list[Tensor], leafs: list[Tensor], revisited: Sequence[Tensor], compute: bool) -> None:
        for kind, new, have in (("node", nodes, self.nodes), ("leaf", leafs, self.leafs)):
            for i, t in enumerate(new, len(have)):
                if not t.name:
                    t.name = f"{kind}_{i}"
            have += new
        visited = self.visited
        visited.update(dict.fromkeys(met, 0))
        for t in (*nodes, *leafs):
            for s in t.src:
                if s is not None:
                    visited[s] += 1
            if compute and t.op != "NONE":
                t.flags = _FLAGS[int(t.flags) | _COMPUTE]
        for t in revisited:  # parts that were only ordered so far (compute=False) and are wanted now
            _flag_computed(t)

    def _full(self, what: str, tensors: Sequence[Tensor]) -> GraphFull:
        before = len(getattr(self, what))
        wanted = _count(tensors, self.visited, leafs=what == "leafs")
        label = f"graph {shown(self.name)!r}" if self.name else "the graph"
        grown = (f", or clear() between runs: {before:,} {what} are left from earlier calls, for a graph only grows; "
                 "or keep the graph and only write new input data") if before else ""  # fmt: skip
        return GraphFull(f"{label} is full: size={self.size:,}, {before:,} {what} were there and {wanted:,} more are needed",
                         f"at most {self.size:,} {what}",
                         f"CGraph(size={before + wanted:,}) or more, or build(…), which makes it large enough{grown}")  # fmt: skip

    def clear(self) -> None:
        """Forget all nodes and leafs; the tensors stay as they are (`ggml_graph_clear`)."""
        self.require_open()
        self.nodes, self.leafs, self.visited = [], [], {}
        self.grads, self.grad_accs = {}, {}
        self._users, self._users_of = {}, 0

    def add_node(self, tensor: Tensor) -> None:
        """Append a node without following its sources (`ggml_graph_add_node`)."""
        self.require_open()
        if len(self.nodes) >= self.size:
            raise self._full("nodes", [tensor])
        self.nodes.append(tensor)

    def view(self, i0: int, i1: int) -> CGraph:
        """The nodes i0 … i1-1 as a graph of their own that shares the visited set (`ggml_graph_view`)."""
        if not 0 <= i0 <= i1 <= len(self.nodes):
            raise ParameterError(f"view of nodes {i0} to {i1}", f"0 <= i0 <= i1 <= {len(self.nodes)}")
        part = CGraph(size=0, name=self.name)
        part.context, part.nodes, part.visited = self.context, self.nodes[i0:i1], self.visited
        return part

    def copy(self, context: Context | None = None, size: int | None = None) -> CGraph:
        """Another graph over the same tensors (`ggml_graph_dup`), of the same capacity unless `size` is given."""
        self.require_open()
        size = self.size if size is None else size
        if size < max(len(self.nodes), len(self.leafs)):
            raise GraphFull(f"a copy of size {size:,}", f"room for {len(self.nodes):,} nodes and {len(self.leafs):,} leafs")
        twin = CGraph(context, size, self.name, bool(self.grads))
        twin.nodes, twin.leafs, twin.visited = [*self.nodes], [*self.leafs], {**self.visited}
        twin.grads, twin.grad_accs = {**self.grads}, {**self.grad_accs}
        return twin

    # ---- gradients

    def build_backward_expand(self, grad_accs: Mapping[Tensor, Tensor] | None = None, context: Context | None = None) -> CGraph:
        """Add the nodes that compute gradients; see `gradients.build_backward_expand` (`ggml_build_backward_expand`)."""
        from workbench.cgraph.gradients import build_backward_expand

        return build_backward_expand(self, grad_accs, context)

    def grad(self, tensor: Tensor) -> Tensor | None:
        """The gradient of the loss with respect to `tensor`, or None (`ggml_graph_get_grad`)."""
        return self.grads.get(tensor)

    def grad_acc(self, tensor: Tensor) -> Tensor | None:
        """What the gradient of `tensor` is added to at each run, or None (`ggml_graph_get_grad_acc`)."""
        return self.grad_accs.get(tensor)

    def reset(self) -> None:
        """Make the graph ready for the first step of training; see `gradients.reset` (`ggml_graph_reset`)."""
        from workbench.cgraph.gradients import reset

        reset(self)

    def room_for_gradients(self) -> None:
        """Take room in the context for gradients, once."""
        if self.context is not None and not self._has_room:
            self.context.reserve("gradients", graph_nbytes(self.size, True) - graph_nbytes(self.size), self.name)
        self._has_room = True

    # ---- asking

    def use_count(self, tensor: Tensor) -> int:
        """How often the graph uses `tensor` as a source; `add(a, a)` uses it twice (`ggml_node_get_use_count`)."""
        return self.visited.get(tensor, 0)

    def users(self, tensor: Tensor) -> list[Tensor]:
        """The nodes that have `tensor` as a source, in order, each once."""
        if self._users_of > len(self.nodes):
            self._users, self._users_of = {}, 0
        for node in self.nodes[self._users_of :]:
            for s in dict.fromkeys(node.src):
                if s is not None:
                    self._users.setdefault(s, []).append(node)
        self._users_of = len(self.nodes)
        return list(self._users.get(tensor, ()))

    def find(self, name: str) -> Tensor | None:
        """The first leaf, else the first node, of this name (`ggml_graph_get_tensor`)."""
        return next((t for t in itertools.chain(self.leafs, self.nodes) if t.name == name), None)

    def require_open(self) -> None:
        """Raise ContextClosed where the context that holds the graph was closed."""
        if self.context is not None and self.context.closed:
            raise ContextClosed(f"graph {shown(self.name)!r} was used after its context {shown(self.context.name)!r} was closed",
                                "an open context", "keep the context open as long as the graph is used")  # fmt: skip

    def require_alive(self) -> None:
        """Raise ContextClosed where the graph or one of its tensors belongs to a closed context."""
        self.require_open()
        for t in itertools.chain(self.leafs, self.nodes):
            t.require_alive()

    def table(self) -> str:
        """Nodes and leafs as text, one line each: index, shape, op, flags, name (`ggml_graph_print`)."""
        from workbench.cgraph.export import table

        return table(self)

    def to_dot(self) -> str:
        """The graph in the language of Graphviz (`ggml_graph_dump_dot`)."""
        from workbench.cgraph.export import to_dot

        return to_dot(self)

    def to_json(self) -> str:
        """The graph as JSON text, without data; `from_json` reads it."""
        from workbench.cgraph.serial import to_json

        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes, context: Context | None = None) -> CGraph:
        """Read what `to_json` wrote; runs nothing from the file. Raises FileFormatError."""
        from workbench.cgraph.serial import from_json

        return from_json(text, context)

    def __len__(self) -> int:
        return len(self.nodes)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        name = f" {shown(self.name)!r}" if self.name else ""
        return f"<CGraph{name} {len(self.nodes):,} nodes, {len(self.leafs):,} leafs, size={self.size:,}>"


def build(*tensors: Tensor, size: int | None = None, name: str = "") -> CGraph:
    """A graph that computes `tensors`, large enough for them unless `size` sets a capacity."""
    graph = CGraph(size=2**31 - 1 if size is None else size, name=name).build_forward_expand(*tensors)
    if size is None:
        graph.size = max(DEFAULT_SIZE, len(graph.nodes), len(graph.leafs))
    return graph


def _flag_computed(tensor: Tensor) -> None:
    """Flag what `tensor` needs, as far down as the flag is missing."""
    todo = [tensor]
    while todo:
        t = todo.pop()
        if t.op != "NONE":
            t.flags = _FLAGS[int(t.flags) | _COMPUTE]
        todo += [s for s in t.src if s is not None and s.op != "NONE" and not int(s.flags) & _COMPUTE]


def _count(tensors: Sequence[Tensor], known: dict[Tensor, int], leafs: bool) -> int:
    """New leafs, or new nodes, below `tensors`."""
    met: set[Tensor] = set()
    todo = list(tensors)
    while todo:
        t = todo.pop()
        if t not in met and t not in known:
            met.add(t)
            todo += [s for s in t.src if s is not None]
    return sum((t.op == "NONE" and not int(t.flags) & _PARAM) == leafs for t in met)


def _cycle(t: Tensor, path: list[Tensor]) -> GraphError:
    loop = path[path.index(t) :]
    names = " <- ".join(u.label for u in (loop if len(loop) <= 6 else [*loop[:3], *loop[-2:]]))
    return GraphError(f"a cycle of {len(loop)} tensors: {names} <- {t.label}", "sources that come before the tensors made from them",
                      "look at the `src` that was set by hand")  # fmt: skip
