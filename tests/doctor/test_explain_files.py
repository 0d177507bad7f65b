"""rules/*.yaml: what is read, and that a broken file is refused with its name and the name of the entry."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendchat.doctor.explain_rules import FOLDER, code, compiled, read_rules
from ascendchat.errors import UserError

GOOD = """\
- id: disk-full
  level: cause
  patterns:
    - 'No space left on device'
  title: {en: It is full, zh: 已满}
  cause: {en: A file could not be written., zh: 有文件没能写入。}
  check:
    - en: Which folder is it?
      zh: 是哪个目录？
  commands: [df -h]
"""


def test_a_rule_is_read_from_a_file_alone(tmp_path: Path) -> None:
    (tmp_path / "01_host.yaml").write_text(GOOD.replace("  title", "    - code: 207001\n  title"))
    (rule,) = read_rules(tmp_path)
    assert (rule.id, rule.level, rule.title["zh"], rule.commands) == ("disk-full", 0, "已满", ["df -h"])
    assert rule.patterns == ["No space left on device", code(207001)]
    assert rule.symptoms == {"en": [], "zh": []}


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("disk-full", "Disk full", "`id` must be a name such as disk-full"),
        ("level: cause", "level: fatal", "`level` must be cause, symptom"),
        ("  commands", "  fix: x\n  commands", "there is no field `fix`"),
        (", zh: 已满", "", "`title` must be a text in `en` and one in `zh`"),
        ("[df -h]", "df -h", "`commands` must be a list of commands"),
        ("  commands", "  symptoms: [full]\n  commands", "`symptoms` must be a list of phrases in `en`"),
        ("  commands", "  alone: maybe\n  commands", "`alone` must be true or false"),
        (
            "'No space left on device'",
            "code: many",
            "`patterns` must be a list of regular expressions, or of `code: NUMBER`",
        ),
        ("It is full", "'{what} is full'", r"the pattern No space left on device has no group \(\?P<what>"),
        ("  cause:", "  title: {en: a, zh: b}\n  cause:", "`title` stands twice"),
        ("- id: disk-full", "- just text\n- id: disk-full", "rule 1: an entry has fields such as `id:`"),
        ("level: cause", "level: [cause", "01_host.yaml"),
    ],
)
def test_a_broken_rule_is_refused_with_its_file_and_name(old: str, new: str, says: str, tmp_path: Path) -> None:
    assert GOOD.count(old) == 1
    (tmp_path / "01_host.yaml").write_text(GOOD.replace(old, new))
    with pytest.raises(UserError, match=says) as caught:
        list(read_rules(tmp_path))
    assert "01_host.yaml" in str(caught.value)
    assert "Adding an error explanation" in str(caught.value)


def test_a_broken_file_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "01_host.yaml").write_text(GOOD)
    (tmp_path / "02_disk.yaml").write_text(GOOD)
    with pytest.raises(UserError, match=r"02_disk\.yaml, rule disk-full: another rule has this name"):
        list(read_rules(tmp_path))
    (tmp_path / "02_disk.yaml").write_text("disk: full\n")
    with pytest.raises(UserError, match=r"02_disk\.yaml: the file must be a list of rules"):
        list(read_rules(tmp_path))
    (tmp_path / "02_disk.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"02_disk\.yaml"):
        list(read_rules(tmp_path))
    (tmp_path / "02_disk.yaml").rename(tmp_path / "disk.yaml")
    with pytest.raises(UserError, match=r"disk\.yaml: a file of rules is called NN_TOPIC\.yaml"):
        list(read_rules(tmp_path))


def test_a_pattern_that_is_no_regular_expression_is_refused_when_it_is_needed() -> None:
    with pytest.raises(UserError, match=r"host\.yaml, rule x: the pattern disk\( is no regular expression"):
        compiled("disk(", "host.yaml, rule x")


def test_rules_and_recipes_are_installed_with_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((FOLDER.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"doctor/rules/*.yaml", "doctor/faults.json", "recipes/*.yaml"} <= set(
        project["tool"]["setuptools"]["package-data"]["ascendchat"]
    )
    assert {path.suffix for path in FOLDER.iterdir()} == {".yaml"}
