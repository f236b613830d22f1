"""`import workbench` is quick because it loads nothing heavy; a room loads only what it computes with."""
import json
import subprocess
import sys

import pytest

HEAVY = ["cupy", "matplotlib", "ipywidgets", "anywidget", "tokenizers", "gguf", "IPython", "jupyterlab", "graphviz"]


def modules_after(code: str) -> tuple[set[str], float]:
    """The top-level modules loaded by `code` in a fresh interpreter, and the seconds it took after numpy."""
    run = subprocess.run([sys.executable, "-c", "import json, sys, time\nimport numpy\nt = time.perf_counter()\n" + code +
                          "\nprint(json.dumps([time.perf_counter() - t, sorted({m.partition('.')[0] for m in sys.modules})]))"],
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    seconds, names = json.loads(run.stdout)
    return set(names), seconds


def test_import_workbench_is_light():
    modules, seconds = modules_after("import workbench")
    assert not modules & set(HEAVY)
    assert seconds < 0.3


def test_import_workbench_does_not_even_need_numpy():
    run = subprocess.run([sys.executable, "-c", "import sys, workbench; print('numpy' in sys.modules)"],
                         capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("room", ["tensors", "kernels", "devices", "execution", "cgraph", "scheduler", "moe", "models", "expertflow"])
def test_rooms_that_compute_load_no_pictures(room):
    from importlib.util import find_spec
    spec = find_spec(f"workbench.{room}")
    if spec is None or spec.origin is None:
        pytest.skip(f"workbench.{room} does not exist yet")
    modules, _ = modules_after(f"import workbench.{room}")
    assert not modules & {"cupy", "matplotlib", "ipywidgets", "anywidget", "IPython", "jupyterlab"}


def test_widgets_load_expertflow_for_the_dashboard_only():
    run = subprocess.run([sys.executable, "-c", "import sys, workbench.widgets as w; loaded = [m for m in sys.modules if m.startswith('workbench.expertflow')]; "
                          "print(loaded, w.Dashboard.__name__, 'workbench.expertflow.tuning' in sys.modules)"], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[] Dashboard True"
