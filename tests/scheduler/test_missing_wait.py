"""A run without one of its waits: exactly that wait is missing, and what the trace says came too early is why results differ."""

import numpy as np
import pytest

import workbench as wb
from tests.scheduler.waits import Knife, load, run
from tests.views.runs import TEXT
from workbench import paths
from workbench.errors import ParameterError
from workbench.lessons.schedule_cases import CASES
from workbench.scheduler.waits import WAITS, differences, each_wait, outcome, run_of, waits
from workbench.trace import Trace
from workbench.views import hazards
from workbench.views.hazards import OVERWRITTEN, READ

SMALL = ["A B C | D | E F", "MLP, batch 32", "layers, batch 32", "two GPUs", "two GPUs, four copies", "experts on the host, batch 32",
         "a copy used twice", "forty inputs"]  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_exactly_the_chosen_wait_is_missing(name):
    make = run_of(CASES[name])
    whole = outcome(make)
    said = [whole.trace.described(e) | {"kind": e.kind} for e in waits(whole.trace)]
    for n, wait in enumerate(said, 1):
        cut = outcome(make, n)
        (missing,) = (cut.trace.described(e) for e in cut.trace.of("left_out"))
        assert missing == {"call": wait["kind"], "name": wait.get("event", wait.get("device"))}
        rest = [cut.trace.described(e) | {"kind": e.kind} for e in waits(cut.trace)]
        assert rest == [*said[: n - 1], *said[n:]][: len(rest)] and (len(rest) == len(said) - 1 or cut.error)


@pytest.mark.parametrize("name", SMALL)
def test_results_differ_only_where_something_came_too_early(name):
    make = run_of(CASES[name])
    whole = outcome(make)
    assert hazards(whole.trace) == [] and whole.error == "" and differences(whole, outcome(make)) == []
    for n in range(1, len(waits(whole.trace)) + 1):
        cut = outcome(make, n)
        assert hazards(cut.trace) or not (differences(whole, cut) or cut.error)


@pytest.mark.parametrize("name", ["abc_d_ef", "moe_ids_on_gpu", "two_gpus_layer_split", "two_gpus_no_async", "eval_callback_grouped",
                                  "moe_two_id_sets", "shared_buft_no_inputs_sync", "pipeline_4_copies_events", "rand_3"])  # fmt: skip
@pytest.mark.parametrize("mode", ["sync-first", "sync-last"])
def test_the_same_in_recorded_cases(name, mode):
    case, trace = load(name), Trace("virtual")
    want, noticed = run(case, Knife(), mode, "", trace), 0
    assert hazards(trace) == []
    for n in range(1, len(waits(trace)) + 1):
        cut = Trace("virtual")
        got = run(case, Knife(), mode, "", cut, n)
        noticed += got != want
        assert got == want or hazards(cut), n
    assert noticed


def test_a_hazard_of_ggml_is_found_in_its_trace():
    """Two devices on one kind of memory: ggml's waits are not enough where the first one is slow (rand_19); ours are."""
    case, mended, ggml = load("rand_19"), Trace("virtual"), Trace("virtual")
    assert run(case, Knife(), "sync-first", "", mended) != run(case, Knife(), "sync-first", "ggml", ggml)
    assert hazards(mended) == [] and {h.kind for h in hazards(ggml)} == {READ}


def test_what_is_overwritten_too_early_is_told_apart():
    """Without waiting for the readers of a copy, the next one lands on it."""
    found = set()
    for name in ("two_gpus_layer_split", "pipeline_4_copies_events"):
        case, trace = load(name), Trace("virtual")
        run(case, Knife(), "async-last", "", trace)
        for n in range(1, len(waits(trace)) + 1):
            cut = Trace("virtual")
            run(case, Knife(), "async-last", "", cut, n)
            found |= {h.kind for h in hazards(cut)}
    assert OVERWRITTEN in found


def test_the_shipped_mixtral_with_experts_on_the_host():
    """Its first needed wait is the one for the ids: without it the host reads old bytes and the run stops; another gives wrong logits."""
    model = wb.load(paths.models_dir() / "tiny-mixtral-f16.gguf")
    tokens = model.tokenizer.encode(TEXT)[:34]

    def make():
        devices = wb.simulated_machine(2)
        placed = wb.place_weights(model, devices, overrides={"_exps": "CPU"})
        session = wb.Session(placed, n_ctx=256, n_batch=64, scheduler=wb.Scheduler(devices))
        return session.scheduler, lambda: {"logits": session.decode(tokens)}

    whole = outcome(make)
    assert hazards(whole.trace) == [] and np.isfinite(whole.results["logits"]).all()
    kinds = [e.kind for e in whole.trace.events if e.kind in (*WAITS, "get_async", "launch")]
    ids = next(n for n, e in enumerate(waits(whole.trace), 1) if e is whole.trace.events[_after(whole.trace, "get_async")])
    cut = outcome(make, ids)
    assert "names expert" in cut.error and cut.results == {} and hazards(cut.trace)[0].who == "the host"
    last = outcome(make, len(waits(whole.trace)))
    assert hazards(last.trace) and kinds
    changed = differences(whole, last)
    assert changed and changed[0].name == "logits" and 0 < changed[0].differing <= changed[0].of


def _after(trace, kind):
    at = next(i for i, e in enumerate(trace.events) if e.kind == kind)
    return next(i for i in range(at, len(trace.events)) if trace.events[i].kind == "sync")


def test_each_wait_goes_through_all():
    rows = list(each_wait(run_of(CASES["A B C | D | E F"])))
    assert [cut.without for _, cut, _ in rows] == list(range(1, len(rows) + 1))
    assert [d[0].name for _, _, d in rows if d] == ["F"]


def test_what_cannot_be_left_out():
    make = run_of(CASES["A B C | D | E F"])
    for n in (-1, 7, 99):
        with pytest.raises(ParameterError, match="1 to 6"):
            outcome(make, n)
    with pytest.raises(ParameterError, match="simulated"):
        outcome(lambda: (wb.Scheduler([wb.CpuBackend()]), dict))


def test_an_eager_machine_has_nothing_to_miss():
    """Devices that work at the call: the same wait is missing, and nothing is different."""
    make = run_of(CASES["A B C | D | E F"])

    def eager():
        scheduler, run = make()
        scheduler.backends[0].machine.eager = True
        return scheduler, run

    assert all(differences(outcome(eager), outcome(eager, n)) == [] for n in range(1, 7))


def test_pipeline_slots_by_number():
    for given, slots in ((False, 1), (1, 1), (2, 2), (3, 3), (True, 4), (4, 4)):
        assert wb.Scheduler(wb.simulated_machine(2), parallel=given).n_copies == slots
    for wrong in (-1, 5):
        with pytest.raises(ParameterError, match="slots"):
            wb.Scheduler(wb.simulated_machine(2), parallel=wrong)
