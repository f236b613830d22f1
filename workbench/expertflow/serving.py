"""Requests served side by side in virtual time: arrivals, token queues, one device, one link, and a cache of experts.

Routes come from a trace, each request being one of its sequences; bytes and operations from a named published configuration
(`costs`). Only the traced layers run, so times are scaled to the layers of the configuration. A request decodes one token after the
other: its next one begins when the last layer has joined the one before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from workbench.errors import ParameterError, shown
from workbench.expertflow.batching import FOREVER, Announced, Batch, Limits, Readings, TokenQueues, worthwhile
from workbench.expertflow.cache import ExpertCache
from workbench.expertflow.costs import Costs
from workbench.expertflow.replay import Forecast
from workbench.moe import RouteTrace


@dataclass
class Served:
    """What serving took. latencies: nanoseconds from a token's begin to its last layer, scaled; ns: the whole, scaled.

    batches: sizes of the expert batches with their causes; loads: of experts, prefetches: those of them on a forecast, useful: those
    of these that a batch met; waited: nanoseconds in queues, of all tokens and experts; lengths: (time, places taken in queues) now and
    then; withdrawn: requests that were.
    """

    costs: Costs
    n_tokens: int = 0
    ns: int = 0
    busy: int = 0
    scale: float = 1.0
    loads: int = 0
    prefetches: int = 0
    useful: int = 0
    withdrawn: int = 0
    waited: int = 0
    longest_wait: int = 0
    latencies: list[int] = field(default_factory=list)
    batches: list[tuple[int, str]] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Tokens per second of the whole configuration; 0 where all requests were withdrawn, whose averages below are not a number."""
        return self.n_tokens / (self.ns / 1e9) if self.n_tokens else 0.0

    def latency(self, share: float = 0.5) -> float:
        """Milliseconds per token, the median or another quantile."""
        return float(np.quantile(self.latencies, share)) / 1e6 if self.latencies else np.nan

    @property
    def batch(self) -> float:
        """Tokens per expert batch, on average."""
        return float(np.mean([n for n, _ in self.batches])) if self.batches else np.nan

    @property
    def loads_per_token(self) -> float:
        """Expert loads per token of the whole configuration."""
        return self.loads * self.scale / (self.n_tokens or np.nan)

    @property
    def wait(self) -> float:
        """Milliseconds that a token stands in a queue, on average, unscaled as limits are."""
        return self.waited / (sum(n for n, _ in self.batches) or np.nan) / 1e6

    def causes(self) -> dict[str, int]:
        """How many batches were served for which reason."""
        out: dict[str, int] = {}
        for _, cause in self.batches:
            out[cause] = out.get(cause, 0) + 1
        return out


def serve(trace: RouteTrace, costs: Costs, limits: Limits, slots: int, *, n_requests: int = 8, n_tokens: int = 16, every: int = 0,
          policy: str = "lru", sequences: Sequence[int] | None = None, adapt: int = 0, free: int = 0, forecast: Forecast | None = None,
          prefetch: bool = True, withdraw: Mapping[int, int] | None = None) -> Served:  # fmt: skip
    """Serve `n_requests` sequences of a trace, `n_tokens` tokens each, one arriving every `every` nanoseconds.

    limits: of the queues, of which no more are merged than there are slots; slots: of all layers together. adapt: batches after which
    threshold and capacity follow what was measured (0: never), with `free` bytes for all queues (none: one place each). forecast: of this
    trace; of two equal queues the one for which more tokens are announced comes first, and with `prefetch` an idle link brings what is
    announced. withdraw: request -> the time at which it is withdrawn. Raises ParameterError where the trace has not these sequences, a
    forecast is of another one, or an unknown request is withdrawn.
    """
    server = _Server(trace, costs, limits, slots, n_requests, n_tokens, every, policy, sequences)
    if forecast is not None and forecast.wanted.shape != (wanted := (trace.n_layers, trace.n_tokens, trace.n_expert)):
        raise ParameterError(f"a forecast of shape {forecast.wanted.shape}", f"{wanted}: that of this trace")
    server.forecast, server.prefetch, server.adapt, server.free = forecast, prefetch, adapt, free
    server.withdraw = dict(withdraw or {})
    if unknown := server.withdraw.keys() - range(n_requests):
        raise ParameterError(f"withdrawn: {', '.join(map(shown, unknown))}", f"requests, 0 to {n_requests - 1}")
    return server.run()


class _Server:
    """now: of the device; link: when it is free; ready: when a load ends; prepared: tokens whose attention can run, by layer."""

    def __init__(self, trace: RouteTrace, costs: Costs, limits: Limits, slots: int, n_requests: int, n_tokens: int, every: int, policy: str,
                 sequences: Sequence[int] | None) -> None:  # fmt: skip
        numbers = np.unique(trace.sequences) if sequences is None else np.asarray(sequences)
        if not 1 <= n_requests <= len(numbers) or n_tokens < 1 or not every >= 0:
            raise ParameterError(f"{n_requests} requests of {n_tokens} tokens, one every {every} ns",
                                 f"1 to {len(numbers)} requests, 1 token or more, 0 ns or more")  # fmt: skip
        if (trace.n_expert, trace.k) != (costs.shape.router.n_expert, costs.shape.router.n_used):
            raise ParameterError(f"routes with {trace.k} of {trace.n_expert} experts", f"those of {costs.name}")
        self.rows = [np.flatnonzero(trace.sequences == s)[:n_tokens] for s in numbers[:n_requests]]
        if unknown := [s for s, rows in zip(numbers.tolist(), self.rows, strict=False) if not len(rows)]:
            raise ParameterError(f"sequences {', '.join(map(shown, unknown))}", "those of the trace")
        self.routes = [trace.experts[:, r].astype(int) for r in self.rows]  # (layers, tokens, k) of each request
        self.costs, self.n_layers = costs, trace.n_layers
        self.scale = costs.shape.n_moe / trace.n_layers
        self.cache = ExpertCache(policy, slots, trace.n_layers, trace.n_expert, scope="global", together=False)
        self.announced = Announced()
        self.forecast: Forecast | None = None
        self.prefetch = True
        self.fetched: set[tuple[int, int]] = set()  # on a forecast, and not met by a batch yet
        self.withdraw: dict[int, int] = {}
        limits = replace(limits, merge=min(limits.merge, slots))  # what is merged is in slots at the same time
        self.queues = TokenQueues(limits, trace.k, worthwhile(costs), self._is_there, self.announced.wanted)
        self.at_once = 2 if slots > 2 + limits.merge else 1  # expert batches that are under way
        self.now = self.link = 0
        self.ready: dict[tuple[int, int], int] = {}
        self.arrivals = [(i * every, i) for i in range(n_requests)]
        heapq.heapify(self.arrivals)
        self.at = [0] * n_requests  # token of each request
        self.layer = [0] * n_requests
        self.begun = [0] * n_requests
        self.prepared: dict[int, list[int]] = {}
        self.loading: list[tuple[int, Batch]] = []  # batches whose expert is on its way: (when it is there, batch)
        self.out = Served(costs, scale=self.scale)
        self.readings, self.adapt, self.free = Readings(), 0, 0

    def _is_there(self, layer: int, expert: int) -> bool:
        return self.cache.holds(layer, expert)

    def run(self) -> Served:
        """Until every request has its tokens."""
        while self._news() or self.prepared or self.queues.n_waiting or self.loading:
            if not (self._compute_ready() or self._start_batch(idle=False) or self._attention() or self._start_batch(idle=True)):
                self._sleep()
        self.out.ns, self.out.longest_wait, self.out.waited = int(self.now * self.scale), self.queues.longest_wait, self.queues.waited
        return self.out

    def _news(self) -> bool:
        """Requests come and are withdrawn; whether more will come."""
        for request in [r for r, at in self.withdraw.items() if at <= self.now]:
            del self.withdraw[request]
            self._drop(request)
        while self.arrivals and self.arrivals[0][0] <= self.now:
            _, request = heapq.heappop(self.arrivals)
            self._begin(request)
        return bool(self.arrivals)

    def _drop(self, request: int) -> None:
        """A request leaves wherever it stands; what an expert computes for it just now is dropped."""
        if self.at[request] >= self.routes[request].shape[1]:
            return  # it has all its tokens
        self.at[request] = self.routes[request].shape[1]
        self.arrivals = [a for a in self.arrivals if a[1] != request]
        heapq.heapify(self.arrivals)
        self.prepared = {layer: left for layer, some in self.prepared.items() if (left := [r for r in some if r != request])}
        self.queues.cancel(request)
        self.announced.forget(request)
        self.out.withdrawn += 1

    def _begin(self, request: int) -> None:
        self.layer[request], self.begun[request] = 0, self.now
        self.prepared.setdefault(0, []).append(request)

    def _attention(self) -> bool:
        """The layer with most tokens that are ready for it."""
        if not self.prepared:
            return False
        layer = max(self.prepared, key=lambda i: (len(self.prepared[i]), -i))
        requests = self.prepared.pop(layer)
        n = len(requests)
        self._spend(self.costs.attention(n) + self.costs.ids(n) + (int(self.costs.head(n) / self.scale) if layer == 0 else 0))
        for r in requests:
            self.queues.add(r, layer, self.routes[r][layer, self.at[r]].tolist(), self.now)
            self._announce(r, layer)
        self.out.lengths.append((self.now, self.queues.n_waiting))
        return True

    def _announce(self, request: int, layer: int) -> None:
        """What is known of a request's next layers after its router in this one; after the first, of all that are known at once."""
        self.announced.arrived(request, layer)
        if self.forecast is None:
            return
        last, row = layer + self.forecast.ahead, self.rows[request][self.at[request]]
        for target in range(layer + 1 if layer == 0 else max(last, layer + 1), min(last + 1, self.n_layers)):
            scores = self.forecast.wanted[target, row]
            self.announced.say(request, target, {int(e): float(scores[e]) for e in np.flatnonzero(scores)})

    def _prefetch(self) -> None:
        """Nobody needs the link: it brings the expert that most tokens are announced for; those that somebody waits for stay."""
        wanted = self.announced.missing(self._is_there) if self.prefetch else None
        stay = {(b.layer, b.expert) for _, b in self.loading} | {key for key in self.queues.queues if self._is_there(*key)}
        if wanted is not None and len(stay) < self.cache.slots_of(wanted[0]):
            self._bring(*wanted, stay)
            self.out.prefetches += 1
            self.fetched.add(wanted)

    def _bring(self, layer: int, expert: int, in_use: Iterable[tuple[int, int]]) -> None:
        for kind, *key, _ in self.cache.bring(layer, expert, in_use):
            if kind == "load":
                self.link = max(self.link, self.now) + self.costs.load
                self.ready[key[0], key[1]] = self.link
                self.readings.loads.append(self.costs.load)
                self.out.loads += 1
            elif kind == "evict":
                self.fetched.discard((key[0], key[1]))

    def _start_batch(self, idle: bool) -> bool:
        """Take a queue; where its expert is missing, ask for the load and go on with something else meanwhile."""
        if len(self.loading) >= self.at_once:  # the link has enough to do
            return False
        batches = self.queues.next(self.now, idle and not self.loading)
        for batch in batches:
            key = batch.layer, batch.expert
            self.out.useful += key in self.fetched
            self.fetched.discard(key)
            self._bring(*key, [(b.layer, b.expert) for _, b in self.loading])
            self.loading.append((self.ready.get(key, 0), batch))
        return bool(batches)

    def _compute_ready(self) -> bool:
        """Compute the batch whose expert has been there for longest."""
        if not self.loading:
            return False
        when, batch = first = min(self.loading, key=lambda item: item[0])
        if when > self.now:
            return False
        self.loading.remove(first)
        batch = batch._replace(tokens=tuple(w for w in batch.tokens if w.token in self.queues.missing))
        if not batch.tokens:  # all of them were withdrawn while their expert came
            return True
        self._spend(self.costs.expert(len(batch.tokens)))
        self.out.batches.append((len(batch.tokens), batch.cause))
        self.readings.batches.append((len(batch.tokens), self.costs.expert(len(batch.tokens))))
        if self.adapt and len(self.out.batches) % self.adapt == 0:
            row, queues = 2 * self.costs.shape.d, self.n_layers * self.costs.shape.router.n_expert
            self.queues.adapt(self.readings.limits(self.queues.limits, self.free, row, queues))
        for request in self.queues.done(w.token for w in batch.tokens):
            self._joined(request)
        return True

    def _joined(self, request: int) -> None:
        self.layer[request] += 1
        if self.layer[request] < self.n_layers:
            self.prepared.setdefault(self.layer[request], []).append(request)
            return
        self.out.latencies.append(int((self.now - self.begun[request]) * self.scale))
        self.out.n_tokens += 1
        self.at[request] += 1
        if self.at[request] < self.routes[request].shape[1]:
            self._begin(request)

    def _spend(self, ns: int) -> None:
        """The device computes; a link that nobody needs meanwhile brings what is announced."""
        if self.link <= self.now and self.announced.sums:
            self._prefetch()
        self.now += ns
        self.out.busy += ns

    def _sleep(self) -> None:
        """Nothing can be done now: until a load ends, a token has waited long enough, or a request arrives."""
        due = self.queues.due() if len(self.loading) < self.at_once else FOREVER
        wake = min([when for when, _ in self.loading] + [at for at, _ in self.arrivals] + [due])
        assert self.now < wake < FOREVER, "nothing to wait for"
        self.now = wake
