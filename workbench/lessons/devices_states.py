"""The state that lesson 26 starts from: loads of recorded texts, placements, tokens that cross links, and a model on several cards."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.cgraph import CGraph
from workbench.devices.cost import Speed, preset
from workbench.devices.simulated import SimulatedDevice, simulated_machine
from workbench.expertflow import sources
from workbench.expertflow.cache import ExpertCache
from workbench.expertflow.costs import Costs, costs
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates, record
from workbench.expertflow.parallel import CardEngine, Engines
from workbench.expertflow.placement import Placement, pack, place, visited
from workbench.expertflow.pool import ExpertPool
from workbench.expertflow.predictors import GateAhead
from workbench.expertflow.several import offload_across
from workbench.moe import ExpertWeights, RouteTrace, Routing, build_experts, configs
from workbench.scheduler import Scheduler
from workbench.tensors import Context, Flag, Tensor, Usage


class Cards(NamedTuple):
    """A text on some cards: of each card its layers, slots, hits, loads and bytes; and whether all logits had the bits of a model that
    is all there."""

    rows: list[tuple[str, int, int, int, int]]
    equal: bool


class Spread(NamedTuple):
    """A text on cards that share the experts of each layer. rows: (there, back) as counted while it ran, and as its routes say; recall of
    the journeys announced; loads waited for, and loads ahead of time; equal: as in `Cards`."""

    rows: tuple[int, int]
    said: tuple[int, int]
    recall: float
    loads: int
    ahead: int
    equal: bool


class LayerRun(NamedTuple):
    """One layer's experts on some cards: virtual ns of the run, visits and choices elsewhere per token, imbalance, results."""

    ns: int
    visits: float
    away: float
    imbalance: float
    out: np.ndarray


@dataclass(frozen=True)
class Uncut(Speed):
    """A card that computes with cut matrices and takes as long as with whole ones: of their width `d` one part in cut[0] is there, of the
    experts' inner width `f` one in cut[1]. Copies count as rows of the whole width."""

    d: int = 1
    f: int = 1
    cut: tuple[int, int] = (1, 1)

    def _whole(self, t: Tensor) -> Tensor:
        real = {self.d // self.cut[0]: self.d, self.f // self.cut[1]: self.f}
        widths = {"f16": 2, "f32": 1}.get(t.dtype.name, 0)  # of matrices and of rows
        ne = tuple(real.get(n, n) if i < widths else n for i, n in enumerate(t.ne))
        return Tensor(t.dtype, ne, op=t.op, spec=t.spec, params=t.params)

    def parts(self, node: Tensor) -> dict[str, int]:
        """Those of the whole node."""
        whole = self._whole(node)
        whole.src = tuple(None if s is None else self._whole(s) for s in node.src)
        return super().parts(whole)

    def transfer_ns(self, nbytes: int, pinned: bool = True) -> int:
        """That of whole rows."""
        return super().transfer_ns(nbytes * self.cut[0], pinned)


class Lesson26:
    """Several devices: the tiny Mixtral and its recorded routes over six kinds of text; the tiny DeepSeek's beside them."""

    EPLB: dict[str, Any] = {
        "source": "github.com/deepseek-ai/EPLB, README, commit d52c72d (MIT)",
        "loads": np.array([[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]),
        "published": [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]],
    }
    """The example that is published with EPLB: 2 layers of 12 experts in 4 groups, 16 places, 8 GPUs in 2 nodes."""

    prompt = "And God said unto Moses, Go in unto"

    # ---- pools

    @cached_property
    def model(self) -> models.Model:
        """The really trained model: 6 layers of 8 experts, of which each token uses 2."""
        return models.load("tiny-mixtral-f16")

    def across(self, n: int, budget: float = 0.5, n_tokens: int = 16) -> Cards:
        """The prompt and `n_tokens` fixed tokens of English, on `n` cards with a share `budget` of all experts in slots."""
        text = (paths.models_dir() / "samples" / "english.txt").read_text("utf-8")[:400]
        tokens = self.model.tokenizer.encode(text)[:n_tokens]
        with offload_across(self.model, budget, n) as run:
            logits = [run.session.decode([t]) for t in tokens]
            rows = [(f"{min(e.pool.weights)} to {max(e.pool.weights)}", sum(map(len, e.pool.classes.values())), c.hits, c.loads,
                     c.demand_bytes) for e, c in zip(run.engines, run.counters, strict=True)]  # fmt: skip
        return Cards(rows, all(np.array_equal(a, b) for a, b in zip(logits, self._whole(tuple(tokens)), strict=True)))

    def spread(self, n: int, fetch: int = 0, budget: float = 0.5, n_tokens: int = 24) -> Spread:
        """`n_tokens` fixed tokens of English on `n` cards that share the experts of each layer, placed by the loads of English. fetch: with
        a forecast by the next layer's gate that names so many experts, and a policy that reads it."""
        text = (paths.models_dir() / "samples" / "english.txt").read_text("utf-8")[:400]
        tokens, placed = self.model.tokenizer.encode(text)[:n_tokens], place(self.loads("english"), n)
        forecast = Forecaster.of_gates(Gates.of(self.model), fetch=fetch) if fetch else None
        policy = "plec" if fetch else "lru"
        with offload_across(self.model, budget, n, placement=placed, policy=policy, forecast=forecast, recording=True) as run:
            logits = [run.session.decode([t]) for t in tokens]
            routes, t = run.session.routes.experts.astype(int), run.traffic
            home = np.array([run.among.homes[layer] for layer in run.among.layers])[:, None]
            away = sum(int((self._of(placed, i)[e] != h).sum()) for i, (e, h) in enumerate(zip(routes, home, strict=True)))
            there = t.announced + t.unannounced
            return Spread((there, int(t.rows.sum()) - there), (int(placed.crossings(routes, home).sum()), away), t.recall,
                          sum(c.loads for c in run.counters), sum(c.prefetches for c in run.counters),
                          all(np.array_equal(a, b) for a, b in zip(logits, self._whole(tuple(tokens)), strict=True)))  # fmt: skip

    @lru_cache(2)  # noqa: B019 - one state per lesson
    def _whole(self, tokens: tuple[int, ...]) -> list[np.ndarray]:
        cards = simulated_machine(1)
        placed = models.place_weights(self.model, cards)
        with models.Session(placed, scheduler=Scheduler(cards)) as session:
            out = [session.decode([t]) for t in tokens]
        placed.close()
        return out

    # ---- loads and placements

    def packing_steps(self, loads: np.ndarray, n_packs: int) -> dict[str, Any]:
        """`pack` for a stepper: the heaviest first, each into the lightest pack that has room."""
        packs = pack(loads, n_packs)
        home = {item: p for p, items in enumerate(packs) for item in items}
        filled, count, steps, room = [0] * n_packs, [0] * n_packs, list[dict[str, Any]](), len(loads) // n_packs
        for item in np.argsort(-loads, kind="stable").tolist():
            p, before = home[item], list(filled)
            full = [i for i in range(n_packs) if count[i] == room]
            lighter = [i for i in full if before[i] < before[p]]
            filled[p] += int(loads[item])
            count[p] += 1
            why = f" Lighter, but full: {', '.join(map(str, lighter))}." if lighter else ""
            why += " It is full now." * (count[p] == room)
            steps.append({"label": f"expert {item}", "cause": "full" if lighter else "lightest", "change": count[p] == room,
                          "sentence": f"Expert {item} ({loads[item]}) goes to device {p}, the lightest with room ({before[p]}).{why}",
                          "marks": [[p, str(item), float(loads[item] / loads.max())]],
                          "table": [[str(i), str(f), "full" if count[i] == room else ""] for i, f in enumerate(filled)]})  # fmt: skip
        return {"title": f"{len(loads)} experts onto {n_packs} devices", "lanes": [f"device {i}" for i in range(n_packs)],
                "columns": ["device", "load", ""], "table": "after this expert", "steps": steps}  # fmt: skip

    @lru_cache(4)  # noqa: B019
    def trace(self, name: str = "tiny-mixtral") -> RouteTrace:
        """Recorded routes, 4,096 tokens of each kind of text."""
        return sources.load(name).trace

    @lru_cache(32)  # noqa: B019
    def part(self, domain: str = "", name: str = "tiny-mixtral") -> RouteTrace:
        """The routes of one kind of text; "": of all."""
        trace = self.trace(name)
        return trace if not domain else trace.select(np.flatnonzero(trace.domains == trace.domain_names.index(domain)))

    @lru_cache(32)  # noqa: B019
    def loads(self, domain: str = "", name: str = "tiny-mixtral") -> np.ndarray:
        """Choices of each layer and expert."""
        return self.part(domain, name).counts()

    @staticmethod
    def in_order(loads: np.ndarray, n_devices: int) -> Placement:
        """Experts on devices by their numbers."""
        return Placement(np.tile(np.arange(loads.shape[1]), (len(loads), 1)), loads, n_devices)

    # ---- links

    @staticmethod
    def homes(n_tokens: int, n_devices: int) -> np.ndarray:
        """Tokens live on the devices in turn."""
        return np.arange(n_tokens) % n_devices

    def crossings(self, placed: Placement, domain: str = "", name: str = "tiny-mixtral") -> float:
        """Other devices that a token visits in a layer, on average over the tokens of a kind of text, or over every sixth of all."""
        part = self.part(domain, name)
        if not domain:
            part = part.select(np.arange(0, part.n_tokens, 6))
        return float(placed.crossings(part.experts.astype(int), self.homes(part.n_tokens, placed.n_devices)).mean())

    def costs(self, name: str = "Mixtral-8x7B", card: str = "rtx3090-pcie4") -> Costs:
        """Nanoseconds of a published configuration in f16."""
        return costs(name, card)

    @staticmethod
    def layer_ns(c: Costs, n_tokens: int, n_devices: int, visits: float, imbalance: float = 1.0) -> tuple[int, int]:
        """(computing on the busiest device, rows there and back over its link), in ns: experts all resident, tokens spread evenly."""
        e, k = c.shape.router.n_expert, c.shape.router.n_used
        each = max(1, round(imbalance * n_tokens * k / e))  # tokens of an expert
        n = min(-(-e // n_devices), max(1, round(imbalance * n_tokens * k / n_devices)))  # experts that a device computes
        rows = n_tokens / n_devices * visits
        return n * c.expert(each), 2 * c.device.transfer_ns(int(rows * 2 * c.shape.d)) if rows else 0

    @staticmethod
    def one_home_ns(c: Costs, n_tokens: int, visits: float, away: float) -> int:
        """Rows there, and a row back for each choice elsewhere, over the link of one card that has all tokens, as f32."""
        return sum(c.device.transfer_ns(int(n_tokens * n * 4 * c.shape.d)) for n in (visits, away) if n)

    def run_layer(self, name: str, n_devices: int, n_tokens: int, trace: str = "tiny-mixtral", card: str = "a100") -> LayerRun:
        """The experts of one layer of a published model, run on simulated cards that hold them all, for recorded routes of English whose
        tokens are all on the first card. Matrices are cut, so that a laptop can multiply them, and random; the clock takes them whole."""
        shape, cut = configs.model(name), (8, 16)
        e, k, d, f = shape.router.n_expert, shape.router.n_used, shape.d // cut[0], shape.f // cut[1]
        known = preset(card).speed
        speed = Uncut(**{field.name: getattr(known, field.name) for field in fields(Speed)}, d=shape.d, f=shape.f, cut=cut)
        machine = simulated_machine(",".join([card] * n_devices), offload_min_batch=1, speed=speed)
        placed = place(self.loads("english", trace)[:1], n_devices)
        ids = self.part("english", trace).experts[:1, :n_tokens].astype(np.int32)
        rng, context, graph = np.random.default_rng(0), Context(10**5, no_alloc=True), CGraph()

        def tensor(what: str, ne: tuple[int, ...], value: np.ndarray, home: SimulatedDevice, usage: Usage = Usage.ANY) -> Tensor:
            t = context.new_tensor({"f2": "f16", "f4": "f32", "i4": "i32"}[value.dtype.str[1:]], *ne, name=what)
            t.place(home.buffer_type.alloc_buffer(t.nbytes, usage))
            t.set(value)
            return t

        def drawn(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, np.float32) / 16

        matrices = [tensor(f"blk.0.ffn_{what}_exps.weight", ne, drawn(*ne[::-1]).astype(np.float16), machine[-1], Usage.WEIGHTS)
                    for what, ne in (("up", (d, f, e)), ("gate", (d, f, e)), ("down", (f, d, e)))]  # fmt: skip
        x = tensor("x", (d, n_tokens), drawn(n_tokens, d), machine[0])
        chosen = tensor("ids", (k, n_tokens), ids[0], machine[0])
        shares = tensor("shares", (1, k, n_tokens), np.full((n_tokens, k, 1), 1 / k, np.float32), machine[0])
        with context.active():
            out = build_experts(x, ExpertWeights(matrices[1], matrices[0], matrices[2]), Routing(chosen, shares, x, x), graph=graph)
        graph.build_forward_expand(out.mark(Flag.OUTPUT))
        engines = []
        for device in machine[:-1]:
            pool = ExpertPool(device, {0: matrices}, sum(w.nbytes for w in matrices) // n_devices, least=e // n_devices)
            slots = {size: len(found) for size, found in pool.classes.items()}
            engines.append(CardEngine(pool, ExpertCache("lru", slots, [0], e, scope="global", sizes=list(pool.sizes.values()))))
        scheduler = Scheduler(machine, transfer=Engines(engines, {0: 0}, placed))
        for _ in range(2):  # the first run brings the experts
            scheduler.reset()
            scheduler.alloc(graph)
            start = machine[0].machine.now
            scheduler.compute(graph)
        ns, there, home = machine[0].machine.now - start, self._of(placed, 0)[ids[0]], np.zeros(n_tokens, int)
        return LayerRun(ns, float(placed.crossings(ids, home).mean()), float((there != 0).sum(1).mean()),
                        placed.imbalance(np.bincount(ids.ravel(), minlength=e)[None]), out.numpy().copy())  # fmt: skip

    @staticmethod
    def _of(placed: Placement, layer: int) -> np.ndarray:
        """The device of each expert of a layer, where there are no copies."""
        return placed.on(layer).argmax(1)

    @cached_property
    def announced(self) -> dict[int, tuple[float, float, float]]:
        """What the gate of the next layer says one layer ahead about English, taking its 2, 3 or 4 best experts: by how many, (recall of
        experts, recall of devices to be visited, precision of these). Four devices."""
        text = (paths.models_dir() / "samples" / "english.txt").read_text("utf-8")[:1500]
        seen = record(self.model, [self.model.tokenizer.encode(text)[:192]])
        placed, home = place(self.loads(), 4), self.homes(seen.routes.n_tokens, 4)
        predictor, out = GateAhead(1), {}
        layers = [m for m in range(seen.routes.n_layers) if predictor.speaks(m, seen.gates)]
        for n in (2, 3, 4):
            right = wanted = hit = visits = said = 0
            for m in layers:
                guess = np.argsort(-predictor.scores(seen, m), 1, kind="stable")[:, :n]
                true = seen.routes.experts[m].astype(int)
                right += int((true[:, :, None] == guess[:, None]).sum())
                wanted += true.size
                a, b = (visited(self._of(placed, m)[e], home, 4) for e in (true, guess))
                hit, visits, said = hit + int((a & b).sum()), visits + int(a.sum()), said + int(b.sum())
            out[n] = right / wanted, hit / visits, hit / said
        return out
