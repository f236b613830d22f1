"""Each kind of copy and wait in the runtime is needed: in some case, leaving one call out raises an error or changes a result.

`python -m tests.scheduler.waits` looks through all cases; what it found stands here as one witness per place. A witness is a
recorded case, or one on changed backends (`waits.load`), the number of the call, the mode, and the quirks.
"""

import pytest

from tests.scheduler.waits import Knife, load, needed, run

WITNESSES = {
    ("_bring", "copy_async"): ("two_gpus_layer_split", 1, "sync-first", "ggml"),
    ("_copy_blocking", "copy_tensor"): ("abc_d_ef", 1, "sync-first", "ggml"),
    ("_copy_user_input", "copy_tensor"): ("abc_d_ef", 1, "sync-first", "ggml"),
    ("move", "set_async"): ("moe_ids_on_gpu", 1, "sync-first", "ggml"),
    ("read_ids", "get_async"): ("moe_ids_on_gpu", 1, "sync-first", "ggml"),
    ("_compute", "compute_async"): ("abc_d_ef", 1, "sync-first", "ggml"),
    ("_compute_observed", "compute_async"): ("eval_callback_grouped", 1, "sync-first", "ggml"),
    # waits
    ("run", "synchronize"): ("shared_buft_no_inputs_sync", 1, "sync-first", "ggml"),
    ("run", "event.synchronize"): ("shared_buft_no_inputs_sync+pipeline", 1, "sync-first", "ggml"),
    ("run", "event.record"): ("pipeline_4_copies_events", 1, "async-first", "ggml"),
    ("_copy_user_input", "synchronize"): ("abc_d_ef", 2, "async-first", "ggml"),
    ("_copy_user_input", "event.synchronize"): ("pipeline_4_copies_events", 9, "async-first", "ggml"),
    ("_await_readers", "synchronize"): ("two_gpus_layer_split", 3, "async-last", "ggml"),
    ("_await_readers", "wait_event"): ("pipeline_4_copies_events", 6, "async-last", "ggml"),
    ("_copy_blocking", "synchronize"): ("abc_d_ef", 1, "sync-first", "ggml"),
    ("_copy_blocking", "event.synchronize"): ("pipeline_4_copies_events+blocking", 6, "async-last", "ggml"),
    ("read_ids", "synchronize"): ("moe_ids_on_gpu", 1, "sync-first", "ggml"),
    ("_compute_observed", "synchronize"): ("eval_callback_grouped", 1, "sync-first", "ggml"),
    ("_await_neighbours", "synchronize"): ("shared_buft_no_inputs_sync+input", 1, "sync-first", ""),
    ("synchronize", "synchronize"): ("pipeline_4_copies_events", 2, "sync-first", "ggml"),
}

REDUNDANT = {
    ("move", "synchronize"): "weights do not change while a run is under way; ggml waits for their device all the same",
    ("run", "synchronize"): "the split before ran on another kind of memory, or on a device without a stream",
    ("run", "event.synchronize"): "as above: ggml waits without asking whether memory is shared",
    ("run", "event.record"): "nobody waits for this slot's event before the next full synchronisation",
    ("_copy_user_input", "synchronize"): "the device has nothing to do: first run, or a wait for an input before this one",
    ("_copy_user_input", "event.synchronize"): "the slot was not used before, or an input before this one has waited for the same event",
    ("_await_readers", "synchronize"): "the copy goes to memory that nobody reads, or a blocking copy follows, which waits itself",
    ("_await_readers", "wait_event"): "the slot was not used before, or the source is slower than the readers of the last contents",
    ("_copy_blocking", "synchronize"): "source or target has no stream or nothing to do; the target was waited for just before",
    ("_copy_blocking", "event.synchronize"): "the source is slower than the readers of the last contents",
    ("_compute_observed", "synchronize"): "the callback does not look at these nodes",
    ("synchronize", "synchronize"): "the device has no stream, or the last split's device, which waited for it, is waited for, too",
    ("_compute", "compute_async"): "the split holds only views",
    ("_await_neighbours", "synchronize"): "ggml's own waits are enough",
    ("read_ids", "synchronize"): "the ids were computed by a device that works at the call, or were waited for with an input before",
    ("_bring", "copy_async"): "an earlier run left the same bytes there",
    ("_copy_blocking", "copy_tensor"): "an earlier run left the same bytes there",
    ("move", "set_async"): "an earlier run left the same bytes there",
}
"""Places some or all of whose calls change nothing in the recorded cases, and why not."""


@pytest.mark.parametrize("place", WITNESSES, ids=".".join)
def test_it_is_noticed_when_one_is_left_out(place):
    name, n, mode, quirks = WITNESSES[place]
    case = load(name)
    whole, cut = run(case, Knife(), mode, quirks), run(case, Knife(place, n), mode, quirks)
    assert whole != "error" and cut != whole


@pytest.mark.parametrize("name", ["abc_d_ef", "moe_ids_on_gpu", "pipeline_4_copies_events", "eval_callback_grouped"])
def test_every_place_is_listed(name):
    for place, _, noticed in needed(load(name), "async-first", "ggml"):
        assert place in WITNESSES or place in REDUNDANT
        assert noticed or place in REDUNDANT, place


def test_ggml_does_not_wait_for_a_neighbour_in_memory():
    """Two devices on one kind of memory: where the second also copies something in, ggml starts it too early."""
    case = load("shared_buft_no_inputs_sync+input")
    assert run(case, Knife(), "sync-first", "") == run(case, Knife(), "async-last", "") != run(case, Knife(), "sync-first", "ggml")
