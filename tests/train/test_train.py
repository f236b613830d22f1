"""The shipped training script: its loss falls, and its files mean the same to this library as to PyTorch.

Runs in an environment of its own (`.ci/run`, job train), which has torch but neither Jupyter nor matplotlib.
"""

import csv
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.train
torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[train]'")

from workbench import models  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "models" / "tools" / "train_tiny_moe.py"
STEPS, SEED = 20, 3
ORDERED = {"tiny-mixtral": "llama", "tiny-deepseek": "deepseek"}  # preset -> GGUF architecture


@pytest.fixture(scope="session")
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_tiny_moe", SCRIPT)
    sys.modules["train_tiny_moe"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def corpus(script, tmp_path_factory):
    """The samples of the six domains in the form the script reads: documents between NULs, a twelfth held out."""
    folder = tmp_path_factory.mktemp("corpus")
    for domain in script.DOMAINS:
        text = (ROOT / "models" / "samples" / f"{domain}.txt").read_text("utf-8")
        (folder / domain).mkdir()
        border = len(text) * 11 // 12
        for part, piece in (("train", text[:border]), ("val", text[border:])):
            (folder / domain / f"{part}.txt").write_text(piece.replace("\n\n", "\0"), "utf-8")
    return folder


def command(*args):
    """The script as a user runs it."""
    done = subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session", params=ORDERED)
def trained(request, corpus, tmp_path_factory):
    """A run of a few steps: (preset, folder with checkpoint, tokenizer and metrics)."""
    work = tmp_path_factory.mktemp(request.param)
    command("train", "--preset", request.param, "--corpus", corpus, "--work", work, "--metrics", work, "--steps", STEPS, "--warmup", 5,
            "--per-domain", 1, "--eval-every", STEPS, "--val-windows", 2, "--seed", SEED)
    return request.param, work


def test_the_loss_falls_in_every_domain(trained, script):
    preset, work = trained
    rows = list(csv.DictReader((work / f"{preset}_val.csv").open()))
    loss = {(int(r["step"]), r["domain"]): float(r["val_loss"]) for r in rows}
    assert set(loss) == {(step, d) for step in (0, STEPS) for d in script.DOMAINS}
    for domain in script.DOMAINS:
        assert 7 < loss[0, domain] < 9, domain  # untrained: about ln 2048 = 7.6
        assert loss[STEPS, domain] < 0.97 * loss[0, domain], domain
    summary = json.loads((work / f"{preset}_summary.json").read_text())
    assert summary["steps"] == STEPS and summary["tokens"] == STEPS * len(script.DOMAINS) * summary["config"]["ctx"]


@pytest.mark.parametrize("quant", ["f32", "f16"])
def test_its_gguf_gives_the_logits_of_pytorch(trained, script, tmp_path, quant):
    preset, work = trained
    file = tmp_path / f"{preset}-{quant}.gguf"
    command("export", "--preset", preset, "--work", work, "--quant", quant, "--out", file)
    theirs = script.load_model(script.PRESETS[preset], work / f"{preset}.safetensors", f16=quant == "f16")
    with models.load(file) as model:
        assert model.hparams.arch == ORDERED[preset]
        assert model.n_params == sum(p.numel() for p in theirs.parameters())
        tokens = model.tokenizer.encode("And God said unto Moses,\n    return x + 12;  床前明月光 0.125")
        assert tokens[0] == script.EOT and tokens[1:] == script.Tokenizer.from_file(str(work / "tokenizer.json")).encode(
            "And God said unto Moses,\n    return x + 12;  床前明月光 0.125").ids
        with torch.no_grad():
            wanted = theirs(torch.tensor([tokens]))[0][0].numpy()
        with models.Session(model) as session:
            got = np.stack([session.decode([token]) for token in tokens])
            assert np.abs(wanted).max() > 1  # a model of zeros would agree with anything
            assert np.abs(got - wanted).max() < 1e-4


def test_its_quantised_gguf_is_close(trained, script, tmp_path):
    preset, work = trained
    file = tmp_path / f"{preset}-q8_0.gguf"
    command("export", "--preset", preset, "--work", work, "--quant", "q8_0", "--out", file)
    theirs = script.load_model(script.PRESETS[preset], work / f"{preset}.safetensors", f16=False)
    tokens = list(range(0, 480, 16))
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens]))[0][0, -1].numpy()
    with models.load(file) as model, models.Session(model) as session:
        got = session.decode(tokens)
    assert 1e-6 < np.abs(got - wanted).max() < 0.1 * np.abs(wanted).max()
