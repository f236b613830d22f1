"""Routers and expert layers against the modules of `transformers`, built from small configurations with random weights: no download.

Runs in the environment of `.ci/run`'s job train (`pytest -m peers tests/peers`).
"""

import importlib
import os

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[train]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[train]'")

import workbench as wb  # noqa: E402
from workbench.cgraph import build  # noqa: E402
from workbench.devices import CpuBackend  # noqa: E402
from workbench.moe import ExpertWeights, FeedForward, build_experts, build_router, presets, reference  # noqa: E402

D, F, TOKENS = 32, 48, 40
SMALL = {"hidden_size": D, "intermediate_size": F, "moe_intermediate_size": F, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "vocab_size": 16}  # fmt: skip


class Case:
    """One model: its module in `transformers`, our router, and the numbers of a small configuration."""

    def __init__(self, package, family, module, router, arguments, n_expert, k):
        self.package, self.family, self.module, self.router = package, family, module, router
        self.arguments = SMALL | {"num_experts": n_expert, "num_local_experts": n_expert, "n_routed_experts": n_expert,
                                  "num_experts_per_tok": k} | arguments  # fmt: skip

    def make(self, seed):
        """The module with random weights: of a size at which routers decide clearly and results are about 1."""
        config = getattr(transformers, self.family + "Config")(**self.arguments)
        torch.manual_seed(seed)
        made = getattr(importlib.import_module(f"transformers.models.{self.package}.modeling_{self.package}"), self.module)(config).eval()
        with torch.no_grad():
            for name, p in [*made.named_parameters(), *made.named_buffers()]:
                p.normal_(0, 1.0 if name.endswith(("bias", "correction_bias")) else p.shape[-1] ** -0.5)
        return made


def weights_of(module, leaf):
    """Our `ExpertWeights` over the numbers of one of their modules."""
    state = {k: v.detach().numpy() for k, v in module.state_dict().items()}
    if "experts.gate_up_proj_bias" in state:                       # gpt-oss: transposed, gate and up interleaved
        both, bias = state["experts.gate_up_proj"].transpose(0, 2, 1), state["experts.gate_up_proj_bias"]
        biases = (bias[:, ::2], bias[:, 1::2], state["experts.down_proj_bias"])
        return ExpertWeights(leaf(both[:, ::2]), leaf(both[:, 1::2]), leaf(state["experts.down_proj"].transpose(0, 2, 1)),
                             biases=tuple(map(leaf, biases)), activation="swiglu_oai")  # fmt: skip
    if "experts.expert_0.wi.weight" in state:                      # Switch: two matrices, expert by expert
        n = module.experts.num_experts
        up, down = (np.stack([state[f"experts.expert_{e}.{w}.weight"] for e in range(n)]) for w in ("wi", "wo"))
        return ExpertWeights(None, leaf(up), leaf(down), activation="relu")
    both, down = state["experts.gate_up_proj"], state["experts.down_proj"]
    shared = next((k.split(".")[0] for k in state if k.startswith("shared_expert") and "proj" in k), None)
    common = FeedForward(*(leaf(state[f"{shared}.{p}_proj.weight"]) for p in ("gate", "up", "down"))) if shared else None
    share = leaf(state["shared_expert_gate.weight"][0]) if "shared_expert_gate.weight" in state else None
    return ExpertWeights(leaf(both[:, :F]), leaf(both[:, F:]), leaf(down), common, share)


CASES = {
    "Mixtral": Case("mixtral", "Mixtral", "MixtralSparseMoeBlock", presets.mixtral(8, 2), {}, 8, 2),
    "Qwen2-MoE": Case("qwen2_moe", "Qwen2Moe", "Qwen2MoeSparseMoeBlock", presets.qwen2_moe(10, 4), {"shared_expert_intermediate_size": 80},
                      10, 4),
    "Qwen3-MoE": Case("qwen3_moe", "Qwen3Moe", "Qwen3MoeSparseMoeBlock", presets.qwen3_moe(16, 4), {"norm_topk_prob": True}, 16, 4),
    "OLMoE": Case("olmoe", "Olmoe", "OlmoeSparseMoeBlock", presets.olmoe(16, 8), {"intermediate_size": F}, 16, 8),
    "DeepSeek-V2-Lite": Case("deepseek_v2", "DeepseekV2", "DeepseekV2Moe", presets.deepseek_moe(16, 6),
                             {"topk_method": "greedy", "routed_scaling_factor": 1.0, "n_shared_experts": 2}, 16, 6),
    "DeepSeek-V2": Case("deepseek_v2", "DeepseekV2", "DeepseekV2Moe", presets.deepseek_v2(16, 4, 8, 3, 16.0),
                        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "n_shared_experts": 2, "n_group": 8,
                         "topk_group": 3}, 16, 4),
    "DeepSeek-V3": Case("deepseek_v3", "DeepseekV3", "DeepseekV3MoE", presets.deepseek_v3(32, 8, 8, 4, 2.5),
                        {"n_shared_experts": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}, 32, 8),
    "gpt-oss": Case("gpt_oss", "GptOss", "GptOssMLP", presets.gpt_oss(12, 4), {}, 12, 4),
}  # fmt: skip


def ours(case, module, rows, router=None):
    """Result, experts and weights of our graph over the module's weights."""
    gate = getattr(module, "gate", None) or module.router
    with wb.Context(2**23) as ctx:
        leaf = lambda a: ctx.from_numpy(np.ascontiguousarray(a, np.float32))  # noqa: E731
        matrix = gate.classifier.weight if hasattr(gate, "classifier") else gate.weight
        bias = leaf(gate.bias.detach().numpy()) if getattr(gate, "bias", None) is not None else None
        selection = getattr(gate, "e_score_correction_bias", None)
        x = leaf(rows)
        routing = build_router(x, leaf(matrix.detach().numpy()), router or case.router, bias=bias,
                               selection_bias=None if selection is None else leaf(selection.numpy()))
        routing.experts.root().mark(wb.Flag.OUTPUT)
        out = build_experts(x, weights_of(module, leaf), routing)
        CpuBackend().compute(build(out, routing.weights))
        k = routing.experts.ne[0]
        return out.numpy().copy(), routing.experts.numpy().reshape(-1, k).copy(), routing.weights.numpy().reshape(-1, k).copy()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_theirs(name, seed):
    case = CASES[name]
    module = case.make(seed)
    rows = np.random.default_rng(seed).standard_normal((TOKENS, D)).astype("f4")
    with torch.no_grad():
        given = torch.from_numpy(rows)[None]
        theirs = module(given)
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs)[0].numpy()
        _, weights, experts = (getattr(module, "gate", None) or module.router)(given[0])
    out, ids, w = ours(case, module, rows)
    order, their_order = np.argsort(ids, -1), np.argsort(experts.numpy(), -1)   # theirs are unsorted in some versions
    np.testing.assert_array_equal(np.take_along_axis(ids, order, -1), np.take_along_axis(experts.numpy(), their_order, -1))
    np.testing.assert_allclose(np.take_along_axis(w, order, -1), np.take_along_axis(weights.numpy(), their_order, -1), rtol=0,
                               atol=1e-5 * max(1.0, np.abs(weights.numpy()).max()))  # fmt: skip
    assert np.abs(theirs).max() > 0.3, "a layer of zeros would agree with anything"
    assert np.abs(out - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())
    if case.router.weight_sum is not None:
        np.testing.assert_allclose(weights.numpy().sum(-1), case.router.weight_sum, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_theirs_too(name):
    case = CASES[name]
    module = case.make(7)
    gate = getattr(module, "gate", None) or module.router
    rows = np.random.default_rng(7).standard_normal((TOKENS, D)).astype("f4")
    with torch.no_grad():
        logits, weights, experts = gate(torch.from_numpy(rows))
    selection = getattr(gate, "e_score_correction_bias", None)
    ids, w = reference.route(logits.numpy(), case.router, 0.0 if selection is None else selection.numpy())
    for a, b, mine, other in zip(ids, experts.numpy(), w, weights.numpy(), strict=True):
        assert sorted(a.tolist()) == sorted(b.tolist())
        np.testing.assert_allclose(mine[np.argsort(a)], other[np.argsort(b)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capacity", [1, 3, 8, 64])
def test_switch_drops_what_theirs_drops(capacity):
    case = Case("switch_transformers", "SwitchTransformers", "SwitchTransformersSparseMLP", None,
                {"d_model": D, "d_ff": F, "d_kv": 16, "expert_capacity": capacity, "router_bias": False}, 6, 1)  # fmt: skip
    module = case.make(capacity)
    rows = np.random.default_rng(capacity).standard_normal((TOKENS, D)).astype("f4")
    router = presets.switch(6, capacity * 6 / TOKENS)
    assert router.capacity(TOKENS) == capacity
    with torch.no_grad():
        theirs = module(torch.from_numpy(rows)[None])[0].numpy()
        kept = module.router(torch.from_numpy(rows)[None])[0].sum(-1)[0].numpy()
    out, _, weights = ours(case, module, rows, router)
    np.testing.assert_array_equal(weights[:, 0] > 0, kept > 0)
    assert np.abs(out - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())
    assert (out[kept == 0] == 0).all() and (capacity < 64) == (kept.sum() < TOKENS)


def test_masking_groups_with_zero_would_choose_otherwise():
    """DeepSeek-V3 masks with -inf (its reference code, today's transformers, llama.cpp). Older transformers masked with 0, which beats a
    chosen group's expert whose score with its bias is negative; the two choices differ, and ours is that of -inf."""
    case = CASES["DeepSeek-V3"]
    module = case.make(1)
    with torch.no_grad():
        module.gate.e_score_correction_bias.sub_(3.0)              # all scores below zero: the order stays as it was
    rows = np.random.default_rng(1).standard_normal((TOKENS, D)).astype("f4")
    with torch.no_grad():
        logits, _, experts = module.gate(torch.from_numpy(rows))
    _, ids, _ = ours(case, module, rows)
    assert np.array_equal(np.sort(ids, -1), np.sort(experts.numpy(), -1))
    scores = reference.sigmoid(logits.numpy()) + module.gate.e_score_correction_bias.numpy()
    differ = 0
    for row, chosen in zip(scores, ids, strict=True):
        pairs = np.sort(row.reshape(8, 4))[:, -2:].sum(-1)
        inside = np.isin(np.arange(32) // 4, np.argsort(-pairs)[:4])
        differ += set(reference.best(np.where(inside, row, 0.0), 8).tolist()) != set(chosen.tolist())
        assert set(reference.best(np.where(inside, row, -np.inf), 8).tolist()) == set(chosen.tolist())
    assert differ == TOKENS
