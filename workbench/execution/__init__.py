"""Execution: memory planned by the graph allocator, one graph run on one backend."""

from workbench.execution.allocator import GraphAllocator, Placement
from workbench.execution.run import GraphRunner, compute

__all__ = ["GraphAllocator", "GraphRunner", "Placement", "compute"]
