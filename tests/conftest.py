"""For all tests: where the recorded data is, one Hypothesis profile, and GPU tests that skip with a reason."""
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples on every machine and no deadline: a slow shared runner is not a failure.
settings.register_profile("workbench", deadline=None, derandomize=True)
settings.load_profile("workbench")


@pytest.fixture(scope="session")
def data() -> Path:
    """tests/data: the recordings of real ggml and llama.cpp."""
    return Path(__file__).parent / "data"


def pytest_collection_modifyitems(items):
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (why := _no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=why))


def _no_gpu() -> str:
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    return "" if cupy.is_available() else "no NVIDIA GPU on this machine"
