"""Compute graphs: which tensors are computed, in which order, and how to look at that."""

from workbench.cgraph.export import table, to_dot
from workbench.cgraph.gradients import backward_expansion, build_backward_expand
from workbench.cgraph.graph import CGraph, build
from workbench.cgraph.serial import from_dict, from_json, to_dict, to_json
from workbench.cgraph.statistics import Statistics, Work, statistics

__all__ = ["CGraph", "Statistics", "Work", "backward_expansion", "build", "build_backward_expand", "from_dict",
           "from_json", "statistics", "table", "to_dict", "to_dot", "to_json"]  # fmt: skip
