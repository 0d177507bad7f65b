"""Settings that a command has lost since a run was begun, and settings that have another name now."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendchat.config import dump, parse, spelling
from ascendchat.config.finetune import FinetuneConfig
from ascendchat.config.rl import RlConfig
from ascendchat.config.train import SftConfig
from ascendchat.errors import UserError
from ascendchat.runs.run import changed

# All that `rl` wrote into config.yaml, at its default, while it still had these.
OF_SFT = "warm_start: false\ntotal_batch_size: null\ntarget_examples_per_step: null\ndataset_dir: ''\npreview: 0\n"
OF_OURS = "warm_start: false\nwarmdown_ratio: null\nembedding_lr: null\nunembedding_lr: null\nscalar_lr: null\n"


def stored(tmp_path: Path, text: str) -> str:
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    return str(tmp_path / "config.yaml")


@pytest.mark.parametrize(("cls", "text"), [(RlConfig, OF_SFT), (FinetuneConfig, OF_OURS)])
def test_the_settings_of_an_old_run_are_read_without_those_that_have_left(
    cls: type, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stored(tmp_path, dump(cls()) + text)
    assert parse(cls, ["--config", path]) == cls()
    assert changed(tmp_path, cls()) == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("total_batch_size: 4096", "total_batch_size is not done here: a step is --prompts-per-step times --samples"),
        ("warm_start: true", "warm_start is not done here: RL starts from weights alone; leave it out"),
    ],
)
def test_a_setting_that_has_left_and_was_in_use_is_named(line: str, says: str, tmp_path: Path) -> None:
    """As a file for --config it is refused; a run that goes on says that it goes on without."""
    path = stored(tmp_path, dump(RlConfig()) + line)
    with pytest.raises(UserError, match=f"config.yaml: {says}"):
        parse(RlConfig, ["--config", path])
    (said,) = changed(tmp_path, RlConfig())
    name, value = line.split(": ")
    assert said.lower() == f"continuing without {spelling(name)}, which this run had: {value}"


def test_an_old_name_is_read_as_the_new_one(tmp_path: Path) -> None:
    old = dump(RlConfig(rollout_mode="async")).replace("rollout_mode:", "rhythm:")
    assert "rhythm: async" in old
    path = stored(tmp_path, old)
    assert parse(RlConfig, ["--config", path]).rollout_mode == "async"
    assert changed(tmp_path, RlConfig(rollout_mode="async")) == []
    assert changed(tmp_path, RlConfig()) == ["continuing with --rollout-mode sync; before, this run had async"]
    assert parse(RlConfig, ["--rhythm", "stream"]) == parse(RlConfig, ["--rollout-mode", "stream"])
    assert parse(SftConfig, ["--warm-start"]) == parse(SftConfig, ["--load-optimizer"])
