"""What if, and why not: the smallest single change that takes a border between two splits away, found by trying all of them.

Nothing here reasons about the passes: every candidate is a `Case` of its own, and the real passes decide what becomes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from workbench.cgraph import CGraph
from workbench.errors import ParameterError, WorkbenchError, shown
from workbench.scheduler.cases import Case, Change, Cut, Draft, Outcome, Placed, outcome_of, tensors_of
from workbench.scheduler.passes import computed, is_weight
from workbench.scheduler.scheduler import Scheduler

__all__ = ["Case", "Change", "Cut", "Draft", "Outcome", "Placed", "Tried", "WhyNot", "candidates", "outcome_of", "why_not"]

KINDS = ("assign", "allow", "weight")
"""Kinds of single changes, the lighter ones first: a setting; a kernel to be written; bytes that take room elsewhere."""


class Tried(NamedTuple):
    """A change and what the passes made of it. verdict: "removes" the border, with fewer splits in all; only "moves" it: its two nodes
    share a split, but there are as many splits as before; "keeps" it; or is "refused", for the reason `why`.

    shifted: computed nodes that run on another backend than before; moved: bytes of the weight; splits: in all, after the change;
    copied: bytes of their inputs, per run; new: borders that were none before.
    """

    change: Change
    verdict: str
    moved: int = 0
    shifted: int = 0
    splits: int = 0
    copied: int = 0
    new: tuple[tuple[str, str], ...] = ()
    why: str = ""


class WhyNot(NamedTuple):
    """Why two neighbours are not in one split. border: the nodes at both sides; cause: why the second one's split begins.

    tried: all single changes, with their verdicts; left: how many more there are that were not tried.
    """

    border: tuple[str, str]
    cause: str
    before: Outcome
    tried: tuple[Tried, ...]
    left: int = 0

    @property
    def removing(self) -> list[Tried]:
        """The changes that take the border away, smallest first.

        Smaller is what leaves more of the plan as it is: fewer nodes shifted to another backend. Among equals an assignment comes
        before support for an op, and that before a weight moved, of which fewer bytes are smaller; then what leaves fewer splits, then
        fewer bytes to copy per run, then what lies nearer to the border.
        """
        return sorted((t for t in self.tried if t.verdict == "removes"),
                      key=lambda t: (t.shifted, KINDS.index(t.change.kind), t.moved, t.splits, t.copied))  # fmt: skip

    @property
    def best(self) -> Tried | None:
        """The smallest change that takes the border away, or None where no single one does."""
        return next(iter(self.removing), None)

    def count(self, verdict: str) -> int:
        """How many of the tried changes ended so."""
        return sum(t.verdict == verdict for t in self.tried)

    def __str__(self) -> str:
        of = f" of {len(self.tried) + self.left}" if self.left else ""
        kinds = [(sum(t.change.kind == k for t in self.tried), what)
                 for k, what in zip(KINDS, ("assignment", "op to support", "weight to move"))]  # fmt: skip
        what = ", ".join(f"{n} × {one}" for n, one in kinds)
        head = f"{self.border[1]} begins a split: {self.cause}. Tried {len(self.tried)}{of} single changes ({what})"
        rest = f"{self.count('moves')} only move the border, {self.count('refused')} are refused"
        t, n = self.best, len(self.removing)
        if t is None:
            return f"{head}: none takes the border away; {rest}."
        cost = [f"{len(self.before.splits)} → {t.splits} splits", f"{self.before.copied:,} → {t.copied:,} bytes copied per run"]
        cost += [f"{t.shifted} nodes on another backend"] if t.shifted else []
        cost += [f"{t.moved:,} bytes moved once"] if t.moved else []
        cost += ["a new border " + ", ".join(" | ".join(b) for b in t.new)] if t.new else []
        ways = f"{n} {'takes' if n == 1 else 'take'} it away"
        return f"{head}: {ways}, the smallest: {t.change}. It gives {'; '.join(cost)}. Of the others {rest}."


def why_not(case: Case, border: int | str, most: int = 2000) -> WhyNot:
    """Find the smallest single change that takes a border away: one assignment, one op supported, or one weight moved.

    border: the number of the split that begins there (1 or more), or the name of its first computed node. All single changes are tried,
    at most `most` of them, those near the border first. A border counts as removed where its two nodes end in one split *and* there are
    fewer splits than before: else it has only moved. Raises ParameterError where there is no such border.
    """
    scheduler, graph = case.scheduler_and_graph()
    before = outcome_of(scheduler, graph)
    a, b = _border(before, border)
    split = next(n.split for n in before.nodes if n.name == b)
    base = Case.of(scheduler, graph, case.name)
    ways = [*candidates(scheduler, graph, before, b)]
    tried = tuple(_try(base, change, moved, before, (a, b)) for change, moved in ways[:most])
    return WhyNot((a, b), before.splits[split].cause, before, tried, len(ways) - len(tried))


def _border(before: Outcome, border: int | str) -> tuple[str, str]:
    pairs = before.borders()
    for i, pair in enumerate(pairs, 1):
        if border in (i, pair[1]):
            return pair
    raise ParameterError(f"no border at {shown(border)}", "the number of a split after the first, or the node that begins it: "
                         + (", ".join(f"{i}: {b}" for i, (_, b) in enumerate(pairs[:12], 1)) or "there is one split only"))  # fmt: skip


def candidates(scheduler: Scheduler, graph: CGraph, before: Outcome, near: str) -> Iterator[tuple[Change, int]]:
    """All single changes, with the bytes of the weight that moves; of each kind those near the node `near` first."""
    names = {t: key for key, t in tensors_of(graph).items()}
    backends, at = scheduler.backends, next(n.place for n in before.nodes if n.name == near)
    place = {n: i for i, n in enumerate(graph.nodes)}
    place |= {leaf: min((place[n] for n in graph.nodes if leaf in n.src), default=0) for leaf in graph.leafs}
    distance = lambda t: abs(2 * (place[t] - at) + 1)  # noqa: E731  the border lies between two places
    now = {n.name: n.backend for n in before.nodes}
    free = [t for t in (*computed(graph.nodes), *graph.leafs) if t.storage is None or t.op != "NONE"]
    for t in sorted(free, key=distance):
        if t in scheduler.by_hand:
            yield Change.assign(names[t], ""), 0
        for b in backends:
            if b.name != (backends[scheduler.by_hand[t]].name if t in scheduler.by_hand else now.get(names[t])):
                yield Change.assign(names[t], b.name), 0
    lacking = [Change.allow(t.desc, b.name) for t in sorted(computed(graph.nodes), key=distance) for b in backends
               if t.spec is not None and not b.supports_op(t)]  # fmt: skip
    yield from ((change, 0) for change in dict.fromkeys(lacking))
    memories = {id(kind): (kind, b.name) for kind, b in reversed([*zip(scheduler.buffer_types, backends, strict=True)])}
    for t in sorted(filter(is_weight, graph.leafs), key=distance):
        for kind, device in reversed(memories.values()):
            if kind is not getattr(t.storage, "buffer_type", None):
                yield Change.move(names[t], device), t.nbytes


def _try(base: Case, change: Change, moved: int, before: Outcome, border: tuple[str, str]) -> Tried:
    try:
        after = base.changed(change).outcome()
    except WorkbenchError as refused:
        return Tried(change, "refused", moved, why=refused.found)
    borders, old = after.borders(), before.borders()
    verdict = "keeps" if border in borders else "removes" if len(after.splits) < len(before.splits) else "moves"
    shifted = sum(a.backend != b.backend for a, b in zip(before.nodes, after.nodes, strict=True) if not a.is_view)
    return Tried(change, verdict, moved, shifted, len(after.splits), after.copied, tuple(b for b in borders if b not in old))
