"""What a wait is good for: the same run again, with exactly that one wait left out.

Simulated devices compute when virtual time gets there, so whoever does not wait meets old bytes. `ggml_backend_synchronize`,
`ggml_backend_event_wait` and `ggml_backend_event_synchronize` are the waits of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from workbench.devices.backend import read_tensor
from workbench.devices.simulated import SimulatedDevice
from workbench.devices.simulated_memory import Machine
from workbench.errors import ParameterError, WorkbenchError, shown
from workbench.scheduler.cases import Case
from workbench.scheduler.scheduler import Scheduler
from workbench.tensors import Flag, Tensor
from workbench.trace import Event, Trace

WAITS = ("sync", "event_wait", "event_sync")
"""The events of a trace that are waits."""

Make = Callable[[], tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]]
"""Makes a run from nothing: a scheduler over fresh simulated devices, and what computes with it and returns results by name."""


class Ran(NamedTuple):
    """A run: its trace, its results by name (none where it stopped), what stopped it ("" for nothing), and which wait was left out."""

    trace: Trace
    results: dict[str, np.ndarray]
    error: str
    without: int


class Difference(NamedTuple):
    """How a result differs from that of the whole run: numbers that differ, those of them that are not even numbers, the largest
    difference of the others."""

    name: str
    differing: int
    of: int
    nan: int
    largest: float


def run_of(case: Case) -> Make:
    """One run of a case with its inputs filled; results are its outputs."""

    def make() -> tuple[Scheduler, Callable[[], Mapping[str, np.ndarray]]]:
        scheduler, graph = case.scheduler_and_graph()

        def run() -> Mapping[str, np.ndarray]:
            scheduler.alloc(graph)
            case.write_inputs(graph)
            scheduler.compute(graph)
            return {t.name: _read(t, scheduler.trace) for t in graph.nodes if t.flags & Flag.OUTPUT}

        return scheduler, run

    return make


def _read(tensor: Tensor, trace: Trace | None) -> np.ndarray:
    """A result, packed; other than `Tensor.numpy` this is a call of the trace."""
    if not tensor.is_contiguous or tensor.dtype.numpy is None:
        return tensor.numpy()
    return read_tensor(tensor, trace).view(tensor.dtype.numpy).reshape(tensor.shape)


def waits(trace: Trace) -> list[Event]:
    """The waits of a recorded run in the order of the calls: number n of `outcome(make, n)` is waits(trace)[n - 1]."""
    return list(trace.of(*WAITS))


def outcome(make: Make, without: int = 0) -> Ran:
    """Run what `make` makes, recorded, with wait number `without` left out (0: with all of them).

    Raises ParameterError where the devices are not simulated ones or there is no such wait.
    """
    scheduler, run = make()
    machine, trace = _machine(scheduler), Trace("virtual")
    scheduler.trace, machine.without_wait = trace, without
    results, error = dict[str, np.ndarray](), ""
    try:
        with np.errstate(all="ignore"):  # old bytes may be no numbers
            results = {name: np.array(value) for name, value in run().items()}
    except WorkbenchError as e:
        if not without:
            raise
        error = str(e)
    finally:
        scheduler.trace = None
        left, machine.without_wait = machine.without_wait, 0
    if left or without < 0:
        raise ParameterError(f"wait {without} to be left out", f"1 to {len(waits(trace))}: the run has so many waits")
    return Ran(trace, results, error, without)


def differences(whole: Ran, cut: Ran) -> list[Difference]:
    """The results of a run that are not, bit for bit, those of the whole run. Results that it did not get to count as all differing."""
    out = []
    for name, want in whole.results.items():
        got = cut.results.get(name)
        if got is None:
            out.append(Difference(name, want.size, want.size, want.size, 0.0))
            continue
        same = (got == want) | (np.isnan(got) & np.isnan(want)) if want.dtype.kind == "f" else got == want
        wrong, nan = ~same, ~np.isfinite(got) & ~same
        if wrong.any():
            apart = np.abs(got[wrong & ~nan].astype(np.float64) - want[wrong & ~nan].astype(np.float64))
            out.append(Difference(name, int(wrong.sum()), want.size, int(nan.sum()), float(apart.max(initial=0.0))))
    return out


def each_wait(make: Make) -> Iterator[tuple[Event, Ran, list[Difference]]]:
    """For every wait of a run: the wait, the run without it, and what is different then."""
    whole = outcome(make)
    for n, event in enumerate(waits(whole.trace), 1):
        cut = outcome(make, n)
        yield event, cut, differences(whole, cut)


def _machine(scheduler: Scheduler) -> Machine:
    found: Any = next((b for b in scheduler.backends if isinstance(b, SimulatedDevice)), None)
    if found is None:
        names = ", ".join(shown(b.name) for b in scheduler.backends)
        raise ParameterError(f"a run on {names}", "simulated devices: only there can a wait be left out", "simulated_machine(2)")
    return found.machine
