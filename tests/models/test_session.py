"""Sessions: the KV cache, several sequences, buckets, reuse of graphs, recorded routes. Logits: tests/parity/test_logits.py."""

import os
import shutil
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.small import N_VOCAB, small_model
from workbench.devices import CpuBackend
from workbench.errors import FileFormatError, ModelError, ParameterError
from workbench.models import Session, load
from workbench.models.gguf import find_model

TOLERANCE = 1e-4  # other shapes: other order of summation
TEXT = [0, 308, 621, 1346, 545, 688, 1540, 312, 1877, 480, 1654, 310]


@pytest.fixture(scope="module")
def model():
    with load("tiny-mixtral-f16") as m:
        yield m


@pytest.fixture(scope="module")
def small():
    with small_model() as m:
        yield m


def test_token_by_token_and_in_pieces_is_as_at_once(model):
    with Session(model) as s, Session(model, n_batch=5) as pieces:
        at_once = s.decode(TEXT, outputs="all")
        np.testing.assert_allclose(pieces.decode(TEXT, outputs="all"), at_once, atol=TOLERANCE)
        pieces.reset()
        np.testing.assert_allclose(pieces.decode(TEXT), at_once[-1], atol=TOLERANCE)
        s.reset()
        np.testing.assert_allclose(np.stack([s.decode([t]) for t in TEXT]), at_once, atol=TOLERANCE)


@pytest.mark.parametrize("n_seq", [2, 3, 5])
def test_sequences_side_by_side_are_as_each_alone(model, n_seq):
    texts = [TEXT[: 3 + i] if i % 2 else TEXT[i:] for i in range(n_seq)]
    with Session(model, n_ctx=512, n_seq_max=n_seq) as s, Session(model) as alone:
        together = s.decode_batch(list(enumerate(texts)), outputs="all")
        for step in range(2):
            for i, text in enumerate(texts):
                alone.reset()
                want = alone.decode(text, outputs="all")
                np.testing.assert_allclose(together[i], want[-len(together[i]) :], atol=TOLERANCE)
            texts = [[*t, 7 + step + i] for i, t in enumerate(texts)]
            together = [x[None] for x in s.decode_batch([(i, t[-1:]) for i, t in enumerate(texts)])]


def test_a_decode_step_inside_a_bucket_rebuilds_nothing(model):
    with Session(model, n_ctx=512, n_seq_max=4) as s:
        s.decode_batch([(i, TEXT[:2]) for i in range(4)])
        s.decode_batch([(i, [5]) for i in range(3)])  # 3 rows in a bucket of 4
        before = (s.n_graph_builds, s.n_plans)
        for n in (3, 4, 3):
            for _ in range(5):
                s.decode_batch([(i, [5]) for i in range(n)])
        assert (s.n_graph_builds, s.n_plans) == before and s.n_graph_reuses == 15
        while s.cache.n_used <= 252:
            s.decode_batch([(i, [5]) for i in range(4)])
        assert (s.n_graph_builds, s.n_plans) == before
        s.decode_batch([(0, [5])] + [(i, [5]) for i in range(1, 4)])  # cell 257: the graph must look at 512
        assert (s.n_graph_builds, s.n_plans) == (before[0] + 1, before[1] + 1)


def test_compute_memory_is_reserved_at_the_start_and_never_grows(model):
    with Session(model, n_ctx=512, n_seq_max=2, n_batch=64) as s:
        reserved = s.memory()["compute buffer"]
        s.decode(TEXT * 20, outputs="all")
        s.decode_batch([(0, [1]), (1, [2])])
        assert s.memory()["compute buffer"] == reserved > 0


def test_a_steady_decode_step_allocates_next_to_nothing(model):
    with Session(model, backend=CpuBackend(dequant_cache_bytes=0)) as s:  # the cache of decoded weights would still be filling
        s.decode(TEXT)
        for _ in range(3):
            s.decode([5])
        tracemalloc.start()
        try:
            for _ in range(5):
                s.decode([5])
                kept = tracemalloc.get_traced_memory()[0]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    routed = 2 * 6
    assert peak <= 64 * 1024 + 64 * routed + 2 * 4 * 2048, f"peak {peak}, kept {kept}"  # besides: two rows of logits


def test_a_full_context_is_an_error_and_leaves_everything_as_it_was(small):
    with Session(small, n_seq_max=2) as s, Session(small) as other:
        s.decode(np.arange(250) % N_VOCAB)
        with pytest.raises(ModelError, match="context is full: 250 of 256.*7 more"):
            s.decode([1] * 7, seq=1)
        assert s.n_past() == 250 and s.n_past(1) == 0 and s.cache.n_used == 250
        other.decode(np.arange(250) % N_VOCAB)
        np.testing.assert_array_equal(s.decode([1] * 6), other.decode([1] * 6))


def test_an_interrupted_step_gives_its_cells_back(small, monkeypatch):
    with Session(small, n_batch=4, recording=True) as s:
        want = s.decode([1, 2, 3, 4, 5, 6])
        s.reset()
        run, calls = s._run, []

        def interrupted(*args):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return run(*args)

        monkeypatch.setattr(s, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            s.decode([1, 2, 3, 4, 5, 6])
        assert s.cache.n_used == 0 and s.n_past() == 0 and s.routes.n_tokens == 6
        np.testing.assert_array_equal(s.decode([1, 2, 3, 4, 5, 6]), want)


def test_an_interrupt_between_any_two_lines_leaves_the_session_as_it_was(small):
    """Also after the last tokens were computed, and between the cells that were taken and whoever holds them."""
    code, stopped = Session.decode_batch.__code__, 0
    with Session(small, n_seq_max=2, recording=True) as s, Session(small, n_seq_max=2) as other:
        want = other.decode_batch([(0, [1, 2]), (1, [3])], "all")
        for n in range(1, 60):
            left = n

            def interrupted(frame, event, arg):
                nonlocal left
                if event == "call":
                    return interrupted if frame.f_code is code else None
                left -= event == "line"
                if not left:
                    raise KeyboardInterrupt
                return interrupted

            sys.settrace(interrupted)
            try:
                got = s.decode_batch([(0, [1, 2]), (1, [3])], "all")
            except KeyboardInterrupt:
                stopped += 1
            else:
                break
            finally:
                sys.settrace(None)
            if s.n_past(0):  # after the last line that changes anything: all of it happened
                assert (s.cache.n_used, s.n_past(0), s.n_past(1)) == (3, 2, 1)
                s.reset()
            assert (s.cache.n_used, s.n_past(0), s.n_past(1)) == (0, 0, 0)
        assert stopped > 15 and all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(["decode", "reset"]), st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=12), st.integers(1, 8))
def test_any_history_of_sequences_ends_like_a_fresh_start(moves, n_batch):
    texts = [[], [], []]
    with small_model() as m, Session(m, n_seq_max=3, n_batch=n_batch) as s:
        for what, seq, n in moves:
            if what == "reset":
                s.reset(seq)
                texts[seq] = []
            else:
                more = [(len(texts[seq]) * 7 + i * 3 + seq) % N_VOCAB for i in range(n)]
                s.decode(more, seq)
                texts[seq] += more
        assert s.cache.n_used == sum(map(len, texts)) and [s.n_past(i) for i in range(3)] == list(map(len, texts))
        got = s.decode_batch([(i, [9]) for i in range(3)])
        with Session(m) as fresh:
            for i in range(3):
                fresh.reset()
                np.testing.assert_allclose(got[i], fresh.decode([*texts[i], 9]), atol=TOLERANCE)


def test_recording_changes_no_logits_and_knows_every_token(model):
    with Session(model, n_seq_max=3, n_ctx=256) as s, Session(model, n_seq_max=3, n_ctx=256, recording=True) as r:
        for entries in ([(0, TEXT), (1, TEXT[:3]), (2, TEXT[:1])], [(0, [5]), (1, [6]), (2, [7])]):
            for a, b in zip(s.decode_batch(entries), r.decode_batch(entries), strict=True):
                np.testing.assert_allclose(a, b, atol=TOLERANCE)
        trace = r.routes
        assert trace.tokens.tolist() == [*TEXT, *TEXT[:3], TEXT[0], 5, 6, 7]
        assert trace.positions.tolist() == [*range(12), 0, 1, 2, 0, 12, 3, 1]
        assert trace.sequences.tolist() == [0] * 12 + [1] * 3 + [2, 0, 1, 2]
        trace.require_weight_sum(model.hparams.router)
        np.testing.assert_array_equal(trace.select(slice(0, 3)).experts, trace.select(slice(12, 15)).experts)
        r.recording = False
        r.decode([1])
        assert r.routes.n_tokens == trace.n_tokens
        r.clear_routes()
        assert r.routes.n_tokens == 0


def test_a_dense_model_has_no_routes():
    with small_model(expert_count=0) as m, Session(m, recording=True) as s:
        s.decode([1, 2])
        with pytest.raises(ModelError, match="no experts"):
            _ = s.routes


@pytest.mark.parametrize(("call", "says"), [
    (lambda s: s.decode([]), "tokens"), (lambda s: s.decode([N_VOCAB]), "token ids"), (lambda s: s.decode([-1]), "token ids"),
    (lambda s: s.decode([0.5]), "tokens"), (lambda s: s.decode([1], seq=1), "sequence 1"), (lambda s: s.decode([1], outputs="some"), "some"),
    (lambda s: s.decode_batch([]), "no tokens"), (lambda s: s.decode_batch([(0, [1]), (0, [2])]), "twice"), (lambda s: s.reset(-1), "sequence -1"),
    (lambda s: Session(s.model, n_ctx=0), "n_ctx"), (lambda s: Session(s.model, n_batch=True), "n_batch"),
    (lambda s: Session(s.model, backend=s.backend, n_threads=2), "backend"),
])
def test_wrong_requests_are_refused(small, call, says):
    with Session(small) as s, pytest.raises(ParameterError, match=says):
        call(s)


def test_f32_weights_are_read_in_the_file_and_never_copied(small):
    with Session(small, n_seq_max=2) as s:
        tracemalloc.start()
        try:
            s.decode_batch([(0, [1, 2, 3]), (1, [4])])
            s.decode_batch([(0, [5]), (1, [6])])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        memory = s.memory()
        assert memory["dequantised weights"] == 0 and memory["weights (mapped)"] == small.nbytes
        assert peak < 3 * 2**20  # two graphs with their plans
    assert all(t.storage is small.file.storage for t in small.weights.values())


def test_decoded_weights_are_counted_and_bounded(model):
    with Session(model, backend=CpuBackend(dequant_cache_bytes=2**20)) as s, Session(model) as free:
        np.testing.assert_array_equal(s.decode(TEXT), free.decode(TEXT))
        assert 0 < s.memory()["dequantised weights"] <= 2**20 < free.memory()["dequantised weights"]


def test_graphs_that_are_no_longer_used_are_dropped(small):
    with Session(small) as s:
        for n in range(1, 25):
            s.reset()
            want = s.decode(list(range(1, n + 1)))
        assert len(s._steps) == 16
        builds = s.n_graph_builds
        s.reset()
        np.testing.assert_array_equal(s.decode(list(range(1, 25))), want)
        assert s.n_graph_builds == builds
        s.reset()
        s.decode([1])
        assert s.n_graph_builds == builds + 1


def test_threads_give_the_same_bits(model):
    with Session(model) as one, Session(model, n_threads=2) as two:
        np.testing.assert_array_equal(one.decode(TEXT * 4), two.decode(TEXT * 4))


@pytest.mark.skipif(os.name == "nt", reason="Windows does not let anyone write to a mapped file")
@pytest.mark.parametrize("how", ["cut", "written", "replaced"])
def test_a_model_file_that_changes_while_it_is_open(tmp_path, how):
    path = tmp_path / "m.gguf"
    shutil.copy(find_model("tiny-mixtral-f16"), path)
    with load(path) as model, Session(model) as session:
        before = session.decode([1, 2, 3])
        if how == "cut":  # reading the lost pages would end the process
            os.truncate(path, 100_000)
        elif how == "written":
            with path.open("r+b") as f:
                f.seek(5_000_000)
                f.write(bytes(1000))
        else:
            os.replace(shutil.copy(path, tmp_path / "new.gguf"), path)
        session.reset()
        if how == "replaced":  # another file: what is mapped stays as it was
            assert np.array_equal(session.decode([1, 2, 3]), before)
            return
        with pytest.raises(FileFormatError, match="changed while it was open"):
            session.decode([1, 2, 3])
        assert session.n_past() == 0 and session.cache.n_used == 0
