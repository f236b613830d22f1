"""Sweeps: many replays of one trace, one after another, in a pool of processes, or on a Dask cluster."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TextIO

from workbench.errors import DependencyError, ParameterError, shown
from workbench.expertflow.replay import Result, replay
from workbench.moe import RouteTrace

SMALL = 5_000_000
"""Accesses below which starting processes costs more than they save."""
Job = Mapping[str, Any]
"""Arguments of one `replay`, without the trace."""
_TRACE: list[RouteTrace] = []  # of a worker process


def jobs(**choices: Any) -> list[Job]:
    """Every combination of the arguments of `replay`; a list holds the values of one argument, anything else is one value."""
    values = [v if isinstance(v, list) else [v] for v in choices.values()]
    return [dict(zip(choices, combination)) for combination in itertools.product(*values)]


def sweep(trace: RouteTrace, todo: Sequence[Job], workers: int = 1, dask: str = "",
          tell: Callable[[int, int], None] | None = None) -> list[Result]:  # fmt: skip
    """The results of all jobs, in their order.

    workers: processes; a script that asks for more than one must do so below `if __name__ == "__main__":`. dask: the address of a
    scheduler instead, such as "tcp://host:8786", whose workers have the workbench installed. tell(done, of): called after every
    replay. The first job that is refused ends the sweep with its error.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ParameterError(f"{shown(workers)} workers", "1 process or more")
    run = _on_dask(trace, todo, dask) if dask else _in_pool(trace, todo, workers) if workers > 1 else _here(trace, todo)
    results: dict[int, Result] = {}
    for i, result in run:
        results[i] = result
        if tell is not None:
            tell(len(results), len(todo))
    return [results[i] for i in range(len(todo))]


def worth(trace: RouteTrace, todo: Sequence[Job]) -> int:
    """As many processes as there are processors and jobs, where starting them pays; else 1."""
    return min(len(todo), os.cpu_count() or 1) if trace.experts.size * len(todo) > SMALL else 1


def _here(trace: RouteTrace, todo: Sequence[Job]) -> Iterator[tuple[int, Result]]:
    for i, job in enumerate(todo):
        yield i, replay(trace, **job)


def _start(trace: RouteTrace) -> None:
    _TRACE[:] = [trace]


def _one(job: Job) -> Result:
    return replay(_TRACE[0], **job)


def _in_pool(trace: RouteTrace, todo: Sequence[Job], workers: int) -> Iterator[tuple[int, Result]]:
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (trace,))  # fork would copy threads that other rooms started
    try:
        futures = {pool.submit(_one, job): i for i, job in enumerate(todo)}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _on_dask(trace: RouteTrace, todo: Sequence[Job], address: str) -> Iterator[tuple[int, Result]]:
    try:
        import distributed
    except ImportError:
        raise DependencyError("a sweep on Dask without the package `distributed`", "it here and on the workers",
                              'pip install "moe-workbench[cluster]"') from None  # fmt: skip
    try:
        client = distributed.Client(address, timeout="10s")
    except (OSError, ValueError) as e:
        raise ParameterError(f"no Dask scheduler at {shown(address)}: {shown(e)}", "its address, as in tcp://127.0.0.1:8786",
                             "`dask scheduler` prints it") from None  # fmt: skip
    with client:
        shared = client.scatter(trace, broadcast=True)
        futures = {client.submit(_replay_there, shared, dict(job), pure=False): i for i, job in enumerate(todo)}
        for future in distributed.as_completed(futures):
            yield futures[future], future.result()


def _replay_there(trace: RouteTrace, job: Job) -> Result:
    return replay(trace, **job)


class Progress:
    """A bar on a terminal; elsewhere nothing, so that files and pipes stay clean."""

    def __init__(self, what: str, to: TextIO | None = None, width: int = 30) -> None:
        self.what, self.to, self.width = what, to or sys.stderr, width

    def __call__(self, done: int, of: int) -> None:
        """`done` of `of` are through."""
        if self.to.isatty():
            full = self.width * done // max(of, 1)
            end = "\n" if done == of else ""
            self.to.write(f"\r{self.what} [{'#' * full}{'.' * (self.width - full)}] {done} of {of}{end}")
            self.to.flush()
