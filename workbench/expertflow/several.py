"""A model with an expert budget on several cards, each with a pool, a cache and a link of its own: layers divided, or experts as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from workbench.devices.backend import Backend, DeviceType
from workbench.devices.simulated import SimulatedDevice, simulated_machine
from workbench.errors import ModelError, ParameterError, shown
from workbench.expertflow.cache import ExpertCache
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.offload import budget_bytes
from workbench.expertflow.parallel import CardEngine, Engines, Traffic
from workbench.expertflow.placement import Placement
from workbench.expertflow.pool import ExpertPool
from workbench.expertflow.visits import Counters, expert_weights
from workbench.models import Model, Session, place_weights
from workbench.scheduler import Scheduler
from workbench.tensors.tensor import Tensor
from workbench.trace import Trace


class Across:
    """A session over several cards; made by `offload_across`. engines: one for each card, in the order of the machine."""

    def __init__(self, session: Session, engines: Engines, scheduler: Scheduler) -> None:
        self.session, self.scheduler = session, scheduler
        self.among, self.engines = engines, engines.engines

    @property
    def counters(self) -> list[Counters]:
        """Hits, loads, bytes and so on since the start, of each card."""
        return [engine.counters for engine in self.engines]

    @property
    def traffic(self) -> Traffic:
        """What crossed between the cards."""
        return self.among.traffic

    def close(self) -> None:
        """Give all memory on the cards back; the model stays open."""
        self.session.close()
        self.scheduler.close()
        self.among.close()
        self.session.model.close()

    def __enter__(self) -> Across:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def offload_across(model: Model, budget: int | float | str, n_devices: int | None = None, *, placement: Placement | None = None,
                   copies: str = "local", backends: Sequence[Backend] | str | None = None, policy: str = "lru",
                   forecast: Forecaster | None = None, prefetches: int = 4, granularity: str = "expert", mmap: bool = True,
                   n_ctx: int | None = None, n_batch: int = 512, n_seq_max: int = 1, recording: bool = False,
                   verify: bool = False, trace: Trace | None = None) -> Across:  # fmt: skip
    """Open a session whose layers are divided among simulated cards, each with its own pool for experts.

    placement: where the experts of each layer are (see `placement.place`); the rest of a layer, shared experts too, stays on the layer's
    card. Without one, experts are where their layer is. copies: which copy of an expert computes, "local" or "least" (see
    `Placement.choose`). budget: of all cards together, divided by the places of their experts. backends: a machine, a preset's name for
    each card, or one for all, such as "rtx3090-pcie4" (default: two round-numbered cards). forecast, policy, prefetches,
    granularity, mmap: as in `offload`; what is announced is loaded by the card that will compute it, and only out of pinned memory by
    several links at once. Raises ParameterError where a card would have no experts, or too few slots.
    """
    weights, k = expert_weights(model), model.hparams.n_expert_used
    if not weights:
        raise ModelError(f"{shown(model.name)} has no experts", "a mixture-of-experts model", "tiny-mixtral-f16, for example")
    if copies not in ("local", "least"):
        raise ParameterError(f"copies={shown(copies)!r}", 'which copy of an expert computes: "local" or "least"')
    machine = _machine(backends, n_devices)
    cards, layers = [b for b in machine if b.device_type is DeviceType.GPU], sorted(weights)
    n = len(cards)
    _require(placement, n, len(layers), model.hparams.n_expert)
    homes = {layer: i * n // len(layers) for i, layer in enumerate(layers)}
    shares, least = _shares(weights, homes, placement, budget_bytes(model, budget), n), k
    if placement is not None:
        least = min(k, placement.holds.shape[1] // n)
    first = {d: min(layer for layer in layers if homes[layer] == d) for d in set(homes.values())}
    rules = {r"_exps\.weight": machine[-1], r"^output": cards[max(first)]}
    for layer in range(model.hparams.n_layer):
        rules[rf"^blk\.{layer}\."] = cards[max((d for d in first if first[d] <= layer), default=0)]
    pinned = None if mmap else machine[-1].buffer_type
    with ExitStack() as opened:
        placed = place_weights(model, machine, overrides=rules, pinned=pinned)
        opened.callback(placed.close)
        weights, engines = expert_weights(placed), []
        owner = {w: homes[layer] for layer, merged in weights.items() for w in merged}
        placed.layer_types = [placed.homes[f"blk.{i}.attn_norm.weight"].buffer_type for i in range(model.hparams.n_layer)]
        for d, card in enumerate(cards):
            if isinstance(card, SimulatedDevice):
                card.offers = lambda node, d=d: owner.get(node.src[0], d) == d
            mine = {layer: weights[layer] for layer in layers if placement is not None or homes[layer] == d}
            try:
                pool = ExpertPool(card, mine, shares[d], least=least, verify=verify)
            except ParameterError as error:
                raise ParameterError(f"{card.name}'s part of the budget: {error.found}", error.expected, error.hint) from None
            opened.callback(pool.close)
            slots = {size: len(found) for size, found in pool.classes.items()}
            cache = ExpertCache(policy, slots, list(mine), model.hparams.n_expert, scope="global", sizes=list(pool.sizes.values()),
                                least=least)  # fmt: skip
            engines.append(CardEngine(pool, cache, forecast, prefetches=prefetches, granularity=granularity))
        among = Engines(engines, homes, placement, copies)
        opened.callback(among.close)
        scheduler = Scheduler(machine, transfer=among)
        opened.callback(scheduler.close)
        session = Session(placed, n_ctx, n_batch, n_seq_max, scheduler=scheduler, recording=recording)
        opened.pop_all()
    scheduler.trace = trace
    return Across(session, among, scheduler)


def _machine(backends: Sequence[Backend] | str | None, n: int | None) -> list[Backend]:
    """The cards and their host."""
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise ParameterError(f"{n!r:.40} devices", "a whole number, 1 or more")
    if backends is None:
        return [*simulated_machine(n or 2, offload_min_batch=1)]
    if isinstance(backends, str):
        found: list[Backend] = [*simulated_machine(backends, offload_min_batch=1)]
        if n is not None and len(found) == 2 and "," not in backends:
            found = [*simulated_machine(",".join([backends] * n), offload_min_batch=1)]
    else:
        found = [*backends]
    cards = sum(b.device_type is DeviceType.GPU for b in found)
    if not cards or n not in (None, cards) or found[-1].device_type is not DeviceType.CPU:
        raise ParameterError(f"{cards} cards among {', '.join(b.name for b in found)}", f"{n or 'some'} cards, and a CPU as the last")
    return found


def _require(placement: Placement | None, n: int, n_layers: int, n_experts: int) -> None:
    """Raise ParameterError where a card would have no experts, or a placement is for another model or machine."""
    if placement is None:
        if n > n_layers:
            raise ParameterError(f"{n} devices for {n_layers} layers with experts", f"1 to {n_layers} devices",
                                 "a placement divides the experts of each layer")  # fmt: skip
        return
    if len(placement.holds) != n_layers or placement.loads.shape != (n_layers, n_experts):
        raise ParameterError(f"a placement of {placement.loads.shape[-1]} experts in {len(placement.holds)} layers",
                             f"one of {n_experts} experts in {n_layers} layers")  # fmt: skip
    placement.require(n, n_experts)


def _shares(weights: Mapping[int, Sequence[Tensor]], homes: Mapping[int, int], placement: Placement | None, budget: int,
            n: int) -> list[int]:  # fmt: skip
    """The budget divided among the cards, by the bytes of the experts that have places there."""
    if placement is not None:  # of each layer the same number of places everywhere
        return [budget // n] * n
    of = [sum(w.nbytes for layer, merged in weights.items() if homes[layer] == d for w in merged) for d in range(n)]
    return [budget * nbytes // sum(of) for nbytes in of]
