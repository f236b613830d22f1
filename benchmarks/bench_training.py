"""A step of training (forward, gradients, AdamW) against PyTorch, which builds its graph anew each time and fuses its optimiser.

Measured on one thread of an AMD EPYC with torch 2.13: 0.47 to 0.74 of PyTorch's time, least for large expert layers.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import Table, duration, take_turns
from workbench import Context, CpuBackend, Flag, GraphRunner, Trainer, moe, ops
from workbench.execution import AdamW, new_parameter

MLPS = ((32, 64, 32), (128, 256, 128), (512, 1024, 256))
"""Width, hidden width, tokens."""
EXPERTS = ((16, 32, 8, 128), (64, 128, 8, 256), (256, 512, 8, 512))
"""Width, hidden width, experts, tokens."""
CLASSES = 16


def tables():
    table = Table("One step of AdamW on one thread, forward and backward included", ["case", "PyTorch", "workbench", "ratio"])
    for d, f, t in MLPS:
        table.add(f"MLP {d} -> {f} -> {CLASSES}, {t} tokens", *_measured(_Mlp(d, f, t)))
    for d, f, e, t in EXPERTS:
        table.add(f"MoE, top-2 of {e}, {d} -> {f} -> {d}, {t} tokens", *_measured(_Moe(d, f, t, e)))
    table.notes.append("The same parameters and batch, losses compared first. PyTorch: autograd and torch.optim.AdamW, experts in a "
                       "loop with index_add; the workbench runs one planned graph.")  # fmt: skip
    yield table


class _Case:
    def __init__(self, d: int, f: int, t: int) -> None:
        self.rng = np.random.default_rng(0)
        self.weights, self.work = Context(2**28), Context(2**22, no_alloc=True)
        self.x = self.work.new_tensor("f32", d, t, name="x").mark(Flag.INPUT)
        self.y = self.work.new_tensor("f32", CLASSES, t, name="y").mark(Flag.INPUT)
        self.batch = {self.x: self.rng.standard_normal((t, d), np.float32),
                      self.y: np.eye(CLASSES, dtype="f4")[self.rng.integers(0, CLASSES, t)]}  # fmt: skip

    def params(self, *shapes: tuple[int, ...]):
        self.parameters = [new_parameter(self.weights, self.rng, *ne) for ne in shapes]
        return self.parameters


class _Mlp(_Case):
    def __init__(self, d, f, t):
        super().__init__(d, f, t)
        w1, b1, w2, b2 = self.params((d, f), (f,), (f, CLASSES), (CLASSES,))
        with self.work.active():
            h = ops.silu(ops.add(ops.mul_mat(w1, self.x), b1))
            self.loss = ops.cross_entropy_loss(ops.add(ops.mul_mat(w2, h), b2), self.y)

    def theirs(self, F, p, x, y):
        return F.cross_entropy(F.silu(x @ p[0].T + p[1]) @ p[2].T + p[3], y)


class _Moe(_Case):
    def __init__(self, d, f, t, n_expert):
        super().__init__(d, f, t)
        router, gate, up, down, head = self.params((d, n_expert), (d, f, n_expert), (d, f, n_expert), (f, d, n_expert), (d, CLASSES))
        with self.work.active():
            h = moe.build_moe_ffn(self.x, router, moe.ExpertWeights(gate, up, down), moe.Router(n_expert, 2))
            self.loss = ops.cross_entropy_loss(ops.mul_mat(head, ops.add(h, self.x)), self.y)

    def theirs(self, F, p, x, y):
        router, gate, up, down, head = p
        weights, chosen = (x @ router.T).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = x.new_zeros(x.shape)
        for e in range(len(router)):
            token, place = (chosen == e).nonzero(as_tuple=True)
            rows = x[token]
            rows = (F.silu(rows @ gate[e].T) * (rows @ up[e].T)) @ down[e].T
            out = out.index_add(0, token, rows * weights[token, place, None])
        return F.cross_entropy((out + x) @ head.T, y)


def _measured(case: _Case) -> tuple[str, ...]:
    trainer = Trainer(case.loss, optimiser=AdamW(1e-4), runner=GraphRunner(CpuBackend(1)))
    ours = lambda: trainer.step(case.batch)  # noqa: E731
    peer = _pytorch(case)
    if peer is None:
        return "not installed", duration(take_turns({"ours": ours})["ours"].median), ""
    a, b = peer(), ours()
    assert abs(a - b) < 1e-4 * max(1, abs(a)), f"PyTorch's loss is {a}, ours {b}"
    theirs, mine = take_turns({"PyTorch": peer, "workbench": ours}, seconds=3.0).values()
    return duration(theirs.median), duration(mine.median), f"{mine.ratio:.2f}"


def _pytorch(case: _Case):
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    p = [torch.tensor(w.numpy().copy(), requires_grad=True) for w in case.parameters]
    x, y = (torch.tensor(v) for v in case.batch.values())
    optimiser = torch.optim.AdamW(p, lr=1e-4, weight_decay=0.0)

    def step() -> float:
        optimiser.zero_grad()
        loss = case.theirs(torch.nn.functional, p, x, y)
        loss.backward()
        optimiser.step()
        return loss.item()

    return step
