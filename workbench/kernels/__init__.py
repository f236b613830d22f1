"""Kernels: the arithmetic of each op, beside its slow definition. Importing this room fills the columns of the op table."""

from workbench.kernels import elementwise, reference, rows
from workbench.kernels.kernel import Kernel, Scratch

__all__ = ["Kernel", "Scratch", "elementwise", "reference", "rows"]
