"""Scheduler cases whose splits real ggml was recorded on, as `Case`s: the same tensors by the same names, in the same order.

What ggml cut stands in `models/metrics/lesson12_ggml.json`: backend, nodes and inputs of each split.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from workbench import paths
from workbench.scheduler.whatif import Case, Draft
from workbench.tensors import Tensor, ops

WIDTH = 64


def abc_d_ef(d: Draft) -> Tensor:
    """The article's case: three products on the card, a softmax that it lacks, and two steps more."""
    wa, wc, we = (d.weight(f"w{name}", WIDTH, WIDTH, on="GPU") for name in "ace")
    c = ops.mul_mat(wc, ops.silu(ops.mul_mat(wa, d.input("x", WIDTH, d.batch)).named("A")).named("B")).named("C")
    return ops.scale(ops.mul_mat(we, ops.soft_max(c).named("D")).named("E"), 0.5).named("F")


def copy_reuse(d: Draft) -> list[Tensor]:
    """A result of the host that two cards read, the first one in two splits."""
    w0, w1, w2, w3 = (d.weight(f"w{i}", WIDTH, WIDTH, on=f"GPU{int(i == 1)}") for i in range(4))
    t = ops.mul_mat(d.weight("wc", WIDTH, WIDTH), d.input("x", WIDTH, d.batch)).named("t")
    a, b = ops.mul_mat(w0, t).named("a"), ops.mul_mat(w1, t).named("d")
    for first in (a, b):
        d.graph.build_forward_expand(first)
    y = ops.mul_mat(w3, ops.add(ops.mul_mat(w2, t).named("e"), a).named("f")).named("y")
    return [y, ops.scale(b, 1.0).named("z")]


def pass3_mixed_blas_gpu(d: Draft) -> list[Tensor]:
    """A card without softmax, BLAS and the CPU; weights on the card and on the host."""
    a = ops.mul_mat(d.weight("w0", WIDTH, WIDTH, on="GPU"), d.input("x", WIDTH, d.batch)).named("a")
    s = ops.soft_max(a).named("s")
    q, r = ops.mul_mat(d.weight("wc", WIDTH, WIDTH), s).named("q"), ops.mul_mat(d.weight("wc2", WIDTH, WIDTH), a).named("r")
    return [ops.add(q, r).named("qr"), ops.mul_mat(s, s).named("p")]


def split_on_incompatible_weight(d: Draft) -> Tensor:
    """Products, a norm's scale and a bias, all of whose weights lie on the host, in a batch that the card takes over."""
    w = [d.weight(f"w{i}", WIDTH, WIDTH) for i in range(3)]
    am = ops.mul(ops.mul_mat(w[0], d.input("x", WIDTH, d.batch)).named("a"), d.weight("m0", WIDTH)).named("am")
    s = ops.add(am, d.weight("b0", WIDTH)).named("s")
    return ops.add(ops.mul_mat(w[1], s).named("d"), ops.mul_mat(w[2], s).named("e")).named("y")


def many_inputs(d: Draft) -> Tensor:
    """Forty sums, each with another input of the user."""
    y = ops.mul_mat(d.weight("w0", WIDTH, WIDTH, on="GPU"), d.input("x", WIDTH, d.batch)).named("a")
    for i in range(40):
        y = ops.add(y, d.input(f"in{i}", WIDTH, d.batch)).named(f"s{i}")
    return y


def many_inputs_grow(d: Draft) -> Tensor:
    """Twenty products of two inputs each: the list of inputs has 29 when a node brings two more."""
    y = ops.mul_mat(d.weight("w0", WIDTH, WIDTH, on="GPU"), d.input("x", WIDTH, d.batch)).named("a")
    for i in range(20):
        y = ops.add(y, ops.mul(d.input(f"p{i}", WIDTH, d.batch), d.input(f"q{i}", WIDTH, d.batch)).named(f"m{i}")).named(f"s{i}")
    return y


SPLITS = {case.name: case for case in (
    Case("abc_d_ef", abc_d_ef, denied=(("SOFT_MAX", "GPU"),)),
    Case("copy_reuse", copy_reuse, devices=2),
    Case("pass3_mixed_blas_gpu", pass3_mixed_blas_gpu, devices="laptop,blas,cpu", batch=32, op_offload=False,
         denied=(("SOFT_MAX", "GPU"),)),
    Case("split_on_incompatible_weight", split_on_incompatible_weight, batch=32),
    Case("many_inputs", many_inputs),
    Case("many_inputs_grow", many_inputs_grow),
)}  # fmt: skip


@cache
def ggml() -> dict[str, list[list[Any]]]:
    """What real ggml cut, by case: [backend, nodes, inputs] of each split."""
    return json.loads((paths.models_dir() / "metrics" / "lesson12_ggml.json").read_text("utf-8"))["cases"]
