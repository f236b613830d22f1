"""What wrong routes cost the shipped models: `models/metrics/random_routes.json`, losses per token in nats with the chosen experts, with
random ones, and with none but shared ones.

`python -m models.tools.random_routes [OUT]`, a minute on one core. 256 tokens of each sample; random routes are drawn from three seeds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workbench import models, paths
from workbench.lessons.replaced_routes import losses_with_routes

MODELS = ("tiny-mixtral-f16", "tiny-deepseek-f16")
DOMAINS = ("english", "python", "c", "chinese", "maths", "numeric")


def main(args: list[str]) -> None:
    """Run both models over all samples and write the file."""
    out = Path(args[0]) if args else paths.models_dir() / "metrics" / "random_routes.json"
    found: dict[str, dict[str, dict[str, object]]] = {}
    for name in MODELS:
        with models.load(name) as model:
            for domain in DOMAINS:
                text = (paths.models_dir() / "samples" / f"{domain}.txt").read_text("utf-8")[:4000]
                tokens = model.tokenizer.encode(text)[:256]
                mean = {routes: round(float(losses_with_routes(model, tokens, routes).mean()), 3) for routes in ("chosen", "none")}
                drawn = [round(float(losses_with_routes(model, tokens, "random", seed).mean()), 3) for seed in range(3)]
                found.setdefault(name, {})[domain] = {**mean, "random": drawn}
    out.write_text(json.dumps({"made by": "models/tools/random_routes.py", "unit": "nats per token", **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
