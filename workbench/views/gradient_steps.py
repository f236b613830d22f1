"""Gradients as steps: the walk of `build_backward_expand`, drawn over the graph that it makes."""

from __future__ import annotations

from typing import Any

from workbench.cgraph import CGraph, backward_expansion
from workbench.errors import ParameterError
from workbench.tensors import Context, Flag, Tensor
from workbench.views.graph_data import MAX_SIZE, all_ids, as_graph, graph_data
from workbench.views.graph_drawing import for_page
from workbench.views.graph_layout import graph_layout
from workbench.views.steps import FOLD, START, Steps, record_steps

SENTENCES = {
    "parameter": "{t} is flagged as a parameter: its gradient is wanted.",
    "loss": "{t} is flagged as the loss, so the walk will start there.",
    "source": "{t} reads {source}, which needs a gradient: so {t} needs one.",
    "seed": "The gradient of {t} with respect to itself is 1: a leaf, written from outside.",
    "visit": "Back at {t} = {op}. Its gradient is {grad}, and the rule of {op} says what each source gets.",
    "constant": "{t} = {op} is left out: nothing below it is trained.",
    "unreached": "{t} = {op} is left out: it has no part in the loss.",
    "same": "{source} gets the gradient of {t} as it is: no node is added.",
    "set": "{source} gets its first gradient, out of {t}: {new}.",
    "add": "{source} has a gradient already, out of another use: the one out of {t} is added to it: {new}.",
    "sub": "{source} gets its share of {t} with the other sign: {new}.",
    "part": "{t} shows a part of {source}: its gradient is added to that part of a tensor of zeros: {new}.",
}
"""Every reason for a step."""


def backward_steps(thing: Any, title: str = "Expanding backwards") -> Steps:
    """The walk of `build_backward_expand`, step by step; the graph, or the loss it is given as, stays as it is.

    Events: ["needs", tensor], ["seed", loss, leaf], ["visit", node], ["skip", node], ["grad", source, its gradient, node, new nodes…].
    Raises what the walk raises.
    """
    graph = as_graph(thing)
    if not any(t.flags & Flag.LOSS for t in graph.nodes):
        raise ParameterError("no loss in this graph", "a node flagged as loss", "loss.mark(Flag.LOSS)")
    work = CGraph(size=MAX_SIZE, name=graph.name)
    work.nodes, work.leafs, work.visited = [*graph.nodes], [*graph.leafs], {t: graph.use_count(t) for t in (*graph.nodes, *graph.leafs)}
    walk, seen = [], len(work.nodes)
    for decision in backward_expansion(work, context=Context(2**31, no_alloc=True, name="steps")):
        walk.append((*decision, work.nodes[seen:]))
        seen = len(work.nodes)
    ids, data = all_ids(work), graph_data(work, title)
    says = [r["name"] for r in data["tensors"]]

    def describe(decision: tuple[Any, ...]) -> dict[str, Any]:
        kind, t, *rest, new = decision
        facts = {"t": says[ids[t]], "op": t.desc}
        event, cause = [kind, ids[t]], kind
        if kind == "needs":
            cause = rest[0] if isinstance(rest[0], str) else "source"
            facts["source"] = says[ids[rest[0]]] if isinstance(rest[0], Tensor) else ""
        elif kind == "seed":
            event.append(ids[rest[0]])
        elif kind == "visit":
            facts["grad"] = says[ids[rest[0]]]
        elif kind == "skip":
            cause = rest[0]
        else:
            made, how, node, _ = rest
            event += [ids[made], ids[node], *(ids[n] for n in new)]
            cause = how if new else "same"
            facts = {"source": says[ids[t]], "t": says[ids[node]], "new": ", ".join(f"{n.desc} ({says[ids[n]]})" for n in new)}
        return {"event": event, "label": f"{kind} {says[ids[t]]}", "change": kind in ("seed", "grad"), "cause": cause,
                "sentence": SENTENCES[cause].format(**facts)}  # fmt: skip

    old = {"nodes": [ids[t] for t in graph.nodes], "leafs": [ids[t] for t in graph.leafs]}
    return record_steps(walk, describe, title, "backward", graph=for_page(data, graph_layout(data)), old=old)


def _fold(s: dict[str, Any], event: list[Any]) -> None:
    """grads: [tensor, its gradient], the latest last."""
    kind, t, *rest = event
    s["now"], s["user"] = t, -1
    if kind == "needs":
        s["needs"].append(t)
    elif kind == "seed":
        s["leafs"].append(rest[0])
        s["grads"].append([t, rest[0]])
    elif kind == "grad":
        grad, s["user"], *new = rest
        s["nodes"] += new
        s["grads"] = [g for g in s["grads"] if g[0] != t] + [[t, grad]]


START["backward"] = lambda trace: {"stack": [], "needs": [], "grads": [], "nodes": [*trace["old"]["nodes"]],
                                   "leafs": [*trace["old"]["leafs"]], "now": -1, "user": -1}  # fmt: skip
FOLD["backward"] = _fold
