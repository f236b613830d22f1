"""Lessons 03 and 04 by hand: their steppers go forwards and back by keys, their sliders run the real code again and keep the run before."""

import pytest

from tests.browser.lab import Page, widget

pytestmark = pytest.mark.browser
CASES = {"03_the_graph.ipynb": ("Expanding the graph", "doublings"), "04_static_or_eager.ipynb": ("Packing two blocks", "the Mixtral with")}


@pytest.fixture(scope="module", params=CASES)
def lesson(request, browser, lab):
    page = Page(browser, lab)
    page.open(request.param)
    page.run_all()
    yield page.page, *CASES[request.param]
    assert page.errors() == []
    page.page.close()


def test_stepper_by_keys(lesson, artifacts):
    page, title, _ = lesson
    bar = page.get_by_role("toolbar", name=title)
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return bar.locator("span").inner_text(), root.locator(".wb-say").inner_text(), root.locator(".wb-scroll").inner_text(), root.locator("svg").first.inner_html()

    seen = [state()]
    steps = int(seen[0][0].split()[-1])
    for _ in range(steps - 1):
        page.keyboard.press("ArrowRight")
        seen.append(state())
    assert seen[-1][0] == f"step {steps} of {steps}"
    assert len({s[1] for s in seen}) == steps                                   # each step names a cause of its own
    assert all(a[2:] != b[2:] for a, b in zip(seen, seen[1:]))                  # and shows something else
    for wanted in reversed(seen[:-1]):                                          # back is the exact inverse of forward
        page.keyboard.press("ArrowLeft")
        assert state() == wanted
    page.keyboard.press("n")
    assert state() in seen[1:]
    page.keyboard.press("End")
    assert state() == seen[-1]
    page.screenshot(path=artifacts / f"stepper-{title.split()[0].lower()}.png")
    page.keyboard.press("Home")
    assert state() == seen[0]
    assert page.evaluate("() => document.activeElement.getAttribute('role')") == "toolbar"   # JupyterLab took no key


def test_slider_runs_again_and_keeps_the_run_before(lesson):
    page, _, label = lesson
    slider = page.get_by_role("slider", name=label)
    root = widget(slider)
    slider.scroll_into_view_if_needed()
    slider.focus()

    def columns():
        rows = [r.locator("td").all_inner_texts() for r in root.locator("tbody tr").all()]
        return [r[1] for r in rows], [r[2] for r in rows]

    for key in ("ArrowRight", "ArrowLeft", "Home"):
        before, text = columns(), root.locator("tbody").inner_text()
        page.keyboard.press(key)
        page.wait_for_function("([e, old]) => e.querySelector('tbody').innerText !== old", arg=[root.element_handle(), text])
        after = columns()
        assert after[0] == before[1] and after[1] != before[1]                  # B became A
