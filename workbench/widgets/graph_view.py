"""`GraphView`: a compute graph to walk through, with the cause of every tensor's place in the order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import traitlets

from workbench.errors import ParameterError, shown
from workbench.tensors import Tensor
from workbench.views.graph_data import CHANNELS, as_graph, graph_data
from workbench.views.graph_drawing import draw_graph, first_open, for_page
from workbench.views.graph_layout import graph_layout
from workbench.views.tables import table
from workbench.widgets.base import FOLDER, Shown, script


class GraphView(Shown):
    """A graph drawn from its data: search, fold layers, colour, choose a tensor and read what it is and why it stands there.

    thing: a CGraph, a model's step, a `Trace` with a snapshot, or tensors. title and caption say what is shown. colour: "op",
    "type", "storage" or "bytes". opened: the layers drawn open, by place among the blocks; the first layer by default. chips: leafs
    as small rows in the boxes that use them (the default for more than 40 tensors), or as boxes of their own.
    Keys: arrows along sources, users and the order; Home End; Enter opens; c folds; + - 0 zoom; / searches.
    """

    _esm = script("graph_scene", "graph_view")
    _css = Shown._css + (FOLDER / "graph_view.css").read_text("utf-8")
    graph = traitlets.Dict().tag(sync=True)
    chosen = traitlets.Unicode("").tag(sync=True)
    opened = traitlets.List().tag(sync=True)
    channel = traitlets.Unicode("op").tag(sync=True)
    query = traitlets.Unicode("").tag(sync=True)

    def __init__(self, thing: Any, title: str = "", caption: str = "", colour: str = "op", opened: Sequence[int] | None = None,
                 chips: bool | None = None, **kwargs: Any) -> None:  # fmt: skip
        if colour not in CHANNELS:
            raise ParameterError(f"colour={colour!r}", f"one of {', '.join(CHANNELS)}")
        graph = as_graph(thing)
        self._tensors = [*graph.leafs, *graph.nodes]
        self._caption, self._blocks = caption, graph_layout(data := graph_data(graph, title), chips)
        super().__init__(graph=for_page(data, self._blocks), channel=colour,
                         opened=list(first_open(self._blocks) if opened is None else opened), **kwargs)  # fmt: skip

    @property
    def selected(self) -> Tensor | None:
        """The tensor that is chosen in the page."""
        return self._tensors[int(self.chosen[1:])] if self.chosen[:1] == "t" else None

    def choose(self, name: str) -> GraphView:
        """Choose a tensor by name or place ("node 12", "leaf 3"); returns the view. Raises ParameterError where there is none."""
        found = next((i for i, r in enumerate(self.graph["data"]["tensors"]) if name in (r["name"], r["tag"])), None)
        if found is None:
            raise ParameterError(f"no tensor {shown(name)!r} in this graph", "a name, or a place such as 'node 12'")
        self.chosen = f"t{found}"
        return self

    def stored_html(self) -> str:
        """The picture as it is opened now, with the rows of what it shows."""
        data = self.graph["data"]
        caption = self._caption or f"{data['n_nodes']} nodes and {data['n_leafs']} leafs. Run the cell to walk through them."
        return draw_graph(data, self._blocks, self.opened, self.channel, caption).html() + self._table(14).html()

    def stored_text(self) -> str:
        """The first nodes as rows."""
        return repr(self._table(24))

    def _table(self, most: int) -> Any:
        data = self.graph["data"]
        nodes = data["tensors"][data["n_leafs"] : data["n_leafs"] + data["n_nodes"]]
        rows = [(r["tag"], r["name"], r["op"], r["type"], "×".join(map(str, r["ne"][: r["dims"]])), r["bytes"],
                 ", ".join(data["tensors"][s]["name"] for s in r["src"] if s is not None)) for r in nodes[:most]]  # fmt: skip
        return table(["order", "name", "op", "type", "ne", "bytes", "sources"], rows,
                     f"{data['title']}: {'the first ' + str(most) + ' of ' if len(nodes) > most else ''}{len(nodes)} nodes in order.")
