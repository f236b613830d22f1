"""The judge of scheduler cases is judged: all recorded cases pass, and one altered value in any compared field fails by name."""

import copy
import gzip
import json
import random

import pytest

from tests.parity import sched
from tests.parity.__main__ import main

NAMED = ["pipeline_reserve", "moe_used_experts_only", "rand_10", "eval_callback_grouped", "alloc_chunks", "unsupported_everywhere", "preallocated_cannot_run",
         "rand_28"]  # fmt: skip


@pytest.fixture(scope="module")
def cases(data):
    return {name: json.loads((data / "goldens/sched" / f"{name}.json").read_text()) for name in NAMED}


def judged(tmp_path, capsys, *some):
    path = tmp_path / "cases.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, some)).encode()))
    status = main(["sched", str(path)])
    return status, capsys.readouterr().out.splitlines()


def test_all_recorded_cases_pass(data, capsys):
    assert main(["sched", str(data / "goldens/sched")]) == 0
    assert capsys.readouterr().out == "111 passed, 0 failed\n"


def swap(values, i=0):
    values[i], values[i + 1] = values[i + 1], values[i]


def expect(change):
    return lambda case: change(case["expect"])


def first(d):
    return next(iter(d))


def output(e):
    values = e["outputs"][first(e["outputs"])]
    i = max((i for i, v in enumerate(values) if isinstance(v, (int, float))), key=lambda i: abs(values[i]))
    values[i] *= 1.001


ALTERATIONS = [
    ("rand_10", lambda c: swap(c["graph"]["nodes"], 3), "graph.nodes[3]"),
    ("rand_10", lambda c: c["graph"]["leafs"].pop(), "graph.leafs"),
    ("rand_10", lambda c: c.update(n_copies=3), "n_copies"),
    *(("pipeline_reserve", expect(lambda e, s=s: e["stages"][s].update({first(e["stages"][s]): 9})), f"stages.{s}[") for s in sched.STAGES),
    ("rand_10", expect(lambda e: e["stages"].pop("pass3")), "stages: pass3"),
    ("rand_10", expect(lambda e: e["causes"].update({first(e["causes"]): "4.cur!"})), "causes["),
    ("rand_10", expect(lambda e: e["causes"].pop(first(e["causes"]))), "causes["),
    *(("pipeline_reserve", expect(lambda e, f=f: e["splits"][1].update({f: 77})), f"splits[1]['{f}']") for f in ("backend", "i_start", "i_end")),
    ("pipeline_reserve", expect(lambda e: e["splits"][1]["inputs"].append("x")), "splits[1]['inputs']"),
    ("pipeline_reserve", expect(lambda e: swap(e["src_rewrites"])), "src_rewrites[0]"),
    ("pipeline_reserve", expect(lambda e: e["src_rewrites"][0].__setitem__(3, "other")), "src_rewrites[0]"),
    ("pipeline_reserve", expect(lambda e: e["graph_copy"]["nodes"][2].__setitem__(1, 2)), "graph_copy.nodes[2]"),
    ("pipeline_reserve", expect(lambda e: e["graph_copy"]["leafs"].pop()), "graph_copy.leafs"),
    ("alloc_chunks", expect(lambda e: e["alloc"]["buffer_sizes"].__setitem__(0, 32)), "alloc.buffer_sizes[0]"),
    ("alloc_chunks", expect(lambda e: e["alloc"]["chunks"][0].append(32)), "alloc.chunks[0]"),
    *(("alloc_chunks", expect(lambda e, i=i: e["alloc"]["tensors"][first(e["alloc"]["tensors"])].__setitem__(i, 5)), "alloc.tensors[") for i in range(4)),
    ("alloc_chunks", expect(lambda e: e["alloc"]["tensors"].pop(first(e["alloc"]["tensors"]))), "alloc.tensors["),
    ("rand_10", expect(lambda e: e.update(cur_copy=1)), "cur_copy"),
    ("rand_10", expect(lambda e: e.update(alloc_ok=False)), "alloc_ok"),
    ("rand_10", expect(lambda e: e.update(status=1)), "status"),
    ("pipeline_reserve", expect(lambda e: e["reserve_trace"].pop()), "reserve_trace"),
    ("pipeline_reserve", expect(lambda e: e["reserve_sizes"].__setitem__(0, 1)), "reserve_sizes[0]"),
    ("rand_10", expect(lambda e: e["trace_alloc"].append(["sync", "CPU"])), "trace_alloc"),
    ("pipeline_reserve", expect(lambda e: swap(e["trace_compute"], 2)), "trace_compute[2]"),
    ("moe_used_experts_only", expect(lambda e: next(t for t in e["trace_compute"] if t[0] == "set_async").__setitem__(4, 1)), "trace_compute["),
    ("eval_callback_grouped", expect(lambda e: next(t for t in e["trace_compute"] if t[0] == "cb").__setitem__(3, None)), "trace_compute["),
    ("rand_10", expect(output), "outputs["),
    ("rand_10", expect(lambda e: e["outputs"].pop(first(e["outputs"]))), "outputs["),
    ("rand_10", expect(lambda e: output(e["more_runs"][0])), "run 2: outputs["),
    ("pipeline_reserve", expect(lambda e: e["more_runs"][0].update(cur_copy=3)), "run 2: cur_copy"),
    ("rand_10", expect(lambda e: e["more_runs"][0].update(mode="other")), "more_runs[0]"),
    ("rand_10", expect(lambda e: e.update(matches_plain_cpu_run={"tensors": ["y"]})), "matches_plain_cpu_run"),
    ("rand_10", expect(lambda e: e.update(outputs_valid=False)), "outputs_valid"),
    ("rand_10", expect(lambda e: e["argsort_ties"].append("t3")), "argsort_ties"),
    ("rand_10", expect(lambda e: e.update(error="no_backend_supports_node", error_phase="run1:alloc")), "error"),
    ("unsupported_everywhere", expect(lambda e: e.update(error=None)), "error"),
    ("unsupported_everywhere", expect(lambda e: e.update(error="preallocated_tensor_cannot_run")), "error"),
    ("unsupported_everywhere", expect(lambda e: e.update(error_phase="reserve")), "error_phase"),
    ("unsupported_everywhere", expect(lambda e: e["stages"].pop("pass3")), "stages: pass3"),
    ("preallocated_cannot_run", expect(lambda e: e.update(error_tensor="y")), "error_tensor"),
    ("rand_28", expect(lambda e: e["stages"]["pass4"].update({first(e["stages"]["pass4"]): 1})), "stages.pass4["),
    ("rand_10", lambda c: c["tensors"][0].update(type="f8"), "error: found DTypeError"),
]


@pytest.mark.parametrize("name, alter, field", ALTERATIONS, ids=[f"{n}-{f}" for n, _, f in ALTERATIONS])
def test_one_altered_value_fails_by_name(tmp_path, capsys, cases, name, alter, field):
    case = copy.deepcopy(cases[name])
    alter(case)
    status, lines = judged(tmp_path, capsys, cases["preallocated_cannot_run"], case)
    assert status == 1 and lines[-1] == "1 passed, 1 failed"
    assert len(lines) == 2 and lines[0].startswith(f"FAIL {name}: {field}")


def leaves(value, path=()):
    if isinstance(value, (dict, list)) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


def other(value):
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, (int, float)):
        return value * 1.5 + 1 if isinstance(value, float) else value + 1
    return value + "!" if isinstance(value, str) and value not in ("nan", "inf", "-inf") else "altered" if value == [] else 0.5


@pytest.mark.parametrize("name", ["pipeline_reserve", "moe_used_experts_only", "rand_10", "alloc_chunks"])
def test_altered_values_anywhere_in_what_was_recorded(cases, name):
    r = random.Random(name)
    places = list(leaves(cases[name]["expect"]))
    for path in r.sample(places, 60):
        case = copy.deepcopy(cases[name])
        at = case["expect"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = other(at[path[-1]])
        assert sched.first_difference(case), path


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}'])
def test_bad_input(tmp_path, capsys, text):
    path = tmp_path / "case.json"
    path.write_text(text)
    assert main(["sched", str(path)]) == 2 and main(["sched"]) == 2 and main(["sched", str(path) + "x"]) == 2
    assert not capsys.readouterr().out
