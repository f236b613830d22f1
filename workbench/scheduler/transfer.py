"""How weights that lie elsewhere reach the device that computes with them.

The runtime asks a `WeightTransfer` before it copies a weight whole. `UsedExperts` is ggml's rule; a pool of expert slots
can stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from workbench.devices.backend import Backend
from workbench.errors import ParameterError, shown
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace

if TYPE_CHECKING:
    from workbench.scheduler.runtime import Part
    from workbench.scheduler.splits import Split

PADDING = 512
"""Bytes copied beyond a run of experts, so that a kernel that reads past its last row meets numbers there and no NaN."""


class Route(Protocol):
    """What a transfer may ask the runtime. slot: which of a split's copies is in use."""

    @property
    def slot(self) -> int:
        """The pipeline slot of this run."""
        ...

    @property
    def trace(self) -> Trace | None:
        """Where calls are recorded."""
        ...

    @property
    def eval_callback(self) -> EvalCallback | None:
        """Who looks at nodes, if anybody."""
        ...

    def backend_of(self, tensor: Tensor) -> Backend:
        """The backend that computed or holds a tensor."""
        ...

    def may_be_partial(self, copy: Tensor) -> bool:
        """Whether nothing but the first node of its split reads this copy."""
        ...

    def part(self, key: Any, nodes: list[Tensor]) -> Part:
        """Some nodes as a graph to compute; the same key gives the same graph as long as the splits stand."""
        ...


class WeightTransfer(Protocol):
    """A policy of weight movement. One that derives from `Mover` may do more than move."""

    def begin(self) -> None:
        """A run over all splits starts."""
        ...

    def move(self, route: Route, target: Backend, split: Split, position: int) -> bool:
        """Bring input number `position` of a split to `target`; False: the runtime shall copy the whole tensor."""
        ...


class Mover:
    """What the runtime tells a policy besides, and what it leaves to it if it likes. Here: nothing.

    attaches: whether `attach` does anything.
    """

    attaches = False

    def attach(self, splits: list[Split], backends: list[Backend]) -> dict[Tensor, list[Tensor]]:
        """A graph was split and has no memory yet: copies may get memory of the policy's own. Returns, by node, what must keep its
        memory until that node."""
        return {}

    def begin(self) -> None:
        """A run over all splits starts."""

    def keeps(self, weight: Tensor) -> bool:
        """Whether copies of a weight are memory of the policy's own: nobody waits for their last readers, nothing is moved."""
        return False

    def compute(self, route: Route, target: Backend, split: Split) -> list[Tensor]:
        """All inputs are there. Returns the nodes that the runtime shall compute: those that the policy has not asked for itself."""
        return split.nodes

    @property
    def holding(self) -> bool:
        """Whether nodes that `compute` kept back have not been asked for yet; a later split's `compute` will ask for them."""
        return False

    def done(self, route: Route, target: Backend, split: Split) -> None:
        """Everything in the split was asked for."""

    def cancelled(self) -> None:
        """A run failed, and devices have forgotten what did not happen yet."""


class WholeTensor(Mover):
    """Every weight is copied whole."""

    def move(self, route: Route, target: Backend, split: Split, position: int) -> bool:
        """Never: the runtime copies it."""
        return False


class UsedExperts(Mover):
    """ggml's rule: where a split starts with MUL_MAT_ID and its weights lie in host memory, only the experts that the ids
    name are copied, neighbours in one go. The ids are read once as long as the same tensor holds them."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the ids of the run before."""
        self._ids: Tensor | None = None
        self._used: list[int] = []

    def move(self, route: Route, target: Backend, split: Split, position: int) -> bool:
        """Copy the used experts of a MUL_MAT_ID that stands first in its split."""
        weight = split.inputs[position]
        copy = split.copies[position][route.slot]
        node = split.nodes[0] if split.nodes else None
        if node is None or node.op != "MUL_MAT_ID" or node.src[0] is not copy or not _constant_on_host(weight):
            return False
        if not route.may_be_partial(copy):
            return False
        route.backend_of(weight).synchronize(copies=False)
        ids, home = self._where_ids_are(route, target, split, position, node)
        if not ids.n_elements:
            return True
        if ids is not self._ids or self._used[-1] >= weight.ne[2]:  # a weight with fewer experts: they are checked again
            self._used = used_experts(ids, home, weight)
            self._ids = ids
        memory, trace = weight.require_data().host_bytes(), route.trace
        for run in expert_copies(self._used, weight.ne[2], weight.nb[2]):
            if trace is not None:
                trace.add("experts", target.buffer_type.now, copy=copy.name, first=run.first, last=run.last, padding=run.padding)
            target.set_async(copy, memory[weight.offset + run.start :][: run.size], run.start)
        return True

    @staticmethod
    def _where_ids_are(route: Route, target: Backend, split: Split, position: int, node: Tensor) -> tuple[Tensor, Backend]:
        """The ids as the node reads them, or the original where its copy to the device is still to come."""
        ids = node.src[2]
        assert ids is not None
        for tensor, copies in zip(split.inputs[position + 1 :], split.copies[position + 1 :], strict=True):
            if copies[route.slot] is ids:
                return tensor, route.backend_of(tensor)
        return ids, target


def used_experts(ids: Tensor, home: Backend, weight: Tensor) -> list[int]:
    """The experts that the ids name, each once, in order. Raises ParameterError for one that the weight does not have."""
    return np.unique(read_ids(ids, home, weight)).tolist()


def read_ids(ids: Tensor, home: Backend, weight: Tensor) -> np.ndarray:
    """The ids [T, k] as the host sees them, which waits for them. Raises ParameterError for an expert that the weight does not have."""
    raw = home.get_async(ids)
    home.synchronize(copies=False)
    values = np.ndarray(ids.ne[1::-1], np.int32, raw, 0, ids.nb[1::-1])
    if values.size and not 0 <= (lowest := values.min()) <= (highest := values.max()) < weight.ne[2]:
        wrong = lowest if lowest < 0 else highest
        raise ParameterError(f"{ids.label} names expert {wrong}",
                             f"0 to {weight.ne[2] - 1}: {shown(weight.name)} has {weight.ne[2]} experts",
                             "write valid ids before the graph runs")  # fmt: skip
    return values


class ExpertCopy(NamedTuple):
    """One copy of neighbouring experts: `size` bytes from `start` on within the weight, the last `padding` of them beyond the run."""

    first: int
    last: int
    start: int
    size: int
    padding: int


def expert_copies(used: list[int], n_expert: int, expert_bytes: int) -> Iterator[ExpertCopy]:
    """The copies that bring the `used` experts, each once and in order, of a weight with `n_expert` of `expert_bytes` bytes each."""
    for first, last in runs(used):
        padding = min(expert_bytes, PADDING) if last < n_expert - 1 else 0
        yield ExpertCopy(first, last, first * expert_bytes, (last - first + 1) * expert_bytes + padding, padding)


def runs(experts: list[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of neighbours: [1, 4, 5, 6] gives (1, 1), (4, 6)."""
    first = last = experts[0]
    for e in experts[1:]:
        if e != last + 1:
            yield first, last
            first = e
        last = e
    yield first, last


def _constant_on_host(weight: Tensor) -> bool:
    storage = weight.require_data()
    return storage.usage is Usage.WEIGHTS and storage.is_host


EvalCallback = Callable[[Tensor, bool], bool]
"""`callback(node, ask)`: with ask=True whether the node is wanted, after computing it with ask=False whether to go on."""
