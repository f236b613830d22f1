"""Random graphs on random machines: the same seed gives the same case, as often as it is built."""

from __future__ import annotations

import random

import numpy as np

from tests.cgraph.random_graphs import random_graph
from workbench import CpuBackend, Flag, Scheduler, Usage
from workbench.devices.backend import DeviceType
from workbench.devices.simulated import SimulatedDevice
from workbench.devices.simulated_memory import Machine, SimulatedMemory
from workbench.errors import WorkbenchError
from workbench.tensors.storage import HostStorage

DENIED = ["MUL_MAT", "ADD", "MUL", "UNARY", "GLU", "SOFT_MAX", "RMS_NORM", "CPY", "CONT", "GET_ROWS", "SET_ROWS", "CONCAT", "ROPE", "SCALE", "ARGSORT"]


def graph_of(seed, n=25):
    """The graph of a seed. What nothing uses is an output, and so is the owner of the memory behind an output that is a view."""
    graph = random_graph(seed, n)
    for t in graph.nodes:
        if not graph.use_count(t):
            t.mark(Flag.OUTPUT)
    for t in graph.nodes:
        if t.flags & Flag.OUTPUT:
            t.root().mark(Flag.OUTPUT)
    for i, t in enumerate((*graph.leafs, *graph.nodes)):
        t.named(f"t{i}")
    return graph


def leaf_values(leaf, seed):
    rng = np.random.default_rng(seed)
    return np.zeros(leaf.shape, np.int32) if leaf.dtype.name == "i32" else rng.uniform(-2, 2, leaf.shape).astype(np.float32)


def write(graph, seed):
    for i, leaf in enumerate(graph.leafs):
        if leaf.storage is not None and leaf.storage.usage is not Usage.WEIGHTS:
            leaf.set(leaf_values(leaf, [seed, i]))


def results(graph):
    return [t.numpy().tobytes() for t in graph.nodes if t.flags & Flag.OUTPUT and t.n_elements]


def on_the_cpu(seed, data, weights):
    """What a plain CPU computes with all tensors in memory of their own."""
    graph = graph_of(seed)
    for i, t in enumerate([*graph.leafs, *graph.nodes]):
        if t.view_src is None:
            t.place(HostStorage(t.nbytes))
            if i in weights:
                t.set(leaf_values(t, [seed, 99, i]))
                t.storage.usage = Usage.WEIGHTS
    backend = CpuBackend(dequant_cache_bytes=0)
    for d in data:
        write(graph, d)
        backend.compute(graph)
        yield results(graph)


def machine_of(r: random.Random, **kw) -> Scheduler:
    """A scheduler over up to two GPUs, perhaps an accelerator on the host's memory, and a CPU, some of which deny ops."""
    machine = Machine()
    host = SimulatedMemory(machine, "CPU", 32, is_host=True)
    shared = SimulatedMemory(machine, "GPU0", 128, r.choice([None, 300]), alloc_extra=r.choice([0, 16]), copies_buffers=r.random() < 0.5)
    backends = []

    def device(name, memory, kind, **how):
        denied = r.sample(DENIED, r.choice([0, 0, 1, 3, 6])) if kind is not DeviceType.CPU else []
        how = {"async_copy": r.random() < 0.6, "async_io": r.random() < 0.6, "events": r.random() < 0.6} | how
        backends.append(SimulatedDevice(machine, name, memory, kind, deny_ops=denied, deny_types=r.choice([[], [], ["f16"]]) if denied else [],
                                        offload_min_batch=r.choice([None, 1, 4]), **how))  # fmt: skip

    for i in range(r.choice([0, 1, 1, 2])):
        own = shared if i == 0 or r.random() < 0.4 else SimulatedMemory(machine, f"GPU{i}", 64)
        device(f"GPU{i}", own, DeviceType.GPU, reads=["CPU"] if r.random() < 0.2 else ["GPU0"] if r.random() < 0.2 else [])
    if r.random() < 0.3:
        device("ACCEL", host, DeviceType.ACCEL)
    device("CPU", host, DeviceType.CPU, waits=r.random() < 0.3, reads=["CPU_Mapped"])
    return Scheduler(backends, parallel=r.random() < 0.3, op_offload=r.random() < 0.7, **kw)


def weights_of(r: random.Random, graph):
    return {i for i in range(len(graph.leafs)) if r.random() < 0.3 and graph.leafs[i].dtype.name != "i32" and not _written(graph, graph.leafs[i])}


def _written(graph, leaf):
    return any(n.view_src is leaf and not n.spec.is_view for n in graph.nodes)


def place(r: random.Random, scheduler, graph, weights, seed):
    """Weights in the memory of some backend, and some assignments by hand."""
    for i in weights:
        leaf = graph.leafs[i]
        leaf.place(r.choice(scheduler.buffer_types).alloc_buffer(leaf.nbytes, Usage.WEIGHTS))
        leaf.set(leaf_values(leaf, [seed, 99, i]))
    assigned = [(i, r.randrange(len(scheduler.backends))) for i in range(len(graph.nodes)) if r.random() < 0.2]
    return assigned if r.random() < 0.7 else []


def assign(scheduler, graph, assigned):
    for i, b in assigned:
        try:
            scheduler.set_backend(graph.nodes[i], b)
        except WorkbenchError:  # a view, or an op that the backend lacks
            pass
