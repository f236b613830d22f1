"""`replay`: cache policies over a recorded trace of routes; no weights move."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.cli.sizes import bytes_text, columns, size
from workbench.errors import ParameterError, WorkbenchError, shown, shown_path

if TYPE_CHECKING:
    from workbench.expertflow.replay import Forecast, Result
    from workbench.expertflow.sources import Source
    from workbench.moe import RouteTrace

HELP = "cache policies over a recorded trace of routes"
MANY = 10_000
SWEPT = ("policy", "slots", "scope", "residency", "batch", "link")
UNFITTED = ("gate-", "oracle")
EPILOG = """recorded traces: tiny-mixtral, tiny-deepseek, switch-base-8
drawn traces: skewed-static, local-drifting, with settings if you like:
local-drifting:tokens=2000,layers=8,experts=896,k=16,seed=0

policies:
  lru            least recently used first
  lfu            least often used first; counts survive an eviction
  lfu_in_cache   least often used first; counts end with an eviction
  lru_frequency  recency, and a bonus for every use
  static         what a sample uses most stays for ever, the rest passes through
  predicted      what is not predicted goes first (the seed)
  plec           slots allotted to the layers ahead (the paper)
  belady         the optimum without prefetching
  oracle         Belady's, and the link brings what is missing next

predictors: oracle, frequency, previous-token, previous-layer, read from routes; gate-0 to gate-4, which need the model;
linear-1, linear-2, non-linear-1, non-linear-2, linear-on-scores-1, network, fitted to the shipped models

Each of --policy, --slots, --scope, --residency, --batch and --link takes several values: lru,lfu  2,4,6  2..8  2..32..6"""


def main(argv: list[str]) -> int:
    """Replay and print a table; 0 when done, 2 and one message on stderr for a wrong request, 130 when interrupted."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except WorkbenchError as e:
        print(f"replay: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m workbench replay", description=HELP + ". No weights move.", epilog=EPILOG,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("trace", metavar="TRACE", help="a name (see below), or a file: .npz, .npy, .jsonl, .json")
    p.add_argument("--policy", default="lru", metavar="NAME", help="see below (default lru)")
    p.add_argument("--slots", default="", metavar="N", help="experts that have room: per layer, or in all with --scope global")
    p.add_argument("--scope", default="layer", metavar="layer|global", help="who shares slots (default layer)")
    p.add_argument("--residency", default="together", metavar="together|one_by_one",
                   help="whether the experts of a step must be there at the same time (default together)")  # fmt: skip
    p.add_argument("--batch", default="1", metavar="N", help="sequences decoded side by side (default 1)")
    p.add_argument("--predictor", metavar="NAME", help="what says which experts to fetch ahead; see below")
    p.add_argument("--fetch", type=int, metavar="M", help="experts to fetch per token and layer (default k)")
    p.add_argument("--link", default="0", metavar="X", help="loads that fit beside the computation of one expert (default 0)")
    p.add_argument("--model", metavar="MODEL", help="whose routers and states predictors read (default: the trace's own)")
    p.add_argument("--sweep", action="append", default=[], metavar="NAME=VALUES", help="another way to give several values: slots=2..8")
    p.add_argument("--workers", type=int, metavar="N", help="processes (default: as many as pay)")
    p.add_argument("--dask", default="", metavar="ADDRESS", help="of a Dask scheduler, such as tcp://host:8786, instead of processes")
    p.add_argument("--expert-bytes", type=size, metavar="SIZE", help="of one expert, to count bytes")
    p.add_argument("--csv", type=Path, metavar="FILE", help="write the table")
    p.add_argument("--plot", type=Path, metavar="FILE.png", help="draw hit rates over slots")
    p.add_argument("--keep-warm-up", action="store_true", help="keep rows at the start that all route alike")
    return p


def _run(args: argparse.Namespace) -> int:
    from workbench.expertflow import sources, sweep

    choices = {name: getattr(args, name) for name in SWEPT}
    for setting in args.sweep:
        name, _, text = setting.partition("=")
        if name not in SWEPT or not text:
            raise ParameterError(f"--sweep {shown(setting)}", f"NAME=VALUES with one of {', '.join(SWEPT)}", "--sweep slots=2..8")
        choices[name] = text
    for path in filter(None, (args.csv, args.plot)):
        if not path.parent.is_dir() or path.is_dir():
            what = f"{shown_path(path)} is a folder" if path.is_dir() else f"no folder {shown_path(path.parent)}"
            raise ParameterError(what, "a file to write to, in a folder that is there")
    if args.plot and args.plot.suffix.lower() != ".png":
        raise ParameterError(f"--plot {shown_path(args.plot)}", "a name that ends in .png: that is what is written")
    if args.fetch is not None and args.fetch < 1:
        raise ParameterError(f"--fetch {args.fetch}", "1 expert or more; without --predictor nothing is fetched ahead")
    if args.fetch is not None and not args.predictor:
        raise ParameterError("--fetch without --predictor", "--predictor NAME", "it says which experts to fetch")
    if not choices["slots"]:
        raise ParameterError("no number of slots", "--slots N, such as --slots 4 or --slots 2..8")
    lists: dict[str, list[Any]] = {name: values(text, float if name == "link" else str if name in ("policy", "scope", "residency") else int)
                                   for name, text in choices.items()}  # fmt: skip
    source = sources.load(args.trace, args.keep_warm_up)
    fit, trace, notes = _parts(source, "static" in lists["policy"] or bool(args.predictor) and not args.predictor.startswith(UNFITTED))
    more: dict[str, Any] = {"hot": fit.counts()} if "static" in lists["policy"] else {}
    if args.predictor:
        more["forecast"] = _forecast(args, source, fit, trace)
    if args.expert_bytes:
        more["sizes"] = (args.expert_bytes,) * trace.n_layers
    todo = [{**job, **more} for job in sweep.jobs(**lists)]
    if args.predictor and not any(lists["link"]):
        notes.append("--link 0: nothing is fetched ahead; a forecast then only tells `predicted` and `plec` whom to keep")
    print(f"{source.name}: {trace.n_tokens:,} tokens, {trace.n_layers} layers, {trace.k} of {trace.n_expert} experts each")
    for note in (*source.notes, *notes):
        print(f"- {shown(note, 300)}")
    workers = args.workers if args.workers is not None else 1 if args.dask else sweep.worth(trace, todo)
    results = sweep.sweep(trace, todo, workers, args.dask, sweep.Progress("replays") if len(todo) > 1 else None)
    print()
    print("\n".join(table(results)))
    _write(args, results, trace)
    return 0


def values(text: str, kind: type) -> list[Any]:
    """ "2,4,6", "2..8", "2..32..6" (every sixth), or names. Raises ParameterError for what is none."""
    out: list[Any] = []
    for part in text.split(","):
        bounds = part.strip().split("..")
        try:
            if kind is int and 2 <= len(bounds) <= 3:
                first, last, step = (*map(int, bounds), 1)[:3]
                found: Sequence[Any] = range(first, last + 1, step)
            else:
                found = [kind(part.strip())]
        except ValueError:
            raise ParameterError(f"the value {shown(part)!r}", "a number, several as in 2,4,6, or a range as in 2..8") from None
        if not found:
            raise ParameterError(f"no value in {shown(part)!r}", "a range from the smaller to the larger, as in 2..8")
        if isinstance(found, range) and found[-1] - found[0] > MANY * abs(found.step):
            raise ParameterError(f"more than {MANY:,} values in {shown(part)!r}", "fewer", "a step, as in 2..32..6")
        out += found
    return out


def _parts(source: Source, fitted: bool) -> tuple[RouteTrace, RouteTrace, list[str]]:
    """What is learnt from, what is replayed, and a note where these differ."""
    import numpy as np

    from workbench.expertflow.observe import split

    trace = source.trace
    if not fitted:
        return trace, trace, []
    learn, report = split(trace)
    if not len(report):
        half = trace.n_tokens // 2
        if not half:
            raise ParameterError("a trace of one token to learn from and to replay", "two tokens or more")
        return trace.select(slice(half)), trace.select(slice(half, None)), ["the first half is learnt from, the second replayed"]
    parts = [trace.select(np.isin(trace.sequences, some)) for some in (learn, report)]
    return *parts, [f"learnt from {len(learn)} sequences, the first of each domain; replayed are the other {len(report)}"]  # type: ignore[return-value]


def _forecast(args: argparse.Namespace, source: Source, fit: RouteTrace, trace: RouteTrace) -> Forecast:
    from workbench import models
    from workbench.expertflow import network, observe, replay, scoring

    simple = ("oracle", "frequency", "previous-token", "previous-layer")
    if args.predictor not in network.names():
        raise ParameterError(f"predictor {shown(args.predictor)!r}", f"one of {', '.join(network.names())}")
    choose = scoring.top(trace.k if args.fetch is None else args.fetch)
    if args.predictor in simple:
        found = network.unfitted(args.predictor).fit(replay.seen_routes(fit))
        return replay.forecast_of(found, replay.seen_routes(trace), choose)
    own = source.name if source.name.startswith("tiny-") else ""
    if not (args.model or own):
        raise ParameterError(f"predictor {args.predictor} on a trace without its model", f"--model, or one of {', '.join(simple)}",
                             "only these read nothing but routes")  # fmt: skip
    with models.load(args.model or f"{own}-f16") as model:
        if args.predictor.startswith("gate-"):
            made = network.unfitted(args.predictor)
        elif own:
            made = network.shipped_predictors(own)[args.predictor]
        else:
            raise ParameterError(f"predictor {args.predictor} on a trace of your own", f"gate-0 to gate-4, or one of {', '.join(simple)}",
                                 "the others are fitted to the shipped models")  # fmt: skip
        print(f"running {model.name} over {trace.n_tokens:,} tokens, for its hidden states …", file=sys.stderr)
        return replay.forecast_of(made, observe.record(model, trace), choose)


def table(results: Sequence[Result]) -> list[str]:
    """The results as aligned lines; columns that say the same in every line are left out, apart from the first two."""
    rows = [r.row() for r in results]
    names = {"policy": "policy", "slots": "slots", "scope": "scope", "residency": "residency", "batch": "batch", "forecast": "forecast",
             "link": "link", "accesses": "accesses", "hits": "hits", "hit_rate": "hit rate", "demand": "demand loads",
             "speculative": "ahead", "wasted": "unused", "dropped": "dropped", "demoted": "demoted", "bytes": "bytes"}  # fmt: skip
    always = ("policy", "slots", "accesses", "hits", "hit_rate", "demand")
    plain = {"forecast": "", "link": 0.0, "batch": 1, "speculative": 0, "wasted": 0, "dropped": 0, "demoted": 0, "bytes": ""}
    kept = [n for n in names if n in always or len({row[n] for row in rows}) > 1 or n in plain and rows[0][n] != plain[n]]

    def cell(name: str, value: Any) -> str:
        if name == "hit_rate":
            return f"{value:.2%}"
        if name == "bytes" and value != "":
            return bytes_text(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)

    lines = [tuple(names[n] for n in kept), *(tuple(cell(n, row[n]) for n in kept) for row in rows)]
    return columns(lines, tuple(i for i, n in enumerate(kept) if not isinstance(rows[0][n], str) or n == "bytes"))


def _write(args: argparse.Namespace, results: Sequence[Result], trace: RouteTrace) -> None:
    try:
        if args.csv:
            with args.csv.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(results[0].row()), lineterminator="\n")
                writer.writeheader()
                writer.writerows(r.row() for r in results)
        if args.plot:
            from workbench.views.expert_cache import hit_rate_picture

            shared = trace.n_expert * (1 if results[0].scope == "layer" else trace.n_layers)
            args.plot.write_bytes(hit_rate_picture(results, "", chance=shared, title=args.trace).png)
    except OSError as e:
        raise ParameterError(f"{shown_path(e.filename)} cannot be written: {shown(e.strerror)}", "a place to write to") from None
    for path in filter(None, (args.csv, args.plot)):
        print(f"written: {shown_path(path)}", file=sys.stderr)
