"""Published models: totals by their makers' own counting, bytes by the tensors themselves, FLOPs by the graphs of the shipped models."""
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest

import workbench as wb
from workbench import models, paths
from workbench.errors import ParameterError, ShapeError
from workbench.moe import RouteTrace, presets
from workbench.moe.configs import EXCEPTIONS, MODELS, Attention, MoEModel, Published, expected_distinct, model
from workbench.tensors import DTYPES, Context

KNOWN = [m for m in MODELS if not m.from_memory]
TINY = {
    "tiny-mixtral-f16": MoEModel("tiny", presets.mixtral(8, 2), 128, 160, 6, 2048, Attention(4, 2, 32), Published("0.0038", "0"), "card"),
    "tiny-deepseek-f16": MoEModel("tiny", presets.deepseek_moe(16, 4), 128, 96, 4, 2048, Attention(4, 2, 32), Published("0.0034", "0"), "card",
                                  n_dense=1, f_dense=384, f_shared=96),
}  # fmt: skip


def printed_as(value: float, figure: str) -> bool:
    """Whether `value`, rounded to the decimals of the printed `figure`, is that figure."""
    step = Decimal(1).scaleb(-len(figure.partition(".")[2]))
    return Decimal(repr(value)).quantize(step, ROUND_HALF_UP) == Decimal(figure)


@pytest.mark.parametrize("row", KNOWN, ids=lambda m: m.name)
def test_figures_are_those_printed_or_listed_with_a_reason(row):
    for what, figure in (("total", row.published.total), ("active", row.published.active)):
        agrees = printed_as(getattr(row, what) / 1e9, figure)
        assert agrees != ((row.name, what) in EXCEPTIONS), f"{row.name} {what}: {getattr(row, what) / 1e9} as {figure}"


def test_exceptions_are_few_near_and_explained():
    assert len(EXCEPTIONS) <= 4 and all(len(reason) > 20 for reason in EXCEPTIONS.values())
    for name, what in EXCEPTIONS:
        ours, figure = getattr(model(name), what) / 1e9, float(getattr(model(name).published, what))
        assert abs(ours / figure - 1) < 0.025


def test_rows_name_their_source_and_those_from_memory_are_marked():
    assert len({m.name for m in MODELS}) == len(MODELS) >= 16
    assert all(len(m.source) > 10 for m in MODELS)
    assert [m.name for m in MODELS if m.from_memory] == ["GShard-600B"]
    with pytest.raises(ParameterError, match="'Mixtral'"):
        model("Mixtral")


@pytest.mark.parametrize(("value", "figure", "same"), [(46.7028, "46.7", True), (140.62, "141", True), (2.45, "2.5", True), (2.449, "2.4", True),
                                                       (2.4514, "2.4", False), (6.95, "7.0", True), (0.5, "1", True)])  # fmt: skip
def test_rounding_is_that_of_print(value, figure, same):
    assert printed_as(value, figure) == same


@pytest.mark.parametrize(("name", "mib"), [("Mixtral-8x7B", 336), ("Mixtral-8x22B", 576), ("Switch-base-32", 9), ("DeepSeek-V2", 45), ("DeepSeek-V3", 84),
                                           ("Qwen1.5-MoE-A2.7B", 16.5), ("Qwen3-30B-A3B", 9), ("OLMoE-1B-7B", 12), ("Phi-3.5-MoE", 150),
                                           ("gpt-oss-20b", 47.46), ("Llama-4-Scout", 240)])  # fmt: skip
def test_bytes_of_an_expert(name, mib):
    assert model(name).bytes_per_expert("bf16") / 2**20 == pytest.approx(mib, abs=0.005)


@pytest.mark.parametrize("kind", [t for t in DTYPES if t not in ("i8", "i16", "i32", "i64", "f64")])
def test_bytes_in_every_storage_type_are_those_of_tensors(kind):
    some = 0
    for row in KNOWN:
        with Context(no_alloc=True) as ctx:
            shapes = [(row.d, row.f)] * (row.matrices - 1) + [(row.f, row.d)]
            if row.d % DTYPES[kind].block or row.f % DTYPES[kind].block:
                with pytest.raises(ShapeError, match="multiple of"):
                    row.bytes_per_expert(kind)
                continue
            some += 1
            assert row.bytes_per_expert(kind) == sum(ctx.new_tensor(kind, *ne).nbytes for ne in shapes)
    assert some >= 5


@pytest.mark.parametrize("name", TINY)
def test_the_formulas_give_the_shipped_models(name):
    row = TINY[name]
    with models.load(name) as loaded:
        assert row.total == loaded.n_params == {"tiny-mixtral-f16": 3_776_128, "tiny-deepseek-f16": 3_433_856}[name]
        experts = loaded.experts(2)
        assert row.bytes_per_expert("f16") == experts.gate.nb[2] + experts.up.nb[2] + experts.down.nb[2]
        n_kv = 256
        step = models.build_step(loaded, models.KVCache(loaded.hparams, n_kv, wb.CpuBackend.buffer_type), 1, n_kv, 1)
        products = sum(t.spec.flops(t) for t in step.graph.nodes if t.op in ("MUL_MAT", "MUL_MAT_ID"))
        norms = (2 * (row.n_moe + row.n_dense) + 1) * row.d         # multiplied element by element, not in a product
        assert row.flops_per_token(n_kv) - 2 * norms == products


def test_active_parameters_are_those_of_k_experts():
    row = model("Mixtral-8x7B")
    assert row.total - row.active == 32 * 6 * 3 * 4096 * 14336
    assert model("DeepSeek-V3").params(8) - model("DeepSeek-V3").active == 129280 * 7168


# ---- how many experts several tokens use

def test_expected_distinct_experts():
    assert expected_distinct(8, 2, 0) == 0 and expected_distinct(8, 2, 1) == 2 and expected_distinct(8, 8, 5) == 8
    assert expected_distinct(60, 4, 25) == pytest.approx(49.31, abs=0.01)
    rng = np.random.default_rng(0)
    drawn = [len({e for _ in range(25) for e in rng.permutation(60)[:4]}) for _ in range(400)]
    assert expected_distinct(60, 4, 25) == pytest.approx(np.mean(drawn), abs=0.5)


@pytest.mark.parametrize("case", [(8, 9, 3), (0, 0, 3), (8, -2, 3), (8, 2, -3), (8, 2, float("nan")), ("8", 2, 3)])
def test_draws_that_cannot_be_are_refused(case):
    with pytest.raises(ParameterError, match="that draw"):
        expected_distinct(*case)


def test_numbers_of_experts_and_tokens_below_zero_are_refused():
    row = model("Mixtral-8x7B")
    for n in (-1, 1.5, True):
        with pytest.raises(ParameterError, match="experts in each layer"):
            row.params(n)
    for n in (-1, float("nan"), None):
        with pytest.raises(ParameterError, match="tokens before"):
            row.flops_per_token(n)


def test_two_totals_written_out():
    # Mixtral-8x7B (config.json): 4096 wide, 32 layers, 32 heads of 128 and 8 of keys, 8 experts of 14336, vocabulary 32000, not tied
    attention = 2 * 4096 * 4096 + 2 * 4096 * 1024
    layer = attention + 8 * 3 * 4096 * 14336 + 8 * 4096 + 2 * 4096
    assert model("Mixtral-8x7B").total == 32 * layer + 2 * 32000 * 4096 + 4096 == 46_702_792_704
    # OLMoE-1B-7B: 2048 wide, 16 layers, 16 heads of 128, norms over all of Q and K, 64 experts of 1024, vocabulary 50304
    layer = 4 * 2048 * 2048 + 2 * 2048 + 64 * 3 * 2048 * 1024 + 64 * 2048 + 2 * 2048
    assert model("OLMoE-1B-7B").total == 16 * layer + 2 * 50304 * 2048 + 2048 == 6_919_161_856


def test_real_tokens_share_experts_more_than_chance():
    for name, e, k in (("tiny-mixtral", 8, 2), ("tiny-deepseek", 16, 4)):
        trace = RouteTrace.load(paths.models_dir() / "traces" / f"{name}_trace.npz")
        assert np.allclose(trace.distinct(1), k)
        for n in (2, 4, 8, 16, 64):
            measured = trace.distinct(n).mean()
            by_hand = np.mean([[len(set(layer[i : i + n].ravel().tolist())) for i in range(0, 2560, n)] for layer in trace.experts])
            assert abs(measured - by_hand) < 0.5
            assert 0.6 * expected_distinct(e, k, n) < measured < expected_distinct(e, k, n)


def test_distinct_counts_what_is_there():
    experts = np.array([[[0, 1], [1, 2], [1, 0], [3, 1], [2, 0]]])
    i = np.arange(5)
    trace = RouteTrace(experts, np.ones_like(experts, float), np.array([0]), i, i, i, 4)
    assert trace.distinct(1).tolist() == [2] and trace.distinct(2).tolist() == [3.0] and trace.distinct(5).tolist() == [4]
    for wrong in (0, 6, -1):
        with pytest.raises(ShapeError, match=f"runs of {wrong}"):
            trace.distinct(wrong)
