"""Compute graphs: which tensors are computed, in which order, and how to look at that."""

from workbench.cgraph.graph import CGraph, build

__all__ = ["CGraph", "build"]
