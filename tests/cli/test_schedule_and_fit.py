"""`schedule` and `fit` (and `run` and `replay`): what the README shows is what they print; JSON; exit codes; sizes."""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from tests.models.headers import qwen3
from workbench.cli import COMMANDS, doctor, fit, replay, run, schedule
from workbench.cli.sizes import bytes_text, rate, size

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
SHOWN = re.findall(r"```console\n\$ python -m workbench ([^\n]*)\n(.*?)```", README, re.S)


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[c.split()[0] for c, _ in SHOWN])
def test_the_readme_shows_what_is_printed(command, printed, tmp_path, monkeypatch, capsys):
    name, *argv = shlex.split(command)
    qwen3(tmp_path / "qwen3-30b-a3b-q4_K.gguf")
    monkeypatch.chdir(tmp_path)
    assert {"schedule": schedule, "fit": fit, "run": run, "replay": replay}[name].main(argv) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == printed.splitlines()


def test_the_readme_shows_all_four():
    names = [c.split()[0] for c, _ in SHOWN]
    assert names == ["fit", "schedule", "run", "replay"] and set(names) <= COMMANDS.keys()


def test_json_holds_the_same(capsys):
    argv = [
        "tiny-mixtral-f16",
        "--device",
        "laptop,blas",
        "-ngl",
        "3",
        "-ot",
        r"blk\.5\..*_exps=CPU",
        "--batch",
        "40",
        "--context",
        "256",
    ]
    assert schedule.main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert schedule.main([*argv, "--splits"]) == 0
    text = capsys.readouterr().out
    for phase in plan["phases"]:
        assert phase["largest_cost"] in text and f"{len(phase['splits'])} splits" in text
        assert sum(s["nodes"] for s in phase["splits"]) > 100
        assert all(f"{w['nbytes']:,}" in text for w in phase["ways"])
    assert text.count("the first node") == 2 and plan["device"] == "laptop,blas"


@pytest.mark.parametrize("argv", [
    [], ["tiny-mixtral-f16"], ["no-such-model", "--device", "cpu"], ["tiny-mixtral-f16", "--device", "abacus"],
    ["tiny-mixtral-f16", "--device", "laptop", "-ot", "no-device"], ["tiny-mixtral-f16", "--device", "laptop", "-ot", "[=CPU"]])  # fmt: skip
def test_wrong_requests_end_with_2_and_say_what_to_try(argv, capsys):
    assert schedule.main(argv) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("schedule: ") and "expected:" in said.err


def test_cpu_moe_is_all_layers_and_the_first_rule_decides(capsys):
    def weights(*argv):
        assert schedule.main(["tiny-mixtral-f16", "--device", "laptop", "--batch", "8", "--context", "256", "--json", *argv]) == 0
        return [d["weights"] for d in json.loads(capsys.readouterr().out)["devices"]]

    assert weights("--cpu-moe") == weights("-ncmoe", "6") == weights("-ot", "_exps=CPU", "-ot", "_exps=GPU") != weights()
    assert weights("-ot", "_exps=GPU", "--cpu-moe") == weights()


@pytest.mark.parametrize("name", ["mine.txt", "no/such/folder/mine.toml"])
def test_calibration_says_at_once_where_it_cannot_write(name, tmp_path, capsys):
    assert doctor.main(["--calibrate", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("doctor: cannot write")


def test_devices_are_listed_with_sources(capsys):
    assert schedule.main(["--devices"]) == 0
    out = capsys.readouterr().out
    assert "rtx3090-pcie4: NVIDIA" in out and "unverified" in out and "936 GB/s" in out


def test_fit_tells_by_its_exit_status(tmp_path, capsys):
    path = str(qwen3(tmp_path / "m.gguf", block_count=4))
    common = ["--link", "25GB/s", "--context", "256", "--batch", "32"]
    for vram, ram, status, word in (
        ("8G", "8G", 0, "FITS: all"),
        ("1500M", "8G", 0, "FITS WITH EXPERTS"),
        ("1500M", "1G", 1, "DOES NOT FIT"),
    ):
        assert fit.main([path, "--vram", vram, "--ram", ram, *common]) == status
        assert capsys.readouterr().out.startswith(word)
    assert fit.main([path + "x", "--vram", "8G", "--ram", "8G", *common]) == 2


def test_sizes():
    assert [size(t) for t in ("24GiB", "24G", "24gb", "1.5K", "7")] == [24 * 2**30, 24 * 2**30, 24 * 10**9, 1536, 7]
    assert [rate(t) for t in ("25", "25G", "12.5GB/s")] == [25e9, 25e9, 12.5e9]
    assert [bytes_text(n) for n in (0, 1536, 2**30, 3 * 2**40)] == ["0 B", "1.50 KiB", "1.00 GiB", "3.00 TiB"]
    for wrong in ("", "G", "-1G", "24X", "1 2", "9" * 400, "99999999T"):
        with pytest.raises(argparse.ArgumentTypeError):
            size(wrong)
    for wrong in ("fast", "0", "3TB/s", "9" * 400, "0." + "0" * 400 + "1"):
        with pytest.raises(argparse.ArgumentTypeError):
            rate(wrong)
