"""Views of routing: what does not fit together is refused, what is empty has a picture all the same."""

import numpy as np
import pytest

from workbench import views
from workbench.errors import ParameterError, ShapeError

WORDS, ONE = ["a", "b"], np.ones((2, 1), int)
WRONG = {
    "words and experts": lambda: views.token_picture(WORDS, [1], ""),
    "a negative expert": lambda: views.token_picture(WORDS, [1, -1], ""),
    "words and rows": lambda: views.router_picture(WORDS, np.ones((3, 4)), ONE, ""),
    "layers and counts": lambda: views.load_picture(np.ones((2, 4)), [0], ""),
    "no experts": lambda: views.load_picture(np.ones((2, 0)), [0, 1], ""),
    "an expert beyond": lambda: views.queue_steps(WORDS, 4 * ONE, ONE, 4),
    "words and choices": lambda: views.queue_steps(["a"], ONE, ONE, 4),
    "choices and kept": lambda: views.queue_steps(WORDS, ONE, np.ones((2, 2)), 4),
    "results and weights": lambda: views.sum_steps(np.ones((2, 3)), [1.0]),
    "no stretch": lambda: views.training_steps(np.ones((3, 4)), 5),
    "groups that do not divide": lambda: views.group_steps(np.arange(7.0), 2, 1, 1, 2),
    "more experts than the groups have": lambda: views.group_steps(np.arange(8.0), 2, 1, 1, 5),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what):
    with pytest.raises((ShapeError, ParameterError)):
        WRONG[what]()


def test_nothing_chosen_is_shown_as_nothing():
    assert "layer 1" in views.load_picture(np.array([[1, 3], [0, 0]]), [0, 1], "").html()
    steps = views.training_steps(np.array([[0, 0], [0, 0], [1, 3]]), 1)["steps"]
    assert [row[1] for row in steps[0]["table"]] == ["0%", "0%"] and [row[1] for row in steps[2]["table"]] == ["25%", "75%"]
    assert views.sum_steps(np.zeros((2, 3)), [0.5, 0.5])["steps"][0]["table"][1] == ["distance to the result", "0.0%"]
    assert views.queue_steps([], np.zeros((0, 2), int), np.zeros((0, 2)), 4)["steps"] == []
