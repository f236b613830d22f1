"""Time per token of a published model whose experts move, from recorded routes: a run in virtual time, and where its time goes.

The shipped experts are so small that a real link would only show its latency. So routes come from a trace, and bytes and operations
from a named published configuration; no millisecond stands without that name. One stream computes, one link copies: demand loads go
first, prefetches use the link while nobody waits for it, and a transfer that has begun is not taken back.

The loss ledger adds up to the whole: each wait is charged to its cause when it happens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from workbench.errors import ParameterError
from workbench.expertflow.cache import ExpertCache, ExpertEvent, require_every_access, require_granularity
from workbench.expertflow.costs import Costs
from workbench.expertflow.replay import Forecast, Stream, cache_for, known_before, walk
from workbench.moe import RouteTrace
from workbench.trace import Trace

LOSSES = ("compute", "compulsory", "capacity", "policy", "late prefetch", "wasted prefetch", "ids", "host", "disk")
"""Where time goes. compute: the device works. Waits: compulsory, for an expert's first load; capacity, for one that Belady's policy
would have had to load as well; policy, for one that it would not; late prefetch, for a load that was under way, or that stood
behind a useful one; wasted prefetch, for the link, busy with what nobody used; ids, for the router's choice to reach the host; host,
for experts computed there, beyond what the device does meanwhile; disk, for experts that had to be read into the host's memory first."""
Key = tuple[int, int]
"""layer, expert."""
FOREVER = 1 << 62


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
    disk_reads: int = 0

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
             granularity: str = "expert", host_slots: int | None = None, record: Trace | None = None,
             recorded: int | None = None) -> Timed:  # fmt: skip
    """Run the routes of a trace with the costs of a configuration that has as many experts, k of them per token.

    policy, slots, scope, forecast: as `replay`. hot: how often each expert was used in other texts, (layers, n_expert); those used
    most are in the slots at the start, and with "static" stay there. batch: sequences side by side. host_below: missing experts with
    fewer tokens are computed on the host and not loaded; "auto": where that is estimated to be quicker than a load, or than the rest of
    one that is under way. The host is slower while the link copies: both read its memory. thinking: nanoseconds that the predictor
    computes in each layer. granularity: whether loads go by "expert" or by "matrix": then an expert begins when its first matrix is
    there, and a load that is needed waits for at most a matrix of a prefetch. host_slots: experts of the traced layers that the host's
    memory holds, those used last (default: all); others are read from `costs.disk` first, also to be computed there.
    record: events of what streams and cache did, in the first `recorded` steps or in all. Raises ParameterError where trace and
    configuration do not fit, and for policies that read the future where experts are computed on the host.
    """
    stream = trace if isinstance(trace, Stream) else Stream(trace, batch=batch)
    routes, router = stream.trace, costs.shape.router
    if (routes.n_expert, routes.k) != (router.n_expert, router.n_used):
        raise ParameterError(f"routes with {routes.k} of {routes.n_expert} experts", f"{router.n_used} of {router.n_expert}: {costs.name}")
    require_granularity(granularity)
    if host_slots is not None and host_slots < router.n_used:
        raise ParameterError(f"host_slots={host_slots!r}", f"{router.n_used} or more: those of a token in one layer")
    require_every_access(policy, host_below)
    cache = cache_for(stream, policy, slots, scope, hot=hot)
    if hot is not None and policy != "static":
        start_warm(cache, hot)
    pieces = costs.shape.matrices if granularity == "matrix" else 1
    run = _Run(stream, costs, cache, forecast, host_below, record, thinking, pieces, host_slots)
    run.recorded = -1 if recorded is None else recorded * routes.n_layers
    return run.all()


def start_warm(cache: ExpertCache, hot: np.ndarray) -> None:
    """Fill the slots of a new cache with the experts used most, without a trace of it in any account."""
    for group in cache.groups:
        keys = np.argsort(-np.asarray(hot)[list(group.layers)].ravel(), kind="stable")[: group.slots]
        for place, layer in enumerate(group.layers):
            for key in keys[keys // cache.n_expert == place][::-1].tolist():
                deque(cache.bring(cache.layers[layer], key % cache.n_expert), 0)


class _Run:
    """One run. now: of the compute stream; link, disk: when these are free; ready: when each piece of a load has come, by (layer, expert);
    rest: the prefetch of which pieces are still to be sent, not before `start`; ram: when each expert that is in the host's memory came;
    recorded: visits of layers after which nothing is recorded any more."""

    recorded = -1

    def __init__(self, stream: Stream, costs: Costs, cache: ExpertCache, forecast: Forecast | None, host_below: int | str,
                 record: Trace | None, thinking: int, pieces: int, host_slots: int | None) -> None:  # fmt: skip
        self.thinking, self.pieces, self.host_slots = thinking, pieces, host_slots
        self.piece = costs.device.transfer_ns(costs.expert_bytes // pieces)
        self.stream, self.costs, self.cache, self.host_below, self.record = stream, costs, cache, host_below, record
        self.known = known_before(stream, forecast) if forecast is not None else None
        self.now = self.link = self.disk = self.start = 0
        self.ready: dict[Key, list[int]] = {}
        self.rest: Key | None = None
        self.ram: OrderedDict[Key, int] = OrderedDict()
        self.gaps: dict[Key, int] = {}  # how long the link waited for the disk, by load
        self.ahead: dict[Key, int] = {}  # prefetched and not used yet: number of the load
        self.useful: set[int] = set()
        self.behind: list[tuple[int, int]] = []  # (load that kept the link busy, time lost)
        self.met: set[Key] = set()
        self.best = unavoidable(stream, cache)
        tokens = stream.trace.n_tokens
        self.out = Timed(costs, tokens, stream.n_steps, costs.shape.n_moe / stream.trace.n_layers)
        self.in_flight = -1

    def all(self) -> Timed:
        """Every step, then what could only be told afterwards."""
        out = self.out
        scaled_head = 1 / out.scale  # once per token, while layers are scaled up
        for _ in self.cache.preload():
            pass
        for step, ((layer, experts), counts) in enumerate(zip(self.stream, token_counts(self.stream), strict=True)):
            n = sum(counts) // self.stream.trace.k
            if step == self.recorded:
                self.record = None
            if layer == 0:
                self._compute(int(self.costs.head(n) * scaled_head), "head")
            self._layer(step, layer, dict(zip(experts, counts, strict=True)), n)
        for load, lost in self.behind:
            out.ledger["late prefetch" if load in self.useful else "wasted prefetch"] += lost
        out.ns, out.useful = self.now, len(self.useful)
        assert sum(out.ledger.values()) == out.ns
        return out

    def _layer(self, step: int, layer: int, wanted: dict[int, int], n: int) -> None:
        out, costs, cache = self.out, self.costs, self.cache
        self._compute(costs.attention(n), "attention")
        if self.thinking:
            self._compute(self.thinking, "predictor")
        for target, scores in self.known(step) if self.known else ():
            self._note(cache.predict(target, scores))
        out.accesses += len(wanted)
        self._advance(costs.ids(n), "ids")
        self._note(cache.route(layer, list(wanted)))
        there = [e for e in wanted if cache.holds(layer, e)]
        hosted = [e for e in wanted if e not in there and self._on_host(wanted[e])]
        late = self._too_late(layer, {e: wanted[e] for e in there}, sum(costs.on_host(wanted[e]) for e in hosted))
        begun, copied, host = self.now, self._copied(), {e: wanted[e] for e in (*hosted, *late)}
        gap = self._until_read(layer, host)
        served = [e for e in wanted if e not in hosted]  # the late ones count as used, too
        self._finish(layer, set(there) - set(late), self.now)
        self._note(cache.need(layer, served), step)
        self._finish(layer, set(there) - set(late), FOREVER)
        for e in sorted(served, key=lambda e: (self._end((layer, e)), e)):
            if e not in host:
                self._expert(step, layer, e, costs.expert(wanted[e]))
            cache.done(layer, e)
        if host:
            self._host(layer, host, begun, copied, gap)

    # ---- the host

    def _on_host(self, n: int) -> bool:
        if self.host_below == "auto":
            return self.costs.on_host(n) < self.costs.load
        return n < int(self.host_below)

    def _too_late(self, layer: int, wanted: dict[int, int], before: int) -> list[int]:
        """Experts under way that the host has computed before they are there, after what it has to do before; their loads go on."""
        late: list[int] = []
        for e in sorted(wanted, key=lambda e: -self._end((layer, e))) if self.host_below == "auto" else ():
            before += self.costs.beside_copies(wanted[e])
            if self._end((layer, e)) - self.now <= before:
                break
            late.append(e)
        return late

    def _until_read(self, layer: int, host: dict[int, int]) -> int:
        """How long the host's work is held up by the disk."""
        at, work = self.now, 0
        for e, n in host.items():
            work += self.costs.on_host(n)
            at = max(at, self._in_ram((layer, e), self.now)) + self.costs.on_host(n)
        return at - self.now - work

    def _host(self, layer: int, host: dict[int, int], begun: int, copied: int, gap: int) -> None:
        """Wait for experts on the host, which began when the layer's others did, and is slower while the link copies."""
        self.out.hosted += len(host)
        work, slowed = (sum(map(time, host.values())) for time in (self.costs.on_host, self.costs.beside_copies))
        self._advance(max(0, min(gap, begun + gap + work - self.now)), "disk")
        while (left := work + gap - (self.now - begun) + (1 - work / slowed) * (self._copied() - copied)) > 0:
            self._advance(ceil(left), "host")  # while it waits, more may be copied
        self._busy("host", "compute", begun, self.now, f"{len(host)} experts of layer {layer}")

    def _in_ram(self, key: Key, asked: int) -> int:
        """When an expert's bytes are in the host's memory; what is not there is read now, and what was used longest ago goes."""
        if self.host_slots is None:
            return asked
        if key not in self.ram:
            start, self.disk = max(asked, self.disk), max(asked, self.disk) + self.costs.read
            self._busy("disk", "read", start, self.disk, f"expert {key[1]} of layer {key[0]}", self.costs.expert_bytes)
            self.ram[key] = self.disk
            self.out.disk_reads += 1
            if len(self.ram) > self.host_slots:
                self.ram.popitem(last=False)
        self.ram.move_to_end(key)
        return max(asked, self.ram[key])

    # ---- the compute stream

    def _compute(self, ns: int, what: str) -> None:
        self._busy("device", "compute", self.now, self.now + ns, what)
        self._advance(ns, "compute")

    def _advance(self, ns: int, why: str) -> None:
        """Time passes on the compute stream, for work or in a wait, and is charged to its cause; an idle link uses it."""
        begin, self.now = self.now, self.now + ns
        self.out.ledger[why] += ns
        self._prefetches(begin)

    def _expert(self, step: int, layer: int, expert: int, ns: int) -> None:
        """Compute with an expert; with each piece as soon as it is there."""
        key, what = (layer, expert), f"expert {expert} of layer {layer}"
        pieces = self.ready.get(key, ())
        why = self._reason(step, key, max(0, pieces[0] - self.now) if pieces else 0)
        if not pieces or pieces[-1] <= self.now:
            return self._compute(ns, what)
        for i, ready in enumerate(pieces):
            self._await(key, ready, why)
            self._compute(ns * (i + 1) // len(pieces) - ns * i // len(pieces), what)

    def _reason(self, step: int, key: Key, lost: int) -> str:
        """What a wait for an expert is charged to."""
        if key in self.ahead:
            self.useful.add(self.ahead.pop(key))
            self.out.late += lost > 0
            return "late prefetch"
        why = "compulsory" if key not in self.met else "capacity" if (step, key[1]) in self.best else "policy"
        self.met.add(key)
        return why

    def _await(self, key: Key, ready: int, why: str) -> None:
        """Wait for a piece that is still on its way."""
        lost = max(0, ready - self.now)
        behind = min(lost, self._blocked.pop(key, 0))
        if behind:
            self.behind.append((self._blocker, behind))
            begin, self.now = self.now, self.now + behind
            self._prefetches(begin)
        read = min(lost - behind, self.gaps.pop(key, 0))
        self._advance(read, "disk")
        self._advance(lost - behind - read, why)

    # ---- the link

    _blocker = -1

    def _copied(self) -> int:
        """How long the link has copied so far."""
        return self.out.link_busy - max(0, self.link - self.now)

    def _end(self, key: Key) -> int:
        """When an expert is there as a whole, if nobody else needs the link before."""
        pieces = self.ready.get(key)
        if pieces is None:
            return 0
        return pieces[-1] if len(pieces) == self.pieces else max(self.link, self.start) + (self.pieces - len(pieces)) * self.piece

    def _prefetches(self, begin: int) -> None:
        """Loads that nobody waits for yet, piece by piece, since `begin`."""
        self.link = max(self.link, begin)
        while self.link < self.now and (self.rest is not None or self._prefetch()):
            if self.rest is not None:
                if self.start >= self.now:  # still being read from disk
                    return
                self._piece(self.rest, max(self.link, self.start))

    def _prefetch(self) -> bool:
        for kind, layer, expert, _ in self._noted(self.cache.prefetch()):
            if kind == "load":
                self.out.prefetches += 1
                self.ahead[layer, expert] = self.in_flight = self.out.prefetches
                self._begin((layer, expert), self.link)
                return True
        return False

    def _begin(self, key: Key, asked: int) -> None:
        self.rest, self.start, self.ready[key] = key, self._in_ram(key, asked), []
        self.gaps[key] = self.start - asked

    def _finish(self, layer: int, experts: set[int], before: int) -> None:
        """A prefetch that turns out to be needed now goes on at once, if it can start by then."""
        if self.rest is not None and self.rest[0] == layer and self.rest[1] in experts and self.start <= before:
            key = self.rest
            while self.rest == key:
                self._piece(key, max(self.link, self.now, self.start))

    def _piece(self, key: Key, start: int) -> None:
        self.link = start + self.piece
        self.ready[key].append(self.link)
        if len(self.ready[key]) == self.pieces:
            self.rest = None if self.rest == key else self.rest
        self.out.link_busy += self.piece
        self._busy("link", "copy", start, self.link, f"expert {key[1]} of layer {key[0]}", self.costs.expert_bytes // self.pieces)

    def _note(self, events: Iterable[ExpertEvent], step: int = -1) -> None:
        """Take decisions down; loads that are needed now queue up on the link, those from disk last."""
        self._blocked: dict[Key, int] = {}
        loads: list[tuple[int, Key]] = []
        for kind, layer, expert, _ in self._noted(events):
            if kind == "hit":
                self.out.hits += 1
                self.met.add((layer, expert))
            elif kind == "load":
                self.out.demand_loads += 1
                loads.append((self._in_ram((layer, expert), self.now), (layer, expert)))
            elif kind == "drop":
                self.out.dropped += 1
        if loads and self.link > self.now:  # a prefetch has begun and is not taken back
            self._blocked[min(loads)[1]], self._blocker = self.link - self.now, self.in_flight
        for start, key in sorted(loads):
            self.ready[key], self.gaps[key] = [], max(0, start - max(self.link, self.now))
            for _ in range(self.pieces):
                self._piece(key, max(self.link, start))

    def _noted(self, events: Iterable[ExpertEvent]) -> Iterator[ExpertEvent]:
        for event in events:
            kind, layer, expert, _ = event
            if kind == "evict":
                self.ready.pop((layer, expert), None)
                self.ahead.pop((layer, expert), None)
                if self.rest == (layer, expert):
                    self.rest = None
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
