"""Memory under watch: who holds what, read at intervals, and what gives way first when it gets tight (the seed's sections 3.4 and 4.4).

A `Monitor` keeps the account of each part; its readings cost time and come late, so between two of them memory can go over the limit.
`Pressure` answers a reading where the pressure arises, and only so often that it does not swing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.errors import ParameterError, shown

PARTS = ("weights", "cache", "queues", "predictor", "activations", "kv")
"""What a device's memory is used for: dense weights, expert slots, waiting tokens, the predictor, compute memory, keys and values."""
GIVING = ("queues", "cache", "window")
"""What can give way, in the order in which it is asked where nothing stands out. The window's bytes are the slots that hold forecasts."""


class Reading(NamedTuple):
    """What a monitor saw: at a time (ns), bytes by part, and their share of the limit."""

    time: int
    parts: dict[str, int]
    ratio: float


class Monitor:
    """The account of a device's memory, part by part.

    limit: bytes of the device. period: nanoseconds between two readings; cost: what one takes. overshoot: the most bytes above
    the limit at any time, seen or not; `spent`: time that readings took.
    """

    def __init__(self, limit: int, period: int, cost: int = 0) -> None:
        if limit < 1 or period < 1 or cost < 0:
            raise ParameterError(f"limit={limit}, period={period}, cost={cost}", "a limit and a period of 1 or more, a cost of 0 or more")
        self.limit, self.period, self.cost = limit, period, cost
        self.parts: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.readings: list[Reading] = []
        self.overshoot = self.spent = 0
        self._next = 0

    @property
    def used(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def account(self, part: str, nbytes: int) -> None:
        """A part now holds `nbytes`. Raises ParameterError for an unknown part or a negative size."""
        if part not in self.parts or nbytes < 0:
            raise ParameterError(f"{nbytes:,} bytes of {shown(part)}", f"0 or more, of {', '.join(PARTS)}")
        self.parts[part] = nbytes
        self.overshoot = max(self.overshoot, self.used - self.limit)

    def look(self, time: int) -> Reading | None:
        """A reading, where one is due at `time`; None between two."""
        if time < self._next:
            return None
        self._next = time + self.period
        self.spent += self.cost
        self.readings.append(Reading(time, dict(self.parts), self.used / self.limit))
        return self.readings[-1]


@dataclass
class Pressure:
    """Decides what gives way (`high`) and what may grow again (`low`).

    shares: of the limit that queues, cache and window may have; above `high` the one most above its share shrinks; where none is, the
    first of GIVING that can. Below `low` they widen again, the last one shrunk first, and only after `calm` readings below it in a
    row: a part that has just shrunk would otherwise grow into the next alarm. most, least: bounds of each part's setting, which
    moves by factors of `step`.
    """

    shares: Mapping[str, float]
    settings: dict[str, float]
    least: Mapping[str, float]
    most: Mapping[str, float]
    high: float = 0.9
    low: float = 0.7
    step: float = 0.75
    calm: int = 3
    _quiet: int = 0
    _shrunk: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high <= 1 or not 0 < self.step < 1:
            raise ParameterError(f"low={self.low}, high={self.high}, step={self.step}", "0 < low < high ≤ 1 and a step between 0 and 1")
        if unknown := {*self.shares, *self.settings} - set(GIVING):
            raise ParameterError(f"{', '.join(sorted(unknown))} among what gives way", f"some of {', '.join(GIVING)}")

    def answer(self, reading: Reading, held: Mapping[str, int], limit: int) -> tuple[str, str, float] | None:
        """(part, "shrinks" or "widens", its new setting), or None. held: bytes of what can give way."""
        if reading.ratio > self.high:
            self._quiet = 0
            return self._shrink(held, limit)
        self._quiet = self._quiet + 1 if reading.ratio < self.low else 0
        if self._quiet < self.calm or not self._shrunk:
            return None
        part = self._shrunk.pop()
        self._quiet = 0
        self.settings[part] = min(self.most[part], self.settings[part] / self.step)
        return part, "widens", self.settings[part]

    def _shrink(self, held: Mapping[str, int], limit: int) -> tuple[str, str, float] | None:
        can = [p for p in GIVING if p in self.settings and self.settings[p] > self.least[p]]
        if not can:
            return None
        above = {p: held.get(p, 0) / limit - self.shares.get(p, 0.0) for p in can}
        part = max(can, key=lambda p: (above[p], -GIVING.index(p))) if max(above.values()) > 0 else can[0]
        self._shrunk.append(part)
        self.settings[part] = max(self.least[part], self.settings[part] * self.step)
        return part, "shrinks", self.settings[part]
