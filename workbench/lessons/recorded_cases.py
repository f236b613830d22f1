"""Five scheduler cases that real ggml was recorded on, as `Case`s: the same tensors by the same names, in the same order.

What ggml decided stands in `models/metrics/lesson08_ggml.json`: backend of each tensor after each stage, and causes.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from workbench import paths
from workbench.scheduler.whatif import Case, Draft
from workbench.tensors import Tensor, ops

WIDTH = 64


def no_weights_input_only(d: Draft) -> Tensor:
    """No weights at all: an input, and two steps behind it."""
    return ops.silu(ops.scale(d.input("x", WIDTH, d.batch), 2.0).named("s")).named("y")


def first_weight_decides(d: Draft) -> Tensor:
    """Two weights are joined before a product: the first on the GPU, which cannot join, the second on the host."""
    w0 = d.weight("w0", WIDTH, WIDTH, on="GPU")
    k = ops.concat(d.weight("wg", WIDTH, 4, on="GPU"), d.weight("wc", WIDTH, 4), 1).named("k")
    return ops.mul_mat(ops.mul_mat(w0, k).named("a"), d.input("x", WIDTH, d.batch)).named("y")


def weight_op_unsupported_by_owner(d: Draft) -> Tensor:
    """The weight lies on a GPU that cannot multiply; the bias behind it lies there, too."""
    a = ops.mul_mat(d.weight("w0", WIDTH, WIDTH, on="GPU"), d.input("x", WIDTH, d.batch)).named("a")
    return ops.add(a, d.weight("b0", WIDTH, on="GPU")).named("y")


def sweep_unsupported_skipped(d: Draft) -> Tensor:
    """Two products, on GPU0 and on GPU1, and three steps between them; GPU0 has no SILU."""
    a = ops.mul_mat(d.weight("w0", WIDTH, WIDTH, on="GPU0"), d.input("x", WIDTH, d.batch)).named("a")
    s2 = ops.scale(ops.silu(a).named("s1"), 2.0).named("s2")
    return ops.mul_mat(d.weight("w1", WIDTH, WIDTH, on="GPU1"), ops.silu(s2).named("s3")).named("d")


def blas_weights_direct(d: Draft) -> Tensor:
    """BLAS beside the CPU, on the same memory: products with and without a weight, and other steps between them."""
    h = ops.mul_mat(d.weight("w0", WIDTH, WIDTH), ops.scale(d.input("x", WIDTH, d.batch), 2.0).named("x2")).named("h")
    hs = ops.silu(h).named("hs")
    return ops.add(ops.mul_mat(hs, hs).named("z"), d.weight("bias", d.batch)).named("y")


RECORDED = {case.name: case for case in (
    Case("no_weights_input_only", no_weights_input_only),
    Case("first_weight_decides", first_weight_decides, denied=(("CONCAT", "GPU"),)),
    Case("weight_op_unsupported_by_owner", weight_op_unsupported_by_owner, denied=(("MUL_MAT", "GPU"),)),
    Case("sweep_unsupported_skipped", sweep_unsupported_skipped, devices=2, denied=(("SILU", "GPU0"),)),
    Case("blas_weights_direct", blas_weights_direct, devices="blas,cpu", batch=32),
)}  # fmt: skip


@cache
def ggml() -> dict[str, Any]:
    """What real ggml decided, by case: "backends", "stages" {stage: {tensor: backend}}, "causes" {tensor: cause}."""
    return json.loads((paths.models_dir() / "metrics" / "lesson08_ggml.json").read_text("utf-8"))["cases"]
