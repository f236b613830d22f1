"""`PromptPlayer`: type a prompt, watch tokens arrive coloured by expert, stop at any time."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import traitlets

from workbench.errors import shown
from workbench.views.palette import style
from workbench.views.tables import table
from workbench.widgets.base import Shown, script

Token = dict[str, Any]
"""{"text", "given": from the prompt?, "experts": [layer][k], "weights": [layer][k]}"""
Source = Callable[[str, int], Iterable[Token]]
"""Called with a prompt and a number of new tokens; yields the prompt's tokens and then the new ones, as they come;
a generator may return why there are fewer than were asked for."""

EVERY = 0.04  # seconds between two looks of the page at the record


class PromptPlayer(Shown):
    """Tokens of a `source`, each with the experts it was sent to; it generates in a thread of its own.

    `record` holds everything drawn: the layers and all tokens so far. `play` runs the present prompt, `stop` ends it.
    """

    _esm = script("prompt_player")
    prompt = traitlets.Unicode().tag(sync=True)
    n_tokens = traitlets.Int(32).tag(sync=True)
    layer = traitlets.Int(0).tag(sync=True)
    k = traitlets.Int(-1).tag(sync=True)
    record = traitlets.Dict().tag(sync=True)
    running = traitlets.Bool(False).tag(sync=True)
    message = traitlets.Unicode("").tag(sync=True)

    def __init__(self, source: Source, layers: Sequence[int], prompt: str = "", n_tokens: int = 32, layer: int = 0) -> None:
        self._source, self._halt, self._turn = source, threading.Event(), threading.Lock()
        self.thread: threading.Thread | None = None
        super().__init__(prompt=prompt, n_tokens=n_tokens, layer=layer, record={"layers": list(layers), "tokens": []})
        self.on_msg(self._asked)
        if prompt:
            self.play(wait=True)

    def play(self, wait: bool = False) -> None:
        """Run the prompt; with `wait`, return when it is done. Asked while it runs, it does nothing."""
        with self._turn:
            if self.running:
                return
            self._halt.clear()
            self.message, self.running, self.k = "generating …", True, -1
        self.thread = threading.Thread(target=self._run, args=(self.prompt, self.n_tokens), name="prompt-player", daemon=True)
        self.thread.start()
        if wait:
            self.thread.join()

    def stop(self) -> None:
        """End the run after the token that is being computed."""
        self._halt.set()

    def _asked(self, _: Any, content: Any, buffers: Any) -> None:
        action = content.get("do") if isinstance(content, dict) else None
        if action in ("generate", "stop"):
            self.play() if action == "generate" else self.stop()

    def _run(self, prompt: str, n_tokens: int) -> None:
        tokens: list[Token] = []
        say = "stopped"
        try:
            why = self._collect(self._source(prompt, n_tokens), tokens)
            if why is not None:
                say = f"done: {sum(not t['given'] for t in tokens)} new tokens" + (f"; {why}" if why else "")
        except Exception as error:  # an exception of a thread would vanish; the page shows it
            say = f"{type(error).__name__}: {shown(error, 300)}"
        self._show(tokens)
        self.message, self.running = say, False

    def _collect(self, source: Iterable[Token], tokens: list[Token]) -> str | None:
        """None if it was stopped, else what the source says about its end."""
        due = 0.0
        stream: Iterator[Token] = iter(source)
        while True:
            try:
                tokens.append(next(stream))
            except StopIteration as end:
                return str(end.value or "")
            if self._halt.is_set():
                if hasattr(stream, "close"):
                    stream.close()
                return None
            if time.monotonic() >= due:
                self._show(tokens)
                due = time.monotonic() + EVERY

    def _show(self, tokens: list[Token]) -> None:
        self.record = {"layers": self.record["layers"], "tokens": list(tokens)}

    def _rows(self) -> list[tuple[Any, ...]]:
        return [(i, t["text"].replace("\n", "⏎"), ", ".join(map(str, t["experts"][self.layer])),
                 ", ".join(f"{w:.2f}" for w in t["weights"][self.layer])) for i, t in enumerate(self.record["tokens"])]

    def _table(self, most: int) -> Any:
        name, n = self.record["layers"][self.layer], len(self.record["tokens"])
        return table(["token", "text", "experts", "weights"], self._rows()[:most],
                     f"Layer {name}: the first {min(most, n)} of {n} tokens. Run the cell to type a prompt of your own.")

    def stored_text(self) -> str:
        """The first tokens with their experts."""
        return repr(self._table(24))

    def stored_html(self) -> str:
        """The text, each token on the colour and with the number of its first expert, and the first rows of the table."""
        chips = []
        for t in self.record["tokens"]:
            first = t["experts"][self.layer][0]
            words = html.escape(shown(t["text"].replace("\n", "⏎"))).replace("⏎", "⏎<br>")
            chips.append(f'<span style="background-color:{style(first).fill};color:{style(first).ink}">{words}<sub>{first}</sub></span> ')
        return f'<div style="font-family:monospace;line-height:2">{"".join(chips)}</div>{self._table(12).html()}'
