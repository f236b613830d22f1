"""The one record of what happened: decisions, computes, copies, waits, routes, cache traffic.

Pictures, tables, counters and exports are functions of a `Trace`, or of its first k events, and of nothing else. An
event is a kind, two times in integer nanoseconds and integers; words (causes, names) are interned once per trace. This
room knows no other room: a graph snapshot is carried as plain data. ggml's nearest thing is the text of `GGML_SCHED_DEBUG`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.errors import FileFormatError, ParameterError, shown

FORMAT, VERSION = "workbench.trace", 1

KINDS: dict[str, tuple[str, ...]] = {
    "enter": ("tensor", "depth"),  # expanding a graph: a tensor is put on the stack …
    "seen": ("tensor", "depth"),  # … was visited before …
    "leaf": ("tensor", "index"),  # … becomes a leaf …
    "node": ("tensor", "index"),  # … becomes a node
    "place": ("tensor", "buffer", "chunk", "offset", "bytes"),
    "reuse": ("tensor", "parent"),
    "free": ("tensor",),
    "backend": ("backend", "device", "memory", "host"),  # who is meant by a number; host: the host sees this memory
    "stage": ("stage",),  # a pass of the scheduler, or a sweep of it, begins
    "assign": ("stage", "tensor", "backend", "cause"),  # backend -1: none
    "split": ("backend", "first", "cause"),  # a split begins at this node of the graph
    "copy": ("tensor", "backend", "slot", "copy"),  # a copy was made for a backend (slot: of the pipeline)
    "input": ("tensor", "backend"),  # … and is an input of the split
    "rewrite": ("node", "source", "copy"),  # source number … of a node is a copy now
    "run": ("slot",),  # the runtime begins with the first split
    "compute": ("node",),
    "task": ("node", "task", "thread", "first", "last"),  # rows first … last - 1 of a node, on one thread
    "launch": ("device", "count"),  # as many "queued" events follow
    "queued": ("name",),
    "sync": ("device",),  # the host waits for a device, from start to end
    "set": ("memory", "name", "offset", "bytes"),  # host bytes into a buffer, while the host waits
    "get": ("memory", "name", "offset", "bytes"),
    "set_async": ("device", "name", "offset", "bytes"),
    "get_async": ("device", "name", "offset", "bytes"),
    "copy_async": ("device", "target", "name", "copy", "bytes", "done"),
    "copy_buffer": ("memory", "name", "copy", "bytes", "done"),
    "experts": ("copy", "first", "last", "padding"),  # the next set_async brings these experts, and bytes beyond the last of them
    "event_record": ("device", "event"),
    "event_wait": ("device", "event"),
    "event_sync": ("event",),
    "left_out": ("call", "name"),  # a wait that a simulated machine was told to leave out; name: of the device or event
    "alloc": ("memory", "bytes"),
    "release": ("memory", "bytes"),
    "ask": ("name", "wanted"),  # an eval callback is asked whether it wants a node …
    "answer": ("name", "go_on"),  # … and whether to go on after it
    "busy": ("device", "stream", "work", "name", "bytes"),  # start and end say when a stream worked; bytes: what a copy moved
    "token": ("index", "id"),
    "route": ("token", "layer", "rank", "expert"),
    "predict": ("token", "layer", "expert"),
    "hit": ("layer", "expert"),
    "load": ("layer", "expert", "bytes"),
    "evict": ("layer", "expert"),
    "hosted": ("layer", "expert"),  # a missing expert was computed on the host
}
"""Every kind of event with the names of its integers. A word such as a cause is the id of an interned string."""

WORDS = frozenset({"cause", "stage", "device", "stream", "work", "target", "memory", "name", "copy", "event", "call"})
"""Fields whose integer is the id of a string of the trace."""


class Event(NamedTuple):
    """One event: kind, start and end in nanoseconds (equal for a decision), and its integers in the order of KINDS."""

    kind: str
    start: int
    end: int
    values: tuple[int, ...]

    def field(self, name: str) -> int:
        """One of its integers by name."""
        return self.values[KINDS[self.kind].index(name)]


@dataclass
class Trace:
    """Events in the order in which they happened, with the strings they refer to and a snapshot of the graph.

    clock: "real" (nanoseconds of this machine), "virtual" (of a simulated device) or "none" (order only).
    `trace[:k]` is the trace after k events; it shares nothing that can change.
    """

    clock: str = "real"
    graph: Mapping[str, Any] | None = None
    about: dict[str, str] = field(default_factory=dict)
    strings: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _ids: dict[str, int] = field(default_factory=dict, repr=False)

    def add(self, kind: str, start: int = 0, end: int | None = None, **values: int | str) -> Event:
        """Record an event. Words are given as strings. Raises ParameterError for an unknown kind or missing fields."""
        names, given, ids = KINDS.get(kind), tuple(values), self._ids
        if names is None or given != names and set(given) != set(names):
            expected = f"{kind} with {names}" if names else "one of " + ", ".join(KINDS)
            raise ParameterError(f"event {kind!r} with fields {sorted(values)}", expected)
        ordered = values.values() if given == names else [values[n] for n in names]
        numbers = tuple([v if type(v) is int else ids[v] if v in ids else self.word(v) if isinstance(v, str) else int(v) for v in ordered])
        event = Event(kind, int(start), int(start if end is None else end), numbers)
        self.events.append(event)
        return event

    def node(self, index: int, start: int, end: int) -> None:
        """Record that a node was computed: the quick way that an execution plan uses."""
        self.events.append(Event("compute", start, end, (index,)))

    def task(self, node: int, task: int, thread: int, first: int, last: int, start: int, end: int) -> None:
        """Record that a thread computed a part of a node: rows first … last - 1 of its result."""
        self.events.append(Event("task", start, end, (node, task, thread, first, last)))

    def word(self, text: str) -> int:
        """The id of a string, interned at its first use."""
        if text not in self._ids:
            self._ids[text] = len(self.strings)
            self.strings.append(text)
        return self._ids[text]

    def of(self, *kinds: str) -> Iterator[Event]:
        """The events of these kinds, in order."""
        return (e for e in self.events if e.kind in kinds)

    def described(self, event: Event) -> dict[str, int | str]:
        """The event's fields by name, words as strings."""
        return {n: self.strings[v] if n in WORDS else v for n, v in zip(KINDS[event.kind], event.values, strict=True)}

    def __len__(self) -> int:
        return len(self.events)

    def __getitem__(self, prefix: slice) -> Trace:
        return Trace(self.clock, self.graph, dict(self.about), list(self.strings), self.events[prefix], dict(self._ids))

    # ---- JSON

    def to_json(self) -> str:
        """The trace as JSON text: kinds by number, events as flat lists of integers."""
        used = list(dict.fromkeys(e.kind for e in self.events))
        number = {k: i for i, k in enumerate(used)}
        rows = [[number[e.kind], e.start, e.end, *e.values] for e in self.events]
        record = {"format": FORMAT, "version": VERSION, "clock": self.clock, "about": self.about, "graph": self.graph,
                  "kinds": [[k, *KINDS[k]] for k in used], "strings": self.strings, "events": rows}  # fmt: skip
        return json.dumps(record, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote. Raises FileFormatError, and nothing else, for anything that is not a trace."""
        try:
            data: dict[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise FileFormatError(f"not JSON: {shown(e)}", "the text that Trace.to_json wrote") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise FileFormatError("JSON that is not a trace of this version", f'"format": "{FORMAT}", "version": {VERSION}')
        missing: Any = None
        strings, about, kinds = (data.get(k, missing) for k in ("strings", "about", "kinds"))
        graph, rows, clock = (data.get(k, missing) for k in ("graph", "events", "clock"))
        _require(_all_strings(strings), "strings", "a list of strings")
        _require(isinstance(about, dict) and _all_strings([*about.values()]), "about", "strings by name")
        _require(isinstance(kinds, list) and all(map(_known_kind, kinds)), "kinds", "known kinds with their fields")
        _require(graph is None or isinstance(graph, dict), "graph", "null or a graph snapshot")
        _require(isinstance(rows, list), "events", "a list")
        _require(clock in ("real", "virtual", "none"), "clock", '"real", "virtual" or "none"')
        events = [_event(row, kinds, len(strings), i) for i, row in enumerate(rows)]
        return cls(clock, graph, about, strings, events, {s: i for i, s in enumerate(strings)})


def _all_strings(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, str) for v in values)


def _known_kind(k: Any) -> bool:
    return isinstance(k, list) and bool(k) and isinstance(k[0], str) and KINDS.get(k[0]) == tuple(k[1:])


def _event(row: Any, kinds: list[list[str]], n_strings: int, i: int) -> Event:
    whole = isinstance(row, list) and len(row) >= 3 and all(type(v) is int for v in row)
    fits = whole and 0 <= row[0] < len(kinds) and len(row) == 2 + len(kinds[row[0]])
    _require(fits, f"events[{i}]", "[kind, start, end, integers …]")
    name, *fields = kinds[row[0]]
    for f, v in zip(fields, row[3:], strict=True):
        _require(f not in WORDS or 0 <= v < n_strings, f"events[{i}].{f}", "the id of a string")
    return Event(name, row[1], row[2], tuple(row[3:]))


def _require(holds: bool, where: str, expected: str) -> None:
    if not holds:
        raise FileFormatError(f"trace: {where} is wrong", expected, "write the trace again with Trace.to_json")
