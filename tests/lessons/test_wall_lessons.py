"""Lessons 20 and 21: their formulas against what can be known otherwise, and figures that must not hang on the last bits."""

import numpy as np
import pytest

from tests.expertflow.recorded import parts
from workbench.expertflow.network import shipped_predictors
from workbench.expertflow.scoring import evaluate, ranks, top
from workbench.lessons import open_lesson
from workbench.lessons.wall_states import GIB, LINK, MIXTRAL, VRAM_SPEED
from workbench.models.described import DescribedFile


@pytest.fixture(scope="module")
def wall():
    return open_lesson("20").state


@pytest.fixture(scope="module")
def routes():
    return open_lesson("21").state


# ---- lesson 20


def test_the_card_of_the_account_is_that_of_the_times(wall):
    device = wall.costs().device
    assert (device.link * 1e9, device.memory * 1e9) == pytest.approx((LINK, VRAM_SPEED)) and wall.costs("f16").expert_bytes == 2 * 3 * 4096 * 14336
    file = DescribedFile("Mixtral-8x7B", MIXTRAL, "q8_0")
    assert wall.bytes_of("q8_0", "all experts") == 32 * 8 * wall.costs("q8_0").expert_bytes
    assert sum(t.n_elements for t in file.tensors.values()) == wall.mixtral.total


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_times_lie_between_their_bounds(wall, kind):
    """All misses waited for one after another is the worst; the link's own time is the least."""
    for slots in (2, 4, 6):
        ran = wall.run(slots, kind)
        misses = 2 * (1 - ran.hit_rate)
        link = 32 * misses * wall.costs(kind).load / 1e6
        assert max(link, wall.resident(kind)) < ran.per_token <= wall.formula(kind, misses) + 1e-6
        assert ran.per_token > 0.95 * wall.formula(kind, misses)
    times = [wall.run(n, kind).per_token for n in range(2, 9)]
    assert times == sorted(times, reverse=True)


def test_tokens_to_hide_is_the_first_that_hides(wall):
    for kind, card in (("f16", "rtx3090-pcie4"), ("q4_0", "rtx3090-pcie3"), ("q8_0", "a100")):
        c, n = wall.costs(kind, card), wall.tokens_to_hide(kind, card)
        assert c.expert(n) >= c.load > c.expert(n - 1)
    assert wall.tokens_to_hide("q8_0", "a100") > wall.tokens_to_hide("q8_0", "rtx3090-pcie4")     # as a `next` says


def test_experts_met_by_counting(wall):
    r = wall.routes
    first = [len(set(r.experts[0, s * 256 : s * 256 + 4].ravel().tolist())) for s in range(96)]
    one = np.mean([[len(set(layer[s * 256 : s * 256 + 4].ravel().tolist())) for s in range(96)] for layer in r.experts])
    assert wall.experts_met(4) == pytest.approx(one) and wall.experts_met(1) == 2 and max(first) <= 8
    assert wall.experts_met(256) <= 8 and wall.tokens_until_all() == 19


def test_moving_changes_no_logit_and_loads_are_the_replays(wall):
    counters, logits, recorded = wall.executed(3, n=12)
    assert np.array_equal(logits, wall.undisturbed(n=12)) and counters.loads == sum(wall.loads(layer, 3) for layer in recorded.experts)


def test_captions_of_lesson_20_are_true(wall):
    found = {kind: wall.fit(kind) for kind in ("f16", "q8_0", "q4_0")}
    short = {kind: (f.checks[0].needed - f.checks[0].available) / GIB for kind, f in found.items()}
    assert round(short["q4_0"], 2) == 1.28 and not found["f16"].checks[-1].holds
    assert wall.on_host("q8_0") < wall.run(2).per_token and all(wall.costs(k).load > 2 * wall.costs(k).on_host(1) for k in ("f16", "q8_0", "q4_0"))
    errors = {r.what: r.error for r in wall.mixtral_offloading}
    assert all(0.3 < errors[f"2-bit, T4, {what}"] < 0.5 for what in ("full", "no preload", "no LRU, no preload"))


# ---- lesson 21


def test_the_lessons_text_is_the_text_of_the_reports(routes):
    _, report = parts("tiny-mixtral")
    assert np.array_equal(routes.report.routes.tokens, report.routes.tokens) and np.array_equal(routes.report.states, report.states)
    assert set(routes.warm_up.routes.sequences % 16) == {11}
    assert not set(routes.part(8, 16).routes.sequences) & set(routes.part(0, 8, 0).routes.sequences)    # stream and fit of the drift


def test_how_early_a_predictor_speaks(routes):
    lead = [routes.lead_ms(n) for n in (-1, 0, 1, 2, 3, 4)]
    assert lead[0] == 0 and lead == sorted(lead) and lead[5] == pytest.approx(4 * lead[2])
    assert lead[5] * 1e6 < 0.5 * routes.costs.load                                               # as a caption says


def test_captions_of_lesson_21_are_true(routes):
    gate, network = routes.results("gate-1", routes.calibrated("gate-1")), routes.results("network", routes.calibrated("network"))
    assert round(gate[-1].fetched) == 4 and abs(gate[-1].recall - 0.95) < 0.01 and abs(network[-1].recall - 0.95) < 0.01
    by_layer = {r.group: r.fetched for r in routes.results("gate-1", routes.calibrated("gate-1"), "layer")}
    assert by_layer["layer 1"] > 6 and all(2.5 < by_layer[f"layer {n}"] < 4 for n in (2, 3, 4, 5))
    lengths = [r.recall for r in routes.results("gate-1", routes.calibrated("gate-1"), "length")]
    assert max(lengths) - min(lengths) < 0.01
    assert routes.run("network").per_token > routes.run().per_token and routes.run("network").hit_rate > routes.run().hit_rate + 0.15
    assert routes.run("network", link=8).per_token < routes.run(link=8).per_token
    assert routes.run("oracle").per_token > 0.85 * routes.run().per_token


def test_printed_choices_do_not_hang_on_the_last_bits(routes):
    """The stepper shows who was fetched: the second and the third place must not be a tie."""
    seen = routes.part(12, 13, 1)
    scores = shipped_predictors("tiny-mixtral")["gate-1"].scores(seen, 3)[12:32]
    best = -np.sort(-scores, 1)
    assert (best[:, 1] - best[:, 2]).min() > 1e-3 and (ranks(scores) < 2).sum() == 40
    two_decimals = best * 100 % 1
    assert np.abs(two_decimals - 0.5).min() > 1e-3
    assert [s.layer for s in evaluate(routes.predictors["gate-1"], seen, top(2))] == [1, 2, 3, 4, 5]
    for key in ("gate-1", "non-linear-1", "oracle"):                                             # in half of the time
        assert routes.beside_cpu(key).per_token < 0.55 * routes.run(key).per_token and routes.beside_cpu(key).ns < routes.beside_cpu().ns


# ---- lesson 27


def test_captions_of_lesson_27_are_true():
    """The gate's forecast pays in all four cases, by a tenth with small experts and by a few percent with large ones; that of the token before
    pays with small experts only; caches live on repetition."""
    own = open_lesson("27").state
    for name, least, most in (("tiny-mixtral-f16", 0.01, 0.08), ("tiny-deepseek-f16", 0.08, 0.2)):
        model = own.open(name)
        for slots in model.shares:
            runs, gate = model.ledgers(slots), model.hybrids(slots)["gate 1 ahead"].per_token
            lru, cpu, hot, best = (runs[w].per_token for w in ("LRU, on demand", "all on the CPU", "hot ones stay, others on the CPU",
                                                               "bound: oracle, prefetching"))
            assert least < 1 - gate / min(cpu, hot) < most and lru - gate > 0.5 * (lru - best)
            before = model.hybrids(slots)["token before"].per_token
            assert (before > min(cpu, hot)) == (name == "tiny-mixtral-f16") and before < lru
            assert runs["gate 1 ahead"].per_token > lru                                          # as long as misses are loaded
    disk = [own.open("tiny-mixtral-f16").hybrids(4, gb * 10**9)["gate 1 ahead"] for gb in (96, 64, 32)]
    assert disk[0].disk_reads <= 48 and disk[0].ns < disk[1].ns < disk[2].ns                     # with room for all, each is read once at most
    rates = [own.rates(n) for n in (1, 4, 16, 32)]
    assert [r.cache for r in rates] == sorted((r.cache for r in rates), reverse=True) and all(0.48 < r.hot < 0.54 for r in rates)
    assert round(rates[0].cache, 2) == 0.69 and rates[3].used > 7.5
