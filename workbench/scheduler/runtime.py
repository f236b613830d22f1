"""The runtime: runs splits in order, with the copies and waits between them (`ggml_backend_sched_compute_splits`).

ggml's rule of waiting assumes that only one device works on a kind of memory. Where several do (`mend`), a split also waits for
whoever shares memory with it and was asked for work since.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from workbench.devices.backend import Backend, Event, copy_tensor
from workbench.scheduler.passes import Assignment
from workbench.scheduler.splits import Split, Splitter
from workbench.scheduler.transfer import EvalCallback, Mover, WeightTransfer
from workbench.tensors.tensor import Flag, Tensor
from workbench.trace import Trace

_INPUT = int(Flag.INPUT)
_NO_HOOKS = Mover()


class Part:
    """The nodes of a split, or a range of them, as a graph to compute. share: the part of the work that MUL_MAT_ID really does,
    where its weight source serves some experts only."""

    share = 1.0

    def __init__(self, nodes: list[Tensor]) -> None:
        self.nodes = nodes
        self._contexts = list({t.context for t in nodes if t.context is not None})

    def require_open(self) -> None:
        """Raise ContextClosed where a context was closed."""
        if any(context.closed for context in self._contexts):
            for node in self.nodes:
                node.require_alive()


class Runtime:
    """Copies, waits and computes for the splits of one graph."""

    def __init__(self, backends: list[Backend], events: list[list[Event | None]], transfer: WeightTransfer, mend: bool) -> None:
        self.backends, self.transfer, self.mend = backends, transfer, mend
        self.eval_callback: EvalCallback | None = None
        self.trace: Trace | None = None
        self.slot = 0
        self._events = events
        self._busy: set[int] = set()  # backends that were asked for work since they were last waited for
        self._neighbours: list[list[int]] = [[] for _ in backends]
        self._parts: dict[Any, Part] = {}
        self._readers: dict[Tensor, int] = {}
        self._of: dict[Tensor, int] = {}
        self._taken: list[Tensor] = []  # nodes that the transfer computed and the callback has not seen yet

    def prepare(self, a: Assignment, splitter: Splitter) -> None:
        """Get ready for another graph."""
        self._parts, self._of, self._readers = {}, a.of, {}
        for r in splitter.rewrites:
            self._readers[r.copy] = self._readers.get(r.copy, 0) + 1
        if self.mend:
            self._neighbours = a.sharing()

    @property
    def hooks(self) -> Mover:
        """The transfer, where it wants to know more than what to move."""
        return self.transfer if isinstance(self.transfer, Mover) else _NO_HOOKS

    # ---- what a WeightTransfer may ask

    def backend_of(self, tensor: Tensor) -> Backend:
        """The backend that computed or holds a tensor."""
        return self.backends[self._of[tensor]]

    def may_be_partial(self, copy: Tensor) -> bool:
        """Whether nothing but the first node of its split reads this copy. ggml does not ask."""
        return not self.mend or self._readers.get(copy) == 1

    # ---- waiting

    def synchronize(self, copies: bool = True) -> None:
        """Wait for all backends; between splits copy streams go on, which nothing but events waits for."""
        for b in self.backends:
            b.synchronize(copies)
        self._busy.clear()

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Where anything fails inside, all backends forget what they were asked for."""
        try:
            yield
        except BaseException:
            for b in self.backends:
                b.cancel()
            self._busy.clear()
            self.hooks.cancelled()
            raise

    def _await(self, backend: int) -> None:
        """Let the host wait for what a backend did in this slot."""
        event = self._events[backend][self.slot]
        if event is not None:
            event.synchronize()
        else:
            self.backends[backend].synchronize(copies=False)

    def _await_neighbours(self, backend: int) -> None:
        """Wait for busy backends that work on memory which this one works on, too."""
        for other in self._neighbours[backend]:
            if other in self._busy:
                self.backends[other].synchronize(copies=False)
                self._busy.discard(other)

    # ---- running

    def run(self, splits: list[Split]) -> bool:
        """Run all splits; False where a callback stopped one early."""
        if self.trace is not None:
            self.trace.add("run", self.backends[0].buffer_type.now, slot=self.slot)
        self.transfer.begin()
        self._taken = []
        finished, previous = True, -1
        for split in splits:
            b = split.backend
            if not split.inputs and previous not in (-1, b):
                self._await(previous)  # memory may be used again across splits
            self._await_neighbours(b)
            for position in range(len(split.inputs)):
                self._bring(split, position)
            finished &= self._compute(split)
            self.hooks.done(self, self.backends[b], split)
            self._busy.add(b)
            event = self._events[b][self.slot]
            if event is not None:
                event.record()
            previous = b
        return finished

    def _bring(self, split: Split, position: int) -> None:
        """Copy one input of a split to its backend."""
        tensor, copy, b = split.inputs[position], split.copies[position][self.slot], split.backend
        home = self._of[tensor]
        if self.hooks.keeps(tensor):
            return
        self._await_neighbours(home)
        if int(tensor.flags) & _INPUT:
            self._copy_user_input(tensor, copy, home, b)
            return
        self._await_readers(b)
        if self.transfer.move(self, self.backends[b], split, position):
            return
        if not self.backends[b].copy_async(self.backends[home], tensor, copy):
            self._copy_blocking(tensor, copy, home, b)

    def _copy_user_input(self, tensor: Tensor, copy: Tensor, home: int, b: int) -> None:
        """At once: the user may overwrite it as soon as we return."""
        if self.mend and home in self._busy:  # a node may have written to it
            self.backends[home].synchronize(copies=False)
        self._await(b)
        copy_tensor(tensor, copy, self.trace)

    def _await_readers(self, b: int) -> None:
        """Let a device wait until it is done with the last contents of its copies in this slot."""
        event = self._events[b][self.slot]
        if event is not None:
            self.backends[b].wait_event(event)
        else:
            self.backends[b].synchronize(copies=False)

    def _copy_blocking(self, tensor: Tensor, copy: Tensor, home: int, b: int) -> None:
        """Where no asynchronous copy is possible."""
        self.backends[home].synchronize(copies=False)
        self._await(b)
        copy_tensor(tensor, copy, self.trace)

    def _compute(self, split: Split) -> bool:
        backend = self.backends[split.backend]
        nodes = self.hooks.compute(self, backend, split)
        if self.eval_callback is None:
            if nodes or not split.nodes:  # else the transfer has asked for all of them
                backend.compute_async(self.part((split.uid, len(nodes)), nodes))
            return True
        if not self._show_taken(split.nodes[: len(split.nodes) - len(nodes)], backend, self.eval_callback):
            return False
        return self._compute_observed(split, nodes, backend, self.eval_callback)

    def _show_taken(self, taken: list[Tensor], backend: Backend, callback: EvalCallback) -> bool:
        """Show nodes that the transfer computes itself, when they are whole: it may take several splits before it computes any."""
        self._taken += taken
        if not self._taken or self.hooks.holding:
            return True
        whole, self._taken = self._taken, []
        backend.synchronize(copies=False)
        return all(not self._asked(callback, node, True) or self._asked(callback, node, False) for node in whole)

    def _compute_observed(self, split: Split, nodes: list[Tensor], backend: Backend, callback: EvalCallback) -> bool:
        """Compute up to each node that the callback wants, show it, and go on unless it says no (this split only)."""
        start = 0
        for i, node in enumerate(nodes):
            wanted = self._asked(callback, node, True)
            if not wanted and i < len(nodes) - 1:
                continue
            backend.compute_async(self.part((split.uid, len(nodes), start, i), nodes[start : i + 1]))
            backend.synchronize(copies=False)
            start = i + 1
            if wanted and not self._asked(callback, node, False):
                return False
        return True

    def _asked(self, callback: EvalCallback, node: Tensor, ask: bool) -> bool:
        answer = bool(callback(node, ask))
        if self.trace is not None:
            now = self.backends[0].buffer_type.now
            if ask:
                self.trace.add("ask", now, name=node.name, wanted=answer)
            else:
                self.trace.add("answer", now, name=node.name, go_on=answer)
        return answer

    def part(self, key: Any, nodes: list[Tensor]) -> Part:
        """Some nodes as a graph to compute, the same one for the same key."""
        if key not in self._parts:
            self._parts[key] = Part(nodes)
        return self._parts[key]
