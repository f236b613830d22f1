"""Starting the tools of developers in the checkout, with the running Python."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workbench import paths

TARGETS = ("workbench", "tools", "tests", "lessons", "notebooks", "benchmarks")


def root() -> Path:
    """The root of the checkout that this file is in."""
    found = paths.checkout()
    assert found is not None, "tools/ exists in a checkout only"
    return found


def python(*arguments: str) -> int:
    """Run this Python with `arguments` at the root of the checkout; return its exit status."""
    return subprocess.run([sys.executable, *arguments], cwd=root()).returncode
