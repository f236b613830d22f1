"""Every architecture: the graph and the logits of small random models are those of real llama.cpp, as recorded and, where it is
installed, as it computes them now (see architectures.py)."""

import importlib.util

import numpy as np
import pytest

from tests.models.architectures import MODELS, STEPS, TOKENS, record, stored, write
from tests.parity import graph
from workbench import Scheduler, Session, load, place_weights
from workbench.devices.simulated import simulated_machine
from workbench.models.hparams import ARCHITECTURES

LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    with load(write(request.param, tmp_path_factory.mktemp("models") / f"{request.param}.gguf")) as model:
        yield model


def name(model):
    return model.path.stem


def decoded(model, **how):
    with Session(model, n_ctx=256, **how) as session:
        return session.decode(TOKENS, outputs="all"), np.stack([session.decode([t]) for t in STEPS])


def agrees(logits, want):
    for got, expected in zip(logits, (want["prompt"], want["steps"]), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_every_architecture_is_there():
    assert {arch for arch, _ in MODELS.values()} == ARCHITECTURES.keys() - {"deepseek"}, "deepseek: tiny-deepseek-f16"


def test_the_graph_is_llama_cpps(model):
    document, _ = stored(name(model))
    assert graph.differences(document, graph.rebuilt(model, document)) == []


def test_the_logits_are_llama_cpps(model):
    _, logits = stored(name(model))
    assert logits["prompt"].std() > 0.1
    agrees(decoded(model), logits)


def test_devices_do_not_change_a_bit(model):
    want = decoded(model)
    gpu, cpu = simulated_machine(1)
    with place_weights(model, [gpu, cpu], 1) as placed:
        got = decoded(placed, scheduler=Scheduler([gpu, cpu]))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.skipif(not LLAMA_CPP, reason="the optional llama-cpp-python is not installed")
def test_llama_cpp_computes_the_same_now(model):
    document, logits = record(name(model))
    assert graph.differences(document, graph.rebuilt(model, document)) == []
    agrees(decoded(model), logits)
