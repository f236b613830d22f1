"""Threads that share the work of a node, and BLAS held to one thread while a graph runs.

As in ggml, threads live as long as the backend and take the tasks of a node from an atomic counter. Unlike there, the
calling thread alone walks the nodes and wakes the others only where a node has several tasks: in Python a barrier at
every node would cost more than most nodes do.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from workbench.kernels.kernel import NUMPY_BUFFER, Step


class Workers:
    """`n_threads - 1` sleeping threads beside the calling one (`ggml_threadpool`); they start with the first use."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._shift: _Shift | None = None
        self._end: Callable[[], Any] | None = None

    def run(self, tasks: Sequence[Sequence[Step]]) -> None:
        """Run every task once and return when all are done; `tasks[w]` are the calls as worker `w` makes them.

        Threads take them in order from a counter. An exception in any of them is raised here, after all have stopped.
        """
        helpers = min(len(tasks), len(tasks[0])) - 1
        shift = self._shift
        if shift is None or shift.broken:
            shift = self._hire()
        shift.broken = True  # until all threads sleep again: where Ctrl-C gets in between, others take their place
        shift.tasks, shift.claim = tasks, itertools.count().__next__
        woken = 0
        try:
            for start in shift.start[:helpers]:
                start.release()
                woken += 1
            try:
                shift.take(0)
            except Exception as e:
                shift.claim = _exhausted
                shift.failures.insert(0, e)
        except BaseException:
            shift.claim = _exhausted
            raise
        finally:
            for done in shift.done[:woken]:
                done.acquire()
        shift.broken = False
        if shift.failures:
            failure = shift.failures[0]
            shift.failures.clear()
            raise failure

    def close(self) -> None:
        """End the threads; a later run starts new ones."""
        if self._end:
            self._end()
        self._shift = self._end = None

    def _hire(self) -> _Shift:
        self.close()
        shift = self._shift = _Shift(self.n_threads - 1)
        threads = [threading.Thread(target=shift.work, args=(i,), name=f"workbench-{i + 1}", daemon=True)
                   for i in range(self.n_threads - 1)]  # fmt: skip
        for thread in threads:
            thread.start()
        self._end = weakref.finalize(self, _dismiss, shift, threads)  # a backend that is forgotten leaves no threads
        return shift


class _Shift:
    """What the threads share. It does not know `Workers`, so that threads do not keep it alive."""

    def __init__(self, n: int) -> None:
        self.start = [_held() for _ in range(n)]  # released by the caller: there is work
        self.done = [_held() for _ in range(n)]  # released by the worker: it has none left
        self.tasks: Sequence[Sequence[Step]] = ()
        self.claim: Callable[[], int] = _exhausted
        self.failures: list[BaseException] = []
        self.broken = self.closing = False

    def take(self, worker: int) -> None:
        tasks, n = self.tasks[worker], len(self.tasks[worker])
        while (i := self.claim()) < n:
            tasks[i]()

    def work(self, helper: int) -> None:
        with np.errstate(all="ignore"):  # as in C: inf and nan are results
            np.setbufsize(NUMPY_BUFFER)
            while True:
                self.start[helper].acquire()
                if self.closing:
                    return
                try:
                    self.take(helper + 1)
                except BaseException as e:
                    self.failures.append(e)
                    self.claim = _exhausted
                self.done[helper].release()


def _held() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _exhausted() -> int:
    return 2**63


def _dismiss(shift: _Shift, threads: list[threading.Thread]) -> None:
    shift.closing = True
    for start, thread in zip(shift.start, threads, strict=True):
        if start.locked():
            start.release()
        if not shift.broken and thread is not threading.current_thread():
            thread.join()


class _SingleThreadedBlas:
    """`with SINGLE_THREADED_BLAS:` holds BLAS to one thread and restores it after the last of nested or parallel uses.

    Its own threads would compete with ours, and would cut sums by their number. Setting costs 8 µs, asking 0.5 µs; the
    libraries are searched once per process, which takes a millisecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._controller: Any = None
        self._limits: Any = None

    def controller(self) -> Any:
        """The one `threadpoolctl.ThreadpoolController`, restricted to BLAS libraries."""
        if self._controller is None:
            import threadpoolctl

            self._controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
        return self._controller

    def __enter__(self) -> None:
        with self._lock:
            if any(lib.num_threads != 1 for lib in self.controller().lib_controllers):  # also where an interrupt left a user behind
                limits = self.controller().limit(limits=1)
                self._limits = self._limits or limits
            self._users += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._limits is not None:
                self._limits.restore_original_limits()
                self._limits = None


SINGLE_THREADED_BLAS = _SingleThreadedBlas()
