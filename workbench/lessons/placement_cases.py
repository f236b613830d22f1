"""Cases of lessons 10 and 11: recorded from real ggml where a name is one of `RECORDED`, made for the lesson otherwise.

What ggml decided stands in `models/metrics/lesson10_ggml.json`. Tensors have the recorded names and order; products are large enough
for BLAS, which changes no decision.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from string import ascii_uppercase
from typing import Any

from workbench import paths
from workbench.scheduler.whatif import Case, Draft
from workbench.tensors import Flag, Tensor, ops

N = 64
BLAS, CARD_AND_BLAS = "blas,cpu", "laptop,blas,cpu"


def product(d: Draft, weight: str, x: Tensor, name: str, on: str = "CPU", rows: int = N) -> Tensor:
    """A product with a weight of `rows` rows."""
    return ops.mul_mat(d.weight(weight, x.ne[0], rows, on=on), x).named(name)


def loose(d: Draft, name: str, *ne: int) -> Tensor:
    """A leaf that is no weight, and was not marked as an input either."""
    return d.context.new_tensor("f32", *ne, name=name)


# ---- pass 3


def pass3_best(d: Draft) -> Tensor:
    """A softmax with a mask between two products on a card that has no softmax."""
    a = product(d, "w0", d.input("x", N, d.batch), "a", "GPU0")
    return product(d, "w1", ops.soft_max_ext(a, d.input("mask", N, d.batch), 1.0, 0.0).named("s"), "y", "GPU0")


def without_mask(d: Draft) -> Tensor:
    """The same without the mask."""
    a = product(d, "w0", d.input("x", N, d.batch), "a", "GPU0")
    return product(d, "w1", ops.soft_max(a).named("s"), "y", "GPU0")


def small_and_large(d: Draft) -> Tensor:
    """An op with a large source on one card and two small ones on the host, among nodes of another card, which cannot do it."""
    far = product(d, "w1", d.input("x", N, d.batch), "far", "GPU1", 8 * N)
    d.graph.build_forward_expand(far)
    near = product(d, "w0", d.input("x2", N, d.batch), "near", "GPU0")
    d.graph.build_forward_expand(near)
    heads = ops.reshape(far, N, 8, d.batch).named("far (heads)")
    turned = ops.rope(heads, d.input("pos", d.batch, kind="i32"), N, freq_factors=d.weight("factors", N // 2)).named("turned")
    return product(d, "w2", turned, "y", "GPU0")


def pass3_upgrade_blas(d: Draft) -> Tensor:
    """A bias, a product of two results, an activation; no card, but BLAS beside the CPU."""
    h = ops.add(d.input("x", N, d.batch), d.weight("b0", N)).named("h")
    return ops.silu(ops.mul_mat(h, h).named("z")).named("y")


def pass3_upgrade_blas_gpu(d: Draft) -> list[Tensor]:
    """Two products of results: one reads the host's memory only, one a result of a card that cannot multiply."""
    x = d.input("x", N, d.batch)
    ga = ops.mul(x, d.weight("wg", N, on="GPU")).named("ga")
    d.graph.build_forward_expand(ga)
    h = ops.add(x, d.weight("wc", N)).named("h")
    return [ops.mul_mat(h, h).named("p"), ops.mul_mat(h, ga).named("q")]


def pass3_mixed_blas_gpu(d: Draft) -> list[Tensor]:
    """A card, BLAS and the CPU, weights on the card and on the host: all passes have something to say."""
    a = product(d, "w0", d.input("x", N, d.batch), "a", "GPU")
    s = ops.soft_max(a).named("s")
    q = product(d, "wc", s, "q")
    return [ops.add(q, product(d, "wc2", a, "r")).named("qr"), ops.mul_mat(s, s).named("p")]


# ---- pass 4


def trailing_views(d: Draft) -> list[Tensor]:
    """A chain of two views at the end, of a result at the beginning."""
    y = product(d, "w", d.input("x", N, d.batch), "y_mm", "GPU").mark(Flag.OUTPUT)
    z = ops.soft_max(product(d, "w2", y, "z_mm", rows=8)).named("z").mark(Flag.OUTPUT)
    d.graph.build_forward_expand(z)
    part = ops.view(y, N, 2, nb=(y.nb[1],)).named("yv")
    return [ops.reshape(part, N // 2, 2, 2).named("yr")]


def views_at_border(d: Draft) -> Tensor:
    """Views on both sides of every border; the card has no softmax."""
    a = product(d, "wa", d.input("x", 16, 8), "A", "GPU", 24)
    soft = ops.soft_max(ops.view(a, 24, 6, nb=(a.nb[1],)).named("v")).named("D")
    e = product(d, "we", ops.cont(ops.transpose(soft).named("t")).named("tc"), "E", "GPU", 8)
    packed = ops.cont(ops.permute(ops.reshape(a, 8, 3, 8).named("r"), 0, 2, 1, 3).named("p")).named("pc")
    soft2 = ops.soft_max(packed).named("D2")
    return ops.add(e, ops.reshape(ops.view(soft2, 192).named("dv"), 8, 24).named("dr")).named("y")


def unflagged_leaf(d: Draft) -> Tensor:
    """A leaf without a flag, read on the card first and on the host later."""
    x = loose(d, "x", N, d.batch)
    return _twice(d, x)


def flagged_leaf(d: Draft) -> Tensor:
    """The same leaf, marked as an input."""
    return _twice(d, d.input("x", N, d.batch))


def _twice(d: Draft, x: Tensor) -> Tensor:
    ax = ops.add(product(d, "w0", x, "a", "GPU"), x).named("ax")
    return ops.add(product(d, "w1", ax, "d"), x).named("y")


def unflagged_leaf_under_view(d: Draft) -> Tensor:
    """A leaf without a flag, read through a view only."""
    return _under_view(d, loose(d, "x", N, d.batch))


def flagged_leaf_under_view(d: Draft) -> Tensor:
    """The same leaf, marked as an input."""
    return _under_view(d, d.input("x", N, d.batch))


def _under_view(d: Draft, x: Tensor) -> Tensor:
    return product(d, "w0", ops.view(x, N, d.batch // 2, nb=(x.nb[1],)).named("v"), "a", "GPU")


def user_assign_view(d: Draft) -> list[Tensor]:
    """A view between a card and the host, which both read."""
    a = product(d, "w0", d.input("x", N, d.batch), "a", "GPU")
    v = ops.reshape(a, 16, a.n_elements // 16).named("v")
    return [ops.silu(v).named("y"), product(d, "w1", v, "z", rows=16)]


def written_by_the_host(d: Draft) -> Tensor:
    """Two rows of a result of the card are replaced; the card cannot do that."""
    x = d.input("x", N, d.batch)
    table = product(d, "w0", x, "table", "GPU")
    rows = ops.silu(ops.view(x, N, 2, nb=(x.nb[1],)).named("two of x")).named("rows")
    filled = ops.set_rows(table, rows, d.input("places", 2, kind="i64")).named("filled")
    return product(d, "w1", filled, "y", "GPU")


RECORDED = {case.name: case for case in (
    Case("pass3_best", pass3_best, devices=2, denied=(("SOFT_MAX", "GPU0"),)),
    Case("pass3_upgrade_blas", pass3_upgrade_blas, devices=BLAS, batch=32),
    Case("pass3_upgrade_blas_gpu", pass3_upgrade_blas_gpu, devices=CARD_AND_BLAS, batch=32, op_offload=False, denied=(("MUL_MAT", "GPU"),)),
    Case("pass3_mixed_blas_gpu", pass3_mixed_blas_gpu, devices=CARD_AND_BLAS, batch=32, op_offload=False, denied=(("SOFT_MAX", "GPU"),)),
    Case("trailing_views", trailing_views),
    Case("views_at_border", views_at_border, denied=(("SOFT_MAX", "GPU"),)),
    Case("unflagged_leaf", unflagged_leaf),
    Case("unflagged_leaf_under_view", unflagged_leaf_under_view, quirks="ggml"),
    Case("user_assign_view", user_assign_view, assigned=(("v", "CPU"),), quirks="ggml"),
)}  # fmt: skip

OTHERS = {case.name: case for case in (
    Case("pass3_best, no mask", without_mask, devices=2, denied=(("SOFT_MAX", "GPU0"),)),
    Case("small and large sources", small_and_large, devices=2, denied=(("ROPE", "GPU0"),)),
    Case("flagged_leaf", flagged_leaf),
    Case("flagged_leaf_under_view", flagged_leaf_under_view),
    Case("a view, not by hand", user_assign_view),
    Case("the host writes", written_by_the_host, denied=(("SET_ROWS", "GPU"),)),
)}  # fmt: skip


@cache
def ggml() -> dict[str, Any]:
    """What real ggml decided, by case: "backends", "stages" {stage: {tensor: backend}}, "causes" {tensor: cause}, "error"."""
    return json.loads((paths.models_dir() / "metrics" / "lesson10_ggml.json").read_text("utf-8"))["cases"]


# ---- drawn from a seed


@dataclass(frozen=True)
class Loose:
    """A recipe of `n` steps A B C … drawn from a seed, of all that passes 3 and 4 care about: products of two results, views read by
    several, leafs without a flag, views of those. A batch of 32 suits it, so that BLAS takes part."""

    seed: int
    n: int = 9

    def __call__(self, d: Draft) -> list[Tensor]:
        """The graph; what nothing reads is an output."""
        r, unary = random.Random(self.seed), (ops.silu, ops.soft_max, ops.rms_norm, ops.sqr, ops.neg)
        made = [d.input("x", r.choice((32, 64)), d.batch)]
        for i in range(self.n):
            name, x, what = ascii_uppercase[i], made[-1] if r.random() < 0.8 else r.choice(made), r.choice("wwbuuuqqvvcd")
            if what == "w":
                y = product(d, f"W{name}", x, name, r.choice(d.devices), r.choice((32, 64)))
            elif what == "b":
                y = ops.add(x, d.weight(f"b{name}", x.ne[0], on=r.choice(d.devices)))
            elif what == "q":
                y = ops.mul_mat(r.choice([t for t in made if t.ne[0] == x.ne[0] and t.ne[1] == d.batch]), x)
            elif what == "v" and x.op != "NONE":
                y = ops.neg(ops.reshape(x, x.ne[0], d.batch).named(f"as {name}"))
            elif what == "c":
                y = ops.add(x, loose(d, f"c{name}", x.ne[0], d.batch))
            elif what == "d":
                y = ops.mul(x, ops.view(loose(d, f"c{name}", x.ne[0], 2), x.ne[0]).named(f"row of c{name}"))
            else:
                y = r.choice(unary)(x)
            made.append(y.named(name))
        read = {s.root() for t in made for s in t.sources()} | {s.root() for t in made for u in t.sources() for s in u.sources()}
        return [t for t in made[1:] if t not in read]


def loose_case(seed: int, quirks: str = "") -> Case:
    """A case drawn from a seed, over a card, two cards, or a card and BLAS, some of which lack ops."""
    r = random.Random(f"loose {seed}")
    devices: int | str = r.choice((1, 2, CARD_AND_BLAS))
    cards: Sequence[str] = ("GPU0", "GPU1") if devices == 2 else ("GPU",)
    denied = tuple((op, card) for card in cards for op in r.sample(("SOFT_MAX", "RMS_NORM", "SQR", "SILU", "NEG", "MUL_MAT"), 2))
    return Case(f"drawn {seed}", Loose(seed), devices, 32, denied=denied, op_offload=False, quirks=quirks)
