"""`run`: continue a text with a model whose experts have a budget on the card; then what moved."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from workbench.cli.sizes import bytes_text, columns, size
from workbench.errors import ParameterError, WorkbenchError

if TYPE_CHECKING:
    from workbench.expertflow.offload import Offloaded


FORECAST = ("predicted", "plec")
"""Policies that do nothing of their own without a forecast."""


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
    p.add_argument("--policy", default="lru", help="who is evicted: lru, lfu, lfu_in_cache, lru_frequency, static, predicted, plec")
    p.add_argument("--predictor", choices=("none", "gate"), default="none",
                   help="gate: the routers of the next layers on the present hidden state choose what to prefetch")  # fmt: skip
    p.add_argument("--window", type=int, metavar="LAYERS", help="how many layers the predictor looks ahead (default 1)")
    p.add_argument("--fetch", type=int, metavar="N", help="experts it names per token and layer (default: as many as are used)")
    p.add_argument("--scope", choices=("global", "layer"), default="global", help="whether layers share their slots (default global)")
    p.add_argument("--host-below", type=_host, default=0, metavar="TOKENS|auto",
                   help="compute missing experts with fewer tokens on the host instead of loading them (default 0: never)")  # fmt: skip
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
    import numpy as np

    from workbench.expertflow.forecast import Forecaster
    from workbench.expertflow.observe import Gates
    from workbench.expertflow.offload import expert_bytes, offload
    from workbench.models import Session, generate, load

    if args.predictor == "none" and (args.policy in FORECAST or args.window is not None or args.fetch is not None):
        asked = f"--policy {args.policy}" if args.policy in FORECAST else "--window" if args.window is not None else "--fetch"
        raise ParameterError(f"{asked} without a predictor", "--predictor gate", "nothing would be predicted, and nothing fetched ahead")
    window = 1 if args.window is None else args.window
    with load(args.model) as model:
        forecast = Forecaster.of_gates(Gates.of(model), window, args.fetch) if args.predictor == "gate" else None
        hot = np.zeros((len(model.hparams.moe_layers), model.hparams.n_expert)) if args.policy == "static" else None
        if hot is not None:
            with Session(model, recording=True) as sample:
                sample.decode(model.tokenizer.encode(args.prompt))
                for layer, ids in enumerate(sample.routes.experts):
                    hot[layer] = np.bincount(ids.ravel(), minlength=hot.shape[1])
        with offload(model, args.expert_budget, policy=args.policy, scope=args.scope, forecast=forecast, host_below=args.host_below,
                     backends=args.device, verify=args.verify, hot=hot) as run:  # fmt: skip
            text = generate(run.session, args.prompt, args.tokens)
            print(args.prompt, end="", flush=True)
            try:
                for piece in text:
                    print("".join(c if c.isprintable() or c in "\n\t" else "·" for c in piece.text), end="", flush=True)
            except KeyboardInterrupt:
                text.close()
            print(f"\n\n{_report(run, expert_bytes(model), len(text.tokens) + text.stats.n_prompt)}")
        if args.verify:
            whole = generate(model, args.prompt, len(text.tokens)).run()
            print(f"  verified: {'the same text' if whole == text.text else 'ANOTHER TEXT'} as with all experts in memory")
            return 0 if whole == text.text else 1
    return 0


def _report(run: Offloaded, total: int, n_tokens: int) -> str:
    c, pool = run.counters, run.engine.pool
    ahead = f"{bytes_text(c.speculative_bytes)}, {c.prefetched_hits:,} of them used, {c.late:,} late"
    if run.engine.staging:
        ahead = f"{bytes_text(c.speculative_bytes)} at the start, for the experts that the prompt uses most"
    rows = [
        ("expert slots", f"{sum(map(len, pool.classes.values()))}", f"{bytes_text(pool.nbytes)} of {bytes_text(total)}"),
        ("hits", f"{c.hits:,}", f"{c.hit_rate:.1%} of the experts wanted"),
        ("loads waited for", f"{c.loads:,}", bytes_text(c.demand_bytes)),
        ("prefetches", f"{c.prefetches:,}", ahead),
        ("dropped forecasts", f"{c.dropped:,}", ""), ("evictions", f"{c.evictions:,}", ""),
        ("computed on the host", f"{c.hosted:,}", ""), ("waves", f"{c.waves:,}", "where a batch needs more experts than there are slots"),
        ("waits for ids", f"{c.ids_waits:,}", f"over {n_tokens:,} tokens"),
    ]  # fmt: skip
    return "\n".join(columns(rows, right=(1,)))
