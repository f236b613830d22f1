"""A model with an expert budget: the front door of the engine.

`offload` puts everything but the experts on a device, gives these a pool of slots there, and opens a session that runs through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from workbench.devices.backend import Backend
from workbench.devices.cost import DISKS
from workbench.devices.simulated import SimulatedDevice, simulated_machine
from workbench.errors import AllocationError, ModelError, ParameterError, shown
from workbench.expertflow.cache import ExpertCache, Future, policy_named
from workbench.expertflow.disk import DiskTier
from workbench.expertflow.engine import ExpertEngine
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.pool import ExpertPool
from workbench.expertflow.precision import store_experts
from workbench.expertflow.visits import Counters, expert_weights
from workbench.models import Model, Session, place_weights
from workbench.scheduler import Scheduler
from workbench.trace import Trace


class Offloaded:
    """A session whose experts move; made by `offload`. `session` decodes, `engine` moves, `trace` holds what happened; `host` is the
    whole model on the host, with its experts as they are stored for this run."""

    def __init__(self, session: Session, engine: ExpertEngine, scheduler: Scheduler, host: Model, *, own_host: bool) -> None:
        self.session, self.engine, self.scheduler, self.host, self._own_host = session, engine, scheduler, host, own_host

    @property
    def counters(self) -> Counters:
        """Hits, loads, bytes and so on since the start."""
        return self.engine.counters

    @property
    def trace(self) -> Trace | None:
        """What happened, where a trace was given."""
        return self.scheduler.trace

    def memory(self) -> dict[str, int]:
        """Bytes on all cards by part, as a `Monitor` accounts them."""
        pool, session = self.engine.pool, self.session
        cards = [b for b in self.scheduler.backends if not b.buffer_type.is_host]
        buffers = getattr(session.model, "buffers", [])
        forecast = self.engine.forecast
        weights = sum(b.size for b in buffers if not b.buffer_type.is_host)
        return {"weights": weights, "cache": pool.nbytes, "queues": 0,
                "predictor": forecast.nbytes if forecast is not None else 0,
                "activations": sum(map(self.scheduler.buffer_size, cards)), "kv": session.cache.nbytes}  # fmt: skip

    def close(self) -> None:
        """Give all memory on the device back; the model stays open."""
        self.session.close()
        self.scheduler.close()
        self.engine.pool.close()
        if self.session.model.context is not None:
            self.session.model.close()
        if self._own_host:
            self.host.close()

    def __enter__(self) -> Offloaded:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def expert_bytes(model: Model) -> int:
    """Bytes of all routed experts of a model."""
    return sum(w.nbytes for merged in expert_weights(model).values() for w in merged)


def budget_bytes(model: Model, budget: int | float | str) -> int:
    """A budget as bytes: a whole number of them, or a share such as 0.25 or "25%" of all expert bytes."""
    share = None
    if isinstance(budget, str) and budget.strip().endswith("%"):
        try:
            share = float(budget.strip()[:-1]) / 100
        except ValueError:
            share = -1.0
    elif isinstance(budget, float):
        share = budget
    if share is not None and 0 <= share <= 1:
        return int(expert_bytes(model) * share + 0.5)
    if share is None and isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    raise ParameterError(f"an expert budget of {shown(budget)!r}", 'bytes, or a share of all experts from 0 to 1 or "0%" to "100%"')


def offload(model: Model, budget: int | float | str, *, policy: str = "lru", scope: str = "global", forecast: Forecaster | None = None,
            storage: str | None = None, mmap: bool = True, host_below: int | str = 0, prefetches: int = 4,
            granularity: str = "expert", backends: Sequence[Backend] | str | None = None, n_ctx: int | None = None, n_batch: int = 512,
            n_seq_max: int = 1, recording: bool = False, verify: bool = False, scrub: bool = False, future: Future | None = None,
            hot: np.ndarray | None = None, host_slots: int | None = None, disk: str = "nvme-pcie4",
            trace: Trace | None = None) -> Offloaded:  # fmt: skip
    """Open a session over `model` whose experts have `budget` bytes on the device.

    policy, scope, future, hot: see `ExpertCache`; forecast, host_below, prefetches, granularity: see `ExpertEngine`. storage: the experts
    are converted on the host first (`precision.store_experts`), and all bytes are those of the converted ones. mmap: what stays on the
    host stays in the mapped file, which is pageable: a copy from there keeps the host waiting, so that a prefetch hides nothing; without,
    it is copied into pinned memory, from which a card copies while the host goes on. backends: a machine, or a preset's name, such as
    "rtx3090-pcie4" (default: a round-numbered simulated card), whose first device computes the experts of any batch.
    host_slots: experts that the host's memory holds (default: all); a simulated card waits for others to be read from `disk`, one of
    `devices.cost.DISKS`. verify: compare what products read with the host's bytes; scrub: overwrite what is evicted. Raises
    ParameterError where the budget is below the experts of one token, with the least that works.
    """
    weights = expert_weights(model)
    if not weights:
        raise ModelError(f"{shown(model.name)} has no experts", "a mixture-of-experts model", "tiny-mixtral-f16, for example")
    made = policy_named(policy)
    for what, value in (("host_below", host_below), ("prefetches", prefetches)):
        if not (isinstance(value, int) and not isinstance(value, bool) and value >= 0 or what == "host_below" and value == "auto"):
            raise ParameterError(f"{what}={value!r:.40}", "a whole number from 0 on" + (', or "auto"' if what == "host_below" else ""))
    if hot is not None and np.shape(hot) != (wanted := (len(weights), model.hparams.n_expert)):
        raise ParameterError(f"a sample of shape {np.shape(hot)}", f"counts of shape {wanted}: [layers with experts, experts]")
    if backends is not None and not isinstance(backends, str) and len(backends) < 2:
        raise ParameterError(f"{len(backends)} backends", "a device with memory of its own, and a CPU as the last")
    if backends is None or isinstance(backends, str):
        backends = simulated_machine(backends or 1, offload_min_batch=1)
    if backends[0].buffer_type.is_host:
        raise ParameterError(f"{backends[0].name}, which computes in the host's memory", "a card with memory of its own",
                             "nothing would be moved: on the host all experts are there")  # fmt: skip
    k, n_expert = model.hparams.n_expert_used, model.hparams.n_expert
    staging = k if made.needs == "hot" else 0
    with ExitStack() as opened:
        host = model if storage is None else opened.enter_context(store_experts(model, storage))
        pinned = None if mmap else getattr(backends[0], "host_buffer_type", backends[-1].buffer_type)
        placed = place_weights(host, backends, overrides={r"_exps\.weight": backends[-1]}, pinned=pinned)
        opened.callback(placed.close)
        weights, layers, room = expert_weights(placed), list(weights), budget_bytes(host, budget)
        share = len(layers) if scope == "layer" else 1
        try:
            pool = ExpertPool(backends[0], weights, room, least=k * share + staging, scrub=scrub, verify=verify)
            opened.callback(pool.close)
            if host_slots is not None:
                pool.disk = _tier(backends[0], host_slots, disk)
            members = {size: sum(s == size for s in pool.sizes.values()) for size in pool.classes}
            slots = {size: (len(found) - staging) // (members[size] if scope == "layer" else 1) for size, found in pool.classes.items()}
            cache = ExpertCache(policy, slots, layers, n_expert, scope=scope, sizes=[pool.sizes[i] for i in layers], least=k,
                                future=future, hot=hot)  # fmt: skip
            engine = ExpertEngine(pool, cache, forecast, host_below=host_below, prefetches=prefetches, staging=staging,
                                  granularity=granularity)  # fmt: skip
            scheduler = Scheduler(backends, transfer=engine)
            opened.callback(scheduler.close)
            session = Session(placed, n_ctx, n_batch, n_seq_max, scheduler=scheduler, recording=recording)
        except AllocationError as e:
            rest = sum(b.size for b in placed.buffers if b.buffer_type is backends[0].buffer_type)
            raise AllocationError(f"slots of {room:,} bytes for experts beside {rest:,} bytes of weights on {backends[0].name}: {e.found}",
                                  "both, KV cache and intermediate results within the device's memory",
                                  "a smaller expert budget, n_ctx or n_batch") from None  # fmt: skip
        opened.pop_all()
    scheduler.trace = trace
    return Offloaded(session, engine, scheduler, host, own_host=storage is not None)


def _tier(card: Backend, slots: int, disk: str) -> DiskTier:
    if disk not in DISKS or not isinstance(card, SimulatedDevice):
        raise ParameterError(f"experts on disk {shown(disk)!r} for {card.name}", f"a simulated card, and one of {', '.join(DISKS)}")
    return DiskTier(card, slots, DISKS[disk])
