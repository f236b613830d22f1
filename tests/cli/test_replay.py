"""`replay`: figures, files, values, and one clear message for every wrong request."""

import csv
import json

import numpy as np
import pytest

from workbench.cli import COMMANDS, replay
from workbench.errors import ParameterError
from workbench.expertflow.cache import POLICIES
from workbench.expertflow.network import names
from workbench.expertflow.sources import SHIPPED, SYNTHETIC


def lines(capsys):
    out = capsys.readouterr()
    return [line.split() for line in out.out.splitlines() if line.startswith("  ")][1:], out


def test_published_figures(capsys):
    assert replay.main(["switch-base-8", "--slots", "12", "--scope", "global", "--policy", "lru,lfu,belady"]) == 0
    rows, _ = lines(capsys)
    assert [(r[0], r[3], r[4]) for r in rows] == [("lru", "354", "27.44%"), ("lfu", "460", "35.66%"), ("belady", "698", "54.11%")]


def test_sweeps_to_a_table_a_file_and_a_plot(tmp_path, capsys):
    argv = ["switch-base-8", "--policy", "lru", "--sweep", "policy=lru,belady", "--sweep", "slots=2..8..3", "--expert-bytes", "1KiB",
            "--csv", str(tmp_path / "r.csv"), "--plot", str(tmp_path / "r.png")]
    assert replay.main(argv) == 0
    rows, out = lines(capsys)
    assert [r[:2] for r in rows] == [[p, s] for p in ("lru", "belady") for s in ("2", "5", "8")]
    with (tmp_path / "r.csv").open(newline="") as file:
        stored = list(csv.DictReader(file))
    assert [f"{int(s['hits']):,}" for s in stored] == [r[3] for r in rows]
    assert all(int(s["bytes"]) == 1024 * int(s["demand"]) for s in stored)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG") and "written" in out.err and "[" not in out.err


def test_what_needs_a_sample_is_replayed_on_the_rest(capsys):
    assert replay.main(["tiny-deepseek", "--slots", "8", "--policy", "lru,static"]) == 0
    rows, out = lines(capsys)
    assert rows[0][2] == rows[1][2] == f"{6144 * 4 * 4:,}" and "72 sequences" in out.out
    assert replay.main(["local-drifting:tokens=100,layers=2,experts=64,k=4", "--slots", "8", "--policy", "static"]) == 0
    rows, out = lines(capsys)
    assert rows[0][2] == "400" and "first half" in out.out


def test_forecasts(capsys):
    argv = ["switch-base-8", "--scope", "global", "--slots", "12", "--policy", "lru,plec", "--link", "1", "--predictor"]
    assert replay.main([*argv, "oracle"]) == 0
    rows, _ = lines(capsys)
    rates = {r[0]: float(next(c for c in r if c.endswith("%")).rstrip("%")) for r in rows}
    assert rates["plec"] > 80 > rates["lru"]
    assert replay.main([*argv, "previous-layer", "--fetch", "2"]) == 0


def test_a_model_gives_its_states(capsys, tmp_path):
    from workbench.expertflow.sources import load

    trace = load("tiny-deepseek").trace
    trace.select(trace.sequences < 2).save(tmp_path / "own.npz")
    argv = [str(tmp_path / "own.npz"), "--policy", "plec", "--scope", "global", "--slots", "32", "--link", "1", "--predictor", "gate-1"]
    assert replay.main(argv) == 2 and "--model" in capsys.readouterr().err
    assert replay.main([*argv, "--model", "tiny-deepseek-f16"]) == 0
    rows, out = lines(capsys)
    assert "hidden states" in out.err and float(next(c for c in rows[0] if c.endswith("%")).rstrip("%")) > 70
    assert replay.main([*argv[:-1], "network", "--model", "tiny-deepseek-f16"]) == 2 and "fitted to the shipped" in capsys.readouterr().err


def test_own_files_and_notes(tmp_path, capsys):
    rng = np.random.default_rng(0)
    with (tmp_path / "log.jsonl").open("w", encoding="utf-8") as file:
        for n, alike in ((40, True), (3, False), (3, False), (2, False)):
            for i in range(n):
                file.write(json.dumps({"req_id": 0, "token_idx": i, "experts": [[0, 1] if alike else rng.permutation(6)[:2].tolist()]}) + "\n")
    assert replay.main([str(tmp_path / "log.jsonl"), "--slots", "6", "--batch", "3"]) == 0
    out = capsys.readouterr().out
    assert "8 tokens" in out and "left out 40 rows" in out and "shrinks from 3" in out
    assert replay.main([str(tmp_path / "log.jsonl"), "--slots", "6", "--keep-warm-up"]) == 0
    assert "48 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "kind", "out"), [("4", int, [4]), ("2,4", int, [2, 4]), ("2..5", int, [2, 3, 4, 5]), ("2..9..3,20", int, [2, 5, 8, 20]),
                                                   ("lru, lfu", str, ["lru", "lfu"]), ("0.5,1", float, [0.5, 1.0])])
def test_values(text, kind, out):
    assert replay.values(text, kind) == out


@pytest.mark.parametrize("text", ["", "x", "2..", "4..2", "1,,2", "2..3..0"])
def test_values_that_are_none(text):
    with pytest.raises(ParameterError):
        replay.values(text, int)


@pytest.mark.parametrize(("argv", "says"), [
    (["none", "--slots", "4"], "no trace none"), (["switch-base-8"], "no number of slots"), (["switch-base-8", "--slots", "0"], "0 slots"),
    (["tiny-mixtral", "--slots", "1"], "at least 2"), (["switch-base-8", "--slots", "4", "--policy", "mru"], "mru"),
    (["switch-base-8", "--slots", "4", "--batch", "11"], "batch of 11"), (["switch-base-8", "--slots", "2", "--batch", "4"], "at least 4"),
    (["switch-base-8", "--slots", "4", "--predictor", "crystal"], "crystal"), (["switch-base-8", "--slots", "4", "--policy", "plec"], "without predictions"),
    (["switch-base-8", "--slots", "4", "--predictor", "gate-1"], "--model"), (["switch-base-8", "--slots", "4", "--link", "-1"], "link of -1"),
    (["switch-base-8", "--slots", "4", "--sweep", "speed=2"], "speed=2"), (["switch-base-8", "--slots", "4", "--workers", "0"], "0 workers"),
    (["switch-base-8", "--slots", "4", "--csv", "no/such/place.csv"], "no folder"), (["switch-base-8", "--slots", "4", "--fetch", "9", "--predictor", "oracle"], "9 best"),
    (["switch-base-8", "--slots", "4", "--plot", "."], "is a folder"), (["switch-base-8", "--slots", "4", "--plot", "a.jpg"], "ends in .png"),
    (["switch-base-8", "--slots", "3..99999999999"], "more than 10,000 values"), (["switch-base-8", "--slots", "8..2"], "smaller to the larger"),
    (["switch-base-8", "--slots", "4", "--fetch", "0", "--predictor", "oracle"], "--fetch 0"), (["switch-base-8", "--slots", "4", "--fetch", "2"], "without --predictor"),
    (["switch-base-8", "--slots", "4", "--policy", "predicted"], "--predictor NAME")])
def test_wrong_requests(argv, says, capsys):
    assert replay.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("replay: ") and says in err and "Traceback" not in err


def test_help_names_everything(capsys):
    with pytest.raises(SystemExit):
        replay.main(["--help"])
    text = capsys.readouterr().out
    for name in (*POLICIES, *SHIPPED, *SYNTHETIC, *(n for n in names() if not n.startswith("gate-")), "gate-0 to gate-4"):
        assert name in text
    assert "replay" in COMMANDS
