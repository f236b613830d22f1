"""`size`: how much code there is, room by room, beside the budget of the design.

Counted are lines that hold code: no blank lines, no comments, no docstrings. Explanation is free.
"""
from __future__ import annotations

import argparse
import ast
import io
import tokenize
from dataclasses import dataclass
from pathlib import Path

from workbench import paths

HELP = "count the code, room by room, against its budget"
BUDGET: dict[tuple[str, ...], int] = {
    ("tensors", "cgraph"): 1200, ("kernels", "devices", "execution"): 1700, ("scheduler",): 1000, ("moe",): 700,
    ("models",): 900, ("expertflow",): 1600, ("views", "widgets", "lessons", "cli"): 1000}
LONG_FILE = 400
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
           tokenize.ENDMARKER}


@dataclass(frozen=True)
class Count:
    """Code lines and tokens of one file."""

    file: Path
    lines: int
    tokens: int


def main(argv: list[str]) -> int:
    """Print the table; with --strict, fail where a budget is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m workbench size", description=HELP)
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a budget is exceeded")
    parser.add_argument("--files", action="store_true", help="list every file")
    args = parser.parse_args(argv)
    rooms = measure(paths.PACKAGE)
    print(table(rooms, args.files))
    outside = sum(count(file).lines for file in Path(__file__).parent.rglob("*.py"))
    print(f"besides, outside the package and its budget: tools/ {outside}")
    return 1 if args.strict and over(rooms) else 0


def measure(package: Path) -> dict[str, list[Count]]:
    """Room -> the counts of its files; the files beside the rooms make the room '.'."""
    rooms: dict[str, list[Count]] = {}
    for file in sorted(package.rglob("*.py")):
        inner = file.relative_to(package)
        if inner.parts[0] != "data":
            rooms.setdefault(inner.parts[0] if len(inner.parts) > 1 else ".", []).append(count(file))
    return rooms


def count(file: Path) -> Count:
    """Count one file."""
    source = file.read_text("utf-8")
    prose = docstring_lines(ast.parse(source))
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in SKIPPED or (token.type == tokenize.STRING and token.start[0] in prose):
            continue
        tokens += 1
        lines |= set(range(token.start[0], token.end[0] + 1))
    return Count(file, len([n for n in lines if source.splitlines()[n - 1].strip()]), tokens)


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines that docstrings (of modules, classes, functions) start on."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.body[0].lineno for node in ast.walk(tree)
            if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None}


def over(rooms: dict[str, list[Count]]) -> list[str]:
    """The groups of rooms that exceed their budget."""
    return [" + ".join(group) for group, budget in BUDGET.items() if _lines(rooms, group) > budget]


def table(rooms: dict[str, list[Count]], files: bool = False) -> str:
    """The counts as text."""
    known = [*BUDGET, *((room,) for room in rooms if not any(room in group for group in BUDGET))]
    out = [f"{'room':<14}{'lines':>7}{'budget':>8}{'tokens/line':>13}{'files':>7}  longest file"]
    for group in known:
        present = [room for room in group if room in rooms]
        for room in present:
            counts = rooms[room]
            longest = max(counts, key=lambda c: c.lines)
            lines, mark = sum(c.lines for c in counts), " (long)" if longest.lines > LONG_FILE else ""
            density = sum(c.tokens for c in counts) / max(lines, 1)
            budget = str(BUDGET[group]) if group in BUDGET and len(group) == 1 else ""
            out.append(f"{room:<14}{lines:>7}{budget:>8}{density:>13.1f}{len(counts):>7}  "
                       f"{longest.file.name} {longest.lines}{mark}")
            out += [f"    {c.file.name:<20}{c.lines:>6}" for c in counts if files]
        if len(group) > 1 and present:
            total = _lines(rooms, group)
            out.append(f"{'  together':<14}{total:>7}{BUDGET[group]:>8}{'  OVER' if total > BUDGET[group] else ''}")
    everything = [c for counts in rooms.values() for c in counts]
    lines = sum(c.lines for c in everything)
    out.append(f"{'all':<14}{lines:>7}{sum(BUDGET.values()):>8}"
               f"{sum(c.tokens for c in everything) / max(lines, 1):>13.1f}{len(everything):>7}")
    if over(rooms):
        out.append(f"over budget: {', '.join(over(rooms))}")
    return "\n".join(out)


def _lines(rooms: dict[str, list[Count]], group: tuple[str, ...]) -> int:
    return sum(c.lines for room in group for c in rooms.get(room, []))
