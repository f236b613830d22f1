"""Calibration while the model runs: cold start, a sliding window of routes, and a test for drift (the seed's sections 3.1 and 6.2).

A router shows afterwards what should have been fetched. So for each expert that was used there is one number, its distance from the
fetched ones (`calibration.RULES`), and every threshold can be judged on the routes of the past. Tokens count, not batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from workbench.errors import ParameterError
from workbench.expertflow.calibration import RULES, TARGET, threshold
from workbench.expertflow.observe import Seen
from workbench.expertflow.predictors import Predictor
from workbench.expertflow.scoring import scores_of

NEVER_MISSES = -np.inf
"""A threshold that fetches everything."""


class Batch(NamedTuple):
    """What is known when a batch is done: for each expert layer that is forecast, the rule's values (N, E), and the sets used (N, E)."""

    values: list[np.ndarray]
    used: list[np.ndarray]


class Online(NamedTuple):
    """Settings of `recalibrate`.

    points: how close to the target recall must come for the cold start to end, counted on enough experts to tell (`enough`). window: tokens
    that thresholds are made from; every: tokens between two calibrations; ahead, ahead_cold: layers to look ahead when warm and when cold.
    alarm: height at which evidence for drift is believed, in logarithms of odds; spread: how much more the misses of real text vary than
    independent ones would (measured: 1 to 3).
    """

    target: float = TARGET
    points: float = 0.01
    window: int = 1024
    every: int = 128
    ahead: int = 2
    ahead_cold: int = 4
    alarm: float = 8.0
    spread: float = 3.0

    @property
    def enough(self) -> int:
        """Experts used on which two standard errors of the recall are as small as `points`."""
        return max(100, int(np.ceil(4 * self.target * (1 - self.target) / self.points**2)))


DEFAULTS = Online()


def stream(predictor: Predictor, seen: Seen, groups: np.ndarray, rule: str = "margin") -> Iterator[Batch]:
    """The batches of a run, in the order of their numbers (`scoring.batches`)."""
    if rule not in RULES:
        raise ParameterError(f"rule {rule!r} for a stream", f"one of {', '.join(RULES)}")
    spoken = [m for m in range(seen.n_layers) if predictor.speaks(m, seen.gates)]
    values, used = [RULES[rule](scores_of(predictor, seen, m), seen.gates.k) for m in spoken], [seen.used(m) for m in spoken]
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        yield Batch([v[rows] for v in values], [u[rows] for u in used])


def recalibrate(batches: Iterable[Batch], settings: Online = DEFAULTS) -> Iterator[tuple[Any, ...]]:
    """Keep a recall target while batches go by; yields what happens as plain tuples, the number of the batch second.

    ("batch", i, "cold" or "warm", recall, fetched, recall lately, layers ahead) after each; ("warm", i, tokens so far) when a cold start
    ends; ("calibrated", i, tokens counted on); ("drift", i, "down" or "up", batch from which on) when the misses have become twice or half
    as many, and a cold start begins with what was seen since. A batch is judged with thresholds made before it.

    Cold start: everything is fetched at first; then thresholds are as low as the few experts counted so far demand (the target plus one
    standard error), which tightens by itself. Drift: two cumulative sums of log odds (Page's test), for twice and for half the misses.
    """
    if not 0 < settings.target < 1 or min(settings.points, settings.window, settings.every, settings.alarm, settings.spread) <= 0:
        raise ParameterError(f"{settings}", "a target between 0 and 1 (at 1 nothing may ever be missed), and settings above 0")
    past, lately = _Past(settings.window), _Lately(settings.enough)
    thresholds: list[float] = []
    cold, tokens, due, sums, since = True, 0, 0, [0.0, 0.0], [0, 0]
    for i, batch in enumerate(batches):
        thresholds = thresholds or [NEVER_MISSES] * len(batch.values)
        hits, n = [v[u] for v, u in zip(batch.values, batch.used)], len(batch.used[0])
        used, missed = sum(map(len, hits)), sum(int((h < t).sum()) for h, t in zip(hits, thresholds))
        if settings.window * len(hits[0]) < n * settings.enough / 4:
            least = settings.enough * n // (4 * len(hits[0])) + 1
            raise ParameterError(f"a window of {settings.window} tokens", f"{least} or more: fewer cannot tell whether a layer is within "
                                 f"{settings.points:g} of the target")  # fmt: skip
        fetched = float(np.mean([(v >= t).sum(1).mean() for v, t in zip(batch.values, thresholds)]))
        past.add(hits, n)
        lately.add(used, missed)
        tokens, due = tokens + n, due + n
        phase, ahead = ("cold", settings.ahead_cold) if cold else ("warm", settings.ahead)
        yield "batch", i, phase, 1 - missed / used, fetched, lately.recall, ahead
        if cold:
            thresholds = past.thresholds(settings.target, errors=1.0)
            if lately.used >= settings.enough and abs(lately.recall - settings.target) <= settings.points:
                cold, due, sums, since = False, 0, [0.0, 0.0], [i + 1, i + 1]
                yield "warm", i, tokens
            continue
        for way, times in enumerate((2.0, 0.5)):
            sums[way] += _log_odds(missed, used, 1 - settings.target, times) / settings.spread
            if sums[way] <= 0:
                sums[way], since[way] = 0.0, i + 1
        if max(sums) > settings.alarm:
            way = int(sums[1] > sums[0])
            yield "drift", i, ("down", "up")[way], since[way]
            past.keep(i + 1 - since[way])
            lately.clear()
            cold, tokens, thresholds = True, 0, past.thresholds(settings.target, errors=1.0)
        elif due >= settings.every:
            due, thresholds = 0, past.thresholds(settings.target)
            yield "calibrated", i, past.tokens


class _Past:
    """The experts used in the last batches, as values per layer; batches leave when the others have `window` tokens."""

    def __init__(self, window: int) -> None:
        self.window, self.tokens = window, 0
        self.batches: deque[tuple[list[np.ndarray], int]] = deque()

    def add(self, hits: list[np.ndarray], n: int) -> None:
        self.batches.append((hits, n))
        self.tokens += n
        while len(self.batches) > 1 and self.tokens - self.batches[0][1] >= self.window:
            self.tokens -= self.batches.popleft()[1]

    def keep(self, n: int) -> None:
        """Forget all but the last n batches."""
        while len(self.batches) > n:
            self.tokens -= self.batches.popleft()[1]

    def thresholds(self, target: float, errors: float = 0.0) -> list[float]:
        """One per layer that reaches the target on these batches, and `errors` standard errors more."""
        layers = [np.concatenate(part) for part in zip(*(hits for hits, _ in self.batches))]
        return [threshold(v, min(1.0, target + errors * (target * (1 - target) / len(v)) ** 0.5)) for v in layers]


class _Lately:
    """Recall of the last batches that together used `enough` experts."""

    def __init__(self, enough: int) -> None:
        self.enough, self.used, self.missed = enough, 0, 0
        self.batches: deque[tuple[int, int]] = deque()

    @property
    def recall(self) -> float:
        return 1 - self.missed / self.used if self.used else 1.0

    def add(self, used: int, missed: int) -> None:
        self.batches.append((used, missed))
        self.used, self.missed = self.used + used, self.missed + missed
        while self.used - self.batches[0][0] >= self.enough:
            first = self.batches.popleft()
            self.used, self.missed = self.used - first[0], self.missed - first[1]

    def clear(self) -> None:
        self.batches.clear()
        self.used = self.missed = 0


def _log_odds(missed: int, n: int, rate: float, times: float) -> float:
    """How much likelier `missed` of `n` are at `times` the rate of misses."""
    other = min(rate * times, (1 + rate) / 2)
    return missed * float(np.log(other / rate)) + (n - missed) * float(np.log((1 - other) / (1 - rate)))
