"""Every rule of `ascendchat explain` on a log excerpt, in both languages; every known failure by its texts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from ascendchat.doctor.explain import explain
from ascendchat.doctor.explain_rules import all_rules, compiled, matchers

SAMPLES = Path(__file__).parent / "explain_samples"
RULES, CODES = all_rules()
IDS = [rule.id for rule in RULES]
TABLES = {name: rows for rule in CODES for name, rows in rule.tables.items()}
MODULES, REASONS, RANGES, HCCL = (TABLES[name] for name in ("module", "reason", "range", "meaning"))


def test_a_failure_is_recognised_by_each_of_its_texts_and_every_pattern_by_one() -> None:
    """explain_samples/lines.txt: a rule, and a line of a log that it explains before all others."""
    lines = [line.split("\t", 1) for line in (SAMPLES / "lines.txt").read_text(encoding="utf-8").splitlines()]
    found = [(name, line, [finding.rule for finding in explain(f"step 3 of 9\n{line}\n")]) for name, line in lines]
    assert [row for row in found if row[2][:1] != [row[0]]] == []
    texts = [line for _, line in lines] + [
        line for path in SAMPLES.glob("*.log") for line in path.open(encoding="utf-8")
    ]
    searched = [(rule.id, pattern, compiled(pattern, rule.where).search) for _, _, pattern, rule in matchers()]
    assert [row[:2] for row in searched if not any(map(row[2], texts))] == [], "add a line for each"


@pytest.mark.parametrize("name", IDS)
def test_each_rule_is_the_first_finding_on_its_excerpt_in_both_languages(name: str) -> None:
    text = (SAMPLES / f"{name}.log").read_text(encoding="utf-8")
    english, chinese = explain(text, "en")[0], explain(text, "zh")[0]
    assert english.rule == chinese.rule == name
    assert {path.stem for path in SAMPLES.glob("*.log")} == set(IDS), "one excerpt for each rule"
    assert english.line in text
    assert english.commands == chinese.commands
    assert english.commands
    assert len(english.check) == len(chinese.check) >= 1
    for one, two in zip(
        [english.title, english.cause, *english.check], [chinese.title, chinese.cause, *chinese.check], strict=True
    ):
        assert one != two
        assert re.search(r"[\u4e00-\u9fff]", two), two
        assert not re.search(r"[\u3000-\u9fff\uff00-\uffef]", one), one
        assert "{" not in one + two


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_kernel_that_does_not_compile_is_explained_for_every_device(language: str) -> None:
    log = (
        "torch 2.11.0+cu130 on cuda:0\n"
        "torch._inductor.exc.InductorError: CalledProcessError: Command '['/usr/bin/gcc', '/tmp/main.c']' returned 1\n"
    )
    (found,) = explain(log, language)
    assert "npu" not in f"{found.rule} {found.title}".lower()
    assert "--no-compile" in found.cause
    assert "ASCENDCHAT_COMPILE=0" in found.cause
    (npu,) = [part for part in re.split(r"[.。] ?", found.cause) if "triton-ascend" in part]
    assert "NPU" in npu  # said of NPUs alone
    assert all(line.startswith("NPU") for line in found.check if "triton-ascend" in line)
    assert found.commands[0] == "export ASCENDCHAT_COMPILE=0"


def test_advice_of_torch_npu_to_set_a_variable_is_not_read_as_that_it_is_set() -> None:
    advice = (
        "Since the operator is called asynchronously, the stacktrace may be inaccurate. If you want to get the "
        "accurate stacktrace, please set the environment variable ASCEND_LAUNCH_BLOCKING=1.\n"
    )
    assert explain("ZorkError: the grue ate the flux\n" + advice) == []
    assert explain("set the environment variable\nASCEND_LAUNCH_BLOCKING=1.\n") == []
    assert [f.rule for f in explain("RuntimeError: NPU out of memory. Tried to allocate 2 GiB\n" + advice)] == [
        "npu-oom"
    ]


def test_a_missing_package_gets_the_extra_it_belongs_to() -> None:
    (npu,) = explain("ModuleNotFoundError: No module named 'torch_npu'")
    assert any(".[npu]" in command for command in npu.commands)
    assert not any(".[hf]" in text for text in [*npu.check, *npu.commands])
    (flash,) = explain("ModuleNotFoundError: No module named 'flash_attn'")
    assert "cannot be installed for an NPU" in flash.cause
    (other,) = explain("ModuleNotFoundError: No module named 'einops'")
    assert "python -m pip install einops" in other.commands[1]


def test_the_loss_that_the_training_loop_refuses_gets_a_cause() -> None:
    from ascendchat.train.loop import Diverged

    text = f"{Diverged.__module__}.{Diverged.__name__}: the loss of step 120 is nan (running mean 3.2); batch 120"
    for line in (text, "ascendchat base: the loss of step 120 is 14.2 (running mean 3.2); batch 120 of this data"):
        (found,) = explain(line)
        assert found.rule == "diverged"
        assert "learning rate" in found.cause


def test_every_pattern_has_plain_text_for_the_scan_and_every_hole_is_filled() -> None:
    for needle, _, pattern, rule in matchers():
        assert len(needle) >= 2, pattern
        texts = [*rule.title.values(), *rule.cause.values(), *(text for check in rule.check for text in check.values())]
        holes = set(re.findall(r"{(\w+)}", " ".join([*texts, *rule.commands]))) - {"code" if rule.code else ""}
        assert holes <= set(compiled(pattern, rule.where).groupindex), rule.id


def test_every_code_of_torch_npu_is_decoded() -> None:
    for module, reason in itertools.product(MODULES, REASONS):
        line = f"[ERROR] 2026-03-02-10:13:12 (PID:7, Device:0, RankID:0) ERR{module}{reason} X y"
        (english,), (chinese,) = explain(line, "en"), explain(line, "zh")
        if (module, reason) == ("99", "999"):
            assert "Python" in english.title
            assert "traceback above" in english.check[0]
        elif english.rule.startswith("code-"):
            assert english.cause == f"{MODULES[module]['en']} reports {REASONS[reason]['en']}."
            assert REASONS[reason]["zh"] in chinese.cause


def test_unlisted_codes_of_cann_and_hccl_are_decoded() -> None:
    for family in ("EI", "EJ", "EE", "EH", "EL", "EZ", "EK", "E3"):
        (found,) = explain(f"{family}7777: something new")
        assert found.rule == f"code-{family}7777"
        (rule,) = [rule for rule in CODES if rule.code.startswith(family)]
        assert found.cause == rule.cause["en"]
    for start, meaning in RANGES.items():
        if start not in ("161", "361", "561"):
            assert meaning["en"] in explain(f"NPU function error: x, error code is {start}777")[0].cause
    assert set(HCCL) == {str(number) for number in range(1, 25)}
    for number, meaning in HCCL.items():
        found = explain(f"HCCL function error: HcclAllReduce(x), error code is {number}")[0]
        assert (found.rule, meaning["en"] in found.cause) == (f"code-HCCL-{number}", True)
        assert explain(f"[AllReduce]errNo[0x000000000500{int(number):04x}] failed")[0].cause == found.cause
    for unknown in ("ERR77001", "error code is 199777", "HCCL error code is 25", "errNo[0x05000063]"):
        assert explain(unknown) == []


def test_a_code_is_decoded_only_when_no_rule_explains_the_log() -> None:
    text = "ERR02200 DIST call hccl api failed\n"
    assert [f.rule for f in explain(text)] == ["code-ERR02200"]
    assert [f.rule for f in explain(text + "OSError: [Errno 28] No space left on device\n")] == ["disk-full"]
