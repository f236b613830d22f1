"""One run of a model's graph in virtual time, summed up: what was copied between devices, what was computed where, what cost most."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.devices.plan import needs_work
from workbench.devices.simulated import SimulatedDevice
from workbench.models.transformer import StepGraph
from workbench.scheduler import Scheduler
from workbench.tensors import Tensor
from workbench.trace import Trace

COPIES = {
    "set_async": "device",
    "copy_async": "target",
    "set": "memory",
    "get": "memory",
    "get_async": "device",
    "copy_buffer": "memory",
}
"""Events that move bytes, and the field that names the memory on the far side of the host."""


class Way(NamedTuple):
    """Bytes that went from one device to another in one run: what they were, in how many copies, and the time these took."""

    source: str
    target: str
    kind: str  # weights, activations, inputs or ids
    nbytes: int
    copies: int
    ns: int


class Work(NamedTuple):
    """Time that one device computed in one run, by what it computed, the bytes it read and wrote for that, and what most of the time
    goes into: "starting kernels", "memory" or "arithmetic"."""

    device: str
    kind: str
    nodes: int
    ns: int
    moved: int
    flops: int
    bound: str


@dataclass
class Phase:
    """One run of one graph: tokens in it, cells of the cache that it looks at, splits, copies, work and the virtual time of all."""

    name: str
    n_tokens: int
    n_kv: int
    splits: list[tuple[str, int, list[tuple[str, int]], str]]  # backend, nodes, inputs with their bytes, why it begins
    ways: list[Way]
    work: list[Work]
    ns: int
    trace: Trace

    def to_dict(self) -> dict[str, Any]:
        """Everything but the trace, as plain data."""
        return {
            **{k: v for k, v in vars(self).items() if k != "trace"},
            "ways": [w._asdict() for w in self.ways], "work": [w._asdict() for w in self.work],
            "splits": [dict(zip(("backend", "nodes", "inputs", "cause"), s, strict=True)) for s in self.splits],
            "tokens_per_second": self.tokens_per_second, "largest_cost": self.largest_cost(),
        }  # fmt: skip

    @property
    def copied(self) -> int:
        """Bytes that went from one device to another."""
        return sum(w.nbytes for w in self.ways)

    @property
    def tokens_per_second(self) -> float:
        """Speed by the cost model."""
        return self.n_tokens * 1e9 / max(self.ns, 1)

    def largest_cost(self) -> str:
        """The largest cost in a sentence."""
        what = "a decoded token" if self.n_tokens == 1 else f"a prompt of {self.n_tokens:,} tokens"
        work, way = max(self.work, key=lambda w: w.ns, default=None), max(self.ways, key=lambda w: w.ns, default=None)
        if way is not None and (work is None or way.ns > work.ns):
            return (f"The largest cost of {what} is copying {way.kind} from {way.source} to {way.target}: {duration(way.ns)} of "
                    f"{duration(self.ns)} ({way.ns / max(self.ns, 1):.0%}), for {way.nbytes:,} bytes in {way.copies} copies.")  # fmt: skip
        if work is None:
            return "Nothing is computed."
        return (
            f"The largest cost of {what} is {work.kind} on {work.device}: {duration(work.ns)} of {duration(self.ns)} "
            f"({work.ns / max(self.ns, 1):.0%}), most of it {_BOUNDS[work.bound].format(w=work)}."
        )


# ---- running a phase


def run_phase(name: str, step: StepGraph, scheduler: Scheduler, machine: Any) -> Phase:
    """Split, place and run one graph, and sum up what happened. Inputs must be written by the caller where they matter."""
    scheduler.reset()
    scheduler.trace = trace = Trace("virtual")
    try:
        scheduler.alloc(step.graph)
        start = machine.now
        scheduler.compute(step.graph)
    finally:
        scheduler.trace = None
    causes = [trace.described(e)["cause"] for e in trace.of("split")]
    splits = [(scheduler.backends[s.backend].name, len(s.nodes), [(t.name, t.nbytes) for t in s.inputs], str(c))
              for s, c in zip(scheduler.splits, causes, strict=True)]  # fmt: skip
    n_tokens = step.inputs.tokens.ne[0]
    n_kv = step.inputs.mask.ne[0]
    return Phase(
        name, n_tokens, n_kv, splits, ways(trace, scheduler), works(scheduler, step), machine.now - start, trace
    )


def ways(trace: Trace, scheduler: Scheduler) -> list[Way]:
    """Bytes between devices in a recorded run, largest first."""
    inputs = {t.name: t for s in scheduler.splits for t in s.inputs}
    kinds = {name: "weights" if t.op == "NONE" and t.storage is not None and t.storage.usage.name == "WEIGHTS" else
             "inputs" if t.op == "NONE" else "activations" for name, t in inputs.items()}  # fmt: skip
    host = scheduler.backends[-1].name
    busy = iter([e for e in trace.of("busy") if trace.described(e)["work"] == "copy"])
    sums: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for event in trace.events:
        if event.kind not in COPIES:
            continue
        d = trace.described(event)
        if event.kind in ("copy_async", "copy_buffer") and not d["done"]:
            continue
        far = str(d[COPIES[event.kind]])
        source = str(d["device"]) if event.kind == "copy_async" else far if event.kind.startswith("get") else host
        target = host if event.kind.startswith("get") else far
        if source == target:
            continue
        name = str(d["copy"] if "copy" in d else d["name"])
        name = name.split("#")[1] if name.count("#") > 1 else name
        kind = "ids" if event.kind == "get_async" else kinds.get(name, "activations")
        took = event.end - event.start
        if event.kind in ("set_async", "get_async", "copy_async"):
            work = next(busy)
            took = work.end - work.start
        row = sums[source, target, kind]
        row[0] += int(d["bytes"])
        row[1] += 1
        row[2] += took
    return sorted((Way(*key, *row) for key, row in sums.items()), key=lambda w: -w.nbytes)


def works(scheduler: Scheduler, step: StepGraph) -> list[Work]:
    """Time by device and kind of work, longest first."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    bounds: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    joining = _joining(step)
    for split in scheduler.splits:
        backend = scheduler.backends[split.backend]
        assert isinstance(backend, SimulatedDevice)
        for node in filter(needs_work, split.nodes):
            assert node.spec is not None
            key = backend.name, _kind(node, step, joining)
            row = sums[key]
            for i, more in enumerate((1, backend.speed.compute_ns(node), node.spec.moved(node), node.spec.flops(node))):
                row[i] += more
            for bound, ns in backend.speed.parts(node).items():
                bounds[key][bound] += ns
    return sorted(
        (
            Work(*key, row[0], row[1], row[2], row[3], max(bounds[key], key=bounds[key].__getitem__))
            for key, row in sums.items()
        ),
        key=lambda w: -w.ns,
    )


def _joining(step: StepGraph) -> set[int]:
    """Nodes of layers with experts that come after the router: `id` of each."""
    segments = [s for s in step.segments if s.kind == "experts"]
    nodes = [step.graph.nodes[s.first : s.last] for s in segments]
    return {id(n) for some in nodes if any(n.op == "MUL_MAT_ID" for n in some) for n in some}


def _kind(node: Tensor, step: StepGraph, joining: set[int]) -> str:
    if node.op == "MUL_MAT_ID":
        return "experts"
    if node is step.logits:
        return "output matrix"
    name = node.name.partition("-")[0]
    if name in ("kq", "kq_soft_max", "kqv", "kqv_mla", "v_cont"):
        return "attention over the cache"
    if name.startswith("ffn_moe_") and id(node) not in joining:
        return "routing"
    if node.op == "MUL_MAT":
        return "dense products"
    if id(node) in joining:
        return "between and after experts"
    if node.op in ("RMS_NORM", "NORM") or (node.op == "MUL" and "norm" in name):
        return "norms"
    return "rope, writing the cache" if node.op in ("ROPE", "SET_ROWS") else "everything else"


_BOUNDS = {"starting kernels": "for starting {w.nodes:,} kernels", "memory": "for {w.moved:,} bytes of memory",
           "arithmetic": "for {w.flops:,} operations"}  # fmt: skip


def duration(ns: float) -> str:
    """A time in the unit that suits it."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"
