"""The file for Perfetto keeps the rules of the Chrome trace event format, and says what the trace says."""

import ast
import json
from collections import defaultdict
from pathlib import Path

import pytest

from tests.views.runs import changed, recorded, two_devices
from workbench import paths
from workbench.trace import Trace
from workbench.views import to_perfetto
from workbench.views.run_data import run_data

NEEDED = {"B": {"name", "cat", "ts", "pid", "tid"}, "E": {"ts", "pid", "tid"}, "M": {"name", "pid", "args"}, "i": {"name", "ts", "pid", "tid", "s"},
          "s": {"id", "cat", "name", "ts", "pid", "tid"}, "f": {"id", "cat", "name", "ts", "pid", "tid", "bp"}, "C": {"name", "ts", "pid", "args"}}  # fmt: skip


def checked(text):
    """The events of a file, after every rule was checked."""
    data = json.loads(text)
    assert set(data) == {"traceEvents", "displayTimeUnit", "otherData"} and data["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(v, str) for v in data["otherData"].values())
    events, named, stacks, slices = data["traceEvents"], set(), defaultdict(list), defaultdict(list)
    for e in events:
        assert NEEDED[e["ph"]] <= set(e)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "process_sort_index", "thread_name")
            named.add((e["name"], e["pid"], e["tid"]))
            continue
        assert e["ts"] >= 0 and round(e["ts"], 3) == e["ts"]                    # microseconds, to the nanosecond
        assert ("process_name", e["pid"], 0) in named
        thread = e["pid"], e.get("tid")
        if e["ph"] != "C":
            assert ("thread_name", *thread) in named
        if e["ph"] == "B":
            assert not stacks[thread] and (not slices[thread] or slices[thread][-1][1] <= e["ts"])
            stacks[thread].append(e)
        elif e["ph"] == "E":
            begin = stacks[thread].pop()
            assert begin["name"] == e["name"] and begin["args"] == e["args"] and begin["ts"] <= e["ts"]
            slices[thread].append((begin["ts"], e["ts"], begin))
        elif e["ph"] == "C":
            assert all(isinstance(v, int) and v >= 0 for v in e["args"].values())
    assert not any(stacks.values())
    return events, slices


def arrows(events, slices):
    """(slice where it begins, slice where it ends) of each flow."""
    ends = defaultdict(dict)
    for e in events:
        if e["ph"] in "sf":
            assert e["ph"] not in ends[e["id"]]                                  # one begin and one end for each number
            ends[e["id"]][e["ph"]] = e
    for flow in ends.values():
        assert set(flow) == {"s", "f"} and flow["s"]["ts"] <= flow["f"]["ts"] and flow["s"]["name"] == flow["f"]["name"]
        yield tuple(next(about for a, b, about in slices[e["pid"], e["tid"]] if a <= e["ts"] <= b and a == e["ts"]) for e in (flow["s"], flow["f"]))


@pytest.mark.parametrize("parallel", [False, True])
def test_the_rules_of_the_format(parallel):
    trace, _ = recorded(parallel)
    events, slices = checked(to_perfetto(trace))
    assert sum(map(len, slices.values())) == len(run_data(trace).spans)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {"host", "CPU", "GPU0", "GPU1"}
    first, last = run_data(trace).spans[0], max(s.end for s in run_data(trace).spans)
    assert max(e["ts"] for e in events if e["ph"] == "E") == round((last - min(e.start for e in [first, *trace.of("run")])) / 1000, 3)


def test_arrows_lead_from_copies_to_the_nodes_that_read_them():
    trace, scheduler = recorded()
    events, slices = checked(to_perfetto(trace))
    found = {(a["args"]["copy"], b["name"]) for a, b in arrows(events, slices)}
    views = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
    expected = {(r.copy.name, r.node.name) for r in scheduler.splitter.rewrites if r.node.op not in views}
    assert found == expected and len(found) > 30


def test_counters_end_where_the_trace_ends():
    trace, scheduler = recorded()
    events, _ = checked(to_perfetto(trace))
    moved = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "bytes moved"]
    assert moved == sorted(moved) and moved[-1] == sum(m.bytes for m in run_data(trace).moves)
    for pid in {e["pid"] for e in events}:
        used = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "compute memory in use" and e["pid"] == pid]
        name = next(e["args"]["name"] for e in events if e["ph"] == "M" and e["pid"] == pid)
        assert not used or (used[-1] == 0 and 0 < max(used) <= scheduler.buffer_size([b.name for b in scheduler.backends].index(name)))


def test_a_prefix_and_another_event():
    trace, _ = recorded()
    middle = len(trace) * 3 // 4
    assert to_perfetto(trace, middle) == to_perfetto(trace[:middle]) != to_perfetto(trace)
    checked(to_perfetto(trace, middle))
    assert to_perfetto(changed(trace, "busy", 5, end=10**7)) != to_perfetto(trace)


def test_work_that_overlaps_on_one_stream_gets_threads_of_its_own():
    trace = two_devices()
    trace.add("busy", 50, 450, device="A", stream="compute", work="compute", name="beside", bytes=0)
    events, slices = checked(to_perfetto(trace))
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"calls", "compute", "compute 2"}
    assert sum(map(len, slices.values())) == len(run_data(trace).spans)


def test_buffers_taken_and_given_back():
    trace = two_devices()
    for kind, time, size in (("alloc", 10, 100), ("alloc", 20, 50), ("release", 30, 100)):
        trace.add(kind, time, memory="A", bytes=size)
    events, _ = checked(to_perfetto(trace))
    assert [(e["ts"], e["args"]["bytes"]) for e in events if e["name"] == "bytes of buffers"] == [(0.01, 100), (0.02, 150), (0.03, 50)]


@pytest.mark.parametrize("trace", [Trace(), Trace("none", about={"<b>": "\x00"}), two_devices('"</script>\x00\n\ud800', "\x1b")])
def test_any_names_and_no_events(trace):
    text = to_perfetto(trace)
    checked(text)
    assert "\x00" not in text and text.isascii() and not any("\x00" in e["name"] or "\n" in e["name"] for e in json.loads(text)["traceEvents"])


def test_it_needs_no_drawing():
    for name in ("perfetto", "run_data"):
        tree = ast.parse((Path(paths.PACKAGE) / "views" / f"{name}.py").read_text("utf-8"))
        used = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} | {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        assert not {m for m in used if m.startswith(("matplotlib", "PIL"))} and used & {"workbench.views.figures", "workbench.views.timelines"} == set()
