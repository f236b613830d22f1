"""Regrouping: never worse than the batches that came, close to the best halves where those can be counted out, and the published order of gain."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ParameterError
from workbench.expertflow import sources
from workbench.expertflow.regroup import distinct, paths_of, regroup, saved, similarity


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
        assert saved(routes, size) == pytest.approx(elsewhere, abs=0.02)


def test_bad_input():
    with pytest.raises(ParameterError):
        regroup(random_paths(0, 4)[:3])
    with pytest.raises(ParameterError):
        regroup(np.zeros((0, 3), bool))
    with pytest.raises(ParameterError):
        saved(sources.load("switch-base-8").trace, 200)
    assert paths_of(sources.load("switch-base-8").trace).shape == (215, 48)
