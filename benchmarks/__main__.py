"""`python -m benchmarks [NAME…]`: run all benchmarks, or those named, and print their tables."""

import importlib
import sys
from pathlib import Path

from benchmarks import harness


def main(names: list[str]) -> int:
    harness.in_a_clean_process()
    found = sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))
    if {"-h", "--help"} & set(names):
        print(f"usage: python -m workbench bench [NAME...]\n\nrun all benchmarks, or those named: {', '.join(found)}")
        return 0
    unknown = [n for n in names if n not in found]
    if unknown:
        print(f"no benchmark {', '.join(unknown)}; there are {', '.join(found)}", file=sys.stderr)
        return 2
    print(harness.machine(), flush=True)
    for name in names or found:
        for table in importlib.import_module(f"benchmarks.bench_{name}").tables():
            print(f"\n{table}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
