"""What lessons 13, 14 and 19 share, and the state of lesson 13: small cases that run, a shipped model, what ggml was recorded to call."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from workbench import models, paths
from workbench.devices.cost import Speed
from workbench.devices.simulated import simulated_machine
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler import Scheduler
from workbench.scheduler.cases import Change
from workbench.scheduler.waits import Make, Ran, outcome, run_of
from workbench.scheduler.whatif import Case, Draft
from workbench.tensors import Flag, Tensor, ops
from workbench.trace import Trace
from workbench.views import hazards
from workbench.views.run_data import HOST, run_data
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
