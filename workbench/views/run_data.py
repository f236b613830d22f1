"""What a trace says of a run: stretches of work and of waiting, bytes that moved, splits, places in memory.

`run_data(trace, k)` reads the first k events once; timeline, memory map, traffic, split table, Perfetto file and stepper draw
from what it returns. Where the snapshot of a graph is missing or of another graph, names stay and ops are unknown.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workbench.errors import shown
from workbench.tensors.dtype import DTYPES
from workbench.trace import Event, Trace

HOST = ("host", "calls")
"""The lane of what the host does itself: copies that it waits for, and waiting."""
WORK = {  # what a stretch of time is spent on: letter, label
    "expert product": ("E", "product with experts"),
    "product": ("P", "product"),
    "op": ("", "other op"),
    "weights": ("W", "copy of weights"),
    "activations": ("A", "copy of activations"),
    "inputs": ("I", "copy of inputs"),
    "wait": ("", "host waits"),
}
COPIES = ("weights", "activations", "inputs")
VIEWS = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE"})


class Span(NamedTuple):
    """A stretch of time of a lane (device, stream). kind: a key of WORK; split, node: numbers, -1 where unknown; copy: whether
    bytes moved, `name` being the original's; event: its place in the trace."""

    lane: tuple[str, str]
    kind: str
    name: str
    start: int
    end: int
    bytes: int
    split: int
    node: int
    run: int
    event: int
    copy_name: str = ""

    @property
    def ns(self) -> int:
        """How long it took."""
        return self.end - self.start


class Move(NamedTuple):
    """Bytes that went from one memory to another; `kind` is one of COPIES."""

    source: str
    target: str
    name: str
    kind: str
    bytes: int
    split: int
    run: int
    event: int


class Mark(NamedTuple):
    """A moment: an event recorded or waited for by a device, a wait that was left out, or the begin of a run."""

    lane: tuple[str, str]
    kind: str
    name: str
    time: int
    event: int


@dataclass
class SplitData:
    """A split as the trace tells it. inputs: (id, name, kind, bytes); times of each run: [start, end]."""

    index: int
    backend: int
    first: int
    cause: str
    last: int = -1
    inputs: list[tuple[int, str, str, int]] = field(default_factory=list)
    times: dict[int, list[int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all inputs, were they copied whole."""
        return sum(size for *_, size in self.inputs)


@dataclass
class Run:
    """Everything that the first events of a trace say."""

    graph: dict[str, Any] = field(default_factory=dict)
    devices: list[tuple[str, str, bool]] = field(default_factory=list)  # (device, memory, does the host see it?)
    spans: list[Span] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    splits: list[SplitData] = field(default_factory=list)
    copies: dict[str, tuple[str, str, int]] = field(default_factory=dict)  # copy -> original's name, kind, home
    copy_names: list[str] = field(default_factory=list)
    several_slots: bool = False  # pipelining: then copies and inputs keep their places for the whole run
    born: dict[str, int] = field(default_factory=dict)  # copy -> the first node of the split that it is made for
    rewrites: dict[tuple[int, int], str] = field(default_factory=dict)  # id of a node, number of its source -> copy
    places: dict[int, tuple[int, int, int, int]] = field(default_factory=dict)  # id -> buffer, chunk, offset, bytes
    held: list[tuple[int, str, int]] = field(default_factory=list)  # time, memory, bytes taken or given back
    runs: int = 0

    @property
    def lanes(self) -> list[tuple[str, str]]:
        """What the host does itself, then devices that work on its memory, then others in the scheduler's order."""
        order = {device: (not host, i) for i, (device, _, host) in enumerate(self.devices)}
        found = {s.lane for s in self.spans} | {m.lane for m in self.marks if m.kind != "run"}
        return sorted(found, key=lambda lane: (lane != HOST, order.get(lane[0], (True, len(order))), lane))

    @property
    def window(self) -> tuple[int, int]:
        """Begin of the first stretch of work and end of the last one."""
        work = [s for s in self.spans if s.kind != "wait"] or self.spans
        return min((s.start for s in work), default=0), max((s.end for s in work), default=0)

    def device_name(self, backend: int) -> str:
        """The name behind the number of a backend."""
        return self.devices[backend][0] if 0 <= backend < len(self.devices) else f"backend {backend}"

    def memory_of(self, name: str) -> str:
        """Whose memory a buffer type or a device works on: "host", or the device."""
        for device, memory, host in self.devices:
            if name in (device, memory):
                return "host" if host else device
        return name


def run_data(trace: Trace, k: int | None = None) -> Run:
    """Read the first `k` events of a trace (all of them by default)."""
    reader = Reader(trace)
    for event in trace.events[:k]:
        reader.feed(event)
    return reader.run


class Reader:
    """Reads events one by one; `run` is what is known so far."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.run, self.n = trace, Run(graph=dict(trace.graph or {})), 0
        self._tensors: list[dict[str, Any]] = self.run.graph.get("tensors", [])
        self._nodes: list[int] = self.run.graph.get("nodes", [])
        self._kinds: dict[str, str] = {}
        for i, t in enumerate(self._tensors):
            self._kinds.setdefault(shown(t["name"]), self._kind_of(i))
        self._queued: dict[str, deque[tuple[str, int, int, str]]] = defaultdict(deque)  # device -> name, split, node, kind
        self._asked: dict[tuple[str, str], deque[int]] = defaultdict(deque)  # device, copy -> splits
        self._expected: list[tuple[str, int]] = []
        self._at, self._left, self._waiting = -1, 0, 0
        self._made: list[tuple[int, str]] = []
        self._launching, self._homes, self._tasked = "", dict[int, int](), set[int]()

    @property
    def split(self) -> int:
        """The split that calls belong to now, -1 outside a run."""
        return self._at

    def feed(self, event: Event) -> dict[str, Any]:
        """Read one more event; its fields by name."""
        d: dict[str, Any] = {n: shown(v) if isinstance(v, str) else v for n, v in self.trace.described(event).items()}
        handler = getattr(self, "_on_" + event.kind, None)
        if handler is not None:
            handler(event, d)
        self.n += 1
        return d

    # ---- what things are

    def _kind_of(self, i: int) -> str:
        t = self._tensors[i]
        if "view" in t and t["view"][0] < i:
            return self._kind_of(t["view"][0])
        if "input" in t["flags"]:
            return "inputs"
        return "weights" if t["op"] == "NONE" else "activations"

    def original(self, name: str) -> tuple[str, str, int]:
        """Of a copy, or of a tensor: the original's name, what kind of thing it is, and the backend where it lies or -1."""
        if name in self.run.copies:
            return self.run.copies[name]
        plain = _plain(name)
        return plain, self._kinds.get(plain, "activations"), -1

    def _work(self, node: int) -> str:
        op = self._tensors[node]["op"] if 0 <= node < len(self._tensors) else ""
        return {"MUL_MAT_ID": "expert product", "MUL_MAT": "product", "OUT_PROD": "product"}.get(op, "op")

    # ---- decisions

    def _on_backend(self, event: Event, d: dict[str, Any]) -> None:
        run = self.run
        if not d["backend"]:
            run.devices, run.splits, run.copies, run.copy_names, run.born, run.rewrites, run.places = [], [], {}, [], {}, {}, {}
            run.several_slots, self._at, self._made = False, -1, []
        run.devices.append((d["device"], d["memory"], bool(d["host"])))

    def _on_assign(self, event: Event, d: dict[str, Any]) -> None:
        self._homes[d["tensor"]] = d["backend"]

    def _on_split(self, event: Event, d: dict[str, Any]) -> None:
        splits = self.run.splits
        if splits:
            splits[-1].last = d["first"]
        splits.append(SplitData(len(splits), d["backend"], d["first"], d["cause"], len(self._nodes) or -1))

    def _on_copy(self, event: Event, d: dict[str, Any]) -> None:
        name, kind, _ = self.original(d["copy"])
        i = d["tensor"]
        if 0 <= i < len(self._tensors) and shown(self._tensors[i]["name"]) == name:
            kind = self._kind_of(i)
        self.run.copies[d["copy"]] = (name, kind, self._homes.get(i, -1))
        self.run.copy_names.append(d["copy"])
        self.run.several_slots |= d["slot"] > 0
        self._made.append((i, d["copy"]))

    def _on_input(self, event: Event, d: dict[str, Any]) -> None:
        i, made = d["tensor"], [copy for tensor, copy in self._made if tensor == d["tensor"]]
        self._made.clear()
        if self.run.splits and made:
            name, kind, _ = self.run.copies[made[0]]
            self.run.splits[-1].inputs.append((i, name, kind, nbytes(self._tensors[i]) if 0 <= i < len(self._tensors) else 0))
            self.run.born.update(dict.fromkeys(made, self.run.splits[-1].first))

    def _on_rewrite(self, event: Event, d: dict[str, Any]) -> None:
        self.run.rewrites[d["node"], d["source"]] = d["copy"]

    def _on_place(self, event: Event, d: dict[str, Any]) -> None:
        self.run.places[d["tensor"]] = (d["buffer"], d["chunk"], d["offset"], d["bytes"])

    def _on_alloc(self, event: Event, d: dict[str, Any]) -> None:
        self.run.held.append((event.start, self.run.memory_of(d["memory"]), d["bytes"]))

    def _on_release(self, event: Event, d: dict[str, Any]) -> None:
        self.run.held.append((event.start, self.run.memory_of(d["memory"]), -d["bytes"]))

    # ---- calls

    def _on_run(self, event: Event, d: dict[str, Any]) -> None:
        self.run.runs += 1
        self._at = -1
        self._next_split()
        self.run.marks.append(Mark(HOST, "run", f"run {self.run.runs}", event.start, self.n))

    def _next_split(self) -> None:
        splits = self.run.splits
        self._at = self._at + 1 if self._at + 1 < len(splits) else -1
        if self._at >= 0:
            self._left = splits[self._at].last - splits[self._at].first

    def _on_launch(self, event: Event, d: dict[str, Any]) -> None:
        self._launching, self._waiting = d["device"], d["count"]
        self._left, left = self._left - d["count"], self._left
        split = self.run.splits[self._at] if self._at >= 0 else None
        first = split.last - left if split else -1
        nodes = range(first, first + d["count"]) if split and 0 <= first and first + d["count"] <= len(self._nodes) else range(0)
        self._expected = [(shown(self._tensors[self._nodes[i]]["name"]), self._nodes[i]) for i in nodes]
        self._by_name = {name: [i for n, i in self._expected if n == name] for name, _ in self._expected}

    def _on_queued(self, event: Event, d: dict[str, Any]) -> None:
        same = self._by_name.get(d["name"], [])
        node = same.pop(0) if same else -1
        if node < 0 or self._tensors[node]["op"] not in VIEWS:
            self._queued[self._launching].append((d["name"], self._at, node, self._work(node)))
        self._waiting -= 1
        if not self._waiting and self._at >= 0 and self._left <= 0:
            self._next_split()

    def _on_busy(self, event: Event, d: dict[str, Any]) -> None:
        lane, name = (d["device"], d["stream"]), d["name"]
        if d["work"] == "compute":
            queue = self._queued[d["device"]]
            found = next((q for q in queue if q[0] == name), None)
            while found is not None and queue.popleft() is not found:
                pass
            _, split, node, kind = found or ("", queue[0][1] if queue else self._at, -1, "op")
            self._span(event, lane, kind, name, 0, split, node)
            return
        plain, kind, _ = self.original(name)
        asked = self._asked[lane[0], name]
        self._span(event, lane, kind, plain, d["bytes"], asked.popleft() if asked else self._at, copy=name)

    def _on_compute(self, event: Event, d: dict[str, Any], thread: str = "") -> None:
        i = d["node"]
        if not thread and i in self._tasked:  # told part by part already
            self._tasked.discard(i)
            return
        node = self._nodes[i] if 0 <= i < len(self._nodes) else -1
        name = shown(self._tensors[node]["name"]) if node >= 0 else f"node {i}"
        self._span(event, ("CPU", thread or "compute"), self._work(node), name, 0, -1, node)

    def _on_task(self, event: Event, d: dict[str, Any]) -> None:
        self._tasked.add(d["node"])
        self._on_compute(event, d, f"thread {d['thread']}")

    def _span(self, event: Event, lane: tuple[str, str], kind: str, name: str, nbytes: int, split: int, node: int = -1,
              copy: str = "") -> None:  # fmt: skip
        self.run.spans.append(Span(lane, kind, name, event.start, event.end, nbytes, split, node, self.run.runs, self.n, copy))
        if 0 <= split < len(self.run.splits) and kind != "wait":
            times = self.run.splits[split].times.setdefault(self.run.runs, [event.start, event.end])
            times[:] = min(times[0], event.start), max(times[1], event.end)

    def _move(self, source: str, target: str, d: dict[str, Any], name: str) -> None:
        plain, kind, _ = self.original(name)
        self.run.moves.append(Move(source, target, plain, kind, d["bytes"], self._at, self.run.runs, self.n))

    def _wait(self, event: Event, name: str) -> None:
        if event.end > event.start:
            self._span(event, HOST, "wait", name, 0, self._at)

    def _on_sync(self, event: Event, d: dict[str, Any]) -> None:
        self._wait(event, f"for {d['device']}")

    def _on_event_sync(self, event: Event, d: dict[str, Any]) -> None:
        self._wait(event, f"for event {d['event']}")

    def _on_set(self, event: Event, d: dict[str, Any]) -> None:
        self._blocking(event, d, "host", self.run.memory_of(d["memory"]), d["name"])

    def _on_get(self, event: Event, d: dict[str, Any]) -> None:
        run, name = self.run, d["name"]
        if self._at >= 0 and run.memory_of(run.device_name(run.splits[self._at].backend)) == "host":  # perhaps an input of this split
            first = run.splits[self._at].first
            name = next((copy for copy, (plain, *_) in run.copies.items() if plain == name and run.born.get(copy) == first), name)
        self._blocking(event, d, run.memory_of(d["memory"]), "host", name)

    def _on_copy_buffer(self, event: Event, d: dict[str, Any]) -> None:
        if d["done"]:
            home = self.original(d["copy"])[2]
            source = self.run.memory_of(self.run.device_name(home)) if home >= 0 else "another device"
            self._blocking(event, d, source, self.run.memory_of(d["memory"]), d["copy"])

    def _blocking(self, event: Event, d: dict[str, Any], source: str, target: str, name: str) -> None:
        self._move(source, target, d, name)
        plain, kind, _ = self.original(name)
        self._span(event, HOST, kind, plain, d["bytes"], self._at, copy=name)

    def _on_set_async(self, event: Event, d: dict[str, Any]) -> None:
        self._asked[d["device"], d["name"]].append(self._at)
        self._move("host", self.run.memory_of(d["device"]), d, d["name"])

    def _on_get_async(self, event: Event, d: dict[str, Any]) -> None:
        self._asked[d["device"], d["name"]].append(self._at)
        self._move(self.run.memory_of(d["device"]), "host", d, d["name"])

    def _on_copy_async(self, event: Event, d: dict[str, Any]) -> None:
        if d["done"]:
            self._asked[d["target"], d["copy"]].append(self._at)
            self._move(self.run.memory_of(d["device"]), self.run.memory_of(d["target"]), d, d["copy"])

    def _on_left_out(self, event: Event, d: dict[str, Any]) -> None:
        self.run.marks.append(Mark(HOST, "left out", d["name"], event.start, self.n))

    def _on_event_record(self, event: Event, d: dict[str, Any]) -> None:
        self.run.marks.append(Mark((d["device"], "compute"), "recorded", d["event"], event.start, self.n))

    def _on_event_wait(self, event: Event, d: dict[str, Any]) -> None:
        self.run.marks.append(Mark((d["device"], "compute"), "waited for", d["event"], event.start, self.n))


# ---- memory


class Piece(NamedTuple):
    """A tensor's place in compute memory, from the node that writes it to behind the last one that reads it; `kind`: "op" for a
    result, or one of COPIES."""

    buffer: int
    chunk: int
    offset: int
    bytes: int
    first: int
    end: int
    name: str
    kind: str


def pieces(run: Run) -> list[Piece]:
    """Who lies where from which node to which, in the order of the graph; of the last graph that was placed."""
    tensors: list[dict[str, Any]] = run.graph.get("tensors", [])
    order = {t: i for i, t in enumerate(run.graph.get("nodes", []))}
    ids = {len(tensors) + n: copy for n, copy in enumerate(run.copy_names)}
    first, last = _lives(run, tensors, order, {copy: i for i, copy in ids.items()})
    out = []
    for i, place in run.places.items():
        if i in ids:
            if run.copies[ids[i]][0] == ids[i]:  # with several slots the original is one of them
                continue
            kept, name, kind = run.several_slots, ids[i], run.copies[ids[i]][1]
            begin = 0 if kept else first.get(i, 0)
        elif i < len(tensors):
            name, flags = shown(tensors[i]["name"]), tensors[i]["flags"]
            kind, kept = "inputs" if "input" in flags else "op", "output" in flags or ("input" in flags and run.several_slots)
            begin = 0 if kind == "inputs" else first.get(i, 0)
        else:
            continue
        out.append(Piece(*place, begin, max(len(order) if kept else last.get(i, begin) + 1, begin + 1), name, kind))
    return out


def _lives(run: Run, tensors: list[dict[str, Any]], order: dict[int, int], ids: dict[str, int]) -> tuple[dict[int, int], dict[int, int]]:
    """By id: the node that writes a tensor first, and the last one that reads it, a view of it or, for the original of a copy, the last
    before the copy is there."""
    def owner(i: int) -> int:
        return tensors[i].get("view", [i])[0] if i < len(tensors) else i

    first = {ids[copy]: node for copy, node in run.born.items()}
    last: dict[int, int] = {}
    for node, at in order.items():
        first.setdefault(owner(node), at)
        last[owner(node)] = at
        for j, s in enumerate(tensors[node]["src"]):
            if s is not None:
                copy = run.rewrites.get((node, j))
                last[owner(s) if copy is None else ids[copy]] = at
    for split in run.splits:
        for original, *_ in split.inputs:
            i = owner(original)
            last[i] = max(last.get(i, 0), split.first - 1)
    return first, last


# ---- names and sizes


def _plain(name: str) -> str:
    """The name inside that of a copy, "backend#name#slot"."""
    parts = name.split("#")
    return "#".join(parts[1:-1]) if len(parts) > 2 and parts[-1].isdecimal() else name


def nbytes(tensor: dict[str, Any]) -> int:
    """Bytes from the first to the last element (`ggml_nbytes`)."""
    ne, nb, kind = tensor["ne"], tensor["nb"], DTYPES[tensor["type"]]
    return (ne[0] // kind.block - 1) * nb[0] + kind.block_bytes + sum((n - 1) * b for n, b in zip(ne[1:], nb[1:])) if all(ne) else 0
