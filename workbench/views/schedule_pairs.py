"""Two runs of the scheduler beside each other: which step of one belongs to which of the other, and where they part."""

from __future__ import annotations

from typing import Any

from workbench.views.schedule_steps import NONE, RULES
from workbench.views.steps import Steps


def pairing(a: Steps, b: Steps) -> dict[str, Any]:
    """What of run `b` belongs to what of run `a`, by the names of tensors and backends.

    "match": the tensor of b, or -1, for each of a; "at": how far b is when a is at step k; "same": the step of b about the same
    tensor in the same stage, or -1; "differs": the steps of a at which the runs part.
    """
    names = {n: i for i, n in enumerate(b["names"])}
    match = [names.get(n, -1) for n in a["names"]]
    where: dict[tuple[Any, ...], list[int]] = {}
    ends: dict[str, int] = {}
    for k, step in enumerate(b["steps"]):
        where.setdefault(_key(b, step, None), []).append(k)
        ends[step["stage"]] = k
    at, same, now = [], [], -1
    for k, step in enumerate(a["steps"]):
        found = next((i for i in where.get(_key(a, step, match), ()) if i > now), -1)
        stage_over = k + 1 == len(a["steps"]) or a["steps"][k + 1]["stage"] != step["stage"]
        until = max((end for s, end in ends.items() if _RANK[s] <= _RANK[step["stage"]]), default=-1) if stage_over else -1
        now = max(now, found, until, 0)
        at.append(now)
        same.append(found)
    return {"match": match, "at": at, "same": same, "differs": _differing(a, b, match)}


_RANK = {s: i for i, s in enumerate(RULES)}


def _key(steps: Steps, step: dict[str, Any], match: list[int] | None) -> tuple[Any, ...]:
    kind, *rest = step["event"]
    t = steps["order"][rest[1]] if kind == "split" else rest[0] if kind not in ("stage", "fail") else None
    j = rest[1] if kind == "rewrite" else None
    return step["stage"], kind, t if match is None or t is None else match[t], j


def _differing(a: Steps, b: Steps, match: list[int]) -> list[int]:
    """Steps of `a` whose decision `b` makes otherwise or not at all; what only b decides counts at the end of the stage."""
    mine, theirs = (_decided(steps) for steps in (a, b))
    back = {t: i for i, t in enumerate(match) if t >= 0}
    ends = {step["stage"]: k for k, step in enumerate(a["steps"])}
    out = set()
    for (stage, t), (k, backend) in mine.items():
        other = theirs.get((stage, match[t]))
        if other is None or other[1] != backend:
            out.add(k)
    for stage, t in theirs:
        if (stage, back.get(t, -1)) not in mine and stage in ends:
            out.add(ends[stage])
    return sorted(out)


def _decided(steps: Steps) -> dict[tuple[str, int], tuple[int, str]]:
    """The last decision of each stage about each tensor, and the splits by their first node: (step, name of the backend)."""
    names = [*(b["name"] for b in steps["backends"]), NONE["name"]]
    out = {}
    for k, step in enumerate(steps["steps"]):
        kind, *rest = step["event"]
        if kind == "assign":
            out[step["stage"], rest[0]] = k, names[rest[1]]
        elif kind == "split":
            out[step["stage"], steps["order"][rest[1]]] = k, names[rest[0]]
    return out
