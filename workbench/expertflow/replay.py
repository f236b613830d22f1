"""Replay: a cache policy over a recorded trace. No weights move; what is counted is which experts were there when they were needed.

Policies without predictions are drained over the whole trace, group by group. With a forecast or a link, everything happens in the order
of a run: predictions as soon as they could be known, then the router, then the experts one after another, and while each is
computed with, the idle link brings what is predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from workbench.errors import ParameterError, ShapeError, shown
from workbench.expertflow.cache import RESIDENCIES, ExpertCache, ExpertEvent, Group, policy_named
from workbench.expertflow.calibration import probability
from workbench.expertflow.observe import Gates, Seen
from workbench.expertflow.predictors import Predictor
from workbench.expertflow.scoring import Choose, scores_of
from workbench.moe import RouteTrace

StepEvent = tuple[int, str, int, int, str]
"""step, kind, layer's place in the trace, expert, cause."""
CHUNK = 1 << 15
"""Steps that are turned into lists at a time."""


@dataclass(frozen=True, eq=False)
class Forecast:
    """What is to be fetched, and when that is known.

    wanted (layers, tokens, experts): a probability for each expert to be fetched, 0 for the others. ahead: how many layers before the
    router's own this is known; a forecast that does not look at the token itself (`across`) may be known in the token before.
    """

    name: str
    wanted: np.ndarray
    ahead: int
    across: bool = False

    def __post_init__(self) -> None:
        if not np.isfinite(self.wanted).all():
            raise ShapeError(f"probabilities of the forecast {shown(self.name)} that are no numbers (NaN or infinite)", "numbers from 0 on")
        if self.wanted.ndim != 3 or self.ahead < 0:
            raise ShapeError(f"a forecast of shape {self.wanted.shape}, {self.ahead} layers ahead", "(layers, tokens, experts), 0 or more")


def forecast_of(predictor: Predictor, seen: Seen, choose: Choose) -> Forecast:
    """What a predictor says of a run (`seen`), and which of it is to be fetched (`scoring.top(n)`, or a `Calibration`)."""
    n = seen.n_layers
    wanted = np.zeros((n, seen.n_tokens, seen.routes.n_expert), np.float32)
    for m in (m for m in range(n) if predictor.speaks(m, seen.gates)):
        scores = scores_of(predictor, seen, m)
        wanted[m] = np.where(choose(scores, m), np.maximum(probability(scores, seen.routes.k), 1e-6), 0)
    ahead = int(min(predictor.ahead, n - 1))
    return Forecast(predictor.name, wanted, ahead, across=bool(np.isinf(predictor.ahead)) and predictor.reads != "token")


def seen_routes(trace: RouteTrace) -> Seen:
    """A run of which only the routes are known: enough for predictors that read no hidden states."""
    layers, nothing = int(trace.layers.max()) + 1, (None,) * trace.n_layers
    gates = Gates(tuple(map(int, trace.layers)), np.empty((layers, 0)), np.empty((trace.n_layers, trace.n_expert, 0)), 0.0, trace.k,
                  nothing, nothing)  # fmt: skip
    states = np.empty((layers, trace.n_tokens, 0))
    return Seen(trace, states, states, gates)


@dataclass(frozen=True)
class Result:
    """What a replay counted. accesses, hits, loads: per layer of the trace; nbytes: of an expert, per layer, where known.

    speculative: loads made because of a prediction; wasted: those of them that nobody used.
    """

    policy: str
    slots: int
    scope: str
    residency: str
    batch: int
    forecast: str
    link: float
    accesses: tuple[int, ...]
    hits: tuple[int, ...]
    loads: tuple[int, ...]
    speculative: int = 0
    wasted: int = 0
    evicted: int = 0
    demoted: int = 0
    dropped: int = 0
    nbytes: tuple[int, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Experts that were there when their step came, of all that were needed."""
        return sum(self.hits) / sum(self.accesses)

    @property
    def demand(self) -> int:
        """Loads that somebody waited for."""
        return sum(self.accesses) - sum(self.hits)

    @property
    def bytes_loaded(self) -> int | None:
        """Bytes over the link, where the size of an expert is known."""
        return sum(n * size for n, size in zip(self.loads, self.nbytes)) if self.nbytes else None

    def row(self) -> dict[str, Any]:
        """One line of a table or a CSV file."""
        names = ("policy", "slots", "scope", "residency", "batch", "forecast", "link")
        counts = ("demand", "speculative", "wasted", "evicted", "demoted", "dropped")
        return {**{n: getattr(self, n) for n in names}, "accesses": sum(self.accesses), "hits": sum(self.hits),
                "hit_rate": round(self.hit_rate, 6), **{n: getattr(self, n) for n in counts},
                "bytes": "" if self.bytes_loaded is None else self.bytes_loaded}  # fmt: skip


class Stream:
    """The steps of a trace: which experts of which layer are needed together.

    batch: so many sequences are decoded side by side, a token of each in every step; 1: token after token, as recorded. In a step
    each expert counts once. Together, experts stand in ascending order; one by one, best first, or in ascending order in a batch.
    """

    def __init__(self, trace: RouteTrace, residency: str = "together", batch: int = 1) -> None:
        if residency not in RESIDENCIES:
            raise ParameterError(f"residency {shown(residency)!r}", f"one of {', '.join(RESIDENCIES)}")
        if not trace.n_tokens or not trace.n_layers or not trace.k:
            raise ShapeError(f"a trace of {trace.n_tokens} tokens, {trace.n_layers} layers and k={trace.k}", "at least one of each")
        self.trace, self.together, self.batch = trace, residency == "together", batch
        self.of_token = np.arange(trace.n_tokens) if batch == 1 else side_by_side(trace, batch)
        self.n_steps = int(self.of_token.max()) + 1
        ids = trace.experts.astype(np.int32)
        if batch == 1:
            ordered = np.sort(ids, -1)
            if (ordered[..., 1:] == ordered[..., :-1]).any():
                raise ShapeError("a token that uses one expert twice in a layer", f"{trace.k} different experts")
            self.rows: list[Any] = list(ordered if self.together else ids)
        else:
            self.rows = [self._sets(layer) for layer in ids]

    def _sets(self, ids: np.ndarray) -> list[np.ndarray]:
        used = np.zeros((self.n_steps, self.trace.n_expert), bool)
        used[self.of_token[:, None], ids] = True
        steps, experts = np.nonzero(used)
        return np.split(experts.astype(np.int32), np.searchsorted(steps, np.arange(1, self.n_steps)))

    @property
    def most(self) -> int:
        """Experts in the largest step."""
        return self.trace.k if self.batch == 1 else max(len(s) for layer in self.rows for s in layer)

    @property
    def needed(self) -> tuple[int, ...]:
        """Experts needed in each layer, over all steps."""
        return tuple(self.trace.n_tokens * self.trace.k if self.batch == 1 else sum(map(len, rows)) for rows in self.rows)

    def keys(self, group: Group) -> np.ndarray | list[np.ndarray]:
        """The steps of a group of layers in the order of a run: (steps, experts) or, in batches, one array for each."""
        parts = [(place * self.trace.n_expert, self.rows[i]) for place, i in enumerate(group.layers)]
        if self.batch == 1:
            return np.stack([base + rows for base, rows in parts], 1).reshape(-1, self.trace.k)
        return [base + layer[s] for s in range(self.n_steps) for base, layer in parts]

    def accesses(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """The keys of a group one after another, and the step of each, counted over all layers."""
        keys = self.keys(group)
        steps = (np.arange(self.n_steps)[:, None] * self.trace.n_layers + group.layers).ravel()
        sizes = self.trace.k if isinstance(keys, np.ndarray) else list(map(len, keys))
        return (keys.ravel() if isinstance(keys, np.ndarray) else np.concatenate(keys)), np.repeat(steps, sizes)

    def steps(self, group: Group) -> Iterator[Sequence[int]]:
        """What `Cache.serve` takes, in keys of the group: its steps or, one by one, pieces of any length."""
        keys = self.keys(group)
        if not isinstance(keys, np.ndarray):
            yield from (k.tolist() for k in keys)
        else:
            for at in range(0, len(keys), CHUNK):
                part = keys[at : at + CHUNK]
                yield from zip(*part.T.tolist()) if self.together else [part.ravel().tolist()]

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        """(layer's place, experts), in the order of a run, best first where nothing else is said."""
        rows = list(self.trace.experts) if self.batch == 1 else self.rows
        for s in range(self.n_steps):
            for place, layer in enumerate(rows):
                yield place, layer[s].tolist()


def side_by_side(trace: RouteTrace, batch: int) -> np.ndarray:
    """The step of each token when `batch` sequences are decoded side by side, the next ones when all of these are over.

    Tokens of these sequences at the same position share a step. Raises ParameterError where the trace has fewer sequences.
    """
    numbers, which = np.unique(trace.sequences, return_inverse=True)
    if isinstance(batch, bool) or not isinstance(batch, (int, np.integer)) or not 1 <= batch <= len(numbers):
        raise ParameterError(f"a batch of {shown(batch)}", f"1 to {len(numbers)}: the trace has so many sequences")
    at = trace.positions.astype(np.int64) - int(trace.positions.min())
    return np.unique(which // batch * (int(at.max()) + 1) + at, return_inverse=True)[1]


def replay(trace: RouteTrace, policy: str = "lru", slots: int | Mapping[int, int] = 4, scope: str = "layer", residency: str = "together",
           batch: int = 1, *, forecast: Forecast | None = None, link: float = 0.0, hot: np.ndarray | None = None,
           sizes: Sequence[int] | None = None) -> Result:  # fmt: skip
    """Count hits and loads of a policy over a trace.

    slots, scope, sizes: see `cache.grouped`. link: expert loads that fit beside the computation of one expert (0: nothing is prefetched).
    hot: for "static", how often each expert was used, (layers, n_expert). Policies that fetch nothing ahead leave forecast and link
    unused. Raises ParameterError and ShapeError for what does not fit.
    """
    rate_of(link)
    needs = policy_named(policy).needs
    if needs == "predictions" and forecast is None:
        raise ParameterError(f"policy {policy} without predictions", "a forecast", "`--predictor NAME`; without one it would be lru")
    forecast, link = forecast if needs == "predictions" else None, link if needs == "predictions" or policy == "oracle" else 0.0
    stream = Stream(trace, residency, batch)
    cache = cache_for(stream, policy, slots, scope, sizes=sizes, hot=hot)
    count = _drained if forecast is None and not link else _walked
    total = sum(group.slots for group in cache.groups) if isinstance(slots, Mapping) else int(slots)
    return Result(policy, total, scope, residency, batch, forecast.name if forecast else "", float(link), stream.needed,
                  nbytes=tuple(sizes or ()), **count(stream, cache, forecast, link))  # fmt: skip


def cache_for(stream: Stream, policy: str, slots: int | Mapping[int, int], scope: str = "layer", **more: Any) -> ExpertCache:
    """The cache that a stream is replayed with; the layers go by their places in the trace."""
    trace = stream.trace
    future = stream if policy_named(policy).needs == "future" else None
    return ExpertCache(policy, slots, trace.n_layers, trace.n_expert, scope=scope, together=stream.together,
                       least=stream.most if stream.together else 1, future=future, **more)  # fmt: skip


def _drained(stream: Stream, cache: ExpertCache, *unused: Any) -> dict[str, Any]:
    """Each group on its own, at full speed."""
    n, loads, evicted = stream.trace.n_expert, np.zeros(stream.trace.n_layers, int), 0
    hits = np.array(stream.needed)
    for group, one in zip(cache.groups, cache.caches):
        loaded, layers = [0] * (n * len(group.layers)), list(group.layers)
        for _, key, _ in one.preload():
            loaded[key] += 1
        before = np.reshape(loaded, (-1, n)).sum(1)
        for kind, key, _ in one.serve(stream.steps(group), stream.together, tell_hits=False):
            if kind == "load":
                loaded[key] += 1
            else:
                evicted += 1
        loads[layers] = np.reshape(loaded, (-1, n)).sum(1)
        hits[layers] -= loads[layers] - before
    return {"hits": tuple(hits.tolist()), "loads": tuple(loads.tolist()), "evicted": evicted}


def _walked(stream: Stream, cache: ExpertCache, forecast: Forecast | None, link: float) -> dict[str, Any]:
    """In the order of a run."""
    per_layer = {kind: [0] * stream.trace.n_layers for kind in ("hit", "load", "evict", "demote", "drop")}
    causes = Counter[tuple[str, str]]()
    for _, kind, place, _, cause in walk(stream, cache, forecast, link):
        per_layer[kind][place] += 1
        causes[kind, cause] += 1
    speculative = causes["load", "predicted"]
    return {"hits": tuple(per_layer["hit"]), "loads": tuple(per_layer["load"]), "speculative": speculative,
            "wasted": speculative - causes["hit", "prefetched"], "evicted": sum(per_layer["evict"]),
            "demoted": sum(per_layer["demote"]), "dropped": sum(per_layer["drop"])}  # fmt: skip


def walk(stream: Stream, cache: ExpertCache, forecast: Forecast | None = None, link: float = 0.0) -> Iterator[StepEvent]:
    """Everything in the order of a run: (step, kind, layer's place, expert, cause); a step is one layer for a token or a batch.

    While an expert is computed with, as many loads as `link` says may be made, at fixed times: what is not used is lost.
    """
    known = forecast and known_before(stream, forecast)
    loads, per = rate_of(link).as_integer_ratio()
    computed, idle = 0, not loads and known is None and stream.together  # then nothing happens while experts are computed with

    def during(step: int, events: Iterator[ExpertEvent]) -> Iterator[StepEvent]:
        for kind, place, expert, cause in events:
            yield step, kind, place, expert, cause

    yield from during(0, cache.preload())
    for step, (place, experts) in enumerate(stream):
        for target, scores in known(step) if known else ():
            yield from during(step, cache.predict(target, scores))
        yield from during(step, cache.step(place, experts) if stream.together else cache.route(place, experts))
        for expert in () if idle else experts:
            if not stream.together:
                yield from during(step, cache.need(place, [expert]))
            for _ in range((computed + 1) * loads // per - computed * loads // per):
                yield from during(step, cache.prefetch())
            computed += 1
            cache.done(place, expert)


def rate_of(link: float) -> Fraction:
    """Loads beside one expert. Raises ParameterError for what is no such number."""
    if isinstance(link, bool) or not isinstance(link, (int, float, np.number)) or not np.isfinite(link) or link < 0:
        raise ParameterError(f"a link of {shown(link)} loads beside one expert", "a number from 0 on")
    return Fraction(float(link)).limit_denominator(1000)


def known_before(stream: Stream, forecast: Forecast) -> Callable[[int], Iterator[tuple[int, dict[int, float]]]]:
    """What is known before each step: (layer's place, experts with their probabilities)."""
    trace, n = stream.trace, stream.trace.n_layers
    if forecast.wanted.shape != (n, trace.n_tokens, trace.n_expert):
        raise ShapeError(f"a forecast of shape {forecast.wanted.shape}", f"{(n, trace.n_tokens, trace.n_expert)}, as the trace has")
    wanted = forecast.wanted
    if stream.batch > 1:  # what any token of the step wants
        wanted = np.zeros((n, stream.n_steps, trace.n_expert))
        for layer, one in zip(wanted, forecast.wanted):
            np.maximum.at(layer, stream.of_token, one)
    total, ahead = stream.n_steps * n, min(forecast.ahead, n - 1)

    def at(step: int) -> Iterator[tuple[int, dict[int, float]]]:
        first = step % n == 0 if not forecast.across else step == 0
        for target in range(step if first else step + ahead, step + ahead + 1):
            if target < total and (forecast.across or target // n == step // n):  # of a token nothing is known before it is there
                scores = wanted[target % n, target // n]
                yield target % n, {int(e): float(scores[e]) for e in np.flatnonzero(scores)}

    return at
