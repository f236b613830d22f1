"""Lessons 07 to 09 by hand: their steppers by keys, forwards and back; questions before decisions; knobs that run the passes again."""

import pytest

from tests.browser.lab import Page, widget

pytestmark = pytest.mark.browser
STEPPERS = {"07_backends_and_buffers.ipynb": "A B C | D | E F, call by call", "08_pass_1.ipynb": "Pass 1:", "09_pass_2.ipynb": "Two sweeps"}
PRACTICE = {"08_pass_1.ipynb": "Practice 1", "09_pass_2.ipynb": "Practice 0"}


@pytest.fixture(scope="module", params=STEPPERS)
def lesson(request, browser, lab):
    page = Page(browser, lab)
    page.open(request.param)
    page.run_all()
    yield page.page, request.param
    assert page.errors() == []
    page.page.close()


def test_every_step_by_keys_and_back(lesson, artifacts):
    page, name = lesson
    bar = page.get_by_role("toolbar", name=STEPPERS[name])
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return bar.locator("span").first.inner_text(), root.locator(".wb-say").inner_text(), root.locator("svg").first.inner_html()

    page.keyboard.press("Home")
    seen = [state()]
    steps = int(seen[0][0].split(" of ")[1].split()[0])
    for _ in range(steps - 1):
        page.keyboard.press("ArrowRight")
        seen.append(state())
    assert seen[-1][0].startswith(f"step {steps} of {steps}") and len({s[0] for s in seen}) == steps
    assert len({s[1] for s in seen}) > 0.7 * steps                              # waits repeat themselves, decisions do not
    for wanted in reversed(seen[:-1]):                                          # back is the exact inverse of forward
        page.keyboard.press("ArrowLeft")
        assert state() == wanted
    page.keyboard.press("n")
    assert state() in seen[1:]
    page.keyboard.press("End")
    assert state() == seen[-1]
    page.screenshot(path=artifacts / f"{name.split('.')[0]}-stepper.png")
    page.keyboard.press("Home")
    assert state() == seen[0]


def test_practice_asks_judges_and_counts(lesson, artifacts):
    page, name = lesson
    if name not in PRACTICE:
        pytest.skip("no practice in this lesson")
    bar = page.get_by_role("toolbar", name=PRACTICE[name])
    root = widget(bar)
    bar.scroll_into_view_if_needed()
    bar.focus()
    for answered in range(1, 4):
        ask = root.locator(".wb-ask fieldset")
        for _ in range(4):                                                      # a heading between two sweeps asks nothing
            page.keyboard.press("ArrowRight")
            if ask.count():
                break
        assert ask.count() == 2 and not root.locator(".wb-judged").count()
        for group in (0, 1):                                                    # backend and reason, by keyboard alone
            ask.nth(group).locator("input").first.focus()
            page.keyboard.press("Space")
        page.keyboard.press("Enter")
        judged = root.locator(".wb-judged")
        judged.wait_for(timeout=10_000)
        assert "✓" in judged.inner_text() or "✗" in judged.inner_text()
        assert f"answered {answered}:" in root.inner_text()
        bar.focus()
    page.screenshot(path=artifacts / f"{name.split('.')[0]}-practice.png")


def test_knobs_run_again_and_keep_the_run_before(lesson):
    page, name = lesson
    if name == "09_pass_2.ipynb":
        box = page.get_by_role("spinbutton", name="Batch")
        root = widget(box)
        box.scroll_into_view_if_needed()
        before = root.locator(".wb-say").inner_text()
        assert "3 splits" in before
        box.fill("32")
        box.press("Enter")
        page.wait_for_function("([node, was]) => node.innerText !== was", arg=[root.locator(".wb-say").element_handle(), before])
        assert "A" in root.locator(".wb-rolls").inner_text()
        return
    slider = page.get_by_role("slider", name="tokens in a batch" if name.startswith("08") else "pieces, as a power of 2")
    root = widget(slider)
    slider.scroll_into_view_if_needed()
    slider.focus()
    before = root.locator("table").inner_text()
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("([root, was]) => root.querySelector('table').innerText !== was", arg=[root.element_handle(), before])
    after = root.locator("table").inner_text()
    assert ("31" in after and "32" in after) if name.startswith("08") else "1,024 × 8,192" in after
