"""A small network over the tokens of a text that says the experts of all layers at once, before the first layer runs (the paper's Routing
Path Predictor); and the fitted predictors that come with the shipped models.

The paper's is an encoder-decoder of width 32 with a head per layer. Here one block of causal attention is enough: a token's forecast
depends on the tokens up to it, so decoding can use it as well as reading a prompt. `models/tools/train_route_predictors.py` trains it
with the workbench's own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from workbench import paths
from workbench.errors import FileFormatError, ParameterError, shown, shown_path
from workbench.expertflow.observe import Gates, Seen
from workbench.expertflow.predictors import (
    Cost,
    Frequency,
    GateAhead,
    Oracle,
    Predictor,
    PreviousLayer,
    PreviousToken,
    Shared,
)
from workbench.moe.routes import DAMAGED_NPZ

HEADS, EPS = 2, 1e-5
TYPICAL = 128
"""The place in a text for which the operations of attention are stated; they grow with it."""


class Network(Predictor):
    """Token ids to scores of all experts of all layers: embedding, one block of causal attention and a hidden layer, a head per layer.

    weights: embed (V, D); norm1, norm2, norm3 (D,); q, k, v, out (D, D); up (F, D), up_bias (F,); down (D, F), down_bias (D,);
    head (M·E, D), head_bias (M·E,). Rows of a matrix are outputs, as in GGUF.
    """

    name, reads, ahead = "network over tokens", "token", float("inf")

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self.weights = {k: np.asarray(w, np.float32) for k, w in weights.items()}
        self._kept: list[tuple[Seen, np.ndarray]] = []

    def scores(self, seen: Seen, m: int) -> np.ndarray:
        """All layers are computed at the first call for a run; the last two runs are kept."""
        shape = seen.n_layers * seen.routes.n_expert, self.weights["embed"].shape[1]
        self._require(seen, m, self.weights["head"], shape)
        for run, found in self._kept:
            if run is seen:
                return found[:, m]
        texts = np.split(seen.routes.tokens, np.flatnonzero(np.diff(seen.routes.sequences)) + 1)
        found = np.concatenate([self.forward(t) for t in texts]).reshape(seen.n_tokens, seen.n_layers, -1)
        self._kept = [*self._kept[-1:], (seen, found)]
        return found[:, m]

    def forward(self, tokens: np.ndarray) -> np.ndarray:
        """One text (T,) to scores (T, M·E). Raises ParameterError for a token that the network does not know."""
        w, n = self.weights, len(tokens)
        if n and not 0 <= tokens.min() <= tokens.max() < len(w["embed"]):
            raise ParameterError(f"tokens {tokens.min()} to {tokens.max()}", f"0 to {len(w['embed']) - 1}", "it knows one vocabulary only")
        x = w["embed"][tokens]
        h = _normed(x, w["norm1"])
        q, k, v = ((h @ w[name].T).reshape(n, HEADS, -1).transpose(1, 0, 2) for name in "qkv")
        a = q @ k.transpose(0, 2, 1) / np.float32(q.shape[-1]) ** 0.5
        a[:, ~np.tri(n, dtype=bool)] = -np.inf
        a = np.exp(a - a.max(-1, keepdims=True))
        x = x + ((a / a.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(n, -1) @ w["out"].T
        h = _normed(x, w["norm2"]) @ w["up"].T + w["up_bias"]
        x = x + (h / (1 + np.exp(-h))) @ w["down"].T + w["down_bias"]
        return _normed(x, w["norm3"]) @ w["head"].T + w["head_bias"]

    def cost(self, gates: Gates, m: int) -> Cost:
        """A layer's share of it: all weights lie in memory, and a token reads all but the embedding's other rows."""
        nbytes, layers = sum(w.nbytes for w in self.weights.values()), len(gates.layers)
        products = sum(w.size for name, w in self.weights.items() if w.ndim == 2 and name != "embed")
        return Cost(nbytes // layers, (2 * products + 4 * self.weights["embed"].shape[1] * TYPICAL) // layers)


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(EPS)) * weight


# ---- what comes with the shipped models

FITTED = {"linear-1": (1, 0, "normed"), "linear-2": (2, 0, "normed"), "non-linear-1": (1, 64, "normed"), "non-linear-2": (2, 64, "normed"),
          "linear-on-scores-1": (1, 0, "logits")}  # fmt: skip
"""Layers on what the router computed: how far they look ahead, their hidden width, and what they read."""


def names() -> list[str]:
    """All predictors by name."""
    return ["frequency", "previous-token", "previous-layer", *(f"gate-{n}" for n in range(5)), *FITTED, "network", "oracle"]


def unfitted(name: str) -> Predictor:
    """A predictor by its name, of `names()` or a layer on another number of layers ahead ("linear-3"), without weights. The network
    has none such: it is trained by a script. Raises ParameterError."""
    simple = {"frequency": Frequency, "previous-token": PreviousToken, "previous-layer": PreviousLayer, "oracle": Oracle}
    word, _, ahead = name.rpartition("-")
    if name in simple:
        return simple[name]()
    if word == "gate" and ahead.isdecimal():
        return GateAhead(int(ahead))
    if f"{word}-1" in FITTED and ahead.isdecimal():
        return Shared(int(ahead), *FITTED[f"{word}-1"][1:])
    raise ParameterError(f"predictor {shown(name)!r}", f"one of {', '.join(n for n in names() if n != 'network')}")


def shipped_predictors(model: str) -> dict[str, Predictor]:
    """All predictors by name, fitted on the first sequences of each domain of a shipped model's trace ("tiny-mixtral")."""
    return load_predictors(paths.models_dir() / "predictors" / f"{model}.npz")


def load_predictors(path: str | Path) -> dict[str, Predictor]:
    """Those of a file written by `save_predictors`. Raises FileFormatError where it is none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {k: v.astype(np.float32) for k, v in dict(file).items()}
        given = {n: Shared(*how, data[n]) for n, how in FITTED.items()}
        network = Network({k.partition("/")[2]: v for k, v in data.items() if k.startswith("network/")})
        found = {"frequency": Frequency(data["frequency"]), "previous-token": PreviousToken(data["frequency"]),
                 "previous-layer": PreviousLayer(data["previous-layer"]), **{f"gate-{n}": GateAhead(n) for n in range(5)}, **given,
                 "network": network, "oracle": Oracle()}  # fmt: skip
        network.forward(np.zeros(1, np.int64))
    except DAMAGED_NPZ as e:
        raise FileFormatError(f"{shown_path(path)} holds no predictors: {shown(getattr(e, 'found', e))}",
                              "a file written by models/tools/train_route_predictors.py") from None  # fmt: skip
    return {n: found[n] for n in names()}


def save_predictors(path: str | Path, fitted: Mapping[str, Predictor]) -> None:
    """Store the weights of fitted predictors (all that `names` lists and that have any), as f16."""
    frequency, below, network = fitted["frequency"], fitted["previous-layer"], fitted["network"]
    assert isinstance(frequency, Frequency) and isinstance(below, PreviousLayer) and isinstance(network, Network)
    arrays = {"frequency": frequency.shares, "previous-layer": below.given, **{n: fitted[n].weights for n in FITTED},  # type: ignore[attr-defined]
              **{f"network/{k}": w for k, w in network.weights.items()}}  # fmt: skip
    np.savez_compressed(path, **{k: np.asarray(w, np.float16) for k, w in arrays.items()})  # type: ignore[arg-type]
