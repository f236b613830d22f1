"""Lessons 15 and 16 by hand: a sum and a queue step by step, knobs that run the layer again."""

import pytest

from tests.browser.lab import Page, widget
from tests.browser.test_lesson05 import REDRAW

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", params=["15_dense_moe.ipynb", "16_top_k_moe.ipynb"])
def lesson(request, browser, lab):
    page = Page(browser, lab)
    page.open(request.param)
    page.run_all()
    yield request.param[:2], page.page
    page.page.close()


STEPPERS = {"15": ("‘ me’ in layer 5", 8, "counts for 63.5%"), "16": ("64 tokens, 8 places", 64, "whose 8 places are taken: dropped")}


def test_stepper_by_keys(lesson, artifacts):
    number, page = lesson
    name, n_steps, said = STEPPERS[number]
    bar = page.get_by_role("toolbar", name=name)
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return bar.locator("span").inner_text(), root.locator(".wb-say").inner_text(), root.locator(".wb-scroll").inner_text()

    start, seen = state(), []
    page.keyboard.press("n")
    assert said in state()[1]
    page.screenshot(path=artifacts / f"lesson{number}-stepper.png")
    page.keyboard.press("Home")
    assert state() == start
    for _ in range(n_steps - 1):
        seen.append(state())
        page.keyboard.press("ArrowRight")
    last = state()
    page.keyboard.press("ArrowRight")
    assert state() == last                                         # there is nothing behind the end
    for wanted in reversed(seen):
        page.keyboard.press("ArrowLeft")
        assert state() == wanted


SLIDERS = {"15": [("temperature", 3), ("experts used", 4)], "16": [("experts per token, k", 2), ("capacity factor", 3), ("temperature", 2)]}


def test_knobs_run_the_layer_again(lesson, artifacts):
    number, page = lesson
    took = []
    for name, moves in SLIDERS[number]:
        slider = page.get_by_role("slider", name=name)
        root = widget(slider)
        slider.scroll_into_view_if_needed()
        for move in range(moves):
            before = root.locator("table").inner_text()
            took.append(page.evaluate(REDRAW, [root.locator(".wb-below").element_handle(), slider.element_handle(), move % 3 != 2]))
            assert root.locator("table").inner_text() != before
    page.screenshot(path=artifacts / f"lesson{number}-knobs.png")
    (artifacts / f"lesson{number}-knobs-ms.txt").write_text(" ".join(f"{t:.0f}" for t in sorted(took)))
