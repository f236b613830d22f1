"""A run call by call for the stepper: who was asked for what, in the order in which the host asked.

The form is that of `workbench.views.rasters`: a lane for the host and for each device, a column for each call.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import ParameterError, shown
from workbench.trace import Event, Trace
from workbench.views.run_data import WORK, Reader
from workbench.views.timelines import amount, duration

CAUSES = {
    "run": "Run {number} begins with split 0.",
    "launch": "{device} is asked to compute {count} {nodes} {first}{split}.",
    "sync": "The host waits for {device}{waited}.",
    "event_sync": "The host waits for event {event}{waited}.",
    "event_record": "{device} is to mark event {event} when it gets there.",
    "event_wait": "{device} is to wait for event {event} before it goes on.",
    "set": "The host itself copies {name}, {bytes} of {kind}, to {target}{split}, and waits until it is there.",
    "get": "The host itself reads {name}, {bytes} of {kind}, from {source}{split}, and waits until it is there.",
    "set_async": "{target} is asked to fetch {bytes} of {kind} from the host: {name}{split}.",
    "get_async": "{source} is asked to send {name}, {bytes} of {kind}, to the host{split}.",
    "copy_async": "{target} is asked to fetch {name}, {bytes} of {kind}, from {source}{split}.",
    "declined": "{target} cannot fetch {name} from {source} by itself: the host has to wait and copy.",
    "copy_buffer": "{name}, {bytes} of {kind}, goes from {source} to {target} while the host waits{split}.",
}
"""Every reason for a step of `run_steps`."""
LETTERS = {"run": "▶", "sync": "…", "event_sync": "…", "event_record": "●", "event_wait": "○", "declined": "✗"}


def run_steps(trace: Trace, title: str = "Calls of a run", most: int = 600) -> dict[str, Any]:
    """The stepper's trace of the calls of a run, at most the first `most`. Raises ParameterError where there is none."""
    reader, steps, names = Reader(trace), list[dict[str, Any]](), list[str]()
    total: dict[tuple[str, str], int] = {}
    events = trace.events
    for i, event in enumerate(events):
        split = reader.split
        fields = reader.feed(event)
        if event.kind not in CAUSES or len(steps) >= most:
            continue
        step = _step(reader, event, fields, split, _first(trace, events, i))
        if len(reader.run.moves) and reader.run.moves[-1].event == i:
            m = reader.run.moves[-1]
            total[m.source, m.target] = total.get((m.source, m.target), 0) + m.bytes
        step["table"] = [["clock", duration(event.end)], ["split", str(split) if split >= 0 else ""],
                         *([f"{a} → {b}", f"{n:,} bytes"] for (a, b), n in total.items())]  # fmt: skip
        steps.append(step)
        names += [lane for lane, _ in step["lanes"] if lane not in names]
    if not steps:
        raise ParameterError("a trace without calls", "the trace of a run", "Scheduler(…, trace=Trace()), then compute")
    devices = [device for device, _, host in sorted(reader.run.devices, key=lambda d: not d[2])]
    lanes = ["host", *(n for n in dict.fromkeys([*devices, *names]) if n != "host")]
    for step in steps:
        step["marks"] = [[lanes.index(lane), text, 1] for lane, text in step.pop("lanes")]
    return {"title": shown(title), "lanes": lanes, "columns": ["", "so far"], "table": "bytes asked for", "steps": steps}


def _first(trace: Trace, events: list[Event], i: int) -> str:
    follows = events[i + 1] if i + 1 < len(events) else None
    return shown(trace.described(follows)["name"]) if follows is not None and follows.kind == "queued" else ""


def _step(reader: Reader, event: Event, fields: dict[str, Any], split: int, first: str) -> dict[str, Any]:
    run, cause = reader.run, event.kind
    facts: dict[str, Any] = {**fields, "split": f" (split {split})" if split >= 0 else "", "number": run.runs, "first": first}
    facts["waited"] = f": {duration(event.end - event.start)} pass" if event.end > event.start else ", which is done already"
    facts["nodes"] = "node," if fields.get("count") == 1 else "nodes, the first being"
    lanes, label = [(fields.get("device", "host"), LETTERS.get(cause, ""))], cause.replace("_", " ")
    if "bytes" in fields:
        name, kind, _ = reader.original(fields.get("copy", fields["name"]))
        done = fields.get("done", 1)
        way = run.moves[-1] if done else None
        source, target = (way.source, way.target) if way is not None else (fields["device"], fields["target"])
        cause = cause if done else "declined"
        facts.update(name=name, kind=kind, bytes=amount(fields["bytes"]), source=source, target=target)
        letter = LETTERS["declined"] if not done else WORK[kind][0]
        lanes = list(dict.fromkeys([(source, letter if not done else "→"), (target, letter)]))
        label = name.removeprefix("blk.").removesuffix(".weight")
    elif cause == "launch":
        lanes, label = [(fields["device"], str(fields["count"]))], f"compute {first}"
    elif cause in ("sync", "event_sync", "run"):
        lanes = [("host", LETTERS[cause])]
    return {"label": label, "cause": cause, "change": cause not in ("sync", "event_sync") or event.end > event.start,
            "sentence": CAUSES[cause].format(**facts), "lanes": lanes}  # fmt: skip
