"""`test`: the tests, then every notebook run again and compared with its stored outputs."""
from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tools.run import root

HELP = "run the tests and every notebook"
NO_TESTS = 5                            # pytest's status when it found nothing to run
CELL_SECONDS = 60


def main(argv: list[str]) -> int:
    """Run pytest over tests/ and, strictly compared, over notebooks/."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench test", description=HELP, allow_abbrev=False,
        epilog="Anything else goes to pytest (paths, -k, -x, -m ...), and then the notebooks are left out.")
    parser.add_argument("--notebooks", action="store_true", help="only the notebooks")
    parser.add_argument("--no-notebooks", action="store_true", help="only the tests")
    parser.add_argument("--serial", action="store_true", help="one process, to use a debugger")
    args, rest = parser.parse_known_args(argv)
    top = root()
    parallel = [] if args.serial else ["-n", "auto", "--dist", "loadscope"]
    results: dict[str, int] = {}
    if not args.notebooks:
        results["tests"] = run(top, "tests", [*parallel, *(rest or ["tests"])])
    if args.notebooks or not (args.no_notebooks or rest):
        folder = top / "notebooks"
        books = [b for b in folder.rglob("*.ipynb") if ".ipynb_checkpoints" not in b.parts]
        if books:
            results["notebooks"] = run(top, "notebooks", [*parallel, *notebook_options(folder), *rest, *map(str, books)])
        else:
            print("\n== notebooks: there are none yet ==")
    failed = [f"{name} (status {status})" for name, status in results.items() if status]
    print(f"\nworkbench test: {'FAILED: ' + ', '.join(failed) if failed else 'all passed'}")
    return 1 if failed else 0


def notebook_options(folder: Path) -> list[str]:
    """How nbval is called: strictly, in this environment's Python, with a limit for each cell."""
    options = ["-p", "no:cacheprovider", "--nbval", "--nbval-current-env", f"--nbval-cell-timeout={CELL_SECONDS}"]
    sanitize = folder / "nbval_sanitize.cfg"
    return [*options, f"--nbval-sanitize-with={sanitize}"] if sanitize.is_file() else options


def run(top: Path, name: str, options: list[str]) -> int:
    """One pytest run with a heading and its seconds."""
    print(f"\n== {name} ==", flush=True)
    started = time.monotonic()
    status = subprocess.run([sys.executable, "-m", "pytest", *options], cwd=top).returncode
    print(f"== {name}: {time.monotonic() - started:.0f} s ==", flush=True)
    if status == NO_TESTS:
        print(f"   pytest found nothing to run for {name}: that counts as a failure here.", flush=True)
    return status
