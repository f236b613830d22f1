"""The set-up: what it announces, when it does nothing, what it leaves out; without a network and without installing."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import setup
from workbench import paths

ROOT = paths.checkout()


def test_plan_says_before_it_starts_what_comes():
    text = setup.plan(ROOT, "main", cuda=False)
    sizes = json.loads((ROOT / "locks" / "sizes.json").read_text("utf-8"))
    assert f"about {sizes['main']['download_mb']} MB" in text and f"about {sizes['main']['disk_mb']} MB" in text
    assert "locks/main.txt" in text and "needs no network" in text and "CuPy" not in text


@pytest.mark.skipif(not setup.cuda_wheel_exists(), reason="no CuPy wheel for this platform")
def test_plan_with_cuda_is_larger_and_names_the_way_out():
    def download(text):
        return int(re.search(r"download +about (\d+)", text)[1])
    with_cuda = setup.plan(ROOT, "main", cuda=True)
    assert "--without-cuda" in with_cuda
    assert download(with_cuda) > download(setup.plan(ROOT, "main", cuda=False)) + 100


def test_without_cuda_drops_cupy_and_what_only_cupy_needs():
    text = (ROOT / "locks" / "main.txt").read_text("utf-8")
    names = {m[0] for line in setup.selected(text, cuda=False) if (m := re.match(r"[a-z0-9._-]+(?===)", line))}
    everything = {m[0] for line in text.splitlines() if (m := re.match(r"[a-z0-9._-]+(?===)", line))}
    assert everything - names == {"cupy-cuda12x", "cuda-pathfinder"}
    assert setup.selected(text, cuda=True) == text.splitlines()


def environment(tmp_path, **stamp) -> setup.Environment:
    env = setup.Environment(tmp_path / ".venv")
    env.python.parent.mkdir(parents=True)
    env.python.write_text("")
    (env.folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\ninclude-system-site-packages = true\n")
    env.stamp.write_text(json.dumps(setup.stamp_for(ROOT, "test", True) | stamp))
    return env


@pytest.mark.parametrize("lock, current", [("main", True), ("test", True), ("dev", False)])
def test_a_larger_lock_serves_a_smaller_wish(tmp_path, lock, current):
    assert environment(tmp_path).current(ROOT, lock, True) is current


@pytest.mark.parametrize("change", [{"sha256": "0"}, {"python": "3.10"}, {"cuda": False}, {"root": "elsewhere"}])
def test_any_change_asks_for_a_new_set_up(tmp_path, change):
    assert not environment(tmp_path, **change).current(ROOT, "test", True)


def test_a_broken_or_missing_stamp_is_no_stamp(tmp_path):
    env = environment(tmp_path)
    env.stamp.write_text("{")
    assert env.installed() == {} and not env.current(ROOT, "main", True)
    env.stamp.unlink()
    assert not env.current(ROOT, "main", True)


def test_an_environment_without_its_configuration_is_none(tmp_path):
    """Its interpreter would be the Python that made it, and pip would change that one."""
    env = environment(tmp_path)
    env.python.unlink()
    env.python.symlink_to(sys.executable)
    assert setup._venv_python(env)
    (env.folder / "pyvenv.cfg").unlink()
    assert env.installed() == {} and setup._venv_python(env) is None
    with pytest.raises(setup.SetupError, match="virtualenv"):
        setup._pip(env, tmp_path / "lock.txt")


@pytest.mark.parametrize("command", ["clean", "setup", "lock", "doctor", "lab", "size", "lessons"])
def test_unknown_arguments_and_pleas_for_help_do_nothing_else(command):
    for argument, status in (("--bogus", 2), ("--help", 0)):
        code = f"import sys; from workbench.cli import main; sys.exit(main({[command, argument]!r}))"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", cwd=ROOT,
                             env={**os.environ, "WORKBENCH_HERE": "1"})
        assert run.returncode == status and f"usage: python -m workbench {command}" in run.stdout + run.stderr, run.stderr
        assert "Traceback" not in run.stderr


def test_without_cuda_is_remembered(tmp_path, monkeypatch):
    env = environment(tmp_path, cuda=False)
    monkeypatch.setattr(setup, "checkout_environment", lambda root: env)
    started = []
    monkeypatch.setattr(setup, "start_again", lambda env, command, argv: started.append(argv))
    monkeypatch.setattr(setup, "install", lambda *a: pytest.fail("nothing changed, so nothing is to be installed"))
    monkeypatch.delenv("WORKBENCH_HERE", raising=False)
    setup.ensure("main", "lab", ["--port", "9000"])
    assert started == [["--port", "9000"]]


def test_here_uses_the_running_python(monkeypatch):
    monkeypatch.setattr(setup, "install", lambda *a: pytest.fail("--here must install nothing"))
    assert setup.ensure("main", "lab", ["--here", "--no-browser"]) == ["--no-browser"]


def test_a_python_without_venv_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "_has", lambda module: module != "ensurepip")
    with pytest.raises(setup.SetupError, match="apt-get install python3-venv"):
        setup.create(setup.Environment(tmp_path / ".venv"))


def test_pip_failing_says_why_and_leaves_no_stamp(tmp_path):
    env = environment(tmp_path)
    env.python.unlink()
    env.python.symlink_to(sys.executable)
    env.stamp.unlink()
    wanted = tmp_path / "lock.txt"
    wanted.write_text("numpy==0.0.0.dev1 --hash=sha256:" + "0" * 64 + "\n--no-index\n")
    with pytest.raises(setup.SetupError, match="No network"):
        setup._pip(env, wanted)
    assert not env.stamp.exists()


@pytest.mark.parametrize("command", [["--help"], ["size"], ["lab", "--help"], ["nonsense"], ["doctor", "--here"]])
def test_commands_start_on_a_bare_python(command):
    """-I -S: no site-packages at all, as on a machine where nothing was installed."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from workbench.cli import main; sys.exit(main({command!r}))"
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == {"nonsense": 2, "doctor": 1}.get(command[0], 0), run.stderr
    assert "Traceback" not in run.stderr
    assert Path(run.stdout.split()[0] if run.stdout else ".")


def test_makefile_and_table_name_the_same_commands():
    from workbench.cli import COMMANDS
    listed = re.search(r"^COMMANDS := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.M)[1].split()
    assert set(listed) <= set(COMMANDS) and {"lab", "test", "size", "doctor"} <= set(listed)
