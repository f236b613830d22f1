"""Totals of published models, computed from shapes alone, against the modules of `transformers`: every parameter, without one byte of it."""

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
pytestmark = pytest.mark.peers
torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[train]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[train]'")

from workbench.moe.configs import MODELS, model  # noqa: E402

MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
CLASSES = {
    "Mixtral-8x7B": ("Mixtral", {}),
    "Mixtral-8x22B": ("Mixtral", {}),
    "DeepSeek-V2-Lite": ("DeepseekV2", MLA | {"q_lora_rank": None, "n_shared_experts": 2}),
    "DeepSeek-V2": ("DeepseekV2", MLA | {"q_lora_rank": 1536, "n_shared_experts": 2, "n_group": 8, "topk_group": 3,
                                         "topk_method": "group_limited_greedy"}),
    "DeepSeek-V3": ("DeepseekV3", MLA | {"q_lora_rank": 1536, "n_shared_experts": 1}),
    "Qwen1.5-MoE-A2.7B": ("Qwen2Moe", {}),
    "Qwen2-57B-A14B": ("Qwen2Moe", {}),
    "Qwen3-30B-A3B": ("Qwen3Moe", {}),
    "OLMoE-1B-7B": ("Olmoe", {}),
    "Phi-3.5-MoE": ("Phimoe", {"attention_bias": True, "lm_head_bias": True}),
    "gpt-oss-20b": ("GptOss", {}),
    "gpt-oss-120b": ("GptOss", {}),
    "Llama-4-Scout": ("Llama4", {}),
} | {f"Switch-base-{n}": ("SwitchTransformers", {"d_ff": 3072, "num_sparse_encoder_layers": 6, "num_sparse_decoder_layers": 6})
     for n in (32, 64, 128)}  # fmt: skip
WITHOUT_A_MODULE = {"DeepSeekMoE-16B", "GShard-600B", "LLaMA-MoE-v1-3.5B"}


def test_every_row_has_a_judge_or_none_exists():
    assert set(CLASSES) | WITHOUT_A_MODULE == {m.name for m in MODELS}


@pytest.mark.parametrize("name", CLASSES)
def test_the_total_is_theirs_to_the_last_parameter(name):
    family, more = CLASSES[name]
    row = model(name)
    e, k = row.router.n_expert, row.router.n_used
    numbers = {"vocab_size": row.n_vocab, "hidden_size": row.d, "d_model": row.d, "num_hidden_layers": row.n_moe + row.n_dense,
               "num_attention_heads": row.attention.heads, "num_key_value_heads": row.attention.kv, "head_dim": row.attention.head,
               "moe_intermediate_size": row.f, "intermediate_size": row.f_dense or row.f, "first_k_dense_replace": row.n_dense,
               "shared_expert_intermediate_size": row.f_shared, "num_experts": e, "num_local_experts": e, "n_routed_experts": e,
               "num_experts_per_tok": k, "tie_word_embeddings": row.tied}  # fmt: skip
    if family == "SwitchTransformers":
        numbers = {n: numbers[n] for n in ("vocab_size", "d_model", "num_experts")}
    config = getattr(transformers, {"Llama4": "Llama4Text"}.get(family, family) + "Config")(**numbers | more)
    made = family + ("ForConditionalGeneration" if family == "SwitchTransformers" else "ForCausalLM")
    with torch.device("meta"):
        theirs = sum(p.numel() for p in getattr(transformers, made)(config).parameters())
    assert row.total == theirs
