"""The trace: prefixes, round trips, and altered JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import FileFormatError, ParameterError
from workbench.trace import KINDS, WORDS, Trace

values = st.integers(-(2**53), 2**53)


@st.composite
def traces(draw):
    trace = Trace(clock=draw(st.sampled_from(["real", "virtual", "none"])), graph=draw(st.none() | st.just({"nodes": []})))
    for kind in draw(st.lists(st.sampled_from(sorted(KINDS)), max_size=30)):
        fields = {f: draw(st.text(max_size=5)) if f in WORDS else draw(values) for f in KINDS[kind]}
        trace.add(kind, draw(values), draw(values), **fields)
    return trace


@given(traces())
def test_json_round_trip(trace):
    assert Trace.from_json(trace.to_json()) == trace


@given(traces(), st.integers(0, 30))
def test_a_prefix_knows_nothing_of_what_follows(trace, k):
    before = trace[:k]
    events = list(before.events)
    trace.add("compute", 1, 2, node=7)
    assert before.events == events and len(before) == min(k, len(trace) - 1)


def test_unknown_kinds_and_missing_fields_are_refused():
    with pytest.raises(ParameterError, match="one of"):
        Trace().add("teleport", node=1)
    with pytest.raises(ParameterError, match="tensor"):
        Trace().add("copy", tensor=1)


@given(traces(), st.data())
def test_altered_json_is_one_clear_error(trace, data):
    trace.add("assign", stage="1", tensor=0, backend=1, cause="1.dst")
    record = json.loads(trace.to_json())
    key = data.draw(st.sampled_from(["format", "version", "clock", "kinds", "strings", "events", "about"]))
    record[key] = data.draw(st.sampled_from([None, 99, "x", [["x"]], {"a": 1}, [[0, 1.5]]]))
    with pytest.raises(FileFormatError):
        Trace.from_json(json.dumps(record))


def test_text_that_is_not_json_or_nested_too_deep():
    for text in ["", "{", "[" * 100_000, '{"format": "workbench.trace"}']:
        with pytest.raises(FileFormatError):
            Trace.from_json(text)
