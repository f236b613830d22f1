"""Lesson 06 by hand: the backward walk by keys, a curve that grows while the cell runs, and the knob that trains anew."""

import pytest

from tests.browser.lab import widget

pytestmark = pytest.mark.browser


@pytest.fixture(params=["06_gradients.ipynb"])
def lesson(desk, request):
    return desk.lesson(request.param)


def test_the_backward_walk_by_keys(lesson, artifacts):
    bar = lesson.get_by_role("toolbar", name="Ten nodes, expanded backwards")
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return root.locator(".wb-say").inner_text(), root.locator(".wb-sheet-table caption").inner_text()

    start = state()
    assert "TRANSPOSE" in start[0] and "10 need a gradient, 6 have one; 5 nodes added" in start[1]
    lesson.screenshot(path=artifacts / "backward-stepper.png")
    lesson.keyboard.press("End")
    assert state()[1] == "10 need a gradient, 10 have one; 9 nodes added"
    lesson.keyboard.press("Home")
    assert state()[0].startswith("w2 is flagged as a parameter") and state()[1].startswith("1 need a gradient, 0 have one")
    lesson.keyboard.press("n")
    assert "with respect to itself is 1" in state()[0]
    for _ in range(40):
        if state() == start:
            break
        lesson.keyboard.press("ArrowRight")
    assert state() == start


def test_the_curve_grows_while_the_cell_runs(lesson):
    """Run again, now that the place above is there: it shows the first steps before the last ones."""
    lesson.evaluate("""() => { window.drawn = []; new MutationObserver(() => {
        for (const image of document.querySelectorAll('.wb-below img'))
            if (image.alt.startsWith('The loss over') && window.drawn.at(-1) !== image.alt) window.drawn.push(image.alt);
    }).observe(document.body, {childList: true, subtree: true}); }""")
    lesson.locator(".jp-CodeCell", has_text="itertools.islice(state.batches(net), 400)").locator(".cm-content").click()
    lesson.keyboard.press("Control+Enter")
    lesson.wait_for_function("() => window.drawn.length > 2 && window.drawn.at(-1) === 'The loss over 400 steps falls.'")
    steps = [int(alt.split()[3]) for alt in lesson.evaluate("() => window.drawn")]
    assert sorted(steps[1:]) == steps[1:] and steps[1] < 400 == steps[-1]


def test_the_knob_trains_anew(lesson):
    rate = lesson.get_by_role("slider", name="rate")
    root = widget(rate)
    rate.scroll_into_view_if_needed()
    rate.focus()
    assert root.locator("tbody tr").nth(2).inner_text().split("\t")[1:] == ["hardly moves", "learns fast"]
    lesson.keyboard.press("Home")
    root.get_by_role("row", name="rate 0.01 0.0001").wait_for()
    assert root.locator("tbody tr").nth(2).inner_text().split("\t")[1:] == ["learns fast", "hardly moves"]
