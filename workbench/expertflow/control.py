"""Answers pressure while a model runs: a `Monitor` reads, `Pressure` decides, and the expert slots, the forecast's window or the queues
give way or grow again (the seed's section 4.4, "adjust buffers dynamically").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from workbench.expertflow.monitor import Monitor, Pressure, Reading
from workbench.expertflow.offload import Offloaded


class Answer(NamedTuple):
    """What was done at a reading: part "shrinks" or "widens" to a setting (slots, layers, places), and the bytes this gave or took."""

    reading: Reading
    part: str
    does: str
    setting: int
    nbytes: int


class Controller:
    """Watches an `Offloaded` run on a card of `limit` bytes; call `step` between two decodes.

    period: virtual nanoseconds between two readings, cost: of one. shares: of the limit, by part (see `Pressure`). queues: the most
    places of token queues, and what is called with a new number of them. marks: high, low, step, calm of `Pressure`. Slots shrink
    to those of one token's experts, the window to nothing, the queues to one place.
    """

    def __init__(self, run: Offloaded, limit: int, period: int, *, cost: int = 0, shares: Mapping[str, float] | None = None,
                 queues: tuple[int, Callable[[int], None]] | None = None, **marks: float) -> None:  # fmt: skip
        self.run, self.monitor, self.answers = run, Monitor(limit, period, cost), list[Answer]()
        engine, k = run.engine, run.session.model.hparams.n_expert_used
        self._slots = {engine.cache.layers[g.layers[0]]: g.slots for g in engine.cache.groups}  # by a layer of each group
        self._least, self._set_queues = k, queues[1] if queues else None
        self._ahead = list(engine.forecast.predictors) if engine.forecast else []
        most = {"cache": float(max(self._slots.values())), **({"window": float(len(self._ahead))} if self._ahead else {}),
                **({"queues": float(queues[0])} if queues else {})}  # fmt: skip
        least = {"cache": float(k), "window": 0.0, "queues": 1.0}
        self._most = most["cache"]
        self.pressure = Pressure(shares or {"queues": 0.1, "cache": 0.5, "window": 0.1}, dict(most), least, most, **marks)  # type: ignore[arg-type]

    def step(self, others: Mapping[str, int] | None = None) -> Answer | None:
        """Account all parts now, and answer if a reading is due. others: bytes by part besides the run's own. Raises ParameterError for an
        unknown part."""
        pool, monitor = self.run.engine.pool, self.monitor
        mine, others = self.run.memory(), others or {}
        for part in {**mine, **others}:
            monitor.account(part, mine.get(part, 0) + others.get(part, 0))
        reading = monitor.look(pool.device.buffer_type.now)
        if reading is None:
            return None
        held = {"queues": monitor.parts["queues"], "cache": pool.nbytes, "window": self._waiting()}
        answer = self.pressure.answer(reading, held, monitor.limit)
        if answer is None:
            return None
        part, does, setting = answer
        before = pool.nbytes
        apply = {"cache": self._resize, "window": self._narrow, "queues": self._set_queues}[part]
        assert apply is not None
        apply(int(setting))
        monitor.account("cache", monitor.parts["cache"] + pool.nbytes - before)
        self.answers.append(Answer(reading, part, does, int(setting), pool.nbytes - before))
        return self.answers[-1]

    def _waiting(self) -> int:
        """Bytes of the slots that a forecast filled and nobody has used yet."""
        engine = self.run.engine
        return sum(len(cache.fetched) * engine.pool.sizes[engine.cache.layers[group.layers[0]]]
                   for group, cache in zip(engine.cache.groups, engine.cache.caches, strict=True))  # fmt: skip

    def _resize(self, slots: int) -> None:
        """Every group of layers in proportion; none grows beyond the high mark."""
        engine, monitor = self.run.engine, self.monitor
        for layer, most in self._slots.items():
            change = max(self._least, int(most * slots / self._most)) - engine.cache.slots_of(layer)
            room = int(self.pressure.high * monitor.limit) - monitor.used - (engine.pool.nbytes - monitor.parts["cache"])
            change = min(change, max(0, room // engine.pool.sizes[layer])) if change > 0 else change
            if change:
                engine.resize(layer, change)

    def _narrow(self, layers: int) -> None:
        forecast = self.run.engine.forecast
        if forecast is not None:
            forecast.predictors = self._ahead[:layers]
