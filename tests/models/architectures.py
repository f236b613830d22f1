"""Small random models of every architecture, written with the `gguf` package, and what real llama.cpp makes of them.

    python -m tests.models.architectures tests/data/architectures

records graphs and logits anew; it needs the optional `llama-cpp-python` (0.3.36 made the stored ones), `gguf` and NumPy.
A recording is a graph in the format of data/goldens/graphs/SCHEMA.md without fingerprints, packed, with logits of the prompt and of two steps.
"""

from __future__ import annotations

import ctypes
import gzip
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

N_VOCAB, D, HEADS, KV, LAYERS = 48, 64, 4, 2, 2
TOKENS, STEPS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35], [8, 9]
DATA = Path(__file__).parents[1] / "data" / "architectures"

COMMON = {"context_length": 256, "embedding_length": D, "block_count": LAYERS, "attention.head_count": HEADS,
          "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": N_VOCAB, "rope.freq_base": 5000.0}  # fmt: skip
WHOLE = {"attention.head_count_kv": KV, "feed_forward_length": 32, "expert_count": 6, "expert_used_count": 2}
MLA = {"attention.head_count_kv": 1, "attention.kv_lora_rank": 12, "rope.dimension_count": 8, "attention.key_length": 20,
       "attention.value_length": 12, "attention.key_length_mla": 24, "attention.value_length_mla": 10, "feed_forward_length": 40,
       "expert_feed_forward_length": 16, "leading_dense_block_count": 1, "expert_shared_count": 2}  # fmt: skip
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}

# name -> architecture, keys of its header
MODELS = {
    "qwen2moe": ("qwen2moe", WHOLE | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40}),
    "qwen3moe": ("qwen3moe", WHOLE | {"expert_feed_forward_length": 24, "attention.key_length": 24, "attention.value_length": 24}),
    "olmoe": ("olmoe", WHOLE | {"attention.head_count_kv": HEADS}),
    "gpt-oss": ("gpt-oss", WHOLE | YARN | {"expert_feed_forward_length": 24, "attention.key_length": 24, "attention.value_length": 24,
                                           "attention.sliding_window": 4}),
    "deepseek-v2": ("deepseek2", MLA | YARN | {"attention.q_lora_rank": 20, "expert_count": 6, "expert_used_count": 3, "expert_weights_scale": 16.0,
                                               "rope.scaling.yarn_log_multiplier": 0.0707}),
    "deepseek-v3": ("deepseek2", MLA | {"attention.q_lora_rank": 20, "expert_count": 8, "expert_used_count": 3, "expert_group_count": 4,
                                        "expert_group_used_count": 2, "expert_gating_func": 2, "expert_weights_norm": True,
                                        "expert_weights_scale": 2.5}),
    "deepseek-v2-lite": ("deepseek2", MLA | {"expert_count": 6, "expert_used_count": 2, "block_count": 26}),
    "mixtral-yarn": ("llama", WHOLE | YARN),
}  # fmt: skip
BIASES = {"qwen2moe": ("attn_q", "attn_k", "attn_v"), "gpt-oss": ("attn_q", "attn_k", "attn_v"), "deepseek-v3": ("exp_probs_b",)}
"""Biases that a file may hold and these do."""


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Every tensor with its extents, fastest first: written down here by hand, not taken from the workbench."""
    arch, keys = MODELS[name]
    n = COMMON | keys
    e, f, layers = n["expert_count"], n.get("expert_feed_forward_length", n["feed_forward_length"]), n["block_count"]
    head = n.get("attention.key_length", D // HEADS)
    q, kv = head * HEADS, head * n["attention.head_count_kv"]
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (D, N_VOCAB), "output_norm.weight": (D,), "output.weight": (D, N_VOCAB)}
    for i in range(layers):
        post = "post_attention_norm" if arch == "gpt-oss" else "ffn_norm"
        layer: dict[str, tuple[int, ...]] = {"attn_norm": (D,), post: (D,)}
        if arch == "deepseek2":
            rank, rot, k, v = (n[x] for x in ("attention.kv_lora_rank", "rope.dimension_count", "attention.key_length_mla", "attention.value_length_mla"))
            layer |= {"attn_kv_a_mqa": (D, rank + rot), "attn_kv_a_norm": (rank,), "attn_k_b": (k - rot, rank, HEADS), "attn_v_b": (rank, v, HEADS),
                      "attn_output": (HEADS * v, D)}  # fmt: skip
            r = n.get("attention.q_lora_rank")
            layer |= {"attn_q_a": (D, r), "attn_q_a_norm": (r,), "attn_q_b": (r, HEADS * k)} if r else {"attn_q": (D, HEADS * k)}
        else:
            layer |= {"attn_q": (D, q), "attn_k": (D, kv), "attn_v": (D, kv), "attn_output": (q, D)}
        if arch in ("qwen3moe", "olmoe"):
            whole = arch == "olmoe"
            layer |= {"attn_q_norm": (q if whole else head,), "attn_k_norm": (kv if whole else head,)}
        if i < n.get("leading_dense_block_count", 0):
            layer |= {"ffn_gate": (D, n["feed_forward_length"]), "ffn_up": (D, n["feed_forward_length"]), "ffn_down": (n["feed_forward_length"], D)}
        else:
            layer |= {"ffn_gate_inp": (D, e), "ffn_gate_exps": (D, f, e), "ffn_up_exps": (D, f, e), "ffn_down_exps": (f, D, e)}
            shared = n.get("expert_shared_feed_forward_length", f * n.get("expert_shared_count", 0))
            if shared:
                layer |= {"ffn_gate_shexp": (D, shared), "ffn_up_shexp": (D, shared), "ffn_down_shexp": (shared, D)}
            if arch == "qwen2moe":
                layer["ffn_gate_inp_shexp"] = (D,)
        biases = {b: {"attn_q": (q,), "attn_k": (kv,), "attn_v": (kv,), "exp_probs_b": (e,)}[b] for b in BIASES.get(name, ())}
        if arch == "gpt-oss":
            layer["attn_sinks"] = (HEADS,)
            biases |= {"attn_output": (D,), "ffn_gate_inp": (e,), "ffn_gate_exps": (f, e), "ffn_up_exps": (f, e), "ffn_down_exps": (D, e)}
        if i < n.get("leading_dense_block_count", 0):
            biases.pop("exp_probs_b", None)
        out |= {f"blk.{i}.{t}.weight": ne for t, ne in layer.items()} | {f"blk.{i}.{t}.bias": ne for t, ne in biases.items()}
    return out


def write(name: str, path: Path, **change: object) -> Path:
    """The model as a file: the same bytes on every machine. change: keys to replace (None drops one), with _ for dots."""
    import gguf

    arch, keys = MODELS[name]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"small {name}")
    for key, value in (COMMON | keys).items():
        value = change.get(key.replace(".", "_"), value)
        if value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{arch}.{key}", value)
    writer.add_tokenizer_model("none")
    rng = np.random.default_rng(1)
    for tensor, ne in shapes(name).items():
        x = rng.integers(-1000, 1001, ne[::-1]) / 1000  # exactly rounded arithmetic: no library's idea of a normal distribution
        norm, bias = "norm" in tensor, tensor.endswith("bias") or "sinks" in tensor
        scale = 0.2 if norm else 0.5 if bias else 2 * ne[0] ** -0.5
        writer.add_tensor(tensor, (x * scale + norm).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- real llama.cpp


def record(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """The graph of the prompt, and logits: of the prompt, and of each step after it. Raises ImportError without llama-cpp-python."""
    tool = _recorder()
    with tempfile.TemporaryDirectory() as folder:
        r = tool.Recorder(write(name, Path(folder) / f"{name}.gguf"), False)
        logits = {"prompt": r.decode(TOKENS, 0, "structure", "all")}
        document = tool.document(r, f"{name}.gguf", "prefill", TOKENS, 0, "all", logits["prompt"])
        logits["steps"] = np.concatenate([r.decode([t], len(TOKENS) + i, None) for i, t in enumerate(STEPS)])
        r.close()
    return document, logits


def _recorder():
    """The tool that recorded the graphs of the shipped models, with the ops and masks that they do not have."""
    path = DATA.parent / "goldens" / "graphs" / "tools" / "record.py"
    spec = importlib.util.spec_from_file_location("record", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    plain, plain_values = tool.params, tool.leaf_values

    def params(op, p):
        p = list(p)
        if op == "GLU" and tool.G.ggml_glu_op_name(p[0]).decode() == "SWIGLU_OAI":
            return plain(op, [*p[:2], *[0] * 14]) | {"alpha": tool.f32(p[2]), "limit": tool.f32(p[3])}
        if op == "UNARY":
            tool.G.ggml_unary_op_name.restype = ctypes.c_char_p
            return {"unary": tool.G.ggml_unary_op_name(p[0]).decode()}
        if op == "FILL":
            return {"value": tool.f32(p[0])}
        if op == "CONCAT":
            return {"dim": p[0]}
        return plain(op, p)

    def leaf_values(t, name):
        if name != "attn_inp_kq_mask":
            return plain_values(t, name)
        return {"seen": [[int(i) for i in np.flatnonzero(row == 0)[[0, -1]]] for row in tool.array(t)[0, 0]]}

    tool.params, tool.leaf_values = params, leaf_values
    return tool


def stored(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """What was recorded."""
    document = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
    with np.load(DATA / f"{name}.npz") as file:
        return document, dict(file)


def main(folder: Path) -> None:
    for name in MODELS:
        document, logits = record(name)
        text = json.dumps(document, separators=(",", ":")).encode()
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(text, mtime=0))
        np.savez_compressed(folder / f"{name}.npz", **logits)
        print(name, len(document["nodes"]), "nodes,", sum(p.stat().st_size for p in folder.glob(f"{name}.[jn]*")), "bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
