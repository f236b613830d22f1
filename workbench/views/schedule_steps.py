"""The scheduler's decisions, step by step: passes 1 to 4 assign, pass 5 cuts, copies and rewires.

`schedule_steps` drains `Scheduler.decisions` into steps of kind "schedule" (see `workbench.views.steps`). Events are whole numbers:
["stage", stage], ["assign", tensor, backend, stage, cause], ["split", backend, first node], ["copy", tensor, backend],
["input", tensor, split], ["rewrite", node, source number, tensor] and, where the scheduler refuses, ["fail"]. Tensors are places in
the graph's data, causes and stages places in the header's "causes" and "stages"; backend -1 is "none yet".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from workbench.cgraph import CGraph
from workbench.devices.backend import DeviceType, buffer_type_of
from workbench.errors import ParameterError, WorkbenchError, shown
from workbench.scheduler import Scheduler
from workbench.scheduler.passes import STAGES, Assignment, computed, is_weight, readable_sources
from workbench.tensors import Tensor
from workbench.views.graph_data import all_ids, as_graph, graph_data
from workbench.views.graph_drawing import for_page
from workbench.views.graph_layout import graph_layout
from workbench.views.palette import OKABE_ITO, ink_on
from workbench.views.schedule_quiz import ask_about, ask_where
from workbench.views.steps import FOLD, START, Steps, record_steps

RULES = {
    "usr": ("by hand", "Before all passes: what you assigned by hand stands."),
    "pass1": ("pass 1", "Pass 1 asks the memory: tensors that have some stay there, inputs of the user are the CPU's, a node goes to its "
                        "first weight."),
    "pass2_gpu_down": ("2 GPU ↓", "Pass 2, first sweep, downwards: backends other than the CPU spread to the nodes after theirs."),
    "pass2_gpu_up": ("2 GPU ↑", "Pass 2, second sweep, upwards: backends other than the CPU spread to the nodes before theirs."),
    "pass2_rest_down": ("2 rest ↓", "Pass 2, third sweep, downwards: now the CPU spreads too."),
    "pass2_rest_up": ("2 rest ↑", "Pass 2, fourth sweep, upwards: what is still open takes the backend of what follows."),
    "pass3": ("pass 3", "Pass 3 gives open nodes to the backend that can read most of their sources, and moves others up where the memory "
                        "is the same."),
    "pass4": ("pass 4", "Pass 4 settles the rest: views follow their memory, sources their reader."),
    "pass5": ("pass 5", "Pass 5 walks the nodes once more: a split for each run of nodes on one backend, a copy for each source that it "
                        "cannot read."),
}  # fmt: skip
"""Every stage: its short name, and what it does in one sentence. "usr" is what was assigned by hand, before the passes."""

CAUSES = {
    "stage": "{rule}",
    "stage empty": "{rule} Here it finds nothing to decide.",
    "usr": "You assigned {t} to {b} by hand.",
    "1.dst": "{t} has memory already, in {memory}: {b} is the first backend that works there{supports}.",
    "1.inp": "{t} is an input of the user. The CPU fills inputs, so it belongs to {b}.",
    "1.off": "{t} reads the weight {w} in host memory, {memory}, and {b} offers to compute such batches: it takes the op, and the weight "
             "will be copied.",
    "1.wgt": "{t} reads the weight {w}, its source {j}, in {memory}: {b} is the first backend that works there and supports {op}.",
    "1.wgt none": "{t} reads the weight {w}, its source {j}, in {memory}, but no backend that works there supports {op}: still open.",
    "2.sup": "{t} takes {b} from {near}, the next assigned node {way}{over}; {b} supports {op}.",
    "3.best": "{t} was passed by in all sweeps. {b} supports {op} and {reads}{more}.",
    "3.upg": "{t} moves up from {old} to {b}, which comes earlier in the list, has the very same memory {memory}, supports {op} and reads "
             "all its sources.",
    "4.vsrc": "{t} is a view, it shows memory of {owner}: it is where {owner} is, {b}.",
    "4.vsrc none": "{t} is a view of {owner}, which has no backend yet: it stays open.",
    "4.cur": "Nothing decided {t} so far. {user} reads it and runs on {b}: it goes there.",
    "4.cur none": "{user} reads {t} and has no backend itself: it stays open.",
    "4.first": "Nothing decided {t}: {b} is the first backend in the list that supports {op}.",
    "4.own": "A repair: {t} writes into memory of {owner}, which {old} cannot reach: it goes to {b}. ggml leaves this to the caller.",
    "4.own owner": "A repair: {writer} writes into {t}, and both must be together: {t} goes from {old} to {b}. ggml leaves this to the "
                   "caller.",
    "4.home": "A repair: {t} shows memory of {owner}, which {old} cannot reach: it goes back to {b}. ggml would leave it there.",
    "4.rest": "A repair: no node reads {t}, so {b} keeps it.",
    "split first": "Split 0 begins at {t}, the first node that computes something, on {b}.",
    "split backend": "{t} runs on {b}, the node before it on {old}: split {k} begins.",
    "split weight": "{t} needs the weight {w} copied in, and this split has inputs already: split {k} begins on the same {b}, so that "
                    "memory of earlier copies can be used again.",
    "split weight again": "{t} reads the weight {w}, which lies elsewhere, and this split has inputs already: split {k} begins on the same "
                          "{b}. That {b} has a copy of {w} by now is not asked.",
    "split full": "{t} needs one input more than this split can list: split {k} begins on the same {b}.",
    "copy": "{b} cannot read {t} where it is ({home}): it gets a copy there, {bytes} bytes.",
    "copy slots": "{t} is an input of the user, and there are {slots} pipeline slots: it gets a copy for each of them on {b}.",
    "input": "{t} is input {k} of split {n}: its {bytes} bytes are copied before the split runs.",
    "rewrite": "{t} will read the copy of {w} as its source {j}.",
    "rewrite again": "{t} will read the copy of {w} as its source {j}: it is there already, so nothing more is copied.",
    "fail": "The scheduler refuses: {why}.",
}
"""Every reason for a step of `schedule_steps`. "1.wgt", "2.sup", … are ggml's short names; a word after them tells cases apart."""

NONE = {"name": "none yet", "code": "?", "fill": "#FFFFFF", "ink": "#000000"}
FILLS = (OKABE_ITO[0], OKABE_ITO[2], OKABE_ITO[6], OKABE_ITO[3], OKABE_ITO[4], OKABE_ITO[5])
CPU_FILL = OKABE_ITO[1]


def backend_looks(scheduler: Scheduler) -> list[dict[str, str]]:
    """Name, letter, colours and memory of each backend; the letter is the second channel: G, A or C, numbered where there are several."""
    kinds = [b.device_type for b in scheduler.backends]
    looks = []
    for i, (b, kind) in enumerate(zip(scheduler.backends, kinds)):
        letter = {DeviceType.CPU: "C", DeviceType.GPU: "G", DeviceType.ACCEL: "A"}[kind]
        fill = CPU_FILL if i == len(kinds) - 1 else FILLS[i % len(FILLS)]
        looks.append({"name": shown(b.name, 40), "code": letter + (str(kinds[:i].count(kind)) if kinds.count(kind) > 1 else ""),
                      "fill": fill, "ink": ink_on(fill), "memory": shown(scheduler.buffer_types[i].name, 40)})  # fmt: skip
    return looks


def schedule_steps(scheduler: Scheduler, graph: Any, title: str = "", stages: Sequence[str] | None = None,
                   questions: bool = False) -> Steps:  # fmt: skip
    """Everything that `scheduler` would decide about `graph`, which both stay as they are. Where it refuses, the last step says why.

    stages: only these are stepped through ("pass2" means its four sweeps); what comes before them has happened already at the first
    step. questions: each decision holds the question of `schedule_quiz` as well. Raises ParameterError for a stage that does not exist.
    """
    if not isinstance(scheduler, Scheduler):
        raise ParameterError(f"a {type(scheduler).__name__}", "a Scheduler", "Scheduler([gpu, CpuBackend()])")
    graph = as_graph(graph)
    if not graph.nodes:
        raise ParameterError("a graph without nodes", "at least one node to place", "build(result) makes a graph of what computes it")
    wanted = stages_of(stages)
    with scheduler.set_aside(graph):
        told = Told(scheduler, graph, questions)
        all_steps = record_steps(told.walk(), lambda step: step, title or "The scheduler decides", "schedule")["steps"]
        data = graph_data(graph, title)
    kept: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []
    for step in all_steps:
        (kept if step["stage"] in wanted or step["cause"] == "fail" else before if not kept else []).append(step)
    looks = backend_looks(scheduler)
    data["channels"]["backend"] = {"of": [len(looks)] * len(data["tensors"]),
                                   "cats": [*({**b, "label": b["name"]} for b in looks), {**NONE, "label": NONE["name"]}]}  # fmt: skip
    order = [told.ids[n] for n in graph.nodes]
    return {"kind": "schedule", "title": shown(title or f"{len(graph.nodes)} nodes over {len(looks)} backends", 200),
            "columns": ["node", *(RULES[s][0] for s in RULES)], "table": "backend after each stage",
            "graph": for_page(data, graph_layout(data)), "stages": [[s, *RULES[s]] for s in RULES], "backends": looks,
            "names": told.says, "causes": told.causes, "order": order,
            "before": [s["event"] for s in before], "steps": kept or all_steps[-1:]}  # fmt: skip


def stages_of(stages: Sequence[str] | str | None) -> set[str]:
    """The exact names of stages that `stages` means; all of them for None."""
    asked = [stages] if isinstance(stages, str) else list(RULES) if stages is None else list(stages)
    found = {s for s in RULES for a in asked if s == a or s.startswith(f"{a}_")}
    strange = [a for a in asked if not any(s == a or s.startswith(f"{a}_") for s in RULES)]
    if strange or not found:
        raise ParameterError(f"stages {shown(strange)}", "some of pass2, " + ", ".join(RULES))
    return found


def unique_names(tensors: Sequence[dict[str, Any]]) -> list[str]:
    """Names that say which tensor is meant: with the op, and then the place, where several are called the same."""
    names = [r["name"] for r in tensors]
    for extra in ("op", "tag"):
        often = Counter(names)
        names = [f"{n} ({r[extra] or 'leaf'})" if often[n] > 1 else n for n, r in zip(names, tensors)]
    return names


class Told:
    """The decisions as steps with full sentences. Its own assignment follows the scheduler's, to say who was the neighbour."""

    def __init__(self, scheduler: Scheduler, graph: CGraph, questions: bool = False) -> None:
        self.scheduler, self.graph, self.questions = scheduler, graph, questions
        self.names = [b.name for b in scheduler.backends]
        self.a = Assignment(scheduler.backends, scheduler.buffer_types, scheduler.op_offload)
        self.ids = all_ids(graph)
        data = graph_data(graph)["tensors"]
        self.says, self.layers = unique_names(data), [r["layer"] for r in data]
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.nodes = computed(graph.nodes)
        self.place = {n: i for i, n in enumerate(self.nodes)}
        self.causes: list[str] = []
        self.at = 0  # the node that pass 4 looks at
        self.splits: list[int] = []
        self.firsts: list[int] = []
        self.copied: set[tuple[Tensor, int]] = set()
        self.inputs = 0
        self.fresh = False  # a copy was made for the rewrite that follows

    def name(self, t: Tensor) -> str:
        """A tensor's name, or its place."""
        return self.says[self.ids[t]] if t in self.ids else shown(t.label)

    def layer(self, t: Tensor) -> int | None:
        """The layer of the model that a tensor belongs to."""
        return self.layers[self.ids[t]]

    def short(self, stage: str) -> str:
        """A stage's short name."""
        return RULES[stage][0]

    def backend(self, b: int) -> str:
        """A backend's name."""
        return shown(self.names[b], 40) if b >= 0 else NONE["name"]

    def walk(self) -> Iterator[dict[str, Any]]:
        """A step for each stage and for each decision."""
        by_hand = [("usr", t, b, "usr") for t, b in self.scheduler.by_hand.items() if t in self.ids]
        stages = iter([*(["usr"] if by_hand else []), *STAGES, "pass5"])
        heading: str | None = None
        stage = ""
        try:
            for decision in chain(by_hand, self.scheduler.decisions(self.graph)):
                now = decision[0] if decision[0] in RULES else "pass5"
                while stage != now:
                    if heading is not None:
                        yield self._stage(heading, "stage empty")
                    heading = stage = next(stages)
                if heading is not None:
                    yield self._stage(heading, "stage")
                    heading = None
                yield {"stage": now, **(self.assigned(*decision) if now != "pass5" else self.cut(*decision))}
        except WorkbenchError as failed:
            if heading is not None:
                yield self._stage(heading, "stage")
            yield {"stage": stage, "event": ["fail"], "label": "refused", "change": True,
                   **self._because("fail", why=shown(str(failed).split("\n")[0], 400).rstrip("."))}  # fmt: skip

    def _stage(self, stage: str, cause: str) -> dict[str, Any]:
        short, rule = RULES[stage]
        event = ["stage", list(RULES).index(stage)]
        return {"stage": stage, "event": event, "label": short, "change": False, **self._because(cause, rule=rule)}

    def _decider(self) -> dict[str, int]:
        return {"by": self.ids[self.by]} if self.by in self.ids else {}

    def _because(self, cause: str, **facts: Any) -> dict[str, str]:
        sentence = CAUSES[cause].format(**{k: f"{v:,}" if isinstance(v, int) else v for k, v in facts.items()})
        return {"cause": cause, "sentence": sentence}

    # ---- passes 1 to 4

    def assigned(self, stage: str, t: Tensor, b: int, cause: str) -> dict[str, Any]:
        """A decision of passes 1 to 4, or one made by hand."""
        old = self.a.of.get(t, -1)
        self.by: Tensor | None = None
        key, facts = self._reason(stage, t, b, cause, old)
        ask = ask_about(self, stage, t, b, key, facts) if self.questions else None
        self.a.decide(stage, t, b, cause)
        if cause not in self.causes:
            self.causes.append(cause)
        event = ["assign", self.ids[t], b, list(RULES).index(stage), self.causes.index(cause)]
        op = t.desc if t.op != "NONE" else "such data"
        made = self._because(key, t=self.name(t), b=self.backend(b), old=self.backend(old), op=op, **facts)
        label = f"{self.name(t)} → {self.backend(b)}"
        return {"event": event, "label": label, "change": b != old, **made, "cause": cause, **self._decider(),
                **({"ask": ask} if ask else {})}  # fmt: skip

    def _reason(self, stage: str, t: Tensor, b: int, cause: str, old: int) -> tuple[str, dict[str, Any]]:
        if cause in ("usr", "1.inp", "4.rest"):
            return cause, {}
        if cause == "4.own":
            writer = next((n for n in self.nodes if n is not t and n.view_src is not None and n.root() is t), None)
            return ("4.own", {"owner": self.name(t.root())}) if writer is None else ("4.own owner", {"writer": self.name(writer)})
        if cause == "1.dst":
            storage = t.storage
            assert storage is not None
            return cause, {"memory": buffer_type_of(storage).name, "supports": f" and supports {t.desc}" if t.op != "NONE" else ""}
        if cause.startswith("1."):
            return self._by_weight(t, b, cause)
        if stage.startswith("pass2"):
            return "2.sup", self._neighbour(t, b, stage)
        if cause == "3.best":
            return cause, self._best(t, b, old)
        if cause == "3.upg":
            return cause, {"memory": self.scheduler.buffer_types[b].name}
        return self._rest(t, b, cause, old)

    def _by_weight(self, t: Tensor, b: int, cause: str) -> tuple[str, dict[str, Any]]:
        j, w = next((j, s) for j, s in enumerate(t.src) if s is not None and is_weight(s))
        assert w.storage is not None
        self.by = w
        facts = {"w": self.name(w), "j": str(j), "memory": buffer_type_of(w.storage).name}
        return ("1.off" if cause == "1.off" else "1.wgt" if b >= 0 else "1.wgt none"), facts

    def _neighbour(self, t: Tensor, b: int, stage: str) -> dict[str, Any]:
        """The node that the sweep met last with a backend, and the open ones between it and `t`."""
        down, i = stage.endswith("down"), self.place[t]
        seen = self.nodes[:i][::-1] if down else self.nodes[i + 1 :]
        skipped = next(k for k, n in enumerate(seen) if self.a.of.get(n, -1) != -1)
        self.by = seen[skipped]
        over = f" (over {skipped} that {self.backend(b)} does not support)" if skipped else ""
        return {"near": self.name(seen[skipped]), "way": "before it" if down else "after it", "over": over}

    def _best(self, t: Tensor, b: int, old: int) -> dict[str, Any]:
        n, sources = readable_sources(self.a, b, t), sum(s is not None for s in t.src)
        more = f", more than {self.backend(old)}, which would get it otherwise" if old >= 0 else ""
        reads = f"can read {n or 'none'} of its {sources} sources" if sources != 1 else f"{'can' if n else 'cannot'} read its source"
        return {"reads": reads, "more": more}

    def _rest(self, t: Tensor, b: int, cause: str, old: int) -> tuple[str, dict[str, Any]]:
        if cause == "4.vsrc":
            owner = t.view_src
            assert owner is not None
            self.by = owner
            return ("4.home" if old >= 0 else cause if b >= 0 else "4.vsrc none"), {"owner": self.name(t.root() if old >= 0 else owner)}
        if cause == "2.sup":
            return "4.first", {}
        nodes = self.graph.nodes
        self.at = next(i for i in range(self.at, len(nodes)) if t in nodes[i].src or t is nodes[i].view_src)
        self.by = nodes[self.at]
        return ("4.cur" if b >= 0 else "4.cur none"), {"user": self.name(nodes[self.at])}

    # ---- pass 5

    def cut(self, kind: str, subject: Any, number: int, detail: Any) -> dict[str, Any]:
        """A step of pass 5."""
        if kind == "split":
            return self._split(subject.first, number, detail)
        if kind == "rewrite":
            j, original = number, subject.src[number]
            cause, self.fresh = "rewrite" if self.fresh else "rewrite again", False
            event = ["rewrite", self.ids[subject], j, self.ids[original]]
            return {"event": event, "label": f"{self.name(subject)} reads a copy", "change": False,
                    **self._because(cause, t=self.name(subject), w=self.name(original), j=str(j))}  # fmt: skip
        facts = {"t": self.name(subject), "b": self.backend(number), "bytes": subject.nbytes}
        if kind == "input":
            k, self.inputs = self.inputs, self.inputs + 1
            return {"event": ["input", self.ids[subject], len(self.splits) - 1], "label": f"input {facts['t']}", "change": True,
                    **self._because("input", k=k, n=str(len(self.splits) - 1), **facts)}  # fmt: skip
        home = self.a.of.get(subject, -1)
        cause, self.fresh = "copy slots" if home == number else "copy", home != number
        return {"event": ["copy", self.ids[subject], number], "label": f"copy {facts['t']}", "change": False,
                **self._because(cause, home=self.backend(home), slots=len(detail), **facts)}  # fmt: skip

    def _split(self, first: int, b: int, why: str) -> dict[str, Any]:
        node = self.graph.nodes[first]
        if not self.splits:
            node = next((n for n in self.nodes), node)
        old = self.splits[-1] if self.splits else -1
        kind = "first" if old < 0 else "backend" if b != old else "weight" if why.startswith("the weight") else "full"
        kind += " again" if kind == "weight" and "already" in why else ""
        weight = next((s for s in node.src if s is not None and is_weight(s) and not self.a.reads(b, s)), node)
        ask = ask_where(self, first, f"split {kind}") if self.questions else None
        self.splits.append(b)
        self.firsts.append(first)
        self.inputs = 0
        return {"event": ["split", b, first], "label": f"split {len(self.splits) - 1} on {self.backend(b)}", "change": True,
                **self._because(f"split {kind}", t=self.name(node), b=self.backend(b), old=self.backend(old), w=self.name(weight),
                                k=str(len(self.splits) - 1)), **({"ask": ask} if ask else {})}  # fmt: skip


# ---- the state after some steps


def _start(trace: Steps) -> dict[str, Any]:
    """of: backend of each tensor; table: tensor -> stage -> [backend, cause]; splits: [backend, first node, inputs]; copies: [tensor,
    backend]; rewrites: [node, source number, tensor]; now: the tensor that the step is about."""
    open_ = [-1] * len(trace["graph"]["data"]["tensors"])
    s = {"stage": -1, "now": -1, "of": open_, "table": {}, "splits": [], "copies": [], "rewrites": [], "failed": False}
    for event in trace["before"]:
        _fold(s, event)
    return s


def _fold(s: dict[str, Any], event: list[Any]) -> None:
    kind, *rest = event
    s["now"] = -1
    if kind == "stage":
        s["stage"] = rest[0]
    elif kind == "assign":
        t, b, stage, cause = rest
        s["now"], s["of"][t] = t, b
        s["table"].setdefault(str(t), {})[str(stage)] = [b, cause]
    elif kind == "split":
        s["splits"].append([rest[0], rest[1], []])
    elif kind == "copy":
        s["now"] = rest[0]
        s["copies"].append(rest)
    elif kind == "input":
        s["now"] = rest[0]
        s["splits"][rest[1]][2].append(rest[0])
    elif kind == "rewrite":
        s["now"] = rest[0]
        s["rewrites"].append(rest)
    else:
        s["failed"] = True


START["schedule"], FOLD["schedule"] = _start, _fold
