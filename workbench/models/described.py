"""A published model by its numbers: the header of a file that nobody needs to have, for `fit` and `plan_schedule`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.devices.planned import planned_file
from workbench.errors import ParameterError
from workbench.models.gguf import GGUFFile, Metadata, TensorInfo
from workbench.models.hparams import HParams, read_hparams
from workbench.tensors.dtype import dtype

ALIGNMENT = 32


class _Numbers(Metadata):
    """Keys with their values, which no file holds."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._given = values

    def __getitem__(self, key: str) -> Any:
        return self._given[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def kind(self, key: str) -> str:
        """The type of a value."""
        return type(self._given[key]).__name__


class DescribedFile(GGUFFile):
    """A GGUF file of hyper-parameters and shapes alone: tensors have offsets and sizes, and no bytes.

    kind: how matrices are stored; norms and routers are f32, as converters make them. Raises ParameterError for hyper-parameters that a
    header of these keys does not give back.
    """

    def __init__(self, name: str, hp: HParams, kind: str = "f16") -> None:
        self.path, self._mapping, self.version, self.alignment, self.data_offset = Path(f"{name}-{kind}.gguf"), None, 3, ALIGNMENT, 0
        keys = {"context_length": hp.n_ctx_train, "embedding_length": hp.n_embd, "block_count": hp.n_layer,
                "attention.head_count": hp.n_head, "attention.head_count_kv": hp.n_head_kv, "feed_forward_length": hp.n_ff,
                "attention.key_length": hp.n_embd_head_k, "attention.value_length": hp.n_embd_head_v, "rope.dimension_count": hp.n_rot,
                "attention.layer_norm_rms_epsilon": hp.rms_eps, "rope.freq_base": hp.rope_freq_base}  # fmt: skip
        if hp.n_expert:
            keys |= {"expert_count": hp.n_expert, "expert_used_count": hp.n_expert_used, "expert_feed_forward_length": hp.n_ff_exp}
        self.metadata = _Numbers({"general.architecture": hp.arch, "general.name": name, **{f"{hp.arch}.{k}": v for k, v in keys.items()}})
        self.tensors, end = {}, 0
        for tensor, ne in (hp.expected_tensors() | {"output.weight": (hp.n_embd, hp.n_vocab)}).items():
            t = dtype("f32" if len(ne) == 1 or "ffn_gate_inp" in tensor else kind)
            nbytes = t.row_bytes(ne[0]) * math.prod(ne[1:])
            self.tensors[tensor] = TensorInfo(tensor, t, (*ne, *(1,) * (4 - len(ne))), end, nbytes)
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.storage = planned_file(end, self.path.name)  # type: ignore[assignment]
        if read_hparams(self) != replace(hp, n_ctx_orig=hp.n_ctx_orig or hp.n_ctx_train):
            raise ParameterError(f"hyper-parameters of {name} that need more keys than these: {', '.join(keys)}", "a plain architecture",
                                 'HParams("llama", …), for example')  # fmt: skip

    def require_unchanged(self) -> None:
        """Nobody can change it."""
