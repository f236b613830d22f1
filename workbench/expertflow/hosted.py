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


class Block:
    """The nodes of a layer's experts a second time, over other memory. nodes: those on the layer's device, first product to last.

    A subclass says where memory comes from: `outside` for what the nodes read, `inside` for what they compute.
    """

    def __init__(self, nodes: Sequence[Tensor]) -> None:
        self.nodes, self.twins = list(nodes), dict[Tensor, Tensor]()
        within = set(nodes)
        for node in nodes:
            for source in node.sources():
                if source not in self.twins and source not in within:
                    self.twins[source] = self.outside(source)
            self.twins[node] = self._twin(node)

    def outside(self, source: Tensor) -> Tensor:
        """What stands for a tensor that the nodes read and do not compute."""
        raise NotImplementedError

    def inside(self, twin: Tensor) -> None:
        """Give memory to the twin of a node."""
        raise NotImplementedError

    def _twin(self, node: Tensor) -> Tensor:
        owner = self.twins.get(node.view_src) if node.view_src is not None else None
        src = tuple(None if s is None else self.twins[s] for s in node.src)
        twin = Tensor(node.dtype, node.ne, node.nb, op=node.op, spec=node.spec, src=src, params=node.params, view_src=owner,
                      view_offs=node.view_offs if owner is not None else 0, name=node.name)  # fmt: skip
        twin.flags = node.flags
        if owner is None:
            if node.view_src is not None:
                raise StorageError(f"{node.label} shows memory from outside the experts", "nodes that own their results")
            self.inside(twin)
        return twin


class HostBlock(Block):
    """The nodes of a layer's experts over host memory."""

    def __init__(self, host: Backend, nodes: Sequence[Tensor]) -> None:
        self.host = host
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._views: list[HostView] = []
        super().__init__(nodes)
        self._part = Part([self.twins[node] for node in nodes])

    def outside(self, source: Tensor) -> Tensor:
        """Experts are read where they are; everything else will be copied."""
        storage = source.storage
        twin = Tensor(source.dtype, source.ne, source.nb).named(source.name)
        if isinstance(storage, SlotView):
            self._views.append(view := HostView(storage.weight))
            twin.place(view)
        else:
            twin.place(HostStorage(source.nbytes, f"{source.name} on the host"))
            self._inputs.append((source, twin))
        return twin

    def inside(self, twin: Tensor) -> None:
        """Memory of its own."""
        twin.place(HostStorage(twin.nbytes, f"{twin.name} on the host"))

    def fetch(self, device: Backend) -> None:
        """Copy what the experts read to the host; asked of the device before anything else of the layer, and waited for."""
        read = [(twin, device.get_async(source)) for source, twin in self._inputs]
        device.synchronize(copies=False)
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
        for node in self.nodes if everything else self.nodes[-1:]:
            twin = self.twins[node]
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
