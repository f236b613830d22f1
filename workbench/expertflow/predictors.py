"""Route predictors: which experts tokens will be sent to, said before their router says it.

Each gives every expert of a layer a score; which of them are then fetched is decided elsewhere (`scoring.top`, `Calibration`). A
predictor reads only what is there when it has to speak; only the `Oracle` reads the answer. The router decides what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from workbench.devices.threads import SINGLE_THREADED_BLAS
from workbench.errors import ParameterError
from workbench.expertflow.observe import Gates, Seen, membership

NEVER = np.float32(-1e9)
"""The score of an expert that a predictor is sure is not used: finite, so that scores can be subtracted."""
RIDGE = 10.0
"""Weight of the penalty in least squares, as in `models/tools/make_traces.py`."""
NORM = 4  # operations per number of a norm with weights


class Cost(NamedTuple):
    """What a predictor adds for one layer: bytes that stay in memory besides the model, and operations per token."""

    nbytes: int
    flops: int


class Predictor:
    """What all predictors have in common.

    name: for tables. ahead: how many layers before the router's own the predictor can speak; 0: in the same layer, before its attention.
    reads: what must be known of the token then: "nothing", its "token" ids, its hidden "state", or "routes" (of it or of the one before).
    """

    name, reads = "", "nothing"
    ahead: float = 1

    def speaks(self, m: int, gates: Gates) -> bool:
        """Whether it has anything to say on expert layer `m`."""
        return True

    def fit(self, seen: Seen) -> Predictor:
        """Learn from a run; returns itself. Nothing is learnt by those that need no fit."""
        return self

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """For expert layer `m`, (N, E): the higher, the more likely used. Raises ParameterError where it does not speak."""
        raise NotImplementedError

    def cost(self, gates: Gates, m: int) -> Cost:
        """What it costs for expert layer `m`."""
        return Cost(0, 0)

    def _require(self, seen: Seen, m: int, fitted: np.ndarray | None, shape: tuple[int, ...]) -> None:
        if not self.speaks(m, seen.gates):
            raise ParameterError(f"{self.name} was asked about expert layer {m}", "a layer that it speaks on: see speaks()")
        if fitted is None:
            raise ParameterError(f"{self.name} was asked before it was fitted", "fit(seen), or weights from shipped_predictors()")
        if fitted.shape != shape:
            raise ParameterError(f"{self.name} was fitted with weights {fitted.shape}", f"{shape}: this model is another one")

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Oracle(Predictor):
    """Knows the answer: what no predictor can beat, and what perfect ones would still have to fetch."""

    name, reads, ahead = "oracle", "routes", float("inf")

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """The experts used, best first, far above all others."""
        routes = seen.routes
        out = np.full((routes.n_tokens, routes.n_expert), NEVER)
        np.put_along_axis(out, routes.experts[m].astype(np.int64), -np.arange(routes.k, dtype=np.float32), 1)
        return out


class Frequency(Predictor):
    """The experts that are used most often, whatever the token: a static hot set (`frequency_global` in `models/metrics`)."""

    name, ahead = "frequency", float("inf")

    def __init__(self, shares: np.ndarray | None = None) -> None:
        self.shares = shares  # (M, E): of the tokens that used the expert

    def fit(self, seen: Seen) -> Frequency:
        """Count."""
        self.shares = np.stack([seen.used(m).mean(0) for m in range(seen.n_layers)]).astype(np.float32)
        return self

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """The same for every token."""
        self._require(seen, m, self.shares, (seen.n_layers, seen.routes.n_expert))
        return np.broadcast_to(_log(self.shares[m]), (seen.n_tokens, seen.routes.n_expert))  # type: ignore[index]

    def cost(self, gates: Gates, m: int) -> Cost:
        """A number per expert."""
        return Cost(4 * gates.n_expert, 0)


class PreviousToken(Frequency):
    """What the token before used in the same layer, then the most frequent ones (TLP in the paper; `previous_token`)."""

    name, reads = "previous token", "routes"

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """At the start of a sequence, where nothing was before: the frequencies alone."""
        self._require(seen, m, self.shares, (seen.n_layers, seen.routes.n_expert))
        before = np.vstack([np.full((1, seen.routes.k), -1), seen.routes.experts[m][:-1].astype(np.int64)])
        before[np.diff(seen.routes.sequences, prepend=-1) != 0] = -1
        return self.following(before, m)

    def following(self, before: np.ndarray, m: int) -> np.ndarray:
        """The scores of tokens whose predecessors used `before` (N, k) in expert layer `m`; -1 for none."""
        if self.shares is None:
            raise ParameterError(f"{self.name} was asked before it was fitted", "fit(seen)")
        return _log(membership(before, len(self.shares[m])) + 1e-3 * self.shares[m])


class PreviousLayer(Predictor):
    """What went with the experts of the layer below when it was fitted (SLP in the paper; `previous_layer_experts`)."""

    name, reads = "previous layer", "routes"

    def __init__(self, given: np.ndarray | None = None) -> None:
        self.given = given  # (M, E, E): share of the tokens with expert e below that use expert f here

    def speaks(self, m: int, gates: Gates) -> bool:
        """Not on the first layer with experts."""
        return m > 0

    def fit(self, seen: Seen) -> PreviousLayer:
        """Count pairs."""
        sets = [seen.used(m).astype(np.float64) for m in range(seen.n_layers)]
        pairs = [np.zeros((seen.routes.n_expert,) * 2), *(a.T @ b for a, b in zip(sets, sets[1:]))]
        self.given = np.stack([p / np.maximum(p.sum(1, keepdims=True), 1) for p in pairs]).astype(np.float32)
        return self

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """The mean over the experts used below."""
        self._require(seen, m, self.given, (seen.n_layers, seen.routes.n_expert, seen.routes.n_expert))
        return _log(seen.used(m - 1).astype(np.float32) @ self.given[m] / seen.routes.k)  # type: ignore[index]

    def cost(self, gates: Gates, m: int) -> Cost:
        """A table of all pairs; k rows of it are added."""
        return Cost(4 * gates.n_expert**2, gates.k * gates.n_expert)


class GateAhead(Predictor):
    """The norm and router of a layer to come, on the hidden state that is there now: nothing is trained (Eliseev and Mazur).

    ahead: 1 to 4 layers (`next_gate_on_prev_layer` and so on); 0: on what enters the layer, before its attention (`gate_on_block_input`).
    """

    reads = "state"

    def __init__(self, ahead: int = 1) -> None:
        if ahead not in range(5):
            raise ParameterError(f"ahead={ahead!r}", "1 to 4 layers, or 0: before the attention of the same layer")
        self.ahead, self.name = ahead, f"gate, {ahead} ahead" if ahead else "gate, before attention"

    def speaks(self, m: int, gates: Gates) -> bool:
        """Where there is a layer that far below."""
        return gates.layers[m] >= self.ahead

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """What the router would say to the state of the earlier layer."""
        self._require(seen, m, seen.states, seen.states.shape)
        return seen.gates.scores(_state(seen, m, int(self.ahead)), m)

    def cost(self, gates: Gates, m: int) -> Cost:
        """No memory: the router is there already. One more norm and product."""
        return Cost(0, (NORM + 2 * gates.n_expert) * gates.width)


class Shared(Predictor):
    """A small layer on what the router of an earlier layer has computed anyway (the seed's section 5.4).

    of="normed": on its normalised state (D numbers); "logits": on its scores (E numbers). hidden: 0 for one linear layer, fitted by least
    squares; else the width of a non-linear layer before it (the seed's remedy for low recall), trained by gradients.
    """

    reads = "state"

    def __init__(self, ahead: int = 1, hidden: int = 0, of: str = "normed", weights: np.ndarray | None = None) -> None:
        if of not in ("normed", "logits") or ahead not in range(1, 5) or hidden < 0:
            raise ParameterError(f"ahead={ahead!r}, hidden={hidden!r}, of={of!r}",
                                 'ahead 1 to 4, hidden 0 or more, of "normed" or "logits"')  # fmt: skip
        self.ahead, self.hidden, self.of = ahead, hidden, of
        self.name = f"{f'non-linear {hidden}' if hidden else 'linear'}{' on scores' * (of == 'logits')}, {ahead} ahead"
        self.weights = weights  # (M, all numbers of a layer, flat)

    def speaks(self, m: int, gates: Gates) -> bool:
        """Where the layer that far below has a router."""
        return gates.layers[m] - self.ahead in gates.layers if self.of == "logits" else gates.layers[m] >= self.ahead

    def fit(self, seen: Seen) -> Shared:
        """Towards what the true router says: its scores (linear), or which experts it takes (non-linear)."""
        size = self._size(seen.gates)
        self.weights = np.zeros((seen.n_layers, size), np.float32)
        with SINGLE_THREADED_BLAS:  # many small products: its threads would only wait for each other
            for m in (m for m in range(seen.n_layers) if self.speaks(m, seen.gates)):
                x = self._inputs(seen, m)
                self.weights[m] = (_train(x, seen.used(m), self.hidden, seed=m) if self.hidden else
                                   _least_squares(x, seen.gates.scores(seen.states[seen.gates.layers[m]], m))).ravel()  # fmt: skip
        return self

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """One or two products."""
        self._require(seen, m, self.weights, (seen.n_layers, self._size(seen.gates)))
        return _forward(self._inputs(seen, m), self.weights[m], self.hidden, seen.routes.n_expert)[-1]  # type: ignore[index]

    def cost(self, gates: Gates, m: int) -> Cost:
        """Its weights, each used once per token."""
        return Cost(4 * self._size(gates), 2 * self._size(gates))

    def _size(self, gates: Gates) -> int:
        d, e = self._width(gates), gates.n_expert
        return (d + 1) * self.hidden + (self.hidden + 1) * e if self.hidden else (d + 1) * e

    def _width(self, gates: Gates) -> int:
        return gates.width if self.of == "normed" else gates.n_expert

    def _inputs(self, seen: Seen, m: int) -> np.ndarray:
        gates, state = seen.gates, _state(seen, m, int(self.ahead))
        below = gates.layers[m] - int(self.ahead)
        return gates.scores(state, gates.layers.index(below)) if self.of == "logits" else gates.normed(state, below)


class OrElse(Predictor):
    """One predictor where it speaks, another one where it does not: so every layer has a forecast."""

    def __init__(self, first: Predictor, other: Predictor) -> None:
        self.first, self.other, self.ahead, self.name = first, other, first.ahead, f"{first.name}, else {other.name}"

    def choose(self, m: int, gates: Gates) -> Predictor:
        """The one that speaks on expert layer `m`."""
        return self.first if self.first.speaks(m, gates) else self.other

    def speaks(self, m: int, gates: Gates) -> bool:
        """Whether either does."""
        return self.choose(m, gates).speaks(m, gates)

    def fit(self, seen: Seen) -> OrElse:
        """Both."""
        self.first.fit(seen)
        self.other.fit(seen)
        return self

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """Those of the one that speaks."""
        return self.choose(m, seen.gates).scores(seen, m)

    def cost(self, gates: Gates, m: int) -> Cost:
        """That of the one that speaks."""
        return self.choose(m, gates).cost(gates, m)


# ---- arithmetic


def _log(shares: np.ndarray) -> np.ndarray:
    """Logarithms; of nothing, far below."""
    return np.log(np.maximum(shares, 1e-30)).astype(np.float32)


def _state(seen: Seen, m: int, ahead: int) -> np.ndarray:
    layer = seen.gates.layers[m]
    return seen.states[layer - ahead] if ahead else seen.inputs[layer]


def _least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(width + 1, E): the linear map of (x, 1) that comes closest to y, with a small penalty on large weights."""
    one = np.hstack([x, np.ones((len(x), 1))]).astype(np.float64)
    return np.linalg.solve(one.T @ one + RIDGE * np.eye(one.shape[1]), one.T @ y).astype(np.float32)


def _parts(weights: np.ndarray, width: int, hidden: int) -> Iterator[np.ndarray]:
    """The matrices in a layer's flat weights, each with its biases as the last row."""
    border = (width + 1) * hidden
    if hidden:
        yield weights[:border].reshape(width + 1, hidden)
    yield weights[border:].reshape((hidden or width) + 1, -1)


def _forward(x: np.ndarray, weights: np.ndarray, hidden: int, n_expert: int) -> list[np.ndarray]:
    """x, what the hidden layer gives (if there is one), and the scores."""
    out = [x]
    for matrix in _parts(weights, x.shape[1], hidden):
        out.append((np.maximum(out[-1], 0) if len(out) > 1 else out[-1]) @ matrix[:-1] + matrix[-1])
    assert out[-1].shape[1] == n_expert
    return out


def _train(x: np.ndarray, used: np.ndarray, hidden: int, seed: int, batch: int = 256, rate: float = 3e-3) -> np.ndarray:
    """Weights of a network with one hidden layer (ReLU) that says which experts are used: cross entropy per expert, Adam.

    Twelve times through all tokens, and at least 800 steps.
    """
    rng, (n, width), n_expert = np.random.default_rng(seed), x.shape, used.shape[1]
    size = (width + 1) * hidden, (hidden + 1) * n_expert
    starts = [rng.normal(size=s) / np.sqrt(s / c) for s, c in zip(size, (hidden, n_expert))]
    w: np.ndarray = np.concatenate(starts).astype(np.float32)
    mean, square, steps = np.zeros_like(w), np.zeros_like(w), 0
    n_batches = -(-n // batch)
    epochs = max(12, -(-800 // n_batches))
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(n), n_batches):
            inside, h, s = _forward(x[rows], w, hidden, n_expert)
            first, last = _parts(w, width, hidden)
            error = (1 / (1 + np.exp(-s)) - used[rows]) / len(rows)
            back = (error @ last[:-1].T) * (h > 0)
            grads = [np.vstack([inside.T @ back, back.sum(0)]), np.vstack([np.maximum(h, 0).T @ error, error.sum(0)])]
            grad, steps = np.concatenate([g.ravel() for g in grads]), steps + 1
            mean, square = 0.9 * mean + 0.1 * grad, 0.99 * square + 0.01 * grad * grad
            slow = rate * (1 - steps / (epochs * n_batches + 1))
            w = w - slow * (mean / (1 - 0.9**steps)) / (np.sqrt(square / (1 - 0.99**steps)) + 1e-8)
    return w.astype(np.float32)
