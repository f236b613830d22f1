"""Kernels: the arithmetic of each op, beside its slow definition. Importing this room fills the columns of the op table."""

import workbench.cgraph.gradients  # noqa: F401 - fills the column of gradients
from workbench.kernels import (
    backward,
    blocks,
    copies,
    elementwise,
    products,
    reference,
    reference_backward,
    reference_products,
    rows,
    superblocks,
)
from workbench.kernels.kernel import Kernel, Scratch

__all__ = ["Kernel", "Scratch", "backward", "blocks", "copies", "elementwise", "products", "reference", "reference_backward",
           "reference_products", "rows", "superblocks"]  # fmt: skip
