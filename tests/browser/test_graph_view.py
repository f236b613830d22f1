"""The graph view and the steppers in a real JupyterLab, with both models; and on a page without Jupyter."""

import json

import pytest

from tests.views.graphs import HOSTILE, MODELS, mlp, model_step
from workbench.cgraph import build
from workbench.views.steps import state
from workbench.widgets import GraphView, step_expand, step_memory

pytestmark = pytest.mark.browser
BUDGET_MS = 100
SETUP = """from workbench import models
from workbench.devices import CpuBackend
from workbench.execution import GraphRunner
from workbench.widgets import GraphView, step_expand, step_memory, step_plan

def step_of(name, n_tokens):
    model, runner = models.load(name), GraphRunner(CpuBackend(n_threads=4))
    cache = models.KVCache(model.hparams, 256, runner.backend.buffer_type)
    return models.build_step(model, cache, n_tokens, 256, n_tokens), runner
mixtral, runner = step_of("tiny-mixtral-f16", 256)"""
CELLS = [SETUP, 'GraphView(mixtral, title="Mixtral")', 'GraphView(step_of("tiny-deepseek-f16", 1)[0], title="DeepSeek", colour="bytes")',
         'layer = mixtral.graph.find("ffn_moe_out-0")\nstep_expand(layer)', "step_memory(mixtral)", "step_plan(runner.prepare(mixtral.graph))"]
ARMED = """sel => { const e = document.querySelectorAll(sel); const one = e[window.which]; one.focus(); window.took = [];
  window.armed?.abort(); window.armed = new AbortController();
  window.addEventListener('keydown', () => { const t = performance.now(); requestAnimationFrame(() => { const c = new MessageChannel();
    c.port1.onmessage = () => window.took.push(performance.now() - t); c.port2.postMessage(0); }); }, {capture: true, signal: window.armed.signal}); }"""


def notebook(cells):
    meta = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    code = [{"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "execution_count": None, "source": c} for i, c in enumerate(cells)]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": meta, "cells": code})


@pytest.fixture
def opened(desk):
    (desk.lab.folder / "views.ipynb").write_text(notebook(CELLS), "utf-8")
    desk.lesson("views.ipynb").wait_for_selector(".wb-canvas >> nth=1")
    return desk


def redraw_ms(page, selector, which, keys):
    """From key press to the task after the next frame, for each key; the focus is in the widget."""
    page.evaluate(f"() => {{ window.which = {which} }}")
    page.locator(selector).nth(which).scroll_into_view_if_needed()
    page.evaluate(ARMED, selector)
    for key in keys:
        page.keyboard.press(key)
        page.wait_for_timeout(30)
    page.wait_for_function("n => window.took.length >= n", arg=len(keys))
    return sorted(page.evaluate("() => window.took"))


def quick_p95(page, selector, which, keys, rounds=4):
    """The 95th percentile of a round of keys. Other work on the machine disturbs a round, so a slow one is tried again."""
    best = float("inf")
    for _ in range(rounds):
        ms = redraw_ms(page, selector, which, keys)
        best = min(best, round(ms[int(0.95 * (len(ms) - 1))], 1))
        if best < BUDGET_MS:
            break
    return best


def test_in_jupyterlab(opened, axe_script, artifacts):
    page = opened
    walk = ["ArrowRight"] * 20 + ["ArrowDown"] * 10 + ["ArrowUp"] * 5 + ["+", "-", "+"] + ["End", "Home"]
    steps = ["ArrowRight"] * 20 + ["n"] * 10 + ["ArrowLeft"] * 5 + ["Space", "End", "p", "Home"]
    p95 = {f"{what} {i}": quick_p95(page.page, selector, i, keys) for what, selector, n, keys in
           (("graph", ".wb-canvas", 2, walk), ("stepper", ".wb-bar", 3, steps)) for i in range(n)}  # fmt: skip
    (artifacts / "redraw.json").write_text(json.dumps({"p95_ms": p95}), "utf-8")
    print("redraw p95 in ms:", p95)
    page.page.evaluate("() => document.querySelectorAll('.wb-bar').forEach(b => { for (let i = 0; i < 40; i++) b.children[2].click(); })")
    assert page.both_themes(axe_script, artifacts / "views") == {}
    assert max(p95.values()) < BUDGET_MS


def test_what_is_chosen_reaches_python_and_back(opened):
    page = opened.page
    page.locator(".wb-canvas").first.focus()
    for key in ("Home", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    say = page.locator(".wb-graph .wb-say").first
    assert "norm-0 = RMS_NORM" in say.inner_text() and "after its source node 0" in say.inner_text()
    assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "The chosen tensor"


def test_fold_search_and_links_without_a_kernel(static):
    view = static(GraphView(model_step(MODELS[0])))
    page = view.page
    boxes = page.locator(".wb-box")
    before = boxes.count()
    page.get_by_role("button", name="open all layers").click()
    assert boxes.count() == len(model_step(MODELS[0]).graph.nodes)  # every node has its box
    page.get_by_role("button", name="fold all layers").click()
    assert page.locator(".wb-folded").count() == 6 and boxes.count() < before
    page.locator(".wb-canvas").focus()
    for key in ("Home", "ArrowDown", "Enter"):                       # from the embedding into the folded layer, which opens
        page.keyboard.press(key)
    assert page.locator(".wb-folded").count() == 5
    page.keyboard.press("/")
    page.keyboard.type("mul_mat_id layer 3")
    assert page.locator(".wb-list tbody tr:not([hidden])").count() == 3
    page.keyboard.press("Enter")
    assert "ffn_moe_gate-3" in page.locator(".wb-say").inner_text()
    page.locator(".wb-inspector button", has_text="blk.3.ffn_gate_exps.weight").click()
    assert page.locator(".wb-inspector caption").inner_text().endswith("blk.3.ffn_gate_exps.weight")
    assert "first met as source 0" in page.locator(".wb-say").inner_text()
    assert view.errors == [] and view.others == []


def test_names_are_text(static):
    view = static(GraphView([mlp(HOSTILE)]))
    view.page.locator(".wb-canvas").focus()
    for _ in range(9):
        view.page.keyboard.press("ArrowRight")
    assert view.page.locator("img").count() == 0 and view.errors == []
    assert "<img src=x" in view.page.locator(".wb-list").inner_text()


@pytest.mark.parametrize("widget", [lambda: step_expand(mlp()), lambda: step_memory(build(mlp()))], ids=["expand", "memory"])
def test_steps_without_a_kernel(static, widget):
    """Every state is the one that Python computes, and back is the inverse of forward: the page is the same."""
    made = widget()
    view, n = static(made), len(made.trace["steps"])
    page = view.page
    page.locator(".wb-bar").focus()
    seen = []
    for k in range(n):
        found = page.evaluate("async k => { const m = await import(window.code); return m.stateAt(model.get('trace'), k); }", k)
        assert found == json.loads(json.dumps(state(made.trace, k)))
        seen.append(page.locator(".wb-two").inner_html())
        page.keyboard.press("ArrowRight")
    for wanted in reversed(seen[:-1]):
        page.keyboard.press("ArrowLeft")
        assert page.locator(".wb-two").inner_html() == wanted
    page.keyboard.press("End")
    assert page.locator(".wb-two").inner_html() == seen[-1] and view.errors == []
