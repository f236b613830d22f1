"""Text to token ids and back: byte-level BPE, built from the vocabulary and merges in a GGUF file (`llama_vocab`).

Splitting and merging is done by Hugging Face's `tokenizers`; decoding is a table look-up and done here, since a stream
of tokens must be cut at whole characters: one character may be spread over several tokens.
"""

from __future__ import annotations

import codecs
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from workbench.errors import DependencyError, ModelError, ParameterError, shown
from workbench.models.gguf import GGUFArray, GGUFFile

SUPPORTED = {"gpt2": ("gpt-2",)}
"""`tokenizer.ggml.model` -> the ways to split text into words (`tokenizer.ggml.pre`) that are known here."""

CONTROL, USER_DEFINED = 3, 4  # token types that are matched in the text before it is split (`llama_token_type`)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's 256 printable characters, each standing for one byte: bytes that print stand for themselves, the
    others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE = _byte_alphabet()


class Tokenizer:
    """A vocabulary and its merges (`llama_vocab`); made by `Tokenizer.from_gguf`.

    tokens: text of each token as stored (byte-level alphabet). special: ids of control tokens. bos, eos: their ids or
    None. eog: ids that end a generation (`llama_vocab_is_eog`). add_bos: whether prompts start with BOS.
    """

    def __init__(self, tokens: Sequence[str], merges: Iterable[str], *, types: Iterable[int] | None = None, bos: int | None = None,
                 eos: int | None = None, ends: Iterable[int | None] = (), add_bos: bool = False) -> None:  # fmt: skip
        self.tokens = list(tokens)
        kinds = [1] * len(self.tokens) if types is None else list(types)
        if len(kinds) != len(self.tokens):
            raise ModelError(f"{len(kinds):,} token types for {len(self.tokens):,} tokens", "one type for each token")
        ends = {eos, *ends} - {None}
        for what, i in [("BOS", bos), *(("end of generation", e) for e in ends)]:
            if i is not None and not 0 <= i < len(self.tokens):
                raise ModelError(f"the id of the {what} token is {i}", f"0 to {len(self.tokens) - 1}, the vocabulary")
        if add_bos and bos is None:
            raise ModelError("prompts shall start with BOS, but there is no BOS token", "tokenizer.ggml.bos_token_id")
        self.bos, self.eos, self.add_bos = bos, eos, add_bos
        self.eog = frozenset(e for e in ends if e is not None)
        self.special = frozenset(i for i, kind in enumerate(kinds) if kind == CONTROL)
        self._verbatim = self.special | {i for i, kind in enumerate(kinds) if kind == USER_DEFINED}
        self._bpe = self._build(merges)

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """The tokenizer of a model. Raises ModelError for a kind that is not supported, DependencyError without `tokenizers`."""
        model = file.meta("tokenizer.ggml.model", kind=str)
        pre = file.meta("tokenizer.ggml.pre", "", str)
        if pre not in SUPPORTED.get(model, ()):
            known = " or ".join(f"model {m!r} with pre {' or '.join(map(repr, p))}" for m, p in SUPPORTED.items())
            raise ModelError(f"the tokenizer of {shown(file.path.name)} is model '{shown(model)}' with pre '{shown(pre)}'", known,
                             "token ids made elsewhere can still be fed to the model; `info` shows the file")  # fmt: skip
        tokens, merges = _array(file, "tokens", "str"), _array(file, "merges", "str")
        types = _array(file, "token_type", "i32") if "tokenizer.ggml.token_type" in file.metadata else None
        ids = {n: file.meta(f"tokenizer.ggml.{n}_token_id", None, int) for n in ("bos", "eos", "eot", "eom")}
        return cls(list(tokens), merges, types=types, bos=ids["bos"], eos=ids["eos"], ends=(ids["eot"], ids["eom"]),
                   add_bos=file.meta("tokenizer.ggml.add_bos_token", False, bool))  # fmt: skip

    @property
    def n_vocab(self) -> int:
        """Number of tokens (`llama_vocab_n_tokens`)."""
        return len(self.tokens)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of a text (`llama_tokenize`); special tokens written out in the text become themselves.

        bos: start with BOS if the model wants it (`add_bos`); False for a text that continues another one.
        """
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise ParameterError(f"the text holds {shown(text[e.start])}, half of a character, at position {e.start}", "whole characters",
                                 "text.encode('utf-8', 'replace').decode()") from None  # fmt: skip
        ids = self._bpe.encode(text, add_special_tokens=False).ids
        return [self.bos, *ids] if bos and self.add_bos and self.bos is not None else ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, perhaps a part of a character. Raises ParameterError for no token."""
        if not 0 <= token < len(self.tokens):
            raise ParameterError(f"token id {token}", f"0 to {len(self.tokens) - 1}")
        text = self.tokens[token]
        if token not in self._verbatim and all(c in _BYTE for c in text):
            return bytes(_BYTE[c] for c in text)
        return text.encode("utf-8", "surrogateescape")

    def token_text(self, token: int) -> str:
        """One token for people: control characters and bytes that are no whole character are escaped (`\\xe4`)."""
        return shown(self.token_bytes(token).decode("utf-8", "backslashreplace"))

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of token ids (`llama_detokenize`). Control tokens show only if `special`; broken characters as U+FFFD."""
        kept = (self.token_bytes(t) for t in tokens if special or t not in self.special)
        return b"".join(kept).decode("utf-8", "replace")

    def stream(self, special: bool = False) -> StreamDecoder:
        """A decoder for tokens that arrive one by one."""
        return StreamDecoder(self, special)

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.n_vocab:,} tokens, bos={self.bos}, eos={self.eos}>"

    def _build(self, merges: Iterable[str]) -> Any:
        try:
            hf = importlib.import_module("tokenizers")
        except ImportError as e:
            raise DependencyError("the package `tokenizers` is missing", "it turns text into tokens", "pip install tokenizers") from e
        vocabulary = {text: i for i, text in enumerate(self.tokens)}
        if len(vocabulary) < len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if vocabulary[t] != i)
            raise ModelError(f"token '{shown(twice)}' occurs twice in the vocabulary", "each token once")
        if missing := _BYTE.keys() - vocabulary.keys():  # `tokenizers` would drop such bytes without a word
            raise ModelError(f"the vocabulary has no tokens for {len(missing)} of the 256 bytes", "one for each: any text can be encoded")
        try:
            pairs = [(m[: (cut := m.index(" ", 1))], m[cut + 1 :]) for m in merges]
            bpe = hf.Tokenizer(hf.models.BPE(vocab=vocabulary, merges=pairs))
            bpe.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            for i in sorted(self._verbatim):
                bpe.add_tokens([hf.AddedToken(self.tokens[i], normalized=False, special=i in self.special)])
        except Exception as e:  # `tokenizers` raises bare Exceptions
            raise ModelError(f"vocabulary and merges do not fit together: {shown(e)}",
                             "merges of two tokens whose parts and result are tokens", "download the file again") from None  # fmt: skip
        if bpe.get_vocab_size() != len(self.tokens):
            raise ModelError(f"a vocabulary of {bpe.get_vocab_size():,} tokens out of {len(self.tokens):,}", "equal numbers")
        return bpe


class StreamDecoder:
    """Text out of tokens that arrive one by one: never half a character."""

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete now: nothing while a character is still unfinished."""
        if token in self._tokenizer.special and not self._special:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, mostly nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _array(file: GGUFFile, name: str, kind: str) -> GGUFArray:
    key = f"tokenizer.ggml.{name}"
    array = file.meta(key, kind=GGUFArray)
    if array.type != kind:
        raise ModelError(f"key {key!r} of {shown(file.path.name)} is {file.metadata.kind(key)}", f"array of {kind}")
    return array
