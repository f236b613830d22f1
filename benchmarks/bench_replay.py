"""How many accesses a second the cache policies take, drained and event by event, beside a plain loop and libcachesim (C)."""

import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np

from benchmarks.harness import Table, duration, take_turns
from workbench.expertflow import sources
from workbench.expertflow.policies import next_uses
from workbench.expertflow.replay import Stream, cache_for, replay, walk

PEERS = {"lru": "LRU", "lfu": None, "lfu_in_cache": "LFU", "lru_frequency": None, "belady": "Belady"}
WANTED = {"lru": 2e6, "lfu": 2e6, "lfu_in_cache": 2e6, "belady": 1e6}


def tables():
    yield speed("tiny-mixtral", 24)
    yield speed("switch-base-8", 12, repeat=200)
    yield growth()
    yield mixtral()


def speed(name, slots, repeat=1):
    trace = sources.load(name).trace
    trace = trace.select(np.tile(np.arange(trace.n_tokens), repeat))
    keys = (np.moveaxis(trace.experts.astype(int), 0, 1) + trace.n_expert * np.arange(trace.n_layers)[:, None]).ravel()
    table = Table(f"{name}, one pool of {slots} slots, one by one, {len(keys):,} accesses: millions of accesses a second",
                  ["policy", "drained", "wanted", "", "each event seen", "plain loop", "libcachesim", "libcachesim / drained"])  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for policy, kind in PEERS.items():
            def drain(policy=policy):
                return replay(trace, policy, slots, "global", "one_by_one")

            def see(policy=policy):
                stream = Stream(trace, "one_by_one")
                return sum(e[1] == "hit" for e in walk(stream, cache_for(stream, policy, slots, "global")))

            peers = {"drained": drain, "seen": see, "loop": plain_lru(keys, slots) if policy == "lru" else None,
                     "peer": libcachesim(kind, keys, slots, folder)}  # fmt: skip
            found = take_turns(peers, seconds=3.0, rounds=5)
            rate = {peer: len(keys) / t.fastest / 1e6 for peer, t in found.items()}
            wanted = WANTED.get(policy)
            table.add(policy, f"{rate['drained']:.2f}", f"{wanted / 1e6:.0f}" if wanted else "",
                      ("ok" if rate["drained"] * 1e6 >= wanted else "below") if wanted else "", *(
                          f"{rate[p]:.2f}" if p in rate else "" for p in ("seen", "loop", "peer")),
                      f"{1 / found['peer'].ratio:.1f}" if "peer" in found else "")  # fmt: skip
    table.notes.append("libcachesim reads a binary trace by itself, without Python; it has no LFU whose counts survive an eviction.")
    return table


def growth():
    table = Table("Time over the length of a trace: tiny Mixtral, 4 slots per layer",
                  ["policy", "1/8 of it", "all", "times as long, for 8 times as much"])  # fmt: skip
    whole = sources.load("tiny-mixtral").trace
    part = whole.select(slice(whole.n_tokens // 8))
    for policy in PEERS:
        peers = {n: lambda p=policy, t=t: replay(t, p, 4) for n, t in (("part", part), ("all", whole))}
        a, b = take_turns(peers, seconds=2.0, rounds=5).values()
        table.add(policy, duration(a.fastest), duration(b.fastest), f"{b.fastest / a.fastest:.1f}")
    return table


def mixtral():
    trace = sources.synthetic("skewed-static", 100_000, 32, 8, 2)
    table = Table("The shape of Mixtral 8x7B, 100,000 tokens: 6.4 million accesses, 4 slots per layer",
                  ["policy", "time", "millions a second"])  # fmt: skip
    for policy in ("lru", "lfu", "belady"):
        found = take_turns({"it": lambda p=policy: replay(trace, p, 4)}, seconds=0.0, rounds=3)["it"].fastest
        table.add(policy, duration(found), f"{trace.experts.size / found / 1e6:.2f}")
    return table


def plain_lru(keys, slots):
    flat = keys.tolist()

    def run():
        cache, hits = OrderedDict(), 0
        for key in flat:
            if key in cache:
                cache.move_to_end(key)
                hits += 1
            else:
                if len(cache) >= slots:
                    cache.popitem(False)
                cache[key] = None
        return hits

    return run


def libcachesim(kind, keys, slots, folder):
    try:
        import libcachesim as peer
    except ImportError:
        return None
    if kind is None:
        return None
    path, after = Path(folder) / "trace.bin", next_uses(keys)
    if not path.exists():
        rows = np.zeros(len(keys), [("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
        rows["id"], rows["size"], rows["next"] = keys, 1, np.where(after == np.arange(len(keys)), -1, after)
        rows.tofile(path)

    def run():
        reader = peer.TraceReader(str(path), peer.TraceType.ORACLE_GENERAL_TRACE)
        return getattr(peer, kind)(cache_size=slots, hashpower=10).process_trace(reader)

    misses, mine = run()[0], replay_hits(kind, keys, slots)
    assert round((1 - misses) * len(keys)) == mine, (kind, misses, mine)
    return run


def replay_hits(kind, keys, slots):
    from workbench.moe import RouteTrace

    policy = next(p for p, k in PEERS.items() if k == kind)
    at = np.arange(len(keys))
    ids = keys.astype(np.int32)[None, :, None]
    trace = RouteTrace(ids, np.full(ids.shape, np.nan), np.zeros(1, int), at * 0, at, at * 0, int(keys.max()) + 1)
    return sum(replay(trace, policy, slots).hits)
