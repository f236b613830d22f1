"""`Dashboard`: all knobs of ExpertFlow over one recorded text; each move runs the simulation again, beside the run before."""

from __future__ import annotations

from typing import Any

from workbench.expertflow.cache import POLICIES
from workbench.expertflow.tuning import PREDICTORS, Bench, Outcome, Settings
from workbench.views.dashboard import Board, dashboard_picture
from workbench.widgets.controls import Knobs

LINKS = (6.0, 12.6, 25.2, 50.4)
WAITS = (0.0, 5.0, 20.0, 50.0, -1.0)
CAPACITIES = (1, 4, 16, 32, 64)
THRESHOLDS = (0, 1, 2, 4, 8)
CARD = 24 * 2**30


class Dashboard(Knobs):
    """Cache size, policy, predictor, window, width of the forecast, way of misses, threshold and capacity of queues, wait and link speed
    of a `tuning.Bench`.

    Below: counters of this run and the one before, time by cause, hit rate beside LRU, LFU and Belady, residency, timeline with stalls, and
    memory by part. `outcome` is the last run.
    """

    def __init__(self, bench: Bench, settings: Settings | None = None, **kwargs: Any) -> None:
        self.bench, start = bench, settings or Settings()
        n_expert, k = bench.stream.trace.n_expert, bench.stream.trace.k
        self._policies = [p for p, made in POLICIES.items() if made.needs in ("", "predictions")]
        knobs = [
            ["slots per layer", k, n_expert, []], ["policy", 0, len(self._policies) - 1, self._policies],
            ["predictor", 0, len(PREDICTORS) - 1, list(PREDICTORS)], ["window, layers ahead", 1, 4, []],
            ["experts named per token", 1, n_expert, []], ["missing experts", 0, 1, ["loaded", "host if quicker"]],
            ["tokens worth a load", 0, len(THRESHOLDS) - 1, [str(n) if n else "that hide it" for n in THRESHOLDS]],
            ["queue capacity", 0, len(CAPACITIES) - 1, [str(c) for c in CAPACITIES]],
            ["longest wait", 0, len(WAITS) - 1, ["none" if not w else "for ever" if w < 0 else f"{w:g} ms" for w in WAITS]],
            ["link", 0, len(LINKS) - 1, [f"{x:g} GB/s" for x in LINKS]],
        ]  # fmt: skip
        values = [start.slots, self._policies.index(start.policy), PREDICTORS.index(start.predictor), start.window, start.fetch,
                  int(start.hosted), THRESHOLDS.index(start.threshold), CAPACITIES.index(start.capacity), WAITS.index(start.wait),
                  LINKS.index(start.link)]  # fmt: skip
        self.outcome: Outcome = bench.run(start)
        super().__init__(knobs=knobs, values=values, **kwargs)
        self.drive(self._run)

    def settings(self, *values: int) -> Settings:
        """The knobs' positions as settings."""
        slots, policy, predictor, window, fetch, hosted, threshold, capacity, wait, link = values
        return Settings(self._policies[policy], slots, PREDICTORS[predictor], window, fetch, CAPACITIES[capacity], WAITS[wait],
                        link=LINKS[link], hosted=bool(hosted), threshold=THRESHOLDS[threshold])  # fmt: skip

    def _run(self, *values: int) -> Board:
        before = self.outcome
        self.outcome = now = self.bench.run(self.settings(*values))
        shape, costs = now.stream.costs.shape, now.stream.costs
        per = costs.expert_bytes / shape.expert
        dense = int((shape.total - shape.n_moe * shape.router.n_expert * shape.expert) * per)
        memory = {"dense weights": dense, "expert slots": now.slots * shape.n_moe * costs.expert_bytes,
                  "queues": 4 * shape.d * shape.n_moe * shape.router.n_expert * now.settings.capacity}  # fmt: skip
        self._board = Board(now, before, self.bench.bounds(now.slots), memory, CARD, _idle_knobs(now.settings))
        return self._board

    def stored_html(self) -> str:
        """Knobs, counters of both runs, and their ledgers as a picture."""
        return f"<div><b>{self._settings()}</b></div>{self._board.table().html()}{dashboard_picture(self._board).html()}"


def _idle_knobs(settings: Settings) -> str:
    """Which knobs change nothing at these settings, in words."""
    said = []
    if POLICIES[settings.policy].needs != "predictions":
        said.append(f"{settings.policy} reads no forecast, so predictor, window and experts named are idle.")
    elif settings.predictor == "none":
        said.append(f"Without a predictor {settings.policy} works as lru.")
    if not settings.wait:
        said.append("Nobody waits, so what is worth a load is not asked.")
    return " ".join(said)
