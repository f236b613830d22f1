"""The disk: experts that the host's memory does not hold are read from there before they can go anywhere.

Bytes come out of the mapped file in any case; what a `DiskTier` says is when they would be in memory.
"""

from __future__ import annotations

from collections import OrderedDict

from workbench.devices.cost import Disk
from workbench.devices.simulated import SimulatedDevice, SimulatedEvent
from workbench.errors import ParameterError


class DiskTier:
    """Experts in the host's memory: `slots` of them, those wanted last (the page cache, expert by expert). The others are read from
    `disk` when they are wanted, one after another, while host and card go on. reads, ns: how many, and how long that took in all.
    """

    def __init__(self, card: SimulatedDevice, slots: int, disk: Disk) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ParameterError(f"{slots!r:.40} experts in the host's memory", "a whole number from 1 on")
        self.card, self.slots, self.disk = card, slots, disk
        self.reads = self.ns = self._free_at = 0
        self._held: OrderedDict[tuple[int, int], SimulatedEvent] = OrderedDict()

    def want(self, layer: int, expert: int, nbytes: int) -> SimulatedEvent:
        """Somebody needs an expert of `nbytes` bytes: the event after which the host's memory holds it."""
        event = self._held.pop((layer, expert), None)
        if event is None:
            event = SimulatedEvent(self.card, f"expert {expert} of layer {layer} is in memory")
            start, ns = max(self._free_at, self.card.machine.now), self.disk.read_ns(nbytes)
            event.time = self._free_at = start + ns
            self.reads, self.ns = self.reads + 1, self.ns + ns
            if len(self._held) >= self.slots:
                self._held.popitem(last=False)
            if self.card.trace is not None:
                self.card.trace.add("busy", start, event.time, device="disk", stream="reads", work="copy", name=event.name, bytes=nbytes)
        self._held[layer, expert] = event
        return event
