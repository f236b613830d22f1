"""A run call by call for the stepper: who was asked for what, in the order in which the host asked, on the clock of the run.

Steps of kind "run" (see `workbench.views.steps`). The event of a step is [call, clock, split, spans, marks, moved, experts, hazards]:
clock: when the host goes on, in nanoseconds from the first call; spans: [lane, kind, name, start, end, bytes, split, way] of what the
call asked for; marks: [lane, mark, time]; moved: [way, bytes] or []; experts: [name, experts, bytes of one, first, last, padding] or [];
hazards: [lane, time, ready]. Lanes, kinds, names and ways are places in the header's lists. What ends behind the clock was asked
for and is not done yet.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import ParameterError, shown
from workbench.trace import Event, Trace
from workbench.views.hazards import Hazard, Watch
from workbench.views.palette import ink_on
from workbench.views.run_data import HOST, WORK, Reader, Span
from workbench.views.steps import FOLD, START, Steps
from workbench.views.timelines import LOOKS, amount, duration, lane_name

CAUSES = {
    "run": "Run {number} begins with split 0.",
    "launch": "{device} is asked to compute {count} {nodes} {first}{split}.",
    "sync": "The host waits for {device}{waited}.",
    "event_sync": "The host waits for event {event}{waited}.",
    "event_record": "{device} is to mark event {event} when it gets there.",
    "event_wait": "{device} is to wait for event {event} before it goes on.",
    "left_out": "Here the wait for {name} was left out: nobody waits.",
    "set": "The host itself copies {name}, {bytes} of {kind}, to {target}{split}, and waits until it is there.",
    "get": "The host itself reads {name}, {bytes} of {kind}, from {source}{split}, and waits until it is there.",
    "set_async": "{target} is asked to fetch {bytes} of {kind} from the host: {name}{split}.",
    "used experts": "{target} is asked to fetch {bytes} of weights from the host: {experts} of {name}{padding}{split}.",
    "get_async": "{source} is asked to send {name}, {bytes} of {kind}, to the host{split}.",
    "copy_async": "{target} is asked to fetch {name}, {bytes} of {kind}, from {source}{split}.",
    "declined": "{target} cannot fetch {name} from {source} by itself: the host has to wait and copy.",
    "copy_buffer": "{name}, {bytes} of {kind}, goes from {source} to {target} while the host waits{split}.",
}
"""Every reason for a step of `run_steps`."""
CALLS = CAUSES.keys() - {"declined", "used experts"}
MARKS = {"recorded": "▲ event recorded", "waited for": "▼ event waited for", "left out": "✗ wait left out", "early": "! too early"}
JUMPS = [["s", "split", "split", False], ["k", "call of a kind", "cause", True]]
"""Keys of the stepper: where a field of the steps differs, or is the same again."""
SHOWN = 30
"""Pieces of work that the picture shows at once, roughly: a longer run begins with a part of it (half of it at zoom 1, and so on)."""


def run_steps(trace: Trace, title: str = "Calls of a run", most: int = 600) -> Steps:
    """The stepper's trace of the calls of a run, at most the first `most`, which the title then says. Raises ParameterError where there
    is none."""
    calls = _Calls(trace)
    for event in trace.events:
        if len(calls.raw) >= most and event.kind in CALLS:
            title = f"{title} (the first {most:,} calls)"
            break
        calls.feed(event)
    if not calls.raw:
        raise ParameterError("a trace without calls", "the trace of a run", "Scheduler(…, trace=Trace()), then compute")
    calls.finish()
    return calls.steps(shown(title, 200))


class _Calls:
    """Collects the calls; each takes the work that follows it up to the next call."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.watch = trace, Watch(trace)
        self.raw: list[dict[str, Any]] = []
        self.zero: int | None = None
        self.brings: dict[str, Any] = {}  # the experts that the next copy brings
        self.marks = self.spans = 0

    @property
    def reader(self) -> Reader:
        """What is known so far."""
        return self.watch.reader

    def feed(self, event: Event) -> None:
        """Read one more event."""
        split, n = self.reader.split, self.reader.n
        found = [*self.watch.feed(event)]
        d = {k: shown(v) if isinstance(v, str) else v for k, v in self.trace.described(event).items()}
        if event.kind == "experts":
            self.brings = d
        elif event.kind in CALLS:
            self.zero = event.start if self.zero is None else self.zero
            self._call(event, d, split, n)
        elif event.kind == "queued" and self.raw and self.raw[-1]["cause"] == "launch" and not self.raw[-1]["first"]:
            self.raw[-1]["first"] = d["name"]
        self._take(found)

    def finish(self) -> None:
        """What is known only when the run is over."""
        self._take([*self.watch.end()])

    def _take(self, found: list[Hazard]) -> None:
        run = self.reader.run
        if self.raw:
            self.raw[-1]["spans"] += run.spans[self.spans :]
            self.raw[-1]["marks"] += [m for m in run.marks[self.marks :] if m.kind != "run"]
            self.raw[-1]["hazards"] += found
        self.spans, self.marks = len(run.spans), len(run.marks)

    def _call(self, event: Event, d: dict[str, Any], split: int, n: int) -> None:
        run, cause = self.reader.run, event.kind
        step: dict[str, Any] = {"call": cause, "clock": event.end, "wait": event.end - event.start, "split": split, "first": "",
                                "spans": [], "marks": [], "hazards": [], "moved": (), "experts": [],
                                "facts": {**d, "number": run.runs}}  # fmt: skip
        if "bytes" in d:
            name, kind, _ = self.reader.original(d.get("copy", d["name"]))
            moved = run.moves[-1] if run.moves and run.moves[-1].event == n else None
            source, target = (moved.source, moved.target) if moved else (d["device"], d["target"])
            step["facts"] |= {"name": name, "kind": kind, "source": source, "target": target}
            step["label"] = name.removeprefix("blk.").removesuffix(".weight")
            cause = cause if moved else "declined"
            if moved:
                step["moved"] = ((source, target), d["bytes"])
            if cause == "set_async" and self.brings.get("copy") == d["name"]:
                cause, step["experts"] = "used experts", self._experts(name, d)
        self.brings = {}
        self.raw.append({**step, "cause": cause})

    def _experts(self, name: str, d: dict[str, Any]) -> list[Any]:
        first, last, padding = (self.brings[k] for k in ("first", "last", "padding"))
        of = next((t["ne"][2] for t in self.reader.run.graph.get("tensors", ()) if shown(t["name"]) == name), last + 1)
        return [name, of, (d["bytes"] - padding) // (last - first + 1), first, last, padding]

    # ---- as plain data

    def steps(self, title: str) -> Steps:
        """All calls as the stepper wants them."""
        run, names, ways = self.reader.run, dict[str, int](), dict[tuple[str, str], int]()
        met = {x.lane for raw in self.raw for x in (*raw["spans"], *raw["marks"], *raw["hazards"])}
        lanes = [lane for lane in run.lanes if lane in met]
        lanes = lanes if HOST in lanes else [HOST, *lanes]
        kinds = list(WORK)
        for raw in self.raw:
            if raw["moved"]:
                ways.setdefault(raw["moved"][0], len(ways))

        def span(s: Span, raw: dict[str, Any]) -> list[int]:
            way = ways[raw["moved"][0]] if raw["moved"] and s.copy_name else -1
            return [lanes.index(s.lane), kinds.index(s.kind), names.setdefault(s.name, len(names)), self.at(s.start), self.at(s.end),
                    s.bytes, s.split, way]  # fmt: skip

        header: Steps = {"kind": "run", "title": title, "lanes": [lane_name(lane, lanes) for lane in lanes],
                         "kinds": [[key, *WORK[key], LOOKS[key][0], ink_on(LOOKS[key][0])] for key in kinds],
                         "ways": [f"{a} → {b}" for a, b in ways], "marks": MARKS, "jumps": JUMPS, "clock": self.trace.clock,
                         "columns": ["", "so far"], "table": "bytes asked for, and there already"}  # fmt: skip
        out, state = list[dict[str, Any]](), START["run"](header)
        for raw in self.raw:
            marks = [[lanes.index(m.lane), list(MARKS).index(m.kind), self.at(m.time)] for m in raw["marks"]]
            moved = [ways[raw["moved"][0]], raw["moved"][1]] if raw["moved"] else []
            event = [raw["call"], self.at(raw["clock"]), raw["split"], [span(s, raw) for s in raw["spans"]], marks, moved, raw["experts"],
                     [[lanes.index(h.lane), self.at(h.at), self.at(h.ready)] for h in raw["hazards"]]]  # fmt: skip
            FOLD["run"](state, event)
            out.append({"event": event, **self._said(raw), "table": _table(header, state)})
        ends = [s[4] for step in out for s in step["event"][3]] + [step["event"][1] for step in out]
        n = sum(len(step["event"][3]) for step in out)
        return {**header, "names": list(names), "end": max(ends), "zoom": max(n // SHOWN, 1).bit_length() - 1,
                "strip": any(raw["experts"] for raw in self.raw), "steps": out}  # fmt: skip

    def at(self, ns: int) -> int:
        """A time from the first call on."""
        return ns - (self.zero or 0)

    def _said(self, raw: dict[str, Any]) -> dict[str, Any]:
        facts, cause = raw["facts"], raw["cause"]
        facts["split"] = f" (split {raw['split']})" if raw["split"] >= 0 else ""
        facts["waited"] = f": {duration(raw['wait'])} pass" if raw["wait"] else ", which is done already"
        facts["nodes"], facts["first"] = "node," if facts.get("count") == 1 else "nodes, the first being", raw["first"]
        if "bytes" in facts:
            facts["bytes"] = amount(facts["bytes"])
        if cause == "used experts":
            _, _, size, first, last, padding = raw["experts"]
            facts["experts"] = f"expert {first}" if first == last else f"experts {first} to {last}"
            facts["bytes"] = f"{size * (last - first + 1):,} bytes"
            facts["padding"] = f", and {padding} bytes of padding" if padding else ", no padding: nothing lies behind it"
        early = dict.fromkeys(" Too early: " + h.says(lambda ns: duration(self.at(ns))) for h in raw["hazards"])
        label = raw.get("label", f"compute {raw['first']}" if cause == "launch" else cause.replace("_", " "))
        change = cause not in ("sync", "event_sync") or raw["wait"] > 0
        sentence = CAUSES[cause].format(**facts) + "".join(early)
        return {"label": label, "cause": cause, "change": change, "split": raw["split"], "sentence": sentence}


def _table(header: Steps, s: dict[str, Any]) -> list[list[str]]:
    """The state in words: the clock, the split, what was asked for and what is done."""
    now, rows = s["now"], [["clock", duration(s["now"])], ["split", str(s["split"]) if s["split"] >= 0 else ""]]
    for way, asked in enumerate(s["moved"]):
        there = sum(span[5] for span in s["spans"] if span[7] == way and span[4] <= now)
        rows += [[header["ways"][way], f"{asked:,} bytes" + (f", {there:,} there" if there < asked else "")]] if asked else []
    for lane, name in enumerate(header["lanes"]):
        ahead = sum(span[0] == lane and span[4] > now for span in s["spans"][: s["call"]])
        rows += [[f"{name} is still at", f"{ahead} earlier {'piece' if ahead == 1 else 'pieces'} of work"]] if ahead else []
    return rows


def _start(trace: Steps) -> dict[str, Any]:
    return {"now": 0, "split": -1, "spans": [], "call": 0, "marks": [], "moved": [0] * len(trace["ways"]), "experts": [], "hazards": []}


def _fold(s: dict[str, Any], event: list[Any]) -> None:
    """call: the first span of this step; experts: those copies of the split's weight so far."""
    _, clock, split, spans, marks, moved, experts, hazards = event
    if split != s["split"] or (experts and s["experts"] and experts[0] != s["experts"][0][0]):
        s["experts"] = []
    s["now"], s["split"], s["call"] = clock, split, len(s["spans"])
    s["spans"] += spans
    s["marks"] += marks
    s["hazards"] += hazards
    if moved:
        s["moved"][moved[0]] += moved[1]
    if experts:
        s["experts"].append(experts)


START["run"], FOLD["run"] = _start, _fold
