"""`Lesson`: questions answered before the code runs, compared with what it did; exercises compared with what it does.

Questions and hints stand in `<language>/<number>.toml`, so that a cell does not show its answer and a translation is one
more folder. Which option is right is never written down: it is the one whose value the code computes.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workbench.errors import ParameterError, shown
from workbench.views import Card
from workbench.views.tables import text
from workbench.widgets import Question

KEYS = "abcdefgh"


def open_lesson(number: str, language: str = "en") -> Lesson:
    """The lesson `number` ("00"). Raises ParameterError where there is none in this language."""
    file = Path(__file__).parent / language / f"{number}.toml"
    if not (number.isdecimal() and language.isalpha() and file.is_file()):
        have = sorted(f"{f.parent.name}/{f.stem}" for f in Path(__file__).parent.glob("*/*.toml"))
        raise ParameterError(f"lesson {number!r} in language {language!r}", f"one of {', '.join(have)}")
    return Lesson(number, tomllib.loads(file.read_text("utf-8")))


class Lesson:
    """One lesson's questions, the learner's answers, and the ready-made state (`state`) of its sections."""

    def __init__(self, number: str, content: dict[str, Any]) -> None:
        self.number, self.content = number, content
        self.asked: dict[str, Question] = {}
        self._state: Any = None

    @property
    def state(self) -> Any:
        """What sections start from, built on first use: `workbench.lessons.states.Lesson<number>`."""
        if self._state is None:
            self._state = getattr(importlib.import_module("workbench.lessons.states"), f"Lesson{self.number}")()
        return self._state

    def predict(self, name: str, answer: str | float | None = None) -> Question:
        """Ask; the answer is kept for `reveal`, also when the cell is run again. `answer` gives it in code: a key or a number."""
        item = self._item("predict", name)
        options = [[key, o["text"]] for key, o in zip(KEYS, item.get("options", []))]
        kept = self.asked[name].answer if name in self.asked else ""
        given = kept if answer is None else str(answer)
        if options and given and given not in dict(options):
            raise ParameterError(f"answer {shown(given)!r}", f"one of {', '.join(dict(options))}")
        self.asked[name] = Question(ask=item["ask"], options=options, answer=given)
        return self.asked[name]

    def reveal(self, name: str, computed: Any, **facts: Any) -> Card:
        """Compare the stored answer with what the code `computed`; `facts` fill the {placeholders} of the reason."""
        item = self._item("predict", name)
        facts = {key: text(value) for key, value in facts.items()}
        reason = item["because"].format(computed=text(computed), **facts)
        answer = self.asked[name].answer.strip() if name in self.asked else ""
        options = dict(zip(KEYS, item.get("options", [])))
        true = next((o["text"] for o in options.values() if _same(o["value"], computed)), None)
        number = text(computed)
        lines = [("computed", number if true is None else true if isinstance(computed, str) or number in true else f"{true} ({number})")]
        if not answer:
            title = "No prediction recorded: answer in the cell above, then run this one again."
            return Card("open", title, [*lines, ("because", reason)])
        tone, said, more = self._judge(answer, options.get(answer), computed) if options else _judge_number(answer, computed)
        title = {"right": "As you predicted.", "wrong": "The code disagrees with you, and that is the useful case."}[tone]
        return Card(tone, title, [("you said", said), *lines, *more, ("because", reason)])

    def check(self, name: str, yours: Any, expected: Any, on: Sequence[tuple[Any, ...]] | None = None,
              steps: Sequence[str] | None = None, tolerance: float = 1e-6) -> Card:  # fmt: skip
        """Compare an exercise with what the program itself says: step by step, up to the first difference.

        yours: a value, a sequence, or a function that is called with each tuple of `on`; expected: what should come out,
        one for each. `steps` names them. An exercise not begun (NotImplementedError, ... or None) is no failure yet, and gets no hint:
        that comes with the first wrong answer.
        """
        item = self._item("check", name)
        task, hint = ("task", item["task"]), ("hint", item["hint"])
        if on is not None and not callable(yours):
            return Card("wrong", f"A function is wanted here, not {_text(yours)}.", [task])
        calls: list[Callable[[], Any]]
        if on is not None:
            calls, labels = [partial(yours, *args) for args in on], [", ".join(map(_text, args)) for args in on]
        else:
            values = list(yours) if isinstance(yours, (list, tuple, np.ndarray)) else [yours]
            expected = list(expected) if isinstance(expected, (list, tuple, np.ndarray)) else [expected]
            calls, labels = [partial(_itself, v) for v in values], [f"value {i}" for i in range(max(len(values), len(expected)))]
        labels = list(steps) if steps is not None else labels
        for i, (call, wanted) in enumerate(zip(calls, expected)):
            try:
                got = call()
            except NotImplementedError:
                got = None
            except Exception as error:  # the learner's code; what it raised is the message
                return Card("wrong", f"Your code stopped at {labels[i]}.", [("error", f"{type(error).__name__}: {error}"), hint])
            if got is None or got is ...:
                return Card("open", "Your turn: not begun yet. A wrong answer gets a hint.", [task])
            if not _same(got, wanted, tolerance):
                return Card("wrong", f"Not yet: the first difference is at step {i + 1} of {len(expected)}.",
                            [("step", labels[i]), ("yours", _text(got)), ("expected", _text(wanted)), hint])
        if len(calls) != len(expected):
            return Card("wrong", f"{len(calls)} values, expected {len(expected)}.", [hint])
        return Card("right", f"Right: {len(expected)} of {len(expected)} agree with the program.", [("next", item.get("next", ""))])

    def _judge(self, key: str, option: dict[str, Any] | None, computed: Any) -> tuple[str, str, list[tuple[str, str]]]:
        if option is None:
            raise ParameterError(f"answer {shown(key)!r}", "a key of one of the options")
        if _same(option["value"], computed):
            return "right", option["text"], []
        named = option.get("misconception")
        return "wrong", option["text"], [("difference", _difference(option["value"], computed)),
                                         (f"“{named}”" if named else "why not", option["why"])]  # fmt: skip

    def _item(self, kind: str, name: str) -> dict[str, Any]:
        items = self.content.get(kind, {})
        if name not in items:
            raise ParameterError(f"{kind} {shown(name)!r} in lesson {self.number}", f"one of {', '.join(items)}")
        return items[name]

    def __repr__(self) -> str:
        answered = sum(bool(q.answer) for q in self.asked.values())
        return f"<Lesson {self.number}: {self.content['title']}, {answered} of {len(self.content['predict'])} questions answered>"


def _itself(value: Any) -> Any:
    return value


def _judge_number(answer: str, computed: float) -> tuple[str, str, list[tuple[str, str]]]:
    try:
        said = float(answer.replace(",", "").replace("_", ""))
    except ValueError:
        return "wrong", answer, [("difference", "that is not a number")]
    close = abs(said - computed) <= 0.05 * abs(computed)
    return ("right" if close else "wrong"), text(said), [("difference", _difference(said, computed))]


def _difference(said: Any, computed: Any) -> str:
    if isinstance(said, bool) or not isinstance(said, (int, float)) or not isinstance(computed, (int, float)):
        return ""
    return f"yours / computed = {said / computed:.3g}" if computed else f"yours - computed = {said - computed:.4g}"


def _same(a: Any, b: Any, tolerance: float = 1e-6) -> bool:
    if isinstance(a, str) or isinstance(b, str) or isinstance(a, bool) or isinstance(b, bool):
        return type(a) is type(b) and a == b
    try:
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    except (TypeError, ValueError):  # parts of different lengths, or no numbers
        parts = (list, tuple, np.ndarray)
        if isinstance(a, parts) and isinstance(b, parts):
            return len(a) == len(b) and all(_same(x, y, tolerance) for x, y in zip(a, b))
        return type(a) is type(b) and bool(a == b)
    return x.shape == y.shape and bool(np.allclose(x, y, rtol=tolerance, atol=0))


def _text(value: Any) -> str:
    if isinstance(value, (float, np.floating)) and np.isfinite(value):  # 81920.0 and 122,880 must look alike to be compared
        x = float(value)
        return f"{int(x):,}" if x.is_integer() and abs(x) < 1e15 else f"{x:,.7g}"
    return ", ".join(map(_text, value)) if isinstance(value, (list, tuple, np.ndarray)) else text(value)
