"""Fit the route predictors of a shipped model, and store their weights and how good they are.

    python models/tools/train_route_predictors.py tiny-mixtral tiny-deepseek

Everything is fitted on sequences 0 to 11 of each domain of the model's trace and judged on 12 to 15. The network over tokens is trained by
the workbench's own gradients on sequences 0 to 10, so that sequence 11 of each domain is text it has not seen: that is what its fetching
is calibrated on. Needs nothing but the workbench; about a minute per model on one core.
"""
import argparse
import csv
import math
import time
from pathlib import Path

import numpy as np

from workbench import models
from workbench.execution import AdamW, Trainer, new_parameter
from workbench.expertflow import network, scoring
from workbench.expertflow.observe import Seen, record, split
from workbench.expertflow.predictors import Frequency, GateAhead, Oracle, PreviousLayer, PreviousToken, Shared
from workbench.moe import RouteTrace
from workbench.tensors import Context, Flag, ops

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HIDDEN, BATCH, RATE, DECAY, DROP, WARM = 32, 128, 8, 5e-3, 0.05, 0.2, 0.1


def build(seen: Seen, n_vocab: int, length: int, rng: np.random.Generator):
    """The network as a graph for BATCH texts of `length` tokens with its loss: (inputs, parameters, scores, loss).

    Loss: cross entropy in each layer between a soft max over its experts and equal shares for the k experts used. (The paper takes binary
    cross entropy per expert; recall was the same within a tenth of a point.)
    """
    m, e, heads, n, batch = seen.n_layers, seen.routes.n_expert, network.HEADS, length * BATCH, BATCH
    home, work = Context(2**26, name="predictor"), Context(2**22, no_alloc=True, name="training graph")
    leaf = lambda name, kind, *ne: work.new_tensor(kind, *ne, name=name).mark(Flag.INPUT)
    inputs = {"tokens": leaf("tokens", "i32", n), "noise": leaf("noise", "f32", WIDTH, n), "mask": leaf("mask", "f32", length, length),
              "labels": leaf("labels", "f32", e, m * n)}
    made = {}

    def parameter(name, *ne, scale=None):
        made[name] = new_parameter(home, rng, *ne, name=name, scale=scale)
        if name.startswith("norm"):
            made[name].set(np.ones(ne, np.float32))
        return made[name]

    with work.active():
        normed = lambda x, name: ops.mul(ops.rms_norm(x, network.EPS), parameter(name, WIDTH))
        x = ops.mul(ops.get_rows(parameter("embed", WIDTH, n_vocab, scale=0.1), inputs["tokens"]), inputs["noise"])
        h = normed(x, "norm1")
        q, k, v = (ops.reshape(ops.mul_mat(parameter(name, WIDTH, WIDTH), h), WIDTH // heads, heads, length, batch) for name in "qkv")
        scores = ops.mul_mat(ops.permute(k, 0, 2, 1, 3), ops.permute(q, 0, 2, 1, 3))
        scores = ops.soft_max_ext(scores, inputs["mask"], (WIDTH / heads) ** -0.5)
        seen_by = ops.mul_mat(ops.cont(ops.permute(v, 1, 2, 0, 3)), scores)
        x = ops.add(x, ops.mul_mat(parameter("out", WIDTH, WIDTH), ops.cont(ops.permute(seen_by, 0, 2, 1, 3), WIDTH, n)))
        h = ops.silu(ops.add(ops.mul_mat(parameter("up", WIDTH, HIDDEN), normed(x, "norm2")), parameter("up_bias", HIDDEN, scale=0.0)))
        x = ops.add(x, ops.add(ops.mul_mat(parameter("down", HIDDEN, WIDTH), h), parameter("down_bias", WIDTH, scale=0.0)))
        y = ops.add(ops.mul_mat(parameter("head", WIDTH, m * e), normed(x, "norm3")), parameter("head_bias", m * e, scale=0.0))
        loss = ops.cross_entropy_loss(ops.reshape(y, e, m * n), inputs["labels"]).named("loss")
    return inputs, made, y, loss


def train(seen: Seen, n_vocab: int, epochs: int, seed: int = 0, say=print) -> network.Network:
    """Train on all sequences of `seen`, which are equally long."""
    rng, numbers = np.random.default_rng(seed), np.unique(seen.routes.sequences)
    length, n = len(seen.routes.tokens) // len(numbers), len(numbers) // BATCH * BATCH
    assert (np.bincount(seen.routes.sequences)[numbers] == length).all() and n, "sequences of equal length, as many as a batch has"
    tokens = seen.routes.tokens.reshape(-1, length)
    labels = np.stack([seen.used(m) for m in range(seen.n_layers)], 1).astype(np.float32) / seen.routes.k
    labels = labels.reshape(len(tokens), length, *labels.shape[1:])
    inputs, made, _, loss = build(seen, n_vocab, length, rng)
    trainer = Trainer(loss, optimiser=AdamW(RATE, decay=DECAY))
    mask = np.where(np.tri(length, dtype=bool), 0, -np.inf).astype(np.float32)
    steps, start = epochs * n // BATCH, time.perf_counter()
    for epoch in range(epochs):
        for rows in np.split(rng.permutation(len(tokens))[:n], n // BATCH):
            done = trainer.n_steps / steps
            trainer.optimiser.rate = RATE * (done / WARM + 0.01 if done < WARM else (1 + math.cos(math.pi * (done - WARM) / (1 - WARM))) / 2)
            noise = (rng.random((length * BATCH, WIDTH), np.float32) >= DROP) / np.float32(1 - DROP)
            last = trainer.step({inputs["tokens"]: tokens[rows].ravel(), inputs["noise"]: noise, inputs["mask"]: mask,
                                 inputs["labels"]: labels[rows].reshape(-1, seen.routes.n_expert)})
        if epoch % 20 == 0 or epoch == epochs - 1:
            say(f"epoch {epoch + 1} of {epochs}: loss {last:.4f}, {time.perf_counter() - start:.0f} s")
    return network.Network({name: t.numpy().copy() for name, t in made.items()})


def rows_of(found, seen: Seen, name: str):
    """A line for each predictor and layer: recall and precision when k, k + 1 and 2k experts are fetched, and what it costs."""
    k = seen.routes.k
    for key, predictor in found.items():
        for few, some, many in zip(*(scoring.evaluate(predictor, seen, scoring.top(n)) for n in (k, k + 1, 2 * k))):
            yield {"model": name, "predictor": key, "layer": few.layer, "recall_at_k": few.recall, "recall_at_k_plus_1": some.recall,
                   "recall_at_2k": many.recall, "precision_at_k": few.precision, "precision_at_2k": many.precision,
                   "best_expert_found": few.best, "exact_set": few.exact, "bytes": few.nbytes, "flops_per_token": few.flops}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", help="shipped models: tiny-mixtral, tiny-deepseek")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--out", type=Path, default=ROOT, help="where predictors/ and metrics/ are")
    args = parser.parse_args()
    for name in args.names:
        start = time.perf_counter()
        with models.load(f"{name}-f16") as model:
            seen = record(model, RouteTrace.load(ROOT / "traces" / f"{name}_trace.npz"))
            n_vocab = model.hparams.n_vocab
        first, last = split(seen.routes)
        fit, report = seen.sequences(first), seen.sequences(last)
        kept = first[np.arange(len(first)) % 12 < 11]
        fitted = {"frequency": Frequency(), "previous-token": PreviousToken(), "previous-layer": PreviousLayer(),
                  **{f"gate-{n}": GateAhead(n) for n in range(5)}, **{n: Shared(*how) for n, how in network.FITTED.items()}, "oracle": Oracle()}
        for predictor in fitted.values():
            predictor.fit(fit)
        print(f"{name}: {time.perf_counter() - start:.0f} s to record and to fit all but the network", flush=True)
        fitted["network"] = train(seen.sequences(kept), n_vocab, args.epochs)
        for folder in ("predictors", "metrics"):
            (args.out / folder).mkdir(parents=True, exist_ok=True)
        network.save_predictors(args.out / "predictors" / f"{name}.npz", fitted)
        found = network.load_predictors(args.out / "predictors" / f"{name}.npz")       # as they are stored
        rows = list(rows_of(found, report, name))
        with open(args.out / "metrics" / f"{name}_predictors.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({k: round(v, 5) if isinstance(v, float) else v for k, v in r.items()} for r in rows)
        print(f"{name}: done in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
