"""The cost model: its formulas, the presets and their sources, pinned and pageable copies, and this machine's clock."""

import dataclasses

import numpy as np
import pytest

from workbench import Context, CpuBackend, build, ops, simulated_machine
from workbench.devices import DeviceType
from workbench.devices.calibrate import calibrate
from workbench.devices.cost import CPU, GPU, Speed, devices_of, preset, presets
from workbench.devices.machines import preset_names
from workbench.errors import FileFormatError, ParameterError
from workbench.models.timing import layer_times
from workbench.tensors import Flag, HostStorage, Usage
from workbench.trace import Trace
from workbench.views.run_data import run_data


@pytest.fixture
def ctx():
    return Context(2**22, no_alloc=True)


# ---- formulas


def test_a_product_takes_its_start_and_the_slower_of_arithmetic_and_memory(ctx):
    speed = Speed(launch_ns=7, flops=2.0, memory=3.0, flops_of={"f16": 8.0})
    wide = ops.mul_mat(ctx.new_tensor("f32", 64, 32), ctx.new_tensor("f32", 64, 16))
    assert speed.compute_ns(wide) == 7 + 2 * 64 * 32 * 16 // 2
    one = ops.mul_mat(ctx.new_tensor("f16", 64, 32), ctx.new_tensor("f32", 64, 1))
    assert speed.compute_ns(one) == 7 + (64 * 32 * 2 + 64 * 4 + 32 * 4) // 3
    assert speed.parts(one)["arithmetic"] == 2 * 64 * 32 // 8


def test_gaps_of_views_are_not_read(ctx):
    """As where outputs of experts are added up: every eighth row."""
    rows = ctx.new_tensor("f32", 64, 8, 100)
    one = ops.view(rows, 64, 1, 100, nb=(rows.nb[1], rows.nb[2]))
    assert one.nbytes > 7 * 64 * 100 * 4
    assert Speed(launch_ns=0, memory=1.0, flops=1e9).compute_ns(ops.add(one, one)) == 3 * 64 * 100 * 4


def test_experts_count_as_often_as_they_are_used(ctx):
    speed = Speed(launch_ns=5, flops=1e9, memory=1.0, expert_ns=100)
    node = ops.mul_mat_id(
        ctx.new_tensor("f16", 32, 48, 8), ctx.new_tensor("f32", 32, 1, 2), ctx.new_tensor("i32", 3, 2)
    )
    touched = 6 * (32 * 48 * 2) + 32 * 2 * 4 + 6 * 4 + node.nbytes
    assert speed.compute_ns(node) == 5 + 6 * 100 + touched
    unpacked = dataclasses.replace(speed, unpacked=True)
    assert unpacked.compute_ns(node) - speed.compute_ns(node) == 6 * 32 * 48 * 2


def test_starts_may_differ_by_op_and_type(ctx):
    speed = Speed(launch_ns=5, flops=1e9, memory=1e9, starts={"MUL_MAT": 9, "MUL_MAT f16": 11})
    x = ctx.new_tensor("f32", 32, 1)
    assert [
        speed.compute_ns(n)
        for n in (
            ops.mul_mat(ctx.new_tensor("f16", 32, 4), x),
            ops.mul_mat(ctx.new_tensor("f32", 32, 4), x),
            ops.add(x, x),
        )
    ] == [11, 9, 5]


def test_copies_by_what_the_host_memory_is():
    speed = Speed(link=10.0, link_ns=100, pageable=4.0)
    assert (speed.transfer_ns(4000), speed.transfer_ns(4000, pinned=False)) == (500, 1100)
    assert GPU.transfer_ns(10**6) == GPU.transfer_ns(10**6, pinned=False)


@pytest.mark.parametrize(("pinned", "waits"), [(True, 0), (False, 10 + 1000)])
def test_pageable_memory_keeps_the_host_busy(ctx, pinned, waits):
    speed = dataclasses.replace(GPU, link=4.0, pageable=1.0, link_ns=10)
    gpu, cpu = simulated_machine(speed=speed)
    gpu.buffer_type.speed = speed
    tensor = ctx.new_tensor("f32", 250)
    tensor.place(gpu.buffer_type.alloc_buffer(1000))
    host = (cpu.buffer_type.alloc_buffer(1000) if pinned else HostStorage(1000)).host_bytes()
    host[:] = 7
    start = gpu.machine.now
    gpu.set_async(tensor, host)
    assert gpu.machine.now - start == waits
    gpu.synchronize()
    assert gpu.machine.now - start == (10 + 250 if pinned else waits)
    tensor.storage.write(0, host)
    assert gpu.machine.now - start == 2 * (10 + 250 if pinned else waits)


@pytest.mark.parametrize("wait", [True, False])
def test_a_prefetch_runs_beside_the_stream_and_needs_its_event(wait):
    """The copy stream: 100 ns of copying beside a kernel, seen by those that wait for it and not before."""
    gpu, cpu = simulated_machine(speed=Speed(launch_ns=40, flops=1e9, memory=1e9, link=4.0, link_ns=0))
    with Context() as ctx:
        tensors = [ctx.new_tensor("f32", 100) for _ in range(2)]
        ys = [ops.scale(t, 2.0).mark(Flag.OUTPUT) for t in tensors]
        for t in (*tensors, *ys):
            t.place(gpu.buffer_type.alloc_buffer(400))
        for t in tensors:
            t.set(np.zeros(100, np.float32))
        source = cpu.buffer_type.alloc_buffer(400)
        source.write(0, np.ones(100, np.float32))
        start, gpu.trace = gpu.machine.now, Trace("virtual")
        gpu.compute_async(build(ys[0]))
        used = gpu.new_event("used")
        used.record()
        done = gpu.prefetch(tensors[1], source.host_bytes(), after=None if wait else used)
        if wait:
            gpu.wait_event(done)
        gpu.compute_async(build(ys[1]))
        gpu.synchronize()
        spans = {(d["stream"], e.start - start, e.end - start) for e in gpu.trace.of("busy") for d in [gpu.trace.described(e)]}
        assert set(ys[1].numpy()) == {2.0 if wait else 0.0}
    want = {("copies", 0, 100), ("compute", 100, 140)} if wait else {("copies", 40, 140), ("compute", 40, 80)}
    assert spans == want | {("compute", 0, 40)} and gpu.machine.now - start >= 140
    assert {lane for lane in run_data(gpu.trace).lanes if lane[0] == "GPU"} == {("GPU", "compute"), ("GPU", "copies")}


def test_waiting_has_a_price():
    gpu, _ = simulated_machine(speed=dataclasses.replace(GPU, sync_ns=123))
    gpu.synchronize()
    assert gpu.machine.now == 123


# ---- presets


def test_every_figure_has_a_source_and_is_positive():
    known = presets()
    assert {"laptop", "rtx3090-pcie3", "rtx3090-pcie4", "two-rtx3090", "a100", "blas", "cpu"} <= known.keys()
    for p in known.values():
        assert p.cards or p.figures
        for name, value in p.figures.items():
            assert len(p.sources[name]) > 5 and (value > 0 or name == "link_ns")
        assert all(0 < share <= 1 for share in p.reached.values())
        assert len(p.rows()) == len(p.figures)


def test_peaks_are_reached_in_part():
    p = preset("rtx3090-pcie4")
    assert p.speed.memory == pytest.approx(936 * p.reached["memory"])
    assert p.speed.flops_of["f16"] == pytest.approx(71000 * p.reached["f16"]) and "q4_K" in p.speed.flops_of
    assert (
        p.speed.link == pytest.approx(2 * preset("rtx3090-pcie3").speed.link, rel=0.01)
        and p.speed.link > p.speed.pageable
    )


def test_machines_of_presets():
    assert [p.kind for p in preset_names("cpu,blas, two-rtx3090")] == ["GPU", "GPU", "BLAS", "CPU"]
    devices = simulated_machine("two-rtx3090,blas")
    assert [d.name for d in devices] == ["GPU0", "GPU1", "BLAS", "CPU"] and devices[2].device_type is DeviceType.ACCEL
    assert devices[2].buffer_type is devices[3].buffer_type and devices[0].buffer_type.capacity == 24 * 2**30
    assert devices[0].speed is preset("rtx3090-pcie3").speed and devices[3].speed is preset("cpu").speed


@pytest.mark.parametrize("names", ["gtx9999", "cpu,cpu", "blas,blas", "", ",".join(["laptop"] * 16)])
def test_wrong_names_are_explained(names):
    with pytest.raises(ParameterError) as e:
        simulated_machine(names)
    assert e.value.expected


GOOD = "[a]\ntitle='t'\nkind='GPU'\nf32=[1,'s']\n"


@pytest.mark.parametrize("text", ["x", "a=1", "[a]\ntitle = 'b'", GOOD.replace("GPU", "TPU"), "[a]\ntitle='t'\nkind='cards'\ncards=[]",
    *(GOOD + more for more in ("wings=[2,'s']", "f16=[]", "f16=2", "memory=[0,'s']", "memory=[-4,'s']", "memory=[nan,'s']", "memory=[inf,'s']",
                               "capacity=[1e300,'s']", "link_ns=[-1,'s']", "starts=[1]", "starts={ADD=-5}", "starts={ADD=inf}",
                               "reached={f32=0}", "reached={f32=2}"))])  # fmt: skip
def test_a_file_without_presets(tmp_path, text):
    file = tmp_path / "a.toml"
    file.write_text(GOOD)
    assert devices_of(str(file))[0].speed.flops == 1
    other = tmp_path / "b.toml"
    other.write_text(text)
    with pytest.raises(FileFormatError):
        devices_of(str(other))


def test_a_file_with_several_devices_is_a_machine(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace("[a]", "[host]").replace("GPU", "CPU") + GOOD)
    assert [p.kind for p in preset_names(str(file))] == ["GPU", "CPU"]
    file = tmp_path / "wrong.toml"
    file.write_text(GOOD + "[m]\ntitle='t'\nkind='cards'\ncards=['laptop']\n")
    with pytest.raises(FileFormatError):
        preset_names(str(file))


def test_machines_name_cards_not_machines(tmp_path):
    (tmp_path / "a.toml").write_text("[a]\ntitle='t'\nkind='cards'\ncards=['laptop', 'two-rtx3090']")
    with pytest.raises(FileFormatError):
        simulated_machine(str(tmp_path / "a.toml"))


def test_blas_takes_large_packed_products_only(ctx):
    blas = simulated_machine("blas")[0]

    def product(k, n, t, kind="f16"):
        return ops.mul_mat(ctx.new_tensor(kind, k, n), ctx.new_tensor("f32", k, t))

    assert blas.supports_op(product(32, 32, 32)) and blas.supports_op(product(64, 64, 40, "q4_0"))
    assert not any(blas.supports_op(product(*shape)) for shape in ((31, 32, 32), (32, 31, 32), (32, 32, 31)))
    assert not blas.supports_op(ops.add(ctx.new_tensor("f32", 64), ctx.new_tensor("f32", 64)))
    wide = ctx.new_tensor("f32", 64, 64)
    assert not blas.supports_op(ops.mul_mat(wide, ops.transpose(wide)))


# ---- this machine


def test_predicted_against_measured_per_layer():
    """The best of up to four tries: a busy machine may spoil any one."""
    for which in ("tiny-mixtral-f16", "tiny-deepseek-f16"):
        for attempt in range(4):
            rows, _ = layer_times(which, rounds=4 + 4 * attempt)
            ratios = {(r.n_tokens, r.layer): round(r.ratio, 2) for r in rows if isinstance(r.layer, int)}
            if all(0.5 <= ratio <= 2 for ratio in ratios.values()):
                break
        assert {n for n, _ in ratios} == {1, 64} and all(0.5 <= ratio <= 2 for ratio in ratios.values()), ratios


def test_a_calibration_is_a_preset(tmp_path):
    backend = CpuBackend()
    measured = calibrate(backend, rounds=1)
    file = tmp_path / "mine.toml"
    file.write_text(measured.to_toml("mine"), "utf-8")
    p = preset(str(file))
    assert p.kind == "CPU" and p.speed.unpacked and p.speed.starts == measured.speed.starts
    for name in ("flops", "memory", "link", "vector"):
        assert getattr(p.speed, name) == pytest.approx(getattr(measured.speed, name), rel=1e-4)
    assert 1 < measured.speed.flops < 1e5 and measured.speed.launch_ns < 10**6 and CPU.flops > 0
    assert simulated_machine(str(file))[-1].speed.launch_ns == measured.speed.launch_ns
    assert np.isfinite(list(measured.speed.flops_of.values())).all() and Usage.WEIGHTS
