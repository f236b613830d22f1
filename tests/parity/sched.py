"""`sched FILE_OR_DIR…`: recorded scheduler cases against the product.

Each case is rebuilt on simulated devices with quirks="ggml" and everything recorded is compared (data/goldens/sched/SCHEMA.md): the
assignment after each stage, causes, splits, rewrites, the graph copy, memory, the calls of every run, results, errors and
their phase. Stages, causes, splits, rewrites and calls are read from the trace. The devices work at the call, as those did
that were recorded.
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
from workbench.errors import GraphError, UnsupportedOp, WorkbenchError
from workbench.scheduler import STAGES, Scheduler
from workbench.tensors import Tensor
from workbench.tensors.storage import HostStorage
from workbench.trace import Trace

Case = dict[str, Any]
TOLERANCE = 1e-5  # of the largest value of a tensor
TIE = 1e-3  # values this close, relative to the largest of the row, may be sorted either way
MODES = ("first", "reuse", "rebuild", "rebuild_sync")


def main(args: list[str]) -> int:
    """Compare the cases in the files and directories named; 0: all passed, 1: some failed, 2: bad input."""
    report = Report("sched")
    if not args:
        return report.bad("FILE_OR_DIR… is needed: cases as .json or .jsonl.gz")
    try:
        for case in sched_case.load(args):
            report.case(str(case["name"]), first_difference(case))
    except BadInput as e:
        return report.bad(e)
    return report.close()


def first_difference(case: Case) -> list[str]:
    """The first thing that differs from the recording, if anything does."""
    try:
        return list(itertools.islice(differences(case), 1))
    except Exception as e:
        return [f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"]


class Replay:
    """One case being run again."""

    def __init__(self, case: Case) -> None:
        self.case, self.expect = case, case["expect"]
        self.scheduler: Scheduler = sched_case.scheduler(case, eager=True)
        self.trace = Trace("virtual")
        self.kept: dict[int, Tensor] = {}
        self.plain = Plain()
        self.phase, self.finished = "", True
        self.made: list[Tensor] = []
        self.graph = CGraph()

    def record(self) -> int:
        """Start recording; the number of events so far."""
        self.scheduler.trace = self.trace
        return len(self.trace)

    def pause(self) -> None:
        """What the test itself does is not part of a recording."""
        self.scheduler.trace = None

    def assign(self) -> None:
        for tensor, backend in self.case["user_assign"]:
            self.scheduler.set_backend(self.made[tensor], backend)

    def recorded_run(self, number: int) -> Case:
        """What was recorded of a run; of a case that ends in an error perhaps nothing."""
        if not number:
            return self.expect
        if self.expect["error"]:
            return dict(enumerate(self.expect.get("more_runs", ()), 1)).get(number, {})
        return self.expect["more_runs"][number - 1]

    def unrecorded(self, expect: Case, field: str) -> bool:
        """Whether a case that ends in an error says nothing of this field."""
        return bool(self.expect["error"]) and field not in expect

    # ---- one run

    def run(self, number: int, mode: str) -> Iterator[str]:
        """Run `number` with all its differences."""
        expect = self.recorded_run(number)
        recorded = expect if "tensors" in expect else self.case
        if mode != "reuse":
            yield from self.build(number, mode, recorded)
            yield from self.alloc(number, mode, expect)
        self.pause()
        sched_case.write_leafs(recorded["tensors"], self.made, number)
        if not self.unrecorded(expect, "cur_copy"):
            yield from same("cur_copy", self.scheduler.slot, expect["cur_copy"])
        self.phase = f"run{number + 1}:compute"
        start = self.record()
        self.finished &= self.scheduler.compute(self.graph)
        self.pause()
        if self.unrecorded(expect, "trace_compute"):
            return
        yield from same_list("trace_compute", calls(self.trace, start), expect["trace_compute"])
        yield from same("status", 0, expect["status"])
        self.plain.run(recorded, number)
        if self.expect["outputs_valid"]:
            yield from self.outputs(recorded, expect["outputs"])

    def build(self, number: int, mode: str, recorded: Case) -> Iterator[str]:
        """Tensors and graph anew, as the mode says; what the scheduler is told before."""
        self.start = self.record()
        if number:
            self.scheduler.reset()
        if mode == "rebuild_sync":
            self.scheduler.synchronize()
        self.pause()
        types = self.scheduler.case_types  # type: ignore[attr-defined]
        self.made = sched_case.tensors(recorded["tensors"], types, self.kept)
        self.graph = sched_case.expanded(recorded["graph"], self.made, self.case["graph_size"])
        self.plain.build(recorded, self.case["graph_size"])
        yield from graph_differences(recorded["graph"], self.graph, self.made)
        if self.case["reserve"] and not number:
            self.assign()
            self.phase = "reserve"
            reserving = self.record()
            self.scheduler.reserve(self.graph)
            self.pause()
            self.start = len(self.trace)
        if self.case["reserve"] and not number and not self.unrecorded(self.expect, "reserve_trace"):
            yield from same_list("reserve_trace", calls(self.trace, reserving), self.expect["reserve_trace"])
            yield from same_list("reserve_sizes", self.sizes(), self.expect["reserve_sizes"])
        self.assign()

    def alloc(self, number: int, mode: str, expect: Case) -> Iterator[str]:
        self.phase = f"run{number + 1}:alloc"
        self.record()
        decided = len(self.trace)
        self.scheduler.alloc(self.graph)
        self.pause()
        if self.unrecorded(expect, "splits"):
            return
        first = self.expect
        found = Decided(self.trace, decided, self.graph)
        yield from stage_differences(found, expect.get("stages", first["stages"]))
        yield from same_dict("causes", found.causes, expect.get("causes", first["causes"]))
        yield from same_list("splits", found.splits, expect.get("splits", first["splits"]))
        yield from same_list("src_rewrites", found.rewrites, expect["src_rewrites"])
        copy = self.scheduler.graph_copy
        for field, tensors, ids in (("nodes", copy.nodes, copy.node_ids), ("leafs", copy.leafs, copy.leaf_ids)):
            yield from same_list(f"graph_copy.{field}", [[t.name, b] for t, b in zip(tensors, ids, strict=True)], expect["graph_copy"][field])
        yield from same("alloc_ok", True, expect["alloc_ok"])
        yield from self.memory(expect["alloc"])
        yield from same_list("trace_alloc", calls(self.trace, self.start), expect["trace_alloc"])

    def sizes(self) -> list[int]:
        return [self.scheduler.buffer_size(i) for i in range(len(self.scheduler.backends))]

    def memory(self, expect: Case) -> Iterator[str]:
        allocator, copy = self.scheduler.allocator, self.scheduler.graph_copy
        yield from same_list("alloc.buffer_sizes", self.sizes(), expect["buffer_sizes"])
        chunks = [allocator.chunk_sizes(i) for i in range(len(self.scheduler.backends))]
        yield from same_list("alloc.chunks", chunks, expect["chunks"])
        places = ((t, allocator.where(t)) for t in (*copy.nodes, *copy.leafs))
        yield from same_dict("alloc.tensors", {t.name: [*place] for t, place in places if place}, expect["tensors"])

    def outputs(self, recorded: Case, expect: Case) -> Iterator[str]:
        made = {t.name: t for t in outputs(recorded, self.made)}
        for name in made.keys() ^ expect.keys():
            yield f"outputs[{name!r}]: {'not recorded' if name in made else 'not an output'}"
        for name, values in expect.items():
            yield from value_differences(made[name], values, set(self.expect["argsort_ties"]))

    def whole(self) -> Iterator[str]:
        """What concerns all runs together."""
        yield from same_list("more_runs", self.case["run_modes"][1:], [m["mode"] for m in self.expect["more_runs"]])
        yield from same_list("argsort_ties", sorted(self.plain.tied(self.expect["argsort_ties"])), sorted(self.expect["argsort_ties"]))
        verdict = self.expect["matches_plain_cpu_run"]
        differ = self.plain.differing(self.made)
        if verdict is not None:
            yield from same("matches_plain_cpu_run", sorted(differ), [] if verdict is True else sorted(verdict["tensors"]))
            if verdict is not True and not np.isclose(self.plain.distances(self.made), number(verdict["max_rel"]), rtol=0.05, equal_nan=True).any():
                yield f"matches_plain_cpu_run['max_rel']: found {self.plain.distances(self.made)[0]}, recorded {verdict['max_rel']}"
        yield from same("outputs_valid", self.finished and not (verdict and differ), self.expect["outputs_valid"])


def differences(case: Case) -> Iterator[str]:
    """Each difference between the recording and the product, in the order of the runs."""
    replay, expect = Replay(case), case["expect"]
    yield from same("n_copies", replay.scheduler.n_copies, case["n_copies"])
    for number, mode in enumerate(case["run_modes"]):
        if mode not in MODES or (mode == "first") != (number == 0):
            yield f"run_modes[{number}]: {mode!r} is unknown"
        where = f"run {number + 1}: " if number else ""
        try:
            for difference in replay.run(number, mode):
                yield where + difference
        except WorkbenchError as e:
            replay.pause()
            yield from error_differences(replay, e)
            return
    yield from same("error", None, expect["error"])
    yield from replay.whole()


def error_differences(replay: Replay, e: WorkbenchError) -> Iterator[str]:
    """A run that the product refuses: for the same reason, in the same phase, as far as ggml came?"""
    expect = replay.expect
    found = error_code(e)
    if expect["error"] != found:
        yield f"error: found {type(e).__name__}: {e.found} ({found}), recorded {expect['error']}"
        return
    yield from same("error_phase", replay.phase, expect["error_phase"])
    if "error_tensor" in expect and not e.found.startswith(f"'{expect['error_tensor']}'"):
        yield f"error_tensor: found {e.found!r}, recorded {expect['error_tensor']!r}"
    if "stages" in expect:
        last = max(i for i, event in enumerate(replay.trace.events) if event.kind == "stage" and replay.trace.described(event)["stage"] == "usr")
        yield from stage_differences(Decided(replay.trace, last, replay.graph), expect["stages"])


def error_code(e: WorkbenchError) -> str:
    """The recording's word for a refusal."""
    if isinstance(e, UnsupportedOp):
        return "no_backend_supports_node" if e.found.startswith("no backend supports") else "preallocated_tensor_cannot_run"
    return "tensor_without_backend_in_allocator" if isinstance(e, GraphError) and "has no backend" in e.found else type(e).__name__


class Decided:
    """What a trace says of one splitting: the state after each stage that was finished, causes, splits, rewrites."""

    def __init__(self, trace: Trace, start: int, graph: CGraph) -> None:
        assert trace.graph is not None
        names = [t["name"] for t in trace.graph["tensors"]]
        state = dict.fromkeys((t.name for t in (*graph.leafs, *graph.nodes)), -1)
        self.stages: dict[str, dict[str, int]] = {}
        self.causes: dict[str, str] = {}
        self.splits: list[Case] = []
        self.rewrites: list[list[Any]] = []
        sources = [list(t["src"]) for t in trace.graph["tensors"]]
        stage = "usr"
        for event in trace.events[start:]:
            d: Any = trace.described(event)
            if event.kind == "stage":
                self.stages[stage] = dict(state)
                stage = d["stage"]
            elif event.kind == "assign":
                name = names[d["tensor"]]
                state[name], self.causes[name] = d["backend"], d["cause"]
            elif event.kind == "split":
                if self.splits:
                    self.splits[-1]["i_end"] = d["first"]
                self.splits.append({"backend": d["backend"], "i_start": d["first"], "i_end": len(graph.nodes), "inputs": []})
            elif event.kind == "copy" and d["copy"] in state:  # with several slots the original is one of the copies
                self.causes[d["copy"]] = "4.cpy"
            elif event.kind == "input":
                self.splits[-1]["inputs"].append(names[d["tensor"]])
            elif event.kind == "rewrite":
                self.rewrites.append([names[d["node"]], d["source"], names[sources[d["node"]][d["source"]]], d["copy"]])


CALLS = {"set": "set", "get": "get", "set_async": "set_async", "get_async": "get_async", "sync": "sync", "copy_async": "cpy_async",
         "copy_buffer": "buf_cpy", "event_record": "ev_record", "event_wait": "ev_wait", "event_sync": "ev_sync", "alloc": "alloc_buf",
         "release": "free_buf"}  # fmt: skip


def calls(trace: Trace, start: int) -> list[list[Any]]:
    """The calls in a trace from event `start` on, as they are recorded."""
    found: list[list[Any]] = []
    rest = iter(trace.events[start:])
    for event in rest:
        fields: Any = trace.described(event)
        if event.kind == "launch":
            found.append(["compute", fields["device"], [trace.described(next(rest))["name"] for _ in range(fields["count"])]])
        elif event.kind in ("ask", "answer"):
            found.append(["cb", fields["name"], event.kind == "ask", bool(fields["wanted" if event.kind == "ask" else "go_on"])])
        elif event.kind in CALLS:
            values = [bool(v) if name == "done" else v for name, v in fields.items()]
            found.append([CALLS[event.kind], *values])
    return found


class Plain:
    """The same runs on a plain CPU, every tensor in memory of its own."""

    def __init__(self) -> None:
        self.backend = CpuBackend(activation_rounding="ggml", dequant_cache_bytes=0)
        self.kept: dict[int, Tensor] = {}
        self.ties: set[str] = set()
        self.exact: set[str] = set()
        self.made: list[Tensor] = []
        self.recorded: Case = {}

    def build(self, recorded: Case, size: int) -> None:
        """The tensors of a run."""
        self.recorded = recorded
        bare = [{k: v for k, v in r.items() if k != "buffer"} for r in recorded["tensors"]]
        self.made = sched_case.tensors(bare, {}, dict(self.kept))
        self.graph = sched_case.expanded(recorded["graph"], self.made, size)
        for r, t in zip(recorded["tensors"], self.made, strict=True):
            if t.view_src is None and t.storage is None:
                t.place(HostStorage(t.nbytes))
            if "buffer" in r:
                self.kept[r["id"]] = t

    def run(self, recorded: Case, number: int) -> None:
        """Compute run `number` and look for ties."""
        sched_case.write_leafs(recorded["tensors"], self.made, number)
        if not number:  # weights persist; what is not a weight is written before each run
            for r, t in zip(recorded["tensors"], self.made, strict=True):
                if "init" in r:
                    t.set(sched_case.leaf_values(r, 0).reshape(t.shape))
        self.backend.compute(self.graph)
        for t in self.made:
            if t.op == "ARGSORT" and t.src[0] is not None:
                rows = np.sort(np.asarray(t.src[0].numpy(), np.float64).reshape(-1, t.ne[0]), axis=-1)
                gaps, scale = np.diff(rows, axis=-1), np.abs(rows).max(axis=-1, keepdims=True, initial=0.0)
                if (gaps <= TIE * scale).any():
                    self.ties.add(t.name)
                if (gaps == 0).any():
                    self.exact.add(t.name)

    def tied(self, recorded: list[str]) -> set[str]:
        """Names of nodes with ties: exact ones must be recorded, close ones may be."""
        return self.exact | (self.ties & set(recorded))

    def distances(self, made: list[Tensor]) -> list[float]:
        """The largest relative difference of an output to what was computed here, where NaN and inf count and where not: a
        recording may do either. Small values count as a millionth."""
        pairs = zip(outputs(self.recorded, made), outputs(self.recorded, self.made), strict=True)
        both = [(np.asarray(a.numpy(), np.float64).ravel(), np.asarray(b.numpy(), np.float64).ravel()) for a, b in pairs]
        with np.errstate(invalid="ignore"):
            far = np.concatenate([np.abs(a - b) / (np.abs(b) + 1e-6) for a, b in both])
        return [float(np.max(far, initial=0.0)), float(np.max(far[np.isfinite(far)], initial=0.0))]

    def differing(self, made: list[Tensor]) -> list[str]:
        """Names of the outputs in `made` that are not, bit for bit, what was computed here."""
        pairs = zip(outputs(self.recorded, made), outputs(self.recorded, self.made), strict=True)
        return [a.name for a, b in pairs if not np.array_equal(a.numpy(), b.numpy(), equal_nan=a.dtype.name != "i32")]


def outputs(recorded: Case, made: list[Tensor]) -> list[Tensor]:
    """The outputs of a case: flagged, and asked for when the graph was built (an owner behind such a view is flagged, too)."""
    return [made[i] for i in dict.fromkeys(recorded["graph"]["expand"]) if "output" in recorded["tensors"][i].get("flags", ())]


# ---- comparing


def number(value: Any) -> float:
    """A recorded number; "nan" and "inf" are strings, and what JSON cannot say is null."""
    return float("nan") if value is None else float(value)


def same(field: str, found: Any, want: Any) -> Iterator[str]:
    if found != want or isinstance(found, bool) != isinstance(want, bool):
        yield f"{field}: found {found!r}, recorded {want!r}"


def same_list(field: str, found: list[Any], want: list[Any]) -> Iterator[str]:
    for i, (a, b) in enumerate(zip(found, want, strict=False)):
        yield from same_dict(f"{field}[{i}]", a, b) if isinstance(a, dict) else same(f"{field}[{i}]", a, b)
    if len(found) != len(want):
        yield f"{field}: found {len(found)} entries, recorded {len(want)}: {(found + want)[min(len(found), len(want))]}"


def same_dict(field: str, found: Case, want: Case) -> Iterator[str]:
    for name in found.keys() | want.keys():
        yield from same(f"{field}[{name!r}]", found.get(name), want.get(name))


def stage_differences(found: Decided, want: Case) -> Iterator[str]:
    for stage in STAGES:
        if (stage in found.stages) != (stage in want):
            yield f"stages: {stage} was {'' if stage in found.stages else 'not '}reached"
        elif stage in want:
            yield from same_dict(f"stages.{stage}", found.stages[stage], want[stage])
    for stage in want.keys() - set(STAGES):
        yield f"stages: {stage} is no stage"


def graph_differences(recorded: Case, graph: CGraph, made: list[Tensor]) -> Iterator[str]:
    ids = {t: i for i, t in enumerate(made)}
    for field in ("leafs", "nodes"):
        yield from same_list(f"graph.{field}", [ids[t] for t in getattr(graph, field)], recorded[field])


def value_differences(t: Tensor, values: list[Any], ties: set[str]) -> Iterator[str]:
    """Values of an output, within the tolerance. Below a sort with ties the order of equal ones is free."""
    whole = np.asarray(t.numpy(), np.float64).ravel()
    n = len(whole) if len(whole) <= 512 else 64
    found, want = whole[:n], np.asarray([float(v) for v in values])
    if n != len(want):
        yield f"outputs[{t.name!r}]: found {n} values, recorded {len(want)}"
        return
    bad = np.flatnonzero(~close(found, want))
    if bad.size and not (depends_on(t, ties) and close(np.sort(found), np.sort(want)).all()):
        i = int(bad[0])
        yield f"outputs[{t.name!r}][{i}]: found {found[i]}, recorded {want[i]} ({bad.size} of {n} differ)"


def close(found: np.ndarray, want: np.ndarray) -> np.ndarray:
    scale = np.max(np.abs(want[np.isfinite(want)]), initial=0.0)
    return np.isclose(found, want, rtol=0, atol=TOLERANCE * scale, equal_nan=True)


def depends_on(t: Tensor, names: set[str]) -> bool:
    """Whether `t` is one of the named tensors or made from one."""
    met, todo = set[Tensor](), [t] if names else []
    while todo:
        u = todo.pop()
        if u.name in names:
            return True
        if u not in met:
            met.add(u)
            todo += u.sources()
    return False
