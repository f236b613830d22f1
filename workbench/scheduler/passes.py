"""Passes 1 to 4: which backend computes each node (`ggml_backend_sched_split_graph`).

Each pass is a generator of decisions `(stage, tensor, backend, cause)` that it makes as it yields them: scheduling drains
it, a stepper shows one at a time. Backends are numbered by priority; the last one is the CPU. -1 means "not decided".

ggml leaves two dangers to its callers: a node that writes into memory which its device cannot reach, and a view apart from its
memory. They are mended at the end of pass 4 (cause "4.own"), except with quirks="ggml".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from workbench.cgraph import CGraph
from workbench.devices.backend import Backend, BufferType, buffer_type_of
from workbench.errors import ParameterError, UnsupportedOp, shown
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Flag, Tensor

Decision = tuple[str, Tensor, int, str]
"""Stage, tensor, index of the backend (-1: none), cause."""

STAGES = ("pass1", "pass2_gpu_down", "pass2_gpu_up", "pass2_rest_down", "pass2_rest_up", "pass3", "pass4")

CAUSES = {
    "usr": "the user assigned it",
    "1.dst": "its memory is already there",
    "1.inp": "it is an input of the user, which the CPU fills",
    "1.off": "its weight lies in host memory and this backend offers to compute such large batches",
    "1.wgt": "the weight it reads lies there",
    "2.sup": "the neighbouring nodes run there and the backend supports it",
    "3.best": "the backend supports it and can read most of its sources",
    "3.upg": "a backend of higher priority shares the same kind of memory",
    "4.vsrc": "a view lives where the tensor lives whose memory it shows",
    "4.cur": "the node that reads it runs there",
    "4.own": "it writes into memory that lies there (a repair: ggml leaves this to the caller)",
    "4.rest": "nothing reads it, so the CPU keeps it (a repair)",
    "4.cpy": "it is a copy made for another backend",
}
"""Why a tensor belongs to a backend: ggml's short names (`SET_CAUSE`) with the sentence. `1.wgt` ends in the source's index."""

IGNORES_WEIGHTS = frozenset({"ROPE", "FLASH_ATTN_EXT"})
"""Ops whose weight source (frequencies, sinks) is too small to choose a backend by."""


def cause_in_words(cause: str) -> str:
    """The sentence for a cause of ggml's."""
    return CAUSES["1.wgt" if cause.startswith("1.wgt") else cause]


class Assignment:
    """The backend of every tensor while a graph is split (`hv_tensor_backend_ids`), with the cause of each decision."""

    def __init__(self, backends: Sequence[Backend], buffer_types: Sequence[BufferType], op_offload: bool = True) -> None:
        self.backends, self.buffer_types, self.op_offload = backends, buffer_types, op_offload
        self.last = len(backends) - 1
        self.of: dict[Tensor, int] = {}
        self.causes: dict[Tensor, str] = {}
        self._supported: list[dict[Tensor, bool]] = [{} for _ in backends]
        self._reads: dict[tuple[int, int], bool] = {}
        self._types: dict[int, BufferType] = {}

    def decide(self, stage: str, tensor: Tensor, backend: int, cause: str) -> Decision:
        """Write a decision down and return it."""
        self.of[tensor] = backend
        self.causes[tensor] = cause
        return stage, tensor, backend, cause

    def supports(self, backend: int, node: Tensor) -> bool:
        """Whether the backend can compute the node; asked once per node and split."""
        known = self._supported[backend]
        answer = known.get(node)
        if answer is None:
            answer = known[node] = self.backends[backend].supports_op(node)
        return answer

    def reads_type(self, backend: int, kind: BufferType) -> bool:
        """Whether the backend works on memory of this type."""
        key = (backend, id(kind))
        answer = self._reads.get(key)
        if answer is None:
            answer = self._reads[key] = self.backends[backend].supports_buft(kind)
            self._types[id(kind)] = kind
        return answer

    def reads(self, backend: int, tensor: Tensor) -> bool:
        """Whether the backend can read the tensor where it lies or will lie (`ggml_backend_sched_buffer_supported`)."""
        storage = tensor.storage
        if storage is not None:
            return self.reads_type(backend, buffer_type_of(storage))
        home = self.of.get(tensor, -1)
        if home == -1 and tensor.view_src is not None:
            home = self.of.get(tensor.view_src, -1)
        return home != -1 and self.reads_type(backend, self.buffer_types[home])

    def sharing(self) -> list[list[int]]:
        """For each backend the others that work on some of the memory that it works on, of all types met so far."""
        everyone = range(len(self.backends))
        types = {id(k): k for k in (*self.buffer_types, *self._types.values())}.values()
        readers = [{b for b in everyone if self.reads_type(b, kind)} for kind in types]
        return [[o for o in everyone if o != b and any({b, o} <= r for r in readers)] for b in everyone]

    def require_assignable(self, tensor: Tensor, backend: int) -> None:
        """Raise where an assignment by hand could only give garbage; see `Scheduler.set_backend`."""
        b = self.backends[backend]
        if tensor.view_src is not None:
            raise ParameterError(f"{tensor.label} is a view and has no computation", "a node that computes something",
                                 f"assign {tensor.view_src.label}, whose memory it shows")  # fmt: skip
        if why := b.why_unsupported(tensor):
            raise UnsupportedOp(f"{b.name} cannot compute {tensor.label} = {tensor.desc}", "a backend that supports the op", why)
        storage = tensor.storage
        if storage is not None and not (storage.usage is Usage.COMPUTE or self.reads_type(backend, buffer_type_of(storage))):
            raise UnsupportedOp(f"{tensor.label} lies in {shown(storage.name)}, which {b.name} does not work on",
                                "a backend that works on this memory", "leave it where it is: whoever reads it gets a copy")  # fmt: skip

    def by_memory(self, owner: Tensor, node: Tensor) -> int:
        """The first backend that works on `owner`'s memory and supports `node`, or -1."""
        storage = owner.storage
        if storage is not None:
            kind = buffer_type_of(storage)
            for b in range(len(self.backends)):
                if self.reads_type(b, kind) and self.supports(b, node):
                    return b
        return -1


def is_weight(tensor: Tensor) -> bool:
    """A tensor that owns memory in a buffer of weights; a view of one does not count, as in ggml."""
    storage = tensor.storage
    return storage is not None and storage.usage is Usage.WEIGHTS and tensor.view_src is None


def computed(nodes: Iterable[Tensor]) -> list[Tensor]:
    """The nodes that are no views: passes 2, 3 and 5 look at no others (`ggml_is_view_op`). A parameter, which is a node
    without op, is among them, and may open a split."""
    return [n for n in nodes if n.spec is None or not n.spec.is_view]


# ---- pass 1: memory, inputs and weights decide


def assign_by_memory(a: Assignment, graph: CGraph) -> Iterator[Decision]:
    """Pass 1: tensors that have memory stay there, inputs go to the CPU, ops go to their first weight.

    Raises UnsupportedOp where a tensor's memory is fixed and no backend can compute it there.
    """
    for tensor in (*graph.leafs, *graph.nodes):
        if a.of.get(tensor, -1) == -1:
            found = home(a, tensor)
            if found is not None:
                yield a.decide("pass1", tensor, *found)


def home(a: Assignment, tensor: Tensor) -> tuple[int, str] | None:
    """Where the memory of a tensor or of its weights says it belongs (`ggml_backend_sched_backend_id_from_cur`)."""
    storage = tensor.storage
    if storage is not None:
        if (b := a.by_memory(tensor, tensor)) != -1:
            return b, "1.dst"
        raise UnsupportedOp(f"{tensor.label} lies in {storage.name}, where no backend can compute {tensor.desc}",
                            "a backend that works on this memory and supports the op",
                            "leave the result without memory, or place it where a backend supports the op")  # fmt: skip
    if int(tensor.flags) & int(Flag.INPUT):
        return a.last, "1.inp"
    if tensor.op not in IGNORES_WEIGHTS:
        for j, source in enumerate(tensor.src):
            if source is not None and is_weight(source):
                return by_weight(a, tensor, source, j)  # the first weight decides, even when it finds no backend
    return None


def by_weight(a: Assignment, node: Tensor, weight: Tensor, j: int) -> tuple[int, str]:
    """The backend of a weight, or one of higher priority that offers to compute ops with weights in host memory."""
    b = a.by_memory(weight, node)
    storage = weight.storage
    if a.op_offload and b == a.last and storage is not None and storage.is_host:
        for better in range(b):
            if a.supports(better, node) and a.backends[better].offload_op(node):
                return better, "1.off"
    return b, f"1.wgt{j}"


# ---- pass 2: neighbours


def expand(a: Assignment, stage: str, nodes: Iterable[Tensor], skip_last: bool) -> Iterator[Decision]:
    """One sweep of pass 2: a node without a backend takes the one of the node before it, if that supports it.

    `skip_last` keeps the CPU from spreading, so that it gets only what no other backend reaches.
    """
    current = -1
    for node in nodes:
        b = a.of.get(node, -1)
        if b != -1:
            current = -1 if skip_last and b == a.last else b
        elif current != -1 and a.supports(current, node):
            yield a.decide(stage, node, current, "2.sup")


# ---- pass 3: better backends, and the rest by their sources


def upgrade(a: Assignment, nodes: Iterable[Tensor]) -> Iterator[Decision]:
    """Pass 3: a node without a backend goes where most of its sources can be read; an assigned one moves to a backend
    of higher priority whose memory is of the very same type (asking every user of the result would be slow)."""
    for node in nodes:
        b = a.of.get(node, -1)
        if b == -1:
            yield from _by_sources(a, node)
            continue
        for better in range(b):
            if (a.buffer_types[better] is a.buffer_types[b] and a.supports(better, node)
                    and all(a.reads(better, s) for s in node.src if s is not None)):  # fmt: skip
                yield a.decide("pass3", node, better, "3.upg")
                break


def _by_sources(a: Assignment, node: Tensor) -> Iterator[Decision]:
    most = -1
    for b in range(len(a.backends)):
        if a.supports(b, node):
            n = readable_sources(a, b, node)
            if n > most:
                most = n
                yield a.decide("pass3", node, b, "3.best")


def readable_sources(a: Assignment, backend: int, node: Tensor) -> int:
    """How many sources of a node have a place already that the backend can read."""
    return sum(_placed(a, s) and a.reads(backend, s) for s in node.src if s is not None)


def _placed(a: Assignment, tensor: Tensor) -> bool:
    return a.of.get(tensor, -1) != -1 or (tensor.view_src is not None and a.of.get(tensor.view_src, -1) != -1)


# ---- pass 4: what is left


def assign_rest(a: Assignment, graph: CGraph, quirks: str = "") -> Iterator[Decision]:
    """Pass 4: views go where their owner is, sources where their reader is, other nodes to the first that supports them.

    Raises UnsupportedOp for a node that no backend supports. An unflagged leaf that is only read through a view gets no
    backend in ggml, whose allocator then aborts; here it follows the view, unless quirks="ggml".
    """
    of = a.of
    for node in graph.nodes:
        if node.view_src is not None and of.get(node, -1) == -1:
            yield a.decide("pass4", node, of.get(node.view_src, -1), "4.vsrc")
        for source in node.src:
            if source is not None and of.get(source, -1) == -1:
                if source.view_src is not None:
                    yield a.decide("pass4", source, of.get(source.view_src, -1), "4.vsrc")
                else:
                    yield a.decide("pass4", source, of.get(node, -1), "4.cur")
        if of.get(node, -1) == -1:
            yield _first_that_supports(a, node)
            owner = node.view_src
            if owner is not None and of.get(owner, -1) == -1 and quirks != "ggml":
                yield a.decide("pass4", owner, of[node], "4.cur")


def _first_that_supports(a: Assignment, node: Tensor) -> Decision:
    for b in range(len(a.backends)):
        if a.supports(b, node):
            return a.decide("pass4", node, b, "2.sup")
    reasons = "; ".join(f"{b.name}: {b.why_unsupported(node)}" for b in a.backends)
    raise UnsupportedOp(f"no backend supports {node.label} = {node.desc}", "one backend at least, usually the CPU", reasons)


# ---- repairs


def settle(a: Assignment, graph: CGraph) -> Iterator[Decision]:
    """Let nodes that write into another tensor's memory (CPY, SET_ROWS) run where that memory can be reached, and views be
    where their memory is.

    Raises UnsupportedOp where no backend can compute all nodes that write into one tensor.
    """
    for leaf in graph.leafs:
        if a.of.get(leaf, -1) == -1:
            yield a.decide("pass4", leaf, a.last, "4.rest")
    views = [n for n in graph.nodes if n.view_src is not None]
    writers: dict[Tensor, list[Tensor]] = {}
    for node in computed(views):
        writers.setdefault(node.root(), []).append(node)
    for owner, nodes in writers.items():
        if not all(a.reads(a.of[n], owner) for n in nodes):
            yield from _together(a, owner, nodes)
    for node in views:
        owner = node.root()
        if node not in writers.get(owner, ()) and not a.reads(a.of[node], owner):
            yield a.decide("pass4", node, a.of[owner], "4.vsrc")


def _together(a: Assignment, owner: Tensor, nodes: list[Tensor]) -> Iterator[Decision]:
    """One backend for a tensor and all nodes that write into it: its own if possible."""
    storage = owner.storage
    for b in (a.of[owner], *range(len(a.backends))):
        reached = a.supports(b, owner) if storage is None else a.reads_type(b, buffer_type_of(storage))
        if reached and all(a.supports(b, n) for n in nodes):
            break
    else:
        lies = f" lies in {shown(storage.name)} and" if storage is not None else ""
        by = ", ".join(n.label for n in nodes[:3])
        raise UnsupportedOp(f"{owner.label}{lies} is written by {by}: no backend can compute all of that",
                            "one backend for a tensor and the nodes that write into it",
                            "let a backend support these ops, or place the tensor elsewhere")  # fmt: skip
    if a.of[owner] != b and storage is None:
        yield a.decide("pass4", owner, b, "4.own")
    for node in nodes:
        if not a.reads(a.of[node], owner):
            yield a.decide("pass4", node, b, "4.own")


def passes(a: Assignment, graph: CGraph, quirks: str = "") -> list[tuple[str, Iterator[Decision]]]:
    """Passes 1 to 4 by the names of their stages, to be drained in this order. Assignments by hand stand already."""
    nodes = computed(graph.nodes)
    upwards = nodes[::-1]
    last = assign_rest(a, graph, quirks)
    return [
        ("pass1", assign_by_memory(a, graph)),
        ("pass2_gpu_down", expand(a, "pass2_gpu_down", nodes, skip_last=True)),
        ("pass2_gpu_up", expand(a, "pass2_gpu_up", upwards, skip_last=True)),
        ("pass2_rest_down", expand(a, "pass2_rest_down", nodes, skip_last=False)),
        ("pass2_rest_up", expand(a, "pass2_rest_up", upwards, skip_last=False)),
        ("pass3", upgrade(a, nodes)),
        ("pass4", last if quirks == "ggml" else itertools.chain(last, settle(a, graph))),
    ]
