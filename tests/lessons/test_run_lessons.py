"""Lessons 13, 14 and 19: what they compare with is real ggml's, their rules hold beyond the cases that they show."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import paths
from workbench.lessons import open_lesson
from workbench.lessons.run_states import calls, ggml_call, predicted
from workbench.lessons.schedule_cases import CASES, random_case
from workbench.scheduler.transfer import expert_copies
from workbench.scheduler.waits import outcome, run_of
from workbench.trace import Trace
from workbench.views import hazards


def test_recorded_calls_are_the_goldens(data):
    shipped = json.loads((paths.models_dir() / "metrics" / "lesson13_ggml.json").read_text("utf-8"))["cases"]
    for name, case in shipped.items():
        golden = json.loads((data / f"goldens/sched/{name}.json").read_text("utf-8"))
        assert case == {"doc": golden["doc"], "calls": golden["expect"]["trace_compute"]}
    assert [ggml_call(c) for c in shipped["abc_d_ef"]["calls"]][:5] == [
        "wait for GPU0", "copy x to GPU0", "compute A B C on GPU0", "wait for GPU0", "copy C from GPU0"]  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("devices", [1, 2])
def test_the_rule_of_lesson_13_holds_for_random_graphs(seed, devices):
    case = random_case(seed, chain=False, devices=devices)
    scheduler, run = run_of(case)()
    scheduler.trace = trace = Trace("virtual")
    run()
    assert predicted(scheduler) == calls(trace)
    assert hazards(trace) == []


def test_every_case_computes_what_the_host_computes():
    state = open_lesson("13").state
    for name in ("A B C | D | E F", "attention, no softmax on the GPU", "MLP, batch 32", "a copy used twice", "two GPUs"):
        case = CASES[name]
        want = state.on_host(case)
        ran = state.run(case)
        assert set(want) == set(ran.results) and state.valid(ran, want)
        assert not state.valid(ran, {n: r + 1 for n, r in want.items()})


def test_the_formula_of_op_offload_is_exact():
    state = open_lesson("13").state
    card, host = state.speeds()
    for batch in (32, 100, 256):
        node, n = state.node(batch), 1024
        kept = host.compute_ns(node) + card.sync_ns
        moved = card.transfer_ns(4 * n * n) + 2 * card.transfer_ns(4 * n * batch) + card.compute_ns(node) + 4 * card.sync_ns
        assert [state.took(state.run(state.product(batch, on))) for on in (False, True)] == [kept, pytest.approx(moved, abs=3)]


# ---- pipelines


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 40), min_size=2, max_size=3), st.integers(2, 4))
def test_a_pipeline_takes_its_ideal_time_where_copies_are_free(n, work, slots):
    state = open_lesson("14").state
    work = [1000 * w for w in work]
    ran = outcome(state.chain(n, work, slots))
    assert hazards(ran.trace) == []
    assert state.took(ran.trace) >= (n - 1) * max(work) + sum(work)
    if len(work) == 2 or slots == 4:
        assert state.took(ran.trace) == (n - 1) * max(work) + sum(work)
    assert [s[0] for s in state.starts(ran.trace)] == [sum(work[:g]) for g in range(len(work))]


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_slots_change_no_bit_and_cost_what_is_said(slots):
    state = open_lesson("14").state
    want, piped = state.prompt(3, 1, n_tokens=8, wait=True), state.prompt(3, slots, n_tokens=8)
    assert np.array_equal(want.logits, piped.logits) and hazards(piped.trace) == []
    if slots > 2:
        more = {d: piped.memory[d] - state.prompt(3, slots - 1, n_tokens=8).memory[d] for d in piped.memory}
        assert more == state.bytes_per_slot(piped)
    assert all(len(names) == slots for names in state.copies(piped).values())


# ---- experts


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=7), st.sampled_from([4, 12, 20]), st.booleans())
def test_copies_of_a_run_are_those_of_the_rule(ids, width, before):
    state = open_lesson("19").state
    ran = state.once(ids, n_expert=12, width=width, before=before)
    size, found = 4 * width * width, state.copies(ran.trace)
    rule = list(expert_copies(sorted(set(ids)), 12, size))
    if before:
        assert [(c.bytes, c.last) for c in found] == [(12 * size, -1)]
    else:
        assert [(c.first, c.last, c.bytes, c.padding) for c in found] == [(p.first, p.last, p.size, p.padding) for p in rule]
    assert hazards(ran.trace) == [] and np.isfinite(ran.results["y"]).all()


def test_used_experts_are_those_of_the_router():
    state = open_lesson("19").state
    ran = state.experts_of(34)
    for layer in range(5):
        used = set(state.used("tiny-mixtral", "python", 34, layer))
        for what in ("gate", "up", "down"):
            mine = [c for c in state.copies(ran.trace) if c.weight == f"blk.{layer}.ffn_{what}_exps.weight"]
            assert {e for c in mine for e in range(c.first, c.last + 1)} == used
    assert state.distinct("tiny-mixtral", 1) == 2 and state.distinct("tiny-deepseek", 512) <= 16
    assert state.expected(8, 2, 1) == 2 and abs(state.expected(128, 4, 512) - 128) < 1e-3


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(1, 10**6))
def test_the_least_time_is_the_least_of_all_ways(used, size):
    state = open_lesson("19").state
    used = sorted(used)
    by_gap = 10_000 + size * 0.04 + sum(min(10_000 + size * 0.04, (b - a) * size * 0.04) for a, b in zip(used, used[1:]))
    assert state.tried(used, size, 10_000, 0.04) == pytest.approx(by_gap)
