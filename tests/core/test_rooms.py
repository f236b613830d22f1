"""The house: a room imports only from rooms above it, and `import workbench` loads nothing heavy."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2] / "workbench"
ORDER = ["errors", "paths", "trace", "tensors", "cgraph", "kernels", "devices", "execution", "scheduler", "moe", "models",
         "expertflow", "views", "widgets", "lessons", "cli"]  # fmt: skip
HEAVY = {"cupy", "matplotlib", "ipywidgets", "tokenizers", "gguf", "anywidget", "threadpoolctl", "graphviz"}


def rooms_imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "workbench" else [node.module]
        yield from (n.split(".")[1] for n in names if n.startswith("workbench."))


@pytest.mark.parametrize("path", sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.stem in ORDER), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downwards(path):
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for other in rooms_imported(path):
        assert other in ORDER, f"{other} has no place in the order of rooms"
        assert ORDER.index(other) <= ORDER.index(room), f"{room} imports from {other}, which is below it"


def module_level(tree):
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield from (n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))) if not isinstance(
            node, (ast.FunctionDef, ast.ClassDef)) else ()  # fmt: skip


@pytest.mark.parametrize("room", ["tensors", "cgraph", "kernels", "devices", "execution", "moe", "models", "expertflow"])
def test_heavy_packages_are_imported_where_they_are_used(room):
    for path in (ROOT / room).rglob("*.py"):
        for node in module_level(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not HEAVY & {n.split(".")[0] for n in names}, f"{path.name} imports {names} at import time"
