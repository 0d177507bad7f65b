"""Flags and YAML into frozen dataclasses: `pytest tests/config/test_config.py`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ascendchat.config import dump, load_yaml, option, parse, wants_help
from ascendchat.config.help import field_docs, field_groups, help_page
from ascendchat.errors import UserError, home


@dataclass(frozen=True)
class Base:
    """What several commands share."""

    device_type: Literal["npu", "cuda", "mps", "cpu"] | None = None
    "device to use"


@dataclass(frozen=True)
class Sample(Base):
    """A command with one field of every kind."""

    device_batch_size: int = option(8, also=("batch", "micro_batch"))
    "rows per device"
    warmup: int = 0
    "steps of warm-up"
    lr: float = 0.02
    "learning rate"
    tokens: int | None = None
    "training tokens"
    name: str = ""
    "name of the run"
    json: bool = False
    "print JSON"
    resume: bool | None = None
    "continue; by default when there is a checkpoint"
    level: Literal[1, 2, 3] = 2
    "how much"
    track: tuple[str, ...] = ("a",)
    "where to log"
    sizes: tuple[int, ...] = ()
    "sizes"
    extra: dict[str, int] = dataclasses.field(default_factory=dict)
    "a mapping"
    share: float = option(0.5, above=0, below=1)
    "part of it"
    rows: int | None = option(None, least=1, most=1e6, besides=(-1,))
    "rows to read; -1: all"
    weights: tuple[float, ...] = option((), least=0)
    "of the parts"


@dataclass(frozen=True)
class Words:
    """Takes bare words."""

    files: tuple[str, ...] = option((), words="each")
    "files"
    json: bool = False
    "print JSON"


@dataclass(frozen=True)
class Numbers:
    """Takes bare numbers."""

    steps: tuple[int, ...] = option(words="each")
    "steps"


@dataclass(frozen=True)
class One:
    """Takes exactly one word."""

    log: str = option(words="each")
    "file"


@dataclass(frozen=True)
class Rest:
    """Runs another command."""

    command: tuple[str, ...] = option(words="rest")
    "what to run"
    devices: int = option(1, also=("npus", "gpus"))
    "how many"


@dataclass(frozen=True)
class Sized:
    """Has two groups."""

    "# Device"
    chip: str = ""
    "name of the chip"

    "# Size"
    width: int = 1
    "channels"
    rows: int = 1
    "rows"


@dataclass(frozen=True)
class Grouped(Sized):
    """Has groups of its own and of its base."""

    json: bool = False
    "print JSON"

    "# Run"
    name: str = ""
    "name of the run"

    "# Size"

    rows: int = 2
    "rows of a step"


def error(cls: type, *argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(cls, list(argv))
    return str(caught.value)


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_dashes_and_underscores_and_aliases_are_the_same_flag() -> None:
    for flag in ("--device-batch-size", "--device_batch_size", "--device-batch_size", "--batch", "--micro_batch"):
        assert parse(Sample, [f"{flag}=32"]) == parse(Sample, [flag, "32"]) == Sample(device_batch_size=32)


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--lr", "-1e-3"], "lr", -1e-3),
        (["--tokens", "1e9"], "tokens", 10**9),
        (["--tokens", "auto"], "tokens", None),
        (["--device-type", "npu"], "device_type", "npu"),
        (["--json"], "json", True),
        (["--json", "false"], "json", False),
        (["--no-json"], "json", False),
        (["--no-resume"], "resume", False),
        (["--resume=auto"], "resume", None),
        (["--track", "b, c,"], "track", ("b", "c")),
        (["--name", "a=b"], "name", "a=b"),
        (["--name=--odd"], "name", "--odd"),
        (["--lr", "1", "--lr", "2"], "lr", 2.0),
    ],
)
def test_values_of_flags(argv: list[str], field: str, value: object) -> None:
    got = getattr(parse(Sample, argv), field)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--device-btch-size", "3"], "unknown flag --device-btch-size; did you mean --device-batch-size?"),
        (["--zzzzzzzz"], "choose from: --device-type, --device-batch-size, --batch"),
        (["--device-type", "cuad"], "--device-type: 'cuad' is not a valid value; did you mean cuda? (choose"),
        (["--tokens", "many"], "--tokens: 'many' is not a whole number"),
        (["--lr", "fast"], "--lr: 'fast' is not a number"),
        (["--json=maybe"], "is not true or false"),
        (["--name"], "--name needs a value"),
        (["--name", ""], "--name has an empty value; leave the flag out"),
        (["--track", ","], "--track must not be empty"),
        (["--lr", "nan"], "--lr: 'nan' is not a number"),
        (["--share", "0"], "--share must be greater than 0 and less than 1, found 0"),
        (["--share", "1"], "--share must be greater than 0 and less than 1, found 1"),
        (["--rows", "0"], "--rows must be at least 1 and at most 1e6, or -1, found 0"),
        (["--rows", "1000001"], "--rows must be at least 1 and at most 1e6, or -1, found 1000001"),
        (["--weights", "1,-2"], "--weights must be at least 0, found -2"),
        (["--name", "--json"], "--name needs a value"),
        (["--no-lr"], "only a switch can be negated"),
        (["--no-json=true"], "takes no value"),
        (["word"], "unexpected argument 'word'"),
        (["--extra", "x"], "give it in a YAML file"),
    ],
)
def test_wrong_input_says_what_was_meant(argv: list[str], said: str) -> None:
    assert said in error(Sample, *argv)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "lr: 1e-4\nmicro-batch: 4\ndevice_type: cpu\ntrack: [x, y]\nextra: {a: 1}\n")
    for argv in (["--config", path, "--batch", "16"], ["--batch", "16", f"--config={path}"]):
        got = parse(Sample, argv)
        assert got == Sample(
            lr=1e-4, device_batch_size=16, device_type="cpu", track=("x", "y"), extra={"a": 1}, warmup=0
        )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devise_type: npu", "unknown setting devise_type; did you mean device_type?"),
        ("warmup: yes", "warmup: True is not a whole number"),
        ("share: 2", "c.yaml: share must be greater than 0 and less than 1, found 2.0"),
        ("weights: [1, -1]", "c.yaml: weights must be at least 0, found -1"),
        ("track: []", "c.yaml: track must not be empty"),
        ("name: off", "put it in quotes"),
        ("device_type: gpu", "c.yaml: device_type: 'gpu' is not a valid value"),
        ("- a\n- b", "must hold `name: value` lines"),
        ("a: [1", "is not valid YAML"),
    ],
)
def test_wrong_yaml_names_the_file_and_the_setting(tmp_path: Path, text: str, said: str) -> None:
    message = error(Sample, "--config", yaml_file(tmp_path, text))
    assert said in message
    assert "c.yaml" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\nlr: 1e-4\nname: b\n", "`name` stands twice, in line 1 and in line 3; leave one out"),
        ("extra:\n  b: {c: 1,\n    c: 2}\n", "`c` stands twice, in line 2 and in line 3; leave one out"),
        ("track: [{a: 1, a: 1}]", "`a` stands twice, in line 1 and in line 1; leave one out"),
        ("device_batch_size: 1\nmicro-batch: 2\n", "device_batch_size and micro-batch say the same; leave one out"),
        ("extra: " + "[" * 100_000, "it is nested too deep"),
        ("extra: " + "{a: " * 100_000, "it is nested too deep"),
    ],
    ids=lambda value: value[:20],
)
def test_yaml_that_says_two_things_or_goes_too_deep_is_refused(tmp_path: Path, text: str, said: str) -> None:
    message = error(Sample, "--config", yaml_file(tmp_path, text))
    assert said in message
    assert "c.yaml" in message


def test_yaml_may_say_the_same_thing_twice_in_two_places(tmp_path: Path) -> None:
    text = "x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\nz: [{a: 1}, {a: 1}]\n"
    assert load_yaml(yaml_file(tmp_path, text)) == {"x": {"a": 1, "b": 2}, "y": {"a": 1, "b": 3}, "z": [{"a": 1}] * 2}
    same = yaml_file(tmp_path, "device_batch_size: 2\nmicro-batch: 2\n")
    assert parse(Sample, ["--config", same]).device_batch_size == 2


def test_missing_binary_and_empty_yaml(tmp_path: Path) -> None:
    assert "No such file" in error(Sample, "--config", str(tmp_path / "no.yaml"))
    assert "Is a directory" in error(Sample, "--config", str(tmp_path))
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\xff")
    assert "not valid YAML" in error(Sample, "--config", str(tmp_path / "b.yaml"))
    assert parse(Sample, ["--config", yaml_file(tmp_path, "# nothing\n")]) == Sample()
    assert load_yaml(yaml_file(tmp_path, "名: 值")) == {"名": "值"}


samples = st.builds(
    Sample,
    device_type=st.sampled_from(["npu", "cuda", "mps", "cpu", None]),
    device_batch_size=st.integers(),
    warmup=st.integers(),
    lr=st.floats(allow_nan=False, allow_infinity=False),
    tokens=st.none() | st.integers(),
    name=st.text(),
    json=st.booleans(),
    resume=st.none() | st.booleans(),
    level=st.sampled_from([1, 2, 3]),
    track=st.lists(st.text(), min_size=1).map(tuple),
    sizes=st.lists(st.integers()).map(tuple),
    extra=st.dictionaries(st.text(), st.integers()),
)


@settings(max_examples=30, deadline=None)
@example(Sample(name="\x85", extra={"\x85 \u2028": 1}, track=("a\u2029b",)))
@example(Sample(name="中文 yes", track=("off", "1e5", "null", "")))
@given(samples)
def test_dumped_config_reads_back_the_same(tmp_path_factory: pytest.TempPathFactory, config: Sample) -> None:
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump(config), encoding="utf-8")
    assert parse(Sample, ["--config", str(path)]) == config
    assert "中文" in dump(config) or not config.name.startswith("中文"), "it stays readable"


def test_bare_words_fill_the_field_that_takes_them(tmp_path: Path) -> None:
    assert parse(Words, ["a,b", "--json", "-"]) == Words(("a,b", "-"), json=True)
    assert "FILES has an empty value" in error(Words, "a", "")
    assert parse(Words, []) == Words()
    assert parse(Numbers, ["1", "-2"]) == Numbers((1, -2))
    assert "STEPS: 'x' is not a whole number" in error(Numbers, "x")
    assert "missing STEPS" in error(Numbers)
    assert parse(One, ["a"]) == One("a")
    assert "one log expected, found 2: a b" in error(One, "a", "b")
    config = Words(("", "a,b", "c d"))
    assert parse(Words, ["--config", yaml_file(tmp_path, dump(config))]) == config


def test_rest_takes_everything_after_the_first_word() -> None:
    assert parse(Rest, ["--npus", "8", "base", "--depth", "12", "--devices", "x"]) == Rest(
        ("base", "--depth", "12", "--devices", "x"), devices=8
    )
    assert parse(Rest, ["-m", "module", "--flag"]).command == ("-m", "module", "--flag")
    assert parse(Rest, ["--gpus=2", "--", "base", "--x"]).command == ("--", "base", "--x")
    assert "missing COMMAND" in error(Rest, "--npus", "8")
    assert "unknown flag --depth" in error(Rest, "--depth", "12", "base")


def test_help_is_asked_before_the_separator_only() -> None:
    assert wants_help(["--lr", "1", "--help"])
    assert wants_help(["-h"])
    assert not wants_help(["--", "x.py", "--help"])


def test_help_text_has_every_flag_its_docs_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert field_docs(Sample).keys() == {f.name for f in dataclasses.fields(Sample)}
    text = help_page("ascendchat sample", Sample)
    assert text.startswith("usage: ascendchat sample [--flags]\n\nA command with one field of every kind.")
    rows = {line.split()[0].rstrip(","): " ".join(line.split()) for line in text.splitlines() if line.startswith("  -")}
    assert rows["--device-batch-size"].startswith("--device-batch-size, --batch, --micro-batch N rows per device")
    assert rows["--warmup"] == "--warmup N steps of warm-up (default: 0)"
    assert rows["--share"] == "--share X part of it (greater than 0 and less than 1; default: 0.5)"
    assert rows["--rows"] == "--rows N rows to read; -1: all (at least 1 and at most 1e6, or -1)"
    assert rows["--level"] == "--level {1,2,3} how much (default: 2)"
    assert rows["--track"] == "--track TEXT,... where to log (default: a)"
    assert rows["--json"] == "--json print JSON"
    assert rows["--device-type"] == "--device-type {npu,cuda,mps,cpu} device to use"
    assert help_page("x", Words).splitlines()[0] == "usage: x [--flags] FILES"


def test_help_shows_the_groups_of_the_command_before_those_of_its_bases() -> None:
    """A redeclared field keeps its group and comes first in it; a heading without fields gives a group its place."""
    assert field_groups(Grouped) == {"": ["json"], "Run": ["name"], "Size": ["rows", "width"], "Device": ["chip"]}
    page = help_page("ascendchat grouped", Grouped).splitlines()
    headings = [line for line in page if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Run:", "Size:", "Device:"]
    flags = [line.split()[0] for line in page if line.startswith("  --")]
    assert flags == ["--json", "--name", "--rows", "--width", "--chip", "--config"]


def test_home_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("ASCENDCHAT_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".cache" / "ascendchat"
