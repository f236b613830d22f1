"""What an engine works on, layer by layer: the expert weights of a model, a visit to a layer's experts, and what is counted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from workbench.expertflow.hosted import HostBlock
from workbench.models.model import Model
from workbench.scheduler.splits import Split
from workbench.tensors.tensor import Tensor

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")


def expert_weights(model: Model) -> dict[int, list[Tensor]]:
    """The merged expert matrices of each layer of a model, as they lie on the host; the one that is read last comes last."""
    layers: dict[int, list[Tensor]] = {}
    for name, weight in sorted(model.weights.items(), key=lambda item: "ffn_down" in item[0]):
        if found := _EXPERTS.fullmatch(name):
            layers.setdefault(int(found[1]), []).append(weight)
    return dict(sorted(layers.items()))


@dataclass(eq=False)
class Visit:
    """One layer's experts in one graph: its products in order, and the nodes from the first to the last of them."""

    layer: int
    products: list[Tensor]
    block: list[list[Tensor]] = field(default_factory=list)  # by split
    # of the present run:
    ids: Any = None
    states: Any = None
    groups: list[list[int]] = field(default_factory=list)
    hosted: list[int] = field(default_factory=list)
    in_waves: bool = False
    twin: HostBlock | None = None


@dataclass
class Counters:
    """What an engine did. Bytes that somebody waited for, and bytes that were fetched on a forecast, are counted apart.

    late: prefetched experts that were wanted before they were there. ids_waits: how often the host waited for a router.
    """

    hits: int = 0
    loads: int = 0
    evictions: int = 0
    hosted: int = 0
    prefetches: int = 0
    prefetched_hits: int = 0
    late: int = 0
    dropped: int = 0
    waves: int = 0
    ids_waits: int = 0
    demand_bytes: int = 0
    speculative_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the wanted experts that were in a slot, or on their way to one; NaN where none was wanted."""
        wanted = self.hits + self.loads + self.hosted
        return self.hits / wanted if wanted else float("nan")

    @property
    def precision(self) -> float:
        """Share of the prefetched experts that were wanted before they had to go; NaN where none was fetched."""
        return self.prefetched_hits / self.prefetches if self.prefetches else float("nan")


def between(splits: list[Split], first: Tensor, last: Tensor) -> list[list[Tensor]]:
    """The nodes from `first` to `last`, split by split."""
    out: list[list[Tensor]] = []
    for split in splits:
        nodes = split.nodes
        a = nodes.index(first) if first in nodes else 0
        b = nodes.index(last) + 1 if last in nodes else len(nodes)
        if out or first in nodes:
            out.append(nodes[a:b])
            if last in nodes:
                break
    return out


def memory_of(block: list[list[Tensor]]) -> list[Tensor]:
    """What owns the compute memory that the nodes of a block read and write."""
    tensors = (t.root() for nodes in block for node in nodes for t in (node, *node.sources()))
    return [t for t in dict.fromkeys(tensors) if t._storage is None]
