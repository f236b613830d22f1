"""`run`: exact text, counters, and one clear message for every wrong request."""

import pytest

from workbench import models
from workbench.cli import COMMANDS, run

SHORT = ["tiny-mixtral-f16", "--tokens", "3"]


@pytest.mark.parametrize("more", [["--expert-budget", "100%"], ["--expert-budget", "245760"], ["--policy", "static", "--expert-budget", "25%"],
                                  ["--policy", "predicted", "--predictor", "gate", "--window", "2"], ["--host-below", "auto"]])
def test_the_text_is_the_same_with_any_budget(more, capsys):
    assert run.main([*SHORT, "--verify", *more]) == 0
    out = capsys.readouterr().out
    assert "verified: the same text" in out and "waits for ids" in out
    assert ("at the start" in out) == ("static" in more)


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
    (["--tokens", "-1"], "n_tokens=-1")])
def test_wrong_requests(argv, says, capsys):
    assert run.main([*SHORT, *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("\nrun: ") and says in err


def test_no_such_model(capsys):
    assert run.main(["nothing.gguf"]) == 2 and "nothing.gguf" in capsys.readouterr().err
    assert "run" in COMMANDS
