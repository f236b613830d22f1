"""What the scheduler decided, as events of a trace and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from workbench.cgraph import CGraph, to_dict
from workbench.cgraph.serial import all_tensors
from workbench.devices.backend import Backend, BufferType
from workbench.execution.allocator import GraphAllocator
from workbench.scheduler.passes import Decision
from workbench.scheduler.splits import Step
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace

if TYPE_CHECKING:
    from workbench.scheduler.scheduler import Scheduler


def placing(trace: Trace, tensors: list[Tensor], allocator: GraphAllocator) -> None:
    """Record where the tensors of a recorded splitting lie in compute memory."""
    for i, tensor in enumerate(tensors):
        place = allocator.where(tensor)
        if place is not None:
            trace.add("place", tensor=i, buffer=place.buffer, chunk=place.chunk, offset=place.offset, bytes=place.size)


def splitting(trace: Trace, graph: CGraph, by_hand: Mapping[Tensor, int], passes: Iterable[tuple[str, Iterator[Decision]]],
              pass5: Iterator[Step], backends: Iterable[Backend], types: Iterable[BufferType]) -> list[Tensor]:  # fmt: skip
    """Make all decisions and record each; the graph becomes the snapshot of the trace, whose ids the events use.

    Returns the tensors by id: those of the snapshot, then, one for each "copy" event, the copies.
    """
    trace.graph = to_dict(graph)
    tensors = all_tensors(graph)
    ids = {t: i for i, t in enumerate(tensors)}
    for i, (device, memory) in enumerate(zip(backends, types, strict=True)):
        trace.add("backend", backend=i, device=device.name, memory=memory.name, host=memory.is_host)
    trace.add("stage", stage="usr")
    for tensor, b in by_hand.items():
        if tensor in ids:
            trace.add("assign", stage="usr", tensor=ids[tensor], backend=b, cause="usr")
    for name, decisions in passes:
        trace.add("stage", stage=name)
        for stage, tensor, b, cause in decisions:
            trace.add("assign", stage=stage, tensor=ids[tensor], backend=b, cause=cause)
    trace.add("stage", stage="pass5")
    for kind, subject, number, detail in pass5:
        if kind == "split":
            trace.add("split", backend=number, first=subject.first, cause=detail)
        elif kind == "copy":
            for slot, copy in enumerate(detail):
                trace.add("copy", tensor=ids[subject], backend=number, slot=slot, copy=copy.name)
                tensors.append(copy)
        elif kind == "input":
            trace.add("input", tensor=ids[subject], backend=number)
        else:
            trace.add("rewrite", node=ids[subject], source=number, copy=detail.name)
    return tensors


def debug(scheduler: Scheduler, level: int) -> str:
    """See `Scheduler.debug`."""
    lines: list[str] = []
    a, graph = scheduler.assignment, scheduler.graph

    def where(tensor: Tensor) -> str:
        b = a.of.get(tensor, -1)
        return f"[{scheduler.backends[b].name if b >= 0 else 'NULL'} {a.causes.get(tensor, '')}]"

    for i, split in enumerate(scheduler.splits):
        inputs = " ".join(f"[{t.label} {t.nbytes:,} bytes]" for t in split.inputs)
        name, n = scheduler.backends[split.backend].name, len(split.inputs)
        lines.append(f"## SPLIT #{i}: {name} # {n} inputs{': ' if inputs else ''}{inputs}")
        for j, node in enumerate(split.nodes, split.first):
            if level > 1 and graph is not None and node.spec is not None and not node.spec.is_view:
                sources = ", ".join(f"{s.label} {where(s)}" for s in node.sources())
                uses = graph.use_count(node)
                lines.append(f"node #{j:3} ({node.desc}): {node.label} {node.nbytes:,} bytes {where(node)} use={uses}: {sources}")
    return "\n".join(lines)
