"""Widgets from the Python side: what they store, how they behave while something runs, and that nothing comes from elsewhere."""

import re
import subprocess
import sys
import threading
import time

import pytest

import workbench.widgets as widgets
from workbench import views
from workbench.errors import ParameterError
from workbench.lessons import open_lesson
from workbench.paths import PACKAGE
from workbench.widgets.base import script

SECONDS = 20


def token(text, i, given=False):
    return {"text": text, "given": given, "experts": [[i % 8, (i + 3) % 8], [(i + 1) % 8, 0]], "weights": [[0.6, 0.4], [0.7, 0.3]]}


def source(prompt, n):
    for i, word in enumerate(prompt.split()):
        yield token(word, i, given=True)
    for i in range(n):
        yield token(f"<b>{i}\n", i)


def wait_for(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def test_player_runs_its_prompt_and_stores_it():
    player = widgets.PromptPlayer(source, [3, 4], "one two", n_tokens=3, layer=1)
    assert [t["text"] for t in player.record["tokens"]] == ["one", "two", "<b>0\n", "<b>1\n", "<b>2\n"]
    assert player.record["layers"] == [3, 4] and not player.running and player.message == "done: 3 new tokens"
    assert "Layer 4: the first 5 of 5 tokens" in repr(player) and " at 0x" not in repr(player)
    page = player.stored_html()
    assert "&lt;b&gt;0⏎" in page and "<b>0" not in page and "<sub>1</sub>" in page


def test_stored_form_stands_beside_the_live_one():
    data, _ = widgets.PromptPlayer(source, [0, 1], "one")._repr_mimebundle_()
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}


def test_stop_ends_a_run_and_another_can_follow():
    gate, taken = threading.Event(), []

    def endless(prompt, n):
        for i in range(10_000):
            taken.append(i)
            yield token("x", i)
            gate.wait(0.001)

    player = widgets.PromptPlayer(endless, [0, 1])
    player._asked(player, {"do": "generate"}, [])              # what the button sends
    thread = player.thread
    wait_for(lambda: len(taken) > 3)
    player._asked(player, {"do": "generate"}, [])              # pressed twice: one run
    assert player.thread is thread
    player._asked(player, {"do": "stop"}, [])
    thread.join(SECONDS)
    assert not player.running and player.message == "stopped" and 0 < len(player.record["tokens"]) < 10_000
    player._source = source
    player.prompt = "again"
    player.play(wait=True)
    assert player.record["tokens"][0]["text"] == "again"


def test_an_error_while_generating_is_shown():
    def broken(prompt, n):
        yield token("x", 0)
        raise ValueError("no such\x07 thing")

    player = widgets.PromptPlayer(broken, [0, 1], "p")
    assert player.message == "ValueError: no such\\x07 thing" and not player.running and len(player.record["tokens"]) == 1


@pytest.mark.parametrize("message", [None, "stop", {"do": "rm"}, {"do": ["stop"]}, {}])
def test_unknown_messages_are_ignored(message):
    player = widgets.PromptPlayer(source, [0, 1])
    player._asked(player, message, [])
    assert player.thread is None and not player.running


def test_player_says_why_there_are_fewer_tokens_than_were_asked_for():
    player = widgets.PromptPlayer(open_lesson("00").state.token_source(), range(6), "x" * 3000, n_tokens=9)
    assert player.message == "done: 0 new tokens; the context of 256 tokens is full" and len(player.record["tokens"]) == 256


def test_records_of_a_running_player_are_never_changed_afterwards():
    seen = []
    player = widgets.PromptPlayer(source, [0, 1])
    player.observe(lambda change: seen.append((change["new"], len(change["new"]["tokens"]))), names=["record"])
    player.prompt = "a b c"
    player.play(wait=True)
    assert seen and all(len(record["tokens"]) == n for record, n in seen)


def test_slider_shows_what_it_drives():
    calls = []

    def run(value):
        calls.append(value)
        return views.table(["value"], [[value]])

    slider = widgets.Range(value=1, max=3, label="<knob>", names=["a", "b", "c", "d"]).drive(run)
    assert "<knob>: b" in repr(slider) and "&lt;knob&gt;" in slider.stored_html()
    slider.value = 3
    assert calls == [1, 3] and "<td style=\"text-align:right\">3</td>" in slider.below and repr(slider).startswith("<knob>: d")


def test_stepper_refuses_an_empty_trace():
    with pytest.raises(ParameterError):
        widgets.Stepper({"title": "t", "lanes": [], "columns": [], "table": "", "steps": []})


@pytest.mark.parametrize("file", sorted((PACKAGE / "widgets").glob("*.js")), ids=lambda f: f.name)
def test_scripts_fetch_nothing_and_write_no_markup(file):
    text = file.read_text("utf-8")
    assert not re.search(r"\bfetch\(|XMLHttpRequest|\bimport\b|https?://(?!www\.w3\.org/)|\beval\(", text)
    assert text.count("innerHTML") <= (file.name == "controls.js")      # there: a view made in Python, which escapes
    if file.name in ("controls.js", "stepper.js", "prompt_player.js"):
        assert "stopPropagation" in text or "keepKeys(el)" in text      # else JupyterLab takes the arrow keys


def test_scripts_parse():
    """The modules are valid JavaScript, where a node program is at hand to say so."""
    import shutil
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node program; the browser tests run the scripts")
    for name in ("controls", "stepper", "prompt_player"):
        subprocess.run([node, "--input-type=module", "--check"], input=script(name), text=True, check=True, capture_output=True)


SUBSHELL = """
import threading, time
from workbench import views, widgets
names = []
def run(value):
    names.append(threading.current_thread().name)
    figure = views.new_figure(2, 1)
    figure.add_subplot().plot([value, 1])
    return views.picture(figure, "a line", "caption")
slider = widgets.Range(value=1, max=9).drive(run)
print(slider.comm.comm_id)
"""


def test_callbacks_run_on_a_subshell_while_a_cell_runs():
    """A message may reach a widget on another thread, in the middle of a cell; nbval never does that, so this test does.

    ipykernel 7.4 sends messages back to the shell that a widget last spoke from, hence the slider is made on a subshell.
    """
    from jupyter_client.manager import start_new_kernel
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(PACKAGE.parent), env=_environment())
    try:
        request = client.session.msg("create_subshell_request")
        client.control_channel.send(request)
        subshell = client.get_control_msg(timeout=SECONDS)["content"]["subshell_id"]
        code = {"code": SUBSHELL, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
        comm = text_of(client, send(client, "execute_request", code, subshell)).split()[-1]
        waiting = client.execute("end = time.monotonic() + 15\nwhile len(names) < 2 and time.monotonic() < end: time.sleep(0.01)\nprint(names[1:])")
        send(client, "comm_msg", {"comm_id": comm, "data": {"method": "update", "state": {"value": 7}, "buffer_paths": []}}, subshell)
        said = text_of(client, waiting)
        assert said.startswith("['subshell-"), said            # it ran while the cell was running, on the subshell's thread
        assert text_of(client, client.execute("print(slider.below[-30:], slider.value)")).endswith("</figure> 7")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def send(client, kind, content, subshell):
    message = client.session.msg(kind, content)
    message["header"]["subshell_id"] = subshell
    client.shell_channel.send(message)
    return message["header"]["msg_id"]


def _environment():
    import os
    return {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHON": sys.executable}


def text_of(client, message_id):
    text = ""
    while True:
        message = client.get_iopub_msg(timeout=SECONDS)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        content = message["content"]
        text += content.get("text", "") + "\n".join(content.get("traceback", []))
        if content.get("execution_state") == "idle":
            return text.strip()
