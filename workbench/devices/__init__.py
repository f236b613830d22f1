"""Devices: memory and the code that computes on it (`ggml_backend_*`, `ggml_cplan`)."""

from workbench.devices.backend import HOST_MEMORY, Backend, Buffer, BufferType, DeviceType, buffer_type_of
from workbench.devices.cpu import CpuBackend
from workbench.devices.cuda import CudaBackend
from workbench.devices.plan import Plan, cut

__all__ = ["HOST_MEMORY", "Backend", "Buffer", "BufferType", "CpuBackend", "CudaBackend", "DeviceType", "Plan", "buffer_type_of", "cut"]
