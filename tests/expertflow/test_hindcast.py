"""Hindcast and regimes: fitted rows are exact, nothing else is; limits of the phase diagram are where arithmetic puts them."""

from dataclasses import replace

import pytest

from workbench.expertflow.hindcast import MIXTRAL_OFFLOADING, PR_15346, hindcast
from workbench.expertflow.regimes import SCHEMES, diagram, step_times
from workbench.expertflow.timing import costs

ROWS = hindcast()


def test_only_fitted_rows_are_exact():
    fitted = [r for r in ROWS if r.note.startswith("fitted")]
    assert all(abs(r.error) < 1e-9 for r in fitted)
    assert all(abs(r.error) > 1e-6 for r in ROWS if r not in fitted)
    assert len(fitted) == 2 + 1 + len(MIXTRAL_OFFLOADING["2-bit"])               # two constants, or a link per card and one more


def test_every_published_figure_stands_there_with_its_error():
    assert sum(r.source.startswith("llama.cpp") for r in ROWS) == 2 * len(PR_15346)
    assert sum(r.source.startswith("Mixtral") for r in ROWS) == 2 * 4 * 4
    misprint = [r for r in ROWS if r.published == 1.791]
    assert len(misprint) == 1 and misprint[0].error < -0.5                       # shown, not mended
    assert max(abs(r.error) for r in ROWS) > 0.5                                 # and what does not carry over is not hidden


def test_published_figures_are_those_of_the_sources():
    """Typed twice: here are sums of the columns."""
    assert sum(b for b, _ in PR_15346.values()) == pytest.approx(3525.27) and sum(a for _, a in PR_15346.values()) == pytest.approx(4529.01)
    assert [sum(row[i] for row in MIXTRAL_OFFLOADING["2-bit"].values()) for i in range(4)] == pytest.approx([10.086, 8.763, 6.738, 4.031])


C = costs("Mixtral-8x7B", kind="q4_0")
ALL = C.shape.n_moe * 8 * C.expert_bytes


def test_what_must_hold_anywhere():
    for p in diagram(C, (1, 8, 64), (8, 25, 60), (20, 60, 200), ALL // 2, lambda n: 0.5):
        assert set(p.times) == set(SCHEMES) and p.times["resident"] is None      # half of it does not fit
        assert p.times["cache"] <= p.times["used experts"]
    full = step_times(C, 4, ALL, 1.0)
    assert full["resident"] <= min(t for t in full.values())


def test_who_wins_at_the_ends():
    def winner(batch, link, memory, hits):
        [p] = diagram(C, (batch,), (link,), (memory,), ALL // 2, lambda n: hits)
        return p.winner

    assert winner(1, 8, 200, 0.5) == "host"                                      # a slow link and fast host memory
    assert winner(1, 60, 10, 0.9) == "cache"
    assert winner(512, 60, 20, 0.5) == "cache"                                   # many tokens pay for their loads
    tiny = step_times(C, 1, 10 * C.expert_bytes, 0.0)
    assert tiny["cache"] is None                                                 # not even a token's experts of each layer fit


def test_a_faster_link_never_hurts():
    for n in (1, 16, 256):
        slow, fast = (step_times(replace(C, device=replace(C.device, link=link)), n, ALL // 2, 0.5) for link in (10, 40))
        assert all(fast[s] <= slow[s] for s in SCHEMES if fast[s] is not None)
