"""`bench`: the benchmarks, which are a program of their own in benchmarks/."""
import sys

from tools.run import python, root


def main(argv: list[str]) -> int:
    """Run them; the arguments are theirs."""
    if not (root() / "benchmarks" / "__main__.py").is_file():
        print("There are no benchmarks yet (benchmarks/__main__.py does not exist).", file=sys.stderr)
        return 2
    return python("-m", "benchmarks", *argv)
