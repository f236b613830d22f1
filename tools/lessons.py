"""`lessons`: build the notebooks from their sources, and check that the two are in step.

A lesson is one text, `lessons/<language>/NN_name.py` (jupytext's percent format). Tags of its cells:

    setup                 the cell that every section needs (exactly one)
    predict, reveal       a question, and the comparison with what the code did
    exercise, tier-1..3   a stub that the learner fills in
    solution, wrong       what takes the stub's place in the twin, and plausible mistakes (in no notebook)
    check                 the cell that judges the exercise

`build` writes `notebooks/NN_name.ipynb` with outputs and its twin `notebooks/solutions/NN_name.ipynb`; another language
goes to `notebooks/<language>/`. `check` compares by content, never by file times.
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.run import root

HELP = "build the notebooks from lessons/, or check that they are in step"
MAX_LINES, MAX_WORDS, MAX_BYTES, MAX_MINUTES = 15, 150, 300_000, 50
WIDGET = "application/vnd.jupyter.widget-view+json"
SOURCE_ONLY = {"solution", "wrong"}
MAX_COLUMNS = 106  # of code: more would be cut off in a window of 1,280 pixels
MACHINE = re.compile(r"(/home/|/root/|/Users/|/tmp/|/var/folders/|[A-Z]:\\+Users\\|site-packages)")
METADATA = {"kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}  # fmt: skip


@dataclass
class Cell:
    """One cell of a lesson: its kind ("code" or "markdown"), text and tags."""

    kind: str
    source: str
    tags: tuple[str, ...] = ()
    outputs: list[Any] = field(default_factory=list)

    def has(self, tag: str) -> bool:
        """Whether it carries a tag."""
        return tag in self.tags


def main(argv: list[str]) -> int:
    """Build or check all lessons, or those named."""
    parser = argparse.ArgumentParser(prog="python -m workbench lessons", description=HELP)
    parser.add_argument("action", choices=["build", "check"])
    parser.add_argument("names", nargs="*", help="lessons by number or name (default: all)")
    args = parser.parse_args(argv)
    problems = []
    chosen = sources(args.names)
    if args.names and not chosen:
        print(f"no lesson {', '.join(args.names)}; there are {', '.join(s.stem for s in sources())}", file=sys.stderr)
        return 2
    for source in chosen:
        if args.action == "build":
            build(source)
        found = check(source)
        problems += found
        print(f"{source.stem}: {'; '.join(found) if found else 'in step'}")
    return 1 if problems else 0


def sources(names: list[str] | tuple[str, ...] = ()) -> list[Path]:
    """The sources of all lessons, or of those whose name begins with one of `names`."""
    found = sorted((root() / "lessons").glob("*/[0-9][0-9]_*.py"))
    return [f for f in found if not names or any(f.stem.startswith(n) for n in names)]


def notebook(source: Path, solutions: bool = False) -> Path:
    """Where the notebook of a source, or its twin with solutions, is stored."""
    language = source.parent.name
    folder = root() / "notebooks" / ("" if language == "en" else language) / ("solutions" if solutions else "")
    return folder / f"{source.stem}.ipynb"


# ---- the source

def read(source: Path) -> list[Cell]:
    """All cells of a source, those for authors included."""
    import jupytext
    book = jupytext.reads(source.read_text("utf-8"), fmt="py:percent")
    return [Cell(c.cell_type, c.source, tuple(c.metadata.get("tags", ()))) for c in book.cells]


def student(cells: list[Cell]) -> list[Cell]:
    """What the learner gets: stubs, and neither solutions nor mistakes."""
    return [c for c in cells if not SOURCE_ONLY & set(c.tags)]


def solved(cells: list[Cell], instead: str = "solution", which: int = 0) -> list[Cell]:
    """The twin: each stub replaced by its solution, or (`instead="wrong"`) by its `which`-th mistake, as far as it has one."""
    out: list[Cell] = []
    for i, cell in enumerate(cells):
        if SOURCE_ONLY & set(cell.tags):
            continue
        choices = list(_followers(cells, i, instead)) if cell.has("exercise") else []
        out.append(choices[min(which, len(choices) - 1)] if choices else cell)
    return out


def mistakes(cells: list[Cell]) -> list[tuple[int, int]]:
    """(index among the exercises, number of wrong answers in the source) for each exercise."""
    exercises = [i for i, c in enumerate(cells) if c.has("exercise")]
    return [(n, len(list(_followers(cells, i, "wrong")))) for n, i in enumerate(exercises)]


def _followers(cells: list[Cell], i: int, tag: str) -> Iterator[Cell]:
    for cell in cells[i + 1 :]:
        if cell.has("exercise"):
            return
        if cell.has(tag):
            yield cell


def sections(cells: list[Cell]) -> dict[str, list[Cell]]:
    """Heading of each section -> its code cells, without the set-up."""
    out: dict[str, list[Cell]] = {}
    name = ""
    for cell in cells:
        if cell.kind == "markdown" and (heading := re.search(r"^## (.+)$", cell.source, re.M)):
            name = heading[1]
        elif cell.kind == "code" and not cell.has("setup") and name:
            out.setdefault(name, []).append(cell)
    return out


# ---- running cells without a kernel

def run(cells: list[Cell], names: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[tuple[Cell, Any, str]]]:
    """Run code cells in this process, in order; returns the names they made and (cell, value of its last line, printed text)."""
    space: dict[str, Any] = {"__name__": "__main__"} if names is None else names
    results = []
    for cell in cells:
        if cell.kind != "code":
            continue
        tree = ast.parse(cell.source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, "<cell>", "exec"), space)
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space) if isinstance(last, ast.Expr) else None
        results.append((cell, value, printed.getvalue()))
    return space, results


# ---- building

def build(source: Path) -> None:
    """Write the notebook and its twin, executed, without what only the builder's machine would know."""
    cells = read(source)
    for solutions in (False, True):
        target = notebook(source, solutions)
        target.parent.mkdir(parents=True, exist_ok=True)
        book = execute(as_notebook(solved(cells) if solutions else student(cells), solutions))
        target.write_text(json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")


def as_notebook(cells: list[Cell], solutions: bool = False) -> dict[str, Any]:
    """The notebook without outputs. A cell's id is a digest of its text, so it stays when others are added."""
    seen: dict[str, int] = {}
    out = []
    for cell in cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:10]
        seen[digest] = seen.get(digest, 0) + 1
        metadata = {"tags": list(cell.tags)} if cell.tags else {}
        item: dict[str, Any] = {"cell_type": cell.kind, "id": digest + "-" * (seen[digest] > 1) + str(seen[digest]) * (seen[digest] > 1),
                                "metadata": metadata, "source": cell.source.splitlines(keepends=True)}  # fmt: skip
        out.append(item | ({"execution_count": None, "outputs": []} if cell.kind == "code" else {}))
    return {"cells": out, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def execute(book: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook in a kernel of this Python and store what it shows, less the handles of live widgets."""
    import nbformat
    from nbclient import NotebookClient
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root()), os.environ.get("PYTHONPATH")]))
    node = nbformat.reads(json.dumps(book), as_version=4)
    NotebookClient(node, timeout=120, kernel_name="python3", store_widget_state=False).execute()
    for n, cell in enumerate((c for c in node.cells if c.cell_type == "code"), 1):
        cell.execution_count, cell.metadata = n, {k: v for k, v in cell.metadata.items() if k == "tags"}
        for output in cell.outputs:
            output.get("data", {}).pop(WIDGET, None)  # without a kernel it would hide the stored text behind an error
            if "execution_count" in output:
                output.execution_count = n
    done = json.loads(nbformat.writes(node))
    return {**done, "metadata": METADATA}


# ---- checking

def check(source: Path) -> list[str]:
    """Every problem of a lesson: notebooks out of step with the source, or against the rules for lessons."""
    cells = read(source)
    problems = lint_source(cells)
    for solutions in (False, True):
        file = notebook(source, solutions)
        if not file.is_file():
            problems.append(f"{file.name} is missing: build it")
            continue
        book = json.loads(file.read_text("utf-8"))
        where = "twin: " if solutions else ""
        wanted = as_notebook(solved(cells) if solutions else student(cells), solutions)
        if [_bare(c) for c in book["cells"]] != [_bare(c) for c in wanted["cells"]]:
            problems.append(f"{where}not in step with {source.name}: build it")
        problems += [where + p for p in lint_notebook(book, file.stat().st_size)]
    return problems


def _bare(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["cell_type"], cell["id"], "".join(cell["source"]), tuple(cell["metadata"].get("tags", ()))


def lint_source(cells: list[Cell]) -> list[str]:
    """Rules for the text: short cells, short prose, minutes, pairs of predict and reveal, complete exercises."""
    problems = []
    for n, cell in enumerate(cells):
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if cell.kind == "code" and len(lines) >= MAX_LINES:
            problems.append(f"cell {n} has {len(lines)} lines, fewer than {MAX_LINES} wanted")
        if cell.kind not in ("code", "markdown"):
            problems.append(f"cell {n} is {cell.kind}, neither code nor prose")
        if cell.kind == "code" and (wide := max(map(len, lines), default=0)) > MAX_COLUMNS:
            problems.append(f"cell {n} has a line of {wide} characters, at most {MAX_COLUMNS} wanted")
        if _of_a_machine(cell.source):
            problems.append(f"cell {n} names a path of one machine")
        words = len(re.findall(r"\w[\w'’.-]*", re.sub(r"^\|.*$", "", cell.source, flags=re.M))) if cell.kind == "markdown" else 0
        if words >= MAX_WORDS:
            problems.append(f"cell {n} has {words} words, fewer than {MAX_WORDS} wanted")
        alts = re.findall(r"!\[(.*?)\]\(", cell.source) if cell.kind == "markdown" else []
        alts += _alts(cell.source) if cell.kind == "markdown" else []
        problems += [f"cell {n} has an image without alt text" for alt in alts if not alt.strip()]
        if cell.kind == "code" and cell.source.rstrip().endswith(";"):
            problems.append(f"cell {n} ends with a semicolon, which hides nothing under nbval")
    problems += [f"{a} and cell {a + 1} are both prose" for a in range(len(cells) - 1)
                 if cells[a].kind == cells[a + 1].kind == "markdown" and not cells[a + 1].source.startswith("#")]  # fmt: skip
    if sum(c.has("setup") for c in cells) != 1:
        problems.append("exactly one cell must be tagged setup")
    names = {tag: [_first_word(c.source, tag) for c in cells if c.has(tag)] for tag in ("predict", "reveal")}
    if names["predict"] != names["reveal"] or len(names["predict"]) < 3:
        problems.append(f"at least three predict cells, each followed by its reveal: {names['predict']} / {names['reveal']}")
    minutes = [int(m) for c in cells if c.kind == "markdown" for m in re.findall(r"^## .* · (\d+) min$", c.source, re.M)]
    headings = [h for c in cells if c.kind == "markdown" for h in re.findall(r"^## (.+)$", c.source, re.M)]
    total = re.search(r"\*\*(\d+) minutes\*\*", cells[0].source)
    if len(minutes) != len(headings) or not total or int(total[1]) != sum(minutes) or sum(minutes) > MAX_MINUTES:
        problems.append(f"each section states its minutes and the first cell their sum ({sum(minutes)}, at most {MAX_MINUTES})")
    return problems + _lint_exercises(cells)


def _lint_exercises(cells: list[Cell]) -> list[str]:
    problems = []
    tiers = {t for c in cells if c.has("exercise") for t in c.tags if t.startswith("tier-")}
    if tiers != {"tier-1", "tier-2", "tier-3"}:
        problems.append(f"exercises of the tiers 1 to 3 wanted, found {sorted(tiers)}")
    for i, cell in enumerate(cells):
        if cell.has("exercise"):
            lacking = [tag for tag in ("solution", "wrong", "check") if not list(_followers(cells, i, tag))]
            problems += [f"the exercise in cell {i} has no {tag} cell" for tag in lacking]
            stub = ast.parse(cell.source)
            returns = any(isinstance(n, ast.Return) for n in ast.walk(stub))
            if returns or not re.search(r"raise NotImplementedError|= \.\.\.", cell.source):
                problems.append(f"the exercise in cell {i} is no open stub: it returns, or raises no NotImplementedError")
            if any(_code(cell) == _code(c) for tag in ("solution", "wrong") for c in _followers(cells, i, tag)):
                problems.append(f"the exercise in cell {i} is the same as one of its answers")
    return problems


def _code(cell: Cell) -> str:
    return ast.dump(ast.parse(cell.source))


def _first_word(source: str, call: str) -> str:
    found = re.search(rf"\.{call}\(\s*['\"]([\w-]+)['\"]", source)
    return found[1] if found else "?"


def _alts(page: str) -> list[str]:
    """The alt text of each `<img>` of a page, "" where there is none."""
    found = [re.search(r"""\balt\s*=\s*("[^"]*"|'[^']*')""", tag) for tag in re.findall(r"<img\b[^>]*", page, re.I)]
    return [alt[1][1:-1] if alt else "" for alt in found]


def _of_a_machine(text: str) -> bool:
    """Whether it names a folder of some machine, or of this one."""
    return bool(MACHINE.search(text)) or any(str(place) in text for place in (root(), Path.home()) if len(place.parts) > 1)


def lint_notebook(book: dict[str, Any], size: int) -> list[str]:
    """Rules for the stored file: size, counts, alt text, no errors, no widget handles, nothing of the builder's machine."""
    problems = [] if size <= MAX_BYTES else [f"{size:,} bytes, at most {MAX_BYTES:,} wanted"]
    code = [c for c in book["cells"] if c["cell_type"] == "code"]
    if [c["execution_count"] for c in code] != list(range(1, len(code) + 1)):
        problems.append("execution counts are not 1..n")
    widgets = book["metadata"].get("widgets")
    if widgets is not None and "state" not in widgets.get("application/vnd.jupyter.widget-state+json", {}):
        problems.append("metadata.widgets has no state")
    for n, cell in enumerate(code, 1):
        if re.search(r"^\w+\.(predict|reveal|check)\(|^(views|widgets)\.\w+\(", "".join(cell["source"]), re.M) and not cell["outputs"]:
            problems.append(f"[{n}] has lost its output")
        for output in cell["outputs"]:
            data = output.get("data", {})
            page = "".join(data.get("text/html", []))
            shown = "".join([*output.get("text", []), page, *data.get("text/plain", [])])
            text = re.sub(r'src="data:image/png;base64,[^"]*"', "", shown)
            if output["output_type"] == "error" or output.get("name") == "stderr" or "Traceback (most recent call last)" in text:
                problems.append(f"[{n}] shows an error or a warning")
            if WIDGET in data or (data and not {"text/html", "text/plain", "image/png"} >= set(data)):
                problems.append(f"[{n}] stores {sorted(data)}")
            if ("image/png" in data and not _alts(page)) or any(len(alt.strip()) < 10 for alt in _alts(page)):
                problems.append(f"[{n}] has a picture without alt text")
            if re.search(r"<(svg|script|iframe|object|embed)\b", text, re.I):
                problems.append(f"[{n}] stores what a repository site removes: a script, a frame or inline SVG")
            if _of_a_machine(text) or re.search(r" at 0x[0-9a-f]{6}", text, re.I):
                problems.append(f"[{n}] shows a path or an address of the builder's machine")
    return problems


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
