"""Every recorded graph of llama.cpp, and the judge itself: each compared field, altered, makes it fail by name."""
import copy
import json
from pathlib import Path

import pytest

from tests.parity import graph
from workbench.models import load
from workbench.paths import models_dir

FILES = sorted(p.name for p in (Path(__file__).parents[1] / "data/goldens/graphs").glob("*.json"))
OFF = [f for f in FILES if "fa-off" in f]


@pytest.mark.parametrize("name", FILES)
def test_our_graph_is_llama_cpps(name, data, capsys):
    model = models_dir() / f"{name.split('.')[0]}.gguf"
    assert graph.main([str(model), str(data / "goldens/graphs" / name)]) == 0
    assert ("1 passed, 0 failed" if name in OFF else "0 passed, 0 failed, 1 skipped") in capsys.readouterr().out


@pytest.fixture(scope="module")
def case_and_ours(data):
    case = graph.read_case(data / "goldens/graphs/tiny-mixtral-f16.prefill.fa-off.json")
    with load("tiny-mixtral-f16") as model:
        yield case, graph.rebuilt(model, case)


def node(case, op, field):
    return next(n for n in case["nodes"] if n["op"] == op and field in n)


def changed(value):
    if isinstance(value, dict):
        key = next(iter(value))
        return {**value, key: changed(value[key])}
    if isinstance(value, list):
        return [changed(value[0]), *value[1:]]
    return {int: lambda v: v + 1, float: lambda v: v * 1.001, str: lambda v: v + "x", bool: lambda v: not v}[type(value)](value)


NODE_FIELDS = [("MUL", f) for f in ("name", "op", "type", "ne", "nb", "src", "flags")] + [("VIEW", "view_src"), ("VIEW", "view_offs"), ("GLU", "desc")]
NODE_FIELDS += [(op, "params") for op in ("RMS_NORM", "ROPE", "SOFT_MAX", "MUL_MAT", "CLAMP", "ARGSORT", "GLU", "PERMUTE", "VIEW")]


@pytest.mark.parametrize(("op", "field"), NODE_FIELDS)
def test_an_altered_node_fails(case_and_ours, op, field):
    case, ours = copy.deepcopy(case_and_ours[0]), case_and_ours[1]
    n = node(case, op, field)
    n[field] = changed(n[field])
    found = graph.differences(case, ours)
    assert len(found) == 1 and f"{field}: " in found[0]


def test_every_single_parameter_counts(case_and_ours):
    case, ours = case_and_ours
    for op in ("ROPE", "CLAMP", "SOFT_MAX", "GLU"):
        for key in node(case, op, "params")["params"]:
            altered = copy.deepcopy(case)
            params = node(altered, op, "params")["params"]
            params[key] = 3.0 if params[key] == "inf" else changed(params[key]) if params[key] else 1.0
            assert graph.differences(altered, ours), (op, key)


@pytest.mark.parametrize("i", range(3), ids=["reference", "name", "op"])
def test_an_altered_source_fails(case_and_ours, i):
    case, ours = copy.deepcopy(case_and_ours[0]), case_and_ours[1]
    n = node(case, "ADD", "src")
    n["src"][1][i] = {0: "n1", 1: "other", 2: "SUB"}[i]
    assert len(graph.differences(case, ours)) == 1


@pytest.mark.parametrize("field", ["name", "kind", "type", "ne", "nb", "flags"])
@pytest.mark.parametrize("kind", ["weight", "kv", "input"])
def test_an_altered_leaf_fails(case_and_ours, kind, field):
    case, ours = copy.deepcopy(case_and_ours[0]), case_and_ours[1]
    leaf = next(x for x in case["leafs"] if x["kind"] == kind)
    leaf[field] = changed(leaf[field])
    found = graph.differences(case, ours)
    assert len(found) == 1 and f"{field}: " in found[0]


def test_altered_inputs_fail(case_and_ours):
    case, ours = case_and_ours
    inputs = [i for i, x in enumerate(case["leafs"]) if x["kind"] == "input"]
    assert len(inputs) == 6
    for i in inputs:
        for form in case["leafs"][i]["v"]:
            altered = copy.deepcopy(case)
            altered["leafs"][i]["v"][form] = changed(altered["leafs"][i]["v"][form])
            assert graph.differences(altered, ours), (case["leafs"][i]["name"], form)


@pytest.mark.parametrize("what", ["order", "missing", "more"])
def test_other_nodes_fail(case_and_ours, what):
    case, ours = copy.deepcopy(case_and_ours[0]), case_and_ours[1]
    nodes = case["nodes"]
    if what == "order":
        nodes[6], nodes[8] = nodes[8], nodes[6]
    elif what == "missing":
        nodes.pop()
    else:
        nodes.append(nodes[-1])
    assert graph.differences(case, ours)


def test_the_command_fails_and_names_it(tmp_path, data, capsys):
    case = json.loads((data / "goldens/graphs/tiny-mixtral-f16.decode.fa-off.json").read_text())
    case["nodes"][2]["type"] = "f16"
    path = tmp_path / "case.json"
    path.write_text(json.dumps(case))
    assert graph.main([str(models_dir() / "tiny-mixtral-f16.gguf"), str(path)]) == 1
    out = capsys.readouterr().out
    assert "FAIL case.json: nodes[2] 'attn_norm-0' type: f32 instead of f16" in out and "0 passed, 1 failed" in out


def test_bad_input_is_status_2(tmp_path, data, capsys):
    model = str(models_dir() / "tiny-mixtral-f16.gguf")
    other = tmp_path / "x.json"
    other.write_text('{"format": "llama-graph-golden/1"}')
    text = tmp_path / "y.json"
    text.write_text("[")
    for i, change in enumerate([{"n_ctx": 10**15}, {"pos0": -5}, {"tokens": None}]):
        case = json.loads((data / "goldens/graphs/tiny-mixtral-f16.decode.fa-off.json").read_text())
        case["config"] |= change
        (tmp_path / f"c{i}.json").write_text(json.dumps(case))
        assert graph.main([model, str(tmp_path / f"c{i}.json")]) == 2
    capsys.readouterr()
    deepseek = data / "goldens/graphs/tiny-deepseek-f16.decode.fa-off.json"
    for args in ([], [model], [model, str(other)], [model, str(text)], [model, str(tmp_path / "none")], [model, str(deepseek)], ["none.gguf", str(deepseek)]):
        assert graph.main(args) == 2
        assert capsys.readouterr().err.startswith("graph: ")
