"""Placement: the published example of EPLB, and what must hold for any loads."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import paths
from workbench.errors import ParameterError
from workbench.expertflow.placement import pack, place, replicate

EXAMPLE = json.loads((paths.checkout() / "tests" / "data" / "eplb_example.json").read_text("utf-8"))


def test_the_published_example():
    e = EXAMPLE
    found = place(np.array(e["weight"]), e["num_gpus"], e["num_replicas"], n_groups=e["num_groups"], n_nodes=e["num_nodes"])
    assert found.holds.tolist() == e["phy2log_expected"]
    alone, twice = (place(np.array(e["weight"]), 12, n).imbalance() for n in (12, 24))
    assert twice < 0.8 * alone                                                   # replicas pay


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(0, 3))
def test_every_expert_has_a_place_and_every_device_as_many(seed, n_devices, n_nodes, more):
    n_nodes = min(n_nodes, n_devices)
    loads = np.random.default_rng(seed).integers(0, 200, (3, 16))
    found = place(loads, n_devices, 16 + 4 * more, n_groups=4, n_nodes=n_nodes)
    assert (found.copies >= 1).all() and found.copies.sum() == 3 * (16 + 4 * more)
    assert np.allclose(found.device_loads().sum(1), loads.sum(1))                # load is shared, not made
    per_node = found.holds.reshape(3, n_nodes, -1)
    for layer in per_node:                                                       # a group stays within its node
        assert all(len({n for n, row in enumerate(layer) if e in row}) == 1 for e in range(16))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=4, max_size=24), st.sampled_from([1, 2, 4]))
def test_packing_is_within_the_bound_of_a_greedy(loads, n):
    loads = loads[: len(loads) // n * n]
    packs = pack(loads, n)
    assert sorted(i for p in packs for i in p) == list(range(len(loads)))
    sums = [sum(loads[i] for i in p) for p in packs]
    assert max(sums) <= sum(loads) / n + max(loads) + 1e-6


def test_replicas_go_to_whoever_carries_most():
    assert replicate([10, 1, 1], 5) == [0, 1, 2, 0, 0]
    assert replicate([4, 4], 4) == [0, 1, 0, 1]


def test_crossings_by_hand():
    """Experts 0, 1 on device 0 and 2, 3 on device 1: a token at home pays for what is not there, and for a device once."""
    found = place(np.array([[4, 3, 2, 1]]), 2)
    homes = {int(e): int(d) for e, d in zip(found.holds[0], found.device_of_place())}
    experts = np.array([[[0, 1], [0, 2], [2, 3]]])
    expected = [len({homes[int(e)] for e in row if homes[int(e)] != 0}) for row in experts[0]]
    assert found.crossings(experts, np.zeros(3, int))[0].tolist() == expected
    everywhere = place(np.array([[4, 3, 2, 1]]), 2, 8)
    assert everywhere.crossings(experts, np.array([0, 1, 1])).sum() <= sum(expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([2, 4]), st.integers(0, 2))
def test_which_copy_computes(seed, n_devices, more):
    rng = np.random.default_rng(seed)
    found = place(rng.integers(0, 50, (1, 8)), n_devices, 8 + n_devices * more)
    rows, home, held = {int(e): int(rng.integers(1, 9)) for e in rng.permutation(8)[:5]}, int(rng.integers(n_devices)), found.on(0)
    for rule in ("local", "least"):
        chosen = found.choose(0, rows, home, rule)
        assert chosen.keys() == rows.keys() and all(held[e, d] for e, d in chosen.items())
        if rule == "local":
            assert all(d == home or not held[e, home] for e, d in chosen.items())
        else:                                        # when the last one came to a device, no other with a copy had less to do
            load = np.bincount(list(chosen.values()), [rows[e] for e in chosen], n_devices)
            last = {d: max((e for e in chosen if chosen[e] == d), key=lambda e: (-rows[e], e)) for d in set(chosen.values())}
            assert all(load[d] - rows[e] <= load[other] for d, e in last.items() for other in np.flatnonzero(held[e]))


def test_homes_may_differ_by_layer():
    found = place(np.array([[4, 3, 2, 1]] * 2), 2)
    experts = np.array([[[0, 1], [2, 3]]] * 2)
    apart = [found.crossings(experts, np.full(2, h)) for h in (0, 1)]
    assert np.array_equal(found.crossings(experts, np.array([[0], [1]])), [apart[0][0], apart[1][1]])


@pytest.mark.parametrize("arguments", [
    (np.ones((1, 4)), 8), (np.ones((1, 4)), 3), (np.ones(4), 2), (np.full((1, 4), np.nan), 2), (np.ones((1, 4)), 0), (np.ones((1, 6)), 4, 6),
])
def test_numbers_that_do_not_fit(arguments):
    with pytest.raises(ParameterError):
        place(*arguments)
