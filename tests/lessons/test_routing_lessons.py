"""Lessons 15 and 16: their state against other judges, printed numbers away from rounding edges, views that say what happened."""

import json
import threading
import time

import numpy as np
import pytest

from workbench import models, moe, paths, views
from workbench.errors import ShapeError
from workbench.lessons import open_lesson

MIXTRAL = moe.presets.mixtral(8, 2)
ROUNDING = 2e-5                                                    # what another order of summation changes at most, ten times over


@pytest.fixture(scope="module")
def state():
    return open_lesson("16").state


@pytest.fixture(scope="module")
def dense():
    return open_lesson("15").state


def test_shipped_nodes_are_those_that_llama_cpp_built(dense):
    file = paths.PACKAGE.parent / "tests/data/goldens/graphs/tiny-mixtral-f16.decode.fa-off.json"
    nodes = [n for n in json.loads(file.read_text("utf-8"))["nodes"]
             if n["name"].endswith("-2") and ("moe" in n["name"] or "l_out" in n["name"])]
    assert dense.llama_cpp == [{"name": n["name"], "op": n.get("desc") or n["op"], "ne": n["ne"][:2], "sources": [s[1] for s in n["src"]]}
                               for n in nodes]


def test_a_layer_alone_is_the_layer_of_the_whole_model(state):
    tokens = state.text()
    with models.Session(state.model, recording=True) as session:
        session.decode(tokens)
        routes = session.routes
    for layer in range(6):
        run = state.layer(layer, MIXTRAL)
        np.testing.assert_array_equal(run.experts, routes.experts[layer])
        np.testing.assert_allclose(run.weights, routes.weights[layer], atol=1e-6)


def test_a_dense_layer_is_its_definition(dense):
    rows = dense.hidden[3][:6]
    run, experts = dense.layer(3, rows=rows), dense.model.experts(3)
    gate, up, down = (t.numpy().astype(np.float64) for t in (experts.gate, experts.up, experts.down))
    logits = rows.astype(np.float64) @ dense.model.weight("ffn_gate_inp", 3).numpy().T
    probs = np.array([moe.reference.softmax(z) for z in logits])
    expected = moe.reference.moe(rows, np.tile(np.arange(8), (6, 1)), probs, gate, up, down)
    np.testing.assert_allclose(run.probs, probs, atol=1e-6)
    np.testing.assert_allclose(run.out, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(run.results.sum(1), run.out, rtol=1e-4, atol=1e-5)


def test_temperature_divides_the_logits(dense):
    cold, warm = dense.layer(5, temperature=0.5), dense.layer(5)
    squared = warm.probs**2
    np.testing.assert_allclose(cold.probs, squared / squared.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)


def test_the_loss_is_that_of_a_session(state):
    tokens = state.text(192)
    with models.Session(state.model) as session:
        logits = np.array([session.decode([t]) for t in tokens[:-1]], np.float64)
    logits -= logits.max(-1, keepdims=True)
    nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(191), tokens[1:]]
    assert state.loss(2) == pytest.approx(nats.mean(), abs=1e-4)


def test_rows_by_expert_are_all_rows_once(state):
    ids = state.layer(0, MIXTRAL).experts
    queues = state.rows_by_expert(ids)
    assert sorted(np.concatenate(queues).tolist()) == list(range(ids.size))
    assert all((ids.ravel()[q] == e).all() and (np.diff(q) > 0).all() for e, q in enumerate(queues))


# ---- printed numbers

def test_printed_routes_do_not_hang_on_the_last_bits(state):
    for layer in range(6):
        best = -np.sort(-state.layer(layer, MIXTRAL).probs, axis=1)[:, :4]
        assert (best[:, :3] - best[:, 1:]).min() > ROUNDING


def away_from_edges(values, decimals):
    scaled = np.abs(np.asarray(values, float).ravel()) * 10**decimals
    return float(np.abs(scaled % 1 - 0.5).min()) / 10**decimals


def test_printed_numbers_are_away_from_rounding_edges(state, dense):
    probs = dense.layer(5).probs
    assert away_from_edges(probs[3:13], 2) > ROUNDING              # percents in the picture
    assert away_from_edges(probs[8], 3) > ROUNDING                 # the stepper, and the table of lesson 16
    assert away_from_edges(np.cumsum(probs[8])[[0, 2]], 3) > ROUNDING   # of the steps that are stored
    for k in (1, 2, 4, 8):
        assert away_from_edges(state.loss(k), 2) > 1e-4
    assert away_from_edges(state.loss(2, normalise=False), 2) > 1e-4
    for temperature in (0.25, 1.0):                                # what the stored knobs show
        run = dense.layer(5, temperature=temperature)
        entropy = -(run.probs * np.log2(np.maximum(run.probs, 1e-30))).sum(-1).mean()
        assert away_from_edges([entropy, run.probs.max(-1).mean(), *run.probs[8]], 2) > ROUNDING
    weights = state.layer(5, MIXTRAL).weights
    assert away_from_edges(weights[3:9], 4) > 1e-6 and away_from_edges(weights[8], 3) > ROUNDING
    for router in (moe.presets.switch(8, None), moe.presets.olmoe(8, 2), moe.presets.deepseek_v2(8, 2, 4, 2)):
        sums = state.layer(5, router).weights.sum(-1)
        assert away_from_edges([sums.min(), sums.max()], 2) > ROUNDING / 2
    assert away_from_edges([state.trace.distinct(n).mean() for n in (2, 4, 8, 16, 64)], 1) > 1e-9


# ---- knobs

def test_layers_are_computed_within_a_tenth_of_a_second_and_on_any_thread(state):
    routers = [moe.Router(8, k, normalise=False, capacity_factor=f) for k in (1, 4) for f in (None, 1.0)]
    wanted = [state.layer(5, r).out for r in routers]
    fastest = min(_seconds(lambda: state.layer(5, routers[3])) for _ in range(10))
    assert fastest < 0.1
    got = {}
    threads = [threading.Thread(target=lambda i=i, r=r: got.update({i: state.layer(5, r).out})) for i, r in enumerate(routers * 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(np.array_equal(got[i], wanted[i % 4]) for i in range(8))


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# ---- views

def test_a_picture_of_tokens_names_every_expert():
    words = ["<s>", " The", "\n", "$x_1$", "床", "a" * 120, "\x00"]
    shown = views.token_picture(words, [0, 9, 3, 1, 2, 7, 4], "Caption.", "Title")
    assert shown.alt.startswith("Title. ‘<s>’ 0; ‘ The’ 9; ") and "\\x00" in shown.alt and shown.png[:4] == b"\x89PNG"
    assert views.token_picture([], [], "Nothing.").png and len(shown.png) < 30_000
    with pytest.raises(ValueError):
        views.token_picture(["a", "b"], [1], "c")


def test_a_picture_of_probabilities_frames_the_chosen():
    probs = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    shown = views.router_picture(["a", "b"], probs, [[0, 1], [2, 0]], "Caption.")
    assert "‘a’ chose 0 (70%), 1 (20%); ‘b’ chose 2 (80%), 0 (10%)" in shown.alt
    with pytest.raises(ShapeError):
        views.router_picture(["a"], probs, [[0], [1]], "c")


def test_loads_are_multiples_of_the_fair_share():
    assert "layer 3: expert 1 300%" in views.load_picture(np.array([[0, 6, 0], [2, 2, 2]]), [3, 4], "Caption.").alt
    rows = views.load_table([4, 0, 8], [0, 0, 2], 8, "Caption.").rows
    assert [r[:3] for r in rows] == [["0", "4", "0"], ["1", "0", "0"], ["2", "8", "2"]]
    assert rows[0][3] == "████" and rows[2][3] == "████████▏░░" and views.load_table([0], caption="c").rows[0][3] == ""
    both = views.load_table([4, 1], [0, 3], 4, "c", before=[2, 2])
    assert both.columns[1:3] == ["A: taken, last run", "B: taken"] and [r[:4] for r in both.rows] == [["0", "2", "4", "0"], ["1", "2", "1", "3"]]
    assert len(views.load_table([100_000, 1]).rows[0][3]) == 40


def test_steps_through_queues_tell_who_is_dropped_and_why():
    experts, kept = np.array([[1, 0], [1, 2], [1, 0]]), np.array([[1, 1], [1, 1], [0, 0]])
    trace = views.queue_steps(["a", "b\n", "c"], experts, kept, 3, capacity=2)
    assert [s["cause"] for s in trace["steps"]] == ["room", "room", "full", "room", "room", "full"]
    assert "expert 1, whose 2 places are taken" in trace["steps"][2]["sentence"] and trace["steps"][1]["label"] == "b⏎"
    assert trace["steps"][-1]["table"] == [["0", "1", ""], ["1", "2", "full"], ["2", "1", ""]]
    free = views.queue_steps(["a", "b", "c"], experts, np.ones((3, 2)), 3)
    assert [s["cause"] for s in free["steps"]] == ["first", "no limit", "no limit", "first", "first", "no limit"]
    assert [s["change"] for s in free["steps"]] == [True, False, False, True, True, False]


def test_steps_through_a_sum_end_at_the_result():
    results, weights = np.array([[3.0, 0], [0, 4.0]]), [0.25, 0.75]
    steps = views.sum_steps(results, weights)["steps"]
    assert steps[0]["table"] == [["weight so far", "0.2500"], ["distance to the result", "80.0%"]]
    assert steps[1]["table"][1] == ["distance to the result", "0.0%"] and [s["change"] for s in steps] == [False, True]
    assert "counts for 75.0%. Now 100.0%" in steps[1]["sentence"]
