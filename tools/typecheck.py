"""`types`: mypy over the package; its settings are in pyproject.toml."""
from tools.run import python


def main(argv: list[str]) -> int:
    """Check the package and the tools, or what the arguments say."""
    return python("-m", "mypy", *(argv or ["workbench", "tools"]))
