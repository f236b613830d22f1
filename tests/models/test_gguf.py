"""The GGUF parser against the reader of the `gguf` package, and against files that lie."""
import contextlib
import os
import struct
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models import craft
from tests.models.craft import BOOL, F32, I32, STR, U16, U32, U64, array, gguf, key, parsed, tensor, text
from workbench import paths
from workbench.cli import info
from workbench.errors import ContextClosed, ContextError, DTypeError, FileFormatError, ModelError, StorageError
from workbench.models.gguf import MAX_ELEMENTS, GGUFArray, find_model, open_gguf, shipped_models
from workbench.tensors import Context, Usage

MODELS = sorted(shipped_models())
F32_DATA = np.arange(16, dtype="<f4").tobytes()


def test_four_models_are_shipped():
    assert MODELS == ["tiny-deepseek-f16", "tiny-mixtral-f16", "tiny-mixtral-q4_0", "tiny-mixtral-q8_0"]


# ---- against the gguf package


@pytest.mark.parametrize("model", MODELS)
def test_metadata_equals_that_of_the_gguf_package(model):
    from gguf import GGUFReader

    reader = GGUFReader(find_model(model))
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    with open_gguf(model) as file:
        ours = {k: list(v) if isinstance(v, GGUFArray) else v for k, v in file.metadata.items()}
        assert ours == theirs
        assert list(ours) == list(theirs)
        assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in theirs.items()}
        assert (file.version, file.alignment, file.data_offset) == (3, reader.alignment, reader.data_offset)


@pytest.mark.parametrize("model", MODELS)
def test_tensors_equal_those_of_the_gguf_package(model):
    from gguf import GGUFReader

    reader = GGUFReader(find_model(model))
    with open_gguf(model) as file:
        assert list(file.tensors) == [t.name for t in reader.tensors]
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert (ours.dtype.id, ours.nbytes, ours.offset) == (theirs.tensor_type, theirs.n_bytes, theirs.data_offset)
            assert list(ours.ne) == theirs.shape.tolist() + [1] * (4 - len(theirs.shape))
            t = file.tensor(theirs.name)
            assert (t.name, t.op, t.dtype, t.ne) == (theirs.name, "NONE", ours.dtype, ours.ne)
            assert np.array_equal(t.raw_rows().reshape(-1), theirs.data.view(np.uint8).reshape(-1))


def test_a_file_written_by_the_gguf_package_is_read(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "w.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_bool("a.yes", True)
    writer.add_int64("a.big", -(2**60))
    writer.add_array("a.words", ["π", "", "b"])
    writer.add_array("a.numbers", [1, -2, 3])
    weights = np.arange(70, dtype=np.float32).reshape(7, 10)
    writer.add_tensor("first", weights)
    writer.add_tensor("second", weights.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(tmp_path / "w.gguf") as file:
        assert (file.alignment, file.metadata["a.yes"], file.metadata["a.big"]) == (64, True, -(2**60))
        assert list(file.metadata["a.words"]) == ["π", "", "b"]
        assert file.metadata["a.numbers"].numpy().tolist() == [1, -2, 3]
        assert np.array_equal(file.tensor("first").array()[0, 0], weights)
        assert np.array_equal(file.tensor("second").array()[0, 0], weights.astype(np.float16))
        assert file.tensors["second"].offset % 64 == 0


SCALARS = {
    craft.U8: st.integers(0, 255), craft.I8: st.integers(-128, 127), U16: st.integers(0, 2**16 - 1), craft.I16: st.integers(-(2**15), 2**15 - 1),
    U32: st.integers(0, 2**32 - 1), I32: st.integers(-(2**31), 2**31 - 1), F32: st.floats(width=32, allow_nan=False),
    BOOL: st.booleans(), STR: st.text(max_size=20), U64: st.integers(0, 2**64 - 1), craft.I64: st.integers(-(2**63), 2**63 - 1),
    craft.F64: st.floats(allow_nan=False),
}
TYPED = st.one_of(*(s.map(lambda x, k=k: (k, x)) for k, s in SCALARS.items()))
LISTS = st.one_of(*(st.lists(s, max_size=9).map(lambda x, k=k: (k, x)) for k, s in SCALARS.items()))


@given(st.dictionaries(st.text(min_size=1, max_size=12).filter(lambda k: k not in ("general.alignment", "split.count")), st.one_of(TYPED, LISTS), max_size=8))
def test_any_metadata_comes_back(wanted):
    keys = [array(k, kind, x) if isinstance(x, list) else key(k, kind, x) for k, (kind, x) in wanted.items()]
    file = parsed(gguf(keys))
    assert list(file.metadata) == list(wanted)
    for name, (_, x) in wanted.items():
        got = file.metadata[name]
        if isinstance(x, list):
            assert list(got) == x == [got[i] for i in range(len(x))]
            assert len(got) == len(x)
        else:
            assert got == x and type(got) is type(x)


# ---- laziness


@contextlib.contextmanager
def traced():
    """Yields a function that tells the peak of traced memory so far."""
    tracemalloc.start()
    last = 0

    def peak():
        return tracemalloc.get_traced_memory()[1] if tracemalloc.is_tracing() else last

    try:
        yield peak
    finally:
        last = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def test_a_large_vocabulary_costs_nothing_until_it_is_read(tmp_path):
    words = [f"word {i}" for i in range(250_000)]
    (tmp_path / "v.gguf").write_bytes(gguf([array("words", STR, words), array("scores", F32, [0.5] * 250_000)]))
    with traced() as peak:
        file = open_gguf(tmp_path / "v.gguf")
        assert peak() < 200_000, "opening took memory"
        array_ = file.metadata["words"]
        assert array_[249_999] == array_[-1] == "word 249999"
        assert peak() < 250_000 * 8 + 200_000, "an index into the strings took more than a table of where they start"
    assert list(array_) == words
    scores = file.metadata["scores"].numpy()
    assert not scores.flags.owndata and not scores.flags.writeable and scores.sum() == 125_000
    with pytest.raises(IndexError):
        array_[250_000]
    with pytest.raises(DTypeError, match="strings"):
        array_.numpy()


@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
def test_eight_gigabytes_open_without_being_read(tmp_path):
    path = tmp_path / "huge.gguf"
    head = gguf([key("general.architecture", STR, "llama")], [tensor("w", [2**16, 2**15])])
    path.write_bytes(head)
    os.truncate(path, len(head) + 2**33)
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with open_gguf(path) as file:
        w = file.tensor("w").array()
        assert w.shape == (1, 1, 2**15, 2**16) and w[0, 0, -1, -1] == 0
        assert time.process_time() - start < 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 50 * 2**20, f"{grown:,} bytes of memory for a file of 8 GiB"


@pytest.mark.skipif(sys.platform == "win32", reason="needs sparse files")
@pytest.mark.parametrize(("head", "word"), [
    (gguf(n_keys=2**30, alignment=1), "number of keys"),
    (gguf(n_tensors=2**28, alignment=1), "number of tensors"),
    (gguf([array("a", STR, [], 2**29)], alignment=1), "elements in value of 'a'"),
    (gguf([array("a", BOOL, [], 2**33)], alignment=1), "elements in value of 'a'"),
    (gguf([array("a", STR, [], MAX_ELEMENTS)], n_keys=2, alignment=1), "key 1 is empty"),
    (gguf([text("a") + struct.pack("<IQ", STR, 2**33)], alignment=1), "bytes of text"),
    (gguf(n_keys=2, alignment=1), "key 0 is empty"),
    (gguf(n_tensors=2, alignment=1), "occurs twice"),
], ids=["keys", "tensors", "strings", "bools", "strings up to the limit", "text", "no keys", "no names"])  # fmt: skip
def test_claims_that_a_huge_file_could_hold_are_refused_at_once(tmp_path, head, word):
    path = tmp_path / "sparse.gguf"
    path.write_bytes(head)
    os.truncate(path, 2**34)
    start = time.process_time()
    with pytest.raises(FileFormatError, match=word):
        open_gguf(path)
    assert time.process_time() - start < 1
    with traced() as peak, pytest.raises(FileFormatError, match=word):
        open_gguf(path)
    assert peak() < 10**6


# ---- files that lie


def one_tensor(**kw):
    fields = {"name": "w", "ne": [4, 4], "kind": 0, "offset": 0} | kw
    return gguf([], [tensor(**fields)], F32_DATA)


WRONG = {
    "bad magic": (gguf(magic=b"GGUX"), "begins with the bytes 47 47 55 58", "GGUF"),
    "cut in the magic": (b"GG", "looks like text", "GGUF"),
    "cut in the counts": (b"GGUF\3\0\0\0\1", "number of tensors at byte 8", "at most 1"),
    "version 0": (gguf(version=0), "version 0x0", "version 2 or 3"),
    "version 1": (gguf(version=1), "GGUF version 1", "version 2 or 3"),
    "version 4": (gguf(version=4), "GGUF version 4", "version 2 or 3"),
    "big endian": (gguf(version=3 << 24), "big-endian", "little endian"),
    "too many keys": (gguf(n_keys=2**40), "number of keys: 1,099,511,627,776", "at most"),
    "too many tensors": (gguf(n_tensors=2**63), "number of tensors", "at most"),
    "one key too many": (gguf([key("a", U32, 1)], n_keys=2, data=bytes(60)), "key 1 is empty", "not empty"),
    "long key": (gguf([text("k" * 70_000)]), "key 0", "at most 65535"),
    "key past the end": (gguf([text("k", 60_000)], data=bytes(40)), "key 0", "at most"),
    "empty key": (gguf([key("", U32, 1)]), "key 0 is empty", "not empty"),
    "key twice": (gguf([key("a", U32, 1), key("a", U32, 2)]), "'a' occurs twice", "once"),
    "unknown value type": (gguf([text("a") + struct.pack("<IQ", 13, 0)]), "'a' has type 13", "0 to 12"),
    "string past the end": (gguf([text("a") + struct.pack("<IQ", STR, 2**62)]), "in value of 'a' reaches past the end", "1 strings"),
    "bool of 2": (gguf([text("a") + struct.pack("<IB", BOOL, 2)], data=bytes(9)), "a bool, is 2", "0 or 1"),
    "bool array": (gguf([array("a", craft.BOOL, [0, 1, 255])]), "a bool, is 255", "0 or 1"),
    "array of arrays": (gguf([text("a") + struct.pack("<IIQ", 9, 9, 1)], data=bytes(90)), "array of arrays", "numbers"),
    "array type": (gguf([text("a") + struct.pack("<IIQ", 9, 77, 1)]), "has type 77", "0 to 12"),
    "array past the end": (gguf([array("a", U64, [1, 2], 2**61)]), "elements in value of 'a'", "at most"),
    "strings past the end": (gguf([array("a", STR, ["x", "y"], 3)], data=b"\xff" * 40, alignment=1), "past the end", "3 strings"),
    "string length of 2**64-1": (gguf([text("a") + struct.pack("<IIQ", 9, STR, 1) + b"\xff" * 8]), "past the end", "1 strings"),
    "alignment 0": (gguf([key("general.alignment", U32, 0)]), "general.alignment is 0", "a power of two"),
    "alignment 48": (gguf([key("general.alignment", U32, 48)]), "general.alignment is 48", "a power of two"),
    "alignment as text": (gguf([key("general.alignment", STR, "32")]), "has type str", "u32"),
    "part of a model": (gguf([key("split.no", U16, 1), key("split.count", U16, 3)]), "a part of a model split into 3 files", "one file"),
    "long tensor name": (one_tensor(name="n" * 64), "name of tensor 0", "at most 63"),
    "5 dimensions": (one_tensor(n_dims=5), "5 dimensions", "at most 4"),
    "2**32-1 dimensions": (one_tensor(n_dims=2**32 - 1), "4,294,967,295 dimensions", "at most 4"),
    "negative extent": (one_tensor(ne=[2**64 - 4, 4]), "ne=", "below 2**58"),
    "extents overflow": (one_tensor(ne=[2**31, 2**31, 2**31]), "ne=", "below 2**58"),
    "extents overflow behind a zero": (one_tensor(ne=[2**62, 0, 2**62]), "ne=", "below 2**58"),
    "removed type": (one_tensor(kind=4), "type id 4, which ggml has removed", "0 (f32)"),
    "unknown type": (one_tensor(kind=9999), "'w' has ggml type id 9999", "0 (f32)"),
    "half a block": (one_tensor(ne=[16, 1], kind=8), "rows of 16 elements in q8_0", "a multiple of 32"),
    "misaligned": (one_tensor(offset=4), "at offset 4", "offset 0"),
    "offset of 2**64-32": (one_tensor(offset=2**64 - 32), "at offset 18,446,744,073,709,551,584", "offset 0"),
    "data past the end": (one_tensor(ne=[4, 5]), "takes 80 bytes, 64 are left", "the whole tensor"),
    "data far past the end": (one_tensor(ne=[2**57]), "takes 576,460,752,303,423,488 bytes", "the whole tensor"),
    "name twice": (gguf([], [tensor("w", [1]), tensor("w", [1], offset=32)], F32_DATA), "'w' occurs twice", "once"),
    "overlap": (gguf([], [tensor("v", [16]), tensor("w", [8], offset=32)], F32_DATA), "'w' at offset 32", "offset 64"),
    "gap": (gguf([], [tensor("v", [4]), tensor("w", [4], offset=64)], F32_DATA + bytes(99)), "'w' at offset 64", "offset 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_named(case):
    raw, found, expected = WRONG[case]
    with pytest.raises(FileFormatError) as error:
        parsed(raw)
    assert found in error.value.found and error.value.found.startswith("crafted.gguf: ")
    assert expected in error.value.expected
    assert error.value.hint


def test_the_file_behind_those_cases_is_right():
    file = parsed(one_tensor())
    assert file.tensor("w").array().reshape(-1).tolist() == list(range(16))


@pytest.mark.parametrize("raw", [
    gguf(version=2),
    gguf([key("split.count", U16, 1)]),
    gguf([key("general.alignment", U32, 1)], [tensor("w", [3])], bytes(12), alignment=1),
    gguf([], [tensor("v", [1]), tensor("w", [3], offset=32)], bytes(44)),  # no padding behind the last one
    gguf([], [tensor("none", [0, 4]), tensor("scalar", [])], bytes(4)),
    gguf([], [tensor("none", [0, 2**57], 28), tensor("too", [2**56, 0, 3])]),
], ids=["version 2", "one part", "alignment 1", "no padding at the end", "no elements", "no elements, long rows"])  # fmt: skip
def test_rare_but_right(raw):
    file = parsed(raw)
    assert [file.tensor(name).numpy().size for name in file.tensors] == [t.n_elements for t in file.tensors.values()]


def test_bytes_that_are_no_text_are_kept_and_shown_escaped(capsys, tmp_path):
    raw = gguf([key(b"k\xff\x1b[31m", STR, b"v\xfe\x07"), array("general.name", STR, [b"\x9b2J", "\u202e<b>"])],
               [tensor(b"t\xff\x00\x1b", [4])], bytes(16))  # fmt: skip
    (tmp_path / "odd.gguf").write_bytes(raw)
    with open_gguf(tmp_path / "odd.gguf") as file:
        (name,) = file.tensors
        assert name.encode("utf-8", "surrogateescape") == b"t\xff\x00\x1b"
        t = file.tensor(name)
        assert t.name == name and t.label == r"'t\udcff\x00\x1b'"
    assert info.main([str(tmp_path / "odd.gguf"), "--metadata", "--tensors"]) == 0
    out = capsys.readouterr().out
    assert r"k\udcff\x1b[31m" in out and r"t\udcff\x00\x1b" in out and r"\u202e<b>" in out
    assert all(c.isprintable() or c == "\n" for c in out)


# ---- what is not GGUF


@pytest.mark.parametrize(("content", "word"), [
    (b"PK\x03\x04" + bytes(50), "zip archive"),
    (struct.pack("<Q", 60) + b'{"w":{"dtype":"F32"', "safetensors"),
    (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    (b"\x80\x02}q\x00.", "pickle"),
    (b"\x1f\x8b\x08", "compressed"),
    (b"<!DOCTYPE html><html>", "web page"),
    (b"tjgg\1\0\0\0", "before GGUF"),
    (b"# a read-me\nwith text, \xc3\xbcberall\n" * 9, "looks like text"),
    (b"\0" * 100, "zero bytes"),
    (b"\x01\x02\xff\xfe" * 20, "begins with the bytes 01 02 ff fe"),
    (b"", "an empty file"),
])  # fmt: skip
def test_other_files_are_recognised(tmp_path, content, word):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(FileFormatError, match=word) as error:
        open_gguf(tmp_path / "x.gguf")
    assert error.value.expected and error.value.hint


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(FileFormatError, match="no file 'nowhere.gguf'") as error:
        open_gguf("nowhere.gguf")
    assert "tiny-mixtral-f16" in error.value.hint
    with pytest.raises(FileFormatError, match="no file"):
        open_gguf("")
    with pytest.raises(FileFormatError, match="no file"):
        open_gguf("a\0b")
    (tmp_path / "m.gguf").write_bytes(gguf())
    with pytest.raises(FileFormatError, match="a folder") as error:
        open_gguf(tmp_path)
    assert "m.gguf" in error.value.hint


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_a_pipe_and_a_dangling_link_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="a device or a pipe"):
        open_gguf(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(FileFormatError, match="cannot be opened"):
        open_gguf(tmp_path / "link")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user whom permissions bind")
def test_no_permission(tmp_path):
    (tmp_path / "m.gguf").write_bytes(gguf())
    (tmp_path / "m.gguf").chmod(0)
    with pytest.raises(FileFormatError, match="cannot be opened") as error:
        open_gguf(tmp_path / "m.gguf")
    assert "permissions" in error.value.hint


def test_models_are_found_by_name_or_path():
    path = paths.models_dir() / "tiny-mixtral-f16.gguf"
    assert find_model("tiny-mixtral-f16") == find_model("tiny-mixtral-f16.gguf") == find_model(path) == find_model(str(path)) == path


# ---- the open file


def test_weights_are_read_only_mapped_memory():
    with open_gguf("tiny-mixtral-q4_0") as file:
        storage = file.storage
        assert storage.usage is Usage.WEIGHTS and storage.is_host and storage.size == file.path.stat().st_size
        t = file.tensor("blk.0.attn_norm.weight")
        assert t.storage is storage and np.shares_memory(t.array(), storage.host_bytes())
        with pytest.raises(StorageError, match="read-only"):
            t.set(np.zeros(128, np.float32))
        with pytest.raises(ValueError, match="read-only"):
            t.array()[...] = 0


def test_tensors_join_a_context_without_memory():
    with open_gguf("tiny-mixtral-q4_0") as file:
        with Context(2**14, no_alloc=True) as context:
            t = file.tensor("output_norm.weight", context)
            assert context.tensors == [t] and np.isfinite(t.array()).all()
        with pytest.raises(ContextClosed):
            t.array()
        with Context(2**14) as context, pytest.raises(ContextError, match="output_norm"):
            file.tensor("output_norm.weight", context)
        with pytest.raises(ModelError, match="no tensor 'nope'"):
            file.tensor("nope")


def test_use_after_close_is_an_error_and_views_survive():
    file = open_gguf("tiny-mixtral-q4_0")
    t, tokens = file.tensor("output_norm.weight"), file.metadata["tokenizer.ggml.tokens"]
    view = t.array()
    before = view.copy()
    file.close()
    file.close()
    assert np.array_equal(view, before)
    for use in (t.array, lambda: tokens[0], lambda: list(tokens), lambda: file.metadata["general.name"]):
        with pytest.raises(StorageError):
            use()


def test_metadata_is_checked_where_it_is_used():
    file = parsed(gguf([key("general.architecture", STR, "llama"), key("llama.block_count", U32, 6), key("x.f", F32, float("nan")),
                        key("x.b", BOOL, 1), array("x.a", I32, [1, 2])]))  # fmt: skip
    assert (file.architecture, file.name, file.hparam("block_count")) == ("llama", "crafted", 6)
    assert file.meta("llama.block_count", kind=float) == 6.0
    assert file.hparam("expert_count", 0) == 0
    assert list(file.meta("x.a", kind=GGUFArray)) == [1, 2]
    for use, word in [(lambda: file.hparam("expert_count"), "llama.expert_count"), (lambda: file.meta("llama.block_count", kind=str), "a value of type str"),
                      (lambda: file.meta("x.b", kind=int), "bool"), (lambda: file.meta("x.a", kind=int), "array of i32"),
                      (lambda: file.meta("x.f", kind=float), "finite")]:  # fmt: skip
        with pytest.raises(ModelError, match=word):
            use()
    with pytest.raises(ModelError, match="general.architecture"):
        _ = parsed(gguf()).architecture


# ---- info


def test_info_tells_what_the_model_card_says(capsys):
    assert info.main(["tiny-mixtral-q4_0"]) == 0
    out = capsys.readouterr().out
    for words in ["version 3", "llama", "tiny-mixtral", "2,048 tokens", "3,776,128", "8, 2 used per token, in 6 layers",
                  f"{61_440 // 32 * 18:,} bytes per expert", "rope.freq_base", "q4_0  18 tensors"]:  # fmt: skip
        assert words in out
    assert "blk.0" not in out


@pytest.mark.parametrize("model", MODELS)
def test_info_lists_everything(model, capsys):
    assert info.main([model, "--tensors", "--metadata"]) == 0
    out = capsys.readouterr().out
    with open_gguf(model) as file:
        assert all(f"  {k} " in out for k in file.metadata)
        assert all(f"  {t.name} " in out and f"{t.nbytes:,} bytes" in out for t in file.tensors.values())


def test_info_survives_odd_metadata(capsys, tmp_path):
    keys = [key("general.architecture", U32, 5), array("general.name", STR, ["a"]), key("5.expert_used_count", I32, -7), key("5.expert_count", STR, "x\n"),
            key("tokenizer.ggml.tokens", U32, 3), array("tokenizer.ggml.bos_token_id", STR, ["\x1b"])]  # fmt: skip
    (tmp_path / "odd.gguf").write_bytes(gguf(keys, [tensor("blk.0.ffn_up_exps.weight", [1, 1, 2])], bytes(8)))
    assert info.main([str(tmp_path / "odd.gguf"), "--tensors", "--metadata"]) == 0
    out = capsys.readouterr().out
    assert r"x\n, -7 used" in out and all(c.isprintable() or c == "\n" for c in out)


def test_info_ends_with_one_clear_message(capsys, tmp_path):
    (tmp_path / "x\x1b.gguf").write_bytes(b"PK\x03\x04")
    assert info.main([str(tmp_path / "x\x1b.gguf")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "zip archive" in captured.err and "Traceback" not in captured.err
    assert "\x1b" not in captured.err


def run_info(*args, **kw):
    line = [sys.executable, "-m", "workbench", "info", "tiny-mixtral-q4_0", "--here", *args]
    return subprocess.Popen(line, cwd=paths.PACKAGE.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kw)


def test_info_in_a_pipe_that_nobody_reads_and_a_terminal_without_unicode():
    with run_info("--tensors") as quiet, run_info("--metadata", env={**os.environ, "PYTHONIOENCODING": "ascii"}) as plain:
        quiet.stdout.close()
        assert quiet.stderr.read() == b""
        out, err = plain.communicate()
    assert rb"\u0120" in out and out.isascii() and (plain.returncode, err) == (0, b"")
