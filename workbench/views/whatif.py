"""Cases and what becomes of them: splits, two runs beside each other, why not, and how far the passes are from the fewest bytes."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from workbench.scheduler import cases
from workbench.scheduler.cases import Case, Outcome, outcome_of, tensors_of
from workbench.scheduler.optimum import Problem, by_cut, by_states
from workbench.scheduler.passes import computed, is_weight
from workbench.scheduler.whatif import WhyNot
from workbench.views.cards import Card
from workbench.views.graph_data import graph_data
from workbench.views.schedule_steps import backend_looks
from workbench.views.tables import Stack, Table, table

ANSWERS = 8
"""Rows of an answer to "why not?"."""


def outcome_table(case: Case | Outcome, caption: str = "") -> Table:
    """The splits that the passes cut: backend, nodes, what is copied in, and why each one begins."""
    out = case.outcome() if isinstance(case, Case) else case
    rows = [(i, s.backend, ", ".join(n.name for n in out.nodes[s.first : s.last]), ", ".join(name for name, _ in s.inputs) or "nothing",
             sum(size for _, size in s.inputs), s.cause) for i, s in enumerate(out.splits)]  # fmt: skip
    caption = caption or f"{counted(len(out.splits), 'split')}; {out.copied:,} bytes are copied between devices in a run."
    return table(["split", "backend", "nodes", "copied in", "bytes", "begins because"], rows, caption)


def compare_table(a: Case | Outcome, b: Case | Outcome, caption: str = "") -> Table:
    """Two runs beside each other, differences marked with ≠."""
    one, other = (x.outcome() if isinstance(x, Case) else x for x in (a, b))
    rows = [(what, x, y, "" if x == y else "≠") for what, x, y in zip(FACTS, facts(one), facts(other))]
    return table(["", "A", "B", ""], rows, caption or difference(one, other))


FACTS = ("splits", "bytes copied per run", "nodes of each backend", "new splits begin at")


def facts(out: Outcome) -> tuple[Any, ...]:
    """Of an outcome, what `FACTS` names."""
    on = {b: sum(n.backend == b for n in out.nodes if not n.is_view) for b in sorted({n.backend for n in out.nodes})}
    return len(out.splits), out.copied, ", ".join(f"{b} {n}" for b, n in on.items() if n), ", ".join(b for _, b in out.borders()) or "none"


def difference(a: Outcome, b: Outcome) -> str:
    """What changed from one outcome to another, in a sentence."""
    was = {n.name: n.backend for n in a.nodes}
    moved = [f"{n.name} ({was[n.name]} → {n.backend})" for n in b.nodes if not n.is_view and was.get(n.name, n.backend) != n.backend]
    splits, copied = ((f"{x:,} → {y:,}" if x != y else f"still {x:,}") for x, y in ((len(a.splits), len(b.splits)), (a.copied, b.copied)))
    more = f" and {len(moved) - 6} more" if len(moved) > 6 else ""
    where = "no node changes its backend" if not moved else f"on another backend: {', '.join(moved[:6])}{more}"
    return f"Splits: {splits}; bytes copied per run: {copied}; {where}."


def why_not_view(answer: WhyNot) -> Stack:
    """The smallest single change that takes a border away, what it costs, and what else was tried."""
    rows = table(ANSWER_COLUMNS, why_not_rows(answer), "What takes the border away, smallest first.")
    return Stack(Card("note", why_not_title(answer), why_not_lines(answer)), *([rows] if answer.best else []))


def why_not_title(answer: WhyNot) -> str:
    """The answer in a line."""
    if answer.best is None:
        return f"No single change takes the border before {answer.border[1]} away."
    return f"Smallest single change without the border before {answer.border[1]}: {answer.best.change}."


ANSWER_COLUMNS = ["change", "nodes on another backend", "splits", "bytes copied per run", "bytes moved once", "new borders"]


def why_not_rows(answer: WhyNot) -> list[tuple[Any, ...]]:
    """The changes that help, as rows."""
    return [(str(t.change), t.shifted, t.splits, t.copied, t.moved, ", ".join(" | ".join(b) for b in t.new) or "none")
            for t in answer.removing[:ANSWERS]]  # fmt: skip


def why_not_lines(answer: WhyNot) -> list[tuple[str, str]]:
    """The answer in words: (what, text)."""
    kinds = {"assign": "assignment by hand", "allow": "op to support", "weight": "weight to move"}
    tried = ", ".join(f"{sum(t.change.kind == kind for t in answer.tried)} × {what}" for kind, what in kinds.items())
    ends = {"removes": "without the border", "moves": "as many splits, it is elsewhere", "keeps": "it stays", "refused": "refused"}
    counts = ", ".join(f"{k} × {said}" for v, said in ends.items() if (k := answer.count(v)))
    left = f", the nearest of {len(answer.tried) + answer.left}" if answer.left else ""
    return [("the border", f"{' | '.join(answer.border)}: {answer.cause}"), ("now", _now(answer.before)),
            ("tried", f"{counted(len(answer.tried), 'single change')}{left} ({tried}): {counts}")]  # fmt: skip


def _now(out: Outcome) -> str:
    return f"{counted(len(out.splits), 'split')}, {out.copied:,} bytes copied per run"


def counted(n: int, what: str) -> str:
    """`3 splits`, `1 split`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# ---- how good are the passes?


def optimum_table(several: Iterable[Case], caption: str = "") -> Table:
    """The five passes beside the placement of fewest bytes, case by case: bytes, and changes of backend along the order."""
    rows: list[tuple[Any, ...]] = []
    for case in several:
        out, problem = case.outcome(), Problem(*case.scheduler_and_graph())
        best = by_cut(problem) if len(problem.backends) <= 2 else by_states(problem)
        line = [n.backend for n in out.nodes if not n.is_view]
        changes = sum(a != b for a, b in zip(line, line[1:]))
        both = out.copied, best.nbytes
        rows.append((case.name, len(line), case.batch or None, *both, ratio(*both), changes, best.changes))
    columns = ["case", "nodes", "batch", "passes, bytes", "fewest, bytes", "ratio", "passes, changes", "fewest, changes"]
    equal, worse = sum(r[3] == r[4] for r in rows), [r[3] / r[4] for r in rows if r[4]]
    said = f"In {equal} of {counted(len(rows), 'case')} the passes move as few bytes as possible"
    said += f"; where bytes must move, the ratio's median is {median(worse):.3g}, the largest {max(worse):.3g}" if worse else ""
    return table(columns, rows, caption or said + ".")


def ratio(a: int, b: int) -> str:
    """How many times as many bytes."""
    return f"{a / b:.2f}" if b else "1.00" if a == b else "∞"


def placement_table(case: Case, caption: str = "") -> Table:
    """Node by node: the backend that the passes chose, and that of the placement of fewest bytes."""
    scheduler, graph = case.scheduler_and_graph()
    out, problem = outcome_of(scheduler, graph), Problem(scheduler, graph)
    best = by_cut(problem) if len(problem.backends) <= 2 else by_states(problem)
    names = {key: scheduler.backends[best.of[t]].name for key, t in tensors_of(graph).items() if t in best.of}
    rows = [(n.name, n.op, n.backend, names[n.name], "" if n.backend == names[n.name] else "≠") for n in out.nodes if not n.is_view]
    caption = caption or f"The passes copy {out.copied:,} bytes, the best placement {best.nbytes:,}."
    return table(["node", "op", "five passes", "fewest bytes", ""], rows, caption)


# ---- for the widget


def case_data(case: Case) -> tuple[Outcome, dict[str, Any]]:
    """What the passes decide, and the same as plain data for the roll of `schedule_roll.js` and the controls of `WhatIf`."""
    scheduler, graph = case.scheduler_and_graph()
    out, looks = outcome_of(scheduler, graph), backend_looks(scheduler)
    number = {b["name"]: i for i, b in enumerate(looks)} | {"": -1}
    known = tensors_of(graph)
    ids = {key: i for i, key in enumerate(known)}
    rows = [{k: r[k] for k in ("name", "class", "src", "op")} for r in graph_data(graph)["tensors"]]
    borders = {b: a for a, b in out.borders()}
    work = [n for n in out.nodes if not n.is_view]
    firsts = [next((n.name for n in work if n.split == i), "") for i in range(len(out.splits))]
    return out, {
        "graph": {"data": {"tensors": rows}}, "backends": looks, "order": [*range(len(graph.leafs), len(known))],
        "of": [*(number[b] for _, b in out.leafs), *(number[n.backend] for n in out.nodes)], "causes": [n.cause for n in out.nodes],
        "splits": [[number[s.backend], s.first, [ids[name] for name, _ in s.inputs]] for s in out.splits],
        "cuts": [[first, borders.get(first, ""), s.cause, [[*i] for i in s.inputs]] for first, s in zip(firsts, out.splits)],
        "facts": [[what, str(v) if isinstance(v, str) else f"{v:,}"] for what, v in zip(FACTS, facts(out))],
        "controls": _controls(case, out, scheduler, known),
    }  # fmt: skip


def _controls(case: Case, out: Outcome, scheduler: Any, known: dict[str, Any]) -> dict[str, Any]:
    homes = {id(kind): b.name for kind, b in reversed([*zip(scheduler.buffer_types, scheduler.backends)])}
    ops: dict[str, list[str]] = {}
    for t in computed(known.values()):
        if t.spec is not None:
            lacking = ops.setdefault(t.desc, [])
            lacking += [b.name for b in scheduler.backends if b.name not in lacking and not b.supports_op(t)]
    return {
        "devices": [b.name for b in scheduler.backends], "memories": list(dict.fromkeys(homes[id(k)] for k in scheduler.buffer_types)),
        "weights": [[key, homes.get(id(getattr(t.storage, "buffer_type", None)), "")] for key, t in known.items() if is_weight(t)],
        "ops": [[op, lacking] for op, lacking in ops.items()], "nodes": [n.name for n in out.nodes if not n.is_view],
        "assigned": dict(case.assigned), "batch": 0 if isinstance(case.recipe, cases.Taken) else case.batch,
        "op_offload": case.op_offload, "parallel": case.parallel,
    }  # fmt: skip
