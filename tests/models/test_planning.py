"""Plans without memory: equal to what a simulated machine does, byte by byte and nanosecond by nanosecond; and to formulas."""

from collections import Counter

import numpy as np
import pytest

from tests.models import craft
from tests.models.architectures import write
from tests.models.headers import N_VOCAB, qwen3
from tests.models.small import small_file
from workbench import Scheduler, Session, load, place_weights, simulated_machine
from workbench.errors import ParameterError
from workbench.models.fitting import fit
from workbench.models.gguf import open_gguf
from workbench.models.kv_cache import KVCache
from workbench.models.phases import COPIES, ways
from workbench.models.planning import EXPERTS, WINDOW, expert_bytes, expert_layers, plan_schedule
from workbench.models.transformer import build_step
from workbench.trace import Trace

CASES = [
    ("tiny-mixtral-f16", "rtx3090-pcie4", {"overrides": {"_exps": "CPU"}}),
    ("tiny-mixtral-q4_0", "laptop", {"n_gpu_layers": 3}),
    ("tiny-mixtral-q8_0", "two-rtx3090", {}),
    ("tiny-deepseek-f16", "two-rtx3090", {"overrides": {r"blk\.[01]\..*_exps": "CPU"}}),
    ("tiny-deepseek-f16", "blas,cpu", {}),
]
N = 40


def calls(trace):
    """Everything that moved bytes or waited, with names and times relative to the first event."""
    out = []
    begin = next(i for i, e in enumerate(trace.events) if e.kind == "run")  # before it, memory was planned
    for e in trace.events[begin:]:
        if e.kind in (*COPIES, "sync", "busy", "launch"):
            out.append((e.kind, e.start, e.end, tuple(trace.described(e).items())))
    first = min(start for _, start, *_ in out)
    return [(kind, start - first, end - first, fields) for kind, start, end, fields in out]


def executed(name, devices, options):
    """Traces of a prompt and a token that a simulated machine really computed, and the routes they took."""
    with load(name) as model:
        tokens = model.tokenizer.encode("Once upon a time there was a little dog who liked to run. " * 6)[: N + 1]
        with Session(model, 256, 64, recording=True) as session:
            session.decode(tokens[:N], outputs="all")
            session.decode(tokens[N:])
            routes = session.routes
        backends = simulated_machine(devices)
        shares = [1.0] * 2 if "two" in devices else None
        ngl = options.get("n_gpu_layers")
        parallel = "two" in devices and not options
        traces = []
        with place_weights(model, backends, ngl, options.get("overrides"), shares) as placed:
            scheduler = Scheduler(backends, parallel=parallel)
            with Session(placed, 256, 64, scheduler=scheduler) as session:
                for part in (tokens[:N], tokens[N:]):
                    scheduler.trace = trace = Trace("virtual")
                    session.decode(part)
                    scheduler.trace = None
                    traces.append((trace, ways(trace, scheduler), len(scheduler.splits)))
    return traces, routes


@pytest.mark.parametrize(("name", "devices", "options"), CASES, ids=[f"{n}-{d}" for n, d, _ in CASES])
def test_planned_and_executed_are_the_same(name, devices, options):
    traces, routes = executed(name, devices, options)
    plan = plan_schedule(name, devices, batch=N, context=256, kv="f32", routes=routes, **options)
    for phase, (trace, moved, n_splits) in zip(plan.phases, traces, strict=True):
        assert len(phase.splits) == n_splits
        assert phase.ways == moved
        got, want = calls(phase.trace), calls(trace)
        want = want[: len(got)]  # a session reads its logits afterwards
        assert Counter((k, f) for k, _, _, f in got) == Counter((k, f) for k, _, _, f in want)
        assert got == want


def test_memory_is_what_the_allocator_measures():
    plan = plan_schedule("tiny-mixtral-f16", "rtx3090-pcie4", n_cpu_moe=6, batch=48, context=512)
    backends = simulated_machine()
    with load("tiny-mixtral-f16") as model, place_weights(model, backends, overrides={"_exps": "CPU"}) as placed:
        cache = KVCache(model.hparams, 512, placed.layer_types, "f16")
        graph = build_step(placed, cache, 48, 512, 48).graph  # llama.cpp reserves as many outputs as tokens
        assert [d.compute for d in plan.devices] == Scheduler(backends).measure(graph)
        assert plan.devices[0].kv == cache.nbytes == 2 * 2 * 512 * model.hparams.n_embd_kv * model.hparams.n_layer
        on_card = sum(t.nbytes for n, t in model.weights.items() if "_exps" not in n and n != "token_embd.weight")
        tied = 0 if "output.weight" in model.weights else model.output.nbytes
        assert plan.devices[0].weights == on_card + tied
        assert sum(d.weights for d in plan.devices) == model.nbytes + tied


# ---- files that are larger than memory


@pytest.fixture(scope="module")
def huge(tmp_path_factory):
    """56 GiB in eight layers."""
    path = qwen3(
        tmp_path_factory.mktemp("huge") / "huge.gguf",
        block_count=8,
        embedding_length=8192,
        expert_feed_forward_length=4096,
        expert_count=128,
    )
    assert path.stat().st_size > 50 * 2**30 and path.stat().st_blocks * 512 < 2**21
    return path


def test_a_file_larger_than_memory(huge):
    plan = plan_schedule(huge, "rtx3090-pcie4", n_cpu_moe=8, batch=256)
    with open_gguf(huge) as file:
        merged = [t for t in file.tensors.values() if "_exps" in t.name]
        assert plan.expert_bytes == sum(t.nbytes for t in merged)
        assert plan.active_bytes == sum(8 * (t.nbytes // 128) for t in merged)
        last = [t for t in merged if t.name.startswith("blk.7.")]
    prefill, decode = plan.phases
    (weights,) = [w for w in prefill.ways if w.kind == "weights"]
    # 256 tokens use all 128 experts; the last layer has one row, whose experts the host computes
    assert weights.nbytes == plan.expert_bytes - sum(t.nbytes for t in last) and weights.copies == 3 * 7
    assert prefill.copied == sum(w.nbytes for w in prefill.ways) and "copying weights" in prefill.largest_cost()
    assert all(w.kind != "weights" for w in decode.ways) and "experts on CPU" in decode.largest_cost()
    (experts,) = [w for w in decode.work if w.kind == "experts"]
    assert plan.active_bytes < experts.moved < 1.01 * plan.active_bytes and experts.device == "CPU"


def test_used_experts_are_copied_with_their_padding():
    """A batch of 32 tokens, each with the same two experts that are no neighbours."""
    with load("tiny-mixtral-f16") as model:
        layers, weights = (
            len(model.hparams.moe_layers),
            [model.weight(f"ffn_{p}_exps", 0) for p in ("gate", "up", "down")],
        )
        with Session(model, 256, 64, recording=True) as session:
            session.decode(list(range(33)), outputs="all")
            routes = session.routes
        bytes_of_one = sum(w.nb[2] for w in weights)
    routes.experts[...] = [1, 4]
    plan = plan_schedule("tiny-mixtral-f16", "laptop", n_cpu_moe=6, batch=32, context=256, routes=routes)
    (copied,) = [w for w in plan.phases[0].ways if w.kind == "weights"]
    assert copied.nbytes == (layers - 1) * (2 * bytes_of_one + 3 * 2 * 512) and copied.copies == (layers - 1) * 3 * 2


@pytest.mark.parametrize(("batch", "copies"), [(31, False), (32, True)])
def test_offload_begins_at_32_tokens(batch, copies):
    plan = plan_schedule("tiny-mixtral-f16", "laptop", n_cpu_moe=6, batch=batch, context=256)
    assert any(w.kind == "weights" for w in plan.phases[0].ways) is copies


def test_pinned_weights_are_copied_faster():
    slow, fast = (
        plan_schedule("tiny-mixtral-f16", "rtx3090-pcie4", n_cpu_moe=6, batch=64, mmap=m).phases[0]
        for m in (True, False)
    )
    assert [w[:5] for w in slow.ways] == [w[:5] for w in fast.ways] and fast.ns < slow.ns


# ---- rules of llama.cpp


@pytest.mark.parametrize(("devices", "options", "pipelined"), [
    ("two-rtx3090", {}, True), ("two-rtx3090", {"n_gpu_layers": 99}, True), ("two-rtx3090", {"n_gpu_layers": 6}, False),
    ("two-rtx3090", {"n_cpu_moe": 1}, False), ("laptop", {}, False)])  # fmt: skip
def test_pipelining_wants_two_cards_all_layers_and_no_overrides(devices, options, pipelined):
    plan = plan_schedule("tiny-mixtral-f16", devices, batch=8, context=256, **options)
    assert plan.pipelined is pipelined and any("ipelining" in n for n in plan.notes) is ("two" in devices)


def test_too_many_layers_are_all_layers_and_it_says_so():
    plan, all_of_them = (
        plan_schedule("tiny-mixtral-f16", "laptop", n_gpu_layers=n, batch=8, context=256) for n in (99, None)
    )
    assert plan.devices == all_of_them.devices and plan.n_gpu_layers == 7
    assert any("-ngl 99 means 7" in n for n in plan.notes) and not any("-ngl" in n for n in all_of_them.notes)


@pytest.mark.parametrize(("options", "found"), [
    ({"devices": "voodoo"}, "voodoo"), ({"n_gpu_layers": -1}, "-1"), ({"overrides": {"(": "CPU"}}, "override"), ({"overrides": {"x": "TPU"}}, "TPU"),
    ({"batch": 0}, "batch"), ({"context": -5}, "context"), ({"kv": "q4_0"}, "kv"), ({"n_cpu_moe": -1}, "n_cpu_moe")])  # fmt: skip
def test_wrong_requests_are_explained(options, found):
    devices = options.pop("devices", "laptop")
    with pytest.raises(ParameterError) as e:
        plan_schedule("tiny-mixtral-f16", devices, **options)
    assert found in e.value.found and e.value.expected


def test_devices_go_by_llama_cpps_names_too():
    plans = [
        plan_schedule("tiny-mixtral-f16", "laptop", n_gpu_layers=0, overrides={"_exps": d}, batch=8, context=256)
        for d in ("GPU", "cuda0", "GPU0")
    ]
    assert len({p.devices[0].weights for p in plans}) == 1 and plans[0].devices[0].weights == plans[0].expert_bytes


def test_a_card_that_is_too_small_is_named(huge):
    plan = plan_schedule(huge, "laptop", batch=32, context=256)
    ((device, excess),) = plan.overflows()
    assert device.name == "GPU" and excess == device.total - 8 * 2**30


# ---- architectures without a builder


@pytest.fixture
def unknown(tmp_path):
    return qwen3(tmp_path / "unknown.gguf", arch="hunyuan", block_count=4)


def test_an_unknown_architecture_gets_its_bytes_and_is_told_so(unknown):
    plan = plan_schedule(unknown, "two-rtx3090", n_cpu_moe=2)
    assert not plan.phases and "no graph builder" in plan.notes[0] and "hunyuan" in plan.notes[0]
    with open_gguf(unknown) as file:
        everything = sum(t.nbytes for t in file.tensors.values())
        first = sum(
            t.nbytes for t in file.tensors.values() if t.name.startswith(("blk.0.", "blk.1.")) and "_exps" in t.name
        )
        assert plan.expert_bytes == expert_bytes(file)[0] > 0
        assert plan.devices[-1].weights == first + file.tensors["token_embd.weight"].nbytes
    assert sum(d.weights for d in plan.devices) == everything and all(d.kv == d.compute == 0 for d in plan.devices)


def test_a_header_that_lies_about_its_layers(tmp_path):
    path = tmp_path / "lies.gguf"
    keys = [craft.key("general.architecture", craft.STR, "odd"), craft.key("odd.block_count", craft.U32, 2**32 - 1)]
    infos = [craft.tensor(f"blk.{i}.ffn_up_exps.weight", (32, 4, 4), 0, 2048 * j) for j, i in enumerate((5, 10**20))]
    path.write_bytes(craft.gguf(keys, infos) + bytes(4096))
    plan = plan_schedule(path, "two-rtx3090")
    assert [d.weights for d in plan.devices] == [2048, 2048, 0] and fit(path, 3000, G, 1e9).fits == "split"


def test_dense_models_are_planned_too(tmp_path):
    path = tmp_path / "dense.gguf"
    path.write_bytes(small_file(expert_count=0))
    plan = plan_schedule(path, "laptop", batch=8, context=256)
    assert plan.expert_bytes == plan.active_bytes == 0 and len(plan.phases) == 2


# ---- fit


G = 2**30


def test_fit_counts_every_byte_once(huge):
    found = fit(huge, 24 * G, 64 * G, 25e9, context=512, batch=64)
    need = {n.what.partition(",")[0].partition(" (")[0]: n.nbytes for n in found.needs}
    with open_gguf(huge) as file:
        assert need["dense weights"] + need["all experts"] + need["embedding"] == sum(
            t.nbytes for t in file.tensors.values()
        )
    plan = plan_schedule(huge, "laptop", overrides={EXPERTS: "CPU"}, context=512, batch=64)
    assert (need["KV cache"], need["compute memory"]) == (plan.devices[0].kv, plan.devices[0].compute)


def test_the_verdict_follows_from_the_bytes(huge):
    experts = plan_schedule(huge, "laptop", batch=32, context=256).expert_bytes
    assert fit(huge, 200 * G, 200 * G, 25e9).fits == "card"
    split = fit(huge, 24 * G, 80 * G, 25e9)
    assert split.fits == "split" and "cannot pin" in split.verdict()
    assert "cannot pin" not in fit(huge, 24 * G, 80 * G, 25e9, pinned=experts).verdict()
    no = fit(huge, 24 * G, 32 * G, 25e9)
    assert no.fits == "no" and not no.bounds
    missing = next(c for c in no.checks if c.hard and not c.holds)
    assert f"{missing.needed - missing.available:,} bytes too many" in no.verdict() and missing.needed > experts
    assert "DOES NOT FIT: all except the experts on the card" in fit(huge, G, 80 * G, 25e9).verdict()


def test_bounds_are_bytes_over_bandwidths(huge):
    found = fit(huge, 24 * G, 80 * G, 25e9, ram_speed=50e9)
    with open_gguf(huge) as file:
        active = expert_bytes(file)[1]
    host, first, link, cached = (b.tokens_per_second for b in found.bounds)
    assert first > host
    assert host == pytest.approx(50e9 / active) and link == pytest.approx(25e9 / active) and cached > link
    dense = found.needs[0].nbytes
    slower = fit(huge, 24 * G, 80 * G, 25e9, ram_speed=50e9, vram_speed=500e9).bounds[0].tokens_per_second
    assert 1 / slower == pytest.approx(active / 50e9 + dense / 500e9)
    assert all(np.isfinite(b.tokens_per_second) for b in found.bounds)


def test_the_layers_whose_experts_stay_on_the_host_are_as_few_as_can_be(tmp_path):
    path = qwen3(tmp_path / "m.gguf", block_count=6)
    with open_gguf(path) as file:
        layers = expert_layers(file)
        whole, active = layers[0]
        assert len(layers) == 6 and expert_bytes(file) == (6 * whole, 6 * active) and active == whole // 16
    without = next(c for c in fit(path, G, 8 * G, 25e9).checks if c.question.startswith("all except")).needed
    for vram, n in ((without + 3 * whole - 1, 4), (without + 3 * whole, 3), (without + whole - 1, None)):
        found = fit(path, vram, 8 * G, 25e9, ram_speed=50e9)
        partial = [b for b in found.bounds if "--n-cpu-moe" in b.way]
        assert [b.nbytes for b in partial] == ([n * active] if n else []) and all(f"--n-cpu-moe {n}" in b.way for b in partial)
        for less in (0, 1) if n else ():
            plan = plan_schedule(path, "laptop", memory=vram, n_cpu_moe=n - less)
            assert bool(plan.overflows()) is bool(less)


def test_a_prompt_that_exceeds_the_cache_is_cut_and_it_says_so():
    plan = plan_schedule("tiny-mixtral-f16", "laptop", batch=600, context=512)
    assert plan.phases[0].n_tokens == 512 and any("600 tokens does not fit" in n for n in plan.notes)


def test_logits_of_a_whole_batch_are_reserved(tmp_path):
    """As llama.cpp does: with this vocabulary they are larger than anything else."""
    plan = plan_schedule(qwen3(tmp_path / "m.gguf", block_count=1), "laptop", batch=512, context=512)
    assert plan.devices[0].compute > 512 * N_VOCAB * 4


def test_time_is_told_by_what_it_goes_into():
    plan = plan_schedule("tiny-mixtral-f16", "laptop", n_cpu_moe=6, batch=48, context=512)
    for phase in plan.phases:
        nodes = Counter[str]()
        for w in phase.work:
            nodes[w.kind] += w.nodes
        assert nodes["norms"] == 6 * 4 + 2 and nodes["routing"] >= 6 * 4 and nodes["experts"] == 18
        assert nodes["rope, writing the cache"] == 6 * 4 and nodes["output matrix"] == 1


def test_notes_fit_the_plan(huge):
    def notes(model, *devices, **options):
        return " ".join(plan_schedule(model, *devices, batch=8, context=256, **options).notes)

    assert "op offload" not in notes("tiny-mixtral-f16", "laptop") and "mapped" not in notes("tiny-mixtral-f16", "laptop")
    assert "op offload" in notes("tiny-mixtral-f16", "laptop", n_cpu_moe=1) and "CUDA graphs" not in notes("tiny-mixtral-f16", "cpu")
    # the norm of 32 heads is a batch of 32 rows to ggml's rule, the norm of 4 is none
    assert "get_op_batch_size" in notes(huge, "laptop", n_gpu_layers=8)


def test_what_has_no_effect_is_said(tmp_path):
    path = tmp_path / "dense.gguf"
    path.write_bytes(small_file(expert_count=0))
    plan = plan_schedule(path, "laptop", batch=8, context=256, n_cpu_moe=2, overrides={"_exbs": "CPU", "attn_q": "CPU"})
    assert [n for n in plan.notes if "fits no tensor" in n] == ["The pattern _exbs fits no tensor's name."]
    assert any("no merged experts" in n for n in plan.notes)
    windowed = write("gpt-oss", tmp_path / "gpt-oss.gguf")
    assert WINDOW in fit(windowed, G, G, 1e9).notes and WINDOW in plan_schedule(windowed, "laptop").notes


def test_cards_share_layers_by_their_memory_without_a_builder_too(tmp_path):
    """The same layers on the same cards, whether graphs are known or not."""
    known, unknown = (plan_schedule(qwen3(tmp_path / f"{a}.gguf", arch=a, block_count=4), "laptop,rtx3090-pcie4", n_gpu_layers=4,
                                    batch=1, context=256) for a in ("qwen3moe", "hunyuan"))  # fmt: skip
    assert [d.weights for d in known.devices] == [d.weights for d in unknown.devices]


def test_what_is_not_counted_is_said(unknown, tmp_path):
    found = fit(unknown, 24 * G, 80 * G, 25e9, context=1000)
    assert any("NOT counted" in n for n in found.notes) and "could not be counted" in found.verdict()
    assert found.needs[1].nbytes == 4 * 4 * 256 * 2 * 1000  # layers, heads of K, widths of K and V, f16
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(craft.gguf([craft.key("general.architecture", craft.STR, "odd")], []))
    assert sum("NOT counted" in n for n in fit(bare, G, G, 1e9).notes) == 2


def test_fit_refuses_nonsense():
    for wrong in ({"vram": 0}, {"ram": -1}, {"link": 0.0}, {"batch": 0}, {"context": -5}):
        with pytest.raises(ParameterError):
            fit("tiny-mixtral-f16", **({"vram": G, "ram": G, "link": 1e9} | wrong))
