"""`sched FILE_OR_DIR…`: recorded scheduler cases against the product.

So far the cases with one backend: graph order, memory plan, results. The rest is counted as skipped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.parity import sched_case
from tests.parity.report import BadInput, Report
from workbench.cgraph import CGraph
from workbench.devices.cpu import CpuBackend
from workbench.execution import GraphAllocator
from workbench.tensors import Tensor

Case = dict[str, Any]
TOLERANCE = 1e-5  # of the largest value of a tensor


def main(args: list[str]) -> int:
    """Compare the cases in the files and directories named; 0: all passed, 1: some failed, 2: bad input."""
    report = Report("sched")
    if not args:
        return report.bad("FILE_OR_DIR… is needed: cases as .json or .jsonl.gz")
    try:
        for case in sched_case.load(args):
            if why_skipped(case):
                report.skipped += 1
            else:
                report.case(case["name"], first_difference(case))
    except BadInput as e:
        return report.bad(e)
    return report.close()


def why_skipped(case: Case) -> str:
    """Why this case cannot be judged yet."""
    if len(case["backends"]) > 1:
        return "needs the multi-backend scheduler"
    return "the scheduler refuses it before anything is allocated" if case["expect"]["error"] else ""


def first_difference(case: Case) -> list[str]:
    """The first thing that differs from the recording, if anything does."""
    try:
        return list(itertools.islice(differences(case), 1))
    except Exception as e:
        return [f"{type(e).__name__}: {str(e).splitlines()[0]}"]


def differences(case: Case) -> Iterator[str]:
    """Each difference between the recording and the product, in the order of the runs."""
    types = sched_case.buffer_types(case)
    allocator = GraphAllocator(types[case["backends"][0]["buft"]], quirks="ggml")
    backend = CpuBackend(activation_rounding="ggml")
    kept: dict[int, Tensor] = {}
    more = case["expect"]["more_runs"]
    for run, mode in enumerate(case["run_modes"]):
        expect = more[run - 1] if run else case["expect"]
        recorded = expect if "tensors" in expect else case
        where = f"run {run + 1}: " if run else ""
        if mode != "reuse":
            made = sched_case.tensors(recorded["tensors"], types, kept)
            graph = sched_case.expanded(recorded["graph"], made, case["graph_size"])
            yield from _graph_differences(recorded["graph"], graph, made, where)
            if case["reserve"] and not run:
                allocator.reserve(graph)
            if not allocator.alloc(graph):
                yield f"{where}alloc_ok: found false, recorded true"
        if "alloc" in expect:
            yield from _alloc_differences(expect["alloc"], graph, allocator, where)
        sched_case.write_leafs(recorded["tensors"], made, run)
        backend.compute(graph)
        if case["expect"]["outputs_valid"]:
            yield from _output_differences(expect["outputs"], made, set(case["expect"]["argsort_ties"]), where)


def _graph_differences(recorded: Case, graph: CGraph, made: list[Tensor], where: str) -> Iterator[str]:
    ids = {t: i for i, t in enumerate(made)}
    for field in ("leafs", "nodes"):
        found = [ids[t] for t in getattr(graph, field)]
        yield from _list_differences(f"{where}graph.{field}", found, recorded[field])


def _alloc_differences(recorded: Case, graph: CGraph, allocator: GraphAllocator, where: str) -> Iterator[str]:
    yield from _list_differences(f"{where}alloc.buffer_sizes", [allocator.buffer_size(0)], recorded["buffer_sizes"])
    yield from _list_differences(f"{where}alloc.chunks", [allocator.chunk_sizes(0)], recorded["chunks"])
    found = {t.name: allocator.where(t) for t in (*graph.leafs, *graph.nodes)}
    for name, place in found.items():
        want = recorded["tensors"].get(name)
        if (place is None) != (want is None):
            yield f"{where}alloc.tensors[{name!r}]: found {place}, recorded {want}"
        for field, have, expected in zip(("buffer", "chunk", "offset", "size"), place or (), want or (), strict=False):
            if have != expected:
                yield f"{where}alloc.tensors[{name!r}].{field}: found {have}, recorded {expected}"
    for name in recorded["tensors"].keys() - found.keys():
        yield f"{where}alloc.tensors[{name!r}]: not in the graph"


def _list_differences(field: str, found: list[Any], want: list[Any]) -> Iterator[str]:
    for i, (a, b) in enumerate(zip(found, want, strict=False)):
        if a != b:
            yield f"{field}[{i}]: found {a}, recorded {b}"
    if len(found) != len(want):
        yield f"{field}: found {len(found)} entries, recorded {len(want)}"


def _output_differences(recorded: Case, made: list[Tensor], ties: set[str], where: str) -> Iterator[str]:
    by_name = {t.name: t for t in made}
    for name, values in recorded.items():
        t = by_name[name]
        if _depends_on(t, ties):  # equal values may be sorted either way
            continue
        found = np.asarray(t.numpy(), np.float64).ravel()[: len(values)]
        want = np.asarray([float(v) for v in values])
        scale = np.max(np.abs(want[np.isfinite(want)]), initial=0.0)
        bad = np.flatnonzero(~(np.isclose(found, want, rtol=0, atol=TOLERANCE * scale, equal_nan=True)))
        if len(found) != len(want) or bad.size:
            i = int(bad[0]) if bad.size else len(found)
            yield f"{where}outputs[{name!r}][{i}]: found {found[i] if bad.size else 'nothing'}, recorded {want[i]} ({bad.size} of {len(want)} differ)"


def _depends_on(t: Tensor, names: set[str]) -> bool:
    met, todo = set[Tensor](), [t] if names else []
    while todo:
        u = todo.pop()
        if u.name in names:
            return True
        if u not in met:
            met.add(u)
            todo += u.sources()
    return False
