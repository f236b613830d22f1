"""What is printed of names and paths from strangers."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import ShapeError, WorkbenchError, shown, shown_path


@given(st.text(alphabet=st.characters(codec=None)), st.integers(2, 100))
def test_what_is_shown_is_printable_and_short(text, limit):
    assert shown(text, limit).isprintable() and len(shown(text, limit)) <= limit
    assert shown_path(text, limit).isprintable() and len(shown_path(text, limit)) <= limit


def test_a_long_path_keeps_the_name_of_its_file():
    assert shown_path("/a" * 500 + "/model.gguf").endswith("/model.gguf")
    assert shown_path("model.gguf") == "model.gguf"


@pytest.mark.parametrize("kind", [WorkbenchError, ShapeError])
def test_an_error_says_found_expected_and_try_and_can_be_sent_to_another_process(kind):
    error = kind("3 rows", "4 rows", "add one")
    assert str(error) == "3 rows\n  expected: 4 rows\n  try: add one"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
