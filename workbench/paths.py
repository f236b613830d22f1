"""Where the models and the notebooks are: in a checkout beside `workbench/`, in an installed wheel inside it.

Standard library only, so that it can be asked before anything is installed.
"""
from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """The root of the checkout this package runs from, or None when it runs from an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "locks").is_dir() else None


def models_dir() -> Path:
    """The folder with the trained models (`*.gguf`), `tokenizer.json` and the model card."""
    return _find("models", "tokenizer.json", "the trained models")


def notebooks_dir() -> Path:
    """The folder with the lessons (`NN_name.ipynb`), as shipped; learners work on copies of them."""
    return _find("notebooks", "*.ipynb", "the lessons")


def _find(name: str, proof: str, what: str) -> Path:
    root = checkout()
    places = [root / name] if root else [PACKAGE / "data" / name]
    for place in places:
        if any(place.glob(proof)):
            return place
    cause = ("This looks like an incomplete checkout: `git status` shows what is missing, `git checkout -- "
             f"{name}` brings it back." if root else
             "This installation does not hold the data: install the wheel again, or work in a checkout.")
    raise FileNotFoundError(f"Cannot find {what}: expected {proof} in {places[0]}, found none. {cause}")
