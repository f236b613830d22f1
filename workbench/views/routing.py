"""What a router did, to look at: tokens coloured by expert, its probabilities, the load of each expert, queues and sums step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.patches import Rectangle

from workbench.errors import ShapeError, shown
from workbench.moe.routers import Router
from workbench.views.figures import Picture, drawable, new_figure, picture
from workbench.views.palette import QUANTITY, style
from workbench.views.rasters import heat_picture
from workbench.views.tables import Table, table

CAUSES = {
    "room": "Choice {rank} of ‘{word}’ is expert {e}, which has {left} of {capacity} places left: place {place}.",
    "first": "Choice {rank} of ‘{word}’ is expert {e}, the first row for it: one more matrix to read.",
    "no limit": "Choice {rank} of ‘{word}’ is expert {e}, which has rows already: place {place} in its queue.",
    "full": "Choice {rank} of ‘{word}’ is expert {e}, whose {capacity} places are taken: dropped, with weight 0.",
    "starved": "Steps {a} to {b}: {who} fell below a tenth of the fair share, {fair}. An expert without tokens learns nothing.",
    "fuller": "Steps {a} to {b}: expert {e} has {share}, {fair} is fair: more than before ({was}). It is trained most, and wanted more.",
    "evener": "Steps {a} to {b}: the fullest, expert {e}, has {share}, {fair} is fair; before, the fullest had {was}.",
    "first load": "Steps {a} to {b}, at the start: the fullest is expert {e} with {share}; {fair} is fair.",
    "add": "Expert {e} computes its network in full and counts for {w:.1%}. Now {share:.1%} of the weight is in the sum.",
}
"""Every reason for a step of `queue_steps`, `sum_steps` and `training_steps`."""
GROUPS = {
    "value": "Group {g} is as good as its {n} best together: {parts} = {value}.",
    "stay": "The best groups stay: {stay}. Experts of the others cannot be chosen, whatever their score.",
    "chosen": "Choice {i}: expert {e} of group {g}, the best score that is left, {s}.",
    "lost": "Without groups these would be among the best {k}: expert {lost}. Their groups are out.",
    "none lost": "Without groups the same {k} experts would be chosen.",
}
"""Every reason for a step of `group_steps`."""
COLUMNS, HEIGHT = 92, 0.36  # characters in a line of `token_picture`; inches from line to line


def token_picture(words: Sequence[str], experts: Sequence[int], caption: str, title: str = "") -> Picture:
    """A text, each token on the colour of its expert with the expert's number below; ⏎ ends a line."""
    if len(words) != len(experts) or any(int(e) < 0 for e in experts):
        raise ShapeError(f"{len(words)} words, experts {shown(list(experts))}", "an expert, from 0, for each word")
    places, x, y = list[tuple[float, int, str]](), 0.0, 0
    for word in words:
        text = drawable(word.replace("\n", "⏎").replace("\t", "→")) or " "
        if x and x + len(text) + 1 > COLUMNS:
            x, y = 0.0, y + 1
        places.append((x, y, text))
        x += max(len(text), 2) + 0.25
        if word.endswith("\n"):
            x, y = 0.0, y + 1
    lines = places[-1][1] + 1 if places else 1
    figure = new_figure(7.6, 0.15 + 0.2 * bool(title) + HEIGHT * lines, layout=None)
    axes = figure.add_axes((0.005, 0, 0.99, 1 - 0.2 * bool(title) / figure.get_figheight()))
    axes.set(xlim=(0, COLUMNS), ylim=(lines, 0), title="")
    axes.axis("off")
    if title:
        figure.text(0.01, 0.99, shown(title, 100), va="top", size=8.5)
    for (x, y, text), e in zip(places, experts, strict=True):
        look, width = style(int(e)), max(len(text), 2)
        axes.add_patch(Rectangle((x, y + 0.08), width, 0.5, fc=look.fill, ec="#333333", lw=0.3, hatch=look.hatch))
        axes.text(x, y + 0.33, text, va="center", size=8.6, family="monospace", color=look.ink)
        axes.text(x + width / 2, y + 0.78, str(int(e)), ha="center", va="center", size=6, color="#333333")
    alt = f"{title or 'Tokens by expert'}. " + "; ".join(f"‘{shown(w, 20)}’ {int(e)}" for w, e in zip(words, experts))
    return picture(figure, alt, caption)


def router_picture(words: Sequence[str], probs: Any, experts: Any, caption: str) -> Picture:
    """Probabilities [T, E] of all experts, a row per token; the chosen ones [T, k] are framed."""
    probs, experts = np.asarray(probs), np.asarray(experts)
    if probs.shape[0] != len(words) or experts.shape[:1] != probs.shape[:1]:
        raise ShapeError(f"{len(words)} words, probs {probs.shape}, experts {experts.shape}", "one row of each per word")
    figure = new_figure(1.7 + 0.52 * probs.shape[1], 0.9 + 0.25 * len(words))
    axes = figure.add_subplot(xlabel="expert")
    axes.imshow(probs, cmap=QUANTITY, vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(probs.shape[1]))
    axes.set_yticks(range(len(words)), [shown(w, 14) for w in words], fontsize=7.5, family="monospace")
    for (t, e), p in np.ndenumerate(probs):
        axes.text(e, t, f"{p:.0%}", ha="center", va="center", size=7, color="white" if p < 0.6 else "black")
    for t, chosen in enumerate(experts):
        for e in chosen:
            axes.add_patch(Rectangle((e - 0.47, t - 0.45), 0.94, 0.9, fill=False, ec="#D55E00", lw=1.8))
    each = (f"‘{shown(w, 20)}’ chose {', '.join(f'{e} ({row[e]:.0%})' for e in chosen)}" for w, row, chosen in zip(words, probs, experts))
    return picture(figure, f"Router probabilities: {'; '.join(each)}", caption)


def load_picture(counts: Any, layers: Sequence[int], caption: str) -> Picture:
    """Choices per layer and expert, (L, E), as multiples of the fair share: 100% is even."""
    counts = np.asarray(counts, float)
    if counts.ndim != 2 or len(counts) != len(layers) or not counts.size:
        raise ShapeError(f"counts {counts.shape} of {len(layers)} layers", "(layers, experts)")
    fair = counts / np.maximum(counts.mean(-1, keepdims=True), 1e-300)  # a layer that was not asked: zeros
    busiest = "; ".join(f"layer {n}: expert {int(row.argmax())} {row.max():.0%}" for n, row in zip(layers, fair))
    alt = f"Load of each expert, 100% is its fair share. Busiest: {busiest}"
    return heat_picture({f"layer {n}": row for n, row in zip(layers, fair)}, caption, alt, "expert", top=max(2.0, float(fair.max())))


def load_table(taken: Sequence[int], dropped: Sequence[int] | None = None, capacity: int | None = None, caption: str = "",
               before: Sequence[int] | None = None) -> Table:  # fmt: skip
    """Choices that each expert took, and dropped, as numbers and as bars; ▏ stands where its capacity ends.

    before: what each took in the last run (A), beside this one (B).
    """
    taken, lost = [int(n) for n in taken], [int(n) for n in dropped] if dropped is not None else [0] * len(taken)
    per = max(1.0, max((a + b for a, b in zip(taken, lost)), default=1) / 40)
    bars = ["█" * round(a / per) + ("▏" if capacity is not None and b else "") + "░" * round(b / per) for a, b in zip(taken, lost)]
    rows = list(zip(range(len(taken)), taken, lost, bars))
    if before is None:
        return table(["expert", "taken", "dropped", "█ taken ░ dropped"], rows, caption)
    return table(["expert", "A: taken, last run", "B: taken", "dropped", "█ taken ░ dropped"],
                 [(e, int(a), *rest) for (e, *rest), a in zip(rows, before)], caption)  # fmt: skip


# ---- steps, for `widgets.Stepper`


def queue_steps(words: Sequence[str], experts: Any, kept: Any, n_expert: int, capacity: int | None = None,
                title: str = "Queues") -> dict[str, Any]:  # fmt: skip
    """Choices [T, k] in the order in which experts take them, all first ones before the second; `kept` [T, k]: which were taken."""
    experts, kept = np.asarray(experts), np.asarray(kept, bool)
    if experts.ndim != 2 or experts.shape != kept.shape or len(experts) != len(words):
        raise ShapeError(f"{len(words)} words, experts {experts.shape}, kept {kept.shape}", "one row of each per word")
    if experts.size and not 0 <= experts.min() <= experts.max() < n_expert:
        raise ShapeError(f"experts from {experts.min()} to {experts.max()}", f"from 0, below {n_expert}")
    queue, steps = [0] * n_expert, list[dict[str, Any]]()
    for rank in range(experts.shape[1]):
        for word, e, fits in zip(words, experts[:, rank].tolist(), kept[:, rank].tolist()):
            label = word.replace("\n", "⏎")
            cause = "full" if not fits else "room" if capacity is not None else "no limit" if queue[e] else "first"
            left = 0 if capacity is None else capacity - queue[e]
            queue[e] += fits
            steps.append({
                "label": label, "cause": cause, "change": cause in ("full", "first"),
                "sentence": CAUSES[cause].format(rank=rank + 1, word=shown(label, 20), e=e, place=queue[e], capacity=capacity, left=left),
                "marks": [[e, str(queue[e]) if fits else "✗", 1.0 if fits else 0.0]],
                "table": [[str(i), str(n), "full" if n == capacity else ""] for i, n in enumerate(queue)],
            })  # fmt: skip
    return {"title": title, "lanes": [f"expert {e}" for e in range(n_expert)], "columns": ["expert", "taken", ""],
            "table": "the queues after this choice", "steps": steps}  # fmt: skip


def sum_steps(results: Any, weights: Sequence[float], title: str = "The weighted sum, expert by expert") -> dict[str, Any]:
    """One token through all experts: their weighted results [E, D] added one after the other, as the graph's additions do."""
    results, weights = np.asarray(results, float), [float(w) for w in weights]
    if results.ndim != 2 or len(results) != len(weights):
        raise ShapeError(f"results {results.shape}, {len(weights)} weights", "a row of results for each weight")
    partial, whole = np.cumsum(results, 0), max(float(np.linalg.norm(results.sum(0))), 1e-300)
    steps = []
    for e, w in enumerate(weights):
        away = np.linalg.norm(partial[-1] - partial[e]) / whole
        steps.append({
            "label": f"expert {e}", "cause": "add", "change": w == max(weights),
            "sentence": CAUSES["add"].format(e=e, w=w, share=sum(weights[: e + 1])),
            "marks": [[i, f"{v:.0%}", v] for i, v in enumerate(weights[: e + 1])],
            "table": [["weight so far", f"{sum(weights[: e + 1]):.4f}"], ["distance to the result", f"{away:.1%}"]],
        })  # fmt: skip
    return {"title": title, "lanes": [f"expert {e}" for e in range(len(weights))], "columns": ["", ""], "table": "after this expert",
            "steps": steps}  # fmt: skip


def training_steps(counts: Any, every: int = 20, title: str = "Load while training") -> dict[str, Any]:
    """Choices per expert at each step of a training run, (steps, E), summed over stretches of `every` steps: how a load becomes uneven."""
    counts = np.asarray(counts, float)
    if counts.ndim != 2 or not 0 < every <= len(counts):
        raise ShapeError(f"counts {counts.shape}, every {every} steps", "(steps, E), and at least one stretch")
    n_expert, fair = counts.shape[1], 1 / counts.shape[1]
    shares = counts[: len(counts) // every * every].reshape(-1, every, n_expert).sum(1)
    shares /= np.maximum(shares.sum(1, keepdims=True), 1)  # steps without any choice: zeros
    steps, starved = list[dict[str, Any]](), set[int]()
    for i, row in enumerate(shares):
        new = {e for e in range(n_expert) if row[e] < fair / 10} - starved
        starved |= new
        e, was = int(row.argmax()), shares[i - 1].max() if i else 0.0
        cause = "first load" if not i else "starved" if new else "fuller" if row[e] > was else "evener"
        who = ", ".join(f"expert {x}" for x in sorted(new))
        steps.append({
            "label": f"{every * (i + 1)}", "cause": cause, "change": bool(new),
            "sentence": CAUSES[cause].format(a=every * i, b=every * (i + 1), e=e, share=f"{row[e]:.0%}", was=f"{was:.0%}",
                                             fair=f"{fair:.1%}", who=who),
            "marks": [[x, f"{100 * v:.0f}", min(1.0, v / fair / 2)] for x, v in enumerate(row)],
            "table": [[str(x), f"{v:.0%}", "below a tenth of its share" if v < fair / 10 else ""] for x, v in enumerate(row)],
        })  # fmt: skip
    return {"title": title, "lanes": [f"expert {e}" for e in range(n_expert)], "columns": ["expert", "choices", ""],
            "table": "the load in these steps", "steps": steps}  # fmt: skip


def group_steps(scores: Any, n_groups: int, n_used: int, group_best: int, k: int, title: str = "Groups, then experts") -> dict[str, Any]:
    """One token's choice among experts in groups, from its scores [E]: each group's value, the groups that stay, the experts that win."""
    scores = np.asarray(scores, float)
    Router(scores.size, k, n_groups=n_groups, n_groups_used=n_used, group_best=group_best)  # refuses what cannot be
    size, steps = len(scores) // n_groups, list[dict[str, Any]]()
    groups = scores.reshape(n_groups, size)
    best = -np.sort(-groups, axis=1)[:, :group_best]
    values = best.sum(1)
    stay = np.argsort(-values, kind="stable")[:n_used].tolist()

    def step(label: str, cause: str, marks: list[list[Any]], rows: list[list[str]], change: bool = False, **facts: Any) -> None:
        steps.append({"label": label, "cause": cause, "change": change, "sentence": GROUPS[cause].format(**facts), "marks": marks,
                      "table": rows})  # fmt: skip

    for g in range(n_groups):
        marks = [[g * size + i, f"{v:.2f}"[-3:], 1.0 if v >= best[g, -1] else 0.2] for i, v in enumerate(groups[g])]
        step(f"group {g}", "value", marks, [[str(h), f"{values[h]:.3f}", ""] for h in range(g + 1)], g=g, n=group_best,
             parts=" + ".join(f"{v:.3f}" for v in best[g]), value=f"{values[g]:.3f}")  # fmt: skip
    rows = [[str(g), f"{values[g]:.3f}", "stays" if g in stay else "out"] for g in range(n_groups)]
    marks = [[g * size + i, "✓", 1.0] for g in stay for i in range(size)]
    step("groups", "stay", marks, rows, True, stay=", ".join(map(str, sorted(stay))))
    left = np.where(np.isin(np.arange(len(scores)) // size, stay), scores, -np.inf)
    chosen, free = (np.argsort(-s, kind="stable")[:k].tolist() for s in (left, scores))
    lost = [e for e in free if e not in chosen]
    for i, e in enumerate(chosen):
        step(f"expert {e}", "chosen", [[c, f"{scores[c]:.2f}"[-3:], 1.0] for c in chosen[: i + 1]], rows, e not in free, e=e, g=e // size,
             s=f"{scores[e]:.3f}", i=i + 1)  # fmt: skip
    step("lost", "lost" if lost else "none lost", [[e, "✗", 0.0] for e in lost], rows, bool(lost),
         lost=", ".join(f"{e} ({scores[e]:.3f}, group {e // size})" for e in lost), k=k)  # fmt: skip
    return {"title": title, "lanes": [f"expert {e}" for e in range(len(scores))], "columns": ["group", "value", ""],
            "table": "the groups", "steps": steps}  # fmt: skip
