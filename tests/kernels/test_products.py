"""Products against their slow definitions, and the promises made about bits, memory, grouping and weights."""

import gc
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import workbench as wb
from tests.parity import ops as judge
from workbench.devices import CpuBackend
from workbench.errors import DTypeError, ParameterError, ShapeError
from workbench.execution import GraphRunner, compute
from workbench.kernels import products
from workbench.kernels.kernel import Scratch
from workbench.kernels.weights import CELL, DequantCache, cells, weights_of
from workbench.tensors import HostStorage, Tensor, Usage, dtype, ops

KINDS = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_K"]


def rng(seed=0):
    return np.random.default_rng(seed)


def filled(ctx, kind, *ne, seed=0):
    """A tensor of random values in memory of its own, as weights lie in a file."""
    if kind == "q4_K":  # nothing here encodes it: random bytes with small f16 scales
        t = Tensor(dtype(kind), (*ne, 1, 1, 1)[:4], context=ctx)
        raw = rng(seed).integers(0, 256, (t.nbytes // 144, 144), dtype=np.uint8)
        raw[:, :4].view(np.float16)[:] = 0.01
        t.place(HostStorage(bytearray(raw.tobytes()), "weights", Usage.WEIGHTS))
        return t
    t = Tensor(dtype(kind), (*ne, 1, 1, 1)[:4], context=ctx)
    t.place(HostStorage(t.nbytes, "weights", Usage.WEIGHTS))
    return t.set(rng(seed).standard_normal(ne[::-1], dtype=np.float32))


def values(t):
    return np.array(t.numpy(), np.float64).reshape(t.ne[::-1])


def run(node, **backend):
    compute(wb.build(node), CpuBackend(**backend))
    return node.array().copy()


def check(node, result, share=1e-6):
    """Within `share` of sum |a||b| of the definition."""
    exact = [values(s) if s.dtype.name not in ("i32",) else s.array() for s in node.src]
    want = node.spec.reference(node, *exact)
    size = node.spec.reference(node, *[np.abs(a) for a in exact])
    assert (np.abs(result - want) <= share * size + 1e-30).all()


# ---- numbers


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 70), t=st.integers(1, 40), w2=st.integers(1, 3), r2=st.integers(1, 3), r3=st.integers(1, 2), seed=st.integers(0, 9))
def test_mul_mat_equals_its_definition(kind, n, t, w2, r2, r3, seed):
    with wb.Context() as ctx:
        k = dtype(kind).block if dtype(kind).block > 1 else 1 + 13 * seed
        w = filled(ctx, kind, k, n, w2, seed=seed)
        x = ctx.from_numpy(rng(seed + 1).standard_normal((r3, w2 * r2, t, k), dtype=np.float32))
        node = ops.mul_mat(w, x)
        check(node, run(node))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_kind", ["f32", "f16", "bf16"])
def test_mul_mat_reads_any_layout(kind, x_kind):
    """Heads taken out of the middle, as a KV cache is read, on both sides."""
    with wb.Context() as ctx:
        k = max(dtype(kind).block, 32)
        w = ops.permute(filled(ctx, kind, k, 3, 70), 0, 2, 1, 3)
        x = ops.permute(ctx.new_tensor(x_kind, k, 6, 5).set(rng(1).standard_normal((5, 6, k))), 0, 2, 1, 3)
        node = ops.mul_mat(w, x)
        check(node, run(node))
        if x_kind != "bf16" and kind == "f32":  # columns with gaps: BLAS cannot read them, so they are copied
            node = ops.mul_mat(ops.slice_view(w, (0, slice(0, 60, 3), slice(0, None, 2))), ops.slice_view(x, (0, slice(None), slice(1, None, 2))))
            check(node, run(node))


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 40), t=st.integers(1, 50), experts=st.integers(1, 9), seed=st.integers(0, 9), data=st.data())
def test_mul_mat_id_equals_its_definition(kind, n, t, experts, seed, data):
    n_used = data.draw(st.integers(1, experts))
    rows = data.draw(st.sampled_from([d for d in range(1, n_used + 1) if n_used % d == 0]))
    repeats = data.draw(st.booleans())  # a token may name an expert twice
    with wb.Context() as ctx:
        k = max(dtype(kind).block, 32)
        w = filled(ctx, kind, k, n, experts, seed=seed)
        x = ctx.from_numpy(rng(seed).standard_normal((t, rows, k), dtype=np.float32))
        ids = ctx.new_tensor("i32", experts, t).set(
            rng(seed).integers(0, experts, (t, experts)) if repeats else np.argsort(rng(seed).random((t, experts))))  # fmt: skip
        node = ops.mul_mat_id(w, x, ops.view(ids, n_used, t, nb=ids.nb[1:2]))
        check(node, run(node))


@pytest.mark.parametrize("kind", ["q4_K", "q6_K", "f16", "q8_0"])
def test_rounded_products_are_those_of_real_ggml(data, kind):
    """Rounding to q8_K is optional for parity; done, it agrees as the others do."""
    cases, arrays = judge.read(data / "goldens" / "ops")
    mine = [c for c in cases if c["op"] in ("mul_mat", "mul_mat_id") and c["src"][0]["type"] == kind]
    assert len(mine) >= 6
    for case in mine:
        with wb.Context(no_alloc=True) as ctx:
            got = judge.run(judge.node_of(ctx, case, [judge.source(ctx, s, arrays) for s in case["src"]]), "ggml")
        size = judge.MAGNITUDES[case["op"]](*[abs(judge.values(s, arrays)) for s in case["src"]]).ravel()
        assert (abs(got - arrays[case["dst"]["key"]]) <= 1e-6 * size).all(), case["id"]


def test_out_prod_repeats_the_first_operand():
    with wb.Context() as ctx:
        a = ctx.from_numpy(rng().standard_normal((1, 2, 5, 7), dtype=np.float32))
        b = ctx.from_numpy(rng(1).standard_normal((3, 4, 5, 6), dtype=np.float32))
        node = ops.out_prod(a, b)
        check(node, run(node))


# ---- what is refused


def test_an_expert_that_is_not_there_is_named_before_anything_is_written():
    with wb.Context() as ctx:
        w, x = filled(ctx, "f32", 8, 4, 3), ctx.from_numpy(np.ones((2, 1, 8), np.float32))
        for bad in (3, -1, 2**31 - 1):
            for tokens in (1, 2):
                ids = ctx.from_numpy(np.array([[0, bad], [1, 2]][:tokens]), "i32", name="chosen experts")
                node = ops.mul_mat_id(w, ops.slice_view(x, slice(0, tokens)), ids).named("up")
                node.set(np.full(node.shape, 7))
                with pytest.raises(ParameterError, match=f"expert {bad} at index \\[0, 1\\] of 'chosen experts', a source of 'up'"):
                    run(node)
                assert (node.numpy() == 7).all()


def test_shapes_and_types_that_do_not_fit_are_refused():
    with wb.Context() as ctx:
        def new(kind, *ne):
            return ctx.new_tensor(kind, *ne)

        for call, error in [
            (lambda: ops.mul_mat(new("f32", 4, 8), new("f32", 8, 2)), ShapeError),
            (lambda: ops.mul_mat(new("f32", 4, 8, 2), new("f32", 4, 2, 3)), ShapeError),
            (lambda: ops.mul_mat(ops.transpose(new("f32", 4, 8)), new("f32", 8, 2)), ShapeError),
            (lambda: ops.mul_mat(new("i32", 4, 8), new("f32", 4, 2)), DTypeError),
            (lambda: ops.mul_mat(new("f32", 32, 8), new("q8_0", 32, 2)), DTypeError),
            (lambda: ops.mul_mat_id(new("f32", 4, 8, 3), new("f32", 4, 1, 2), new("i64", 2, 2)), DTypeError),
            (lambda: ops.mul_mat_id(new("f32", 4, 8, 3), new("f32", 4, 1, 2), new("i32", 2, 3)), ShapeError),
            (lambda: ops.mul_mat_id(new("f32", 4, 8, 3), new("f32", 4, 2, 2), new("i32", 3, 2)), ShapeError),
            (lambda: ops.mul_mat_id(new("f32", 5, 8, 3), new("f32", 4, 1, 2), new("i32", 2, 2)), ShapeError),
            (lambda: ops.mul_mat_id(new("f32", 4, 8, 3, 2), new("f32", 4, 1, 2), new("i32", 2, 2)), ShapeError),
            (lambda: ops.out_prod(new("f32", 4, 8), new("f32", 4, 7)), ShapeError),
            (lambda: ops.out_prod(new("f16", 4, 8), new("f32", 4, 8)), DTypeError),
        ]:  # fmt: skip
            with pytest.raises(error, match="expected: "):
                call()


# ---- bits


def products_of(ctx, kind):
    """A plain product and one through ids, both large enough to be cut."""
    w, x = filled(ctx, kind, 256, 2000), ctx.from_numpy(rng(1).standard_normal((40, 256), dtype=np.float32))
    e, y = filled(ctx, kind, 256, 700, 4, seed=2), ctx.from_numpy(rng(3).standard_normal((90, 1, 256), dtype=np.float32))
    ids = ctx.from_numpy(np.argsort(rng(4).random((90, 4)))[:, :2], "i32")
    return [ops.mul_mat(w, x), ops.mul_mat_id(e, y, ids)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rounding", ["none", "ggml"])
def test_bits_do_not_depend_on_threads_or_cache(kind, rounding):
    with wb.Context() as ctx:
        for node in products_of(ctx, kind):
            assert len(products.columns(node)) > 1
            first = run(node, activation_rounding=rounding)
            for options in ({"n_threads": 2}, {"n_threads": 5}, {"dequant_cache_bytes": 0}, {"dequant_cache_bytes": 5 * 2**18, "n_threads": 3}):
                assert np.array_equal(run(node, activation_rounding=rounding, **options), first), options


@given(n=st.integers(1, 20_000), k=st.integers(1, 5000), t=st.integers(1, 600))
def test_tasks_are_cut_at_multiples_of_64_rows(n, k, t):
    with wb.Context(no_alloc=True) as ctx:
        node = ops.mul_mat(ctx.new_tensor("f32", k, n), ctx.new_tensor("f32", k, t))
    parts = products.columns(node)
    assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]] and (parts[0].start, parts[-1].stop) == (0, n)
    assert all(p.start % 64 == 0 for p in parts) and len(parts) <= products.MAX_TASKS
    for part in parts:
        pieces = cells(part, n, k)
        assert (pieces[0].start, pieces[-1].stop) == (part.start, part.stop)
        assert all(a.stop == b.start and b.start % 64 == 0 for a, b in zip(pieces, pieces[1:], strict=False))
        assert all((p.stop - p.start) * k <= max(CELL, 64 * k) for p in pieces)


# ---- memory


@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_a_steady_state_run_grows_nothing(kind, tokens):
    with wb.Context(64 * 2**20) as ctx:
        w, x = filled(ctx, kind, 256, 512, 4), ctx.from_numpy(rng(1).standard_normal((tokens, 1, 256), dtype=np.float32))
        ids = ctx.from_numpy(np.argsort(rng(4).random((tokens, 4)))[:, :2], "i32")
        heads = ops.permute(ctx.new_tensor("f16", 64, 8, 512).set(rng().standard_normal((512, 8, 64))), 0, 2, 1, 3)
        queries = ctx.new_tensor("f32", 64, tokens, 8).set(rng().standard_normal((8, tokens, 64)))
        h = ops.mul_mat_id(w, x, ids)
        graph = wb.build(h, ops.mul_mat_id(filled(ctx, kind, 512, 256, 4), h, ids), ops.mul_mat(heads, queries))
        for options in ({}, {"dequant_cache_bytes": 0}, {"activation_rounding": "ggml"}):
            runner = GraphRunner(CpuBackend(**options))
            runner.run(graph)
            tracemalloc.start()
            runner.run(graph)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= 64 * 1024 + 64 * 2 * tokens, options


# ---- weights


class Slots:
    """Experts in slots of another order: a source as a pool would be one. It counts what is asked."""

    dtype, direct = dtype("f32"), True

    def __init__(self, experts):
        self.slots, self.where, self.asked = experts[::-1].copy(), list(range(len(experts)))[::-1], []
        self.shape = (1, *experts.shape)

    def matrix(self, i3, i2, part, into=None):
        raise AssertionError("mul_mat_id asks for experts")

    def expert(self, e, part=slice(None), into=None):
        self.asked.append(e)
        return self.slots[self.where[e]][part]


@pytest.mark.parametrize("tokens", [1, 30])
def test_each_used_expert_is_asked_for_once(tokens):
    with wb.Context() as ctx:
        w, x = filled(ctx, "f32", 16, 8, 6), ctx.from_numpy(rng(1).standard_normal((tokens, 1, 16), dtype=np.float32))
        chosen = rng(2).integers(0, 5, (tokens, 3))
        chosen[chosen == 2] = 4
        node = ops.mul_mat_id(w, x, ctx.from_numpy(chosen, "i32"))
        source = Slots(w.array()[0])
        scratch = Scratch(np.empty(node.spec.kernel.work(node), np.uint8))
        node.spec.kernel.bind(np, [source, x.array(), node.src[2].array()], node.array(), {}, scratch=scratch)()
        check(node, node.array())
        distinct = all(len(set(row)) == len(row) for row in chosen.tolist())
        assert sorted(set(source.asked)) == sorted(set(chosen.ravel().tolist()))
        assert len(source.asked) == len(set(source.asked)) or not distinct


def test_mapped_f32_weights_are_never_copied():
    with wb.Context() as ctx:
        w = filled(ctx, "f32", 16, 8, 3)
        source = weights_of(w, DequantCache(2**20))
        assert source.direct and np.shares_memory(source.expert(1), w.array()) and np.shares_memory(source.matrix(0, 2, slice(2, 5)), w.array())


def cached(w, cache):
    return weights_of(w, cache).matrix(0, 0, slice(0, w.ne[1]), np.empty(w.n_elements, np.float32))


def test_the_cache_decodes_once_within_its_budget_and_sees_writes():
    with wb.Context() as ctx:
        a, b = filled(ctx, "f16", 64, 100, seed=1), filled(ctx, "f16", 64, 100, seed=2)
        cache = DequantCache(30_000)
        assert np.array_equal(cached(a, cache), a.numpy()) and (cache.used, cache.misses, cache.hits) == (25_600, 1, 0)
        assert np.array_equal(cached(a, cache), a.numpy()) and (cache.misses, cache.hits) == (1, 1)
        assert np.array_equal(cached(b, cache), b.numpy()) and cache.used == 25_600  # no room: decoded into scratch
        a.set(a.numpy() + 1)
        assert np.array_equal(cached(a, cache), a.numpy()) and (cache.used, cache.hits) == (25_600, 1)
        a.storage.close()
        assert np.array_equal(cached(b, cache), b.numpy()) and cache.used == 25_600  # a's room was taken over
        cache.clear()
        assert cache.used == 0


def test_the_cache_forgets_storages_that_are_gone_and_never_keeps_changing_data():
    cache = DequantCache(2**20)
    with wb.Context() as ctx:
        cached(ctx.new_tensor("f16", 64, 10).set(np.ones((10, 64))), cache)  # not Usage.WEIGHTS
        assert cache.used == 0
        cached(filled(wb.Context(), "q8_0", 64, 10), cache)
    gc.collect()
    assert cache.used == 0  # its tensor and storage were collected


def test_weights_do_not_keep_the_cache_of_a_dropped_backend_alive():
    with wb.Context() as ctx:
        w, cache = filled(ctx, "f16", 64, 10), DequantCache(2**20)
        cached(w, cache)
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        assert gone() is None


def test_many_threads_may_ask_the_cache_at_once():
    with wb.Context() as ctx:
        w = filled(ctx, "q8_0", 1024, 2000)
        cache, want = DequantCache(2**30), w.numpy()
        wrong, start = [], threading.Barrier(4)

        def ask():
            room, source = np.empty(2**19, np.float32), weights_of(w, cache)
            start.wait()
            for part in cells(slice(0, 2000), 2000, 1024) * 3:
                if not np.array_equal(source.matrix(0, 0, part, room), want[part]):
                    wrong.append(part)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not wrong and cache.used == want.nbytes
