"""`Session`: a model at work (`llama_context`): its KV cache, its compute memory and the graphs it keeps.

A graph is built once for each shape (tokens, visible cells, rows of logits) and then only fed with new inputs. Compute memory
is reserved for the largest shape when the session starts, so no step ever has to grow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from workbench.cgraph import CGraph
from workbench.devices import Backend
from workbench.errors import ModelError, ParameterError, shown
from workbench.execution import GraphAllocator
from workbench.models.kv_cache import KVCache
from workbench.models.model import Model
from workbench.models.transformer import StepGraph, build_step
from workbench.moe import RouteRecorder, RouteTrace
from workbench.scheduler import Scheduler

MAX_GRAPHS = 16
"""Graphs kept for reuse; beyond that the one that was not used for longest is dropped."""


class Session:
    """Decodes tokens of up to n_seq_max sequences (`llama_context`, `llama_decode`).

    n_ctx: cells of the KV cache, shared by all sequences (default: the length the model was trained for; rounded up to 256).
    n_batch: most tokens in one graph. backend: where to compute; else a CPU backend with `activation_rounding` and `n_threads`.
    scheduler: compute on several devices instead, with a model from `place_weights`; it belongs to this session until closed.
    recording: whether routes are kept in `routes`; it may be switched at any time.
    Counters: n_graph_builds, n_graph_reuses, n_plans.
    """

    def __init__(self, model: Model, n_ctx: int | None = None, n_batch: int = 512, n_seq_max: int = 1, backend: Backend | None = None,
                 activation_rounding: str | None = None, n_threads: int | None = None, recording: bool = False,
                 scheduler: Scheduler | None = None) -> None:  # fmt: skip
        n_ctx = model.hparams.n_ctx_train if n_ctx is None else n_ctx
        for what, value in (("n_ctx", n_ctx), ("n_batch", n_batch), ("n_seq_max", n_seq_max)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise ParameterError(f"{what}={value!r}", "a whole number of 1 or more")
        if backend is not None and (activation_rounding, n_threads) != (None, None):
            raise ParameterError("a backend together with activation_rounding or n_threads", "one or the other",
                                 "CpuBackend(n_threads=…, activation_rounding=…) takes them")  # fmt: skip
        if scheduler is not None and (backend, activation_rounding, n_threads) != (None, None, None):
            raise ParameterError("a scheduler together with a backend, activation_rounding or n_threads", "one or the other")
        self.model, self.n_seq_max, self.scheduler = model, n_seq_max, scheduler
        self._own_backend = backend is None and scheduler is None
        self.backend = scheduler.backends[-1] if scheduler is not None else backend or _cpu(activation_rounding, n_threads)
        self.cache = KVCache(model.hparams, n_ctx, getattr(model, "layer_types", self.backend.buffer_type))
        self.n_ctx, self.n_batch = self.cache.n_ctx, min(n_batch, self.cache.n_ctx)
        self.n_graph_builds = self.n_graph_reuses = self.n_plans = 0
        self.recording = recording
        self._recorder = RouteRecorder(model.hparams.moe_layers, model.hparams.router) if model.hparams.moe_layers else None
        self._next = [0] * n_seq_max
        self._steps: dict[tuple[int, int, int, bool], tuple[StepGraph, Any]] = {}
        self._memory: dict[bool, GraphAllocator | None] = {}
        try:
            self._allocator(recording)
        except BaseException:
            self.close()
            raise

    # ---- decoding

    def decode(self, tokens: Sequence[int] | np.ndarray, seq: int = 0, outputs: str = "last") -> np.ndarray:
        """Append tokens to a sequence; the logits of the last one (n_vocab,), or with outputs="all" of each (T, n_vocab)."""
        return self.decode_batch([(seq, tokens)], outputs)[0]

    def decode_batch(self, entries: Sequence[tuple[int, Sequence[int] | np.ndarray]], outputs: str = "last") -> list[np.ndarray]:
        """Append tokens to several sequences at once: (sequence, tokens) each; their logits in the same order.

        One token per sequence is a decode step: the number of rows is then padded to a power of two, so that few graphs
        serve any number of sequences. Raises ModelError where the context is full, ParameterError for tokens or
        sequences that do not exist, FileFormatError where the model's file was changed; the session is then as it was before.
        """
        self.model.file.require_unchanged()
        tokens, seqs, positions, wanted = self._rows(entries, outputs)
        if len(tokens) > self.n_ctx - self.cache.n_used:
            raise ModelError(f"the context is full: {self.cache.n_used} of {self.n_ctx} cells are in use, {len(tokens)} more tokens came",
                             f"at most {self.n_ctx - self.cache.n_used} tokens",
                             "session.reset(seq) frees a sequence; Session(model, n_ctx=…) makes a larger context")  # fmt: skip
        steps = len(tokens) == len(entries)
        recorded = len(self._recorder) if self._recorder is not None else 0
        before, logits = self._next, list[np.ndarray]()
        try:
            for first in range(0, len(tokens), self.n_batch):
                part = slice(first, first + self.n_batch)
                cells = self.cache.take(seqs[part], positions[part])
                logits.append(self._run(tokens[part], seqs[part], positions[part], cells, wanted[part], steps))
            rows = np.concatenate(logits) if len(logits) > 1 else logits[0]
            out = list(rows) if outputs == "last" else np.split(rows, np.cumsum([len(given) for _, given in entries])[:-1])
            more = {seq: len(given) for seq, given in entries}
            self._next = [n + more.get(seq, 0) for seq, n in enumerate(before)]
        except BaseException:  # an interrupt may come between any two of these lines
            self._next = before
            for seq, _ in entries:
                self.cache.cut(seq, before[seq])
            if self._recorder is not None:
                self._recorder.keep(recorded)
            raise
        return out

    def reset(self, seq: int | None = None) -> None:
        """Forget a sequence, or all of them (`llama_memory_seq_rm`, `llama_memory_clear`)."""
        for s in range(self.n_seq_max) if seq is None else [self._checked_seq(seq)]:
            self.cache.clear(s)
            self._next[s] = 0

    def n_past(self, seq: int = 0) -> int:
        """Tokens that a sequence holds; the position of its next one."""
        return self._next[self._checked_seq(seq)]

    # ---- routes

    @property
    def routes(self) -> RouteTrace:
        """What was recorded while `recording` was on. Raises ModelError for a model without experts."""
        if self._recorder is None:
            raise ModelError(f"{shown(self.model.name)} has no experts", "a mixture-of-experts model", "tiny-mixtral-f16, for example")
        return self._recorder.trace()

    def clear_routes(self) -> None:
        """Forget the recorded routes."""
        if self._recorder is not None:
            self._recorder.clear()

    # ---- memory

    def memory(self) -> dict[str, int]:
        """Bytes by purpose; the weights are mapped from the file, not copied."""
        return {"weights (mapped)": self.model.nbytes, "KV cache": self.cache.nbytes,
                "compute buffer": self._compute_bytes(), **self.backend.memory_report()}  # fmt: skip

    def close(self) -> None:
        """Give all memory back; the model stays open."""
        self._steps.clear()
        if self.scheduler is not None:
            self.scheduler.reset()
        for allocator in self._memory.values():
            if allocator is not None:
                allocator.close()
        self.cache.close()
        if self._own_backend:
            self.backend.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session of {shown(self.model.name)!r}, {self.cache.n_used} of {self.n_ctx} cells used, {len(self._steps)} graphs>"

    # ---- inside

    def _rows(self, entries: Sequence[tuple[int, Any]], outputs: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Token, sequence, position of each row, and whether its logits are wanted."""
        if outputs not in ("last", "all"):
            raise ParameterError(f"outputs={outputs!r}", '"last" or "all"')
        if not entries:
            raise ParameterError("no tokens to decode", "at least one (sequence, tokens)")
        tokens, seqs, positions, wanted = [], [], [], []
        seen: set[int] = set()
        for seq, given in entries:
            ids = np.asarray(given)
            if self._checked_seq(seq) in seen:
                raise ParameterError(f"sequence {seq} twice in one batch", "each sequence once", "join its tokens")
            seen.add(seq)
            if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
                raise ParameterError(f"tokens {given!r:.60}", "a list of one or more token ids")
            if not (0 <= ids.min() and ids.max() < self.model.hparams.n_vocab):
                raise ParameterError(f"token ids from {ids.min()} to {ids.max()}", f"0 to {self.model.hparams.n_vocab - 1}",
                                     "encode text with model.tokenizer")  # fmt: skip
            tokens.append(ids)
            seqs.append(np.full(len(ids), seq))
            positions.append(self._next[seq] + np.arange(len(ids)))
            wanted.append(np.full(len(ids), outputs == "all"))
            wanted[-1][-1] = True
        return tuple(map(np.concatenate, (tokens, seqs, positions, wanted)))  # type: ignore[return-value]

    def _checked_seq(self, seq: int) -> int:
        if not isinstance(seq, int | np.integer) or not 0 <= seq < self.n_seq_max:
            raise ParameterError(f"sequence {seq!r}", f"0 to {self.n_seq_max - 1}", "Session(model, n_seq_max=…) allows more")
        return seq

    def _run(self, tokens: np.ndarray, seqs: np.ndarray, positions: np.ndarray, cells: np.ndarray, wanted: np.ndarray,
             pad: bool) -> np.ndarray:  # fmt: skip
        """One graph run; the logits of the wanted rows."""
        n, recording = len(tokens), self.recording and self._recorder is not None
        out_ids = np.arange(n) if recording else np.flatnonzero(wanted)
        skip = min(bucket(n), self.n_batch) - n if pad else 0
        # Rows that fill up the bucket repeat the first one and stand before it, so that its own result is what remains.
        rows = np.concatenate([np.zeros(skip, np.int64), np.arange(n)])
        n_outputs = min(bucket(max(len(out_ids), 1)), n) if not pad and not recording else len(out_ids) + skip
        out_rows = np.zeros(n_outputs, np.int64)
        out_rows[n_outputs - len(out_ids) :] = out_ids + skip
        step, plan = self._step(n + skip, self.cache.n_kv(), n_outputs, recording)
        fill_inputs(step, self.cache, tokens[rows], positions[rows], seqs[rows], cells[rows], out_rows)
        plan.run()
        (self.scheduler or self.backend).synchronize(copies=False)
        if recording:
            assert self._recorder is not None
            self._recorder.add(step.routings, np.stack([tokens, positions, seqs], 1), skip)
        logits = step.logits.numpy().reshape(n_outputs, -1)[n_outputs - len(out_ids) :]
        return logits[wanted] if recording else logits.copy()

    def _step(self, n_tokens: int, n_kv: int, n_outputs: int, recording: bool) -> tuple[StepGraph, Any]:
        """The graph of this shape with its plan: kept from before, else built, placed and planned."""
        key = (n_tokens, n_kv, n_outputs, recording)
        if key in self._steps:
            self.n_graph_reuses += 1
            self._steps[key] = self._steps.pop(key)  # the last one used stands last
            if self.scheduler is not None:
                self._schedule(self._steps[key][0].graph)
            return self._steps[key]
        step = self._build(*key)
        allocator = self._allocator(recording)
        if allocator is None:
            self._steps[key] = step, self._schedule(step.graph)
        else:
            allocator.alloc(step.graph)
            self._steps[key] = step, self.backend.plan(step.graph)
        self.n_plans += 1
        if len(self._steps) > MAX_GRAPHS:
            del self._steps[next(iter(self._steps))]
        return self._steps[key]

    def _build(self, n_tokens: int, n_kv: int, n_outputs: int, recording: bool) -> StepGraph:
        self.n_graph_builds += 1
        step = build_step(self.model, self.cache, n_tokens, n_kv, n_outputs)
        if recording:
            for routing in step.routings:
                RouteRecorder.watch(routing)
        return step

    def _allocator(self, recording: bool) -> GraphAllocator | None:
        """Compute memory, reserved for the largest graph; a recording one keeps more alive, so it has its own. None: a
        scheduler has it."""
        if recording not in self._memory:
            own = self._memory[recording] = None if self.scheduler else GraphAllocator(self.backend.buffer_type)
            (own or self.scheduler).reserve(self._build(self.n_batch, self.n_ctx, self.n_batch, recording).graph)  # type: ignore[union-attr]
        return self._memory[recording]

    def _schedule(self, graph: CGraph) -> _Scheduled:
        """Let the scheduler hold this graph; it holds one at a time."""
        assert self.scheduler is not None
        if self.scheduler.graph is not graph or not self.scheduler.is_allocated:
            self.scheduler.reset()
            self.scheduler.alloc(graph)
        return _Scheduled(self.scheduler, graph)

    def _compute_bytes(self) -> int:
        if self.scheduler is not None:
            return sum(map(self.scheduler.buffer_size, range(len(self.scheduler.backends))))
        return sum(m.buffer_size() for m in self._memory.values() if m is not None)


class _Scheduled(NamedTuple):
    """A graph that a scheduler runs, where a session expects a plan."""

    scheduler: Scheduler
    graph: CGraph

    def run(self) -> None:
        """Ask for all splits."""
        self.scheduler.compute_async(self.graph)


def fill_inputs(step: StepGraph, cache: KVCache, tokens: np.ndarray, positions: np.ndarray, seqs: np.ndarray, cells: np.ndarray,
                out_ids: np.ndarray) -> None:  # fmt: skip
    """Write the inputs of a step (`llm_graph_result::set_inputs`)."""
    values = {"tokens": tokens, "pos": positions, "k_idxs": cells, "v_idxs": cache.v_indices(cells), "out_ids": out_ids}
    for name, leaf in vars(step.inputs).items():
        name, windowed, _ = name.partition("_swa")
        if name == "mask":
            mask = np.empty((leaf.ne[1], leaf.ne[0]), np.float32)
            cache.fill_mask(mask, seqs, positions, cache.hp.window if windowed else 0)
            leaf.set(mask)
        else:
            leaf.set(values[name])


def bucket(n: int) -> int:
    """The power of two from n up."""
    return 1 << (n - 1).bit_length()


def _cpu(activation_rounding: str | None, n_threads: int | None) -> Backend:
    from workbench.devices import CpuBackend

    return CpuBackend(n_threads=1 if n_threads is None else n_threads, activation_rounding=activation_rounding or "none")


