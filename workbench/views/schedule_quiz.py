"""Questions before each decision of the scheduler: which backend, and why. Wrong reasons are named misconceptions, made from the state.

A question is {"question", "choices": [[text, value]], "is": the value that comes, "options": [[text, misconception, why not]],
"right": place of the true reason}. Nothing here decides anything: what is right comes from the scheduler's own decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.scheduler.passes import is_weight
from workbench.tensors import Tensor

if TYPE_CHECKING:
    from workbench.views.schedule_steps import Told

RIGHT = {
    "1.dst": "it has memory already, in {memory}",
    "1.inp": "it is an input of the user, and the CPU fills inputs",
    "1.wgt": "it reads the weight {w}, which lies in {memory}",
    "1.wgt none": "it reads the weight {w}, and no backend that works on {memory} supports {op}",
    "1.off": "{b} offers to compute such batches although the weight {w} lies in host memory",
    "2.sup": "{near} runs there, the next node {way} that is assigned, and {b} supports {op}",
    "3.best": "no sweep could take it; {b} supports {op} and reads more of its sources than those before it in the list",
    "3.upg": "{b} comes earlier in the list, has the very same memory and can do all of it",
    "4.vsrc": "its memory is that of {owner}, which is there",
    "4.vsrc none": "its memory is that of {owner}, which is still open",
    "4.cur": "{user} reads it and runs there",
    "4.cur none": "{user} reads it, and is still open itself",
    "4.first": "nothing else decides, so the first backend in the list that supports {op} takes it",
    "split backend": "it runs on another backend than the node before it",
    "split weight": "a weight must be copied in for it, and the split has inputs already",
    "split weight again": "it reads a weight that lies elsewhere, though its copy is there, and the split has inputs already",
    "split full": "it needs one input more than the split can list",
}
"""The true reasons, short; the keys are those of `schedule_steps.CAUSES`."""

WRONG = {
    "nearest neighbour decides": ("{near} runs on {x} and is nearest to it",
                                  "Only pass 2 looks at neighbours, and only in the direction of its sweep."),
    "the scheduler balances load": ("{x} has the fewest nodes so far", "No pass counts work: nearly all nodes may end on one backend."),
    "first GPU wins": ("{x} comes first in the list", "The place in the list only settles between backends that fit equally well."),
    "the op type decides": ("{op} is {a_product}, and {x} computes those",
                            "What kind of op it is only matters where a backend does not support it."),
    "sources decide in every pass": ("its source {s} is on {x}",
                                     "Sources are counted in pass 3, and only for nodes that are still open."),
    "sweeps look both ways": ("{near} runs on {x}, the next assigned node {way}",
                              "Each sweep goes in one direction and carries a backend along."),
    "all weights have a say": ("its weight {w} lies with {x}", "The first weight among the sources decides, whatever the others say."),
    "an op never leaves its weight": ("its weight {w} lies with {x}",
                                      "With op_offload a backend may offer to compute large batches; then the weight is copied."),
    "inputs go to their reader": ("{user} reads it, on {x}",
                                  "The user writes inputs from the host. Readers on other devices get a copy."),
    "views follow their reader": ("{user} reads it, on {x}",
                                  "A view has no computation of its own. It cannot be anywhere but with its memory."),
    "the CPU takes what is left": ("nothing decided it, so {x} takes it", "Pass 4 looks at who reads it first."),
    "bytes are counted": ("most bytes of its sources lie with {x}", "Pass 3 counts sources, not bytes."),
    "all users are asked": ("every node that reads it can run on {x}",
                            "To ask all users of every node would be slow: pass 3 only asks for the very same memory."),
    "each copy begins a split": ("it reads a tensor that must be copied",
                                 "Copies only fill the list of inputs. Where the backend stays, the split goes on."),
    "each layer is a split": ("a layer of the model begins there", "Splits know nothing of layers."),
    "views begin splits": ("a view stands there", "Pass 5 passes views by: they compute nothing."),
    "splits have equal length": ("the split before it has nodes enough", "A split may be as long as the graph."),
}  # fmt: skip
"""Misconceptions: the reason they give, and what is the matter with it."""


def ask_about(told: Told, stage: str, t: Tensor, b: int, key: str, facts: dict[str, Any]) -> dict[str, Any] | None:
    """The question before a decision of passes 1 to 4, or None for what is no prediction (assignments by hand, repairs)."""
    if key not in RIGHT:
        return None
    op = t.desc if t.op != "NONE" else "a leaf"
    right = RIGHT[key].format(**facts, b=told.backend(b), op=op)
    wrong = [(text, name, why) for name, x, facts in _misconceptions(told, stage, t, b, key)
             for text, why in [_filled(name, x=told.backend(x), op=op, **facts)]]  # fmt: skip
    choices = [[told.backend(i), i] for i in range(len(told.names))] + [["none yet: it stays open", -1]]
    where = {"pass1": "Pass 1", "pass3": "Pass 3", "pass4": "Pass 4"}.get(stage, f"The sweep {told.short(stage)} of pass 2")
    return _question(f"{where} comes to {told.name(t)}{f' = {op}' if t.op != 'NONE' else ''}. Which backend does it get?", choices, b,
                     right, wrong, told.ids[t])  # fmt: skip


def ask_where(told: Told, first: int, key: str) -> dict[str, Any] | None:
    """The question before a split: at which node, and why."""
    nodes, begin = told.graph.nodes, told.firsts[-1] if told.firsts else -1
    if key not in RIGHT:
        return None
    crossing = [i for i in range(begin + 1, len(nodes)) if any(told.a.of[s] != told.a.of[nodes[i]] for s in nodes[i].sources())]
    views = [i for i in range(begin + 1, len(nodes)) if nodes[i] not in told.place]
    length = begin + max(1, begin // max(len(told.firsts), 1) or len(nodes) // 3)
    layer = [i for i in range(begin + 1, len(nodes)) if told.layer(nodes[i]) != told.layer(nodes[i - 1])]
    found = [("each copy begins a split", crossing), ("views begin splits", views), ("each layer is a split", layer),
             ("splits have equal length", [length] if length < len(nodes) else [])]  # fmt: skip
    places = list(dict.fromkeys([first, *(i for _, at in found for i in at[:2])]))[:5]
    turned = found[first % len(found) :] + found[: first % len(found)]
    wrong = [(text, name, why) for name, _ in turned for text, why in [_filled(name)]]
    chosen = sorted(places)
    said = f"A split began at {told.name(nodes[begin])}. At which node does the next one begin?"
    return _question(said, [[told.name(nodes[i]), i] for i in chosen], first, RIGHT[key], wrong, first)


def _question(question: str, choices: list[list[Any]], is_: Any, right: str, wrong: list[tuple[str, str, str]],
              turn: int) -> dict[str, Any]:  # fmt: skip
    options = [[right, "", ""], *([*w] for w in dict.fromkeys(wrong) if w[0] != right)][:4]
    turn %= len(options)
    options = options[turn:] + options[:turn]
    return {"question": question, "choices": choices, "is": is_, "options": options, "right": options.index([right, "", ""])}


def _filled(name: str, **facts: Any) -> tuple[str, str]:
    text, why = WRONG[name]
    return text.format(**facts), why


def _misconceptions(told: Told, stage: str, t: Tensor, b: int, key: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(name, backend that would follow, facts), those of this pass first."""
    of, nodes, last = told.a.of, told.graph.nodes, len(told.names) - 1
    readers = [n for n in nodes if t in n.src and of.get(n, -1) >= 0]
    if key == "1.off":
        yield "an op never leaves its weight", last, {"w": told.name(next(s for s in t.src if s is not None and is_weight(s)))}
    weights = [s for s in t.src if s is not None and is_weight(s)]
    if key.startswith("1.wgt") and len(weights) > 1 and of.get(weights[-1], -1) not in (b, -1):
        yield "all weights have a say", of[weights[-1]], {"w": told.name(weights[-1])}
    if key == "4.vsrc" and readers:
        yield "views follow their reader", of[readers[0]], {"user": told.name(readers[0])}
    if key == "1.inp" and (reader := next((n for n in nodes if t in n.src), None)) is not None:
        home = next((of[s] for s in reader.src if s is not None and is_weight(s) and s in of), 0)
        yield "inputs go to their reader", home, {"user": told.name(reader)}
    if key == "4.cur":
        yield "the CPU takes what is left", last, {}
    if key == "3.upg":
        yield "all users are asked", b, {}
    if key == "3.best":
        yield "bytes are counted", _heaviest(told, t, b), {}
    if stage.startswith("pass2"):
        yield from _of_sweeps(told, stage, t, b)
    elif t in told.order and (near := _nearest(told, t)) is not None:
        yield "nearest neighbour decides", of[near], {"near": told.name(near)}
    counts = Counter(of[n] for n in told.nodes if of.get(n, -1) >= 0)
    yield "the scheduler balances load", min(range(last + 1), key=lambda i: (counts[i], i == b)), {}
    if key != "4.first" and t.op != "NONE":
        product = t.op in ("MUL_MAT", "MUL_MAT_ID")
        yield "the op type decides", 0 if product else last, {"a_product": "a product" if product else "no product"}
    if key != "4.first":
        yield "first GPU wins", 0, {}


def _of_sweeps(told: Told, stage: str, t: Tensor, b: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    of, i, down = told.a.of, told.place[t], stage.endswith("down")
    behind = told.nodes[i + 1 :] if down else told.nodes[:i][::-1]
    other = next((n for n in behind if of.get(n, -1) >= 0), None)
    if other is not None:
        yield "sweeps look both ways", of[other], {"near": told.name(other), "way": "after it" if down else "before it"}
    before = told.nodes[:i][::-1] if down else told.nodes[i + 1 :]
    near = next((n for n in before if of.get(n, -1) >= 0), None)
    source = next((s for s in t.src if s is not None and of.get(s, -1) >= 0 and s is not near), None)
    if source is not None:
        yield "sources decide in every pass", of[source], {"s": told.name(source)}


def _nearest(told: Told, t: Tensor) -> Tensor | None:
    nodes, i = told.graph.nodes, told.order[t]
    around = sorted((abs(k - i), k) for k, n in enumerate(nodes) if k != i and told.a.of.get(n, -1) >= 0)
    return nodes[around[0][1]] if around else None


def _heaviest(told: Told, t: Tensor, b: int) -> int:
    sizes: Counter[int] = Counter()
    for s in t.sources():
        if told.a.of.get(s, -1) >= 0:
            sizes[told.a.of[s]] += s.nbytes
    return sizes.most_common(1)[0][0] if sizes else b
