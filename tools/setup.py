"""The set-up: a virtual environment beside the checkout, filled from a lock file with hashes.

Runs in a bare system Python (standard library only), says beforehand what it will download and store, does nothing
when a stamp shows that nothing changed, and ends by starting the same command again inside the environment.
"""
from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from workbench import paths
from workbench.errors import WorkbenchError

LOCKS = ("main", "test", "dev")         # each holds everything of those before it, at the same versions
CUDA = "cupy-cuda12x"
NEWS_OFF = {"@jupyterlab/apputils-extension:notification":
            {"fetchNews": "false", "checkForUpdates": False}}


class SetupError(WorkbenchError):
    """The environment could not be made; the message says what to do."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment of ours: where it is and what its stamp says."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def stamp(self) -> Path:
        """The file that says which lock, for which Python, was installed completely."""
        return self.folder / "workbench-stamp.json"

    def active(self) -> bool:
        """Whether the running interpreter is this environment's."""
        return Path(sys.prefix).resolve() == self.folder.resolve()

    def whole(self) -> bool:
        """Whether the interpreter is there and is the environment's own: without `pyvenv.cfg` it would be the Python that
        made it, and pip would install into that one."""
        return self.python.exists() and (self.folder / "pyvenv.cfg").is_file()

    def installed(self) -> dict[str, object]:
        """What the stamp says; empty when there is none or the environment is broken."""
        try:
            return dict(json.loads(self.stamp.read_text("utf-8"))) if self.whole() else {}
        except (OSError, ValueError):
            return {}

    def current(self, root: Path, lock: str, cuda: bool) -> bool:
        """Whether it already holds what `lock` (or a larger one) asks for, for the running Python."""
        have = self.installed()
        return any(have == stamp_for(root, larger, cuda) for larger in LOCKS[LOCKS.index(lock):])


def checkout_environment(root: Path) -> Environment:
    """The environment of a checkout."""
    return Environment(root / ".venv")


def stamp_for(root: Path, lock: str, cuda: bool) -> dict[str, object]:
    """What the stamp must say once `lock` is installed for the running Python."""
    digest = hashlib.sha256((root / "locks" / f"{lock}.txt").read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    return {"lock": lock, "sha256": digest, "python": "%d.%d" % sys.version_info[:2], "cuda": cuda, "root": str(root)}


def main(argv: list[str]) -> int:
    """`setup`: make or update .venv and start nothing; `setup dev` for what developers and CI need."""
    parser = argparse.ArgumentParser(prog="python -m workbench setup", description="only set up .venv; start nothing")
    parser.add_argument("lock", nargs="?", choices=LOCKS, default="main", help="for learners, for tests, for developers")
    parser.add_argument("--without-cuda", action="store_true", help="leave CuPy out (and stay without it)")
    parser.add_argument("--with-cuda", action="store_true", help="add CuPy after --without-cuda")
    lock = parser.parse_args([a for a in argv if a != "--here"]).lock
    ensure(lock, "setup", argv)
    print(f"{sys.prefix} holds all of locks/{lock}.txt.")
    return 0


def ensure(lock: str, command: str, argv: list[str]) -> list[str]:
    """Return the remaining arguments once the packages of `lock` are there; may replace the process."""
    flags = {a for a in argv if a in ("--here", "--without-cuda", "--with-cuda")}
    here, argv = "--here" in flags, [a for a in argv if a not in flags]
    root = paths.checkout()
    if root is None or here or os.environ.get("WORKBENCH_HERE"):
        if lock == "any":
            return argv
        missing = [m for m in ("numpy", "jupyterlab", *(["pytest"] if lock == "test" else [])) if not _has(m)]
        if missing:
            raise SetupError(f"this Python ({sys.executable}) lacks {', '.join(missing)}. "
                             "Install them here, or leave out --here and let the workbench make its own environment.")
        return argv
    env = checkout_environment(root)
    if lock == "any":
        if env.installed() and not env.active():
            start_again(env, command, argv)
        return argv
    cuda = "--with-cuda" in flags or ("--without-cuda" not in flags and env.installed().get("cuda", True) is True)
    if not env.current(root, lock, cuda):
        install(root, env, lock, cuda)
    if env.active():
        return argv
    start_again(env, command, argv)
    return argv                         # not reached: start_again does not return


def plan(root: Path, lock: str, cuda: bool) -> str:
    """What the set-up is about to do, in words and figures, before it does it."""
    lines = selected((root / "locks" / f"{lock}.txt").read_text("utf-8"), cuda)
    count = len({re.match(r"[A-Za-z0-9._-]+", line)[0] for line in lines if re.match(r"[A-Za-z0-9]", line)})  # type: ignore[index]
    sizes = json.loads((root / "locks" / "sizes.json").read_text("utf-8"))
    figures = sizes[lock]
    download = figures["download_mb"] + (sizes["cuda"]["download_mb"] if cuda and cuda_wheel_exists() else 0)
    disk = figures["disk_mb"] + (sizes["cuda"]["disk_mb"] if cuda and cuda_wheel_exists() else 0)
    text = [f"Setting up the workbench in {root / '.venv'} (once; your Python itself is not changed).",
            f"  packages   up to {count}, at the versions and hashes of locks/{lock}.txt",
            f"  download   about {download} MB from the package index that your pip is set to",
            f"  on disk    about {disk} MB ({sizes['measured_on']})"]
    if cuda and cuda_wheel_exists():
        text.append(f"  of these, CuPy for NVIDIA GPUs is {sizes['cuda']['download_mb']} MB to download and "
                    f"{sizes['cuda']['disk_mb']} MB on disk: --without-cuda leaves it out.")
    text.append("After this the workbench needs no network.")
    return "\n".join(text)


def cuda_wheel_exists() -> bool:
    """Whether a CuPy wheel exists for this platform (the lock's marker says the same)."""
    import platform
    machine = platform.machine()
    return (sys.platform == "linux" and machine in ("x86_64", "aarch64")) or (
        sys.platform == "win32" and machine == "AMD64")


def selected(lock_text: str, cuda: bool) -> list[str]:
    """The lines of a lock file; without CUDA, less CuPy and what only CuPy needs."""
    if cuda:
        return lock_text.splitlines()
    kept: list[str] = []
    for block in re.split(r"\n(?=[A-Za-z0-9])", lock_text):
        name = re.match(r"[A-Za-z0-9._-]+", block)
        via = set(re.findall(r"^ +# +(?:via +)?([A-Za-z0-9._-]+)(?: \(.*\))?$", block, re.M)) - {"via"}
        if name and (name[0] == CUDA or via == {CUDA}):
            continue
        kept += block.splitlines()
    return kept


def install(root: Path, env: Environment, lock: str, cuda: bool) -> None:
    """Create the environment where needed and fill it from the lock."""
    print(plan(root, lock, cuda), flush=True)
    started = time.monotonic()
    have = _venv_python(env)
    if have is None or have != "%d.%d" % sys.version_info[:2]:
        if env.folder in Path(sys.executable).parents:
            raise SetupError(f"{env.folder} must be made anew (it is for Python {have or '?'}), but its own Python runs this.",
                             hint="call the workbench with your own Python: python3 -m workbench setup")
        if env.folder.exists():
            print(f"  replacing the old environment (for Python {have or '?'})", flush=True)
            shutil.rmtree(env.folder)
        create(env)
    env.stamp.unlink(missing_ok=True)
    wanted = env.folder / "workbench-lock.txt"
    wanted.write_text("\n".join(selected((root / "locks" / f"{lock}.txt").read_text("utf-8"), cuda)) + "\n", "utf-8")
    _pip(env, wanted)
    purelib = subprocess.run([str(env.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                             check=True, capture_output=True, text=True).stdout.strip()
    (Path(purelib) / "moe_workbench.pth").write_text(f"{root}\n", "utf-8")
    settings = env.folder / "share" / "jupyter" / "lab" / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "overrides.json").write_text(json.dumps(NEWS_OFF, indent=1), "utf-8")
    env.stamp.write_text(json.dumps(stamp_for(root, lock, cuda)), "utf-8")
    print(f"  ready after {time.monotonic() - started:.0f} s\n", flush=True)


def create(env: Environment) -> None:
    """Make an empty virtual environment with pip in it."""
    lacking = [m for m in ("venv", "ensurepip") if not _has(m)]
    if lacking:
        raise SetupError(
            f"this Python ({sys.executable}) has no {' and no '.join(lacking)} module, so it cannot make a virtual "
            "environment.\n  Debian, Ubuntu:  sudo apt-get install python3-venv\n"
            "  elsewhere:       use a Python from python.org, your system's full package, or conda (environment.yml)")
    made = subprocess.run([sys.executable, "-m", "venv", str(env.folder)], capture_output=True, text=True)
    if made.returncode:
        raise SetupError(f"`python -m venv {env.folder}` said:\n{made.stdout}{made.stderr}\n"
                         "Is the folder writable, and is there room on the disk?")


def start_again(env: Environment, command: str, argv: list[str]) -> None:
    """Run the same command with the environment's Python; does not return."""
    line = [str(env.python), "-m", "workbench", command, *argv]
    environ = {**os.environ, "PYTHONPATH": _joined(str(paths.checkout()), os.environ.get("PYTHONPATH"))}
    sys.stdout.flush()
    if os.name == "nt":                 # execve on Windows would give the prompt back at once
        try:
            sys.exit(subprocess.call(line, env=environ))
        except KeyboardInterrupt:
            sys.exit(130)
    os.execve(line[0], line, environ)


def _pip(env: Environment, wanted: Path) -> None:
    log = env.folder / "workbench-setup.log"
    line = [str(env.python), "-m", "pip", "--require-virtualenv", "install", "--disable-pip-version-check", "--no-input",
            "--require-hashes", "--only-binary=:all:", "--progress-bar=off", "-r", str(wanted)]
    tail: list[str] = []
    fetched = 0
    with log.open("w", encoding="utf-8") as out, subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip:
        assert pip.stdout is not None
        for text in pip.stdout:
            out.write(text)
            tail = [*tail[-14:], text]
            if text.startswith(("Collecting", "Processing")):
                fetched += 1
                if sys.stdout.isatty():
                    print(f"\r  fetching {fetched:>3}  {Path(text.split()[1]).name[:50]:<50}", end="", flush=True)
            elif text.startswith("Installing collected"):
                print(f"\r  unpacking {fetched} packages" + " " * 50, flush=True)
    if pip.returncode:
        raise SetupError(f"pip stopped with status {pip.returncode}. Its last lines:\n\n{''.join(tail)}\n"
                         f"Everything it said is in {log}.\nNo network? The set-up is the one step that needs it. "
                         "A proxy or an own index? pip's usual settings (pip.conf, PIP_INDEX_URL) are honoured.")


def _venv_python(env: Environment) -> str | None:
    """The Python version an environment was made for, if its interpreter still runs."""
    if not env.whole():
        return None
    asked = subprocess.run([str(env.python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                           capture_output=True, text=True)
    return asked.stdout.strip() or None


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _joined(*parts: str | None) -> str:
    return os.pathsep.join(p for p in parts if p)
