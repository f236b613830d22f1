"""`generate`: continue a text with a model, as it is made; then what it cost."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from workbench.errors import WorkbenchError, shown

if TYPE_CHECKING:
    from workbench.models import Session


def main(argv: list[str]) -> int:
    """Run the command; 0 when it ended well or was interrupted, 2 for a wrong request."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except WorkbenchError as e:
        print(f"\ngenerate: {e}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m workbench generate", description="Continue a text with a model.")
    p.add_argument("model", metavar="MODEL", help="path of a GGUF file, or the name of a shipped model (tiny-mixtral-f16, …)")
    p.add_argument("--prompt", required=True, help="the text to continue")
    p.add_argument("--tokens", type=int, default=64, metavar="N", help="at most so many tokens (default 64)")
    p.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default: always the most likely token")
    p.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K most likely tokens (default 0: all)")
    p.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw among the fewest that reach probability P (default 1: all)")
    p.add_argument("--seed", type=int, help="the same seed draws the same tokens")
    p.add_argument("--threads", type=int, default=1, metavar="N", help="threads for large products (default 1)")
    p.add_argument("--rounding", choices=("none", "ggml"), default="none", help="ggml: round activations as ggml's products do")
    p.add_argument("--ctx", type=int, metavar="N", help="tokens of context (default: what the model was trained for)")
    p.add_argument("--experts", action="store_true", help="print the experts of each token, layer by layer")
    return p


def _run(args: argparse.Namespace) -> int:
    from workbench.models import Sampler, Session, generate, load

    sampler = Sampler(args.temperature, args.top_k, args.top_p, args.seed)
    with (
        load(args.model) as model,
        Session(model, args.ctx, activation_rounding=args.rounding, n_threads=args.threads, recording=args.experts) as session,
    ):
        generation = generate(session, args.prompt, args.tokens, sampler)
        print(args.prompt, end="", flush=True)
        try:
            for piece in generation:
                print(_printable(piece.text), end="", flush=True)
        except KeyboardInterrupt:
            generation.close()
        print()
        if args.experts:
            _print_experts(session)
        print(f"\n[{generation.stats}]")
    return 0


def _printable(text: str) -> str:
    """Generated text as it may go to a terminal: line breaks and tabs as they are, other control characters escaped."""
    return "".join(c if c in "\n\t" else shown(c, 10) for c in text)


def _print_experts(session: Session) -> None:
    routes, tokenizer = session.routes, session.model.tokenizer
    print("\nexperts of each token, best first, in layers " + ", ".join(map(str, routes.layers)))
    for i in range(routes.n_tokens):
        chosen = " | ".join(" ".join(f"{e:>2}" for e in layer) for layer in routes.experts[:, i])
        print(f"{routes.positions[i]:>5}  {chosen}  {tokenizer.token_text(int(routes.tokens[i]))}")
