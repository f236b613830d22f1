"""What a graph consists of: ops counted, work per op and per layer, tensors used several times, bytes by purpose."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from workbench.cgraph.graph import CGraph
from workbench.errors import shown
from workbench.tensors.storage import Usage
from workbench.tensors.tensor import Flag, Tensor

_LAYER = re.compile(r"(?:^|[ .])blk\.(\d{1,6})\.|(?:-|^cache_[a-z]+_l)(\d{1,6})(?= |$)")
_UNNAMED = re.compile(r"(?:node|leaf)_\d+(?: |$)| \(")


@dataclass
class Work:
    """Nodes that belong together: how many, their floating-point operations, and the bytes they read and write."""

    count: int = 0
    flops: int = 0
    moved: int = 0

    def add(self, node: Tensor) -> None:
        """Count one node."""
        self.count += 1
        if node.spec is not None:
            self.flops += node.spec.flops(node)
            self.moved += node.spec.moved(node)


@dataclass
class Statistics:
    """Answers about a graph; see `statistics`.

    ops: work by telling op name; layers: work by layer number, None for what belongs to no layer; repeated: tensors that are
    used at least twice, with the nodes that use them; bytes: of weights, inputs, leafs that the graph writes into (a KV
    cache), and of all results that own memory (the allocator needs less, since their lifetimes differ).
    """

    n_nodes: int = 0
    n_leafs: int = 0
    ops: dict[str, Work] = field(default_factory=dict)
    layers: dict[int | None, Work] = field(default_factory=dict)
    layer_ops: dict[tuple[int | None, str], Work] = field(default_factory=dict)
    repeated: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    weight_bytes: int = 0
    input_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total(self) -> Work:
        """All nodes together."""
        parts = self.ops.values()
        return Work(sum(w.count for w in parts), sum(w.flops for w in parts), sum(w.moved for w in parts))

    def share(self, op: str) -> float:
        """The part of all floating-point operations that falls to `op`: where optimising pays."""
        return self.ops[op].flops / max(self.total.flops, 1) if op in self.ops else 0.0

    def __str__(self) -> str:
        lines = [f"{self.n_nodes:,} nodes, {self.n_leafs:,} leafs; weights {self.weight_bytes:,} bytes, inputs {self.input_bytes:,}, "
                 f"state {self.state_bytes:,}, results {self.activation_bytes:,}"]  # fmt: skip
        lines.append(f"  {'op':18s} {'nodes':>6s} {'flops':>15s} {'bytes moved':>15s} {'share':>6s}")

        def row(label: str, w: Work) -> str:
            return f"  {label:18s} {w.count:6,d} {w.flops:15,d} {w.moved:15,d} {w.flops / max(self.total.flops, 1):6.1%}"

        lines += [row(op, w) for op, w in sorted(self.ops.items(), key=lambda x: (-x[1].flops, x[0]))]
        lines += [row("no layer" if n is None else f"layer {n}", w) for n, w in self.layers.items()]
        for t, users in self.repeated[:8]:
            names = ", ".join(shown(u.name, 24) for u in users[:4])
            lines.append(f"  used {len(users)} times: {shown(t.name)} by {names}{', …' if len(users) > 4 else ''}")
        return "\n".join(lines)


def statistics(graph: CGraph) -> Statistics:
    """Count a graph: ops, work, layers (as `layers_of` finds them), repeated use, bytes."""
    s = Statistics(len(graph.nodes), len(graph.leafs))
    layers = layers_of(graph)
    for t in graph.nodes:
        n = layers[t]
        for work in (s.ops.setdefault(t.desc, Work()), s.layers.setdefault(n, Work()), s.layer_ops.setdefault((n, t.desc), Work())):
            work.add(t)
        if t.view_src is None and t.op != "NONE":
            s.activation_bytes += t.nbytes
    s.layers = dict(sorted(s.layers.items(), key=lambda x: -1 if x[0] is None else x[0]))
    written = {t.view_src for t in graph.nodes if t.op in ("CPY", "SET_ROWS")}
    for t in (*graph.leafs, *(t for t in graph.nodes if t.op == "NONE")):  # parameters are nodes
        if t.flags & Flag.INPUT:
            s.input_bytes += t.nbytes
        elif t in written and not (t.storage and t.storage.usage is Usage.WEIGHTS):
            s.state_bytes += t.nbytes
        else:
            s.weight_bytes += t.nbytes
    s.repeated = [(t, graph.users(t)) for t in (*graph.leafs, *graph.nodes) if graph.use_count(t) > 1]
    s.repeated.sort(key=lambda x: -len(x[1]))
    return s


def layers_of(graph: CGraph) -> dict[Tensor, int | None]:
    """The layer of each leaf and node, or None.

    It is the number in its name ("ffn_gate-3"), else that of a weight it uses ("blk.3.ffn_gate.weight"); a node without a
    name of its own belongs to the last layer among its sources.
    """
    layers = {t: _named_layer(t) for t in graph.leafs}
    for t in graph.nodes:
        layers[t] = _layer(t, layers)
    return layers


def _named_layer(t: Tensor) -> int | None:
    m = _LAYER.search(t.name)
    return int(m[1] or m[2]) if m else None


def _layer(t: Tensor, layers: dict[Tensor, int | None]) -> int | None:
    own = _named_layer(t)
    if own is not None:
        return own
    weights = [n for s in t.sources() if s.op == "NONE" and (n := layers.get(s)) is not None]
    if weights or t.name and not _UNNAMED.search(t.name):
        return max(weights, default=None)
    return max((n for s in t.sources() if s is not t and (n := layers.get(s)) is not None), default=None)
