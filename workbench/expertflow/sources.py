"""Where route traces come from: the shipped ones, synthetic ones, and files of strangers with their traps.

`load` returns a `Source`: the trace, and notes on what was found and what was done about it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workbench import paths
from workbench.errors import FileFormatError, ParameterError, ShapeError, shown, shown_path
from workbench.expertflow.synthetic import SYNTHETIC, synthetic
from workbench.moe import RouteTrace
from workbench.moe.routes import DAMAGED_NPZ

SHIPPED = {"tiny-mixtral": "tiny-mixtral_trace.npz", "tiny-deepseek": "tiny-deepseek_trace.npz", "switch-base-8": "switch-base-8.json"}
"""Names of recorded traces, and their files."""
IDS = ("experts", "routed_experts", "topk_ids", "topk_experts", "expert_ids", "selected_experts", "selections")
"""Names under which loggers store expert ids; the same for the others:"""
WEIGHTS = ("weights", "topk_weights", "probs")
REQUEST, PLACE, TOKEN = ("req_id", "request_id", "sequence"), ("token_idx", "position"), ("token_id", "token")
ALIKE = 32
"""So many rows at the start that all route alike are no text but a warm-up."""
FORMS = "`.npz` or `.npy` of [tokens, layers, k], RouteTrace.save's `.npz`, `.jsonl` with rows per token, `.json` with selections"


@dataclass(frozen=True, eq=False)
class Source:
    """A trace, its name, and notes on what was found in the file."""

    name: str
    trace: RouteTrace
    notes: tuple[str, ...] = ()


def load(name: str | Path, keep_warm_up: bool = False) -> Source:
    """A shipped trace by name, a synthetic one ("local-drifting:tokens=2000,layers=8,experts=64,k=8,seed=0"), or a file.

    Rows at the start that all route alike are left out, unless `keep_warm_up`. Raises FileFormatError, ShapeError and ParameterError
    for files that are damaged, ids that are ragged, negative or no whole numbers, weights that are NaN, and traces without tokens.
    """
    word, _, settings = str(name).partition(":")
    if str(name) in SHIPPED:
        return _shipped(str(name))
    if word in SYNTHETIC:
        return Source(str(name), synthetic(word, **_settings(settings)), (SYNTHETIC[word],))
    path = Path(name)
    if not path.is_file():
        raise FileFormatError(f"no trace {shown_path(name)}", f"one of {', '.join((*SHIPPED, *SYNTHETIC))}, or a file: {FORMS}")
    readers = {".npz": _read_npz, ".npy": _read_npy, ".jsonl": _read_jsonl, ".json": _read_json}
    if path.suffix not in readers:
        raise FileFormatError(f"a file ending in {shown(path.suffix)!r}", FORMS)
    try:
        trace, notes = readers[path.suffix](path)
    except (OSError, UnicodeDecodeError) as e:
        raise FileFormatError(f"{shown_path(path)} cannot be read: {shown(e)}", FORMS) from None
    return _checked(path.name, trace, notes, keep_warm_up)


def _settings(text: str) -> dict[str, int]:
    names, out = {"tokens": "n_tokens", "layers": "n_layers", "experts": "n_expert", "k": "k", "seed": "seed"}, {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in names or not value.isdecimal():
            raise ParameterError(f"setting {shown(part)!r}", f"{', '.join(names)}, each with a whole number, as in tokens=2000,layers=8")
        out[names[key]] = int(value)
    return out


def _shipped(name: str) -> Source:
    folder = paths.models_dir() / "traces"
    if name != "switch-base-8":
        return _checked(name, RouteTrace.load(folder / SHIPPED[name]), [], True)
    trace, notes = _read_json(folder / SHIPPED[name])
    about = json.loads((folder / "switch-base-8_capture.json").read_text("utf-8"))
    spans = about["prompt_spans"]
    lengths = [s["token_end_exclusive"] - s["token_start"] for s in spans]
    domains = [s["id"].rpartition("-")[0] for s in spans]
    names = tuple(dict.fromkeys(domains))
    trace.layers, trace.domain_names = np.array(about["sparse_encoder_block_indices"], np.int32), names
    trace.sequences = np.repeat(np.arange(len(spans), dtype=np.int32), lengths)
    trace.positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    trace.domains = np.repeat([names.index(d) for d in domains], lengths)
    return _checked(name, trace, notes, True)


# ---- what every trace is looked at for


def _checked(name: str, trace: RouteTrace, notes: list[str], keep_warm_up: bool) -> Source:
    if not trace.n_tokens or not trace.n_layers or not trace.k:
        raise ShapeError(f"{shown(name)}: {trace.n_tokens} tokens, {trace.n_layers} layers, k={trace.k}", "at least one of each")
    sets = trace.sets()
    twice = np.argwhere((sets[..., 1:] == sets[..., :-1]).any(-1))
    if len(twice):
        layer, token = twice[0]
        raise ShapeError(f"{shown(name)}: token {token} uses one expert twice in layer {trace.layers[layer]}", "different experts")
    unknown = np.isnan(trace.weights)
    if unknown.any() and not unknown.all() or np.isinf(trace.weights).any() or (trace.weights < 0).any():
        bad = np.argwhere(~(trace.weights >= 0) | np.isinf(trace.weights))[0]
        raise ShapeError(f"{shown(name)}: a weight of {trace.weights[tuple(bad)]} at token {bad[1]}, layer {trace.layers[bad[0]]}",
                         "numbers from 0 on, or none at all")  # fmt: skip
    if not unknown.any():
        sums = trace.weights.sum(-1, dtype=np.float64)
        if np.abs(sums - 1).max() > 1e-2:
            notes.append(f"weights do not sum to 1 but to {sums.min():.3g} to {sums.max():.3g}: taken as they are, not normalised")
    if not keep_warm_up:
        trace = _without_warm_up(name, trace, sets, notes)
    sizes = np.unique(trace.positions, return_counts=True)[1]
    if (np.diff(sizes) < 0).any():
        notes.append(f"side by side, the batch shrinks from {sizes.max()} sequences to {sizes[-1]} as they end")
    return Source(name, trace, tuple(notes))


def _without_warm_up(name: str, trace: RouteTrace, sets: np.ndarray, notes: list[str]) -> RouteTrace:
    same = (sets[:, 1:] == sets[:, :-1]).all((0, 2))
    ends = np.append(np.flatnonzero(~same) + 1, trace.n_tokens)
    runs = np.diff(ends, prepend=0)
    n_runs = int(np.argmax(runs < ALIKE)) if (runs < ALIKE).any() else len(runs)
    if not n_runs:
        return trace
    dropped = int(ends[n_runs - 1])
    if dropped == trace.n_tokens:
        raise ShapeError(f"{shown(name)}: all {dropped:,} tokens route alike", "a text", "keep_warm_up, if this is one")
    sizes = " + ".join(f"{n:,}" for n in runs[:n_runs])
    notes.append(f"left out {dropped:,} rows at the start that route alike ({sizes}): a warm-up, no text")
    return trace.select(slice(dropped, None))


def _trace(ids: Any, weights: Any, n_expert: Any, notes: list[str], **rows: Any) -> RouteTrace:
    """From [tokens, layers, k]."""
    experts, given = _whole(ids, "expert ids"), None if weights is None else _numbers(weights, "weights")
    if experts.ndim != 3:
        raise ShapeError(f"expert ids of shape {experts.shape}", "[tokens, layers, k]")
    if given is not None and given.shape != experts.shape:
        raise ShapeError(f"weights {given.shape} of expert ids {experts.shape}", "the same shape")
    if given is not None and given.size and np.isnan(given).all():
        raise ShapeError("weights that are all NaN", "numbers from 0 on, or none at all", "leave them out of the file if unknown")
    if experts.size and experts.max() >= 2**31:
        raise ShapeError(f"expert {experts.max()}", "ids below 2**31")
    if experts.size and experts.min() < 0:
        token, layer, _ = np.argwhere(experts < 0)[0]
        raise ShapeError(f"expert {experts.min()} at token {token}, layer {layer}", "ids from 0 on", "leave rows out that only pad")
    n, n_layers, _ = experts.shape
    if n_expert is None:
        n_expert = int(experts.max(initial=-1)) + 1
        notes.append(f"the number of experts is not given: {n_expert}, the highest id + 1")
    given = np.full(experts.shape, np.nan, np.float32) if given is None else given
    zero, at = np.zeros(n, np.int32), np.arange(n, dtype=np.int32)
    rows = {"layers": np.arange(n_layers, dtype=np.int32), "tokens": zero, "positions": at, "sequences": zero, **rows}
    small = np.uint8 if int(n_expert) <= 256 and experts.max(initial=0) < 256 else np.int32
    return RouteTrace(np.moveaxis(experts, 1, 0).astype(small), np.moveaxis(given, 1, 0), n_expert=int(n_expert), **rows)


def _numbers(values: Any, what: str) -> np.ndarray:
    try:
        return np.asarray(values, np.float32)
    except (ValueError, TypeError):
        raise ShapeError(f"{what} that are ragged or no numbers", "as many for every token and layer") from None


def _whole(values: Any, what: str) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError:
        raise ShapeError(f"{what} that are ragged", "as many for every token and layer") from None
    if array.size and array.dtype.kind not in "iu":
        raise ShapeError(f"{what} of type {array.dtype}", "whole numbers, as many for every token and layer")
    return array.astype(np.int64)


# ---- forms of files


def _read_npz(path: Path) -> tuple[RouteTrace, list[str]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            data = dict(file)
    except DAMAGED_NPZ as e:
        raise FileFormatError(f"{shown_path(path)} is not a readable .npz file: {shown(e)}", FORMS) from None
    if "moe_layers" in data or {"experts", "weights", "layers", "sequences"} <= set(data):
        return RouteTrace.load(path), []
    name = next((n for n in IDS if n in data), None) or (next(iter(data)) if len(data) == 1 else None)
    if name is None:
        raise FileFormatError(f"{shown_path(path)} holds {', '.join(map(shown, data))}", f"expert ids under one of {', '.join(IDS)}")
    notes: list[str] = []
    weights = next((data[n] for n in WEIGHTS if n in data), None)
    return _trace(data[name], weights, data.get("n_expert"), notes), notes


def _read_npy(path: Path) -> tuple[RouteTrace, list[str]]:
    notes: list[str] = []
    try:
        return _trace(np.load(path, allow_pickle=False), None, None, notes), notes
    except DAMAGED_NPZ as e:
        if isinstance(e, ShapeError):
            raise
        raise FileFormatError(f"{shown_path(path)} is not a readable .npy file: {shown(e)}", FORMS) from None


def _read_json(path: Path) -> tuple[RouteTrace, list[str]]:
    """A router trace of stratamoe-lab, or a bare list [tokens][layers][k]."""
    data, notes = _parsed(path.read_text("utf-8"), shown_path(path)), list[str]()
    data = {"selections": data} if isinstance(data, list) else data
    ids = _first(data, IDS) if isinstance(data, dict) else None
    if ids is None:
        raise FileFormatError(f"{shown_path(path)} has no expert ids", f"a list under one of {', '.join(IDS)}")
    return _trace(ids, None, data.get("expertsPerLayer"), notes), notes


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as e:
        raise FileFormatError(f"{where} is not JSON: {shown(e)}", FORMS) from None


def _read_jsonl(path: Path) -> tuple[RouteTrace, list[str]]:
    """A row per token with the ids of all layers, or a row per token and layer; layers may come one after another within a step."""
    layers: dict[int, list[tuple[Any, Any, tuple[Any, ...]]]] = {}
    n_expert = None
    with path.open(encoding="utf-8") as file:
        for i, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"line {i} of {shown_path(path)}"
            row = _parsed(line, where)
            row = {"experts": row} if isinstance(row, list) else row
            ids = _first(row, IDS) if isinstance(row, dict) else None
            if not isinstance(ids, list) or not ids:
                raise FileFormatError(f"{where} has no expert ids", f"a list under one of {', '.join(IDS)}")
            weights, layer = _first(row, WEIGHTS), _first(row, ("layer", "layer_id"))
            if isinstance(ids[0], list):
                parts = zip(range(len(ids)), ids, weights or [None] * len(ids))
            elif isinstance(layer, int):
                parts = zip([layer], [ids], [weights])
            else:
                raise FileFormatError(f"{where} does not name its layer", "`layer`, or the ids of all layers in one row")
            for number, one, w in parts:
                layers.setdefault(number, []).append((one, w, tuple(_first(row, names) for names in (REQUEST, PLACE, TOKEN))))
            n_expert = row.get("n_expert", n_expert)
    columns, names = [layers[n] for n in sorted(layers)], np.array(sorted(layers), np.int32)
    if not columns:
        raise ShapeError(f"{shown_path(path)} holds no rows", "at least one token")
    about = [place for _, _, place in columns[0]]
    if any([place for _, _, place in column] != about for column in columns):
        counts = sorted({len(column) for column in columns})
        raise ShapeError(f"layers with {', '.join(map(str, counts))} rows in {shown_path(path)}", "the same tokens in every layer")
    ids, weights = ([[cell[part] for cell in token] for token in zip(*columns)] for part in (0, 1))
    notes = list[str]()
    return _trace(ids, weights if weights[0][0] is not None else None, n_expert, notes, layers=names, **_rows(about, notes)), notes


def _first(row: dict[str, Any], names: Iterable[str]) -> Any:
    return next((row[n] for n in names if n in row), None)


def _rows(about: Sequence[tuple[Any, ...]], notes: list[str]) -> dict[str, np.ndarray]:
    """Sequences and positions from request ids and places; where all requests have one id, from the places alone."""
    requests, places, tokens = zip(*about)
    out = {"tokens": np.array(tokens, np.int32)} if all(isinstance(t, int) for t in tokens) else {}
    names, which = np.unique([str(r) for r in requests], return_inverse=True)
    if len(names) > 1:
        order = np.argsort(which, kind="stable")
        at = np.empty(len(which), np.int32)
        at[order] = np.arange(len(which)) - np.searchsorted(which[order], which[order])
        return {**out, "sequences": which.astype(np.int32), "positions": at}
    if not all(isinstance(p, int) for p in places):
        return out
    step = np.cumsum(np.diff(places, prepend=places[0] - 1) <= 0)
    sizes = np.bincount(step)
    if len(sizes) == 1:
        return {**out, "positions": np.array(places, np.int32)}
    notes.append(f"one request id for all: {len(sizes):,} steps, a new one wherever token_idx starts again; "
                 "rows count as sequences, though a row need not stay the same request")  # fmt: skip
    row = np.arange(len(step)) - (np.cumsum(sizes) - sizes)[step]
    return {**out, "sequences": row.astype(np.int32), "positions": step.astype(np.int32)}
