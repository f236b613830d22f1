"""Graphs that the tests of views and widgets draw."""

from functools import cache

from workbench import models
from workbench.devices import CpuBackend
from workbench.execution import GraphRunner
from workbench.tensors import Context, Flag, ops

MODELS = ("tiny-mixtral-f16", "tiny-deepseek-f16")
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\n$x$"


@cache
def model_step(name):
    model = models.load(name)
    return models.build_step(model, models.KVCache(model.hparams, 256), n_tokens=1, n_kv=256, n_outputs=1)


def mlp(hidden_name="", no_alloc=True):
    """The seed's two-layer network with a residual: x is used twice."""
    context = Context(10**6, no_alloc=no_alloc)
    sizes = {"x": (8, 4), "w1": (8, 32), "b1": (32,), "w2": (32, 8)}
    x, w1, b1, w2 = (context.new_tensor("f32", *ne, name=name) for name, ne in sizes.items())
    x.mark(Flag.INPUT)
    with context.active():
        hidden = ops.relu(ops.add(ops.mul_mat(w1, x), b1)).named(hidden_name)
        return ops.add(ops.mul_mat(w2, hidden), x)


def planned_step(n_threads=4, n_tokens=256):
    """A step of the Mixtral large enough that nodes are cut, its memory and plan."""
    model = models.load(MODELS[0])
    runner = GraphRunner(CpuBackend(n_threads=n_threads))
    cache_ = models.KVCache(model.hparams, 256, runner.backend.buffer_type)
    step = models.build_step(model, cache_, n_tokens, 256, n_tokens)
    return step, cache_, runner.prepare(step.graph), runner
