"""Hyper-parameters, graphs and their segments. Node lists against llama.cpp: tests/parity/test_graph.py."""
import numpy as np
import pytest

from tests.models import craft
from tests.models.architectures import MODELS, write
from tests.models.small import small_model
from workbench.devices import CpuBackend
from workbench.errors import ContextClosed, ModelError
from workbench.execution import GraphAllocator
from workbench.models import Builder, KVCache, Session, build_step, load
from workbench.models.session import fill_inputs


@pytest.mark.parametrize(("key", "value", "says"), [
    ("general.architecture", (craft.STR, "phimoe"), "phimoe"),
    ("llama.block_count", (craft.U32, 2**31), "2147483648"),
    ("llama.block_count", (craft.STR, "two"), "two"),
    ("llama.block_count", None, "llama.block_count"),
    ("llama.attention.head_count", (craft.U32, 0), "is 0"),
    ("llama.attention.head_count", (craft.U32, 5), "is 5"),
    ("llama.attention.head_count_kv", (craft.U32, 3), "is 3"),
    ("llama.expert_used_count", (craft.U32, 5), "is 5"),
    ("llama.rope.dimension_count", (craft.U32, 4), "is 4"),
    ("llama.rope.freq_base", (craft.F32, float("nan")), "nan"),
    ("llama.rope.scaling.type", (craft.STR, "longrope"), "longrope"),
    ("llama.vocab_size", (craft.U32, 41), "is 41"),
    ("llama.attention.layer_norm_rms_epsilon", (craft.F32, -1.0), "-1"),
])
def test_a_wrong_key_is_named_with_its_value(key, value, says):
    with pytest.raises(ModelError) as e:
        small_model(change={key: value})
    assert key in str(e.value) and says in str(e.value)


def test_every_tensor_that_does_not_fit_is_named():
    with pytest.raises(ModelError) as e:
        small_model(tensors={"blk.0.attn_q.weight": None, "blk.1.ffn_up_exps.weight": (32, 48, 5), "blk.1.attn_q.bias": (32,), "output_norm.weight": None})
    text = str(e.value)
    assert text.startswith("4 tensors")
    for line in ("blk.0.attn_q.weight is missing ([32, 32])", "output_norm.weight is missing", "blk.1.attn_q.bias is unknown",
                 "blk.1.ffn_up_exps.weight is [32, 48, 5] instead of [32, 48, 4]"):
        assert line in text


@pytest.mark.parametrize("options", [
    {}, {"tied": True}, {"arch": "deepseek"}, {"expert_count": 0}, {"expert_used_count": 1}, {"arch": "deepseek", "leading_dense_block_count": 0},
    {"arch": "deepseek", "expert_shared_count": 0}, {"tensors": {"rope_freqs.weight": (4,)}},
], ids=str)  # fmt: skip
def test_every_form_of_model_decodes_the_same_at_once_and_token_by_token(options):
    with small_model(**options) as model, Session(model) as session:
        tokens = [3, 1, 4, 1, 5]
        at_once = session.decode(tokens, outputs="all")
        session.reset()
        one_by_one = np.stack([session.decode([t]) for t in tokens])
    assert np.isfinite(at_once).all() and at_once.std() > 0.01
    np.testing.assert_allclose(one_by_one, at_once, atol=1e-4)


@pytest.mark.parametrize("name", ["tiny-mixtral-f16", "tiny-deepseek-f16"])
def test_segments_are_the_graph_cut_where_the_router_has_decided(name):
    with load(name) as model:
        step = build_step(model, KVCache(model.hparams, 256), 4, 256, 1)
        nodes = step.graph.nodes
        assert [s.first for s in step.segments] == [0, *(s.last for s in step.segments[:-1])] and step.segments[-1].last == len(nodes)
        for s in step.segments:
            ops = [n.op for n in nodes[s.first : s.last]]
            assert ("MUL_MAT_ID" in ops) == (s.kind == "experts" and s.layer in model.hparams.moe_layers)
            assert ("ARGSORT" in ops) == (s.kind == "attention" and s.layer in model.hparams.moe_layers)


@pytest.mark.parametrize("name", ["tiny-mixtral-f16", "tiny-deepseek-f16", "qwen2moe", "gpt-oss", "deepseek-v3"])
def test_segments_built_and_run_alone_give_the_bits_of_the_whole(name, tmp_path):
    with load(write(name, tmp_path / f"{name}.gguf") if name in MODELS else name) as model:
        tokens = np.array([0, 308, 621, 1346, 545]) % model.hparams.n_vocab
        n = len(tokens)
        with Session(model) as session:
            whole = session.decode(tokens, outputs="all")
        backend = CpuBackend()
        cache = KVCache(model.hparams, 256, backend.buffer_type)
        seqs, pos = np.zeros(n, int), np.arange(n)
        cells = cache.take(seqs, pos)
        memories = []

        def run(b):
            memory = GraphAllocator(backend.buffer_type)
            memories.append(memory)
            memory.alloc(b.graph)
            fill_inputs_used(b)
            return lambda: backend.compute(b.graph)

        def fill_inputs_used(b):
            for leaf in vars(b.inputs).values():
                if leaf.storage is None:  # not part of this segment
                    memory = GraphAllocator(backend.buffer_type)
                    memories.append(memory)
                    leaf.place(backend.buffer_type.alloc_buffer(leaf.nbytes))
            fill_inputs(b, cache, tokens, pos, seqs, cells, np.arange(n))

        def builder():
            return Builder(model, cache, n, 256, n)

        b = builder()
        out = b.embedding()
        run(b)()
        x = out.numpy().copy()
        for layer in range(model.hparams.n_layer):
            b = builder()
            hidden = b.attention(entry := b.leaf("x", "f32", model.hparams.n_embd, n), layer)
            kept = [hidden.residual, hidden.normed, *((hidden.routing.experts, hidden.routing.weights) if hidden.routing else ())]
            for t in kept:
                t.root().flags |= 2  # outputs: they leave the segment
            go = run(b)
            entry.set(x)
            go()
            values = [t.numpy().copy() for t in kept]
            b = builder()
            entries = b.boundary(layer)
            out = b.experts(entries, layer)
            go = run(b)
            routing = entries.routing
            for leaf, v in zip([entries.residual, entries.normed, *((routing.experts, routing.weights) if routing else ())], values, strict=True):
                leaf.set(v.reshape(leaf.shape))
            go()
            x = out.numpy().copy()
        b = builder()
        logits = b.output(entry := b.leaf("x", "f32", model.hparams.n_embd, n))
        go = run(b)
        entry.set(x)
        go()
        np.testing.assert_array_equal(logits.numpy(), whole)
        cache.close()
        for m in memories:
            m.close()


def test_a_graph_over_a_closed_model_is_an_error():
    model = load("tiny-mixtral-f16")
    session = Session(model)
    session.decode([0, 1])
    model.close()
    with pytest.raises(ContextClosed, match="weights of tiny-mixtral-f16"):
        session.decode([2])
    session.close()


def test_weights_are_the_bytes_of_the_file():
    with load("tiny-mixtral-f16") as model:
        for name, t in model.weights.items():
            assert t.storage is model.file.storage and t.offset == model.file.tensors[name].offset
