"""`doctor`: what this machine has, and what to do about what it lacks. Works in any Python, inside .venv or outside."""
from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from workbench import paths

HELP = "what this machine has, and what to do about what it lacks"
PACKAGES = ("jupyterlab", "ipywidgets", "numpy", "matplotlib", "graphviz", "nbval", "gguf", "tokenizers", "anywidget",
            "graphviz-pure", "threadpoolctl")
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")


@dataclass(frozen=True)
class Finding:
    """One line of the report: good, or not and then what to do; `needed` marks what lessons cannot do without."""

    what: str
    found: str
    good: bool = True
    advice: str = ""
    needed: bool = True


def main(argv: list[str]) -> int:
    """Print the report; 1 when something is missing that the lessons need."""
    args = _parser().parse_args(argv)
    if args.calibrate is not None:
        return calibrate(args.calibrate)
    findings = examine()
    for f in findings:
        mark = "ok" if f.good else "MISSING" if f.needed else "-"
        print(f"{mark:<8}{f.what:<14}{f.found}")
        if f.advice and not f.good:
            print(f"{'':<22}-> {f.advice}")
    return 1 if any(f.needed and not f.good for f in findings) else 0


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m workbench doctor", description=HELP)
    p.add_argument("--calibrate", nargs="?", const="", metavar="FILE.toml",
                   help="measure this machine's CPU, and its GPU where there is one, and how well that predicts a model; write the presets")
    return p


def calibrate(path: str) -> int:
    """Measure, print, and write presets for `schedule --device FILE.toml`."""
    if path and (not path.endswith(".toml") or not Path(path).resolve().parent.is_dir()):
        print(f"doctor: cannot write to {path!r}\n  expected: a name that ends in .toml, in a folder that is there", file=sys.stderr)
        return 2
    from workbench.devices.calibrate import calibrate as measure
    from workbench.models.gguf import shipped_models
    from workbench.models.timing import layer_times, table

    rows, found = [], measure()
    for name in list(shipped_models())[:4]:
        rows += layer_times(name)[0]
    print("\n".join(table(rows)))
    toml = found.to_toml("this-cpu")
    try:
        from workbench.devices import CudaBackend
        gpu = CudaBackend()
    except Exception as error:
        print(f"\nno GPU measured: {str(error).splitlines()[0]}")
    else:
        toml += "\n" + measure(gpu).to_toml("this-gpu")
    print(f"\n{toml}", end="")
    if path:
        try:
            Path(path).write_text(toml, "utf-8")
        except OSError as error:
            print(f"doctor: cannot write {path!r}: {error.strerror}", file=sys.stderr)
            return 2
        print(f"\nwritten to {path}: `schedule MODEL --device {path}`")
    return 0


def examine() -> list[Finding]:
    """All findings, in the order in which one would repair them."""
    return [_python(), _environment(), *_packages(), _cpu(), _memory(), _blas(), gpu(), _dot(), _models(), _lessons(),
            _browser()]


def gpu() -> Finding:
    """The GPU, or one sentence why there is none to use. Never imports CuPy where it is not installed."""
    advice = "nothing to do: every lesson runs on the CPU and on simulated devices"
    if importlib.util.find_spec("cupy") is None:
        why = "no CUDA on macOS" if sys.platform == "darwin" else "CuPy is not in this Python"
        fix = advice if sys.platform == "darwin" else "`lab --with-cuda` adds CuPy; without it lessons use the CPU"
        return Finding("GPU", f"none: {why}", False, fix, needed=False)
    try:
        cupy = importlib.import_module("cupy")
        if not cupy.is_available():
            return Finding("GPU", "none: CuPy finds no NVIDIA driver or no device", False, advice, needed=False)
        device = cupy.cuda.runtime.getDeviceProperties(0)
        free, total = cupy.cuda.runtime.memGetInfo()
        return Finding("GPU", f"{device['name'].decode()}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, "
                              f"CuPy {cupy.__version__}")
    except Exception as error:          # a broken driver fails in many ways, none of which may end the report
        return Finding("GPU", f"unusable: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                       False, "check that the driver supports CUDA 12 (nvidia-smi); lessons use the CPU", needed=False)


def _python() -> Finding:
    version = platform.python_version()
    return Finding("Python", f"{version}  {sys.executable}", sys.version_info >= (3, 11),
                   "the workbench needs 3.11 or newer: make lab PYTHON=python3.12")


def _environment() -> Finding:
    root = paths.checkout()
    if root is None:
        return Finding("environment", f"installed package in {paths.PACKAGE.parent}")
    venv = root / ".venv"
    if Path(sys.prefix).resolve() == venv.resolve():
        return Finding("environment", f"{venv} (active)")
    ready = (venv / "workbench-stamp.json").is_file()
    state = "ready, but this report is about another Python" if ready else "not made"
    return Finding("environment", f"{venv} ({state})", ready,
                   "`make lab` or `python -m workbench lab` makes it", needed=False)


def _packages() -> list[Finding]:
    have: dict[str, str] = {}
    lacking: list[str] = []
    for name in PACKAGES:
        try:
            have[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(name)
    found = [Finding("packages", ", ".join(f"{n} {v}" for n, v in have.items()))] if have else []
    if lacking:
        found.append(Finding("packages", f"not in this Python: {', '.join(lacking)}", False,
                             "`make lab` installs them into .venv; with conda: environment.yml"))
    return found


def _cpu() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Finding("CPU", f"{usable} usable of {os.cpu_count()} ({platform.machine()}, {platform.system()})")


def _memory() -> Finding:
    total = memory_bytes()
    if total is None:
        return Finding("memory", "unknown on this system")
    return Finding("memory", f"{total / 1e9:.1f} GB", total > 2e9, "lessons want 2 GB: close other programs",
                   needed=False)


def memory_bytes() -> int | None:
    """Physical memory, without any package; None where the system does not tell."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if sys.platform == "win32":
        import ctypes

        class Status(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong),
                        *((f"field{i}", ctypes.c_ulonglong) for i in range(7))]

        status = Status(length=ctypes.sizeof(Status))
        if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            return int(status.field0)
    return None


def _blas() -> Finding:
    if importlib.util.find_spec("numpy") is None or importlib.util.find_spec("threadpoolctl") is None:
        return Finding("BLAS", "not known without numpy and threadpoolctl", False, "see packages", needed=False)
    importlib.import_module("numpy")
    pools = importlib.import_module("threadpoolctl").threadpool_info()
    blas = [f"{p['internal_api']} {p.get('version') or ''}, {p['num_threads']} threads" for p in pools
            if p["user_api"] == "blas"]
    return Finding("BLAS", "; ".join(blas) or "NumPy's own, or one that threadpoolctl does not know (Accelerate?)")


def _dot() -> Finding:
    if dot := shutil.which("dot"):
        return Finding("Graphviz", dot)
    if shutil.which("graphviz-pure", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])):
        return Finding("Graphviz", "graphviz-pure (no dot program; none is needed)")
    return Finding("Graphviz", "no dot program and no graphviz-pure", False, "see packages", needed=False)


def _models() -> Finding:
    try:
        files = sorted(paths.models_dir().glob("*.gguf"))
    except FileNotFoundError as error:
        return Finding("models", "none", False, str(error))
    size = sum(f.stat().st_size for f in files) / 1e6
    return Finding("models", f"{len(files)} files, {size:.0f} MB in {paths.models_dir()}", bool(files),
                   "`git checkout -- models` brings them back")


def _lessons() -> Finding:
    try:
        return Finding("lessons", f"{len(list(paths.notebooks_dir().glob('*.ipynb')))} in {paths.notebooks_dir()}")
    except FileNotFoundError as error:
        return Finding("lessons", "none", False, str(error))


def _browser() -> Finding:
    from workbench.cli.lab import has_browser
    chromium = os.environ.get("CHROMIUM") or next((p for p in map(shutil.which, CHROMIUMS) if p), None)
    if has_browser():
        return Finding("browser", f"yes{f' ({chromium})' if chromium else ''}")
    found = f"{chromium}, but no display: `lab` prints the address" if chromium else "none that can be opened here"
    return Finding("browser", found, bool(chromium), "`lab` prints the address; open it in any browser. For the "
                   "browser tests: apt-get install chromium", needed=False)
