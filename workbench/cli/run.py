"""`run`: continue a text with a model whose experts have a budget on the card; then what moved."""

from __future__ import annotations

import argparse
import sys
from math import isnan
from typing import TYPE_CHECKING

from workbench.cli.sizes import bytes_text, columns, size
from workbench.errors import ParameterError, WorkbenchError

if TYPE_CHECKING:
    from workbench.expertflow.offload import Offloaded
    from workbench.models import Model


def main(argv: list[str]) -> int:
    """Run the command; 0 when it ended well or was interrupted while it wrote, 1 where --verify found a difference, 2 for a wrong request,
    130 when interrupted before or after that."""
    args = parser().parse_args(argv)
    try:
        return _run(args)
    except WorkbenchError as e:
        print(f"\nrun: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog="python -m workbench run",
        description="Continue a text with a mixture of experts that does not fit on the (simulated) card: experts move through a pool.",
        epilog="Weights really move and outputs are exact; the time of the card is virtual, and says nothing about larger models: "
               "`replay` and lesson 20 put published sizes beside recorded routes.")  # fmt: skip
    p.add_argument("model", metavar="MODEL", help="path of a GGUF file, or the name of a shipped model (tiny-mixtral-f16, …)")
    p.add_argument("--prompt", default="And God said unto Moses, Go in unto", help="the text to continue")
    p.add_argument("--tokens", type=int, default=32, metavar="N", help="at most so many tokens (default 32)")
    p.add_argument("--expert-budget", type=_budget, default="50%", metavar="BYTES|PERCENT",
                   help="memory for experts on the card: 3MiB, or 25%% of all experts (default 50%%)")  # fmt: skip
    p.add_argument("--expert-storage", metavar="TYPE",
                   help="convert the experts first: f16, q8_0, q4_0; int8 is q8_0: integers in blocks of 32, each with an f16 scale")
    p.add_argument("--policy", help="who is evicted: lru, lfu, lfu_in_cache, lru_frequency, static, predicted, plec "
                                    "(default lru, with a predictor predicted)")  # fmt: skip
    p.add_argument("--predictor", default="none", metavar="NAME[,NAME…]",
                   help="what to prefetch. gate: the routers of the next layers on the present hidden state; linear, non-linear, "
                        "linear-on-scores: layers fitted to replace them; frequency, previous-token, previous-layer: from routes. "
                        "Several: each where those before it are silent, as in gate,frequency")  # fmt: skip
    p.add_argument("--fit", metavar="TRACE|TEXT", help="what predictors and the static set learn from: a recorded trace, by name or file, "
                                                       "or a text file (default: the prompt)")  # fmt: skip
    p.add_argument("--window", type=int, metavar="LAYERS", help="how many layers the predictor looks ahead (default 1)")
    p.add_argument("--fetch", type=int, metavar="N", help="experts it names per token and layer (default: as many as are used)")
    p.add_argument("--prefetches", type=int, metavar="N", help="at most so many loads after each layer (default 4)")
    p.add_argument("--scope", choices=("global", "layer"), default="global", help="whether layers share their slots (default global)")
    p.add_argument("--host-below", type=_host, default=0, metavar="TOKENS|auto",
                   help="compute missing experts with fewer tokens on the host instead of loading them (default 0: never); auto: "
                        "where that is quicker, as for single tokens: then only a predictor or --policy static fills slots")  # fmt: skip
    p.add_argument("--granularity", default="expert", metavar="expert|matrix",
                   help="what a product waits for: all of an expert, or its own matrix (default expert)")  # fmt: skip
    p.add_argument("--host-slots", type=int, metavar="N",
                   help="experts that the host's memory holds, those wanted last (default all); others come from a disk first")  # fmt: skip
    p.add_argument("--no-mmap", action="store_true", help="copy the experts into pinned memory, from which prefetches really overlap")
    p.add_argument("--device", default="rtx3090-pcie4", help="preset of the card (default rtx3090-pcie4)")
    p.add_argument("--verify", action="store_true",
                   help="compare slots that are read with the file, and the text with that of a run without a budget")
    return p


def _budget(text: str) -> str | int:
    return text if text.strip().endswith("%") else size(text)


def _host(text: str) -> str | int:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: a number of tokens, or auto")


def _run(args: argparse.Namespace) -> int:
    from workbench.expertflow.observe import Gates, record
    from workbench.expertflow.offload import offload
    from workbench.expertflow.warm_up import forecaster, learns, warm_up
    from workbench.models import generate, load

    policy = _policy(args)
    with load(args.model) as model:
        gates, prompt, seen, hot, forecast = Gates.of(model), model.tokenizer.encode(args.prompt), None, None, None
        if args.fit:
            print(f"running {model.name} over the tokens of {args.fit} …", file=sys.stderr)
        if policy == "static" or args.predictor != "none" and learns(args.predictor):
            seen = warm_up(model, args.fit) if args.fit else record(model, [prompt])
            hot = seen.routes.counts() if policy == "static" else None
        if args.predictor != "none":
            forecast = forecaster(args.predictor, gates, 1 if args.window is None else args.window, args.fetch, seen)
        with offload(model, args.expert_budget, policy=policy, scope=args.scope, forecast=forecast, storage=args.expert_storage,
                     mmap=not args.no_mmap, host_below=args.host_below, prefetches=4 if args.prefetches is None else args.prefetches,
                     granularity=args.granularity, backends=args.device, verify=args.verify, hot=hot,
                     host_slots=args.host_slots) as run:  # fmt: skip
            text = generate(run.session, args.prompt, args.tokens)
            print(args.prompt, end="", flush=True)
            try:
                for piece in text:
                    print("".join(c if c.isprintable() or c in "\n\t" else "·" for c in piece.text), end="", flush=True)
            except KeyboardInterrupt:
                text.close()
            rows = _report(run, len(text.tokens) + text.stats.n_prompt)
            if args.expert_storage:
                rows.append(_storage_row(f"stored as {args.expert_storage}", model, run.host, prompt))
            if seen is not None:
                rows.append(("fitted on", f"{seen.n_tokens:,}", f"tokens of {args.fit or 'the prompt'}"))
            print("\n\n" + "\n".join(columns(rows, right=(1,))))
            if args.verify:
                whole = generate(run.host, args.prompt, len(text.tokens)).run()
                print(f"  verified: {'the same text' if whole == text.text else 'ANOTHER TEXT'} as with all experts in memory")
                return 0 if whole == text.text else 1
    return 0


def _policy(args: argparse.Namespace) -> str:
    """The policy asked for, or the one that goes with the predictor. Raises ParameterError where an option would have no effect."""
    from workbench.expertflow.cache import POLICIES, policy_named
    from workbench.expertflow.warm_up import learns

    policy = args.policy or ("lru" if args.predictor == "none" else "predicted")
    forecasts = [name for name, p in POLICIES.items() if p.needs == "predictions"]
    if policy_named(policy).needs != "predictions" and args.predictor != "none":
        raise ParameterError(f"--policy {policy} with a predictor", f"--policy {' or '.join(forecasts)}", f"{policy} fetches nothing ahead")
    given = {f"--policy {policy}": policy in forecasts, "--window": args.window, "--fetch": args.fetch, "--prefetches": args.prefetches}
    without = next((name for name, value in given.items() if value not in (None, False)), None)
    if args.predictor == "none" and without:
        raise ParameterError(f"{without} without a predictor", "--predictor gate", "nothing would be predicted, and nothing fetched ahead")
    learning = args.predictor != "none" and learns(args.predictor)
    if args.fit and policy != "static" and not learning:
        raise ParameterError("--fit with nothing to fit", "--policy static, or a predictor other than gate", "the others learn nothing")
    if args.host_slots is not None and args.no_mmap:
        raise ParameterError("--host-slots with --no-mmap", "one of them", "pinned memory holds all experts")
    return policy


def _report(run: Offloaded, n_tokens: int) -> list[tuple[str, str, str]]:
    from workbench.expertflow.offload import expert_bytes

    c, pool, forecast = run.counters, run.engine.pool, run.engine.forecast
    rows = [
        ("expert slots", f"{sum(map(len, pool.classes.values()))}", f"{bytes_text(pool.nbytes)} of {bytes_text(expert_bytes(run.host))}"),
        ("hits", f"{c.hits:,}", f"{c.hit_rate:.1%} of the experts wanted"),
        ("loads waited for", f"{c.loads:,}", bytes_text(c.demand_bytes)),
    ]  # fmt: skip
    if run.engine.staging:
        rows.append(("loads at the start", "", f"{bytes_text(c.speculative_bytes)}, the experts that are used most"))
    if forecast is not None:
        rows += [
            ("foretold", f"{forecast.foretold:,}", f"{_share(forecast.recall)} of the experts wanted where there was a forecast (recall)"),
            ("prefetches", f"{c.prefetches:,}", bytes_text(c.speculative_bytes)),
            ("used of them", f"{c.prefetched_hits:,}",
             f"{_share(c.precision)} (precision); {c.late:,} late, still on their way when wanted"),
            ("dropped forecasts", f"{c.dropped:,}", "experts for which no slot could be spared"),
        ]  # fmt: skip
    if pool.disk is not None:
        rows.append(("read from disk", f"{pool.disk.reads:,}", f"experts; the host's memory holds {pool.disk.slots:,} at a time"))
    rows += [
        ("evictions", f"{c.evictions:,}", ""), ("computed on the host", f"{c.hosted:,}", ""),
        ("waves", f"{c.waves:,}", "where a batch needs more experts than there are slots, or some are computed on the host"),
        ("waits for ids", f"{c.ids_waits:,}", f"over {n_tokens:,} tokens"),
        ("memory", "", ", ".join(f"{part} {bytes_text(n)}" for part, n in run.memory().items() if n)),
    ]  # fmt: skip
    return rows


def _share(x: float) -> str:
    return "-" if isnan(x) else f"{x:.1%}"


def _storage_row(title: str, model: Model, stored: Model, tokens: list[int]) -> tuple[str, str, str]:
    from workbench.expertflow.offload import expert_bytes
    from workbench.expertflow.precision import logit_error, storage_errors

    largest = max(e.alone for e in storage_errors(model, stored, tokens))
    return (title, f"{expert_bytes(stored) / expert_bytes(model):.0%}", "of the bytes in the file; on the prompt, the largest error of a "
            f"layer's experts is {largest:.2%}, and that of the logits {logit_error(model, stored, tokens):.2%}")  # fmt: skip
