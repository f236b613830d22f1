"""Gradients, AdamW and whole training runs against PyTorch. Runs in the environment of `.ci/run`'s job train (`pytest -m peers`)."""

import numpy as np
import pytest

pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[train]'")

import torch.nn.functional as F  # noqa: E402

from workbench import Context, Flag, build, compute, moe, ops  # noqa: E402
from workbench.execution import AdamW, Trainer, new_parameter  # noqa: E402


def tensors(parameters, dtype=torch.float32):
    return [torch.tensor(w.numpy().copy(), dtype=dtype, requires_grad=True) for w in parameters]


class Pair:
    """The same network here and in PyTorch: `ours` is its loss, `theirs(parameters, x, y, dtype)` theirs."""

    def __init__(self, seed, d=12, f=20, t=9, classes=5):
        self.rng, self.d, self.t, self.classes = np.random.default_rng(seed), d, t, classes
        self.weights, self.work = Context(2**22), Context(2**20, no_alloc=True)
        self.x = self.work.new_tensor("f32", d, t, name="x").mark(Flag.INPUT)
        self.y = self.work.new_tensor("f32", classes, t, name="y").mark(Flag.INPUT)
        self.f = f

    def param(self, *ne):
        return new_parameter(self.weights, self.rng, *ne)

    def batch(self):
        x = self.rng.standard_normal((self.t, self.d), np.float32)
        return x, np.eye(self.classes, dtype="f4")[self.rng.integers(0, self.classes, self.t)]


class Mlp(Pair):
    """RMS norm, two layers with the activation, a residual, cross entropy."""

    def __init__(self, seed, act="silu", **kw):
        super().__init__(seed, **kw)
        self.act = act
        self.parameters = [self.param(self.d), self.param(self.d, self.f), self.param(self.f), self.param(self.f, self.d),
                           self.param(self.d, self.classes)]  # fmt: skip
        g, w1, b1, w2, w3 = self.parameters
        with self.work.active():
            h = ops.unary(act, ops.add(ops.mul_mat(w1, ops.mul(ops.rms_norm(self.x, 1e-5), g)), b1))
            self.loss = ops.cross_entropy_loss(ops.mul_mat(w3, ops.add(ops.mul_mat(w2, h), self.x)), self.y)

    def theirs(self, parameters, x, y):
        g, w1, b1, w2, w3 = parameters
        act = {"silu": F.silu, "relu": F.relu, "gelu": lambda a: F.gelu(a, approximate="tanh"), "tanh": torch.tanh, "sigmoid": torch.sigmoid}
        h = act[self.act](F.rms_norm(x, (self.d,), g, 1e-5) @ w1.T + b1) @ w2.T + x
        return F.cross_entropy(h @ w3.T, y)


class Experts(Pair):
    """Top-k experts of a softmax router, cross entropy. Weights are renormalised (Mixtral), except for k = 1 (Switch), where a weight of
    1 would leave the router without a gradient, and Adam would follow its rounding errors."""

    def __init__(self, seed, n_expert=4, k=2, **kw):
        super().__init__(seed, **kw)
        self.k = k
        self.parameters = [self.param(self.d, n_expert), self.param(self.d, self.f, n_expert), self.param(self.d, self.f, n_expert),
                           self.param(self.f, self.d, n_expert), self.param(self.d, self.classes)]  # fmt: skip
        router, gate, up, down, head = self.parameters
        with self.work.active():
            h = moe.build_moe_ffn(self.x, router, moe.ExpertWeights(gate, up, down), moe.Router(n_expert, k, normalise=k > 1))
            self.loss = ops.cross_entropy_loss(ops.mul_mat(head, ops.add(h, self.x)), self.y)

    def theirs(self, parameters, x, y):
        router, gate, up, down, head = parameters
        weights, chosen = torch.softmax(x @ router.T, -1).topk(self.k, -1)
        weights = weights / weights.sum(-1, keepdim=True) if self.k > 1 else weights
        hidden = F.silu(torch.einsum("tkfd,td->tkf", gate[chosen], x)) * torch.einsum("tkfd,td->tkf", up[chosen], x)
        h = (torch.einsum("tkdf,tkf->tkd", down[chosen], hidden) * weights[..., None]).sum(1) + x
        return F.cross_entropy(h @ head.T, y)


PAIRS = {
    **{f"mlp {act}": (lambda seed, act=act: Mlp(seed, act)) for act in ("silu", "relu", "gelu", "tanh", "sigmoid")},
    "switch": lambda seed: Experts(seed, k=1),
    "mixtral": lambda seed: Experts(seed),
    "all experts": lambda seed: Experts(seed, k=4),
    "wide": lambda seed: Experts(seed, n_expert=8, k=3, d=64, f=96, t=70),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PAIRS)
def test_gradients(name, seed):
    """Both in f32, theirs in f64 as the judge: ours may err as much as f32 does, 1e-5 of the largest."""
    pair = PAIRS[name](seed)
    x, y = pair.batch()
    trainer = Trainer(pair.loss)
    grads = {w: trainer.graph.grad(w).mark(Flag.OUTPUT) for w in pair.parameters}
    exact = tensors(pair.parameters, torch.float64)
    loss = pair.theirs(exact, torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64))
    loss.backward()
    trainer.optimiser.rate = 0.0
    got = trainer.step({pair.x: x, pair.y: y})
    assert got == pytest.approx(loss.item(), rel=1e-5)
    for w, t in zip(pair.parameters, exact):
        want = t.grad.numpy()
        assert np.abs(grads[w].numpy() - want).max() <= 1e-5 * np.abs(want).max() + 1e-8


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rate", [1e-3, 1e-2])
@pytest.mark.parametrize("seed", range(3))
def test_adamw_of_given_gradients(seed, rate, decay):
    """The optimiser alone, 50 steps of the same gradients in both: within 1e-6 of numbers of size 1."""
    rng = np.random.default_rng(seed)
    with Context() as ctx:
        w, grad, m, v, numbers = (ctx.from_numpy(rng.standard_normal(n).astype("f4")) for n in ((7, 13), (7, 13), (7, 13), (7, 13), 7))
        m.set(np.zeros((7, 13)))
        v.set(np.zeros((7, 13)))
        graph = build(ops.opt_step_adamw(w.mark(Flag.PARAM), grad, m, v, numbers))
        (t,) = tensors([w])
        theirs, ours = torch.optim.AdamW([t], lr=rate, weight_decay=decay, eps=1e-8), AdamW(rate, decay=decay)
        for step in range(1, 51):
            g = (rng.standard_normal((7, 13)) * 10.0 ** rng.integers(-4, 2)).astype("f4")
            grad.set(g)
            numbers.set(ours.numbers(step))
            compute(graph)
            t.grad = torch.tensor(g)
            theirs.step()
            assert np.abs(w.numpy() - t.detach().numpy()).max() <= 1e-6


@pytest.mark.parametrize("name", ["mlp silu", "mlp relu", "switch", "mixtral"])
def test_training_runs(name):
    """100 steps from the same start on the same batches: parameters stay together within 1e-4, losses within 1e-4."""
    pair = PAIRS[name](7)
    trainer, mine = Trainer(pair.loss, optimiser=AdamW(1e-3, decay=0.01)), tensors(pair.parameters)
    optimiser = torch.optim.AdamW(mine, lr=1e-3, weight_decay=0.01)
    batches = [pair.batch() for _ in range(5)]
    for step in range(100):
        x, y = batches[step % 5]
        optimiser.zero_grad()
        loss = pair.theirs(mine, torch.tensor(x), torch.tensor(y))
        loss.backward()
        optimiser.step()
        assert trainer.step({pair.x: x, pair.y: y}) == pytest.approx(loss.item(), abs=1e-4)
    for w, t in zip(pair.parameters, mine):
        assert np.abs(w.numpy() - t.detach().numpy()).max() < 1e-4


@pytest.mark.parametrize("k", [1, 2])
def test_balance_losses(k):
    """`transformers`' load-balancing loss sums its shares to k, ours to 1; the z-loss is the mean square of PyTorch's logsumexp."""
    from workbench.moe import balance

    rng = np.random.default_rng(k)
    with Context() as ctx:
        router = moe.Router(6, k)
        r = moe.build_router(ctx.from_numpy(rng.standard_normal((50, 8)).astype("f4")), ctx.from_numpy(rng.standard_normal((6, 8)).astype("f4")), router)
        loss, z = balance.load_balancing_loss(r, router), balance.z_loss(r.logits)
        compute(build(loss, z, r.logits))
        logits = torch.tensor(r.logits.numpy().copy())
        assert z.numpy().item() == pytest.approx(logits.logsumexp(-1).square().mean().item(), rel=1e-5)
        transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[train]'")
        module = __import__("transformers.models.mixtral.modeling_mixtral", fromlist=["load_balancing_loss_func"])
        assert transformers and module.load_balancing_loss_func((logits,), 6, k).item() == pytest.approx(k * loss.numpy().item(), rel=1e-5)
