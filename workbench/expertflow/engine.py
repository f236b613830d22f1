"""The engine: a mixture of experts runs on a device that has room for some of its experts only.

It is a `WeightTransfer`: the scheduler cuts the graph before each product with experts as it always does, and asks how the weights
are to come. The engine reads the router's ids once per layer, lets the cache policy decide, loads what is missing into the pool,
and lets the device wait for these loads alone. What a forecast names comes while the host waits for the next router: one piece
after another, as long as the link is idle, so that a load that somebody waits for never stands behind more than one of them. A batch
that needs more experts than there are slots runs in waves: the nodes from a layer's first product to its last are computed once for
each group of experts, each time for that group's rows only.

Whatever was predicted, the same kernels compute the same rows from the same bytes: results equal those of a model that is all there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from workbench.devices.backend import Backend, Event
from workbench.devices.simulated import SimulatedEvent
from workbench.errors import ParameterError
from workbench.expertflow.cache import ExpertCache, ExpertEvent, policy_named, require_every_access, require_granularity
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.hosted import HostBlock, host_ns, load_ns
from workbench.expertflow.pool import Expert, ExpertPool, Slot, SlotView
from workbench.expertflow.visits import Counters, Visit, between, memory_of
from workbench.scheduler.splits import Split
from workbench.scheduler.transfer import Mover, Route, UsedExperts, read_ids
from workbench.tensors.tensor import Tensor


class ExpertEngine(Mover):
    """Moves experts through a pool (a `WeightTransfer`); other weights by ggml's rule.

    pool: on the device that computes the experts. cache: decides hits, loads and evictions; it has as many slots as the pool, less
    `staging` of them, which "static" needs for what only passes through. forecast: what to prefetch; at most `prefetches` loads after
    each layer. host_below: missing experts with fewer tokens than that are computed on the host instead of being loaded; "auto": where
    that is estimated to be quicker than a load, or than the rest of a load that is under way. granularity: "expert", a product waits
    for all of its experts; "matrix", for the matrices that it reads. Raises ParameterError for other words, and
    for policies that read the future where experts are computed on the host.
    """

    attaches = True

    def __init__(self, pool: ExpertPool, cache: ExpertCache, forecast: Forecaster | None = None, *, host_below: int | str = 0,
                 prefetches: int = 4, staging: int = 0, granularity: str = "expert") -> None:  # fmt: skip
        require_granularity(granularity)
        require_every_access(cache.policy, host_below)
        self.pool, self.cache, self.forecast, self.host_below = pool, cache, forecast, host_below
        self.prefetches, self.staging, self.granularity, self.counters = prefetches, staging, granularity, Counters()
        self._others, self._host = UsedExperts(), pool.device
        self._visits: dict[Tensor, Visit] = {}
        self._products: dict[Any, list[tuple[int, Visit]]] = {}  # uid of a split -> where products stand in it
        self._open: Visit | None = None
        self._reading: dict[int, Slot] = {}
        self._passing: list[Expert] = []
        self._foresees = policy_named(cache.policy).needs in ("predictions", "future")
        self._left = 0  # prefetches that may still begin before the next router has spoken
        self._coming: Slot | None = None  # the prefetch that began last
        self._router: Event | None = None
        self._preloaded = False

    # ---- what the scheduler and its runtime call

    def attach(self, splits: list[Split], backends: list[Backend]) -> dict[Tensor, list[Tensor]]:
        """Let copies of experts be slots, find the visits, and keep what a wave reads until the last wave has read it."""
        self._visits, self._products, self._host, visits = {}, {}, backends[-1], dict[int, Visit]()
        if self.host_below == "auto":
            for b in (self.pool.device, self._host):
                if not hasattr(b, "speed"):
                    raise ParameterError(f'host_below="auto" on {b.name}, whose speed nobody knows', "a simulated machine",
                                         "a number of tokens as host_below")  # fmt: skip
        for split in splits:
            if backends[split.backend] is self.pool.device:
                for tensor, copies in zip(split.inputs, split.copies, strict=True):
                    if (view := self.pool.view(tensor)) is not None:
                        for copy in copies:
                            copy.place(view)
            for i, node in enumerate(split.nodes):
                if (view := self._view(node)) is not None:
                    visit = self._visits[node] = visits.setdefault(view.layer, Visit(view.layer, []))
                    visit.products.append(node)
                    self._products.setdefault(split.uid, []).append((i, visit))
        for visit in visits.values():
            visit.block = between(splits, visit.products[0], visit.products[-1])
        kept = [v for v in visits.values() if self._may_need_waves(v)]
        return {v.products[-1]: memory_of(v.block) for v in kept}

    def begin(self) -> None:
        """A run starts; the first one brings what a policy wants there from the start."""
        self._others.begin()
        self._open = None
        if not self._preloaded:
            self._preloaded = True
            self._apply(self.pool.device, self.cache.preload())
            self.counters.speculative_bytes += self._send(self.pool.where.values())

    def keeps(self, weight: Tensor) -> bool:
        """Experts come to their slots when the router has spoken."""
        return self.pool.view(weight) is not None

    def move(self, route: Route, target: Backend, split: Split, position: int) -> bool:
        """What is no expert goes by ggml's rule."""
        return self.keeps(split.inputs[position]) or self._others.move(route, target, split, position)

    def compute(self, route: Route, target: Backend, split: Split) -> list[Tensor]:
        """Bring each layer's experts before its first product; run waves at its last, where it takes several."""
        nodes, at = split.nodes, 0
        for i, visit in self._products.get(split.uid, ()):
            node = nodes[i]
            enters = node is visit.products[0]
            if i > at and (enters or self._pending):
                target.compute_async(route.part((split.uid, "before", at, i), nodes[at:i]))
                at = i
            if enters:
                self._enter(target, visit, node)
                at = i
            elif not visit.in_waves:
                self._await(target, node)
            if node is visit.products[-1] and visit.in_waves:
                self._waves(route, target, visit)
                at = i + 1
        return [] if self.holding else nodes[at:]

    @property
    def holding(self) -> bool:
        """Whether a layer that runs in waves has not come to its last product."""
        return self._open is not None and self._open.in_waves

    def done(self, route: Route, target: Backend, split: Split) -> None:
        """After a layer's last product was asked for: its slots may be written again when that is done."""
        if self._open is not None and not self._open.in_waves and self._open.products[-1] in split.nodes:
            self._leave(target, self._open)
            self._open = None

    def cancelled(self) -> None:
        """Give slots back whose loads did not happen. Whatever was interrupted, cache and pool agree again on who is there."""
        self._open, self._passing, self._reading, self._coming, self._left = None, [], {}, None, 0
        self.pool.forget_unfinished()
        held = {(layer, e) for layer, experts in self.cache.resident().items() for e in experts}
        for layer, expert in self.pool.where.keys() - held:
            self.pool.evict(layer, expert)
        self.cache.forget(held - self.pool.where.keys())
        for group in self.cache.caches:
            group.busy = ()

    def resize(self, layer: int, n: int) -> int:
        """The slots that this layer can use become `n` more, or fewer for a negative `n`, between two runs. Returns the bytes taken
        from the device, negative for bytes given back."""
        size = self.pool.sizes[layer]
        if n < 0:
            self._apply(self.pool.device, self.cache.shed(layer, -n))
            return -self.pool.shrink(size, -n)
        self.pool.grow(size, n)
        self.cache.widen(layer, n)
        return n * size

    def fetch(self, layer: int, expert: int, stay: Iterable[Expert] = ()) -> bool:
        """Bring one expert ahead, for somebody who decides by himself what comes next (token queues); those that `stay` keep their slots.
        False where it is there, the link is busy, or there is no slot to spare."""
        stay = list(stay)
        if self.pool.link is not None and not self.pool.link.done or len(stay) >= self.cache.slots_of(layer):
            return False
        events = [e for e in self.cache.bring(layer, expert, stay) if e[0] != "hit" and e[3] != "staged"]
        self._apply(self.pool.device, [(kind, at, e, "predicted") for kind, at, e, _ in events])
        if events:
            self.counters.speculative_bytes += self._send([self.pool.where[layer, expert]])
        return bool(events)

    # ---- a layer

    def _enter(self, target: Backend, visit: Visit, product: Tensor) -> None:
        """Read who is wanted, and go on as was settled."""
        weight, x, ids = product.src
        assert weight is not None and x is not None and ids is not None
        states = target.get_async(x) if self.forecast is not None else None
        self._feed(target)
        self._open, visit.ids = visit, read_ids(ids, target, weight)
        self.counters.ids_waits += 1
        wanted: dict[int, int] = {}
        for e in sorted(visit.ids.ravel().tolist()):
            wanted[e] = wanted.get(e, 0) + 1
        self._settle(target, visit, wanted)
        if not visit.in_waves:
            self._serve(target, visit, visit.groups[0] if visit.groups else [], None)
            self._look_ahead(target, visit, states)
        else:
            visit.states = states

    def _settle(self, target: Backend, visit: Visit, wanted: dict[int, int]) -> None:
        """Where each wanted expert (with its number of rows) is computed, and in which wave."""
        layer, where = visit.layer, self.pool.where
        there: list[int] = []
        missing: list[int] = []
        visit.hosted = []
        for e, n in wanted.items():
            slot = where.get((layer, e))
            if slot is not None and slot.ahead:
                self.counters.late += not slot.there
                slot.ahead = False
            if self.host_below and self._on_host(layer, slot, n):
                visit.hosted.append(e)
            else:
                (missing if slot is None else there).append(e)
        visit.groups = self._groups(layer, there, missing)
        visit.in_waves = len(visit.groups) > 1 or bool(visit.hosted)
        self._apply(target, self.cache.route(layer, list(wanted)))

    def _groups(self, layer: int, there: list[int], missing: list[int]) -> list[list[int]]:
        """Those that are there first, then as many at a time as there are slots for."""
        most = self.cache.slots_of(layer)
        if not missing or not self.staging and len(there) + len(missing) <= most:
            return [there + missing] if there or missing else []
        free, step = (0, min(self.staging, most)) if self.staging else (max(most - len(there), 0), most)
        first, rest = there + missing[:free], missing[free:]
        return [first] * bool(first) + [rest[i : i + step] for i in range(0, len(rest), step)]

    def _on_host(self, layer: int, slot: Slot | None, n_tokens: int) -> bool:
        """Whether an expert with so many tokens is computed on the host: one in no slot, or still on its way to one."""
        if self.host_below == "auto":
            weights = self.pool.weights[layer]
            wait = load_ns(self.pool.device, weights) if slot is None else self.pool.remaining(slot)
            return host_ns(self._host, weights, n_tokens) < wait
        return slot is None and n_tokens < int(self.host_below)

    def _serve(self, target: Backend, visit: Visit, group: Sequence[int], only: frozenset[int] | None) -> None:
        """Make a group of experts resident and let the next products read them."""
        layer, where = visit.layer, self.pool.where
        self._apply(target, self.cache.need(layer, group))
        slots = self._reading = {e: where[layer, e] for e in group}
        self.counters.demand_bytes += self._send(slots.values())
        self._await(target, visit.products[0])
        table, views = {e: (slot, slot.load) for e, slot in slots.items()}, self.pool.views[layer]

        def bind() -> None:
            for view in views:
                view.bind(table, only)

        target.then(bind)

    def _send(self, slots: Iterable[Slot]) -> int:
        """Ask for what was not asked for yet: expert by expert or, where products wait for matrices, what is read first first."""
        unsent = [(m, slot) for slot in slots for m in slot.unsent]
        if self.granularity == "matrix":
            unsent.sort(key=lambda pair: pair[0])
        return sum([self.pool.send(slot, m) for m, slot in unsent])

    @property
    def _pending(self) -> bool:
        """Whether products to come read what may not be there yet."""
        return any(slot.ready for slot in self._reading.values())

    def _await(self, target: Backend, product: Tensor) -> None:
        """Let the device wait for what a product reads; what follows on its stream comes after that in any case."""
        for slot in self._reading.values():
            if not (ready := slot.ready):
                continue
            last = max(ready)
            if self.granularity == "matrix" and (m := self._m(product)) < last:
                event = ready.pop(m, None)
            else:
                event = ready[last]
                ready.clear()
            if event is not None and not event.done:
                target.wait_event(event)

    def _look_ahead(self, target: Backend, visit: Visit, states: np.ndarray | None) -> None:
        """Forecasts; then the link has something to do as long as nobody waits for it."""
        self._left = self.prefetches if self._foresees else 0
        if self.forecast is not None and states is not None:
            normed = states.view(np.float32).reshape(len(visit.ids), -1)
            for layer, scores in self.forecast.after(visit.layer, visit.ids, normed):
                self._announce(target, layer, scores)
        self._prefetch(target)

    def _announce(self, target: Backend, layer: int, scores: dict[int, float]) -> None:
        """A layer to come will want these experts, each for a share of the tokens."""
        self._left = self.prefetches
        self._apply(target, self.cache.predict(layer, scores))
        if target.trace is not None:
            for expert in scores:
                target.trace.add("predict", target.buffer_type.now, token=-1, layer=layer, expert=expert)

    def _feed(self, target: Backend) -> None:
        """The host waits for the router: until then an idle link brings what was announced."""
        if not self._left and (self._coming is None or not self._coming.unsent):
            return
        router = self._router = self._router or target.new_event("the router")
        if router is not None:
            router.record()
        while (router is None or self.pool.link is None or _comes_first(self.pool.link, router)) and self._prefetch(target):
            pass

    def _prefetch(self, target: Backend) -> bool:
        """Ask for one piece ahead: the next matrix of what is coming, or what was announced next. Whether there was any."""
        if self._coming is None or not self._coming.unsent:
            before = self.counters.prefetches
            if self._left:
                self._left -= 1
                self._apply(target, self.cache.prefetch())
            if self.counters.prefetches == before:
                self._left = 0
                return False
        assert (slot := self._coming) is not None
        pieces = slot.unsent[:1] if self.granularity == "matrix" else list(slot.unsent)
        self.counters.speculative_bytes += sum([self.pool.send(slot, m) for m in pieces])
        return True

    def _apply(self, target: Backend, events: Iterable[ExpertEvent]) -> None:
        """Do what the cache decided, count it, and write it down."""
        trace, count = target.trace, self.counters
        now = target.buffer_type.now if trace is not None else 0
        for kind, layer, expert, cause in events:
            if kind == "load":
                slot = self.pool.take(layer, expert)
                slot.ahead = cause in ("predicted", "hot set")
                if cause == "staged":
                    self._passing.append((layer, expert))
                elif cause == "predicted":
                    self._coming = slot
                count.loads += not slot.ahead
                count.prefetches += cause == "predicted"
                if trace is not None:
                    trace.add("load", now, layer=layer, expert=expert, bytes=self.pool.expert_bytes(layer))
                continue
            if kind == "hit":
                count.hits += 1
                count.prefetched_hits += cause == "prefetched"
            elif kind == "evict":
                self.pool.evict(layer, expert)
                count.evictions += 1
            elif kind == "hosted":
                count.hosted += 1
            else:
                count.dropped += kind == "drop"
                continue
            if trace is not None:
                trace.add(kind, now, layer=layer, expert=expert)

    def _leave(self, target: Backend, visit: Visit) -> None:
        """The products of a group were asked for: when they are done, its slots may be written."""
        event = target.new_event(f"{target.name} has read layer {visit.layer}")
        if event is not None:
            event.record()
        for slot in self._reading.values():
            slot.read = event
        self.cache.done(visit.layer, *self._reading)
        self._reading = {}
        for passed in self._passing:
            self.pool.evict(*passed)
        self._passing = []

    def _waves(self, route: Route, target: Backend, visit: Visit) -> None:
        """Compute a layer's experts group by group on the device, and some on the host in the meantime."""
        if visit.hosted:
            visit.twin = visit.twin or HostBlock(self._host, [node for nodes in visit.block for node in nodes])
            visit.twin.fetch(target)
        self.counters.waves += len(visit.groups)
        for group in visit.groups:
            self._serve(target, visit, group, frozenset(group))
            for i, nodes in enumerate(visit.block):
                for product in visit.products if self._pending else ():
                    if product in nodes:
                        self._await(target, product)
                part = route.part((nodes[0], "wave", i), nodes)
                part.share = self._share(visit, group)
                target.compute_async(part)
            self._leave(target, visit)
        self._look_ahead(target, visit, visit.states)
        if visit.hosted:
            assert visit.twin is not None
            if (disk := self.pool.disk) is not None:
                for e in visit.hosted:
                    disk.want(visit.layer, e, self.pool.expert_bytes(visit.layer)).synchronize()
            visit.twin.compute(visit.hosted)
            visit.twin.write(target, visit.ids, visit.hosted, everything=route.eval_callback is not None)
            self._apply(target, (("hosted", visit.layer, e, "") for e in visit.hosted))
        visit.in_waves, self._open = False, None

    @staticmethod
    def _m(product: Tensor) -> int:
        """Which of its layer's matrices a product reads."""
        weight = product.src[0]
        assert weight is not None and isinstance(weight.storage, SlotView)
        return weight.storage.m

    def _view(self, node: Tensor) -> SlotView | None:
        storage = node.src[0].storage if node.op == "MUL_MAT_ID" and node.src[0] is not None else None
        return storage if isinstance(storage, SlotView) and storage.pool is self.pool else None

    def _share(self, visit: Visit, group: Sequence[int]) -> float:
        """The part of a layer's products that a group is."""
        return len(group) / sum(map(len, visit.groups))

    def _may_need_waves(self, visit: Visit) -> bool:
        ids = visit.products[0].src[2]
        always = bool(self.host_below) or bool(self.staging)
        return ids is not None and (always or ids.n_elements > self.cache.slots_of(visit.layer))


def _comes_first(link: Event, router: Event) -> bool:
    """Let the host wait for the first of two events; whether that is the link's."""
    if isinstance(link, SimulatedEvent) and isinstance(router, SimulatedEvent):  # their clock moves only where somebody waits
        if link.time < router.time:
            link.synchronize()
            return True
        return False
    while not (link.done or router.done):
        pass
    return not router.done
