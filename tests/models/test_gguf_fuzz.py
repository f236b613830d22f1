"""Shipped files cut, bent and filled with absurd numbers: they open, or say in one error why not; nothing else happens.

Each mutant goes through the parser, every value of its metadata, `info` and the tokenizer. A mutant may cost at most a
second of processor time and little memory beside itself.
"""
import random
import time
import tracemalloc
from collections import Counter

import pytest

from tests.models.craft import parsed
from workbench.cli import info
from workbench.errors import FileFormatError, WorkbenchError
from workbench.models.gguf import GGUFArray, _Header, find_model, open_gguf
from workbench.models.tokenizer import Tokenizer

MOST_BYTES = 5 * 2**20
FILES = ["tiny-mixtral-q4_0", "tiny-deepseek-f16"]
ABSURD = [0, 1, 5, 33, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


@pytest.fixture(scope="module", params=FILES)
def shipped(request):
    """The bytes of a file and the length of its header."""
    with open_gguf(request.param) as file:
        return file.path.read_bytes(), file.data_offset


@pytest.fixture(scope="module")
def number_fields(shipped):
    """Where the header holds counts, lengths, types, extents and offsets: (position, bytes), found by watching the parser."""
    fields = []
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("u32", 4), ("u64", 8)):
            plain = getattr(_Header, name)
            patch.setattr(_Header, name, lambda self, what, plain=plain, size=size: (fields.append((self.pos, size)), plain(self, what))[1])
        file = parsed(shipped[0])
    for value in file.metadata.values():
        if isinstance(value, GGUFArray) and value.type == "str":
            fields += [(start - 8, 8) for start, _ in list(value._spans())[:: len(value) // 15]]
    assert len(fields) > 400
    return fields


class Outcomes:
    """Counts what became of the mutants, and checks what each of them cost."""

    def __init__(self):
        self.seen = Counter()

    def __enter__(self):
        tracemalloc.start()
        return self

    def __exit__(self, *exc):
        tracemalloc.stop()

    def examine(self, raw):
        tracemalloc.reset_peak()
        before, start = tracemalloc.get_traced_memory()[0], time.process_time()
        self.seen[use(raw)] += 1
        cost, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1] - before
        assert cost < 1, f"{cost:.2f} s"
        assert peak < MOST_BYTES, f"{peak:,} bytes"


def use(raw):
    """Everything that reads a header; returns how far it came. Any error but ours goes through, and fails the test."""
    try:
        file = parsed(raw)
    except FileFormatError as e:
        assert e.expected and e.hint and str(e).replace("\n", "").isprintable()
        return "refused"
    for line in [*info.overview(file), *info.metadata(file), *info.tensors(file)]:
        assert line.replace("\n", "").isprintable()
    for name in file.tensors:
        t = file.tensor(name)
        assert t.offset + t.nbytes <= len(raw)
        t.raw_rows()[-1:, -1:, -1:].sum()  # the last row really is there
    try:
        tokenizer = Tokenizer.from_gguf(file)
        assert tokenizer.decode(tokenizer.encode("a 今 b", bos=False), special=True) == "a 今 b"
    except WorkbenchError:
        return "opened, no tokenizer"
    return "opened"


def test_cut_anywhere_in_the_header(shipped):
    raw, header = shipped
    rng = random.Random(1)
    with Outcomes() as outcomes:
        for length in [*range(1, 120), *sorted(rng.sample(range(120, header + 1), 120)), header + 1, len(raw) // 2, len(raw) - 1]:
            outcomes.examine(raw[:length])
    assert set(outcomes.seen) == {"refused"}


def test_absurd_numbers_in_every_field(shipped, number_fields):
    raw, rng = bytearray(shipped[0]), random.Random(2)
    with Outcomes() as outcomes:
        for pos, size in number_fields:
            was = raw[pos : pos + size]
            number = int.from_bytes(was, "little")
            candidates = {n % 2 ** (8 * size) for n in [*ABSURD, number + 1, number - 1, number * 2, number + 32, len(raw), len(raw) - pos]} - {number}
            for n in rng.sample(sorted(candidates), 1):
                raw[pos : pos + size] = n.to_bytes(size, "little")
                outcomes.examine(bytes(raw))
            raw[pos : pos + size] = was
    assert outcomes.seen["refused"] > 300, outcomes.seen


def test_flipped_bits_and_random_bytes(shipped):
    raw, header = bytearray(shipped[0]), shipped[1]
    rng = random.Random(3)
    with Outcomes() as outcomes:
        for _ in range(130):
            places = [rng.randrange(rng.choice([200, 2000, header])) for _ in range(rng.choice([1, 1, 2, 8]))]
            was = [(p, raw[p]) for p in places]
            for p in places:
                raw[p] = rng.choice([raw[p] ^ 1 << rng.randrange(8), rng.randrange(256), 0, 255])
            outcomes.examine(bytes(raw))
            for p, byte in reversed(was):
                raw[p] = byte
    assert bytes(raw) == shipped[0]
    assert len(outcomes.seen) == 3, outcomes.seen  # some of each kind: the mutants are neither all harmless nor all fatal


def test_pieces_removed_repeated_and_exchanged(shipped):
    raw, header = shipped
    rng = random.Random(4)
    with Outcomes() as outcomes:
        for _ in range(100):
            a, b = sorted(rng.sample(range(4, header), 2))
            b = min(b, a + rng.choice([1, 8, 24, 100, 10_000]))
            piece = {"out": b"", "twice": raw[a:b] * 2, "elsewhere": raw[(at := rng.randrange(header)) : at + b - a], "zero": bytes(b - a)}
            outcomes.examine(raw[:a] + piece[rng.choice(list(piece))] + raw[b:])
    assert outcomes.seen["refused"] > 30, outcomes.seen


def test_info_on_mutants_as_files(tmp_path, capsys):
    original = find_model("tiny-mixtral-q4_0").read_bytes()
    rng, path, codes = random.Random(5), tmp_path / "mutant.gguf", Counter()
    for _ in range(40):
        raw = bytearray(original)
        for _ in range(rng.choice([1, 3])):
            raw[rng.randrange(rng.choice([24, 600, 70_000]))] = rng.randrange(256)
        path.write_bytes(raw[: rng.choice([len(raw), len(raw), rng.randrange(70_000)])])
        code = info.main([str(path), "--metadata", "--tensors"])
        out, err = capsys.readouterr()
        codes[code] += 1
        assert (code, bool(out), bool(err)) in {(0, True, False), (2, False, True)}
        assert all(c.isprintable() or c == "\n" for c in out + err) and "Traceback" not in err
    assert set(codes) == {0, 2}, codes
