"""`lint`, `types`, `bench`, `lock`, `clean`: one line each for those who change the workbench."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from workbench import paths

TARGETS = ("workbench", "tests", "notebooks", "benchmarks")
CACHES = (".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "build", "dist")


def main(argv: list[str]) -> int:
    """Run the command named by the first argument; the rest goes to the tool behind it."""
    command, rest = argv[0], argv[1:]
    root = paths.checkout()
    if root is None:
        print(f"`{command}` works in a checkout of the repository only.", file=sys.stderr)
        return 2
    if command == "clean":
        return clean(root)
    there = [name for name in TARGETS if (root / name).is_dir()]
    lines = {"lint": ["-m", "ruff", "check", *(rest or there)],
             "types": ["-m", "mypy", *(rest or ["workbench"])],
             "bench": ["-m", "benchmarks", *rest],
             "lock": [str(root / "locks" / "update.py"), *rest]}
    if command == "bench" and not (root / "benchmarks" / "__main__.py").is_file():
        print("There are no benchmarks yet (benchmarks/__main__.py does not exist).", file=sys.stderr)
        return 2
    return subprocess.run([sys.executable, *lines[command]], cwd=root).returncode


def clean(root: Path) -> int:
    """Remove what can be made again: .venv, caches, builds. `work/` is the learner's and stays."""
    if Path(sys.prefix).resolve() == (root / ".venv").resolve() and os.name == "nt":
        print("Call this with your own Python: Windows cannot remove the one that runs.", file=sys.stderr)
        return 2
    gone = [root / ".venv", *(root / name for name in CACHES)]
    gone += [cache for top in TARGETS for cache in (root / top).rglob("__pycache__")]
    for folder in gone:
        if folder.is_dir():
            shutil.rmtree(folder)
            if folder.parent == root:
                print(f"  removed {folder.name}")
    return 0
