"""Regrouping: never worse than the batches that came, close to the best halves where those can be counted out, and the published order of gain."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import models
from workbench.errors import ParameterError
from workbench.expertflow import sources
from workbench.expertflow.network import shipped_predictors
from workbench.expertflow.observe import record, split
from workbench.expertflow.offload import offload
from workbench.expertflow.predictors import GateAhead, OrElse
from workbench.expertflow.regroup import distinct, needed, paths_of, predicted_paths, regroup, similarity
from workbench.expertflow.replay import forecast_of
from workbench.expertflow.scoring import top


def random_paths(seed, n, layers=3, n_expert=6, k=1):
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 2, n)
    favour = rng.gumbel(size=(2, layers, n_expert)) * 2
    out = np.zeros((n, layers, n_expert), bool)
    for t in range(n):
        best = np.argsort(-(favour[kind[t]] + rng.gumbel(size=(layers, n_expert))), -1)[:, :k]
        np.put_along_axis(out[t], best, True, -1)
    return out.reshape(n, -1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 4, 8, 16]))
def test_equal_halves_nobody_lost_never_worse(seed, n):
    paths = random_paths(seed, n)
    a, b = regroup(paths)
    assert len(a) == len(b) == n // 2 and sorted([*a, *b]) == list(range(n))
    assert (np.diff(a) > 0).all() and (np.diff(b) > 0).all()                     # within a half the old order stands
    assert distinct(paths, (a, b)) <= distinct(paths, (np.arange(n // 2), np.arange(n // 2, n)))


def test_most_of_what_the_best_halves_would_save():
    def count(paths, half):
        return distinct(paths, (np.array(half), np.array(sorted(set(range(10)) - set(half)))))

    before = after = best = 0
    for seed in range(40):
        paths = random_paths(seed, 10)
        before += count(paths, range(5))
        after += distinct(paths, regroup(paths))
        best += min(count(paths, (0, *rest)) for rest in combinations(range(1, 10), 4))
    assert best <= after < before
    assert (before - after) / (before - best) > 0.6


def test_similarity_is_one_less_the_hamming_distance():
    paths = random_paths(1, 8)
    s = similarity(paths)
    for i in range(8):
        for j in range(8):
            assert s[i, j] == pytest.approx(1 - (paths[i] != paths[j]).mean())


def test_the_gain_on_the_switch_trace_is_of_the_order_found_elsewhere():
    """Another implementation, with true routes: 10.5, 10.6, 17.4 and 18.5 % for batches of 4, 8, 16 and 32."""
    routes = sources.load("switch-base-8").trace
    for size, elsewhere in ((4, 0.105), (8, 0.106), (16, 0.174), (32, 0.185)):
        assert needed(routes, size).saved == pytest.approx(elsewhere, abs=0.02)


@pytest.fixture(scope="module")
def held_out():
    """Beginnings of texts that the shipped predictors were not fitted on, with states."""
    trace = sources.load("tiny-mixtral").trace
    _, numbers = split(trace)
    with models.load("tiny-mixtral-f16") as model:
        return record(model, trace.select(np.isin(trace.sequences, numbers) & (trace.positions < 32)))


def test_predicted_routes_save_part_of_what_true_ones_do(held_out):
    shipped, routes = shipped_predictors("tiny-mixtral"), held_out.routes
    told = {name: predicted_paths(forecast_of(p, held_out, top(2))) for name, p in
            (("true", shipped["oracle"]), ("gate", OrElse(GateAhead(1), shipped["frequency"])), ("network", shipped["network"]))}
    assert np.array_equal(told["true"], paths_of(routes))
    for size in (4, 8, 16, 32):
        true, gate, network = (needed(routes, size, told[name]) for name in ("true", "gate", "network"))
        assert true == needed(routes, size) and true.before == gate.before == network.before <= 8
        assert true.after < min(gate.after, network.after) < true.before
        assert max(gate.saved, network.saved) > 0.3 * true.saved                  # a route is named right in two of three cases or more


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek"])
def test_regrouped_by_forecasts_real_sequences_give_the_same(name):
    """Two batches of four real sequences each through the engine with half of the experts, beside all eight in one plain graph."""
    texts = ["def main(", "And it came to pass", "x = 1;", "The LORD", "for i in", "if (a", "1 2 3", "return"]
    with models.load(f"{name}-f16") as model, models.Session(model, n_seq_max=8, n_ctx=512) as whole:
        prompts = list(enumerate(map(model.tokenizer.encode, texts)))
        shipped, k = shipped_predictors(name), model.hparams.n_expert_used
        with offload(model, 0.5, n_seq_max=8, n_ctx=512, scrub=True, verify=True) as run:
            logits, came = whole.decode_batch(prompts), [list(p) for _, p in prompts]
            run.session.decode_batch(prompts)
            changed = 0
            for _ in range(3):
                for text, row in zip(came, logits, strict=True):
                    text.append(int(row.argmax()))
                seen = record(model, came)
                last = np.cumsum(list(map(len, came))) - 1
                halves = regroup(predicted_paths(forecast_of(OrElse(GateAhead(1), shipped["frequency"]), seen, top(k)))[last])
                changed += not np.array_equal(halves[0], np.arange(4))
                logits = whole.decode_batch([(i, text[-1:]) for i, text in enumerate(came)])
                for half in map(np.ndarray.tolist, halves):
                    for i, row in zip(half, run.session.decode_batch([(i, came[i][-1:]) for i in half]), strict=True):
                        assert np.abs(row - logits[i]).max() <= 1e-4 * np.abs(logits[i]).max() and row.argmax() == logits[i].argmax()
            assert changed >= 2


def test_bad_input():
    with pytest.raises(ParameterError):
        regroup(random_paths(0, 4)[:3])
    with pytest.raises(ParameterError):
        regroup(np.zeros((0, 3), bool))
    with pytest.raises(ParameterError):
        needed(sources.load("switch-base-8").trace, 200)
    with pytest.raises(ParameterError):
        needed(sources.load("switch-base-8").trace, 0)
    with pytest.raises(ParameterError):
        needed(sources.load("switch-base-8").trace, 4, np.zeros((215, 47), bool))
    assert paths_of(sources.load("switch-base-8").trace).shape == (215, 48)
