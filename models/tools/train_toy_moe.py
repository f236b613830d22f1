"""Trains the small expert layers of lessons 17 and 18 and writes `models/metrics/toy_moe.json`: balance with and without remedies, dense
against experts at equal operations per token, and random routes with and without a shared expert.

`python -m models.tools.train_toy_moe [OUT]`, some minutes on one core, with the workbench alone. The figures are medians over seeds, which
differ in the task, the start and the batches; other machines may round the last digit differently.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from workbench.moe import Router
from workbench.moe.training import REMEDIES, ClusterModel, ClusterTask, equal_hidden, report

SEEDS, STEPS, EVERY = range(10), 400, 10
TOP1, TOP2 = Router(8, 1, normalise=False), Router(8, 2)
CURVES = range(5)


def main(args: list[str]) -> None:
    """Train everything and write the file."""
    out = Path(args[0]) if args else Path(__file__).parents[1] / "metrics" / "toy_moe.json"
    document = {"made by": "models/tools/train_toy_moe.py", "steps": STEPS, "tokens per step": 256, "balance": balances(),
                "dense against experts": curves(), "random routes": routes()}  # fmt: skip
    out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def balances() -> dict[str, list[dict[str, float]]]:
    """remedy -> one record per seed."""
    return {name: [{k: rounded(v) for k, v in report(ClusterModel(ClusterTask(seed=s), TOP1, remedy=remedy, seed=s).train(STEPS)).items()}
                   for s in SEEDS] for name, remedy in REMEDIES.items()}  # fmt: skip


def curves() -> dict[str, dict[str, object]]:
    """task -> network -> the training losses of five seeds (means of ten steps), operations per token and numbers trained."""
    found: dict[str, dict[str, object]] = {}
    for task, n_clusters in (("eight maps", 8), ("one map", 1)):
        moe = [ClusterModel(ClusterTask(n_clusters, seed=s), TOP2, remedy=REMEDIES["selection bias"], seed=s).train(STEPS) for s in CURVES]
        equal = equal_hidden(moe[0])
        nets = {"8 experts, 2 used": moe}
        for name, hidden in ((f"dense, {equal} wide: equal operations", equal), ("dense, 128 wide: equal parameters", 128)):
            nets[name] = [ClusterModel(ClusterTask(n_clusters, seed=s), None, hidden, seed=s).train(STEPS) for s in CURVES]
        found[task] = {name: {"operations per token": rounded(nets[name][0].flops_per_token()), "parameters": nets[name][0].n_parameters(),
                              "test loss": [rounded(m.test()["loss"]) for m in nets[name]],
                              "losses": [[rounded(x) for x in np.reshape(m.losses, (-1, EVERY)).mean(1)] for m in nets[name]]}
                       for name in nets}  # fmt: skip
    return found


def routes() -> list[dict[str, object]]:
    """For each network and length of training: the loss with the chosen and with random experts, of five seeds."""
    nets = {"1 of 8": (TOP1, 0), "1 of 8 and a shared one": (TOP1, 16), "2 of 8": (TOP2, 0), "2 of 8 and a shared one": (TOP2, 16)}
    found: list[dict[str, object]] = []
    for steps in (STEPS, 3 * STEPS):
        for common in (0.0, 0.5):
            for name, (router, shared) in nets.items():
                models = [ClusterModel(ClusterTask(common=common, seed=s), router, shared=shared, remedy=REMEDIES["selection bias"],
                                       seed=s).train(steps) for s in CURVES]  # fmt: skip
                losses = {kind: [rounded(m.test(routes=kind)["loss"]) for m in models] for kind in ("chosen", "random")}
                found.append({"network": name, "common": common, "steps": steps,
                              "operations per token": rounded(models[0].flops_per_token()), **losses})  # fmt: skip
    return found


def rounded(x: float) -> float:
    """Four digits."""
    return float(f"{float(x):.4g}")


if __name__ == "__main__":
    main(sys.argv[1:])
