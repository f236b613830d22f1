"""Lessons 20 and 21 by hand: one token's way and a forecast step by step, knobs that run the simulation and the calibration again."""

import pytest

from tests.browser.lab import Page, widget
from tests.browser.test_lesson05 import REDRAW

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", params=["20_the_memory_wall.ipynb", "21_predicting_routes.ipynb"])
def lesson(request, browser, lab):
    page = Page(browser, lab)
    page.open(request.param)
    page.run_all()
    yield request.param[:2], page
    page.page.close()


STEPPERS = {"20": ("One token with room for two experts per layer", "the router chooses"),
            "21": ("gate, 1 ahead: what it fetches for layer 3", "was not fetched")}  # fmt: skip


def test_stepper_by_keys(lesson, artifacts):
    number, page = lesson[0], lesson[1].page
    name, said = STEPPERS[number]
    bar = page.get_by_role("toolbar", name=name)
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return bar.locator("span").inner_text(), root.locator(".wb-say").inner_text()

    page.keyboard.press("Home")
    start = state()
    page.keyboard.press("n")
    seen = [state()]
    assert said in seen[0][1]
    page.screenshot(path=artifacts / f"lesson{number}-stepper.png")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
        seen.append(state())
    assert len({s[0] for s in seen}) == 5
    for wanted in reversed(seen[:-1]):
        page.keyboard.press("ArrowLeft")
        assert state() == wanted
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert state() == start


SLIDERS = {"20": [("slots per layer", 4), ("stored as", 2), ("card", 2)], "21": [("predictor", 3), ("target", 3), ("rule", 2)]}


def test_knobs_run_it_again(lesson, artifacts):
    number, page = lesson[0], lesson[1].page
    took = []
    for name, moves in SLIDERS[number]:
        slider = page.get_by_role("slider", name=name)
        root = widget(slider)
        slider.scroll_into_view_if_needed()
        for move in range(moves):
            before = root.locator("table").inner_text()
            took.append(page.evaluate(REDRAW, [root.locator(".wb-below").element_handle(), slider.element_handle(), move % 2 == 0]))
            assert root.locator("table").inner_text() != before
    page.screenshot(path=artifacts / f"lesson{number}-knobs.png")
    (artifacts / f"lesson{number}-knobs-ms.txt").write_text(" ".join(f"{t:.0f}" for t in sorted(took)))


def test_nothing_is_said_on_the_console_and_nobody_else_is_asked(lesson, axe_script, artifacts):
    number, page = lesson
    assert page.errors() == [] and page.others == []
    assert not [f for f in page.axe(axe_script) if f[1] in ("critical", "serious")]
    figures = page.page.locator(".jp-OutputArea figure img")
    for i in range(figures.count()):
        figures.nth(i).scroll_into_view_if_needed()
        figures.nth(i).screenshot(path=artifacts / f"lesson{number}-figure{i}.png")
