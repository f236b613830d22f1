"""Steps of anything that decides: expanding a graph, packing memory, running a plan. One form for all, drawn by one stepper.

`record_steps` drains a generator of decisions into a dictionary {"kind", "title", "steps", …}; a step is {"label",
"sentence", "cause", "change", "event"}, and an event is a kind with whole numbers. What is drawn at step k is
`state(trace, k)`: a fold over the first k + 1 events, written here once for Python and once, the same, in
`step_pictures.js`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from workbench.cgraph import CGraph
from workbench.devices import HOST_MEMORY, BufferType, Plan
from workbench.devices.plan import BYTES_PER_NS, FLOPS_PER_NS
from workbench.errors import ParameterError, shown
from workbench.execution import GraphAllocator
from workbench.tensors import Flag, Tensor
from workbench.trace import Trace
from workbench.views.graph_data import all_ids, as_graph, graph_data
from workbench.views.graph_drawing import for_page
from workbench.views.graph_layout import graph_layout

Steps = dict[str, Any]

CAUSES = {
    "start": "Start at {t}: not in the graph yet, so it goes on the stack and its sources come first.",
    "new": "{user} needs its source {j}, {t}: met for the first time, so it goes on the stack.",
    "seen": "{user} needs its source {j}, {t}: visited before, so nothing is added.",
    "seen start": "{t} is in the graph already: nothing to do.",
    "leaf": "{t} has no sources: it becomes leaf {index} and leaves the stack.",
    "node": "All sources of {t} are recorded: it becomes node {index} and leaves the stack.",
    "hole": "{t} needs {size} bytes: of the free holes that are large enough, the smallest has {hole}, at {offset}.",
    "tail": "{t} needs {size} bytes: no hole is large enough, the free end of the buffer is, at {offset}.",
    "grow": "{t} needs {size} bytes: nothing free is large enough, so the buffer grows to {end}.",
    "reuse": "{t} takes over the place of {parent}: the op may work in place, and this is the last use.",
    "refuse": "{t} could work in place, but not over {parent}: {why}.",
    "shrink": "{t} needs less than {parent} had: {size} bytes at {offset} become free.",
    "free": "After node {at} nothing uses {t} any more: its {size} bytes become free.",
    "keep": "Nothing uses {t} any more, but its bytes stay: {why}.",
    "whole": "{t} = {op} is one task, too little work to share: thread {thread} computes it, the others {others}.",
    "chunk": "Chunk {part} of {parts} of {t} = {op}: rows {first} to {last}, the next number of the counter, taken by thread {thread}.",
    "last": "Chunk {part} of {parts} of {t} = {op}, rows {first} to {last}, taken by thread {thread}: the last; then all threads meet.",
}
"""Every reason for a step of the steppers of this room."""


def record_steps(decisions: Iterable[Any], describe: Callable[[Any], dict[str, Any] | None], title: str, kind: str = "list",
                 **header: Any) -> Steps:  # fmt: skip
    """The steps of any generator of decisions. `describe` says what a decision is, or None where it is to be left out.

    It returns "event" ([kind, whole numbers…]), "sentence" and "cause", and may add "label" and "change" (does the state
    grow or shrink?). kind: how steps are drawn: "expand", "packing", "plan", or "list" for sentences alone.
    """
    steps = []
    for decision in decisions:
        step = describe(decision)
        if step is not None:
            steps.append({"label": step["event"][0], "change": False, **step})
    if not steps:
        raise ParameterError(f"no decisions to step through: {title}", "at least one")
    return {"kind": kind, "title": shown(title, 200), "columns": ["step", "what", "why"], "table": "steps so far", **header, "steps": steps}


def _because(cause: str, **facts: Any) -> dict[str, str]:
    return {"cause": cause, "sentence": CAUSES[cause].format(**{k: f"{v:,}" if isinstance(v, int) else v for k, v in facts.items()})}


# ---- expanding a graph


def expand_steps(*tensors: Tensor, graph: CGraph | None = None, title: str = "Expanding the graph") -> Steps:
    """The walk of `build_forward_expand`, step by step; `graph`, where given, holds what is there already, and stays as it is.

    Events: ["enter", tensor, user or -1, source number], ["seen", the same], ["leaf", tensor, index], ["node", tensor, index].
    """
    before = graph if graph is not None else CGraph()
    walk = list(before.decisions(*tensors))
    after = CGraph(size=before.size)
    for have, new, kind in ((before.leafs, after.leafs, "leaf"), (before.nodes, after.nodes, "node")):
        new += [*have, *(t for k, t, _, _ in walk if k == kind)]
    ids, data = all_ids(after), graph_data(after, title)
    says = [r["name"] for r in data["tensors"]]
    at: dict[Tensor, int] = {}

    def describe(decision: tuple[str, Tensor, Any, int]) -> dict[str, Any]:
        kind, t, detail, _ = decision
        i = ids[t]
        if kind in ("leaf", "node"):
            return {"event": [kind, i, detail], "label": f"{kind} {detail}", "change": True, **_because(kind, t=says[i], index=detail)}
        if detail is None:
            return {"event": [kind, i, -1, 0], **_because("start" if kind == "enter" else "seen start", t=says[i])}
        j = at[detail] = next(j for j in range(at.get(detail, -1) + 1, len(detail.src)) if detail.src[j] is t)
        cause = "new" if kind == "enter" else "seen"
        return {"event": [kind, i, ids[detail], j], **_because(cause, t=says[i], user=says[ids[detail]], j=j)}

    old = {"nodes": [ids[t] for t in before.nodes], "leafs": [ids[t] for t in before.leafs]}
    return record_steps(walk, describe, title, "expand", graph=for_page(data, graph_layout(data)), old=old)


# ---- packing memory


def memory_steps(thing: Any, buffer_type: BufferType = HOST_MEMORY, title: str = "Packing memory") -> Steps:
    """How the allocator places the tensors of a graph, step by step, without giving any memory.

    Events, each ending with the node that is computed then (-1: before the run): ["place", tensor, chunk, offset, bytes, at],
    ["reuse", tensor, parent, bytes, at], ["shrink", parent, chunk, offset, bytes, at], ["free" / "keep", tensor, at],
    ["refuse", tensor, parent, at]. Raises ParameterError where every tensor has memory already.
    """
    graph = as_graph(thing)
    decisions = list(GraphAllocator(buffer_type).decisions(graph))
    if not decisions:
        raise ParameterError("every tensor of this graph has memory already", "a graph that is not allocated yet",
                             "build it in a context with no_alloc=True, and look before it is prepared or computed")  # fmt: skip
    ids, data = all_ids(graph), graph_data(graph, title)
    says, packing = [r["name"] for r in data["tensors"]], _Packing(graph, buffer_type)

    def describe(decision: tuple[Any, ...]) -> dict[str, Any]:
        kind, t, *rest = decision
        facts = packing.facts(kind, t, rest)
        facts.update({k: says[ids[v]] for k, v in facts.items() if isinstance(v, Tensor)})
        event = {"place": lambda: [rest[1], rest[2], facts["size"]], "reuse": lambda: [ids[rest[0]], facts["size"]],
                 "refuse": lambda: [ids[rest[0]]], "shrink": lambda: rest[1:4]}.get(kind, list)()  # fmt: skip
        change = kind in ("place", "reuse", "free")
        return {"event": [kind, ids[t], *event, facts["at"]], "label": f"{kind} {says[ids[t]]}", "change": change,
                **_because(facts.pop("cause", kind), **{"t": says[ids[t]], **facts})}  # fmt: skip

    steps = record_steps(decisions, describe, title, "packing", names=says, tags=[r["tag"] for r in data["tensors"]],
                         n_nodes=len(graph.nodes), last={str(ids[t]): n for t, n in packing.last.items()})  # fmt: skip
    return {**steps, "chunks": state(steps, len(steps["steps"]) - 1)["high"]}


class _Packing:
    """What the sentences say beside the decision: holes, sizes, and which node is computed at that time."""

    def __init__(self, graph: CGraph, buffer_type: BufferType) -> None:
        self.type = buffer_type
        self.index = {t: i for i, t in enumerate(graph.nodes)}
        self.last: dict[Tensor, int] = {}
        for i, node in enumerate(graph.nodes):
            for s in node.sources():
                self.last[s] = self.last[s.root()] = i  # a view keeps its owner
        self.now = -1
        self.places: dict[Tensor, tuple[int, int, int]] = {}
        self.high: dict[int, int] = {}

    def padded(self, size: int) -> int:
        return -(-size // self.type.alignment) * self.type.alignment

    def facts(self, kind: str, t: Tensor, rest: list[Any]) -> dict[str, Any]:
        if kind in ("place", "reuse", "refuse") and not t.flags & Flag.INPUT:
            self.now = self.index.get(t, self.now)
        out: dict[str, Any] = {"at": self.now}
        if kind == "place":
            out.update(self._placed(t, rest[1], rest[2], self.padded(rest[3])))
        elif kind == "reuse":
            chunk, offset, _ = self.places.pop(rest[0])
            out.update(parent=rest[0], size=self.padded(self.type.alloc_size(t)))
            self.places[t] = (chunk, offset, out["size"])
        elif kind == "refuse":
            out.update(parent=rest[0], why=rest[1])
        elif kind == "shrink":
            heir = next(u for u, (c, o, s) in self.places.items() if c == rest[1] and o + s == rest[2])
            out.update(t=heir, parent=t, offset=rest[2], size=rest[3])
        else:
            self.now = out["at"] = max(self.now, self.last.get(t, self.now))
            size = self.places.pop(t)[2] if kind == "free" else 0
            out.update({"size": size} if kind == "free" else {"why": rest[0]})
        return out

    def _placed(self, t: Tensor, chunk: int, offset: int, size: int) -> dict[str, Any]:
        above = [o for c, o, s in self.places.values() if c == chunk and o >= offset and s]
        below = [o + s for c, o, s in self.places.values() if c == chunk and o + s <= offset and s]
        high, end = self.high.get(chunk, 0), offset + size
        self.places[t], self.high[chunk] = (chunk, offset, size), max(high, end)
        cause = "hole" if above else "tail" if end <= high else "grow"
        return {"cause": cause, "size": size, "offset": offset, "end": end, "hole": min(above, default=0) - max(below, default=0)}


# ---- running a plan


def plan_steps(plan: Plan, recorded: Trace | None = None, title: str = "") -> Steps:
    """Which thread computes which part of which node, step by step.

    recorded: a trace that `plan.run(record=trace)` filled. Without one the run is simulated: every thread equally fast, as fast as the
    plan assumes when it cuts, nodes one after another, and each free thread takes the next chunk.
    Events: ["task", job, part, thread, first row, last row, start, end]; times in nanoseconds from the first.
    """
    events = [e.values[:3] + (e.start, e.end) for e in recorded.of("task")] if recorded is not None else list(_simulated(plan))
    where = {job.at: i for i, job in enumerate(plan.jobs)}
    zero = min((e[3] for e in events), default=0)
    threads = plan.backend.n_threads
    nodes = [{"name": shown(job.node.name), "tag": f"node {job.at}", "op": job.node.desc, "parts": [[p.start, p.stop] for p in job.parts]}
             for job in plan.jobs]  # fmt: skip
    left = {i: len(job.parts) for i, job in enumerate(plan.jobs)}

    def describe(event: tuple[int, ...]) -> dict[str, Any]:
        at, part, thread, start, end = event
        node, n = nodes[job := where[at]], len(nodes[where[at]]["parts"])
        left[job] -= 1
        first, stop = node["parts"][part]
        facts = {"t": f"{node['tag']} {node['name']}", "op": node["op"], "part": part + 1, "parts": n, "first": first, "last": stop - 1,
                 "thread": thread, "others": "wait" if threads > 1 else "do not exist"}  # fmt: skip
        return {"event": ["task", job, part, thread, first, stop, start - zero, end - zero], "label": f"{node['name']} {part + 1}/{n}",
                "change": n > 1 and part == 0, **_because("chunk" if left[job] else "last" if n > 1 else "whole", **facts)}  # fmt: skip

    title = title or ("One recorded run of the plan" if recorded is not None else "The plan, simulated from counted operations and bytes")
    return record_steps(sorted(events, key=lambda e: (e[3], e[1])), describe, title, "plan", nodes=nodes, threads=threads)


def _simulated(plan: Plan) -> Iterable[tuple[int, int, int, int, int]]:
    now = 0
    for job in plan.jobs:
        assert job.node.spec is not None
        ns = job.node.spec.flops(job.node) // FLOPS_PER_NS + job.node.spec.moved(job.node) // BYTES_PER_NS
        n, cost = len(job.parts), max(1, int(ns) // len(job.parts))
        free = [now] * min(plan.backend.n_threads, n)
        for part in range(n):
            thread = free.index(min(free))
            yield job.at, part, thread, free[thread], free[thread] + cost
            free[thread] += cost
        now = max(free)


# ---- the state after some steps


def state(trace: Steps, k: int) -> dict[str, Any]:
    """What is drawn at step `k`: a fold over the first k + 1 events and nothing else of the steps."""
    out: dict[str, Any] = START[trace["kind"]](trace)
    for step in trace["steps"][: k + 1]:
        FOLD[trace["kind"]](out, step["event"])
    return out


def _expand(s: dict[str, Any], event: list[Any]) -> None:
    kind, t, *rest = event
    s["now"], s["user"] = t, -1
    if kind == "enter":
        s["stack"].append(t)
        s["visited"].append(t)
    if kind in ("enter", "seen"):
        s["user"] = rest[0]
    else:
        s["stack"].pop()
        s[kind + "s"].append(t)


def _packing(s: dict[str, Any], event: list[Any]) -> None:
    """live: tensor -> [chunk, offset, bytes, first node]; gone: [tensor, chunk, offset, bytes, first node, end]."""
    kind, t, *rest, at = event
    live, key = s["live"], str(t)
    s["now"], s["at"] = t, at
    if kind == "place":
        chunk, offset, size = rest
        live[key] = [chunk, offset, size, at]
        s["high"] += [0] * (chunk + 1 - len(s["high"]))
        s["high"][chunk] = max(s["high"][chunk], offset + size)
        s["alone"] += size
    elif kind == "reuse":
        chunk, offset, size, first = live.pop(str(rest[0]))
        s["gone"].append([rest[0], chunk, offset, size, first, at])
        live[key] = [chunk, offset, rest[1], at]
        s["alone"] += rest[1]
    elif kind == "free":
        s["gone"].append([t, *live.pop(key), at + 1])


def _plan(s: dict[str, Any], event: list[Any]) -> None:
    s["job"] = event[1]
    s["tasks"].append(event[1:])


def _list(s: dict[str, Any], event: list[Any]) -> None:
    s["events"].append(event)


START: dict[str, Callable[[Steps], dict[str, Any]]] = {
    "expand": lambda trace: {"stack": [], "visited": [], **{k: [*v] for k, v in trace["old"].items()}, "now": -1, "user": -1},
    "packing": lambda trace: {"live": {}, "gone": [], "high": [], "alone": 0, "now": -1, "at": -1},
    "plan": lambda trace: {"tasks": [], "job": -1},
    "list": lambda trace: {"events": []},
}
FOLD = {"expand": _expand, "packing": _packing, "plan": _plan, "list": _list}
"""How each kind of steps begins and goes on; other modules of this room add their kinds (`schedule_steps`)."""
