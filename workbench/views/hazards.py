"""What was read or overwritten too early in a run: the order that the waits of the runtime keep, checked on its trace.

Work of devices happens when virtual time reaches its end, whatever the order of the calls. So a read comes too early where what the
calls had written before ends later; and a write where what the calls had read before it ends later. Only what was asked for and is
not done yet can be hurt. Traces of real devices have no such times and are not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from workbench.errors import shown
from workbench.trace import Event, Trace
from workbench.views.run_data import HOST, Reader, nbytes

Range = tuple[Any, int, int]
"""Bytes of one memory: which, from, to."""
READ, OVERWRITTEN = "read too early", "overwritten too early"
HOST_READS = "the host"
SAYS = {
    READ: "{who} reads {tensor} at {at}, but {other} is done with it only at {ready}.",
    HOST_READS: "the host looks at {tensor} at {at}, but it is there only at {ready}.",
    OVERWRITTEN: "{who} overwrites {tensor} at {at}, which {other} still needs until {ready}.",
}
"""What is said of each kind of hazard."""


class Hazard(NamedTuple):
    """One order that was not kept. `other` is done with the tensor only at `ready`, but `who` came at `at`, on `lane`; event: the call
    of `who`, by its place in the trace."""

    kind: str
    tensor: str
    who: str
    other: str
    at: int
    ready: int
    event: int
    lane: tuple[str, str]

    def says(self, clock: Callable[[int], str]) -> str:
        """The hazard in a sentence; `clock` writes a time."""
        facts = {**self._asdict(), "at": clock(self.at), "ready": clock(self.ready)}
        return SAYS[HOST_READS if self.who == HOST_READS else self.kind].format(**facts)


class Access(NamedTuple):
    """What a piece of work reads and writes: [(range, tensor)]; it happens at `time`, of equal times in `order`."""

    lane: tuple[str, str]
    time: int
    order: int
    who: str
    reads: list[tuple[Range, str]]
    writes: list[tuple[Range, str]]


def hazards(trace: Trace) -> list[Hazard]:
    """Everything that came too early in a run of simulated devices; none where all waits are there."""
    watch = Watch(trace)
    found = [h for event in trace.events for h in watch.feed(event)]
    return found + [*watch.end()]


class Watch:
    """Reads events one by one; each gives the orders that it breaks."""

    def __init__(self, trace: Trace) -> None:
        self.reader = Reader(trace)
        self.judged = trace.clock == "virtual"
        self._pending: list[Access] = []
        self._call: dict[str, Any] = {}  # the asynchronous copy whose work comes next
        self._fetched: Access | None = None  # what the host asked for and looks at next
        self._originals: dict[str, int] = {}
        self._ids: dict[str, int] = {}
        self._order = self._now = self._asked = 0
        self._cut = ""  # the wait that was left out since the last launch

    def feed(self, event: Event) -> Iterator[Hazard]:
        """Read one more event."""
        n = self.reader.n
        d = self.reader.feed(event)
        if not self.judged:
            return
        if event.kind == "backend" and not d["backend"]:
            self._ids, self._originals = {}, {}
        elif event.kind == "copy":
            self._originals[d["copy"]] = d["tensor"]
        elif event.kind in ("launch", "left_out"):
            self._cut = d.get("name", "")
        elif event.kind == "run" or (event.kind == "sync" and d["device"] == self._cut):  # a run is over, or waited for again
            yield from self.end()
        yield from self._looked(event, n)
        if event.kind in ("set_async", "get_async", "copy_async"):
            self._call = {**d, "call": event.kind}
        if event.kind not in ("busy", "backend", "assign", "stage", "split", "copy", "input", "rewrite", "place"):
            self._now, self._asked = max(self._now, event.end), n
        access = self._access(event, d)
        if access is not None:
            yield from self._against(access)
            self._pending = [a for a in self._pending if a.time > self._now]
            self._pending.append(access)

    def end(self) -> Iterator[Hazard]:
        """After a run somebody looks at the results; known only where a wait behind its last launch was left out."""
        if self._cut:
            tensors: list[dict[str, Any]] = self.reader.run.graph.get("tensors", [])
            read = {s for t in tensors for s in t["src"]}
            results = {shown(t["name"]) for i, t in enumerate(tensors) if i not in read or "output" in t["flags"]}
            for a in self._pending:
                if a.time > self._now and (name := a.writes[0][1] if a.writes else "") in results:
                    yield Hazard(READ, name, HOST_READS, a.who, self._now, a.time, self._asked, HOST)

    def _looked(self, event: Event, n: int) -> Iterator[Hazard]:
        """The host looks at what it fetched right after the wait for it, or at once where there is none."""
        a = self._fetched
        if a is not None and event.kind not in ("queued", "busy"):
            self._fetched = None
            if event.kind not in ("sync", "event_sync") and a.time > self._now:
                yield Hazard(READ, a.reads[0][1], HOST_READS, a.who, self._now, a.time, n, HOST)

    def _against(self, a: Access) -> Iterator[Hazard]:
        for p in self._pending:
            if (p.time, p.order) <= (a.time, a.order):
                continue
            early = next((name for r, _ in p.writes for own, name in a.reads if _meet(r, own)), "")
            late = next((name for r, name in p.reads for own, _ in a.writes if _meet(r, own)), "")
            over = next((name for r, name in p.writes for own, _ in a.writes if _meet(r, own)), "")
            if early:
                yield Hazard(READ, early, a.who, p.who, a.time, p.time, self._asked, a.lane)
            elif late or over:
                yield Hazard(OVERWRITTEN, late or over, a.who, p.who, a.time, p.time, self._asked, a.lane)

    # ---- who touches what

    def _access(self, event: Event, d: dict[str, Any]) -> Access | None:
        run, kind = self.reader.run, event.kind
        self._order += 1
        if kind == "busy" and d["work"] == "compute":
            return self._computed(event, run.spans[-1].node)
        if kind == "busy":
            call, self._call = self._call, {}
            copy = call.get("copy", call.get("name", ""))
            if call.get("call") == "get_async":
                self._fetched = self._made(event, f"the copy of {self.reader.original(copy)[0]} to the host", [self._bytes(copy)], [])
                return self._fetched
            return self._copied(event, copy, call.get("offset", 0), call.get("bytes", 0))
        if kind in ("set", "copy_buffer"):
            return self._copied(event, d.get("copy", d["name"]), d.get("offset", 0), d["bytes"])
        if kind == "get":
            copy = run.spans[-1].copy_name
            target = [self._bytes(copy)] if copy in run.copies else []
            return self._made(event, f"the copy of {d['name']}", [self._bytes(d["name"])], target)
        if kind == "answer":
            return self._made(event, "the callback", [self._bytes(d["name"])], [])
        return None

    def _computed(self, event: Event, node: int) -> Access | None:
        tensors: list[dict[str, Any]] = self.reader.run.graph.get("tensors", [])
        if not 0 <= node < len(tensors):
            return None
        reads = []
        for j, s in enumerate(tensors[node]["src"]):
            copy = self.reader.run.rewrites.get((node, j))
            if s is not None:
                reads.append(self._bytes(copy) if copy is not None else self._range(s))
        return self._made(event, shown(tensors[node]["name"]), reads, [self._range(node)])

    def _copied(self, event: Event, copy: str, offset: int, nbytes: int) -> Access | None:
        if copy not in self._originals or not nbytes:
            return None
        parts = []
        for i in (self._originals[copy], self._id(copy)):
            (space, start, _), name = self._range(i)
            parts.append(((space, start + offset, start + offset + nbytes), name))
        return self._made(event, f"the copy of {parts[0][1]}", parts[:1], parts[1:])

    def _made(self, event: Event, who: str, reads: list[Any], writes: list[Any]) -> Access:
        lane = HOST if event.kind == "answer" else self.reader.run.spans[-1].lane
        return Access(lane, event.end, self._order, who, [r for r in reads if r], [w for w in writes if w])

    def _id(self, name: str) -> int:
        """The number of a copy or of a tensor of the graph, -1 for an unknown name."""
        run = self.reader.run
        tensors: list[dict[str, Any]] = run.graph.get("tensors", [])
        if len(self._ids) < len(run.copy_names):
            self._ids = {copy: len(tensors) + n for n, copy in enumerate(run.copy_names)}
        if name in self._ids:
            return self._ids[name]
        return next((i for i, t in enumerate(tensors) if shown(t["name"]) == name), -1)

    def _bytes(self, name: str) -> tuple[Range, str] | None:
        i = self._id(name)
        return self._range(i) if i >= 0 else None

    def _range(self, i: int) -> tuple[Range, str]:
        """Where a tensor lies, and its name (of a copy: the original's)."""
        run = self.reader.run
        tensors: list[dict[str, Any]] = run.graph["tensors"]
        name = run.copy_names[i - len(tensors)] if i >= len(tensors) else ""
        t = tensors[i if i < len(tensors) else self._originals[name]]
        owner, offset = t.get("view", (i, 0)) if i < len(tensors) else (i, 0)
        place = run.places.get(owner)
        space: Any = place[:2] if place else tensors[owner]["name"] if owner < len(tensors) else name
        start = offset + (place[2] if place else 0)
        return (space, start, start + nbytes(t)), shown(t["name"])


def _meet(a: Range, b: Range) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]
