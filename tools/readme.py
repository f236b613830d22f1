"""`python -m tools.readme`: draw the picture of the README again, from a run of the shipped model."""

from __future__ import annotations

from tools.run import root
from workbench import models, views

PROMPT = "And God said unto Moses, def __init__(self, x=3): return x + 1"
LAYER = 5


def main() -> int:
    """Route the prompt, draw which experts each token used, and write docs/experts.png."""
    with models.load("tiny-mixtral-f16") as model, models.Session(model, recording=True) as session:
        session.decode(model.tokenizer.encode(PROMPT))
        routes = session.routes
        texts = [model.tokenizer.token_text(int(t)) for t in routes.tokens]
        tokens = [{"text": text, "experts": routes.experts[:, i].tolist(), "weights": routes.weights[:, i].tolist()}
                  for i, text in enumerate(texts)]  # fmt: skip
        steps = views.route_steps(tokens, LAYER, model.hparams.n_expert)
    picture = views.raster_picture(steps, "The experts that layer 5 of a small trained model chooses, token by token.")
    target = root() / "docs" / "experts.png"
    target.write_bytes(picture.png)
    print(f"{target.relative_to(root())}: {len(picture.png):,} bytes\n{picture.alt}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
