"""A mixture-of-experts block against real ggml and PyTorch: what NumPy costs, and what caching decoded weights buys."""

from __future__ import annotations

import numpy as np

from benchmarks import peers
from benchmarks.harness import SETTLE, Table, take_turns

TOKENS = (1, 32, 512)
AIM = {1: 0.65, 32: 0.9, 512: 1.5}
"""Speed against ggml on one thread that the block aims at."""
WHY = {
    False: "One token is one reading of two experts: BLAS's matrix-vector product reads slower than ggml's dot products, and each of "
           "the graph's nodes\n  is a call from Python. Many tokens are matrix products, where BLAS is ahead.",
    True: "One token: ggml multiplies f16 as it is stored; NumPy has no such product, so the workbench reads the decoded f32 of its "
          "cache, twice the bytes.\n  Without the cache it would have to decode them each time, as the NumPy loop does.",
}  # fmt: skip
"""Where the block loses against ggml, by whether weights are f16."""


def tables():
    for half in (False, True):
        for n_threads in (1, 2):
            yield _table(half, n_threads)


def _table(half: bool, n_threads: int) -> Table:
    from threadpoolctl import threadpool_limits

    kind = "f16" if half else "f32"
    table = Table("MoE block, router 512 -> 8, top-2, SwiGLU 512 -> 1024 -> 512, "
                  f"{kind} weights, {n_threads} thread(s): ms (speed against ggml)",
                  ["tokens", "ggml", "workbench", "aim", "NumPy loop", "PyTorch"])  # fmt: skip
    for n_tokens in TOKENS:
        block = peers.Block(n_tokens, half)
        runs = {"ggml": peers.real_ggml(block, n_threads), "workbench": peers.ours(block, n_threads),
                "NumPy loop": peers.plain_numpy(block), "PyTorch": peers.pytorch(block, n_threads)}  # fmt: skip
        with threadpool_limits(n_threads):
            _agree(runs, 5e-3 if half else 1e-4)
            timing = take_turns(runs, seconds=4.0, settle=SETTLE if n_threads > 1 else 0.0)
        base = timing.get("ggml")
        cells = {name: f"{t.median * 1e3:.3f}" + (f" ({1 / t.ratio:.2f})" if base else "") for name, t in timing.items()}
        aim = f"{AIM[n_tokens]:.2f}" if n_threads == 1 else ""
        table.add(n_tokens, *(cells.get(n, "not installed") for n in ("ggml", "workbench")), aim,
                  *(cells.get(n, "not installed") for n in ("NumPy loop", "PyTorch")))  # fmt: skip
    table.notes.append(WHY[half])
    return table


def _agree(runs, tolerance: float) -> None:
    """All peers compute the same block; the looser bound is for f16, where ggml and PyTorch round activations."""
    results = {name: run().copy() for name, run in runs.items() if run is not None}
    expected = results["NumPy loop"]
    scale = np.abs(expected).max()
    for name, result in results.items():
        worst = np.abs(result.reshape(expected.shape) - expected).max() / scale
        assert worst < tolerance, f"{name} differs from NumPy by {worst:.1e} of the largest value"
