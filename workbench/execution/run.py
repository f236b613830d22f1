"""Running one graph on one backend: memory, plan and run, each made once and used again.

The order that always works: build the graph, `prepare` it (now every tensor has memory), `set` the inputs, `run` it.
A graph that comes again, as in decoding, is only run: nothing is planned, nothing is allocated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import numpy as np

from workbench.cgraph import CGraph
from workbench.devices import Backend, CpuBackend, Plan
from workbench.devices.plan import Recorder
from workbench.errors import NoDataError
from workbench.execution.allocator import GraphAllocator
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Tensor


class GraphRunner:
    """A backend with the compute memory and the plans of the graphs it runs (`ggml_gallocr` + `ggml_backend_graph_compute`).

    Graphs share one compute buffer: running one overwrites what another left there, except in tensors that have memory
    of their own (a context with data, a buffer). n_plans and n_reallocations count what a steady state does not do.
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self.backend = backend or CpuBackend()
        self.allocator = GraphAllocator(self.backend.buffer_type)
        self.n_plans = self.n_reallocations = 0
        self._plans: weakref.WeakKeyDictionary[CGraph, Plan] = weakref.WeakKeyDictionary()

    def prepare(self, graph: CGraph) -> Plan:
        """Give every tensor of the graph memory and bind its nodes to kernels; does nothing where that is done already.

        Inputs that get their memory here hold NaN (integers: -1) until they are set, never something plausible.
        """
        plan = self._plans.get(graph)
        if plan is not None and plan.fits(graph):
            return plan
        if any(_lacks_memory(t) for t in (*graph.leafs, *graph.nodes)):
            fresh = [t for t in graph.leafs if _lacks_memory(t)]
            before = self.allocator.chunk_sizes()
            self.allocator.alloc(graph)
            self.n_reallocations += self.allocator.chunk_sizes() != before
            _poison(fresh)
        plan = self._plans[graph] = self.backend.plan(graph)
        self.n_plans += 1
        return plan

    def run(self, graph: CGraph, record: Recorder | None = None) -> None:
        """Compute the graph. `record` is told the start and end of every node.

        Raises NoDataError where a leaf has no memory, for then nobody can have written it; UnsupportedOp where the
        backend has no kernel; ContextClosed where a context of one of its tensors was closed.
        """
        plan = self._plans.get(graph)
        if plan is None or not plan.fits(graph):
            graph.require_alive()
            for leaf in graph.leafs:
                if _lacks_memory(leaf):
                    raise _never_written(leaf)
            plan = self.prepare(graph)
        plan.execute(record)

    def memory_report(self) -> dict[str, int]:
        """Bytes held for running graphs: planned compute buffers and what the backend holds beside them."""
        return {"compute buffers": self.allocator.buffer_size(), **self.backend.memory_report()}

    def close(self) -> None:
        """Give the compute memory back; the backend stays as it is."""
        self._plans.clear()
        self.allocator.close()


def compute(graph: CGraph, backend: Backend | None = None, n_threads: int = 1) -> None:
    """Compute a graph once, whose leafs have data (`ggml_graph_compute_with_ctx`); nodes without memory get some.

    Without a backend a CPU one is made for this call. To run a graph many times, use GraphRunner.
    """
    used = backend or CpuBackend(n_threads)
    try:
        GraphRunner(used).run(graph)
    finally:
        if backend is None:
            used.close()


def _lacks_memory(t: Tensor) -> bool:
    """No place yet, or one in compute memory that was given back since."""
    s = t.storage
    return t.view_src is None and (s is None or s.closed and s.usage is Usage.COMPUTE)


def _never_written(leaf: Tensor) -> NoDataError:
    found = f"leaf {leaf.label} has no data" + (" any more: a larger graph took its memory" if leaf.storage else "")
    return NoDataError(found, "an input that was written before the graph runs",
                       "runner.prepare(graph), then x.set(values), then runner.run(graph); "
                       "or a context with no_alloc=False, whose tensors have memory at once")  # fmt: skip


def _poison(leafs: Iterable[Tensor]) -> None:
    for t in leafs:
        if t.storage is not None:
            t.storage.write(t.offset, np.full(t.nbytes, 0xFF, np.uint8))
