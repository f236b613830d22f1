"""The widgets as Python sees them, and their JavaScript compared with Python's where both compute the same."""

import json
import shutil
import subprocess

import pytest

from tests.cgraph.random_graphs import random_graph
from tests.cgraph.test_gradients import network
from tests.views.graphs import HOSTILE, MODELS, mlp, model_step, planned_step
from workbench.cgraph import build
from workbench.errors import ParameterError
from workbench.trace import Trace
from workbench.views.gradient_steps import backward_steps
from workbench.views.graph_layout import stack
from workbench.views.steps import expand_steps, memory_steps, plan_steps, state
from workbench.widgets import GraphView, step_expand, step_memory, step_plan
from workbench.widgets.base import FOLDER


def javascript(files, expression, given):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed: the same is compared in a browser (tests/browser)")
    code = "\n".join((FOLDER / f"{name}.js").read_text("utf-8") for name in files).replace("\nexport default ", "\nvoid ")
    program = f"{code}\nconst given = JSON.parse(require('fs').readFileSync(0, 'utf8'));\nconsole.log(JSON.stringify({expression}));"
    done = subprocess.run([node, "-e", program], input=json.dumps(given), capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_states_in_the_browser_are_those_of_python():
    _, _, plan, runner = planned_step()
    graphs = [random_graph(seed) for seed in range(4)]
    traces = [expand_steps(mlp()), *(expand_steps(g.nodes[-1]) for g in graphs), *(memory_steps(g) for g in graphs), plan_steps(plan),
              backward_steps(build(network()[1]))]
    found = javascript(("common", "graph_scene", "step_pictures"), "given.map(t => t.steps.map((_, k) => stateAt(t, k)))", traces)
    assert found == [[state(t, k) for k in range(len(t["steps"]))] for t in traces]
    runner.close()


def test_blocks_are_stacked_in_the_browser_as_in_python():
    view = GraphView(model_step(MODELS[0]))
    for opened in ([], [1], [1, 4, 6]):
        found = javascript(("common", "graph_scene"), "stack(given.graph, given.opened)", {"graph": view.graph, "opened": opened})
        places, width, height = stack(view.graph["blocks"], opened)
        assert found == {"places": [list(p) for p in places], "width": width, "height": height}


def test_state_of_a_view_is_json_and_small():
    for name in MODELS:
        view = GraphView(model_step(name))
        assert len(json.dumps(view.graph, allow_nan=False)) < 350_000
        assert len(view.stored_html()) < 200_000


def test_choosing():
    step = model_step(MODELS[0])
    view = GraphView(step, colour="bytes")
    assert view.selected is None
    assert view.choose("ffn_moe_logits-0").selected is step.graph.find("ffn_moe_logits-0")
    assert view.choose("node 12").selected is step.graph.nodes[12]
    with pytest.raises(ParameterError, match="no tensor"):
        view.choose("nothing")
    with pytest.raises(ParameterError, match="colour"):
        GraphView(step, colour="taste")


def test_a_trace_with_a_snapshot_can_be_viewed():
    from workbench.cgraph.serial import to_dict

    graph = build(mlp())
    view = GraphView(Trace(graph=to_dict(graph)))
    assert [r["name"] for r in view.graph["data"]["tensors"]] == [t.name for t in (*graph.leafs, *graph.nodes)]


def test_stored_pages_need_no_kernel_and_escape_names():
    y = mlp(HOSTILE)
    for widget in (GraphView([y]), step_expand(y), step_memory([y])):
        data, _ = widget._repr_mimebundle_()
        assert "<img alt=" in data["text/html"] and "<img src=x" not in data["text/html"]
        assert "0x" not in data["text/plain"] and "\x1b" not in data["text/plain"]


def test_ready_steppers():
    _, _, plan, runner = planned_step()
    for widget, n in ((step_expand(mlp()), 19), (step_plan(plan), sum(len(j.parts) for j in plan.jobs))):
        assert len(widget.trace["steps"]) == n
        json.dumps(widget.trace, allow_nan=False)
    runner.close()
