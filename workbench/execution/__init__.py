"""Execution: memory planned by the graph allocator, one graph run on one backend."""

from workbench.execution.allocator import GraphAllocator, Placement

__all__ = ["GraphAllocator", "Placement"]
