"""`routes MODEL-f16.gguf TRACE.npz`: which experts each token of held-out text goes to, against the PyTorch model. A case is a layer.

Every sequence has a context of its own; nothing is rounded. In each layer the expert sets of at least 99.9 % of the tokens must
be equal, and the router's probabilities within 0.002 (they are stored as f16) for as many; both after whatever flipped earlier.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.parity.report import BadInput, Report, judge_files
from workbench.models import Model, Session
from workbench.moe import RouteTrace

EQUAL, PROBABILITY = 0.999, 0.002


def main(args: list[str]) -> int:
    """Compare and print; 0: all passed, 1: some failed, 2: bad input."""
    return judge_files("routes", args, "MODEL-f16.gguf TRACE.npz", run, most=1)


def run(report: Report, model: Model, path: Path) -> None:
    """All sequences of a trace."""
    want = RouteTrace.load(path)
    if not want.n_tokens:
        raise BadInput(f"{path.name} holds no tokens")
    if want.k != model.hparams.n_expert_used or want.n_layers != len(model.hparams.moe_layers):
        raise BadInput(f"{path.name} has {want.n_layers} layers and k={want.k}, {model.path.name} {len(model.hparams.moe_layers)} and "
                       f"k={model.hparams.n_expert_used}: made from another model?")  # fmt: skip
    have = replay(model, want)
    ours, theirs = have.weights, want.weights
    if model.hparams.router.normalise:  # the trace holds probabilities over all experts; ours are divided by their sum
        theirs = theirs / theirs.sum(-1, keepdims=True)
    equal = (have.sets() == want.sets()).all(-1)
    close = (np.abs(np.sort(ours, -1) - np.sort(theirs, -1)) <= PROBABILITY).all(-1)
    for i, layer in enumerate(have.layers):
        found = [f"moe_layers: layer {layer} instead of {want.layers[i]}"] if layer != want.layers[i] else []
        for what, good in (("experts", equal[i]), ("probs", close[i])):
            if good.mean() < EQUAL:
                at = int(np.argmin(good))
                found.append(f"{what} (of tokens): {good.mean():.4%} agree, at least {EQUAL:.1%} must; the first of {int((~good).sum())} that differ: "
                             f"sequence {want.sequences[at]}, position {want.positions[at]}")  # fmt: skip
        report.case(f"{path.name} layer {layer}", found, f"expert sets equal {equal[i].mean():.4%}, probabilities {close[i].mean():.4%}")


def replay(model: Model, want: RouteTrace) -> RouteTrace:
    """The same tokens through our model, sequence by sequence."""
    starts = np.flatnonzero(np.diff(want.sequences, prepend=-1))
    with Session(model, n_ctx=int(want.positions.max()) + 1, recording=True) as session:
        for tokens in np.split(want.tokens, starts[1:]):
            session.reset()
            session.decode(tokens)
        return session.routes
