"""Training commands: what is wrong with a run's name or trackers is said before anything is prepared for it."""

from __future__ import annotations

import importlib.util

import pytest

from ascendchat.cli import main


@pytest.fixture
def nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first work of every training command is an error."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr("ascendchat.train.run.pick", work)


COMMANDS = [["base"], ["mid"], ["sft"], ["rl"], ["finetune", "--model", "absent", "--data", "absent.jsonl"]]


@pytest.mark.usefixtures("nothing_begins")
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["x\ny", "a/b", "../up", "-"])
def test_a_name_that_cannot_be_a_folder_is_refused_first(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"--run={name}"]) == 2
    assert "cannot name a run; use letters, digits, . _ - only" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_begins")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_tracker_that_is_not_installed_is_said_first(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*command, "--track", "wandb"]) == 2
    assert "--track wandb needs a package that is not installed; type: pip install wandb" in capsys.readouterr().err
