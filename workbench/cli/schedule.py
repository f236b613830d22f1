"""`schedule`: what ggml's scheduler does with a model on given devices. Reads the header only."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.errors import ParameterError, WorkbenchError, shown

if TYPE_CHECKING:
    from workbench.models.phases import Phase
    from workbench.models.planning import SchedulePlan

HELP = "what ggml's scheduler would do with a model on given devices"


def main(argv: list[str]) -> int:
    """Run the command; 2, and one message on stderr, for a wrong request."""
    args = _parser().parse_args(argv)
    try:
        for line in device_lines() if args.devices else _lines(args):
            print(line)
    except WorkbenchError as e:
        print(f"schedule: {e}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m workbench schedule",
        description=HELP + ". Reads the header of the file only, and computes nothing.",
    )
    p.add_argument("model", metavar="MODEL", nargs="?", help="path of a GGUF file, or the name of a shipped model")
    p.add_argument("--device", metavar="PRESET[,PRESET]", help="cards, an accelerator, a CPU: see --devices")
    p.add_argument("--devices", action="store_true", help="list the presets, each figure with its source")
    p.add_argument(
        "-ngl",
        "--n-gpu-layers",
        type=int,
        metavar="N",
        help="layers on cards, counted from the end; the output is one more (default: all)",
    )
    p.add_argument(
        "-ot",
        "--override-tensor",
        action="append",
        default=[],
        metavar="REGEX=DEV",
        help="weights whose name the pattern fits go to DEV; the first that fits decides, before --n-cpu-moe",
    )
    p.add_argument(
        "-ncmoe", "--n-cpu-moe", type=int, default=0, metavar="N", help="experts of the first N layers stay on the host"
    )
    p.add_argument("-cmoe", "--cpu-moe", dest="n_cpu_moe", action="store_const", const=512, help="all experts stay on the host")
    p.add_argument(
        "--batch", type=int, default=512, metavar="N", help="tokens of the prompt, in one graph (default 512)"
    )
    p.add_argument("--context", type=int, default=4096, metavar="N", help="cells of the KV cache (default 4096)")
    p.add_argument("--kv", choices=("f16", "f32"), default="f16", help="type of the KV cache (default f16)")
    p.add_argument("--no-mmap", action="store_true", help="weights on the host are pinned, not mapped from the file")
    p.add_argument("--splits", action="store_true", help="list every split with its inputs and why it begins")
    p.add_argument("--json", action="store_true", help="everything as JSON")
    return p


def _lines(args: argparse.Namespace) -> Iterator[str]:
    from workbench.models.planning import plan_schedule

    if not args.model or not args.device:
        raise ParameterError("no MODEL, or no --device", "both: schedule tiny-mixtral-f16 --device rtx3090-pcie4",
                             "`schedule --devices` lists the presets")  # fmt: skip
    overrides: dict[str, str] = {}
    for text in args.override_tensor:
        for rule in text.split(","):
            pattern, given, device = rule.rpartition("=")
            if not given or not pattern:
                raise ParameterError(
                    f"--override-tensor {shown(rule)!r}", "REGEX=DEV", "--override-tensor '_exps=CPU', for example"
                )
            overrides.setdefault(pattern, device)
    plan = plan_schedule(args.model, args.device, n_gpu_layers=args.n_gpu_layers, overrides=overrides, n_cpu_moe=args.n_cpu_moe,
                         batch=args.batch, context=args.context, kv=args.kv, mmap=not args.no_mmap)  # fmt: skip
    if args.json:
        yield json.dumps({"device": args.device, **plan.to_dict()}, indent=1)
        return
    yield from report(plan, args.device, args.splits)


def report(plan: SchedulePlan, device: str, splits: bool = False) -> Iterator[str]:
    """The plan as text, line by line."""
    from workbench.cli.sizes import bytes_text, columns

    known = bool(plan.phases)
    yield f"{shown(plan.model)} ({shown(plan.architecture)}) on {device}: {plan.n_gpu_layers} of {plan.n_layer + 1} layers on cards"
    yield ""
    rows: list[tuple[str, ...]] = [
        ("memory", "weights", "KV cache" if known else "", "compute" if known else "", "in all", "of")
    ]
    for d in plan.devices:
        besides = [bytes_text(n) if known else "" for n in (d.kv, d.compute)]
        rows.append((f"{d.name} ({d.title})", bytes_text(d.weights), *besides,
                     bytes_text(d.total), bytes_text(d.capacity) if d.capacity else ""))  # fmt: skip
    yield from columns(rows, (1, 2, 3, 4, 5))
    for d, excess in plan.overflows():
        yield f"  {d.name} IS TOO SMALL by {bytes_text(excess)}: fewer layers (-ngl), experts on the host (--n-cpu-moe), less --context."
    if plan.expert_bytes:
        yield f"  all experts: {bytes_text(plan.expert_bytes)}; those of one token: {bytes_text(plan.active_bytes)}"
    for phase in plan.phases:
        yield ""
        yield from _phase(phase, splits)
    yield ""
    yield from (f"- {note}" for note in plan.notes)


def _phase(p: Phase, splits: bool) -> Iterator[str]:
    from workbench.cli.sizes import bytes_text, columns, speed_text
    from workbench.models.phases import duration

    what = "decode, 1 token" if p.n_tokens == 1 else f"{p.name}, {p.n_tokens:,} tokens"
    yield (f"{what}, looking at {p.n_kv:,} cells: {len(p.splits)} split{'s' * (len(p.splits) != 1)}, {duration(p.ns)}, "
           f"{speed_text(p.tokens_per_second)} tokens/s, {bytes_text(p.copied / p.n_tokens)} copied per token")  # fmt: skip
    if p.ways:
        rows: list[tuple[str, ...]] = [("copied", "", "bytes", "per token", "copies", "time")]
        rows += [
            (
                f"{w.source} → {w.target}",
                w.kind,
                f"{w.nbytes:,}",
                f"{w.nbytes / p.n_tokens:,.0f}",
                f"{w.copies:,}",
                duration(w.ns),
            )
            for w in p.ways
        ]
        yield from columns(rows, (2, 3, 4, 5))
    rows = [("computed", "", "nodes", "time", "mostly")]
    rows += [(w.device, w.kind, f"{w.nodes:,}", duration(w.ns), w.bound) for w in p.work]
    yield from columns(rows, (2, 3))
    yield f"  {p.largest_cost()}"
    if splits:
        rows = [("split", "on", "nodes", "inputs", "begins because")]
        some = [", ".join(f"{shown(t)} ({bytes_text(b)})" for t, b in inputs[:4]) for _, _, inputs, _ in p.splits]
        listed = [text + " …" * (len(s[2]) > 4) for text, s in zip(some, p.splits)]
        rows += [(str(i), backend, str(n), listed[i], cause)
                 for i, (backend, n, _, cause) in enumerate(p.splits)]  # fmt: skip
        yield from columns(rows, (0, 2))


def device_lines() -> Iterator[str]:
    """The presets, each figure with its source."""
    from workbench.cli.sizes import columns
    from workbench.devices.cost import presets

    for p in presets().values():
        yield f"{p.name}: {p.title}"
        if p.cards:
            yield f"  {' and '.join(p.cards)}"
        else:
            yield from columns([("figure", "value", "reached", "source"), *p.rows()], (1, 2))
        yield ""
