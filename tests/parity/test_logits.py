"""All shipped models against recordings of llama.cpp, and the judge: each field, altered in one value, fails by name."""
import numpy as np
import pytest

from tests.parity import logits
from workbench.paths import models_dir

MODELS = ["tiny-mixtral-f16", "tiny-mixtral-q8_0", "tiny-mixtral-q4_0", "tiny-deepseek-f16"]


def file_of(name):
    return str(models_dir() / f"{name}.gguf")


@pytest.mark.parametrize("name", MODELS)
def test_logits_experts_and_greedy_tokens_are_llama_cpps(name, data, capsys):
    oracle = data / "oracle"
    assert logits.main([file_of(name), str(oracle / f"{name}.dequant-f32.npz"), str(oracle / f"{name}.npz")]) == 0
    assert "13 passed, 0 failed" in capsys.readouterr().out


def one_prompt(data, tmp_path, kind, change, prompt="p02"):
    """A copy of one prompt with one field changed."""
    fields = {k: v.copy() for k, v in np.load(data / f"oracle/tiny-mixtral-f16{kind}.npz").items() if k.startswith(prompt)}
    change({k.split("_", 1)[1]: v for k, v in fields.items()})
    path = tmp_path / f"copy{kind}.npz"
    np.savez(path, **fields)
    return [file_of("tiny-mixtral-f16"), str(path)]


def swapped_experts(p):
    p["experts"][3, 5] = p["experts"][3, 5][::-1]


ALTERED = {
    "tokens": lambda p: p["tokens"].__setitem__(3, p["tokens"][3] + 1),
    "logits": lambda p: p["logits"].__setitem__((7, 100), p["logits"][7, 100] + 2e-4),
    "experts": lambda p: p["experts"].__setitem__((2, 4, 0), (p["experts"][2, 4, 0] + 1) % 8),
    "experts (order)": swapped_experts,
    "greedy": lambda p: p["greedy"].__setitem__(4, p["greedy"][4] ^ 1),
    "greedy_margin": lambda p: p["greedy_margin"].__setitem__(2, p["greedy_margin"][2] + 0.01),
    "logits (NaN)": lambda p: p["logits"].__setitem__((0, 0), np.nan),
}  # fmt: skip


@pytest.mark.parametrize("field", ALTERED)
def test_one_altered_value_fails_and_is_named(field, data, tmp_path, capsys):
    assert logits.main(one_prompt(data, tmp_path, ".dequant-f32", ALTERED[field])) == 1
    out = capsys.readouterr().out
    assert "FAIL copy.dequant-f32.npz p02: " in out and field.split()[0] in out and "0 passed, 1 failed" in out


def test_an_unaltered_copy_passes(data, tmp_path, capsys):
    assert logits.main(one_prompt(data, tmp_path, ".dequant-f32", lambda p: None)) == 0
    assert logits.main(one_prompt(data, tmp_path, "", lambda p: None)) == 0



@pytest.mark.parametrize(("says", "change"), [
    ("logits (of tokens) at position 7", lambda p: p["logits"].__setitem__((7, 100), p["logits"][7, 100] + 1)),
    ("logits (of tokens): 0.0", lambda p: p["logits"].__iadd__(0.011)),
    ("experts: ", lambda p: p["experts"].__setitem__((0, slice(1, 9)), p["experts"][0, 1:9] ^ 1)),
])
def test_alterations_beyond_the_bounds_of_rounding_fail(says, change, data, tmp_path, capsys):
    assert logits.main(one_prompt(data, tmp_path, "", change)) == 1
    assert says in capsys.readouterr().out


def test_bad_input_is_status_2(data, tmp_path, capsys):
    good = str(data / "oracle/tiny-mixtral-f16.npz")
    text = tmp_path / "text.npz"
    text.write_text("no archive")
    np.savez(tmp_path / "empty.npz")
    np.savez(tmp_path / "short.npz", p00_tokens=np.arange(3))
    wrong = one_prompt(data, tmp_path, "", lambda p: p["tokens"].__setitem__(0, 5000))
    for args in ([], [file_of(MODELS[0])], [file_of(MODELS[0]), str(text)], [file_of(MODELS[0]), str(tmp_path / "empty.npz")], wrong,
                 [file_of(MODELS[0]), str(tmp_path / "short.npz")], [file_of("tiny-deepseek-f16"), good], ["none.gguf", good]):  # fmt: skip
        assert logits.main(args) == 2
        assert capsys.readouterr().err.startswith("logits: ")


def test_a_damaged_file_is_status_2(data, tmp_path, capsys):
    whole = (data / "oracle" / "tiny-mixtral-q4_0.npz").read_bytes()
    for damaged in (whole[:3000], whole[:2000] + bytes(500) + whole[2500:]):
        (tmp_path / "damaged.npz").write_bytes(damaged)
        assert logits.main(["tiny-mixtral-q4_0", str(tmp_path / "damaged.npz")]) == 2
        assert "not a readable .npz file" in capsys.readouterr().err
