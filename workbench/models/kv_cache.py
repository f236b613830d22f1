"""The cache of keys and values (`llama_kv_cache`): n_ctx cells that all sequences share.

A cell holds K and V of one token in every layer. Which cell belongs to which sequence, and at which position, is known
here alone; the graph only sees indices to write to and a mask of what each token may read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench.devices import Buffer, BufferType
from workbench.errors import ModelError
from workbench.models.hparams import HParams
from workbench.tensors import Context, Tensor, ops
from workbench.tensors.context import TENSOR_OVERHEAD, padded

PAD_KV = 256
"""n_kv and n_ctx are multiples of it (`llama_kv_cache::get_padding`), so that one graph serves many steps."""
FREE = -1


class KVCache:
    """Keys and values of up to n_ctx tokens, and the account of their cells (`llama_kv_cache`, `llama_kv_cells`).

    K lies token by token, [n_embd_kv, n_ctx]; V lies transposed, a row per channel, as llama.cpp keeps it without flash
    attention (its tensor is described as [n_embd_kv, n_ctx] all the same). buffer_type: one for all layers, or one for each.
    Without one there is no memory: enough to build graphs. Compressed attention (deepseek2) keeps one row for all heads, whose
    first part is V: there is no V of its own. kind: f32, or f16 as llama.cpp has it by default (`-ctk`, `-ctv`).
    """

    def __init__(self, hp: HParams, n_ctx: int, buffer_type: BufferType | Sequence[BufferType] | None = None,
                 kind: str = "f32") -> None:  # fmt: skip
        self.hp, self.n_ctx = hp, padded(n_ctx, PAD_KV)
        self.context = Context(2 * hp.n_layer * TENSOR_OVERHEAD, no_alloc=True, name="kv cache")
        self.k = [self.context.new_tensor(kind, hp.n_embd_kv, self.n_ctx, name=f"cache_k_l{i}") for i in range(hp.n_layer)]
        self.v = [self.context.new_tensor(kind, hp.n_embd_v, self.n_ctx, name=f"cache_v_l{i}") for i in range(hp.n_layer) if hp.n_embd_v]
        self.buffers: list[Buffer] = []
        self.nbytes = sum(t.nbytes for t in (*self.k, *self.v))
        if buffer_type is not None:
            types = [buffer_type] * hp.n_layer if isinstance(buffer_type, BufferType) else list(buffer_type)
            try:
                for memory in dict.fromkeys(types):
                    mine = [i for i, own in enumerate(types) if own is memory]
                    self._place(memory, [t for i in mine for t in (*self.k[i : i + 1], *self.v[i : i + 1])])
            except BaseException:
                self.close()
                raise
        self.seq = np.full(self.n_ctx, FREE, np.int32)
        self.pos = np.zeros(self.n_ctx, np.int32)

    def _place(self, kind: BufferType, tensors: list[Tensor]) -> None:
        buffer = kind.alloc_buffer(sum(t.nbytes for t in tensors))
        self.buffers.append(buffer)
        buffer.clear(0)  # cells that are masked out are multiplied by zero: they must not hold NaN
        end = 0
        for tensor in tensors:
            tensor.place(buffer, end)
            end += tensor.nbytes

    def close(self) -> None:
        """Give the memory back."""
        self.context.close()
        for buffer in self.buffers:
            buffer.close()

    # ---- cells

    @property
    def n_used(self) -> int:
        """Cells in use."""
        return int(np.count_nonzero(self.seq != FREE))

    def take(self, seqs: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The lowest free cells for these tokens. Raises ModelError, with nothing taken, where there are too few."""
        free = np.flatnonzero(self.seq == FREE)[: len(seqs)]
        if len(free) < len(seqs):
            raise ModelError(f"{len(seqs)} more tokens with {len(free)} of {self.n_ctx} cells of the context free", "room for all of them",
                             "reset a sequence that is done, or make the session with a larger n_ctx")  # fmt: skip
        self.seq[free], self.pos[free] = seqs, positions
        return free

    def give_back(self, cells: np.ndarray) -> None:
        """Free these cells."""
        self.seq[cells] = FREE

    def cut(self, seq: int, n: int) -> None:
        """Forget a sequence's tokens from position `n` on."""
        self.seq[(self.seq == seq) & (self.pos >= n)] = FREE

    def clear(self, seq: int) -> None:
        """Forget a sequence (`llama_memory_seq_rm`)."""
        self.seq[self.seq == seq] = FREE

    def n_kv(self) -> int:
        """Cells a graph must look at: up to the last one in use, padded so that the number changes rarely."""
        used = np.flatnonzero(self.seq != FREE)
        return min(padded(int(used[-1]) + 1 if len(used) else 1, PAD_KV), self.n_ctx)

    def fill_mask(self, mask: np.ndarray, seqs: np.ndarray, positions: np.ndarray, window: int = 0) -> None:
        """Row t: 0 at the cells of the token's own sequence up to its own position (the last `window` ones), -inf elsewhere."""
        n_kv = mask.shape[-1]
        cell_seq, cell_pos = self.seq[:n_kv], self.pos[:n_kv]
        mask.fill(-np.inf)
        for row, seq, pos in zip(mask, seqs, positions, strict=True):
            row[(cell_seq == seq) & (cell_pos <= pos) & ((cell_pos > pos - window) if window else True)] = 0

    def v_indices(self, cells: np.ndarray) -> np.ndarray:
        """Where the elements of V go in the transposed cache: channel · n_ctx + cell, token by token."""
        return (np.arange(self.hp.n_embd_v) * self.n_ctx + cells[:, None]).reshape(-1)

    # ---- nodes

    def write_k(self, layer: int, k: Tensor, cells: Tensor) -> Tensor:
        """Store K [head, heads, T] into its cells (`cpy_k`)."""
        return ops.set_rows(self.k[layer], ops.view(k, self.hp.n_embd_kv, k.ne[2], nb=(k.nb[2],)), cells)

    def write_v(self, layer: int, v: Tensor, places: Tensor) -> Tensor:
        """Store V transposed, element by element: rows of one element each (`cpy_v`)."""
        v = ops.reshape(v, self.hp.n_embd_v, v.ne[2])
        cache = self.v[layer]
        rows = ops.reshape(cache, 1, cache.n_elements)
        return ops.set_rows(rows, ops.reshape(v, 1, v.n_elements), places)

    def read_k(self, layer: int, n_kv: int) -> Tensor:
        """The first n_kv cells of K as [head, heads, n_kv] (`get_k`). Nothing ties it to the writing node but their order."""
        k, head = self.k[layer], self.hp.n_embd_head_k
        return ops.view(k, head, self.hp.n_head_kv, n_kv, 1, nb=(k.nb[0] * head, k.nb[1], k.nb[1] * self.n_ctx))

    def read_v(self, layer: int, n_kv: int) -> Tensor:
        """The first n_kv cells of the transposed V as [n_kv, heads, head] (`get_v`)."""
        v, head = self.v[layer], self.hp.n_embd_head_v
        row = v.nb[0] * self.n_ctx
        return ops.view(v, n_kv, self.hp.n_head_kv, head, 1, nb=(row * head, row, row * self.hp.n_embd_v))
