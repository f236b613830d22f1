"""Hindcast and regimes: fitted rows are exact, nothing else is; limits of the phase diagram are where arithmetic puts them."""

from dataclasses import replace

import numpy as np
import pytest

from workbench.expertflow.costs import costs
from workbench.expertflow.hindcast import MIXTRAL_OFFLOADING, PR_15346, QWEN_35B_RUNS, hindcast
from workbench.expertflow.regimes import SCHEMES, Rates, diagram, measured, step_times
from workbench.moe import RouteTrace
from workbench.moe.configs import expected_distinct

ROWS = hindcast()


def test_only_fitted_rows_are_exact():
    fitted = [r for r in ROWS if r.note.startswith("fitted")]
    assert all(abs(r.error) < 1e-9 for r in fitted)
    assert all(abs(r.error) > 1e-6 for r in ROWS if r not in fitted)
    assert len(fitted) == 2 + 1 + len(MIXTRAL_OFFLOADING["2-bit"]) + 2           # two constants, or a link per card and one more


def test_every_published_figure_stands_there_with_its_error():
    assert sum(r.source.startswith("llama.cpp") for r in ROWS) == 2 * len(PR_15346)
    assert sum(r.source.startswith("Mixtral") for r in ROWS) == 2 * 4 * 4
    misprint = [r for r in ROWS if r.published == 1.791]
    assert len(misprint) == 1 and misprint[0].error < -0.5                       # shown, not mended
    assert max(abs(r.error) for r in ROWS) > 0.5                                 # and what does not carry over is not hidden


def test_expertflows_own_figures():
    """Perfect forecasts are above what it measured with real ones; its gain over LRU is not found where misses wait for the link."""
    hits = {r.what.split(",")[0]: [x for x in ROWS if x.source.endswith("figure 10") and x.what.split(",")[0] == r.what.split(",")[0]]
            for r in ROWS if r.source.endswith("figure 10")}  # fmt: skip
    assert {name: len(rows) for name, rows in hits.items()} == {"LRU": 3, "PLEC": 3}
    assert all(p.published < p.ours <= 100 and p.ours > lru.ours for p, lru in zip(hits["PLEC"], hits["LRU"], strict=True))
    gains = [r for r in ROWS if r.source.endswith("throughput")]
    assert [r.published for r in gains] == [1.99, 1.94] and all(0.9 < r.ours < 1.5 for r in gains)
    assert all(float(r.note.rsplit(" ", 1)[1].rstrip("x")) > r.published for r in gains)        # with misses on the host it is


def test_published_figures_are_those_of_the_sources():
    """Typed twice: here are sums of the columns."""
    assert sum(b for b, _ in PR_15346.values()) == pytest.approx(3525.27) and sum(a for _, a in PR_15346.values()) == pytest.approx(4529.01)
    assert [sum(row[i] for row in MIXTRAL_OFFLOADING["2-bit"].values()) for i in range(4)] == pytest.approx([10.086, 8.763, 6.738, 4.031])


def test_the_study_in_which_forecasts_did_not_pay():
    """Bytes explain its first series within 2 %, and not what the second one loses besides."""
    rows = {r.what: r for r in ROWS if r.unit == "s"}
    assert rows.keys() == QWEN_35B_RUNS.keys() and abs(rows["demand cache of 2 GB"].error) < 0.02 and 0 < rows["online, native"].error < 0.05
    native, cache, *foretold = (r for r in rows.values() if r.what.startswith("online"))
    assert all(-0.4 < r.error < -0.25 for r in (cache, *foretold))
    assert native.published < cache.published < min(r.published for r in foretold)


C = costs("Mixtral-8x7B", kind="q4_0")
ALL = C.shape.n_moe * 8 * C.expert_bytes


def even(batch, hits=0.5):
    return Rates(expected_distinct(8, 2, batch), hits, hits)


def test_what_must_hold_anywhere():
    for p in diagram(C, (1, 8, 64), (8, 25, 60), (20, 60, 200), ALL // 2, even):
        t = p.times
        assert set(t) == set(SCHEMES) and t["resident"] is t["forecast"] is None     # half of it does not fit; nothing was run
        assert t["cache"] <= t["used experts"] and t["hot"] <= t["host"]
        assert t["shared"] <= t["cache"] * 1.0001                                    # with the same hits: copying all of the misses is one way
    full = step_times(C, 4, ALL, Rates(5.0, 1.0, 1.0))
    assert full["resident"] <= min(t for t in full.values() if t is not None) and full["shared"] is None
    assert [p.winner for p in diagram(C, (1,), (25,), (60,), ALL // 2, even, lambda costs, n: 1e-3)] == ["forecast"]


def test_who_wins_at_the_ends():
    def winner(batch, link, memory, cache, hot):
        [p] = diagram(C, (batch,), (link,), (memory,), ALL // 2, lambda n: Rates(expected_distinct(8, 2, n), cache, hot))
        return p.winner

    assert winner(1, 8, 200, 0.5, 0.5) == "hot"                                  # a slow link and fast host memory
    assert winner(1, 60, 10, 0.9, 0.5) == "cache"
    assert winner(512, 60, 20, 0.5, 0.5) in ("cache", "shared")                  # many tokens pay for their loads
    tiny = step_times(C, 1, 10 * C.expert_bytes, even(1, 0.0))
    assert tiny["cache"] is tiny["hot"] is None                                  # not even a token's experts of each layer fit


def test_a_faster_link_never_hurts_what_does_not_compute_beside_it():
    for n in (1, 16, 256):
        slow, fast = (step_times(replace(C, device=replace(C.device, link=link)), n, ALL // 2, even(n)) for link in (10, 40))
        assert all(fast[s] <= slow[s] for s in SCHEMES if fast[s] is not None and s != "shared")


def test_shared_by_hand():
    """Of three cold experts one is copied and computed, two are computed on the host meanwhile, or any other split that is quicker."""
    c, before, each = C, C.attention(1) + C.ids(1), C.expert(1)
    found = step_times(c, 1, ALL // 2, Rates(4.0, 0.25, 0.25))["shared"]
    ways = [max((1 + n) * each, n * c.load + each, (3 - n) * c.beside_copies(1)) for n in (1, 2, 3)]
    assert found == pytest.approx((c.shape.n_moe * (before + min(ways)) + c.head(1)) / 1e6)


def test_rates_are_counted_in_replays():
    """Four sequences side by side over one layer of 8 with slots for half: by hand from sets."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((1, 80, 8)) - 0.4 * (np.arange(8) < 3), -1)[..., :2].astype(np.int32)
    at = np.arange(80, dtype=np.int32)
    trace = RouteTrace(ids, np.full(ids.shape, np.nan, np.float32), np.array([0]), at * 0, at % 20, at // 20, 8)
    steps = [set(ids[0][at % 20 == p].ravel().tolist()) for p in range(20)]
    hot = set(np.argsort(-trace.counts()[0], kind="stable")[:4].tolist())
    found = measured(trace, trace, 4, 4)
    assert found.used == pytest.approx(sum(map(len, steps)) / 20)
    assert found.hot == pytest.approx(sum(len(s & hot) for s in steps) / sum(map(len, steps)))
    assert 0 < found.cache < 1
