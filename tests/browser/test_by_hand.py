"""The lessons by keyboard: steppers forwards and back, questions before decisions, sliders that run the real code again."""

import pytest

from tests.browser.lab import widget

pytestmark = pytest.mark.browser
STEPPERS = {  # number -> toolbar, what `n` leads to from the first step, least share of steps that say something of their own, whether all show it
    "01_tensors.ipynb": ("arrow keys step", "", 1, True),
    "02_context_and_arena.ipynb": ("arrow keys step", "", 1, True),
    "03_the_graph.ipynb": ("Expanding the graph", "", 1, True),
    "04_static_or_eager.ipynb": ("Packing two blocks", "", 1, True),
    "05_threads_and_the_plan.ipynb": ("The plan, simulated", "Chunk 1 of", 0.3, False),
    "07_backends_and_buffers.ipynb": ("A B C | D | E F, call by call", "", 0.7, False),     # waits repeat themselves, decisions do not
    "08_pass_1.ipynb": ("Pass 1:", "", 0.7, False),
    "09_pass_2.ipynb": ("Two sweeps", "", 0.7, False),
    "15_dense_moe.ipynb": ("‘ me’ in layer 5", "counts for 63.5%", 0.7, False),
    "16_top_k_moe.ipynb": ("64 tokens, 8 places", "whose 8 places are taken: dropped", 0.7, False),
    "20_the_memory_wall.ipynb": ("One token with room for two experts per layer", "the router chooses", 0.3, False),
    "21_predicting_routes.ipynb": ("gate, 1 ahead: what it fetches for layer 3", "was not fetched", 0.3, False),
    "22_the_expert_cache.ipynb": ("Layer 4, LRU, 4 slots", "", 0.3, False),
}  # fmt: skip
STATE = """e => [e.querySelector('.wb-bar span').innerText, e.querySelector('.wb-say').innerText,
    [...e.querySelectorAll('.wb-scroll, .wb-memory, .wb-raster, svg')].filter(part => !part.querySelector('[aria-rowindex]'))  // scrolled, not kept
        .map(part => part.innerHTML.replaceAll(' style=""', '')).join()]"""
MOST = 80


class Stepper:
    """One stepper of the lesson that is open, with the focus on its bar."""

    def __init__(self, page, name):
        self.page, self.bar = page, page.get_by_role("toolbar", name=name).first
        self.root = widget(self.bar)
        self.bar.scroll_into_view_if_needed()
        self.bar.focus()

    def state(self):
        """[place, sentence, picture]"""
        return self.root.evaluate(STATE)

    def press(self, key):
        self.page.keyboard.press(key)
        return self.state()


@pytest.mark.parametrize("book", STEPPERS)
def test_every_step_by_keys_and_back(desk, artifacts, book):
    name, said, own, shows = STEPPERS[book]
    stepper = Stepper(desk.lesson(book), name)
    stepper.page.screenshot(path=artifacts / f"{book[:2]}-stepper.png")
    seen = [stepper.press("Home")]
    steps = int(seen[0][0].split()[3])
    seen += [stepper.press("ArrowRight") for _ in range(min(steps, MOST) - 1)]
    assert len({s[0] for s in seen}) == len(seen) and seen[-1][0].startswith(f"step {len(seen)} of {steps}")
    assert len({s[1] for s in seen}) >= own * len(seen)
    assert not shows or all(a[2] != b[2] for a, b in zip(seen, seen[1:]))
    for wanted in reversed(seen[:-1]):                                          # back is the exact inverse of forward
        assert stepper.press("ArrowLeft") == wanted
    jumped = stepper.press("n")
    assert said in jumped[1] and jumped[0] != seen[0][0]
    last = stepper.press("End")
    assert last[0].startswith(f"step {steps} of {steps}") and stepper.press("ArrowRight") == last      # there is nothing behind the end
    assert stepper.press("Home") == seen[0]
    assert desk.page.evaluate("() => document.activeElement.getAttribute('role')") == "toolbar"        # JupyterLab took no key


@pytest.mark.parametrize("book", ["01_tensors.ipynb", "02_context_and_arena.ipynb"])
def test_what_was_marked_in_memory_stays_marked(desk, book):
    stepper = Stepper(desk.lesson(book), STEPPERS[book][0])
    place = stepper.press("Home")[0]
    marked = []
    for _ in range(int(place.split()[3])):
        cells = stepper.root.locator(".wb-memory").inner_html()
        marked.append(cells.count("background") + cells.count("wb-pale"))
        stepper.press("ArrowRight")
    assert marked == sorted(marked) and marked[0] < marked[-1]


@pytest.mark.parametrize("book", ["22_the_expert_cache.ipynb"])
def test_evictions_name_their_cause(desk, book):
    stepper = Stepper(desk.lesson(book), "Layer 4, LRU, 4 slots")
    assert "is loaded, and the token waits" in stepper.press("Home")[1]
    assert any("Expert 2 goes" in stepper.press("n")[1] for _ in range(64))
    assert "expert 2" not in stepper.root.locator(".wb-scroll.wb-sheet-table").inner_text()
    assert "Expert 5 goes" in stepper.press("n")[1]
    shown, picture = stepper.root.locator("td.wb-now.wb-mark").first.bounding_box(), stepper.root.locator(".wb-raster").bounding_box()
    assert picture["x"] <= shown["x"] < picture["x"] + picture["width"], "the step is out of sight"


@pytest.mark.parametrize("book", ["22_the_expert_cache.ipynb"])
def test_the_correction_of_the_worked_example(desk, book):
    stepper = Stepper(desk.lesson(book), "The paper's example")
    stepper.press("Home")
    assert any("The router does not want expert 3 of layer 2" in stepper.press("n")[1] for _ in range(8))


@pytest.mark.parametrize(("book", "practice"), [("08_pass_1.ipynb", "Practice 1"), ("09_pass_2.ipynb", "Practice 0")])
def test_practice_asks_judges_and_counts(desk, book, practice):
    stepper = Stepper(desk.lesson(book), practice)
    root, page = stepper.root, stepper.page
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
        stepper.bar.focus()


SLIDERS = [  # number, slider, moves, whether the run before stands beside the new one
    ("01_tensors.ipynb", "", 3, True), ("02_context_and_arena.ipynb", "", 3, True), ("03_the_graph.ipynb", "doublings", 3, True),
    ("04_static_or_eager.ipynb", "the Mixtral with", 3, True), ("05_threads_and_the_plan.ipynb", "threads", 4, True),
    ("07_backends_and_buffers.ipynb", "pieces, as a power of 2", 2, False), ("08_pass_1.ipynb", "tokens in a batch", 2, False),
    ("15_dense_moe.ipynb", "temperature", 3, False), ("15_dense_moe.ipynb", "experts used", 4, False),
    ("16_top_k_moe.ipynb", "experts per token, k", 2, False), ("16_top_k_moe.ipynb", "capacity factor", 3, False),
    ("16_top_k_moe.ipynb", "temperature", 2, False), ("20_the_memory_wall.ipynb", "slots per layer", 4, False),
    ("20_the_memory_wall.ipynb", "stored as", 2, False), ("20_the_memory_wall.ipynb", "card", 2, False),
    ("21_predicting_routes.ipynb", "predictor", 3, False), ("21_predicting_routes.ipynb", "target", 3, False),
    ("21_predicting_routes.ipynb", "rule", 2, False), ("22_the_expert_cache.ipynb", "the cache", 4, True),
]  # fmt: skip
NUMBERS = {"07_backends_and_buffers.ipynb": ["1,024 × 8,192"], "08_pass_1.ipynb": ["31", "32"]}
"""What stands below after the first move of these lessons."""


def runs(root):
    """What is written of the run before (A) and of this one (B), which are rows or columns of the table."""
    rows = [r.locator("td").all_inner_texts() for r in root.locator("tbody").first.locator("tr").all()]
    if rows[0][0] == "A":
        return rows[0][1:], rows[1][1:]
    return [r[1] for r in rows], [r[2] for r in rows]


@pytest.mark.parametrize(("book", "name", "moves", "beside"), SLIDERS)
def test_a_slider_runs_it_again_and_keeps_the_focus(desk, book, name, moves, beside):
    page = desk.lesson(book)
    slider = page.get_by_role("slider", name=name).first
    root = widget(slider)
    slider.scroll_into_view_if_needed()
    slider.focus()
    for move in range(moves):
        before, text, at = beside and runs(root), root.locator(".wb-below").inner_text(), slider.input_value()
        keys = ("ArrowLeft", "ArrowRight") if move % 3 == 0 else ("ArrowRight", "ArrowLeft")
        page.keyboard.press(keys[0])
        if slider.input_value() == at:                                          # it stood at that end
            page.keyboard.press(keys[1])
        page.wait_for_function("([e, old]) => e.innerText !== old", arg=[root.locator(".wb-below").element_handle(), text])
        if beside:
            after = runs(root)
            assert after[0] == before[1] and after[1] != before[1]              # B became A
        if not move:
            assert all(number in root.inner_text() for number in NUMBERS.get(book, ()))
    assert slider.evaluate("e => e === document.activeElement")


@pytest.mark.parametrize("book", ["05_threads_and_the_plan.ipynb"])
def test_nothing_is_large_enough_to_be_cut(desk, book):
    page = desk.lesson(book)
    least = page.get_by_role("slider", name="least task, µs")
    root = widget(least)
    least.focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    root.locator("tbody tr").nth(1).get_by_role("cell", name="100,000").wait_for()
    assert runs(root)[1][3:5] == ["0", "0"]


@pytest.mark.parametrize("book", ["09_pass_2.ipynb"])
def test_a_larger_batch_splits_otherwise(desk, book):
    page = desk.lesson(book)
    box = page.get_by_role("spinbutton", name="Batch")
    root = widget(box)
    box.scroll_into_view_if_needed()
    before = root.locator(".wb-say").inner_text()
    assert "3 splits" in before
    box.fill("32")
    box.press("Enter")
    page.wait_for_function("([node, was]) => node.innerText !== was", arg=[root.locator(".wb-say").element_handle(), before])
    assert "A" in root.locator(".wb-rolls").inner_text()
