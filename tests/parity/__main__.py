"""`python -m tests.parity {ops,logits,graph,sched,routes} ARGS`: the workbench against recordings of ggml and llama.cpp.

Each command prints a line per failing case and field and closes with `N passed, M failed[, K skipped]`. It exits with 0
where all passed, 1 where one failed, 2 where the input cannot be judged.
"""

import importlib
import sys

COMMANDS = ("ops", "logits", "graph", "sched", "routes")


def main(args: list[str]) -> int:
    """Run one command; the exit status."""
    if not args or args[0] not in COMMANDS:
        print(f"usage: python -m tests.parity {{{','.join(COMMANDS)}}} ARGS", file=sys.stderr)
        return 2
    try:
        command = importlib.import_module(f"tests.parity.{args[0]}")
    except ModuleNotFoundError as e:
        print(f"this Python has no {e.name}: use that of .venv (.venv/bin/python), which `make setup` makes", file=sys.stderr)
        return 2
    return command.main(args[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
