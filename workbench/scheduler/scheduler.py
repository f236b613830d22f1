"""`Scheduler`: a graph over several devices (`ggml_backend_sched`).

It assigns nodes to backends, cuts the graph into splits, lets the allocator place everything, and runs the splits in order
with the copies and waits between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from workbench.cgraph import CGraph
from workbench.devices.backend import Backend, BufferType, DeviceType, Event, copy_tensor
from workbench.errors import GraphError, GraphFull, ParameterError
from workbench.execution.allocator import GraphAllocator
from workbench.scheduler.passes import Assignment, Decision, assign
from workbench.scheduler.splits import GraphCopy, Split, Splitter
from workbench.scheduler.transfer import EvalCallback, UsedExperts, WeightTransfer
from workbench.tensors.tensor import Flag, Tensor
from workbench.trace import Trace

MAX_COPIES = 4
"""Pipeline slots of a parallel scheduler (`GGML_SCHED_MAX_COPIES`)."""


class Part:
    """The nodes of a split, or a range of them, as a graph to compute."""

    def __init__(self, nodes: list[Tensor]) -> None:
        self.nodes = nodes
        self._contexts = list({t.context for t in nodes if t.context is not None})

    def require_open(self) -> None:
        """Raise ContextClosed where a context was closed."""
        for context in self._contexts:
            context.require_open()


class Scheduler:
    """Runs graphs over several backends (`ggml_backend_sched_t`).

    backends: by priority; the last one must be a CPU. buffer_types: the compute memory of each (default: its own).
    graph_size: most nodes and leafs. parallel: four pipeline slots instead of one. op_offload: whether backends may take
    ops whose weights lie in host memory. quirks="ggml" reproduces ggml's three hazards instead of refusing or mending them.
    transfer: how weights move. trace: where every call is recorded.
    n_reallocations, n_splittings count what a steady state does not do.
    """

    def __init__(self, backends: Sequence[Backend], buffer_types: Sequence[BufferType] | None = None, graph_size: int = 2048, *,
                 parallel: bool = False, op_offload: bool = True, quirks: str = "", transfer: WeightTransfer | None = None,
                 trace: Trace | None = None) -> None:  # fmt: skip
        if not backends or backends[-1].device_type is not DeviceType.CPU:
            raise ParameterError(f"backends {[b.name for b in backends]}", "at least one, and a CPU as the last",
                                 "append CpuBackend()")  # fmt: skip
        self.backends = list(backends)
        self.buffer_types = list(buffer_types) if buffer_types is not None else [b.buffer_type for b in backends]
        for b, kind in zip(self.backends, self.buffer_types, strict=True):
            if not b.supports_buft(kind):
                raise ParameterError(f"{b.name} with compute memory {kind.name}", "memory that the backend works on")
        self.graph_size, self.op_offload, self.quirks = graph_size, op_offload, quirks
        self.n_copies = MAX_COPIES if parallel else 1
        self.transfer: WeightTransfer = transfer or UsedExperts()
        self.eval_callback: EvalCallback | None = None
        self.n_reallocations = self.n_splittings = 0
        self.trace = trace
        self._allocator = GraphAllocator(self.buffer_types, quirks)
        self._splitter = Splitter(self.backends, self.n_copies)
        self._events = [[b.new_event(f"{b.name}.{c}") if self.n_copies > 1 else None for c in range(self.n_copies)] for b in self.backends]
        self._ids: tuple[list[int], list[int]] = ([], [])  # backends of the graph copy's nodes and leafs, now …
        self._previous_ids = self._ids  # … and of the graph before; a reset keeps both
        self._slot = self._next_slot = 0
        self._user: dict[Tensor, int] = {}
        self._forget()

    @property
    def trace(self) -> Trace | None:
        """Where calls are recorded; setting it sets it for all backends."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for b in self.backends:
            b.trace = trace

    # ---- what the last split decided

    @property
    def splits(self) -> list[Split]:
        """The splits of the last graph, in order."""
        return self._splitter.splits

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
        return self._slot

    @property
    def allocator(self) -> GraphAllocator:
        """The memory of all backends."""
        return self._allocator

    def backend_of(self, tensor: Tensor) -> Backend:
        """The backend of a tensor of the last graph (`ggml_backend_sched_get_tensor_backend`)."""
        b = self._assignment.of.get(tensor, -1)
        if b < 0:
            raise GraphError(f"{tensor.label} has no backend", "a tensor of the graph that was split last")
        return self.backends[b]

    def buffer_size(self, backend: int) -> int:
        """Bytes of compute memory of a backend; 0 where an earlier one has the same (`ggml_backend_sched_get_buffer_size`)."""
        return self._allocator.buffer_size(backend)

    def set_backend(self, tensor: Tensor, backend: int | Backend) -> None:
        """Assign a node by hand, until the next reset (`ggml_backend_sched_set_tensor_backend`).

        Raises UnsupportedOp where the backend cannot compute it, ParameterError for views, which have no computation of
        their own; quirks="ggml" accepts both, as ggml does, with garbage as the result.
        """
        b = backend if isinstance(backend, int) else self.backends.index(backend)
        if not 0 <= b < len(self.backends):
            raise ParameterError(f"backend {b}", f"0 to {len(self.backends) - 1}")
        if self.quirks != "ggml":
            if tensor.view_src is not None:
                raise ParameterError(f"{tensor.label} is a view and has no computation", "a node that computes something",
                                     f"assign {tensor.view_src.label}, whose memory it shows")  # fmt: skip
            self.backends[b].require_op(tensor)
        self._user[tensor] = b
        self._is_reset = False

    # ---- states

    def _forget(self) -> None:
        self._assignment = Assignment(self.backends, self.buffer_types, self.op_offload)
        self._copy = GraphCopy()
        self._graph: CGraph | None = None
        self._parts: dict[Any, Part] = {}
        self._is_reset, self._is_allocated = True, False

    def reset(self) -> None:
        """Forget the last graph and all assignments by hand; its nodes get their own sources back (`…_sched_reset`)."""
        self._splitter.undo()
        self._user = {}
        self._forget()

    def decisions(self, graph: CGraph) -> Iterator[Decision]:
        """Passes 1 to 4, one decision at a time, from the present assignments by hand. Changes nothing else."""
        return assign(self._fresh_assignment(), graph, self.quirks)

    def _fresh_assignment(self) -> Assignment:
        a = Assignment(self.backends, self.buffer_types, self.op_offload)
        for tensor, b in self._user.items():
            a.decide("usr", tensor, b, "usr")
        return a

    def split(self, graph: CGraph) -> list[Split]:
        """Assign and cut a graph without giving it memory (`ggml_backend_sched_split_graph`)."""
        graph.require_open()
        if len(graph.nodes) + len(graph.leafs) > self.graph_size * 2:
            raise GraphFull(f"a graph of {len(graph.nodes):,} nodes and {len(graph.leafs):,} leafs",
                            f"at most {self.graph_size:,} of each", "Scheduler(…, graph_size=…)")  # fmt: skip
        self._splitter.undo()
        self._is_reset, self._is_allocated = False, False
        self.n_splittings += 1
        a = self._assignment = self._fresh_assignment()
        for _ in assign(a, graph, self.quirks):
            pass
        for _ in self._splitter.split(a, graph, self._slot):
            pass
        for split in self.splits:
            split.nodes = self.backends[split.backend].optimize(split.nodes)
        self._copy, self._graph, self._parts = self._splitter.graph_copy(a, graph), graph, {}
        self._previous_ids, self._ids = self._ids, (self._copy.node_ids, self._copy.leaf_ids)
        return self.splits

    def reserve(self, graph: CGraph) -> None:
        """Make the compute memory large enough for `graph`, the largest one to come (`ggml_backend_sched_reserve`).

        Ends in a reset. Raises AllocationError where a device is too small.
        """
        self.synchronize()
        self.split(graph)
        self._allocator.reserve(self._copy, *self._ids)  # type: ignore[arg-type]
        self.reset()

    def alloc(self, graph: CGraph) -> None:
        """Assign, cut and place a graph; then its inputs can be written (`ggml_backend_sched_alloc_graph`)."""
        if self._is_allocated:
            raise GraphError("a graph is allocated already", "a reset before the next one", "scheduler.reset()")
        self._slot = self._next_slot
        self._next_slot = (self._next_slot + 1) % self.n_copies
        self.split(graph)
        if self._moved() or not self._allocator.alloc(self._copy):  # type: ignore[arg-type]
            self.n_reallocations += 1
            for b in self.backends:  # inputs of splits may move: nothing may be on its way
                b.synchronize()
            self._allocator.reserve(self._copy, *self._ids)  # type: ignore[arg-type]
            self._allocator.alloc(self._copy)  # type: ignore[arg-type]
        self._is_allocated = True

    def _moved(self) -> bool:
        """Whether a position of the graph copy has another backend *and* other memory than before; where the graph before
        was shorter, the allocator notices."""
        types = self.buffer_types
        return any(
            i != j and types[i] is not types[j]
            for now, before in zip(self._ids, self._previous_ids, strict=True)
            for i, j in zip(now, before, strict=False)
        )

    # ---- running

    def compute(self, graph: CGraph) -> bool:
        """Run a graph and wait for it (`ggml_backend_sched_graph_compute`); False where a callback stopped it early."""
        finished = self.compute_async(graph)
        self.synchronize()
        return finished

    def compute_async(self, graph: CGraph) -> bool:
        """Run a graph; results are there after `synchronize`. One that is not allocated yet is split and placed first."""
        if not self._is_reset and not self._is_allocated:
            self.reset()
        if not self._is_allocated:
            self.alloc(graph)
        if self._graph is not graph:
            raise GraphError("another graph than the one that was allocated", "the same graph, or a reset before",
                             "scheduler.reset(); scheduler.alloc(graph)")  # fmt: skip
        return self._run_splits()

    def synchronize(self) -> None:
        """Wait for all backends (`ggml_backend_sched_synchronize`)."""
        for b in self.backends:
            b.synchronize()
        if not self._is_allocated:
            self._next_slot = 0  # the same slot at each step keeps addresses the same

    def _run_splits(self) -> bool:
        self.transfer.begin()
        finished, previous = True, -1
        for split in self.splits:
            if not split.inputs and previous not in (-1, split.backend):
                self._await(previous)  # memory may be used again across splits
            for position in range(len(split.inputs)):
                self._bring(split, position)
            finished &= self._compute_split(split)
            event = self._events[split.backend][self._slot]
            if event is not None:
                event.record()
            previous = split.backend
        return finished

    def _event(self, backend: int) -> Event | None:
        return self._events[backend][self._slot]

    def _await(self, backend: int) -> None:
        """Let the host wait for what a backend did in this slot."""
        event = self._event(backend)
        if event is not None:
            event.synchronize()
        else:
            self.backends[backend].synchronize()

    def copy_for(self, tensor: Tensor, split: Split) -> Tensor | None:
        """The copy that a split reads instead of `tensor`, or None."""
        copies = self._splitter.copies.get((tensor, split.backend))
        return copies[self._slot] if copies else None

    def _bring(self, split: Split, position: int) -> None:
        """Copy one input of a split to its backend."""
        tensor, target = split.inputs[position], self.backends[split.backend]
        copy = self.copy_for(tensor, split)
        assert copy is not None
        if int(tensor.flags) & int(Flag.INPUT):  # at once: the user may overwrite it as soon as we return
            self._await(split.backend)
            copy_tensor(tensor, copy, self._trace)
            return
        event = self._event(split.backend)
        if event is not None:
            target.wait_event(event)  # the device must be done with the last contents of the copy
        else:
            target.synchronize()
        if self.transfer.move(self, target, split, position):
            return
        source = self.backend_of(tensor)
        if not target.copy_async(source, tensor, copy):
            source.synchronize()
            self._await(split.backend)
            copy_tensor(tensor, copy, self._trace)

    def _compute_split(self, split: Split) -> bool:
        backend = self.backends[split.backend]
        if self.eval_callback is None:
            backend.compute_async(self._part(split.uid, split.nodes))
            return True
        return self._compute_observed(split, backend, self.eval_callback)

    def _compute_observed(self, split: Split, backend: Backend, callback: EvalCallback) -> bool:
        """Compute up to each node that the callback wants, show it, and go on unless it says no (this split only)."""
        start = 0
        for i, node in enumerate(split.nodes):
            wanted = self._asked(callback, node, True)
            if not wanted and i < len(split.nodes) - 1:
                continue
            backend.compute_async(self._part((split.uid, start, i), split.nodes[start : i + 1]))
            backend.synchronize()
            start = i + 1
            if wanted and not self._asked(callback, node, False):
                return False
        return True

    def _asked(self, callback: EvalCallback, node: Tensor, ask: bool) -> bool:
        answer = bool(callback(node, ask))
        if self._trace is not None:
            if ask:
                self._trace.add("ask", name=node.name, wanted=answer)
            else:
                self._trace.add("answer", name=node.name, go_on=answer)
        return answer

    def _part(self, key: Any, nodes: list[Tensor]) -> Part:
        if key not in self._parts:
            self._parts[key] = Part(nodes)
        return self._parts[key]

    # ---- asking

    def debug(self) -> str:
        """Splits with their inputs and nodes (`GGML_SCHED_DEBUG=2`)."""
        lines: list[str] = []
        a = self._assignment
        for i, split in enumerate(self.splits):
            inputs = " ".join(f"[{t.label} {t.nbytes:,} bytes]" for t in split.inputs)
            lines.append(f"## SPLIT #{i}: {self.backends[split.backend].name} # {len(split.inputs)} inputs{': ' if inputs else ''}{inputs}")
            for node in split.nodes:
                if node.spec is not None and not node.spec.is_view:
                    sources = " ".join(f"{s.label} [{self._where(s)}]" for s in node.sources())
                    lines.append(f"  {node.desc:>14} {node.label} [{self._where(node)} {a.causes.get(node, '')}]: {sources}")
        return "\n".join(lines)

    def _where(self, tensor: Tensor) -> str:
        b = self._assignment.of.get(tensor, -1)
        return self.backends[b].name if b >= 0 else "NULL"

    def close(self) -> None:
        """Give the compute memory back; the backends stay as they are (`ggml_backend_sched_free`)."""
        self.reset()
        self._allocator.close()

    def __repr__(self) -> str:
        return f"<Scheduler over {', '.join(b.name for b in self.backends)}, {len(self.splits)} splits>"

