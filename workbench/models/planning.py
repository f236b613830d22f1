"""What ggml's scheduler does with a model on given devices, found out from the header of its file alone.

The model is placed, its graphs are built, split and given memory, and run: by the same code as always, on devices that have sizes and
speeds but neither bytes nor kernels (`devices.planned`). So copies and times are those that a run of the simulated machine has.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from workbench.devices import DeviceType
from workbench.devices.planned import PlannedMachine, planned_file, planned_machine
from workbench.devices.simulated import SimulatedDevice
from workbench.errors import ModelError, ParameterError, shown
from workbench.models.gguf import GGUFFile, open_gguf
from workbench.models.hparams import ARCHITECTURES
from workbench.models.kv_cache import PAD_KV, KVCache
from workbench.models.model import Model
from workbench.models.offload import PlacedModel, home_of_layer, place_weights
from workbench.models.phases import Phase, run_phase
from workbench.models.transformer import build_step
from workbench.moe import RouteTrace
from workbench.scheduler import Scheduler
from workbench.tensors import Tensor
from workbench.tensors.context import padded

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of merged experts (`LLM_FFN_EXPS_REGEX`): what `--n-cpu-moe` keeps on the host."""
WINDOW = ("Layers with a sliding window get as many cells as the others (llama.cpp --swa-full); without that, theirs are as many as the "
          "window and a batch need.")  # fmt: skip


class Device(NamedTuple):
    """Bytes on one device, by purpose, and its capacity (0: not known)."""

    name: str
    title: str
    weights: int
    kv: int
    compute: int
    capacity: int

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.kv + self.compute


@dataclass
class SchedulePlan:
    """What `plan_schedule` found. phases: prefill and decode; empty for an architecture without a graph builder. notes: what
    was assumed, and rules of llama.cpp that played a part."""

    model: str
    architecture: str
    devices: list[Device]
    phases: list[Phase]
    n_gpu_layers: int
    n_layer: int
    pipelined: bool
    n_context: int
    expert_bytes: int  # of all experts
    active_bytes: int  # of the experts that one token uses
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the traces, as plain data."""
        phases = [p.to_dict() for p in self.phases]
        return {**vars(self), "devices": [d._asdict() for d in self.devices], "phases": phases}

    def overflows(self) -> list[tuple[Device, int]]:
        """Devices that are too small, with the bytes that are too many."""
        return [(d, d.total - d.capacity) for d in self.devices if d.capacity and d.total > d.capacity]


def plan_schedule(which: str | os.PathLike[str] | GGUFFile, devices: str, *, n_gpu_layers: int | None = None,
                  overrides: Mapping[str, str] | None = None, n_cpu_moe: int = 0, batch: int = 512, context: int = 4096, kv: str = "f16",
                  mmap: bool = True, routes: RouteTrace | None = None, memory: int | None = None) -> SchedulePlan:  # fmt: skip
    """Plan a model on a machine of presets, for one prompt of `batch` tokens and one decoded token after it.

    n_gpu_layers, overrides (pattern -> device), n_cpu_moe: what goes where, as llama.cpp's options of these names. context: cells of the
    cache. kv: its type. mmap: weights stay pageable; without it they are pinned. routes: which experts tokens choose (at least batch + 1
    tokens); default: uniformly at random. memory: bytes of each card instead of the preset's.
    """
    if kv not in ("f16", "f32"):
        raise ParameterError(f"kv={kv!r}", "f16 or f32")
    for what, value in (("batch", batch), ("context", context)):
        if not isinstance(value, int) or not 1 <= value < 2**31:
            raise ParameterError(f"{what}={value!r}", f"a whole number from 1 to {2**31 - 1:,}")
    own = not isinstance(which, GGUFFile)
    file = open_gguf(which) if not isinstance(which, GGUFFile) else which
    try:
        return _Planner(file, devices, memory, mmap).plan(
            n_gpu_layers, overrides or {}, n_cpu_moe, batch, context, kv, routes
        )
    finally:
        if own:
            file.close()


class _Planner:
    """The devices and the file while a plan is made."""

    def __init__(self, file: GGUFFile, names: str, memory: int | None, mmap: bool) -> None:
        self.file, self.notes = file, list[str]()
        self.routes: _Routes | None = None
        self.backends: list[SimulatedDevice] = planned_machine(names, memory)
        machine = self.backends[0].machine
        assert isinstance(machine, PlannedMachine)
        self.machine = machine
        self.gpus = [b for b in self.backends if b.device_type is DeviceType.GPU]
        self.weights = planned_file(file.storage.size, file.path.name)
        self.mapped = mmap
        if self.gpus and not mmap:
            self.machine.pinned[self.weights._byte.ctypes.data] = 1

    def plan(self, n_gpu_layers: int | None, overrides: Mapping[str, str], n_cpu_moe: int, batch: int, context: int, kv: str,
             routes: RouteTrace | None) -> SchedulePlan:  # fmt: skip
        n_layer = int(self.file.hparam("block_count"))
        n = self._layers(n_gpu_layers, n_layer)
        rules = {self._known_pattern(p): self._known_device(d) for p, d in overrides.items()}
        if not isinstance(n_cpu_moe, int) or not 0 <= n_cpu_moe <= 512:
            raise ParameterError(f"n_cpu_moe={n_cpu_moe!r}", "0 to 512 layers")
        rules = rules | {p: "CPU" for i in range(min(n_cpu_moe, n_layer)) if (p := rf"blk\.{i}{EXPERTS}") not in rules}
        names = {"output.weight", *self.file.tensors}
        self.notes += [f"The pattern {shown(p)} fits no tensor's name." for p in overrides if not any(re.search(p, n) for n in names)]
        experts, active = expert_bytes(self.file)
        if n_cpu_moe and not experts:
            self.notes.append("--n-cpu-moe has no effect: the model has no merged experts.")
        if batch > context:
            self.notes.append(f"A prompt of {batch:,} tokens does not fit into {context:,} cells: one of {context:,} is planned.")
            batch = context
        out = SchedulePlan(self.file.name, self.file.architecture, [], [], n, n_layer, False, padded(context, PAD_KV),
                           experts, active, self.notes)  # fmt: skip
        if self.file.architecture not in ARCHITECTURES:
            return self._bytes_only(out, n, rules)
        model = Model(self.file)
        try:
            if model.hparams.window:
                self.notes.append(WINDOW)
            for weight in model.weights.values():
                weight.place(self.weights, weight.offset)
            self.machine.routes = self.routes = _Routes(model, routes, batch) if model.hparams.moe_layers else None
            placed = place_weights(model, self.backends, n, rules, self._shares())
            with placed:
                self._schedule(out, placed, rules, batch, context, kv)
        finally:
            model.context.close()
        self._remark(out, rules, routes)
        return out

    # ---- what was asked for

    def _layers(self, wanted: int | None, n_layer: int) -> int:
        if wanted is not None and (not isinstance(wanted, int) or wanted < 0):
            raise ParameterError(f"-ngl {wanted}", f"0 to {n_layer + 1}: {n_layer} layers and the output")
        if not self.gpus:
            if wanted:
                self.notes.append("-ngl has no effect: there is no GPU among the devices.")
            return 0
        if wanted is not None and wanted > n_layer + 1:
            self.notes.append(
                f"-ngl {wanted} means {n_layer + 1}: the model has {n_layer} layers, and the output counts as one more."
            )
        return n_layer + 1 if wanted is None else min(wanted, n_layer + 1)

    @staticmethod
    def _known_pattern(pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as e:
            raise ParameterError(
                f"override {pattern!r}", "a regular expression, found anywhere in a tensor's name", str(e)
            ) from None
        return pattern

    def _known_device(self, name: str) -> str:
        for b in self.backends:
            if b.device_type is not DeviceType.ACCEL and name.upper().replace("CUDA", "GPU") in (
                b.name,
                f"{b.name}0" if b.name == "GPU" else b.name,
            ):
                return b.name
        known = ", ".join(b.name for b in self.backends if b.device_type is not DeviceType.ACCEL)
        raise ParameterError(
            f"override to {shown(name)!r}", f"one of {known}", "--override-tensor '_exps=CPU', for example"
        )

    # ---- the plan

    def _schedule(
        self, out: SchedulePlan, placed: PlacedModel, rules: Mapping[str, str], batch: int, context: int, kv: str
    ) -> None:
        several = sum(b.device_type is DeviceType.GPU for b in self.backends) > 1
        out.pipelined = several and out.n_gpu_layers > out.n_layer and not rules
        cache = KVCache(placed.hparams, context, placed.layer_types, kv)
        # As many outputs as tokens, as llama.cpp reserves. Its graph has one more input, embeddings in place of tokens: 4 bytes per token
        # and hidden number that are missing here on the host.
        largest = build_step(placed, cache, batch, cache.n_ctx, batch)
        size = 2 * max(len(largest.graph.nodes), len(largest.graph.leafs))
        scheduler = Scheduler(self.backends, graph_size=size, parallel=out.pipelined)
        try:
            scheduler.reserve(largest.graph)
            compute: dict[str, int] = defaultdict(int)  # an accelerator and the host share their memory
            for i, b in enumerate(self.backends):
                compute[b.buffer_type.name] += scheduler.buffer_size(i)
            weights = self._weights(placed)
            out.devices = [Device(b.name, _title(b), weights.get(b.name, 0), self._kv(cache, b), compute[b.buffer_type.name], _capacity(b))
                           for b in self.backends if b.device_type is not DeviceType.ACCEL]  # fmt: skip
            for name, n, past in (("prefill", batch, 0), ("decode", 1, min(batch, cache.n_ctx - 1))):
                if self.routes is not None:
                    self.routes.window = past, past + n
                step = build_step(placed, cache, n, min(padded(past + n, PAD_KV), cache.n_ctx), 1)
                out.phases.append(run_phase(name, step, scheduler, self.machine))
        finally:
            scheduler.close()
            cache.close()

    @staticmethod
    def _kv(cache: KVCache, b: SimulatedDevice) -> int:
        return sum(buffer.size for buffer in cache.buffers if buffer.buffer_type is b.buffer_type)

    @staticmethod
    def _weights(placed: PlacedModel) -> dict[str, int]:
        out: dict[str, int] = defaultdict(int)
        for name, home in placed.homes.items():
            out[home.name] += placed.weights[name].nbytes if name in placed.weights else 0
        return out

    def _bytes_only(self, out: SchedulePlan, n: int, rules: Mapping[str, str]) -> SchedulePlan:
        """An architecture that nobody builds graphs for: where its weights would go, by their names."""
        shares = self._shares() or [1.0] * len(self.gpus)
        totals: dict[str, int] = defaultdict(int)
        for info in self.file.tensors.values():
            rule = next((d for p, d in rules.items() if re.search(p, info.name)), None)
            layer = re.match(r"blk\.(\d+)\.", info.name)
            i = min(int(layer[1]), out.n_layer) if layer else out.n_layer if info.name.startswith("output") else None
            home = self.backends[-1] if i is None else home_of_layer(i, out.n_layer + 1, n, self.gpus, self.backends[-1], shares)
            totals[rule or home.name] += info.nbytes
        out.devices = [
            Device(b.name, _title(b), totals[b.name], 0, 0, _capacity(b))
            for b in self.backends
            if b.device_type is not DeviceType.ACCEL
        ]
        self.notes.insert(0, f"Architecture {shown(self.file.architecture)!r} has no graph builder here: bytes of weights only, no splits, "
                             f"no cache, no times. Builders: {', '.join(ARCHITECTURES)}.")  # fmt: skip
        return out

    def _shares(self) -> list[float] | None:
        """Several cards get layers by their memory; the sizes that presets tell stand for what llama.cpp finds free."""
        return [float(b.buffer_type.limit or 1) for b in self.gpus] if len(self.gpus) > 1 else None  # type: ignore[attr-defined]

    def _remark(self, out: SchedulePlan, rules: Mapping[str, str], routes: RouteTrace | None) -> None:
        note = self.notes.append
        embedding = self.file.tensors.get("token_embd.weight")
        on_host = out.devices[-1].weights > (embedding.nbytes if embedding else 0)  # the embedding is looked up there, never copied
        if self.gpus and on_host and self.mapped:
            note("Weights on the host stay in the mapped file, which is pageable: copies from there are slow; --no-mmap pins them.")
        if out.expert_bytes and routes is None:
            note(
                "Which experts tokens choose is drawn uniformly at random; real routers are less even: a prompt then needs fewer experts."
            )
        if self.gpus and on_host:
            note("A card takes over products whose weights lie on the host from 32 tokens in a batch on, and then copies them in at each "
                 "run (op offload); a single decoded token never does: the CPU computes there.")  # fmt: skip
        if any(p.n_tokens == 1 and w.kind == "weights" for p in out.phases for w in p.ways):
            note("Also a decoded token copies weights: norms of 32 heads or more are a batch of 32 to that rule (get_op_batch_size).")
        if len(self.gpus) > 1 and not out.pipelined:
            note("No pipelining: llama.cpp wants all layers on cards" + (", and no overrides." if rules else "."))
        elif out.pipelined:
            note("Pipelining: four slots for inputs and copies, so compute buffers are larger. One batch is timed, alone: with several in "
                 "flight the cards work at the same time.")  # fmt: skip
        if self.gpus:
            note("Each kernel is started by itself; llama.cpp fuses some and replays CUDA graphs, so starting kernels can cost less.")
        note("Attention is planned without flash attention (llama.cpp -fa off), whose compute buffers are smaller.")


def _title(b: SimulatedDevice) -> str:
    return {DeviceType.GPU: "card", DeviceType.ACCEL: "accelerator", DeviceType.CPU: "host"}[b.device_type]


def _capacity(b: SimulatedDevice) -> int:
    return getattr(b.buffer_type, "limit", None) or 0


def expert_bytes(file: GGUFFile) -> tuple[int, int]:
    """Bytes of all routed experts, and of those that one token uses; by the names of the tensors, for any architecture."""
    layers = expert_layers(file).values()
    return sum(all_of_them for all_of_them, _ in layers), sum(active for _, active in layers)


def expert_layers(file: GGUFFile) -> dict[int, tuple[int, int]]:
    """The same for each layer that has routed experts."""
    used = file.metadata.get(f"{file.architecture}.expert_used_count", 0)
    used = used if type(used) is int else 0
    out: dict[int, tuple[int, int]] = {}
    for t in file.tensors.values():
        layer = re.match(r"blk\.(\d+)" + EXPERTS, t.name)
        if layer and t.name.endswith(".weight") and t.ne[2] > 1:
            whole, active = out.get(int(layer[1]), (0, 0))
            out[int(layer[1])] = whole + t.nbytes, active + t.nbytes // t.ne[2] * min(used, t.ne[2])
    return out


class _Routes:
    """What tensors of expert ids hold while a plan runs: rows of a record, or experts drawn uniformly at random.

    window: the tokens of the present graph; a layer that sees fewer rows sees the last ones.
    """

    window = 0, 0

    def __init__(self, model: Model, given: RouteTrace | None, batch: int) -> None:
        hp = model.hparams
        layers, n, k = hp.moe_layers, batch + 1, hp.n_expert_used
        if given is None:
            self.experts = np.stack([_drawn(np.random.default_rng(layer), n, hp.n_expert, k) for layer in layers])
        elif given.n_tokens < n or given.k != k or len(given.layers) != len(layers):
            raise ParameterError(f"routes of {given.n_tokens} tokens through {given.n_layers} layers, {given.k} experts each",
                                 f"{n} tokens or more, {len(layers)} layers, {k} experts")  # fmt: skip
        else:
            self.experts = given.experts.astype(np.int32)
        self.rows = {layer: i for i, layer in enumerate(layers)}

    def __call__(self, ids: Tensor) -> np.ndarray:
        found = re.search(r"-(\d+)(?:#\d+)?(?: \(.*\))?$", ids.name)
        if found is None:
            raise ModelError(f"{ids.label} is in no layer", "expert ids that are named for their layer")
        last = self.window[1]
        return self.experts[self.rows[int(found[1])], last - ids.ne[1] : last]


def _drawn(rng: np.random.Generator, n: int, n_expert: int, k: int) -> np.ndarray:
    return np.argsort(rng.random((n, n_expert), np.float32), -1)[:, :k].astype(np.int32)
