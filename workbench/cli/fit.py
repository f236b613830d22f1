"""`fit`: whether a model fits on a card, and how fast it could be at most. Reads the header only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.cli.sizes import bytes_text, columns, rate, size, speed_text
from workbench.errors import WorkbenchError, shown

if TYPE_CHECKING:
    from workbench.models.fitting import Fit

HELP = "whether a model fits on a card, and how fast it could be at most"


def main(argv: list[str]) -> int:
    """Print the verdict: 0 where the model fits, 1 where it does not, 2 and one message on stderr for a wrong request."""
    args = _parser().parse_args(argv)
    from workbench.models.fitting import fit

    try:
        found = fit(args.model, args.vram, args.ram, args.link, pinned=args.pinned, context=args.context, batch=args.batch,
                    ram_speed=args.ram_speed, vram_speed=args.vram_speed, kv=args.kv)  # fmt: skip
    except WorkbenchError as e:
        print(f"fit: {e}", file=sys.stderr)
        return 2
    from workbench.expertflow.verdict import verdict

    cache = verdict(found)
    if cache is not None:
        found.bounds += filter(None, (cache.bound, cache.hybrid))
    for line in report(found):
        print(line)
    if cache is not None:
        print(f"- {cache.sentence}")
    return 1 if found.fits == "no" else 0


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m workbench fit",
        description=HELP + ". Sizes: 24GiB or 24G (2**30), 24GB (10**9); speeds: 25GB/s.",
    )
    p.add_argument("model", metavar="MODEL", help="path of a GGUF file, or the name of a shipped model")
    p.add_argument("--vram", type=size, required=True, metavar="SIZE", help="memory of the card")
    p.add_argument("--ram", type=size, required=True, metavar="SIZE", help="memory of the host, free for the model")
    p.add_argument(
        "--link",
        type=rate,
        required=True,
        metavar="SPEED",
        help="host to card; PCIe 3.0 x16 about 12GB/s, 4.0 x16 about 25GB/s",
    )
    p.add_argument("--pinned", type=size, metavar="SIZE", help="what the host lets be pinned (default: half of --ram)")
    p.add_argument(
        "--ram-speed",
        type=rate,
        default=58e9,
        metavar="SPEED",
        help="memory of the host (default 58GB/s: two channels of DDR5-5200 at 70%%)",
    )
    p.add_argument("--vram-speed", type=rate, metavar="SPEED", help="memory of the card (default: counted as free)")
    p.add_argument("--batch", type=int, default=512, metavar="N", help="tokens in one graph (default 512)")
    p.add_argument("--context", type=int, default=4096, metavar="N", help="cells of the KV cache (default 4096)")
    p.add_argument("--kv", choices=("f16", "f32"), default="f16", help="type of the KV cache (default f16)")
    return p


def report(found: Fit) -> Iterator[str]:
    """The verdict as text, line by line."""
    yield found.verdict()
    yield ""
    yield from columns(
        [("bytes", "", "", "on"), *((n.what, f"{n.nbytes:,}", bytes_text(n.nbytes), n.where) for n in found.needs)],
        (1, 2),
    )
    yield ""
    rows: list[tuple[str, ...]] = [("question", "", "needed", "there is")]
    rows += [
        (c.question, "yes" if c.holds else "NO", bytes_text(c.needed), bytes_text(c.available)) for c in found.checks
    ]
    yield from columns(rows, (2, 3))
    for c in found.checks:
        if not c.holds and found.fits != "card":
            yield f"  {c.question}: {bytes_text(c.needed - c.available)} too many. Try: {c.advice}."
    if found.bounds:
        yield ""
        rows = [("no more tokens/s than", "", "bytes per token", "over", "")]
        rows += [
            (speed_text(b.tokens_per_second), b.way, bytes_text(b.nbytes), b.over, f"{b.bandwidth / 1e9:,.4g} GB/s")
            for b in found.bounds
        ]
        yield from columns(rows, (0, 2, 4))
    yield ""
    yield from (f"- {shown(note, 400)}" for note in found.notes)
