"""Backends, buffer types and buffers."""

import numpy as np
import pytest

from workbench import OPS, Context, build, ops
from workbench.devices import HOST_MEMORY, BufferType, CpuBackend, DeviceType, buffer_type_of
from workbench.errors import AllocationError, ParameterError, StorageError, UnsupportedOp
from workbench.tensors.storage import HostStorage, Storage, Usage
from workbench.tensors.tensor import Tensor


def test_a_buffer_is_a_storage_of_its_type():
    buffer = HOST_MEMORY.alloc_buffer(1000, Usage.WEIGHTS)
    assert isinstance(buffer, Storage) and buffer.usage is Usage.WEIGHTS and buffer.size == 1000
    assert buffer_type_of(buffer) is HOST_MEMORY
    assert buffer.host_bytes().ctypes.data % HOST_MEMORY.alignment == 0
    buffer.clear(7)
    assert set(buffer.read(0, 1000)) == {7} and buffer.version == 1
    buffer.close()
    with pytest.raises(StorageError):
        buffer.read(0, 1)


def test_memory_handed_in_counts_as_host_memory():
    kind = buffer_type_of(HostStorage(bytearray(64)))
    assert kind.is_host and kind is not HOST_MEMORY and CpuBackend().supports_buft(kind)


def test_only_the_device_refuses_what_is_too_large():
    assert BufferType("small", max_size=100).alloc_buffer(101).size == 101  # a limit for planners
    with pytest.raises(AllocationError):
        HOST_MEMORY.alloc_buffer(2**60)
    with pytest.raises(ParameterError, match="power of two"):
        BufferType("odd", alignment=24)


def test_a_device_without_host_access_is_not_for_the_cpu():
    assert not CpuBackend().supports_buft(BufferType("far", is_host=False))


@pytest.mark.parametrize("bad", [{"n_threads": 0}, {"n_threads": "2"}, {"activation_rounding": "some"}, {"dequant_cache_bytes": -1}])
def test_the_cpu_refuses_bad_settings(bad):
    with pytest.raises(ParameterError):
        CpuBackend(**bad)


def test_supported_is_what_the_op_table_has_a_kernel_for(monkeypatch):
    cpu = CpuBackend()
    assert cpu.device_type is DeviceType.CPU
    with Context() as ctx:
        x = ctx.new_tensor("f32", 32, 4, name="x")
        y = ops.silu(x).named("y")
        assert cpu.supports_op(y) and cpu.supports_op(x) and cpu.supports_op(ops.transpose(x))
        monkeypatch.setattr(OPS["SILU"], "kernel", None)
        graph = build(y)
        with pytest.raises(UnsupportedOp, match=r"CPU cannot compute 'y': SILU\(f32\) -> f32\n.*\n.*no kernel for SILU"):
            cpu.compute(graph)


def test_block_types_only_where_a_kernel_decodes_them():
    cpu = CpuBackend()
    with Context() as ctx:
        q = ctx.new_tensor("q8_0", 32, 4, name="q")
        x = ctx.new_tensor("f32", 32, 4)
        assert cpu.supports_op(ops.mul_mat(q, x)) and cpu.supports_op(ops.cpy(x, q))
        smuggled = Tensor(x.dtype, x.ne, op="ADD", spec=OPS["ADD"], src=(x, q))
        assert "q8_0" in cpu.why_unsupported(smuggled) and "'q'" in cpu.why_unsupported(smuggled)


def test_memory_report_counts_work_buffer_and_decoded_weights():
    cpu = CpuBackend(dequant_cache_bytes=2**20)
    with Context() as ctx:
        w = ctx.new_tensor("f16", 64, 64).set(np.ones((64, 64)))
        w.storage.usage = Usage.WEIGHTS
        y = ops.mul_mat(w, ctx.from_numpy(np.ones((2, 64), np.float32)))
        plan = cpu.plan(build(y))
        assert plan.work_size > 0
        plan.run()
        assert cpu.memory_report() == {"work buffer": plan.work_size, "dequantised weights": 64 * 64 * 4}
        assert (y.numpy() == 64).all()
        del plan
        cpu.close()
        assert sum(cpu.memory_report().values()) == 0
