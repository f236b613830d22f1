"""The runtime stepper: its state is a fold over the first k calls, and agrees with the machine, the ids and the runtime's own rule."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench as wb
from tests.scheduler.graphs import context, filled, moe, values
from tests.views.runs import recorded, two_devices
from workbench.errors import ParameterError
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler.transfer import PADDING, expert_copies, runs
from workbench.scheduler.waits import outcome, run_of, waits
from workbench.trace import Trace
from workbench.views import expert_picture, missing_wait, run_steps, steps_picture, timeline, waits_table
from workbench.views.steps import state
from workbench.widgets import leave_out_wait, step_run


def every_state(steps):
    return [state(steps, k) for k in range(len(steps["steps"]))]


@pytest.mark.parametrize("parallel", [False, True])
def test_state_at_k_is_a_fold_over_the_first_k_calls(parallel):
    steps = run_steps(recorded(parallel)[0])
    states = every_state(steps)
    for k in range(0, len(states), 9):
        cut = {**steps, "steps": steps["steps"][: k + 1]}
        more = copy.deepcopy(cut)
        more["steps"].append({"event": ["sync", 10**9, 3, [], [], [], [], []]})
        assert state(cut, k) == state(more, k) == states[k]
    assert json.loads(json.dumps(states[-1])) == states[-1]
    assert [s["now"] for s in states] == sorted(s["now"] for s in states)


@pytest.mark.parametrize("parallel", [False, True])
def test_done_is_what_the_trace_says_and_everything_in_the_end(parallel):
    trace, _ = recorded(parallel)
    steps = run_steps(trace)
    zero = next(e.start for e in trace.events if e.kind == "sync")
    busy = sorted((e.start - zero, e.end - zero) for e in trace.of("busy"))
    last = state(steps, len(steps["steps"]) - 1)
    device = [s for s in last["spans"] if steps["lanes"][s[0]] != "host"]
    assert sorted((s[3], s[4]) for s in device) == busy and all(s[4] <= last["now"] for s in last["spans"])
    for k, step in enumerate(steps["steps"]):
        s = state(steps, k)
        asked = sum(e.start - zero <= 10**18 for e in trace.events[: _index(trace, k)] if e.kind == "busy")
        assert len([x for x in s["spans"] if steps["lanes"][x[0]] != "host"]) == asked
        done = {name: sum(x[5] for x in s["spans"] if x[7] == i and x[4] <= s["now"]) for i, name in enumerate(steps["ways"])}
        for name, said in step["table"]:
            if name in done:
                amount = int(said.split(", ")[-1].split()[0].replace(",", "")) if "there" in said else int(said.split()[0].replace(",", ""))
                assert amount == done[name]


def _index(trace, k):
    """Where call k + 1 stands in the trace."""
    from workbench.views.run_steps import CALLS
    at = [i for i, e in enumerate(trace.events) if e.kind in CALLS]
    return at[k + 1] if k + 1 < len(at) else len(trace.events)


def test_what_was_asked_and_is_not_done_stands_behind_the_clock():
    """Right after a launch nothing of it is done; after the wait for the device everything is."""
    steps = run_steps(outcome(run_of(CASES["A B C | D | E F"])).trace)
    launch = next(k for k, s in enumerate(steps["steps"]) if s["label"] == "compute A")
    s = state(steps, launch)
    assert [steps["names"][x[2]] for x in s["spans"][s["call"] :]] == ["A", "B", "C"]
    assert all(x[4] > s["now"] for x in s["spans"][s["call"] :])
    wait = next(k for k in range(launch, len(steps["steps"])) if steps["steps"][k]["cause"] == "sync")
    assert all(x[4] <= state(steps, wait)["now"] for x in s["spans"][s["call"] :])


# ---- experts


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.sampled_from([4, 16, 128, 300]))
def test_expert_runs_and_padding_are_those_of_the_ids(ids, f):
    """Also where an expert is smaller than the padding, so that bytes alone do not tell whether the last one is padding."""
    scheduler = wb.Scheduler(wb.simulated_machine(offload_min_batch=1))
    graph, *_, weight = moe(context(), scheduler.buffer_types[-1], used=1, t=len(ids), d=4, f=f)
    scheduler.trace = trace = Trace("virtual")
    filled(scheduler, graph, x=values(len(ids), 1, 4), ids=np.array(ids, np.int32).reshape(len(ids), 1))
    steps = run_steps(trace)
    copies = [step["event"][6] for step in steps["steps"] if step["event"][6]]
    used, size = sorted(set(ids)), weight.nb[2]
    assert [(c[3], c[4]) for c in copies] == list(runs(used))
    assert [c[5] for c in copies] == [min(size, PADDING) if c[4] < 7 else 0 for c in copies]
    assert [c[:3] for c in copies] == [["experts", 8, size]] * len(copies)
    moved = [trace.described(e)["bytes"] for e in trace.of("set_async")]
    assert moved == [(c[4] - c[3] + 1) * size + c[5] for c in copies] == [c.size for c in expert_copies(used, 8, size)]
    at = [k for k, step in enumerate(steps["steps"]) if step["event"][6]]
    assert state(steps, at[-1])["experts"] == copies and steps["strip"]
    assert [s["cause"] for s in steps["steps"]].count("used experts") == len(copies)


def test_experts_are_forgotten_when_the_next_weight_comes():
    steps = run_steps(recorded()[0])
    for k, s in enumerate(every_state(steps)):
        names = {e[0] for e in s["experts"]}
        assert len(names) <= 1
        if steps["steps"][k]["event"][6]:
            assert names == {steps["steps"][k]["event"][6][0]}
    strip = next(k for k, s in enumerate(steps["steps"]) if s["cause"] == "used experts" and s["event"][6][5])
    assert "bytes of padding" in steps["steps"][strip]["sentence"]
    assert "copied so far" not in steps_picture(steps, "c", strip).alt and steps_picture(steps, "c", strip).png


def test_strips_say_copies_and_bytes():
    made = expert_picture({"three": ([1, 1, 4, 6, 6], 8, 4096), "one": ([4, 5, 6], 8, 4096), "end": ([7], 8, 4096), "none": ([], 8, 16)}, "caption")
    assert "three: 3 copies, 13,824 bytes" in made.alt and "one: 1 copies, 12,800 bytes" in made.alt and "end: 1 copies, 4,096 bytes" in made.alt
    assert "none: 0 copies, 0 bytes" in made.alt


# ---- one wait less


def test_the_step_says_what_came_too_early():
    make = run_of(CASES["A B C | D | E F"])
    whole, cut = outcome(make), outcome(make, 3)
    steps = run_steps(cut.trace)
    early = [s for s in steps["steps"] if s["event"][7]]
    assert len(early) == 1 and "Too early: the copy of C reads C at" in early[0]["sentence"] and early[0]["label"] == "C"
    gone = next(s for s in steps["steps"] if s["cause"] == "left_out")
    assert gone["sentence"] == "Here the wait for GPU was left out: nobody waits."
    assert not any(s["event"][7] for s in run_steps(whole.trace)["steps"])
    view = missing_wait(whole, cut)
    assert "Without wait 3 (“The host waits for GPU" in repr(view) and "the copy of C reads C" in repr(view) and "F" in repr(view)
    assert "only the numbers are wrong" in repr(view)
    assert "Too early" in timeline(cut.trace).alt and "Too early" not in timeline(whole.trace).alt
    same = missing_wait(whole, outcome(make, 1))
    assert "Nothing comes too early" in repr(same) and "bit for bit" in repr(same)
    rows = waits_table(whole, [outcome(make, n) for n in range(1, len(waits(whole.trace)) + 1)]).rows
    assert [r[0] for r in rows if "wrong" in r[3]] == ["3"]


def test_a_slider_leaves_one_out():
    """Small runs are all tried beforehand, so a page without a kernel has them; larger ones when they are chosen."""
    slider = leave_out_wait(run_of(CASES["A B C | D | E F"]), "read it in the table", value=3)
    assert len(slider.names) == 6 and sorted(slider.cuts) == ["1", "2", "3", "4", "5", "6"]
    assert "the copy of C reads C" in slider.cuts["3"]["said"] and slider.cuts["3"]["rows"][0][:2] == ["F", "256 of 256"]
    assert "Nothing comes too early" in slider.cuts["1"]["said"] and "read it in the table" in slider.cuts["1"]["said"]
    assert "the copy of C reads C" in slider.stored_html() and "the copy of C reads C" in slider.stored_text()
    large = leave_out_wait(run_of(CASES["forty inputs"]), value=2)
    assert sorted(large.cuts) == ["2"]
    large.value = 5
    assert sorted(large.cuts) == ["2", "5"] and large.cuts["5"]["said"].startswith("Without wait 5")


def test_a_run_that_stops_says_so():
    make = run_of(CASES["experts on the host, batch 32"])
    whole = outcome(make)
    cut = next(c for c in (outcome(make, n) for n in range(1, len(waits(whole.trace)) + 1)) if c.error)
    view = repr(missing_wait(whole, cut))
    assert "The run stops" in view and "names expert" in view and "the host looks at ffn_moe_topk-0" in view


# ---- the door


def test_present_signature_and_the_step_to_begin_with():
    trace, _ = recorded()
    assert step_run(trace).trace["title"] == "Calls of a run"
    made = step_run(trace, "title", "caption")
    assert made.trace["title"] == "title" and "caption" in made.stored_html()
    assert step_run(trace, k=7).k == 7 and "step 8 of" in step_run(trace, k=7).stored_html()
    jumps = made.trace["jumps"]
    assert [j[0] for j in jumps] == ["s", "k"] and all(field in made.trace["steps"][0] for _, _, field, _ in jumps)


def test_runs_without_anything_known():
    steps = run_steps(two_devices("<script>", "<b>"))
    assert state(steps, len(steps["steps"]) - 1)["spans"] and "<script>" in steps["names"]
    assert "<script" not in step_run(two_devices("<script>", "<b>")).stored_html()
    with pytest.raises(ParameterError, match="without calls"):
        run_steps(Trace())
    part = run_steps(recorded()[0], most=20)
    assert len(part["steps"]) == 20 and part["title"] == "Calls of a run (the first 20 calls)"
