"""Measuring: peers take turns, medians are compared, and the machine is named with every table.

A benchmark is a module `bench_<name>.py` with `tables()`, which yields Table objects. Peers are callables without
arguments; where a row has a limit, the table says whether it holds.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter, sleep

UNWANTED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Settings that make OpenBLAS run kernels meant for another processor."""


def in_a_clean_process() -> None:
    """Start this program anew without the settings that would distort BLAS; returns at once where there are none."""
    if any(name in os.environ for name in UNWANTED):
        clean = {k: v for k, v in os.environ.items() if k not in UNWANTED}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], clean)


@dataclass(frozen=True)
class Timing:
    """Seconds of one peer: the median, the fastest, and the median of its ratios to the first peer, round by round."""

    median: float
    fastest: float
    ratio: float


SETTLE = 0.3
"""Seconds after which the threads of OpenBLAS and of ggml sleep: until then they spin and take cores from the next peer."""


def take_turns(peers: Mapping[str, Callable[[], object] | None], seconds: float = 2.0, rounds: int = 9,
               settle: float = 0.0) -> dict[str, Timing]:  # fmt: skip
    """Run the peers in turns, at least `rounds` times each and for about `seconds` in all; None peers are left out.

    The first peer is the one that ratios refer to. Its neighbours in time are compared, so that a busy machine, which
    slows all of them, changes ratios little. settle: seconds to wait before each peer, which then runs once unmeasured; peers
    with threads need it.
    """
    there = {name: run for name, run in peers.items() if run is not None}
    for run in there.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in there}
    start = perf_counter()
    while len(next(iter(times.values()))) < rounds or perf_counter() - start < seconds:
        for name, run in there.items():
            if settle:
                sleep(settle)
                run()
            t = perf_counter()
            run()
            times[name].append(perf_counter() - t)
    base = next(iter(times.values()))
    return {name: Timing(statistics.median(t), min(t), statistics.median(a / b for a, b in zip(t, base))) for name, t in times.items()}


@dataclass
class Table:
    """A table of results: a title, the heads of its columns, rows of text, and notes below."""

    title: str
    heads: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        self.rows.append([str(c) for c in cells])

    def __str__(self) -> str:
        lines = [self.heads, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.heads))]
        shown = ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))) for line in lines]
        return "\n".join([self.title, shown[0], "  ".join("-" * w for w in widths), *shown[1:], *(f"  {n}" for n in self.notes)])


def comparison(title: str, peer: str, ours: str = "workbench") -> Table:
    """A table of our time against one peer's, with a limit."""
    return Table(title, ["case", peer, ours, "ratio", "limit", ""])


def compare(table: Table, case: str, peer: Callable[[], object], ours: Callable[[], object], limit: float | None, **how: float) -> None:
    """One row of a `comparison`: medians, our time over the peer's, and whether that is within the limit."""
    a, b = take_turns({"peer": peer, "ours": ours}, **how).values()
    verdict = "" if limit is None else "ok" if b.ratio <= limit else "above"
    table.add(case, duration(a.median), duration(b.median), f"{b.ratio:.3f}", "" if limit is None else limit, verdict)


def duration(seconds: float) -> str:
    """Seconds in a unit that fits."""
    unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{seconds * factor:.2f} {unit}"


def machine() -> str:
    """The processor, its threads, Python, NumPy, and which kernel BLAS runs."""
    import numpy
    import threadpoolctl

    blas = [f"{d['internal_api']} {d['version']} with {d.get('architecture', 'unknown')} kernels"
            for d in threadpoolctl.threadpool_info() if d["user_api"] == "blas"]  # fmt: skip
    return (f"{_processor()}, {os.cpu_count()} threads; Python {platform.python_version()}, NumPy {numpy.__version__}, "
            f"{', '.join(blas) or 'a BLAS that threadpoolctl does not know'}; load {_load()}")  # fmt: skip


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
