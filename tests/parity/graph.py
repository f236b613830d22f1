"""`graph MODEL.gguf GRAPH.json…`: our graphs against the node lists of real llama.cpp. A case is a file.

Compared, node by node in order: name, op, desc, type, ne, nb, src (which tensor, its name and op), view_src, view_offs,
flags, params; leaf by leaf in order of first use: name, kind, type, ne, nb, flags and, of inputs, the values.
Not compared, on purpose: `buffer` (where llama.cpp keeps a leaf: its repacked q4_0 layout is an optimisation of one
back end) and the fingerprints `v` of nodes (the command `logits` compares results). Recordings with flash attention are
skipped: it is another graph (FLASH_ATTN_EXT), which the workbench does not build.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.report import BadInput, Report, judge_files
from workbench.models.hparams import HParams
from workbench.models.kv_cache import KVCache
from workbench.models.model import Model
from workbench.models.session import fill_inputs
from workbench.models.transformer import StepGraph, build_step
from workbench.tensors import HostStorage, Tensor

FORMAT = "llama-graph-golden/1"


def main(args: list[str]) -> int:
    """Compare and print; 0: all passed, 1: some failed, 2: bad input."""
    return judge_files("graph", args, "MODEL.gguf GRAPH.json…", run_case)


def run_case(report: Report, model: Model, path: Path) -> None:
    """One recorded graph."""
    case = read_case(path)
    if case["config"]["flash_attn"]:
        return report.skip(path.name, "flash attention is another graph, which the workbench does not build")
    if case["model"]["arch"] != model.hparams.arch:
        raise BadInput(f"{path.name} was recorded from {case['model']['file']}, not from {model.path.name}")
    try:
        found = differences(case, rebuilt(model, case))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
        raise BadInput(f"{path.name} is not a recorded graph: {type(e).__name__} {e}") from None
    report.case(path.name, found)


def read_case(path: Path) -> dict[str, Any]:
    """The JSON of a recorded graph."""
    try:
        case = json.loads(path.read_text("utf-8"))
        if case["format"] != FORMAT:
            raise BadInput(f"{path.name}: format {case['format']!r} instead of {FORMAT!r}")
        case["config"]["flash_attn"], case["model"]["arch"], case["nodes"], case["leafs"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise BadInput(f"{path.name} is not a recorded graph: {type(e).__name__} {e}") from None
    return case


def rebuilt(model: Model, case: dict[str, Any]) -> dict[str, Any]:
    """Our graph for the case's configuration, described as the recording describes llama.cpp's."""
    config = case["config"]
    n, pos0 = len(config["tokens"]), config["pos0"]
    if not 1 <= pos0 + n <= config["n_ctx"] <= 2**20:
        raise BadInput(f"{pos0} + {n} tokens in a context of {config['n_ctx']}")
    cache = KVCache(model.hparams, config["n_ctx"])
    for first, last in ((0, pos0), (pos0, pos0 + n)):
        seqs, positions = np.zeros(last - first, np.int32), np.arange(first, last)
        cells = cache.take(seqs, positions)
    out_ids = np.arange(n) if config["outputs"] == "all" else np.array([n - 1])
    step = build_step(model, cache, n, cache.n_kv(), len(out_ids))
    for leaf in vars(step.inputs).values():
        leaf.place(HostStorage(leaf.nbytes))
    fill_inputs(step, cache, np.array(config["tokens"]), positions, seqs, cells, out_ids)
    return described(step, model, cache)


def described(step: StepGraph, model: Model, cache: KVCache) -> dict[str, Any]:
    """A graph as a recording: nodes, and leafs in the order in which nodes use them."""
    node_refs = {t: f"n{i}" for i, t in enumerate(step.graph.nodes)}
    leaf_refs: dict[Tensor, str] = {}

    def ref(t: Tensor) -> list[str]:
        return [node_refs[t] if t in node_refs else leaf_refs.setdefault(t, f"l{len(leaf_refs)}"), t.name, t.op]

    def node(t: Tensor) -> dict[str, Any]:
        out = {"name": t.name, "op": t.op} | ({"desc": t.desc} if t.desc != t.op else {}) | layout(t)
        out["src"] = [["self", t.name, t.op] if s is t else s and ref(s) for s in t.src]
        if t.view_src is not None:
            out |= {"view_src": ref(t.view_src), "view_offs": t.view_offs}
        return out | ({"params": dict(t.params)} if t.params else {})

    nodes = [node(t) for t in step.graph.nodes]
    kinds = {t: "weight" for t in model.weights.values()} | {t: "kv" for t in (*cache.k, *cache.v)}
    leafs = [{"name": t.name, "kind": kinds.get(t, "input")} | layout(t) | ({} if t in kinds else {"v": values(t, model.hparams)}) for t in leaf_refs]
    return {"nodes": nodes, "leafs": leafs}


def layout(t: Tensor) -> dict[str, Any]:
    return {"type": t.dtype.name, "ne": list(t.ne), "nb": list(t.nb), "flags": int(t.flags)}


def values(t: Tensor, hp: HParams) -> dict[str, Any]:
    """The contents of an input in all the forms that a recording may use."""
    flat = t.numpy().ravel()
    if t.dtype.name == "f32":
        rows = t.array()[0, 0]
        ordered = all((row[:n] == 0).all() and np.isneginf(row[n:]).all() for row in rows for n in [int((row == 0).sum())])
        seen = [np.flatnonzero(row == 0) for row in rows]
        runs = all(len(i) and i[-1] - i[0] + 1 == len(i) for i in seen)
        return {"visible": [len(i) for i in seen] if ordered else "zeros with gaps",
                "seen": [[int(i[0]), int(i[-1])] for i in seen] if runs else "zeros with gaps"}  # fmt: skip
    return {"all": flat.tolist(), "sum": int(flat.sum()), "first": flat[:8].tolist(), "last": flat[-8:].tolist()}


def differences(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    """One line per differing field."""
    found = []
    for what in ("nodes", "leafs"):
        if len(want[what]) != len(have[what]):
            found.append(f"{what}: {len(have[what])} instead of {len(want[what])}")
        for i, (w, h) in enumerate(zip(want[what], have[what])):
            found += [f"{what}[{i}] {w.get('name')!r} {field}: {h.get(field)} instead of {w.get(field)}"
                      for field in sorted(({*w, *h} - {"buffer"}) - ({"v"} if what == "nodes" else set()))
                      if not same(w.get(field), h.get(field), field)]  # fmt: skip
    return found


def same(want: Any, have: Any, field: str = "") -> bool:
    """Equal; numbers as f32, since that is how a tensor holds its parameters; of inputs, the forms that were recorded."""
    if isinstance(want, dict) and isinstance(have, dict):
        keys = want.keys() if field == "v" else want.keys() | have.keys()
        return all(same(want.get(k), have.get(k)) for k in keys)
    if isinstance(want, list | tuple) and isinstance(have, list | tuple):
        return len(want) == len(have) and all(map(same, want, have))
    if isinstance(want, float) or isinstance(have, float):
        numbers = [float(x) if x in ("inf", "-inf") else x for x in (want, have)]
        return all(isinstance(x, int | float) for x in numbers) and np.float32(numbers[0]) == np.float32(numbers[1])
    return type(want) is type(have) and want == have
