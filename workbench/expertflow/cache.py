"""The expert cache: which experts of which layers are in slots (the paper's Expert Cache Engine; llama.cpp has none).

Layers that share slots form a group with a `Cache` of its own. An `ExpertCache` is fed one step at a time: `predict` as soon as
predictions for a layer are there, `step` when its router has spoken, `done` when an expert was computed with, `prefetch`
whenever the link is idle. Each yields what was decided, as tuples (kind, layer, expert, cause).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from workbench.errors import ParameterError, shown
from workbench.expertflow import policies
from workbench.expertflow.policies import ALWAYS, Cache, Due, Event

ExpertEvent = tuple[str, int, int, str]
"""kind, layer, expert, cause."""
SCOPES, RESIDENCIES = ("layer", "global"), ("together", "one_by_one")
GRANULARITIES = ("expert", "matrix")
"""What moves, and is waited for, at a time: all of an expert, or the matrix that a product reads."""


@dataclass(frozen=True)
class Policy:
    """A policy by name: how its cache is made, what it must be told, and what it does in one line."""

    make: Callable[..., Cache]
    needs: str
    about: str


def _recency_and_frequency(slots: int, n_keys: int) -> Cache:
    return policies.Frequency(slots, n_keys, weight=slots)


POLICIES: dict[str, Policy] = {
    "lru": Policy(policies.Recency, "", "least recently used first"),
    "lfu": Policy(policies.Frequency, "", "least often used first; counts survive an eviction"),
    "lfu_in_cache": Policy(partial(policies.Frequency, in_cache=True), "", "least often used first; counts end with an eviction"),
    "lru_frequency": Policy(_recency_and_frequency, "", "recency, plus a bonus of as many accesses as there are slots for every use"),
    "static": Policy(policies.HotSet, "hot", "the experts used most in a sample stay for ever, others pass through"),
    "predicted": Policy(policies.Planned, "predictions", "what is not predicted goes first (the seed)"),
    "plec": Policy(policies.Allotted, "predictions", "slots allotted to the layers ahead (the paper)"),
    "belady": Policy(policies.Belady, "future", "the optimum without prefetching: needed last, first to go"),
    "oracle": Policy(partial(policies.Belady, window=ALWAYS), "future", "Belady's, and the link brings what is missing next"),
}
"""Every policy by name."""


@dataclass(frozen=True)
class Group:
    """Layers, by their place in the trace, whose experts share slots. The key of an expert is its layer's place here * E + expert."""

    layers: tuple[int, ...]
    slots: int


def policy_named(name: str) -> Policy:
    """Raises ParameterError for an unknown one."""
    if name not in POLICIES:
        raise ParameterError(f"policy {shown(name)!r}", f"one of {', '.join(POLICIES)}")
    return POLICIES[name]


def require_granularity(granularity: str) -> None:
    """Raises ParameterError for another word than those of GRANULARITIES."""
    if granularity not in GRANULARITIES:
        raise ParameterError(f"granularity {shown(granularity)!r}", f"one of {', '.join(GRANULARITIES)}")


def require_every_access(policy: str, host_below: int | str) -> None:
    """Raises ParameterError where a policy that reads the future would not see all of it, since some experts are computed on the host."""
    if host_below and policy_named(policy).needs == "future":
        raise ParameterError(f"policy {policy} with experts computed on the host", "host_below=0",
                             "its future counts every access, also those that its slots would not see")  # fmt: skip


def grouped(n_layers: int, n_expert: int, slots: int | Mapping[int, int], scope: str = "layer", sizes: Sequence[int] | None = None,
            least: int = 1) -> list[Group]:  # fmt: skip
    """The groups of layers 0 … n_layers - 1.

    slots: of each layer (scope "layer"), or of all together ("global"). sizes: bytes of an expert of each layer; only experts of one size
    can share slots, so a global pool falls into classes, whose shares are in proportion to their experts, or are given
    as {size: slots}. least: slots that a group must have. Raises ParameterError where one has fewer.
    """
    if scope not in SCOPES:
        raise ParameterError(f"scope {shown(scope)!r}", f"one of {', '.join(SCOPES)}")
    if sizes is not None and len(sizes) != n_layers:
        raise ParameterError(f"{len(sizes)} sizes of experts", f"one for each of the {n_layers} layers")
    sizes = [0] * n_layers if sizes is None else list(sizes)
    members = [(i,) for i in range(n_layers)] if scope == "layer" else [
        tuple(i for i in range(n_layers) if sizes[i] == size) for size in dict.fromkeys(sizes)]  # fmt: skip
    shares = [slots.get(sizes[m[0]], 0) if isinstance(slots, Mapping) else slots if scope == "layer" else slots * len(m) // n_layers
              for m in members]  # fmt: skip
    for layers, n in zip(members, shares):
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < least:
            of = f" for experts of {sizes[layers[0]]:,} bytes" if len(set(sizes)) > 1 else ""
            raise ParameterError(f"{n} slots{of}", f"at least {least}: so many experts must be there at the same time",
                                 "more slots, or residency one_by_one" if least > 1 else "more slots")  # fmt: skip
    return [Group(layers, min(int(n), len(layers) * n_expert)) for layers, n in zip(members, shares)]


class Future(Protocol):
    """What is to come."""

    def accesses(self, group: Group) -> tuple[np.ndarray, np.ndarray]:
        """The keys of a group in the order of their accesses, and the step of each, counted over all layers."""
        ...


class ExpertCache:
    """A policy over all layers, fed one step at a time.

    layers: how the layers are called (default 0, 1, …), in the order in which they run; n_expert: of each. slots, scope, sizes:
    see `grouped`. together: all experts of a step must be resident at the same time. future: for "belady" and "oracle", what is to
    come, such as a `replay.Stream`; hot: for "static", how often each expert was used (layers, n_expert).
    """

    def __init__(self, policy: str, slots: int | Mapping[int, int], layers: int | Sequence[int], n_expert: int, *, scope: str = "layer",
                 sizes: Sequence[int] | None = None, together: bool = True, least: int = 1,
                 future: Future | None = None, hot: np.ndarray | None = None) -> None:  # fmt: skip
        made, names = policy_named(policy), list(range(layers)) if isinstance(layers, int) else [int(i) for i in layers]
        self.policy, self.together, self.layers, self.n_expert = policy, together, names, n_expert
        self.groups = grouped(len(names), n_expert, slots, scope, sizes, least)
        self._at = {names[i]: (g, place * n_expert) for g, group in enumerate(self.groups) for place, i in enumerate(group.layers)}
        self.clock, self._now = 0, len(names) - 1
        self.caches = [made.make(group.slots, len(group.layers) * n_expert, **_told(made, group, future, hot)) for group in self.groups]

    def _group(self, layer: int) -> tuple[int, int]:
        """The number of a layer's group, and the key of the layer's expert 0."""
        if layer not in self._at:
            raise ParameterError(f"layer {shown(layer)}", f"one of {', '.join(map(str, self.layers))}")
        return self._at[layer]

    def _place(self, layer: int, experts: Iterable[int]) -> tuple[int, list[int]]:
        g, base = self._group(layer)
        keys = [base + int(e) for e in experts]
        if keys and (not base <= min(keys) <= max(keys) < base + self.n_expert or len(set(keys)) != len(keys)):
            raise ParameterError(f"experts {[k - base for k in keys]} of layer {layer}", f"each once, from 0 to {self.n_expert - 1}")
        return g, keys

    def _named(self, g: int, events: Iterator[Event]) -> Iterator[ExpertEvent]:
        n, layers = self.n_expert, self.groups[g].layers
        for kind, key, cause in events:
            yield kind, self.layers[layers[key // n]], key % n, cause

    # ---- what an engine or a replay calls

    def slots_of(self, layer: int) -> int:
        """Slots that a layer's experts can use, those that they share with other layers included."""
        return self.groups[self._group(layer)[0]].slots

    def holds(self, layer: int, expert: int) -> bool:
        """Whether an expert is in a slot, or on its way to one."""
        g, base = self._at[layer]
        return base + expert in self.caches[g].resident

    def preload(self) -> Iterator[ExpertEvent]:
        """Loads before the first step."""
        for g, cache in enumerate(self.caches):
            yield from self._named(g, cache.preload())

    def predict(self, layer: int, scores: Mapping[int, float]) -> Iterator[ExpertEvent]:
        """At its next visit a layer will need these experts, each with a probability; replaces what was predicted for that visit."""
        g, keys = self._place(layer, scores)
        cache, at = self.caches[g], self.layers.index(layer)
        if isinstance(cache, policies.Planned):
            due = self.clock + 1 + (at - self._now - 1) % len(self.layers)
            yield from self._named(g, cache.predict(due, dict(zip(keys, scores.values()))))

    def step(self, layer: int, experts: Collection[int]) -> Iterator[ExpertEvent]:
        """The router of a layer wants these experts: corrections, then hits, then loads of what is missing."""
        yield from self.route(layer, experts)
        yield from self.need(layer, experts)

    def route(self, layer: int, experts: Collection[int]) -> Iterator[ExpertEvent]:
        """The first part of `step`: what was predicted and is not wanted is demoted or dropped."""
        g, keys = self._place(layer, experts)
        self.clock, self._now, cache = self.clock + 1, self.layers.index(layer), self.caches[g]
        for other in self.caches:
            other.busy = ()
        if isinstance(cache, policies.Planned):
            yield from self._named(g, cache.route(self.clock, keys, self.together))

    def need(self, layer: int, experts: Collection[int]) -> Iterator[ExpertEvent]:
        """The second part of `step`, for all experts of the step or, where they come one by one, for each on its own."""
        g, keys = self._place(layer, experts)
        slots = self.groups[g].slots
        if self.together and len(keys) > slots:
            raise ParameterError(f"{len(keys)} experts of layer {layer} in one step", f"at most {slots}, the slots there are",
                                 "smaller steps, more slots, or residency one_by_one")  # fmt: skip
        self.caches[g].busy = keys if self.together else keys[-1:]
        yield from self._named(g, self.caches[g].serve([sorted(keys) if self.together else keys], self.together))

    def bring(self, layer: int, expert: int, in_use: Iterable[tuple[int, int]] = ()) -> Iterator[ExpertEvent]:
        """One expert by itself, while those `in_use`, of any layers, must stay (they count as used now)."""
        g, keys = self._place(layer, [expert])
        keys += [key for other, e in in_use for h, [key] in [self._place(other, [e])] if h == g and key not in keys]
        if len(keys) > self.groups[g].slots:
            raise ParameterError(f"{len(keys)} experts in use", f"at most {self.groups[g].slots}, the slots there are")
        yield from self._named(g, self.caches[g].serve([sorted(keys)]))

    def done(self, layer: int, *experts: int) -> None:
        """Experts were computed with, and their slots may be taken."""
        g, base = self._group(layer)
        self.caches[g].done(*[base + e for e in experts])

    def prefetch(self) -> Iterator[ExpertEvent]:
        """The link is idle: at most one load, of what is needed soonest and can have a slot."""
        ahead: list[tuple[Due, int]] = [(due, g) for g, cache in enumerate(self.caches) if (due := cache.upcoming()) is not None]
        for _, g in sorted(ahead):
            for event in self._named(g, self.caches[g].prefetch()):
                yield event
                if event[0] == "load":
                    return

    def shed(self, layer: int, n: int) -> Iterator[ExpertEvent]:
        """The layer's group gives up `n` slots for good, empty ones first; experts in use stay. Raises ParameterError where they
        would not fit any more."""
        g, _ = self._place(layer, ())
        group, cache = self.groups[g], self.caches[g]
        if not 0 <= n < group.slots or len(cache.busy) > group.slots - n:
            raise ParameterError(f"{n} of {group.slots} slots to be given up", f"so many that {max(1, len(cache.busy))} stay")
        self.groups[g] = Group(group.layers, group.slots - n)
        yield from self._named(g, cache.resize(group.slots - n))

    def widen(self, layer: int, n: int) -> None:
        """The layer's group has `n` slots more."""
        g, _ = self._place(layer, ())
        self.groups[g] = Group(self.groups[g].layers, self.groups[g].slots + n)
        self.caches[g].slots = self.groups[g].slots

    def forget(self, experts: Iterable[tuple[int, int]]) -> None:
        """These (layer, expert) are in no slot after all, for example since their loads failed."""
        for layer, expert in experts:
            g, [key] = self._place(layer, [expert])
            self.caches[g].remove(key)

    def resident(self) -> dict[int, list[int]]:
        """The experts of each layer that are in slots now, in ascending order."""
        out: dict[int, list[int]] = {layer: [] for layer in self.layers}
        for g, cache in enumerate(self.caches):
            for key in sorted(cache.resident):
                out[self.layers[self.groups[g].layers[key // self.n_expert]]].append(key % self.n_expert)
        return out


def _told(policy: Policy, group: Group, future: Future | None, hot: np.ndarray | None) -> dict[str, Any]:
    """What a policy must know before it starts."""
    if policy.needs == "future":
        if future is None:
            raise ParameterError("the optimum asked for without a future", "what is to come", "it is a bound, not a policy to run with")
        keys, steps = future.accesses(group)
        return {"future": keys, "steps": steps.tolist() if policy is POLICIES["oracle"] else None}
    if policy.needs == "hot":
        if hot is None:
            raise ParameterError("policy static without a sample", "how often each expert was used", "counts of a warm-up run")
        return {"hot": np.argsort(-np.asarray(hot)[list(group.layers)].ravel(), kind="stable").tolist()}  # of equals the lowest
    return {}
