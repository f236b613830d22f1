"""Execution: memory planned by the graph allocator, one graph run on one backend, and training."""

from workbench.execution.allocator import GraphAllocator, Placement
from workbench.execution.run import GraphRunner, compute
from workbench.execution.training import AdamW, Trainer, new_parameter

__all__ = ["AdamW", "GraphAllocator", "GraphRunner", "Placement", "Trainer", "compute", "new_parameter"]
