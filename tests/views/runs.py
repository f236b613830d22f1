"""A recorded run of a shipped model on a simulated machine with two cards, and small runs written by hand."""

import copy
from functools import lru_cache

import workbench as wb
from workbench import paths
from workbench.trace import Event, Trace

TEXT = "Once upon a time there was a little dog who liked to run in the park with his friend and a big red ball. One day"


@lru_cache(None)
def recorded(parallel=False):
    """(trace, scheduler) after one prompt; experts stay on the host, so their weights travel."""
    model = wb.load(paths.models_dir() / "tiny-mixtral-f16.gguf")
    devices = wb.simulated_machine(2)
    placed = wb.place_weights(model, devices, overrides={"_exps": "CPU"})
    scheduler = wb.Scheduler(devices, parallel=parallel)
    session = wb.Session(placed, n_ctx=256, n_batch=64, scheduler=scheduler)
    scheduler.trace = trace = Trace("virtual")
    session.decode(model.tokenizer.encode(TEXT)[:40])
    scheduler.trace = None
    return trace, scheduler


def other(trace, change):
    """A copy of a trace in which each event is `change(event)`; None leaves it out."""
    made = copy.copy(trace)
    made.events = [e for e in map(change, trace.events) if e is not None]
    return made


def changed(trace, kind, n=0, **fields):
    """A copy in which the n-th event of a kind differs in start, end or fields."""
    at = [i for i, e in enumerate(trace.events) if e.kind == kind][n]
    made = trace[:]
    event = made.events[at]
    described = made.described(event) | {k: v for k, v in fields.items() if k not in ("start", "end")}
    values = tuple(made.word(v) if isinstance(v, str) else v for v in described.values())
    made.events[at] = Event(kind, fields.get("start", event.start), fields.get("end", event.end), values)
    return made


def two_devices(name="w", extra=""):
    """A computes 0–100 and 400–500; B's stream computes 100–400; the host waits for B and copies a little before."""
    trace = Trace("virtual")
    for i, device in enumerate(("A" + extra, "B" + extra, "CPU")):
        trace.add("backend", backend=i, device=device, memory=device, host=device == "CPU")
    busy = {"stream": "compute", "work": "compute", "bytes": 0}
    trace.add("set", 0, 40, memory="B" + extra, name=name, offset=0, bytes=640)
    trace.add("busy", 0, 100, device="A" + extra, name=name, **busy)
    trace.add("sync", 100, 400, device="B" + extra)
    trace.add("busy", 100, 400, device="B" + extra, name=name, **busy)
    trace.add("event_record", 400, device="B" + extra, event=name)
    trace.add("busy", 400, 500, device="A" + extra, name=name, **busy)
    return trace
