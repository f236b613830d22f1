"""Constructors of graph nodes: each computes a shape and returns a `Tensor`; arithmetic happens only in kernels.

They carry ggml's names without its `ggml_` prefix and without the context argument (see `context_for`).
"""

from workbench.tensors.ops.elementwise import add
from workbench.tensors.ops.layout import permute, reshape, slice_view, transpose, view

__all__ = ["add", "permute", "reshape", "slice_view", "transpose", "view"]
