"""`info`: what is inside a GGUF file. Reads the header only, so a file of many GB answers at once."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from workbench.errors import WorkbenchError, shown
from workbench.models.gguf import GGUFArray, GGUFFile, TensorInfo, open_gguf, shipped_models

HELP = "what is inside a GGUF file"


def main(argv: list[str]) -> int:
    """Print the report; 2, and one message on stderr, when the file cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m workbench info", description=HELP)
    shipped = ", ".join(shipped_models()) or "none here"
    parser.add_argument("model", metavar="MODEL", help=f"a GGUF file, or the name of a shipped model ({shipped})")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--metadata", action="store_true", help="list every key of the header (long arrays abbreviated)")
    args = parser.parse_args(argv)
    try:
        with open_gguf(args.model) as file:
            for line in itertools.chain(overview(file), *(section(file) for section, asked in
                                        [(metadata, args.metadata), (tensors, args.tensors)] if asked)):  # fmt: skip
                print(line)
    except WorkbenchError as e:
        print(f"info: {e}", file=sys.stderr)
        return 2
    return 0


def overview(file: GGUFFile) -> Iterator[str]:
    """The report without its options, line by line."""
    meta = file.metadata
    arch = meta.get("general.architecture", "")
    yield from _columns([
        ("file", f"{shown(file.path.name)}, {_bytes(file.storage.size)}"),
        ("GGUF", f"version {file.version}, {len(meta):,} keys, {len(file.tensors):,} tensors, "
                 f"data from byte {file.data_offset:,}, aligned to {file.alignment}"),
        ("architecture", _value(arch) or "not given"),
        ("name", _value(meta.get("general.name", "not given"))),
        ("tokenizer", _tokenizer(file)),
        ("parameters", _parameters(file)),
        ("experts", _experts(file)),
    ])  # fmt: skip
    yield "\nhyper-parameters"
    prefix = f"{arch}."
    yield from _columns((shown(k.removeprefix(prefix)), _value(meta[k])) for k in meta if k.startswith(prefix))
    yield "\ntensors by type"
    yield from _columns(_types(file.tensors.values()), right=(1, 2, 3))


def metadata(file: GGUFFile) -> Iterator[str]:
    """Every key with its type and value."""
    yield "\nmetadata"
    yield from _columns((shown(k), file.metadata.kind(k), _value(v)) for k, v in file.metadata.items())


def tensors(file: GGUFFile) -> Iterator[str]:
    """Every tensor: name, type, extents (fastest first), bytes, offset in the file."""
    yield "\ntensors"
    rows = ((shown(t.name), t.dtype.name, _extents(t), f"{t.nbytes:,} bytes", f"at {t.offset:,}") for t in file.tensors.values())
    yield from _columns(rows, right=(3,))


def _extents(t: TensorInfo) -> str:
    n_dims = max((i + 1 for i, n in enumerate(t.ne) if n != 1), default=1)
    return "x".join(map(str, t.ne[:n_dims]))


def _tokenizer(file: GGUFFile) -> str:
    meta = file.metadata
    parts = [_value(meta.get("tokenizer.ggml.model", "none")), _value(meta.get("tokenizer.ggml.pre", ""))]
    for name in ("tokens", "merges"):
        array = meta.get(f"tokenizer.ggml.{name}")
        if isinstance(array, GGUFArray):
            parts.append(f"{len(array):,} {name}")
    parts += [f"{n.upper()} {_value(meta[k])}" for n in ("bos", "eos") if (k := f"tokenizer.ggml.{n}_token_id") in meta]
    return ", ".join(p for p in parts if p)


def _expert_tensors(file: GGUFFile) -> list[TensorInfo]:
    return [t for t in file.tensors.values() if t.name.endswith("_exps.weight") and t.ne[2] > 1]


def _routing(file: GGUFFile) -> tuple[Any, Any]:
    """How many experts there are and how many a token uses, as the header says."""
    arch = file.metadata.get("general.architecture", "")
    return file.metadata.get(f"{arch}.expert_count"), file.metadata.get(f"{arch}.expert_used_count")


def _parameters(file: GGUFFile) -> str:
    total = sum(t.n_elements for t in file.tensors.values())
    routed = _expert_tensors(file)
    _, used = _routing(file)
    if not routed or type(used) is not int:
        return f"{total:,}"
    active = total - sum(t.n_elements - t.n_elements // t.ne[2] * min(max(used, 0), t.ne[2]) for t in routed)
    return f"{total:,}, {active:,} of them active per token"


def _experts(file: GGUFFile) -> str:
    routed = _expert_tensors(file)
    count, used = _routing(file)
    if not routed:
        return "none"
    layers: dict[str, int] = {}
    for t in routed:
        layer = t.name.rpartition(".ffn_")[0]
        layers[layer] = layers.get(layer, 0) + t.nbytes // t.ne[2]
    low, high = min(layers.values()), max(layers.values())
    each = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    shared = sum(t.nbytes for t in file.tensors.values() if t.name.endswith("_shexp.weight"))
    also = f"; {shared:,} bytes of experts that are always on" if shared else ""
    return f"{_value(count)}, {_value(used)} used per token, in {len(layers)} layers; {each} bytes per expert and layer{also}"


def _types(infos: Iterable[TensorInfo]) -> Iterator[tuple[str, ...]]:
    table: dict[str, list[int]] = {}
    for t in infos:
        row = table.setdefault(t.dtype.name, [0, 0, 0])
        for i, n in enumerate((1, t.n_elements, t.nbytes)):
            row[i] += n
    table["all"] = [sum(r[i] for r in table.values()) for i in range(3)]
    return ((name, f"{n:,} tensors", f"{elements:,} elements", f"{nbytes:,} bytes") for name, (n, elements, nbytes) in table.items())


def _value(value: Any) -> str:
    """A value of the metadata on one line: arrays abbreviated, text escaped and cut."""
    if not isinstance(value, GGUFArray):
        return shown(value[:200] if isinstance(value, str) else value)
    first = [shown(v if isinstance(v, float | int) else v[:200], 20) for v in itertools.islice(value, 6)]
    return f"{len(value):,}: [{', '.join(first)}{', …' if len(value) > 6 else ''}]"


def _bytes(n: int) -> str:
    return f"{n:,} bytes" if n < 10**6 else f"{n / 10**6:,.1f} MB" if n < 10**10 else f"{n / 10**9:,.1f} GB"


def _columns(rows: Iterable[tuple[str, ...]], right: tuple[int, ...] = ()) -> Iterator[str]:
    """Rows as aligned columns; the last column is as long as it is."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        yield "  " + "  ".join(cells).rstrip()
