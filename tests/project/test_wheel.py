"""A wheel holds everything, and the package runs from it, away from the checkout and without a network."""
import os
import subprocess
import sys
import zipfile

import pytest

from workbench import paths

pytestmark = pytest.mark.slow
ROOT = paths.checkout()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-c", "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))",
                    str(folder)], cwd=ROOT, check=True, capture_output=True, text=True)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked into an empty folder, as pip --target would."""
    site = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile",
                    "--disable-pip-version-check", "--target", str(site), str(wheel)], check=True)
    return site


def run_there(site, folder, code):
    """Run code with the unpacked wheel first on the path and with no sight of the checkout."""
    bare = ("import sys; sys.path = [p for p in sys.path if not __import__('os').path.exists(p + '/pyproject.toml')]; "
            f"sys.path.insert(0, {str(site)!r})\n")
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run([sys.executable, "-c", bare + code], cwd=folder, env=environ, check=True,
                          capture_output=True, text=True).stdout.strip()


def test_no_stray_files(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"workbench", next(t for t in tops if t.endswith(".dist-info"))}
    assert not [n for n in names if "__pycache__" in n or ".ipynb_checkpoints" in n or n.endswith("train_tiny_moe.py")]
    assert wheel.stat().st_size < 60e6


def test_licences_travel_along(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("licenses/LICENSE", "licenses/NOTICE", "data/models/MODEL_CARD.md", "data/models/samples/NOTICE.md",
                 "data/models/traces/APACHE-2.0.txt"):
        assert any(n.endswith(name) for n in names), name


def test_package_runs_from_the_wheel(installed, tmp_path):
    where = run_there(installed, tmp_path, "import workbench; from workbench import paths; "
                      "print(workbench.__file__); print(paths.checkout())").splitlines()
    assert where == [str(installed / "workbench" / "__init__.py"), "None"]


def test_models_are_found(installed, tmp_path):
    out = run_there(installed, tmp_path, "from workbench.paths import models_dir as m; "
                    "print(*sorted(f.name for f in m().glob('*.gguf')), sep='\\n'); print((m() / 'tokenizer.json').stat().st_size)")
    expected = sorted(f.name for f in (ROOT / "models").glob("*.gguf"))
    assert out.splitlines() == [*expected, str((ROOT / "models" / "tokenizer.json").stat().st_size)]


def test_traces_are_found(installed, tmp_path):
    out = run_there(installed, tmp_path, "from workbench.expertflow.sources import SHIPPED, load; "
                    "print(*(load(n).trace.n_tokens for n in (*SHIPPED, 'local-drifting:tokens=5,layers=2')))")
    assert out == "24576 24576 215 5"


def test_notebooks_are_found(installed, tmp_path):
    expected = sorted(f.name for f in (ROOT / "notebooks").glob("*.ipynb"))
    if not expected:
        pytest.skip("there are no notebooks yet")
    out = run_there(installed, tmp_path, "from workbench.paths import notebooks_dir as n; "
                    "print(*sorted(f.name for f in n().glob('*.ipynb')), sep='\\n')")
    assert out.splitlines() == expected


def test_every_data_file_of_the_package_is_in_the_wheel(installed):
    """The widgets' .js and .css, py.typed, and whatever else stands beside the code."""
    there = {f.relative_to(ROOT) for f in (ROOT / "workbench").rglob("*") if f.is_file()
             and "__pycache__" not in f.parts and f.suffix != ".pyc"}
    assert there and {f for f in there if not (installed / f).is_file()} == set()


def test_command_line_from_the_wheel(installed, tmp_path):
    out = run_there(installed, tmp_path, "from workbench.cli import main; raise SystemExit(main(['doctor']) > 1)")
    assert "models" in out and str(installed) in out
    code = "from workbench.cli import main; raise SystemExit(main(['size']) != 2)"
    run_there(installed, tmp_path, code)


def test_missing_data_is_explained(installed, tmp_path):
    code = ("from pathlib import Path\nfrom workbench import paths\npaths.PACKAGE = Path('nowhere')\n"
            "try: paths.models_dir()\nexcept FileNotFoundError as e: print(e)")
    out = run_there(installed, tmp_path, code)
    assert "trained models" in out and "install the wheel again" in out
