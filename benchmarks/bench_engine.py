"""ExpertFlow's engine: virtual time per token of every policy and forecast, and what the engine's own bookkeeping takes of a real run."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from benchmarks.harness import Table
from workbench import models
from workbench.expertflow import sources
from workbench.expertflow.costs import costs
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.network import shipped_predictors
from workbench.expertflow.observe import Gates, record
from workbench.expertflow.offload import offload
from workbench.expertflow.predictors import GateAhead, Oracle, OrElse
from workbench.expertflow.replay import forecast_of
from workbench.expertflow.scoring import top
from workbench.expertflow.timing import simulate

CASES = (("tiny-mixtral", "Mixtral-8x7B", (2, 4)), ("tiny-deepseek", "LLaMA-MoE-v1-3.5B", (4, 8)))
"""Trace, the published configuration whose bytes and operations it gets, and slots per layer: 25 and 50 % of the experts."""


def tables():
    ends = Table("What forecasts bring, with misses on the host: the best of each case, virtual ms per token", [
        "case", "LRU on demand", "all missing on the CPU", "hot set, rest on the CPU", "LRU to oracle with Belady", "best forecast", "ms",
        "gap closed", "of the CPU's best", "the same, loads by matrix", "32 GB of RAM, NVMe"])  # fmt: skip
    for trace, shape, capacities in CASES:
        for slots in capacities:
            yield _times(trace, shape, slots, ends)
    ends.notes.append("Plainly: forecasts pay in all four cases, where a miss does not wait for the link but is computed on the host: "
                      "the link brings what comes next while host and card compute, and the host is slower while it copies.")
    ends.notes.append("With misses that are loaded none pays at Mixtral's size, nor LLaMA-MoE's gate: the link is never idle.")
    yield ends
    yield _bookkeeping()


def _times(name: str, shape: str, slots: int, ends: Table) -> Table:
    c = costs(shape, "rtx3090-pcie4", "f16")
    trace = sources.load(name).trace
    part = trace.select(trace.sequences % 16 == 12)  # one sequence of each domain, none that a predictor was fitted on
    with models.load(f"{name}-f16") as model:
        seen, warm = record(model, part), record(model, trace.select(trace.sequences % 16 == 0))
    k, counts, shipped = trace.k, warm.routes.counts(), shipped_predictors(name)
    case = f"{c.name}: {slots} of {trace.n_expert}"
    table = Table(f"{case} experts in slots per layer, routes of {name}, virtual ms per token",
                  ["policy", "forecast", "misses", "ms", "stalled", "MiB per token", "gap closed", "of the CPU's best"])  # fmt: skip
    base, best = (simulate(part, c, p, slots).per_token for p in ("lru", "oracle"))
    everything = simulate(part, c, "lru", slots, host_below=10**9).per_token
    static = simulate(part, c, "static", slots, hot=counts, host_below="auto").per_token
    found: dict[str, tuple[float, float, dict[str, object]]] = {}

    def add(policy: str, said: str, **more: object) -> None:
        out = simulate(part, c, policy, slots, **more)  # type: ignore[arg-type]
        closed = (base - out.per_token) / (base - best)
        table.add(policy, said, "host" if "host_below" in more else "loaded", f"{out.per_token:.1f}", f"{out.stalled:.0%}",
                  f"{out.bytes_per_token / 2**20:,.0f}", f"{closed:+.0%}", f"{out.per_token / min(everything, static):.2f}")  # fmt: skip
        if said and not said.startswith(("oracle", "all")) and "host_below" in more:
            found[said] = out.per_token, closed, more

    for policy in ("lru", "lfu", "lfu_in_cache", "lru_frequency", "belady", "oracle"):
        add(policy, "")
    add("lru", "all missing on the host", host_below=10**9)
    add("static", "", hot=counts, host_below="auto")
    often = shipped["frequency"]
    hidden = shipped["non-linear-1"].hidden * c.shape.d // seen.gates.width  # type: ignore[attr-defined]
    for predictor, thinking in ((often, 0), (shipped["previous-token"], 0), (shipped["previous-layer"], 0),
                                (OrElse(GateAhead(1), often), c.look_ahead), (OrElse(GateAhead(2), often), c.look_ahead),
                                (OrElse(shipped["linear-1"], often), c.look_ahead),
                                (OrElse(shipped["non-linear-1"], often), c.predictor(hidden)), (shipped["network"], 0),
                                (Oracle(), 0)):  # fmt: skip
        for named in dict.fromkeys((1, k)):
            forecast = forecast_of(predictor, seen, top(named))
            for more in ({}, {"host_below": "auto", "hot": counts}):
                add("predicted", f"{predictor.name}, {named} named", forecast=forecast, thinking=thinking, **more)
    table.notes.append("Gap closed: from LRU on demand (0 %) to perfect forecasts, Belady's eviction, misses loaded (100 %). CPU's best: "
                       f"the quicker of all missing on the CPU ({everything:.1f} ms) and the hot set with the rest there ({static:.1f}). "
                       "With misses on the host, slots start with the hot set. A predictor's own time is counted, but the network's, which "
                       "works before the first layer. plec does what predicted does where slots belong to layers.")  # fmt: skip
    said = min(found, key=lambda s: found[s][0])
    ms, closed, more = found[said]
    ram = max(k, int(32e9 / c.expert_bytes * trace.n_layers / c.shape.n_moe))
    matrix, disk = (simulate(part, c, "predicted", slots, **more, **other).per_token  # type: ignore[arg-type]
                    for other in ({"granularity": "matrix"}, {"host_slots": ram}))  # fmt: skip
    fits = ram >= trace.n_layers * trace.n_expert
    ends.add(case, f"{base:.1f}", f"{everything:.1f}", f"{static:.1f}", f"{best:.1f}", said, f"{ms:.1f}", f"{closed:+.0%}",
             f"{ms / min(everything, static):.2f}", f"{matrix:.1f}", "holds all" if fits else f"{disk:.1f}")  # fmt: skip
    return table


def _bookkeeping() -> Table:
    table = Table("Real time of a run with half of the experts in slots: three held-out texts, a token at a time",
                  ["model", "policy", "forecast", "token, ms", "engine's own code", "forecasts"])  # fmt: skip
    for name in ("tiny-mixtral", "tiny-deepseek"):
        trace = sources.load(name).trace
        texts = [trace.tokens[trace.sequences == s].tolist() for s in (12, 28, 44)]
        for policy, window in (("lru", 0), ("predicted", 1)):
            with models.load(f"{name}-f16") as model:
                forecast = Forecaster.of_gates(Gates.of(model), window) if window else None
                with offload(model, 0.5, policy=policy, forecast=forecast, n_ctx=512) as run, sampled() as found:
                    begun = perf_counter()
                    for tokens in texts:
                        run.session.reset()
                        for token in tokens:
                            run.session.decode([token])
                    each = (perf_counter() - begun) / sum(map(len, texts))
            own, ahead = (found[who] / found.total() for who in ("engine", "forecast"))
            table.add(name, policy, f"gate, {window} ahead" if window else "", f"{1e3 * each:.2f}", f"{own:.1%}", f"{ahead:.1%}")
    table.notes.append(f"Who was at work, seen every {1e3 * EVERY:g} ms: expertflow's own functions, not what they call of other rooms; "
                       "what forecasters compute stands apart.")  # fmt: skip
    return table


EVERY = 0.001
"""Seconds between two looks at who is at work: so seldom that looking changes nothing, and a run of some seconds has thousands."""


@contextmanager
def sampled() -> Iterator[Counter[str]]:
    """Counts how often expertflow's code ("engine"), a forecaster ("forecast") or anything else ("rest") was found at work inside."""
    found = Counter[str]()

    def look(_: int, frame: FrameType | None) -> None:
        at, files = frame, list[str]()
        while at is not None and len(files) < 6:  # deeper than a forecaster's arithmetic
            files.append(at.f_code.co_filename)
            at = at.f_back
        inside = any(file.endswith("forecast.py") for file in files)
        found["forecast" if inside else "engine" if "expertflow" in files[0] else "rest"] += 1

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
