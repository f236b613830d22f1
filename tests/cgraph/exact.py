"""Graphs computed in f64 by the slow definitions, and the slopes of their results by finite differences."""

import numpy as np

import workbench.kernels  # noqa: F401 - fills the columns
from workbench.tensors import Tensor


def evaluate(nodes, given=None) -> dict[Tensor, np.ndarray]:
    """The value of every node, in f64, all four axes in NumPy's order. given: values of leafs, others are read from memory."""
    values: dict[Tensor, np.ndarray] = dict(given or {})

    def value(t: Tensor) -> np.ndarray:
        if t not in values:
            a = t.array()
            values[t] = a.astype(np.float64) if a.dtype.kind == "f" else a.copy()
        return values[t]

    with np.errstate(all="ignore"):
        for t in nodes:
            if t.op == "NONE":
                value(t)
            elif t.op == "VIEW":
                flat = np.ascontiguousarray(value(t.src[0]))
                scale = flat.itemsize // t.dtype.block_bytes
                strides = tuple(b * scale for b in t.nb[::-1])
                start = flat.reshape(-1)[t.params["offset"] // t.dtype.block_bytes :]
                values[t] = np.lib.stride_tricks.as_strided(start, t.ne[::-1], strides).copy()
            elif t.spec.is_view:
                a = value(t.src[0])
                axes = t.params.get("axes", (1, 0, 2, 3))
                order = [3 - axes.index(3 - i) for i in range(4)]
                values[t] = a.reshape(t.ne[::-1]) if t.op == "RESHAPE" else a.transpose(order)
            else:
                values[t] = np.asarray(t.spec.reference(t, *[None if s is None else value(s) for s in t.src]))
    return values


def slopes(nodes, loss: Tensor, w: Tensor, step: float = 1e-5) -> np.ndarray:
    """How the loss changes with each element of `w`: central differences, in f64."""
    start = w.array().astype(np.float64)
    out = np.empty(start.shape)
    for i in np.ndindex(start.shape):
        ends = []
        for sign in (1, -1):
            moved = start.copy()
            moved[i] += sign * step
            ends.append(evaluate(nodes, {w: moved})[loss].item())
        out[i] = (ends[0] - ends[1]) / (2 * step)
    return out
