"""Hyper-parameters of a model, read from the header of its file and checked against the tensors it holds.

Files come from strangers: each value has a range, and every tensor that is missing, unknown or of another shape is named.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.errors import ModelError, ParameterError, shown
from workbench.models.gguf import GGUFFile
from workbench.moe import Router


@dataclass(frozen=True)
class Architecture:
    """What the models of one architecture have in common and their files do not say: how one graph builder serves them all.

    rope_mode: 0 turns neighbours, 2 halves of a row. qk_norm: a norm of Q and K "per head" or over the "whole" row.
    normalise: the router divides its weights by their sum. gating: see `moe.Router`. free_heads: the width of a head is a
    number of its own. mla: attention over a compressed K and V (DeepSeek-V2). late_rows: rows are picked after the last layer and
    not within it. shared_gate: the shared expert is weighted. names_attention: llama.cpp names the result of the attention.
    oss: what gpt-oss alone has: sinks, biases everywhere, a sliding window in every other layer, SWIGLU_OAI.
    """

    rope_mode: int = 0
    qk_norm: str = ""
    normalise: bool = False
    gating: str = "softmax"
    free_heads: bool = False
    mla: bool = False
    late_rows: bool = False
    shared_gate: bool = False
    names_attention: bool = False
    rope_freqs: bool = False
    oss: bool = False


ARCHITECTURES = {
    "llama": Architecture(normalise=True, names_attention=True, rope_freqs=True),
    "deepseek": Architecture(rope_freqs=True),
    "qwen2moe": Architecture(rope_mode=2, shared_gate=True),
    "qwen3moe": Architecture(rope_mode=2, qk_norm="per head", normalise=True, free_heads=True),
    "olmoe": Architecture(rope_mode=2, qk_norm="whole"),
    "deepseek2": Architecture(mla=True),
    "gpt-oss": Architecture(rope_mode=2, gating="softmax_weight", free_heads=True, late_rows=True, names_attention=True, oss=True),
}
"""Architectures there is a graph builder for: Llama and Mixtral share one name, deepseek is DeepSeekMoE v1, deepseek2 V2 and V3."""

DENSE_FIRST = ("deepseek", "deepseek2")
"""Architectures whose first layers may have no experts, and whose shared expert is counted in experts."""
NO_BUILDER = "other widths have no graph builder here"
GATINGS = {1: "softmax", 2: "sigmoid"}
"""`expert_gating_func` in files of deepseek2."""
MAX_LAYERS, MAX_EXPERTS = 512, 512  # as in llama.cpp
MAX_NAMED = 60


@dataclass(frozen=True)
class HParams:
    """The numbers that shape a model (`llama_hparams`).

    n_ff: hidden size of dense layers; n_ff_exp: of one expert; n_ff_shexp: of the shared one, 0 for none; n_layer_dense: leading
    layers without experts (DeepSeek). n_embd_head_k, n_embd_head_v: width of a head of K and V as the cache keeps them. n_lora_q,
    n_lora_kv, n_embd_head_k_mla, n_embd_head_v_mla: ranks and head widths of compressed attention. window: tokens that layers with a
    sliding window see. yarn: ext_factor, attn_factor, beta_fast, beta_slow of RoPE; yarn_log_mul: see `kq_scale`.
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
    n_ff_shexp: int = 0
    expert_weights_scale: float = 0.0
    n_layer_dense: int = 0
    n_embd_head_k: int = 0
    n_embd_head_v: int = 0
    n_lora_q: int = 0
    n_lora_kv: int = 0
    n_embd_head_k_mla: int = 0
    n_embd_head_v_mla: int = 0
    gating: str = "softmax"
    normalise: bool = False
    n_groups: int = 1
    n_groups_used: int = 1
    window: int = 0
    yarn: tuple[float, float, float, float] = (0.0, 1.0, 32.0, 1.0)
    yarn_log_mul: float = 0.0

    def __post_init__(self) -> None:
        for width in ("n_embd_head_k", "n_embd_head_v"):  # where nobody says otherwise: the width shared among the heads
            if not getattr(self, width) and self.n_head:
                object.__setattr__(self, width, self.n_embd // self.n_head)

    @property
    def traits(self) -> Architecture:
        """What all models of this architecture have in common."""
        return ARCHITECTURES[self.arch]

    @property
    def n_embd_head(self) -> int:
        """Width of one attention head, before compression."""
        return self.n_embd_head_k_mla or self.n_embd_head_k

    @property
    def n_embd_kv(self) -> int:
        """Width of a row of the K cache (`n_embd_k_gqa`): all key heads side by side."""
        return self.n_embd_head_k * self.n_head_kv

    @property
    def n_embd_v(self) -> int:
        """Width of a row of the V cache (`n_embd_v_gqa`), 0 where V is a part of K."""
        return 0 if self.traits.mla else self.n_embd_head_v * self.n_head_kv

    @property
    def kq_scale(self) -> float:
        """Factor on the products of queries and keys: 1/√head; deepseek2 takes YaRN's share of it in here."""
        one = np.float32(1)
        if not self.traits.mla:
            return float(one / np.sqrt(np.float32(self.n_embd_head)))
        stretch = np.log(one / np.float32(self.rope_freq_scale))
        original = np.float32(self.yarn[1]) * (one + np.float32(0.1) * stretch)
        mscale = original * (one + np.float32(0.1) * np.float32(self.yarn_log_mul) * stretch)
        return float(mscale * mscale / np.sqrt(np.float32(self.n_embd_head)))

    def windowed(self, layer: int) -> bool:
        """Whether a layer sees the last `window` tokens only: every other one of gpt-oss, the first included."""
        return self.window > 0 and layer % 2 == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(range(self.n_layer_dense, self.n_layer)) if self.n_expert else ()

    @property
    def router(self) -> Router:
        """How tokens choose experts: Mixtral divides the weights by their sum, DeepSeek v1 uses them as they are."""
        return Router(self.n_expert, self.n_expert_used, self.gating, self.normalise, self.expert_weights_scale, self.n_groups,
                      self.n_groups_used)  # fmt: skip

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a file with these numbers must hold: name -> extents, fastest first."""
        d = self.n_embd
        want: dict[str, tuple[int, ...]] = {"token_embd.weight": (d, self.n_vocab), "output_norm.weight": (d,)}
        for i in range(self.n_layer):
            want |= {f"blk.{i}.{name}": ne for name, ne in (self._attention() | self._experts(i)).items()}
        return want

    def _attention(self) -> dict[str, tuple[int, ...]]:
        d, heads, kv, q = self.n_embd, self.n_head, self.n_embd_kv, self.n_embd_head * self.n_head
        post = "post_attention_norm" if self.traits.oss else "ffn_norm"
        want: dict[str, tuple[int, ...]] = {"attn_norm.weight": (d,), f"{post}.weight": (d,)}
        if self.traits.mla:
            rank, rows = self.n_lora_kv, self.n_embd_head_v_mla
            want |= {"attn_kv_a_mqa.weight": (d, rank + self.n_rot), "attn_kv_a_norm.weight": (rank,),
                     "attn_k_b.weight": (self.n_embd_head - self.n_rot, rank, heads), "attn_v_b.weight": (rank, rows, heads),
                     "attn_output.weight": (heads * rows, d)}  # fmt: skip
            if not self.n_lora_q:
                return want | {"attn_q.weight": (d, q)}
            rank = self.n_lora_q
            return want | {"attn_q_a.weight": (d, rank), "attn_q_a_norm.weight": (rank,), "attn_q_b.weight": (rank, q)}
        want |= {"attn_q.weight": (d, q), "attn_k.weight": (d, kv), "attn_v.weight": (d, kv), "attn_output.weight": (q, d)}
        if self.traits.qk_norm:
            whole = self.traits.qk_norm == "whole"
            want |= {"attn_q_norm.weight": (q if whole else self.n_embd_head,), "attn_k_norm.weight": (kv if whole else self.n_embd_head,)}
        return want | ({"attn_sinks.weight": (heads,), "attn_output.bias": (d,)} if self.traits.oss else {})

    def _experts(self, layer: int) -> dict[str, tuple[int, ...]]:
        d, e, f = self.n_embd, self.n_expert, self.n_ff_exp
        if layer not in self.moe_layers:
            return _feed_forward("", d, self.n_ff)
        want = {"ffn_gate_inp.weight": (d, e)} | _feed_forward("_exps", d, f, e)
        if self.n_ff_shexp:
            want |= _feed_forward("_shexp", d, self.n_ff_shexp)
        if self.traits.shared_gate:
            want["ffn_gate_inp_shexp.weight"] = (d,)
        if self.traits.oss:
            want |= {"ffn_gate_inp.bias": (e,), "ffn_gate_exps.bias": (f, e), "ffn_up_exps.bias": (f, e), "ffn_down_exps.bias": (d, e)}
        return want

    def optional_tensors(self) -> dict[str, tuple[int, ...]]:
        """What a file may hold besides: an output matrix (else the embedding serves), frequency factors of RoPE, biases."""
        out: dict[str, tuple[int, ...]] = {"output.weight": (self.n_embd, self.n_vocab)}
        if self.traits.rope_freqs:
            out["rope_freqs.weight"] = (self.n_rot // 2,)
        for i in range(self.n_layer):
            if self.traits.mla:
                out[f"blk.{i}.exp_probs_b.bias"] = (self.n_expert,)
            elif self.arch not in ("llama", "deepseek"):
                widths = {"q": self.n_embd_head * self.n_head, "k": self.n_embd_kv, "v": self.n_embd_kv}
                out |= {f"blk.{i}.attn_{what}.bias": (n,) for what, n in widths.items()}
        return out


def _feed_forward(suffix: str, d: int, f: int, *experts: int) -> dict[str, tuple[int, ...]]:
    wide = (d, f, *experts)
    return {f"ffn_gate{suffix}.weight": wide, f"ffn_up{suffix}.weight": wide, f"ffn_down{suffix}.weight": (f, d, *experts)}


def read_hparams(file: GGUFFile) -> HParams:
    """The hyper-parameters of an open file. Raises ModelError naming key and value where one is missing or absurd."""
    if file.architecture not in ARCHITECTURES:
        raise ModelError(f"key 'general.architecture' of {shown(file.path.name)} is {shown(file.architecture)!r}",
                         f"one of {', '.join(ARCHITECTURES)}: these have a graph builder", "`info` shows what is in the file")  # fmt: skip
    traits = ARCHITECTURES[file.architecture]
    n_embd, n_head = _whole(file, "embedding_length", 2**20), _whole(file, "attention.head_count", 2**12)
    n_head_kv = _whole(file, "attention.head_count_kv", n_head, n_head)
    if not (traits.free_heads or traits.mla):
        _require(file, "attention.head_count", n_head, n_embd % n_head == 0 and n_embd // n_head % 2 == 0, f"an even share of {n_embd}")
    _require(file, "attention.head_count_kv", n_head_kv, n_head % n_head_kv == 0, f"a divisor of {n_head} heads")
    n_layer = _whole(file, "block_count", MAX_LAYERS)
    n_expert = _whole(file, "expert_count", MAX_EXPERTS, 0, least=0)
    n_ctx = _whole(file, "context_length", 2**28)
    n_used = _whole(file, "expert_used_count", max(n_expert, 1)) if n_expert else 0
    n_ff = _whole(file, "feed_forward_length", 2**22)
    kind, scale = _rope_scaling(file)
    log_mul = _number(file, "rope.scaling.yarn_log_multiplier", 0.0, 1e3, 0.0) / 0.1 if traits.mla else 0.0
    hp = HParams(
        arch=file.architecture, n_vocab=_vocab(file), n_ctx_train=n_ctx, n_embd=n_embd, n_layer=n_layer, n_head=n_head,
        n_head_kv=n_head_kv, n_ff=n_ff, rms_eps=_number(file, "attention.layer_norm_rms_epsilon", 0.0, 1.0), **_heads(file, n_embd, n_head),
        rope_freq_base=_number(file, "rope.freq_base", 1.0, 1e12, 10000.0), rope_freq_scale=scale,
        n_ctx_orig=_whole(file, "rope.scaling.original_context_length", 2**28, n_ctx),
        yarn=_yarn(file, kind, scale, log_mul), yarn_log_mul=log_mul,
        n_expert=n_expert, n_expert_used=n_used, n_ff_exp=_expert_width(file, n_ff, n_used),
        n_ff_shexp=_shared_width(file, n_expert, n_ff, n_used),
        expert_weights_scale=_number(file, "expert_weights_scale", 0.0, 1e6, 0.0),
        n_layer_dense=_whole(file, "leading_dense_block_count", n_layer, 0, least=0) if file.architecture in DENSE_FIRST else 0,
        window=_whole(file, "attention.sliding_window", 2**28) if traits.oss else 0, **_routing(file, n_expert),
    )  # fmt: skip
    if n_expert:
        try:
            _ = hp.router
        except ParameterError as e:
            raise ModelError(f"the experts of {shown(file.path.name)}: {e.found}", e.expected, "the file is damaged, or altered") from None
    return hp


def _heads(file: GGUFFile, n_embd: int, n_head: int) -> dict[str, Any]:
    """Widths of heads, and how many of their elements RoPE turns."""
    traits = ARCHITECTURES[file.architecture]
    head = n_embd // n_head
    out = {f"n_embd_head_{key[0]}": _whole(file, f"attention.{key}_length", 2**20, head) for key in ("key", "value")}
    out["n_rot"] = n_rot = _whole(file, "rope.dimension_count", 2**20, out["n_embd_head_k"])
    if traits.mla:
        if file.hparam("attention.key_length_mla", 0) == 0:
            raise ModelError(f"{shown(file.path.name)} has no key 'deepseek2.attention.key_length_mla'",
                             "a file with split attn_k_b and attn_v_b",
                             "convert the model anew: files of 2024 hold one matrix instead, which has no graph builder here")  # fmt: skip
        out |= {"n_lora_q": _whole(file, "attention.q_lora_rank", 2**20, 0, least=0),
                "n_lora_kv": _whole(file, "attention.kv_lora_rank", 2**20),
                "n_embd_head_k_mla": _whole(file, "attention.key_length_mla", 2**20),
                "n_embd_head_v_mla": _whole(file, "attention.value_length_mla", 2**20)}  # fmt: skip
        k, rank = out["n_embd_head_k"], out["n_lora_kv"]
        fits = n_rot % 2 == 0 and n_rot < out["n_embd_head_k_mla"]
        _require(file, "rope.dimension_count", n_rot, fits, "even, and less than attention.key_length_mla")
        _require(file, "attention.key_length", k, k == rank + n_rot, f"{rank + n_rot}: kv_lora_rank and rope.dimension_count together")
        heads = file.hparam("attention.head_count_kv", n_head)
        _require(file, "attention.head_count_kv", heads, heads == 1, "1: compressed attention keeps one row for all heads")
        return out
    for key, given in (("attention.key_length", out["n_embd_head_k"]), ("attention.value_length", out["n_embd_head_v"])):
        want = out["n_embd_head_k"] if traits.free_heads else head
        _require(file, key, given, given == want and given % 2 == 0, f"{want}, the width of a head: {NO_BUILDER}")
    width = out["n_embd_head_k"]
    _require(file, "rope.dimension_count", n_rot, n_rot == width, f"{width}, the width of a head: {NO_BUILDER}")
    return out


def _expert_width(file: GGUFFile, n_ff: int, n_used: int) -> int:
    """Hidden size of an expert: a key of its own in newer architectures."""
    if not n_used or file.architecture in ("llama", "olmoe"):
        return n_ff
    return _whole(file, "expert_feed_forward_length", 2**22, n_ff // n_used if file.architecture.startswith("qwen") else None)


def _shared_width(file: GGUFFile, n_expert: int, n_ff: int, n_used: int) -> int:
    """Hidden size of the shared expert, 0 for none: so many experts wide, or a key of its own."""
    if not n_expert:
        return 0
    if ARCHITECTURES[file.architecture].shared_gate:
        return _whole(file, "expert_shared_feed_forward_length", 2**22, n_ff)
    if file.architecture not in DENSE_FIRST:
        return 0
    return _whole(file, "expert_shared_count", MAX_EXPERTS, 0, least=0) * _expert_width(file, n_ff, n_used)


def _routing(file: GGUFFile, n_expert: int) -> dict[str, Any]:
    """How experts are chosen; files of deepseek2 say so themselves."""
    traits = ARCHITECTURES[file.architecture]
    out: dict[str, Any] = {"gating": traits.gating, "normalise": traits.normalise}
    if traits.mla and n_expert:
        gating = _whole(file, "expert_gating_func", 9, 0, least=0) or 1
        _require(file, "expert_gating_func", gating, gating in GATINGS, "1 (softmax) or 2 (sigmoid)")
        out |= {"gating": GATINGS[gating], "normalise": file.hparam("expert_weights_norm", False, bool)}
    groups = _whole(file, "expert_group_count", MAX_EXPERTS, 0, least=0)
    if groups > 1:
        out |= {"n_groups": groups, "n_groups_used": _whole(file, "expert_group_used_count", groups)}
    return out


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


def _rope_scaling(file: GGUFFile) -> tuple[str, float]:
    """Kind of scaling, and the factor on positions."""
    kind = file.hparam("rope.scaling.type", "linear", str)
    known = kind in ("none", "linear", "yarn")
    _require(file, "rope.scaling.type", kind, known, "none, linear or yarn: LongRoPE has no graph builder here")
    factor = _number(file, "rope.scaling.factor", 0.0, 1e6, 0.0)
    return kind, 1.0 / factor if kind != "none" and factor > 0 else 1.0


def _yarn(file: GGUFFile, kind: str, scale: float, log_mul: float) -> tuple[float, float, float, float]:
    """ext_factor, attn_factor, beta_fast, beta_slow as llama.cpp hands them to RoPE, whose own stretch of magnitudes it cancels."""
    defaults = {"ext_factor": 1.0 if kind == "yarn" else 0.0, "beta_fast": 32.0, "beta_slow": 1.0}
    extent, fast, slow = (_number(file, f"rope.scaling.yarn_{key}", 0.0, 1e6, default) for key, default in defaults.items())
    attention = _number(file, "rope.scaling.attn_factor", 0.0, 1e6, 1.0)
    if not extent:
        return 0.0, attention, fast, slow
    factor = 1 / scale

    def magnitude(share: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1

    attention *= magnitude(log_mul if log_mul not in (0.0, 1.0) else 1.0) / magnitude(log_mul) if log_mul else magnitude(1.0)
    return extent, attention / (1 + 0.1 * math.log(factor)), fast, slow


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
