"""The README keeps its promises: its program runs, its pictures and commands exist."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np

from workbench import models
from workbench.expertflow import sources
from workbench.expertflow.costs import costs
from workbench.expertflow.observe import record
from workbench.expertflow.predictors import GateAhead
from workbench.expertflow.replay import forecast_of
from workbench.expertflow.scoring import top
from workbench.expertflow.timing import simulate

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


def test_the_way_to_decode_that_it_names_is_the_quickest():
    """With Mixtral's sizes and half of the experts in one pool, as `run` has it: no fitted predictor, at the start nothing in the slots."""
    assert "half its experts on an RTX 3090" in README and "`--predictor gate --fetch 1 --host-below auto --no-mmap`" in README
    c, trace = costs("Mixtral-8x7B", "rtx3090-pcie4"), sources.load("tiny-mixtral").trace
    with models.load("tiny-mixtral-f16") as model:
        seen = record(model, trace.select(trace.sequences % 16 == 12))
    half = trace.n_layers * trace.n_expert // 2

    def ms(policy, host_below, forecast=None):
        return simulate(seen.routes, c, policy, half, scope="global", forecast=forecast, host_below=host_below,
                        thinking=c.look_ahead if forecast else 0).per_token  # fmt: skip

    times = {("gate", window, fetch, host): ms("predicted", host, forecast_of(GateAhead(window), seen, top(fetch)))
             for window in (1, 2) for fetch in (1, 2, 4) for host in (0, "auto")}  # fmt: skip
    times |= {(policy, host): ms(policy, host) for policy in ("lru", "lfu", "lfu_in_cache", "lru_frequency") for host in (0, "auto")}
    assert min(times, key=times.get) == ("gate", 1, 1, "auto")
