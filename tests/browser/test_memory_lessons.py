"""Lessons 01 and 02 by hand: their memory maps step forwards and back by keys, their sliders run the real code again."""

import pytest

from tests.browser.lab import Page, widget

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module", params=["01_tensors.ipynb", "02_context_and_arena.ipynb"])
def lesson(request, browser, lab):
    page = Page(browser, lab)
    page.open(request.param)
    page.run_all()
    yield page.page
    page.page.close()


def test_memory_stepper_by_keys(lesson, artifacts):
    bar = lesson.get_by_role("toolbar", name="arrow keys step").first
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return (bar.locator("span").inner_text(), root.locator(".wb-say").inner_text(), root.locator(".wb-scroll").inner_text(),
                root.locator(".wb-memory").inner_html())

    seen = [state()]
    steps = int(seen[0][0].split()[-1])
    for _ in range(steps - 1):
        lesson.keyboard.press("ArrowRight")
        seen.append(state())
    assert len({s[1] for s in seen}) == len({s[3] for s in seen}) == steps      # each step says and shows something else
    marked = [s[3].count("background") + s[3].count("wb-pale") for s in seen]
    assert marked == sorted(marked) and marked[0] < marked[-1]                  # what was marked stays
    for wanted in reversed(seen[:-1]):                                          # back is the exact inverse of forward
        lesson.keyboard.press("ArrowLeft")
        assert state() == wanted
    lesson.keyboard.press("n")
    assert state() in seen[1:]
    lesson.keyboard.press("End")
    assert state() == seen[-1]
    lesson.screenshot(path=artifacts / f"memory-stepper-{steps}.png")
    lesson.keyboard.press("Home")
    assert state() == seen[0]
    assert lesson.evaluate("() => document.activeElement.getAttribute('role')") == "toolbar"   # JupyterLab took no key


def test_slider_runs_the_code_again_and_keeps_the_run_before(lesson):
    slider = lesson.get_by_role("slider").first
    root = widget(slider)
    slider.scroll_into_view_if_needed()
    slider.focus()

    def rows():
        return [r.locator("td").all_inner_texts() for r in root.locator("tbody tr").all()[:2]]

    before = rows()
    assert [r[0] for r in before] == ["A", "B"]
    for key in ("ArrowRight", "ArrowLeft", "Home"):
        old, text = rows(), root.locator("tbody").first.inner_text()
        lesson.keyboard.press(key)
        lesson.wait_for_function("([e, old]) => e.querySelector('tbody').innerText !== old", arg=[root.element_handle(), text])
        assert rows()[0][1:] == old[1][1:] and rows()[1] != old[1]              # B became A
