"""What lesson 12 says of real ggml, of plans and of hazards is what the recordings and the code say."""

import json
import pathlib

import pytest

from workbench.lessons import open_lesson
from workbench.lessons.recorded_splits import SPLITS, ggml
from workbench.lessons.schedule_cases import CASES

GOLDENS = pathlib.Path(__file__).parents[1] / "data" / "goldens" / "sched"


@pytest.fixture(scope="module")
def state():
    return open_lesson("12").state


@pytest.mark.parametrize("name", SPLITS)
def test_splits_of_real_ggml(name):
    """The excerpt that the lesson ships is the recording's, and our splits are its: backend, nodes, inputs."""
    golden = json.loads((GOLDENS / f"{name}.json").read_text("utf-8"))
    names = {t["id"]: t["name"] for t in golden["tensors"]}
    nodes = [names[i] for i in golden["graph"]["nodes"]]
    one_card = sum(b["type"] == "GPU" for b in golden["backends"]) == 1
    backends = ["GPU" if one_card and b["name"] == "GPU0" else b["name"] for b in golden["backends"]]
    recorded = [[backends[s["backend"]], nodes[s["i_start"] : s["i_end"]], s["inputs"]] for s in golden["expect"]["splits"]]
    assert ggml()[name] == recorded
    out = SPLITS[name].outcome()
    assert [[s.backend, [n.name for n in out.nodes[s.first : s.last]], [i for i, _ in s.inputs]] for s in out.splits] == recorded


def test_both_arrays_side_by_side(state):
    """`Scheduler.moved` names exactly the positions at which the arrays differ, and other memory is what makes a new plan."""
    for case in (CASES["MLP with BLAS"], CASES["A B C | D | E F"], CASES["MLP, half on the host"]):
        for hand in ({}, {case.outcome().nodes[2].name: "CPU"}, {case.outcome().nodes[-1].name: "CPU"}):
            scheduler, names, anew = state.again(case, **hand)
            (nodes, leafs), (old_nodes, old_leafs) = scheduler.backend_ids
            assert len(nodes) == len(names) == len(scheduler.graph_copy.nodes)
            found = {(kind, i): (now, before) for kind, i, now, before, _ in scheduler.moved()}
            for kind, now, before in (("node", nodes, old_nodes), ("leaf", leafs, old_leafs)):
                for i, b in enumerate(now):
                    old = before[i] if i < len(before) else 0
                    assert found.get((kind, i), (b, b)) == (b, old)
            types = scheduler.buffer_types
            assert all(memory == (types[b] is not types[old]) for _, _, b, old, memory in scheduler.moved())
            if any(memory for *_, memory in scheduler.moved()):
                assert anew == 1
            if not hand:
                assert found == {} and anew == 0


def test_hazards(state):
    names = ["another graph, old plan", "a view assigned by hand", "a leaf without flag under a view"]
    assert [state.hazard(n, "ggml").split(":")[0].split(",")[0] for n in names] == ["wrong", "wrong", "stops"]
    assert [state.hazard(n, "").split(":")[0] for n in names] == ["right", "refused", "right"]


def test_weights_come_one_by_one(state):
    """The compute memory of the card: one weight, the rows that go in and those that come out, however many layers there are."""
    for n in (2, 5, 12):
        case = state.deep(n)
        assert len(case.outcome().splits) == n and state.memory(case)[0] == 64 * 64 * 4 + 2 * 64 * 32 * 4


def test_unknown_graphs_are_worth_it(state):
    """Many seeds: three to six splits, several reasons among them, and never the same graph twice."""
    cases = [state.unknown(seed) for seed in range(30)]
    assert len({c.name for c in cases}) == 30 and all(3 <= len(state.begins(c)) <= 6 for c in cases)
    causes = {s.cause.split(" ")[1] for c in cases for s in c.outcome().splits[1:]}
    assert causes == {"next", "weight"}
    q = state.drawn(0, 5)
    assert q.expected.count("no more") == 2 and len(q.steps) == len(q.expected)
    assert state.parts("GPU A,  CPU  B", "GPU A") == ["GPU A", "CPU B", "no more", "GPU A", "no more"] and state.parts(..., "GPU A") == [...]
