"""Lesson 05 by hand: the stepper over the plan's tasks, and three knobs that run the simulation again."""

import pytest

from tests.browser.lab import Page, widget

pytestmark = pytest.mark.browser
NAME = "05_threads_and_the_plan.ipynb"


@pytest.fixture(scope="module")
def lesson(browser, lab):
    page = Page(browser, lab)
    page.open(NAME)
    page.run_all()
    yield page.page
    page.page.close()


def test_plan_stepper_by_keys(lesson, artifacts):
    bar = lesson.get_by_role("toolbar", name="The plan, simulated")
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return bar.locator("span").inner_text(), root.locator(".wb-say").inner_text(), root.locator(".wb-scroll").inner_text()

    start = state()
    assert "thread 0" in start[1]
    lesson.keyboard.press("n")
    first = state()
    assert "Chunk 1 of" in first[1] and "ffn_gate" in first[1]
    seen = [first]
    for _ in range(4):
        lesson.keyboard.press("ArrowRight")
        seen.append(state())
    assert len({s[1] for s in seen}) == 5
    lesson.screenshot(path=artifacts / "plan-stepper.png")
    for wanted in reversed(seen[:-1]):
        lesson.keyboard.press("ArrowLeft")
        assert state() == wanted
    lesson.keyboard.press("End")
    lesson.keyboard.press("Home")
    assert state() == start


def test_knobs_redraw_and_keep_the_run_before(lesson, artifacts):
    threads = lesson.get_by_role("slider", name="threads")
    root = widget(threads)
    threads.scroll_into_view_if_needed()

    def rows():
        return [r.split("\t") for r in root.locator("tbody tr").all_inner_texts()]

    first = rows()
    assert [r[0] for r in first] == ["A", "B"] and first[1][1] == "8"
    threads.focus()
    took = []
    for press in range(12):
        before = root.locator("tbody").inner_text()
        took.append(lesson.evaluate(REDRAW, [root.locator(".wb-below").element_handle(), threads.element_handle(), press % 2 == 0]))
        assert root.locator("tbody").inner_text() != before
    assert rows()[0][1:3] == ["9", "512"] and rows()[1][1:3] == ["8", "512"]
    least = root.get_by_role("slider", name="least task, µs")
    least.focus()
    for _ in range(3):
        lesson.keyboard.press("ArrowRight")
    root.locator("tbody tr").nth(1).get_by_role("cell", name="100,000").wait_for()
    assert rows()[1][4:6] == ["0", "0"] and rows()[0][1] == rows()[1][1] == "8"      # nothing is large enough to be cut
    lesson.screenshot(path=artifacts / "plan-knobs.png")
    (artifacts / "plan-knobs-ms.txt").write_text(" ".join(f"{t:.0f}" for t in sorted(took)))


REDRAW = """([below, slider, up]) => new Promise(done => {
    const start = performance.now();
    new MutationObserver((_, me) => { me.disconnect(); requestAnimationFrame(() => setTimeout(() => done(performance.now() - start))); })
        .observe(below, {childList: true, subtree: true});
    slider.value = +slider.value + (up ? 1 : -1);
    slider.dispatchEvent(new Event('input', {bubbles: true})); })"""
"""Move a slider and return the milliseconds until what is below it was painted anew: to the kernel and back."""
