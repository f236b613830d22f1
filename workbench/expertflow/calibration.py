"""Calibration: how much of a forecast to fetch, so that a wanted share of the experts used is there (the seed's section 3.1).

For each expert layer one number is chosen on a warm-up set, by one of three rules. All three reach the target; they differ in what has
to be fetched for it, so a report gives recall, precision and experts fetched together, by layer, domain or place in the text.

`workbench.expertflow.online` keeps a target while a stream of batches goes by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
