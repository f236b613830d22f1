"""The state that lessons 13 and 14 start from: small cases that run, one shipped model on several cards, what ggml was recorded to call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.cgraph import build
from workbench.devices.cost import Speed
from workbench.devices.simulated import simulated_machine
from workbench.errors import ParameterError
from workbench.lessons.schedule_cases import CASES
from workbench.models.planning import plan_schedule
from workbench.models.session import fill_inputs
from workbench.scheduler import Scheduler
from workbench.scheduler.cases import Change
from workbench.scheduler.waits import Make, Ran, outcome, run_of
from workbench.scheduler.whatif import Case, Draft
from workbench.tensors import Flag, Tensor, ops
from workbench.trace import Trace
from workbench.views import hazards
from workbench.views.run_data import HOST, Run, nbytes, run_data
from workbench.views.run_steps import run_steps

TEXT = "Once upon a time there was a little dog who liked to run in the park with his friend and a big red ball. One day "


# ---- calls in words

WORDS = {
    "sync": "wait for {device}", "event_sync": "wait for event {event}", "event_wait": "{device} waits for event {event}",
    "event_record": "record event {event}", "set": "copy {name} to {memory}", "get": "copy {name} from {memory}",
    "copy_async": "ask {target} to fetch {name}", "set_async": "ask {device} to fetch {bytes:,} bytes of {name}",
    "get_async": "ask {device} to send {name}", "compute": "compute {nodes} on {device}", "ask": "callback is asked about {name}",
    "answer": "callback is shown {name}",
}  # fmt: skip
"""Every call that the host makes in a run, by its event in a trace."""
GGML = {"sync": ("sync", "device"), "ev_sync": ("event_sync", "event"), "ev_wait": ("event_wait", "device", "event"),
        "ev_record": ("event_record", "device", "event"), "set": ("set", "memory", "name"), "get": ("get", "memory", "name"),
        "cpy_async": ("copy_async", "device", "target", "name"), "set_async": ("set_async", "device", "name", "offset", "bytes"),
        "get_async": ("get_async", "device", "name"), "compute": ("compute", "device", "nodes")}  # fmt: skip
"""The same in the recordings of ggml: event and fields."""


def ggml_call(call: Sequence[Any]) -> str:
    """A recorded call of ggml in the same words."""
    if call[0] == "cb":
        return WORDS["ask" if call[2] else "answer"].format(name=call[1])
    kind, *fields = GGML[call[0]]
    facts = dict(zip(fields, call[1:]))
    facts["name"] = str(facts.get("name", "")).split("#")[-2 if str(facts.get("name", "")).count("#") > 1 else 0]
    facts["nodes"] = " ".join(facts.get("nodes", ()))
    return WORDS[kind].format(**facts) + (": refused" if kind == "copy_async" and not call[-1] else "")


def calls(trace: Trace) -> list[str]:
    """What the host asked for in the runs of a trace; results that are read after a run are left out."""
    out, names, left, device, running = list[str](), list[str](), 0, "", False
    run, results = run_data(trace), _results(trace)
    for e in trace.events:
        d: dict[str, Any] = trace.described(e)
        running |= e.kind == "run"
        if e.kind == "launch":
            names, left, device = [], d["count"], d["device"]
        elif e.kind == "queued":
            names, left = [*names, d["name"]], left - 1
            if not left:
                out.append(WORDS["compute"].format(nodes=" ".join(names), device=device))
        elif e.kind in WORDS and running and not (e.kind == "get" and d["name"] in results):
            copied = d.get("copy", d.get("name", ""))
            line = WORDS[e.kind].format(**{**d, "name": run.copies[copied][0] if copied in run.copies else d.get("name", "")})
            out.append(line + (": refused" if e.kind == "copy_async" and not d["done"] else ""))
    return out


def _results(trace: Trace) -> set[str]:
    return {t["name"] for t in (trace.graph or {}).get("tensors", ()) if "output" in t["flags"]}


def predicted(scheduler: Scheduler) -> list[str]:
    """The calls that follow from the splits of the last graph, by the rule of lesson 13; weights that are copied in part left aside."""
    backends, slot, out, previous = scheduler.backends, scheduler.slot, list[str](), -1
    events = [b.new_event(f"{b.name}.{slot}") is not None and scheduler.n_copies > 1 for b in backends]

    def wait(b: int) -> None:
        if getattr(backends[b], "waits", False):
            out.append(f"wait for event {backends[b].name}.{slot}" if events[b] else f"wait for {backends[b].name}")

    def synchronize(b: int) -> None:
        if getattr(backends[b], "waits", False):
            out.append(f"wait for {backends[b].name}")

    for split in scheduler.splits:
        b, name = split.backend, backends[split.backend].name
        if not split.inputs and previous not in (-1, b):
            wait(previous)
        for tensor in split.inputs:
            home = backends.index(scheduler.backend_of(tensor))
            source = backends[home].name
            if tensor.flags & Flag.INPUT:
                wait(b)
            else:
                if events[b]:
                    out.append(f"{name} waits for event {name}.{slot}")
                else:
                    wait(b)
                able = getattr(backends[b], "async_copy", False)
                done = able and getattr(backends[home], "async_copy", False)
                out += [f"ask {name} to fetch {tensor.name}" + ("" if done else ": refused")] if able else []
                if done:
                    continue
                synchronize(home)
                wait(b)
            out.append(f"copy {tensor.name} from {source}" if backends[b].buffer_type.is_host else f"copy {tensor.name} to {name}")
        out.append(f"compute {' '.join(n.name for n in split.nodes)} on {name}")
        out += [f"record event {name}.{slot}"] if events[b] else []
        previous = b
    for b in range(len(backends)):
        synchronize(b)
    return out


class Described(NamedTuple):
    """A split as the exercise gets it: the device, its nodes, and inputs (name, the device where it lies, is it an input of the user?)."""

    device: str
    nodes: tuple[str, ...]
    inputs: tuple[tuple[str, str, bool], ...]


class RunLesson:
    """What lessons 13, 14 and 19 share."""

    cases: Mapping[str, Case] = CASES

    @cached_property
    def model(self) -> models.Model:
        """The really trained Mixtral: 6 layers of 8 experts."""
        return models.load("tiny-mixtral-f16")

    @cached_property
    def ggml(self) -> dict[str, list[str]]:
        """The calls of real ggml in some recorded cases, in the words of `calls`."""
        data = json.loads((paths.models_dir() / "metrics" / "lesson13_ggml.json").read_text("utf-8"))["cases"]
        return {name: [ggml_call(c) for c in case["calls"]] for name, case in data.items()}

    def run(self, case: Case) -> Ran:
        """One recorded run of a case."""
        return outcome(run_of(case))

    def calls(self, trace: Trace) -> list[str]:
        """The calls of its runs, in words."""
        return calls(trace)

    def on_host(self, case: Case) -> dict[str, np.ndarray]:
        """The results of a case whose weights all lie on the host, where everything is computed."""
        scheduler, graph = case.scheduler_and_graph()
        moved = [Change.move(t.name, "CPU") for t in graph.leafs if not t.flags & Flag.INPUT]
        assigned = [Change.assign(t.name, "CPU") for t in graph.nodes if not t.is_view]
        plain = replace(case, op_offload=False, parallel=False).changed(*moved, *assigned)
        return outcome(run_of(plain)).results

    def valid(self, ran: Ran, results: Mapping[str, np.ndarray]) -> bool:
        """Nothing came too early, and the results are `results`, bit for bit."""
        return not hazards(ran.trace) and all(np.array_equal(ran.results[name], value) for name, value in results.items())

    def tokens(self, n: int) -> np.ndarray:
        """The first `n` tokens of a text."""
        ids = self.model.tokenizer.encode(TEXT)
        return np.array((ids * (n // len(ids) + 1))[:n])

    def decode(self, n_tokens: int, devices: int | str = 1, parallel: bool = False, op_offload: bool = True,
               callback: Callable[[Tensor, bool], bool] | None = None) -> Make:  # fmt: skip
        """A run of the Mixtral whose experts stay on the host: `n_tokens` tokens in one batch; its result are the logits."""

        def make() -> tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]:
            backends = simulated_machine(devices)
            placed = models.place_weights(self.model, backends, overrides={"_exps": "CPU"})
            scheduler = Scheduler(backends, parallel=parallel, op_offload=op_offload)
            session = models.Session(placed, n_ctx=256, n_batch=64, scheduler=scheduler)
            scheduler.eval_callback = callback
            return scheduler, lambda: {"logits": session.decode(self.tokens(n_tokens))}

        return make


class Lesson13(RunLesson):
    """Running the splits: small cases, the tiny Mixtral, calls recorded from ggml, one product to offload."""

    shares = {"PR 13386, Dell R740 with two 4090D, prompt tokens per second": {"--no-op-offload": 69.62, "offloaded": 279.45},
              "ik_llama.cpp PR 520, DeepSeek-V3, two 3090 on PCIe 3.0 x8, 34 new tokens": {"kept on the host": 9.5, "offloaded": 1.5}}
    """Published: what op offload brought, and what it cost."""

    def script(self, case: Case) -> tuple[list[Described], list[str], list[str]]:
        """The splits of a case as plain data, the calls predicted from them, and those of a run."""
        make = run_of(case)
        scheduler, run = make()
        scheduler.trace = trace = Trace("virtual")
        run()
        names = [b.name for b in scheduler.backends]
        splits = [Described(names[s.backend], tuple(n.name for n in s.nodes),
                            tuple((t.name, scheduler.backend_of(t).name, bool(t.flags & Flag.INPUT)) for t in s.inputs))
                  for s in scheduler.splits]  # fmt: skip
        return splits, predicted(scheduler), calls(trace)

    @property
    def read_twice(self) -> Case:
        """x is read on two GPUs."""
        return Case("x twice", _Twice(), devices=2)

    def user_copies(self, case: Case) -> int:
        """Copies of the user's inputs in a real run."""
        inputs = {t.name for t in case.scheduler_and_graph()[1].leafs if t.flags & Flag.INPUT}
        return sum(c.startswith("copy ") and c.split()[1] in inputs for c in calls(self.run(case).trace))

    def computes_with(self, case: Case, wanted: set[str]) -> int:
        """Compute calls of a real run whose callback wants these nodes."""
        def make() -> tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]:
            scheduler, run = run_of(case)()
            scheduler.eval_callback = lambda node, ask: node.name in wanted
            return scheduler, run

        return sum(c.startswith("compute ") for c in calls(outcome(make).trace))

    def short_calls(self, case: Case) -> list[str]:
        """The calls of a real run without refused questions and without the wait at the end, in the words of the last exercise."""
        found = [c for c in calls(self.run(case).trace) if not c.endswith("refused")]
        while found[-1].startswith("wait"):
            found.pop()
        return [c if c.startswith("wait") else c.rsplit(" ", 2)[0] for c in found]

    @staticmethod
    def launches(trace: Trace) -> list[tuple[str, int, int, int, int]]:
        """Each time that nodes are asked for: their names, when the call is made, how many are done when it returns, begin and end of
        the work, in nanoseconds from the first call."""
        steps = run_steps(trace)
        events = [s["event"] for s in steps["steps"] if s["event"][0] == "launch"]
        return [(" ".join(steps["names"][s[2]] for s in spans), clock, sum(s[4] <= clock for s in spans), spans[0][3], spans[-1][4])
                for _, clock, _, spans, *_ in events]  # fmt: skip

    @staticmethod
    def input_copies(trace: Trace) -> list[int]:
        """Nanoseconds of the host's time for each copy of an input of the user."""
        return [s.ns for s in run_data(trace).spans if s.kind == "inputs" and s.lane == HOST]

    def node(self, batch: int) -> Tensor:
        """The product that is offloaded, for the cost model."""
        return self.product(batch).scheduler_and_graph()[1].nodes[0]

    def one_token(self) -> tuple[int, list[str], list[str]]:
        """One token through the Mixtral: splits, predicted calls, recorded calls."""
        scheduler, run = self.decode(1)()
        scheduler.trace = trace = Trace("virtual")
        run()
        return len(scheduler.splits), predicted(scheduler), calls(trace)

    @staticmethod
    def product(batch: int, op_offload: bool = True, devices: int | str = "rtx3090-pcie4,cpu", width: int = 1024) -> Case:
        """One product whose weight, `width` × `width` numbers, lies on the host."""
        return Case(f"product of {width}", _Product(width), devices, batch, op_offload=op_offload)

    def speeds(self, devices: int | str = "rtx3090-pcie4,cpu") -> tuple[Speed, Speed]:
        """The cost model of the card and of the host of a machine."""
        backends = simulated_machine(devices)
        return backends[0].speed, backends[-1].speed

    @staticmethod
    def took(ran: Ran) -> int:
        """Virtual nanoseconds from the begin of the run to its last event."""
        return max(e.end for e in ran.trace.events) - next(e.start for e in ran.trace.of("run"))


@dataclass(frozen=True)
class _Product:
    """A recipe that can be compared."""

    width: int

    def __call__(self, d: Draft) -> Tensor:
        return ops.mul_mat(d.weight("W", self.width, self.width), d.input("x", self.width, d.batch)).named("y")


@dataclass(frozen=True)
class _Twice:
    """Two cards, and both read x."""

    def __call__(self, d: Draft) -> Tensor:
        x = d.input("x", 64, d.batch)
        a = ops.mul_mat(d.weight("W0", 64, 64, on="GPU0"), x).named("a")
        return ops.add(ops.mul_mat(d.weight("W1", 64, 64, on="GPU1"), a).named("b"), x).named("c")


class Piped(NamedTuple):
    """Several batches of a prompt over several cards: trace, virtual time, logits of the last row, compute memory per device."""

    trace: Trace
    ns: int
    logits: np.ndarray
    memory: dict[str, int]

    @property
    def run(self) -> Run:
        """What the trace says."""
        return run_data(self.trace)


class Lesson14(RunLesson):
    """Pipeline parallelism: the tiny Mixtral over two or three cards, batch after batch."""

    published = {512: (3936.45, 4505.63), 1024: (4269.13, 5140.05), 2048: (3996.18, 5324.33), 4096: (3148.68, 4974.44)}
    """llama.cpp pull request 4918 (January 2024): Llama 7B Q4_0 on a 3090 Ti and a 3080, micro-batches of 256 tokens; tokens per second
    by length of the prompt, before and after."""

    def prompt(self, n_batches: int, slots: int = 4, cards: int = 2, shares: Sequence[float] = (3, 4), n_tokens: int = 32,
               wait: bool = False) -> Piped:  # fmt: skip
        """`n_batches` batches of `n_tokens` tokens through the Mixtral, one after another, without waiting between them unless `wait`.

        slots: of the pipeline (1: none). shares: how the layers and the output are divided. A run is kept: the same call gives it again.
        """
        key = n_batches, slots, cards, tuple(shares), n_tokens, wait
        if key not in self._runs:
            self._runs[key] = self._prompt(*key)
        return self._runs[key]

    @cached_property
    def _runs(self) -> dict[Any, Piped]:
        return {}

    def _prompt(self, n_batches: int, slots: int, cards: int, shares: Sequence[float], n_tokens: int, wait: bool) -> Piped:
        backends = simulated_machine(cards)
        placed = models.place_weights(self.model, backends, shares=shares)
        scheduler, machine = Scheduler(backends, parallel=slots), backends[0].machine
        n_ctx = -(-n_batches * n_tokens // 256) * 256
        cache = models.KVCache(self.model.hparams, n_ctx, placed.layer_types)
        steps = [models.build_step(placed, cache, n_tokens, n_ctx, 1) for _ in range(n_batches)]
        scheduler.reserve(steps[0].graph)
        scheduler.trace, start = Trace("virtual"), machine.now
        tokens = self.tokens(n_batches * n_tokens)
        for i, step in enumerate(steps):
            at, seq = np.arange(i * n_tokens, (i + 1) * n_tokens), np.zeros(n_tokens, np.int64)
            scheduler.reset()
            scheduler.alloc(step.graph)
            fill_inputs(step, cache, tokens[at], at, seq, cache.take(seq, at), np.array([n_tokens - 1]))
            scheduler.compute_async(step.graph)
            if wait:
                scheduler.synchronize()
        scheduler.synchronize()
        memory = {b.name: scheduler.buffer_size(i) for i, b in enumerate(backends)}
        return Piped(scheduler.trace, machine.now - start, steps[-1].logits.numpy().copy(), memory)

    @staticmethod
    def stages(piped: Piped) -> dict[str, float]:
        """Nanoseconds that each card works for one batch."""
        spans, runs = piped.run.spans, piped.run.runs
        return {d: sum(s.ns for s in spans if s.lane[0] == d) / runs for d in piped.memory if d != "CPU"}

    @staticmethod
    def busy(piped: Piped) -> dict[str, float]:
        """The share of the time in which each card works."""
        return {d: ns * piped.run.runs / piped.ns for d, ns in Lesson14.stages(piped).items()}

    @staticmethod
    def copies(piped: Piped) -> dict[tuple[str, str], list[str]]:
        """The copies that the last graph made: (original, device) -> their names, one for each slot."""
        out: dict[tuple[str, str], list[str]] = {}
        trace, names = piped.trace, [d for d, _, _ in piped.run.devices]
        begin = max(i for i, e in enumerate(trace.events) if e.kind == "backend")
        for e in trace.events[begin:]:
            if e.kind == "copy":
                d = trace.described(e)
                original = (trace.graph or {})["tensors"][d["tensor"]]["name"]
                out.setdefault((original, names[int(d["backend"])]), []).append(str(d["copy"]))
        return out

    @staticmethod
    def bytes_per_slot(piped: Piped) -> dict[str, int]:
        """What one slot more takes on each device: every tensor that has a copy for each slot, rounded up to the memory's alignment."""
        sizes = {t["name"]: nbytes(t) for t in (piped.trace.graph or {})["tensors"]}
        align = {kind.name: kind.alignment for kind in (b.buffer_type for b in simulated_machine(len(piped.memory) - 1))}
        out = dict.fromkeys(piped.memory, 0)
        for name, device in Lesson14.copies(piped):
            out[device] += -(-sizes[name] // align[device]) * align[device]
        return out

    def planned(self, cards: int, n_gpu_layers: int, n_layer: int, overrides: Sequence[str]) -> bool:
        """Whether the planner pipelines the Mixtral with these options."""
        if n_layer != self.model.hparams.n_layer:
            raise ParameterError(f"{n_layer} layers", f"{self.model.hparams.n_layer}, as the Mixtral has")
        devices = "two-rtx3090" if cards == 2 else "rtx3090-pcie4"
        return bool(self.plan(devices, n_gpu_layers=n_gpu_layers, overrides=dict.fromkeys(overrides, "CPU")).pipelined)

    def plan(self, devices: str = "two-rtx3090", **options: Any) -> Any:
        """What the planner says of the Mixtral on a machine, with llama.cpp's options (`workbench schedule`)."""
        return plan_schedule(str(paths.models_dir() / "tiny-mixtral-f16.gguf"), devices, batch=64, context=256, **options)

    def chain(self, n_batches: int, work: Sequence[int], slots: int = 4, link_ns: int = 0, wait: bool = False) -> Make:
        """A run of `n_batches` batches over as many cards as there are numbers in `work`: nanoseconds that each card takes for one batch.

        Each card makes one product; the last one keeps the result of every batch in a memory of its own, as a cache does. link_ns: what
        each copy takes. wait: after each batch.
        """

        def make() -> tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]:
            free = Speed(launch_ns=0, flops=1e12, memory=1e12, link=1e12, link_ns=link_ns)
            backends = simulated_machine(len(work), offload_min_batch=None)
            for b, ns in zip(backends, [*work[:-1], work[-1] // 2, 0]):  # the last card also keeps the result
                b.speed = replace(free, launch_ns=ns)
                b.buffer_type.speed = free  # type: ignore[attr-defined]
            case, last = Case("chain", _Cards(len(work)), len(work)), backends[-2].buffer_type
            draft = Draft(case, {b.name: b.buffer_type for b in backends})
            kept = draft.context.new_tensor("f32", 8, 4 * n_batches, name="kept")
            kept.place(last.alloc_buffer(kept.nbytes))
            graphs = []
            with draft.context.active():
                for i in range(n_batches):
                    y = _Cards(len(work))(draft)
                    graphs.append(build(ops.cpy(y, ops.view(kept, 8, 4, nb=(kept.nb[1],), offset=i * 4 * kept.nb[1])).named("keep")))
            scheduler = Scheduler(backends, parallel=slots)

            def run() -> Mapping[str, np.ndarray]:
                for i, graph in enumerate(graphs):
                    scheduler.reset()
                    scheduler.alloc(graph)
                    case.write_inputs(graph, seed=i)
                    scheduler.compute_async(graph)
                    if wait:
                        scheduler.synchronize()
                scheduler.synchronize()
                return {f"batch {i}": rows for i, rows in enumerate(np.split(kept.numpy(), n_batches))}

            return scheduler, run

        return make

    @staticmethod
    def took(trace: Trace) -> int:
        """Nanoseconds from the first run to the end of the last work on a card."""
        return max(e.end for e in trace.of("busy", "sync")) - next(e.start for e in trace.of("run"))

    @staticmethod
    def starts(trace: Trace) -> list[list[int]]:
        """When each card begins with each batch: one list for each card, in nanoseconds from the first."""
        begun: dict[str, dict[int, int]] = {}
        for s in run_data(trace).spans:
            if s.lane[0].startswith("GPU") and not s.copy_name:
                begun.setdefault(s.lane[0], {}).setdefault(s.run, s.start)
        zero = min(at for runs in begun.values() for at in runs.values())
        return [[at - zero for at in runs.values()] for _, runs in sorted(begun.items())]


@dataclass(frozen=True)
class _Cards:
    """A recipe: one step on each card, which reads an input of the user as well."""

    cards: int

    def __call__(self, d: Draft) -> Tensor:
        x = d.input("x", 8, d.batch)
        y = x
        for i in range(self.cards):
            y = ops.mul_mat(d.weight(f"W{i}", 8, 8, on=f"GPU{i}" if self.cards > 1 else "GPU"), y).named(f"y{i}")
        return y

