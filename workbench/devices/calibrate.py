"""Measuring a device: speeds of products, memory and copies by the workbench's own kernels, as a preset of its own.

A busy machine shows what it can do only now and then, so each figure is the best of several rounds, taken in turns.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import numpy as np

from workbench.cgraph import build
from workbench.devices.backend import Backend, DeviceType
from workbench.devices.cost import Speed
from workbench.devices.cpu import CpuBackend
from workbench.tensors import OPS, Context, Tensor, Usage, ops

FOR_CARDS = 16
"""Products of 2048 x 2048 take a card some 0.1 ms: many times what it takes to start them."""
TYPES = ("f32", "f16", "q8_0", "q4_0")
EXPERTS, SMALL, COPY = 16, 16, 16 * 2**20


class Bench:
    """A node with memory on a device. best: nanoseconds of the best run so far."""

    best = float("inf")

    def __init__(self, backend: Backend, node: Tensor) -> None:
        self.graph = build(node)
        tensors = [t for t in (*self.graph.leafs, *self.graph.nodes) if t.view_src is None]
        places = np.cumsum([0, *(-(-t.nbytes // 256) * 256 for t in tensors)])
        self.buffer = backend.buffer_type.alloc_buffer(
            int(places[-1]), Usage.WEIGHTS
        )  # so that decoded weights are kept, as those of models
        for t, place in zip(tensors, places, strict=False):
            t.place(self.buffer, int(place))
        rng = np.random.default_rng(0)
        for leaf in self.graph.leafs:
            if leaf.dtype.name == "i64":
                leaf.set(np.zeros(leaf.shape, np.int64))
            elif leaf.dtype.name == "i32":  # expert ids, no token naming one twice
                ids = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (leaf.n_rows, 1)), axis=1)
                leaf.set(ids[:, : leaf.ne[0]].reshape(leaf.shape))
            else:
                leaf.set(rng.standard_normal(leaf.shape, np.float32))
        self.plan = backend.plan(self.graph)
        self.run()
        self.best = float("inf")  # the first run decodes and warms up

    def node(self, i: int, start_ns: int, end_ns: int) -> None:
        """The node was computed: a plan says so."""
        self.best = min(self.best, end_ns - start_ns)

    def run(self) -> None:
        """Run once more."""
        self.plan.execute(self)

    def rate(self, column: str, start: float) -> float:
        """Operations ("flops") or bytes ("moved") per nanosecond, without the time it takes to start."""
        node = self.graph.nodes[-1]
        return getattr(node.spec, column)(node) / max(self.best - start, 0.05 * self.best)

    def close(self) -> None:
        """Give the memory back."""
        self.buffer.close()


def _starts(c: Context) -> dict[str, Tensor]:
    """Each op on so few numbers that only its start counts; those that models are made of."""
    new = c.new_tensor
    x, y, many = new("f32", 16), new("f32", 16), new("f32", 16, 2)
    one, cell = new("i32", 1), new("i64", 1)
    experts = {k: ops.mul_mat_id(new(k, 32, 16, EXPERTS), new("f32", 32, 1, 1), new("i32", 1, 1)) for k in TYPES}
    return {
        "ADD": ops.add(x, y), "MUL": ops.mul(x, y), "DIV": ops.div(x, y), "CLAMP": ops.clamp(x, 0.0, 1.0), "SUM_ROWS": ops.sum_rows(x),
        "RMS_NORM": ops.rms_norm(x, 1e-5), "SWIGLU": ops.swiglu_split(x, y), "ARGSORT": ops.argsort(x),
        "CONT": ops.cont(ops.transpose(many)),
        "SOFT_MAX": ops.soft_max_ext(new("f32", 16, 1, 4), new("f32", 16, 1), 0.5), "ROPE": ops.rope(new("f32", 16, 4, 1), one, 16),
        "GET_ROWS": ops.get_rows(new("f16", 16, EXPERTS), one), "SET_ROWS": ops.set_rows(new("f32", 16, 4), new("f32", 16, 1), cell),
        "MUL_MAT f32": ops.mul_mat(ops.permute(new("f32", 16, 2, 16), 0, 2, 1, 3), ops.permute(new("f32", 16, 4, 1), 0, 2, 1, 3)),
        **{f"MUL_MAT {k}": ops.mul_mat(new(k, 32, 16), new("f32", 32, 1)) for k in TYPES[1:]},
        **{f"MUL_MAT_ID {k}": node for k, node in experts.items()},
    }  # fmt: skip


def _large(c: Context, s: int) -> dict[str, Tensor]:
    """Nodes on so many numbers that their start counts little; s: how many times as wide as for a CPU."""
    new = c.new_tensor
    return {
        "memory": ops.add(new("f32", 2**22 * s), new("f32", 2**22 * s)), "vector": ops.soft_max(new("f32", 256 * s, 512 * s)),
        "experts": ops.mul_mat_id(new("f16", 128 * s, 64 * s, EXPERTS), new("f32", 128 * s, 1, 64 * s), new("i32", 2, 64 * s)),
        **{k: ops.mul_mat(new(k, 128 * s, 128 * s), new("f32", 128 * s, 64 * s)) for k in TYPES},
    }  # fmt: skip


@dataclass
class Calibration:
    """What was measured of a device. speed: as the cost model takes it; figures and how they were measured: for a file."""

    title: str
    kind: str
    speed: Speed
    capacity: int = 0
    how: dict[str, str] = field(default_factory=dict)

    def to_toml(self, name: str = "measured") -> str:
        """A preset of its own, for `--device FILE.toml`."""
        s = self.speed
        f16, quantised = s.flops_of.get("f16", s.flops), s.flops_of.get("q4_0", s.flops)
        figures: dict[str, float] = {"capacity": self.capacity, "memory": s.memory, "f32": s.flops, "f16": f16, "quantised": quantised,
                                     "vector": s.vector or s.flops, "link": s.link, "pageable": s.pageable or s.link,
                                     "launch_ns": s.launch_ns, "expert_ns": s.expert_ns, "link_ns": s.link_ns,
                                     "sync_ns": s.sync_ns}  # fmt: skip
        lines = [f"[{name}]", f'title = "{self.title}"', f'kind = "{self.kind}"']
        lines += [f'{k} = [{v if k == "capacity" else f"{v:.6g}"}, "measured: {self.how.get(k, "see calibrate.py")}"]'
                  for k, v in figures.items() if k != "capacity" or v]  # fmt: skip
        starts = ", ".join(f'"{op}" = {ns}' for op, ns in s.starts.items())
        return "\n".join([*lines, f"starts = {{ {starts} }}", *(["unpacked = true"] if s.unpacked else [])]) + "\n"


def _how(s: int) -> dict[str, str]:
    return {
        "memory": f"ADD of two arrays of {16 * s} MiB", "f32": f"a product of {128 * s} x {128 * s} and {128 * s} x {64 * s}",
        "f16": "the same with f16 weights", "quantised": "the same with q4_0 weights", "vector": f"SOFT_MAX of {512 * s} rows of {256 * s}",
        "link": "a copy of 16 MiB", "pageable": "a copy of 16 MiB out of ordinary memory",
        "launch_ns": "ADD of 16 numbers and a wait; starts: other ops on as few", "capacity": "what the driver says",
        "expert_ns": f"MUL_MAT_ID with 16 experts of {128 * s} x {64 * s}, per expert, without its arithmetic",
        "link_ns": "a copy of 4 bytes", "sync_ns": "waiting for nothing",
    }  # fmt: skip


def _capacity(backend: Any) -> int:
    """Bytes of a card; 0 for a host."""
    if getattr(backend, "cupy", None) is None:
        return 0
    with backend.cupy.cuda.Device(backend.device):
        return int(backend.cupy.cuda.runtime.memGetInfo()[1])


class Calibrator:
    """Measures a backend: call `round` as often as there is time for, in between other work; `result` is the best of all rounds.

    scale: how many times as wide matrices are as for a CPU (None: as suits the device).
    """

    def __init__(self, backend: Backend | None = None, scale: int | None = None) -> None:
        self.backend = backend or CpuBackend()
        self.scale = scale or (1 if self.backend.device_type is DeviceType.CPU else FOR_CARDS)
        self.context = Context(2**20, no_alloc=True, name="calibration")
        with self.context.active():
            self.benches = {
                name: Bench(self.backend, node)
                for name, node in (_starts(self.context) | _large(self.context, self.scale)).items()
            }
        self._copies: dict[str, float] = {}
        self._buffer = self.backend.buffer_type.alloc_buffer(COPY)
        self._pageable = np.zeros(COPY, np.uint8)
        self._pinned = self._pinned_bytes()

    def _pinned_bytes(self) -> np.ndarray:
        if self.backend.device_type is DeviceType.CPU:
            return self._pageable
        host: Any = getattr(self.backend, "host_buffer_type", None)
        return host.alloc_buffer(COPY).host_bytes() if host is not None else self._pageable

    def round(self, copies: bool = True) -> None:
        """Every figure once more."""
        for _ in range(4):  # in turns: in a model, too, other nodes have been to the caches in between
            for name, bench in self.benches.items():
                if name != "memory":
                    bench.run()
        self.benches["memory"].run()
        if copies:
            for name, data in (("link", self._pinned), ("pageable", self._pageable), ("link_ns", self._pageable[:4])):
                self._time(name, lambda data=data: self._buffer.write(0, data))  # type: ignore[misc]
            self._time("sync_ns", self.backend.synchronize)

    def _time(self, name: str, work: Callable[[], Any]) -> None:
        self.backend.synchronize()
        start = perf_counter_ns()
        work()
        self.backend.synchronize()
        self._copies[name] = min(self._copies.get(name, float("inf")), perf_counter_ns() - start)

    def result(self) -> Calibration:
        """What was measured so far."""
        b, c = self.benches, self._copies
        starts = {name: int(bench.best) for name, bench in b.items() if name.isupper() or " " in name}
        start = starts["ADD"]
        products = {t: b[t].rate("flops", starts[f"MUL_MAT {t}"]) for t in TYPES}
        experts = OPS["MUL_MAT_ID"].flops(b["experts"].graph.nodes[-1]) / products["f16"]
        types = products | {"bf16": products["f16"]}
        latency = c.get("link_ns", 0.0)
        rates = {k: COPY / max(c[k] - latency, 1.0) for k in ("link", "pageable") if k in c}
        speed = Speed(launch_ns=int(start), flops=products["f32"], memory=b["memory"].rate("moved", start), flops_of=types,
                      vector=b["vector"].rate("flops", starts["SOFT_MAX"]), starts=starts,
                      unpacked=self.backend.device_type is DeviceType.CPU,
                      expert_ns=int(max(b["experts"].best - starts["MUL_MAT_ID f16"] - experts, 0) / EXPERTS), link_ns=int(latency),
                      sync_ns=int(c.get("sync_ns", 0.0)),
                      **rates)  # fmt: skip
        kind = "CPU" if self.backend.device_type is DeviceType.CPU else "GPU"
        title = (
            f"{self.backend.name} of this machine ({platform.machine()}, {platform.system()}), kernels of the workbench"
        )
        return Calibration(title, kind, speed, _capacity(self.backend), _how(self.scale))

    def close(self) -> None:
        """Give the memory back; the backend stays."""
        self.context.close()
        for bench in self.benches.values():
            bench.close()
        self._buffer.close()


def calibrate(backend: Backend | None = None, rounds: int = 5) -> Calibration:
    """Measure a device, by default the CPU with one thread: the best of `rounds` rounds, about 0.1 s each on a desktop."""
    calibrator = Calibrator(backend)
    try:
        for _ in range(rounds):
            calibrator.round()
        return calibrator.result()
    finally:
        calibrator.close()
