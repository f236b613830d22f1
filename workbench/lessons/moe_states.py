"""The state that lessons 15 and 16 start from: a real text in a real model, and single expert layers with any router."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import threading
from collections.abc import Sequence
from functools import cached_property
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from workbench import models, moe, paths
from workbench.cgraph import CGraph, build
from workbench.devices import CpuBackend
from workbench.devices.cost import preset
from workbench.execution import GraphRunner
from workbench.kernels.products import by_expert, id_type
from workbench.models.session import fill_inputs
from workbench.tensors import Context, Flag, Tensor, ops

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")


class LayerRun(NamedTuple):
    """One expert layer over T rows, computed: `out` [T, D], the gate's `probs` [T, E], and what each expert contributed,
    `results` [T, k, D]; `experts`, `weights` [T, k], of a routed layer only; `kept` [T, k] where experts have a capacity."""

    graph: CGraph
    out: np.ndarray
    probs: np.ndarray
    results: np.ndarray
    weights: np.ndarray
    experts: np.ndarray
    kept: np.ndarray


class MoELesson:
    """What lessons 15 and 16 share: the tiny Mixtral, and 64 tokens of English."""

    _turn = threading.Lock()  # callbacks of widgets may come on another thread

    @cached_property
    def model(self) -> models.Model:
        """The really trained model, mapped from its file: 6 layers of 8 experts, of which each token uses 2."""
        return models.load("tiny-mixtral-f16")

    def text(self, n_tokens: int = 64, domain: str = "english") -> list[int]:
        """The first tokens of a sample that the model was not trained on."""
        return self.model.tokenizer.encode((paths.models_dir() / "samples" / f"{domain}.txt").read_text("utf-8")[: 8 * n_tokens])[:n_tokens]

    def words(self, tokens: Sequence[int]) -> list[str]:
        """Each token as text."""
        stream = self.model.tokenizer.stream(special=True)
        return [stream.push(token) or "…" for token in tokens]

    def run(self, tokens: Sequence[int], model: models.Model | None = None) -> tuple[models.StepGraph, np.ndarray]:
        """A text through the whole model in one go, router inputs kept: (its graph, its logits [T, vocabulary])."""
        model, n, runner = model or self.model, len(tokens), GraphRunner()
        cache = models.KVCache(model.hparams, n, runner.backend.buffer_type)
        step = models.build_step(model, cache, n, cache.n_ctx, n)
        for t in step.graph.nodes:
            if t.name.startswith(("ffn_norm", "ffn_moe_kept")):
                t.mark(Flag.OUTPUT)
        runner.prepare(step.graph)
        at, seq = np.arange(n), np.zeros(n, np.int64)
        fill_inputs(step, cache, np.array(tokens), at, seq, cache.take(seq, at), at)
        runner.run(step.graph)
        self._kept = runner  # its memory holds what was marked
        return step, step.logits.numpy().copy()

    @cached_property
    def hidden(self) -> dict[int, np.ndarray]:
        """What the router of each layer reads, for the text: [T, D] by layer, kept from a run of the whole model."""
        nodes = {t.name: t for t in self.run(self.text())[0].graph.nodes}
        return {n: nodes[f"ffn_norm-{n}"].numpy().copy() for n in self.model.hparams.moe_layers}

    def layer(self, layer: int, router: moe.Router | None = None, temperature: float = 1.0, rows: np.ndarray | None = None) -> LayerRun:
        """The expert layer alone, its own weights, over the text (or `rows`): routed by `router`, or dense where none is given.

        temperature: the router's matrix is divided by it, and so are the logits.
        """
        rows = self.hidden[layer] if rows is None else rows
        matrix = self.model.weight("ffn_gate_inp", layer).numpy() / np.float32(temperature)
        experts = self.model.experts(layer)
        with self._turn, Context(matrix.nbytes + 2**12, name="router") as own, Context(2**18, no_alloc=True).active() as context:
            x, gate = context.new_tensor("f32", *rows.shape[::-1], name="x").mark(Flag.INPUT), own.from_numpy(matrix, name="gate")
            graph, routing = CGraph(), None
            if router is None:
                out = moe.build_dense_moe(x, gate, experts, graph=graph, layer=layer)
            else:
                routing = moe.build_router(x, gate, router, graph=graph, layer=layer)
                moe.RouteRecorder.watch(routing)
                out = moe.build_experts(x, experts, routing, graph=graph, layer=layer)
            graph.build_forward_expand(out)
            named = {t.name: t for t in graph.nodes}
            wanted = [out, named[f"ffn_moe_probs-{layer}"], named[f"ffn_moe_weighted-{layer}"]]
            for t in (*wanted, *([routing.kept] if routing and routing.kept else [])):
                t.root().mark(Flag.OUTPUT)
            runner = GraphRunner()
            runner.prepare(graph)
            x.set(rows)
            runner.run(graph)
            got = [t.numpy().copy() for t in wanted]
            if routing is None:
                n = got[1].shape[1]
                return LayerRun(graph, got[0], got[1], got[2], got[1], np.tile(np.arange(n), (len(rows), 1)), np.ones(got[1].shape, bool))
            weights, ids = (t.numpy().reshape(len(rows), -1).copy() for t in (routing.weights, routing.experts))
            kept = np.ones(ids.shape, bool) if routing.kept is None else routing.kept.numpy().reshape(ids.shape) > 0
            return LayerRun(graph, got[0], got[1], got[2], weights, ids, kept)

    def described(self, n_expert: int, k: int | None = None, d: int = 128, f: int = 160, n_tokens: int = 1) -> CGraph:
        """An expert layer of any size from descriptions alone: dense, or with k experts used."""
        with Context(2**20, no_alloc=True).active() as context:
            x, gate = context.new_tensor("f32", d, n_tokens), context.new_tensor("f32", d, n_expert)
            wide = d, f, n_expert
            gate_exps, up, down = (context.new_tensor("f16", *ne) for ne in (wide, wide, (f, d, n_expert)))
            experts = moe.ExpertWeights(gate_exps, up, down)
            graph = CGraph()
            if k is None:
                return graph.build_forward_expand(moe.build_dense_moe(x, gate, experts, graph=graph))
            return graph.build_forward_expand(moe.build_moe_ffn(x, gate, experts, moe.Router(n_expert, k), graph=graph))

    def flops(self, graph: CGraph) -> int:
        """Operations of the products of a graph, router included."""
        return sum(t.spec.flops(t) for t in graph.nodes if t.op in PRODUCTS and t.spec)

    def simulated_us(self, graph: CGraph, device: str = "rtx3090-pcie4") -> float:
        """Microseconds of a graph on a card, by the figures of its preset: starting kernels, and arithmetic or memory for each node."""
        speed = preset(device).speed
        return sum(speed.compute_ns(t) for t in graph.nodes if t.spec and not t.spec.is_view) / 1000

    def loss(self, n_used: int, n_tokens: int = 192, domain: str = "english", normalise: bool = True) -> float:
        """Mean loss per token, in nats, if the model used so many experts per token instead of its 2."""
        model, tokens = copy.copy(self.model), self.text(n_tokens, domain)
        model.hparams = dataclasses.replace(model.hparams, n_expert_used=n_used, normalise=normalise)
        logits = self.run(tokens, model)[1][:-1].astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        right = logits[np.arange(len(logits)), tokens[1:]]
        return float((np.log(np.exp(logits).sum(-1)) - right).mean())

    @cached_property
    def llama_cpp(self) -> list[dict[str, Any]]:
        """The nodes that llama.cpp built for the experts of layer 2 and one token: name, op, ne, names of the sources."""
        return json.loads((paths.models_dir() / "metrics" / "lesson15_llama_cpp.json").read_text("utf-8"))["nodes"]


class Lesson15(MoELesson):
    """Dense MoE: a layer by hand, the tiny Mixtral's gates, layers of any number of experts."""

    def small(self, n_expert: int = 8, d: int = 4, f: int = 6, n_tokens: int = 3) -> tuple[dict[str, np.ndarray], Tensor, CGraph]:
        """A dense layer small enough to print: (its arrays, the node of the result, its graph, ready to run)."""
        rng = np.random.default_rng(15)
        shapes = {"x": (n_tokens, d), "router": (n_expert, d), "gate": (n_expert, f, d), "up": (n_expert, f, d), "down": (n_expert, d, f)}
        arrays = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
        room = sum(a.nbytes for a in arrays.values()) + (n_expert + 8) * 2**12 + 64 * n_tokens * n_expert * (d + f)
        context = Context(room, name="small")
        x, router, gate, up, down = (context.from_numpy(a, name=name) for name, a in arrays.items())
        graph = CGraph()
        with context.active():
            out = moe.build_dense_moe(x, router, moe.ExpertWeights(gate, up, down), graph=graph)
        return arrays, out, graph.build_forward_expand(out)

    def soft_max(self, logits: np.ndarray, temperature: float) -> np.ndarray:
        """SOFT_MAX of logits / temperature, as a graph with one node computes it."""
        with Context(2**14).active() as context:
            out = ops.soft_max_ext(context.from_numpy(np.asarray(logits, np.float32)), None, 1 / temperature)
            CpuBackend().compute(build(out))
            return out.numpy().copy()

    def best_ms(self, n_expert: int, n_tokens: int = 64, rounds: int = 7) -> float:
        """Measured here: milliseconds of a dense layer of width 128 with experts of 160, the fastest of several runs."""
        plan, times = CpuBackend().plan(self.small(n_expert, 128, 160, n_tokens)[2]), []
        for _ in range(rounds):
            start = perf_counter()
            plan.run()
            times.append(perf_counter() - start)
        return 1000 * min(times)


class Lesson16(MoELesson):
    """Top-k MoE: the same text and layers, and what others measured."""

    @cached_property
    def kimi(self) -> list[tuple[int, int, int]]:
        """Kimi K3, 896 experts of which 16 are used: (tokens, different experts on average, the same for independent draws)."""
        with (paths.models_dir() / "traces" / "kimi-k3_unique.csv").open(encoding="utf-8") as file:
            return [(int(a), int(b), int(c)) for a, b, c in list(csv.reader(file))[1:]]

    def rows_by_expert(self, ids: np.ndarray, n_expert: int = 8) -> list[np.ndarray]:
        """Choices (t · k + rank) of each expert in `ids` [T, k], grouped as MUL_MAT_ID groups them before its products."""
        places, sizes = by_expert(np, ids.ravel().astype(id_type(n_expert)), n_expert)
        return np.split(places, np.cumsum(sizes)[:-1])

    @cached_property
    def trace(self) -> moe.RouteTrace:
        """The routes of 24,576 tokens of six kinds of text."""
        return moe.RouteTrace.load(paths.models_dir() / "traces" / "tiny-mixtral_trace.npz")
