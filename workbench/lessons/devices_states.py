"""The state that lesson 26 starts from: loads of recorded texts, placements, tokens that cross links, and a model on several cards."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.devices.simulated import simulated_machine
from workbench.expertflow import sources
from workbench.expertflow.observe import record
from workbench.expertflow.placement import Placement, pack, place
from workbench.expertflow.predictors import GateAhead
from workbench.expertflow.several import offload_across
from workbench.expertflow.timing import Costs, costs
from workbench.moe import RouteTrace
from workbench.scheduler import Scheduler


class Cards(NamedTuple):
    """A text on some cards: of each card its layers, slots, hits, loads and bytes; and whether all logits had the bits of a model that
    is all there."""

    rows: list[tuple[str, int, int, int, int]]
    equal: bool


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
                a, b = self._visited(placed, m, true, home), self._visited(placed, m, guess, home)
                hit, visits, said = hit + int((a & b).sum()), visits + int(a.sum()), said + int(b.sum())
            out[n] = right / wanted, hit / visits, hit / said
        return out

    @staticmethod
    def _visited(placed: Placement, layer: int, experts: np.ndarray, home: np.ndarray) -> np.ndarray:
        """(tokens, devices): who goes where, without copies."""
        of = np.empty(placed.loads.shape[1], int)
        of[placed.holds[layer]] = placed.device_of_place()
        out = np.zeros((len(home), placed.n_devices), bool)
        np.put_along_axis(out, of[experts], True, 1)
        out[np.arange(len(home)), home] = False
        return out
