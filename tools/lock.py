"""Resolve the dependencies of pyproject.toml again: main.txt, test.txt, dev.txt and sizes.json in locks/.

    python -m workbench lock [--upgrade] [--no-sizes]

The locks hold for every platform and for Python 3.11 to 3.14, with hashes and without the name of any index. Versions
stay as they are unless --upgrade is given or a specifier in pyproject.toml asks for others. sizes.json holds what the
set-up prints beforehand; it is measured by installing each lock into a temporary folder.
"""
from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1] / "locks"
UV = [sys.executable, "-m", "uv"]
EXTRAS: dict[str, list[str]] = {"main": [], "test": ["test"], "dev": ["test", "dev"]}


def resolve(upgrade: bool) -> None:
    """Write the three locks, the largest first, so that the smaller ones take their versions from it."""
    for name in ("dev", "test", "main"):
        target = HERE / f"{name}.txt"
        line = [*UV, "pip", "compile", "--no-config", "--quiet", "--universal", "--python-version", "3.11",
                "--generate-hashes", "--only-binary", ":all:", "--no-emit-index-url", "--no-header", "-o", str(target)]
        line += [part for extra in EXTRAS[name] for part in ("--extra", extra)]
        line += ["--constraint", str(HERE / "dev.txt")] if name != "dev" else ["--upgrade"] if upgrade else []
        subprocess.run([*line, "pyproject.toml"], check=True, cwd=HERE.parent)
        text = re.sub(r"^( +#(?: +via)? +)-c .*\n", "", target.read_text("utf-8"), flags=re.M)
        target.write_text(f"# {name}: made by `python -m workbench lock` from pyproject.toml\n{text}", "utf-8")


def measure() -> None:
    """Write sizes.json: megabytes to download and on disk for this platform, with CuPy apart."""
    def weigh(lock: str, without: str = "") -> tuple[int, int]:
        with tempfile.TemporaryDirectory() as folder:
            chosen = Path(folder, "lock.txt")
            blocks = re.split(r"\n(?=[A-Za-z0-9])", (HERE / f"{lock}.txt").read_text("utf-8"))
            chosen.write_text("\n".join(b for b in blocks if not without or not b.startswith(without)), "utf-8")
            wheels, site = Path(folder, "wheels"), Path(folder, "site")
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
            subprocess.run([*pip, "download", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(chosen),
                            "-d", str(wheels)], check=True)
            subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site),
                            *map(str, wheels.iterdir())], check=True)
            return _size(wheels), _size(site)

    empty = 25_000_000                                      # an environment with pip and nothing else
    everything, bare = weigh("main"), weigh("main", "cupy-cuda12x")
    sizes: dict[str, object] = {
        "measured_on": f"measured on {platform.system()} {platform.machine()}, Python %d.%d" % sys.version_info[:2],
        "cuda": {"download_mb": _mb(everything[0] - bare[0]), "disk_mb": _mb(everything[1] - bare[1])},
        "main": {"download_mb": _mb(bare[0]), "disk_mb": _mb(bare[1] + empty)}}
    for lock in ("test", "dev"):
        download, disk = weigh(lock, "cupy-cuda12x")
        sizes[lock] = {"download_mb": _mb(download), "disk_mb": _mb(disk + empty)}
    (HERE / "sizes.json").write_text(json.dumps(sizes, indent=1) + "\n", "utf-8")


def _size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _mb(size: int) -> int:
    return round(size / 1e6)


def main(argv: list[str]) -> int:
    """Resolve, then measure."""
    parser = argparse.ArgumentParser(prog="python -m workbench lock", description="resolve the dependencies and rewrite locks/")
    parser.add_argument("--upgrade", action="store_true", help="take newer versions, too")
    parser.add_argument("--no-sizes", action="store_true", help="do not measure what the set-up will download and store")
    args = parser.parse_args(argv)
    try:
        resolve(args.upgrade)
        if not args.no_sizes:
            measure()
    except subprocess.CalledProcessError as e:
        print(f"lock: {e.cmd[2]} stopped with status {e.returncode}; what it said is above", file=sys.stderr)
        return 1
    return 0
