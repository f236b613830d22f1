"""Constructors of graph nodes: each computes a shape and returns a `Tensor`; arithmetic happens only in kernels.

They carry ggml's names without its `ggml_` prefix and without the context argument (see `context_for`).
"""

from workbench.tensors.ops.copies import cast, cont, cpy, dup, get_rows, set_rows
from workbench.tensors.ops.elementwise import add
from workbench.tensors.ops.layout import permute, reshape, slice_view, transpose, view
from workbench.tensors.ops.products import mul_mat, mul_mat_id, out_prod

__all__ = ["add", "cast", "cont", "cpy", "dup", "get_rows", "mul_mat", "mul_mat_id", "out_prod", "permute",
           "reshape", "set_rows", "slice_view", "transpose", "view"]  # fmt: skip
