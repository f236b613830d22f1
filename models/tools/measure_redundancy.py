"""How alike the experts of small trained layers are, with and without a shared expert: writes `models/metrics/redundancy.json`.

`python -m models.tools.measure_redundancy [OUT]`, some minutes on one core. The task has eight clusters, each with a map of its own, of
which the share `common` is the same in all of them. Similarity: the mean cosine between what two experts answer to the same tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from workbench.lessons.expert_similarity import every_answer, mean_cosine
from workbench.moe import Router
from workbench.moe.training import ClusterModel, ClusterTask, Remedy

SEEDS, STEPS, N_TOKENS = range(5), 400, 512
NETS = {"1 of 8": (Router(8, 1, normalise=False), 0), "1 of 8 and a shared one": (Router(8, 1, normalise=False), 16),
        "2 of 8": (Router(8, 2), 0), "2 of 8 and a shared one": (Router(8, 2), 16)}  # fmt: skip


def measured(network: str, common: float, seed: int) -> dict[str, float]:
    """One layer, trained with a selection bias: similarity, and the loss on tokens it did not see with chosen and random experts."""
    router, shared = NETS[network]
    model = ClusterModel(ClusterTask(common=common, seed=seed), router, shared=shared, remedy=Remedy(bias=0.01), seed=seed).train(STEPS)
    rows = model.task.batch(np.random.default_rng(5), N_TOKENS)[0]
    assert model.experts is not None
    return {"similarity": mean_cosine(every_answer(rows, model.experts)), "chosen": model.test()["loss"],
            "random": model.test(routes="random")["loss"]}  # fmt: skip


def main(args: list[str]) -> None:
    """Train everything and write the file."""
    out = Path(args[0]) if args else Path(__file__).parents[1] / "metrics" / "redundancy.json"
    found = []
    for common in (0.0, 0.5, 0.9):
        for network in NETS:
            runs = [measured(network, common, seed) for seed in SEEDS]
            found.append({"network": network, "common": common} | {k: [float(f"{r[k]:.4g}") for r in runs] for k in runs[0]})
    document = {"made by": "models/tools/measure_redundancy.py", "steps": STEPS, "tokens": N_TOKENS, "runs": found}
    out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
