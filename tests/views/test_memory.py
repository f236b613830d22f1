"""Memory as cells: walks go where NumPy goes, arenas are mapped without gaps, and step k knows nothing of what follows."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import paths
from workbench.cgraph import CGraph
from workbench.errors import DTypeError, ParameterError
from workbench.lessons import open_lesson
from workbench.tensors import Context, ops
from workbench.views import MemoryMap, address_steps, arena_steps, byte_map, memory_picture
from workbench.views.memory import ARENA_CAUSES, WALK_CAUSES, memory_state


@st.composite
def views_of_a_tensor(draw):
    ne = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    owner = Context().from_numpy(np.arange(np.prod(ne), dtype=np.float32).reshape(ne[::-1]), name="owner")
    t = owner
    for _ in range(draw(st.integers(0, 3))):
        which = draw(st.sampled_from(["transpose", "permute", "slice"]))
        if which == "transpose":
            t = t.T
        elif which == "permute":
            t = ops.permute(t, *draw(st.permutations(range(4))))
        else:
            t = t[tuple(slice(draw(st.integers(0, n - 1)), n, draw(st.integers(1, 2))) for n in t.shape)]
    return t


@given(views_of_a_tensor())
def test_a_walk_reads_what_numpy_reads(t):
    trace = address_steps(t)
    values = t.array().reshape(-1)
    assert len(trace["steps"]) == t.n_elements
    memory = t.root().array().reshape(-1)
    for step, value in zip(trace["steps"], values):
        [[cell, shown, *_]] = step["marks"]
        assert memory[cell] == value and float(shown.replace(",", "")) == value
        assert int(step["table"][-1][3]) == cell * trace["unit"] and step["cause"] in WALK_CAUSES
    assert sum(s["cause"] == "carry" for s in trace["steps"]) == t.n_rows - 1


@given(views_of_a_tensor(), st.integers(0, 300))
def test_a_step_depends_on_nothing_behind_it(t, k):
    trace = address_steps(t)
    k %= len(trace["steps"])
    other = copy.deepcopy({**trace, "steps": trace["steps"][: k + 1]})
    other["steps"].append({"marks": [[0, "?", "?", 7, False]]})
    assert list(memory_state(trace, k)) == list(memory_state(other, k))


def test_every_cause_of_a_walk_occurs():
    t = Context().from_numpy(np.zeros((2, 2, 2), np.float32))
    assert {s["cause"] for s in address_steps(t.T)["steps"]} == set(WALK_CAUSES)


def test_walks_that_cannot_be_drawn_are_refused():
    ctx = Context()
    with pytest.raises(ParameterError, match="at most 256"):
        address_steps(ctx.new_tensor("f32", 257))
    with pytest.raises(DTypeError):
        address_steps(ctx.new_tensor("q8_0", 32))


def small_arena(no_alloc=False):
    ctx = Context(3072, no_alloc=no_alloc, name="small")
    x, w = ctx.new_tensor("f32", 8, name="x"), ctx.new_tensor("f32", 8, 3, name="w")
    x.reshape(4, 2)
    ops.mul_mat(w, x)
    CGraph(ctx, size=5, name="g")
    return ctx


@pytest.mark.parametrize("no_alloc", [False, True])
def test_an_arena_is_mapped_to_the_byte(no_alloc):
    ctx = small_arena(no_alloc)
    trace = arena_steps(ctx)
    cells = [cell for step in trace["steps"] for cell, *_ in step["marks"]]
    assert cells == list(range(ctx.used_mem // 16))                   # no gap, no overlap
    data = sum(mark[1] in "Dd" for step in trace["steps"] for mark in step["marks"])
    assert data * 16 == (0 if no_alloc else 32 + 96 + 16)             # 12 bytes of the result are padded
    for step in trace["steps"]:
        assert sum(int(row[4].replace(",", "")) for row in step["table"]) == ctx.mem_size


def test_every_cause_of_an_arena_occurs():
    seen = {s["cause"] for no_alloc in (False, True) for s in arena_steps(small_arena(no_alloc))["steps"]}
    assert seen == set(ARENA_CAUSES)


def test_a_mark_with_look_minus_one_wipes_the_cell():
    trace = {"cells": ["a", "b"], "unit": 1, "per_row": 2, "title": "t", "legend": [[0, "x"]],
             "steps": [{"marks": [[1, "B", "n", 0, False]]}, {"marks": [[1, "", "", -1, False]]}]}
    assert [c[1:4] for c in memory_state(trace, 0)] == [("a", "", -1), ("B", "n", 0)]
    assert [c[1:4] for c in memory_state(trace, 1)] == [("a", "", -1), ("b", "", -1)]


def test_changing_one_event_changes_picture_map_and_alt_text():
    trace = arena_steps(small_arena())
    other = copy.deepcopy(trace)
    other["steps"][1]["marks"] = other["steps"][1]["marks"][:-1]
    a, b = memory_picture(trace, "c"), memory_picture(other, "c")
    assert a.png != b.png and a.alt != b.alt and a.png == memory_picture(trace, "c").png
    assert MemoryMap(trace, "c").html() != MemoryMap(other, "c").html()
    assert memory_picture(trace, "c", 0).alt.count(": x") == 1 and ": w" not in memory_picture(trace, "c", 0).alt


def test_no_name_becomes_markup():
    ctx = Context(1024, name="<b>")
    ctx.new_tensor("f32", 1, name="<script>\x00")
    page = MemoryMap(arena_steps(ctx), "<i>").html()
    assert "<script" not in page and "<i>" not in page
    assert byte_map({"$x$": [("<b>", 2)]}, "c").png


def test_the_run_shown_in_lesson_02_is_the_recorded_one():
    recorded = json.loads((paths.PACKAGE.parent / "tests/data/context_memory.json").read_text("utf-8"))["runs"][0]["steps"]
    shown = open_lesson("02").state.GGML_RUN
    assert [used for _, used in shown] == [step[-1] for step in recorded[: len(shown)]]
    assert [name for name, _ in shown[-3:]] == [step[0] for step in recorded[8:11]]
    context = Context()
    assert all(used == context.used_mem for *_, used in open_lesson("02").state.replay(context))
