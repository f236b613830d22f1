"""The state that lesson 21 starts from: the tiny Mixtral's hidden states and routes on held-out text, fitted predictors, a clock."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from workbench import models, paths, views
from workbench.expertflow import sources
from workbench.expertflow.calibration import Calibration, Row, calibrate, report
from workbench.expertflow.costs import Costs, costs
from workbench.expertflow.network import shipped_predictors
from workbench.expertflow.observe import Seen, record
from workbench.expertflow.online import Batch, Online, recalibrate, stream
from workbench.expertflow.predictors import Predictor, Shared
from workbench.expertflow.replay import forecast_of
from workbench.expertflow.scoring import Choose, batches, top
from workbench.expertflow.timing import Timed, simulate

NAME, PER_DOMAIN = "tiny-mixtral", 16
ENGLISH, PYTHON = 1, 0
TITLES = {"frequency": "frequency", "previous-token": "previous token", "previous-layer": "previous layer",
          "gate-0": "gate, before attention", "gate-1": "gate, 1 ahead", "gate-2": "gate, 2 ahead", "gate-3": "gate, 3 ahead",
          "gate-4": "gate, 4 ahead", "linear-1": "linear, 1 ahead", "non-linear-1": "hidden layer, 1 ahead",
          "network": "network over tokens", "linear-on-scores-1": "linear on scores", "oracle": "oracle"}  # fmt: skip
"""Predictors by their names, and as the tables of the lesson call them."""


@lru_cache(1)
def _recorded() -> Seen:
    """Sequences 8 to 15 of each domain, and 0 to 7 of Python: run once per process."""
    routes = sources.load(NAME).trace
    place = routes.sequences % PER_DOMAIN
    wanted = (place >= 8) | (routes.domains == PYTHON)
    with models.load(f"{NAME}-f16") as model:
        return record(model, routes.select(wanted))


class Lesson21:
    """Predicting routes: what the tiny Mixtral saw, said and did; predictors as shipped, fitted on sequences 0 to 11 of each domain."""

    @property
    def model_text(self) -> Any:
        """The tokenizer of the model, to show tokens as text."""
        with models.load(f"{NAME}-f16") as model:
            return model.tokenizer

    def part(self, first: int, last: int, domain: int | None = None) -> Seen:
        """Sequences first … last - 1 of each domain, or of one."""
        seen = _recorded()
        numbers = np.unique(seen.routes.sequences)
        place, of = numbers % PER_DOMAIN, numbers // PER_DOMAIN
        return seen.sequences(numbers[(first <= place) & (place < last) & ((domain is None) | (of == domain))])

    @property
    def report(self) -> Seen:
        """What results are reported on: sequences 12 to 15, which nobody was fitted on."""
        return _report()

    @property
    def warm_up(self) -> Seen:
        """What thresholds are chosen on: sequence 11 of each domain, which the network has not seen."""
        return _warm_up()

    @property
    def predictors(self) -> dict[str, Predictor]:
        """As shipped."""
        return _predictors()

    def titled(self, *keys: str) -> dict[str, Predictor]:
        """Some of them by the names that tables show."""
        return {TITLES[key]: self.predictors[key] for key in keys}

    def tokens(self, seen: Seen, rows: Sequence[int]) -> list[str]:
        """Tokens as text."""
        tokenizer, ids = self.model_text, seen.routes.tokens
        return [tokenizer.decode([int(ids[row])]) or "⏎" for row in rows]

    def published(self, predictor: str, column: str) -> float:
        """A figure of `models/metrics`, by PyTorch on all held-out text: mean over layers 2 to 5."""
        with open(paths.models_dir() / "metrics" / f"{NAME}_predictability.csv", encoding="utf-8") as f:
            return float(np.mean([float(r[column]) for r in csv.DictReader(f) if r["predictor"] == predictor and int(r["layer"]) > 1]))

    def calibrated(self, key: str, target: float = 0.95, rule: str = "margin") -> Calibration:
        """A predictor's thresholds."""
        return _calibrated(key, target, rule)

    def results(self, key: str, choose: Choose, by: str = "domain", seen: Seen | None = None) -> list[Row]:
        """A report on the held-out text."""
        return report(self.predictors[key], self.report if seen is None else seen, choose, by)

    # ---- how early

    @property
    def costs(self) -> Costs:
        """Mixtral-8x7B in q8_0 on a card of 24 GB, as in lesson 20."""
        return _costs()

    def lead_ms(self, ahead: int) -> float:
        """Milliseconds from the state that a predictor reads to the experts it speaks of, if nobody waits for a load; ahead: 0 stands for
        what enters the layer, -1 for the input of the layer's own router."""
        c = self.costs
        layer = c.attention(1) + c.ids(1) + 2 * c.expert(1)
        return {-1: 0, 0: c.attention(1) + c.ids(1)}.get(ahead, ahead * layer) / 1e6

    @staticmethod
    def node_names() -> list[str]:
        """The nodes of one decode step of the model, in the order in which they are computed."""
        with models.load(f"{NAME}-f16") as model:
            return [t.name for t in models.build_step(model, models.KVCache(model.hparams, 256), 1, 256, 1).graph.nodes]

    # ---- one domain for another

    @property
    def on_python(self) -> Predictor:
        """A linear layer, 1 ahead, fitted on eight Python texts alone."""
        return _on_python()

    def batches_of(self, predictor: Predictor, seen: Seen, size: int) -> list[Batch]:
        """A run of texts, `size` of them side by side."""
        return list(stream(predictor, seen, batches(seen.routes, size)))

    def online(self, parts: Sequence[Batch], **settings: Any) -> list[tuple[Any, ...]]:
        """Everything that happens while they go by."""
        events = list(recalibrate(parts, Online(**settings)))
        assert sum(e[0] == "batch" for e in events) == len(parts)
        return events

    # ---- does it help

    def run(self, key: str = "", choose: Choose | None = None, link: float = 1.0, slots: int = 4) -> Timed:
        """48 tokens with the costs of lesson 20, the link so many times as fast: on demand with LRU, or with a forecast (of 2)."""
        seen = _some()
        c = replace(self.costs, device=replace(self.costs.device, link=self.costs.device.link * link))
        if not key:
            return simulate(seen.routes, c, "lru", slots)
        found = forecast_of(self.predictors[key], seen, choose or top(2))
        ran = simulate(seen.routes, c, "predicted", slots, forecast=found)
        assert sum(ran.ledger.values()) == ran.ns
        return ran

    def beside_cpu(self, key: str = "") -> Timed:
        """The same tokens with misses computed on the host: with a forecast (of 1), or the experts used most in other texts alone."""
        seen, hot = _some(), self.part(8, 12).routes.counts()
        forecast = forecast_of(self.predictors[key], seen, top(1)) if key else None
        return simulate(seen.routes, self.costs, "predicted" if key else "static", 4, forecast=forecast, hot=hot, host_below="auto")

    def steps(self, key: str, choose: Choose, m: int, n: int = 20) -> dict[str, Any]:
        """The stepper's trace of a forecast over some tokens of an English text."""
        seen = self.part(12, 13, ENGLISH)
        rows = range(12, 12 + n)
        return views.forecast_steps(self.predictors[key], seen, choose, m, rows, self.tokens(seen, rows))


@lru_cache(1)
def _report() -> Seen:
    return Lesson21().part(12, 16)


@lru_cache(1)
def _warm_up() -> Seen:
    return Lesson21().part(11, 12)


@lru_cache(1)
def _predictors() -> dict[str, Predictor]:
    return shipped_predictors(NAME)


@lru_cache(1)
def _costs() -> Costs:
    return costs("Mixtral-8x7B", "rtx3090-pcie4", "q8_0")


@lru_cache(64)
def _calibrated(key: str, target: float, rule: str) -> Calibration:
    return calibrate(_predictors()[key], _warm_up(), target, rule)


@lru_cache(1)
def _on_python() -> Predictor:
    return Shared(1).fit(Lesson21().part(0, 8, PYTHON))


@lru_cache(1)
def _some() -> Seen:
    seen = Lesson21().part(12, 13, ENGLISH)
    rows = slice(16, 64)
    return Seen(seen.routes.select(rows), seen.states[:, rows], seen.inputs[:, rows], seen.gates)
