"""Lesson 22 by hand: stepping through evictions with their causes, and the knob that replays."""

import pytest

from tests.browser.lab import Page, widget

pytestmark = pytest.mark.browser
NAME = "22_the_expert_cache.ipynb"


@pytest.fixture(scope="module")
def lesson(browser, lab):
    page = Page(browser, lab)
    page.open(NAME)
    page.run_all()
    yield page.page
    page.page.close()


def test_evictions_by_keys(lesson, artifacts):
    bar = lesson.get_by_role("toolbar", name="Layer 4, LRU, 4 slots")
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        table = root.locator(".wb-scroll.wb-sheet-table").inner_text()
        return bar.locator("span").inner_text(), root.locator(".wb-say").inner_text(), table

    assert "Expert 5 goes" in state()[1]
    shown = root.locator("td.wb-now.wb-mark").first
    picture = root.locator(".wb-raster").bounding_box()
    assert picture["x"] <= shown.bounding_box()["x"] < picture["x"] + picture["width"], "the step it starts with is out of sight"
    lesson.screenshot(path=artifacts / "cache-stepper.png")
    lesson.keyboard.press("p")
    before = state()
    assert "Expert 2 goes" in before[1] and "expert 2" not in before[2]
    seen = [before]
    for _ in range(3):
        lesson.keyboard.press("ArrowRight")
        seen.append(state())
    assert len({s[0] for s in seen}) == 4
    for wanted in reversed(seen[:-1]):
        lesson.keyboard.press("ArrowLeft")
        assert state() == wanted
    lesson.keyboard.press("Home")
    assert "is loaded, and the token waits" in state()[1] and state()[0] == "step 1 of 64"
    lesson.keyboard.press("End")
    assert state()[0] == "step 64 of 64"


def test_the_correction_of_the_worked_example(lesson, artifacts):
    bar = lesson.get_by_role("toolbar", name="The paper's example")
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()
    lesson.keyboard.press("n")
    assert "The router does not want expert 3 of layer 2" in root.locator(".wb-say").inner_text()
    lesson.screenshot(path=artifacts / "cache-example.png")


def test_what_if_redraws_and_keeps_the_run_before(lesson, artifacts):
    knob = lesson.get_by_role("slider", name="the cache")
    root = widget(knob)
    knob.scroll_into_view_if_needed()

    def column(n):
        return [r.split("\t")[n] for r in root.locator("tbody tr").all_inner_texts()]

    for _ in range(4):
        was = column(2)
        knob.focus()
        lesson.keyboard.press("ArrowRight")
        lesson.wait_for_function("([knob, was]) => !knob.closest('.wb').innerText.includes('B: this run') || "
                                 "knob.closest('.wb').querySelectorAll('tbody tr')[0].children[2].innerText !== was",
                                 arg=[knob.element_handle(), was[0]])
        assert column(1) == was
    lesson.screenshot(path=artifacts / "cache-what-if.png")
