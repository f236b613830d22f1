"""`Scheduler`: a graph over several devices (`ggml_backend_sched`).

It assigns nodes to backends, cuts the graph into splits, lets the allocator place everything, and runs the splits in order
with the copies and waits between them.
"""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from workbench.cgraph import CGraph
from workbench.cgraph.graph import next_uid
from workbench.devices.backend import Backend, BufferType, DeviceType, Event
from workbench.errors import GraphError, GraphFull, ParameterError, WorkbenchError
from workbench.execution.allocator import GraphAllocator
from workbench.scheduler import record
from workbench.scheduler.passes import Assignment, passes
from workbench.scheduler.runtime import Runtime
from workbench.scheduler.splits import GraphCopy, Split, Splitter
from workbench.scheduler.transfer import EvalCallback, UsedExperts, WeightTransfer
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Moves, Tensor
from workbench.trace import Trace

MAX_COPIES = 4
"""Pipeline slots of a parallel scheduler (`GGML_SCHED_MAX_COPIES`)."""


_HOLDERS: weakref.WeakKeyDictionary[CGraph, Callable[[], Scheduler | None]] = weakref.WeakKeyDictionary()
"""Graph -> the scheduler that split it last: its memory does not bind another one."""


F = TypeVar("F", bound=Callable[..., Any])


def _in_turn(method: F) -> F:
    """Let calls from several threads wait for each other, also those of other schedulers on the same devices."""

    @functools.wraps(method)
    def call(self: Scheduler, *args: Any, **kw: Any) -> Any:
        with ExitStack() as turns:
            for turn in self._turns:
                turns.enter_context(turn)
            return method(self, *args, **kw)

    return call  # type: ignore[return-value]


class Scheduler:
    """Runs graphs over several backends (`ggml_backend_sched_t`).

    backends: by priority; the last one must be a CPU. buffer_types: the compute memory of each (default: its own).
    graph_size: most nodes and leafs. parallel: four pipeline slots instead of one, or as many as a number says. op_offload: whether
    backends may take ops whose weights lie in host memory. quirks="ggml" reproduces ggml's hazards instead of refusing or mending them.
    transfer: how weights move. trace: where decisions and calls are recorded.

    Calls from several threads happen one after the other. Threads that write inputs of their own need a scheduler each.

    A steady state does not change these counters: n_splittings, graphs assigned and cut; n_reservations, plans of memory made
    anew because the last one did not fit; n_reallocations, those that had to take other memory.
    """

    def __init__(self, backends: Sequence[Backend], buffer_types: Sequence[BufferType] | None = None, graph_size: int = 2048, *,
                 parallel: bool | int = False, op_offload: bool = True, quirks: str = "", transfer: WeightTransfer | None = None,
                 trace: Trace | None = None) -> None:  # fmt: skip
        self.backends = list(backends)
        if strange := [b for b in self.backends if not isinstance(b, Backend)]:
            raise ParameterError(f"{strange[0]!r} among the backends", "backends", "Scheduler([gpu, CpuBackend()])")
        if not self.backends or self.backends[-1].device_type is not DeviceType.CPU:
            raise ParameterError(f"backends {[b.name for b in self.backends]}", "at least one, and a CPU as the last",
                                 "append CpuBackend()")  # fmt: skip
        self.buffer_types = [b.buffer_type for b in self.backends] if buffer_types is None else list(buffer_types)
        if len(self.buffer_types) != len(self.backends):
            raise ParameterError(f"{len(self.buffer_types)} buffer types", f"one for each of {len(self.backends)} backends")
        for b, kind in zip(self.backends, self.buffer_types, strict=True):
            if not b.supports_buft(kind):
                raise ParameterError(f"{b.name} with compute memory {kind.name}", "memory that the backend works on")
        if not isinstance(graph_size, int) or graph_size < 1:
            raise ParameterError(f"graph_size={graph_size!r}", "a whole number of nodes, 1 or more")
        self.graph_size, self.op_offload, self.quirks = graph_size, op_offload, quirks
        self.n_copies = MAX_COPIES if parallel is True else int(parallel or 1)
        if not 1 <= self.n_copies <= MAX_COPIES:
            raise ParameterError(f"parallel={parallel!r}", f"True, False, or 1 to {MAX_COPIES} slots")
        turns = {id(turn): turn for turn in (threading.RLock(), *(b.turn for b in self.backends))}
        self._turns = [turns[key] for key in sorted(turns)]  # in one order for all schedulers: none waits for ever
        self.n_splittings = self.n_reservations = self.n_reallocations = 0
        self._allocator = GraphAllocator(self.buffer_types, quirks)
        self._splitter = Splitter(self.backends, self.n_copies, quirks)
        self._runtime = Runtime(self.backends, self._new_events(), transfer or UsedExperts(), mend=not quirks)
        self.trace = trace
        self._ids: tuple[list[int], list[int]] = ([], [])  # backends of the graph copy's nodes and leafs, now …
        self._previous_ids = self._ids  # … and of the graph before; a reset keeps both
        self._next_slot = 0
        self._user: dict[Tensor, int] = {}
        self._forget()

    def _new_events(self) -> list[list[Event | None]]:
        several = self.n_copies > 1
        return [[b.new_event(f"{b.name}.{c}") if several else None for c in range(self.n_copies)] for b in self.backends]

    @property
    def trace(self) -> Trace | None:
        """Where decisions and calls are recorded; setting it sets it for all backends."""
        return self._runtime.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._runtime.trace = trace
        for b in self.backends:
            b.trace = trace

    @property
    def transfer(self) -> WeightTransfer:
        """How weights reach the device that computes with them."""
        return self._runtime.transfer

    @transfer.setter
    def transfer(self, transfer: WeightTransfer) -> None:
        self._runtime.transfer = transfer

    @property
    def eval_callback(self) -> EvalCallback | None:
        """Is asked for each node, and shown those that it wants (`ggml_backend_sched_set_eval_callback`)."""
        return self._runtime.eval_callback

    @eval_callback.setter
    def eval_callback(self, callback: EvalCallback | None) -> None:
        self._runtime.eval_callback = callback

    # ---- what the last split decided

    @property
    def graph(self) -> CGraph | None:
        """The graph that was split last, or None after a reset."""
        return self._graph

    @property
    def splits(self) -> list[Split]:
        """The splits of the last graph, in order."""
        return self._splitter.splits if self._graph is not None else []

    @property
    def assignment(self) -> Assignment:
        """Backend and cause of every tensor of the last graph."""
        return self._assignment

    @property
    def graph_copy(self) -> GraphCopy:
        """The order of nodes and leafs that the allocator saw."""
        return self._copy

    @property
    def splitter(self) -> Splitter:
        """Copies and rewrites of the last graph."""
        return self._splitter

    @property
    def slot(self) -> int:
        """The pipeline slot in use (`cur_copy`)."""
        return self._runtime.slot

    @property
    def allocator(self) -> GraphAllocator:
        """The memory of all backends."""
        return self._allocator

    @property
    def is_reset(self) -> bool:
        """No graph was split and nothing was assigned since the last reset."""
        return self._is_reset

    @property
    def is_allocated(self) -> bool:
        """The last graph has its memory: inputs can be written, and it can be computed."""
        return self._is_allocated

    def backend_of(self, tensor: Tensor) -> Backend:
        """The backend of a tensor of the last graph (`ggml_backend_sched_get_tensor_backend`)."""
        b = self._assignment.of.get(tensor, -1)
        if b < 0:
            raise GraphError(f"{tensor.label} has no backend", "a tensor of the graph that was split last")
        return self.backends[b]

    def buffer_size(self, backend: int | Backend) -> int:
        """Bytes of compute memory of a backend; 0 where an earlier one has the same (`ggml_backend_sched_get_buffer_size`)."""
        return self._allocator.buffer_size(self._index(backend))

    def _index(self, backend: int | Backend) -> int:
        if isinstance(backend, int) and not isinstance(backend, bool) and 0 <= backend < len(self.backends):
            return backend
        if backend in self.backends:
            return self.backends.index(backend)
        names = ", ".join(f"{i}: {b.name}" for i, b in enumerate(self.backends))
        raise ParameterError(f"backend {backend!r}", f"one of this scheduler's, or its number: {names}")

    @_in_turn
    def set_backend(self, tensor: Tensor, backend: int | Backend) -> None:
        """Assign a node by hand, until the next reset (`ggml_backend_sched_set_tensor_backend`).

        Raises UnsupportedOp where the backend cannot compute it or reach its memory, ParameterError for views, which have no
        computation of their own; quirks="ggml" accepts all of these, as ggml does, with garbage as the result.
        """
        b = self._index(backend)
        if not isinstance(tensor, Tensor):
            raise ParameterError(f"{tensor!r} to be assigned", "a tensor", "graph.find(name) finds one")
        if self.quirks != "ggml":
            self._assignment.require_assignable(tensor, b)
        self._user[tensor] = b
        self._is_reset = False

    # ---- states

    def _forget(self) -> None:
        self._assignment = self._fresh_assignment()
        self._copy = GraphCopy()
        self._graph: CGraph | None = None
        self._recorded: list[Tensor] = []  # the tensors that a trace means by their number
        self._is_allocated = False
        self._is_reset = not self._user

    @_in_turn
    def reset(self) -> None:
        """Forget the last graph and all assignments by hand (`ggml_backend_sched_reset`)."""
        self._user = {}
        self._forget()

    def decisions(self, graph: CGraph) -> Iterator[tuple[Any, ...]]:
        """All that `split` would decide, one step at a time, from the present assignments by hand; nothing is changed.

        Passes 1 to 4: (stage, tensor, backend, cause). Pass 5: see `splits.Step`. Between two steps a graph that has compute
        memory has it as before; `set_aside` says what the steps were decided from.
        """
        a = self._fresh_assignment()
        for steps in (*(p for _, p in passes(a, graph, self.quirks)), self._splitter.preview().split(a, graph, self.slot)):
            with self.set_aside(graph):
                made, failed = _until_it_fails(steps)
            yield from made
            if failed is not None:
                raise failed

    @contextmanager
    def set_aside(self, graph: CGraph) -> Iterator[None]:
        """Look at a graph as `split` does: without the compute memory that a scheduler gave to its tensors."""
        holder = _HOLDERS.get(graph, lambda: None)() or self
        kept = [(t, t._storage) for t in (*graph.leafs, *graph.nodes)
                if t._storage is not None and (self._places_anew(t) or holder._places_anew(t))]  # fmt: skip
        try:
            for t, _ in kept:
                t._storage = None
            yield
        finally:
            for t, storage in kept:
                t._storage = storage

    @property
    def by_hand(self) -> dict[Tensor, int]:
        """The assignments by hand since the last reset, by tensor."""
        return dict(self._user)

    def _fresh_assignment(self) -> Assignment:
        a = Assignment(self.backends, self.buffer_types, self.op_offload)
        for tensor, b in self._user.items():
            a.decide("usr", tensor, b, "usr")
        return a

    @_in_turn
    def split(self, graph: CGraph) -> list[Split]:
        """Assign and cut a graph without giving it memory (`ggml_backend_sched_split_graph`).

        Memory that a scheduler gave to the graph's tensors before does not count: they are placed anew. One that holds the
        graph loses it. Where this fails, no graph is split, and assignments by hand stay.
        """
        self._forget()
        if not isinstance(graph, CGraph):
            raise ParameterError(f"a {type(graph).__name__}", "a graph", "build(result) makes one")
        graph.require_alive()
        if max(len(graph.nodes), len(graph.leafs)) > self.graph_size:
            raise GraphFull(f"a graph of {len(graph.nodes):,} nodes and {len(graph.leafs):,} leafs",
                            f"at most {self.graph_size:,} of each", "Scheduler(…, graph_size=…)")  # fmt: skip
        holder = _HOLDERS.get(graph, lambda: None)()
        if holder is not None and holder is not self:
            holder._hand_over(graph)
        _HOLDERS[graph] = weakref.ref(self)
        self._take_back(graph)
        self.n_splittings += 1
        self._is_reset = False
        with collector_paused():
            self._split(graph)
        return self.splits

    def _split(self, graph: CGraph) -> None:
        a, splitter = self._assignment, self._splitter
        if self.trace is None:
            for _, decisions in passes(a, graph, self.quirks):
                for _ in decisions:
                    pass
            for _ in splitter.split(a, graph, self.slot):
                pass
        else:
            steps = passes(a, graph, self.quirks), splitter.split(a, graph, self.slot)
            self._recorded = record.splitting(self.trace, graph, self._user, *steps, self.backends, self.buffer_types)
        kept: dict[Tensor, list[Tensor]] = {}
        hooks = self._runtime.hooks
        if hooks.attaches or any(b.optimizes for b in self.backends):
            with splitter.rewritten():
                kept = hooks.attach(splitter.splits, self.backends)
                self._optimize(kept)
        self._graph, self._copy = graph, splitter.graph_copy(a, graph, kept)
        graph.uid = next_uid()
        self._runtime.prepare(a, splitter)
        self._previous_ids, self._ids = self._ids, (self._copy.node_ids, self._copy.leaf_ids)

    def _take_back(self, graph: CGraph) -> None:
        """Forget where this scheduler put the graph's tensors, and where anybody put what is computed anew in any case."""
        taken = False
        for tensors in (graph.leafs, graph.nodes):
            for t in tensors:
                if t._storage is not None and self._places_anew(t):
                    t._storage, taken = None, True
        Moves.count += taken

    def _places_anew(self, t: Tensor) -> bool:
        storage = t._storage
        return storage is not None and (self._allocator.owns(t) or self.quirks != "ggml" and t.op != "NONE"
                                        and storage.usage is Usage.COMPUTE)  # fmt: skip

    def _hand_over(self, graph: CGraph) -> None:
        """Another scheduler wants the graph."""
        self._take_back(graph)
        if self._graph is graph:
            self._forget()

    def _optimize(self, kept: dict[Tensor, list[Tensor]]) -> None:
        """Let each backend order the nodes of its splits, and add to `kept` what memory it wants kept, by the node until which."""

        def keep(tensor: Tensor, until: Tensor) -> None:
            tensors = kept.setdefault(until, [])
            if tensor not in tensors:
                tensors.append(tensor)

        for split in self._splitter.splits:
            nodes = self.backends[split.backend].optimize(split.nodes, keep)
            if nodes is not split.nodes:
                _require_order(self.backends[split.backend], split.nodes, nodes)
                split.nodes = nodes
        if kept:
            for node in kept.keys() - {n for s in self._splitter.splits for n in s.nodes}:
                raise GraphError(f"a backend wants memory kept until {node.label}", "a node of the graph")

    @_in_turn
    def measure(self, graph: CGraph) -> list[int]:
        """Bytes of compute memory per backend that `reserve` would take; takes none (`ggml_backend_sched_reserve_size`).
        Ends in a reset."""
        self.reset()
        self.synchronize()
        self.split(graph)
        try:
            with self._splitter.rewritten():
                return self._allocator.measure(self._copy, *self._ids)  # type: ignore[arg-type]
        finally:
            self.reset()

    @_in_turn
    def reserve(self, graph: CGraph) -> None:
        """Make the compute memory large enough for `graph`, the largest one to come (`ggml_backend_sched_reserve`).

        Ends in a reset. Raises AllocationError where a device is too small.
        """
        self.synchronize()
        self.split(graph)
        try:
            with self._splitter.rewritten():
                self._allocator.reserve(self._copy, *self._ids)  # type: ignore[arg-type]
        finally:
            self.reset()

    @_in_turn
    def alloc(self, graph: CGraph) -> None:
        """Assign, cut and place a graph; then its inputs can be written (`ggml_backend_sched_alloc_graph`).

        Raises GraphError where a graph is allocated already; AllocationError where a device is too small, and then nothing is.
        """
        if self._is_allocated:
            raise GraphError("a graph is allocated already", "a reset before the next one", "scheduler.reset()")
        self._runtime.slot = self._next_slot
        self._next_slot = (self._next_slot + 1) % self.n_copies
        try:
            self.split(graph)
            with self._splitter.rewritten():
                self._place()
        except BaseException:
            self._forget()
            raise
        self._is_allocated = True

    def _place(self) -> None:
        allocator, copy = self._allocator, self._copy
        plans, sizes = allocator.n_reserved, self._chunks()
        if any(elsewhere for *_, elsewhere in self.moved()) or not allocator.alloc(copy):  # type: ignore[arg-type]
            for b in self.backends:  # inputs of splits may move: nothing may be on its way
                b.synchronize()
            allocator.reserve(copy, *self._ids)  # type: ignore[arg-type]
            allocator.alloc(copy)  # type: ignore[arg-type]
        self.n_reservations += allocator.n_reserved - plans
        self.n_reallocations += self._chunks() != sizes
        if self.trace is not None:
            record.placing(self.trace, self._recorded, allocator)

    def _chunks(self) -> list[list[int]]:
        return [self._allocator.chunk_sizes(i) for i in range(len(self.backends))]

    def moved(self) -> Iterator[tuple[str, int, int, int, bool]]:
        """Where the graph copy has another backend than the one before (`prev_node_backend_ids`):
        ("node" or "leaf", position, backend now, backend before, is that other memory?).

        One position with other memory, and the plan is made anew. Where there was none, 0 counts.
        """
        types = [*self.buffer_types, None]  # None: of a tensor without backend
        for kind, now, before in zip(("node", "leaf"), *self.backend_ids, strict=True):
            before = before[: len(now)] + [0] * (len(now) - len(before))
            if now != before:
                for i, (b, old) in enumerate(zip(now, before, strict=True)):
                    if b != old:
                        yield kind, i, b, old, types[b] is not types[old]

    @property
    def backend_ids(self) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
        """Backends of the graph copy's (nodes, leafs): of this graph, and of the one before. A reset keeps both."""
        return self._ids, self._previous_ids

    # ---- running

    @_in_turn
    def compute(self, graph: CGraph) -> bool:
        """Run a graph and wait for it (`ggml_backend_sched_graph_compute`); False where a callback stopped it early.

        Results may lie where inputs were: write all inputs again before the next run.
        """
        finished = self.compute_async(graph)
        self.synchronize()
        return finished

    @_in_turn
    def compute_async(self, graph: CGraph) -> bool:
        """Run a graph; results are there after `synchronize`. One that is not allocated yet is split and placed first.

        Leafs flagged as inputs can be written anew at once, for the next run; others only after `synchronize`.
        Where it fails, work that was asked for is given up on all backends; the graph stays allocated and can be run again.
        """
        if not self._is_allocated:
            if not self._is_reset and self.quirks == "ggml":  # ggml drops assignments by hand here
                self.reset()
            self.alloc(graph)
        if self._graph is not graph:
            raise GraphError("another graph than the one that was allocated", "the same graph, or a reset before",
                             "scheduler.reset(); scheduler.alloc(graph)")  # fmt: skip
        with self._runtime.giving_up(), self._splitter.rewritten():
            return self._runtime.run(self.splits)

    @_in_turn
    def synchronize(self, copies: bool = True) -> None:
        """Wait for all backends (`ggml_backend_sched_synchronize`), and for what was prefetched: results do not need the latter."""
        with self._runtime.giving_up():
            self._runtime.synchronize(copies)
        if not self._is_allocated:
            self._next_slot = 0  # the same slot at each step keeps addresses the same

    def debug(self, level: int = 2) -> str:
        """Splits with their inputs, and from level 2 on their nodes (`GGML_SCHED_DEBUG`)."""
        with self._splitter.rewritten():
            return record.debug(self, level)

    @_in_turn
    def close(self) -> None:
        """Give the compute memory back; the backends stay as they are (`ggml_backend_sched_free`)."""
        self.reset()
        self._allocator.close()

    def __repr__(self) -> str:
        return f"<Scheduler over {', '.join(b.name for b in self.backends)}, {len(self.splits)} splits>"


def _until_it_fails(steps: Iterable[Any]) -> tuple[list[Any], WorkbenchError | None]:
    made = []
    try:
        for step in steps:
            made.append(step)
    except WorkbenchError as failed:
        return made, failed
    return made, None


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's search for reference cycles, whose share grows with the number of objects alive: everything made
    while a graph is split stays."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _require_order(backend: Backend, before: list[Tensor], after: list[Tensor]) -> None:
    """Raise GraphError where a backend's order is not one of the same nodes, sources first."""
    left = set(before)
    if len(after) != len(before) or left != set(after):
        raise GraphError(f"{backend.name} made {len(after)} nodes of the {len(before)} of a split", "the same nodes in another order")
    for node in after:
        left.discard(node)
        for s in (*node.sources(), node.root()):
            if s in left:
                raise GraphError(f"{backend.name} puts {node.label} before {s.label}, which it reads", "sources before their readers")
