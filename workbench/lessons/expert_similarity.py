"""How alike the experts of a layer are: by what they answer to the same rows, and by their weights."""

from __future__ import annotations

import numpy as np

from workbench.cgraph import build
from workbench.errors import ShapeError
from workbench.execution import GraphRunner
from workbench.moe import ExpertWeights, build_all_experts
from workbench.tensors import Context, Flag


def every_answer(rows: np.ndarray, experts: ExpertWeights) -> np.ndarray:
    """What each expert answers to each of `rows` [T, D], as if every token had chosen all of them: [E, T, D]."""
    n_expert = experts.up.ne[2]
    with Context(2**18, no_alloc=True, name="every answer").active() as context:
        x, probs = (context.new_tensor("f32", width, len(rows)).mark(Flag.INPUT) for width in (rows.shape[1], n_expert))
        graph = build(build_all_experts(x, experts, probs))
        down = next(t for t in graph.nodes if t.name.startswith("ffn_moe_down")).mark(Flag.OUTPUT)
        runner = GraphRunner()
        runner.prepare(graph)
        x.set(rows)
        probs.set(np.ones((len(rows), n_expert), np.float32))
        runner.run(graph)
        return down.numpy().reshape(n_expert, *rows.shape).copy()


def mean_cosine(vectors: np.ndarray) -> float:
    """[E, …, D]: the cosine between two different experts, averaged over all pairs (and rows). 1: the same, 0: nothing in common."""
    n = len(vectors)
    if n < 2 or not vectors.size:
        raise ShapeError(f"{n} experts, {vectors.size} numbers", "two experts or more, and something to compare")
    unit = vectors.reshape(n, -1, vectors.shape[-1]).astype(np.float64)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=-1, keepdims=True), 1e-30)
    pairs = np.einsum("itd,jtd->ij", unit, unit) / unit.shape[1]
    return float((pairs.sum() - np.trace(pairs)) / (n * (n - 1)))


def hidden_units(experts: ExpertWeights) -> np.ndarray:
    """The weights of each hidden unit, [E, F, 3 D]: its rows of gate (2 D where there is none) and up, and its column of down."""
    gate = () if experts.gate is None else (experts.gate.numpy(),)
    parts = (*gate, experts.up.numpy(), experts.down.numpy().swapaxes(1, 2))
    return np.concatenate([p.astype(np.float64) for p in parts], axis=-1)


def matched_cosine(units: np.ndarray) -> float:
    """[E, F, n]: each unit of an expert beside the most similar one of another expert, whatever their places; the mean over all.

    The order of hidden units means nothing, so weights in equal places say little about what two experts do.
    """
    if len(units) < 2 or not units.size:
        raise ShapeError(f"{len(units)} experts, {units.size} numbers", "two experts or more, and something to compare")
    unit = (units / np.maximum(np.linalg.norm(units, axis=-1, keepdims=True), 1e-30)).astype(np.float32)
    pairs = (unit[i] @ unit[j].T for i in range(len(unit)) for j in range(i))
    return float(np.mean([pair.max(axis).mean() for pair in pairs for axis in (0, 1)]))


def by_chance(units: np.ndarray, seed: int = 0) -> float:
    """`matched_cosine` of the same numbers after each unit's weights were shuffled: what matching finds where nothing is alike."""
    return matched_cosine(np.random.default_rng(seed).permuted(units, axis=-1))
