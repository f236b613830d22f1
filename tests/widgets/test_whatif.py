"""`WhatIf` as Python sees it, and the tables it shows: every wish is a run of the real passes, refusals lose nothing."""

import time

import pytest

from workbench import Scheduler, load, models, place_weights, simulated_machine
from workbench.lessons.schedule_cases import CASES, random_case
from workbench.scheduler.optimum import fewest_bytes
from workbench.scheduler.whatif import Case, Change, why_not
from workbench.views import compare_table, optimum_table, outcome_table, placement_table, why_not_view
from workbench.views.whatif import case_data
from workbench.widgets import WhatIf

CHAIN = CASES["A B C | D | E F"]
WISHES = [("weight", "W", "CPU"), ("deny", "SILU", "GPU"), ("allow", "SOFT_MAX", "GPU"), ("assign", "E", "CPU"), ("assign", "E", ""),
          ("batch", "", 32), ("op_offload", "", False), ("parallel", "", True)]  # fmt: skip


@pytest.mark.parametrize("wish", WISHES, ids=lambda w: f"{w[0]} {w[1]} {w[2]}")
def test_a_wish_of_the_page_is_a_change(wish):
    view = WhatIf(CHAIN)
    before = view.run
    view.wish = [1, *wish]
    changed = CHAIN.changed(Change(*wish))
    assert view.case == changed and view.run == case_data(changed)[1] and view.last == before and view.answer == {}
    view.wish = [2, "back"]
    assert view.case == CHAIN and view.run == before and view.last == case_data(changed)[1]
    view.wish = [3, "first"]
    assert view.case == CHAIN


def test_a_refusal_is_said_and_nothing_is_lost():
    view = WhatIf(CHAIN).change(Change.batch(2))
    state = view.run, view.last, view.case
    view.wish = [1, "assign", "D", "GPU"]
    assert view.note == "Refused: GPU cannot compute 'D' = SOFT_MAX. GPU is made without SOFT_MAX."
    view.wish = [2, "batch", "", 0]
    assert view.note.startswith("Refused: a batch of 0") and (view.run, view.last, view.case) == state
    view.change(Change.deny("SOFT_MAX", "CPU"))
    assert view.note.startswith("Refused: no backend supports 'D' = SOFT_MAX") and (view.run, view.last, view.case) == state
    assert view.ask(7).note.startswith("no border at 7") and view.answer == {}


def test_why_not_in_the_page():
    view = WhatIf(CHAIN)
    view.wish = [1, "ask", 1]
    answer = why_not(CHAIN, 1)
    assert view.answer["title"] == "Smallest single change without the border before D: give GPU a kernel for SOFT_MAX."
    assert view.answer["ways"][0] == ["allow", "SOFT_MAX", "GPU"] and view.answer["border"] == ["C", "D"]
    assert len(view.answer["rows"]) == len(view.answer["ways"]) == len(answer.removing) == 5
    assert view.answer["rows"][0] == ["give GPU a kernel for SOFT_MAX", "1", "1", "1,024", "0", "none"]
    assert "10 single changes (8 × assignment by hand, 1 × op to support, 1 × weight to move)" in view.answer["lines"][2][1]
    view.wish = [2, *view.answer["ways"][0]]
    assert len(view.run["splits"]) == 1 and view.answer == {} and view.note.startswith("Splits: 3 → 1; bytes copied per run: 3,072 → 1,024")
    none = WhatIf(CASES["MLP, half on the host"]).ask("down")
    assert none.answer["title"] == "No single change takes the border before down away." and none.answer["rows"] == []


def test_what_the_page_draws_is_what_the_passes_decided():
    for case in (*CASES.values(), *(random_case(s, 12, chain=False) for s in range(10))):
        out, data = case_data(case)
        scheduler, graph = case.scheduler_and_graph()
        scheduler.split(graph)
        a = scheduler.assignment
        assert data["of"] == [a.of.get(t, -1) for t in (*graph.leafs, *graph.nodes)]
        assert [s[:2] for s in data["splits"]] == [[s.backend, s.first] for s in scheduler.splits]
        names = [t.name for t in (*graph.leafs, *graph.nodes)]
        assert [[names[i] for i in s[2]] for s in data["splits"]] == [[t.name for t in s.inputs] for s in scheduler.splits]
        assert len(data["cuts"]) == len(out.splits) and [c[0] for c in data["cuts"][1:]] == [b for _, b in out.borders()]


def test_the_kernel_s_share_of_a_redraw_is_small():
    """The page has 100 ms; the passes, the comparison and the data for the page take the smaller part of it, also for the widest case."""
    for name in ("A B C | D | E F", "forty inputs", "experts on the host, batch 32"):
        view, times = WhatIf(CASES[name]), []
        for i in range(9):
            start = time.perf_counter()
            view.wish = [i, "batch", "", 32 + i]
            times.append(time.perf_counter() - start)
        assert min(times) < 0.05, f"{name}: {1000 * min(times):.0f} ms"


def test_stored_forms():
    view = WhatIf(CHAIN, "What the page says")
    text, html = view.stored_text(), view.stored_html()
    assert text.startswith("A B C | D | E F\n[Picture: 6 nodes") and "What the page says" in html and "<img alt=" in html
    assert "begins because" in text and "<svg" not in html and len(html) < 60_000
    view.change(Change.allow("SOFT_MAX", "GPU")).ask(1)
    view.change(Change.deny("SOFT_MAX", "GPU")).ask(1)
    assert "≠" in repr(view) and "give GPU a kernel for SOFT_MAX" in repr(view) and "object at 0x" not in repr(view)


@pytest.mark.parametrize(("name", "tokens", "splits"), [("tiny-mixtral-f16", 1, 14), ("tiny-deepseek-f16", 1, 10), ("tiny-deepseek-f16", 40, 13)])
def test_a_graph_that_exists_has_no_batch(name, tokens, splits):
    with load(name) as model:
        backends = simulated_machine()
        with place_weights(model, backends, overrides={"_exps": "CPU"}) as placed:
            cache = models.KVCache(placed.hparams, 256, placed.layer_types)
            view = WhatIf(Case.of(Scheduler(backends), models.build_step(placed, cache, tokens, 256, 1).graph, "a step"), most=30)
            assert view.run["controls"]["batch"] == 0 and len(view.run["splits"]) == splits
            view.change(Change.move("token_embd.weight", "GPU"))
            assert len(view.run["splits"]) == splits - 1 and view.ask(1).answer["title"]


def test_tables():
    a, b = CHAIN, CHAIN.changed(Change.move("W", "CPU"))
    assert outcome_table(a).rows[1] == ["1", "CPU", "D", "C", "1,024", "the next node runs on another backend"]
    assert outcome_table(b).caption == "1 split; 0 bytes are copied between devices in a run."
    assert compare_table(a, b).rows[0] == ["splits", "3", "1", "≠"] and compare_table(a, a).rows[0][3] == ""
    assert compare_table(a, b).caption.endswith("on another backend: A (GPU → CPU), B (GPU → CPU), C (GPU → CPU), E (GPU → CPU), F (GPU → CPU).")
    assert repr(why_not_view(why_not(a, 1))).startswith("· Smallest single change")
    assert placement_table(a).rows[1] == ["B", "SILU", "GPU", "CPU", "≠"]


def test_the_table_of_optima_counts_what_it_says():
    cases = [random_case(s, 9, chain=s % 2 == 0, devices=1 + (s % 5 == 0)) for s in range(12)]
    view = optimum_table(cases)
    best = [fewest_bytes(*c.scheduler_and_graph()).nbytes for c in cases]
    copied = [c.outcome().copied for c in cases]
    assert [r[3:5] for r in view.rows] == [[f"{a:,}", f"{b:,}"] for a, b in zip(copied, best)]
    equal = sum(a == b for a, b in zip(copied, best))
    assert view.caption.startswith(f"In {equal} of 12 cases the passes move as few bytes as possible")
    assert [r[5] for r in view.rows] == [f"{a / b:.2f}" if b else "1.00" if a == b else "∞" for a, b in zip(copied, best)]
