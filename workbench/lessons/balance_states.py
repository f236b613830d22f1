"""The state that lessons 17 and 18 start from: a small expert layer that is trained while one waits, records of longer runs, the shipped
models with limits on their experts, and single layers in DeepSeek's form. Public names only."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import threading
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from workbench import models, moe, paths
from workbench.cgraph import CGraph, build
from workbench.execution import GraphRunner, compute
from workbench.lessons.expert_similarity import by_chance, every_answer, hidden_units, matched_cosine, mean_cosine
from workbench.lessons.moe_states import MoELesson
from workbench.lessons.replaced_routes import losses_with_routes
from workbench.models.hparams import HParams
from workbench.moe.layers import FeedForward, build_shared
from workbench.moe.training import ClusterModel, ClusterTask, Remedy
from workbench.tensors import Context, Flag, Tensor, ops

TOP1 = moe.Router(8, 1, normalise=False)
REMEDIES = {"none": Remedy(), "load-balancing loss": Remedy(aux=0.2), "z-loss": Remedy(z=1e-3), "selection bias": Remedy(bias=0.01)}
"""As in `models/tools/train_toy_moe.py`, which recorded ten seeds of each."""
METRICS = paths.models_dir() / "metrics"


def recorded(name: str) -> Any:
    """A file of `models/metrics`: JSON as it is, CSV as a list of rows."""
    file = METRICS / name
    if file.suffix == ".json":
        return json.loads(file.read_text("utf-8"))
    with file.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


class Routed(NamedTuple):
    """What losses say about logits [T, E]: the numbers, probabilities [T, E], experts [T, k], choices per expert, and the slope of the
    balancing loss for each logit [T, E]."""

    balance: float
    z: float
    probs: np.ndarray
    experts: np.ndarray
    counts: np.ndarray
    slopes: np.ndarray


class LimitedHParams(HParams):
    """A model's numbers with a capacity for each expert."""

    capacity_factor: float | None = None

    @property
    def router(self) -> moe.Router:
        """The model's router, which drops what an expert has no room for."""
        return dataclasses.replace(super().router, capacity_factor=self.capacity_factor)


class Lesson17(MoELesson):
    """Load balancing: runs with and without each remedy, the shipped ablation, the tiny Mixtral with full experts."""

    _training = threading.Lock()

    @cached_property
    def _trained(self) -> dict[tuple[str, int], ClusterModel]:
        return {}

    def trained(self, remedy: str = "none", seed: int = 1, steps: int = 400) -> ClusterModel:
        """A layer of eight experts, one per token, trained here and now (a second or two), and then kept."""
        with self._training:
            model = self._trained.get((remedy, seed)) or ClusterModel(ClusterTask(seed=seed), TOP1, remedy=REMEDIES[remedy], seed=seed)
            self._trained[remedy, seed] = model
            return model.train(max(0, steps - len(model.losses)))

    def small(self, aux: float = 0.0, z: float = 0.0, steps: int = 20) -> ClusterModel:
        """Four experts on four clusters, trained for so many steps: short enough for a knob."""
        router = moe.Router(4, 1, normalise=False)
        return ClusterModel(ClusterTask(4, 8), router, 8, remedy=Remedy(aux, z), n_tokens=64, rate=0.04).train(steps)

    def losses_of(self, logits: Any, router: moe.Router = TOP1) -> Routed:
        """The balancing loss and the z-loss of logits [T, E], built, run and differentiated: a router whose matrix is 1 keeps them."""
        z = np.asarray(logits, np.float32)
        with Context(2**22, name="losses").active() as context:
            x = context.from_numpy(z, name="logits").mark(Flag.PARAM)
            routing = moe.build_router(x, context.from_numpy(np.eye(z.shape[1], dtype=np.float32), name="router"), router)
            loss = ops.cont(moe.balance.load_balancing_loss(routing, router)).mark(Flag.LOSS)
            size = moe.balance.z_loss(routing.logits)
            compute(build(size))
            said = float(size.numpy().item())
            graph = build(loss).build_backward_expand()
            graph.reset()
            compute(graph)
            slope = graph.grad(x)
            assert slope is not None
            probs, ids = routing.probs.numpy().copy(), routing.experts.numpy().copy()
            counts = moe.balance.counts_of(ids, router.n_expert)
            return Routed(float(loss.numpy().item()), said, probs, ids, counts, slope.numpy().copy())

    def scores(self, seed: int, n_tokens: int = 64) -> np.ndarray:
        """Made-up probabilities [T, 8] that like some experts better than others; multiples of 1/1024 plus a little, so that none tie."""
        rng = np.random.default_rng([17, seed])
        rough = np.round(1024 * rng.dirichlet(np.linspace(0.5, 2, 8), n_tokens)) / 1024
        return rough + 1e-5 * rng.permuted(np.tile(np.arange(8.0), (n_tokens, 1)), axis=1)

    def settled(self, scores: np.ndarray, rate: float, steps: int) -> np.ndarray:
        """Choices per expert in the last of so many steps with a selection bias, by the program's own choice and its own step."""
        router, bias, counts = TOP1, np.zeros(8), np.zeros(8, int)
        for _ in range(steps):
            counts = moe.balance.counts_of([moe.reference.choose(row + bias, router) for row in scores], 8)
            bias += moe.balance.bias_step(counts, rate)
        return counts

    def mixed(self, each: int = 32) -> list[int]:
        """The first tokens of all six samples, one after the other."""
        return sum((self.text(each, domain) for domain in ("english", "python", "c", "chinese", "maths", "numeric")), [])

    def loss_with_capacity(self, tokens: list[int], factor: float | None) -> tuple[float, float]:
        """The tiny Mixtral whose experts take at most factor times their fair share: (nats per token, share of choices dropped)."""
        hp = self.model.hparams
        limited = LimitedHParams(**{f.name: getattr(hp, f.name) for f in dataclasses.fields(hp)})
        object.__setattr__(limited, "capacity_factor", factor)
        model = copy.copy(self.model)
        model.hparams = limited
        step, logits = self._run_watched(model, tokens)
        kept = [r.kept.numpy() for r in step.routings if r.kept is not None]
        logits = logits[:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        nats = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), tokens[1:]]
        return float(nats.mean()), float(1 - np.mean(kept)) if kept else 0.0

    def _run_watched(self, model: models.Model, tokens: list[int]) -> tuple[models.StepGraph, np.ndarray]:
        with self._turn:
            return self.run(tokens, model)

    @cached_property
    def runs(self) -> dict[str, list[dict[str, float]]]:
        """Ten seeds of each remedy, as recorded."""
        return recorded("toy_moe.json")["balance"]

    @cached_property
    def curves(self) -> dict[str, dict[str, dict[str, Any]]]:
        """task -> network -> losses of five seeds: dense against experts, as recorded."""
        return recorded("toy_moe.json")["dense against experts"]

    def ablation(self, step: int = 500) -> dict[str, np.ndarray]:
        """Shares of the load [6 layers, 8 experts] of the tiny Mixtral while it was trained, "with" and "without" balancing."""
        rows = [r for r in recorded("balance_ablation.csv") if int(r["step"]) == step]
        return {v: np.array([[float(r[f"load_{e}"]) for e in range(8)] for r in rows if r["variant"] == v]) for v in ("with", "without")}

    def validation(self, run: str, step: int = 500) -> float:
        """Recorded loss of a run on held-out text, averaged over the six domains, in nats."""
        return float(np.mean([float(r["val_loss"]) for r in recorded(f"{run}_val.csv") if int(r["step"]) == step]))

    def usage(self, layer: int, run: str = "tiny-mixtral") -> dict[str, np.ndarray]:
        """Share of each expert of a layer by kind of text, as recorded."""
        out: dict[str, list[float]] = {}
        for r in recorded(f"{run}_domain_usage.csv"):
            if int(r["layer"]) == layer:
                out.setdefault(r["domain"], []).append(float(r["share"]))
        return {domain: np.array(shares) for domain, shares in out.items()}


class Form(NamedTuple):
    """A layer in DeepSeek's form over T rows: its graph, `out` and what the routed and the shared experts added to it [T, D]; `experts`,
    `weights` [T, k]; `scores` [T, E] before any bias."""

    graph: CGraph
    out: np.ndarray
    routed: np.ndarray
    shared: np.ndarray
    experts: np.ndarray
    weights: np.ndarray
    scores: np.ndarray


class Lesson18(MoELesson):
    """Shared experts: the tiny DeepSeek, whose layers have 16 experts to choose 4 from, and one that every token uses."""

    similarity = staticmethod(mean_cosine)
    answers = staticmethod(every_answer)
    units, matched, by_chance = staticmethod(hidden_units), staticmethod(matched_cosine), staticmethod(by_chance)

    @cached_property
    def model(self) -> models.Model:
        """The really trained model, mapped from its file: layer 0 is dense, layers 1 to 4 have experts."""
        return models.load("tiny-deepseek-f16")

    @cached_property
    def mixtral(self) -> MoELesson:
        """The other model, without shared experts, with the same text."""
        return MoELesson()

    def form(self, layer: int = 4, router: moe.Router | None = None, *, shared: FeedForward | bool = True, gate: np.ndarray | None = None,
             bias: np.ndarray | None = None, routed: float = 1.0) -> Form:  # fmt: skip
        """The expert layer alone over the text. router: the model's own by default; shared: False for none, or another network.

        gate [D]: weights of a gate on the shared expert; bias [E]: a selection bias; routed: factor on what the routed experts add.
        """
        router, rows, merged = router or self.model.hparams.router, self.hidden[layer], self.model.experts(layer)
        network = merged.shared if shared is True else shared or None
        with self._turn, Context(2**16, name="own") as own, Context(2**18, no_alloc=True).active() as context:
            x = context.new_tensor("f32", *rows.shape[::-1], name="x").mark(Flag.INPUT)
            vectors = [None if v is None else own.from_numpy(np.asarray(v, np.float32), name=name)
                       for name, v in (("shared gate", gate), ("selection bias", bias))]  # fmt: skip
            experts = dataclasses.replace(merged, shared=network, shared_gate=vectors[0])
            graph = CGraph()
            matrix = self.model.weight("ffn_gate_inp", layer)
            routing = moe.build_router(x, matrix, router, selection_bias=vectors[1], graph=graph, layer=layer)
            if routed != 1.0:
                routing = dataclasses.replace(routing, weights=ops.scale(routing.weights, routed))
            out = moe.build_experts(x, experts, routing, graph=graph, layer=layer)
            graph.build_forward_expand(out)
            named = {t.name: t for t in graph.nodes}
            parts = [out, named.get(f"ffn_moe_out-{layer}"), named.get(f"ffn_shexp_out-{layer}", named.get(f"ffn_shexp-{layer}"))]
            got = self._computed(graph, x, rows, [*parts, routing.experts, routing.weights, routing.probs])
        zero, (n, k) = np.zeros_like(got[0]), (len(rows), router.n_used)
        return Form(graph, got[0], got[1], zero if got[2] is None else got[2], got[3].reshape(n, k), got[4].reshape(n, k), got[5])

    def shared_alone(self, layer: int = 4) -> np.ndarray:
        """The shared expert as the plain network that it is, over the text [T, D]."""
        rows = self.hidden[layer]
        with self._turn, Context(2**18, no_alloc=True).active() as context:
            x = context.new_tensor("f32", *rows.shape[::-1], name="x").mark(Flag.INPUT)
            out = build_shared(x, self.model.experts(layer))
            return self._computed(build(out), x, rows, [out])[0]

    @staticmethod
    def _computed(graph: CGraph, x: Tensor, rows: np.ndarray, wanted: list[Tensor | None]) -> list[Any]:
        for t in wanted:
            if t is not None:
                t.root().mark(Flag.OUTPUT)
        runner = GraphRunner()
        runner.prepare(graph)
        x.set(rows)
        runner.run(graph)
        return [None if t is None else t.numpy().copy() for t in wanted]

    def promoted(self, n: int, layer: int = 4) -> FeedForward | bool:
        """A shared network of n parts: the trained one, then the routed experts that most tokens of the text choose, each scaled by the
        mean weight it had. Wider matrices are all that several shared experts are."""
        if n < 2:
            return n == 1
        merged, run = self.model.experts(layer), self.form(layer)
        used = np.bincount(run.experts.ravel(), minlength=16)
        best = np.argsort(-used, kind="stable")[: n - 1]
        gates, ups, downs = ([t.numpy().astype(np.float32)] for t in (merged.shared.gate, merged.shared.up, merged.shared.down))  # type: ignore[union-attr]
        for e in best:
            gates.append(merged.gate.numpy()[e].astype(np.float32))  # type: ignore[union-attr]
            ups.append(merged.up.numpy()[e].astype(np.float32))
            downs.append(merged.down.numpy()[e].astype(np.float32) * run.weights[run.experts == e].mean())
        arrays = [np.concatenate(gates), np.concatenate(ups), np.concatenate(downs, 1)]
        self._kept_shared = context = Context(sum(a.nbytes for a in arrays) + 2**13, name="shared experts")
        gate, up, down = (context.from_numpy(np.ascontiguousarray(a)) for a in arrays)
        return FeedForward(gate, up, down)

    def active_parameters(self, d: int, f: int, n_expert: int, k: int, n_shared: int) -> int:
        """Numbers of a layer that one token uses, counted from the tensors of a graph for one token: described, never allocated."""
        with Context(2**18, no_alloc=True).active() as context:
            new, wide = context.new_tensor, f * n_shared
            shared = FeedForward(new("f16", d, wide), new("f16", d, wide), new("f16", wide, d)) if n_shared else None
            experts = moe.ExpertWeights(new("f16", d, f, n_expert), new("f16", d, f, n_expert), new("f16", f, d, n_expert), shared)
            out = moe.build_moe_ffn(new("f32", d, 1), new("f32", d, n_expert), experts, moe.Router(n_expert, k))
            used = {"MUL_MAT": 1.0, "MUL_MAT_ID": k / n_expert}
            return round(sum(used[t.op] * t.src[0].n_elements for t in build(out).nodes if t.op in used and t.src[0]))

    def loss_with_routes(self, model: models.Model, routes: str, n_tokens: int = 192) -> float:
        """Nats per token of an English text with the chosen experts, with random ones, or with none but the shared ones."""
        tokens = self.text(n_tokens)
        return float(losses_with_routes(model, tokens, routes).mean())

    @cached_property
    def random_routes(self) -> dict[str, dict[str, dict[str, Any]]]:
        """model -> kind of text -> losses by routes, as recorded."""
        return {name: kinds for name, kinds in recorded("random_routes.json").items() if name.startswith("tiny")}

    @cached_property
    def redundancy(self) -> list[dict[str, Any]]:
        """Small trained layers with and without a shared expert: similarity of experts, losses; five seeds each, as recorded."""
        return recorded("redundancy.json")["runs"]

    def trained(self, shared: bool, common: float = 0.9, seed: int = 0, steps: int = 400) -> ClusterModel:
        """Eight small experts, one per token, with a shared one or without, on clusters that have a share of their task in common."""
        return ClusterModel(ClusterTask(common=common, seed=seed), TOP1, shared=16 * shared, remedy=REMEDIES["selection bias"],
                            seed=seed).train(steps)  # fmt: skip
