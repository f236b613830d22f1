"""Lessons 17 and 18: their state against other judges, what they claim about runs, printed numbers away from rounding edges."""

import numpy as np
import pytest

from workbench import models, moe, views
from workbench.errors import ShapeError
from workbench.lessons import open_lesson
from workbench.lessons.balance_states import REMEDIES, TOP1
from workbench.lessons.expert_similarity import by_chance, every_answer, hidden_units, matched_cosine, mean_cosine
from workbench.lessons.replaced_routes import losses_with_routes
from workbench.moe import ExpertWeights, balance
from workbench.moe.training import ClusterModel, ClusterTask
from workbench.tensors import Context


@pytest.fixture(scope="module")
def state():
    return open_lesson("17").state


@pytest.fixture(scope="module")
def shared():
    return open_lesson("18").state


# ---- lesson 17


def test_losses_are_their_definitions(state):
    z = np.random.default_rng(0).standard_normal((40, 8)) * 2
    for k in (1, 2):
        run = state.losses_of(z, moe.Router(8, k, normalise=False))
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        ids = np.argsort(-z, 1)[:, :k]
        f = np.bincount(ids.ravel(), minlength=8) / ids.size
        np.testing.assert_allclose(run.probs, p, atol=1e-6)
        assert (run.experts == ids).all() and (run.counts == f * ids.size).all()
        assert run.balance == pytest.approx(8 * (f * p.mean(0)).sum(), rel=1e-5)
        assert run.z == pytest.approx((np.log(np.exp(z).sum(1)) ** 2).mean(), rel=1e-5)
        np.testing.assert_allclose(run.slopes, 8 / 40 * p * (f - p @ f[:, None]), atol=1e-7)


def test_capacity_in_a_real_model(state):
    tokens = state.text(64)
    plain = losses_with_routes(state.model, tokens).mean()
    free, full = state.loss_with_capacity(tokens, None), state.loss_with_capacity(tokens, 4.0)
    assert free[1] == full[1] == 0 and free[0] == pytest.approx(full[0], abs=1e-5) == pytest.approx(plain, abs=1e-4)
    nothing, half = state.loss_with_capacity(tokens, 0.0), state.loss_with_capacity(tokens, 0.5)
    assert nothing[1] == 1 and half[1] >= 0.5 and nothing[0] == pytest.approx(losses_with_routes(state.model, tokens, "none").mean(), abs=1e-4)
    assert state.model.hparams.router.capacity_factor is None


def test_settling_is_what_the_program_does(state):
    for seed in (0, 1):
        scores = state.scores(seed)
        assert state.settled(scores, 1 / 64, 1).tolist() == np.bincount(scores.argmax(1), minlength=8).tolist()
        assert balance.max_violation(state.settled(scores, 1 / 64, 40)) < 0.5 < balance.max_violation(state.settled(scores, 1 / 64, 1))


class Shaken(ClusterTask):
    """The same batches, each number off in its last places, as another machine's arithmetic would be."""

    def batch(self, rng, n):
        x, y, cluster = super().batch(rng, n)
        return x * np.float32(1 + 5e-7), y, cluster


@pytest.mark.parametrize("remedy", REMEDIES)
def test_what_lesson_17_prints_of_a_live_run_does_not_hang_on_the_last_bits(state, remedy):
    runs = [state.trained(remedy, seed=3), ClusterModel(Shaken(seed=3), TOP1, remedy=REMEDIES[remedy], seed=3).train(400)]
    said = []
    for run in runs:
        load = run.load()
        said.append([f"{balance.max_violation(load):.1f}", int((load < load.mean() / 10).sum()), f"{balance.load_entropy(load):.2f}",
                     f"{np.mean(run.losses[-50:]):.1f}", [f"{b:+.1f}" for b in run.selection_bias],
                     *(views.training_steps(run.counts)["steps"] if remedy == "none" else [])])  # fmt: skip
    assert said[0] == said[1]


def test_the_knob_balances_with_the_weight_of_the_loss(state):
    worst = [balance.max_violation(state.small(aux).load(5)) for aux in (0, 0.1, 0.3, 1.0, 3.0)]
    assert worst == sorted(worst, reverse=True) and worst[0] > 2 and worst[-1] < 0.5


def test_recorded_ablation_is_strong_imbalance_and_no_collapse(state):
    runs = state.ablation()
    worst = [balance.max_violation(x) for x in runs["without"]]
    assert max(balance.max_violation(x) for x in runs["with"]) < 0.3 and sum(v > 1 for v in worst) == 4
    assert runs["without"].max() < 0.5 and abs(state.validation("tiny-mixtral") - state.validation("tiny-mixtral-nobalance")) < 0.03


def test_training_steps_say_what_the_counts_say():
    counts = np.array([[4, 4, 4, 4], [6, 4, 3, 3], [12, 4, 0, 0], [10, 6, 0, 0], [10, 6, 0, 0]])
    steps = views.training_steps(counts, 1)["steps"]
    assert [s["cause"] for s in steps] == ["first load", "fuller", "starved", "evener", "evener"]
    assert [s["change"] for s in steps] == [False, False, True, False, False]
    assert "expert 2, expert 3" in steps[2]["sentence"] and "75%" not in steps[3]["sentence"].split(";")[0]
    with pytest.raises(ShapeError, match="stretch"):
        views.training_steps(counts, 9)


# ---- lesson 18


def test_a_form_is_the_layer_of_the_whole_model(shared):
    tokens = shared.text()
    with models.Session(shared.model, recording=True) as session:
        session.decode(tokens)
        routes = session.routes
    for i, layer in enumerate(shared.model.hparams.moe_layers):
        run = shared.form(layer)
        np.testing.assert_array_equal(run.experts, routes.experts[i])
        np.testing.assert_allclose(run.weights, routes.weights[i], atol=1e-6)


def test_forms_with_and_without_parts(shared):
    plain, bare = shared.form(), shared.form(shared=False)
    np.testing.assert_array_equal(plain.routed, bare.out)
    assert not bare.shared.any()
    g = np.random.default_rng(0).standard_normal(128) * 0.1
    gated = shared.form(gate=g)
    np.testing.assert_allclose(gated.shared, plain.shared / (1 + np.exp(-shared.hidden[4] @ g))[:, None], rtol=1e-3, atol=1e-5)
    merged, rows = shared.model.experts(4), shared.hidden[4].astype(float)
    gate, up, down = (np.asarray(t.numpy(), float) for t in (merged.shared.gate, merged.shared.up, merged.shared.down))
    z = rows @ gate.T
    np.testing.assert_allclose(plain.shared, (z / (1 + np.exp(-z)) * (rows @ up.T)) @ down.T, rtol=2e-2, atol=2e-2)


def test_promoted_experts_are_added_to_the_shared_one(shared):
    assert shared.promoted(0) is False and shared.promoted(1) is True
    run, two = shared.form(), shared.form(shared=shared.promoted(2))
    best = np.bincount(run.experts.ravel(), minlength=16).argmax()
    answer = every_answer(shared.hidden[4], shared.model.experts(4))[best] * run.weights[run.experts == best].mean()
    np.testing.assert_allclose(two.shared - run.shared, answer, rtol=2e-2, atol=2e-2)


def test_every_answer_is_that_of_the_routed_layer(shared):
    run, answers = shared.form(), every_answer(shared.hidden[4], shared.model.experts(4))
    t = np.arange(len(run.out))[:, None]
    np.testing.assert_allclose((answers[run.experts, t] * run.weights[..., None]).sum(1), run.routed, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("vectors", [np.ones((1, 2, 3)), np.ones((2, 0, 3)), np.ones((0, 2, 3))], ids=lambda v: str(v.shape))
def test_similarity_needs_two_experts_and_something_to_compare(vectors):
    for measure in (mean_cosine, matched_cosine):
        with pytest.raises(ShapeError):
            measure(vectors)


def test_experts_of_two_matrices_and_of_zeros_have_a_similarity():
    rng = np.random.default_rng(0)
    with Context() as ctx:
        up, down = (ctx.from_numpy(rng.standard_normal(s).astype("f4")) for s in ((3, 5, 4), (3, 4, 5)))
        units = hidden_units(ExpertWeights(None, up, down, activation="relu"))
    assert units.shape == (3, 5, 8) and np.isfinite(matched_cosine(units))
    assert matched_cosine(np.zeros((2, 3, 4))) == mean_cosine(np.zeros((2, 3, 4))) == 0


def test_similarity_by_hand():
    a = np.random.default_rng(0).standard_normal((5, 6))
    assert mean_cosine(np.array([a, a, a])) == pytest.approx(1) and mean_cosine(np.array([a, -a])) == pytest.approx(-1)
    assert mean_cosine(np.eye(3)) == pytest.approx(0)
    units = np.random.default_rng(1).standard_normal((2, 20, 60))
    same = np.array([units[0], units[0][::-1]])                       # the same expert, its hidden units in another order
    assert matched_cosine(same) == pytest.approx(1) and abs(mean_cosine(same.reshape(2, -1))) < 0.2
    assert matched_cosine(units) == pytest.approx(by_chance(units), abs=0.03) and by_chance(units) == by_chance(units)
    with pytest.raises(ShapeError, match="two"):
        mean_cosine(units[:1])


def test_units_are_rows_and_columns_of_one_hidden_unit(shared):
    experts = shared.model.experts(1)
    units = hidden_units(experts)
    assert units.shape == (16, 96, 3 * 128)
    np.testing.assert_array_equal(units[3, 7, 256:], experts.down.numpy()[3][:, 7])


def test_active_parameters_are_those_of_the_file(shared):
    hp, m = shared.model.hparams, shared.model.experts(4)
    one = sum(t.n_elements for t in (m.gate, m.up, m.down)) // 16
    alone = sum(t.n_elements for t in (m.shared.gate, m.shared.up, m.shared.down))
    assert shared.active_parameters(hp.n_embd, hp.n_ff_exp, 16, 4, 1) == 4 * one + alone + 128 * 16


@pytest.mark.parametrize("best", [1, 2])
def test_group_steps_choose_as_the_graph_does(shared, best):
    run = shared.form(4, moe.Router(16, 4, normalise=False, n_groups=4, n_groups_used=2, group_best=best))
    free = shared.form(4)
    for t in range(64):
        steps = views.group_steps(run.scores[t], 4, 2, best, 4)["steps"]
        assert [m[0] for m in steps[-2]["marks"]] == run.experts[t].tolist()
        assert {m[0] for m in steps[-1]["marks"]} == set(free.experts[t]) - set(run.experts[t])


def test_recorded_redundancy_and_random_routes_say_what_the_lesson_says(shared):
    runs = {(r["network"], r["common"]): r for r in shared.redundancy}
    for net in ("1 of 8", "2 of 8"):
        for common in (0.0, 0.5, 0.9):
            with_, without = runs[f"{net} and a shared one", common], runs[net, common]
            assert np.median(with_["random"]) < np.median(without["random"]) and np.median(with_["random"]) > 1
        alike = [np.median(runs[name, 0.9]["similarity"]) for name in (f"{net} and a shared one", net)]
        assert alike[0] < alike[1] and (net == "1 of 8" or alike[0] < 0.7 * alike[1])
    live = [shared.similarity(shared.answers(m.task.batch(np.random.default_rng(5), 512)[0], m.experts))
            for m in (shared.trained(False), shared.trained(True))]
    assert live == pytest.approx([runs["1 of 8", 0.9]["similarity"][0], runs["1 of 8 and a shared one", 0.9]["similarity"][0]], rel=0.01)
