"""Choosing the next token from logits (`llama_sampler`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from workbench.errors import ModelError, ParameterError


@dataclass
class Sampler:
    """How the next token is drawn. temperature 0: always the most likely one (greedy), nothing is drawn.

    Otherwise, in llama.cpp's order: keep the top_k most likely (0: all), of these the fewest that together reach probability
    top_p (1: all), divide logits by the temperature, draw. The same seed gives the same tokens; None draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    rng: np.random.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ParameterError(f"temperature={self.temperature}", "0 (greedy) or more; 0.7 is usual")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise ParameterError(f"top_k={self.top_k}", "a whole number; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ParameterError(f"top_p={self.top_p}", "above 0, at most 1; 1 keeps all tokens")
        if self.seed is not None and self.seed < 0:
            raise ParameterError(f"seed={self.seed}", "a whole number of 0 or more, or None")
        self.rng = np.random.default_rng(self.seed)

    def __call__(self, logits: np.ndarray) -> int:
        """The next token id. Raises ModelError where the logits hold NaN, or nothing to choose from."""
        if not np.isfinite(highest := logits.max()):  # NaN anywhere gives NaN
            raise ModelError(f"logits whose largest is {highest}", "finite logits", "the file may be damaged: compare it with its source")
        if self.temperature == 0:
            return int(logits.argmax())
        tokens, p = self.candidates(logits)
        drawn = int(np.searchsorted(p.cumsum(), self.rng.random(), "right"))
        return int(tokens[min(drawn, len(p) - 1)])

    def candidates(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may be drawn, most likely first, and their probabilities."""
        if self.temperature == 0:
            return np.array([logits.argmax()]), np.ones(1)
        tokens = np.argsort(-logits, kind="stable")[: self.top_k or None]
        x = logits[tokens].astype(np.float64)
        if self.top_p < 1:
            kept = int(np.searchsorted(_soft_max(x).cumsum(), self.top_p)) + 1
            tokens, x = tokens[:kept], x[:kept]
        return tokens, _soft_max(x, self.temperature)


def _soft_max(x: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    with np.errstate(over="ignore"):  # a temperature next to nothing: -inf, and so probability 0
        p = np.exp((x - x.max()) / temperature)
    return p / p.sum()
