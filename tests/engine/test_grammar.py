"""Grammars alone: ids are ours, special tokens can be named, what cannot be compiled says why and harms nobody."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from typing import Any

import engine_models as make
import numpy as np
import pytest

from ascendchat.engine import grammar as module
from ascendchat.engine import grammar as trial
from ascendchat.engine.grammar import TOO_MUCH, Grammars, Matcher, compiled, grammars, vocabulary, with_moved_borders
from ascendchat.engine.request import Grammar

TEXT = make.tokenizer()
SPECIAL = TEXT.specials
END = SPECIAL["<|assistant_end|>"]


def schema(**content: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(content))


def follow(matcher: Matcher, tokens: list[int]) -> str | None:
    """Every token must be allowed; how the last one ends the answer."""
    ending = None
    for token in tokens:
        assert ending is None, "the answer is over"
        assert grammars(TEXT).allowed([matcher])[0, token], f"{TEXT.decode([token])!r} is barred"
        ending = matcher.take(token)
    return ending


def behind(grammar: Grammar, text: str = "") -> Matcher:
    """A matcher of an answer that has this text so far."""
    matcher = grammars(TEXT).matcher(grammar)
    assert follow(matcher, TEXT.encode(text)) is None
    return matcher


def next_tokens(matcher: Matcher) -> set[int]:
    return set(np.flatnonzero(grammars(TEXT).allowed([matcher])[0]).tolist())


def may_be_whole(grammar: Grammar, text: str) -> bool:
    """Whether an answer may be this text and no more."""
    matcher = grammars(TEXT).matcher(grammar)
    for token in TEXT.encode(text):
        if token not in next_tokens(matcher):
            return False
        ending = matcher.take(token)
    return ending == "stop" or END in next_tokens(matcher)


def test_ids_are_those_of_our_tokenizer() -> None:
    theirs = vocabulary(TEXT)
    assert (theirs.vocab_size, theirs.eos_token) == (TEXT.vocab_size, END)
    ordinary = [number for number in range(len(TEXT.tokens)) if number != 255]  # a byte that no text has
    assert [theirs.decode_bytes([number]) for number in ordinary] == [TEXT.tokens[number] for number in ordinary]
    assert not any(theirs.is_special_token(number) for number in ordinary)
    assert all(theirs.is_special_token(number) for number in SPECIAL.values())
    for text in ("hello, hell", '{"a": "你好"}', "é 🙂\n\n  x"):
        assert theirs.tokenize_str(text) == TEXT.encode(text)


@pytest.mark.parametrize(
    ("grammar", "answer", "ending"),
    [
        (schema(type="object", properties={"hello": {"const": "好"}}, required=["hello"]), '{"hello": "好"}', "stop"),
        (schema(type="object", properties={"a": {"type": "integer"}}), '{"a":1,"b":[null, 2]}', "stop"),
        (schema(type="integer", minimum=10, maximum=20), "17", "stop"),
        (Grammar("json"), '{"x": {"y": []}}', "stop"),
        (Grammar("regex", "[a-c]+!"), "abc!", "stop"),
        (Grammar("regex", "(?:ab)*"), "abab", None),
        (Grammar("lark", 'start: "he" ("l" | "ll") NAME\nNAME: /[a-z]{2}/'), "hellxy", "stop"),
    ],
)
def test_answers_that_fit_are_allowed_and_end(grammar: Grammar, answer: str, ending: str | None) -> None:
    matcher = grammars(TEXT).matcher(grammar)
    assert follow(matcher, TEXT.encode(answer)) == ending
    if ending is None:
        assert END in next_tokens(matcher)


def test_the_end_is_allowed_only_where_the_answer_may_end() -> None:
    grammar = Grammar("regex", "ab?")
    assert next_tokens(behind(grammar)) == {ord("a")}
    assert next_tokens(behind(grammar, "a")) == {ord("b"), END}


def test_json_cannot_be_stretched_with_white_space() -> None:
    grammar = schema(type="array", items={"type": "integer", "maximum": 9, "minimum": 0})
    places = [
        before for before in ("", "[", "[1", "[1,", "[1, ") if next_tokens(behind(grammar, before)) & set(b" \t\r\n")
    ]
    assert places == ["[1,"], "one, behind a comma"


def test_what_a_schema_says_to_the_library_is_overruled() -> None:
    flexible = schema(type="array", **{"x-guidance": {"whitespace_pattern": "[ ]+"}})
    assert ord(" ") not in next_tokens(behind(flexible, "["))
    with pytest.raises(ValueError, match="uniqueItems"):
        grammars(TEXT).matcher(schema(type="array", uniqueItems=True, **{"x-guidance": {"lenient": True}}))


def test_a_key_cannot_be_written_a_second_time_by_escapes() -> None:
    r"""{"a": 1, "\u0061": "x"} has the key a twice, and a reader keeps the second."""
    grammar = schema(type="object", properties={"a": {"type": "integer"}}, additionalProperties={"type": "string"})
    assert {ord("n"), ord("u")} & next_tokens(behind(grammar, '{"a":1,"\\')) == {ord("n")}


@pytest.mark.parametrize(
    ("borders", "inside", "outside"),
    [
        ({"exclusiveMinimum": 5, "maximum": 5.125}, ["5.101", "5.125"], ["5", "5.0", "6"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1.0}, ["-1.5", "-1.25"], ["-1", "-1.0", "-2"]),
        ({"exclusiveMinimum": 0, "minimum": -3, "exclusiveMaximum": 0.5}, ["0.25"], ["0", "-0", "-1"]),
        ({"exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5}, ["0.25", "0.375"], ["0", "0.0", "0.125"]),
        ({"exclusiveMinimum": 5, "maximum": 8}, ["6", "7", "8"], ["5", "9"]),
        ({"minimum": 5.5, "exclusiveMaximum": 6}, ["5.5", "5.99"], ["6", "6.0", "5"]),
        ({"allOf": [{"exclusiveMinimum": 5}, {"maximum": 5.5}]}, ["5.25", "5.5"], ["5", "6"]),
        ({"$defs": {"default": {"exclusiveMinimum": 5}}, "$ref": "#/$defs/default", "maximum": 5.5}, ["5.5"], ["5"]),
        ({"exclusiveMinimum": 10**10, "maximum": 10**10 + 0.5}, ["10000000000.25"], ["10000000000"]),
        ({"exclusiveMinimum": 0}, ["0.0000000001", "7"], ["0", "-1"]),
    ],
)
def test_exclusive_borders_are_outside(borders: Any, inside: list[str], outside: list[str]) -> None:
    grammar = schema(type="number", **borders)
    assert [text for text in [*inside, *outside] if may_be_whole(grammar, text)] == inside


@pytest.mark.parametrize("name", ["const", "enum", "default", "examples", "properties"])
def test_exclusive_borders_of_a_property_are_outside_whatever_its_name(name: str) -> None:
    inner = {"type": "number", "exclusiveMinimum": 5, "maximum": 5.5}
    grammar = schema(type="object", properties={name: inner}, required=[name], additionalProperties=False)
    assert [text for text in ("5", "5.25") if may_be_whole(grammar, f'{{"{name}":{text}}}')] == ["5.25"]


def test_a_schema_with_borders_may_be_deep_or_no_json() -> None:
    deep = '{"exclusiveMinimum": 1, "not": ' * 200 + '{"maximum": 1.5}' + "}" * 200
    assert with_moved_borders(deep).count("1.000000001") == 200
    for text in ('{"exclusiveMinimum": 1', '{"exclusiveMinimum": 1e999, "maximum": NaN}', "[" * 10**5 + '"exclusiveM'):
        assert with_moved_borders(text)


def test_exclusive_borders_of_whole_numbers_are_outside() -> None:
    grammar = schema(type="integer", exclusiveMinimum=5, maximum=8)
    assert [text for text in "4 5 6 8 9".split() if may_be_whole(grammar, text)] == ["6", "8"]
    with pytest.raises(ValueError, match="cannot be used"):
        grammars(TEXT).matcher(schema(type="integer", exclusiveMinimum=5, maximum=5.125))


def test_only_borders_are_moved() -> None:
    value = {"exclusiveMinimum": 5, "text": ["x"]}
    content = json.dumps(value, separators=(",", ":"))
    behind(schema(type="object", properties={"exclusiveMinimum": {"const": value}}), '{"exclusiveMinimum":' + content)


TOOLS = """
    start: TEXT | call
    TEXT: /(.|\\n)+/
    call: <|tool_start|> %json {
        "x-guidance": {"whitespace_flexible": false},
        "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": false
    } <|tool_end|>
"""


def test_a_tool_call_between_special_tokens_or_free_text() -> None:
    grammar, special = Grammar("lark", TOOLS), set(SPECIAL.values())
    assert next_tokens(behind(grammar)) & special == {SPECIAL["<|tool_start|>"]}
    call = [SPECIAL["<|tool_start|>"], *TEXT.encode('{"x":-7}'), SPECIAL["<|tool_end|>"]]
    assert follow(grammars(TEXT).matcher(grammar), call) == "stop"
    assert next_tokens(behind(grammar, "hello <|tool_start|> as text")) & special == {END}


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (schema(type="objec"), "Invalid type: objec"),
        (Grammar("json_schema", '{"type"'), "EOF while parsing"),
        (schema(type="integer", minimum=5, maximum=3), "Unsatisfiable schema: minimum"),
        (schema(**{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no answer fits it"),
        (Grammar("lark", "start: <|nothing|>"), "unknown special token"),
        (Grammar("regex", "("), "unclosed group"),
        (Grammar("regex", "x" * (module.MAX_CHARACTERS + 1)), "characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_cannot_be_compiled_says_why_in_one_line(grammar: Grammar, says: str) -> None:
    for _ in range(2):  # compiled, and remembered
        with pytest.raises(ValueError, match=rf"^the grammar \({grammar.kind}\) cannot be used: .") as caught:
            grammars(TEXT).matcher(grammar)
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def chain(length: int) -> Grammar:
    """References to references; the last is null, and each may be a list of the next."""
    steps: dict[str, Any] = {f"d{length}": {"type": "null"}}
    for number in range(length):
        following = {"$ref": f"#/$defs/d{number + 1}"}
        steps[f"d{number}"] = {"anyOf": [following, {"type": "array", "items": following}]}
    return schema(**{"$defs": steps, "$ref": "#/$defs/d0"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "hostile",
    [chain(3000), schema(type="integer", multipleOf=100_000_007)],
    ids=["kills the process that compiles it", "runs for minutes"],
)
def test_a_grammar_that_kills_or_hangs_the_compiler_is_refused_and_the_next_one_works(hostile: Grammar) -> None:
    rows = grammars(TEXT)
    for _ in range(2):
        with pytest.raises(ValueError, match=TOO_MUCH):
            rows.matcher(hostile)
    assert follow(rows.matcher(Grammar("regex", "next")), TEXT.encode("next")) == "stop"


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "says"), [(1, ""), (2, TOO_MUCH)])
def test_a_grammar_whose_process_was_killed_is_tried_in_another_once(
    monkeypatch: pytest.MonkeyPatch, kills: int, says: str
) -> None:
    """Nothing was wrong with it: memory may have run out elsewhere."""
    ask, struck = trial.Lane._ask, list[int]()

    def killing(lane: Any, process: subprocess.Popen[bytes], job: Any) -> str | None:
        if len(struck) < kills:
            struck.append(process.pid)
            process.kill()
        return ask(lane, process, job)

    monkeypatch.setattr(trial.Lane, "_ask", killing)
    lane = trial.Lane(TEXT)
    assert lane.reason(Grammar("regex", "a"), 3.0) == says
    assert len(set(struck)) == kills
    if lane.process is not None:
        lane.process.kill()
        lane.process.wait()


@pytest.mark.slow
def test_an_honest_grammar_is_answered_before_the_third_hostile_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hostile ones stand in a lane of their own as soon as they have taken longer than any honest one."""
    monkeypatch.setattr(trial, "QUICK_SECONDS", 0.1)
    monkeypatch.setattr(trial, "CPU_SECONDS", 0.4)
    rows, over = Grammars(TEXT), queue.Queue[str]()
    rows.check(Grammar("regex", "first"))  # its process has started

    def ask(name: str, grammar: Grammar) -> None:
        with contextlib.suppress(ValueError):
            rows.check(grammar)
            over.put(name)
            return
        over.put(f"{name} is refused")

    asked = [("hostile", schema(type="integer", multipleOf=100_000_007 + number)) for number in range(6)]
    asked.append(("honest", Grammar("regex", "honest")))
    asking = [threading.Thread(target=ask, args=each) for each in asked]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    order = [over.get() for _ in asking]
    assert order.index("honest") < 3
    assert sorted(order) == ["honest", *["hostile is refused"] * 6]


def test_a_new_grammar_is_tried_once_however_many_ask_and_once_for_each_who_must_not_know_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, tried, begin = Grammars(TEXT), [], threading.Event()

    def reason(grammar: Grammar) -> str:
        tried.append(grammar.text)
        assert begin.wait(60)
        return ""

    monkeypatch.setattr(rows._trial, "reason", reason)
    monkeypatch.setattr(
        module, "compiled", lambda tokens, grammar: tried.append("compiled") or compiled(tokens, grammar)
    )
    asked = [("a", "x"), ("a", "y"), ("a", "x"), ("b", "x"), ("a", "x"), ("b", "x")]
    asking = [threading.Thread(target=rows.matcher, args=(Grammar("regex", text), salt)) for salt, text in asked]
    for thread in asking:
        thread.start()
    begin.set()
    for thread in asking:
        thread.join()
    assert sorted(tried) == ["compiled"] * 3 + ["x", "x", "y"]


def test_a_chain_of_references_that_is_not_hostile_is_compiled() -> None:
    assert follow(grammars(TEXT).matcher(chain(40)), TEXT.encode("[[null]]")) == "stop"


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tried = Grammars(TEXT), []
    ask = rows._trial.reason
    monkeypatch.setattr(rows._trial, "reason", lambda grammar: tried.append(grammar.text) or ask(grammar))
    monkeypatch.setattr(module, "MAX_KNOWN", 2)
    for text in ("a", "b", "a", "c", "a", "b", "("):
        try:
            matcher = rows.matcher(Grammar("regex", text))
        except ValueError:
            continue
        assert matcher.take(ord(text)) == "stop", "a new row begins at the beginning"
    assert tried == ["a", "b", "c", "b", "("]
    assert len(rows._known) == 2


@pytest.mark.slow
def test_the_trial_runs_without_torch_and_ends_with_its_parent() -> None:
    script = (
        "import sys\n"
        "from ascendchat.data.tokenizer.tokenizer import Tokenizer\n"
        "from ascendchat.engine.grammar import Trial\n"
        "from ascendchat.engine.request import Grammar\n"
        "trial = Trial(Tokenizer([(104, 101)]))\n"
        "assert trial.reason(Grammar('regex', 'a')) == ''\n"
        "maps = open(f'/proc/{trial.quick.process.pid}/maps').read()\n"
        "assert 'llguidance' in maps and 'libtorch' not in maps\n"
        "print(trial.quick.process.pid, flush=True)\n"
        "import os; os._exit(0)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": ":".join(sys.path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # returns when everybody has closed its output: the trial's process, too
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().isdigit()
