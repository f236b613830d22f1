"""The record of routes: what it holds, and that it survives a file."""
import numpy as np
import pytest

from workbench.errors import FileFormatError, ShapeError
from workbench.moe import Router, RouteRecorder, RouteTrace
from workbench.paths import models_dir


def made(n=6, layers=(1, 2), k=2, n_expert=4, **more):
    rng = np.random.default_rng(0)
    experts = np.stack([[rng.permutation(n_expert)[:k] for _ in range(n)] for _ in layers]).astype(np.uint8)
    weights = rng.random(experts.shape, np.float32)
    weights /= weights.sum(-1, keepdims=True)
    i = np.arange(n, dtype=np.int32)
    return RouteTrace(experts, weights, np.array(layers), i * 10, i % 3, i // 3, n_expert, **more)


@pytest.mark.parametrize("more", [{}, {"domains": np.array([0, 0, 0, 1, 1, 1]), "domain_names": ("c", "maths")}])
def test_a_stored_record_is_the_same(tmp_path, more):
    trace = made(**more)
    trace.save(tmp_path / "r.npz")
    back = RouteTrace.load(tmp_path / "r.npz")
    for field in ("experts", "weights", "layers", "tokens", "positions", "sequences", "n_expert", "domain_names"):
        np.testing.assert_array_equal(getattr(back, field), getattr(trace, field))
    assert (back.domains is None) == (not more)


def test_shipped_traces_are_read():
    trace = RouteTrace.load(models_dir() / "traces/tiny-deepseek_trace.npz")
    assert (trace.n_layers, trace.n_tokens, trace.k, trace.n_expert) == (4, 24576, 4, 16)
    assert trace.layers.tolist() == [1, 2, 3, 4] and trace.domain_names[5] == "numeric"
    assert (trace.tokens[trace.positions == 0] == 0).all() and trace.sequences[-1] == 95 and trace.domains[-1] == 5
    counts = trace.counts()
    assert counts.shape == (4, 16) and (counts.sum(1) == 24576 * 4).all()
    shares = counts / counts.mean(1, keepdims=True)
    np.testing.assert_allclose(shares.max(1), [1.27979, 1.20329, 1.2627, 1.32422], atol=1e-4)  # the model card's table


def test_counts_and_selection():
    trace = made()
    assert all(trace.counts()[i, e] == (trace.experts[i] == e).sum() for i in range(2) for e in range(4))
    part = trace.select(trace.sequences == 1)
    assert part.n_tokens == 3 and part.tokens.tolist() == [30, 40, 50]


def test_weights_must_sum_to_what_the_router_declares():
    trace = made()
    trace.require_weight_sum(Router(4, 2))
    trace.require_weight_sum(Router(4, 2, normalise=False))
    trace.weights[1, 3, 0] += 0.01
    with pytest.raises(ShapeError, match="0.01"):
        trace.require_weight_sum(Router(4, 2))
    trace.weights[1, 3, 0] = np.nan
    with pytest.raises(ShapeError):
        trace.require_weight_sum(Router(4, 2))


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ShapeError, match="expert 3"):
        made().__class__(**{**vars(made()), "n_expert": 3})
    with pytest.raises(ShapeError, match="both"):
        made().__class__(**{**vars(made()), "tokens": np.arange(5)})
    (tmp_path / "text.npz").write_text("no archive")
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    for name in ("text.npz", "other.npz", "missing.npz"):
        with pytest.raises(FileFormatError, match=name):
            RouteTrace.load(tmp_path / name)


def test_an_empty_record():
    trace = RouteRecorder((0, 1), Router(8, 2)).trace()
    assert (trace.n_layers, trace.n_tokens, trace.k) == (2, 0, 2) and trace.counts().sum() == 0
    trace.require_weight_sum(Router(8, 2))


@pytest.mark.parametrize("change", [{"experts": [[[-1, 0]]]}, {"experts": [[[0.5, 1]]]}, {"experts": [["a"]]}, {"positions": [0, 1]},
                                    {"n_expert": [1, 2]}, {"unknown": [1]}])  # fmt: skip
def test_files_that_lie_are_one_clear_error(tmp_path, change):
    one = RouteTrace(np.zeros((1, 1, 2), np.uint8), np.ones((1, 1, 2)), np.array([0]), *np.zeros((3, 1), int), n_expert=4)
    assert repr(one) == "<RouteTrace of 1 tokens in 1 layers, 2 of 4 experts each>"
    file = tmp_path / "r.npz"
    one.save(file)
    with np.load(file) as data:
        np.savez(file, **{**data, **{k: np.array(v) for k, v in change.items()}})
    with pytest.raises(FileFormatError, match="is not a route trace"):
        RouteTrace.load(file)


def test_damaged_files_are_one_clear_error(tmp_path):
    file = tmp_path / "r.npz"
    RouteTrace(np.zeros((1, 99, 2), np.uint8), np.ones((1, 99, 2)), np.array([0]), *np.zeros((3, 99), int), n_expert=4).save(file)
    whole = file.read_bytes()
    rng = np.random.default_rng(0)
    for i in range(60):
        raw = bytearray(whole[: rng.integers(len(whole))] if i % 3 == 0 else whole)
        for at in rng.integers(0, max(len(raw), 1), 3):
            raw[at : at + 1] = rng.bytes(1)
        file.write_bytes(raw)
        try:
            RouteTrace.load(file)
        except FileFormatError:
            pass
