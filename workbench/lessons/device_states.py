"""The state that lesson 07 starts from: simulated devices, tensors placed in their memory, copies and streams. Public names only."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from workbench.cgraph import CGraph, build
from workbench.devices import Backend, BufferType, CudaBackend, cuda
from workbench.devices.backend import HOST_HANDED_IN
from workbench.devices.planned import planned_file, planned_machine
from workbench.devices.simulated import SimulatedDevice, simulated_machine
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler import Assignment, Scheduler
from workbench.tensors import Context, Flag, Tensor, Usage, ops
from workbench.trace import Trace
from workbench.views.run_data import run_data


class Layer(NamedTuple):
    """A product whose weights have to be brought over: bytes in host memory, the weight on the card, the graph, its result."""

    data: np.ndarray
    weight: Tensor
    graph: CGraph
    out: Tensor


class Lesson07:
    """Backends and buffers: simulated machines by name, tensors placed in them, layers that share slots of a card."""

    def machine(self, names: str = "rtx3090-pcie4", **settings: Any) -> list[SimulatedDevice]:
        """The devices of a machine of presets, the CPU last; `[0].machine.now` is its clock in nanoseconds."""
        return simulated_machine(names, **settings)

    def placed(self, kind: BufferType, *ne: int, name: str = "x", dtype: str = "f32", usage: Usage = Usage.ANY,
               data: np.ndarray | None = None) -> Tensor:  # fmt: skip
        """A tensor in a fresh buffer of this type; nothing is written unless there is `data`."""
        t = Context(2**10, no_alloc=True, name="here").new_tensor(dtype, *ne, name=name)
        t.place(kind.alloc_buffer(kind.alloc_size(t), usage))
        return t if data is None else t.set(data)

    def elapsed(self, device: SimulatedDevice, call: Callable[[], Any]) -> int:
        """Nanoseconds of virtual time that a call takes the host."""
        start = device.machine.now
        call()
        return device.machine.now - start

    def copy_ns(self, names: str, nbytes: int, pieces: int = 1, pinned: bool = True) -> int:
        """Virtual time for `nbytes` to a card in so many blocking copies, out of pinned or of ordinary memory."""
        card, cpu = self.machine(names)
        size = nbytes // pieces
        t = self.placed(card.buffer_type, size, dtype="i8")
        data = (cpu.buffer_type if pinned else HOST_HANDED_IN).alloc_buffer(size).host_bytes().view(np.int8)
        return self.elapsed(card, lambda: [t.set(data) for _ in range(pieces)])

    def measured_copies(self) -> list[tuple[str, list[int], list[float]]]:
        """Measured here: (way, bytes, µs of the best copy) within host memory, and to a real card where there is one."""
        sizes, out = [2**12, 2**18, 2**20, 2**25], []
        source, target = np.ones(sizes[-1], np.uint8), np.zeros(sizes[-1], np.uint8)
        ways: dict[str, Callable[[int], Any]] = {"memory to memory": lambda n: np.copyto(target[:n], source[:n])}
        if not cuda.why_not():
            card = CudaBackend()
            places = {n: self.placed(card.buffer_type, n, dtype="i8") for n in sizes}
            ways["host to card"] = lambda n: places[n].set(source[:n].view(np.int8))
        for name, copy in ways.items():
            times = [min(_elapsed(partial(copy, n)) for _ in range(max(5, min(200, 2**26 // n)))) for n in sizes]
            out.append((name, sizes, times))
        return out

    def no_card(self) -> str:
        """Why only host memory was measured; empty where there is a card."""
        why = cuda.why_not()
        return f"Skipped, the link to a card: {why}." if why else ""

    # ---- layers whose weights come over one by one

    def layers(self, devices: Sequence[Backend], shapes: Sequence[tuple[int, int, int]], n_slots: int) -> list[Layer]:
        """Products [k, n] by [k, tokens] on the card `devices[0]`; weight i lies in slot i % n_slots, its bytes in pinned memory."""
        card, host = devices[0].buffer_type, devices[-1].buffer_type
        slots = [card.alloc_buffer(4 * max(k * n for k, n, _ in shapes), Usage.WEIGHTS) for _ in range(n_slots)]
        rng, made = np.random.default_rng(7), []
        for i, (k, n, tokens) in enumerate(shapes):
            context = Context(2**12, no_alloc=True, name=f"layer {i}")
            weight, x = context.new_tensor("f32", k, n, name=f"w{i}"), context.new_tensor("f32", k, tokens, name="x")
            with context.active():
                out = ops.mul_mat(weight, x).named(f"layer {i}")
            weight.place(slots[i % n_slots])
            for t in (x, out):
                t.place(card.alloc_buffer(t.nbytes))
            x.set(rng.standard_normal((tokens, k), np.float32))
            data = host.alloc_buffer(weight.nbytes).host_bytes()
            data[:] = rng.standard_normal(k * n, np.float32).view(np.uint8)
            made.append(Layer(data, weight, build(out), out))
        return made

    def stream(self, card: SimulatedDevice, layers: Sequence[Layer], n_slots: int, ahead: bool = True, wait: bool = True) -> int:
        """Bring each weight over and compute with it; returns the virtual nanoseconds that took.

        ahead: copy on the copy stream, beside what is computed; wait: only when the slot's last reader is done.
        """
        card.machine.spend(max(card.free_at - card.machine.now, 0))
        start, free = card.machine.now, dict[int, Any]()
        for i, layer in enumerate(layers):
            if ahead:
                card.wait_event(card.prefetch(layer.weight, layer.data, after=free.get(i % n_slots) if wait else None))
            else:
                card.set_async(layer.weight, layer.data)
            card.compute_async(layer.graph)
            free[i % n_slots] = event = card.new_event(f"layer {i} done")
            assert event is not None
            event.record()
        end = card.free_at
        card.synchronize()
        return end - start

    def right(self, layers: Sequence[Layer]) -> list[bool]:
        """Whether each result is what NumPy makes of the same numbers."""
        verdicts = []
        for layer in layers:
            w, x = layer.weight, layer.out.src[1]
            assert x is not None
            want = x.numpy() @ layer.data.view(np.float32).reshape(w.ne[1], w.ne[0]).T
            verdicts.append(bool(np.allclose(layer.out.numpy(), want, atol=1e-3)))
        return verdicts

    def costs(self, card: SimulatedDevice, layers: Sequence[Layer]) -> tuple[list[int], list[int]]:
        """Nanoseconds of each layer's copy and of its computation, by the formulas of the cost model."""
        return ([card.speed.transfer_ns(layer.data.nbytes) for layer in layers],
                [card.speed.compute_ns(layer.out) for layer in layers])  # fmt: skip

    def spans(self, trace: Trace, ns: int) -> tuple[list[tuple[int, float, float, str]], list[str]]:
        """What streams were busy with in the last `ns` of a trace, in µs, as `views.lane_picture` takes it; and their names."""
        busy = [(trace.described(e), e) for e in trace.of("busy")]
        start = max(e.end for _, e in busy) - ns
        names = sorted({str(d["stream"]) for d, _ in busy})
        return ([(names.index(str(d["stream"])), (e.start - start) / 1000, (e.end - start) / 1000, str(d["name"]))
                 for d, e in busy if e.start >= start], names)  # fmt: skip

    def streams(self) -> tuple[list[tuple[list[int], list[int], int]], list[int], list[str]]:
        """For the exercise: (copies, layers, slots) of runs on a simulated laptop, the nanoseconds they took, and their names."""
        on, expected, names = [], [], []
        kinds = {"layers longer": [(128, 128, 2048)] * 5, "copies longer": [(256, 256, 256)] * 5,
                 "mixed": [(256, 256, 512), (128, 256, 2048), (256, 256, 64), (64, 256, 2048), (256, 128, 1024)]}  # fmt: skip
        for (name, shapes), slots in itertools.product(kinds.items(), (1, 2, 3)):
            devices = self.machine("laptop")
            layers = self.layers(devices, shapes, slots)
            expected.append(self.stream(devices[0], layers, slots))
            assert all(self.right(layers))
            on.append((*self.costs(devices[0], layers), slots))
            names.append(f"{name}, {slots} slot{'s' * (slots > 1)}")
        return on, expected, names

    # ---- the questions

    def bias(self, usage: Usage) -> tuple[Scheduler, CGraph]:
        """y = w x + b over a card and its host: w on the card, b on the host in a buffer of this usage."""
        card, cpu = self.machine()
        w = self.placed(card.buffer_type, 64, 64, name="w", usage=Usage.WEIGHTS)
        b = self.placed(cpu.buffer_type, 64, name="b", usage=usage)
        with Context(2**12, no_alloc=True, name="bias").active() as context:
            x = context.new_tensor("f32", 64, 4, name="x").mark(Flag.INPUT)
            y = ops.add(ops.mul_mat(w, x).named("wx"), b).named("y").mark(Flag.OUTPUT)
        return Scheduler([card, cpu]), build(y)

    def placement(self, usage: Usage) -> dict[str, str]:
        """The backend of each node of `bias`."""
        scheduler, graph = self.bias(usage)
        scheduler.split(graph)
        return {t.name: scheduler.backend_of(t).name for t in graph.nodes}

    def sample_nodes(self, kind: BufferType) -> dict[str, Tensor]:
        """Nodes of a model by what they do, with weights in memory of this type."""
        n = 64
        w16, w, experts = (self.placed(kind, *ne, name="w", dtype=t, usage=Usage.WEIGHTS) for t, ne in
                           (("f16", (n, n)), ("f32", (n, n)), ("f16", (n, n, 8))))  # fmt: skip
        with Context(2**14, no_alloc=True, name="samples").active() as context:
            x, few = context.new_tensor("f32", n, 64), context.new_tensor("f32", n, 4)
            ids, rows = context.new_tensor("i32", 2, 64), context.new_tensor("i32", 64)
            return {
                "product, 64 tokens": ops.mul_mat(w16, x), "product, 4 tokens": ops.mul_mat(w16, few),
                "expert product, 64 tokens": ops.mul_mat_id(experts, ops.reshape(x, n, 1, 64), ids),
                "look-up of 64 rows": ops.get_rows(w, rows), "softmax": ops.soft_max(x), "sum": ops.add(x, x),
            }  # fmt: skip

    def who(self, names: str, tokens: int) -> str:
        """The backend that a scheduler over this machine gives a product to whose weight lies in host memory."""
        devices = self.machine(names)
        graph = self.product(devices[-1].buffer_type, tokens, 64, 64)
        scheduler = Scheduler(devices)
        scheduler.split(graph)
        return scheduler.backend_of(graph.nodes[0]).name

    def memory_questions(self) -> tuple[list[tuple[Any, ...]], list[int], list[str]]:
        """For the exercise: (backends, buffer type, node), what a scheduler without offloading answers, and names."""
        on, expected, names = [], [], []
        for machine in ("blas,cpu", "rtx3090-pcie4,blas,cpu", "two-rtx3090,cpu"):
            devices = self.machine(machine, deny_ops=["MUL_MAT_ID"])
            a = Assignment(devices, [d.buffer_type for d in devices])
            for kind in (*dict.fromkeys(d.buffer_type for d in devices), HOST_HANDED_IN):
                for what, node in self.sample_nodes(kind).items():
                    if node.src[0] is not None and node.src[0].storage is not None:
                        on.append((devices, kind, node))
                        expected.append(a.by_memory(node.src[0], node))
                        names.append(f"{what}, weight in {kind.name}, {', '.join(d.name for d in devices)}")
        return on, expected, names

    def product(self, kind: BufferType, tokens: int, k: int = 4096, n: int = 14336) -> CGraph:
        """A product of an f16 weight [k, n] in memory of this type with an input of so many tokens; nobody writes the weight."""
        w = self.placed(kind, k, n, name="w", dtype="f16", usage=Usage.WEIGHTS)
        with Context(2**12, no_alloc=True, name="product").active() as context:
            x = context.new_tensor("f32", k, tokens, name="x").mark(Flag.INPUT)
            return build(ops.mul_mat(w, x).named("y").mark(Flag.OUTPUT))

    def offload_us(self, tokens: int, on_card: bool, pinned: bool = True) -> float:
        """Virtual microseconds of a product of Llama 3 8B whose weight lies on the host: by the CPU, or by the card, which has to
        fetch it. Planned: copies, waits and launches of the real runtime, on devices whose memory has no bytes."""
        card, cpu = planned_machine("rtx3090-pcie4", offload_min_batch=1 if on_card else None)
        k, n = 4096, 14336
        graph = self.product(cpu.buffer_type, tokens, k, n)
        w = graph.nodes[0].src[0]
        assert w is not None
        if not pinned:
            w.place(planned_file(w.nbytes, "of weights"))
        scheduler = Scheduler([card, cpu])
        scheduler.alloc(graph)
        ns = self.elapsed(card, lambda: scheduler.compute(graph))
        assert scheduler.splits[0].backend == (0 if on_card else 1)
        return ns / 1000

    def break_even(self, pinned: bool) -> int:
        """The first number of tokens for which fetching the weight takes less time than computing on the host."""
        return bisect.bisect_left(range(1, 1000), True, key=lambda n: self.offload_us(n, True, pinned) < self.offload_us(n, False)) + 1

    # ---- the running program of lessons 07 to 12

    def chain_run(self) -> Trace:
        """The calls of a run of A B C | D | E F."""
        trace, case = Trace("virtual"), CASES["A B C | D | E F"]
        scheduler, graph = case.scheduler_and_graph(trace)
        scheduler.alloc(graph)
        case.write_inputs(graph)
        scheduler.compute(graph)
        return trace

    def chain_copies(self, trace: Trace) -> list[tuple[str, str, str, int]]:
        """What such a run copied: (tensor, from, to, bytes)."""
        return [(m.name, m.source, m.target, m.bytes) for m in run_data(trace).moves]


def _elapsed(call: Callable[[], Any]) -> float:
    start = perf_counter_ns()
    call()
    return (perf_counter_ns() - start) / 1000
