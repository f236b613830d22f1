"""The judge of scheduler cases is judged: named cases pass, and one altered value in any compared field fails by name."""

import copy
import gzip
import json

import pytest

from tests.parity.__main__ import main

NAMED = ["rand_9", "rand_24", "rand_29", "rand_39"]  # all recorded cases with one backend that ggml accepts


@pytest.fixture(scope="module")
def cases(data):
    return {name: json.loads((data / "goldens/sched" / f"{name}.json").read_text()) for name in NAMED}


def judged(tmp_path, capsys, *some):
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, some)).encode()))
    status = main(["sched", str(path)])
    return status, capsys.readouterr().out.splitlines()


def test_named_cases_pass(data, capsys):
    assert main(["sched", *(str(data / "goldens/sched" / f"{name}.json") for name in NAMED)]) == 0
    assert capsys.readouterr().out == "4 passed, 0 failed\n"
    assert main(["sched", str(data / "goldens/sched")]) == 0
    assert capsys.readouterr().out == "4 passed, 0 failed, 107 skipped\n"


def swap(case):
    nodes = case["graph"]["nodes"]
    nodes[3], nodes[4] = nodes[4], nodes[3]


def place(entry):
    def alter(case):
        tensors = case["expect"]["alloc"]["tensors"]
        tensors[next(iter(tensors))][entry] += 32

    return alter


def output(expect):
    values = next(iter(expect["outputs"].values()))
    i = max((i for i, v in enumerate(values) if isinstance(v, (int, float))), key=lambda i: abs(values[i]))
    values[i] *= 1.001


@pytest.mark.parametrize(
    "name, alter, field",
    [
        ("rand_9", swap, "graph.nodes[3]"),
        ("rand_9", lambda c: c["graph"]["nodes"].pop(), "graph.nodes"),
        ("rand_9", lambda c: c["graph"]["leafs"].reverse(), "graph.leafs[0]"),
        ("rand_9", lambda c: c["expect"]["alloc"]["buffer_sizes"].__setitem__(0, 7840), "alloc.buffer_sizes[0]"),
        ("rand_9", lambda c: c["expect"]["alloc"]["chunks"][0].append(32), "alloc.chunks[0]"),
        ("rand_9", place(0), "alloc.tensors['in2'].buffer"),
        ("rand_9", place(1), "alloc.tensors['in2'].chunk"),
        ("rand_9", place(2), "alloc.tensors['in2'].offset"),
        ("rand_9", place(3), "alloc.tensors['in2'].size"),
        ("rand_9", lambda c: c["expect"]["alloc"]["tensors"].pop("t0"), "alloc.tensors['t0']"),
        ("rand_9", lambda c: c["expect"]["alloc"]["tensors"].update(other=[0, 0, 0, 4]), "alloc.tensors['other']"),
        ("rand_9", lambda c: output(c["expect"]), "outputs["),
        ("rand_9", lambda c: output(c["expect"]["more_runs"][0]), "run 2: outputs["),
        ("rand_24", lambda c: c["expect"]["more_runs"][0]["alloc"]["buffer_sizes"].__setitem__(0, 1), "run 2: alloc.buffer_sizes[0]"),
        ("rand_24", lambda c: output(c["expect"]["more_runs"][0]), "run 2: outputs["),
        ("rand_39", lambda c: c["expect"]["more_runs"][0]["alloc"]["tensors"].clear(), "run 2: alloc.tensors["),
        ("rand_29", lambda c: output(c["expect"]), "outputs["),
        ("rand_29", lambda c: c["tensors"][0].update(type="f8"), "DTypeError"),
    ],
)
def test_one_altered_value_fails_by_name(tmp_path, capsys, cases, name, alter, field):
    case = copy.deepcopy(cases[name])
    alter(case)
    status, lines = judged(tmp_path, capsys, cases["rand_39"], case)
    assert status == 1 and lines[-1] == "1 passed, 1 failed"
    assert len(lines) == 2 and lines[0].startswith(f"FAIL {name}: {field}")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}'])
def test_bad_input(tmp_path, capsys, text):
    path = tmp_path / "case.json"
    path.write_text(text)
    assert main(["sched", str(path)]) == 2 and main(["sched"]) == 2 and main(["sched", str(path) + "x"]) == 2
    assert not capsys.readouterr().out
