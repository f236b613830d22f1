"""Experts of one layer on several cards (expert parallelism): rows travel to where their experts are, and results come back.

Each expert has a home, or several (`placement.Placement`), and each card a pool, a cache and a link of its own. The card that has
the rest of a layer reads its router's ids and sends the other cards the rows that want their experts, and no others. There the nodes of the
layer's experts exist a second time; the same kernels compute them over the same shapes, for these experts `only`. A row comes back
for each choice: adding up stays with the layer's card, in its router's order, for another order has other bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from workbench.devices.backend import Backend, Buffer, copy_tensor
from workbench.expertflow.engine import ExpertEngine
from workbench.expertflow.hosted import Block
from workbench.expertflow.lanes import Board, Lane, Traffic
from workbench.expertflow.placement import Placement, visited
from workbench.expertflow.pool import SlotView
from workbench.expertflow.visits import Visit
from workbench.scheduler.splits import Split
from workbench.scheduler.transfer import Mover, Route, UsedExperts
from workbench.tensors.dtype import I32
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Tensor


class PeerBlock(Block):
    """The nodes of a layer's experts over the memory of another card, with lanes there and back. home, card: the engines of the layer's
    card and of this one; visit: what this one will see of the layer."""

    def __init__(self, home: CardEngine, card: CardEngine, visit: Visit) -> None:
        ids = visit.products[0].src[2]
        assert ids is not None
        self.home, self.card, self.ids = home, card, ids
        self.inner: list[Tensor] = []
        self._states: list[Tensor] = []
        super().__init__([node for nodes in visit.block for node in nodes])
        self.visit = Visit(visit.layer, [self.twins[p] for p in visit.products], [[self.twins[n] for n in self.nodes]])
        here, there = home.pool.device, card.pool.device
        self.there = [Lane([(here, s), (there, self.twins[s])], ids.ne[1]) for s in self._states]
        self.back = [Lane([(there, self.twins[node]), (here, node)], ids.ne[0] * ids.ne[1], packs=node is self.nodes[-1])
                     for node in self.nodes if node.view_src is None]  # fmt: skip
        self.numbers = Tensor(I32, (*ids.ne[:2], 1, 1))

    def outside(self, source: Tensor) -> Tensor:
        """Experts are in this card's slots; ids and states come by the links; the rest is small, constant, and copied now."""
        storage = source.storage
        twin = Tensor(source.dtype, source.ne, None if source is self.ids else source.nb).named(source.name)
        if isinstance(storage, SlotView):
            twin.place(self.card.pool.view(storage.weight))
        elif storage is not None and storage.usage is Usage.WEIGHTS:
            self.home.among.constants.append(buffer := self.card.pool.device.buffer_type.alloc_buffer(source.nbytes, Usage.WEIGHTS))
            twin.place(buffer)
            copy_tensor(source, twin)
        else:
            self.inner.append(twin)
            if source is not self.ids:
                self._states.append(source)
        return twin

    def inside(self, twin: Tensor) -> None:
        """Memory of the board, later."""
        self.inner.append(twin)

    def uses(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """What needs memory on the layer's card, on this one, and of the host."""
        here = [t for lane in self.there for t in lane.uses(0)] + [t for lane in self.back for t in lane.uses(1)]
        there = [t for lane in self.there for t in lane.uses(1)] + [t for lane in self.back for t in lane.uses(0)]
        return here, self.inner + there, [self.numbers, *(lane.numbers for lane in (*self.there, *self.back) if lane.packs)]

    def fetch(self, ids: np.ndarray, traffic: Traffic) -> None:
        """Send the rows that want experts here, and the ids. ids (T, k)."""
        wanted = np.isin(ids, [e for group in self.visit.groups for e in group])
        self._places, rows = np.flatnonzero(wanted), np.flatnonzero(wanted.any(1))
        memory = self.numbers.require_data().host_bytes()[self.numbers.offset :][: self.numbers.nbytes]
        memory[:] = np.ascontiguousarray(ids, np.int32).reshape(-1).view(np.uint8)
        self.card.pool.device.set_async(self.twins[self.ids], memory)
        for lane in self.there:
            traffic.add(self.home.d, self.card.d, len(rows), lane.send(rows))

    def write(self, traffic: Traffic, everything: bool) -> None:
        """Send the finished rows into the results of the layer's card. everything: those of all nodes, for somebody who looks."""
        for lane in self.back:
            if lane.packs:
                traffic.add(self.card.d, self.home.d, len(self._places), lane.send(self._places))
            elif everything:
                lane.send(self._places)


class CardEngine(ExpertEngine):
    """The engine of one card among several, which all belong to `Engines`: it loads and computes its own experts, for any card's layers."""

    d = 0
    among: Engines

    @property
    def visits(self) -> list[Visit]:
        """The layers of the present graph whose experts this card's splits ask for."""
        return list(dict.fromkeys(self._visits.values()))

    def _settle(self, target: Backend, visit: Visit, wanted: dict[int, int]) -> None:
        """Each expert to the card that shall compute it; each of these settles the rest as if it were alone."""
        among, layer = self.among, visit.layer
        among.wanted = wanted
        where = among.where(layer, wanted)
        of = [{e: n for e, n in wanted.items() if where[e] == d} for d in range(len(among.engines))]
        super()._settle(target, visit, of[self.d])
        for block in among.blocks.get(visit, ()):
            ExpertEngine._settle(block.card, block.card.pool.device, block.visit, of[block.card.d])
        away = any(b.visit.groups for b in among.blocks.get(visit, ()))
        visit.in_waves |= away
        among.judge(layer, np.vectorize(where.__getitem__)(visit.ids) if away else np.full((len(visit.ids), 1), self.d))

    def _share(self, visit: Visit, group: Sequence[int]) -> float:
        """By rows where a product takes as long as its arithmetic, by experts where it takes as long as reading them."""
        wanted = self.among.wanted
        of_rows, of_experts = sum(wanted[e] for e in group) / sum(wanted.values()), len(group) / len(wanted)
        if (speed := getattr(self.pool.device, "speed", None)) is None:
            return max(of_rows, of_experts)
        _, arithmetic, memory = speed.parts(visit.products[0]).values()
        return float(max(arithmetic * of_rows, memory * of_experts) / max(arithmetic, memory, 1))

    def _waves(self, route: Route, target: Backend, visit: Visit) -> None:
        """The other cards compute their experts while this one computes its own."""
        blocks = [b for b in self.among.blocks.get(visit, ()) if b.visit.groups]
        for b in blocks:
            b.fetch(visit.ids, self.among.traffic)
        for b in blocks:
            ExpertEngine._waves(b.card, route, b.card.pool.device, b.visit)
        super()._waves(route, target, visit)
        last = None
        for b in blocks:
            device = b.card.pool.device
            if last is not None:  # what comes to one card shares its link
                device.wait_event(last)
            b.write(self.among.traffic, everything=route.eval_callback is not None)
            last = device.new_event(f"{device.name} has sent layer {visit.layer}")
            if last is not None:
                last.record()

    def _may_need_waves(self, visit: Visit) -> bool:
        return self.among.placement is not None or super()._may_need_waves(visit)

    def _look_ahead(self, target: Backend, visit: Visit, states: np.ndarray | None) -> None:
        """After the layer's own card is done, not after each of the others."""
        if self.among.homes[visit.layer] == self.d:
            super()._look_ahead(target, visit, states)

    def _announce(self, target: Backend, layer: int, scores: dict[int, float]) -> None:
        """To each card what it will have to compute."""
        among = self.among
        where = among.where(layer, scores)
        if self.forecast is not None and among.placement is not None:
            among.announced[layer] = np.vectorize(where.__getitem__)(self.forecast.guesses[layer])
        for card in among.engines:
            if layer in card.pool.weights:
                mine = {e: s for e, s in scores.items() if where[e] == card.d}
                ExpertEngine._announce(card, card.pool.device, layer, mine)

    def _prefetch(self, target: Backend) -> bool:
        """A piece over this card's link, and all that they may over the others'."""
        for card in self.among.engines:
            while card is not self and ExpertEngine._prefetch(card, card.pool.device):
                pass
        return super()._prefetch(target)


class Engines(Mover):
    """An engine per card (a `WeightTransfer`): whatever a split needs comes through the engine of the card that computes it.

    homes: layer -> the card that has the rest of it. placement: where the layers' experts are (None: with their layer), and `rule`, which
    copy computes: see `Placement.choose`.
    """

    attaches = True

    def __init__(self, engines: Sequence[CardEngine], homes: Mapping[int, int], placement: Placement | None = None,
                 rule: str = "local") -> None:  # fmt: skip
        self.engines, self.homes, self.placement, self.rule = list(engines), dict(homes), placement, rule
        self.layers = sorted(homes)
        self.traffic, self.wanted = Traffic(len(engines)), dict[int, int]()
        self.announced: dict[int, np.ndarray] = {}
        self.blocks: dict[Visit, list[PeerBlock]] = {}
        self.constants: list[Buffer] = []  # of all blocks
        self._boards: list[Board] = []
        self._of, self._others = {id(e.pool.device): e for e in engines}, UsedExperts()
        for d, engine in enumerate(engines):
            engine.d, engine.among = d, self

    def where(self, layer: int, rows: Mapping[int, float]) -> dict[int, int]:
        """The card that computes each of these experts, by the numbers of their rows."""
        home = self.homes[layer]
        if self.placement is None:
            return dict.fromkeys(rows, home)
        return self.placement.choose(self.layers.index(layer), rows, home, self.rule)

    def judge(self, layer: int, there: np.ndarray) -> None:
        """Compare the journeys of a layer's rows with those announced. there (T, k): where a token's experts are computed."""
        n, home = len(self.engines), self.homes[layer]
        said, true = self.announced.pop(layer, None), visited(there, home, n)
        named = np.zeros_like(true) if said is None or len(said) != len(true) else visited(said, home, n)
        self.traffic.announced += int((true & named).sum())
        self.traffic.unannounced += int((true & ~named).sum())
        self.traffic.in_vain += int((named & ~true).sum())

    # ---- what the scheduler and its runtime call

    def attach(self, splits: list[Split], backends: list[Backend]) -> dict[Tensor, list[Tensor]]:
        """Each engine finds its own products; other cards with experts of theirs get the nodes a second time."""
        kept: dict[Tensor, list[Tensor]] = {}
        for engine in self.engines:
            kept.update(engine.attach(splits, backends))
        if self.placement is None:
            return kept
        self._clear()
        self._boards = self._boards or [Board(b.buffer_type) for b in (*(e.pool.device for e in self.engines), backends[-1])]
        for home in self.engines:
            for visit in home.visits:
                blocks = self.blocks[visit] = [PeerBlock(home, card, visit) for card in self.engines if card is not home]
                uses: list[list[Tensor]] = [[] for _ in self._boards]
                for b in blocks:
                    for d, tensors in zip((home.d, b.card.d, -1), b.uses(), strict=True):
                        uses[d] += tensors
                for board, use in zip(self._boards, uses, strict=True):
                    board.uses.append(use)
        for board in self._boards:
            board.place()
        return kept

    def _clear(self) -> None:
        for engine in self.engines:
            engine.pool.device.synchronize()
        for buffer in self.constants:
            buffer.close()
        self.blocks, self.constants = {}, []

    def begin(self) -> None:
        """A run starts on all cards."""
        self._others.begin()
        for engine in self.engines:
            engine.begin()

    def keeps(self, weight: Tensor) -> bool:
        """Whether a pool has it."""
        return any(engine.keeps(weight) for engine in self.engines)

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
        self.announced = {}
        for engine in self.engines:
            engine.cancelled()

    def close(self) -> None:
        """Give all memory of pools and boards back."""
        self._clear()
        for board in self._boards:
            board.close()
        for engine in self.engines:
            engine.pool.close()
