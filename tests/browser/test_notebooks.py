"""Every notebook in a real JupyterLab: it runs, nothing fails, nothing is fetched from elsewhere, everything can be reached.

What is only in lesson 00 (a prompt typed by hand, the stepper driven by keys) is tested there.
"""

import pytest

from tests.browser.lab import ROOT, widget

pytestmark = pytest.mark.browser
BOOKS = sorted(f.name for f in (ROOT / "notebooks").glob("*.ipynb"))


def failures(book):
    return [[i, o["ename"], o["evalue"]] for i, c in enumerate(book["cells"]) for o in c.get("outputs", [])
            if o["output_type"] == "error" and "raises-exception" not in c["metadata"].get("tags", [])]


@pytest.mark.parametrize("name", BOOKS)
def test_useful_before_anything_runs_then_runs_and_is_accessible(desk, axe_script, artifacts, name):
    """A fresh copy is untrusted and has no kernel state: its pictures and tables show all the same, and no widget error does. Then it
    runs without errors, in the light theme and, looked at again, in the dark one."""
    desk.open(name)
    page = desk.page
    sizes = page.evaluate("""() => [...document.querySelectorAll('.jp-Cell-outputArea img')].map(i => [i.complete && i.naturalWidth, i.alt])""")
    assert sizes and all(width > 100 and alt for width, alt in sizes)
    text = page.evaluate("() => [...document.querySelectorAll('.jp-Cell-outputArea')].map(e => e.innerText).join('\\n')")
    assert "Loading widget" not in text and "Error displaying widget" not in text
    assert page.locator(".jp-Cell-outputArea table").count() >= 5
    desk.run_all()
    assert failures(desk.save(name)) == []
    assert desk.both_themes(axe_script, artifacts / name.removesuffix(".ipynb")) == {}


@pytest.fixture(params=["00_start_here.ipynb"])
def lesson00(desk, request):
    return desk.lesson(request.param)


def test_stepper_by_keys(lesson00):
    bar = lesson00.get_by_role("toolbar", name="Experts of each token in layer 5")
    root = widget(bar)
    place = bar.locator("span")
    bar.scroll_into_view_if_needed()
    bar.focus()

    def state():
        return place.inner_text(), root.locator(".wb-say").inner_text(), root.locator(".wb-scroll").inner_text(), root.locator(".wb-raster").inner_html()

    first = state()
    assert first[0].startswith("step 1 of")
    seen = [first]
    for _ in range(4):
        lesson00.keyboard.press("ArrowRight")
        seen.append(state())
    assert len({s[1] for s in seen}) == 5                      # each step says something else
    for wanted in reversed(seen[:-1]):                         # back is the exact inverse of forward
        lesson00.keyboard.press("ArrowLeft")
        assert state() == wanted
    lesson00.keyboard.press("Space")
    assert state() == seen[1]
    lesson00.keyboard.press("n")
    assert "new" in state()[2]
    lesson00.keyboard.press("End")
    last = state()
    steps = int(last[0].split()[-1])
    assert last[0] == f"step {steps} of {steps}"
    lesson00.keyboard.press("Home")
    assert state() == first
    assert lesson00.evaluate("() => document.activeElement.getAttribute('role')") == "toolbar"   # JupyterLab took no key


def test_prompt_player_generates_and_stops(lesson00, artifacts):
    prompt = lesson00.get_by_label("Prompt", exact=True)
    root = widget(prompt)
    prompt.scroll_into_view_if_needed()
    prompt.fill("def main(")
    root.get_by_label("new tokens").fill("12")
    root.get_by_label("new tokens").press("Tab")
    prompt.press("Control+Enter")
    root.get_by_text("done: 12 new tokens").wait_for()
    tokens = root.locator(".wb-token").all_inner_texts()
    assert any("main" in t for t in tokens) and root.locator(".wb-token").count() == root.locator("tbody tr").count()
    before = [o.get_attribute("style") for o in root.locator(".wb-token").all()]
    root.get_by_label("layer").select_option(label="0")
    after = [o.get_attribute("style") for o in root.locator(".wb-token").all()]
    assert before != after and len(before) == len(after)
    root.get_by_role("listbox").focus()
    lesson00.keyboard.press("Home")
    assert root.locator(".wb-say").inner_text().startswith("token 0 ")
    lesson00.screenshot(path=artifacts / "prompt-player.png")
    prompt.fill('<img src=x onerror="window.harmed=1">')      # text stays text
    prompt.press("Control+Enter")
    root.locator(".wb-token").nth(1).get_by_text("<").wait_for()
    root.get_by_text("done: 12 new tokens").wait_for()
    assert root.locator("img").count() == 0 and lesson00.evaluate("() => window.harmed") is None
    root.get_by_label("new tokens").fill("200")
    root.get_by_label("new tokens").press("Tab")
    root.get_by_role("button", name="Generate").click()
    root.get_by_role("button", name="Stop").click()
    root.get_by_text("stopped", exact=True).wait_for()
    assert root.locator(".wb-token").count() < 200
    assert root.get_by_role("button", name="Generate").is_enabled()


def test_prediction_is_kept_and_compared(lesson00):
    choice = lesson00.get_by_label("52", exact=True)
    choice.scroll_into_view_if_needed()
    choice.check()
    reveal = lesson00.locator(".jp-CodeCell").filter(has_text='lesson.reveal("nodes"')
    reveal.locator(".cm-content").click()
    lesson00.keyboard.press("Control+Enter")
    reveal.locator(".jp-OutputArea").get_by_text("The code disagrees with you").wait_for()
    assert "yours / computed = 0.164" in reveal.locator(".jp-OutputArea").inner_text()


def test_what_if_slider_redraws(lesson00):
    slider = lesson00.get_by_label("last word")
    slider.scroll_into_view_if_needed()
    root = widget(slider)
    before = root.locator("table").inner_text()
    slider.focus()
    lesson00.keyboard.press("ArrowRight")
    lesson00.wait_for_function("([e, old]) => e.querySelector('table').innerText !== old", arg=[root.element_handle(), before])
    assert "A: “ the”" in root.locator("table").inner_text() and "B: “ me”" in root.locator("table").inner_text()
