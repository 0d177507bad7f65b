"""Lead from an error text, or from what a user sees, to its cause, what to check and the command to run.

    ascendchat explain LOG...        ascendchat explain --lang zh < LOG        ascendchat explain --json RUN-FOLDER
    ascendchat explain "training hangs"                                        ascendchat explain 显存不足

rules/*.yaml hold the rules, explain_rules.py reads them. A log of any size is read in blocks: the plain text inside
each pattern is searched for first (fast), and the pattern runs only on the lines that hold it.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from ascendchat.config.commands import ExplainConfig
from ascendchat.config.language import language
from ascendchat.doctor.explain_rules import (
    CONSEQUENCE,
    GENERIC,
    HOLE,
    NOTE,
    SYMPTOM,
    ErrorRule,
    Values,
    all_rules,
    answer,
    compiled,
    fill,
    matchers,
)
from ascendchat.errors import UserError

BLOCK_BYTES = 1 << 20  # bytes read at a time
MAX_LINE_BYTES = 4 << 20  # of one line, besides its end; a dump of data may have no line breaks
CONTEXT_CHARS = 1000  # on either side of the plain text, in which the pattern is searched; a line may be megabytes long
MAX_SHOWN_CHARS = 300  # of a matched line
MAX_CODES = 50  # different status codes; a damaged log may hold thousands
COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
CLOCK = re.compile(rb"\d{4}-\d\d-\d\d[-T ]\d\d:\d\d:\d\d")
# Lines between two attempts of a launcher in one log. The user asks about the last attempt.
RESTART = (b"will restart worker group", b"Restarting worker group", b"ascendchat launch: starting again")
PATH = re.compile(r"^\S*/\S*$|\.(?:log|txt|gz|out|err|json|jsonl)$")  # a word that is meant as a file, existing or not
# The commands that a sentence of ours holds between backquotes
QUOTED = re.compile(r"`((?:ascendchat|pip|python|source|export|npu-smi) [^`]+)`")
ATTEMPT = re.compile(r"attempt_(\d+)")  # the folder `ascendchat launch` gives to each attempt


@dataclass(frozen=True)
class _Finding:
    """One explained fault; the first of a list is the likely root cause."""

    rule: str
    title: str
    cause: str
    check: list[str]
    commands: list[str]
    line: str = ""
    count: int = 0
    line_number: int = 0
    file: str = ""
    level: int = 0
    symptom: str = ""  # the phrase that the question resembles; "" for a match in the text of a log


@dataclass
class _Hit:
    rule: ErrorRule
    values: Values
    line: str
    count: int
    position: tuple[int, int]  # (index of the file, line)
    file: str
    clock: bytes
    attempt: tuple[int, int]  # (by the folder of the log, by the restarts seen in it)

    def finding(self, lang: str) -> _Finding:
        where = {"line": self.line, "count": self.count, "line_number": self.position[1], "file": self.file}
        finding = _finding(self.rule, lang, lambda text: fill(text, self.values, lang), **where)
        finding.commands.extend(dict.fromkeys(QUOTED.findall(str(self.values.get("message", "")))))
        return finding


class _Scan:
    """Read logs block by block and keep one hit per rule, so memory does not grow with the log."""

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
        tail, scanned = b"", 0  # of a line without an end so far; a progress bar writes many texts on one line
        for data in _blocks(stream, name):
            data = tail + data
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if end:
                self._block(data[:end])
                scanned = 0
            tail = data[end:]
            if len(tail) > BLOCK_BYTES:  # a line longer than a block: keep only its end
                if scanned < MAX_LINE_BYTES:
                    self._block(tail[:-CONTEXT_CHARS])
                    scanned += len(tail)
                tail = tail[-CONTEXT_CHARS:]
        self._block(tail)

    def _block(self, block: bytes) -> None:
        block = block.replace(b"\0", b"")  # a log of another system may have two bytes per letter
        if b"\x1b" in block:
            block = COLOUR.sub(b"", block)
        # Lines of a log differ mostly in their numbers: without them few different lines are left to look at.
        unique_lines = b"\n".join(set(block.translate(None, b"0123456789").split(b"\n")))
        matches: dict[tuple[int, str], tuple[ErrorRule, Values, re.Match[str]]] = {}
        explained: set[int] = set()  # lines explained by a rule: their codes need no decoding
        for needle, bare, pattern, rule in matchers():
            at = block.find(needle) if bare in unique_lines else -1
            while at >= 0:
                begin, end = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
                end = len(block) if end < 0 else end
                begin = block.rfind(b"\r", begin, at) + 1 or begin  # a progress bar writes many texts on one line
                text = block[max(begin, at - CONTEXT_CHARS) : min(end, at + CONTEXT_CHARS)].decode("utf-8", "replace")
                match = compiled(pattern, rule.where).search(text)
                values = rule.values(match) if match and not (rule.code and begin in explained) else None
                if match and values is not None:
                    matches.setdefault((begin, fill(rule.id, values)), (rule, values, match))
                    if not rule.code:
                        explained.add(begin)
                at = block.find(needle, end)
        restarts = sorted(m.start() for text in RESTART for m in re.finditer(re.escape(text), block))
        alone = {begin for (begin, _), (rule, _, _) in matches.items() if rule.alone}
        for (begin, name), (rule, values, match) in sorted(matches.items(), key=lambda item: item[0][0]):
            while restarts and restarts[0] < begin:
                restarts.pop(0)
                self.attempt = (self.attempt[0], self.attempt[1] + 1)
            if rule.alone or begin not in alone:
                self._keep(name, rule, values, match, block, begin)
        self.attempt = (self.attempt[0], self.attempt[1] + len(restarts))
        self.clock = self._clock(block, len(block))
        self.lines += block.count(b"\n")

    def _clock(self, block: bytes, position: int) -> bytes:
        """The date and time on the line at `position`, or the last one printed shortly before it."""
        end = block.find(b"\n", position)
        times = CLOCK.findall(block, max(0, position - 4000), len(block) if end < 0 else end)
        return re.sub(rb"[-T ](?=\d\d:)", b" ", times[-1]) if times else self.clock

    def _keep(self, name: str, rule: ErrorRule, values: Values, match: re.Match[str], block: bytes, begin: int) -> None:
        """Count a match; its text is kept when it is the first of its rule, or the first of a later attempt."""
        old = self.hits.get(name)
        if old:
            old.count += 1
            if old.attempt >= self.attempt:
                return
        elif rule.level == GENERIC and len(self.hits) > len(all_rules()[0]) + MAX_CODES:
            return
        text = match.string
        start = max(0, min(match.start(), len(text) - MAX_SHOWN_CHARS))
        self.hits[name] = _Hit(
            rule,
            values={key: CONTROL.sub("", v) if isinstance(v, str) else v for key, v in values.items()},
            line=CONTROL.sub("", text[start : start + MAX_SHOWN_CHARS]).strip(),
            count=old.count if old else 1,
            position=(self.files, self.lines + block.count(b"\n", 0, begin) + 1),
            file=self.name,
            clock=self._clock(block, begin),
            attempt=self.attempt,
        )

    def findings(self, lang: str) -> list[_Finding]:
        """Findings with the likely root cause first: faults before their consequences, the last attempt first, then the
        earliest."""
        hits = list(self.hits.values())
        if any(hit.rule.level <= SYMPTOM for hit in hits):
            hits = [hit for hit in hits if not hit.rule.code]
        clocks = all(hit.clock for hit in hits)

        def order(hit: _Hit) -> tuple[bool, int, int, int, bytes, tuple[int, int]]:
            folder, restarts = hit.attempt
            if self.files > 1:  # only the log of the launcher counts restarts; it cannot be compared with others
                restarts = 0
            clock = hit.clock if clocks else b""
            return hit.rule.level >= NOTE, -folder, -restarts, hit.rule.level, clock, hit.position

        return [hit.finding(lang) for hit in sorted(hits, key=order)]


def _finding(rule: ErrorRule, lang: str, filled: Callable[[str], str], **where: Any) -> _Finding:
    """Put the words of a rule and the place of its match into a finding."""
    return _Finding(
        rule=filled(rule.id),
        title=filled(rule.title[lang]),
        cause=filled(rule.cause[lang]),
        check=[filled(check[lang]) for check in rule.check],
        commands=[filled(command) for command in rule.commands],
        level=rule.level,
        **where,
    )


def _blocks(stream: IO[bytes] | gzip.GzipFile, name: str) -> Iterator[bytes]:
    """Yield the content of a log in blocks; a compressed log that was cut off gives what it has."""
    while True:
        try:
            data = stream.read(BLOCK_BYTES)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return
        except OSError as error:
            raise UserError(f"cannot read {name}: {error.strerror or error}; check the disk and the path") from None
        if not data:
            return
        yield data


def explain(text: str, lang: str = "en") -> list[_Finding]:
    """Explain an error text, likely root cause first; an empty list when nothing in it is known."""
    import io

    scan = _Scan()
    scan.read(io.BytesIO(text.encode("utf-8", "replace")))
    return scan.findings(lang)


def ask(question: str, lang: str = "en") -> list[_Finding]:
    """Answer a question: by a known error text in it, else by the rules with the most similar symptoms, likeliest
    first."""
    findings = explain(question, lang)
    if any(f.level <= CONSEQUENCE for f in findings):
        return findings
    exact = [f for f in findings if f.level != GENERIC]  # a description that a rule knows word by word
    unfilled = functools.partial(HOLE.sub, "…")  # there is no log that would fill the holes
    similar = [_finding(rule, lang, unfilled, symptom=phrase) for rule, phrase in match_phrases(question)]
    return [*exact, *(f for f in similar if f.rule not in {t.rule for t in exact})] or findings


def answer_text(findings: list[_Finding], lang: str, is_question: bool = False) -> str:
    """Format the findings as plain text. `asked`: they answer a question instead of a log."""
    words = {key: text[lang] for key, text in answer().items() if isinstance(text, dict)}
    if not findings:
        head, steps = ("unmatched", "ask") if is_question else ("unknown", "next")
        return "\n".join([words[head], *(f"  - {step[lang]}" for step in answer()[steps])]) + "\n"
    rooted = findings[0].level <= SYMPTOM and not is_question
    shown = [f for f in findings if not (rooted and f.level == CONSEQUENCE) and f.level != GENERIC][:5] or findings[:5]
    rest = [f for f in findings if f not in shown]
    lines = [words["maybe" if findings[0].symptom else "head"]]
    for number, finding in enumerate(shown, 1):
        times = f", {words['times'].format(finding.count)}" if finding.count > 1 else ""
        where = f"{finding.file}:{finding.line_number}" if finding.file else words["line"].format(finding.line_number)
        lines += ["", f"{number}. {finding.title}  [{finding.rule}{times}]"]
        if finding.line:
            lines += [f"   {words['seen']} {where}: {finding.line}"]
        lines += [f"   {words['cause']} {finding.cause}"]
        lines += [f"   {words['check']} {check}" for check in finding.check]
        lines += [f"   {words['run']} {command}" for command in finding.commands]
    if rest:
        decoded = {f.rule: f" {f.cause}" for f in rest if f.level == GENERIC}
        lines += ["", words["also"], *(f"  - {f.title}  [{f.rule}]{decoded.get(f.rule, '')}" for f in rest)]
    return "\n".join(lines) + "\n"


def _write(stream: TextIO, text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a console may not know Chinese
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def print_findings(text: str, stream: TextIO, lang: str | None = None) -> None:
    """Explain an uncaught error under its traceback; say so when it is unknown."""
    lang = language(lang)
    _write(stream, "\n" + answer_text(explain(text, lang), lang))


def _question(words: tuple[str, ...]) -> str:
    """The words joined, if they are a question; "" when one is a file, or looks like the name of one."""
    if not words or any(word == "-" or PATH.search(word) or Path(word).exists() for word in words):
        return ""
    return " ".join(words)


def _logs(words: tuple[str, ...]) -> list[str]:
    """List the logs to read: files, the *.log files of folders, and `-` for standard input."""
    logs: list[str] = []
    for word in words or ("-",):
        path = Path(word)
        if word == "-" or path.is_file() or path.is_fifo() or path.is_char_device():
            logs.append(word)
        elif path.is_dir():
            logs_below = sorted(str(file) for ending in ("*.log", "*.log.gz") for file in path.rglob(ending))
            if not logs_below:
                raise UserError(f"there is no *.log file in {word}; name the log itself: ascendchat explain FILE")
            logs += logs_below
        else:
            raise UserError(
                f"there is no file {word}; give a log, pipe one in: COMMAND 2>&1 | ascendchat explain, or say what "
                'you see: ascendchat explain "training hangs"'
            )
    return logs


def _scan_logs(words: tuple[str, ...], lang: str) -> list[_Finding]:
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
    """Run `ascendchat explain`; exit status 0 when something was recognised, 1 when the text is unknown."""
    lang, question = language(config.lang), _question(config.log)
    findings = ask(question, lang) if question else _scan_logs(config.log, lang)
    if config.json:
        answer = {"known": bool(findings), "findings": [asdict(finding) for finding in findings]}
        _write(sys.stdout, json.dumps(answer, ensure_ascii=False, indent=2) + "\n")
    else:
        _write(sys.stdout, answer_text(findings, lang, is_question=bool(question)))
    return 0 if findings else 1


# Fuzzy matching of what a user sees instead of an error text: `explain "training hangs"`, `explain 显存不足`.
#
# Question and phrases are cut into terms: English words without their endings, Chinese characters and pairs of them. A
# rare term weighs more than a common one (as inverse document frequency does). A rule scores as its best phrase: the
# share of the phrase that is in the question, times half of one plus the share of the question in the phrase.

MAX_RULES = 5  # in an answer
MIN_SCORE = 0.45
MIN_SCORE_RATIO = 0.6  # to the best score
TITLE_WORTH = 0.8  # a title weighs less than a symptom, which weighs 1: it names the cause
STOP_WORDS = frozenset(
    "a an the is are was were be been am my your i we it its this that of on in at to for with from by and or as do "
    "does did has have had when while after before very so too just get gets got what why how can will would there "
    "please help me during all always still then".split()
)
NEGATED = frozenset("no not cannot can't doesn't don't isn't won't never".split())
ENDING = re.compile(r"(?:ing|ed|er|ly|es|s|e)$")
STOP_CHARS = re.compile("[的了很是在太我你吗呢么怎为什个有会就都也啊呀请问时候一直老总]")


def terms(text: str) -> frozenset[str]:
    """Set of terms by which two texts are compared."""
    parts: set[str] = set()
    for word in re.findall(r"[a-z0-9][a-z0-9_'-]*", text.casefold()):
        if word in NEGATED:
            parts.add("not")
        elif word not in STOP_WORDS:
            parts.add(word if len(word) < 5 or word.endswith("ss") else ENDING.sub("", word))
    for run in re.findall(r"[\u4e00-\u9fff]+", STOP_CHARS.sub("", text)):
        parts |= set(run) | {run[i : i + 2] for i in range(len(run) - 1)}
    return frozenset(parts)


def phrases(rule: ErrorRule) -> list[tuple[str, float]]:
    """(phrase, weight) pairs of a rule in both languages."""
    symptoms = [(phrase, 1.0) for symptoms in rule.symptoms.values() for phrase in symptoms]
    return symptoms + [(HOLE.sub("", title), TITLE_WORTH) for title in rule.title.values()]


@functools.cache
def phrase_index() -> tuple[list[tuple[ErrorRule, str, float, frozenset[str]]], Counter[str]]:
    """(rule, phrase, weight, terms) of all phrases of all rules, and in how many phrases each term occurs."""
    index = [(rule, phrase, worth, terms(phrase)) for rule in all_rules()[0] for phrase, worth in phrases(rule)]
    return index, Counter(term for _, _, _, parts in index for term in parts)


def match_phrases(question: str) -> list[tuple[ErrorRule, str]]:
    """(rule, its phrase most similar to the question), best first; empty when none is similar enough."""
    index, frequency = phrase_index()

    def weight(parts: frozenset[str]) -> float:
        return sum(math.log(1 + len(index) / (1 + frequency[term])) for term in parts)

    question_terms = terms(question)
    total = weight(question_terms)
    best: dict[str, tuple[float, ErrorRule, str]] = {}
    for rule, phrase, worth, parts in index:
        shared = weight(parts & question_terms)
        if not shared:
            continue
        score = worth * shared / weight(parts) * (0.5 + 0.5 * shared / total)
        if score > best.get(rule.id, (0.0,))[0]:
            best[rule.id] = (score, rule, phrase)
    ranked = sorted(best.values(), key=lambda entry: -entry[0])  # stable: rules named first stay first
    floor = max(MIN_SCORE, MIN_SCORE_RATIO * ranked[0][0]) if ranked else 0.0
    return [(rule, phrase) for score, rule, phrase in ranked if score >= floor][:MAX_RULES]
