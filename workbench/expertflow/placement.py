"""Experts on several devices: who lives where, and who lives twice (EPLB of DeepSeek; expert placement in vLLM and SGLang).

Loads decide. The most loaded experts get replicas, and each device the same number of experts with about the same load. Where
experts stand in groups and devices in nodes, groups stay within a node, so a token that is sent to a few groups crosses few links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.errors import ParameterError


def pack(loads: Sequence[float] | np.ndarray, n_packs: int) -> list[list[int]]:
    """Items into packs of equal number and about equal load: the heaviest first, each into the lightest pack that has room.

    Raises ParameterError where the packs cannot have the same number.
    """
    loads = np.asarray(loads, np.float64)
    if n_packs < 1 or len(loads) % n_packs:
        raise ParameterError(f"{len(loads)} items in {n_packs} packs", "the same number in each")
    room = len(loads) // n_packs
    packs: list[list[int]] = [[] for _ in range(n_packs)]
    if room == 1:  # nothing to balance
        return [[i] for i in range(n_packs)]
    filled = [0.0] * n_packs
    for item in np.argsort(-loads, kind="stable").tolist():
        p = min((p for p in range(n_packs) if len(packs[p]) < room), key=filled.__getitem__)
        packs[p].append(item)
        filled[p] += loads[item]
    return packs


def replicate(loads: Sequence[float] | np.ndarray, n_copies: int) -> list[int]:
    """Which expert each of `n_copies` places holds: every one once, then again and again the one whose copies carry most each."""
    loads = np.asarray(loads, np.float64)
    if n_copies < len(loads):
        raise ParameterError(f"{n_copies} places for {len(loads)} experts", "at least one for each")
    holds, copies = list(range(len(loads))), np.ones(len(loads))
    for _ in range(n_copies - len(loads)):
        busiest = int(np.argmax(loads / copies))
        holds.append(busiest)
        copies[busiest] += 1
    return holds


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the experts of each layer live: `holds` (layers, places), devices one after another with the same number of places each.

    loads (layers, experts): what it was made for.
    """

    holds: np.ndarray
    loads: np.ndarray
    n_devices: int

    @property
    def copies(self) -> np.ndarray:
        """How often each expert exists, (layers, experts)."""
        return np.stack([np.bincount(row, minlength=self.loads.shape[1]) for row in self.holds])

    def device_of_place(self) -> np.ndarray:
        """The device of each place."""
        return np.arange(self.holds.shape[1]) // (self.holds.shape[1] // self.n_devices)

    def device_loads(self, loads: np.ndarray | None = None) -> np.ndarray:
        """(layers, devices): an expert's load is shared evenly by its copies. loads: of another time than it was made for."""
        loads = self.loads if loads is None else np.asarray(loads, np.float64)
        share = np.take_along_axis(loads / self.copies, self.holds, 1)
        return share.reshape(len(share), self.n_devices, -1).sum(2)

    def imbalance(self, loads: np.ndarray | None = None) -> float:
        """Load of the busiest device over the mean, averaged over the layers: everybody waits for the busiest."""
        d = self.device_loads(loads)
        return float((d.max(1) / np.maximum(d.mean(1), 1e-30)).mean())

    def require(self, n_devices: int, n_experts: int) -> None:
        """Raise ParameterError where it is for other devices or experts, or where an expert has no place."""
        if self.n_devices != n_devices or self.holds.shape[1] % n_devices:
            raise ParameterError(f"{self.holds.shape[1]} places on {self.n_devices} devices, for a machine of {n_devices}",
                                 "a placement for just these devices, the same number of places on each")  # fmt: skip
        if self.holds.size and not 0 <= self.holds.min() <= self.holds.max() < n_experts:
            raise ParameterError(f"places for experts {self.holds.min()} to {self.holds.max()}", f"0 to {n_experts - 1}")
        for layer, row in enumerate(self.holds):
            if homeless := sorted(set(range(n_experts)) - set(row.tolist())):
                raise ParameterError(f"expert {homeless[0]} of expert layer {layer} has no place on any device",
                                     "a place for each expert", "`place` makes such placements")  # fmt: skip

    def on(self, layer: int) -> np.ndarray:
        """Which devices hold each expert of a layer: (experts, devices) of True and False."""
        held = np.zeros((self.loads.shape[1], self.n_devices), bool)
        held[self.holds[layer], self.device_of_place()] = True
        return held

    def choose(self, layer: int, rows: Mapping[int, float], home: int, rule: str = "local") -> dict[int, int]:
        """The device that computes each expert for the tokens of one step, which are all at `home`. rows: expert -> its tokens.

        All tokens of an expert go to one copy, for a product over other rows has other bits. "local": the copy at home, else the first
        that exists; "least": most tokens first, each expert to the device with a copy that has the fewest rows so far.
        """
        held, filled, out = self.on(layer), np.zeros(self.n_devices), dict[int, int]()
        for e in sorted(rows, key=lambda e: (-rows[e], e)):
            where = np.flatnonzero(held[e])
            d = min(where, key=filled.__getitem__) if rule == "least" else home if held[e, home] else where[0]
            out[e] = int(d)
            filled[d] += rows[e]
        return out

    def crossings(self, experts: np.ndarray, home: np.ndarray) -> np.ndarray:
        """Devices other than a token's own that its experts make it visit, (layers, tokens).

        experts (layers, tokens, k); home (tokens,) or (layers, tokens): where each token is. A copy on the token's own device is taken
        where there is one; else the first that exists. Each visit is a row there and a row back.
        """
        out, home = np.zeros(experts.shape[:2], np.int64), np.broadcast_to(home, experts.shape[:2])
        for layer in range(len(experts)):
            held = self.on(layer)
            there = np.where(held[experts[layer], home[layer, :, None]], home[layer, :, None], held.argmax(1)[experts[layer]])
            out[layer] = visited(there, home[layer], self.n_devices).sum(1)
        return out


def visited(there: np.ndarray, home: np.ndarray | int, n_devices: int) -> np.ndarray:
    """Which devices other than its own a token's row travels to, (tokens, devices). there (tokens, k): where its experts are computed."""
    out = np.zeros((len(there), n_devices), bool)
    np.put_along_axis(out, there, True, 1)
    out[np.arange(len(there)), home] = False
    return out


def place(loads: np.ndarray, n_devices: int, n_places: int | None = None, *, n_groups: int = 1, n_nodes: int = 1) -> Placement:
    """Place the experts of each layer on devices by their loads (layers, experts).

    n_places: places in all, experts and replicas (default: no replicas). n_groups, n_nodes: groups of experts stay within a node;
    where groups do not divide among the nodes, experts are placed without regard to them, as EPLB does. Raises ParameterError for other
    numbers that do not divide.
    """
    loads = np.asarray(loads, np.float64)
    if loads.ndim != 2 or not loads.size or not np.isfinite(loads).all() or loads.min() < 0:
        raise ParameterError(f"loads of shape {loads.shape}", "(layers, experts), finite and 0 or more")
    n_experts = loads.shape[1]
    n_places = n_experts if n_places is None else n_places
    if n_devices < 1 or n_places % n_devices or n_places < n_experts:
        raise ParameterError(f"{n_places} places for {n_experts} experts on {n_devices} devices",
                             "a multiple of the devices, with a place for each expert",
                             "more places, each with a replica, or fewer devices")  # fmt: skip
    if n_groups % n_nodes:
        n_groups = n_nodes = 1
    if n_experts % n_groups or n_devices % n_nodes or n_places % n_nodes:
        raise ParameterError(f"{n_experts} experts in {n_groups} groups, {n_devices} devices in {n_nodes} nodes", "numbers that divide")
    return Placement(np.stack([_layer(row, n_devices, n_places, n_groups, n_nodes) for row in loads]), loads, n_devices)


def _layer(loads: np.ndarray, n_devices: int, n_places: int, n_groups: int, n_nodes: int) -> np.ndarray:
    """Groups to nodes, replicas within each node, then places to the node's devices."""
    size = len(loads) // n_groups
    out: list[int] = []
    for groups in pack(loads.reshape(n_groups, size).sum(1), n_nodes):
        mine = np.concatenate([np.arange(g * size, (g + 1) * size) for g in groups])
        holds = replicate(loads[mine], n_places // n_nodes)
        each = loads[mine] / np.bincount(holds)
        for places in pack(each[holds], n_devices // n_nodes):
            out += [int(mine[holds[p]]) for p in places]
    return np.array(out)
