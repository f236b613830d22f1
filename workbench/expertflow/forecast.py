"""Forecasts while a model runs: after a layer's router has spoken, the experts of the layers to come.

A `Forecaster` turns route predictors, which are made and judged on recorded runs, into something that an engine can ask between
two layers: it shows them what is known by now, and takes the most likely experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isinf

import numpy as np

from workbench.errors import ParameterError
from workbench.expertflow.observe import Gates, Seen
from workbench.expertflow.predictors import GateAhead, OrElse, Predictor, PreviousToken
from workbench.moe import RouteTrace


class Forecaster:
    """Asks predictors about the next layers, and counts how right they are.

    predictors: the one that looks 1 layer ahead, 2 layers ahead, …: as many as the window is wide; past the last layer, those that
    need nothing of a token itself speak about the first layers of the next one. fetch: experts to name per token and layer (default k).
    guesses: for each layer the experts named last, (T, fetch). Counted: asked, forecasts made; wanted, the experts that layers with
    a forecast needed, once in a batch, and foretold, those of them that it had named; nbytes, flops: what the predictors cost.
    """

    def __init__(self, gates: Gates, predictors: Sequence[Predictor], fetch: int | None = None) -> None:
        for distance, predictor in enumerate(predictors, 1):
            for p in _parts(predictor):
                if not (p.ahead == distance and p.reads in ("state", "routes") or p.reads == "nothing" or isinstance(p, PreviousToken)):
                    raise ParameterError(f"{p.name}, for layers {distance} ahead", f"one that speaks {distance} layers before the router "
                                         "and reads the present layer, or what the token before used", "a smaller window")  # fmt: skip
                if isinf(p.ahead) and distance > len(gates.layers):
                    raise ParameterError(f"a window of {len(predictors)} layers", f"at most {len(gates.layers)}: so many have experts")
        self.gates, self.predictors = gates, list(predictors)
        self.fetch = gates.k if fetch is None else fetch
        if not 1 <= self.fetch <= gates.n_expert:
            raise ParameterError(f"fetch={fetch!r}", f"1 to {gates.n_expert} experts")
        self.asked = self.flops = self.wanted = self.foretold = 0
        self.guesses: dict[int, np.ndarray] = {}
        self._last: dict[int, np.ndarray] = {}
        self._kept: Seen | None = None
        self._plan = {layer: list(self._speakers(now)) for now, layer in enumerate(gates.layers)}
        different = dict.fromkeys(p for predictor in predictors for p in _parts(predictor))
        self.nbytes = sum(p.cost(gates, m).nbytes for p in different for m in range(len(gates.layers)) if p.speaks(m, gates))

    @classmethod
    def of_gates(cls, gates: Gates, window: int = 1, fetch: int | None = None) -> Forecaster:
        """The routers of the next layers on the present state: nothing is trained."""
        return cls(gates, [GateAhead(n) for n in range(1, window + 1)], fetch)

    @property
    def recall(self) -> float:
        """Share of the experts needed that the last forecast before had named; NaN where there was none."""
        return self.foretold / self.wanted if self.wanted else float("nan")

    def after(self, layer: int, ids: np.ndarray, normed: np.ndarray) -> Iterator[tuple[int, dict[int, float]]]:
        """What the next layers will want: (layer, expert -> share of the tokens that are expected there).

        ids (T, k) are the experts of `layer`; normed (T, D) is what its router read.
        """
        if layer in self.guesses:
            used = set(ids.ravel().tolist())
            self.wanted += len(used)
            self.foretold += len(used.intersection(self.guesses[layer].ravel().tolist()))
        self._last[layer] = np.array(ids)
        seen = self._seen(layer, ids, normed)
        for p, m, flops in self._plan[layer]:
            self.asked += 1
            self.flops += flops * len(ids)
            scores = p.following(self._before(m, len(ids)), m) if isinstance(p, PreviousToken) else p.scores(seen, m)
            best = np.argsort(-scores, axis=1, kind="stable")[:, : self.fetch]
            self.guesses[self.gates.layers[m]] = best
            yield self.gates.layers[m], {e: n / len(ids) for e, n in sorted(Counter(best.ravel().tolist()).items())}

    def _speakers(self, now: int) -> Iterator[tuple[Predictor, int, int]]:
        """After expert layer `now`: who speaks about which expert layer, and its operations per token."""
        gates = self.gates
        for distance, predictor in enumerate(self.predictors, 1):
            ahead = gates.layers[now] + distance
            for p in _parts(predictor):
                across = isinf(p.ahead)
                m = (now + distance) % len(gates.layers) if across else gates.layers.index(ahead) if ahead in gates.layers else -1
                if across or m >= 0 and p.speaks(m, gates):
                    yield p, m, p.cost(gates, m).flops
                    break

    def _before(self, m: int, n: int) -> np.ndarray:
        """What the token before each of `n` used in expert layer `m`, (n, k): where a step has the same sequences as the last one, or
        a single token; -1 where nobody was before."""
        last = self._last.get(self.gates.layers[m], np.empty((0, self.gates.k), np.int64))
        return last[len(last) - n :] if len(last) >= n else np.full((n, self.gates.k), -1)

    def _seen(self, layer: int, ids: np.ndarray, normed: np.ndarray) -> Seen:
        """A run of which the present layer is known, and of the others what earlier calls left, which nobody reads. A norm does not see
        the length of a state, so the state before the norm is as good as what came out of it, without the norm's weights."""
        gates, n = self.gates, len(ids)
        if self._kept is None or self._kept.n_tokens != n:
            experts, states = np.zeros((len(gates.layers), n, gates.k), np.int32), np.zeros((len(gates.norms), n, gates.width), np.float32)
            none, weights = np.zeros(n, np.int64), np.full(experts.shape, np.nan, np.float32)
            routes = RouteTrace(experts, weights, np.array(gates.layers), none, none, none, gates.n_expert)
            self._kept = Seen(routes, states, states, gates)
        np.divide(normed, gates.norms[layer], out=self._kept.states[layer])
        self._kept.routes.experts[gates.layers.index(layer)] = ids
        return self._kept


def _parts(predictor: Predictor) -> list[Predictor]:
    """Those that it asks one after another."""
    return [*_parts(predictor.first), *_parts(predictor.other)] if isinstance(predictor, OrElse) else [predictor]
