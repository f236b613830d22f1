"""Tensors: storage types, descriptions of arrays, the arena that holds them, and the table of ops."""

from workbench.tensors.context import Context
from workbench.tensors.dtype import BF16, DTYPES, F16, F32, F64, I8, I16, I32, I64, Q4_0, Q4_K, Q6_K, Q8_0, DType, dtype
from workbench.tensors.opspec import OPS, OpSpec
from workbench.tensors.storage import HostStorage, Storage, Usage
from workbench.tensors.tensor import Flag, Tensor

__all__ = ["BF16", "DTYPES", "F16", "F32", "F64", "I8", "I16", "I32", "I64", "OPS", "Q4_0", "Q4_K", "Q6_K", "Q8_0",
           "Context", "DType", "Flag", "HostStorage", "OpSpec", "Storage", "Tensor", "Usage", "dtype"]  # fmt: skip
