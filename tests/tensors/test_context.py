"""The arena: bytes as real ggml counts them, and the errors that replace dangling pointers."""

import json
import pathlib

import numpy as np
import pytest

import workbench as wb
from workbench.errors import AllocationError, ContextClosed, ContextError, ContextFull, NoDataError, ParameterError
from workbench.tensors.context import TENSOR_OVERHEAD

RECORDED = json.loads((pathlib.Path(__file__).parents[1] / "data" / "context_memory.json").read_text())


@pytest.mark.parametrize("run", RECORDED["runs"], ids=lambda r: f"no_alloc={r['no_alloc']}")
def test_used_memory_equals_real_ggml(run):
    ctx, made = wb.Context(1 << 20, no_alloc=run["no_alloc"]), []
    build = {
        "mul_mat": lambda: wb.ops.mul_mat(*made[-2:]),
        "transpose": lambda: wb.ops.transpose(made[-1]),
        "relu": lambda: wb.ops.relu(made[-2]),
        "graph100": lambda: wb.CGraph(ctx, size=100),
    }
    for what, *ne, used in run["steps"]:
        made.append(build[what]() if what in build else ctx.new_tensor(what, *ne[0]))
        assert ctx.used_mem == used, what


def test_overheads_equal_real_ggml():
    assert RECORDED["tensor_overhead"] == TENSOR_OVERHEAD
    for size, nbytes in RECORDED["graph_overhead"].items():
        ctx = wb.Context(1 << 23)
        wb.CGraph(ctx, size=int(size))
        assert ctx.used_mem == nbytes, size


def test_a_full_arena_says_how_much_is_missing_and_keeps_what_it_has():
    ctx = wb.Context(1000)
    x = ctx.from_numpy(np.arange(4.0), name="x")
    with pytest.raises(ContextFull, match=r"'big' needs 4,368 bytes, 6\d\d of 1,008 are left"):
        ctx.new_tensor("f32", 1000, name="big")
    assert x.numpy().tolist() == [0, 1, 2, 3] and len(ctx.objects) == 1
    ctx.new_tensor("f32", 3)  # still usable


def test_the_size_in_the_message_is_enough():
    ctx = wb.Context(400)
    with pytest.raises(ContextFull) as caught:
        ctx.new_tensor("f32", 100)
    size = int(caught.value.hint.split("mem_size=")[1].split(")")[0])
    wb.Context(size).new_tensor("f32", 100)


def test_use_after_close_names_tensor_and_context():
    with wb.Context(name="weights") as ctx:
        x = ctx.from_numpy([1.0], name="x")
    with pytest.raises(ContextClosed, match=r"(?s)'x'.*'weights'"):
        x.numpy()
    with pytest.raises(ContextClosed):
        ctx.new_tensor("f32", 1)


def test_a_view_dies_with_its_owner():
    owner, other = wb.Context(name="owner"), wb.Context(name="other")
    x = owner.from_numpy(np.arange(6.0), name="x")
    with other.active():
        y = x[2:4]
    assert y.context is other and y.numpy().tolist() == [2, 3]
    owner.close()
    with pytest.raises(ContextClosed, match="'owner'"):
        y.numpy()


def test_tensors_from_before_a_reset_are_dead():
    ctx = wb.Context()
    x = ctx.from_numpy([1.0], name="x")
    ctx.reset()
    ctx.from_numpy([2.0])
    assert len(ctx.objects) == 1
    with pytest.raises(ContextClosed):
        x.numpy()


def test_memory_handed_in_is_used():
    memory = bytearray(2000)
    x = wb.Context(memory=memory).from_numpy(np.full(3, 7.0, np.float32))
    assert memory[x.offset : x.offset + 12] == np.full(3, 7, "<f4").tobytes()
    with pytest.raises(ContextError, match="read-only"):
        wb.Context(memory=bytes(100))


def test_no_alloc_is_never_a_wrong_number():
    ctx = wb.Context(no_alloc=True)
    x = ctx.new_tensor("f32", 4, name="x")
    for use in (x.numpy, lambda: x.set([0] * 4), lambda: (x + x).numpy()):
        with pytest.raises(NoDataError, match="no_alloc"):
            use()


def test_new_ops_go_to_the_active_context_else_to_the_first_source():
    weights, work = wb.Context(name="weights"), wb.Context(name="work")
    w, x = weights.from_numpy([1.0, 2.0]), work.from_numpy([3.0, 4.0])
    assert (w + x).context is weights
    with work.active():
        assert (w + x).context is work
        with weights.active():
            assert (x + w).context is weights
        assert (w + x).context is work


def test_sizes_and_memory_that_are_none():
    for size in ("x", None, 1.5, True, -1):
        with pytest.raises(ParameterError, match="whole number of bytes"):
            wb.Context(size)
    for memory in ("text", np.zeros((8, 8), np.uint8)[::2, ::2]):
        with pytest.raises(ContextError, match="contiguous piece"):
            wb.Context(memory=memory)


def test_an_arena_that_gets_no_memory_stays_empty():
    ctx = wb.Context(1 << 60)
    with pytest.raises(AllocationError):
        ctx.new_tensor("f32", 4)
    assert ctx.used_mem == 0 and not ctx.objects and not ctx.tensors
