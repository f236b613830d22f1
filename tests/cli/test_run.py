"""`run`: exact text, counters, and one clear message for every wrong request."""

import re

import pytest

from workbench import models
from workbench.cli import COMMANDS, run
from workbench.expertflow.warm_up import RUNNING

SHORT = ["tiny-mixtral-f16", "--tokens", "3"]


@pytest.mark.parametrize("more", [["--expert-budget", "100%"], ["--expert-budget", "245760"], ["--policy", "static", "--expert-budget", "25%"],
                                  ["--policy", "plec", "--predictor", "gate", "--window", "2", "--prefetches", "1", "--granularity", "matrix"], ["--host-below", "auto"],
                                  ["--predictor", "gate,frequency", "--host-below", "auto", "--no-mmap"], ["--expert-storage", "int8", "--policy", "static"],
                                  ["--predictor", "previous-token", "--expert-storage", "q4_0", "--fit", "tiny-mixtral"]])  # fmt: skip
def test_the_text_is_the_same_with_any_budget(more, capsys):
    assert run.main([*SHORT, "--verify", *more]) == 0
    out = capsys.readouterr().out
    assert "verified: the same text" in out and "waits for ids" in out
    assert ("at the start" in out) == ("static" in more) and ("of the logits" in out) == ("--expert-storage" in more)
    assert ("recall" in out and "precision" in out and "late" in out) == ("--predictor" in more)
    assert ("24,576  tokens of tiny-mixtral" in out) == ("--fit" in more)


@pytest.mark.parametrize("predictor", RUNNING)
def test_every_predictor_runs_and_says_what_it_learnt_from(predictor, capsys):
    assert run.main([*SHORT, "--verify", "--predictor", predictor, "--policy", "predicted"]) == 0
    out = capsys.readouterr().out
    assert "the same text" in out and ("12  tokens of the prompt" in out) == (predictor != "gate")


def test_what_was_counted_nowhere_has_no_share(capsys):
    assert run.main([*SHORT, "--predictor", "gate", "--prefetches", "0"]) == 0
    out = capsys.readouterr().out
    assert "used of them" in out and "nan" not in out


@pytest.mark.parametrize(("more", "hit"), [([], False), (["--policy", "static"], True), (["--predictor", "gate"], True)])
def test_with_misses_on_the_host_only_what_fetches_ahead_fills_slots(more, hit, capsys):
    assert run.main([*SHORT, "--host-below", "auto", *more]) == 0
    hits, loads, hosted = (int(n) for n in re.findall(r"(?:hits|loads waited for|computed on the host) +(\d+)", capsys.readouterr().out))
    assert loads == 0 < hosted and (hits > 0) == hit


def test_experts_that_the_host_does_not_hold_are_read_from_disk(capsys):
    reads = []
    for slots in ("2", "48"):
        assert run.main([*SHORT, "--verify", "--host-slots", slots]) == 0
        out = capsys.readouterr().out
        loads, n = (int(n) for n in re.findall(r"(?:loads waited for|read from disk) +(\d+)", out))
        reads.append(n)
        assert "the same text" in out and n <= loads
    assert reads[1] <= 48 and reads[1] < reads[0]                                # with room for all, each once
    assert run.main([*SHORT, "--host-slots", "2", "--no-mmap"]) == 2 and run.main([*SHORT, "--host-slots", "0"]) == 2
    assert "pinned memory holds all experts" in capsys.readouterr().err


def test_another_text_is_an_error_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(models.Generation, "run", lambda self: "another")
    assert run.main([*SHORT, "--verify"]) == 1 and "ANOTHER TEXT" in capsys.readouterr().out


def test_an_interrupt_while_loading_ends_quietly(monkeypatch, capsys):
    monkeypatch.setattr(models, "load", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run.main(SHORT) == 130 and not capsys.readouterr().err


@pytest.mark.parametrize(("argv", "says"), [
    (["--expert-budget", "0"], "245,760 bytes or more"), (["--expert-budget", "1"], "245,760 bytes or more"), (["--expert-budget", "101%"], "'101%'"),
    (["--expert-budget", "nan%"], "'nan%'"), (["--scope", "layer", "--expert-budget", "5%"], "12 slots"), (["--policy", "mru"], "policy 'mru'"),
    (["--policy", "belady"], "a bound, not a policy"), (["--policy", "predicted"], "--predictor gate"), (["--policy", "plec"], "--predictor gate"),
    (["--window", "2"], "--window without"), (["--fetch", "2"], "--fetch without"), (["--predictor", "gate", "--window", "99"], "1 to 4 layers"),
    (["--predictor", "gate", "--fetch", "0"], "fetch=0"), (["--predictor", "gate", "--fetch", "9"], "fetch=9"), (["--device", "toaster"], "toaster"),
    (["--tokens", "-1"], "n_tokens=-1"), (["--predictor", "oracle"], "the router's answer"), (["--predictor", "network"], "the tokens of the text"),
    (["--granularity", "byte"], "expert, matrix"), (["--predictor", "gate-1"], "the window says"), (["--predictor", "gate", "--window", "0"], "1 or more"),
    (["--predictor", "previous-layer", "--window", "2"], "a smaller window"), (["--predictor", "frequency", "--window", "7"], "at most 6"),
    (["--predictor", "gate", "--policy", "lru"], "lru fetches nothing ahead"), (["--predictor", "gate", "--policy", "static"], "predicted or plec"),
    (["--predictor", "gate", "--prefetches", "-1"], "prefetches=-1"), (["--prefetches", "1"], "--prefetches without"),
    (["--fit", "tiny-mixtral"], "nothing to fit"), (["--fit", "tiny-mixtral", "--predictor", "gate"], "nothing to fit"),
    (["--fit", "nothing.txt", "--predictor", "frequency"], "nothing.txt cannot be read"),
    (["--device", "cpu"], "a card with memory of its own"), (["--device", "blas"], "nothing would be moved"),
    (["--fit", "tiny-deepseek", "--policy", "static"], "another model"), (["--expert-storage", "int4"], "int8 is another name for q8_0")])
def test_wrong_requests(argv, says, capsys):
    assert run.main([*SHORT, *argv]) == 2
    before, _, message = capsys.readouterr().err.partition("\nrun: ")
    assert says in message and (not before or "--fit" in argv)


def test_what_was_rounded_is_not_stored_in_more_bits(capsys):
    assert run.main(["tiny-mixtral-q4_0", "--expert-storage", "f16"]) == 2 and "does not come back" in capsys.readouterr().err


def test_text_to_fit_on_may_be_a_file(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("And God said unto Moses. " * 2000, encoding="utf-8")
    assert run.main([*SHORT, "--predictor", "frequency", "--fit", str(tmp_path / "a.txt")]) == 0
    assert "8,192  tokens of" in capsys.readouterr().out
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert run.main([*SHORT, "--predictor", "frequency", "--fit", str(tmp_path / "a.txt")]) == 2
    assert "a text in UTF-8" in capsys.readouterr().err


def test_no_such_model(capsys):
    assert run.main(["nothing.gguf"]) == 2 and "nothing.gguf" in capsys.readouterr().err
    assert "run" in COMMANDS
