"""Time per token of a published model whose experts move, from recorded routes: a run in virtual time, and where its time goes.

The shipped experts are so small that a real link would only show its latency. So routes come from a trace, and bytes and operations
from a named published configuration; no millisecond stands without that name. One stream computes, one link copies: demand loads go
first, prefetches use the link while nobody waits for it, and a transfer that has begun is not taken back.

The loss ledger adds up to the whole: each wait is charged to its cause when it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from workbench.devices.cost import Speed, preset
from workbench.errors import ParameterError
from workbench.expertflow.cache import ExpertCache, ExpertEvent
from workbench.expertflow.replay import Forecast, Stream, cache_for, known_before, walk
from workbench.moe import RouteTrace
from workbench.moe.configs import MoEModel, model
from workbench.trace import Trace

KERNELS = 20
"""Kernels that a layer starts besides those of its experts: norms, attention, the router."""
LOSSES = ("compute", "compulsory", "capacity", "policy", "late prefetch", "wasted prefetch", "ids", "host")
"""Where time goes. compute: the device works. Waits: compulsory, for an expert's first load; capacity, for one that Belady's policy
would have had to load as well; policy, for one that it would not; late prefetch, for a load that was under way, or that stood
behind a useful one; wasted prefetch, for the link, busy with what nobody used; ids, for the router's choice to reach the host; host,
for experts computed there, beyond what the device does meanwhile."""


@dataclass(frozen=True)
class Costs:
    """Nanoseconds of a layer of a published model on a machine. n: tokens at once."""

    shape: MoEModel
    kind: str
    device: Speed
    host: Speed
    name: str
    n_past: int = 0

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of an expert."""
        return self.shape.bytes_per_expert(self.kind)

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes that a layer reads besides its routed experts, keys and values included."""
        s, per = self.shape, self.shape.bytes_per_expert(self.kind) / (self.shape.matrices * self.shape.d * self.shape.f)
        dense = s.attention.params(s.d) + s.matrices * s.d * s.f_shared + s.router.n_expert * s.d
        return int(dense * per) + 2 * 2 * self.n_past * s.attention.kv * s.attention.head

    @cached_property
    def _kept(self) -> dict[tuple[str, int], int]:
        return {}

    def _once(self, what: str, n: int, compute: Callable[[int], int]) -> int:
        """Runs ask for the same few numbers of tokens again and again."""
        found = self._kept.get((what, n))
        if found is None:
            found = self._kept[what, n] = compute(n)
        return found

    def attention(self, n: int) -> int:
        """Everything in a layer before its experts."""
        return self._once("attention", n, self._attention)

    def _attention(self, n: int) -> int:
        flops = 2 * n * (self.shape.attention.params(self.shape.d) + self.shape.matrices * self.shape.d * self.shape.f_shared)
        flops += 4 * n * self.n_past * self.shape.attention.heads * self.shape.attention.head
        return KERNELS * self.device.launch_ns + int(max(self.dense_bytes / self.device.memory, flops / self._rate(self.device)))

    def expert(self, n: int) -> int:
        """One expert's matrices on the device."""
        return self._once("expert", n, lambda n: self._expert(n, self.device))

    def _expert(self, n: int, on: Speed) -> int:
        work = max(self.expert_bytes / on.memory, 2 * n * self.shape.expert / self._rate(on))
        return self.shape.matrices * on.launch_ns + int(work)

    def on_host(self, n: int) -> int:
        """The same on the host, with the rows' way there and back."""
        return self._once("host", n, lambda n: self._expert(n, self.host) + 2 * self.device.transfer_ns(4 * n * self.shape.d))

    @cached_property
    def load(self) -> int:
        """An expert over the link, from pinned memory."""
        return self.device.transfer_ns(self.expert_bytes)

    def ids(self, n: int) -> int:
        """The router's ids to the host, which waits for them."""
        return self._once("ids", n, self._ids)

    def _ids(self, n: int) -> int:
        return self.device.sync_ns + self.device.transfer_ns(4 * n * self.shape.router.n_used)

    def head(self, n: int) -> int:
        """Embedding, last norm and output matrix."""
        return self._once("head", n, self._head)

    def _head(self, n: int) -> int:
        size = self.shape.embedding * self.expert_bytes / self.shape.expert
        return 3 * self.device.launch_ns + int(max(size / self.device.memory, 2 * n * self.shape.embedding / self._rate(self.device)))

    def predictor(self, hidden: int) -> int:
        """A network of one hidden layer that names the experts of a layer: two small products, weights in f16."""
        weights = hidden * (self.shape.d + self.shape.router.n_expert)
        work = max(2 * weights / self.device.memory, 2 * weights / self._rate(self.device))
        return 2 * self.device.launch_ns + int(work) if hidden else 0

    def _rate(self, speed: Speed) -> float:
        return speed.flops_of.get(self.kind, speed.flops)


def costs(name: str = "Mixtral-8x7B", device: str = "rtx3090-pcie4", kind: str = "f16", host: str = "cpu", n_past: int = 0) -> Costs:
    """The costs of a published model (`moe.configs`) stored as `kind` on presets (`devices.cost`)."""
    return Costs(model(name), kind, preset(device).speed, preset(host).speed, f"{name} ({kind}) on {device}", n_past)


@dataclass
class Timed:
    """What a run took. ns: all of it, in `n_steps` steps of `n_tokens` tokens in all; ledger: the same by cause (see LOSSES).

    scale: layers of the configuration for each layer of the trace; `per_token` is scaled by it.
    """

    costs: Costs
    n_tokens: int
    n_steps: int
    scale: float
    ns: int = 0
    ledger: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LOSSES, 0))
    hits: int = 0
    accesses: int = 0
    late: int = 0
    hosted: int = 0
    demand_loads: int = 0
    prefetches: int = 0
    useful: int = 0
    dropped: int = 0
    link_busy: int = 0

    @property
    def per_token(self) -> float:
        """Milliseconds per token of the whole configuration."""
        return self.ns * self.scale / self.n_tokens / 1e6

    @property
    def hit_rate(self) -> float:
        """Share of the accesses whose expert was in a slot, or on its way to one."""
        return self.hits / self.accesses

    @property
    def stalled(self) -> float:
        """Share of the time in which the device did nothing."""
        return 1 - self.ledger["compute"] / self.ns

    @property
    def bytes_per_token(self) -> int:
        """Bytes over the link per token of the whole configuration, on demand and ahead."""
        return int((self.demand_loads + self.prefetches) * self.costs.expert_bytes * self.scale / self.n_tokens)

    def rows(self) -> list[tuple[str, float, str]]:
        """The ledger: cause, milliseconds per token, share."""
        return [(k, v * self.scale / self.n_tokens / 1e6, f"{v / self.ns:.1%}") for k, v in self.ledger.items()]


def simulate(trace: RouteTrace | Stream, costs: Costs, policy: str = "lru", slots: int = 4, *, scope: str = "layer", batch: int = 1,
             forecast: Forecast | None = None, host_below: int | str = 0, hot: np.ndarray | None = None, thinking: int = 0,
             record: Trace | None = None) -> Timed:  # fmt: skip
    """Run the routes of a trace with the costs of a configuration that has as many experts, k of them per token.

    policy, slots, scope, forecast, hot: as `replay`. batch: sequences side by side. host_below: missing experts with fewer tokens are
    computed on the host and not loaded; "auto": where that is estimated to be quicker than a load. thinking: nanoseconds that the
    predictor computes in each layer.
    record: events of what streams and cache did. Raises ParameterError where trace and configuration do not fit.
    """
    stream = trace if isinstance(trace, Stream) else Stream(trace, batch=batch)
    routes, router = stream.trace, costs.shape.router
    if (routes.n_expert, routes.k) != (router.n_expert, router.n_used):
        raise ParameterError(f"routes with {routes.k} of {routes.n_expert} experts", f"{router.n_used} of {router.n_expert}: {costs.name}")
    cache = cache_for(stream, policy, slots, scope, hot=hot)
    return _Run(stream, costs, cache, forecast, host_below, record, thinking).all()


class _Run:
    """One run. now: of the compute stream; link: when it is free; ready: when a load ends, by (layer, expert)."""

    def __init__(self, stream: Stream, costs: Costs, cache: ExpertCache, forecast: Forecast | None, host_below: int | str,
                 record: Trace | None, thinking: int) -> None:  # fmt: skip
        self.thinking = thinking
        self.stream, self.costs, self.cache, self.host_below, self.record = stream, costs, cache, host_below, record
        self.known = known_before(stream, forecast) if forecast is not None else None
        self.now = self.link = 0
        self.ready: dict[tuple[int, int], int] = {}
        self.ahead: dict[tuple[int, int], int] = {}  # prefetched and not used yet: number of the load
        self.useful: set[int] = set()
        self.behind: list[tuple[int, int]] = []  # (load that kept the link busy, time lost)
        self.met: set[tuple[int, int]] = set()
        self.best = unavoidable(stream, cache)
        tokens = stream.trace.n_tokens
        self.out = Timed(costs, tokens, stream.n_steps, costs.shape.n_moe / stream.trace.n_layers)
        self.in_flight = -1

    def all(self) -> Timed:
        """Every step, then what could only be told afterwards."""
        out, n_layers = self.out, self.stream.trace.n_layers
        scaled_head = 1 / out.scale  # once per token, while layers are scaled up
        for event in self.cache.preload():
            self.ready[event[1], event[2]] = 0
        for step, ((layer, experts), counts) in enumerate(zip(self.stream, token_counts(self.stream), strict=True)):
            n = sum(counts) // self.stream.trace.k
            if layer == 0:
                self._compute(int(self.costs.head(n) * scaled_head), "head")
            self._layer(step, layer, dict(zip(experts, counts, strict=True)), n)
        for load, lost in self.behind:
            out.ledger["late prefetch" if load in self.useful else "wasted prefetch"] += lost
        out.ns, out.useful = self.now, len(self.useful)
        assert sum(out.ledger.values()) == out.ns and n_layers
        return out

    def _layer(self, step: int, layer: int, wanted: dict[int, int], n: int) -> None:
        out, costs, cache = self.out, self.costs, self.cache
        self._compute(costs.attention(n), "attention")
        if self.thinking:
            self._compute(self.thinking, "predictor")
        for target, scores in self.known(step) if self.known else ():
            self._note(cache.predict(target, scores))
        out.accesses += len(wanted)
        missing = [e for e in wanted if not cache.holds(layer, e)]
        hosted = [e for e in missing if self._on_host(wanted[e])]
        self._wait(costs.ids(n), "ids")
        self._note(cache.route(layer, list(wanted)))
        served = [e for e in wanted if e not in hosted]
        self._note(cache.need(layer, served), step)
        begun = self.now
        for e in sorted(served, key=lambda e: (self.ready.get((layer, e), 0), e)):
            self._await(step, layer, e)
            self._compute(costs.expert(wanted[e]), f"expert {e} of layer {layer}")
            cache.done(layer, e)
        if hosted:
            out.hosted += len(hosted)
            end = begun + sum(costs.on_host(wanted[e]) for e in hosted)
            self._busy("host", "compute", begun, end, f"{len(hosted)} experts of layer {layer}")
            self._wait(max(0, end - self.now), "host")

    def _on_host(self, n: int) -> bool:
        if self.host_below == "auto":
            return self.costs.on_host(n) < self.costs.load
        return n < int(self.host_below)

    # ---- the compute stream

    def _compute(self, ns: int, what: str) -> None:
        self._busy("device", "compute", self.now, self.now + ns, what)
        self._advance(ns, "compute")

    def _wait(self, ns: int, why: str) -> None:
        self._advance(ns, why)

    def _advance(self, ns: int, why: str) -> None:
        """Time passes on the compute stream; an idle link uses it."""
        begin, self.now = self.now, self.now + ns
        self.out.ledger[why] += ns
        self.link = max(self.link, begin)
        while self.link < self.now and self._prefetch():
            pass

    def _await(self, step: int, layer: int, expert: int) -> None:
        """Wait for an expert that is still on its way."""
        key = layer, expert
        lost = max(0, self.ready.get(key, 0) - self.now)
        if key in self.ahead:
            self.useful.add(self.ahead.pop(key))
            self.out.late += lost > 0
            self._advance(lost, "late prefetch")
            return
        why = "compulsory" if key not in self.met else "capacity" if (step, expert) in self.best else "policy"
        self.met.add(key)
        behind = min(lost, self._blocked.pop(key, 0))
        if behind:
            self.behind.append((self._blocker, behind))
            begin, self.now = self.now, self.now + behind
            self.link = max(self.link, begin)
        self._advance(lost - behind, why)

    # ---- the link

    _blocker = -1

    def _prefetch(self) -> bool:
        """One load that nobody waits for yet."""
        for kind, layer, expert, _ in self._noted(self.cache.prefetch()):
            if kind == "load":
                self.out.prefetches += 1
                self._send(layer, expert, self.link)
                self.ahead[layer, expert] = self.in_flight = self.out.prefetches
                return True
        return False

    def _send(self, layer: int, expert: int, start: int) -> None:
        self.link = start + self.costs.load
        self.ready[layer, expert] = self.link
        self.out.link_busy += self.costs.load
        self._busy("link", "copy", start, self.link, f"expert {expert} of layer {layer}", self.costs.expert_bytes)

    def _note(self, events: Iterable[ExpertEvent], step: int = -1) -> None:
        """Take decisions down; loads that are needed now queue up on the link."""
        self._blocked: dict[tuple[int, int], int] = {}
        first = True
        for kind, layer, expert, _ in self._noted(events):
            if kind == "hit":
                self.out.hits += 1
                self.met.add((layer, expert))
            elif kind == "load":
                self.out.demand_loads += 1
                if first and self.link > self.now:  # a prefetch has begun and is not taken back
                    self._blocked[layer, expert], self._blocker = self.link - self.now, self.in_flight
                first = False
                self._send(layer, expert, max(self.link, self.now))
            elif kind == "drop":
                self.out.dropped += 1

    def _noted(self, events: Iterable[ExpertEvent]) -> Iterator[ExpertEvent]:
        for event in events:
            kind, layer, expert, _ = event
            if kind == "evict":
                self.ready.pop((layer, expert), None)
                self.ahead.pop((layer, expert), None)
            if self.record is not None and kind in ("hit", "evict"):
                self.record.add(kind, self.now, layer=layer, expert=expert)
            elif self.record is not None and kind == "load":
                self.record.add(kind, self.now, layer=layer, expert=expert, bytes=self.costs.expert_bytes)
            yield event

    def _busy(self, device: str, stream: str, start: int, end: int, name: str, nbytes: int = 0) -> None:
        if self.record is not None and end > start:
            self.record.add("busy", start, end, device=device, stream=stream, work=stream, name=name, bytes=nbytes)


def token_counts(stream: Stream) -> Iterator[list[int]]:
    """For each step of a stream, how many tokens go to each of its experts, in the order in which the stream names them."""
    routes = stream.trace
    if stream.batch == 1:
        ones = [1] * routes.k
        for _ in range(stream.n_steps * routes.n_layers):
            yield ones
        return
    counts = np.zeros((routes.n_layers, stream.n_steps, routes.n_expert), np.int64)
    for layer, ids in enumerate(routes.experts):
        np.add.at(counts[layer], (stream.of_token[:, None], ids.astype(np.int64)), 1)
    for step in range(stream.n_steps):
        for layer in range(routes.n_layers):
            yield counts[layer, step][counts[layer, step] > 0].tolist()


def unavoidable(stream: Stream, like: ExpertCache) -> set[tuple[int, int]]:
    """(step, expert) of the accesses that Belady's policy misses with the same slots. Kept with the stream, which is read only."""
    key = tuple((g.layers, g.slots) for g in like.groups)
    kept: dict[object, set[tuple[int, int]]] = stream.__dict__.setdefault("_unavoidable", {})
    if key not in kept:
        kept[key] = _missed_by_belady(stream, like)
    return kept[key]


def _missed_by_belady(stream: Stream, like: ExpertCache) -> set[tuple[int, int]]:
    future = ExpertCache("belady", {0: sum(g.slots for g in like.groups)} if len(like.groups) == 1 else like.groups[0].slots,
                         like.layers, like.n_expert, scope="global" if len(like.groups) == 1 else "layer", together=like.together,
                         future=stream)  # fmt: skip
    return {(step, expert) for step, kind, _, expert, _ in walk(stream, future) if kind == "load"}
