"""From an error text, or from what a user sees, to its cause, what to check and the command to run.

    ascendchat explain LOG...        ascendchat explain --lang zh < LOG        ascendchat explain --json RUN-FOLDER
    ascendchat explain "training hangs"                                        ascendchat explain 显存不足

The rules stand in explain_rules_*.py; explain_rules.py says how to add one. A log of any size is read in blocks: the
plain text inside each pattern is looked for first (fast), and the pattern runs only on the lines that hold it.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TextIO

from ascendchat.config import UserError
from ascendchat.config.commands import ExplainConfig
from ascendchat.config.language import language
from ascendchat.doctor import (
    explain_rules_codes,
    explain_rules_cuda,
    explain_rules_driver,
    explain_rules_hccl,
    explain_rules_host,
    explain_rules_hub,
    explain_rules_import,
    explain_rules_kernel,
    explain_rules_memory,
    explain_rules_model,
    explain_rules_own,
    explain_rules_ranks,
    explain_rules_speed,
    explain_rules_torch_npu,
    explain_rules_training,
)
from ascendchat.doctor.explain_rules import CONSEQUENCE, GENERIC, NOTE, SYMPTOM, Rule, literal
from ascendchat.doctor.explain_symptoms import alike
from ascendchat.doctor.explain_text import Finding, render

OWN = explain_rules_own.RULE
# Of two rules that match the same line, the one named first comes first.
RULES: list[Rule] = [
    *explain_rules_memory.RULES,
    *explain_rules_kernel.RULES,
    *explain_rules_cuda.RULES,
    *explain_rules_torch_npu.RULES,
    *explain_rules_import.RULES,
    *explain_rules_driver.RULES,
    *explain_rules_hccl.RULES,
    *explain_rules_ranks.RULES,
    *explain_rules_model.RULES,
    *explain_rules_training.RULES,
    *explain_rules_speed.RULES,
    *explain_rules_hub.RULES,
    *explain_rules_host.RULES,
    OWN,
]
# (plain text to look for, the same without digits, pattern, rule; None for a code that is decoded on the spot)
MATCHERS: list[tuple[bytes, bytes, re.Pattern[str], Rule | None]] = []
for _rule in [*RULES, None]:
    for _pattern in _rule.patterns if _rule else explain_rules_codes.PATTERNS:
        _needle = literal(_pattern).encode()
        MATCHERS.append((_needle, _needle.translate(None, b"0123456789"), re.compile(_pattern), _rule))

BLOCK = 1 << 20  # bytes read at a time
REACH = 1000  # characters of a line looked at on either side of the plain text; a line may be megabytes long
SHOWN = 300  # characters of a line that are shown
MOST_CODES = 50  # different codes that are kept; a damaged log may hold thousands
COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
CLOCK = re.compile(rb"\d{4}-\d\d-\d\d[-T ]\d\d:\d\d:\d\d")
# What stands between two attempts of a launcher in one log. The last attempt is the one asked about.
RESTART = (b"will restart worker group", b"Restarting worker group", b"ascendchat launch: starting again")
PATH = re.compile(r"^\S*/\S*$|\.(?:log|txt|gz|out|err|json|jsonl)$")  # not there, but meant as a file
HOLE = re.compile(r"\{\w+\}")
ATTEMPT = re.compile(r"attempt_(\d+)")  # the folder `ascendchat launch` gives to each attempt


@dataclass
class _Hit:
    rule: Rule
    values: dict[str, str]
    line: str
    count: int
    place: tuple[int, int]  # (index of the file, line)
    file: str
    clock: bytes
    attempt: tuple[int, int]  # (by the folder of the log, by the restarts seen in it)


class _Scan:
    """Reads logs block by block and keeps one hit per rule, so memory does not grow with the log."""

    def __init__(self) -> None:
        self.hits: dict[str, _Hit] = {}
        self.files = 0
        self.name = ""
        self.lines = 0
        self.attempt = (0, 0)
        self.clock = b""

    def read(self, stream: IO[bytes] | gzip.GzipFile, name: str = "") -> None:
        """Scan one log to its end."""
        folder = ATTEMPT.search(name)
        self.files, self.name, self.lines, self.clock = self.files + 1, name, 0, b""
        self.attempt = (int(folder[1]) if folder else 0, 0)
        rest = b""
        for data in _blocks(stream, name):
            whole, newline, tail = (rest + data).rpartition(b"\n")
            if newline:
                self._block(whole + newline)
            rest = tail
            if len(rest) > BLOCK:  # a line longer than a block: keep only its end
                self._block(rest[:-REACH])
                rest = rest[-REACH:]
        self._block(rest)

    def _block(self, block: bytes) -> None:
        block = block.replace(b"\0", b"")  # a log of another system may have two bytes per letter
        if b"\x1b" in block:
            block = COLOUR.sub(b"", block)
        # Lines of a log differ mostly in their numbers: without them few different lines are left to look at.
        slim = b"\n".join(set(block.translate(None, b"0123456789").split(b"\n")))
        seen: dict[tuple[int, str], tuple[int, Rule, re.Match[str]]] = {}
        named: set[int] = set()  # lines explained by a rule: their codes need no decoding
        for needle, bare, pattern, rule in MATCHERS:
            at = block.find(needle) if bare in slim else -1
            while at >= 0:
                begin, end = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
                end = len(block) if end < 0 else end
                begin = block.rfind(b"\r", begin, at) + 1 or begin  # a progress bar writes many texts on one line
                match = pattern.search(block[max(begin, at - REACH) : min(end, at + REACH)].decode("utf-8", "replace"))
                known = rule or (match and begin not in named and explain_rules_codes.decode(match)) or None
                if match and known:
                    seen.setdefault((begin, known.id), (begin, known, match))
                    if rule:
                        named.add(begin)
                at = block.find(needle, end)
        restarts = sorted(m.start() for text in RESTART for m in re.finditer(re.escape(text), block))
        for begin, known, match in sorted(seen.values(), key=lambda item: item[0]):
            while restarts and restarts[0] < begin:
                restarts.pop(0)
                self.attempt = (self.attempt[0], self.attempt[1] + 1)
            if known is OWN or (begin, OWN.id) not in seen:  # our own sentence says it better than a rule on its words
                self._keep(known, match, block, begin)
        self.attempt = (self.attempt[0], self.attempt[1] + len(restarts))
        self.clock = self._clock(block, len(block))
        self.lines += block.count(b"\n")

    def _clock(self, block: bytes, position: int) -> bytes:
        """The date and time on the line at `position`, or the last one printed shortly before it."""
        end = block.find(b"\n", position)
        times = CLOCK.findall(block, max(0, position - 4000), len(block) if end < 0 else end)
        return re.sub(rb"[-T ](?=\d\d:)", b" ", times[-1]) if times else self.clock

    def _keep(self, rule: Rule, match: re.Match[str], block: bytes, begin: int) -> None:
        """Count a match; its text is kept when it is the first of its rule, or the first of a later attempt."""
        old = self.hits.get(rule.id)
        if old:
            old.count += 1
            if old.attempt >= self.attempt:
                return
        elif rule.level == GENERIC and len(self.hits) > len(RULES) + MOST_CODES:
            return
        text = match.string
        start = max(0, min(match.start(), len(text) - SHOWN))
        self.hits[rule.id] = _Hit(
            rule,
            values={key: CONTROL.sub("", value or "") for key, value in match.groupdict().items()},
            line=CONTROL.sub("", text[start : start + SHOWN]).strip(),
            count=old.count if old else 1,
            place=(self.files, self.lines + block.count(b"\n", 0, begin) + 1),
            file=self.name,
            clock=self._clock(block, begin),
            attempt=self.attempt,
        )

    def findings(self, lang: str) -> list[Finding]:
        """Likely root cause first: faults before their consequences, the last attempt first, then the earliest."""
        hits = list(self.hits.values())
        if any(hit.rule.level <= SYMPTOM for hit in hits):
            hits = [hit for hit in hits if hit.rule.level != GENERIC and hit.rule.id != "code-ERR99999"]
        clocks = all(hit.clock for hit in hits)

        def order(hit: _Hit) -> tuple[bool, int, int, int, bytes, tuple[int, int]]:
            folder, restarts = hit.attempt
            if self.files > 1:  # only the log of the launcher counts restarts; it cannot be compared with others
                restarts = 0
            clock = hit.clock if clocks else b""
            return hit.rule.level >= NOTE, -folder, -restarts, hit.rule.level, clock, hit.place

        return [_finding(hit, lang) for hit in sorted(hits, key=order)]


def _finding(hit: _Hit, lang: str) -> Finding:
    def fill(text: str) -> str:
        for name, value in hit.values.items():
            text = text.replace("{" + name + "}", value)
        return text

    found = _say(hit.rule, lang, fill)
    if "message" in hit.values:
        found.commands.extend(explain_rules_own.quoted_commands(hit.values["message"]))
    return replace(found, line=hit.line, count=hit.count, line_number=hit.place[1], file=hit.file)


def _say(rule: Rule, lang: str, fill: Callable[[str], str], symptom: str = "") -> Finding:
    """The words of a rule, as a finding without a place."""
    words = rule.text(lang)
    return Finding(
        rule=rule.id,
        title=fill(words.title),
        cause=fill(words.cause),
        check=[fill(check) for check in words.check],
        commands=[fill(command) for command in rule.commands],
        line="",
        count=0,
        line_number=0,
        file="",
        level=rule.level,
        symptom=symptom,
    )


def _blocks(stream: IO[bytes] | gzip.GzipFile, name: str) -> Iterator[bytes]:
    """The content of a log in blocks; a compressed log that was cut off gives what it has."""
    while True:
        try:
            data = stream.read(BLOCK)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror or error}; check the disk and the path") from None
        if not data:
            return
        yield data


def explain(text: str, lang: str = "en") -> list[Finding]:
    """What an error text means, likely root cause first; an empty list when nothing in it is known."""
    import io

    scan = _Scan()
    scan.read(io.BytesIO(text.encode("utf-8", "replace")))
    return scan.findings(lang)


def ask(question: str, lang: str = "en") -> list[Finding]:
    """What a question means: a known error text in it, else the rules whose symptoms are like it, likeliest first."""
    found = explain(question, lang)
    if any(f.level <= CONSEQUENCE for f in found):
        return found
    told = [f for f in found if f.level != GENERIC]  # a description that a rule knows word by word
    likely = [_say(rule, lang, _unfilled, phrase) for rule, phrase in alike(question, RULES)]
    return [*told, *(f for f in likely if f.rule not in {t.rule for t in told})] or found


def _unfilled(text: str) -> str:
    """A text of a rule without the log that would fill its holes."""
    return HOLE.sub("…", text)


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a console may not know Chinese
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def print_findings(text: str, stream: TextIO, lang: str | None = None) -> None:
    """Explain an uncaught error under its traceback; says so when it is unknown."""
    lang = language(lang)
    _write(stream, "\n" + render(explain(text, lang), lang))


def _question(words: tuple[str, ...]) -> str:
    """What was asked in words instead of naming logs; "" when a word is a file, or looks like the name of one."""
    if not words or any(word == "-" or PATH.search(word) or Path(word).exists() for word in words):
        return ""
    return " ".join(words)


def _logs(words: tuple[str, ...]) -> list[str]:
    """Files, the *.log files of folders, and `-` for standard input."""
    found: list[str] = []
    for word in words or ("-",):
        path = Path(word)
        if word == "-" or path.is_file() or path.is_fifo() or path.is_char_device():
            found.append(word)
        elif path.is_dir():
            inside = sorted(str(file) for ending in ("*.log", "*.log.gz") for file in path.rglob(ending))
            if not inside:
                raise UserError(f"there is no *.log file in {word}; name the log itself: ascendchat explain FILE")
            found += inside
        else:
            raise UserError(
                f"there is no file {word}; give a log, pipe one in: COMMAND 2>&1 | ascendchat explain, or say what "
                'you see: ascendchat explain "training hangs"'
            )
    return found


def _scan_logs(words: tuple[str, ...], lang: str) -> list[Finding]:
    scan = _Scan()
    for name in _logs(words):
        if name == "-":
            if sys.stdin.isatty():
                print("paste the error text, then press Ctrl-D", file=sys.stderr)
            scan.read(sys.stdin.buffer)
            continue
        try:
            with gzip.open(name) if name.endswith(".gz") else open(name, "rb") as stream:
                scan.read(stream, name)
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror or error}; check its permissions: ls -l") from None
    return scan.findings(lang)


def run(config: ExplainConfig) -> int:
    """`ascendchat explain`: 0 when something was recognised, 1 when the text is unknown."""
    lang, question = language(config.lang), _question(config.log)
    findings = ask(question, lang) if question else _scan_logs(config.log, lang)
    if config.json:
        answer = {"known": bool(findings), "findings": [asdict(found) for found in findings]}
        _write(sys.stdout, json.dumps(answer, ensure_ascii=False, indent=2) + "\n")
    else:
        _write(sys.stdout, render(findings, lang, asked=bool(question)))
    return 0 if findings else 1
