"""Curves over steps, and the widget that shows one after another."""

import pytest

from workbench.views import curves_picture, table
from workbench.widgets import Live


@pytest.mark.parametrize("runs", [[[2.0, 1.0, 0.5]], [[2.0, 1.0, 0.5], [3.0, 1.5, 0.1]], [[1.0]]])
@pytest.mark.parametrize("log", [True, False])
def test_curves_of_any_number_of_runs(runs, log):
    one = curves_picture({"a": {"first": runs, "second": runs}, "b": {"third": runs}}, "It falls.", "Two panels of curves.", every=10, log=log)
    again = curves_picture({"a": {"first": runs, "second": runs}, "b": {"third": runs}}, "It falls.", "Two panels of curves.", every=10, log=log)
    assert one.png == again.png and one.caption == "It falls." and one.alt == "Two panels of curves."


def test_a_live_place_shows_what_was_drawn_last():
    live = Live("Nothing <yet>.")
    assert live.below == "<p>Nothing &lt;yet&gt;.</p>" and repr(live) == "Nothing <yet>."
    seen = []
    live.observe(lambda change: seen.append(change["new"]), names=["below"])
    for step in (1, 2):
        live.draw(table(["step"], [(step,)], "Drawn while code runs."))
    assert len(seen) == 2 and live.stored_html() == seen[-1] and "2" in live.stored_text()
    live.close()
