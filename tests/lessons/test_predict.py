"""Predict, reveal, check: the learner's answer is kept, compared with the computed value, and every outcome says what to do."""

import numpy as np
import pytest

from workbench.errors import ParameterError
from workbench.lessons import open_lesson
from workbench.lessons.lesson import Lesson

CONTENT = {
    "title": "A test",
    "predict": {
        "nodes": {"ask": "How many?", "because": "It is {computed}, by the formula {formula}.", "options": [
            {"text": "six", "value": 6, "misconception": "a layer is a node", "why": "A layer has many."},
            {"text": "318", "value": 318, "why": ""}]},
        "who": {"ask": "Who?", "because": "A node.", "options": [{"text": "a node", "value": "NODE", "why": ""}, {"text": "luck", "value": "LUCK", "why": "No."}]},
        "bytes": {"ask": "Bytes?", "because": "So."},
    },
    "check": {"double": {"task": "Double it.", "hint": "times two", "next": "now halve it"}},
}


@pytest.fixture
def lesson():
    return Lesson("99", CONTENT)


def test_no_prediction_is_said_kindly_with_the_same_numbers(lesson):
    lesson.predict("nodes")
    card = lesson.reveal("nodes", 318, formula=318)
    assert card.tone == "open" and "No prediction recorded" in card.title
    assert "computed: 318" in repr(card) and "by the formula 318" in repr(card)
    lesson.asked.clear()                                      # not even asked: the same
    assert repr(lesson.reveal("nodes", 318, formula=318)) == repr(card)


def test_right_and_wrong_answers(lesson):
    lesson.predict("nodes", "b")
    assert lesson.reveal("nodes", 318, formula=1).passed
    lesson.predict("nodes", "a")
    card = lesson.reveal("nodes", 318, formula=1)
    assert not card.passed
    assert "you said: six" in repr(card) and "yours / computed = 0.0189" in repr(card)
    assert "“a layer is a node”: A layer has many." in repr(card)


def test_the_code_decides_which_option_is_right(lesson):
    lesson.predict("nodes", "a")
    assert lesson.reveal("nodes", 6, formula=1).passed        # had the program counted six, "six" would be right
    lesson.predict("who", "a")
    assert lesson.reveal("who", "NODE").passed
    assert not lesson.reveal("who", "LUCK").passed


def test_an_answer_given_in_the_page_survives_running_the_cell_again(lesson):
    lesson.predict("nodes").answer = "a"                      # what a click does
    again = lesson.predict("nodes")
    assert again.answer == "a" and lesson.reveal("nodes", 318, formula=1).tone == "wrong"


@pytest.mark.parametrize("answer, tone", [("1000", "right"), ("1,040", "right"), ("2000", "wrong"), ("many", "wrong"), ("", "open")])
def test_numbers_are_compared_by_ratio(lesson, answer, tone):
    lesson.predict("bytes", answer)
    assert lesson.reveal("bytes", 1000).tone == tone


def test_unknown_names_and_keys_are_refused(lesson):
    with pytest.raises(ParameterError, match="one of nodes"):
        lesson.predict("nods")
    with pytest.raises(ParameterError, match="one of a, b"):
        lesson.predict("nodes", "z")
    with pytest.raises(ParameterError, match="en/00"):
        open_lesson("77")
    with pytest.raises(ParameterError):
        open_lesson("../../x")


def check(lesson, yours, on=((1,), (2,), (5,))):
    return lesson.check("double", yours, [2 * args[0] for args in on], list(on))


def test_check_names_the_first_difference(lesson):
    def sometimes(x):
        return 2 * x if x < 5 else x

    assert check(lesson, lambda x: 2 * x).passed
    card = check(lesson, sometimes)
    assert card.tone == "wrong" and "step 3 of 3" in card.title
    assert "step: 5" in repr(card) and "yours: 5" in repr(card) and "expected: 10" in repr(card) and "hint: times two" in repr(card)


def test_check_of_a_stub_of_a_crash_and_of_a_wrong_length(lesson):
    def stub(x):
        raise NotImplementedError

    assert check(lesson, stub).tone == "open" and "Double it." in repr(check(lesson, stub))
    assert check(lesson, lambda x: None).tone == "open" and check(lesson, lambda x: ...).tone == "open"
    crash = check(lesson, lambda x: 1 / 0)
    assert crash.tone == "wrong" and "ZeroDivisionError" in repr(crash)
    assert "2 values, expected 3" in lesson.check("double", [2, 4], [2, 4, 10]).title
    assert lesson.check("double", [2, 4, 10, 12], [2, 4, 10]).tone == "wrong"


def test_a_hint_comes_with_the_first_wrong_answer_not_before(lesson):
    assert "times two" not in repr(check(lesson, lambda x: None)) and "times two" in repr(check(lesson, lambda x: x))


def test_what_is_no_function_or_has_odd_parts_gets_a_card_not_a_traceback(lesson):
    assert "A function is wanted here, not 2" in check(lesson, 2).title
    ragged = [np.array([1, 2]), np.array([0.5])]
    assert lesson.check("double", [ragged], [([1, 2], [0.5])]).passed
    assert not lesson.check("double", [ragged], [([1, 2], [0.5, 0.5])]).passed
    assert not lesson.check("double", [[np.array([1, 2]), "x"]], [[[1, 2], [3]]]).passed
    assert not lesson.check("double", [{1: 2}], [2]).passed and not lesson.check("double", [object()], [2]).passed


def test_yours_and_expected_are_printed_alike(lesson):
    card = repr(lesson.check("double", [81920.0, 2], [122880, 2]))
    assert "yours: 81,920\n" in card and "expected: 122,880\n" in card
    assert "yours: 0.50001\n" in repr(lesson.check("double", np.array([0.50001]), [0.5]))


def test_check_compares_arrays_and_refuses_look_alikes(lesson):
    assert lesson.check("double", np.array([2.0, 4.0]), [2, 4]).passed
    assert not lesson.check("double", ["2"], [2]).passed
    assert not lesson.check("double", [float("nan")], [2.0]).passed
    assert not lesson.check("double", [[2, 4, 6]], [[2, 4]]).passed
    assert not lesson.check("double", [True], [1]).passed


def test_text_of_learners_is_shown_as_text(lesson):
    card = check(lesson, lambda x: "<i>\x07")
    assert "<i>" not in card.html() and "&lt;i&gt;\\x07" in card.html()
