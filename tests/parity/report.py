"""The lines a parity command prints: one per failing case and field, and a closing count."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.models import Model, load

MOST_LINES = 12


class BadInput(Exception):
    """What was handed to the command cannot be judged."""


class Report:
    """Counts cases and prints what differs."""

    def __init__(self, name: str) -> None:
        self.name, self.passed, self.failed, self.skipped = name, 0, 0, 0

    def case(self, case: str, differences: list[str], note: str = "") -> None:
        """Judge one case by its list of differences."""
        if not differences:
            self.passed += 1
            if note:
                print(f"ok   {case}: {note}")
            return
        self.failed += 1
        for line in differences[:MOST_LINES]:
            print(f"FAIL {case}: {line}")
        if len(differences) > MOST_LINES:
            print(f"FAIL {case}: … and {len(differences) - MOST_LINES} more differences")

    def skip(self, case: str, reason: str) -> None:
        """Count a case that is not judged, and say why."""
        self.skipped += 1
        print(f"skip {case}: {reason}")

    def bad(self, reason: object) -> int:
        """The exit status for input that cannot be judged."""
        print(f"{self.name}: {reason}", file=sys.stderr)
        return 2

    def close(self) -> int:
        """Print the count; the exit status."""
        print(f"{self.passed} passed, {self.failed} failed" + (f", {self.skipped} skipped" if self.skipped else ""))
        return 1 if self.failed or not self.passed + self.skipped else 0


def judge_files(name: str, args: list[str], needed: str, judge: Callable[[Report, Model, Path], None], most: int | None = None) -> int:
    """Judge recordings (`args[1:]`, at most `most`) of the model `args[0]` one by one; the exit status."""
    report = Report(name)
    if len(args) < 2 or most is not None and len(args) > most + 1:
        return report.bad(f"{needed} are needed")
    try:
        with load(args[0]) as model:
            for path in map(Path, args[1:]):
                judge(report, model, path)
    except (BadInput, WorkbenchError) as e:
        return report.bad(e)
    return report.close()
