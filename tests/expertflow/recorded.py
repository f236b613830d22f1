"""Both shipped models on their own traces, run once per session; and small made-up runs for bad input and properties."""

from __future__ import annotations

import functools

import numpy as np

from workbench import models, paths
from workbench.expertflow.observe import Gates, Seen, record, split
from workbench.moe import RouteTrace

NAMES = ("tiny-mixtral", "tiny-deepseek")


@functools.cache
def trace(name: str) -> RouteTrace:
    return RouteTrace.load(paths.models_dir() / "traces" / f"{name}_trace.npz")


@functools.cache
def seen(name: str) -> Seen:
    with models.load(f"{name}-f16") as model:
        return record(model, trace(name))


@functools.cache
def parts(name: str) -> tuple[Seen, Seen]:
    """The sequences to fit on and those to report on."""
    return tuple(seen(name).sequences(numbers) for numbers in split(trace(name)))


def domain(name: str, which: int, first: int = 0, last: int = 16) -> Seen:
    """Some sequences of one domain, by their places in it."""
    routes = trace(name)
    return seen(name).sequences(np.unique(routes.sequences[routes.domains == which])[first:last])


def made(n: int = 40, layers=(0, 1, 2), n_expert: int = 6, k: int = 2, width: int = 5, seed: int = 0, length: int = 8) -> Seen:
    """Random states through random routers: routes are what these routers say."""
    rng = np.random.default_rng(seed)
    deep = max(layers) + 1
    states, inputs = rng.standard_normal((2, deep, n, width), np.float32)
    gates = Gates(tuple(layers), np.ones((deep, width), np.float32), rng.standard_normal((len(layers), n_expert, width), np.float32), 1e-5, k,
                  (None,) * len(layers), (None,) * len(layers), (100,) * len(layers))  # fmt: skip
    experts = np.stack([np.argsort(-gates.scores(states[layer], m), 1)[:, :k] for m, layer in enumerate(layers)]).astype(np.uint8)
    at = np.arange(n)
    routes = RouteTrace(experts, np.full(experts.shape, 1 / k, np.float32), np.array(layers), rng.integers(0, 50, n), at % length, at // length,
                        n_expert)  # fmt: skip
    return Seen(routes, states, inputs, gates)
