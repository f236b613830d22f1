"""Token queues over real tensors: eight sequences side by side give what one graph for all gives, within rounding."""

import numpy as np
import pytest

from workbench import models
from workbench.errors import ModelError, ParameterError
from workbench.expertflow.batching import FOREVER, LATENCY, Limits
from workbench.expertflow.offload import offload
from workbench.expertflow.segments import SegmentServer

PROMPTS = ["def main(", "And it came to pass", "x = 1;", "The LORD", "for i in", "if (a", "1 2 3", "return"]


@pytest.mark.parametrize("limits", [LATENCY, Limits(8, 6, 2), Limits(4, FOREVER, 3, merge=3)], ids=["latency", "waits", "throughput"])
@pytest.mark.parametrize("name", ["tiny-mixtral-f16", "tiny-deepseek-f16"])
def test_eight_sequences_agree_with_one_graph_for_all(name, limits):
    with models.load(name) as model, models.Session(model, n_seq_max=8, n_ctx=512) as whole, offload(model, 0.5, n_seq_max=8, n_ctx=512) as run:
        prompts = list(enumerate(model.tokenizer.encode(p) for p in PROMPTS))
        logits = whole.decode_batch(prompts)
        run.session.decode_batch(prompts)
        server = SegmentServer(run, limits)
        for _ in range(3):
            tokens = {seq: int(row.argmax()) for seq, row in enumerate(logits)}
            found = server.step(tokens)
            logits = whole.decode_batch([(seq, [t]) for seq, t in tokens.items()])
            for seq, row in enumerate(logits):
                assert np.abs(found[seq] - row).max() <= 1e-4 * np.abs(row).max() and found[seq].argmax() == row.argmax()
        k = model.hparams.n_expert_used
        assert sum(n for _, _, n, _ in server.batches) == 3 * 8 * k * len(model.hparams.moe_layers)
        assert max(n for _, _, n, _ in server.batches) > 1 and not server.queues.n_waiting and not server.queues.missing


def test_a_failed_step_leaves_everything_as_it_was():
    with models.load("tiny-mixtral-f16") as model, offload(model, 0.5, n_seq_max=2) as run:
        for seq, text in enumerate(("def main(", "And it came")):
            run.session.decode(model.tokenizer.encode(text), seq)
        server, card = SegmentServer(run, LATENCY), run.engine.pool.device
        before = server.step({0: 5, 1: 6})
        used, past = run.session.cache.n_used, [run.session.n_past(s) for s in (0, 1)]
        card.fail_compute = 9
        with pytest.raises(Exception, match="made to fail"):
            server.step({0: 7, 1: 8})
        card.fail_compute = 0
        assert (run.session.cache.n_used, [run.session.n_past(s) for s in (0, 1)]) == (used, past)
        assert not server.queues.missing and not server.queues.n_waiting
        again = server.step({0: 7, 1: 8})
        assert all(np.isfinite(row).all() for row in (*before.values(), *again.values()))


def test_bad_input():
    with models.load("tiny-mixtral-f16") as model, offload(model, 0.5) as run:
        server = SegmentServer(run, LATENCY)
        with pytest.raises(ParameterError):
            server.step({})
        with pytest.raises(ParameterError):
            server.step({3: 1})
        with pytest.raises(ParameterError):
            server.step({0: 10**6})


def test_models_that_segments_do_not_serve():
    class Run:
        session = type("S", (), {"model": type("M", (), {"name": "none", "hparams": type("H", (), {
            "moe_layers": (), "arch": "llama", "window": 0, "traits": type("T", (), {"late_rows": False})})})})

    with pytest.raises(ModelError):
        SegmentServer(Run(), LATENCY)
