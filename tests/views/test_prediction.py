"""Pictures of forecasts: what they say in words, misses that are named with their cause, and what cannot be drawn."""

import dataclasses

import numpy as np
import pytest

from tests.expertflow.recorded import made
from workbench import views, widgets
from workbench.errors import ParameterError
from workbench.expertflow.calibration import Row, calibrate, report
from workbench.expertflow.observe import Seen
from workbench.expertflow.predictors import Frequency, GateAhead, Oracle
from workbench.expertflow.scoring import curve, evaluate, top
from workbench.views.prediction import CAUSES


def test_curves_say_recall_at_k_and_at_twice_k():
    run = made()
    picture = views.recall_picture({"gate <b>": curve(GateAhead(1), run), "oracle": curve(Oracle(), run)}, 2, "caption", nbytes=1024)
    assert "oracle: 100.0% with 2, 100.0% with 4" in picture.alt and "<b>" not in picture.html().split("src=")[0].replace("&lt;b&gt;", "")
    assert picture.png == views.recall_picture({"gate <b>": curve(GateAhead(1), run), "oracle": curve(Oracle(), run)}, 2, "caption", nbytes=1024).png
    assert views.recall_picture({"all": curve(Oracle(), made(n_expert=3))}, 2, "c").alt.count("with") == 1        # there is no 2k
    with pytest.raises(ParameterError):
        views.recall_picture({}, 2, "c")


def test_layers_on_which_nothing_is_said_stay_empty():
    run = made()
    picture = views.layer_picture({"gate": evaluate(GateAhead(2), run, top(2))}, "c", layers=range(3))
    assert "gate: –, –, " in picture.alt and "nan" not in picture.alt
    rows = report(Oracle(), run, calibrate(Oracle(), run), "layer")
    assert "layer 0 100.0%" in views.group_picture({"oracle": rows}, "c").alt
    assert "layer 0 2.0" in views.group_picture({"oracle": rows}, "c", "fetched").alt
    assert isinstance(rows[0], Row)


def test_a_miss_is_named_with_its_place_and_distance():
    run = made(3, layers=(0,), n_expert=4, k=2, length=3)
    run = Seen(dataclasses.replace(run.routes, experts=np.array([[[0, 1], [3, 0], [2, 3]]], np.uint8)), run.states, run.inputs, run.gates)
    fixed = Frequency(np.array([[0.8, 0.4, 0.2, 0.1]]))
    steps = views.forecast_steps(fixed, run, top(2), 0, range(3), ["a", "b\n", "<c>"])
    causes = [s["cause"] for s in steps["steps"]]
    assert causes == ["all found", "one missed", "several missed"] and set(causes) == set(CAUSES)
    one, two, three = steps["steps"]
    assert one["sentence"] == "‘a’: all 2 experts that the router takes were fetched." and not one["change"]
    assert "expert 3 was not fetched. In the forecast it had place 4 of 4, 1.39 below" in two["sentence"] and "1 fetched in vain" in two["sentence"]
    assert "experts 2 and 3 were not fetched; in the forecast the best of them had place 3 of 4; 2 fetched in vain" in three["sentence"]
    assert {(m[0], m[1]) for m in two["marks"]} == {(0, "●"), (3, "✗"), (1, "○")}
    stored = widgets.Stepper(steps, "c").stored_html()
    assert "<c>" not in stored and "&lt;c&gt;" in stored


def test_events_over_batches():
    events = [("batch", i, "cold" if i < 4 or i >= 20 else "warm", 0.9, 3.0, 0.9, 2) for i in range(30)]
    events[5:5] = [("warm", 3, 40)]
    events[22:22] = [("drift", 19, "down", 17)]
    picture = views.online_picture(events, "c", target=0.95, smooth=4, marks={18: "new text <i>"})
    assert "30 batches; cold starts end at batch 3; drift is found at batch 19" in picture.alt
    with pytest.raises(ParameterError, match="3 batches"):
        views.online_picture(events[:3], "c", target=0.95)
    assert "none" in views.online_picture(events[6:20], "c", target=0.95).alt
