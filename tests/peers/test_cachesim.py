"""LRU, LFU and Belady against libcachesim, hit for hit, on random and on recorded traces. (Its LFU forgets counts with the eviction.)"""

import numpy as np
import pytest

from tests.expertflow.caching import trace_of
from workbench.expertflow import sources
from workbench.expertflow.policies import next_uses
from workbench.expertflow.replay import replay

pytestmark = pytest.mark.peers
libcachesim = pytest.importorskip("libcachesim", reason="libcachesim is not installed: pip install '.[train]'")
NEVER = np.iinfo(np.int64).max


def peer(kind, keys, slots):
    """Hits of libcachesim's cache; Belady's must be told when each key comes again."""
    cache, hits = getattr(libcachesim, kind)(cache_size=slots), 0
    following = np.where((after := next_uses(keys)) == np.arange(len(keys)), NEVER, after)
    for key, after in zip(keys.tolist(), following.tolist()):
        hits += cache.get(libcachesim.Request(obj_id=key, obj_size=1, op=libcachesim.ReqOp.OP_READ, next_access_vtime=after))
    return hits


POLICIES = {"lru": "LRU", "lfu_in_cache": "LFU", "belady": "Belady"}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_random_traces(policy, seed):
    rng = np.random.default_rng(seed)
    n_keys, n = int(rng.integers(12, 200)), int(rng.integers(50, 3000))
    p = np.arange(1, n_keys + 1) ** -rng.uniform(0, 1.5)
    keys = rng.choice(n_keys, n, p=p / p.sum())
    slots = int(rng.integers(10, n_keys))
    trace = trace_of(keys[None, :, None], n_keys)
    assert sum(replay(trace, policy, slots).hits) == peer(POLICIES[policy], keys, slots)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("name", "slots"), [("switch-base-8", 12), ("switch-base-8", 18), ("switch-base-8", 36), ("tiny-mixtral", 12),
                                             ("tiny-mixtral", 30), ("tiny-deepseek", 20), ("tiny-deepseek", 48), ("local-drifting:tokens=300,layers=4", 800)])
def test_recorded_traces_in_one_pool(policy, name, slots):
    trace = sources.load(name).trace
    trace = trace.select(slice(3000))
    keys = (np.moveaxis(trace.experts.astype(int), 0, 1) + trace.n_expert * np.arange(trace.n_layers)[:, None]).ravel()
    result = replay(trace, policy, slots, "global", "one_by_one")
    assert sum(result.hits) == peer(POLICIES[policy], keys, slots)


@pytest.mark.parametrize("policy", POLICIES)
def test_layer_by_layer(policy):
    trace = sources.load("tiny-deepseek").trace.select(slice(4000))
    hits = replay(trace, policy, 10, residency="one_by_one").hits
    assert hits == tuple(peer(POLICIES[policy], layer.ravel().astype(int), 10) for layer in trace.experts)
