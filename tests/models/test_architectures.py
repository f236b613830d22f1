"""Every architecture: the graph and the logits of small random models are those of real llama.cpp, as recorded and, where it is
installed, as it computes them now (see architectures.py)."""

import importlib.util

import numpy as np
import pytest

from tests.models.architectures import MODELS, STEPS, TOKENS, record, stored, write
from tests.parity import graph
from workbench import Scheduler, Session, load, place_weights
from workbench.devices.simulated import simulated_machine
from workbench.errors import ModelError
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


def test_routes_are_recorded_and_their_weights_sum_to_what_the_router_declares(model):
    with Session(model, n_ctx=256, recording=True) as session:
        session.decode(TOKENS)
        routes, hp = session.routes, model.hparams
    assert routes.experts.shape == (len(hp.moe_layers), len(TOKENS), hp.n_expert_used)
    routes.require_weight_sum(hp.router)


@pytest.mark.parametrize(("name", "change", "says"), [
    ("deepseek-v3", {"attention_key_length_mla": None}, "convert the model anew"),
    ("deepseek-v3", {"attention_key_length": 24}, "20: kv_lora_rank and rope.dimension_count together"),
    ("deepseek-v3", {"attention_head_count_kv": 2}, "1: compressed attention"),
    ("deepseek-v3", {"rope_dimension_count": 24}, "less than attention.key_length_mla"),
    ("deepseek-v3", {"expert_gating_func": 3}, r"1 \(softmax\) or 2 \(sigmoid\)"),
    ("deepseek-v3", {"expert_group_count": 3}, "groups of equal size"),
    ("deepseek-v2", {"rope_scaling_type": "longrope"}, "LongRoPE has no graph builder"),
    ("gpt-oss", {"attention_value_length": 16}, "24, the width of a head"),
    ("gpt-oss", {"attention_sliding_window": None}, "gpt-oss.attention.sliding_window"),
    ("gpt-oss", {"expert_feed_forward_length": 12}, r"ffn_gate_exps.bias is \[24, 6\] instead of \[12, 6\]"),
    ("olmoe", {"attention_head_count_kv": 2}, r"attn_k_norm.weight is \[64\] instead of \[32\]"),
    ("qwen3moe", {"expert_used_count": 7}, "expert_used_count"),
], ids=str)  # fmt: skip
def test_a_header_that_does_not_fit_is_refused_by_name(tmp_path, name, change, says):
    with pytest.raises(ModelError, match=says):
        load(write(name, tmp_path / "wrong.gguf", **change))


@pytest.mark.skipif(not LLAMA_CPP, reason="the optional llama-cpp-python is not installed")
def test_llama_cpp_computes_the_same_now(model):
    document, logits = record(name(model))
    assert graph.differences(document, graph.rebuilt(model, document)) == []
    agrees(decoded(model), logits)
