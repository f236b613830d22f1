"""What the scheduler decided, as events of a trace and as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from workbench.cgraph import CGraph, to_dict
from workbench.cgraph.serial import all_tensors
from workbench.scheduler.passes import Decision
from workbench.scheduler.splits import Step
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace

if TYPE_CHECKING:
    from workbench.scheduler.scheduler import Scheduler


def splitting(trace: Trace, graph: CGraph, by_hand: Mapping[Tensor, int], passes: Iterable[tuple[str, Iterator[Decision]]],
              pass5: Iterator[Step]) -> None:  # fmt: skip
    """Make all decisions and record each; the graph becomes the snapshot of the trace, whose ids the events use."""
    trace.graph = to_dict(graph)
    ids = {t: i for i, t in enumerate(all_tensors(graph))}
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
        elif kind == "input":
            trace.add("input", tensor=ids[subject], backend=number)
        else:
            trace.add("rewrite", node=ids[subject], source=number, copy=detail.name)


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
