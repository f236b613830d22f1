"""A shipped model whose router is overruled: the same text with the chosen experts, with random ones, and with none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from workbench import models
from workbench.errors import ParameterError
from workbench.execution import GraphRunner
from workbench.models.session import fill_inputs
from workbench.models.transformer import Builder
from workbench.tensors import Tensor, ops

ROUTES = ("chosen", "random", "none")


def losses_with_routes(model: models.Model, tokens: Sequence[int], routes: str = "chosen", seed: int = 0) -> np.ndarray:
    """The loss of each next token, -log of its probability, (T - 1,): in nats, from one run over the whole text.

    routes: "chosen" by the router; "random": experts drawn for each token and layer, all different, with the weights of the chosen
    ones; "none": routed experts count for nothing, and only shared ones are left.
    """
    if routes not in ROUTES:
        raise ParameterError(f"routes={routes!r}", f"one of {', '.join(ROUTES)}")
    n, runner, hp, rng = len(tokens), GraphRunner(), model.hparams, np.random.default_rng(seed)
    cache = models.KVCache(hp, n, runner.backend.buffer_type)
    b = Builder(model, cache, n, cache.n_ctx, n)
    drawn: dict[Tensor, np.ndarray] = {}
    x = b.embedding()
    for layer in range(hp.n_layer):
        hidden = b.attention(x, layer)
        if (routing := hidden.routing) is not None and routes != "chosen":
            with b.context.active():
                if routes == "none":
                    routing = replace(routing, weights=ops.scale(routing.weights, 0.0))
                else:
                    ids = b.leaf(f"random routes {layer}", "i32", hp.n_expert_used, n)
                    drawn[ids] = rng.random((n, hp.n_expert)).argsort(axis=1)[:, : hp.n_expert_used]
                    routing = replace(routing, experts=ids)
            hidden = replace(hidden, routing=routing)
        x = b.experts(hidden, layer)
    step = models.StepGraph(b.context, b.graph, b.inputs, b.output(x))
    runner.prepare(step.graph)
    at, seq = np.arange(n), np.zeros(n, np.int64)
    fill_inputs(step, cache, np.array(tokens), at, seq, cache.take(seq, at), at)
    for t, values in drawn.items():
        t.set(values)
    runner.run(step.graph)
    logits = step.logits.numpy().astype(float)[:-1]
    highest = logits.max(1)
    return np.log(np.exp(logits - highest[:, None]).sum(1)) + highest - logits[np.arange(n - 1), list(tokens)[1:]]
