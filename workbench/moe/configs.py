"""Published mixture-of-experts models as data, and their arithmetic: parameters, bytes per expert, FLOPs per token, experts in use.

Each row names where its numbers were read, and by which rule its maker counts. Totals are computed from the shapes alone; tests hold
them against the published figures at the precision these are printed with, and against modules of `transformers` to the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import ParameterError, shown
from workbench.moe import presets
from workbench.moe.routers import Router, is_number, is_whole
from workbench.tensors.dtype import DType, dtype


@dataclass(frozen=True)
class Attention:
    """Heads of one layer: `heads` queries and `kv` keys and values of `head` numbers; biases of "qkv" or "qkvo".

    qk_norm: numbers of one norm of Q and one of K. sinks: one number per head (gpt-oss). latent (q_rank, kv_rank, rope, v): compressed
    attention (DeepSeek-V2), where `head` counts what is not turned; q_rank 0 for whole queries.
    """

    heads: int
    kv: int
    head: int
    biases: str = ""
    qk_norm: tuple[int, int] = (0, 0)
    sinks: bool = False
    latent: tuple[int, int, int, int] | None = None

    def params(self, d: int) -> int:
        """Parameters of one layer in a model of width `d`."""
        if self.latent:
            q_rank, kv_rank, rope, v = self.latent
            queries = self.heads * (self.head + rope)
            q = d * q_rank + q_rank + q_rank * queries if q_rank else d * queries
            return q + d * (kv_rank + rope) + kv_rank + kv_rank * self.heads * (self.head + v) + self.heads * v * d
        widths = {"q": self.heads * self.head, "k": self.kv * self.head, "v": self.kv * self.head}
        biases = sum(widths[c] for c in self.biases if c in widths) + d * ("o" in self.biases)
        return d * (sum(widths.values()) + widths["q"]) + biases + sum(self.qk_norm) + self.heads * self.sinks

    def flops(self, n_past: int) -> int:
        """Multiplications and additions of one token with the keys and values of `n_past` tokens."""
        rope, v = self.latent[2:] if self.latent else (0, self.head)
        return 2 * n_past * self.heads * (self.head + rope + v)


WITHOUT_INPUT = "without the input embedding"


@dataclass(frozen=True)
class Published:
    """What the makers print, in billions: all parameters, and those that one token uses.

    rule: what they count as used: "all" that a token passes, or WITHOUT_INPUT, all but the input embedding.
    """

    total: str
    active: str
    rule: str = "all"


@dataclass(frozen=True)
class MoEModel:
    """One model: `n_moe` layers with experts of width f, `n_dense` without; vocabulary; widths of the shared experts together.

    matrices: per expert, 3 with a gate and 2 without; biases: on experts and router. bias: of norms and output matrix. n_attention:
    blocks of attention where there are not as many as layers (Switch: the decoder has two each). extra: what no formula here covers.
    source: where the numbers were read; from_memory: never looked up, so no figure of this row is used as a fact.
    """

    name: str
    router: Router
    d: int
    f: int
    n_moe: int
    n_vocab: int
    attention: Attention
    published: Published
    source: str
    n_dense: int = 0
    f_dense: int = 0
    f_shared: int = 0
    shared_gate: bool = False
    matrices: int = 3
    biases: bool = False
    bias: bool = False
    tied: bool = False
    n_attention: int = 0
    n_norms: int = 1
    extra: int = 0
    from_memory: bool = False

    @property
    def expert(self) -> int:
        """Parameters of one routed expert."""
        return self.matrices * self.d * self.f + self.biases * ((self.matrices - 1) * self.f + self.d)

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding; the output matrix has as many."""
        return self.n_vocab * self.d

    def params(self, n_experts: int | None = None) -> int:
        """Parameters with `n_experts` experts in each layer: all of them, unless a number is given."""
        n = self.router.n_expert if n_experts is None else n_experts
        if not is_whole(n) or n < 0:
            raise ParameterError(f"{shown(n)} experts in each layer", "a whole number, 0 or more")
        attention = self.n_attention or self.n_moe + self.n_dense
        sublayers = attention + self.n_moe + self.n_dense + self.n_norms
        router = self.router.n_expert * (self.d + self.biases)
        layer = n * self.expert + router + self.matrices * self.d * self.f_shared + self.d * self.shared_gate
        return (self.embedding * (1 if self.tied else 2) + self.n_vocab * self.bias + sublayers * self.d * (1 + self.bias)
                + attention * self.attention.params(self.d) + self.n_moe * layer + self.n_dense * self.matrices * self.d * self.f_dense
                + self.extra)  # fmt: skip

    @property
    def total(self) -> int:
        """All parameters (a selection bias, which no gradient trains, is not among them)."""
        return self.params()

    @property
    def active(self) -> int:
        """Parameters that one token uses, counted by the rule of the published figure."""
        return self.params(self.router.n_used) - (self.embedding if self.published.rule == WITHOUT_INPUT else 0)

    def bytes_per_expert(self, kind: str | DType) -> int:
        """Bytes of one expert's matrices in a storage type, as ggml lays out rows. Raises ShapeError where blocks do not divide them."""
        t = dtype(kind)
        return (self.matrices - 1) * self.f * t.row_bytes(self.d) + self.d * t.row_bytes(self.f)

    def flops_per_token(self, n_past: int = 0) -> int:
        """Multiplications and additions of one token: two for each weight it passes (the embedding is only looked up), and
        those of attention to `n_past` tokens."""
        if not is_number(n_past) or n_past < 0:
            raise ParameterError(f"{shown(n_past)} tokens before this one", "0 or more")
        looked_up = 0 if self.tied else self.embedding
        blocks = self.n_attention or self.n_moe + self.n_dense
        return 2 * (self.params(self.router.n_used) - looked_up) + blocks * self.attention.flops(n_past)


def expected_distinct(n_expert: int, k: int, n_tokens: int) -> float:
    """Experts of a layer that n tokens need together if each draws its k at random: E · (1 - (1 - k/E)^n)."""
    if not (all(map(is_number, (n_expert, k, n_tokens))) and 0 <= k <= n_expert > 0 <= n_tokens):
        raise ParameterError(f"{shown(n_tokens)} tokens that draw {shown(k)} of {shown(n_expert)} experts", "0 ≤ k ≤ E, 0 tokens or more")
    return n_expert * (1 - (1 - k / n_expert) ** n_tokens)


def _switch(n_expert: int, total: str) -> MoEModel:
    return MoEModel(f"Switch-base-{n_expert}", presets.switch(n_expert), 768, 3072, 12, 32128, Attention(12, 12, 64),
                    Published(total, "0.22"), "ExpertFlow 2410.17954, table 1; transformers' SwitchTransformersConfig, but "
                    "d_ff 3072 and 6 sparse layers each, as in the files", n_dense=12, f_dense=3072, matrices=2, tied=True,
                    n_attention=36, n_norms=2, extra=2 * 32 * 12)  # fmt: skip


MODELS: Sequence[MoEModel] = (
    MoEModel("Mixtral-8x7B", presets.mixtral(), 4096, 14336, 32, 32000, Attention(32, 8, 128), Published("46.7", "12.9"),
             "Mixtral paper 2401.04088; configuration in ljcleo/moe-lrc"),
    MoEModel("Mixtral-8x22B", presets.mixtral(), 6144, 16384, 56, 32000, Attention(48, 8, 128), Published("141", "39"),
             "configuration on Hugging Face; announcement of Mistral AI"),
    _switch(32, "1.98"), _switch(64, "3.79"), _switch(128, "7.41"),
    MoEModel("LLaMA-MoE-v1-3.5B", Router(16, 4), 4096, 688, 32, 32000, Attention(32, 32, 128), Published("6.74", "3.5"),
             "LLaMA-MoE 2406.16554: the FFN of LLaMA-2-7B cut in 16 parts, 688 = 11008/16; total from the table of ljcleo/moe-lrc"),
    MoEModel("DeepSeekMoE-16B", presets.deepseek_moe(), 2048, 1408, 27, 102400, Attention(16, 16, 128), Published("16.4", "2.8"),
             "DeepSeekMoE 2401.06066; configuration in ljcleo/moe-lrc", n_dense=1, f_dense=10944, f_shared=2816),
    MoEModel("DeepSeek-V2-Lite", presets.deepseek_moe(), 2048, 1408, 26, 102400, Attention(16, 16, 128, latent=(0, 512, 64, 128)),
             Published("15.7", "2.4", WITHOUT_INPUT), "DeepSeek's config_16B.json; 2405.04434", n_dense=1, f_dense=10944,
             f_shared=2816),
    MoEModel("DeepSeek-V2", presets.deepseek_v2(), 5120, 1536, 59, 102400, Attention(128, 128, 128, latent=(1536, 512, 64, 128)),
             Published("236", "21"), "DeepSeek's config_236B.json; 2405.04434", n_dense=1, f_dense=12288, f_shared=3072),
    MoEModel("DeepSeek-V3", presets.deepseek_v3(), 7168, 2048, 58, 129280, Attention(128, 128, 128, latent=(1536, 512, 64, 128)),
             Published("671", "36.6", WITHOUT_INPUT), "DeepSeek's config_671B.json and README_WEIGHTS.md; 2412.19437", n_dense=3,
             f_dense=18432, f_shared=2048),
    MoEModel("Qwen1.5-MoE-A2.7B", presets.qwen2_moe(), 2048, 1408, 24, 151936, Attention(16, 16, 128, "qkv"), Published("14.3", "2.7"),
             "announcement of Qwen; configuration in ljcleo/moe-lrc", f_shared=5632, shared_gate=True),
    MoEModel("Qwen2-57B-A14B", presets.qwen2_moe(64, 8), 3584, 2560, 28, 151936, Attention(28, 4, 128, "qkv"), Published("57.41", "14"),
             "Qwen2 2407.10671; total from the table of ljcleo/moe-lrc", f_shared=20480, shared_gate=True),
    MoEModel("Qwen3-30B-A3B", presets.qwen3_moe(), 2048, 768, 48, 151936, Attention(32, 4, 128, qk_norm=(128, 128)),
             Published("30.5", "3.3"), "Qwen3 2505.09388; configuration in ljcleo/moe-lrc"),
    MoEModel("OLMoE-1B-7B", presets.olmoe(), 2048, 1024, 16, 50304, Attention(16, 16, 128, qk_norm=(2048, 2048)), Published("6.9", "1.3"),
             "OLMoE 2409.02060; configuration in ljcleo/moe-lrc"),
    MoEModel("Phi-3.5-MoE", Router(16, 2, normalise=False), 4096, 6400, 32, 32064, Attention(32, 8, 128, "qkvo"), Published("41.87", "6.6"),
             "total from the table of ljcleo/moe-lrc; model card (its router, SparseMixer, is no preset here)", bias=True),
    MoEModel("gpt-oss-20b", presets.gpt_oss(32), 2880, 2880, 24, 201088, Attention(64, 8, 64, "qkvo", sinks=True),
             Published("20.9", "3.6", WITHOUT_INPUT), "model card of gpt-oss (2508.10925); openai/gpt-oss torch/model.py", biases=True),
    MoEModel("gpt-oss-120b", presets.gpt_oss(128), 2880, 2880, 36, 201088, Attention(64, 8, 64, "qkvo", sinks=True),
             Published("116.8", "5.1", WITHOUT_INPUT), "model card of gpt-oss (2508.10925); openai/gpt-oss torch/model.py", biases=True),
    MoEModel("Llama-4-Scout", Router(16, 1, "sigmoid", False), 5120, 8192, 48, 202048, Attention(40, 8, 128), Published("109", "17"),
             "transformers' Llama4TextConfig; model card (its router weighs inputs, not results: no preset here)", f_shared=8192),
    MoEModel("GShard-600B", presets.gshard(), 1024, 8192, 18, 64000, Attention(16, 16, 128), Published("600", "-"),
             "2006.16668, not looked up", n_dense=18, f_dense=8192, matrices=2, tied=True, from_memory=True),
)  # fmt: skip
"""The models, by family. Those marked `from_memory` are listed for their place in history and used for nothing."""

EXCEPTIONS = {
    ("Switch-base-128", "total"): "The paper's table cuts 7.4155 off to 7.41; the table of ljcleo/moe-lrc rounds it to 7.42.",
    ("DeepSeek-V2-Lite", "active"): "2.45 without the input embedding (2.24 without the output matrix as well), cut off to 2.4.",
    ("Qwen3-30B-A3B", "active"): "3.35 by all parameters; Qwen cuts it off to 3.3.",
    ("Llama-4-Scout", "total"): "The published total has the vision encoder in it; this row counts the text model alone.",
}
"""Figures that differ from ours by more than rounding, and why: (name, "total" or "active") -> reason."""


def model(name: str) -> MoEModel:
    """The row of this name. Raises ParameterError where there is none."""
    for row in MODELS:
        if row.name == name:
            return row
    raise ParameterError(f"no published model {shown(name)!r}", "one of " + ", ".join(m.name for m in MODELS))
