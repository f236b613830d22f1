"""The command line: a table of commands, each imported only when it is asked for."""
from __future__ import annotations

import importlib
import importlib.util
import sys

# command -> (module, what it does); a module offers `main(argv) -> exit status`
COMMANDS: dict[str, tuple[str, str]] = {
    "lab": ("lab", "open the lessons in JupyterLab (the first time: set up .venv)"),
    "doctor": ("doctor", "what this machine has, and what to do about what it lacks"),
    "generate": ("generate", "continue a text with one of the small models"),
    "info": ("info", "what is inside a GGUF file"),
    "test": ("test", "run the tests and every notebook"),
    "size": ("size", "count the code, room by room, against its budget"),
    "lint": ("develop", "check the style with ruff"),
    "types": ("develop", "check the annotations with mypy"),
    "bench": ("develop", "run the benchmarks"),
    "lock": ("develop", "resolve the dependencies again and rewrite locks/"),
    "clean": ("develop", "remove .venv and caches; never your work/"),
}
# commands of one module that serves several: it is told which one was asked for
SHARED = {"develop"}
# these run in whatever Python is there; all others need the packages and get .venv first
BARE = {"doctor", "size", "clean"}
NEEDS = {"lab": "main", "generate": "main", "info": "main", "bench": "main", "test": "test"}


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
    module = f"workbench.cli.{COMMANDS[command][0]}"
    if importlib.util.find_spec(module) is None:
        print(f"`{command}` is not in this version of the workbench yet ({module} does not exist).", file=sys.stderr)
        return 2
    if command not in BARE and not {"-h", "--help"} & set(rest):
        from workbench.cli import setup
        try:
            rest = setup.ensure(NEEDS.get(command, "dev"), command, rest)
        except setup.SetupError as error:
            print(f"\nSet-up failed: {error}", file=sys.stderr)
            return 1
    run = importlib.import_module(module).main
    return run([command, *rest]) if COMMANDS[command][0] in SHARED else run(rest)


def usage() -> str:
    """The help text: every command with its one line."""
    lines = [f"  {name:<9} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m workbench COMMAND [options]", "", *lines, "",
                      "--without-cuda leaves CuPy out of the set-up; --here uses the Python you run (conda, a venv of",
                      "your own) and sets nothing up. COMMAND --help tells more."])
