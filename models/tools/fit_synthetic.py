"""Fit the synthetic traces (`workbench/expertflow/synthetic.py`) to the published statistics of Kimi K3.

    python -m models.tools.fit_synthetic          # from the root of a checkout; writes models/traces/kimi-k3_fit.csv

For each of the 92 layers: how many experts a text of 159 tokens uses, the entropy of their shares, and how much a token shares
with the one before it (Jaccard), against drawn texts of the same length. Damped steps, averaged over several draws at the end.
"""
import csv
from pathlib import Path

import numpy as np

from workbench.expertflow.synthetic import draw

FOLDER = Path(__file__).parents[1] / "traces"
E, K, N = 896, 16, 159


def measure(ids):
    """(layers, N, k) -> per layer: experts used, share of the 100 most used, entropy in bits, Jaccard with the token before."""
    out = []
    for layer in ids:
        share = np.sort(np.bincount(layer.ravel(), minlength=E))[::-1] / layer.size
        used = np.zeros((len(layer), E), bool)
        np.put_along_axis(used, layer, True, 1)
        both = (used[1:] & used[:-1]).sum(1)
        share = share[share > 0]
        out.append((len(share), share[:100].sum(), -(share * np.log2(share)).sum(), (both / (2 * layer.shape[1] - both)).mean()))
    return np.array(out).T


def fit(goal, local, rounds=40):
    used, _, entropy, jaccard = goal
    zipf, active, reused, kept = np.ones(len(used)), used * 1.15, np.zeros(len(used)), []
    for i in range(rounds):
        ids = np.concatenate(list(draw(np.c_[zipf, active, reused], N, E, K, local, seed=i)), 1)
        have = measure(ids)
        step = 1.0 if i < 12 else 0.3
        active = np.clip(active * (1 + step * (used / have[0] - 1)), used, E)
        zipf = np.clip(zipf + step * 0.5 * (have[2] - entropy), 0, 3)
        if local:
            reused = np.clip(reused + step * 0.8 * (2 * jaccard / (1 + jaccard) - 2 * have[3] / (1 + have[3])), 0, 0.95)
        if i >= rounds - 16:
            kept.append((zipf, active, reused))
    return np.mean(kept, 0)


def main():
    with (FOLDER / "kimi-k3_layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    goal = np.array([[float(r[c]) for c in ("unique_experts", "top100_share", "usage_entropy_bits", "jaccard_prev_token")] for r in rows]).T
    with (FOLDER / "kimi-k3_fit.csv").open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("kind", "layer", "zipf", "active", "reused"))
        for kind in ("skewed-static", "local-drifting"):
            zipf, active, reused = fit(goal, kind == "local-drifting")
            out.writerows((kind, r["layer"], f"{z:.3f}", f"{a:.0f}", f"{q:.3f}") for r, z, a, q in zip(rows, zipf, active, reused))
            ids = np.concatenate(list(draw(np.c_[zipf, active, reused], N, E, K, kind == "local-drifting", 999)), 1)
            for name, want, have in zip(("used", "top 100", "entropy", "Jaccard"), goal, measure(ids)):
                off = abs(have - want).mean()
                print(f"{kind:15} {name:8} published {want.mean():8.3f}  drawn {have.mean():8.3f}  mean difference {off:.3f}")


if __name__ == "__main__":
    main()
