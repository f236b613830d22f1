"""Mixture of experts: routers, expert layers and the record of what was routed where.

Only graphs are built here (`build_moe_ffn` in llama.cpp); they are computed like any other graph. `presets`: the routers of published
models; `reference`: both in plain NumPy; `configs`: published models as data.
"""

from workbench.moe import balance, configs, presets, reference
from workbench.moe.layers import (
    ExpertWeights,
    FeedForward,
    build_all_experts,
    build_dense_moe,
    build_experts,
    build_ffn,
    build_moe_ffn,
    build_shared,
)
from workbench.moe.routers import Router, Routing, build_router, name_node
from workbench.moe.routes import RouteRecorder, RouteTrace

__all__ = ["ExpertWeights", "FeedForward", "RouteRecorder", "RouteTrace", "Router", "Routing", "balance", "build_all_experts",
           "build_dense_moe", "build_experts", "build_ffn", "build_moe_ffn", "build_router", "build_shared", "configs", "name_node",
           "presets", "reference"]  # fmt: skip
