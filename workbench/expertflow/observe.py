"""What was seen while a model ran: its routes, and the hidden states that route predictors read.

The states are those of the workbench's own graphs: the nodes that llama.cpp calls `ffn_inp` (the residual stream that a layer's norm and
router read) and `l_out` of the layer below (what enters the layer, before its attention) are kept until the end of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from workbench.errors import ModelError, ParameterError, ShapeError
from workbench.execution import GraphRunner
from workbench.models import KVCache, Model, build_step
from workbench.models.session import fill_inputs
from workbench.moe import RouteRecorder, RouteTrace
from workbench.tensors import Flag

SAME = 0.99
"""Least share of tokens that a model must route as a trace says, to count as the one that made it."""
FIT_SEQUENCES = 12
"""Of each domain the first twelve sequences are for fitting, the others for reports."""


@dataclass(frozen=True, eq=False)
class Gates:
    """The routers of a model, and the norms before them: what any hidden state can be sent through.

    layers: which layers of the model have experts; norms (layers of the model, D); routers (expert layers, E, D); biases: one (E,)
    per expert layer, or None; choice: biases that experts are chosen by after the sigmoid (DeepSeek-V3). k: experts per token.
    expert_bytes: of one expert as it is stored, per expert layer (empty: not known).
    """

    layers: tuple[int, ...]
    norms: np.ndarray
    routers: np.ndarray
    eps: float
    k: int
    biases: tuple[np.ndarray | None, ...]
    choice: tuple[np.ndarray | None, ...]
    expert_bytes: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Model) -> Gates:
        """Those of an open model. Raises ModelError where it has no experts."""
        hp = model.hparams
        if not hp.moe_layers:
            raise ModelError(f"{model.name} has no experts", "a mixture of experts", "tiny-mixtral-f16, for example")
        norm = "post_attention_norm" if hp.traits.oss else "ffn_norm"

        def arrays(what: str) -> tuple[np.ndarray | None, ...]:
            found = [model.bias(what, layer) for layer in hp.moe_layers]
            return tuple(None if t is None else np.array(t.numpy(), np.float32) for t in found)

        def nbytes(layer: int) -> int:
            merged = model.experts(layer)
            return sum(t.nbytes for t in (merged.gate, merged.up, merged.down) if t is not None) // hp.n_expert

        return cls(tuple(hp.moe_layers), np.stack([model.weight(norm, i).numpy() for i in range(hp.n_layer)]),
                   np.stack([model.weight("ffn_gate_inp", i).numpy() for i in hp.moe_layers]), hp.rms_eps, hp.n_expert_used,
                   arrays("ffn_gate_inp"), arrays("exp_probs_b"), tuple(map(nbytes, hp.moe_layers)))  # fmt: skip

    @property
    def n_expert(self) -> int:
        """Experts per layer."""
        return self.routers.shape[1]

    @property
    def width(self) -> int:
        """Numbers in a hidden state (D)."""
        return self.routers.shape[2]

    def normed(self, states: np.ndarray, layer: int) -> np.ndarray:
        """`states` (N, D) as the router of a layer of the model would read them (`ffn_norm`)."""
        scale = np.sqrt(np.mean(np.square(states, dtype=np.float32), -1, keepdims=True) + np.float32(self.eps))
        return states / scale * self.norms[layer]

    def scores(self, states: np.ndarray, m: int) -> np.ndarray:
        """What expert layer `m` chooses by, (N, E), if its norm and router read `states` (N, D); limits on groups are left out."""
        logits = self.normed(states, self.layers[m]) @ self.routers[m].T
        if (bias := self.biases[m]) is not None:
            logits = logits + bias
        if (bias := self.choice[m]) is None:
            return logits
        return 1 / (1 + np.exp(-logits)) + bias


@dataclass(frozen=True, eq=False)
class Seen:
    """A run of N tokens: `routes`, and of each layer of the model the `states` its router read and the `inputs` that entered it, (L, N, D).

    Tokens of one sequence stand together and in order. `gates` are those of the model that ran.
    """

    routes: RouteTrace
    states: np.ndarray
    inputs: np.ndarray
    gates: Gates

    def __post_init__(self) -> None:
        wanted = len(self.gates.norms), self.routes.n_tokens, self.gates.width
        if self.states.shape != wanted or self.inputs.shape != wanted:
            raise ShapeError(f"hidden states {self.states.shape} and {self.inputs.shape}", f"both {wanted}: layers, tokens, width")
        require_fit(self.routes, self.gates)

    @property
    def n_tokens(self) -> int:
        """Tokens."""
        return self.routes.n_tokens

    @property
    def n_layers(self) -> int:
        """Layers with experts."""
        return self.routes.n_layers

    def used(self, m: int) -> np.ndarray:
        """Which experts each token used in expert layer `m`: (N, E) of True and False."""
        return membership(self.routes.experts[m], self.routes.n_expert)

    def sequences(self, wanted: Any) -> Seen:
        """The run without other sequences than the `wanted` ones (by their numbers)."""
        which = np.isin(self.routes.sequences, np.asarray(wanted))
        return replace(self, routes=self.routes.select(which), states=self.states[:, which], inputs=self.inputs[:, which])

    def __repr__(self) -> str:
        return f"<Seen: {self.n_tokens:,} tokens in {len(np.unique(self.routes.sequences))} sequences, {self.n_layers} layers with experts>"


def membership(ids: np.ndarray, n_expert: int) -> np.ndarray:
    """Ids (N, k) as sets (N, E); negative ids stand for none."""
    out = np.zeros((len(ids), n_expert + 1), bool)
    np.put_along_axis(out, np.where(ids < 0, n_expert, ids.astype(np.int64)), True, 1)
    return out[:, :n_expert]


def require_fit(routes: RouteTrace, gates: Gates) -> None:
    """Raise ModelError where a trace cannot be of a model with these gates."""
    have = tuple(map(int, routes.layers)), routes.n_expert, routes.k
    wanted = gates.layers, gates.n_expert, gates.k
    if have != wanted:
        said = "layers {0}, {2} of {1} experts"
        raise ModelError(f"routes of {said.format(*have)}", said.format(*wanted), "the trace was made with another model: open that one")


def split(routes: RouteTrace) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the sequences to fit on, and of those to report on: of each domain the first twelve, and the rest."""
    starts = np.flatnonzero(np.diff(routes.sequences, prepend=-1))
    numbers = routes.sequences[starts]
    domains = np.zeros(len(starts), int) if routes.domains is None else routes.domains[starts]
    place = np.array([np.sum(domains[:i] == d) for i, d in enumerate(domains)])
    return numbers[place < FIT_SEQUENCES], numbers[place >= FIT_SEQUENCES]


def record(model: Model, texts: RouteTrace | Sequence[Sequence[int] | np.ndarray]) -> Seen:
    """Run texts through the model's graph, each in a context of its own, and keep what predictors are fitted and judged on.

    texts: lists of token ids, or a trace, whose sequences are run again. Raises ModelError where the trace is of another model.
    """
    gates, given = Gates.of(model), texts if isinstance(texts, RouteTrace) else None
    if given is not None:
        require_fit(given, gates)
        texts = np.split(given.tokens, np.flatnonzero(np.diff(given.sequences)) + 1) if given.n_tokens else []
    rows = [np.asarray(t) for t in texts]  # type: ignore[union-attr]
    n_vocab = model.hparams.n_vocab
    if not rows or not all(t.ndim == 1 and t.size and t.dtype.kind in "iu" and 0 <= t.min() and t.max() < n_vocab for t in rows):
        raise ParameterError(f"{len(rows)} texts", f"one or more, each of one or more token ids below {n_vocab}",
                             "model.tokenizer.encode(text) makes them")  # fmt: skip
    watch = _Watch(model, max(map(len, rows)))
    try:
        parts = [watch.run(t) for t in rows]
    finally:
        watch.cache.close()
    experts, weights, states, inputs = (np.concatenate(p, 1) for p in zip(*parts, strict=True))
    if given is None:
        numbers, places = np.repeat(np.arange(len(rows)), [len(t) for t in rows]), np.concatenate([np.arange(len(t)) for t in rows])
        routes = RouteTrace(experts, weights, np.array(gates.layers), np.concatenate(rows), places, numbers, gates.n_expert)
    else:
        routes = replace(given, experts=experts, weights=weights)
        same = (routes.sets() == given.sets()).all((0, 2)).mean()
        if same < SAME:
            raise ModelError(f"{same:.1%} of the trace's tokens take the same way through {model.name}", f"{SAME:.0%} or more",
                             "the trace was made with other weights, or with these in another storage type; a text fits any")  # fmt: skip
    return Seen(routes, states, inputs, gates)


class _Watch:
    """The graph for texts of up to `length` tokens, with what is to be seen kept to the end of a run.

    Shorter texts are filled up behind their end, where no token of theirs looks.
    """

    def __init__(self, model: Model, length: int) -> None:
        hp, self.runner, self.length = model.hparams, GraphRunner(), length
        self.cache = KVCache(hp, length, self.runner.backend.buffer_type)
        self.step = build_step(model, self.cache, length, self.cache.n_ctx, length)
        nodes = {t.name: t for t in self.step.graph.nodes}
        self.states = [nodes[f"ffn_inp-{i}"] for i in range(hp.n_layer)]
        self.inputs = [nodes["embd"], *(nodes[f"l_out-{i}"] for i in range(hp.n_layer - 1))]
        for t in (*self.states, *self.inputs):
            t.mark(Flag.OUTPUT)
        for routing in self.step.routings:
            RouteRecorder.watch(routing)
        self.runner.prepare(self.step.graph)
        self.cells = self.cache.take(np.zeros(length, np.int64), np.arange(length))

    def run(self, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
        """Experts and weights (M, T, k), states and inputs (L, T, D) of one text."""
        n, at = len(tokens), np.arange(self.length)
        padded = np.concatenate([tokens, np.zeros(self.length - n, tokens.dtype)])
        fill_inputs(self.step, self.cache, padded, at, np.zeros(self.length, np.int64), self.cells, at)
        self.runner.run(self.step.graph)
        rows = [[t.numpy().reshape(self.length, -1)[:n] for t in some] for some in (
            [r.experts for r in self.step.routings], [r.weights for r in self.step.routings], self.states, self.inputs)]  # fmt: skip
        return tuple(np.stack(part) for part in rows)
