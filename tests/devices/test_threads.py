"""Workers: each task once, failures in the caller, no threads left behind."""

import gc
import threading
from functools import partial

import pytest

from workbench.devices.threads import Workers


def _threads():
    return {t for t in threading.enumerate() if t.name.startswith("workbench-")}


@pytest.mark.parametrize("n_threads", [2, 3, 4])
def test_each_task_runs_exactly_once(n_threads):
    workers = Workers(n_threads)
    for round_ in range(200):
        done, n_tasks = [], 1 + round_ % 9
        workers.run([[partial(done.append, i) for i in range(n_tasks)]] * min(n_threads, n_tasks))
        assert sorted(done) == list(range(n_tasks))
    workers.close()


def test_several_threads_take_part_each_with_its_own_calls():
    meet = threading.Barrier(3, timeout=20)
    workers, seen = Workers(3), []

    def task(worker):
        meet.wait()  # passes only when three threads hold a task at the same time
        seen.append((worker, threading.current_thread().name))

    workers.run([[lambda w=w: task(w) for _ in range(3)] for w in range(3)])
    assert {w for w, _ in seen} == {0, 1, 2} and len({name for _, name in seen}) == 3
    workers.close()


@pytest.mark.parametrize("who", ["caller", "helper"])
def test_a_failure_of_any_thread_reaches_the_caller(who):
    workers, meet = Workers(2), threading.Barrier(2, timeout=20)

    def task(worker):
        meet.wait()
        if worker == (who == "helper"):
            raise ZeroDivisionError(who)

    for _ in range(3):
        with pytest.raises(ZeroDivisionError, match=who):
            workers.run([[lambda w=w: task(w)] * 2 for w in range(2)])
        done = []
        workers.run([[partial(done.append, 1)] * 5] * 2)
        assert len(done) == 5
    workers.close()


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1, 2)])
def test_no_thread_outlives_close_after_a_failure(failing):
    before, workers, meet = _threads(), Workers(3), threading.Barrier(3, timeout=20)

    def task(worker):
        meet.wait()
        if worker in failing:
            raise ZeroDivisionError(worker)

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            workers.run([[lambda w=w: task(w)] * 3 for w in range(3)])
    assert len(_threads() - before) == 2  # the same ones: they sleep again after a failure
    workers.close()
    assert _threads() <= before


def test_threads_start_late_and_end_with_close_or_with_the_last_reference():
    gc.collect()  # backends that other tests left behind end their threads now, not in between
    before = _threads()
    workers = Workers(3)
    assert _threads() == before
    workers.run([[lambda: None] * 3] * 3)
    assert len(_threads() - before) == 2
    workers.close()
    assert _threads() == before
    workers.run([[lambda: None] * 3] * 3)
    assert len(_threads() - before) == 2
    del workers
    gc.collect()
    assert _threads() == before
