"""The tokenizer against Hugging Face's own file, llama.cpp's tokens, and texts cut at every byte."""
import importlib
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.craft import BOOL, I32, STR, U32, array, gguf, key, parsed
from workbench import paths
from workbench.errors import DependencyError, ModelError, ParameterError
from workbench.models.gguf import open_gguf, shipped_models
from workbench.models.tokenizer import Tokenizer, _byte_alphabet

SAMPLES = ["c", "chinese", "english", "maths", "numeric", "python"]
ALPHABET = list(_byte_alphabet())


@pytest.fixture(scope="module")
def tokenizer():
    with open_gguf("tiny-mixtral-f16") as file:
        return Tokenizer.from_gguf(file)


@pytest.fixture(scope="module")
def reference():
    return importlib.import_module("tokenizers").Tokenizer.from_file(str(paths.models_dir() / "tokenizer.json"))


# ---- against tokenizer.json and llama.cpp


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples_give_the_ids_of_tokenizer_json_and_come_back(tokenizer, reference, sample):
    content = (paths.models_dir() / "samples" / f"{sample}.txt").read_bytes().decode("utf-8")
    ids = tokenizer.encode(content, bos=False)
    assert ids == reference.encode(content).ids
    assert len(ids) > 10_000
    assert tokenizer.decode(ids) == content
    assert tokenizer.encode(content) == [0, *ids]
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == content


@pytest.mark.parametrize("model", sorted(shipped_models()))
def test_oracle_prompts_give_the_tokens_of_llama_cpp(model, data):
    prompts = json.loads((data / "oracle" / "prompts.json").read_text("utf-8"))
    with open_gguf(model) as file:
        tokenizer = Tokenizer.from_gguf(file)
    assert len(prompts) >= 6
    for prompt in prompts:
        assert tokenizer.encode(prompt["text"]) == prompt["tokens"]
        assert tokenizer.decode(prompt["tokens"]) == prompt["text"]


@given(st.text())
def test_any_text_comes_back_and_equals_the_reference(tokenizer, reference, content):
    ids = tokenizer.encode(content, bos=False)
    assert ids == reference.encode(content).ids
    if "<|endoftext|>" not in content:
        assert tokenizer.decode(ids) == content


@given(st.lists(st.integers(0, 2047), max_size=40))
def test_any_tokens_decode_as_the_reference_does(tokenizer, reference, ids):
    assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.decode(ids, special=True) == reference.decode(ids, skip_special_tokens=False)


# ---- streams


@given(st.lists(st.integers(0, 2047), max_size=40))
def test_a_stream_ends_with_the_text_of_all_tokens(tokenizer, ids):
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""


def test_a_stream_never_shows_half_a_character(tokenizer):
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_vocab) if len(tokenizer.token_bytes(i)) == 1}
    content = "aé今🙂b"
    stream = tokenizer.stream()
    shown = [stream.push(single[bytes([b])]) for b in content.encode()]
    assert shown == ["a", "", "é", "", "", "今", "", "", "", "🙂", "b"]
    assert stream.push(single[b"\xe4"]) == "" and stream.flush() == "\ufffd"
    assert stream.push(single[b"x"]) == "x", "nothing is left over from before the flush"


# ---- single tokens


def test_token_text_is_readable(tokenizer):
    by_text = {tokenizer.token_text(i): i for i in range(tokenizer.n_vocab)}
    assert len(by_text) == tokenizer.n_vocab == 2048
    assert {"<|endoftext|>", " ", "\\n", "\\x00", "\\xe4", "今", "!"} <= by_text.keys()
    assert all(t.isprintable() for t in by_text)


def test_all_bytes_have_a_token(tokenizer):
    assert {tokenizer.token_bytes(i) for i in range(2048)} >= {bytes([b]) for b in range(256)}


def test_special_tokens(tokenizer):
    assert (tokenizer.bos, tokenizer.eos, tokenizer.eog, tokenizer.special, tokenizer.add_bos) == (0, 0, {0}, {0}, True)
    assert tokenizer.encode("a<|endoftext|>b", bos=False) == [tokenizer.encode("a", bos=False)[0], 0, tokenizer.encode("b", bos=False)[0]]
    assert tokenizer.decode([0, *tokenizer.encode("hi", bos=False)]) == "hi"
    assert tokenizer.decode([0], special=True) == "<|endoftext|>"
    assert tokenizer.stream().push(0) == "" and tokenizer.stream(special=True).push(0) == "<|endoftext|>"
    assert tokenizer.encode("") == [0] and tokenizer.encode("", bos=False) == []


@pytest.mark.parametrize("token", [-1, 2048, 2**40])
def test_no_such_token(tokenizer, token):
    for use in (tokenizer.token_bytes, tokenizer.token_text, lambda t: tokenizer.decode([t]), tokenizer.stream().push):
        with pytest.raises(ParameterError, match=f"token id {token}"):
            use(token)


def test_half_a_character_in_the_text_is_refused(tokenizer):
    with pytest.raises(ParameterError, match=r"\\udce4.* at position 2"):
        tokenizer.encode("ab\udce4")


# ---- other files


def model(tokens=(), merges=(), types=None, model="gpt2", pre="gpt-2", extra=()):
    tokens = [*ALPHABET, *tokens]
    keys = [key("tokenizer.ggml.model", STR, model), key("tokenizer.ggml.pre", STR, pre), array("tokenizer.ggml.tokens", STR, tokens),
            array("tokenizer.ggml.merges", STR, merges), *extra]  # fmt: skip
    if types is not None:
        keys.append(array("tokenizer.ggml.token_type", I32, [1] * len(ALPHABET) + types))
    return parsed(gguf(keys))


def test_merges_apply_in_order_and_user_tokens_stand_as_written():
    t = Tokenizer.from_gguf(model(["ab", "bc", "abc", " x ", "</s>"], ["a b", "b c", "ab c"], [1, 1, 1, 4, 3],
                                  extra=[key("tokenizer.ggml.eos_token_id", U32, 260), key("tokenizer.ggml.eot_token_id", U32, 258)]))  # fmt: skip
    assert [t.token_text(i) for i in t.encode("abcbc x </s>")] == ["abc", "bc", " x ", "</s>"]
    assert t.decode(t.encode("abcbc x </s>")) == "abcbc x "
    assert (t.bos, t.eos, t.eog, t.special, t.add_bos) == (None, 260, {260, 258}, {260}, False)
    assert t.encode("ab") == t.encode("ab", bos=False) == [256]


@pytest.mark.parametrize(("file", "word"), [
    (model(model="llama", pre="default"), "model 'llama' with pre 'default'"),
    (model(model="bert", pre=""), "model 'bert'"),
    (model(pre="llama-bpe"), "pre 'llama-bpe'"),
    (model(pre="x\x1b"), r"pre 'x\\x1b'"),
    (parsed(gguf()), "no key 'tokenizer.ggml.model'"),
    (parsed(gguf([key("tokenizer.ggml.model", STR, "gpt2"), key("tokenizer.ggml.pre", STR, "gpt-2")])), "no key 'tokenizer.ggml.tokens'"),
    (model(["aa", "aa"]), "'aa' occurs twice"),
    (model(["aa"], ["a a", "b b"]), "do not fit together"),
    (model(["aa"], ["aa"]), "do not fit together"),
    (model(["aa"], types=[1, 1]), "258 token types for 257 tokens"),
    (model(["a\udcff".encode("utf-8", "surrogateescape")]), "do not fit together"),
    (model(extra=[key("tokenizer.ggml.bos_token_id", U32, 256)]), "id of the BOS token is 256"),
    (model(extra=[key("tokenizer.ggml.eot_token_id", U32, 2**31)]), "end of generation token is 2147483648"),
    (model(extra=[key("tokenizer.ggml.add_bos_token", BOOL, 1)]), "no BOS token"),
    (model(extra=[key("tokenizer.ggml.bos_token_id", STR, "x")]), "bos_token_id"),
    (parsed(gguf([key("tokenizer.ggml.model", STR, "gpt2"), key("tokenizer.ggml.pre", STR, "gpt-2"), array("tokenizer.ggml.merges", STR, []),
                  array("tokenizer.ggml.tokens", STR, ALPHABET[:-2])])), "no tokens for 2 of the 256 bytes"),
    (parsed(gguf([key("tokenizer.ggml.model", STR, "gpt2"), key("tokenizer.ggml.pre", STR, "gpt-2"),
                  array("tokenizer.ggml.tokens", I32, [1])])), "array of i32"),
])  # fmt: skip
def test_what_is_not_supported_says_so(file, word):
    with pytest.raises(ModelError, match=word) as error:
        Tokenizer.from_gguf(file)
    assert error.value.expected


def test_other_kinds_say_which_are_supported():
    with pytest.raises(ModelError) as error:
        Tokenizer.from_gguf(model(model="llama", pre="default"))
    assert "'gpt2' with pre 'gpt-2'" in error.value.expected


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DependencyError, match="tokenizers"):
        Tokenizer.from_gguf(model())


def test_the_package_is_loaded_only_when_needed():
    code = "import sys, workbench.models.tokenizer, workbench.models.gguf; sys.exit('tokenizers' in sys.modules or 'gguf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=paths.PACKAGE.parent, check=False).returncode == 0
