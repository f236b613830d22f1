"""The command line: a table of commands, each imported only when it is asked for."""
from __future__ import annotations

import importlib
import importlib.util
import io
import os
import sys

from workbench import paths
from workbench.errors import WorkbenchError

# command -> (module, packages it needs, what it does); a module offers `main(argv) -> exit status`.
# The modules in tools/ work in a checkout only. "": any Python will do; "any": .venv where it is ready, else any Python;
# otherwise the lock that .venv must hold.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "lab": ("workbench.cli.lab", "main", "open the lessons in JupyterLab (the first time: set up .venv)"),
    "doctor": ("workbench.cli.doctor", "any", "what this machine has, and what to do about what it lacks"),
    "generate": ("workbench.cli.generate", "main", "continue a text with one of the small models"),
    "schedule": ("workbench.cli.schedule", "main", "what ggml's scheduler would do with a model on given devices"),
    "run": ("workbench.cli.run", "main", "continue a text with a model whose experts have a budget"),
    "replay": ("workbench.cli.replay", "main", "cache policies over a recorded trace of routes"),
    "fit": ("workbench.cli.fit", "main", "whether a model fits on a card, and how fast it could be at most"),
    "info": ("workbench.cli.info", "main", "what is inside a GGUF file"),
    "setup": ("tools.setup", "", "only set up .venv: [main|test|dev] [--without-cuda]"),
    "test": ("tools.test", "test", "run the tests and every notebook"),
    "lessons": ("tools.lessons", "test", "build the notebooks from lessons/, or check that they are in step"),
    "size": ("tools.size", "", "count the code, room by room, against its budget"),
    "lint": ("tools.lint", "dev", "check the style with ruff"),
    "types": ("tools.typecheck", "dev", "check the annotations with mypy"),
    "bench": ("tools.bench", "main", "run the benchmarks"),
    "lock": ("tools.lock", "dev", "resolve the dependencies again and rewrite locks/"),
    "clean": ("tools.clean", "", "remove .venv and caches; never your work/"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        print(f"workbench has no command {command!r}.\n\n{usage()}", file=sys.stderr)
        return 2
    module, lock, _ = COMMANDS[command]
    checkout = paths.checkout() is not None
    if not _exists(module):
        where = "is not in this version of the workbench yet" if checkout or module.startswith("workbench") \
            else "works in a checkout of the repository only"
        print(f"`{command}` {where} ({module} does not exist here).", file=sys.stderr)
        return 2
    try:
        if checkout and lock and not {"-h", "--help"} & set(rest):
            _early_check(module, rest)
            rest = importlib.import_module("tools.setup").ensure(lock, command, rest)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):    # a terminal that lacks a character gets it escaped
                stream.reconfigure(errors="backslashreplace")
        status = int(importlib.import_module(module).main(rest))
        sys.stdout.flush()
        return status
    except BrokenPipeError:             # `info MODEL | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except WorkbenchError as error:
        print(f"\n{command}: {error}", file=sys.stderr)
        return 1


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _early_check(module: str, argv: list[str]) -> None:
    """Refuse wrong arguments before minutes of set-up, where a module's `parser` can be had without packages."""
    try:
        make = getattr(importlib.import_module(module), "parser", None)
    except ImportError:
        return
    if make is not None:
        make().parse_args(argv)


def usage() -> str:
    """The help text: every command with its one line."""
    lines = [f"  {name:<9} {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m workbench COMMAND [options]", "", *lines, "",
                      "--without-cuda leaves CuPy out of the set-up; --here uses the Python you run (conda, a venv of",
                      "your own) and sets nothing up. COMMAND --help tells more."])
