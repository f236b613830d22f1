"""Sources of traces: the shipped ones, the synthetic ones beside the published figures, and the traps of strangers' files."""

import csv
import hashlib
import importlib.util
import json

import numpy as np
import pytest

from tests.expertflow.caching import random_trace
from workbench.errors import FileFormatError, ParameterError, ShapeError
from workbench.expertflow.replay import replay
from workbench.expertflow.sources import ALIKE, SHIPPED, load
from workbench.expertflow.synthetic import SYNTHETIC, synthetic
from workbench.paths import checkout, models_dir


def row(i, layer, ids, **more):
    return {"req_id": "a", "token_idx": i, "layer": layer, "topk_ids": ids, **more}


def written(path, rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n", "utf-8")
    return path


# ---- shipped

def test_shipped_traces():
    shapes = {name: load(name).trace for name in SHIPPED}
    assert {n: (t.n_tokens, t.n_layers, t.k, t.n_expert) for n, t in shapes.items()} == {
        "tiny-mixtral": (24576, 6, 2, 8), "tiny-deepseek": (24576, 4, 4, 16), "switch-base-8": (215, 6, 1, 8)}
    assert any("not normalised" in n for n in load("tiny-deepseek").notes)


def test_the_switch_trace_is_the_recorded_one():
    folder = models_dir() / "traces"
    about = json.loads((folder / "switch-base-8_capture.json").read_text("utf-8"))
    assert hashlib.sha256((folder / "switch-base-8.json").read_bytes()).hexdigest() == about["trace_sha256"]
    trace = load("switch-base-8").trace
    assert trace.layers.tolist() == [1, 3, 5, 7, 9, 11] and trace.domain_names == ("security", "electronics", "science", "software")
    assert np.bincount(trace.sequences).tolist() == [21, 26, 17, 28, 19, 16, 19, 21, 25, 23]
    assert trace.positions[:23].tolist() == [*range(21), 0, 1] and trace.domains[[0, 63, 64, 214]].tolist() == [0, 0, 1, 3]
    assert [trace.experts[:, 0, 0].tolist(), trace.experts[:, 1, 0].tolist()] == [[7, 0, 2, 1, 3, 7], [5, 2, 7, 3, 4, 1]]


# ---- synthetic

def measured(ids):
    spec = importlib.util.spec_from_file_location("fit_synthetic", checkout() / "models" / "tools" / "fit_synthetic.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool.measure(ids)


@pytest.fixture(scope="module")
def published():
    with (models_dir() / "traces" / "kimi-k3_layers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return np.array([[float(r[c]) for r in rows] for c in ("unique_experts", "top100_share", "usage_entropy_bits", "jaccard_prev_token")])


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_synthetic_traces_have_the_published_statistics(kind, published):
    """159 tokens, as in the paragraph that was measured: mean over the 92 layers, and layer by layer."""
    trace = synthetic(kind, 159, 92, seed=5)
    found = measured(trace.experts)
    used, top, entropy, jaccard = np.abs(found - published).mean(1)
    assert used < 15 and top < 0.04 and entropy < 0.1
    assert found[0].mean() == pytest.approx(published[0].mean(), rel=0.02) and found[2].mean() == pytest.approx(published[2].mean(), rel=0.01)
    if kind == "local-drifting":
        assert jaccard < 0.02 and np.corrcoef(found[3], published[3])[0, 1] > 0.9
        with (models_dir() / "traces" / "kimi-k3_unique.csv").open(newline="") as file:
            for r in csv.DictReader(file):  # this curve was not fitted
                n = int(r["prefix_tokens"])
                union = np.mean([len(np.unique(layer[:n])) for layer in trace.experts])
                assert union == pytest.approx(float(r["unique_mean"]), rel=0.12)
    else:
        assert found[3].mean() < 0.6 * published[3].mean()  # skew alone does not explain how much is used again


def test_favourites_drift_or_do_not():
    """A hot list made from the first part serves the rest of a static trace, and not that of a drifting one; LRU the other way round."""
    rates = {}
    for kind in SYNTHETIC:
        trace = synthetic(kind, 1200, 3)
        early, late = trace.select(slice(300)), trace.select(slice(600, None))
        rates[kind] = [replay(late, p, 128, residency="one_by_one", hot=early.counts()).hit_rate for p in ("static", "lru")]
    static, drifting = rates["skewed-static"], rates["local-drifting"]
    assert static[0] > static[1] + 0.05 and drifting[1] > drifting[0] + 0.2


def test_synthetic_settings():
    source = load("local-drifting:tokens=30,layers=2,experts=40,k=3,seed=7")
    trace = source.trace
    assert (trace.n_tokens, trace.n_layers, trace.n_expert, trace.k) == (30, 2, 40, 3) and "synthetic" in source.notes[0]
    assert (trace.experts == load(source.name).trace.experts).all() and (np.diff(trace.sets()) > 0).all()
    assert (trace.experts != load("local-drifting:tokens=30,layers=2,experts=40,k=3,seed=8").trace.experts).any()
    assert load("skewed-static:tokens=3,layers=1,experts=4,k=4").trace.sets().tolist() == [[[0, 1, 2, 3]] * 3]
    for bad in ("local-drifting:tokens=0", "local-drifting:tokens=-1", "skewed-static:k=900", "skewed-static:size=3", "skewed-static:layers"):
        with pytest.raises(ParameterError):
            load(bad)


# ---- own files

def test_arrays_are_read_as_tokens_layers_k(tmp_path):
    trace = random_trace(np.random.default_rng(0), 3, 50, 9, 2)
    ids = np.moveaxis(trace.experts, 0, 1)
    np.save(tmp_path / "a.npy", ids.astype(np.int16))
    np.savez(tmp_path / "b.npz", routed_experts=ids, weights=np.full(ids.shape, 0.5), n_expert=12)
    np.savez(tmp_path / "c.npz", ids)
    trace.save(tmp_path / "d.npz")
    (tmp_path / "e.json").write_text(json.dumps(ids.tolist()), "utf-8")
    a, b, c, d, e = (load(tmp_path / n) for n in ("a.npy", "b.npz", "c.npz", "d.npz", "e.json"))
    assert all((x.trace.experts == trace.experts).all() for x in (a, b, c, d, e))
    assert (a.trace.n_expert, b.trace.n_expert, d.trace.n_expert) == (9, 12, 9) and "highest id + 1" in a.notes[0] and b.notes == d.notes == ()
    assert np.isnan(a.trace.weights).all() and (b.trace.weights == 0.5).all()


def test_rows_per_token_or_per_token_and_layer(tmp_path):
    whole = [{"experts": [[1, 2], [0, 3]], "token": 7}, {"experts": [[2, 0], [3, 1]], "token": 9}, ""]
    split = [row(0, 4, [1, 2]), row(1, 4, [2, 0]), row(0, 6, [0, 3]), row(1, 6, [3, 1])]
    mixed = [split[0], split[2], split[1], split[3]]
    bare = [[[1, 2], [0, 3]], [[2, 0], [3, 1]]]
    traces = [load(written(tmp_path / f"{i}.jsonl", rows)).trace for i, rows in enumerate((whole, split, mixed, bare))]
    assert all(t.experts.tolist() == [[[1, 2], [2, 0]], [[0, 3], [3, 1]]] for t in traces)
    assert traces[0].tokens.tolist() == [7, 9] and traces[1].layers.tolist() == [4, 6] and traces[0].layers.tolist() == [0, 1]


def test_requests_make_sequences(tmp_path):
    rows = [{"req_id": r, "experts": [[i % 4, 4]]} for i, r in enumerate("abacab")]
    source = load(written(tmp_path / "r.jsonl", rows))
    assert source.trace.sequences.tolist() == [0, 1, 0, 2, 0, 1] and source.trace.positions.tolist() == [0, 0, 1, 0, 2, 1]
    assert any("shrinks from 3 sequences to 1" in n for n in source.notes)


def log(rng, batches, layers=2, n_expert=8, warm_up=()):
    """A serving log: one request id, layers one after another in a step, rows numbered within the step."""
    for n, alike in [*((n, True) for n in warm_up), *((n, False) for n in batches)]:
        steps = [[[1, 2] if alike else rng.permutation(n_expert)[:2].tolist() for _ in range(n)] for _ in range(layers)]
        yield from (row(i, layer, ids, topk_weights=[0.097, 0.052]) for layer, step in enumerate(steps) for i, ids in enumerate(step))


def test_the_traps_of_serving_logs(tmp_path):
    rng = np.random.default_rng(0)
    path = written(tmp_path / "log.jsonl", log(rng, (5, 5, 4, 4, 2), warm_up=(64, 40)))
    source = load(path)
    notes = "\n".join(source.notes)
    assert source.trace.n_tokens == 20 and "104 rows" in notes
    assert "one request id for all: 7 steps" in notes and "shrinks from 5 sequences to 2" in notes
    assert "0.149 to 0.149" in notes and "highest id + 1" in notes
    assert (source.trace.positions - 2).tolist() == [0] * 5 + [1] * 5 + [2] * 4 + [3] * 4 + [4] * 2
    assert source.trace.sequences.tolist() == [*range(5), *range(5), *range(4), *range(4), *range(2)]
    result = replay(source.trace, "lru", 8, batch=5)
    assert result.accesses[0] == sum(len(set(source.trace.experts[0][source.trace.positions == s].ravel())) for s in range(2, 7))
    kept = load(path, keep_warm_up=True)
    assert kept.trace.n_tokens == 124 and "104 rows" not in "\n".join(kept.notes)


def test_two_kinds_of_warm_up_and_text_that_merely_repeats(tmp_path):
    ids = np.concatenate([np.tile([[[0, 1]]], (8192, 1, 1)), np.tile([[[2, 3]]], (256, 1, 1)), np.random.default_rng(0).permuted(
        np.tile(np.arange(6), (500, 1, 1)), axis=-1)[..., :2]])
    ids[8448] = [[4, 5]]
    np.save(tmp_path / "w.npy", ids)
    source = load(tmp_path / "w.npy")
    assert source.trace.n_tokens == 500 and any("8,192 + 256" in n for n in source.notes)
    np.save(tmp_path / "s.npy", ids[8448 - ALIKE + 1 :])
    assert load(tmp_path / "s.npy").trace.n_tokens == 500 + ALIKE - 1
    np.save(tmp_path / "o.npy", ids[:100])
    with pytest.raises(ShapeError, match="all 100 tokens route alike"):
        load(tmp_path / "o.npy")
    assert load(tmp_path / "o.npy", keep_warm_up=True).trace.n_tokens == 100


@pytest.mark.parametrize(("rows", "error", "says"), [
    ([[[1, 2]], [[1, 2, 3]]], ShapeError, "ragged"), ([[[1, 2], [3]], [[1, 2], [3]]], ShapeError, "ragged"),
    ([[[1, -1]], [[1, 2]]], ShapeError, "expert -1 at token 0"), ([[[1, 2.5]]], ShapeError, "whole numbers"), ([[[1, "x"]]], ShapeError, "whole numbers"),
    ([[[3, 3]]], ShapeError, "one expert twice"), ([], ShapeError, "no rows"), (["{"], FileFormatError, "line 1"), (["5"], FileFormatError, "no expert ids"),
    (['{"experts": []}'], FileFormatError, "no expert ids"), ([{"topk_ids": [1, 2]}], FileFormatError, "does not name its layer"),
    ([row(0, 0, [1, 2]), row(0, 1, [1, 2]), row(1, 0, [1, 2])], ShapeError, "1, 2 rows"),
    ([{"experts": [[1, 2]], "weights": [[0.5, None]]}], ShapeError, "weight of nan"), (['{"experts": [[1, 2]], "weights": [[0.5, NaN]]}'], ShapeError, "weight of nan"),
    ([{"experts": [[1, 2]], "weights": [[0.5, -0.5]]}], ShapeError, "weight of -0.5"), ([{"experts": [[1, 2]], "weights": [[0.5]]}], ShapeError, "weights"),
    ([{"experts": [[1, 9]], "n_expert": 4}], ShapeError, "expert 9"), ([{"experts": [[1, 2]], "weights": [["a", "b"]]}], ShapeError, "no numbers")])
def test_rows_that_cannot_be(tmp_path, rows, error, says):
    with pytest.raises(error, match=says):
        load(written(tmp_path / "bad.jsonl", rows))


def test_files_that_cannot_be(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 nothing")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "a.json").write_text('{"layers": 3}', "utf-8")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe{}")
    (tmp_path / "a.txt").write_text("1 2", "utf-8")
    np.savez(tmp_path / "b.npz", first=np.zeros(3), second=np.zeros(3))
    np.save(tmp_path / "o.npy", np.array([[1, 2], [3]], object), allow_pickle=True)
    np.save(tmp_path / "f.npy", np.zeros((2, 2, 2)))
    np.save(tmp_path / "n.npy", np.zeros((0, 2, 2), int))
    np.save(tmp_path / "t.npy", np.zeros((4, 2), int))
    for name in ("a.npz", "a.npy", "a.json", "a.jsonl", "a.txt", "b.npz", "o.npy", "missing.npz"):
        with pytest.raises(FileFormatError):
            load(tmp_path / name)
    for name, says in (("f.npy", "float64"), ("n.npy", "0 tokens"), ("t.npy", r"\(4, 2\)")):
        with pytest.raises(ShapeError, match=says):
            load(tmp_path / name)
    with pytest.raises(FileFormatError):
        load(tmp_path)


def test_weights_that_are_partly_unknown(tmp_path):
    trace = random_trace(np.random.default_rng(0), 1, 5, 4, 2)
    trace.weights[:] = 0.5
    trace.weights[0, 3, 1] = np.nan
    trace.save(tmp_path / "w.npz")
    with pytest.raises(ShapeError, match="weight of nan at token 3"):
        load(tmp_path / "w.npz")


def test_weights_that_are_all_nan_and_ids_beyond_32_bits_are_refused(tmp_path):
    ids = np.array([[[0, 1]], [[1, 2]]])
    np.savez(tmp_path / "nan.npz", experts=ids, weights=np.full(ids.shape, np.nan))
    with pytest.raises(ShapeError, match="all NaN"):
        load(tmp_path / "nan.npz")
    np.save(tmp_path / "far.npy", ids + 2**32)
    with pytest.raises(ShapeError, match="4294967298"):
        load(tmp_path / "far.npy")
