"""`python -m workbench lab`, really started: the page answers, a kernel imports the checkout, Ctrl-C ends it all."""
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from workbench import paths
from workbench.cli import lab

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="Ctrl-C cannot be sent to one process here")]
ROOT = paths.checkout()


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lessons")
    cell = {"cell_type": "code", "id": "a", "execution_count": None, "metadata": {}, "outputs": [], "source": "1"}
    book = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (folder / "00_start.ipynb").write_text(json.dumps(book))
    return folder


@pytest.fixture(scope="module")
def server(lessons, tmp_path_factory):
    """(process, base address, token, first lines printed)"""
    work = tmp_path_factory.mktemp("learner") / "work"
    code = ("import pathlib, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from workbench import paths\n"
            f"paths.notebooks_dir = lambda: pathlib.Path({str(lessons)!r})\n"
            f"from workbench.cli import main; sys.exit(main(['lab', '--here', '--no-browser', '--work', {str(work)!r},"
            f" '--port', '{lab.free_port(18888 + os.getpid() % 1000)}']))")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "JUPYTER_RUNTIME_DIR": str(work.parent / "run"),
               "JUPYTER_DATA_DIR": str(work.parent / "data"), "JUPYTER_CONFIG_DIR": str(work.parent / "config")}
    process = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, cwd=work.parent, env=environ)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    said = ""
    while not (address := re.search(r"(http://127\.0\.0\.1:\d+)(/lab/tree/\S+)\?token=(\w+)", said)):
        line = process.stdout.readline()
        assert line, said
        said += line
    yield process, *address.groups(), said
    watchdog.cancel()
    if process.poll() is None:
        process.terminate()
        process.wait(20)
    process.stdout.close()


def ask(server, path, body=None, token=True):
    _, base, _, key, _ = server
    request = urllib.request.Request(base + path, data=body, headers={"Authorization": f"token {key}"} if token else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


def test_it_opens_lesson_00_in_the_learners_copy(server):
    assert server[2] == "/lab/tree/00_start.ipynb"
    assert [f["name"] for f in json.loads(ask(server, "/api/contents"))["content"]] == ["00_start.ipynb"]
    assert "jupyter-config-data" in ask(server, server[2])


def test_it_wants_the_token(server):
    with pytest.raises(urllib.error.HTTPError, match="403"):
        ask(server, "/api/contents", token=False).close()


def test_it_asks_nobody_for_news(server):
    assert json.loads(ask(server, "/lab/api/news"))["news"] == []
    assert json.loads(ask(server, "/lab/api/update"))["notification"] is None


def test_a_kernel_started_there_imports_the_workbench(server, tmp_path):
    kernel = json.loads(ask(server, "/api/kernels", b"{}"))["id"]
    from jupyter_client import BlockingKernelClient
    [file] = (p for p in [*tmp_path.parent.parent.rglob(f"kernel-{kernel}.json")])
    client = BlockingKernelClient(connection_file=str(file))
    client.load_connection_file()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        out = []
        client.execute_interactive("import workbench; print(workbench.__file__)", timeout=30, output_hook=out.append)
    finally:
        client.stop_channels()
    text = "".join(m["content"].get("text", "") for m in out if m["msg_type"] == "stream")
    assert text.strip() == str(ROOT / "workbench" / "__init__.py"), out


def test_control_c_ends_it(server):
    process = server[0]
    process.send_signal(signal.SIGINT)
    process.wait(20)
    time.sleep(0.2)
    with pytest.raises(urllib.error.URLError):
        ask(server, "/api")
