"""All routes of both models against the shipped traces, and the judge: each field, altered, fails by name."""
import numpy as np
import pytest

from tests.parity import routes
from workbench.paths import models_dir


def file_of(name):
    return str(models_dir() / f"{name}-f16.gguf")


@pytest.mark.parametrize(("name", "layers"), [("tiny-mixtral", 6), ("tiny-deepseek", 4)])
def test_held_out_text_goes_to_the_same_experts(name, layers, capsys):
    assert routes.main([file_of(name), str(models_dir() / f"traces/{name}_trace.npz")]) == 0
    assert f"{layers} passed, 0 failed" in capsys.readouterr().out


def one_sequence(tmp_path, change, s=40):
    trace = dict(np.load(models_dir() / "traces/tiny-deepseek_trace.npz"))
    part = {k: trace[k][s : s + 1].copy() for k in ("tokens", "domain")} | {k: trace[k][:, s : s + 1].copy() for k in ("experts", "probs")}
    part |= {"moe_layers": trace["moe_layers"].copy(), "domain_names": trace["domain_names"]}
    change(part)
    np.savez(tmp_path / "one.npz", **part)
    return [file_of("tiny-deepseek"), str(tmp_path / "one.npz")]


@pytest.mark.parametrize(("says", "change"), [
    ("layer 2: experts", lambda t: t["experts"].__setitem__((1, 0, 9, 0), (t["experts"][1, 0, 9].max() + 1) % 16)),
    ("layer 3: probs", lambda t: t["probs"].__setitem__((2, 0, 9, 0), t["probs"][2, 0, 9, 0] + 0.01)),
    ("experts (of tokens)", lambda t: t["tokens"].__setitem__((0, 9), 1000)),
    ("moe_layers: layer 4 instead of 5", lambda t: t["moe_layers"].__setitem__(3, 5)),
])
def test_one_altered_value_fails_and_is_named(says, change, tmp_path, capsys):
    assert routes.main(one_sequence(tmp_path, change)) == 1
    assert says in capsys.readouterr().out


def test_an_unaltered_sequence_passes(tmp_path, capsys):
    assert routes.main(one_sequence(tmp_path, lambda t: None)) == 0
    assert "4 passed, 0 failed" in capsys.readouterr().out


def test_bad_input_is_status_2(tmp_path, capsys):
    good = str(models_dir() / "traces/tiny-deepseek_trace.npz")
    np.savez(tmp_path / "other.npz", a=1)
    for args in ([], [file_of("tiny-mixtral"), good], [file_of("tiny-deepseek"), str(tmp_path / "other.npz")], ["none.gguf", good],
                 one_sequence(tmp_path, lambda t: t["tokens"].__setitem__((0, 1), 60000))):
        assert routes.main(args) == 2
        assert capsys.readouterr().err.startswith("routes: ")
