"""The README keeps its promises: its program runs, its pictures and commands exist."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_program_runs_and_is_right():
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names, said = {}, io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(program, names)
    hidden = 0.1 * 8
    expected = 0.01 * 32 * hidden / (1 + np.exp(-hidden))
    assert np.allclose(names["y"].numpy(), expected, rtol=1e-6)
    assert said.getvalue().count("MUL_MAT") == 2


def test_its_links_and_pictures_exist():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets and all((ROOT / t).exists() for t in targets if "://" not in t)


def test_the_folders_its_commands_name_exist():
    for path in re.findall(r"(?:tests/data|models)/[\w./*-]+", README):
        assert list(ROOT.glob(path)), path


def test_the_first_screen_has_a_picture_and_the_two_commands():
    first = README.split("## Build")[0]
    assert "make lab" in first and "make test" in first and "![" in first
