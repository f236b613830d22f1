"""Calibration: how much of a forecast to fetch, so that a wanted share of the experts used is there (the seed's section 3.1).

For each expert layer one number is chosen on a warm-up set, by one of three rules. All three reach the target; they differ in what has
to be fetched for it, so a report gives recall, precision and experts fetched together, by layer, domain or place in the text.

`recalibrate` does the same while a stream of batches goes by: cold start, a sliding window, and a test for drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from workbench.errors import ParameterError
from workbench.expertflow.observe import Seen
from workbench.expertflow.predictors import Predictor
from workbench.expertflow.scoring import Choose, scores_of

TARGET = 0.95
"""The seed's advice: find 95 % of the experts used."""
LENGTHS = (16, 64, 128, 256)
"""Where reports by place in the text are cut."""


def margin(scores: np.ndarray, k: int) -> np.ndarray:
    """How far each expert is from the k-th place of its token: 0 for the last that would be used, negative below it."""
    return scores - np.partition(scores, -k, axis=1)[:, -k, None]


def probability(scores: np.ndarray, k: int) -> np.ndarray:
    """The soft max over the scores of a token."""
    e = np.exp(scores - scores.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


RULES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"margin": margin, "probability": probability}
"""What is held against a threshold. A third rule, "temperature", fixes the threshold at half of an even share, 1 / 2E, and chooses the
temperature that scores are divided by before the soft max; a higher one adds experts and never takes one away."""


@dataclass(frozen=True)
class Calibration:
    """A rule with its number for each expert layer (NaN where the predictor does not speak). Called with scores, it says what to fetch.

    reached: recall on the warm-up set, per layer; n_used: how many experts that was counted on.
    """

    predictor: str
    rule: str
    target: float
    k: int
    values: tuple[float, ...]
    reached: tuple[float, ...]
    n_used: int

    def __call__(self, scores: np.ndarray, m: int) -> np.ndarray:
        """Which experts of layer `m` to fetch, (N, E)."""
        if not 0 <= m < len(self.values) or np.isnan(self.values[m]):
            raise ParameterError(f"expert layer {m}", f"a layer that {self.predictor} was calibrated on")
        return _chosen(self.rule, scores, self.k, self.values[m])


def _chosen(rule: str, scores: np.ndarray, k: int, value: float) -> np.ndarray:
    if rule == "temperature":
        return probability(scores / value, k) >= 0.5 / scores.shape[1]
    return RULES[rule](scores, k) >= value


def calibrate(predictor: Predictor, warm_up: Seen, target: float = TARGET, rule: str = "margin") -> Calibration:
    """Choose a number per expert layer so that the warm-up set reaches `target`, and no more than that is fetched.

    The warm-up set should be text that the predictor was not fitted on: on its own text it looks better than it is.
    """
    if not 0 < target <= 1:
        raise ParameterError(f"a recall target of {target!r}", "above 0, at most 1", "0.95 finds 95 % of the experts used")
    if rule not in (*RULES, "temperature"):
        raise ParameterError(f"rule {rule!r}", f"one of {', '.join(RULES)}, temperature")
    if not warm_up.n_tokens:
        raise ParameterError("a warm-up set of 0 tokens", "at least one text", "record(model, texts)")
    values, reached, k = [], [], warm_up.gates.k
    for m in range(warm_up.n_layers):
        if not predictor.speaks(m, warm_up.gates):
            values.append(float("nan"))
            reached.append(float("nan"))
            continue
        scores, used = scores_of(predictor, warm_up, m), warm_up.used(m)
        values.append(_temperature(scores, used, target) if rule == "temperature" else threshold(RULES[rule](scores, k)[used], target))
        reached.append(float(_chosen(rule, scores, k, values[-1])[used].mean()))
    return Calibration(predictor.name, rule, target, k, tuple(values), tuple(reached), warm_up.n_tokens * k)


def threshold(values: np.ndarray, target: float) -> float:
    """The highest threshold that a share `target` of the values reaches."""
    place = len(values) - max(1, int(np.ceil(target * len(values) - 1e-9)))
    return float(np.partition(values, place)[place])


def _temperature(scores: np.ndarray, used: np.ndarray, target: float, tries: int = 40) -> float:
    """The lowest temperature that reaches the target, found by halving: recall grows with it."""
    low, high = 1e-3, 1e-3
    while _chosen("temperature", scores, 0, high)[used].mean() < target:
        low, high = high, high * 4
    for _ in range(tries):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _chosen("temperature", scores, 0, middle)[used].mean() >= target else (middle, high)
    return high


class Row(NamedTuple):
    """A line of a report. error: two standard errors of the recall, taken between sequences (NaN for a single one)."""

    group: str
    tokens: int
    recall: float
    error: float
    precision: float
    fetched: float


def report(predictor: Predictor, seen: Seen, choose: Choose, by: str = "domain") -> list[Row]:
    """Recall, precision and experts fetched per token and layer: by "layer", "domain", "length" (place in the text), and in all."""
    routes = seen.routes
    spoken = [m for m in range(seen.n_layers) if predictor.speaks(m, seen.gates)]
    found = {m: (choose(scores_of(predictor, seen, m), m), seen.used(m)) for m in spoken}
    everyone = np.ones(routes.n_tokens, bool)
    groups: dict[str, tuple[list[int], np.ndarray]]
    if by == "layer":
        groups = {f"layer {routes.layers[m]}": ([m], everyone) for m in spoken}
    elif by == "domain":
        if routes.domains is None:
            raise ParameterError("a report by domain of a trace without domains", 'by="length" or by="layer"')
        groups = {name: (spoken, routes.domains == i) for i, name in enumerate(routes.domain_names)}
    elif by == "length":
        groups = {f"{a} to {b - 1}": (spoken, (a <= routes.positions) & (routes.positions < b)) for a, b in zip((0, *LENGTHS), LENGTHS)}
    else:
        raise ParameterError(f"by={by!r}", '"layer", "domain" or "length"')
    rows = [_row(name, found, layers, where, routes.sequences) for name, (layers, where) in groups.items() if where.any()]
    return [*rows, _row("all", found, spoken, everyone, routes.sequences)]


def _row(name: str, found: Mapping[int, Any], layers: list[int], where: np.ndarray, sequences: np.ndarray) -> Row:
    right, used, fetched = (sum(part[where] for part in parts) for parts in zip(*(
        ((chosen & used).sum(1), used.sum(1), chosen.sum(1)) for chosen, used in (found[m] for m in layers))))  # fmt: skip
    _, place = np.unique(sequences[where], return_inverse=True)
    each = np.bincount(place, right) / np.bincount(place, used)
    error = 2 * each.std(ddof=1) / len(each) ** 0.5 if len(each) > 1 else float("nan")
    n = int(where.sum())
    return Row(name, n, float(right.sum() / used.sum()), float(error), float(right.sum() / max(fetched.sum(), 1)),
               float(fetched.sum() / n / len(layers)))  # fmt: skip


# ---- online

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
    spread: float = 2.0

    @property
    def enough(self) -> int:
        """Experts used on which two standard errors of the recall are as small as `points`."""
        return max(100, int(np.ceil(4 * self.target * (1 - self.target) / self.points**2)))


def stream(predictor: Predictor, seen: Seen, groups: np.ndarray, rule: str = "margin") -> Iterator[Batch]:
    """The batches of a run, in the order of their numbers (`scoring.batches`)."""
    if rule not in RULES:
        raise ParameterError(f"rule {rule!r} for a stream", f"one of {', '.join(RULES)}")
    spoken = [m for m in range(seen.n_layers) if predictor.speaks(m, seen.gates)]
    values, used = [RULES[rule](scores_of(predictor, seen, m), seen.gates.k) for m in spoken], [seen.used(m) for m in spoken]
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        yield Batch([v[rows] for v in values], [u[rows] for u in used])


def recalibrate(batches: Iterable[Batch], settings: Online = Online()) -> Iterator[tuple[Any, ...]]:
    """Keep a recall target while batches go by; yields what happens as plain tuples, the number of the batch second.

    ("batch", i, "cold" or "warm", recall, fetched, recall lately, layers ahead) after each; ("warm", i, tokens seen) when a cold start ends;
    ("calibrated", i, tokens counted on); ("drift", i, "down" or "up", batch from which on) when the misses have become twice or half as
    many, and a cold start begins with what was seen since. A batch is judged with thresholds made before it.

    Cold start: everything is fetched at first; then thresholds are as low as the few experts counted so far demand (the target plus one
    standard error), which tightens by itself. Drift: two cumulative sums of log odds (Page's test), for twice and for half the misses.
    """
    if not 0 < settings.target < 1 or min(settings.points, settings.window, settings.every, settings.alarm, settings.spread) <= 0:
        raise ParameterError(f"{settings}", "a target between 0 and 1, and settings above 0")
    history: deque[tuple[list[np.ndarray], int, int]] = deque()  # values of the experts used, how many were missed, tokens
    thresholds: list[float] = []
    cold, seen, due, sums, since = True, 0, 0, [0.0, 0.0], [0, 0]
    for i, batch in enumerate(batches):
        thresholds = thresholds or [-np.inf] * len(batch.values)
        hits, n = [v[u] for v, u in zip(batch.values, batch.used)], len(batch.used[0])
        n_used, missed = sum(map(len, hits)), sum(int((h < t).sum()) for h, t in zip(hits, thresholds))
        history.append((hits, missed, n))
        while sum(n for *_, n in history) > settings.window and len(history) > 2:
            history.popleft()
        seen, due = seen + n, due + n
        lately, counted = _recall(history, settings.enough)
        fetched = float(np.mean([(v >= t).sum(1).mean() for v, t in zip(batch.values, thresholds)]))
        yield ("batch", i, "cold" if cold else "warm", 1 - missed / n_used, fetched, lately, settings.ahead_cold if cold else settings.ahead)
        if cold:
            thresholds = _thresholds(history, settings.target, 1.0)
            if counted >= settings.enough and abs(lately - settings.target) <= settings.points:
                cold, due, sums, since = False, 0, [0.0, 0.0], [i + 1, i + 1]
                yield "warm", i, seen
            continue
        for way, times in enumerate((2.0, 0.5)):
            sums[way] += _log_odds(missed, n_used, 1 - settings.target, times) / settings.spread
            if sums[way] <= 0:
                sums[way], since[way] = 0.0, i + 1
        if max(sums) > settings.alarm:
            way = int(sums[1] > sums[0])
            yield "drift", i, ("down", "up")[way], since[way]
            history = deque(list(history)[-(i + 1 - since[way]) :])
            history = deque((hits, 0, n) for hits, _, n in history)
            cold, seen, thresholds = True, 0, _thresholds(history, settings.target, 1.0)
        elif due >= settings.every:
            due, thresholds = 0, _thresholds(history, settings.target)
            yield "calibrated", i, sum(n for *_, n in history)


def _recall(history: Iterable[tuple[list[np.ndarray], int, int]], enough: int) -> tuple[float, int]:
    """Of the last batches with at least `enough` experts used: their recall, and how many that were."""
    used = missed = 0
    for hits, misses, _ in reversed(list(history)):
        used, missed = used + sum(map(len, hits)), missed + misses
        if used >= enough:
            break
    return 1 - missed / max(used, 1), used


def _log_odds(missed: int, n: int, rate: float, times: float) -> float:
    """How much likelier `missed` of `n` are at `times` the rate of misses."""
    other = min(rate * times, (1 + rate) / 2)
    return missed * np.log(other / rate) + (n - missed) * np.log((1 - other) / (1 - rate))


def _thresholds(history: Iterable[tuple[list[np.ndarray], int, int]], target: float, errors: float = 0.0) -> list[float]:
    """The threshold of each layer from the experts used lately; errors: standard errors to stay above the target."""
    layers = [np.concatenate(part) for part in zip(*(hits for hits, *_ in history))]
    return [threshold(v, min(1.0, target + errors * (target * (1 - target) / len(v)) ** 0.5)) for v in layers]
