"""GGUF files that are nothing but a header: tensors of any size, in a sparse file that takes no room on disk."""

from __future__ import annotations

import math
import os
from pathlib import Path

from tests.models import craft
from workbench.tensors import dtype

QWEN3_30B = {"context_length": 40960, "embedding_length": 2048, "block_count": 48, "attention.head_count": 32, "attention.head_count_kv": 4,
             "feed_forward_length": 6144, "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768,
             "attention.key_length": 128, "attention.value_length": 128}  # fmt: skip
"""Numbers of the published Qwen3-30B-A3B."""
N_VOCAB = 151936


def qwen3(path: Path, arch: str = "qwen3moe", kind: str = "q4_K", **change: int) -> Path:
    """A file of the form of Qwen3-MoE; matrices are stored as `kind`, routers and norms as f32. "_" in names of numbers means "."."""
    n = QWEN3_30B | {k.replace("__", "."): v for k, v in change.items()}
    keys = [
        craft.key("general.architecture", craft.STR, arch),
        craft.key(f"{arch}.attention.layer_norm_rms_epsilon", craft.F32, 1e-6),
    ]
    keys += [craft.key(f"{arch}.{k}", craft.U32, v) for k, v in n.items()]
    infos, end = [], 0
    for name, ne in shapes(n).items():
        t = dtype(kind if len(ne) > 1 and "gate_inp" not in name else "f32")
        infos.append(craft.tensor(name, ne, t.id, end))
        end += -(-t.row_bytes(ne[0]) * math.prod(ne[1:]) // 32) * 32
    head = craft.gguf(keys, infos)
    path.write_bytes(head)
    os.truncate(path, len(head) + end)
    return path


def shapes(n: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Every tensor with its extents, fastest first."""
    d, e, f, head = n["embedding_length"], n["expert_count"], n["expert_feed_forward_length"], n["attention.key_length"]
    q, kv = head * n["attention.head_count"], head * n["attention.head_count_kv"]
    out: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (d, N_VOCAB),
        "output_norm.weight": (d,),
        "output.weight": (d, N_VOCAB),
    }
    layer = {"attn_norm": (d,), "ffn_norm": (d,), "attn_q": (d, q), "attn_k": (d, kv), "attn_v": (d, kv), "attn_output": (q, d), "attn_q_norm": (head,),
             "attn_k_norm": (head,), "ffn_gate_inp": (d, e), "ffn_gate_exps": (d, f, e), "ffn_up_exps": (d, f, e), "ffn_down_exps": (f, d, e)}  # fmt: skip
    for i in range(n["block_count"]):
        out |= {f"blk.{i}.{name}.weight": ne for name, ne in layer.items()}
    return out
