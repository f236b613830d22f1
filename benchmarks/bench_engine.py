"""ExpertFlow's engine: virtual time per token of every policy and forecast, and what the engine's own bookkeeping takes of a real run."""

from __future__ import annotations

import cProfile
import pstats

from benchmarks.harness import Table
from workbench import models
from workbench.expertflow import sources
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates, record
from workbench.expertflow.offload import offload
from workbench.expertflow.predictors import Frequency, GateAhead, Oracle, OrElse
from workbench.expertflow.replay import forecast_of
from workbench.expertflow.scoring import top
from workbench.expertflow.timing import costs, simulate

CASES = (("tiny-mixtral", "Mixtral-8x7B", (2, 4)), ("tiny-deepseek", "LLaMA-MoE-v1-3.5B", (4, 8)))
"""Trace, the published configuration whose bytes and operations it gets, and slots per layer: 25 and 50 % of the experts."""


def tables():
    for trace, shape, capacities in CASES:
        for slots in capacities:
            yield _times(trace, shape, slots)
    yield _bookkeeping()


def _times(name: str, shape: str, slots: int) -> Table:
    c = costs(shape, "rtx3090-pcie4", "f16")
    trace = sources.load(name).trace
    part = trace.select(trace.sequences % 16 == 12)  # one sequence of each domain, none that a predictor was fitted on
    with models.load(f"{name}-f16") as model:
        seen, warm = record(model, part), record(model, trace.select(trace.sequences % 16 == 0))
    k, counts = trace.k, warm.routes.counts()
    table = Table(f"{c.name}: {slots} of {trace.n_expert} experts in slots per layer, routes of {name}, virtual ms per token",
                  ["policy", "forecast", "ms", "stalled", "MiB per token", "gap closed"])  # fmt: skip
    base, best = (simulate(part, c, p, slots).per_token for p in ("lru", "oracle"))

    def add(policy: str, said: str, **more: object) -> None:
        out = simulate(part, c, policy, slots, **more)  # type: ignore[arg-type]
        table.add(policy, said, f"{out.per_token:.1f}", f"{out.stalled:.0%}", f"{out.bytes_per_token / 2**20:,.0f}",
                  f"{(base - out.per_token) / (base - best):+.0%}")  # fmt: skip

    for policy in ("lru", "lfu", "lfu_in_cache", "lru_frequency", "belady", "oracle"):
        add(policy, "")
    for predictor in (Frequency(), OrElse(GateAhead(1), Frequency()), OrElse(GateAhead(2), Frequency()), Oracle()):
        predictor.fit(warm)
        for named in dict.fromkeys((1, k)):
            add("predicted", f"{predictor.name}, {named} named", forecast=forecast_of(predictor, seen, top(named)))
        add("plec", f"{predictor.name}, {k} named", forecast=forecast_of(predictor, seen, top(k)))
    add("static", "misses computed on the host", hot=counts, host_below="auto")
    table.notes.append("Gap closed: from LRU on demand (0 %) to perfect forecasts with Belady's eviction (100 %). Below 0 %: slower.")
    return table


def _bookkeeping() -> Table:
    table = Table("Real time of a run with half of the experts in slots: 40 tokens, one at a time",
                  ["model", "policy", "forecast", "run, s", "of that in the engine's own code"])  # fmt: skip
    for name in ("tiny-mixtral-f16", "tiny-deepseek-f16"):
        for policy, window in (("lru", 0), ("predicted", 1)):
            with models.load(name) as model:
                forecast = Forecaster.of_gates(Gates.of(model), window) if window else None
                with offload(model, 0.5, policy=policy, forecast=forecast) as run:
                    run.session.decode(model.tokenizer.encode("And God said"))
                    profile = cProfile.Profile()
                    profile.enable()
                    for token in range(40, 80):
                        run.session.decode([token])
                    profile.disable()
            stats = pstats.Stats(profile)
            own = sum(t for (file, _, _), (_, _, t, _, _) in stats.stats.items() if "/expertflow/" in file)  # type: ignore[attr-defined]
            table.add(name, policy, f"gate, {window} ahead" if window else "", f"{stats.total_tt:.2f}", f"{own / stats.total_tt:.1%}")  # type: ignore[attr-defined]
    table.notes.append("Under a profiler, which slows small functions more than large ones: an upper bound.")
    return table
