"""Lesson 26: cards that compute with cut matrices take as long as with whole ones."""

import pytest

from workbench.cgraph import CGraph
from workbench.devices.cost import Speed, preset
from workbench.lessons.devices_states import Uncut
from workbench.moe import ExpertWeights, Routing, build_experts
from workbench.tensors import Context


def nodes(d, f, n_tokens):
    """A layer's experts as a graph, without memory."""
    context, graph = Context(10**5, no_alloc=True), CGraph()
    up, gate, down = (context.new_tensor("f16", *ne) for ne in ((d, f, 8), (d, f, 8), (f, d, 8)))
    x, ids, shares = context.new_tensor("f32", d, n_tokens), context.new_tensor("i32", 2, n_tokens), context.new_tensor("f32", 1, 2, n_tokens)
    with context.active():
        graph.build_forward_expand(build_experts(x, ExpertWeights(gate, up, down), Routing(ids, shares, x, x), graph=graph))
    return graph.nodes


@pytest.mark.parametrize("n_tokens", [1, 512, 1024])    # as many tokens as the cut width has numbers, too
def test_the_clock_takes_matrices_whole(n_tokens):
    known = preset("a100").speed
    card = Uncut(**vars(known), d=4096, f=14336, cut=(8, 16))
    pairs = list(zip(nodes(4096, 14336, n_tokens), nodes(512, 896, n_tokens), strict=True))
    assert all(known.parts(whole) == card.parts(cut) for whole, cut in pairs) and any(known.compute_ns(w) > 10**5 for w, _ in pairs)
    assert card.transfer_ns(512 * 4) == Speed.transfer_ns(known, 4096 * 4)
