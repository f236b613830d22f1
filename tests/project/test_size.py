"""The size counter counts code, and only code."""
from tools import size

SOURCE = '''"""Module docstring,
over two lines."""
# a comment

import os      # with a comment behind it


class A:
    """Docstring."""

    text = """a string
    that is data"""

    def f(self):
        \'\'\'Docstring
        with a "quote".\'\'\'
        return os.name, (
            1,

            2)
'''


def test_counts_code_lines_only(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(SOURCE, "utf-8")
    assert size.count(file).lines == 1 + 1 + 2 + 1 + 3       # import, class, the string, def, the return


def test_explanation_is_free(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(SOURCE, "utf-8")
    before = size.count(file)
    file.write_text(SOURCE.replace("# a comment", "# a comment\n" * 9).replace('"""Docstring."""', '"""' + "x\n" * 50 + '"""'))
    after = size.count(file)
    assert (after.lines, after.tokens) == (before.lines, before.tokens)


def test_a_room_over_its_budget_is_named(tmp_path):
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "a.py").write_text("x = 1\n" * (size.BUDGET[("moe",)] + 1))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "b.py").write_text("x = 1\n" * 9999)
    rooms = size.measure(tmp_path)
    assert list(rooms) == ["moe"] and size.over(rooms) == ["moe"]
    assert "over budget: moe" in size.table(rooms)


def test_the_package_can_be_counted():
    rooms = size.measure(size.paths.PACKAGE)
    assert "cli" in rooms and sum(c.lines for c in rooms["cli"]) > 100
