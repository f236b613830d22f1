"""What a layer of a published model takes on a machine: its parts on the device and on the host, a load over the link, a read from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from workbench.devices.cost import DISKS, Disk, Speed, preset
from workbench.moe.configs import MoEModel, model

KERNELS = 20
"""Kernels that a layer starts besides those of its experts: norms, attention, the router."""


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of a layer of a published model on a machine. n: tokens at once."""

    shape: MoEModel
    kind: str
    device: Speed
    host: Speed
    name: str
    n_past: int = 0
    disk: Disk = DISKS["nvme-pcie4"]

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of an expert."""
        return self.shape.bytes_per_expert(self.kind)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes that a layer reads besides its routed experts, keys and values included."""
        s, per = self.shape, self.shape.bytes_per_expert(self.kind) / (self.shape.matrices * self.shape.d * self.shape.f)
        dense = s.attention.params(s.d) + s.matrices * s.d * s.f_shared + s.router.n_expert * s.d
        return int(dense * per) + 2 * 2 * self.n_past * s.attention.kv * s.attention.head

    @cached_property
    def _kept(self) -> dict[tuple[str, int], int]:
        return {}

    def _once(self, what: str, n: int, compute: Callable[[int], int]) -> int:
        """Runs ask for the same few numbers of tokens again and again."""
        found = self._kept.get((what, n))
        if found is None:
            found = self._kept[what, n] = compute(n)
        return found

    def attention(self, n: int) -> int:
        """Everything in a layer before its experts."""
        return self._once("attention", n, self._attention)

    def _attention(self, n: int) -> int:
        flops = 2 * n * (self.shape.attention.params(self.shape.d) + self.shape.matrices * self.shape.d * self.shape.f_shared)
        flops += 4 * n * self.n_past * self.shape.attention.heads * self.shape.attention.head
        return KERNELS * self.device.launch_ns + int(max(self.dense_bytes / self.device.memory, flops / self._rate(self.device)))

    def expert(self, n: int) -> int:
        """One expert's matrices on the device."""
        return self._once("expert", n, lambda n: self._expert(n, self.device))

    def _expert(self, n: int, on: Speed, memory: float = 0.0) -> int:
        work = max(self.expert_bytes / (memory or on.memory), 2 * n * self.shape.expert / self._rate(on))
        return self.shape.matrices * on.launch_ns + int(work)

    def on_host(self, n: int) -> int:
        """The same on the host, with the rows' way there and back."""
        return self._once("host", n, self._on_host)

    def beside_copies(self, n: int) -> int:
        """The same while the link copies all the time: it reads the same memory, of which the host keeps the rest, at least half."""
        left = max(self.host.memory - self.device.link, self.host.memory / 2)
        return self._once("beside", n, lambda n: self._on_host(n, left))

    def _on_host(self, n: int, memory: float = 0.0) -> int:
        return self._expert(n, self.host, memory) + 2 * self.device.transfer_ns(4 * n * self.shape.d)

    @cached_property
    def load(self) -> int:
        """An expert over the link, from pinned memory."""
        return self.device.transfer_ns(self.expert_bytes)

    @cached_property
    def read(self) -> int:
        """An expert from disk into the host's memory."""
        return self.disk.read_ns(self.expert_bytes)

    def ids(self, n: int) -> int:
        """The router's ids to the host, which waits for them."""
        return self._once("ids", n, self._ids)

    def _ids(self, n: int) -> int:
        return self.device.sync_ns + self.device.transfer_ns(4 * n * self.shape.router.n_used)

    def head(self, n: int) -> int:
        """Embedding, last norm and output matrix."""
        return self._once("head", n, self._head)

    def _head(self, n: int) -> int:
        size = self.shape.embedding * self.expert_bytes / self.shape.expert
        return 3 * self.device.launch_ns + int(max(size / self.device.memory, 2 * n * self.shape.embedding / self._rate(self.device)))

    def predictor(self, hidden: int) -> int:
        """A network of one hidden layer that names the experts of a layer: two small products, weights in f16."""
        weights = hidden * (self.shape.d + self.shape.router.n_expert)
        work = max(2 * weights / self.device.memory, 2 * weights / self._rate(self.device))
        return 2 * self.device.launch_ns + int(work) if hidden else 0

    @cached_property
    def look_ahead(self) -> int:
        """The router of a layer to come on the present state: one more norm and product."""
        return 2 * self.device.launch_ns + int(2 * self.shape.d * self.shape.router.n_expert / self.device.memory)

    def _rate(self, speed: Speed) -> float:
        return speed.flops_of.get(self.kind, speed.flops)


def costs(name: str = "Mixtral-8x7B", device: str = "rtx3090-pcie4", kind: str = "f16", host: str = "cpu", n_past: int = 0) -> Costs:
    """The costs of a published model (`moe.configs`) stored as `kind` on presets (`devices.cost`)."""
    return Costs(model(name), kind, preset(device).speed, preset(host).speed, f"{name} ({kind}) on {device}", n_past)
