"""Published models by their numbers: the same answers as from a file with that header."""

import dataclasses

import pytest

from workbench.errors import ParameterError
from workbench.models import HParams
from workbench.models.described import DescribedFile
from workbench.models.fitting import fit
from workbench.models.planning import expert_bytes, plan_schedule
from workbench.moe.configs import model

MIXTRAL = HParams("llama", n_vocab=32000, n_ctx_train=32768, n_embd=4096, n_layer=32, n_head=32, n_head_kv=8, n_rot=128, n_ff=14336, rms_eps=1e-5,
                  rope_freq_base=1e6, n_expert=8, n_expert_used=2, n_ff_exp=14336, normalise=True)  # fmt: skip
GIB = 2**30


def test_it_has_the_published_parameters():
    file, shape = DescribedFile("Mixtral-8x7B", MIXTRAL), model("Mixtral-8x7B")
    assert sum(t.n_elements for t in file.tensors.values()) == shape.total
    experts, active = expert_bytes(file)
    assert experts == 32 * 8 * shape.bytes_per_expert("f16") and active == experts // 4
    assert file.hparam("block_count") == 32 and file.name == "Mixtral-8x7B" and "Mixtral-8x7B-f16.gguf" in repr(file)
    ends = [t.offset + t.nbytes for t in file.tensors.values()]
    assert all(b.offset >= a for a, b in zip(ends, list(file.tensors.values())[1:])) and ends[-1] <= file.storage.size


def test_it_takes_no_memory_and_is_left_open():
    file = DescribedFile("Mixtral-8x7B", MIXTRAL)
    for _ in range(2):
        found = fit(file, 24 * GIB, 128 * GIB, 25e9)
    assert found.model == "Mixtral-8x7B-f16.gguf" and found.fits == "split"
    assert "DOES NOT FIT" in fit(file, 24 * GIB, 64 * GIB, 25e9).verdict()


def test_a_file_with_the_same_header_gets_the_same_account(tmp_path):
    """Qwen3-30B-A3B: a header on disk, in a sparse file, against numbers alone."""
    from tests.models.headers import N_VOCAB, QWEN3_30B, qwen3

    n = QWEN3_30B
    hp = HParams("qwen3moe", n_vocab=N_VOCAB, n_ctx_train=n["context_length"], n_embd=2048, n_layer=48, n_head=32, n_head_kv=4, n_rot=128,
                 n_ff=n["feed_forward_length"], rms_eps=1e-6, n_expert=128, n_expert_used=8, n_ff_exp=768, n_embd_head_k=128, n_embd_head_v=128,
                 normalise=True)  # fmt: skip
    ours, theirs = DescribedFile("qwen", hp, "q4_K"), qwen3(tmp_path / "qwen.gguf")
    a, b = (fit(f, 24 * GIB, 64 * GIB, 25e9) for f in (ours, theirs))
    assert (a.needs, a.checks, a.bounds, a.fits) == (b.needs, b.checks, b.bounds, b.fits)
    one, other = (plan_schedule(f, "rtx3090-pcie4,cpu", overrides={"_exps": "CPU"}, batch=8, context=256) for f in (ours, theirs))
    assert [p.ns for p in one.phases] == [p.ns for p in other.phases] and one.devices == other.devices


def test_what_needs_more_keys_is_refused():
    with pytest.raises(ParameterError, match="more keys"):
        DescribedFile("x", dataclasses.replace(MIXTRAL, expert_weights_scale=2.5))
