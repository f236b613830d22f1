"""Gradients: the nodes that compute how a loss changes with each parameter, added to the graph that computes the loss.

`build_backward_expand` walks the forward nodes from the last to the first. A node whose gradient is known hands it on to its sources by the
rule of its op; a source that is used several times adds up what it gets. So the gradients are a graph like any other: planned, placed,
scheduled and run like one. Gradients belong to the graph (`CGraph.grads`), not to tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from workbench.errors import DTypeError, GraphError, ShapeError, shown
from workbench.tensors import ops
from workbench.tensors.context import Context, context_for
from workbench.tensors.dtype import F32
from workbench.tensors.opspec import OPS
from workbench.tensors.tensor import Flag, Tensor

if TYPE_CHECKING:
    from workbench.cgraph.graph import CGraph

# ---- what a rule hands on


class Minus(NamedTuple):
    """A gradient that is subtracted."""

    grad: Tensor


class Part(NamedTuple):
    """The gradient of the part of a source that a view shows: strides 1 to 3 and offset within the source, in bytes."""

    grad: Tensor
    nb: tuple[int, ...]
    offset: int


Rule = Callable[..., "Tensor | Minus | Part"]
"""`rule(node, grad, *sources)`: the gradient of one source, from that of the node."""


@dataclass(frozen=True)
class Gradient:
    """How an op hands its gradient on: the column `backward` of its row.

    of: a rule for each source that gets one. stops: sources on which the result does not depend in a way that has a slope (indices,
    the target of a copy): they get none, rightly. Any other source that would need one is an error. A rule may give a tensor of
    fewer elements that is repeated over its source.
    """

    of: Mapping[int, Rule]
    stops: tuple[int, ...] = ()
    why: str = field(default="")

    def __call__(self, node: Tensor, grad: Tensor, i: int) -> Tensor | Minus | Part:
        """The gradient of source `i`."""
        return self.of[i](node, grad, *node.src)


# ---- helpers of rules


def _packed(t: Tensor) -> Tensor:
    return t if t.is_contiguous else ops.cont(t)


def _f32(t: Tensor) -> Tensor:
    """Frozen weights of another type are decoded, as ggml's OUT_PROD does on the fly."""
    return t if t.dtype is F32 else ops.cast(t, F32)


def _fold(grad: Tensor, like: Tensor) -> Tensor:
    """The gradient of an operand that was repeated: the sum over its copies."""
    return grad if grad.ne == like.ne else ops.repeat_back(grad, like)


def _shaped(grad: Tensor, like: Tensor) -> Tensor:
    return grad if grad.ne == like.ne else ops.reshape(_packed(grad), *like.ne)


def _rows(t: Tensor) -> Tensor:
    return ops.cont(t) if t.is_transposed else t


def _unbatched(product: Tensor, w: Tensor) -> Tensor:
    """Sums over the batches that read the same matrix of `w`: r neighbours each along dimensions 2 and 3."""
    if product.ne == w.ne:
        return product
    (n, m, b2, b3), (_, _, w2, w3) = product.ne, w.ne
    if b3 == 1:  # as ggml: the copies become a dimension of their own
        each = ops.view(product, n, m, w2, b2 // w2, nb=(product.nb[1], product.nb[2] * (b2 // w2), product.nb[2]))
        return ops.repeat_back(each, w)
    third = ops.repeat_back(ops.reshape(product, n * m * b2, b3 // w3, w3), (n * m * b2, 1, w3))
    both = ops.repeat_back(ops.reshape(third, n * m, b2 // w2, w2, w3), (n * m, 1, w2, w3))
    return ops.reshape(both, *w.ne)


def _sign(a: Tensor) -> Tensor:
    return ops.sub(ops.step(a), ops.step(ops.neg(a)))


def _inside(a: Tensor, low: float, high: float, grad: Tensor) -> Tensor:
    """`grad` where low ≤ a ≤ high, else 0."""
    if low > -np.inf:
        grad = ops.mul(grad, ops.scale(ops.step(ops.scale(a, -1, low)), -1, 1))
    if high < np.inf:
        grad = ops.mul(grad, ops.scale(ops.step(ops.scale(a, 1, -high)), -1, 1))
    return grad


def _gelu_back(grad: Tensor, a: Tensor) -> Tensor:
    """gelu(a) = a · sigmoid(u(a)) with u = 2√(2/π) (a + 0.044715 a³), so its slope is s + a · u' · s · (1 - s)."""
    c = 2 * 0.7978845608028654
    square = ops.sqr(a)
    s = ops.sigmoid(ops.mul(a, ops.scale(square, c * 0.044715, c)))
    bend = ops.mul(ops.mul(a, ops.scale(square, 3 * c * 0.044715, c)), ops.mul(s, ops.scale(s, -1, 1)))
    return ops.mul(grad, ops.add(s, bend))


def _oai_factors(node: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """alpha · g, and u + 1, of SWIGLU_OAI."""
    alpha, limit = node.params["alpha"], node.params["limit"]
    return ops.scale(ops.clamp(gate, -np.inf, limit), alpha), ops.scale(ops.clamp(up, -limit, limit), 1, 1)


def _oai_gate(n: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    inner, factor = _oai_factors(n, gate, up)
    return _inside(gate, -np.inf, n.params["limit"], ops.silu_back(ops.mul(g, factor), inner))


def _oai_up(n: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    active = ops.scale(ops.silu(_oai_factors(n, gate, up)[0]), 1 / n.params["alpha"])
    return _inside(up, -n.params["limit"], n.params["limit"], ops.mul(active, g))


_GATED: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {  # of the activated gate, and of the other factor
    "SWIGLU": (lambda n, g, gate, up: ops.silu_back(ops.mul(g, up), gate), lambda n, g, gate, up: ops.mul(ops.silu(gate), g)),
    "GEGLU": (lambda n, g, gate, up: _gelu_back(ops.mul(g, up), gate), lambda n, g, gate, up: ops.mul(ops.gelu(gate), g)),
    "REGLU": (lambda n, g, gate, up: ops.mul(ops.step(gate), ops.mul(g, up)), lambda n, g, gate, up: ops.mul(ops.relu(gate), g)),
    "SWIGLU_OAI": (_oai_gate, _oai_up),
}


def _fused(name: str, n: Tensor, g: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
    """Of the first source: the gate, or a row that holds both halves, whose gradients are then joined."""
    gate, up = _GATED[name]
    if b is not None:
        return gate(n, g, a, b)
    half = a.ne[0] // 2
    first, second = (ops.view(a, half, *a.ne[1:], nb=a.nb[1:], offset=i * half * 4) for i in range(2))
    active, other = (second, first) if n.params["swapped"] else (first, second)
    of_active, of_other = gate(n, g, active, other), up(n, g, active, other)
    return ops.concat(of_other, of_active, 0) if n.params["swapped"] else ops.concat(of_active, of_other, 0)


def _joined(i: int, n: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
    g, dim, part = _packed(g), n.params["dim"], (a, b)[i]
    return ops.cont(ops.view(g, *part.ne, nb=g.nb[1:], offset=i * a.ne[dim] * g.nb[dim]))


def _inverse(axes: tuple[int, ...]) -> list[int]:
    return [axes.index(i) for i in range(4)]


def _bias_rows(n: Tensor, g: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    rows = ids.n_elements
    return ops.get_rows_back(ops.reshape(_packed(g), g.ne[0], rows), ops.reshape(_packed(ids), rows), b)


# ---- the rules

_same: Rule = lambda n, g, *src: g  # noqa: E731

_RULES: dict[str, Gradient] = {
    "DUP": Gradient({0: _same}),
    "ADD": Gradient({0: _same, 1: lambda n, g, a, b: _fold(g, b)}),
    "SUB": Gradient({0: _same, 1: lambda n, g, a, b: Minus(_fold(g, b))}),
    "MUL": Gradient({0: lambda n, g, a, b: ops.mul(g, b), 1: lambda n, g, a, b: _fold(ops.mul(a, g), b)}),
    "DIV": Gradient({0: lambda n, g, a, b: ops.div(g, b), 1: lambda n, g, a, b: Minus(_fold(ops.mul(g, ops.div(n, b)), b))}),
    "ADD_ID": Gradient({0: _same, 1: _bias_rows}),
    "SQR": Gradient({0: lambda n, g, a: ops.scale(ops.mul(a, g), 2)}),
    "SQRT": Gradient({0: lambda n, g, a: ops.scale(ops.div(g, n), 0.5)}),
    "LOG": Gradient({0: lambda n, g, a: ops.div(g, a)}),
    "SCALE": Gradient({0: lambda n, g, a: ops.scale(_packed(g), n.params["scale"])}),
    "CLAMP": Gradient({0: lambda n, g, a: _inside(a, n.params["min"], n.params["max"], g)}),
    "FILL": Gradient({}, stops=(0,)),
    "ABS": Gradient({0: lambda n, g, a: ops.mul(_sign(a), g)}),
    "NEG": Gradient({0: lambda n, g, a: Minus(g)}),
    "STEP": Gradient({}, stops=(0,)),
    "TANH": Gradient({0: lambda n, g, a: ops.mul(g, ops.scale(ops.sqr(n), -1, 1))}),
    "RELU": Gradient({0: lambda n, g, a: ops.mul(ops.step(a), g)}),
    "SIGMOID": Gradient({0: lambda n, g, a: ops.mul(g, ops.mul(n, ops.scale(n, -1, 1)))}),
    "GELU": Gradient({0: lambda n, g, a: _gelu_back(g, a)}),
    "GELU_QUICK": Gradient({0: lambda n, g, a: ops.silu_back(g, ops.scale(a, 1.702))}),
    "SILU": Gradient({0: lambda n, g, a: ops.silu_back(g, a)}),
    "EXP": Gradient({0: lambda n, g, a: ops.mul(n, g)}),
    **{name: Gradient({0: partial(_fused, name), 1: up}) for name, (_, up) in _GATED.items()},
    "SUM": Gradient({0: _same}),
    "MEAN": Gradient({0: lambda n, g, a: ops.scale(g, 1 / a.ne[0])}),
    "SUM_ROWS": Gradient({0: lambda n, g, a: ops.repeat(g, a)}),
    "REPEAT": Gradient({0: lambda n, g, a: ops.repeat_back(g, a)}),
    "REPEAT_BACK": Gradient({0: lambda n, g, a: ops.repeat(g, a)}),
    "CONCAT": Gradient({0: partial(_joined, 0), 1: partial(_joined, 1)}),
    "RMS_NORM": Gradient({0: lambda n, g, a: ops.rms_norm_back(g, a, n.params["eps"])}),
    "SOFT_MAX": Gradient({0: lambda n, g, a, *_: ops.soft_max_back(g, n, n.params["scale"], n.params["max_bias"])},
                         why="masks and sinks are not trained here"),
    "CROSS_ENTROPY_LOSS": Gradient({0: lambda n, g, a, b: ops.cross_entropy_loss_back(g, a, b)}, why="labels are given, not computed"),
    "MUL_MAT": Gradient({0: lambda n, g, w, x: _unbatched(ops.out_prod(_rows(_f32(x)), g), w),
                         1: lambda n, g, w, x: ops.out_prod(_f32(w), ops.transpose(g))}),
    "MUL_MAT_ID": Gradient({0: lambda n, g, w, x, ids: ops.out_prod_id(_packed(x), _packed(g), ids, w.ne[2]),
                            1: lambda n, g, w, x, ids: _fold(ops.mul_mat_id_back(_f32(w), _packed(g), ids), x)}),
    "GET_ROWS": Gradient({0: lambda n, g, a, rows: ops.get_rows_back(_packed(g), rows, a)}),
    "CPY": Gradient({0: lambda n, g, a, b: _shaped(g, a)}, stops=(1,)),
    "CONT": Gradient({0: lambda n, g, a: _shaped(g, a)}),
    "RESHAPE": Gradient({0: lambda n, g, a: ops.reshape(_packed(g), *a.ne)}),
    "VIEW": Gradient({0: lambda n, g, a: Part(g, n.nb[1:], n.params["offset"])}),
    "PERMUTE": Gradient({0: lambda n, g, a: ops.permute(g, *_inverse(n.params["axes"]))}),
    "TRANSPOSE": Gradient({0: lambda n, g, a: ops.transpose(g)}),
}  # fmt: skip
"""Row by row. Where ggml has a rule, this is it, node for node; it has none for ADD_ID, CLAMP, TANH, SIGMOID, GELU, GELU_QUICK, CONCAT,
MUL_MAT_ID, the gated units but SWIGLU, and for repeated operands of SUB and DIV."""

_ONLY_BACKWARD = "it stands in backward graphs only, and gradients of gradients are not built"
_WITHOUT = {
    **dict.fromkeys(["ARGMAX", "ARGSORT", "TOP_K"], "its result is an index, which has no slope"),
    **dict.fromkeys(["NORM", "L2_NORM"], "ggml has none either; RMS_NORM has one"),
    **dict.fromkeys(["ROPE", "DIAG_MASK_INF"], "attention is not trained here (ggml has ROPE_BACK and DIAG_MASK_ZERO for it)"),
    **dict.fromkeys(["SET_ROWS", "OUT_PROD"], "ggml has none either"),
    **dict.fromkeys(["ACC", "SILU_BACK", "RMS_NORM_BACK", "SOFT_MAX_BACK", "CROSS_ENTROPY_LOSS_BACK", "GET_ROWS_BACK", "MUL_MAT_ID_BACK",
                     "OUT_PROD_ID", "OPT_STEP_ADAMW"], _ONLY_BACKWARD),
    "CUMSUM": "it counts places in queues here, which have no slope",
}  # fmt: skip

for _op, _rule in _RULES.items():
    OPS[_op].backward = _rule
for _op, _reason in _WITHOUT.items():
    OPS[_op].without["backward"] = _reason

_MAKES_VIEWS = {"CPY", "SET_ROWS", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"}


# ---- the walk


def build_backward_expand(graph: CGraph, grad_accs: Mapping[Tensor, Tensor] | None = None, context: Context | None = None) -> CGraph:
    """Add the gradients of the tensors flagged LOSS with respect to those flagged PARAM; returns the graph (`ggml_build_backward_expand`).

    `graph.grad(w)` is then the gradient of w. The loss itself gets an accumulator, a leaf that must hold 1: in a context with data it
    does; without, it is an input, which `graph.reset()` writes and which must be written before each run. grad_accs: tensors of
    their own to add a parameter's gradient to, in place, at each run; reset zeroes them. context: where new tensors are laid out; else
    the active one, else that of the loss.

    Raises GraphError: no loss or no parameter, an op without gradient between them, gradients that are there already; ShapeError,
    DTypeError, GraphFull, ContextFull. The graph is then as it was before.
    """
    for _ in backward_expansion(graph, grad_accs, context):
        pass
    return graph


def backward_expansion(graph: CGraph, grad_accs: Mapping[Tensor, Tensor] | None = None,
                       context: Context | None = None) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """The walk of `build_backward_expand`, one decision at a time; abandoned or failed, it takes its nodes out of the graph again.

    ("needs", tensor, why): a gradient will be wanted; why is "parameter", "loss" or the source that has one. ("seed", loss, accumulator).
    Then, from the last node to the first: ("visit", node, its gradient) or ("skip", node, cause), cause "constant" (nothing below it is
    trained) or "unreached" (it has no part in the loss); and for each source ("grad", source, gradient, how, node, nodes added), how
    "set", "add", "sub", "part".
    """
    walk = _Walk(graph, dict(grad_accs or {}))
    before = len(graph.nodes), len(graph.leafs), dict(graph.visited)
    try:
        yield from walk.decisions(context)
    except BaseException:
        del graph.nodes[before[0] :], graph.leafs[before[1] :]
        graph.visited, graph.grads, graph.grad_accs = before[2], {}, {}
        raise


class _Walk:
    def __init__(self, graph: CGraph, accs: dict[Tensor, Tensor]) -> None:
        graph.require_open()
        if graph.grads:
            raise GraphError(f"{_name(graph)} has gradients already", "a graph of forward nodes", "build the forward graph anew")
        self.graph, self.accs = graph, accs
        self.losses = [t for t in graph.nodes if t.flags & Flag.LOSS]
        self.params = [t for t in graph.nodes if t.flags & Flag.PARAM]
        if not self.losses:
            raise GraphError(f"no loss in {_name(graph)}", "a node flagged as loss", "loss.mark(Flag.LOSS) on the tensor to minimise")
        if not self.params:
            raise GraphError(f"no parameter in {_name(graph)}", "a leaf flagged as parameter",
                             "w.mark(Flag.PARAM) before the graph is built: a parameter counts as a node")  # fmt: skip
        for t in self.losses:
            require_loss(t)
        for t, a in accs.items():
            if t not in graph.visited:
                raise GraphError(f"an accumulator for {t.label}, which is not in {_name(graph)}", "a tensor of the graph")
            if not isinstance(a, Tensor) or a.root() in graph.visited or sum(a.root() is b.root() for b in accs.values()) > 1:
                raise GraphError(f"accumulator {shown(a)} for {t.label}", "a tensor of its own: each run adds to it, and a reset zeroes it")
            if a.ne != t.ne or a.dtype is not F32:
                raise ShapeError(f"accumulator {a.label} of {a.dtype}, ne={a.ne}, for {t.label}", f"f32, ne={t.ne}")
        self.needs: dict[Tensor, Any] = {}

    def decisions(self, context: Context | None) -> Iterator[tuple[Any, ...]]:
        graph, forward = self.graph, [*self.graph.nodes]
        for t in forward:
            if (why := self._why(t)) is not None:
                self.needs[t] = why
                yield "needs", t, why
        reached = self._reached(forward)
        graph.room_for_gradients()
        with (context or context_for(self.losses)).active() as place:
            for t in (*self.losses, *(t for t in self.accs if t in reached and not t.flags & Flag.LOSS)):
                acc = self.accs.get(t) or _seed(t, place)
                graph.grads[t] = graph.grad_accs[t] = acc
                if t.flags & Flag.LOSS:
                    yield "seed", t, acc
            for node in reversed(forward):
                if node.op == "NONE":
                    continue
                if node not in reached:
                    yield "skip", node, "unreached" if node in self.needs else "constant"
                    continue
                yield "visit", node, graph.grads[node]
                for i, source in self._wanted(node):
                    assert node.spec is not None and node.spec.backward is not None
                    n = len(graph.nodes)
                    made, how = self._given(source, node.spec.backward(node, graph.grads[node], i))
                    graph.grads[source] = made.named(f"grad for {source.name}")
                    graph.build_forward_expand(made)
                    yield "grad", source, made, how, node, len(graph.nodes) - n

    def _why(self, t: Tensor) -> Any:
        """Why `t` needs a gradient, or None."""
        if t.dtype.numpy is not None and t.dtype.numpy.kind == "i":
            return None
        why: Any = "parameter" if t.flags & Flag.PARAM else "loss" if t.flags & Flag.LOSS else None
        stops = getattr(t.spec and t.spec.backward, "stops", ())
        why = why or next((s for i, s in enumerate(t.src) if s in self.needs and i not in stops), None)
        if why is not None and t.dtype is not F32:
            raise DTypeError(f"{t.label} of {t.dtype} would need a gradient", "f32 from the parameters to the loss", 'ops.cast(t, "f32")')
        return why

    def _wanted(self, node: Tensor) -> list[tuple[int, Tensor]]:
        stops = getattr(node.spec and node.spec.backward, "stops", ())
        return [(i, s) for i, s in enumerate(node.src) if s is not None and s in self.needs and s is not node and i not in stops]

    def _reached(self, forward: list[Tensor]) -> set[Tensor]:
        """Tensors that will get a gradient. Raises GraphError where one would have to pass an op that has none."""
        reached = set(self.losses)
        for node in reversed(forward):
            if node not in reached:
                continue
            for i, source in self._wanted(node):
                self._require_rule(node, i, source)
                reached.add(source)
        if not reached & set(self.params):
            raise GraphError(f"no parameter of {_name(self.graph)} has a part in the loss", "a path from a parameter to the loss")
        return reached

    def _require_rule(self, node: Tensor, i: int, source: Tensor) -> None:
        rule = node.spec.backward if node.spec is not None else None
        trained = source
        while (why := self.needs[trained]) not in ("parameter", "loss"):
            trained = why
        where = f"{node.label} = {node.desc}, on the way from the loss to {trained.label}"
        if rule is None:
            reason = node.spec.without.get("backward", "there is no rule for it") if node.spec is not None else "it is no op of the table"
            raise GraphError(f"no gradient passes {where}: {reason}", "ops that have one",
                             f"another op in its place, or {trained.label} without the flag PARAM")  # fmt: skip
        if i not in rule.of:
            raise GraphError(f"no gradient of source {i}, {source.label}, of {where}: {rule.why or 'there is no rule for it'}",
                             "a source that is not trained", f"{trained.label} without the flag PARAM")  # fmt: skip
        if node.view_src is not None and node.op not in _MAKES_VIEWS:
            raise GraphError(f"{where}, works in place", "the values of the forward pass, unchanged", "the op without _inplace")
        if node.op == "VIEW" and not source.is_contiguous:
            raise GraphError(f"{where}, is a view of {source.label}, which is not packed", "a view of packed memory",
                             "ops.cont before the view")  # fmt: skip

    def _given(self, source: Tensor, made: Tensor | Minus | Part) -> tuple[Tensor, str]:
        """What `source` has now, after another gradient for it was made, and how it was taken in."""
        have, into = self.graph.grads.get(source), source in self.graph.grad_accs
        if isinstance(made, Part):
            add = ops.acc_inplace if into else ops.acc
            return add(ops.fill(source, 0.0) if have is None else have, made.grad, made.nb, made.offset), "part"
        if isinstance(made, Minus):
            if have is None:
                return ops.neg(_packed(made.grad)), "sub"
            return (ops.sub_inplace if into else ops.sub)(have, made.grad), "sub"
        if have is None:
            return (made if made.ne == source.ne else ops.repeat(made, source)), "set"
        return (ops.add_inplace if into else ops.add)(have, made), "add"


def _seed(loss: Tensor, context: Context) -> Tensor:
    """The gradient of the loss with respect to itself, a leaf that holds 1."""
    seed = context.new_tensor(F32, 1, name=f"grad for {loss.name}").mark(Flag.INPUT)
    return seed if seed.storage is None else seed.set([1.0])


def _name(graph: CGraph) -> str:
    return f"graph {shown(graph.name)!r}" if graph.name else "the graph"


def require_loss(t: Tensor) -> None:
    """Raise ShapeError or DTypeError unless `t` can be a loss: one f32 number."""
    if t.n_elements != 1:
        raise ShapeError(f"loss {t.label} has ne={t.ne}", "one number", "ops.sum, or ops.mean of one row, makes one")
    if t.dtype is not F32:
        raise DTypeError(f"loss {t.label} is {t.dtype}", "f32", 'ops.cast(loss, "f32")')


def reset(graph: CGraph) -> None:
    """Write 1 into the gradient of each loss and 0 into all other accumulators and into the momenta of optimisers (`ggml_graph_reset`)."""
    for node in graph.nodes:
        if node.op == "OPT_STEP_ADAMW":
            for t in node.src[2:4]:
                assert t is not None
                _write(t, 0.0)
    for t, acc in graph.grad_accs.items():
        _write(acc, 1.0 if t.flags & Flag.LOSS else 0.0)


def _write(t: Tensor, value: float) -> None:
    t.require_data().write(t.offset, np.full(t.n_elements, value, np.float32))
