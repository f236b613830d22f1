"""`lab`: a learner's copy of the lessons, opened in JupyterLab."""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

from workbench import paths

HELP = "open the lessons in JupyterLab"
ORIGINS = ".origins.json"               # copy -> digest of the lesson it was made from


def parser() -> argparse.ArgumentParser:
    """What `lab` takes; asked before anything is set up."""
    p = argparse.ArgumentParser(prog="python -m workbench lab", description=HELP)
    p.add_argument("--fresh", metavar="NAME", help="a fresh copy of one lesson (03, or its name); yours is kept")
    p.add_argument("--work", type=Path, help="where your copies live (default: work/ beside the checkout)")
    p.add_argument("--no-browser", action="store_true", help="only print the address")
    p.add_argument("--port", type=_port, metavar="1-65535", help="default: the first free one from 8888 on")
    p.add_argument("--without-cuda", action="store_true", help="set up without CuPy (137 MB)")
    p.add_argument("--with-cuda", action="store_true", help="add CuPy after --without-cuda")
    p.add_argument("--here", action="store_true", help="use this Python as it is, set nothing up")
    return p


def main(argv: list[str]) -> int:
    """Bring `work/` up to date and start JupyterLab on lesson 00."""
    args = parser().parse_args(argv)
    root = paths.checkout()
    work = (args.work or (root or Path.cwd()) / "work").resolve()
    try:
        if args.port and not is_free(args.port):    # else the other's answers would be taken for ours
            raise ValueError(f"port {args.port} is taken, or not ours to take: leave --port out, or name another")
        port = args.port or free_port()
        lessons = _lessons()
        new = fresh(lessons, work, args.fresh) if args.fresh else []
        new += update(lessons, work)
    except ValueError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"lab: {error}\n  Your copies go to {work}: --work FOLDER names another place.", file=sys.stderr)
        return 1
    _trust(work, new)
    return start(work, root, port, args.no_browser)


def update(lessons: Path, work: Path) -> list[str]:
    """Copy the lessons that are not in `work` yet, renew the untouched ones; return the names copied.

    A copy that the learner changed is never written to.
    """
    work.mkdir(parents=True, exist_ok=True)
    origins, copied = _origins(work), []
    for source in sorted(lessons.rglob("*.ipynb")):
        name = source.relative_to(lessons).as_posix()
        if ".ipynb_checkpoints" in name:
            continue
        copy, shipped = work / name, _digest(source)
        if copy.exists():
            if _digest(copy) == shipped or origins.get(name) == shipped:
                origins.setdefault(name, shipped)
                continue
            if _digest(copy) != origins.get(name):
                print(f"  {name}: the lesson has a newer version; yours, which you changed, stays as it is "
                      f"(a fresh copy beside it: --fresh {source.stem})")
                continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        origins[name] = shipped
        copied.append(name)
    _write_origins(work, origins)
    if copied:
        print(f"  {len(copied)} lesson{'s' * (len(copied) > 1)} copied to {work}")
    return copied


def fresh(lessons: Path, work: Path, wanted: str) -> list[str]:
    """Replace one copy by the lesson as shipped, keeping the old one as NAME.mine-1.ipynb; return the names."""
    stem = Path(wanted).name.removesuffix(".ipynb")
    found = [f for f in sorted(lessons.rglob("*.ipynb")) if f.stem == stem]
    found = found or [f for f in sorted(lessons.glob("*.ipynb")) if f.stem.startswith(stem)]
    if len(found) != 1:
        names = ", ".join(f.stem for f in found or sorted(lessons.glob("*.ipynb")))
        raise ValueError(f"--fresh {wanted}: expected the name of one lesson, found {len(found)}. There are: {names}")
    name = found[0].relative_to(lessons).as_posix()
    copy = work / name
    if copy.exists():
        number = 1
        while (kept := copy.with_name(f"{copy.stem}.mine-{number}.ipynb")).exists():
            number += 1
        copy.rename(kept)
        print(f"  your {name} is now {kept.name}")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(found[0], copy)
    _write_origins(work, {**_origins(work), name: _digest(copy)})
    return [name]


def start(work: Path, root: Path | None, port: int, no_browser: bool) -> int:
    """Start JupyterLab, say where it is, and stay until it ends."""
    first = next(iter(sorted(work.glob("00*.ipynb")) or sorted(work.glob("*.ipynb"))), None)
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(16)
    page = f"/lab/tree/{first.name}" if first else "/lab"
    address = f"http://127.0.0.1:{port}{page}?token={token}"
    environ = {**os.environ, "JUPYTER_TOKEN": token}
    if root:                            # kernels import the checkout's package, whatever folder they start in
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    line = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={work}", f"--ServerApp.port={port}",
            "--ServerApp.port_retries=0", "--ServerApp.answer_yes=True", "--ServerApp.ip=127.0.0.1", "--no-browser",
            "--log-level=WARN", "--LabApp.log_level=WARN",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.news_url="]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        line.append("--allow-root")
    print("  starting JupyterLab ...", flush=True)
    with subprocess.Popen(line, env=environ) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        try:
            if not _answers(server, port):
                print("JupyterLab did not start; what it said is above. Another --port may help.", file=sys.stderr)
                server.terminate()
                return server.wait() or 1
            opened = not no_browser and has_browser() and webbrowser.open(address)
            print(f"\n  The workbench is open{' in your browser' if opened else ''}:\n\n      {address}\n\n"
                  f"  Your copies of the lessons are in {work}. Ctrl-C here stops it.\n", flush=True)
            server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()
    return 0


def _lessons() -> Path:
    try:
        return paths.notebooks_dir()
    except FileNotFoundError as error:
        raise ValueError(str(error)) from None


def has_browser() -> bool:
    """Whether there is a graphical browser to open."""
    if sys.platform.startswith("linux") and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def free_port(first: int = 8888) -> int:
    """The first port from `first` on that nobody listens on."""
    for port in range(first, first + 100):
        if is_free(port):
            return port
    raise ValueError(f"no free port from {first} to {first + 99}: name one with --port")


def is_free(port: int) -> bool:
    """Whether nobody listens on this port of this machine, and we may."""
    with socket.socket() as probe:
        if os.name != "nt":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: a number from 1 to 65535")
    return int(text)


def _answers(server: subprocess.Popen[bytes], port: int, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api", timeout=2):
                return True
        except urllib.error.HTTPError:
            return True
        except OSError:
            time.sleep(0.2)
    return False


def _trust(work: Path, names: list[str]) -> None:
    """Sign fresh copies, so that JupyterLab shows their stored outputs (the lessons come from this repository)."""
    if not names:
        return
    import nbformat
    from nbformat.sign import NotebookNotary
    notary = NotebookNotary()
    for name in names:
        notary.sign(nbformat.read(work / name, as_version=4))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _origins(work: Path) -> dict[str, str]:
    try:
        return dict(json.loads((work / ORIGINS).read_text("utf-8")))
    except (OSError, ValueError):
        return {}


def _write_origins(work: Path, origins: dict[str, str]) -> None:
    work.mkdir(parents=True, exist_ok=True)
    (work / ORIGINS).write_text(json.dumps(origins, indent=1, sort_keys=True), "utf-8")
