"""Product tensors rebuilt from a recorded scheduler case (data/goldens/sched/SCHEMA.md)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.report import BadInput
from workbench.cgraph import CGraph
from workbench.devices.backend import BufferType, DeviceType
from workbench.devices.simulated import SimulatedDevice
from workbench.devices.simulated_memory import Machine, SimulatedMemory
from workbench.scheduler import Scheduler
from workbench.scheduler.transfer import EvalCallback
from workbench.tensors import OPS, Context, Flag, Tensor, Usage, dtype

INT_PARAMS = {"n_dims", "mode", "n_ctx_orig", "offset", "dim", "n_past", "k"}
FLAGS = {"input": Flag.INPUT, "output": Flag.OUTPUT, "param": Flag.PARAM}
FIELDS = {"name", "bufts", "backends", "tensors", "graph", "run_modes", "expect"}
Case = dict[str, Any]


def load(paths: Iterable[str | Path]) -> Iterator[Case]:
    """Cases from files and directories: one JSON object, or one per line in a .jsonl.gz. Raises BadInput."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from load(sorted([*path.glob("*.json"), *path.glob("*.jsonl.gz")]))
            continue
        try:
            packed = path.name.endswith(".jsonl.gz")
            texts = gzip.decompress(path.read_bytes()).decode().splitlines() if packed else [path.read_text("utf-8")]
            cases = [json.loads(text) for text in texts if text.strip() or not packed]
        except (OSError, EOFError, ValueError) as e:
            raise BadInput(f"{path} is not a recorded case: {e}") from None
        for case in cases:
            if not isinstance(case, dict) or not FIELDS <= case.keys():
                raise BadInput(f"{path}: a case without some of {', '.join(sorted(FIELDS))}")
            yield case


def buffer_types(case: Case, machine: Machine | None = None) -> dict[str, SimulatedMemory]:
    """The recorded buffer types by name."""
    return {b["name"]: SimulatedMemory(machine or Machine(), b["name"], b["align"], b["max_size"], b["is_host"], None, b["alloc_extra"], b["buf_cpy"])
            for b in case["bufts"]}  # fmt: skip


def backends(case: Case, machine: Machine, types: dict[str, SimulatedMemory]) -> list[SimulatedDevice]:
    """The recorded backends. They round activations as ggml's CPU kernels do, which computed the recorded results."""
    return [SimulatedDevice(machine, r["name"], types[r["buft"]], DeviceType(r["type"]), reads=r["supports_buft"], deny_ops=r["deny_ops"],
                            allow_ops=r["allow_ops"], deny_types=r["deny_types"], offload_min_batch=r["offload_min_batch"],
                            async_copy=r["async_cpy"], async_io=r["async_io"], waits=r["sync"], events=r["events"],
                            activation_rounding="ggml") for r in case["backends"]]  # fmt: skip


def callback(case: Case) -> EvalCallback | None:
    """The recorded eval callback."""
    wish = case["eval_callback"]
    return wish and (lambda node, ask: node.name in wish["need"] if ask else node.name != wish["stop_at"])


def scheduler(case: Case, eager: bool = False, **kw: Any) -> Scheduler:
    """The recorded scheduler over simulated devices. `case_types` holds its buffer types, `machine` their machine."""
    machine = Machine(eager=eager)
    types = buffer_types(case, machine)
    own = case["sched_bufts"] and [types[name] for name in case["sched_bufts"]]
    made = Scheduler(backends(case, machine, types), own, case["graph_size"], parallel=case["parallel"], op_offload=case["op_offload"],
                     quirks=kw.pop("quirks", "ggml"), **kw)  # fmt: skip
    made.eval_callback = callback(case)
    made.case_types, made.machine = types, machine  # type: ignore[attr-defined]
    return made


def params(recorded: Case) -> dict[str, Any]:
    """Op parameters as the product names and types them."""
    if "glu" in recorded:
        return {"glu": recorded["glu"], "swapped": False}
    return {k: int(v) if k in INT_PARAMS else float(v) if isinstance(v, (int, float)) else tuple(v) if isinstance(v, list) else v
            for k, v in recorded.items()}  # fmt: skip


def tensors(recorded: list[Case], types: Mapping[str, BufferType], kept: dict[int, Tensor] | None = None) -> list[Tensor]:
    """Product tensors of `recorded`, by id; those with a buffer are taken from `kept`, or placed and put there."""
    ctx = Context(mem_size=(len(recorded) + 1) * 400, no_alloc=True, name="case")
    kept = {} if kept is None else kept
    made: list[Tensor] = []
    for r in recorded:
        if r["id"] in kept:
            made.append(kept[r["id"]])
            continue
        p = r.get("params", {})
        t = Tensor(dtype(r["type"]), tuple(r["ne"]), tuple(r["nb"]), context=ctx, op=r["op"], params=params(p), name=r["name"],
                   spec=OPS.get(p.get("unary") or p.get("glu") or r["op"]),
                   view_src=made[r["view_src"]] if "view_src" in r else None, view_offs=r.get("view_offs", 0))  # fmt: skip
        for flag in r.get("flags", ()):
            t.flags |= FLAGS[flag]
        made.append(t)
        t.src = tuple(None if i is None else made[i] for i in r.get("src", ()))  # a cast is its own source
        if "buffer" in r:
            kind = types[r["buffer"]["buft"]]
            t.place(kind.alloc_buffer(kind.alloc_size(t), Usage(r["buffer"]["usage"])))
            kept[r["id"]] = t
    return made


def expanded(recorded: Case, made: list[Tensor], size: int) -> CGraph:
    """The graph of a case, built by the recorded calls of build_forward_expand."""
    graph = CGraph(size=size)
    for i in recorded["expand"]:
        graph.build_forward_expand(made[i])
    return graph


def write_leafs(recorded: list[Case], made: list[Tensor], run: int) -> None:
    """Leaf data of run number `run`; weights only before the first."""
    for r, t in zip(recorded, made, strict=True):
        if "init" in r and t.storage is not None and (run == 0 or t.storage.usage is not Usage.WEIGHTS):
            t.set(leaf_values(r, run).reshape(t.shape))


def leaf_values(r: Case, run: int) -> np.ndarray:
    """The values SCHEMA.md prescribes for a leaf."""
    n, init = int(np.prod(r["ne"])), r["init"]
    if init["kind"] != "hash":
        return np.resize(np.asarray(init["values"], np.float32 if init["kind"] == "f32" else None), n)
    seed, word = init["seed"] + (7919 * run if "input" in r.get("flags", ()) else 0), np.uint64(0xFFFFFFFF)
    h = (np.arange(1, n + 1, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed * 40503)) & word
    h ^= h >> np.uint64(15)
    h = (h * np.uint64(2246822519)) & word
    h ^= h >> np.uint64(13)
    return (((h >> np.uint64(8)).astype(np.float64) / 2**24 - 0.5) * init["scale"] + init["off"]).astype(np.float32)
