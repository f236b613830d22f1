"""What was routed where: the experts of each token in each layer, with their weights.

Predictors, caches and pictures work on this record, wherever it comes from: a run of the workbench or a stored file.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import FileFormatError, ShapeError, shown, shown_path
from workbench.moe.routers import Router, Routing
from workbench.tensors import Flag

DAMAGED_NPZ = (OSError, ValueError, TypeError, EOFError, LookupError, MemoryError, NotImplementedError, zipfile.BadZipFile, zlib.error)
"""What NumPy raises for `.npz` files that are none, or not whole."""


@dataclass(eq=False, repr=False)
class RouteTrace:
    """Routes of N tokens through L expert layers, k experts each.

    experts (L, N, k): ids, best first; weights (L, N, k): what the router gave them (NaN where unknown); layers (L,): which
    layers of the model these are; tokens, positions, sequences (N,): the token id, its place in its sequence, and whose it
    is; domains (N,): index into domain_names, or None.
    """

    experts: np.ndarray
    weights: np.ndarray
    layers: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    n_expert: int
    domains: np.ndarray | None = None
    domain_names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        n_layers, n = len(self.layers), len(self.tokens)
        if self.experts.ndim != 3 or self.experts.shape[:2] != (n_layers, n) or self.weights.shape != self.experts.shape:
            raise ShapeError(f"experts {self.experts.shape} and weights {self.weights.shape}", f"both ({n_layers} layers, {n} tokens, k)")
        for name in ("positions", "sequences", "domains"):
            if (values := getattr(self, name)) is not None and values.shape != (n,):
                raise ShapeError(f"{name} {values.shape} of {n} tokens", f"({n},)")
        if self.experts.dtype.kind not in "iu":
            raise ShapeError(f"expert ids of type {self.experts.dtype}", "whole numbers")
        lowest, highest = (int(self.experts.min()), int(self.experts.max())) if self.experts.size else (0, 0)
        if self.experts.size and not 0 <= lowest <= highest < self.n_expert:
            wrong = lowest if lowest < 0 else highest
            raise ShapeError(f"expert {wrong} in a record of {self.n_expert} experts", "ids from 0, below n_expert")

    @property
    def n_layers(self) -> int:
        """Expert layers."""
        return self.experts.shape[0]

    @property
    def n_tokens(self) -> int:
        """Tokens."""
        return self.experts.shape[1]

    @property
    def k(self) -> int:
        """Experts per token and layer."""
        return self.experts.shape[2]

    def __repr__(self) -> str:
        return f"<RouteTrace of {self.n_tokens:,} tokens in {self.n_layers} layers, {self.k} of {self.n_expert} experts each>"

    def sets(self) -> np.ndarray:
        """The experts in ascending order, for comparing choices without regard to rank."""
        return np.sort(self.experts, axis=-1)

    def counts(self) -> np.ndarray:
        """How often each expert of each layer was chosen: (L, n_expert)."""
        return np.stack([np.bincount(layer.ravel(), minlength=self.n_expert) for layer in self.experts])

    def distinct(self, n_tokens: int) -> np.ndarray:
        """How many different experts n consecutive tokens use together: (L,), the mean over such runs. Raises ShapeError without one."""
        runs = self.n_tokens // n_tokens if n_tokens > 0 else 0
        if not runs:
            raise ShapeError(f"runs of {n_tokens} in a record of {self.n_tokens} tokens", f"1 to {self.n_tokens}")
        used = np.sort(self.experts[:, : runs * n_tokens].reshape(self.n_layers, runs, -1), axis=-1)
        return 1 + (np.diff(used, axis=-1) != 0).sum(-1).mean(-1)

    def select(self, which: Any) -> RouteTrace:
        """The tokens picked by an index, slice or mask over N."""
        domains = None if self.domains is None else self.domains[which]
        return RouteTrace(self.experts[:, which], self.weights[:, which], self.layers, self.tokens[which], self.positions[which],
                          self.sequences[which], self.n_expert, domains, self.domain_names)  # fmt: skip

    def require_weight_sum(self, router: Router, tolerance: float = 1e-5) -> None:
        """Raise ShapeError where weights do not sum to what the router declares; nothing to check where it declares nothing."""
        if router.weight_sum is None or not self.n_tokens:
            return
        worst = float(np.abs(self.weights.sum(-1) - router.weight_sum).max())
        if not worst <= tolerance * router.weight_sum:
            raise ShapeError(f"routing weights that are {worst:.3g} away from their sum", f"{router.weight_sum:g} for every token")

    def save(self, path: str | Path) -> None:
        """Store as `.npz`."""
        extra: dict[str, Any] = {} if self.domains is None else {"domains": self.domains, "domain_names": np.array(self.domain_names)}
        np.savez_compressed(path, experts=self.experts, weights=self.weights, layers=self.layers, tokens=self.tokens,
                            positions=self.positions, sequences=self.sequences, n_expert=self.n_expert, **extra)  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> RouteTrace:
        """A record stored by `save`, or one of the shipped traces (their weights are router probabilities).

        Raises FileFormatError where the file is neither.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                data = dict(file)
        except DAMAGED_NPZ as e:
            raise FileFormatError(f"{shown_path(path)} is not a readable .npz file: {shown(e)}", "a route trace") from None
        try:
            return _from_shipped(data) if "moe_layers" in data else _from_saved(data)
        except DAMAGED_NPZ as e:
            raise FileFormatError(f"{shown_path(path)} is not a route trace: {shown(getattr(e, 'found', e))}",
                                  "a file written by RouteTrace.save, or a shipped `*_trace.npz`") from None  # fmt: skip


def _from_saved(data: dict[str, np.ndarray]) -> RouteTrace:
    names = tuple(str(n) for n in data.pop("domain_names", ()))
    return RouteTrace(**{**data, "n_expert": int(data["n_expert"]), "domain_names": names})  # type: ignore[arg-type]


def _from_shipped(data: dict[str, np.ndarray]) -> RouteTrace:
    n_seq, length = data["tokens"].shape
    experts, probs = data["experts"], data["probs"]
    flat = (experts.shape[0], n_seq * length, experts.shape[-1])
    n_expert = int(data["n_expert"]) if "n_expert" in data else int(experts.max()) + 1
    return RouteTrace(
        experts=experts.reshape(flat), weights=probs.astype(np.float32).reshape(flat), layers=data["moe_layers"],
        tokens=data["tokens"].ravel().astype(np.int32), positions=np.tile(np.arange(length, dtype=np.int32), n_seq),
        sequences=np.repeat(np.arange(n_seq, dtype=np.int32), length), n_expert=n_expert,
        domains=np.repeat(data["domain"], length), domain_names=tuple(str(n) for n in data["domain_names"]),
    )  # fmt: skip


class RouteRecorder:
    """Collects the routes of one graph run after another.

    The router's results lie in compute memory that later nodes of the same graph reuse, so `watch` flags their owners as
    outputs before memory is planned: they then keep their bytes until the run is over.
    """

    def __init__(self, layers: Sequence[int], router: Router) -> None:
        self.layers, self.router = tuple(layers), router
        self.clear()

    @staticmethod
    def watch(routing: Routing) -> None:
        """Keep the results of one router readable until the end of a run."""
        for tensor in (routing.experts, routing.weights):
            tensor.root().mark(Flag.OUTPUT)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._experts: list[np.ndarray] = []
        self._weights: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []

    def __len__(self) -> int:
        """Runs recorded so far."""
        return len(self._rows)

    def keep(self, n_runs: int) -> None:
        """Forget what was recorded after the first `n_runs` runs."""
        for kept in (self._experts, self._weights, self._rows):
            del kept[n_runs:]

    def add(self, routings: Sequence[Routing], rows: np.ndarray, skip: int = 0) -> None:
        """Record a run: the routings of all layers and one row (token, position, sequence) per token; `skip` leading ones pad."""
        k = self.router.n_used
        kind = np.uint8 if self.router.n_expert <= 256 else np.uint16
        self._experts.append(np.stack([r.experts.numpy().reshape(-1, k)[skip:].astype(kind) for r in routings]))
        self._weights.append(np.stack([r.weights.numpy().reshape(-1, k)[skip:] for r in routings]))
        self._rows.append(np.array(rows, np.int32))

    def trace(self) -> RouteTrace:
        """Everything recorded so far."""
        k = self.router.n_used
        empty = np.empty((len(self.layers), 0, k))
        rows = np.concatenate([np.empty((0, 3), np.int32), *self._rows])
        experts = np.concatenate(self._experts, 1) if self._experts else empty.astype(np.uint8)
        weights = np.concatenate(self._weights, 1) if self._weights else empty.astype(np.float32)
        return RouteTrace(experts, weights, np.array(self.layers, np.int32), rows[:, 0], rows[:, 1], rows[:, 2], self.router.n_expert)
