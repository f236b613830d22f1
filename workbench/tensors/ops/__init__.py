"""Constructors of graph nodes: each computes a shape and returns a `Tensor`; arithmetic happens only in kernels.

They carry ggml's names without its `ggml_` prefix and without the context argument (see `context_for`).
"""

from workbench.tensors.ops.copies import cast, cont, cpy, dup, get_rows, set_rows
from workbench.tensors.ops.elementwise import (
    abs,
    add,
    add_id,
    clamp,
    div,
    exp,
    fill,
    geglu,
    geglu_split,
    gelu,
    gelu_quick,
    glu,
    log,
    mul,
    neg,
    reglu,
    reglu_split,
    relu,
    scale,
    sigmoid,
    silu,
    sqr,
    sqrt,
    step,
    sub,
    swiglu,
    swiglu_oai,
    swiglu_split,
    tanh,
    unary,
)
from workbench.tensors.ops.layout import permute, reshape, slice_view, transpose, view
from workbench.tensors.ops.products import mul_mat, mul_mat_id, out_prod
from workbench.tensors.ops.rows import (
    argmax,
    argsort,
    argsort_top_k,
    concat,
    cross_entropy_loss,
    diag_mask_inf,
    l2_norm,
    mean,
    norm,
    repeat,
    rms_norm,
    rope,
    soft_max,
    soft_max_ext,
    sum,
    sum_rows,
    top_k,
)

__all__ = ["abs", "add", "add_id", "argmax", "argsort", "argsort_top_k", "cast", "clamp", "concat", "cont",
           "cpy", "cross_entropy_loss", "diag_mask_inf", "div", "dup", "exp", "fill", "geglu", "geglu_split", "gelu",
           "gelu_quick", "get_rows", "glu", "l2_norm", "log", "mean", "mul", "mul_mat", "mul_mat_id", "neg",
           "norm", "out_prod", "permute", "reglu", "reglu_split", "relu", "repeat", "reshape", "rms_norm",
           "rope", "scale", "set_rows", "sigmoid", "silu", "slice_view", "soft_max", "soft_max_ext", "sqr",
           "sqrt", "step", "sub", "sum", "sum_rows", "swiglu", "swiglu_oai", "swiglu_split", "tanh", "top_k", "transpose",
           "unary", "view"]  # fmt: skip
