"""`ascendchat explain "training hangs"`: rules found by what a user sees, in both languages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascendchat import cli
from ascendchat.config.commands import ExplainConfig
from ascendchat.doctor.explain import MAX_RULES, ask, match_phrases, phrases, run, terms
from ascendchat.doctor.explain_rules import all_rules
from ascendchat.errors import UserError

RULES = all_rules()[0]
TOLD = [(rule.id, phrase) for rule in RULES for phrases in rule.symptoms.values() for phrase in phrases]


@pytest.mark.parametrize(
    ("question", "first", "among"),
    [
        ("显存不足", "npu-oom", "cuda-oom"),
        ("out of memory", "npu-oom", "cuda-oom host-oom mps-oom"),
        ("训练卡住", "standstill", "hccl-exec-timeout"),
        ("my training hangs after 10 steps on 8 cards", "standstill", "hccl-exec-timeout"),
        ("NPU not found", "", "npu-not-visible torch-npu-missing npu-smi-container"),
        ("loss 不下降", "loss-flat", ""),
        ("slow training", "", "host-bound cpu-fallback jit-compile"),
        ("乱码", "poor-answers", ""),
        ("how do I install torch_npu", "torch-npu-missing", ""),
        ("HCCL_IF_IP", "hccl-if-ip", ""),
    ],
)
def test_a_symptom_in_words_finds_its_rules_best_first(question: str, first: str, among: str) -> None:
    found = [finding.rule for finding in ask(question)]
    assert not first or found[0] == first
    assert set(among.split()) <= set(found)
    assert len(found) <= MAX_RULES + 1
    assert found == [finding.rule for finding in ask(question, "zh")]


def test_every_symptom_of_a_rule_finds_it() -> None:
    assert [(name, phrase) for name, phrase in TOLD if name not in [rule.id for rule, _ in match_phrases(phrase)]] == []


def test_word_endings_order_and_letter_case_do_not_matter() -> None:
    assert terms("Training HANGS") == terms("hanging trains") == terms("the hanged train")
    assert terms("loss") == {"loss"}
    assert terms("训练很慢") == terms("训练慢")


def test_an_error_text_as_the_question_is_read_as_one() -> None:
    (found,) = ask("RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB")
    assert (found.rule, found.symptom, found.line_number) == ("npu-oom", "", 1)
    assert ask("error code is 107777")[0].rule == "code-107777"


def test_texts_found_by_symptom_have_no_holes_and_no_place() -> None:
    for rule in RULES:
        for phrase, _ in phrases(rule):
            for finding in ask(phrase, "zh"):
                text = " ".join([finding.title, finding.cause, *finding.check])
                assert "{" not in text
                assert bool(finding.line) == (finding.symptom == "")


def test_the_command_takes_a_symptom_with_or_without_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "--lang", "en", "out", "of", "memory"]) == 0
    english = capsys.readouterr().out
    assert "by its symptom" in english
    assert "1. The NPU ran out of memory  [npu-oom]" in english
    assert "2. The GPU ran out of memory  [cuda-oom]" in english
    assert "Seen:" not in english
    assert cli.main(["explain", "训练卡住", "--lang", "zh"]) == 0
    assert "1. 训练停住不动，也没有报错  [standstill]" in capsys.readouterr().out
    assert cli.main(["explain", "--json", "disk full"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["known"]
    assert [(f["rule"], f["symptom"]) for f in answer["findings"]] == [("disk-full", "disk full")]


@pytest.mark.parametrize(("lang", "says"), [("en", "What to do next"), ("zh", "接下来可以")])
def test_a_question_that_is_like_nothing_says_what_to_do(
    lang: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for question in ("how do I bake bread", "天气怎么样", "hello"):
        assert cli.main(["explain", "--lang", lang, question]) == 1
        shown = capsys.readouterr().out
        assert says in shown
        assert "ascendchat explain train.log" in shown
        assert "ascendchat doctor" in shown


def test_a_file_that_is_not_there_is_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.log", "runs/d12", "out.txt"):
        with pytest.raises(UserError, match="there is no file"):
            run(ExplainConfig(log=(name,)))
    (tmp_path / "memory").write_text("nothing known\n")  # a file of that name is a log
    assert run(ExplainConfig(log=("memory",))) == 1
