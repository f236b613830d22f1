"""The graph allocator: all memory of a graph planned before it runs (`ggml_gallocr`).

It walks the nodes in order and gives each a place when it is computed, takes the place back after the last use, and
lets a node take over a parent's place where the op allows it. What results is one buffer per buffer type, as small as
the overlap of lifetimes allows; a run then takes no memory at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from workbench.cgraph import CGraph
from workbench.devices.backend import Buffer, BufferType
from workbench.errors import AllocationError, GraphError, ParameterError, shown
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Flag, Tensor

MAX_CHUNKS = 16  # GGML_VBUFFER_MAX_CHUNKS
UNLIMITED = 2**63 - 1  # SIZE_MAX / 2
_INPUT, _OUTPUT = int(Flag.INPUT), int(Flag.OUTPUT)


class Placement(NamedTuple):
    """Where a tensor lies: buffer id, chunk of that buffer, byte offset, bytes reserved (without padding)."""

    buffer: int
    chunk: int
    offset: int
    size: int


class _Chunk:
    """One buffer to be: its free blocks in the order of addresses, and how far it has been used."""

    __slots__ = ("starts", "sizes", "max_size")

    def __init__(self, size: int) -> None:
        self.starts, self.sizes, self.max_size = [0], [size], 0


class BlockAllocator:
    """Best fit over free blocks, in chunks of at most `max_size` bytes (`ggml_dyn_tallocr`). Only numbers, no memory."""

    def __init__(self, alignment: int, max_size: int | None = None) -> None:
        self.alignment = alignment
        self.max_size = UNLIMITED if max_size is None else min(max_size, UNLIMITED)
        self.chunks: list[_Chunk] = []

    def padded(self, size: int) -> int:
        """`size` rounded up to the alignment."""
        return -(-size // self.alignment) * self.alignment

    def alloc(self, size: int) -> tuple[int, int]:
        """Take `size` bytes: (chunk, offset). Raises AllocationError where no chunk can be opened any more."""
        size = self.padded(size)
        c, i = self._best_hole(size) or self._best_tail(size) or self._new_chunk(size)
        chunk = self.chunks[c]
        offset = chunk.starts[i]
        chunk.starts[i] += size
        chunk.sizes[i] -= size
        if not chunk.sizes[i]:
            del chunk.starts[i], chunk.sizes[i]
        chunk.max_size = max(chunk.max_size, offset + size)
        return c, offset

    def free(self, c: int, offset: int, size: int) -> None:
        """Give bytes back and merge them with free neighbours."""
        size = self.padded(size)
        if not size:
            return
        starts, sizes = self.chunks[c].starts, self.chunks[c].sizes
        i = bisect_left(starts, offset)  # the block behind
        if i and starts[i - 1] + sizes[i - 1] == offset:
            sizes[i - 1] += size
            if i < len(starts) and offset + size == starts[i]:
                sizes[i - 1] += sizes[i]
                del starts[i], sizes[i]
        elif i < len(starts) and offset + size == starts[i]:
            starts[i] = offset
            sizes[i] += size
        else:
            starts.insert(i, offset)
            sizes.insert(i, size)

    def _best_hole(self, size: int) -> tuple[int, int] | None:
        """The smallest hole that is large enough: of equal ones the last, and a later chunk goes before an earlier one."""
        found = None
        for c, chunk in enumerate(self.chunks):
            best = UNLIMITED
            for i, free in enumerate(chunk.sizes[:-1]):
                if size <= free <= best:
                    found, best = (c, i), free
        return found

    def _best_tail(self, size: int) -> tuple[int, int] | None:
        """The block at the end of a chunk that wastes least, or failing that makes its chunk grow least."""
        found, best = None, -UNLIMITED
        for c, chunk in enumerate(self.chunks):
            if chunk.sizes and chunk.sizes[-1] >= size:
                spare = chunk.max_size - chunk.starts[-1] - size  # below zero: bytes that the chunk must grow
                if best < spare < 0 or best < 0 <= spare or 0 <= spare < best:
                    found, best = (c, len(chunk.sizes) - 1), spare
        return found

    def _new_chunk(self, size: int) -> tuple[int, int]:
        """A tensor above `max_size` gets a chunk of its own size; the last chunk has no limit."""
        if len(self.chunks) >= MAX_CHUNKS:
            raise AllocationError(f"{size:,} bytes in a buffer of {MAX_CHUNKS} chunks that are all full", "room in one of them")
        last = len(self.chunks) == MAX_CHUNKS - 1
        self.chunks.append(_Chunk(UNLIMITED if last else max(size, self.max_size)))
        return len(self.chunks) - 1, 0


class _State:
    """What the plan knows of one tensor (`hash_node`)."""

    __slots__ = ("n_children", "n_views", "allocated", "place")

    def __init__(self) -> None:
        self.n_children = self.n_views = 0
        self.allocated, self.place = False, Placement(0, 0, 0, 0)


class _Planning:
    """One pass over a graph that decides where each tensor goes; `decisions` makes it happen step by step."""

    def __init__(self, types: Sequence[BufferType], graph: CGraph, node_ids: Sequence[int] | None, leaf_ids: Sequence[int] | None) -> None:
        self.types, self.graph = types, graph
        self.node_ids = node_ids if node_ids is not None else [0] * len(graph.nodes)
        self.leaf_ids = leaf_ids if leaf_ids is not None else [0] * len(graph.leafs)
        for what, ids, n in (("node", self.node_ids, len(graph.nodes)), ("leaf", self.leaf_ids, len(graph.leafs))):
            if len(ids) != n or max(ids, default=-1) >= len(types):
                raise ParameterError(f"{len(ids)} {what} buffer ids up to {max(ids, default=0)}", f"{n} ids below {len(types)}")
        by_type = {id(t): BlockAllocator(t.alignment, t.max_size) for t in types}
        self.blocks = [by_type[id(t)] for t in types]  # buffer ids of one type share their memory
        self.states: defaultdict[Tensor, _State] = defaultdict(_State)

    def decisions(self) -> Iterator[tuple[Any, ...]]:
        """See `GraphAllocator.decisions`."""
        graph, states, missing = self.graph, self.states, self._missing
        for leaf, buffer in zip(graph.leafs, self.leaf_ids, strict=True):
            if missing(leaf, buffer):
                yield from self._allocate(leaf, buffer)
        for node, buffer in zip(graph.nodes, self.node_ids, strict=True):
            if node.view_src is not None and node.op != "NONE":  # NONE: a scheduler's mark that keeps a source alive
                states[node.view_src].n_views += 1
            if int(node.flags) & _INPUT and missing(node, buffer):
                yield from self._allocate(node, buffer)
            for s in node.src:
                if s is not None:
                    states[s].n_children += 1
                    if int(s.flags) & _INPUT and missing(s, buffer):
                        yield from self._allocate(s, buffer)
        for node, buffer in zip(graph.nodes, self.node_ids, strict=True):
            for t in (*node.src, node):
                if t is not None and missing(t, buffer):
                    yield from self._allocate(t, buffer)
            for s in node.src:
                if s is not None:
                    states[s].n_children -= 1
                    if not states[s].n_children and not states[s].n_views:
                        yield from self._last_use(s)

    def _missing(self, t: Tensor, buffer: int) -> bool:
        if buffer < 0:
            raise GraphError(f"tensor {t.label} has no backend, so the allocator does not know where to put it",
                             "a buffer id of zero or more for every leaf and node",
                             "mark a leaf that is only used through views as input: t.mark(Flag.INPUT)")  # fmt: skip
        return t.view_src is None and not _has_memory(t) and not self.states[t].allocated

    def _allocate(self, t: Tensor, buffer: int) -> Iterator[tuple[Any, ...]]:
        state = self.states[t]
        state.allocated = True
        if t.spec is not None and t.spec.in_place:
            for parent in t.src:
                if parent is None:
                    continue
                if why := self._why_not_reuse(t, parent):
                    yield "refuse", t, parent, why
                    continue
                yield "reuse", t, parent
                yield from self._take_over(state, t, parent)
                return
        size = self.types[buffer].alloc_size(t)
        state.place = Placement(buffer, *self.blocks[buffer].alloc(size), size)
        yield "place", t, *state.place

    def _why_not_reuse(self, t: Tensor, parent: Tensor) -> str:
        p = self.states[parent]
        if not p.allocated:
            return "a view owns no memory" if parent.view_src is not None else "its memory is not this allocator's"
        if int(parent.flags) & _OUTPUT:
            return "it is an output"
        if not _same_layout(t, parent):
            return "the layouts differ"
        if p.n_children != 1:
            return f"{p.n_children - 1} more uses follow" if p.n_children > 2 else "one more use follows"
        if p.n_views:
            return "a view of it is still in use"
        kind = self.types[p.place.buffer]  # a device may need more room for one op's result than for another's
        return "it has too little room" if kind.alloc_size(t) > p.place.size else ""

    def _take_over(self, state: _State, t: Tensor, parent: Tensor) -> Iterator[tuple[Any, ...]]:
        """`t` gets the place of `parent`; what it does not need is freed (`ggml_gallocr_free_extra_space`)."""
        p = self.states[parent]
        p.allocated = False  # it must not be freed after its last use, which is now
        buffer, chunk, offset, had = p.place
        size = self.types[buffer].alloc_size(t)
        state.place = Placement(buffer, chunk, offset, size)
        blocks = self.blocks[buffer]
        kept, extra = blocks.padded(size), blocks.padded(had) - blocks.padded(size)
        if extra:
            blocks.free(chunk, offset + kept, extra)
            yield "shrink", parent, buffer, chunk, offset + kept, extra

    def _last_use(self, t: Tensor) -> Iterator[tuple[Any, ...]]:
        """Free a tensor, or the owner behind a view, when nothing uses it any more."""
        state = self.states[t]
        if t.view_src is not None:
            t = t.view_src
            state = self.states[t]
            state.n_views -= 1
            if state.n_views or state.n_children:
                return
        if not state.allocated:
            return
        if int(t.flags) & _OUTPUT:
            yield "keep", t, "outputs stay readable after the run"
            return
        buffer, chunk, offset, size = state.place
        self.blocks[buffer].free(chunk, offset, size)
        state.allocated = False
        yield "free", t, *state.place


class GraphAllocator:
    """Plans the memory of graphs and hands it out (`ggml_gallocr`).

    buffer_types: the memory to use; a list for several backends, whose position is the buffer id, and of which those
    that are the same object share one buffer. quirks="ggml" keeps the plan of another graph whenever counts match and sizes
    fit, as ggml does; without it the topology is compared too, since old offsets can be wrong for it.
    """

    def __init__(self, buffer_types: BufferType | Sequence[BufferType], quirks: str = "") -> None:
        if quirks not in ("", "ggml"):
            raise ParameterError(f"quirks={quirks!r}", "'' or 'ggml'")
        self.buffer_types = [*buffer_types] if isinstance(buffer_types, Sequence) else [buffer_types]
        if not self.buffer_types:
            raise ParameterError("no buffer types", "at least one")
        self.quirks = quirks
        self._first = [next(j for j, u in enumerate(self.buffer_types) if u is t) for t in self.buffer_types]
        self._buffers: list[list[Buffer] | None] = [None] * len(self.buffer_types)
        self.n_reserved = 0  # plans made so far: a steady run makes none
        self._forget()

    def _forget(self) -> None:
        self._nodes: list[tuple[Placement | None, tuple[Placement | None, ...]]] | None = None
        self._leafs: list[Placement | None] = []
        self._topology: list[tuple[Any, ...]] = []

    # ---- planning

    def decisions(self, graph: CGraph, node_buffer_ids: Sequence[int] | None = None,
                  leaf_buffer_ids: Sequence[int] | None = None) -> Iterator[tuple[Any, ...]]:  # fmt: skip
        """The plan of `reserve`, one decision at a time, without keeping it.

        ("place", tensor, buffer, chunk, offset, size), ("free", the same), ("reuse", tensor, parent): in place;
        ("refuse", tensor, parent, cause): why not; ("shrink", parent, buffer, chunk, offset, size): the part that a
        smaller child gave back; ("keep", tensor, cause): not freed after its last use.
        """
        return _Planning(self.buffer_types, graph, node_buffer_ids, leaf_buffer_ids).decisions()

    def _planned(self, *args: Any) -> _Planning:
        planning = _Planning(self.buffer_types, *args)
        for _ in planning.decisions():
            pass
        return planning

    def measure(self, graph: CGraph, node_buffer_ids: Sequence[int] | None = None,
                leaf_buffer_ids: Sequence[int] | None = None) -> list[int]:  # fmt: skip
        """Bytes per buffer id that `reserve` would take; takes none (`ggml_gallocr_reserve_n_size`)."""
        plan = self._planned(graph, node_buffer_ids, leaf_buffer_ids)
        return [sum(c.max_size for c in blocks.chunks) for blocks in plan.blocks]

    def reserve(self, graph: CGraph, node_buffer_ids: Sequence[int] | None = None,
                leaf_buffer_ids: Sequence[int] | None = None) -> None:  # fmt: skip
        """Plan `graph` and make the buffers large enough for it (`ggml_gallocr_reserve_n`).

        The ids say into which buffer each node and leaf goes; all into 0 where they are left out. Buffers only grow; one
        that grows is made anew, and tensors that lay in the old one must be allocated again. Raises AllocationError.
        """
        graph.require_open()
        self._forget()
        plan = self._planned(graph, node_buffer_ids, leaf_buffer_ids)

        def recorded(t: Tensor | None) -> Placement | None:
            return None if t is None or t.view_src is not None or _has_memory(t) else plan.states[t].place

        leafs = [recorded(t) for t in graph.leafs]
        nodes = [(recorded(t), tuple(recorded(s) for s in t.src)) for t in graph.nodes]
        for i, blocks in enumerate(plan.blocks):
            if self._first[i] == i:
                self._grow(i, [c.max_size for c in blocks.chunks])
            self._buffers[i] = self._buffers[self._first[i]]
        self._nodes, self._leafs, self.n_reserved = nodes, leafs, self.n_reserved + 1
        self._topology = [] if self.quirks else _topology(graph)

    def _grow(self, i: int, sizes: list[int]) -> None:
        have = self._buffers[i]
        if have is not None and len(have) >= len(sizes) and all(b.size >= n for b, n in zip(have, sizes, strict=False)):
            return
        self._close(i)  # before the new ones are taken: both together might not fit
        kind, made = self.buffer_types[i], list[Buffer]()
        try:
            for n in sizes:
                made.append(kind.alloc_buffer(n, Usage.COMPUTE))
        except AllocationError as e:
            for b in made:
                b.close()
            found = f"the graph needs {sum(sizes):,} bytes of {shown(kind.name)} for its intermediate results: {e.found}"
            raise AllocationError(found, e.expected or "as much free memory", e.hint or "a smaller batch") from e
        self._buffers[i] = made

    # ---- handing out

    def alloc(self, graph: CGraph) -> bool:
        """Give every tensor of `graph` its memory by the last plan (`ggml_gallocr_alloc_graph`).

        Where the plan does not fit, one is made anew for a single buffer; with several buffers the answer is False, since
        only the caller knows the ids: call `reserve` with them. Tensors that already have memory keep it.
        """
        graph.require_open()
        if self._nodes is None or self._needs_reserve(graph):
            if len(self.buffer_types) > 1:
                return False
            self.reserve(graph)
        assert self._nodes is not None
        for leaf, place in zip(graph.leafs, self._leafs, strict=True):
            self._put(leaf, place)
        for node, (own, sources) in zip(graph.nodes, self._nodes, strict=True):
            for s, place in zip(node.src, sources, strict=False):
                if s is not None:
                    self._put(s, place)
            self._put(node, own)
        return True

    def _put(self, t: Tensor, place: Placement | None) -> None:
        if place is not None and t.view_src is None and not _has_memory(t):
            t.place(self._buffers[place.buffer][place.chunk], place.offset)  # type: ignore[index]

    def _needs_reserve(self, graph: CGraph) -> bool:
        """ggml's rule (`ggml_gallocr_needs_realloc`): other counts, or a tensor larger than its place."""
        assert self._nodes is not None
        if len(self._nodes) != len(graph.nodes) or len(self._leafs) != len(graph.leafs):
            return True
        for node, (own, sources) in zip(graph.nodes, self._nodes, strict=True):
            if not self._fits(node, own):
                return True
            for j, s in enumerate(node.src):
                if s is not None and not self._fits(s, sources[j] if j < len(sources) else None):
                    return True
        return not self.quirks and self._topology != _topology(graph)

    def _fits(self, t: Tensor, place: Placement | None) -> bool:
        if t.view_src is not None or _has_memory(t):
            return True
        return place is not None and self.buffer_types[place.buffer].alloc_size(t) <= place.size

    # ---- asking

    def chunk_sizes(self, i: int = 0) -> list[int]:
        """Bytes of each chunk of buffer `i`."""
        return [b.size for b in self._buffers[i] or ()]

    def buffer_size(self, i: int = 0) -> int:
        """Bytes of buffer `i`; 0 where an earlier id has the same one (`ggml_gallocr_get_buffer_size`)."""
        return sum(self.chunk_sizes(i)) if self._first[i] == i else 0

    def owns(self, tensor: Tensor) -> bool:
        """Whether `tensor` was placed here, or in compute memory that is gone: another plan may put it elsewhere."""
        s = tensor._storage
        return s is not None and s.usage is Usage.COMPUTE and (s.closed or any(s is b for have in self._buffers for b in have or ()))

    def where(self, tensor: Tensor) -> Placement | None:
        """Where `tensor` lies in this allocator's buffers, or None: it is a view, or its memory is someone else's."""
        for i, buffers in enumerate(self._buffers):
            for c, b in enumerate(buffers or ()):
                if tensor.view_src is None and tensor.storage is b:
                    return Placement(i, c, tensor.offset, self.buffer_types[i].alloc_size(tensor))
        return None

    def close(self) -> None:
        """Give all buffers back (`ggml_gallocr_free`)."""
        for i in range(len(self._buffers)):
            self._close(i)
        self._forget()

    def _close(self, i: int) -> None:
        for b in self._buffers[i] or ():
            b.close()
        self._buffers = [None if self._first[j] == self._first[i] else have for j, have in enumerate(self._buffers)]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{shown(t.name)} {self.buffer_size(i):,} bytes" for i, t in enumerate(self.buffer_types) if self._first[i] == i)
        return f"<GraphAllocator {sizes}>"


def _has_memory(t: Tensor) -> bool:
    """True where the tensor was given memory; a place in a compute buffer that has since been replaced counts as none."""
    s = t._storage
    return s is not None and not (s.closed and s.usage is Usage.COMPUTE)


def _same_layout(a: Tensor, b: Tensor) -> bool:
    """Equal type, extents and strides (`ggml_are_same_layout`)."""
    return a.dtype is b.dtype and a.ne == b.ne and a.nb == b.nb


def _topology(graph: CGraph) -> list[tuple[Any, ...]]:
    """All that a plan depends on besides sizes: who uses whom, views, inputs and outputs, and where in-place is possible."""
    index = {t: i for i, t in enumerate((*graph.leafs, *graph.nodes))}
    found: list[tuple[Any, ...]] = [tuple(int(t.flags) & (_INPUT | _OUTPUT) for t in graph.leafs)]
    for t in graph.nodes:
        root = -1 if t.view_src is None else index.get(t.view_src, -2)
        in_place = t.spec is not None and t.spec.in_place
        sources = [(index.get(s, -2), in_place and _same_layout(t, s)) for s in t.src if s is not None]
        found.append((int(t.flags) & (_INPUT | _OUTPUT), in_place, root, *sources))
    return found
