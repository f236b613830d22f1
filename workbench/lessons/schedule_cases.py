"""The small cases of lessons 08 to 12: `CASES` by name, each a `workbench.scheduler.whatif.Case` that takes milliseconds to build.

Weights lie where the recipe puts them unless a case says otherwise. Devices of `devices=1` are GPU and CPU, of 2 GPU0, GPU1 and CPU.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from string import ascii_uppercase

from workbench.moe import ExpertWeights, Router, build_moe_ffn
from workbench.scheduler.whatif import Case, Draft
from workbench.tensors import Tensor, ops

WIDTH = 64
SIZES = (16, 32, 64, 128)


def chain(d: Draft) -> Tensor:
    """The article's A B C | D | E F: six steps, of which D, a softmax, is the odd one."""
    x = ops.mul_mat(d.weight("W", WIDTH, WIDTH, on="GPU"), d.input("x", WIDTH, d.batch)).named("A")
    for name, op in zip("BCDEF", (ops.silu, ops.sqr, ops.soft_max, ops.sqrt, ops.neg)):
        x = op(x).named(name)
    return x


def bare_chain(d: Draft) -> Tensor:
    """Four steps without any weight: nothing says where they belong."""
    x = d.input("x", WIDTH, d.batch)
    for name, op in zip("ABCD", (ops.silu, ops.sqr, ops.sqrt, ops.neg)):
        x = op(x).named(name)
    return x


def mlp(d: Draft) -> Tensor:
    """Two layers with biases: the first pair of weights on the GPU, the second on the host."""
    x = d.input("x", WIDTH, d.batch)
    h = ops.add(ops.mul_mat(d.weight("W1", WIDTH, 2 * WIDTH, on="GPU"), x).named("up"), d.weight("b1", 2 * WIDTH, on="GPU")).named("up_b")
    h = ops.silu(h).named("act")
    y = ops.mul_mat(d.weight("W2", 2 * WIDTH, WIDTH), h).named("down")
    return ops.add(ops.add(y, d.weight("b2", WIDTH)).named("down_b"), x).named("sum")


def layers(d: Draft) -> Tensor:
    """Three layers of norm, product and residual sum; the middle one's weights on the host."""
    x = d.input("x", WIDTH, d.batch)
    for i, home in enumerate(("GPU", "CPU", "GPU")):
        h = ops.mul(ops.rms_norm(x).named(f"norm{i}"), d.weight(f"g{i}", WIDTH, on=home)).named(f"scaled{i}")
        h = ops.silu(ops.mul_mat(d.weight(f"W{i}", WIDTH, WIDTH, on=home), h).named(f"up{i}")).named(f"act{i}")
        x = ops.add(h, x).named(f"out{i}")
    return x


def attention(d: Draft) -> Tensor:
    """Attention over the batch, with views: q, k, v, scores, softmax, mix, output."""
    n, heads = WIDTH, 4
    x = d.input("x", n, d.batch)

    def heads_of(name: str, on: str) -> Tensor:
        product = ops.mul_mat(d.weight(f"W{name}", n, n, on=on), x).named(name)
        return ops.permute(ops.reshape(product, n // heads, heads, d.batch).named(f"{name} (heads)"), 0, 2, 1, 3).named(f"{name} (turned)")

    q, k, v = (heads_of(name, "GPU") for name in "qkv")
    scores = ops.soft_max(ops.mul_mat(k, q).named("kq")).named("probs")
    mixed = ops.mul_mat(ops.cont(ops.transpose(v).named("v (transposed)")).named("v_cont"), scores).named("kqv")
    merged = ops.cont(ops.permute(mixed, 0, 2, 1, 3).named("kqv (turned)"), n, d.batch).named("merged")
    return ops.add(ops.mul_mat(d.weight("Wo", n, n, on="GPU"), merged).named("o"), x).named("out")


def views(d: Draft) -> Tensor:
    """A result whose two halves are read through views, one by a product on the host."""
    x = d.input("x", WIDTH, d.batch)
    h = ops.mul_mat(d.weight("W1", WIDTH, 2 * WIDTH, on="GPU"), x).named("both")
    a = ops.view(h, WIDTH, d.batch, nb=(h.nb[1],)).named("left")
    b = ops.view(h, WIDTH, d.batch, nb=(h.nb[1],), offset=4 * WIDTH).named("right")
    gate = ops.mul_mat(d.weight("W2", WIDTH, WIDTH), ops.cont(b).named("packed")).named("gate")
    return ops.mul(a, ops.silu(gate).named("act")).named("product")


def moe(d: Draft) -> Tensor:
    """Norm, router and eight experts, two per token; router on the GPU, experts on the host."""
    n, hidden, experts = WIDTH, 32, 8
    x = ops.mul(ops.rms_norm(d.input("x", n, d.batch)).named("norm"), d.weight("g", n, on="GPU")).named("scaled")
    gate_inp = d.weight("router", n, experts, on="GPU")
    shapes = {"gate_exps": (n, hidden, experts), "up_exps": (n, hidden, experts), "down_exps": (hidden, n, experts)}
    gate, up, down = (d.weight(name, *ne) for name, ne in shapes.items())
    return build_moe_ffn(x, gate_inp, ExpertWeights(gate, up, down), Router(experts, 2), graph=d.graph)


def many_inputs(d: Draft) -> Tensor:
    """Forty sums, each with another input of the user, which the host holds."""
    y = ops.mul_mat(d.weight("W", WIDTH, WIDTH, on="GPU"), d.input("x", WIDTH, d.batch)).named("y")
    for i in range(40):
        y = ops.add(y, d.input(f"x{i}", WIDTH, d.batch)).named(f"s{i}")
    return y


def two_cards(d: Draft) -> Tensor:
    """Four layers over two GPUs, and the residual sums between them."""
    x = d.input("x", WIDTH, d.batch)
    for i in range(4):
        h = ops.silu(ops.mul_mat(d.weight(f"W{i}", WIDTH, WIDTH, on=f"GPU{i // 2}"), x).named(f"up{i}")).named(f"act{i}")
        x = ops.add(h, x).named(f"out{i}")
    return x


def reused(d: Draft) -> Tensor:
    """A result of the host that the GPU reads in two splits: it is copied once."""
    h = ops.mul_mat(d.weight("W", WIDTH, WIDTH), d.input("x", WIDTH, d.batch)).named("h")
    a = ops.mul_mat(d.weight("Wa", WIDTH, WIDTH, on="GPU"), h).named("a")
    b = ops.soft_max(a).named("b")
    return ops.mul_mat(d.weight("Wb", WIDTH, WIDTH, on="GPU"), ops.add(b, h).named("c")).named("e")


def tied(d: Draft) -> Tensor:
    """Two products with one and the same weight of the host."""
    w = d.weight("W", WIDTH, WIDTH)
    a = ops.mul_mat(w, d.input("x", WIDTH, d.batch)).named("a")
    return ops.mul_mat(d.weight("W2", WIDTH, WIDTH), ops.mul_mat(w, ops.silu(a).named("s")).named("c")).named("e")


@dataclass(frozen=True)
class RandomSteps:
    """A recipe of `n` steps A B C … drawn from a seed: products with weights on random devices, biases, and steps without weights; with
    chain=False also sums of earlier results and views."""

    seed: int
    n: int = 8
    chain: bool = True

    def __call__(self, d: Draft) -> list[Tensor]:
        """The graph; what nothing reads is an output."""
        r, unary = random.Random(self.seed), (ops.silu, ops.soft_max, ops.rms_norm, ops.sqr, ops.neg)
        made = [d.input("x", r.choice(SIZES), d.batch)]
        for i in range(self.n):
            name, x = f"{ascii_uppercase[i % 26]}{i // 26 or ''}", made[-1] if self.chain else r.choice(made[-4:])
            same = [t for t in made if t.ne == x.ne]
            what = r.choice("wwwbuuuu" if self.chain else "wwwbuuussv")
            if what == "w":
                x = ops.mul_mat(d.weight(f"W{name}", x.ne[0], r.choice(SIZES), on=r.choice(d.devices)), x)
            elif what == "b":
                x = ops.add(x, d.weight(f"b{name}", x.ne[0], on=r.choice(d.devices)))
            elif what == "s":
                x = ops.add(x, r.choice(same))
            elif what == "v" and x.op != "NONE" and x.ne[0] > SIZES[0]:
                x = ops.neg(ops.view(x, x.ne[0] // 2, d.batch, nb=(x.nb[1],)).named(f"half of {x.name}"))
            else:
                x = r.choice(unary)(x)
            made.append(x.named(name))
        read = {s.root() for t in made for s in t.sources()} | {s.root() for t in made for u in t.sources() for s in u.sources()}
        return [t for t in made[1:] if t not in read]


def random_case(seed: int, n: int = 8, chain: bool = True, devices: int = 1) -> Case:
    """A case drawn from a seed: its steps, where the weights lie, the batch, and what each GPU lacks."""
    r, cards = random.Random(f"case {seed}"), ["GPU"] if devices == 1 else [f"GPU{i}" for i in range(devices)]
    denied = tuple((r.choice(("SOFT_MAX", "RMS_NORM", "SQR", "SILU")), card) for card in cards if r.random() < 0.6)
    kind = "chain" if chain else "graph"
    return Case(f"{kind} {seed}", RandomSteps(seed, n, chain), devices, r.choice((4, 4, 4, 32)), denied=denied)


def _cases() -> dict[str, Case]:
    blas = "laptop,blas,cpu"
    found = [
        Case("A B C | D | E F", chain, denied=(("SOFT_MAX", "GPU"),)),
        Case("no weights", bare_chain),
        Case("MLP, half on the host", mlp),
        Case("MLP on the host", mlp, weights=(("W1", "CPU"), ("b1", "CPU"))),
        Case("MLP on the GPU", mlp, weights=(("W2", "GPU"), ("b2", "GPU"))),
        Case("MLP, batch 32", mlp, batch=32),
        Case("MLP, batch 32, no op_offload", mlp, batch=32, op_offload=False),
        Case("MLP with BLAS", mlp, devices=blas, batch=32),
        Case("layers, one on the host", layers),
        Case("layers, batch 32", layers, batch=32),
        Case("layers with BLAS", layers, devices=blas, batch=32),
        Case("attention", attention),
        Case("attention, no softmax on the GPU", attention, denied=(("SOFT_MAX", "GPU"),)),
        Case("views", views),
        Case("experts on the host", moe),
        Case("experts on the host, batch 32", moe, batch=32),
        Case("experts on the GPU", moe, weights=tuple((f"{w}_exps", "GPU") for w in ("gate", "up", "down"))),
        Case("forty inputs", many_inputs),
        Case("two GPUs", two_cards, devices=2),
        Case("two GPUs, four copies", two_cards, devices=2, parallel=True),
        Case("a copy used twice", reused, denied=(("SOFT_MAX", "GPU"),)),
        Case("a weight used twice", tied, batch=32),
    ]
    return {case.name: case for case in found}


CASES = _cases()
"""By name; the article's A B C | D | E F comes first."""
