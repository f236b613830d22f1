"""`Model`: a GGUF file opened as weights, hyper-parameters and tokenizer (`llama_model`).

Weights stay where they are: each is a leaf over the mapped file, so opening costs the header alone.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from workbench.errors import shown
from workbench.models.gguf import GGUFFile, open_gguf
from workbench.models.hparams import HParams, read_hparams, require_tensors
from workbench.moe import ExpertWeights, FeedForward
from workbench.tensors import Context, Tensor
from workbench.tensors.context import TENSOR_OVERHEAD

if TYPE_CHECKING:
    from workbench.models.tokenizer import Tokenizer


class Model:
    """An open model (`llama_model`): `hparams`, `weights` by their names in the file, `tokenizer`; `with` closes it.

    Raises ModelError where metadata and tensors do not fit together.
    """

    def __init__(self, file: GGUFFile) -> None:
        self.file, self.path, self.name = file, file.path, file.name
        self.hparams: HParams = read_hparams(file)
        require_tensors(file, self.hparams)
        self.context = Context(TENSOR_OVERHEAD * len(file.tensors), no_alloc=True, name=f"weights of {shown(file.path.name)}")
        self.weights: dict[str, Tensor] = {name: file.tensor(name, self.context) for name in file.tensors}

    def weight(self, what: str, layer: int | None = None) -> Tensor:
        """A weight by its short name: `weight("attn_q", 3)` is `blk.3.attn_q.weight`."""
        return self.weights[f"{what}.weight" if layer is None else f"blk.{layer}.{what}.weight"]

    def bias(self, what: str, layer: int) -> Tensor | None:
        """A bias by its short name: `bias("attn_q", 3)` is `blk.3.attn_q.bias`; None where the model has none."""
        return self.weights.get(f"blk.{layer}.{what}.bias")

    @property
    def output(self) -> Tensor:
        """The matrix that makes logits: `output.weight`, or the embedding where the two are tied."""
        return self.weights.get("output.weight", self.weights["token_embd.weight"])

    def feed_forward(self, layer: int, suffix: str = "") -> FeedForward:
        """The matrices of a dense network; suffix "_shexp": of the shared expert, "_exps": of all experts, merged."""
        gate, up, down = (self.weight(f"ffn_{part}{suffix}", layer) for part in ("gate", "up", "down"))
        return FeedForward(gate, up, down)

    def experts(self, layer: int) -> ExpertWeights:
        """The merged matrices of a layer's experts, and what goes with them."""
        hp = self.hparams
        shared = self.feed_forward(layer, "_shexp") if hp.n_ff_shexp else None
        merged = self.feed_forward(layer, "_exps")
        share = self.weight("ffn_gate_inp_shexp", layer) if hp.traits.shared_gate else None
        biases = None
        if hp.traits.oss:
            gate, up, down = (self.weights[f"blk.{layer}.ffn_{part}_exps.bias"] for part in ("gate", "up", "down"))
            biases = gate, up, down
        return ExpertWeights(merged.gate, merged.up, merged.down, shared, share, biases, "swiglu_oai" if hp.traits.oss else "silu")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer described in the file."""
        from workbench.models.tokenizer import Tokenizer

        return Tokenizer.from_gguf(self.file)

    @property
    def n_params(self) -> int:
        """Parameters in all (`llama_model_n_params`)."""
        return sum(t.n_elements for t in self.weights.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as stored (`llama_model_size`)."""
        return sum(t.nbytes for t in self.weights.values())

    def close(self) -> None:
        """Close the file; computing a graph over its weights is an error from now on."""
        self.context.close()
        self.file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Model {shown(self.name)!r} {self.hparams.arch}, {self.n_params:,} parameters, {self.nbytes:,} bytes>"


def load(path: str | os.PathLike[str]) -> Model:
    """Open a model: a path, or the name of a shipped one ("tiny-mixtral-f16"). Raises FileFormatError, ModelError."""
    file = open_gguf(path)
    try:
        return Model(file)
    except BaseException:
        file.close()
        raise
