"""Where the boxes and lines of a graph go: layers from top to bottom, computed once, without a program of the system.

A graph whose tensors belong to at least two layers of a model is cut into blocks: what comes before the layers, each layer, what
comes after. Each block is laid out for itself, and can be drawn folded (one box) or open; `stack` puts blocks below each
other. The browser and the stored picture both draw this data. After Sugiyama: longest paths, order by barycentres, then
positions as near to the neighbours as the gaps allow (isotonic regression).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH, NAME_ROW, OP_ROW, CHIP_ROW, VIEW_ROW = 190, 19, 17, 16, 21
GAP_X, GAP_Y, GAP_BLOCKS, FRAME = 16, 22, 34, 16
HEAD, FOOT = 30, 14  # room for a block's title, and at its end
FOLDED = (330, 66)
MANY = 40
"""A graph of more tensors shows its leafs as chips in the boxes that use them."""
SWEEPS = 12
LONG = 60
"""Ranks that a line may pass before it shares its way with others of the same source."""


@dataclass(eq=False)
class _Part:
    """Something that takes room in a rank: the box of a tensor, or the place where a line passes (width 0)."""

    tensor: int
    rank: int
    w: float
    h: float
    above: list[_Part] = field(default_factory=list)
    below: list[_Part] = field(default_factory=list)
    x: float = 0.0
    y: float = 0.0
    at: float = 0.0
    lean: dict[int, float] = field(default_factory=dict)  # id of a part below -> how far left or right a line enters it

    def near(self, down: bool) -> list[float]:
        """Where the neighbours in the rank before (down) or behind stand, seen from where the lines enter."""
        return [q.at - q.lean.get(id(self), 0) for q in self.above] if down else [q.at + self.lean.get(id(q), 0) for q in self.below]


def graph_layout(data: dict[str, Any], chips: bool | None = None) -> list[dict[str, Any]]:
    """The blocks of `graph_data`'s result, top to bottom.

    A block is {"name", "folded": text of the closed box, "counts": [[class, n]], "w", "h", "boxes": [[tensor, x, y, w, h]],
    "chips": {tensor: [leafs]}, "lines": [[source, user, j, [x, y, …]]], "ins" / "outs": {tensor: x}}; coordinates are pixels from
    its upper left corner; keys are text, as in JSON. "ins" and "outs" say where lines from and to other blocks pass its border.
    """
    tensors, n_leafs = data["tensors"], data["n_leafs"]
    if chips is None:
        chips = len(tensors) > MANY
    drawn = [i for i, r in enumerate(tensors) if not (chips and _chip(r))]
    blocks = _blocks(tensors, drawn)
    home = {i: b for b, (_, members) in enumerate(blocks) for i in members}
    made = [_block(name, members, tensors, home, b, chips) for b, (name, members) in enumerate(blocks)]
    for block, (_, members) in zip(made, blocks):
        nodes = [i for i in members if i >= n_leafs]
        reads = {s for i in members for s in tensors[i]["src"] if s is not None and tensors[s]["class"] in "WDP"}
        weights = sum(tensors[s]["bytes"] for s in reads)
        block["folded"] = f"{len(nodes)} nodes, {weights:,} bytes of weights"
        block["counts"] = [[c, n] for c, n in Counter(tensors[i]["class"] for i in nodes).most_common()]
    return made


def stack(blocks: Sequence[dict[str, Any]], opened: Sequence[int]) -> tuple[list[tuple[float, float, float, float]], float, float]:
    """Where each block lies, (x, y, w, h), with the blocks `opened` open; and width and height of all."""
    sizes = [(b["w"], b["h"]) if i in opened or not b["name"] else FOLDED for i, b in enumerate(blocks)]
    width, y = max((w for w, _ in sizes), default=0), 0.0
    places = []
    for w, h in sizes:
        places.append(((width - w) / 2, y, w, h))
        y += h + GAP_BLOCKS
    return places, width, max(y - GAP_BLOCKS, 0)


def crossing_lines(data: dict[str, Any], blocks: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Lines between blocks: (tensor, its block, block that uses it)."""
    home = {box[0]: b for b, block in enumerate(blocks) for box in block["boxes"]}
    return sorted({(s, home[s], home[i]) for i in home for s in data["tensors"][i]["src"] if s in home and home[s] != home[i]})


# ---- blocks


def _chip(record: dict[str, Any]) -> bool:
    return not record["op"] and bool(record["users"])


def _blocks(tensors: list[dict[str, Any]], drawn: list[int]) -> list[tuple[str, list[int]]]:
    layers = sorted({tensors[i]["layer"] for i in drawn if tensors[i]["layer"] is not None})
    if len(layers) < 2:
        return [("", drawn)]
    place: dict[int, int] = {}  # -1 before the layers, else the place among them, len(layers) after them
    for i in drawn:
        n = tensors[i]["layer"]
        before = [place.get(s, -1) for s in tensors[i]["src"] if s is not None]
        place[i] = layers.index(n) if n is not None else len(layers) if any(b >= 0 for b in before) else -1
    if any(place.get(s, -1) > place[i] for i in drawn for s in tensors[i]["src"] if s is not None):
        return [("", drawn)]  # layers that feed each other in both directions: one picture
    names = ["", *(f"layer {n}" for n in layers), ""]
    groups = [(name, [i for i in drawn if place[i] == b - 1]) for b, name in enumerate(names)]
    return [g for g in groups if g[1]]


def _block(name: str, members: list[int], tensors: list[dict[str, Any]], home: dict[int, int], b: int, chips: bool) -> dict[str, Any]:
    parts: dict[int, _Part] = {}
    read: dict[int, list[int]] = {}
    inside = set(members)
    for i in members:
        r = tensors[i]
        read[i] = [s for s in dict.fromkeys(r["src"]) if chips and s is not None and s != i and _chip(tensors[s])]
        slim = r["class"] == "V"
        parts[i] = _Part(i, 0, WIDTH, (VIEW_ROW if slim else NAME_ROW + OP_ROW + 2) + CHIP_ROW * len(read[i]))
    wanted = [(s, i, j) for i in members for j, s in enumerate(tensors[i]["src"]) if s is not None and s != i]
    edges = [(s, i, j) for s, i, j in wanted if s in inside]
    ins = [(s, i, j) for s, i, j in wanted if s in home and home[s] != b]
    outs = [i for i in members if any(home.get(u, b) != b for u in tensors[i]["users"])]
    depth = _rank(members, parts, edges, {i for _, i, _ in ins})
    ranks: list[list[_Part]] = [[] for _ in range(depth + 2)]  # the first and the last hold the ports
    for i in members:
        ranks[parts[i].rank].append(parts[i])
    ports_in = {s: _Part(s, 0, 0, 0) for s in dict.fromkeys(s for s, _, _ in ins)}
    ports_out = {i: _Part(i, depth + 1, 0, 0) for i in outs}
    ranks[0] += ports_in.values()
    ranks[-1] += ports_out.values()
    ways: dict[tuple[int, int], _Part] = {}
    shifts = {i: _entries(tensors[i]["src"], i, home) for i in members}
    paths = [(s, i, j, _passages(parts[s] if s in inside else ports_in[s], parts[i], ranks, ways, shifts[i][j]))
             for s, i, j in (*edges, *ins)]  # fmt: skip
    paths += [(i, i, -1, _passages(parts[i], ports_out[i], ranks, ways, 0)) for i in outs]
    _order(ranks)
    width, height = _place(ranks, HEAD if name else GAP_Y)
    drawn: set[int] = set()
    lines = [[s, i, j, _line(path, shifts[i][j] if j >= 0 else 0, drawn)] for s, i, j, path in paths]
    boxes = [[i, *(round(v, 1) for v in (p.x - p.w / 2, p.y, p.w, p.h))] for i, p in parts.items()]
    return {"name": name, "w": round(width), "h": round(height), "boxes": boxes, "chips": {str(i): c for i, c in read.items() if c},
            "lines": lines, "ins": {str(s): round(p.x, 1) for s, p in ports_in.items()},
            "outs": {str(i): round(p.x, 1) for i, p in ports_out.items()}}  # fmt: skip


def _rank(members: list[int], parts: dict[int, _Part], edges: list[tuple[int, int, int]], fed: set[int]) -> int:
    """Longest paths from the top; what hangs on nothing above moves down to its first user. Returns the last rank, from 1."""
    above: dict[int, list[int]] = {i: [] for i in members}
    below: dict[int, list[int]] = {i: [] for i in members}
    for s, i, _ in edges:
        above[i].append(s)
        below[s].append(i)
    floats: dict[int, bool] = {}
    order = _topological(members, above, below)
    for i in order:
        parts[i].rank = 1 + max((parts[s].rank for s in above[i]), default=0)
        floats[i] = i not in fed and all(floats[s] for s in above[i])
    for i in reversed(order):
        if floats[i] and below[i]:
            parts[i].rank = min(parts[u].rank for u in below[i]) - 1
    top = min(parts[i].rank for i in members) - 1
    for i in members:
        parts[i].rank -= top
    return max(parts[i].rank for i in members)


def _topological(members: list[int], above: dict[int, list[int]], below: dict[int, list[int]]) -> list[int]:
    """Sources first, whatever order the graph has; tensors in a cycle come last, as they stand."""
    waits = {i: len(above[i]) for i in members}
    ready = [i for i in members if not waits[i]]
    for i in ready:  # grows while it is read
        for u in below[i]:
            waits[u] -= 1
            if not waits[u]:
                ready.append(u)
    placed = set(ready)
    stuck = [i for i in members if i not in placed]
    for i in stuck:
        above[i] = [s for s in above[i] if s in placed]
        below[i] = []
    return ready + stuck


def _entries(src: list[int | None], i: int, home: dict[int, int]) -> dict[int, float]:
    """How far from the middle of a box the line of each source enters it: source 0 on the left."""
    drawn = [j for j, s in enumerate(src) if s in home and s != i]
    return {j: k - (len(drawn) - 1) / 2 for k, j in enumerate(drawn)}


def _passages(a: _Part, b: _Part, ranks: list[list[_Part]], ways: dict[tuple[int, int], _Part], shift: float) -> list[_Part]:
    """The line from `a` to `b`: a place in every rank between, linked from rank to rank; lines from one part share theirs."""
    path = [a]
    for r in range(a.rank + 1, b.rank):
        place = ways.get((id(a), r))
        if place is None:
            place = ways[id(a), r] = _Part(a.tensor, r, 0, 0)
            ranks[r].append(place)
            _link(path[-1], place)
        path.append(place)
    _link(path[-1], b)
    path[-1].lean[id(b)] = shift * 0.2
    return [*path, b]


def _link(p: _Part, q: _Part) -> None:
    p.below.append(q)
    q.above.append(p)


# ---- order and position


def _order(ranks: list[list[_Part]]) -> None:
    """Neighbours close to each other: each rank sorted by where its neighbours stand; the best of some sweeps is kept."""
    best, kept = -1, [list(r) for r in ranks]
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for rank in ranks if down else ranks[::-1]:
            if sweep:
                rank.sort(key=lambda p: _mean(p.near(down), p.at))
            for at, p in enumerate(rank):
                p.at = at
        crossed = sum(_crossings(r) for r in ranks)
        if best < 0 or crossed < best:
            best, kept = crossed, [list(r) for r in ranks]
    for rank, order in zip(ranks, kept):
        rank[:] = order


def _mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(rank: list[_Part]) -> int:
    """Lines from this rank down that cross: inversions, counted by insertion."""
    from bisect import bisect_right, insort

    seen: list[float] = []
    n = 0
    for p in rank:
        ends = sorted(p.near(down=False))
        n += sum(len(seen) - bisect_right(seen, e) for e in ends)
        for e in ends:
            insort(seen, e)
    return n


def _place(ranks: list[list[_Part]], head: float) -> tuple[float, float]:
    """Coordinates of all parts; returns the size of the block."""
    for rank in ranks:
        x = -sum(p.w + GAP_X for p in rank) / 2  # every rank around the same middle
        for p in rank:
            p.x = x + (p.w + GAP_X) / 2
            x += p.w + GAP_X
    for sweep in range(4 * SWEEPS):
        both, down = sweep >= SWEEPS, sweep % 2 == 0
        for rank in ranks if down else ranks[::-1]:
            _settle(rank, both or down, both or not down)
    left = min((p.x - p.w / 2 for r in ranks for p in r), default=0) - FRAME
    y = head
    for rank in ranks[1:-1]:
        height = max((p.h for p in rank), default=0)
        for p in rank:
            p.y = y + (height - p.h) / 2
            if not p.w:
                p.y, p.h = y, height
        y += height + GAP_Y
    y += FOOT - GAP_Y
    for p in ranks[-1]:
        p.y = y
    for p in (p for rank in ranks for p in rank):
        p.x -= left
    return max((p.x + p.w / 2 for r in ranks for p in r), default=0) + FRAME, y


def _settle(rank: list[_Part], up: bool, down: bool) -> None:
    """Each part as near to its neighbours as order and gaps allow: least squares by pooling (isotonic regression).

    Places that lines pass pull hardest on each other and hardly on boxes, so that long lines and chains of boxes become straight.
    """
    offset, before = 0.0, None
    pools: list[tuple[float, float, int]] = []  # weight, weighted sum, members
    offsets: list[float] = []
    for p in rank:
        offset += 0 if before is None else (p.w + before.w) / 2 + GAP_X
        offsets.append(offset)
        before = p
        pulls = [(1.0 if p.w and q.w else 0.15 if p.w or q.w else 8.0, q.x) for q in (*(p.above if up else ()), *(p.below if down else ()))]
        weight = sum(w for w, _ in pulls) or 0.05
        total = sum(w * x for w, x in pulls) if pulls else weight * p.x
        pools.append((weight, total - weight * offset, 1))
        while len(pools) > 1 and pools[-2][1] / pools[-2][0] > pools[-1][1] / pools[-1][0]:
            (w0, s0, n0), (w1, s1, n1) = pools[-2:]
            pools[-2:] = [(w0 + w1, s0 + s1, n0 + n1)]
    places = iter([s / w for w, s, n in pools for _ in range(n)])
    for p, offset in zip(rank, offsets):
        p.x = next(places) + offset


def _line(path: list[_Part], shift: float, drawn: set[int]) -> list[float]:
    """Points of a line: out of the box, along the places it passes, into the box where its source number belongs.

    A very long one begins where it leaves the lines drawn before, so that the picture stays small.
    """
    start = max((k for k, p in enumerate(path[:-1]) if id(p) in drawn), default=0) if len(path) > LONG else 0
    drawn.update(id(p) for p in path[1:-1])
    points = [] if start else [path[0].x, path[0].y + path[0].h]
    for p in path[max(start, 1) : -1]:
        points += [p.x, p.y, p.x, p.y + p.h]
    points += [path[-1].x + shift * 26, path[-1].y]
    return [round(v, 1) for v in points]
