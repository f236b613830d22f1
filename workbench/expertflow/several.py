"""Experts on several cards: each card computes some layers, and has a pool, a cache and a link of its own for their experts."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.devices.backend import Backend
from workbench.devices.simulated import SimulatedDevice, simulated_machine
from workbench.errors import ModelError, ParameterError, shown
from workbench.expertflow.cache import ExpertCache
from workbench.expertflow.engine import Counters, ExpertEngine, expert_weights
from workbench.expertflow.offload import budget_bytes
from workbench.expertflow.pool import ExpertPool
from workbench.models import Model, Session, place_weights
from workbench.scheduler import Scheduler
from workbench.scheduler.splits import Split
from workbench.scheduler.transfer import Mover, Route, UsedExperts
from workbench.tensors.tensor import Tensor


class Engines(Mover):
    """An engine per device (a `WeightTransfer`): whatever a split needs comes through the engine of the device that computes it."""

    attaches = True

    def __init__(self, engines: Sequence[ExpertEngine]) -> None:
        self.engines = list(engines)
        self._of = {id(e.pool.device): e for e in engines}
        self._others = UsedExperts()

    def attach(self, splits: list[Split], backends: list[Backend]) -> dict[Tensor, list[Tensor]]:
        """Each engine finds its own products."""
        kept: dict[Tensor, list[Tensor]] = {}
        for engine in self.engines:
            kept.update(engine.attach(splits, backends))
        return kept

    def begin(self) -> None:
        """A run starts on all devices."""
        self._others.begin()
        for engine in self.engines:
            engine.begin()

    def move(self, route: Route, target: Backend, split: Split, position: int) -> bool:
        """By the engine of the target, or ggml's rule where it has none."""
        return self._of.get(id(target), self._others).move(route, target, split, position)

    def compute(self, route: Route, target: Backend, split: Split) -> list[Tensor]:
        """By the engine of the target."""
        return self._of.get(id(target), self._others).compute(route, target, split)

    @property
    def holding(self) -> bool:
        """Whether any engine keeps nodes back."""
        return any(engine.holding for engine in self.engines)

    def done(self, route: Route, target: Backend, split: Split) -> None:
        """To the engine of the target."""
        self._of.get(id(target), self._others).done(route, target, split)

    def cancelled(self) -> None:
        """A run failed: each pool gives back what did not come."""
        for engine in self.engines:
            engine.cancelled()


class Across:
    """A session over several devices; made by `offload_across`. engines: one for each device, in the order of the machine."""

    def __init__(self, session: Session, engines: Sequence[ExpertEngine], scheduler: Scheduler) -> None:
        self.session, self.engines, self.scheduler = session, list(engines), scheduler

    @property
    def counters(self) -> list[Counters]:
        """Hits, loads, bytes and so on since the start, of each device."""
        return [engine.counters for engine in self.engines]

    def close(self) -> None:
        """Give all memory on the devices back; the model stays open."""
        self.session.close()
        self.scheduler.close()
        for engine in self.engines:
            engine.pool.close()
        self.session.model.close()

    def __enter__(self) -> Across:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def offload_across(model: Model, budget: int | float | str, n_devices: int = 2, *, policy: str = "lru", n_ctx: int | None = None,
                   n_batch: int = 512, n_seq_max: int = 1, recording: bool = False, verify: bool = False) -> Across:  # fmt: skip
    """Open a session whose layers are divided among simulated cards, each with its own pool for the experts of its layers.

    budget: of all cards together, divided by the bytes of their experts. Raises ParameterError where a card would have no experts.
    """
    weights, k = expert_weights(model), model.hparams.n_expert_used
    if not weights:
        raise ModelError(f"{shown(model.name)} has no experts", "a mixture-of-experts model", "tiny-mixtral-f16, for example")
    if not isinstance(n_devices, int) or not 1 <= n_devices <= len(weights):
        raise ParameterError(f"{n_devices} devices for {len(weights)} layers with experts", f"1 to {len(weights)} devices")
    backends = simulated_machine(n_devices, offload_min_batch=1)
    total = budget_bytes(model, budget)
    layers = sorted(weights)
    homes = {layer: i * n_devices // len(layers) for i, layer in enumerate(layers)}
    owner = {w: homes[layer] for layer, merged in weights.items() for w in merged}
    first = {d: min(layer for layer in layers if homes[layer] == d) for d in range(n_devices)}
    rules = {r"_exps\.weight": backends[-1], r"^output": backends[n_devices - 1]}
    for layer in range(model.hparams.n_layer):
        d = max((d for d in first if first[d] <= layer), default=0)
        rules[rf"^blk\.{layer}\."] = backends[d]
    placed, engines = place_weights(model, backends, overrides=rules), list[ExpertEngine]()
    placed.layer_types = [placed.homes[f"blk.{i}.attn_norm.weight"].buffer_type for i in range(model.hparams.n_layer)]
    nbytes = sum(w.nbytes for w in owner)
    try:
        for d in range(n_devices):
            card = backends[d]
            assert isinstance(card, SimulatedDevice)
            card.offers = lambda node, d=d: owner.get(node.src[0], d) == d
            mine = {layer: weights[layer] for layer in layers if homes[layer] == d}
            share = total * sum(w.nbytes for merged in mine.values() for w in merged) // nbytes
            pool = ExpertPool(card, mine, share, least=k, verify=verify)
            slots = {size: len(found) for size, found in pool.classes.items()}
            cache = ExpertCache(policy, slots, list(mine), model.hparams.n_expert, scope="global", sizes=list(pool.sizes.values()), least=k)
            engines.append(ExpertEngine(pool, cache))
        scheduler = Scheduler(backends, transfer=Engines(engines))
        session = Session(placed, n_ctx, n_batch, n_seq_max, scheduler=scheduler, recording=recording)
    except BaseException:
        for engine in engines:
            engine.pool.close()
        placed.close()
        raise
    return Across(session, engines, scheduler)
