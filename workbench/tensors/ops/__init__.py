"""Constructors of graph nodes: each computes a shape and returns a `Tensor`; arithmetic happens only in kernels.

They carry ggml's names without its `ggml_` prefix and without the context argument (see `context_for`).
"""

from workbench.tensors.ops.backward import (
    acc,
    acc_inplace,
    add_inplace,
    cross_entropy_loss_back,
    get_rows_back,
    mul_mat_id_back,
    opt_step_adamw,
    out_prod_id,
    repeat_back,
    rms_norm_back,
    silu_back,
    soft_max_back,
    sub_inplace,
)
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
    cumsum,
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

__all__ = ["abs", "acc", "acc_inplace", "add", "add_id", "add_inplace", "argmax", "argsort", "argsort_top_k", "cast",
           "clamp", "concat", "cont", "cpy", "cross_entropy_loss", "cross_entropy_loss_back", "cumsum", "diag_mask_inf",
           "div", "dup", "exp", "fill", "geglu", "geglu_split", "gelu", "gelu_quick", "get_rows", "get_rows_back", "glu",
           "l2_norm", "log", "mean", "mul", "mul_mat", "mul_mat_id", "mul_mat_id_back", "neg", "norm", "opt_step_adamw",
           "out_prod", "out_prod_id", "permute", "reglu", "reglu_split", "relu", "repeat", "repeat_back", "reshape",
           "rms_norm", "rms_norm_back", "rope", "scale", "set_rows", "sigmoid", "silu", "silu_back", "slice_view",
           "soft_max", "soft_max_back", "soft_max_ext", "sqr", "sqrt", "step", "sub", "sub_inplace", "sum", "sum_rows",
           "swiglu", "swiglu_oai", "swiglu_split", "tanh", "top_k", "transpose", "unary", "view"]  # fmt: skip
