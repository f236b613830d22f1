"""Regrouping two batches: tokens that want the same experts go together (the paper's token scheduler, section 1.3 of its description).

Two adjacent batches of T tokens become two other ones of T tokens each, so that fewer different experts are needed in all. The exact
optimum is out of reach; this is the paper's approximation: two medoids, equal halves by similarity of routes, a few rounds.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.errors import ParameterError
from workbench.expertflow.observe import membership
from workbench.expertflow.replay import Forecast
from workbench.moe import RouteTrace

ROUNDS = 10
"""Rounds at most; it settles after three or four."""


def similarity(paths: np.ndarray) -> np.ndarray:
    """S (n, n) of routes (n, layers x experts) of True and False: 1 - Hamming distance / (layers x experts)."""
    bits = paths.astype(np.float32)
    both = bits @ bits.T
    size = bits.sum(1)
    return 1 - (size[:, None] + size[None] - 2 * both) / paths.shape[1]


def distinct(paths: np.ndarray, halves: tuple[np.ndarray, np.ndarray]) -> int:
    """Experts needed by both halves, over all layers: sum of R1 + R2."""
    return int(sum(paths[half].any(0).sum() for half in halves))


def regroup(paths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens (n, layers x experts, an even number) in two equal halves, each in its old order.

    Never worse than the halves they came in. Raises ParameterError for an odd number of tokens or none.
    """
    n = len(paths)
    if paths.ndim != 2 or n < 2 or n % 2:
        raise ParameterError(f"routes of shape {paths.shape}", "an even number of tokens, two or more, with all layers' experts in a row",
                             "predict the routes of two batches of the same size")  # fmt: skip
    alike = similarity(paths)
    best = np.arange(n // 2), np.arange(n // 2, n)
    fewest = distinct(paths, best)
    first = int(np.argmin(alike.sum(1)))  # the token most unlike all others, and the one most unlike that
    medoids = first, int(np.argmin(alike[first]))
    for _ in range(ROUNDS):
        lean = alike[medoids[0]] - alike[medoids[1]]
        order = np.argsort(-lean, kind="stable")
        halves = np.sort(order[: n // 2]), np.sort(order[n // 2 :])
        if (count := distinct(paths, halves)) < fewest:
            best, fewest = halves, count
        now = tuple(int(half[np.argmax(alike[np.ix_(half, half)].mean(1))]) for half in halves)
        if now == medoids:
            break
        medoids = now[0], now[1]
    return best


def paths_of(routes: RouteTrace) -> np.ndarray:
    """The routes of each token in a row, (tokens, layers x experts)."""
    used = np.stack([membership(layer, routes.n_expert) for layer in routes.experts], 1)
    return used.reshape(routes.n_tokens, -1)


def predicted_paths(forecast: Forecast) -> np.ndarray:
    """The same as a forecast has them: what it would fetch."""
    return (forecast.wanted > 0).transpose(1, 0, 2).reshape(forecast.wanted.shape[1], -1)


class Needed(NamedTuple):
    """Different experts per layer that a batch needs, on average: as the batches came, and regrouped."""

    before: float
    after: float

    @property
    def saved(self) -> float:
        """Share of them that regrouping saves; negative where it needs more."""
        return 1 - self.after / self.before


def needed(routes: RouteTrace, size: int, by: np.ndarray | None = None) -> Needed:
    """Over all pairs of adjacent batches of `size` tokens, grouped by predicted routes (`by`), else by the true ones. What is counted
    are true routes."""
    paths = paths_of(routes)
    by = paths if by is None else by
    pairs = [slice(at, at + 2 * size) for at in range(0, len(paths) - 2 * size + 1, 2 * size)] if size > 0 else []
    if not pairs or by.shape != paths.shape:
        raise ParameterError(f"batches of {size} tokens from a trace of {len(paths)}, predicted routes of shape {by.shape}",
                             f"1 to {len(paths) // 2} tokens, and {paths.shape}")  # fmt: skip
    as_come = np.arange(size), np.arange(size, 2 * size)
    counts = [(distinct(paths[p], as_come), distinct(paths[p], regroup(by[p]))) for p in pairs]
    return Needed(*(np.sum(counts, 0) / (2 * len(pairs) * routes.n_layers)).tolist())
