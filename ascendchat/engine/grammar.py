"""Answers that fit a grammar: which tokens may come next, from llguidance; nothing else imports it.

    rows = grammars(tokenizer)
    matcher = rows.matcher(Grammar("json_schema", '{"type": "object"}'))   # a ValueError says why it cannot be compiled
    allowed = rows.allowed([matcher])                                       # (1, V) bool: what may be chosen now
    ending = matcher.take(token)                                            # "stop" when the answer is complete

engine.py asks before every choice of a row whose Sampling has a grammar. A server calls `grammars(tokenizer).check` in
its front, too: a bad grammar is then refused before it stands in a queue.

A grammar comes from a stranger, and llguidance can be killed by one (a chain of a few thousand references overflows the
stack; "multipleOf": 100000007 runs for minutes). So each new text is compiled in a process of its own first (trial.py).
While masks are computed its own limits hold; an answer that reaches one is cut short.

Cost, 16 rows of the toy world's model (depth 4, 128 wide, 1,536 ids) on one CPU core: a step of 15.3 ms takes 0.7 ms
(4 %) more, of which 0.2 to 0.4 ms are the masks. llguidance's executor with two threads was no faster on two busy cores
(a median of 0.16 ms instead of 0.21, a mean of 1.2 instead of 0.8); large vocabularies were not measured.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.landing import Landing
from ascendchat.engine.request import Grammar
from ascendchat.engine.trial import Trial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_CHARACTERS = 500_000  # of a grammar's text
MOST_LEXER_STATES = 50_000  # of one row; 1 to 2 KB each
MOST_KNOWN = 128  # compiled grammars that are kept
MOST_REASON = 300  # characters of llguidance's reason that are passed on
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
    limits = LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
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
    found, left = [], [whole]
    while left:
        each = left.pop()
        if isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            found.append(each)
            for name, content in each.items():
                if name in NAMED and isinstance(content, dict):
                    left += content.values()
                elif name not in DATA:
                    left.append(content)
    return found


def _borders(part: dict[str, Any], *names: str) -> list[float]:
    """The numbers under these names; beyond 1e14 floats have hardly anything behind the point."""
    return [part[name] for name in names if type(part.get(name)) in (int, float) and abs(part[name]) < 1e14]


def too_long(grammar: Grammar) -> str:
    """Why a text is not even read."""
    return f"it has {len(grammar.text)} characters, at most {MOST_CHARACTERS} are read"


def unusable(grammar: Grammar, reason: str) -> str:
    """The whole sentence."""
    return f"the grammar ({grammar.kind}) cannot be used: {reason}"


def in_a_line(reason: str) -> str:
    """llguidance's reason, short and in words."""
    if reason.startswith("NoExtension"):
        reason = "no answer fits it"
    line = " ".join(reason.removesuffix("<non-verbose/>").split())
    return line if len(line) <= MOST_REASON else line[:MOST_REASON] + "..."


class Matcher:
    """How far one row has come in its grammar."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner
        # landing.py's: on the way to the end; tokens left at which to look again; tokens of the shortest call
        self.landing, self.look_at = False, 1 << 60
        self.call_needs: int | None = None

    def take(self, token: int) -> Literal["stop", "length"] | None:
        """The row has this token now. How the answer ends with it, if it does: complete, or at a limit."""
        if not self.inner.consume_token(token):
            return "length"
        return "stop" if self.inner.is_stopped() else None


class Memo(Generic[Value]):
    """Values that are made once each, by the thread that asks first; others wait for it, and for nothing else. The
    oldest are forgotten."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Future[Value]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Any, make: Callable[[], Value]) -> Value:
        with self._lock:
            known = self._known.get(key)
            if first := known is None:
                known = self._known[key] = Future()
                if len(self._known) > MOST_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
        if first:
            try:
                known.set_result(make())
            except BaseException as error:
                with self._lock:
                    self._known.pop(key, None)
                known.set_exception(error)
                raise
        return known.result()


class Grammars:
    """The grammars of one tokenizer, compiled once each. From any thread; a new grammar holds up nobody but who asks
    for the same. `salt`: whose it is, as that of a Request; how long it takes tells nobody what others have used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.vocab = tokenizer, tokenizer.vocab_size
        self._trial = Trial(tokenizer)
        self._known: Memo[str] = Memo()  # why a grammar cannot be used, "" where it can
        self._made: Memo[LLMatcher] = Memo()
        self._lock = threading.Lock()  # of what is copied

    @cached_property
    def _tokens(self) -> LLTokenizer:
        return vocabulary(self.tokenizer)

    @cached_property
    def _landing(self) -> Landing:
        return Landing(self.tokenizer)

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
        if len(grammar.text) > MOST_CHARACTERS:
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
