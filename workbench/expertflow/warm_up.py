"""What a run learns from before it starts: its own prompt, a text, or a recorded trace; and forecasters by name, fitted on that."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import FileFormatError, ParameterError, shown, shown_path
from workbench.expertflow import sources
from workbench.expertflow.forecast import Forecaster
from workbench.expertflow.network import unfitted
from workbench.expertflow.observe import Gates, Seen, record
from workbench.expertflow.predictors import OrElse, Predictor
from workbench.models import Model

PIECE, PIECES = 256, 32
"""A text is read in pieces of so many tokens, and at most so many of them."""
AHEAD = ("gate", "linear", "non-linear", "linear-on-scores")
RUNNING = (*AHEAD, "frequency", "previous-token", "previous-layer")
"""Predictors that have what they read while a model runs; AHEAD: those that there is one of for each number of layers ahead."""
WHY_NOT = {"oracle": "it reads the router's answer, which nobody has before it speaks: `replay --predictor oracle` shows that bound",
           "network": "it reads the tokens of the text, which nobody has between two layers: `replay --predictor network` judges it"}


def warm_up(model: Model, source: str | Path) -> Seen:
    """Run a recorded trace's tokens, or those of a text file, through the model, and keep what predictors are fitted on.

    Of a text, the first PIECES pieces of PIECE tokens. Raises FileFormatError for what is neither, ModelError for another model's trace.
    """
    word, path = str(source).partition(":")[0], Path(source)
    if word in (*sources.SHIPPED, *sources.SYNTHETIC) or path.suffix in (".npz", ".npy", ".jsonl", ".json"):
        return record(model, sources.load(source).trace)
    try:
        tokens = model.tokenizer.encode(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        why = shown(getattr(e, "strerror", e))
        raise FileFormatError(f"{shown_path(path)} cannot be read: {why}", "a text in UTF-8, or a recorded trace of this model",
                              f"by file or by name: {', '.join(sources.SHIPPED)}") from None  # fmt: skip
    piece = min(PIECE, model.hparams.n_ctx_train)
    return record(model, [tokens[i : i + piece] for i in range(0, min(len(tokens), piece * PIECES), piece)])


def learns(names: str) -> bool:
    """Whether any of these predictors has to be fitted. Raises ParameterError for one that no running engine can ask."""
    for name in _chain(names):
        if name not in RUNNING:
            raise ParameterError(f"predictor {shown(name)!r}", f"one of {', '.join(RUNNING)}, or several as in gate,frequency",
                                 WHY_NOT.get(name, "the window says how many layers ahead"))  # fmt: skip
    return any(name != "gate" for name in _chain(names))


def _chain(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def forecaster(names: str, gates: Gates, window: int = 1, fetch: int | None = None, seen: Seen | None = None) -> Forecaster:
    """A forecaster by the name of its predictor, or several, as in "gate,frequency": each speaks where those before it do not.

    window: layers to look ahead. seen: what predictors are fitted on; "gate" needs none. Raises ParameterError.
    """
    if window < 1:
        raise ParameterError(f"a window of {window} layers", "1 or more")
    if learns(names) and seen is None:
        raise ParameterError(f"predictor {names} without anything to learn from", "a run to fit it on: warm_up(model, source)")
    if window > 4 and (of_state := [name for name in _chain(names) if name in AHEAD]):
        raise ParameterError(f"a window of {window} layers with {of_state[0]}", "1 to 4 layers")
    once: dict[str, Predictor] = {}

    def made(name: str, distance: int) -> Predictor:
        key = f"{name}-{distance}" if name in AHEAD else name
        if key not in once:
            once[key] = unfitted(key) if seen is None else unfitted(key).fit(seen)
        return once[key]

    def joined(distance: int) -> Predictor:
        last, *before = (made(name, distance) for name in reversed(_chain(names)))
        for p in before:
            last = OrElse(p, last)
        return last

    return Forecaster(gates, [joined(distance) for distance in range(1, window + 1)], fetch)
