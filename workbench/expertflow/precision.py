"""What storing experts in fewer bits costs: the error of each layer alone, and what has accumulated by then (the seed's section 6.1).

Two models with the same weights in two storage types read the same tokens. Alone: each layer's experts get the hidden states of the
reference run, so that only their own rounding shows. Accumulated: the hidden states of the two runs side by side, so with whatever
else is stored differently in the two files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workbench.cgraph import CGraph
from workbench.errors import ModelError
from workbench.execution import GraphRunner
from workbench.expertflow.observe import Seen, record
from workbench.models import Model
from workbench.moe import Routing, build_experts
from workbench.tensors import Context, Tensor


class LayerError(NamedTuple):
    """Relative errors (root of the summed squares, over that of the reference) of a layer, and the bytes of its experts."""

    layer: int
    alone: float
    accumulated: float
    other_routes: float
    nbytes: int
    reference_nbytes: int


def storage_errors(reference: Model, other: Model, tokens: Sequence[int]) -> list[LayerError]:
    """The error of `other`'s experts per layer with experts, first to last.

    other_routes: share of the tokens that the accumulated error sends to another set of experts. Raises ModelError where the two
    are not the same model.
    """
    if reference.hparams.router != other.hparams.router or reference.hparams.n_embd != other.hparams.n_embd:
        raise ModelError(f"{other.name} beside {reference.name}", "the same model in another storage type")
    seen, also = record(reference, [np.asarray(tokens)]), record(other, [np.asarray(tokens)])
    out = []
    for m, layer in enumerate(seen.gates.layers):
        a, b = (_experts(model, seen, m) for model in (reference, other))
        away = (seen.used(m) != also.used(m)).any(1).mean()
        sizes = [sum(w.nbytes for w in _merged(model, layer)) for model in (other, reference)]
        out.append(LayerError(layer, _error(b, a), _error(also.states[layer], seen.states[layer]), float(away), *sizes))
    return out


def _merged(model: Model, layer: int) -> tuple[Tensor, ...]:
    e = model.experts(layer)
    return tuple(w for w in (e.gate, e.up, e.down) if w is not None)


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def _experts(model: Model, seen: Seen, m: int) -> np.ndarray:
    """What the experts of expert layer `m` add, (T, D), with the reference run's states and routes."""
    layer, routes = seen.gates.layers[m], seen.routes
    normed = seen.gates.normed(seen.states[layer], layer).astype(np.float32)
    with Context(1 << 22) as ctx:
        x = ctx.from_numpy(np.ascontiguousarray(normed), name="x")
        ids = ctx.from_numpy(np.ascontiguousarray(routes.experts[m].astype(np.int32)), name="ids")
        weights = ctx.from_numpy(np.ascontiguousarray(routes.weights[m].astype(np.float32)[..., None]), name="weights")
        graph = CGraph()
        with ctx.active():
            result = build_experts(x, model.experts(layer), Routing(ids, weights, x, x), graph=graph, layer=layer)
        graph.build_forward_expand(result)
        GraphRunner().run(graph)
        return np.array(result.numpy())
