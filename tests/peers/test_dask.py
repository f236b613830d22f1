"""A sweep on a real Dask cluster gives the results of a sweep here, in order, and its errors."""

import pytest

from workbench.errors import ParameterError
from workbench.expertflow import sources
from workbench.expertflow.sweep import jobs, sweep

pytestmark = pytest.mark.peers
distributed = pytest.importorskip("distributed", reason="distributed is not installed: pip install '.[cluster]'")


@pytest.fixture(scope="module")
def address():
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None) as cluster:
        yield cluster.scheduler_address


def test_the_same_results(address):
    trace = sources.load("switch-base-8").trace
    todo = jobs(policy=["lru", "lfu", "belady"], slots=[12, 24], scope="global")
    told = []
    assert sweep(trace, todo, dask=address, tell=lambda done, of: told.append((done, of))) == sweep(trace, todo)
    assert told == [(i, 6) for i in range(1, 7)]
    with pytest.raises(ParameterError, match="mru"):
        sweep(trace, jobs(policy=["lru", "mru"], slots=12, scope="global"), dask=address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense"])
def test_no_scheduler_there(address):
    trace = sources.load("switch-base-8").trace
    with pytest.raises(ParameterError, match="no Dask scheduler"):
        sweep(trace, jobs(policy="lru", slots=12), dask=address)
