"""Very small models with random f32 weights, as files in memory: whole ones, and ones with something wrong."""
from __future__ import annotations

import numpy as np

from tests.models import craft
from workbench.models import Model

SHAPE = {"context_length": 256, "embedding_length": 32, "block_count": 2, "attention.head_count": 4, "attention.head_count_kv": 2,
         "feed_forward_length": 48, "expert_count": 4, "expert_used_count": 2}
DEEPSEEK = {"leading_dense_block_count": 1, "expert_feed_forward_length": 24, "expert_shared_count": 1}
N_VOCAB = 40


def small_model(arch="llama", tied=False, change=None, tensors=None, **numbers):
    """An open model. change: keys to replace (None drops one); tensors: name -> ne to add or replace (None drops one)."""
    return Model(craft.parsed(small_file(arch, tied, change, tensors, **numbers)))


def small_file(arch="llama", tied=False, change=None, tensors=None, **numbers):
    n = {**SHAPE, **(DEEPSEEK if arch == "deepseek" else {}), **numbers}
    keys = {"general.architecture": (craft.STR, arch)} | {f"{arch}.{k}": (craft.U32, v) for k, v in n.items()}
    keys[f"{arch}.attention.layer_norm_rms_epsilon"] = (craft.F32, 1e-5)
    keys |= change or {}
    shapes = {name: ne for name, ne in (expected(arch, n, tied) | (tensors or {})).items() if ne}
    rng = np.random.default_rng(7)
    infos, data = [], b""
    for name, ne in shapes.items():
        values = rng.standard_normal(ne[::-1]) * (1 if len(ne) == 1 else ne[0] ** -0.5) + (len(ne) == 1)
        infos.append(craft.tensor(name, ne, 0, len(data)))
        data += values.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    return craft.gguf([craft.key(k, *v) for k, v in keys.items() if v], infos, data)


def expected(arch, n, tied):
    d, heads, kv, f, e = n["embedding_length"], n["attention.head_count"], n["attention.head_count_kv"], n["feed_forward_length"], n["expert_count"]
    out = {"token_embd.weight": (d, N_VOCAB), "output_norm.weight": (d,)} | ({} if tied else {"output.weight": (d, N_VOCAB)})
    for i in range(n["block_count"]):
        out |= {f"blk.{i}.{k}.weight": ne for k, ne in {
            "attn_norm": (d,), "ffn_norm": (d,), "attn_q": (d, d), "attn_k": (d, d // heads * kv), "attn_v": (d, d // heads * kv),
            "attn_output": (d, d)}.items()}
        experts = e and i >= n.get("leading_dense_block_count", 0)
        width = n.get("expert_feed_forward_length", f) if experts else f
        tail, suffix = ((e,), "_exps") if experts else ((), "")
        out |= {f"blk.{i}.ffn_gate{suffix}.weight": (d, width, *tail), f"blk.{i}.ffn_up{suffix}.weight": (d, width, *tail),
                f"blk.{i}.ffn_down{suffix}.weight": (width, d, *tail)}
        if experts:
            out[f"blk.{i}.ffn_gate_inp.weight"] = (d, e)
            if shared := n.get("expert_shared_count", 0):
                out |= {f"blk.{i}.ffn_gate_shexp.weight": (d, width * shared), f"blk.{i}.ffn_up_shexp.weight": (d, width * shared),
                        f"blk.{i}.ffn_down_shexp.weight": (width * shared, d)}
    return out
