"""Lesson 25's dashboard by keyboard alone: each knob runs the simulation again, beside the run before, and keeps the focus."""

import re

import pytest

from tests.browser.lab import widget

pytestmark = pytest.mark.browser
KNOBS = {  # label -> key, counters of which at least one changes (as they begin), and a picture that changes
    "missing experts": ("End", ["ms per token, one"], "Timeline"),
    "predictor": ("End", ["recall"], ""),                                       # lru, which it starts with, reads no forecast
    "policy": ("End", ["ms per token, one"], "Residency"),
    "experts named per token": ("ArrowRight", ["recall"], "Residency"),
    "window, layers ahead": ("ArrowRight", ["ms per token, one"], "Timeline"),
    "slots per layer": ("ArrowRight", ["slots"], "Memory"),
    "link": ("Home", ["ms per token, one"], "Time"),
    "longest wait": ("End", ["ms per token of a request", "tokens/s"], ""),
    "tokens worth a load": ("ArrowRight", ["ms per token of a request", "tokens/s"], ""),      # of queues that wait
    "queue capacity": ("Home", ["tokens/s", "tokens per"], "Memory"),
}  # fmt: skip
PARTS = ("Time per token by cause. A:", "Hit rates: lru", "Timeline of", "Memory of 24 GiB:", "Residency:")


@pytest.fixture(params=["25_the_tuning_case.ipynb"])
def board(desk, request):
    return widget(desk.lesson(request.param).get_by_role("slider", name="slots per layer"))


def columns(board):
    """Counters of the run before and of this run, by name."""
    rows = [r.split("\t") for r in board.locator("tbody tr").all_inner_texts()]
    return [{r[0]: r[n] for r in rows} for n in (1, 2)]


def drawn(board):
    return {svg.get_attribute("aria-label").replace(":", " ").split()[0]: svg.inner_html() for svg in board.locator("svg").all()}


def test_each_knob_by_keyboard_runs_it_again_and_keeps_the_run_before(desk, board):
    page = desk.page
    board.scroll_into_view_if_needed()
    page.get_by_role("slider", name="slots per layer").focus()
    order = [page.evaluate("() => document.activeElement.labels[0].innerText")]
    for _ in range(len(KNOBS) - 1):                                             # every knob is reached by Tab
        page.keyboard.press("Tab")
        order.append(page.evaluate("() => document.activeElement.labels[0].innerText"))
    assert sorted(order) == sorted(KNOBS)
    for name, (key, rows, picture) in KNOBS.items():
        board.get_by_role("slider", name=name).focus()
        before, pictures, text = columns(board), drawn(board), board.locator(".wb-below").inner_html()
        page.keyboard.press(key)
        page.wait_for_function("([e, old]) => e.innerHTML !== old", arg=[board.locator(".wb-below").element_handle(), text])
        after = columns(board)
        assert after[0] == before[1], name                                      # B became A
        assert any(after[1][n] != after[0][n] for n in after[0] if n.startswith(tuple(rows))), name
        assert not picture or drawn(board)[picture] != pictures[picture], name
        assert page.evaluate("() => document.activeElement.labels[0].innerText") == name      # the focus stayed
    assert columns(board)[0] != columns(board)[1]


def test_the_pictures_say_what_they_show(board):
    said = [svg.get_attribute("aria-label") for svg in board.get_by_role("img").all()]
    assert [next(p for p in PARTS if s.startswith(p)) for s in said] == list(PARTS)
    a, b = columns(board)
    times = re.findall(r"[AB]: compute", said[0])
    assert len(times) == 2 and board.get_by_role("img").first.locator("text", has_text=f"A {a['ms per token, one stream']} ms").count() == 1
    rates = {n: float(v) for n, v in re.findall(r"(\w+) ([\d.]+)%", said[1])}
    assert set(rates) == {"lru", "lfu", "belady", "now"} and rates["now"] == float(b["hit rate"].rstrip("%"))
    assert rates["belady"] == max(rates[p] for p in ("lru", "lfu", "belady"))


def test_light_and_dark(desk, board, axe_script, artifacts):
    for theme in ("Light", "Dark"):
        desk.theme(theme)
        board.screenshot(path=artifacts / f"dashboard-{theme.lower()}.png")
        assert desk.axe(axe_script, "color-contrast") == []
