"""Text generation: prompt in, tokens out one by one, with what it cost."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from workbench.errors import ModelError, ParameterError
from workbench.models.model import Model, load
from workbench.models.sampling import Sampler
from workbench.models.session import Session


class Piece(NamedTuple):
    """One generated token and the text that is complete with it: empty inside a character, and of a token that ends the text."""

    token: int
    text: str


class _Event(Protocol):
    def is_set(self) -> bool: ...


Stop = Callable[[], bool] | _Event
"""Asked before each token whether to stop: a function, or a `threading.Event`."""


@dataclass
class GenerationStats:
    """What a generation cost. ended: why it ended: "length", "end of text", "asked to stop" or "context full"."""

    n_prompt: int = 0
    n_generated: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    n_decoded: int = 0
    ended: str = ""
    peak_memory: int | None = None

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.n_prompt / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Generated tokens per second, the prompt left out."""
        return self.n_decoded / self.decode_seconds if self.decode_seconds else 0.0

    def __str__(self) -> str:
        peak = f"{self.peak_memory / 2**20:.1f} MiB" if self.peak_memory else "unknown"
        return (f"prompt {self.n_prompt} tokens, {self.prefill_rate:.1f} tokens/s; generated {self.n_generated} tokens, "
                f"{self.decode_rate:.1f} tokens/s; peak memory {peak}; ended: {self.ended}")  # fmt: skip


class Generation(Iterator[Piece]):
    """The tokens of one generation, made as they are asked for. `text`, `tokens`: so far; `stats`: what it cost."""

    def __init__(self, pieces: Generator[Piece, None, None], stats: GenerationStats, own: Sequence[Session | Model] = ()) -> None:
        self._pieces, self.stats, self._own = pieces, stats, own
        self.text, self.tokens = "", list[int]()

    def __next__(self) -> Piece:
        piece = next(self._pieces)
        self.text += piece.text
        if piece.token >= 0:
            self.tokens.append(piece.token)
        return piece

    def close(self) -> None:
        """End the generation here, and give back the session and the model that were made for it."""
        self._pieces.close()
        _close(self._own)  # a generator that never started does not do it

    def run(self) -> str:
        """Generate to the end; the whole text."""
        for _ in self:
            pass
        return self.text


def generate(source: Session | Model | str | Path, prompt: str | Sequence[int], n_tokens: int, sampler: Sampler | None = None, *,
             on_token: Callable[[Piece], Any] | None = None, stop: Stop | None = None, seq: int = 0,
             **options: Any) -> Generation:  # fmt: skip
    """Continue `prompt` (text or token ids) by up to `n_tokens` tokens; iterate over the result, or call its `run()`.

    source: a session, whose sequence `seq` is started anew; or a model or its name, for which a session with `options` is
    made. Ends at a token that ends the text, when `stop` says so, or when the context is full. Default: greedy.
    """
    if not isinstance(n_tokens, int) or n_tokens < 0:
        raise ParameterError(f"n_tokens={n_tokens!r}", "a whole number of 0 or more")
    if isinstance(source, Session):
        if options:
            raise ParameterError(f"options {', '.join(options)} with a session", "a model, for which a session is made")
        session, model = source, None
        ids = _prompt_ids(source.model, prompt)
    else:
        model = None if isinstance(source, Model) else load(source)
        try:
            ids = _prompt_ids(model or source, prompt)  # type: ignore[arg-type]
            session = Session(model or source, **options)  # type: ignore[arg-type]
        except BaseException:
            if model is not None:
                model.close()
            raise
    stats = GenerationStats(n_prompt=len(ids))
    own: list[Session | Model] = [] if source is session else [session] if model is None else [session, model]
    return Generation(_pieces(session, ids, n_tokens, sampler or Sampler(), on_token, stop, seq, stats, own), stats, own)


def _prompt_ids(model: Model, prompt: str | Sequence[int]) -> list[int]:
    ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise ParameterError("an empty prompt", "at least one token", "this model adds none at the start of a text")
    return ids


def _pieces(session: Session, ids: list[int], n_tokens: int, sampler: Sampler, on_token: Callable[[Piece], Any] | None, stop: Stop | None,
            seq: int, stats: GenerationStats, own: Sequence[Session | Model]) -> Generator[Piece, None, None]:  # fmt: skip
    try:
        for piece in _tokens(session, ids, n_tokens, sampler, stop, seq, stats):
            if on_token is not None:
                on_token(piece)
            yield piece
    finally:
        stats.peak_memory = peak_memory()
        stats.ended = stats.ended or "asked to stop"  # the iterator was closed, or interrupted
        _close(own)


def _close(resources: Sequence[Session | Model]) -> None:
    for resource in resources:
        resource.close()


def _tokens(session: Session, ids: list[int], n_tokens: int, sampler: Sampler, stop: Stop | None, seq: int,
            stats: GenerationStats) -> Iterator[Piece]:  # fmt: skip
    tokenizer = session.model.tokenizer
    stream = tokenizer.stream()
    session.reset(seq)
    start = time.perf_counter()
    logits: np.ndarray = session.decode(ids, seq)
    stats.prefill_seconds = time.perf_counter() - start
    ended = "length"
    for i in range(n_tokens):
        if _asked(stop):
            ended = "asked to stop"
            break
        token = sampler(logits)
        stats.n_generated += 1
        if token in tokenizer.eog:
            ended = "end of text"
            yield Piece(token, "")
            break
        yield Piece(token, stream.push(token))
        if i + 1 < n_tokens and not _asked(stop):
            start = time.perf_counter()
            try:
                logits = session.decode([token], seq)
            except ModelError:
                if session.cache.n_used < session.n_ctx:
                    raise
                ended = "context full"
                break
            stats.decode_seconds += time.perf_counter() - start
            stats.n_decoded += 1
    stats.ended = ended
    if rest := stream.flush():
        yield Piece(-1, rest)


def _asked(stop: Stop | None) -> bool:
    return stop is not None and (stop() if callable(stop) else stop.is_set())


def peak_memory() -> int | None:
    """The most memory this process ever held, in bytes; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # elsewhere than on Linux: ask the C library
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, the others KiB
