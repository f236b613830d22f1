"""Hyper-parameters of a model, read from the header of its file and checked against the tensors it holds.

Files come from strangers: each value has a range, and every tensor that is missing, unknown or of another shape is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from workbench.errors import ModelError, shown
from workbench.models.gguf import GGUFFile
from workbench.moe import Router

ARCHITECTURES = ("llama", "deepseek")
"""Architectures there is a graph builder for: Llama and Mixtral share one name, DeepSeek is DeepSeekMoE v1."""

MAX_LAYERS, MAX_EXPERTS = 512, 512  # as in llama.cpp
MAX_NAMED = 60


@dataclass(frozen=True)
class HParams:
    """The numbers that shape a model (`llama_hparams`).

    n_ff: hidden size of dense layers; n_ff_exp: of one expert; n_layer_dense: leading layers without experts (DeepSeek).
    """

    arch: str
    n_vocab: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_rot: int
    n_ff: int
    rms_eps: float
    rope_freq_base: float = 10000.0
    rope_freq_scale: float = 1.0
    n_ctx_orig: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_expert_shared: int = 0
    expert_weights_scale: float = 0.0
    n_layer_dense: int = 0

    @property
    def n_embd_head(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def n_embd_kv(self) -> int:
        """Width of a row of the K or V cache (`n_embd_k_gqa`): all key heads side by side."""
        return self.n_embd_head * self.n_head_kv

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(range(self.n_layer_dense, self.n_layer)) if self.n_expert else ()

    @property
    def router(self) -> Router:
        """How tokens choose experts: Mixtral divides the weights by their sum, DeepSeek v1 uses them as they are."""
        return Router(self.n_expert, self.n_expert_used, "softmax", self.arch == "llama", self.expert_weights_scale)

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a file with these numbers must hold: name -> extents, fastest first."""
        d, kv = self.n_embd, self.n_embd_kv
        want: dict[str, tuple[int, ...]] = {"token_embd.weight": (d, self.n_vocab), "output_norm.weight": (d,)}
        for i in range(self.n_layer):
            b = f"blk.{i}."
            want |= {b + "attn_norm.weight": (d,), b + "attn_q.weight": (d, d), b + "attn_k.weight": (d, kv),
                     b + "attn_v.weight": (d, kv), b + "attn_output.weight": (d, d), b + "ffn_norm.weight": (d,)}  # fmt: skip
            if i not in self.moe_layers:
                want |= _feed_forward(b, "", d, self.n_ff)
                continue
            e, f = self.n_expert, self.n_ff_exp
            want[b + "ffn_gate_inp.weight"] = (d, e)
            want |= _feed_forward(b, "_exps", d, f, e)
            if self.n_expert_shared:
                want |= _feed_forward(b, "_shexp", d, f * self.n_expert_shared)
        return want

    def optional_tensors(self) -> dict[str, tuple[int, ...]]:
        """What a file may hold besides: an output matrix (else the embedding serves), frequency factors of RoPE."""
        return {"output.weight": (self.n_embd, self.n_vocab), "rope_freqs.weight": (self.n_rot // 2,)}


def _feed_forward(prefix: str, suffix: str, d: int, f: int, *experts: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}ffn_gate{suffix}.weight": (d, f, *experts), f"{prefix}ffn_up{suffix}.weight": (d, f, *experts),
            f"{prefix}ffn_down{suffix}.weight": (f, d, *experts)}  # fmt: skip


def read_hparams(file: GGUFFile) -> HParams:
    """The hyper-parameters of an open file. Raises ModelError naming key and value where one is missing or absurd."""
    if file.architecture not in ARCHITECTURES:
        raise ModelError(f"key 'general.architecture' of {shown(file.path.name)} is {shown(file.architecture)!r}",
                         f"one of {', '.join(ARCHITECTURES)}: these have a graph builder", "`info` shows what is in the file")  # fmt: skip
    deepseek = file.architecture == "deepseek"
    n_embd, n_head = _whole(file, "embedding_length", 2**20), _whole(file, "attention.head_count", 2**12)
    n_head_kv = _whole(file, "attention.head_count_kv", n_head, n_head)
    _require(file, "attention.head_count", n_head, n_embd % n_head == 0 and n_embd // n_head % 2 == 0, f"an even share of {n_embd}")
    _require(file, "attention.head_count_kv", n_head_kv, n_head % n_head_kv == 0, f"a divisor of {n_head} heads")
    n_layer = _whole(file, "block_count", MAX_LAYERS)
    n_expert = _whole(file, "expert_count", MAX_EXPERTS, 0, least=0)
    n_ctx = _whole(file, "context_length", 2**28)
    n_ff = _whole(file, "feed_forward_length", 2**22)
    head = n_embd // n_head
    hp = HParams(
        arch=file.architecture, n_vocab=_vocab(file), n_ctx_train=n_ctx, n_embd=n_embd, n_layer=n_layer, n_head=n_head, n_head_kv=n_head_kv,
        n_rot=_whole(file, "rope.dimension_count", head, head), n_ff=n_ff,
        rms_eps=_number(file, "attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope_freq_base=_number(file, "rope.freq_base", 1.0, 1e12, 10000.0), rope_freq_scale=_rope_scale(file),
        n_ctx_orig=_whole(file, "rope.scaling.original_context_length", 2**28, n_ctx),
        n_expert=n_expert, n_expert_used=_whole(file, "expert_used_count", max(n_expert, 1)) if n_expert else 0,
        n_ff_exp=_whole(file, "expert_feed_forward_length", 2**22) if deepseek and n_expert else n_ff,
        n_expert_shared=_whole(file, "expert_shared_count", MAX_EXPERTS, 0, least=0) if deepseek else 0,
        expert_weights_scale=_number(file, "expert_weights_scale", 0.0, 1e6, 0.0),
        n_layer_dense=_whole(file, "leading_dense_block_count", n_layer, 0, least=0) if deepseek else 0,
    )  # fmt: skip
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        given = _whole(file, key, 2**20, head)
        _require(file, key, given, given == head, f"{head}, the width of a head: other widths have no graph builder here")
    return hp


def require_tensors(file: GGUFFile, hp: HParams) -> None:
    """Raise ModelError naming every tensor that is missing, unknown, or of another shape than `hp` asks for."""
    want, have = hp.expected_tensors(), file.tensors
    allowed = want | hp.optional_tensors()
    problems = [f"{shown(name)} is missing ({_dims(ne)})" for name, ne in want.items() if name not in have]
    for name, info in have.items():
        if name not in allowed:
            problems.append(f"{shown(name)} is unknown in a {hp.arch} model of {hp.n_layer} layers")
        elif info.ne != _full(allowed[name]):
            problems.append(f"{shown(name)} is {_dims(info.ne)} instead of {_dims(allowed[name])}")
        elif len(allowed[name]) == 1 and info.dtype.name != "f32":
            problems.append(f"{shown(name)} is stored as {info.dtype} instead of f32")
    if problems:
        more = [f"… and {len(problems) - MAX_NAMED} more"] if len(problems) > MAX_NAMED else []
        listed = "\n  - ".join(problems[:MAX_NAMED] + more)
        found = f"{len(problems)} tensors of {shown(file.path.name)} do not fit its hyper-parameters:\n  - {listed}"
        raise ModelError(found, f"the {len(want)} tensors of a {hp.arch} model",
                         "`info` lists them; convert an old file anew: it may hold experts one by one")  # fmt: skip


def _vocab(file: GGUFFile) -> int:
    """The vocabulary's size: the rows of the embedding; a key that says otherwise is an error."""
    info = file.tensors.get("token_embd.weight")
    if info is None:
        raise ModelError(f"{shown(file.path.name)} has no tensor 'token_embd.weight'", "an embedding for every token")
    n = _whole(file, "vocab_size", 2**24, info.ne[1])
    _require(file, "vocab_size", n, n == info.ne[1], f"{info.ne[1]}, the rows of token_embd.weight")
    return n


def _rope_scale(file: GGUFFile) -> float:
    kind = file.hparam("rope.scaling.type", "none", str)
    _require(file, "rope.scaling.type", kind, kind in ("none", "linear"), "none or linear: YaRN and LongRoPE have no graph builder here")
    factor = _number(file, "rope.scaling.factor", 0.0, 1e6, 0.0)
    return 1.0 / factor if kind == "linear" and factor > 0 else 1.0


def _whole(file: GGUFFile, key: str, most: int, default: int | None = None, least: int = 1) -> int:
    value = file.hparam(key) if default is None else file.hparam(key, default)
    _require(file, key, value, least <= value <= most, f"a whole number from {least:,} to {most:,}")
    return value


def _number(file: GGUFFile, key: str, least: float, most: float, default: float | None = None) -> float:
    value = file.hparam(key, kind=float) if default is None else file.hparam(key, default, float)
    _require(file, key, value, math.isfinite(value) and least <= value <= most, f"a number from {least:g} to {most:g}")
    return value


def _require(file: GGUFFile, key: str, value: Any, ok: bool, expected: str) -> None:
    if not ok:
        raise ModelError(f"key '{file.architecture}.{key}' of {shown(file.path.name)} is {shown(value)}", expected,
                         "the file is damaged, or of a kind that is not supported")  # fmt: skip


def _full(ne: tuple[int, ...]) -> tuple[int, ...]:
    return (*ne, *(1,) * (4 - len(ne)))


def _dims(ne: tuple[int, ...]) -> str:
    kept = max((i + 1 for i, n in enumerate(ne) if n != 1), default=1)
    return "[" + ", ".join(map(str, ne[:kept])) + "]"
