"""How good a forecast of routes is: recall and precision together, what it fetches, and what it costs.

Recall alone says nothing: a forecast of all experts has recall 1. So every result carries precision, the bytes of the experts fetched,
and the bytes and operations of the predictor. For batches there is the paper's accuracy (B_acc): recall of the experts that any token of
the batch uses, beside its precision and beside what fetching at random would give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench.errors import ParameterError, ShapeError
from workbench.expertflow.observe import Seen
from workbench.expertflow.predictors import Predictor
from workbench.moe import RouteTrace

Choose = Callable[[np.ndarray, int], np.ndarray]
"""Which experts to fetch: scores (N, E) and the number of an expert layer to (N, E) of True and False."""


class Score(NamedTuple):
    """One predictor on one expert layer. fetched: experts per token; recall: of the experts used, those fetched; precision: of those
    fetched, the ones used; best: the highest-weighted expert was fetched; exact: exactly the ones used were.
    moved: bytes of the experts fetched for a token; nbytes, flops: of the predictor, per token."""

    predictor: str
    layer: int
    tokens: int
    fetched: float
    recall: float
    precision: float
    best: float
    exact: float
    moved: float
    nbytes: int
    flops: int


@dataclass(frozen=True)
class Coverage:
    """A forecast for batches of tokens, mean over batches: experts needed and fetched by a batch, recall (B_acc) and precision of that,
    and the recall of as many experts fetched at random."""

    size: int
    batches: int
    needed: float
    fetched: float
    recall: float
    precision: float
    chance: float


def top(n: int) -> Choose:
    """Fetch the n best of each token."""
    if not isinstance(n, int) or n < 1:
        raise ParameterError(f"top({n!r})", "1 expert or more")

    def choose(scores: np.ndarray, m: int) -> np.ndarray:
        if n > scores.shape[1]:
            raise ParameterError(f"the {n} best of {scores.shape[1]} experts", f"1 to {scores.shape[1]}")
        return ranks(scores) < n

    return choose


def ranks(scores: np.ndarray) -> np.ndarray:
    """The place of each expert among those of its token, 0 for the best; of equals the lowest number comes first. (N, E)"""
    order = np.argsort(-scores, 1, kind="stable")
    out = np.empty_like(order)
    np.put_along_axis(out, order, np.arange(scores.shape[1])[None], 1)
    return out


def scores_of(predictor: Predictor, seen: Seen, m: int) -> np.ndarray:
    """What a predictor says on expert layer `m`, (N, E), checked. Raises ShapeError for scores that are no numbers."""
    scores = np.asarray(predictor.scores(seen, m))
    if scores.shape != (seen.n_tokens, seen.routes.n_expert):
        raise ShapeError(f"scores {scores.shape} of {predictor.name}", f"({seen.n_tokens} tokens, {seen.routes.n_expert} experts)")
    if not np.isfinite(scores).all():
        bad = int((~np.isfinite(scores)).sum())
        raise ShapeError(f"{bad} scores of {predictor.name} on expert layer {m} that are not numbers (NaN or infinite)", "finite scores",
                         "look for NaN in the hidden states it reads")  # fmt: skip
    return scores


def evaluate(predictor: Predictor, seen: Seen, choose: Choose, where: np.ndarray | None = None) -> list[Score]:
    """One score for each expert layer that the predictor speaks on. where (N,): judge these tokens only."""
    rows = slice(None) if where is None else where
    n = len(seen.routes.tokens[rows])
    if not n:
        raise ParameterError("no tokens to judge", "one or more")
    out = []
    for m in (m for m in range(seen.n_layers) if predictor.speaks(m, seen.gates)):
        chosen, used = choose(scores_of(predictor, seen, m)[rows], m), seen.used(m)[rows]
        both, fetched = (chosen & used).sum(), chosen.sum()
        best = np.take_along_axis(chosen, seen.routes.experts[m, rows, :1].astype(np.int64), 1)
        nbytes = seen.gates.expert_bytes[m] if seen.gates.expert_bytes else 0
        shares = (fetched / n, both / used.sum(), both / max(fetched, 1), best.mean(), (chosen == used).all(1).mean(), fetched / n * nbytes)
        out.append(Score._make((predictor.name, int(seen.routes.layers[m]), n, *map(float, shares), *predictor.cost(seen.gates, m))))
    return out


def mean(scores: Iterable[Score]) -> Score:
    """The mean over layers, layer -1; precision is that of all fetches together, and a predictor's bytes are added up."""
    rows = list(scores)
    if not rows:
        raise ParameterError("no scores", "those of one layer or more", "does the predictor speak on any layer?")
    fetched, recall, _, best, exact, moved, nbytes, flops = np.array([r[3:] for r in rows], float).mean(0).tolist()
    right = sum(r.precision * r.fetched for r in rows) / max(sum(r.fetched for r in rows), 1e-12)
    n = len(rows)
    return Score(rows[0].predictor, -1, rows[0].tokens, fetched, recall, right, best, exact, moved, round(nbytes * n), round(flops * n))


def curve(predictor: Predictor, seen: Seen, where: np.ndarray | None = None) -> np.ndarray:
    """Recall and precision when the 1, 2, … E best are fetched, mean over the layers it speaks on: (2, E)."""
    rows = slice(None) if where is None else where
    found = []
    for m in (m for m in range(seen.n_layers) if predictor.speaks(m, seen.gates)):
        place = np.take_along_axis(ranks(scores_of(predictor, seen, m)[rows]), seen.routes.experts[m, rows].astype(np.int64), 1)
        found.append(np.bincount(place.ravel(), minlength=seen.routes.n_expert).cumsum() / place.size)
    recall = np.mean(found, 0)
    return np.stack([recall, recall * seen.routes.k / np.arange(1, seen.routes.n_expert + 1)])


# ---- batches


def batches(routes: RouteTrace, size: int, order: np.ndarray | None = None) -> np.ndarray:
    """The number of the batch that each token belongs to, when `size` sequences are decoded side by side: tokens of one batch have the
    same position. order: the sequences, those that stand together first (default: as they come)."""
    numbers = np.unique(routes.sequences) if order is None else np.asarray(order)
    if not 1 <= size <= len(numbers):
        raise ParameterError(f"batches of {size!r} sequences", f"1 to {len(numbers)}: as many as there are")
    team = np.full(int(routes.sequences.max()) + 1, -1)
    team[numbers] = np.arange(len(numbers)) // size
    longest = int(routes.positions.max()) + 1
    return team[routes.sequences] * longest + routes.positions


def coverage(predictor: Predictor, seen: Seen, choose: Choose, groups: np.ndarray) -> Coverage:
    """What a forecast is worth to batches: an expert is needed or fetched when any token of the batch needs or fetches it."""
    labels, groups = np.unique(groups, return_inverse=True)
    n_expert, sums = seen.routes.n_expert, np.zeros(5)
    spoken = [m for m in range(seen.n_layers) if predictor.speaks(m, seen.gates)]
    for m in spoken:
        need, have = (_unions(rows, groups, len(labels)) for rows in (seen.used(m), choose(scores_of(predictor, seen, m), m)))
        both, n_need, n_have = (need & have).sum(1), need.sum(1), have.sum(1)
        sums += [n_need.mean(), n_have.mean(), (both / n_need).mean(), (both / np.maximum(n_have, 1)).mean(), n_have.mean() / n_expert]
    size = round(len(groups) / len(labels))
    return Coverage(size, len(labels), *(sums / len(spoken)).tolist())


def _unions(rows: np.ndarray, groups: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros((n, rows.shape[1]), bool)
    np.logical_or.at(out, groups, rows)
    return out
