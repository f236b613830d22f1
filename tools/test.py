"""`test`: the tests, then every notebook run again and compared with its stored outputs."""
from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import time
from pathlib import Path

from tools.run import python, root
from workbench.cli.doctor import CHROMIUMS

HELP = "run the tests, every notebook, and the lessons in a real browser"
SECTIONS = ("tests", "notebooks", "browser")
NO_TESTS = 5                            # pytest's status when it found nothing to run
CELL_SECONDS = 60


def main(argv: list[str]) -> int:
    """Run pytest over tests/, over notebooks/ (compared strictly), and over tests/browser where there is a browser."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench test", description=HELP, allow_abbrev=False,
        epilog="Anything else goes to pytest (paths, -k, -x, -m ...); then only the tests run, unless --only says so.")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one section; may be repeated")
    parser.add_argument("--serial", action="store_true", help="one process, to use a debugger")
    args, rest = parser.parse_known_args(argv)
    wanted = args.only or (["tests"] if rest else SECTIONS)
    parallel = [] if args.serial else ["-n", "auto", "--dist", "loadscope"]
    results: dict[str, int] = {}
    if "tests" in wanted:
        named = [a for a in rest if (root() / a.partition("::")[0]).exists()]
        results["tests"] = run("tests", [*parallel, *rest, *([] if named else ["tests"])])
    if "notebooks" in wanted:
        folder = root() / "notebooks"
        books = [str(b) for b in sorted(folder.rglob("*.ipynb")) if ".ipynb_checkpoints" not in b.parts]
        skip = "" if books else "there are none yet"
        results["notebooks"] = run("notebooks", [*parallel, *notebook_options(folder), *rest, *books], skip)
    if "browser" in wanted:
        missing = no_browser()
        workers = [] if args.serial else ["-n", "auto", "--maxprocesses", "4"]     # a browser and a server for each
        results["browser"] = run("browser", ["-m", "browser", *workers, *rest, "tests/browser"], missing)
        if missing and os.environ.get("CI") and (root() / "tests" / "browser").is_dir():
            results["browser"] = 1      # a check that everyone counts on must not vanish quietly
    failed = [f"{name} (status {status})" for name, status in results.items() if status]
    print(f"\nworkbench test: {'FAILED: ' + ', '.join(failed) if failed else 'nothing failed'}")
    return 1 if failed else 0


def notebook_options(folder: Path) -> list[str]:
    """How nbval is called: strictly, in this environment's Python, with a limit for each cell."""
    options = ["-p", "no:cacheprovider", "--nbval", "--nbval-current-env", f"--nbval-cell-timeout={CELL_SECONDS}"]
    sanitize = folder / "nbval_sanitize.cfg"
    return [*options, f"--nbval-sanitize-with={sanitize}"] if sanitize.is_file() else options


def no_browser() -> str:
    """Why the browser tests cannot run here; empty when they can."""
    if not (root() / "tests" / "browser").is_dir():
        return "tests/browser does not exist yet"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not in this environment: `python -m workbench setup dev` adds it"
    if not (os.environ.get("CHROMIUM") or any(map(shutil.which, CHROMIUMS))):
        return "no Chromium on PATH: install it (Debian: apt-get install chromium) or set CHROMIUM to its program"
    return ""


def run(name: str, options: list[str], skip: str = "") -> int:
    """One pytest run with a heading and its seconds, or the reason why there is none."""
    print(f"\n== {name} ==", flush=True)
    if skip:
        print(f"   SKIPPED: {skip}", flush=True)
        return 0
    started = time.monotonic()
    status = python("-m", "pytest", *options)
    print(f"== {name}: {time.monotonic() - started:.0f} s ==", flush=True)
    if status == NO_TESTS:
        print(f"   pytest found nothing to run for {name}: that counts as a failure here.", flush=True)
    return status
