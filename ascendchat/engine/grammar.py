"""Answers that fit a grammar: which tokens may come next, from llguidance; nothing else imports it.

    rows = grammars(tokenizer)
    matcher = rows.matcher(Grammar("json_schema", '{"type": "object"}'))   # a ValueError says why it cannot be compiled
    allowed = rows.allowed([matcher])                                       # (1, V) bool: what may be chosen now
    ending = matcher.take(token)                                            # "stop" when the answer is complete

engine.py asks before every choice of a row whose Sampling has a grammar. A server calls `grammars(tokenizer).check` in
its front, too: a bad grammar is then refused before it stands in a queue.

A grammar comes from a stranger, and llguidance can be killed by one (a chain of a few thousand references overflows the
stack; "multipleOf": 100000007 runs for minutes). So each new text is compiled in a process of its own first
(grammar.py). While masks are computed its own limits hold; an answer that reaches one is cut short.

Cost, 16 rows of the toy world's model (depth 4, 128 wide, 1,536 ids) on one CPU core: a step of 15.3 ms takes 0.7 ms
(4 %) more, of which 0.2 to 0.4 ms are the masks. llguidance's executor with two threads was no faster on two busy cores
(a median of 0.16 ms instead of 0.21, a mean of 1.2 instead of 0.8); large vocabularies were not measured.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Grammar
from ascendchat.processes import ChildProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


MAX_CHARACTERS = 500_000  # of a grammar's text
MAX_LEXER_STATES = 50_000  # of one row; 1 to 2 KB each
MAX_KNOWN = 128  # compiled grammars that are kept
MAX_REASON = 300  # characters of llguidance's reason that are passed on
# One line, a space behind commas and colons or none: a model cannot fill its answer with white space. No \uXXXX: with
# it a key of `properties` can be written a second time as an additional one. What a schema says in "x-guidance" (other
# white space, unknown keywords ignored) is overruled: an answer that validates is what was asked for.
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
DATA = ("const", "enum", "default", "examples")  # no schemas, whatever they look like
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # schemas by any name

Value = TypeVar("Value")


def vocabulary(tokenizer: Tokenizer) -> LLTokenizer:
    """Our ids as llguidance knows them; <|assistant_end|> is the end of every answer."""
    from llguidance import LLTokenizer

    if content := getattr(tokenizer, "json", ""):  # of a Hugging Face model
        return LLTokenizer(content, n_vocab=tokenizer.vocab_size, eos_token=tokenizer.specials["<|assistant_end|>"])
    made: LLTokenizer = LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]
        encoder={token: number for number, token in enumerate(tokenizer.tokens)},
        special_tokens=tokenizer.specials,
        pattern=tokenizer.pattern,
        eos_token=tokenizer.specials["<|assistant_end|>"],
        n_vocab=tokenizer.vocab_size,
    )
    return made


def compiled(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """A matcher at the beginning of the grammar; a ValueError with the reason where there is none."""
    from llguidance import LLMatcher, LLParserLimits

    if grammar.kind == "lark":
        source = LLMatcher.grammar_from_lark(grammar.text)
    elif grammar.kind == "regex":
        source = LLMatcher.grammar_from_regex(grammar.text)
    else:
        schema = '{"type": "object"}' if grammar.kind == "json" else with_moved_borders(grammar.text)
        source = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    made = LLMatcher(tokens, source, log_level=0, limits=limits)
    if not made.is_error():
        made.compute_bitmask()  # finds what no answer fits, and what runs into a limit at once
    if made.is_error():
        raise ValueError(made.get_error())
    return made


def with_moved_borders(text: str) -> str:
    """A schema in which certain exclusive borders are inclusive ones a thousand-millionth further on: llguidance 1.9
    allows 5 where a number must be above 5 and at most 5.5, as with any whole border less than 1 away from another one
    that is further from 0. The other one may stand in another part of the schema (`allOf`, `$ref`)."""
    if '"exclusiveM' not in text:
        return text
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return text  # the compiler says what is wrong with it
    parts = _schemas(whole)
    for exclusive, inclusive, sign, others in (
        ("exclusiveMinimum", "minimum", 1, ("maximum", "exclusiveMaximum")),
        ("exclusiveMaximum", "maximum", -1, ("minimum", "exclusiveMinimum")),
    ):
        ends = [abs(end) for part in parts for end in _borders(part, *others) if end * sign > 0]
        near = {end // 1 for end in ends if end % 1}
        for part in parts:
            for border in _borders(part, exclusive):
                size = border * sign
                if size >= 0 and size in near:
                    moved = size + max(1e-9, size * 1e-15)  # it compares 15 digits
                    part[inclusive] = sign * max([moved, *(sign * given for given in _borders(part, inclusive))])
                    del part[exclusive]
    return json.dumps(whole)


def _schemas(whole: Any) -> list[dict[str, Any]]:
    """Every schema in one, itself too; not by recursion, since a stranger says how deep it is."""
    schemas, left = [], [whole]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            schemas.append(each)
            for name, content in each.items():
                if name in NAMED and isinstance(content, dict):
                    left += content.values()
                elif name not in DATA:
                    left.append(content)
    return schemas


def _borders(part: dict[str, Any], *names: str) -> list[float]:
    """The numbers under these names; beyond 1e14 floats have hardly anything behind the point."""
    return [part[name] for name in names if type(part.get(name)) in (int, float) and abs(part[name]) < 1e14]


def too_long(grammar: Grammar) -> str:
    """Why a text is not even read."""
    return f"it has {len(grammar.text)} characters, at most {MAX_CHARACTERS} are read"


def unusable(grammar: Grammar, reason: str) -> str:
    """The whole sentence."""
    return f"the grammar ({grammar.kind}) cannot be used: {reason}"


def in_a_line(reason: str) -> str:
    """llguidance's reason, short and in words."""
    if reason.startswith("NoExtension"):
        reason = "no answer fits it"
    line = " ".join(reason.removesuffix("<non-verbose/>").split())
    return line if len(line) <= MAX_REASON else line[:MAX_REASON] + "..."


class Matcher:
    """The state of one row in its grammar."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        # grammar.py's: on the way to the end; tokens left at which to look again; tokens of the shortest call
        self.landing, self.look_at = False, 1 << 60
        self.call_needs: int | None = None

    def take(self, token: int) -> Literal["stop", "length"] | None:
        """The row has this token now. How the answer ends with it, if it does: complete, or at a limit."""
        if not self.inner.consume_token(token):
            return "length"
        return "stop" if self.inner.is_stopped() else None


class _Memo(Generic[Value]):
    """Values that are made once each, by the thread that asks first; others wait for it, and for nothing else. The
    oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Future[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Any, make: Callable[[], Value]) -> Value:
        with self._lock:
            future = self._known.get(key)
            if first := future is None:
                future = self._known[key] = Future()
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
        if first:
            try:
                future.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._known.pop(key, None)
                future.set_exception(error)
                raise
        return future.result()


class Grammars:
    """The grammars of one tokenizer, compiled once each. From any thread; a new grammar holds up nobody but who asks
    for the same. `salt`: whose it is, as that of a Request; how long it takes tells nobody what others have used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.vocab = tokenizer, tokenizer.vocab_size
        self._trial = Trial(tokenizer)
        self._known: _Memo[str] = _Memo()  # why a grammar cannot be used, "" where it can
        self._made: _Memo[LLMatcher] = _Memo()
        self._lock = threading.Lock()  # of what is copied

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return vocabulary(self.tokenizer)

    @cached_property
    def _landing(self) -> _Landing:
        return _Landing(self.tokenizer)

    def check(self, grammar: Grammar, salt: str = "") -> None:
        """A ValueError of one line where the grammar cannot be used; nothing is compiled in this process."""
        if reason := self._known.get((salt, grammar), lambda: self._reason(grammar)):
            raise ValueError(unusable(grammar, reason))

    def matcher(self, grammar: Grammar, salt: str = "", tried: bool = False) -> Matcher:
        """For a new row; a ValueError of one line where the grammar cannot be used. `tried`: it was checked elsewhere,
        with this tokenizer."""
        if not tried:
            self.check(grammar, salt)
        try:
            made = self._made.get((salt, grammar), lambda: compiled(self._tokens, grammar))
        except ValueError as error:
            raise ValueError(unusable(grammar, in_a_line(str(error)))) from None
        with self._lock:
            return Matcher(made.deep_copy())

    def _reason(self, grammar: Grammar) -> str:
        if len(grammar.text) > MAX_CHARACTERS:
            return too_long(grammar)
        return in_a_line(self._trial.reason(grammar))

    def allowed(self, matchers: Sequence[Matcher | None], left: Sequence[int] = ()) -> np.ndarray:
        """(rows, V) bool: tokens that may come next; all in a row without a grammar, none where one is at a limit.
        `left`: tokens that each may still write; where they are few, only what leads to the end."""
        bits = np.full((len(matchers), -(-self.vocab // 32)), -1, dtype=np.int32)
        for row, matcher in zip(bits, matchers):
            if matcher is not None:
                matcher.inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
                if matcher.inner.is_error():
                    row[:] = 0
        rows = np.unpackbits(bits.view(np.uint8), axis=1, count=self.vocab, bitorder="little").view(np.bool_)
        for row, matcher, tokens in zip(rows, matchers, left):
            if matcher is not None and row.any():
                self._landing.narrow(matcher, row, tokens)
        return rows


_made: dict[str, Grammars] = {}
_making = threading.Lock()


def grammars(tokenizer: Tokenizer) -> Grammars:
    """Those of a tokenizer: all engines of a process share them."""
    with _making:
        if tokenizer.fingerprint not in _made:
            _made[tokenizer.fingerprint] = Grammars(tokenizer)
        return _made[tokenizer.fingerprint]


# Brings an answer that must fit a grammar to its end before its tokens run out.
#
#     landing = Landing(tokenizer)
#     landing.narrow(matcher, row, left)       # row: (V,) bool, what the grammar allows next; `left` tokens remain
#
# A model that does not know when to close a string would write to its limit, and half a JSON object is of no use. So
# when what is left is just enough, only tokens that lead to the end are allowed: quotes, brackets, commas where a
# required field is missing. How much is enough is tried out on a copy of the matcher.

FAR = 512  # tokens left above which nobody looks
SPARE = 2  # tokens more than the shortest end needs


class _Landing:
    """The tokens that lead to an end, of one tokenizer: a single byte is always a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.specials
        self.end, self.tools = special["<|assistant_end|>"], tokenizer.calls_tools
        self.call, self.call_end = special["<|tool_start|>"], special["<|tool_end|>"]
        self.quote, self.brace, self.letter, bracket, comma = (tokenizer.byte_id(byte) for byte in b'"}z],')
        self.closers = [self.brace, bracket, self.quote, comma]

    def narrow(self, matcher: Matcher, row: np.ndarray, left: int) -> None:
        """Take away what leads too far, when it is time."""
        if self.tools and row[self.call] and row[self.end] and left <= FAR:  # text, behind which a call may begin
            if matcher.call_needs is None:
                matcher.call_needs = self.shortest(matcher, FAR, self.call)
            row[self.call] = left - SPARE > matcher.call_needs
        if not matcher.landing and left <= min(matcher.look_at, FAR):
            spare = left - SPARE - self.shortest(matcher, left)
            matcher.landing = spare <= 0
            matcher.look_at = left - max(1, spare // 4)  # a token can make the end longer, by a nested object for one
        if matcher.landing:
            self.steer(row)

    def steer(self, row: np.ndarray) -> None:
        """Leave only what is nearest to the end."""
        if row[self.end]:
            if not row[self.letter]:  # free text may be cut anywhere
                only(row, self.end)
        elif self.tools and row[self.call_end]:
            only(row, self.call_end)
        elif row[self.brace] and row[self.letter]:  # inside a string, which a brace does not end
            if row[self.quote]:
                only(row, self.quote)
        else:
            nearest = next((token for token in self.closers if row[token]), None)
            if nearest is not None:
                only(row, nearest)

    def shortest(self, matcher: Matcher, most: int, first: int | None = None) -> int:
        """Tokens to the end from here, or from behind a `first` one, as `steer` goes; `most` if they do not suffice."""
        inner = matcher.inner.deep_copy()
        if first is not None:
            inner.consume_token(first)
        for count in range(most):
            if inner.is_stopped() or inner.is_accepting():
                return count
            row = np.unpackbits(np.frombuffer(inner.compute_bitmask(), np.uint8), bitorder="little").view(np.bool_)
            self.steer(row)
            if not row.any() or not inner.consume_token(int(row.argmax())):
                return most
        return most


def only(row: np.ndarray, token: int) -> None:
    row[:] = False
    row[token] = True


# Compiles a stranger's grammar where it can do no harm: in a process with limits, which may die of it.
#
#     trial = Trial(tokenizer)
#     trial.reason(Grammar("regex", "("))        # why it cannot be compiled; "" when it can. From any thread
#
#     python -m ascendchat.engine.grammar           the other process: a tokenizer, then grammars, as pickles on its
# input
#
# Each grammar is compiled in a fork of that process, which starts with the first one (about half a second) and stays.
# The limit is processor time, not time on the clock, so that a busy machine refuses nothing; the parent's patience is
# for a process that does not run at all. A grammar gets QUICK_SECONDS first, which is many times what an honest one
# needs; what is not done by then stands in another queue, before another process, and nobody but its like waits for it.

QUICK_SECONDS = 0.25  # for one grammar, of processor time
CPU_SECONDS = 3.0  # for one that was not done by then
MEMORY = 4 << 30  # bytes of address space
STACK = 4 << 20  # bytes: half of what the engine's thread usually has, so what passes here passes there
PATIENCE = 120.0  # seconds on the clock
ENDING = 1.0  # seconds on the clock, for a process whose output has ended
TOO_MUCH = "it takes too much time or memory to compile"
SLOW = "SLOW"  # the process's answer where its fork has reached the limit of time
MAX_ANSWER = 4096  # characters of a reason: a pipe takes them at once
NICE = 5  # answers under way come first


class Trial:
    """The parent's side: two lanes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.quick, self.thorough = Lane(tokenizer), Lane(tokenizer)

    def reason(self, grammar: Grammar) -> str:
        """Why a grammar cannot be compiled; empty when it can."""
        reason = self.quick.reason(grammar, QUICK_SECONDS)
        if reason is None:
            reason = self.thorough.reason(grammar, CPU_SECONDS)
        return TOO_MUCH if reason is None else reason


class Lane:
    """One process, and whoever waits for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.process: ChildProcess | None = None
        self._lock = threading.Lock()

    def reason(self, grammar: Grammar, seconds: float) -> str | None:
        """Why a grammar cannot be compiled, "" when it can; None when the time was not enough."""
        with self._lock:
            for _ in range(2):  # a process that was killed says nothing of the grammar: it is tried once more
                if self.process is None or self.process.poll() is not None:
                    self.process = self._start()
                answer = self._ask(self.process, (grammar, seconds))
                if answer is not None:
                    return None if answer == SLOW else answer
                if self._end() >= 0:
                    break
            return TOO_MUCH

    def _end(self) -> int:
        """Exit status of the process that gave no answer; 0 when it had to be killed."""
        process, self.process = self.process, None
        assert process is not None
        status = process.wait(ENDING)
        if status is None:
            process.kill()
            process.wait()
        return status or 0

    def _start(self) -> ChildProcess:
        path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        child = ChildProcess.start(
            [sys.executable, "-m", "ascendchat.engine.grammar"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **one, "PYTHONPATH": os.pathsep.join(path)},
        )
        assert child.process.stdin is not None
        pickle.dump(getattr(self.tokenizer, "for_grammars", self.tokenizer), child.process.stdin)
        return child

    def _ask(self, child: ChildProcess, job: tuple[Grammar, float]) -> str | None:
        """The other process's answer; None when it died or never came."""
        process = child.process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        line = process.stdout.readline() if ready else b""
        return str(json.loads(line)) if line.endswith(b"\n") else None


def main() -> None:
    """The other process: answers until its input ends."""

    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is meant for the parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    tokens = vocabulary(pickle.load(sys.stdin.buffer))
    while True:
        try:
            grammar, seconds = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        print(json.dumps(tried(tokens, grammar, seconds)), flush=True)


def tried(tokens: Any, grammar: Grammar, seconds: float) -> str:
    """Compile a grammar in a fork of this process; its answer, as in Lane.reason."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        worker = threading.Thread(target=compile_one, args=(tokens, grammar, theirs))
        worker.start()
        worker.join()
        os._exit(0)
    os.close(theirs)
    _, status = os.waitpid(child, 0)
    with open(ours, encoding="utf-8", errors="replace") as file:
        answer = file.read()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return SLOW
    return answer[1:] if answer else TOO_MUCH  # it has died, or of an error that nobody thought of


def compile_one(tokens: Any, grammar: Grammar, out: int) -> None:
    """In a thread, whose stack has a size that is known: writes "." and the reason."""

    try:
        compiled(tokens, grammar).deep_copy()
        reason = ""
    except ValueError as error:
        reason = str(error) or "it makes no sense"
    os.write(out, b"." + reason.encode("utf-8", "replace")[:MAX_ANSWER])


if __name__ == "__main__":
    main()
