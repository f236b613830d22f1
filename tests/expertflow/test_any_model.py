"""Random small models of every architecture (biases, shared experts, groups, a sigmoid router) through the engine: the bits of the
model that is all there, whatever the budget, the policy, the forecast, and where missing experts are computed."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.expertflow.offloaded import Run
from tests.models.architectures import MODELS, N_VOCAB, write
from workbench import load
from workbench.expertflow.cache import GRANULARITIES
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.observe import Gates
from workbench.expertflow.visits import expert_weights

NAMES = [name for name in MODELS if name != "deepseek-v2-lite"]  # 26 layers: too long for so many runs


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory):
    """A model, and logits of some prompts with everything on the card."""
    pytest.importorskip("gguf")
    with load(write(request.param, tmp_path_factory.mktemp("models") / f"{request.param}.gguf")) as model:
        yield model, {}


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bits_are_those_of_the_model_that_is_all_there(case, data):
    model, known = case
    tokens = tuple(np.random.default_rng(data.draw(st.integers(0, 1), "prompt")).integers(0, N_VOCAB, 9).tolist())
    if tokens not in known:
        whole = Run(model, None)
        known[tokens] = whole.text(list(tokens), 2)
        whole.close()
    weights, k, n_expert = expert_weights(model), model.hparams.n_expert_used, model.hparams.n_expert
    policy = data.draw(st.sampled_from(["lru", "lfu", "lfu_in_cache", "lru_frequency", "static", "predicted", "plec"]), "policy")
    scope = data.draw(st.sampled_from(["global", "layer"]), "scope")
    least = k * (len(weights) if scope == "layer" else 1) + k * (policy == "static")
    size = sum(-(-w.nb[2] // 256) * 256 for w in next(iter(weights.values())))
    slots = data.draw(st.integers(least, max(least, n_expert * len(weights))), "slots")
    window = data.draw(st.integers(1, 2), "window") if policy in ("predicted", "plec") or data.draw(st.booleans(), "forecast") else 0
    run = Run(model, slots * size, policy=policy, scope=scope, host_below=data.draw(st.sampled_from([0, 2, 3, "auto", 10**6]), "host below"),
              granularity=data.draw(st.sampled_from(GRANULARITIES), "granularity"),
              hot=np.arange(n_expert * len(weights)).reshape(len(weights), -1) * 7 % 5,
              forecast=Forecaster.of_gates(Gates.of(model), window) if window else None)
    try:
        assert np.array_equal(run.text(list(tokens), 2), known[tokens])
    finally:
        run.close()


@pytest.mark.parametrize("host_below", [0, 2, 10**6])
def test_a_callback_sees_every_node_whole(case, host_below):
    """Also nodes that were computed in waves, or in part on the host: what it sees is what it sees of the model that is all there."""
    model, _ = case
    k, size = model.hparams.n_expert_used, sum(-(-w.nb[2] // 256) * 256 for w in next(iter(expert_weights(model).values())))
    seen = []
    for budget, more in ((None, {}), (k * size, {"host_below": host_below})):
        run, found = Run(model, budget, **more), {}

        def look(node, ask, found=found):
            if not ask:
                found[node.name] = np.array(node.numpy())
            return True

        run.session.scheduler.eval_callback = look
        run.session.decode([3, 1, 4, 1, 5, 9, 2, 6], outputs="all")
        seen.append(found)
        assert budget is None or run.counters.waves or run.counters.hosted
        run.close()
    assert list(seen[0]) == list(seen[1])
    assert not [name for name in seen[0] if seen[0][name].tobytes() != seen[1][name].tobytes()]
