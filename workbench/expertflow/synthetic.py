"""Synthetic route traces, matched to the published statistics of a large model.

In each layer a part of the experts is active, with a popularity that falls with their rank to the power -zipf. "skewed-static" draws k of
them for each token. "local-drifting" keeps each expert of the token before with probability `reused`, and draws the others; and two
random experts change ranks once per token and 896 experts, so that favourites do not last.

The three numbers of each layer are fitted by `models/tools/fit_synthetic.py` to what heyobi/LazyLora published of Kimi K3 (896 experts, 16
used, 92 layers): shares, entropy and reuse over a paragraph of 159 tokens. How fast favourites drift is not published, and set by hand.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator

import numpy as np

from workbench import paths
from workbench.errors import ParameterError, shown
from workbench.moe import RouteTrace

SYNTHETIC = {
    "skewed-static": "synthetic: few experts do most of the work, always the same; matched to Kimi K3's shares, not to its reuse",
    "local-drifting": "synthetic: experts are often used again at once, favourites change; matched to Kimi K3's shares and reuse",
}
"""Every kind, with what to say of it."""


def synthetic(kind: str, n_tokens: int = 2000, n_layers: int = 8, n_expert: int = 896, k: int = 16, seed: int = 0) -> RouteTrace:
    """A trace of one sequence. Fewer layers than 92 take some of the fitted ones, evenly; other numbers of experts are an extrapolation."""
    if kind not in SYNTHETIC:
        raise ParameterError(f"synthetic trace {shown(kind)!r}", f"one of {', '.join(SYNTHETIC)}")
    if min(n_tokens, n_layers, k) < 1 or not k <= n_expert <= 1 << 16:
        raise ParameterError(f"{n_tokens} tokens, {n_layers} layers, {k} of {n_expert} experts", "one or more, k no more than there are")
    with (paths.models_dir() / "traces" / "kimi-k3_fit.csv").open(newline="") as file:
        table = [[float(row[c]) for c in ("zipf", "active", "reused")] for row in csv.DictReader(file) if row["kind"] == kind]
    fit = np.array(table)[np.arange(n_layers) * len(table) // n_layers]
    experts = np.concatenate(list(draw(fit, n_tokens, n_expert, k, kind == "local-drifting", seed)), 1)
    at, zero = np.arange(n_tokens, dtype=np.int32), np.zeros(n_tokens, np.int32)
    return RouteTrace(experts.astype(np.uint8 if n_expert <= 256 else np.uint16), np.full(experts.shape, np.nan, np.float32),
                      np.arange(n_layers, dtype=np.int32), zero, at, zero, n_expert)  # fmt: skip


def draw(fit: np.ndarray, n_tokens: int, n_expert: int, k: int, local: bool, seed: int) -> Iterator[np.ndarray]:
    """Blocks (layers, tokens, k) of drawn experts. fit (layers, 3): zipf, how many of 896 are active, reused."""
    rng, n_layers, ranks = np.random.default_rng(seed), len(fit), np.arange(n_expert)
    active = np.maximum(max(2 * k, 64), np.round(fit[:, 1:2] * n_expert / 896))  # of few experts all are in use
    popular = np.where(ranks < active, -fit[:, :1] * np.log(ranks + 1), -np.inf)
    log_p = np.take_along_axis(popular, np.argsort(rng.random((n_layers, n_expert)), 1), 1)
    if not local:
        block = max(1, (1 << 22) // log_p.size)
        for start in range(0, n_tokens, block):
            score = log_p[:, None] + rng.gumbel(size=(n_layers, min(block, n_tokens - start), n_expert))
            yield _best(score, k)
        return
    before = np.zeros((n_layers, 0), np.int64)
    for _ in range(n_tokens):
        score = log_p + rng.gumbel(size=log_p.shape)
        layer, place = np.nonzero(rng.random(before.shape) < fit[:, 2:])
        score[layer, before[layer, place]] = np.inf
        before = _best(score, k)
        yield before[:, None]
        for i in np.repeat(np.arange(n_layers), rng.poisson(n_expert / 896, n_layers)):
            a, b = rng.integers(0, n_expert, 2)
            log_p[i, [a, b]] = log_p[i, [b, a]]


def _best(score: np.ndarray, k: int) -> np.ndarray:
    """The k highest along the last axis, best first; of equals the lowest number."""
    ids = np.sort(np.argpartition(-score, k - 1, -1)[..., :k], -1)
    order = np.argsort(-np.take_along_axis(score, ids, -1), -1, kind="stable")
    return np.take_along_axis(ids, order, -1)
