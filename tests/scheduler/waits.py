"""Recorded cases run with one call of the runtime left out: which copies and waits are needed?

    python -m tests.scheduler.waits [CASE…]

prints every place in the runtime with how many of its calls are needed. A place is found by the function that makes the
call, so a new copy or wait cannot be forgotten.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np

from tests.parity import sched_case
from workbench.devices.cost import Speed
from workbench.devices.simulated import SimulatedDevice, SimulatedEvent
from workbench.errors import WorkbenchError
from workbench.scheduler import runtime, transfer

CASES = Path(__file__).parents[1] / "data/goldens/sched"
CALLS = [*((SimulatedDevice, name) for name in ("synchronize", "wait_event", "copy_async", "set_async", "get_async", "compute_async")),
         (SimulatedEvent, "synchronize"), (SimulatedEvent, "record")]  # fmt: skip
MODES = [f"{how}-{slower}" for how in ("sync", "async") for slower in ("first", "last")]
"""Whether a run is waited for before the next one is asked for, and whether the first or the last backend is the slowest."""
HELPERS = {"_await"}  # its callers know what they wait for


class Knife:
    """Counts the runtime's calls by place (function, call) and leaves the n-th of one place out."""

    def __init__(self, place=None, n=0):
        self.place, self.n, self.calls = place, n, Counter()

    def cut(self, name, real, args):
        frame = sys._getframe(2)
        if frame.f_globals["__name__"] not in (runtime.__name__, transfer.__name__):
            return real(*args)
        while frame.f_code.co_name in HELPERS:
            frame = frame.f_back
        place = (frame.f_code.co_name, name)
        self.calls[place] += 1
        if (place, self.calls[place]) != (self.place, self.n):
            return real(*args)
        return {"copy_async": lambda *_: True, "get_async": stale_bytes}.get(name, lambda *_: None)(*args)

    @contextlib.contextmanager
    def at_work(self):
        with contextlib.ExitStack() as stack:
            for owner, name in CALLS:
                real, label = owner.__dict__[name], f"event.{name}" if owner is SimulatedEvent else name
                stack.enter_context(mock.patch.object(owner, name, lambda *a, real=real, label=label, copies=True: self.cut(label, real, a)))
            real = runtime.copy_tensor
            stack.enter_context(mock.patch.object(runtime, "copy_tensor", lambda *a: self.cut("copy_tensor", real, a)))
            yield


def stale_bytes(device, tensor):
    """What a read leaves in the host's buffer when it does not happen."""
    return np.full(tensor.nbytes, 0xFF, np.uint8)


def looking(callback, seen):
    """The callback, which also looks at the values that it is shown."""

    def look(node, ask):
        if not ask:
            seen.append(node.numpy().tobytes())
        return callback(node, ask)

    return look


def run(case, knife, mode, quirks, trace=None, without=0):
    """Outputs of the runs of a case, or the error that ended them. Mode "sync": as recorded; "async": without waiting between runs
    and with inputs overwritten as soon as a run was asked for. without: the wait that the machine leaves out."""
    scheduler = sched_case.scheduler(case, quirks=quirks, trace=trace)
    scheduler.machine.without_wait = without
    order = scheduler.backends if "first" in mode else scheduler.backends[::-1]
    for i, device in enumerate(order):  # computing takes much longer than copying: who does not wait is there before it
        device.speed = Speed(launch_ns=1_000_000 >> 2 * i, link_ns=10, link=1e6)
    for memory in scheduler.case_types.values():
        memory.speed = Speed(link_ns=10, link=1e6)
    kept, found = {}, []
    if scheduler.eval_callback is not None:
        scheduler.eval_callback = looking(scheduler.eval_callback, found)
    with contextlib.suppress(WorkbenchError), knife.at_work():
        for number, how in enumerate(case["run_modes"]):
            expect = case["expect"]["more_runs"][number - 1] if number else case["expect"]
            recorded = expect if "tensors" in expect else case
            if how != "reuse":
                scheduler.reset()
                made = sched_case.tensors(recorded["tensors"], scheduler.case_types, kept)
                graph = sched_case.expanded(recorded["graph"], made, case["graph_size"])
                for tensor, backend in case["user_assign"]:
                    with contextlib.suppress(WorkbenchError):
                        scheduler.set_backend(made[tensor], backend)
                scheduler.alloc(graph)
            sched_case.write_leafs(recorded["tensors"], made, number)
            outputs = [made[i] for i in recorded["graph"]["expand"]]
            if "async" not in mode:
                scheduler.compute(graph)
                found += [t.numpy().tobytes() for t in outputs]
            else:
                scheduler.compute_async(graph)
                observe(scheduler, outputs, found)
                overwrite_inputs(made)
        scheduler.synchronize()
        return [f if isinstance(f, bytes) else f.tobytes() for f in found]
    return "error"


def observe(scheduler, outputs, found):
    """Ask each device to copy its outputs away behind the work it was asked for, without making anybody wait."""
    for t in outputs:
        device, copy = scheduler.backend_of(t), np.zeros(t.nbytes, np.uint8)
        source = t.storage.device_bytes()[t.offset : t.offset + t.nbytes]
        scheduler.machine.ask(device.free_at, lambda copy=copy, source=source: np.copyto(copy, source), device)
        found.append(copy)


def overwrite_inputs(made):
    for t in made:
        if t.flags & 1 and t.op == "NONE" and t.storage is not None and t.storage.is_host:
            t.storage.host_bytes()[t.offset : t.offset + t.nbytes] = 0xFF


def needed(case, mode, quirks):
    """(place, n) of every call of a case with whether leaving it out is noticed."""
    whole = Knife()
    want = run(case, whole, mode, quirks)
    for place, total in whole.calls.items():
        for n in range(1, total + 1):
            yield place, n, run(case, Knife(place, n), mode, quirks) != want


def load(name):
    """A recorded case; "NAME+change" is one on changed backends."""
    name, _, change = name.partition("+")
    case = json.loads((CASES / f"{name}.json").read_text())
    for backend in case["backends"]:
        if change == "blocking":  # no copies between devices
            backend["async_cpy"] = False
        elif change == "pipeline":  # events and four copies
            backend["events"] = backend["type"] == "GPU"
    if change == "pipeline":
        case |= {"parallel": True, "n_copies": 4}
    if change == "input":  # the second GPU, which reads the first one's memory, also has something to copy in
        next(t for t in case["tensors"] if t["name"] == "w1")["buffer"]["buft"] = "CPU"
        case["user_assign"] = [[t["id"], 1] for t in case["tensors"] if t["name"] == "d"]
    return case


def main(names, quirks="ggml"):
    total, needed_ones, shown = Counter(), Counter(), {}
    for name in names or sorted(p.stem for p in CASES.glob("*.json")):
        case = load(name)
        if case["expect"]["error"] or not (case["expect"]["outputs_valid"]):
            continue
        for mode in MODES:
            for place, n, noticed in needed(case, mode, quirks):
                total[place] += 1
                needed_ones[place] += noticed
                if noticed:
                    shown.setdefault(place, []).append((name, n, mode))
    for place in sorted(total):
        print(f"{'.'.join(place):45} {needed_ones[place]:4} of {total[place]:4} needed  {shown.get(place, [''])[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
