"""The judge of ops is judged: all handed cases pass, and one altered value in any compared field fails by name."""

import copy
import json

import numpy as np
import pytest

from tests.parity import ops
from tests.parity.__main__ import main


@pytest.fixture(scope="module")
def recorded(data):
    return ops.read(data / "goldens" / "ops")


def judge(tmp_path, capsys, case, arrays):
    keys = [s["key"] for s in [*case["src"], case["dst"]] if s]
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [case]}))
    np.savez(tmp_path / "cases.npz", **{k: arrays[k] for k in keys if k in arrays})
    status = main(["ops", str(tmp_path)])
    return status, capsys.readouterr().out


def test_all_handed_cases_pass(data, capsys):
    assert main(["ops", str(data / "goldens" / "ops")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "374 passed, 0 failed"



def one_per_op(cases):
    """The first case of each op and pair of types (the last ones hold edge values, some within the absolute tolerance)."""
    return {(c["op"], c["src"][0]["type"], c["dst"]["type"]): c for c in reversed(cases) if c["op"] != "backward_mlp"}.values()


def altered(a, kind):
    """The same memory with one value changed: the largest float by 5 %, an index or a byte by one."""
    b = a.copy()
    i = int(np.nanargmax(np.where(np.isfinite(a), np.abs(a.astype(float)), -1))) if kind != "bf16" else int(a.size // 2)
    if a.dtype.kind == "f":
        b[i] = b[i] * 0.95 if b[i] else 0.05
    else:
        b[i] = b[i] ^ (1 if kind != "bf16" else 0x10)
    return b


def test_an_altered_value_of_the_result_fails(recorded, tmp_path, capsys):
    cases, arrays = recorded
    for case in one_per_op(cases):
        if case["op"] in ops.PRODUCTS and case["src"][0]["type"] != "f32":
            continue  # their unrounded tolerance is wide; see the next test
        key = case["dst"]["key"]
        status, out = judge(tmp_path, capsys, case, arrays | {key: altered(arrays[key], case["dst"]["type"])})
        assert status == 1 and out.startswith(f"FAIL {case['id']}: dst data: ") and out.endswith("0 passed, 1 failed\n"), case["id"] + out


@pytest.mark.parametrize("part", ["loss", "logits", "w1", "b1", "w2", "b2", "ops", "n_forward_nodes"])
def test_each_part_of_a_backward_case_is_judged(recorded, tmp_path, capsys, part):
    cases, arrays = recorded
    case = copy.deepcopy(next(c for c in cases if c["op"] == "backward_mlp"))
    arrays = {k: v for k, v in arrays.items() if k.startswith(case["id"])}
    if part == "ops":
        case["ops"][-2:] = case["ops"][:-3:-1]
    elif part == "n_forward_nodes":
        case[part] += 1
    else:
        key = (case["grads"].get(part) or case.get(part) or case["dst"])["key"]
        arrays[key] = altered(arrays[key], "f32")
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [case]}))
    np.savez(tmp_path / "cases.npz", **arrays)
    assert main(["ops", str(tmp_path)]) == 1
    name = f"grad {part}" if part in case["grads"] else part
    out = capsys.readouterr().out
    assert out.startswith(f"FAIL {case['id']}: {name}") and out.endswith("0 passed, 1 failed\n"), out


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q4_K"])
def test_a_product_is_judged_with_and_without_rounding(recorded, tmp_path, capsys, kind):
    cases, arrays = recorded
    case = next(c for c in cases if c["op"] == "mul_mat" and c["src"][0]["type"] == kind)
    key, share = case["dst"]["key"], ops.UNROUNDED[kind]
    sizes = ops.MAGNITUDES["mul_mat"](*[abs(ops.values(s, arrays)) for s in case["src"]]).ravel()
    for error, roundings in (2e-6, ["ggml"]), (2.5 * share, ["none", "ggml"]):
        changed = arrays[key].copy()
        changed[0] += error * sizes[0]
        status, out = judge(tmp_path, capsys, case, arrays | {key: changed})
        expected = [] if kind == "q4_K" and error < 1e-5 else roundings  # rounding is optional for those types
        assert [r for r in ("none", "ggml") if f"FAIL {case['id']}: dst data (activation_rounding={r})" in out] == expected, out
        assert status == bool(expected)


@pytest.mark.parametrize(("field", "value"), [("type", "f16"), ("ne", [1, 2, 3, 4]), ("nb", [4, 8, 12, 16]), ("offset", 4)])
@pytest.mark.parametrize("op", ["mul_mat", "set_rows", "argsort_top_k", "cpy"])
def test_an_altered_description_fails(recorded, tmp_path, capsys, op, field, value):
    cases, arrays = recorded
    case = copy.deepcopy(next(c for c in cases if c["op"] == op))
    case["dst"][field] = value
    status, out = judge(tmp_path, capsys, case, arrays)
    assert status == 1 and out.startswith(f"FAIL {case['id']}: ") and f"dst {field}: " in out


def test_a_wrong_place_of_nan_or_infinity_fails(recorded, tmp_path, capsys):
    cases, arrays = recorded
    case = next(c for c in cases if c["op"] == "soft_max")
    key = case["dst"]["key"]
    for value in (np.nan, np.inf, -np.inf):
        changed = arrays[key].copy()
        changed[1] = value
        status, out = judge(tmp_path, capsys, case, arrays | {key: changed})
        assert status == 1 and "1 of" in out, out


def test_a_source_that_lacks_memory_fails_by_name(recorded, tmp_path, capsys):
    cases, arrays = recorded
    case = copy.deepcopy(next(c for c in cases if c["id"] == "mul_mat/f32_permuted"))
    case["src"][0]["offset"] = 400
    status, out = judge(tmp_path, capsys, case, arrays)
    assert status == 1 and out.startswith("FAIL mul_mat/f32_permuted: ValueError: ")


def test_a_case_that_claims_more_than_it_holds_fails_without_allocating_it(recorded, tmp_path, capsys):
    cases, arrays = recorded
    for name, field, value in ("repeat/c0", "ne", [2**36, 4]), ("cpy/f32_f32", "dst_ne", [2**36]), ("repeat/c0", "ne", [-1]):
        case = copy.deepcopy(next(c for c in cases if c["id"] == name))
        case["params"][field] = value
        status, out = judge(tmp_path, capsys, case, arrays)
        assert status == 1 and out.startswith(f"FAIL {name}: ")


@pytest.mark.parametrize("content", ["", "[", "[]", "{}", '{"cases": [{"id": 1}]}', '{"cases": ["x"]}', "[" * 100_000])
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, content):
    if content:
        (tmp_path / "cases.json").write_text(content)
    assert main(["ops", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("ops: ") and captured.err.count("\n") == 1


def test_unknown_commands_say_what_there_is(capsys):
    assert main(["nonsense"]) == 2 == main([])
    assert "ops,logits,graph,sched,routes" in capsys.readouterr().err
