"""`lint`: ruff over code, tests and notebooks; the rules are in pyproject.toml."""
from tools.run import TARGETS, python, root


def main(argv: list[str]) -> int:
    """Check everything, with ruff's own options (--fix, --statistics, --version)."""
    return python("-m", "ruff", "check", *(name for name in TARGETS if (root() / name).is_dir()), *argv)
