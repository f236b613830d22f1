"""`lab` makes copies for the learner and never writes over the learner's work."""
import json

import pytest

from workbench.cli import lab


@pytest.fixture
def lessons(tmp_path):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for name in ("00_start", "01_tensors", "10_pass_three"):
        (folder / f"{name}.ipynb").write_text(json.dumps({"cells": [], "name": name}))
    return folder


@pytest.fixture
def work(tmp_path):
    return tmp_path / "work"


def test_copies_what_is_not_there(lessons, work):
    assert lab.update(lessons, work) == ["00_start.ipynb", "01_tensors.ipynb", "10_pass_three.ipynb"]
    assert lab.update(lessons, work) == []


def test_a_changed_copy_is_never_overwritten(lessons, work, capsys):
    lab.update(lessons, work)
    (work / "00_start.ipynb").write_text("mine")
    lab.update(lessons, work)
    (lessons / "00_start.ipynb").write_text("a newer lesson")
    assert lab.update(lessons, work) == []
    assert (work / "00_start.ipynb").read_text() == "mine"
    assert "newer version" in capsys.readouterr().out


def test_a_copy_of_unknown_origin_counts_as_changed(lessons, work):
    work.mkdir()
    (work / "00_start.ipynb").write_text("from somewhere")
    assert "00_start.ipynb" not in lab.update(lessons, work)
    assert (work / "00_start.ipynb").read_text() == "from somewhere"


def test_an_untouched_copy_follows_the_lesson(lessons, work):
    lab.update(lessons, work)
    (lessons / "00_start.ipynb").write_text("a newer lesson")
    assert lab.update(lessons, work) == ["00_start.ipynb"]
    assert (work / "00_start.ipynb").read_text() == "a newer lesson"


def test_a_damaged_record_loses_nothing(lessons, work):
    lab.update(lessons, work)
    (work / lab.ORIGINS).write_text("{")
    (work / "00_start.ipynb").write_text("mine")
    (lessons / "01_tensors.ipynb").write_text("newer")
    assert lab.update(lessons, work) == []
    assert (work / "00_start.ipynb").read_text() == "mine"


def test_fresh_keeps_the_old_one_under_another_name(lessons, work):
    lab.update(lessons, work)
    for round_ in (1, 2):
        (work / "00_start.ipynb").write_text(f"mine {round_}")
        assert lab.fresh(lessons, work, "00") == ["00_start.ipynb"]
        assert (work / f"00_start.mine-{round_}.ipynb").read_text() == f"mine {round_}"
        assert (work / "00_start.ipynb").read_bytes() == (lessons / "00_start.ipynb").read_bytes()
    assert (work / "00_start.mine-1.ipynb").read_text() == "mine 1"


@pytest.mark.parametrize("name", ["0", "99", "nothing"])
def test_fresh_wants_exactly_one_lesson(lessons, work, name):
    with pytest.raises(ValueError, match="00_start, 01_tensors"):
        lab.fresh(lessons, work, name)


def test_free_port_is_free():
    import socket
    port = lab.free_port()
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", port))
        mine.listen()
        assert lab.free_port(port) != port
