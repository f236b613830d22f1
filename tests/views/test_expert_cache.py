"""Pictures and steps of the expert cache: they say what the events say, and nothing beyond the step shown."""

import numpy as np
import pytest

from tests.expertflow.caching import random_trace
from tests.expertflow.test_policies import noise, perfect
from workbench import views
from workbench.errors import ParameterError
from workbench.expertflow.replay import Stream, cache_for, replay, walk
from workbench.views.expert_cache import CAUSES, SIGNS
from workbench.widgets import Stepper


def run(policy="lru", slots=3, scope="layer", layers=2, forecast=None, link=0.0, n=30, seed=0):
    trace = random_trace(np.random.default_rng(seed), layers, n, 6, 2)
    return trace, list(walk(Stream(trace), cache_for(Stream(trace), policy, slots, scope, hot=trace.counts()), forecast and forecast(trace), link))


def test_lanes_are_filled_while_an_expert_is_in_a_slot():
    trace, events = run()
    steps = views.cache_steps(events, [4, 7], 6)
    assert steps["lanes"][:2] == ["L4 e0", "L4 e1"] and len(steps["lanes"]) == 12 and len(steps["steps"]) == len(events)
    held = set()
    for event, step in zip(events, steps["steps"]):
        _, kind, layer, expert, _ = event
        key = layer * 6 + expert
        (held.discard if kind == "evict" else held.add)(key)
        assert {lane for lane, _, _ in step["marks"]} == held | {key}
        assert [text for lane, text, _ in step["marks"] if lane == key] == [SIGNS[kind]]
        assert {row[0] for row in step["table"]} == {steps["lanes"][k] for k in held}
        assert step["change"] == (kind == "evict") and step["event"] == [kind, *event[0:1], layer, expert]


def test_sentences_give_the_cause_with_its_facts():
    trace, events = run(layers=1, n=12)
    steps = views.cache_steps(events, [0], 6, tokens=[f"w{i}" for i in range(12)])["steps"]
    first = next(s for s in steps if s["change"])
    where = steps.index(first)
    step, _, _, gone, _ = events[where]
    used = [i for i in range(step) if gone in trace.experts[0, i]]
    ago = step - used[-1]
    assert first["sentence"] == f"Expert {gone} goes: of those not in use, its last use is the longest ago ({ago} token{'s' * (ago > 1)} ago)."
    assert steps[0]["sentence"].startswith("'w0', layer 0, needs expert ") and steps[0]["cause"] == "missed"


def test_every_cause_has_a_sentence_and_every_sentence_a_cause():
    seen = set()
    for seed in range(12):
        for policy in ("lru", "lfu", "lru_frequency", "static", "belady", "predicted", "plec"):
            for forecast in (perfect, lambda t: noise(t, 1, False, 3), lambda t: noise(t, 2, True, 4)):
                trace, events = run(policy, 5 if policy != "static" else 3, "global", 2, forecast, 1.0, 25, seed)
                seen |= {f"{kind} {cause}" for _, kind, _, _, cause in events}
                views.cache_steps(events, [0, 1], 6)
    cache = cache_for(Stream(trace), "lru", 3)
    for layer, experts in Stream(trace):
        list(cache.step(layer, experts))
    for other in cache.caches:
        other.busy = ()
    seen |= {f"{kind} {cause}" for kind, _, _, cause in cache.shed(0, 1)}
    cache = cache_for(Stream(trace), "predicted", 4, "global")
    list(cache.step(0, [0, 1]))
    for scores in ({2: 0.9}, {3: 0.9}):
        list(cache.predict(1, scores))
        cache.done(0, 0)
        seen |= {f"{kind} {cause}" for kind, _, _, cause in cache.prefetch()}
    seen |= {f"{kind} {cause}" for kind, _, _, cause in cache.predict(1, {4: 0.1})}
    list(cache.predict(1, {5: 0.1}))
    seen |= {f"{kind} {cause}" for kind, _, _, cause in cache.predict(1, {2: 0.1})}
    assert seen == set(CAUSES), (seen - set(CAUSES), set(CAUSES) - seen)


def test_nothing_shown_depends_on_what_follows():
    _, events = run(n=20)
    whole, part = views.cache_steps(events, [0, 1], 6), views.cache_steps(events[:17], [0, 1], 6)
    assert whole["steps"][:17] == part["steps"]
    assert views.cache_steps(events, [0, 1], 6, most=17)["steps"] == part["steps"]


def test_the_stepper_shows_them():
    _, events = run()
    stepper = Stepper(views.cache_steps(events, [0, 1], 6, title="LRU"), "Three slots per layer.")
    assert "<img" in stepper.stored_html() and "LRU" in stepper.stored_text() and "goes" in stepper.stored_text()


@pytest.mark.parametrize("first", [0, 7, 18, 25])
def test_the_map_of_residency(first):
    trace, events = run("plec", 7, "global", 3, lambda t: perfect(t, 1, False), 1.0, 30)
    image = views.residency_picture(events, trace.layers, 6, "caption", first=first, count=12)
    inside = after_token(events, first + 11, 3)
    said = image.alt.partition("at the end: ")[2].rstrip(".").split("; ")
    for layer, text in enumerate(said):
        assert text == f"layer {layer} " + (", ".join(map(str, sorted(e for k, e in inside if k == layer))) or "none")
    shown = [e for e in events if first * 3 <= e[0] < (first + 12) * 3]
    for kind, cause, name in (("load", "missed", "loads when needed"), ("load", "predicted", "ahead")):
        n = sum(e[1] == kind and e[4] == cause for e in shown)
        assert f"{n} {name}" in image.alt
    assert image.caption == "caption" and image.png.startswith(b"\x89PNG")


def after_token(events, token, n_layers):
    """Who is in a slot when a token is through."""
    held = set()
    for step, kind, layer, expert, _ in events:
        if step >= (token + 1) * n_layers:
            break
        if kind == "load":
            held.add((layer, expert))
        elif kind == "evict":
            held.discard((layer, expert))
    return held


def test_curves_of_hit_rates():
    trace = random_trace(np.random.default_rng(0), 1, 200, 8, 2)
    results = [replay(trace, p, s) for p in ("lru", "belady") for s in (2, 4, 6)]
    image = views.hit_rate_picture(results, "c", chance=8, title="both")
    for r in results:
        assert f"{r.slots} slots {r.hit_rate:.1%}" in image.alt
    with pytest.raises(ParameterError):
        views.hit_rate_picture([], "c")
    with pytest.raises(ParameterError):
        views.cache_steps([], [0], 4)
