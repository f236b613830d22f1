"""`clean`: remove what can be made again."""
import argparse
import os
import shutil
import sys
from pathlib import Path

from tools.run import TARGETS, root

HELP = "remove .venv and caches; never your work/"
CACHES = (".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "build", "dist")


def main(argv: list[str]) -> int:
    """Remove .venv, .venv-train, caches and builds. `work/` is the learner's and stays."""
    argparse.ArgumentParser(prog="python -m workbench clean", description=HELP).parse_args(argv)
    top = root()
    if os.name == "nt" and Path(sys.prefix).resolve() == (top / ".venv").resolve():
        print("Call this with your own Python: Windows cannot remove the one that runs.", file=sys.stderr)
        return 2
    gone = [*top.glob(".venv*"), *(top / name for name in CACHES)]
    gone += [cache for name in TARGETS for cache in (top / name).rglob("__pycache__")]
    for folder in gone:
        if folder.is_dir():
            shutil.rmtree(folder)
            if folder.parent == top:
                print(f"  removed {folder.name}")
    return 0
