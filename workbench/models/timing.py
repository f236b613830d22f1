"""The cost model against the clock: what runs of a model take per layer on this machine's CPU, and what was predicted."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from workbench.devices import Backend
from workbench.devices.calibrate import Calibration, Calibrator
from workbench.errors import ModelError
from workbench.models.model import load
from workbench.models.session import Session, fill_inputs

PROMPT = 64


class LayerTime(NamedTuple):
    """One layer of one run: tokens in it, nanoseconds predicted and measured. layer: its number, or "embedding" or "output"."""

    model: str
    n_tokens: int
    layer: int | str
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / max(self.measured, 1)


class _Best:
    """The shortest time of each node over all runs."""

    def __init__(self, n: int) -> None:
        self.ns: list[int | None] = [None] * n

    def node(self, i: int, start_ns: int, end_ns: int) -> None:
        """A plan tells its times."""
        took, best = end_ns - start_ns, self.ns[i]
        self.ns[i] = took if best is None else min(best, took)


def layer_times(
    which: str | os.PathLike[str], rounds: int = 6, backend: Backend | None = None
) -> tuple[list[LayerTime], Calibration]:
    """Times per layer of a prompt of 64 tokens and of one decoded token, with the calibration that predicted them.

    Both are the best of `rounds` rounds in turns, so that a busy machine disturbs both alike.
    """
    calibrator = Calibrator(backend)
    try:
        with load(which) as model, Session(model, 256, PROMPT, backend=calibrator.backend) as session:
            tokens = np.arange(PROMPT + 1) % model.hparams.n_vocab
            session.decode(tokens[:PROMPT])
            session.decode(tokens[PROMPT:])
            if len(session._steps) != 2:
                raise ModelError(
                    f"{len(session._steps)} graphs for a prompt and a token", "two: of 64 tokens and of one"
                )
            runs = [(step, plan, _Best(len(step.graph.nodes))) for step, plan in session._steps.values()]
            for _ in range(rounds):
                calibrator.round(copies=False)
                for step, plan, best in runs:
                    for _ in range(3):  # the first brings it back into the caches
                        _fill(session, step, tokens)
                        plan.run(best)
            calibration = calibrator.result()
            return [
                row for step, _, best in runs for row in _rows(model.path.stem, step, best, calibration)
            ], calibration
    finally:
        calibrator.close()


def _fill(session: Session, step: Any, tokens: np.ndarray) -> None:
    """Inputs give their memory back within a run, so each run needs them anew."""
    n, n_out = step.inputs.tokens.ne[0], step.inputs.out_ids.ne[0]
    places = np.arange(PROMPT) if n > 1 else np.array([PROMPT])
    fill_inputs(step, session.cache, tokens[places], places, np.zeros(n, np.int64), places, np.arange(n - n_out, n))


def _rows(model: str, step: Any, best: _Best, calibration: Calibration) -> list[LayerTime]:
    sums: dict[int | str, list[int]] = {}
    for segment in step.segments:
        row = sums.setdefault(segment.layer if segment.layer >= 0 else segment.kind, [0, 0])
        for i in range(segment.first, segment.last):
            took = best.ns[i]
            if took is not None:
                row[0] += calibration.speed.compute_ns(step.graph.nodes[i])
                row[1] += took
    return [LayerTime(model, step.inputs.tokens.ne[0], layer, *row) for layer, row in sums.items()]


def table(rows: list[LayerTime]) -> list[str]:
    """Predicted against measured, a line per model and run: in all, and the layers with the lowest and the highest ratio."""
    lines = [f"{'model':<18}{'tokens':>7}{'predicted ms':>14}{'measured ms':>13}{'ratio':>7}  ratio of layers"]
    for model, n in dict.fromkeys((r.model, r.n_tokens) for r in rows):
        mine = [r for r in rows if (r.model, r.n_tokens) == (model, n)]
        predicted, measured = sum(r.predicted for r in mine), sum(r.measured for r in mine)
        layers = [r.ratio for r in mine if isinstance(r.layer, int)]
        lines.append(
            f"{model:<18}{n:>7}{predicted / 1e6:>14.2f}{measured / 1e6:>13.2f}{predicted / measured:>7.2f}"
            f"  {min(layers):.2f} to {max(layers):.2f}"
        )
    return lines
