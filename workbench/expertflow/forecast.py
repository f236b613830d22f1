"""Forecasts while a model runs: after a layer's router has spoken, the experts of the layers to come.

A `Forecaster` turns route predictors, which are made and judged on recorded runs, into something that an engine can ask between
two layers: it shows them what is known by now, and takes the most likely experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from workbench.errors import ParameterError
from workbench.expertflow.observe import Gates, Seen
from workbench.expertflow.predictors import GateAhead, Predictor
from workbench.moe import RouteTrace


class Forecaster:
    """Asks predictors about the next layers.

    predictors: the one that looks 1 layer ahead, 2 layers ahead, …: as many as the window is wide. fetch: experts to name per token
    and layer (default k). Counted: asked, forecasts made; nbytes, flops: what the predictors cost.
    """

    def __init__(self, gates: Gates, predictors: Sequence[Predictor], fetch: int | None = None) -> None:
        for distance, p in enumerate(predictors, 1):
            known = p.ahead == distance if p.reads in ("state", "routes") else p.reads == "nothing"
            if not known:
                raise ParameterError(f"{p.name} for layers {distance} ahead", f"one that speaks {distance} layers before the router",
                                     "and reads nothing but the present layer")  # fmt: skip
        self.gates, self.predictors = gates, list(predictors)
        self.fetch = gates.k if fetch is None else fetch
        if not 1 <= self.fetch <= gates.n_expert:
            raise ParameterError(f"fetch={fetch!r}", f"1 to {gates.n_expert} experts")
        self.asked, self.flops = 0, 0
        self.nbytes = sum(p.cost(gates, m).nbytes for p in self.predictors for m in range(len(gates.layers)) if p.speaks(m, gates))

    @classmethod
    def of_gates(cls, gates: Gates, window: int = 1, fetch: int | None = None) -> Forecaster:
        """The routers of the next layers on the present state: nothing is trained."""
        return cls(gates, [GateAhead(n) for n in range(1, window + 1)], fetch)

    def after(self, layer: int, ids: np.ndarray, normed: np.ndarray) -> Iterator[tuple[int, dict[int, float]]]:
        """What the next layers will want: (layer, expert -> share of the tokens that are expected there).

        ids (T, k) are the experts of `layer`; normed (T, D) is what its router read.
        """
        gates, now = self.gates, self.gates.layers.index(layer)
        seen = self._seen(now, ids, normed)
        for distance, predictor in enumerate(self.predictors, 1):
            if layer + distance not in gates.layers:
                continue
            m = gates.layers.index(layer + distance)
            if not predictor.speaks(m, gates):
                continue
            self.asked += 1
            self.flops += predictor.cost(gates, m).flops * len(ids)
            best = np.argsort(-predictor.scores(seen, m), axis=1, kind="stable")[:, : self.fetch]
            counts = np.bincount(best.ravel(), minlength=gates.n_expert) / len(ids)
            yield layer + distance, {int(e): float(counts[e]) for e in np.flatnonzero(counts)}

    def _seen(self, now: int, ids: np.ndarray, normed: np.ndarray) -> Seen:
        """A run of which nothing is known but the present layer. A norm does not see the length of a state, so the state before
        the norm is as good as what came out of it, without the norm's weights."""
        gates, n = self.gates, len(ids)
        layers, layer = len(gates.norms), gates.layers[now]
        states = np.zeros((layers, n, gates.width), np.float32)
        states[layer] = normed / gates.norms[layer]
        experts = np.zeros((len(gates.layers), n, gates.k), np.int32)
        experts[now] = ids
        none, weights = np.zeros(n, np.int64), np.full(experts.shape, np.nan, np.float32)
        routes = RouteTrace(experts, weights, np.array(gates.layers), none, none, none, gates.n_expert)
        return Seen(routes, states, states, gates)
