"""A run as a file for Perfetto (https://ui.perfetto.dev), chrome://tracing or speedscope: the Chrome trace event format.

A process is a device, a thread one of its streams; arrows lead from a copy to the nodes that read it; counters hold the bytes in use
of each compute memory and the bytes moved so far. Times are microseconds from the begin of the run, to the nanosecond. Slices are pairs of
begin and end: start + length in floating point would let neighbours overlap by a hair, and viewers then lose one of them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from workbench.trace import Trace
from workbench.views.run_data import HOST, WORK, Run, Span, pieces, run_data

COLOURS = {"expert product": "thread_state_running", "product": "thread_state_iowait", "op": "thread_state_runnable", "weights": "terrible",
           "activations": "bad", "inputs": "yellow", "wait": "grey"}  # fmt: skip
"""Names of colours that chrome://tracing knows; Perfetto chooses its own."""


def to_perfetto(trace: Trace, k: int | None = None) -> str:
    """The first `k` events of a trace as JSON text in the Chrome trace event format."""
    run = run_data(trace, k)
    starts = [*(s.start for s in run.spans), *(m.time for m in run.marks), *(t for t, _, _ in run.held)]
    writer = _Writer(run, min(starts, default=0))
    about = {name: str(value) for name, value in trace.about.items()} | {"clock": trace.clock, "made by": "workbench"}
    record = {"traceEvents": list(writer.events()), "displayTimeUnit": "ns", "otherData": about}
    return json.dumps(record, separators=(",", ":"), allow_nan=False)


class _Writer:
    """Numbers processes and threads, and writes one event after another."""

    def __init__(self, run: Run, zero: int) -> None:
        self.run, self.zero = run, zero
        lanes = list(dict.fromkeys([*run.lanes, *(m.lane for m in run.marks)]))
        self.rows = {lane: _rows(run, lane) for lane in lanes}
        memories = dict.fromkeys(run.memory_of(name) for _, name, _ in run.held)
        self.pid = {device: i for i, device in enumerate(dict.fromkeys([*(lane[0] for lane in lanes), *memories]), 1)}
        threads = [(lane, row) for lane in lanes for row in range(max(len(self.rows[lane]), 1))]
        self.tid = {at: 1 + sum(lane[0] == at[0][0] for lane, _ in threads[:i]) for i, at in enumerate(threads)}
        self.where = {s.event: self.place(lane, row) for lane, rows in self.rows.items() for row, spans in enumerate(rows) for s in spans}

    def at(self, ns: int) -> float:
        """Microseconds since the begin."""
        return round((ns - self.zero) / 1000, 3)

    def events(self) -> Iterator[dict[str, Any]]:
        """All of them: names, slices, marks, arrows, counters."""
        for device, pid in self.pid.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": device}}
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
        for (lane, row), tid in self.tid.items():
            name = lane[1] + (f" {row + 1}" if row else "")
            yield {"ph": "M", "name": "thread_name", "pid": self.pid[lane[0]], "tid": tid, "args": {"name": name}}
        for span in (s for rows in self.rows.values() for spans in rows for s in spans):
            about = {"name": _said(span), "cat": span.kind, **self.where[span.event], "args": self.facts(span)}
            yield {"ph": "B", "ts": self.at(span.start), **about, "cname": COLOURS[span.kind]}
            yield {"ph": "E", "ts": self.at(span.end), **about}  # speedscope pairs by name and facts
        for mark in self.run.marks:
            yield {"ph": "i", "s": "t", "cat": "mark", "name": f"{mark.name} {mark.kind}" if mark.kind != "run" else mark.name,
                   "ts": self.at(mark.time), **self.place(mark.lane)}  # fmt: skip
        yield from self.arrows()
        yield from self.counters()

    def place(self, lane: tuple[str, str], row: int = 0) -> dict[str, int]:
        return {"pid": self.pid[lane[0]], "tid": self.tid[lane, row]}

    def facts(self, span: Span) -> dict[str, Any]:
        facts: dict[str, Any] = {"what": WORK[span.kind][1], "event": span.event}
        if span.split >= 0:
            facts |= {"split": span.split, "backend of the split": self.run.device_name(self.run.splits[span.split].backend)}
        if span.node >= 0:
            facts["op"] = self.run.graph["tensors"][span.node]["op"]
        if span.copy_name:
            facts |= {"bytes": span.bytes, "copy": span.copy_name}
        return facts

    def arrows(self) -> Iterator[dict[str, Any]]:
        """From each copy to every node that reads it in the same run."""
        readers: dict[str, list[int]] = defaultdict(list)
        for (node, _), copy in self.run.rewrites.items():
            readers[copy].append(node)
        computed = {(s.run, s.node): s for s in self.run.spans if s.node >= 0}
        number = 0
        for span in self.run.spans:
            for node in dict.fromkeys(readers.get(span.copy_name, ())):
                reader = computed.get((span.run, node))
                if reader is None or reader.start < span.start or not span.copy_name:
                    continue
                number += 1
                flow = {"cat": "flow", "name": span.kind, "id": number}
                yield {"ph": "s", **flow, "ts": self.at(span.start), **self.where[span.event]}
                yield {"ph": "f", "bp": "e", **flow, "ts": self.at(reader.start), **self.where[reader.event]}

    def counters(self) -> Iterator[dict[str, Any]]:
        """Bytes of buffers taken, bytes of compute memory in use, and bytes moved, each at the times at which it changes."""
        held: dict[str, int] = defaultdict(int)
        for time, memory, size in self.run.held:
            held[memory] += size
            yield self.count(memory, "bytes of buffers", time, held[memory])
        for device, changes in in_use(self.run).items():
            if device in self.pid:
                for time, size in changes:
                    yield self.count(device, "compute memory in use", time, size)
        moved, host = 0, next(iter(self.pid), "")
        for span in sorted((s for s in self.run.spans if s.bytes), key=lambda s: s.end):
            moved += span.bytes
            yield self.count(HOST[0] if HOST[0] in self.pid else host, "bytes moved", span.end, moved)

    def count(self, device: str, name: str, time: int, value: int) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": self.pid[device], "tid": 0, "ts": self.at(time), "args": {"bytes": value}}


def in_use(run: Run) -> dict[str, list[tuple[int, int]]]:
    """By device: (time, bytes of its compute memory that hold something still needed), in the last run of the last graph."""
    nodes: list[int] = run.graph.get("nodes", [])
    spans = {s.node: s for s in run.spans if s.node >= 0 and s.run == run.runs}
    times, at = list[int](), run.window[0]
    for node in nodes:
        at = max(at, spans[node].start) if node in spans else at
        times.append(at)
    if not spans or not times:
        return {}
    changes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for p in pieces(run):
        device = run.device_name(p.buffer)
        changes[device][times[min(p.first, len(times) - 1)]] += p.bytes
        changes[device][times[p.end] if p.end < len(times) else run.window[1]] -= p.bytes
    out: dict[str, list[tuple[int, int]]] = {}
    for device, steps in changes.items():
        total = 0
        out[device] = [(time, total := total + step) for time, step in sorted(steps.items())]
    return out


def _rows(run: Run, lane: tuple[str, str]) -> list[list[Span]]:
    """The stretches of a lane in order; those that overlap, which a thread cannot show, in rows of their own."""
    rows: list[list[Span]] = []
    for span in sorted((s for s in run.spans if s.lane == lane), key=lambda s: (s.start, s.end)):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows


def _said(span: Span) -> str:
    return f"copy {span.name}" if span.copy_name else f"wait {span.name}" if span.kind == "wait" else span.name
