"""Experts computed where their weights are: on the host, for tokens so few that a copy of the weights would take longer.

The nodes of a layer's experts exist a second time over host memory. What they read is copied there, the host computes the rows
of its experts with the same kernels, and the finished rows are written into the result on the device, beside those of the
experts that the device computed (the choice that Fiddler makes per expert).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from workbench.devices.backend import Backend
from workbench.errors import StorageError
from workbench.expertflow.pool import SlotView
from workbench.kernels.weights import WeightSource
from workbench.scheduler.runtime import Part
from workbench.tensors.storage import HostStorage, Usage
from workbench.tensors.tensor import Tensor


class HostView(HostStorage):
    """The host's merged weight, of which a product computes with some experts only."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.require_data().host_bytes()[weight.offset :][: weight.nbytes], weight.name, Usage.WEIGHTS)
        self.weight = weight
        self.only: Collection[int] | None = None

    def weight_source(self, device: Backend) -> WeightSource:
        """What a product on the host asks."""
        return _Some(self, device.weights(self.weight))


class _Some:
    """Another source, of which some experts are wanted."""

    def __init__(self, view: HostView, whole: WeightSource) -> None:
        self._view, self.matrix, self.expert = view, whole.matrix, whole.expert
        self.dtype, self.shape, self.direct = whole.dtype, whole.shape, whole.direct

    @property
    def only(self) -> Collection[int] | None:
        return self._view.only


class HostBlock:
    """The nodes of a layer's experts over host memory. block: the nodes on the device, first product to last."""

    def __init__(self, host: Backend, block: Sequence[Tensor]) -> None:
        self.host, self.block = host, list(block)
        self._twins: dict[Tensor, Tensor] = {}
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._views: list[HostView] = []
        inside = set(block)
        for node in block:
            for source in node.sources():
                if source not in self._twins and source not in inside:
                    self._outside(source)
            self._twins[node] = self._inside(node)
        self._part = Part([self._twins[node] for node in block])

    def _outside(self, source: Tensor) -> None:
        storage = source.storage
        twin = Tensor(source.dtype, source.ne, source.nb).named(source.name)
        if isinstance(storage, SlotView):
            self._views.append(view := HostView(storage.weight))
            twin.place(view)
        else:
            twin.place(HostStorage(source.nbytes, f"{source.name} on the host"))
            self._inputs.append((source, twin))
        self._twins[source] = twin

    def _inside(self, node: Tensor) -> Tensor:
        owner = self._twins.get(node.view_src) if node.view_src is not None else None
        src = tuple(None if s is None else self._twins[s] for s in node.src)
        twin = Tensor(node.dtype, node.ne, node.nb, op=node.op, spec=node.spec, src=src, params=node.params, view_src=owner,
                      view_offs=node.view_offs if owner is not None else 0, name=node.name)  # fmt: skip
        twin.flags = node.flags
        if owner is None:
            if node.view_src is not None:
                raise StorageError(f"{node.label} shows memory from outside the experts", "nodes that own their results")
            twin.place(HostStorage(node.nbytes, f"{node.name} on the host"))
        return twin

    def fetch(self, device: Backend) -> None:
        """Copy what the experts read to the host; asked of the device before anything else of the layer, and waited for."""
        read = [(twin, device.get_async(source)) for source, twin in self._inputs]
        device.synchronize()
        for twin, data in read:
            twin.require_data().write(0, data)

    def compute(self, experts: Collection[int]) -> None:
        """Compute the rows of `experts` on the host."""
        for view in self._views:
            view.only = frozenset(experts)
        self.host.compute_async(self._part)
        self.host.synchronize()

    def write(self, device: Backend, ids: np.ndarray, experts: Collection[int], everything: bool = False) -> int:
        """Ask for the finished rows to be written into the device's result; neighbours in one go. Returns their bytes.

        everything: for somebody who looks at what lies between, rows of all the block's nodes are written, not the last one's alone.
        """
        places, total = np.flatnonzero(np.isin(ids.reshape(-1), list(experts))), 0
        for node in self.block if everything else self.block[-1:]:
            twin = self._twins[node]
            row, memory = node.nb[1], twin.require_data().host_bytes()[twin.offset :]
            for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else ():
                start, stop = int(run[0]) * row, (int(run[-1]) + 1) * row
                device.set_async(node, memory[start:stop].copy(), start)
            total += len(places) * row
        return total


def host_ns(host: Any, weights: Sequence[Tensor], n_tokens: int) -> int:
    """What the host would take for an expert's products with `n_tokens` tokens: reading its matrices, or the arithmetic."""
    speed = host.speed
    return sum(speed.launch_ns + int(max(w.nb[2] / speed.memory, 2 * w.ne[0] * w.ne[1] * n_tokens / speed.flops)) for w in weights)


def load_ns(device: Any, weights: Sequence[Tensor]) -> int:
    """What bringing an expert over the link takes."""
    return sum(device.speed.transfer_ns(w.nb[2]) for w in weights)
