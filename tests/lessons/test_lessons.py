"""The lessons themselves: in step with their sources, every section on its own, exercises that tell right from wrong.

And the linter: each rule is broken once, and must say so.
"""

import json
import re
import tomllib

import numpy as np
import pytest

from tools import lessons as tool
from workbench import paths
from workbench.lessons import open_lesson

SOURCES = tool.sources()
MISCONCEPTIONS = {"the scheduler picks experts", "a hit costs nothing", "more threads, more speed", "active means resident"}
each_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda s: f"{s.parent.name}-{s.stem}")


def content(source):
    return tomllib.loads((paths.PACKAGE / "lessons" / source.parent.name / f"{source.stem[:2]}.toml").read_text("utf-8"))


def setup(cells):
    return [c for c in cells if c.has("setup")]


@each_lesson
def test_notebooks_are_in_step_and_keep_the_rules(source):
    assert tool.check(source) == []


@each_lesson
def test_every_section_runs_after_the_setup_alone(source):
    cells = tool.student(tool.read(source))
    for heading, section in tool.sections(cells).items():
        space, _ = tool.run(setup(cells))
        try:
            tool.run(section, space)
        except Exception as error:
            raise AssertionError(f"section {heading!r} needs more than the set-up: {error!r}") from error


@each_lesson
def test_stub_is_open_solution_passes_and_every_plausible_mistake_fails(source):
    cells = tool.read(source)
    exercises = [section for section in tool.sections(cells).values() if any(c.has("exercise") for c in section)]
    assert exercises
    verdicts = lambda some: [value for cell, value, _ in run_exercises(cells, some) if cell.has("check")]  # noqa: E731
    assert [v.tone for v in verdicts(tool.student(cells))] == ["open"] * len(tool.mistakes(cells))
    assert [v.tone for v in verdicts(tool.solved(cells))] == ["right"] * len(tool.mistakes(cells))
    for which in range(max(n for _, n in tool.mistakes(cells))):
        for verdict in verdicts(tool.solved(cells, "wrong", which)):
            assert verdict.tone == "wrong" and any(label in ("expected", "error") for label, _ in verdict.lines)


def run_exercises(cells, version):
    space, _ = tool.run(setup(cells))
    wanted = [cell for section in tool.sections(version).values() if any(c.has("check") for c in section) for cell in section]
    return tool.run(wanted, space)[1]


@each_lesson
def test_predictions_have_one_right_option_and_reasons_for_the_others(source):
    cells = tool.student(tool.read(source))
    space, results = tool.run(cells)
    lesson, items = space["lesson"], content(source)["predict"]
    revealed = {tool._first_word(cell.source, "reveal"): cell for cell, _, _ in results if cell.has("reveal")}
    assert set(revealed) == set(items)
    for name, cell in revealed.items():
        options = items[name].get("options", [])
        passed = []
        for key, _ in zip("abcdefgh", options):
            lesson.predict(name, key)
            card = tool.run([cell], space)[1][0][1]
            passed.append(card.passed)
            if not card.passed:
                assert len(card.lines) >= 3, f"{name} {key}: no reason given"
        assert passed.count(True) == (1 if options else 0), f"{name}: {passed}"
        assert all(o["why"] or ok for o, ok in zip(options, passed))


def test_named_misconceptions_are_wrong_options():
    assert {o["misconception"] for s in SOURCES for p in content(s)["predict"].values() for o in p.get("options", [])
            if "misconception" in o} >= MISCONCEPTIONS


@each_lesson
def test_most_cells_are_compared_strictly(source):
    code = [c for c in tool.student(tool.read(source)) if c.kind == "code"]
    ignored = [c for c in code if any(t.startswith("nbval") for t in c.tags)]
    assert len(ignored) <= 0.1 * len(code) and all(c.has("device") for c in ignored)


# ---- lesson 00: its numbers are llama.cpp's, and far enough from any edge to print the same everywhere

def test_shipped_numbers_are_those_of_the_oracle():
    shipped = open_lesson("00").state.llama_cpp
    data = np.load(paths.PACKAGE.parent / "tests/data/oracle/tiny-mixtral-f16.dequant-f32.npz")
    graph = json.loads((paths.PACKAGE.parent / "tests/data/goldens/graphs/tiny-mixtral-f16.decode.fa-off.json").read_text("utf-8"))
    assert np.array_equal(np.float32(shipped["logits"]), data["p01_logits"][-1])
    assert shipped["tokens"] == data["p01_tokens"].tolist()
    assert shipped["experts_last"] == data["p01_experts"][:, -1].tolist()
    assert shipped["n_nodes_decode"] == graph["counts"]["nodes"]


def test_printed_routes_and_text_do_not_hang_on_the_last_bits():
    from workbench import models
    state = open_lesson("00").state
    ids = [t["id"] for t in state.run]
    rounding = 2e-5                                            # ten times what another order of summation changes
    for layer in range(6):
        best = -np.sort(-state.scores(ids, layer), axis=1)[:, :3]
        assert (best[:, :2] - best[:, 1:]).min() > rounding
    weights = state.routes(ids).weights[5].astype(float) * 100
    assert np.abs(weights % 1 - 0.5).min() > 100 * rounding    # two decimals are printed
    sampler, n = models.Sampler(temperature=0.7, seed=1), len(state.model.tokenizer.encode(state.prompt))
    with models.Session(state.model) as session:
        logits = session.decode(ids[:n])
        for token in ids[n:]:
            tokens, p = sampler.candidates(logits)
            drawn = sampler.rng.random()
            assert tokens[np.searchsorted(p.cumsum(), drawn, "right")] == token
            assert np.abs(p.cumsum() - drawn).min() > rounding
            logits = session.decode([token])


# ---- the linter

GOOD = """# %% [markdown]
# # T
#
# **5 minutes**

# %% tags=["setup"]
x = 1

# %% [markdown]
# ## 1 · A · 5 min

# %% tags=["predict"]
lesson.predict("a")

# %% tags=["reveal"]
lesson.reveal("a", 1)

# %% tags=["predict"]
lesson.predict("b")

# %% tags=["reveal"]
lesson.reveal("b", 1)

# %% tags=["predict"]
lesson.predict("c")

# %% tags=["reveal"]
lesson.reveal("c", 1)
""" + "".join(f"""
# %% tags=["exercise", "tier-{n}"]
def f{n}(): raise NotImplementedError

# %% tags=["solution"]
def f{n}(): return {n}

# %% tags=["wrong"]
def f{n}(): return 0

# %% tags=["check"]
lesson.check("{n}", f{n}, {n})
""" for n in (1, 2, 3))


def problems(tmp_path, text):
    file = tmp_path / "99_t.py"
    file.write_text(text, "utf-8")
    return tool.lint_source(tool.read(file))


def test_the_good_source_is_good(tmp_path):
    assert problems(tmp_path, GOOD) == []


@pytest.mark.parametrize("old, new, said", [
    ("x = 1", "\n".join(f"x{i} = 1" for i in range(15)), "has 15 lines"),
    ("# # T", "# # T\n#\n# " + "word " * 160, "words"),
    ("# # T", "# # T\n#\n# ![](a.png)", "without alt text"),
    ("# # T", "# # T\n#\n# ![ ](a.png)", "without alt text"),
    ("# # T", "# # T\n#\n# <IMG src='a.png'>", "without alt text"),
    ("x = 1", "x;", "semicolon"),
    ("x = 1", f"x = '{'y' * 120}'", "characters, at most"),
    ("x = 1", "x = open('/home/me/x')", "path of one machine"),
    ("# # T", f"# # T\n#\n# in `{paths.PACKAGE.parent}`", "path of one machine"),
    ("# %% [markdown]\n# ## 1", "# %% [raw]\n# words\n\n# %% [markdown]\n# ## 1", "neither code nor prose"),
    ("def f2(): raise NotImplementedError", "def f2(): return 7", "no open stub"),
    ("def f2(): raise NotImplementedError", "def f2(x=1):\n    if x: return 2\n    raise NotImplementedError", "no open stub"),
    ("def f2(): return 2", "def f2(): raise NotImplementedError  # later", "same as one of its answers"),
    ('tags=["setup"]', 'tags=["other"]', "tagged setup"),
    ('lesson.reveal("b", 1)', 'lesson.reveal("c", 1)', "followed by its reveal"),
    (" · 5 min", "", "minutes"),
    ("**5 minutes**", "**4 minutes**", "minutes"),
    ('tags=["solution"]', "", "no solution cell"),
    ('tags=["wrong"]', "", "no wrong cell"),
    ('"tier-3"', '"tier-2"', "tiers 1 to 3"),
])
def test_every_rule_for_sources_bites(tmp_path, old, new, said):
    assert old in GOOD
    assert any(said in p for p in problems(tmp_path, GOOD.replace(old, new)))


@pytest.fixture
def book():
    cells = tool.as_notebook([tool.Cell("markdown", "# T"), tool.Cell("code", "x"), tool.Cell("code", "y")])
    for n, cell in enumerate((c for c in cells["cells"] if c["cell_type"] == "code"), 1):
        cell["execution_count"] = n
        cell["outputs"] = [{"output_type": "execute_result", "metadata": {}, "execution_count": n, "data": {
            "text/html": ['<figure><img alt="a long description" src="data:image/png;base64,AA"></figure>'], "image/png": "AA", "text/plain": ["a picture"]}}]
    return cells


def test_the_good_notebook_is_good(book):
    assert tool.lint_notebook(book, 1000) == []


@pytest.mark.parametrize("change, said", [
    (lambda b: b["cells"][1].update(execution_count=7), "counts"),
    (lambda b: b["metadata"].update(widgets={}), "no state"),
    (lambda b: b["cells"][1]["outputs"].append({"output_type": "error", "ename": "E", "evalue": "", "traceback": []}), "error"),
    (lambda b: b["cells"][1]["outputs"].append({"output_type": "stream", "name": "stderr", "text": ["w"]}), "error"),
    (lambda b: b["cells"][1]["outputs"][0]["data"].update({tool.WIDGET: {}}), "stores"),
    (lambda b: b["cells"][1]["outputs"][0]["data"].update({"image/svg+xml": "<svg/>"}), "stores"),
    (lambda b: b["cells"][1]["outputs"][0]["data"].update({"text/html": ["<b>no</b>"]}), "alt text"),
    (lambda b: b["cells"][1]["outputs"][0]["data"].update({"text/html": ['<img src="data:image/png;base64,AA">']}), "alt text"),
    (lambda b: b["cells"][1]["outputs"][0]["data"]["text/html"].append('<img src="data:image/png;base64,AA">'), "alt text"),   # a second one
    (lambda b: b["cells"][1]["outputs"][0]["data"]["text/html"].append("<svg></svg>"), "removes"),
    (lambda b: b["cells"][1].update(source=["widgets.Range()"], outputs=[]), "lost its output"),
    (lambda b: b["cells"][1]["outputs"].append({"output_type": "stream", "name": "stdout", "text": ["Traceback (most recent call last):"]}), "error"),
    (lambda b: b["cells"][1]["outputs"][0]["data"].update({"text/plain": ["/home/me/x"]}), "machine"),
    (lambda b: b["cells"][1]["outputs"][0]["data"].update({"text/plain": [f"{paths.PACKAGE.parent}/x"]}), "machine"),
    (lambda b: b["cells"][1]["outputs"][0]["data"].update({"text/plain": ["<F at 0x7f3a5c>"]}), "machine"),
])
def test_every_rule_for_notebooks_bites(book, change, said):
    change(book)
    assert any(said in p for p in tool.lint_notebook(book, 1000))


def test_a_large_notebook_is_noticed(book):
    assert any("bytes" in p for p in tool.lint_notebook(book, tool.MAX_BYTES + 1))


def test_ids_of_cells_stay_when_others_are_added():
    a, b = tool.Cell("code", "a"), tool.Cell("code", "b")
    ids = [c["id"] for c in tool.as_notebook([a, b])["cells"]]
    assert [c["id"] for c in tool.as_notebook([tool.Cell("code", "new"), a, b, a])["cells"]][1:3] == ids
    assert len({c["id"] for c in tool.as_notebook([a, a, a])["cells"]}) == 3
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", i) for i in ids)


@each_lesson
def test_a_changed_source_is_out_of_step(source, tmp_path, monkeypatch):
    changed = tmp_path / source.parent.name / source.name
    changed.parent.mkdir()
    changed.write_text(source.read_text("utf-8") + "\n# %%\nchanged = True\n", "utf-8")
    monkeypatch.setattr(tool, "notebook", lambda _, solutions=False, real=tool.notebook: real(source, solutions))
    found = tool.check(changed)
    assert any(p.startswith("not in step") for p in found) and any(p.startswith("twin: not in step") for p in found)
