"""Forecasts of routes to look at: recall against precision and bytes, recall over layers, one token after another, and over time.

Recall never stands alone: beside it is what had to be fetched for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from workbench.errors import ParameterError, shown
from workbench.views.expert_cache import DASHES, MARKERS
from workbench.views.figures import Picture, new_figure, picture
from workbench.views.palette import OKABE_ITO
from workbench.views.rasters import heat_picture
from workbench.views.steps import Steps, record_steps

if TYPE_CHECKING:
    from workbench.expertflow.calibration import Row
    from workbench.expertflow.observe import Seen
    from workbench.expertflow.predictors import Predictor
    from workbench.expertflow.scoring import Choose, Score

SIGNS = {"found": "●", "missed": "✗", "wasted": "○"}
CAUSES = {
    "all found": "{who}: all {k} experts that the router takes were fetched{extra}.",
    "one missed": "{who}: expert {missed} was not fetched. In the forecast it had place {place} of {n}, {below} below the last "
                  "one fetched{extra}.",
    "several missed": "{who}: experts {missed} were not fetched; in the forecast the best of them had place {place} of {n}{extra}.",
}
"""Every reason for a step of `forecast_steps`."""


def recall_picture(curves: Mapping[str, np.ndarray], k: int, caption: str, *, nbytes: int = 0, title: str = "") -> Picture:
    """Recall when the 1, 2, … E best are fetched (`scoring.curve`): over what that moves, and over precision. nbytes: of one expert, for
    an axis in KiB. Larger marks stand at k and at 2k experts."""
    if not curves:
        raise ParameterError("no curves to draw", "those of one predictor or more")
    figure = new_figure(7.6, 3.3)
    size, unit = (nbytes / 1024, "KiB fetched per token and layer") if nbytes else (1, "experts fetched per token and layer")
    axes: Any = figure.subplots(1, 2, sharey=True)
    for i, (name, (recall, precision)) in enumerate(curves.items()):
        look: dict[str, Any] = {"ls": DASHES[i % 4], "color": "#000000" if name == "oracle" else OKABE_ITO[(4, 5, 2, 6, 0, 7, 1)[i % 7]],
                                "marker": MARKERS[i % len(MARKERS)], "ms": 3, "lw": 1.4}  # fmt: skip
        n = np.arange(1, len(recall) + 1)
        for panel, x in zip(axes, (n * size, precision)):
            panel.plot(x, recall, label=shown(name, 40), **look)
            at = [place - 1 for place in (k, 2 * k) if place <= len(recall)]
            panel.plot(np.asarray(x)[at], recall[at], ls="", marker=look["marker"], ms=7, color=look["color"], mec="white")
    axes[0].set(xlabel=unit, ylabel="recall", xlim=(0, None), ylim=(0, 1.02), title=shown(title, 80))
    axes[1].set(xlabel="precision", xlim=(0, 1.02))
    for panel in axes:
        panel.axhline(0.95, color="#999999", lw=0.8, ls=":")
        panel.grid(color="#dddddd", lw=0.6)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[1].xaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=7.5, frameon=False)
    said = "; ".join(f"{name}: {c[0][k - 1]:.1%} with {k}" + (f", {c[0][2 * k - 1]:.1%} with {2 * k}" if 2 * k <= c.shape[1] else "")
                     for name, c in curves.items())  # fmt: skip
    return picture(figure, f"{title or 'Recall over what is fetched, and over precision'}. Recall by experts fetched: {said}.", caption)


def layer_picture(scores: Mapping[str, Sequence[Score]], caption: str, *, layers: Sequence[int], what: str = "recall") -> Picture:
    """A figure of `Score` ("recall", "precision") for each predictor (rows) and layer (columns); "–" where it does not speak."""
    rows = {}
    for name, found in scores.items():
        by_layer = {s.layer: getattr(s, what) for s in found}
        rows[name] = [by_layer.get(layer, float("nan")) for layer in layers]
    said = "; ".join(f"{name}: " + ", ".join("–" if np.isnan(x) else f"{x:.0%}" for x in row) for name, row in rows.items())
    return heat_picture(rows, caption, f"{what.capitalize()} in layers {', '.join(map(str, layers))}. {said}.",
                        f"{what} in layer", columns=list(map(str, layers)))  # fmt: skip


def group_picture(reports: Mapping[str, Sequence[Row]], caption: str, what: str = "recall", xlabel: str = "") -> Picture:
    """A figure of calibration reports: a row for each report, a column for each group (domains, places in the text, layers)."""
    groups = [row.group for row in next(iter(reports.values()))]
    rows = {name: [getattr(row, what) for row in found] for name, found in reports.items()}
    form, top = (".1f", max(map(max, rows.values()))) if what == "fetched" else (".1%", 1.0)
    said = "; ".join(f"{name}: " + ", ".join(f"{g} {x:{form}}" for g, x in zip(groups, row)) for name, row in rows.items())
    return heat_picture(rows, caption, f"{what.capitalize()} by group. {said}.", xlabel, top, columns=groups, form=form)


def forecast_steps(predictor: Predictor, seen: Seen, choose: Choose, m: int, rows: Iterable[int], tokens: Sequence[str],
                   title: str = "") -> Steps:  # fmt: skip
    """The stepper's trace of a forecast for expert layer `m`, token by token: ● fetched and used, ○ fetched in vain, ✗ used and missed.

    rows: the tokens of the run to show; tokens: what each of these is called.
    """
    scores, used, k, n = predictor.scores(seen, m), seen.used(m), seen.gates.k, seen.routes.n_expert
    chosen = choose(scores, m)

    def describe(item: tuple[int, str]) -> dict[str, Any]:
        row, token = item
        want, have, order = used[row], chosen[row], np.argsort(-scores[row], kind="stable")
        state = {"found": want & have, "missed": want & ~have, "wasted": have & ~want}
        missed, label = np.flatnonzero(state["missed"]), shown(token.replace("\n", "⏎"), 12)
        cause = ("all found", "one missed")[len(missed)] if len(missed) < 2 else "several missed"
        place = min((int(np.flatnonzero(order == e)[0]) for e in missed), default=0)
        last = scores[row][have].min() if have.any() else scores[row].max()
        extra = int(state["wasted"].sum())
        facts = {"missed": " and ".join(map(str, missed)), "place": place + 1, "below": f"{last - scores[row][order[place]]:.2f}"}
        said = CAUSES[cause].format(who=f"‘{label}’", k=k, n=n, extra=f"; {extra} fetched in vain" if extra else "", **facts)
        marks = [[int(e), SIGNS[what], 1 if what != "wasted" else 0.3] for what, mask in state.items() for e in np.flatnonzero(mask)]
        table = [[str(e), f"{scores[row][e]:.2f}", "yes" if have[e] else "", "yes" if want[e] else ""] for e in order]
        return {"event": [cause, row, len(missed), extra], "label": label, "sentence": said, "cause": cause, "change": len(missed) > 0,
                "marks": marks, "table": table}  # fmt: skip

    layer = int(seen.routes.layers[m])
    return record_steps(zip(rows, tokens), describe, title or f"{predictor.name}: what it fetches for layer {layer}", "",
                        lanes=[f"expert {e}" for e in range(n)], columns=["expert", "score", "fetched", "used"],
                        table="best forecast first")  # fmt: skip


def online_picture(events: Iterable[tuple[Any, ...]], caption: str, *, target: float, smooth: int = 8,
                   marks: Mapping[int, str] | None = None, title: str = "") -> Picture:  # fmt: skip
    """Recall and experts fetched over batches (`expertflow.online.recalibrate`), mean of `smooth` batches; grey while it is cold, a line
    where drift was found. marks: batch -> what the reader should know happened there."""
    events = list(events)
    rows = [e for e in events if e[0] == "batch"]
    if len(rows) < smooth:
        raise ParameterError(f"{len(rows)} batches", f"{smooth} or more", "smooth=1 draws each batch")
    every = max(1, smooth // 2)  # a point for half of what it is the mean of
    at = np.arange(smooth - 1, len(rows))[::every]
    recall, fetched = (np.convolve([e[i] for e in rows], np.full(smooth, 1 / smooth), "valid")[::every] for i in (3, 4))
    figure = new_figure(7.2, 3.0)
    axes: Any = figure.subplots(2, 1, sharex=True)
    looks = (recall, "recall", OKABE_ITO[4]), (fetched, "experts fetched\nper token", OKABE_ITO[5])
    for panel, (y, label, colour) in zip(axes, looks):
        panel.plot(at, y, color=colour, lw=1.3)
        panel.set_ylabel(label, fontsize=8)
        panel.grid(color="#dddddd", lw=0.6)
        for begin, end in _cold(rows):
            panel.axvspan(begin - 0.5, end + 0.5, color="#cccccc", lw=0)
        for e in events:
            if e[0] == "drift":
                panel.axvline(e[1], color="#000000", lw=1.2, ls="--")
        for batch in marks or {}:
            panel.axvline(batch, color=OKABE_ITO[2], lw=1.2, ls=":")
    axes[0].axhline(target, color="#999999", lw=0.8, ls=":")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0].set_title(shown(title, 80), fontsize=9)
    for batch, text in (marks or {}).items():
        axes[0].annotate(shown(text, 40), (batch, 0.04), xycoords=("data", "axes fraction"), fontsize=7.5, xytext=(-3, 0),
                         textcoords="offset points", ha="right")  # fmt: skip
    for e in events:
        if e[0] == "drift":
            axes[0].annotate(f"drift {e[2]}", (e[1], 0.9), xycoords=("data", "axes fraction"), fontsize=7.5, xytext=(3, 0),
                             textcoords="offset points")  # fmt: skip
    axes[1].set_xlabel("batch", fontsize=8)
    warm, drift = ([str(e[1]) for e in events if e[0] == kind] for kind in ("warm", "drift"))
    alt = (f"{title or 'Recall and experts fetched over batches'}: {len(rows)} batches; cold starts end at batch "
           f"{', '.join(warm) or 'none'}; drift is found at batch {', '.join(drift) or 'none'}. Grey: cold; dashed: drift.")  # fmt: skip
    return picture(figure, alt, caption)


def _cold(rows: Sequence[tuple[Any, ...]]) -> list[tuple[int, int]]:
    """First and last batch of each cold stretch."""
    out: list[tuple[int, int]] = []
    for e in rows:
        if e[2] == "cold":
            if out and out[-1][1] == e[1] - 1:
                out[-1] = out[-1][0], e[1]
            else:
                out.append((e[1], e[1]))
    return out
