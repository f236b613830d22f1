"""What users do to an engine: knobs at their ends, files replaced, runs interrupted, prefetches that come at the wrong time."""

import shutil
import sys

import numpy as np
import pytest

from tests.expertflow.offloaded import Run
from workbench import models, paths
from workbench.errors import FileFormatError, ParameterError, StorageError
from workbench.expertflow.cache import GRANULARITIES
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates
from workbench.expertflow.offload import budget_bytes, expert_bytes, offload
from workbench.expertflow.visits import expert_weights

NAME, PROMPT = "tiny-mixtral-f16", "And God said unto Moses, Go in unto Pharaoh"


@pytest.fixture(scope="module")
def model():
    with models.load(NAME) as model:
        yield model


@pytest.fixture(scope="module")
def resident(model):
    run = Run(model, None)
    yield run.text(model.tokenizer.encode(PROMPT))
    run.close()


def ahead(model, window=2, fetch=None):
    return Forecaster.of_gates(Gates.of(model), window, fetch)


def test_a_prefetch_without_a_free_slot_is_dropped_not_waited_for(model, resident):
    """With a token's experts and nothing more, all slots are in use while the layer computes."""
    run = Run(model, 2 * 122_880, policy="predicted", forecast=ahead(model))
    assert np.array_equal(run.text(model.tokenizer.encode(PROMPT)), resident)
    assert run.counters.dropped > 0
    run.close()


@pytest.mark.parametrize(("window", "fetch", "prefetches"), [(1, 1, 0), (4, 8, 64), (1, 8, 1)])
def test_knobs_at_their_ends(model, resident, window, fetch, prefetches):
    for budget in (2 * 122_880, 1.0):
        run = Run(model, budget, policy="plec", forecast=ahead(model, window, fetch), prefetches=prefetches)
        assert np.array_equal(run.text(model.tokenizer.encode(PROMPT)), resident)
        if not prefetches:
            assert run.counters.prefetches == 0
        run.close()


def test_all_there_moves_each_expert_once(model):
    run = Run(model, "100%")
    for token in model.tokenizer.encode(PROMPT * 3):
        run.session.decode([token])
    assert run.counters.evictions == 0 and run.counters.loads == len(run.pool.where)
    run.close()


@pytest.mark.parametrize("sent", [0, 1, 2, 3])
def test_a_prefetch_in_flight_never_writes_into_a_slot_that_was_given_away(model, sent):
    """The copy stream keeps the order of loads, and each load waits for the last reader: a tag is the last load's, or none."""
    run = Run(model, 3 * 122_880)
    pool, card = run.pool, run.card
    begun = pool.take(0, 1)
    for m in range(sent):
        pool.send(begun, m)
    pool.evict(0, 1)                                                             # before the copies have happened
    slot = pool.load(3, 5)
    assert slot is begun and slot is pool.where[3, 5] and slot.tag is None and not slot.there
    card.synchronize()
    assert slot.tag == (3, 5, slot.load)
    for m, weight in enumerate(pool.weights[3]):
        there = slot.buffer.device_bytes()[pool.offsets[3][m] :][: weight.nb[2]]
        assert np.array_equal(there, weight.require_data().host_bytes()[weight.offset + 5 * weight.nb[2] :][: weight.nb[2]])
    run.close()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_reset_forgets_what_was_on_its_way(model, resident, granularity):
    run = Run(model, 0.5, policy="predicted", forecast=ahead(model), granularity=granularity)
    tokens = model.tokenizer.encode(PROMPT)
    run.session.decode(tokens)
    run.card.cancel()                                                            # as after a failed run: copies under way never end
    run.engine.cancelled()
    run.session.reset()
    assert np.array_equal(run.text(tokens), resident)
    run.close()


class Interrupted:
    """Ctrl-C at the n-th call of a function of engine or pool, or of other `files`."""

    def __init__(self, n, files=("expertflow/engine.py", "expertflow/pool.py")):
        self.left, self.files = n, files

    def __call__(self, frame, event, arg):
        if event == "call" and frame.f_code.co_filename.endswith(self.files):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt

    def __enter__(self):
        sys.setprofile(self)

    def __exit__(self, *exc):
        sys.setprofile(None)


@pytest.mark.parametrize(("granularity", "policy"), [("expert", "predicted"), ("matrix", "predicted"), ("matrix", "static")])
def test_an_interrupt_anywhere_leaves_a_session_that_works(model, resident, granularity, policy):
    """Also between what the cache decided and what the pool did about it, and while a prefetch is under way."""
    run = Run(model, 0.3, policy=policy, forecast=ahead(model), granularity=granularity, hot=np.arange(48).reshape(6, 8))
    tokens, stopped = model.tokenizer.encode(PROMPT), 0
    for n in (*range(1, 2000, 97), 10**9):
        with Interrupted(n):
            try:
                run.session.decode(tokens)
            except KeyboardInterrupt:
                stopped += 1
        run.session.reset()
        there = {(layer, e) for layer, experts in run.engine.cache.resident().items() for e in experts}
        assert there == run.pool.where.keys()
        if n % 5 == 0:
            assert np.array_equal(run.text(tokens), resident)
            run.session.reset()
    assert stopped > 5 and np.array_equal(run.text(tokens), resident)
    run.close()


def test_an_interrupt_while_a_card_prepares_a_graph(model, resident):
    """Between the plan of a graph and the times of its nodes, too: a session begins anew, and has the same bits."""
    run, tokens, stopped = Run(model, 0.3), model.tokenizer.encode(PROMPT), 0
    for n in range(1, 200, 9):
        with Interrupted(n, ("devices/cost.py",)):
            try:
                run.session.decode(tokens)
            except KeyboardInterrupt:
                stopped += 1
        run.session.reset()
    assert stopped > 5 and np.array_equal(run.text(tokens), resident)
    run.close()


def test_a_prompt_token_by_token_loads_experts_again_and_again(model):
    """Looped, a prompt reads each expert several times; as one batch, once per layer: the counters say by how much."""
    tokens = model.tokenizer.encode(PROMPT * 4)[:48]
    loads = []
    for parts in ([tokens], [[t] for t in tokens]):
        run = Run(model, 0.25)
        for part in parts:
            run.session.decode(part)
        loads.append(run.counters.loads)
        run.close()
    assert loads[1] > 2 * loads[0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_file_that_is_replaced_or_written_while_it_is_mapped(tmp_path, granularity):
    """Another file in its place leaves the mapped one whole; writing into it is found before anything is computed."""
    path = tmp_path / "model.gguf"
    shutil.copy(paths.models_dir() / f"{NAME}.gguf", path)
    with models.load(path) as model, offload(model, 0.5, verify=True, granularity=granularity) as run:
        first = run.session.decode(model.tokenizer.encode("And"))
        shutil.copy(paths.models_dir() / "tiny-mixtral-q8_0.gguf", tmp_path / "other")
        (tmp_path / "other").replace(path)
        run.session.reset()
        assert np.array_equal(run.session.decode(model.tokenizer.encode("And")), first)
    shutil.copy(paths.models_dir() / f"{NAME}.gguf", path)
    with models.load(path) as model, offload(model, 0.5, granularity=granularity) as run:
        run.session.decode(model.tokenizer.encode("And"))
        with path.open("r+b") as file:
            file.seek(-4096, 2)
            file.write(bytes(4096))
            file.truncate(path.stat().st_size + 1)
        with pytest.raises(FileFormatError, match="changed"):
            run.session.decode([5])


def test_budgets_in_words(model):
    whole = expert_bytes(model)
    assert budget_bytes(model, "25%") == budget_bytes(model, 0.25) == whole // 4 and budget_bytes(model, 1000) == 1000
    for wrong in ("lots", "120%", -1, 1.5, True, "x%"):
        with pytest.raises(ParameterError):
            budget_bytes(model, wrong)


def test_a_slot_cannot_be_taken_twice_and_a_closed_pool_is_no_memory(model):
    run = Run(model, 2 * 122_880)
    run.pool.load(0, 0)
    run.pool.load(0, 1)
    with pytest.raises(StorageError):
        run.pool.load(0, 2)
    view = run.pool.view(expert_weights(model)[0][0])
    with pytest.raises(StorageError):
        view.expert(7)
    run.pool.close()
    assert view.closed
    run.placed.close()


def test_the_engines_own_work_is_small_beside_the_run(model):
    """Counted calls, not seconds: per layer and token a handful of decisions, whatever the length of the run."""
    run = Run(model, 0.5)
    tokens = model.tokenizer.encode(PROMPT * 3)[:40]
    for token in tokens:
        run.session.decode([token])
    c = run.counters
    assert c.ids_waits == len(tokens) * 6
    assert c.hits + c.loads == len(tokens) * 6 * 2 and c.evictions <= c.loads
    run.close()


@pytest.mark.parametrize(("more", "says"), [
    ({"host_below": -1}, "host_below=-1"), ({"host_below": "few"}, "host_below='few'"), ({"host_below": 1.5}, "host_below=1.5"),
    ({"prefetches": -1}, "prefetches=-1"), ({"granularity": "bit"}, "granularity 'bit'"), ({"policy": "static", "hot": np.zeros((1, 1))}, "shape"), ({"backends": []}, "0 backends")])
def test_wrong_settings_are_refused_by_name(model, more, says):
    with pytest.raises(ParameterError) as e:
        offload(model, 0.5, **more)
    assert says in str(e.value)


def test_auto_on_a_device_whose_speed_nobody_knows_is_refused(model):
    run = Run(model, 0.5, host_below="auto")
    speed, run.card.speed = run.card.speed, None
    del run.card.speed
    with pytest.raises(ParameterError, match="whose speed nobody knows"):
        run.session.decode([5])
    run.card.speed = speed
    run.close()
