"""Views of a run: what they show is what the events say, step k knows only the first k, and memory never holds two things at one place."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.views.runs import changed, other, recorded, two_devices
from workbench.errors import ParameterError
from workbench.trace import Trace
from workbench.views import memory_map, memory_table, split_table, timeline, timeline_table, traffic, traffic_table
from workbench.views.run_data import HOST, pieces, run_data
from workbench.views.run_steps import CAUSES, run_steps
from workbench.views.timelines import covered, longest_gap
from workbench.widgets import step_run

PICTURES = [timeline, memory_map, traffic]
TABLES = [timeline_table, memory_table, traffic_table, split_table]


def busy(trace):
    return [(trace.described(e), e) for e in trace.of("busy")]


def test_every_stretch_of_work_is_drawn_once_at_its_time():
    trace, _ = recorded()
    run = run_data(trace)
    drawn = Counter((s.lane, s.start, s.end) for s in run.spans if s.lane != HOST)
    assert drawn == Counter(((d["device"], d["stream"]), e.start, e.end) for d, e in busy(trace))
    assert run.window == (min(e.start for _, e in busy(trace)), max(e.end for e in trace.of("busy", "set", "get")))
    asked = Counter(trace.described(e)["name"] for e in trace.of("set_async", "get_async"))
    asked.update(d["copy"] for e in trace.of("copy_async") if (d := trace.described(e))["done"])
    assert Counter(s.copy_name for s in run.spans if s.lane != HOST and s.copy_name) == asked


def test_computes_are_found_again_in_the_graph():
    trace, scheduler = recorded()
    run = run_data(trace)
    tensors, nodes = run.graph["tensors"], run.graph["nodes"]
    computed = [s for s in run.spans if s.lane != HOST and not s.copy_name]
    assert [s.node for s in computed] == [n for n in nodes if tensors[n]["op"] not in ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")]
    for s in computed:
        split = scheduler.splits[s.split]
        assert split.first <= nodes.index(s.node) < split.last and s.lane[0] == scheduler.backends[split.backend].name
        assert (s.kind == "expert product") == (tensors[s.node]["op"] == "MUL_MAT_ID")


def test_splits_are_those_of_the_scheduler():
    trace, scheduler = recorded()
    run = run_data(trace)
    table = split_table(trace)
    assert len(run.splits) == len(scheduler.splits) == len(table.rows)
    for data, split in zip(run.splits, scheduler.splits):
        assert (data.backend, data.first, data.last) == (split.backend, split.first, split.last)
        assert [(name, size) for _, name, _, size in data.inputs] == [(t.name, t.nbytes) for t in split.inputs]
    kinds = {name: kind for s in run.splits for _, name, kind, _ in s.inputs}
    assert {kinds[n] for n in kinds if n.endswith("_exps.weight")} == {"weights"}
    assert {kinds[n] for n in kinds if "inp_" in n and n.startswith(("inp", "attn"))} == {"inputs"} and kinds["embd"] == "activations"


def test_traffic_counts_every_byte_once():
    trace, _ = recorded()
    expected = Counter()
    for e in trace.events:
        d = trace.described(e)
        if e.kind in ("set", "set_async") and d.get("memory", d.get("device")) != "CPU":
            expected["host", d.get("memory", d.get("device"))] += d["bytes"]
        elif e.kind in ("get", "get_async") and d.get("memory", d.get("device")) != "CPU":
            expected[d.get("memory", d.get("device")), "host"] += d["bytes"]
        elif e.kind == "copy_async" and d["done"]:
            expected[d["device"], d["target"]] += d["bytes"]
    rows = {(r[0], r[1]): int(r[5].replace(",", "")) for r in traffic_table(trace).rows}
    total = rows.pop(("all", ""))
    assert rows == expected and total == sum(expected.values())
    more = changed(trace, "set_async", bytes=1_000_000)
    assert traffic_table(more).rows != traffic_table(trace).rows and traffic(more).png != traffic(trace).png


@pytest.mark.parametrize("parallel", [False, True])
def test_memory_never_holds_two_things_at_one_place(parallel):
    trace, scheduler = recorded(parallel)
    lying = pieces(run_data(trace))
    twice = sum("#" not in trace.described(e)["copy"] for e in trace.of("copy"))  # an original that serves as one of its copies
    assert len(lying) == len(list(trace.of("place"))) - twice > 100 and (twice > 0) == parallel
    for a, b in itertools.combinations(lying, 2):
        apart = (a.buffer, a.chunk) != (b.buffer, b.chunk) or a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
        early, late = sorted((a, b), key=lambda p: (p.first, p.end))
        in_place = early.offset == late.offset and early.end == late.first + 1
        assert apart or early.end <= late.first or in_place, (a, b)
    for i, backend in enumerate(scheduler.backends):
        high = max(p.offset + p.bytes for p in lying if p.buffer == i)
        assert 0 < high <= scheduler.buffer_size(i)
        assert f"{high:,}" in next(r for r in memory_table(trace).rows if r[0] == backend.name)


@pytest.mark.parametrize(("kind", "fields", "views"), [
    ("busy", {"end": 10**7}, [timeline, timeline_table]), ("place", {"offset": 10**6}, [memory_map, memory_table]),
    ("split", {"backend": 2}, [split_table, memory_map]), ("sync", {"end": 10**7}, [timeline_table]),
])  # fmt: skip
def test_one_other_event_changes_the_view(kind, fields, views):
    trace, _ = recorded()
    different = changed(trace, kind, n=3, **fields)
    for view in views:
        a, b = view(trace), view(different)
        assert (a.png, a.alt) != (b.png, b.alt) if hasattr(a, "png") else a.html() != b.html()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1500))
def test_step_k_knows_only_the_first_k_events(k):
    trace, _ = recorded()
    cut = trace[:k]
    later = trace[:k]
    later.add("busy", 1, 10**9, device="GPU7", stream="compute", work="compute", name="later", bytes=0)
    later.add("place", tensor=0, buffer=0, chunk=0, offset=0, bytes=10**9)
    whole, known = run_data(trace, k), run_data(cut)
    assert dataclasses.asdict(whole) == dataclasses.asdict(known) == dataclasses.asdict(run_data(later, min(k, len(trace))))
    assert timeline_table(trace, k).html() == timeline_table(cut).html()


def test_pictures_of_a_prefix():
    trace, _ = recorded()
    middle = len(trace) * 3 // 4
    for view in PICTURES:
        assert view(trace, middle).png == view(trace[:middle]).png == view(trace, middle).png
    assert timeline(trace, middle).png != timeline(trace).png
    assert timeline(trace, window=(0, 600_000)).png != timeline(trace).png


def test_the_longest_gap_and_its_cause():
    run = run_data(two_devices())
    gap = longest_gap(run)
    assert (gap.device, gap.start, gap.end) == ("A", 100, 400) and gap.cause == "B computed for 100% of it"
    assert "A idle for 300 ns; meanwhile B computed for 100% of it" in timeline(two_devices()).caption
    assert "Busy: A 40%, B 60%" in timeline(two_devices()).caption and "waits in 60%" in timeline(two_devices()).caption
    assert longest_gap(run_data(other(two_devices(), lambda e: e if e.start < 100 else None))) is None


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))))
def test_covered_time_is_the_length_of_the_union(pieces):
    spans = [(a, a + n) for a, n in pieces]
    assert covered(spans) == len({t for a, b in spans for t in range(a, b)})


def test_parallel_slots_show_their_events():
    trace, _ = recorded(parallel=True)
    marks = Counter(m.kind for m in run_data(trace).marks)
    assert marks["recorded"] == len(list(trace.of("event_record"))) > 0 and marks["waited for"] == len(list(trace.of("event_wait"))) > 0


@pytest.mark.parametrize("view", PICTURES + TABLES)
def test_nothing_recorded_is_shown_as_nothing(view):
    for trace in (Trace(), Trace("none"), recorded()[0][:0]):
        shown = view(trace)
        assert shown.html() and repr(shown)


@pytest.mark.parametrize("view", PICTURES + TABLES)
def test_no_name_becomes_markup(view):
    trace = two_devices("<script>$x$\x00\n", "<b>\x1b")
    trace.add("assign", stage="<i>", tensor=0, backend=0, cause="<i>")
    trace.add("split", backend=0, first=0, cause="<i>")
    page = view(trace).html()
    assert "<script" not in page and "<b>" not in page and "<i>" not in page and "\x00" not in page and "\x1b" not in page


def test_threads_of_a_real_run_are_lanes():
    a = wb.Context().new_tensor("f32", 512, 512, name="a")
    b = wb.Context().new_tensor("f32", 512, 64, name="b")
    a.set(np.ones(a.shape, np.float32))
    b.set(np.ones(b.shape, np.float32))
    graph = wb.build((a @ b).named("product"))
    backend = wb.CpuBackend(n_threads=2)
    wb.GraphAllocator(backend.buffer_type).alloc(graph)
    trace = Trace(graph=None)
    backend.plan(graph).run(record=trace)
    backend.close()
    run = run_data(trace)
    assert {lane[0] for lane in run.lanes} == {"CPU"} and all(lane[1].startswith("thread") for lane in run.lanes)
    assert len(run.spans) == len(list(trace.of("task"))) and timeline(trace).png


# ---- call by call


def test_every_call_is_a_step_with_its_cause():
    trace, _ = recorded()
    steps = run_steps(trace)
    assert len(steps["steps"]) == sum(e.kind in CAUSES for e in trace.events)
    assert {s["cause"] for s in steps["steps"]} <= set(CAUSES) and all("{" not in s["sentence"] for s in steps["steps"])
    weights = [s["sentence"] for s in steps["steps"] if s["label"] == "1.ffn_up_exps"]
    assert weights and "is asked to fetch" in weights[0] and "of weights from the host" in weights[0]
    last = dict(row for row in steps["steps"][-1]["table"])
    assert last["host → GPU0"].split()[0] == next(r[5] for r in traffic_table(trace).rows if r[:2] == ["host", "GPU0"])


@given(st.integers(1, 80))
def test_a_step_depends_on_nothing_behind_it(k):
    trace, _ = recorded()
    at = [i for i, e in enumerate(trace.events) if e.kind in CAUSES][k - 1]
    part = run_steps(trace[: at + 2])["steps"][:k]  # one event more: a launch is told by its first node
    assert [(s["sentence"], s["table"]) for s in part] == [(s["sentence"], s["table"]) for s in run_steps(trace)["steps"][:k]]


def test_the_stepper_of_a_run():
    widget = step_run(recorded()[0], caption="what the host asked for")
    assert "is asked to compute" in widget.stored_text() and "what the host asked for" in widget.stored_html()
    for trace in (Trace(), recorded()[0][:5]):
        with pytest.raises(ParameterError, match="without calls"):
            step_run(trace)
