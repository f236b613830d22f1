"""CuPy has every function, method and keyword that kernels use. It needs the package, not a GPU: nothing is computed.

What runs on a GPU is judged on one; this test keeps kernels runnable there on machines that have none.
"""

import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

import workbench.kernels
from workbench.tensors import OPS

FILES = [p for p in Path(workbench.kernels.__file__).parent.glob("*.py") if not p.stem.startswith("reference")]
PLAIN = {"copy", "items", "get", "index"}  # methods of Python's own types that arrays have too


@pytest.fixture(scope="module")
def cupy():
    return pytest.importorskip("cupy", reason="CuPy is not installed")


def uses() -> set[tuple[str, str, str]]:
    """(owner, name, keyword or "") of each `xp.name(…, keyword=…)` and `array.name(…, keyword=…)` in the kernels."""
    found = {("xp", s.kernel.ufunc, "") for s in OPS.values() if s.kernel and s.kernel.ufunc}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and _is_xp(node.value):
                found.add(("xp", node.attr, ""))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, owner = node.func.attr, "xp" if _is_xp(node.func.value) else "ndarray"
                if owner == "xp" or (name in dir(np.ndarray) and name not in PLAIN and not _is_numpy(node.func.value)):
                    found |= {(owner, name, k) for k in ["", *(k.arg for k in node.keywords if k.arg)]}
    return found


def _is_xp(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "xp"


def _is_numpy(node: ast.AST) -> bool:
    """`np.…` itself: host code that no GPU runs."""
    return isinstance(node, ast.Name) and node.id == "np"


def parameters(function) -> set[str]:
    """Names of the parameters; for compiled functions from the first line of the docstring."""
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:
        first = (function.__doc__ or "").strip().splitlines()[0]
        return set(re.findall(r"(\w+)(?==|,|\))", first[first.index("(") :]))


def test_kernels_are_found():
    found = uses()
    assert {("xp", "add", ""), ("xp", "argsort", "kind"), ("ndarray", "sum", "keepdims")} <= found and len(found) > 40


def test_cupy_has_what_kernels_use(cupy):
    missing = []
    for owner, name, keyword in sorted(uses()):
        function = getattr(cupy if owner == "xp" else cupy.ndarray, name, None)
        if function is None:
            missing.append(f"{owner}.{name}")
        elif keyword and keyword not in parameters(function):
            missing.append(f"{owner}.{name}({keyword}=…)")
    assert not missing
