"""Experts stored in fewer bits, and what that costs: the error of each layer alone, and what has accumulated by then (the seed's 6.1).

Two models with the same weights in two storage types read the same tokens. Alone: each layer's experts get the hidden states of the
reference run, so that only their own rounding shows. Accumulated: the hidden states of the two runs side by side, so with whatever
else is stored differently in the two files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workbench.cgraph import CGraph
from workbench.errors import ModelError, ParameterError, shown
from workbench.execution import GraphRunner
from workbench.expertflow.observe import Seen, record
from workbench.expertflow.visits import expert_weights
from workbench.kernels.blocks import chunks, decode, encode, operand
from workbench.models import Model, Session
from workbench.moe import Routing, build_experts
from workbench.tensors import Context, DType, HostStorage, Tensor, Usage, dtype
from workbench.tensors.context import TENSOR_OVERHEAD

STORAGES = {"f16": 65504.0, "q8_0": 127 * 65504.0, "q4_0": 8 * 65504.0}
"""Types to store experts in, and the largest number that each can hold: scales of blocks are f16."""
OTHER_NAMES = {"int8": "q8_0"}
"""q8_0 is what ggml has for int8: 8-bit integers in blocks of 32, each with a scale in f16, so 8.5 bits a weight."""
PIECE = 1 << 20
"""Numbers that are converted at a time."""


class StoredModel(Model):
    """A model whose experts lie on the host in another type; made by `store_experts`. Closing it leaves the original open."""

    def __init__(self, model: Model, storage: DType) -> None:
        self.file, self.path, self.name, self.hparams = model.file, model.path, model.name, model.hparams
        experts = [w for merged in expert_weights(model).values() for w in merged]
        self.context = Context(TENSOR_OVERHEAD * len(experts), no_alloc=True, name=f"experts of {shown(model.name)} in {storage}")
        self._memory: list[HostStorage] = []
        self.weights = {**model.weights, **{w.name: self._stored(w, storage) for w in experts if _larger(w, storage)}}

    def _stored(self, weight: Tensor, storage: DType) -> Tensor:
        """`weight`, converted piece by piece."""
        if weight.ne[0] % storage.block:
            raise ModelError(f"{weight.name} has rows of {weight.ne[0]} numbers", f"whole blocks of {storage.block} for {storage}",
                             "f16")  # fmt: skip
        copy = self.context.new_tensor(storage, *weight.ne, name=weight.name)
        self._memory.append(HostStorage(copy.nbytes, copy.name, Usage.WEIGHTS))
        copy.place(self._memory[-1])
        source, target = operand(weight), operand(copy)
        for i in chunks(target.shape, PIECE):
            wide = np.empty(target[i].shape, np.float32)
            decode(np, source[i], wide)
            if (largest := np.abs(wide).max()) > (most := STORAGES[storage.name]):
                raise ModelError(f"{weight.name} holds {largest:.3g}", f"at most {most:,.0f}: that is all that {storage} can hold")
            encode(np, wide, target[i])
        return copy

    def close(self) -> None:
        """Give the converted experts back; the model that they came from stays open."""
        for memory in self._memory:
            memory.close()
        self.context.close()


def store_experts(model: Model, storage: str) -> StoredModel:
    """The same model with its experts in `storage` (see STORAGES); matrices that take no more bits than that stay as they are.

    Raises ParameterError for other types, and where all matrices take fewer bits already; ModelError where the numbers or the
    rows of a matrix do not go into the type, or there are no experts.
    """
    name = OTHER_NAMES.get(storage, storage)
    if name not in STORAGES:
        raise ParameterError(f"experts stored as {shown(storage)!r}", f"one of {', '.join(STORAGES)}; int8 is another name for q8_0")
    kind, found = dtype(name), [w for merged in expert_weights(model).values() for w in merged]
    if not found:
        raise ModelError(f"{shown(model.name)} has no experts", "a mixture-of-experts model", "tiny-mixtral-f16, for example")
    if all(w.dtype.bits < kind.bits for w in found):
        most = max((w.dtype for w in found), key=lambda t: t.bits)
        raise ParameterError(f"experts in {most}, {most.bits:g} bits a weight, to be stored as {kind}, {kind.bits:g} bits",
                             f"a type of at most {most.bits:g} bits", "leave them as they are: what rounding took does not come back")
    return StoredModel(model, kind)


def _larger(weight: Tensor, storage: DType) -> bool:
    return weight.dtype is not storage and weight.dtype.bits >= storage.bits


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


def logit_error(reference: Model, other: Model, tokens: Sequence[int]) -> float:
    """The relative error of `other`'s logits over all tokens: what has accumulated at the end."""
    logits = []
    for model in (reference, other):
        with Session(model, n_batch=len(tokens)) as session:
            logits.append(session.decode(tokens, outputs="all"))
    return _error(logits[1], logits[0])


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
