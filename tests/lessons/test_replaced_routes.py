"""Shipped models with their router overruled."""

import json

import numpy as np
import pytest

from workbench import models, paths
from workbench.errors import ParameterError
from workbench.lessons.replaced_routes import losses_with_routes


@pytest.fixture(scope="module", params=["tiny-mixtral-f16", "tiny-deepseek-f16"])
def model(request):
    with models.load(request.param) as made:
        yield made


def text(model, n=48):
    return model.tokenizer.encode((paths.models_dir() / "samples" / "english.txt").read_text("utf-8")[:1000])[:n]


def test_chosen_routes_are_those_of_a_session(model):
    tokens = text(model)
    with models.Session(model) as session:
        logits = session.decode(tokens, outputs="all").astype(float)[:-1]
    want = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1) - logits[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(losses_with_routes(model, tokens), want, atol=1e-4)


def test_wrong_routes_cost_something_and_are_drawn_from_the_seed(model):
    tokens = text(model)
    chosen, random, none = (losses_with_routes(model, tokens, routes).mean() for routes in ("chosen", "random", "none"))
    assert min(random, none) > chosen + 0.2
    assert losses_with_routes(model, tokens, "random", 0).mean() == random != losses_with_routes(model, tokens, "random", 1).mean()


def test_wrong_routes_hurt_less_with_shared_experts():
    """As recorded: without a shared expert more than 3 nats per token in every domain, with one less than 1.5."""
    file = json.loads((paths.models_dir() / "metrics" / "random_routes.json").read_text("utf-8"))
    worse = {name: [np.mean(d["random"]) - d["chosen"] for d in file[name].values()] for name in ("tiny-mixtral-f16", "tiny-deepseek-f16")}
    assert min(worse["tiny-mixtral-f16"]) > 3 and max(worse["tiny-deepseek-f16"]) < 1.5


def test_unknown_routes_are_named(model):
    with pytest.raises(ParameterError, match="chosen, random, none"):
        losses_with_routes(model, text(model), "best")
