"""The graph allocator against recorded plans of real ggml, and against the meaning of a plan: live tensors never overlap."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgraph.random_graphs import random_graph
from tests.parity import sched_case
from workbench.cgraph import CGraph, build
from workbench.devices.backend import HOST_MEMORY, BufferType
from workbench.errors import AllocationError, GraphError, NoDataError, ParameterError, StorageError
from workbench.execution import GraphAllocator
from workbench.execution.allocator import BlockAllocator
from workbench.tensors import F32, Context, Flag, Tensor, ops


def split_graph(case):
    """The graph that real ggml handed to its allocator: `graph_copy` of the recording, with copies and dependency marks."""
    types = sched_case.buffer_types(case)
    made = sched_case.tensors(case["tensors"], types)
    by_name = {t.name: t for t in made}
    recorded = case["expect"]["graph_copy"]

    def tensor(name, sources_of_copies):
        if name not in by_name:
            if name.endswith(" (view)"):  # keeps the original alive until it was copied
                x = by_name[name.removesuffix(" (view)")]
                by_name[name] = Tensor(x.dtype, x.ne, x.nb, view_src=x.root(), view_offs=x.view_offs, src=(x,), name=name)
            else:
                x = sources_of_copies[name]
                by_name[name] = Tensor(x.dtype, x.ne, x.nb, name=name)
                if case["n_copies"] > 1:  # the copies of a pipeline keep their place
                    by_name[name].mark(Flag.INPUT).mark(Flag.OUTPUT)
        return by_name[name]

    copied = {copy: by_name[old] for _, _, old, copy in case["expect"]["src_rewrites"]}
    listed = [n for n, _ in (*recorded["nodes"], *recorded["leafs"]) if "#" in n]
    for name in listed:  # a copy that no rewrite names: BACKEND#tensor#index
        copied.setdefault(name, by_name.get(name.split("#")[1]))
    for node, j, _, copy in case["expect"]["src_rewrites"]:
        t = by_name[node]
        t.src = tuple(tensor(copy, copied) if i == j else s for i, s in enumerate(t.src))
    graph = CGraph(size=10**6)
    graph.nodes = [tensor(n, copied) for n, _ in recorded["nodes"]]
    graph.leafs = [tensor(n, copied) for n, _ in recorded["leafs"]]
    for t in graph.leafs:
        if graph.leafs.count(t) > 1:  # a pipelined input, which serves as one of its copies itself
            t.mark(Flag.OUTPUT)
    names = case["sched_bufts"] or [b["buft"] for b in case["backends"]]
    ids = [[i for _, i in recorded[part]] for part in ("nodes", "leafs")]
    return graph, [types[n] for n in names], *ids


def test_plans_of_real_ggml(data):
    judged = 0
    for case in sched_case.load([data / "goldens/sched"]):
        alloc = case["expect"].get("alloc")
        if not alloc:  # real ggml refuses the case
            continue
        graph, types, node_ids, leaf_ids = split_graph(case)
        allocator = GraphAllocator(types, quirks="ggml")
        allocator.reserve(graph, node_ids, leaf_ids)
        assert allocator.alloc(graph)
        places = {t.name: list(p) for t in (*graph.leafs, *graph.nodes) if (p := allocator.where(t))}
        assert places == alloc["tensors"], case["name"]
        assert [allocator.buffer_size(i) for i in range(len(types))] == alloc["buffer_sizes"], case["name"]
        assert [allocator.chunk_sizes(i) for i in range(len(types))] == alloc["chunks"], case["name"]
        judged += 1
    assert judged == 104


def live_ranges(graph):
    """root tensor -> [index that writes it, last index that reads it]; inputs and leafs are there from the start."""
    ranges = {t: [-1, -1] for t in graph.leafs}
    for i, t in enumerate(graph.nodes):
        if t.view_src is None:
            ranges[t] = [-1 if t.flags & Flag.INPUT else i, i]
        for s in t.src:
            if s is not None and s is not t:
                ranges[s.root()][1] = i
    for t, span in ranges.items():
        if t.flags & Flag.OUTPUT:
            span[1] = len(graph.nodes)
    return ranges


@given(st.integers(0, 10**6), st.sampled_from([1, 32, 256]))
def test_live_tensors_never_overlap(seed, alignment):
    graph = random_graph(seed)
    allocator = GraphAllocator(BufferType("memory", alignment))
    assert allocator.alloc(graph)
    placed = [(t, span, allocator.where(t)) for t, span in live_ranges(graph).items() if t.nbytes]
    assert all(p is not None and p.offset % alignment == 0 and p.offset + p.size <= allocator.buffer_size() for _, _, p in placed)
    for i, (a, (a0, a1), p) in enumerate(placed):
        for b, (b0, b1), q in placed[:i]:
            if p.offset < q.offset + b.nbytes and q.offset < p.offset + a.nbytes and a0 <= b1 and b0 <= a1:
                old, new = (a, b) if a1 == b0 else (b, a)  # only a node that takes over its last-used source
                assert (a1 == b0 or b1 == a0) and old in new.src and new.spec.in_place and p.offset == q.offset
                assert (old.ne, old.nb, old.dtype) == (new.ne, new.nb, new.dtype)


@given(st.integers(0, 10**6))
def test_blocks_come_back_whole(seed):
    r, blocks, taken = random.Random(seed), BlockAllocator(16, 1000), []
    for _ in range(60):
        if taken and r.random() < 0.45:
            blocks.free(*taken.pop(r.randrange(len(taken))))
        else:
            size = r.choice([1, 16, 100, 500, 1500])
            taken.append((*blocks.alloc(size), size))
        spans = sorted((c, o, o + blocks.padded(n)) for c, o, n in taken)
        assert all(c != d or end <= start for (c, _, end), (d, start, _) in zip(spans, spans[1:]))
        free = [(c, o, o + n) for c, chunk in enumerate(blocks.chunks) for o, n in zip(chunk.starts, chunk.sizes)]
        for c in range(len(blocks.chunks)):  # taken and free bytes together are the chunk, without gaps
            edges = sorted(span[1:] for span in spans + free if span[0] == c)
            assert edges[0][0] == 0 and all(a[1] == b[0] for a, b in zip(edges, edges[1:]))
    for c, offset, size in taken:
        blocks.free(c, offset, size)
    assert all(chunk.starts == [0] for chunk in blocks.chunks)


def test_chunks_end():
    blocks = BlockAllocator(32, 64)
    assert [blocks.alloc(64) for _ in range(15)] == [(c, 0) for c in range(15)]
    assert blocks.alloc(10**12) == (15, 0) and blocks.alloc(1) == (15, 10**12)  # the last chunk has no limit


def chain(n=3, rows=4, start=None):
    ctx = Context(400 * n + 800, no_alloc=True)
    with ctx.active():
        t = start or ctx.new_tensor("f32", 8, rows, name="x").mark(Flag.INPUT)
        for _ in range(n):
            t = ops.sqr(t)
    return build(t.mark(Flag.OUTPUT))


def test_decisions_say_what_reserve_does():
    ctx = Context(no_alloc=True)
    with ctx.active():
        x = ctx.new_tensor("f32", 8, name="x").mark(Flag.INPUT)
        a = ops.sqr(x).named("a")
        b = ops.add(a, x).named("b")
        c = ops.mul(ops.sum_rows(b).named("s"), b.reshape(8)[0:1]).named("c").mark(Flag.OUTPUT)
    graph = build(c)
    allocator = GraphAllocator(HOST_MEMORY)
    steps = [(d[0], d[1].name, *(x.name if isinstance(x, Tensor) else x for x in d[2:])) for d in allocator.decisions(graph)]
    assert allocator.buffer_size() == 0  # looking takes no memory
    assert steps == [
        ("place", "x", 0, 0, 0, 32),
        ("refuse", "a", "x", "one more use follows"),
        ("place", "a", 0, 0, 32, 32),
        ("reuse", "b", "a"),
        ("free", "x", 0, 0, 0, 32),
        ("place", "s", 0, 0, 0, 4),
        ("reuse", "c", "s"),
        ("free", "b", 0, 0, 32, 32),
    ]
    assert allocator.measure(graph) == [64]
    assert allocator.alloc(graph)
    places = {d[1]: (d[2], d[3], d[4], d[5]) for d in allocator.decisions(random_graph(1)) if d[0] == "place"}
    assert len(places) > 5  # a plan of another graph does not disturb this one
    assert allocator.where(b) == allocator.where(a) == (0, 0, 32, 32)
    assert allocator.where(c).offset == 0 and allocator.where(b.reshape(8)) is None


def test_a_result_that_needs_more_room_than_its_source_gets_a_place_of_its_own():
    class Padding(BufferType):  # as on a device that pads the results of some ops
        def alloc_size(self, tensor):
            return tensor.nbytes + (512 if tensor.op == "SQR" else 0)

    with Context(no_alloc=True).active() as ctx:
        x = ctx.new_tensor("f32", 64).mark(Flag.INPUT)
        first = ops.neg(ops.add(x, x))
        graph = build(ops.neg(ops.sqr(first)))
    decisions = list(GraphAllocator(Padding("padding")).decisions(graph))
    assert ("refuse", graph.nodes[2], first, "it has too little room") in decisions
    assert all(d[-1] > 0 for d in decisions if d[0] in ("shrink", "free"))


def test_one_buffer_is_planned_anew_only_when_it_must():
    allocator = GraphAllocator(HOST_MEMORY)
    assert allocator.alloc(chain(rows=4)) and allocator.n_reserved == 1
    assert allocator.alloc(chain(rows=2)) and allocator.n_reserved == 1  # smaller: the places do
    assert allocator.alloc(chain(rows=5)) and allocator.n_reserved == 2
    assert allocator.alloc(chain(4, rows=5)) and allocator.n_reserved == 3  # another number of nodes
    graph = chain(4, rows=5)
    assert allocator.alloc(graph) and allocator.alloc(graph) and allocator.n_reserved == 3


def test_several_buffers_need_their_ids():
    other = BufferType("other", 64)
    allocator = GraphAllocator([HOST_MEMORY, other, HOST_MEMORY])
    graph = chain(2)
    assert not allocator.alloc(graph)
    allocator.reserve(graph, [1, 2], [0])
    assert allocator.alloc(graph)
    assert allocator.buffer_size(0) == 128 and allocator.buffer_size(1) == 0 and allocator.buffer_size(2) == 0  # in place throughout
    assert not allocator.alloc(chain(3))
    allocator.reserve(chain(3, rows=9), [1, 1, 1], [0])
    assert allocator.buffer_size(0) == allocator.chunk_sizes(2)[0] == 9 * 32
    with pytest.raises(ParameterError):
        allocator.reserve(graph, [0, 3], [0])
    with pytest.raises(GraphError, match="'x' has no backend"):
        allocator.reserve(graph, [0, 0], [-1])


def fork(swap):
    """Two graphs of equal counts and sizes; in one of them the first result is still needed at the end."""
    ctx = Context(no_alloc=True)
    with ctx.active():
        x = ctx.new_tensor("f32", 64, name="x").mark(Flag.INPUT)
        a = ops.scale(x, 2.0)
        b = ops.scale(a, 3.0)
        c = ops.add(b, a if swap else b)
    return build(c.mark(Flag.OUTPUT))


def test_the_plan_of_another_topology():
    """Real ggml keeps the offsets (golden stale_reuse_other_topology) and computes garbage; we look first."""
    for quirks, plans in (("ggml", 1), ("", 2)):
        allocator = GraphAllocator(HOST_MEMORY, quirks=quirks)
        assert allocator.alloc(fork(False))
        second = fork(True)
        assert allocator.alloc(second) and allocator.n_reserved == plans
        a, b = second.nodes[:2]
        assert (a.offset == b.offset) == (quirks == "ggml")  # b overwrites a, which the last node still reads


def test_a_plan_whose_in_place_step_no_longer_fits():
    def graph(columns):
        ctx = Context(no_alloc=True)
        with ctx.active():
            x = ctx.new_tensor("f32", 8, 4).mark(Flag.INPUT).mark(Flag.OUTPUT)
            y = ctx.new_tensor("f32", columns, 4).mark(Flag.INPUT).mark(Flag.OUTPUT)
            return build(ops.add(x, ops.sqr(y)).mark(Flag.OUTPUT))

    allocator = GraphAllocator(HOST_MEMORY)
    allocator.alloc(graph(8))
    repeated = graph(1)  # sqr(y) is now repeated over x: the sum must not be written over it
    allocator.alloc(repeated)
    assert repeated.nodes[0].offset != repeated.nodes[1].offset


def test_a_buffer_that_grows_ends_the_old_one():
    allocator = GraphAllocator(HOST_MEMORY)
    small, large = chain(2, rows=1), chain(3, rows=100)
    allocator.alloc(small)
    small.nodes[-1].set([[0.0] * 8])
    allocator.alloc(large)
    with pytest.raises(StorageError, match="freed"):
        small.nodes[-1].numpy()
    assert allocator.alloc(small)
    small.nodes[-1].set([[1.0] * 8])
    allocator.close()
    with pytest.raises(StorageError):
        small.nodes[-1].numpy()
    assert allocator.buffer_size() == 0


def test_no_memory():
    allocator = GraphAllocator(BufferType("tiny", 32, make=lambda kind, size, usage: pytest.fail("not reached") if size < 100 else refuse(size)))
    graph = chain()
    for _ in range(2):
        with pytest.raises(AllocationError, match="needs 128 bytes of tiny"):
            allocator.alloc(graph)
    with pytest.raises(NoDataError):
        graph.nodes[0].numpy()


def refuse(size):
    raise AllocationError(f"{size} bytes", "fewer")


def test_memory_of_others_is_left_alone():
    owner = Context()
    w = owner.new_tensor("f32", 8, 4, name="w").set([[1.0] * 8] * 4)
    before = w.storage, w.offset
    graph = chain(2, start=w)
    allocator = GraphAllocator(HOST_MEMORY)
    assert allocator.alloc(graph)
    assert (w.storage, w.offset) == before and allocator.where(w) is None and w.dtype is F32
    assert allocator.buffer_size() == 128


def test_long_graphs():
    graph = chain(50_000)
    allocator = GraphAllocator(HOST_MEMORY)
    assert allocator.alloc(graph) and allocator.buffer_size() == 128
