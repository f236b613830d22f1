"""The runtime stepper in the browser: every state is the one that Python computes; keys, jumps and zoom; axe; redraw in time."""

import json

import pytest

from tests.browser.test_graph_view import BUDGET_MS, quick_p95
from tests.views.runs import recorded
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler.waits import outcome, run_of
from workbench.views.steps import state
from workbench.widgets import leave_out_wait, step_run

pytestmark = pytest.mark.browser
RUNS = {
    "mixtral": lambda: step_run(recorded()[0]),
    "pipeline": lambda: step_run(recorded(True)[0]),
    "one wait less": lambda: step_run(outcome(run_of(CASES["A B C | D | E F"]), 3).trace),
}


@pytest.mark.parametrize("name", RUNS)
def test_every_state_is_pythons_and_back_is_the_inverse(static, name):
    made = RUNS[name]()
    view, n = static(made), len(made.trace["steps"])
    page = view.page
    found = page.evaluate("async n => { const m = await import(window.code); return [...Array(n).keys()].map(k => m.stateAt(model.get('trace'), k)); }", n)
    assert found == [json.loads(json.dumps(state(made.trace, k))) for k in range(n)]
    page.locator(".wb-bar").focus()
    seen = []
    for _ in range(min(n, 60)):
        seen.append(page.locator(".wb-two").inner_html())
        page.keyboard.press("ArrowRight")
    page.evaluate("k => model.set('k', k)", len(seen) - 1)
    for wanted in reversed(seen[:-1]):
        page.keyboard.press("ArrowLeft")
        assert page.locator(".wb-two").inner_html() == wanted
    assert view.errors == [] and view.others == []


def test_keys_jump_to_splits_and_kinds_and_zoom(static):
    made = RUNS["mixtral"]()
    page = static(made).page
    steps = made.trace["steps"]
    k = lambda: page.evaluate("() => model.get('k')")  # noqa: E731
    page.locator(".wb-bar").focus()
    page.keyboard.press("s")
    first = next(i for i, s in enumerate(steps) if s["split"] != steps[0]["split"])
    assert k() == first
    page.keyboard.press("k")
    again = next(i for i in range(first + 1, len(steps)) if steps[i]["cause"] == steps[first]["cause"])
    assert k() == again
    page.keyboard.press("Shift+K")
    assert k() == first
    page.keyboard.press("Shift+S")
    assert k() == first - 1
    page.get_by_label("jump to the next call of a kind").select_option("used experts")
    assert steps[k()]["cause"] == "used experts" and "bytes of weights from the host: expert" in page.locator(".wb-say").inner_text()
    assert page.locator(".wb-used").count() >= 1 and page.locator(".wb-bracket").count() == 1
    page.locator(".wb-bar").focus()
    ticks = page.locator(".wb-sheet text").all_inner_texts()
    page.keyboard.press("-")
    wider = page.locator(".wb-piece").count()
    page.keyboard.press("+")
    assert page.locator(".wb-sheet text").all_inner_texts() == ticks and page.locator(".wb-piece").count() <= wider
    page.keyboard.press("End")
    assert page.locator(".wb-asked").count() == 0                     # in the end everything is done
    launch = next(i for i, s in enumerate(steps) if s["cause"] == "launch" and len(s["event"][3]) > 4)
    page.evaluate("k => model.set('k', k)", launch)
    assert page.locator(".wb-asked").count() > 0
    assert page.locator(".wb-say").get_attribute("aria-live") == "polite"


def test_what_came_too_early_is_marked(static):
    made = RUNS["one wait less"]()
    page = static(made).page
    early = next(i for i, s in enumerate(made.trace["steps"]) if s["event"][7])
    page.evaluate("k => model.set('k', k)", early - 1)
    assert page.locator(".wb-early").count() == 0
    page.evaluate("k => model.set('k', k)", early)
    assert page.locator(".wb-early").count() == 1 and "Too early: the copy of C reads C" in page.locator(".wb-say").inner_text()
    assert "✗ wait left out" in page.locator(".wb-legend").inner_text() and "! too early" in page.locator(".wb-legend").inner_text()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", RUNS)
def test_axe_and_redraw(static, axe_script, artifacts, name, dark):
    made = RUNS[name]()
    view = static(made, dark=dark)
    page = view.page
    page.add_script_tag(path=axe_script)
    for k in (0, len(made.trace["steps"]) // 2, len(made.trace["steps"]) - 1):
        page.evaluate("k => model.set('k', k)", k)
        found = page.evaluate("() => axe.run().then(r => r.violations.map(v => [v.id, v.impact, v.nodes[0].failureSummary]))")
        assert [v for v in found if v[1] in ("serious", "critical")] == []
    keys = ["ArrowLeft"] * 20 + ["Shift+S"] * 4 + ["s"] * 4 + ["k"] * 6 + ["n"] * 6
    best = quick_p95(page, ".wb-bar", 0, keys)
    page.screenshot(path=artifacts / f"run-stepper-{name.replace(' ', '-')}-{'dark' if dark else 'light'}.png")
    print("redraw p95 in ms:", best)
    assert best < BUDGET_MS and view.errors == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_slider_over_waits_needs_no_kernel(static, axe_script, artifacts, dark):
    view = static(leave_out_wait(run_of(CASES["A B C | D | E F"]), value=3), dark=dark)
    page = view.page
    say = page.locator(".wb-say")
    assert "the copy of C reads C" in say.inner_text() and "256 of 256" in page.locator(".wb-below").inner_text()
    assert page.locator(".wb-early").count() == 1
    page.screenshot(path=artifacts / f"missing-wait-{'dark' if dark else 'light'}.png")
    best = quick_p95(page, "input[type=range]", 0, ["ArrowLeft", "ArrowRight"] * 8)
    print("redraw p95 in ms:", best)
    assert best < BUDGET_MS
    page.get_by_label("leave out wait").focus()
    page.keyboard.press("ArrowLeft")
    assert "Nothing comes too early" in say.inner_text() and page.locator(".wb-early").count() == 0 and view.errors == []
    view.page.add_script_tag(path=axe_script)
    found = view.page.evaluate("() => axe.run().then(r => r.violations.map(v => [v.id, v.impact]))")
    assert [v for v in found if v[1] in ("serious", "critical")] == []
