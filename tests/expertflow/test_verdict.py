"""The ExpertFlow line of `fit`: a bound that obeys arithmetic, and a verdict that follows from it."""

import pytest

from tests.models.headers import qwen3
from workbench.errors import ParameterError
from workbench.expertflow.verdict import _recorded, verdict
from workbench.models.fitting import fit

GIB = 2**30


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    return qwen3(tmp_path_factory.mktemp("headers") / "qwen3-30b-a3b-q4_K.gguf")


def test_a_cache_beats_copying_with_even_routes_and_pays_only_where_it_beats_the_host(header):
    for link, ram_speed in ((12.6e9, 58e9), (63e9, 58e9), (25e9, 10e9)):
        found = fit(header, 8 * GIB, 24 * GIB, link, ram_speed=ram_speed)
        said = verdict(found)
        host = max(b.tokens_per_second for b in found.bounds if b.over == "memory of the host")
        copied = min(b.tokens_per_second for b in found.bounds if b.over == "link")
        assert said.bound.tokens_per_second > copied
        assert ("misses cross the link does not pay" in said.sentence) == (said.bound.tokens_per_second <= host)
        assert ("on the host it does not pay" in said.sentence) == (said.hybrid.tokens_per_second <= host)
        assert said.hybrid.nbytes == said.bound.nbytes and (said.hybrid.tokens_per_second > said.bound.tokens_per_second) == (ram_speed > link)
    assert "misses cross the link pays" in verdict(fit(header, 8 * GIB, 24 * GIB, 63e9, ram_speed=5e9)).sentence


def test_more_room_never_hurts(header):
    speeds = [verdict(fit(header, int(gb * GIB), 24 * GIB, 12.6e9)).bound.tokens_per_second for gb in (3, 6, 9, 12)]
    assert speeds == sorted(speeds)


def test_no_room_for_a_tokens_experts_is_said(header):
    said = verdict(fit(header, int(1.6 * GIB), 24 * GIB, 12.6e9))
    assert said.bound is said.hybrid is None and "no room" in said.sentence


def test_nothing_is_said_where_nothing_moves(header):
    assert verdict(fit(header, 40 * GIB, 64 * GIB, 12.6e9)) is None
    assert verdict(fit("tiny-mixtral-f16", GIB, GIB, 12e9)) is None


def test_the_nearest_recorded_router_stands_in():
    assert _recorded(0.5, 2 / 8)[0] in ("tiny-mixtral", "tiny-deepseek") and 0.5 < _recorded(0.5, 0.25)[2] < 1
    with pytest.raises(ParameterError):
        _recorded(0.0, 0.25)
