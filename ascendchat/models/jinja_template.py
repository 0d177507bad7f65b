"""The Jinja chat template of a Hugging Face model: turns conversations into tokens and a mask of the assistant's own.

    template.prompt(messages, limit)       # ends where the assistant's answer begins
    template.render(messages)              # ids and mask
    template.pieces(messages, limit)       # for training: no piece is longer than `limit`

data/chat/render.py calls it when the tokenizer has such a template; our own models have the format of that file. The
mask comes from the template's {% generation %} blocks. A template without them is rendered before and after each turn
of the assistant: the difference is the turn, provided that the one text begins with the other. Some templates write
earlier turns otherwise than the last one (Qwen3 leaves out its thoughts): then each turn becomes a piece of its own,
behind the text that the model will see before it. Tool calls, their results and the tools that a system message offers
are passed on as the template takes them, else they stand in the texts. Thoughts reach a template that takes them beside
the words, as `reasoning_content` or by another name.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ascendchat.data.chat.render import (
    Counts,
    Message,
    Part,
    Rendered,
    canonical,
    content_parts,
    exchanges,
    flat,
    max_that_fits,
)
from ascendchat.data.chat.tables import THOUGHTS
from ascendchat.data.chat.turns import TOOLS_OFFERED
from ascendchat.data.surrogates import replace_lone_surrogates
from ascendchat.errors import UserError

# Tool calls in the form that transformers documents for chat templates:
#
#     tool_messages([{"type": "tool", "text": '{"name": "weather"}'}, {"type": "output", "text": "sunny"}])
#     # [{"role": "assistant", "content": "", "tool_calls": [...]}, {"role": "tool", "content": "sunny", ...}]
#
# PROBE_CALL and PROBE_OFFER are rendered to see whether a template supports them.

OFFERED = "tools"  # key in the first message of a conversation: the tools that may be called
CALLED, ARGUMENT, RESULT = "qqzq", "zqqz", "qzqz"  # words that no template writes by itself


def function(name: str, number: int, arguments: Any) -> dict[str, Any]:
    """A tool call. Its id has nine letters and digits, since Mistral's templates take no other."""
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


PROBE_CALL: Sequence[Message] = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [function(CALLED, 0, {"a": ARGUMENT})]},
    {"role": "tool", "content": RESULT, "name": CALLED, "tool_call_id": "call00000"},
    {"role": "assistant", "content": "b"},
)
TOOL = {"name": CALLED, "description": ARGUMENT, "parameters": {"type": "object", "properties": {}}}
PROBE_OFFER: Sequence[Message] = ({"role": "user", "content": "a", OFFERED: [{"type": "function", "function": TOOL}]},)


def probe_thought(name: str) -> Sequence[Message]:
    """A conversation with a thought under the key `name`."""
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": ARGUMENT, name: CALLED}]


def read_calls(text: str) -> list[dict[str, Any]]:
    """The tool calls in a part; none in a call of the calculator, or where it is no JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    calls = value if isinstance(value, list) else [value]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else []


def tool_messages(parts: Sequence[Part], thoughts: str = "thought") -> list[Message]:
    """A turn of the assistant as messages, with its thoughts under the key `thoughts`; none if it has neither tool
    calls nor thoughts, or calls something that is no function."""
    messages: list[Message] = []
    number, waiting = 0, list[tuple[str, str]]()  # calls without a result: id and name
    for at, part in enumerate(parts):
        behind_thought = at > 0 and parts[at - 1]["type"] == "thought"  # whose message has no words yet
        if part["type"] == "text":
            if behind_thought:
                messages[-1]["content"] = part["text"]
            else:
                messages.append({"role": "assistant", "content": part["text"]})
        elif part["type"] == "thought":
            messages.append({"role": "assistant", "content": "", thoughts: part["text"]})
        elif part["type"] == "tool":
            calls = read_calls(part["text"])
            if not calls:
                return []
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            for call in calls:
                entry = function(call["name"], number, call.get("arguments") or {})
                messages[-1].setdefault("tool_calls", []).append(entry)
                waiting.append((entry["id"], call["name"]))
                number += 1
        elif not waiting:
            return []
        else:
            identity, name = waiting.pop(0)
            messages.append({"role": "tool", "content": part["text"], "name": name, "tool_call_id": identity})
    return messages if number or any(thoughts in message for message in messages) else []


def with_tools(talk: list[Message], wants_system: bool = False) -> list[Message]:
    """The conversation with the tools that its system message lists (data/chat/turns.py) under the key OFFERED of its
    first message; a system message without other text is dropped, unless the template wants one."""
    if not talk or talk[0]["role"] != "system" or TOOLS_OFFERED not in talk[0]["content"]:
        return talk
    before, _, text = talk[0]["content"].rpartition(TOOLS_OFFERED)
    try:
        value = json.loads(text)
    except ValueError:
        return talk
    entries = value if isinstance(value, list) else [value]
    if not entries or not all(isinstance(tool, dict) for tool in entries):
        return talk
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in entries]
    has_system = wants_system or before.strip()
    rest = [{"role": "system", "content": before.rstrip("\n")}, *talk[1:]] if has_system else talk[1:]
    return [{**rest[0], OFFERED: tools}, *rest[1:]] if rest else talk


def split_offers(talk: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Split a conversation into the messages and the tools, which a template takes as separate variables."""
    bare = [{name: value for name, value in message.items() if name != OFFERED} for message in talk]
    return bare, [tool for message in talk for tool in message.get(OFFERED, ())]


MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
IN_TEXT = {"text": "{}", "tool": "<<{}=", "output": "{}>>"}  # tool calls as GSM8K writes those of its calculator
SHORT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
NEXT = {"role": "user", "content": CALLED}
LEADS: Sequence[Sequence[Message]] = (
    (),
    ({"role": "system", "content": "a"},),
)  # messages before a short conversation, in the order in which they are tried
OPENING, THOUGHT = "<think>", "</think>"  # around the thoughts of an answer
BREAK = "\u200b"  # a zero-width space, put into text that only looks like a special token


class _Span(NamedTuple):
    """The characters of a text that a turn of the assistant has."""

    begin: int
    end: int


class ChatTemplate:
    """Renders conversations. `marked`: the tokenizer that recognises special tokens in a text; `names`: these tokens;
    `added`: other tokens beside its vocabulary, such as runs of blanks."""

    def __init__(
        self, inner: Any, marked: Any, stops: Sequence[int], names: Mapping[int, str], added: Mapping[int, str]
    ) -> None:
        self.inner, self._marked, self._names = inner, marked, dict(names)
        self.options: dict[str, Any] = {}  # further variables of the template, such as enable_thinking
        self.generation = bool(MARKED.search(str(inner.chat_template)))
        # messages with which the template accepts short conversations; None where it refuses all of them
        self.lead: Sequence[Message] | None = next((lead for lead in LEADS if self._accepts([*lead, *SHORT])), None)
        self.calls = self._writes(PROBE_CALL, CALLED, ARGUMENT, RESULT)
        self.offers = self._writes(PROBE_OFFER, CALLED, ARGUMENT)
        source = str(inner.chat_template)
        keys = (key for key in THOUGHTS if key in source and self._writes(probe_thought(key), CALLED, ARGUMENT))
        self.thoughts = next(keys, None)  # the key under which the template takes thoughts
        self.closing = self._closing()
        self.end = self._turn_end(self._names)
        if self.end is None and (end := self._turn_end(added)) is not None:  # <|im_end|> of some ChatML models
            self.end, self._names[end] = end, added[end]
        self.follows = self._next_opening() if self.end is None else None
        bare = self.lead is not None and self.end is None and self.follows is None and not self.generation
        self.appended = next(iter(stops), None) if bare else None  # the end of a reply, learned instead of `closing`
        ends = [number for number in (self.end, self.follows) if number is not None]
        self.stops = tuple(dict.fromkeys([*ends, *stops]))
        self._special = re.compile(
            "|".join(map(re.escape, sorted(self._names.values(), key=len, reverse=True))) or r"(?!)"
        )

    # ---- the interface of data/chat/render.py --------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], limit: int | None = None, counts: Counts | None = None) -> list[int]:
        """The tokens of a conversation up to the assistant's next answer. One that is too long loses its oldest
        exchanges, then the system message, then its beginning."""
        system, groups = exchanges(messages)
        whole = ids = self._prompt([*system, *flat(groups)])
        if limit is not None and len(ids) > limit:

            def behind(count: int) -> list[int]:
                return self._prompt([*system, *flat(groups[-count:])])

            most = max_that_fits(len(groups) - 1, lambda count: len(behind(count)) <= limit)
            ids = (behind(most) if most else self._prompt(flat(groups[-1:])))[-limit:]
        if counts is not None:
            complete = len(ids) == len(whole)
            counts.pieces += 1
            counts.tokens += len(ids)
            counts.whole, counts.split = counts.whole + complete, counts.split + (not complete)
            counts.cut_prompts += not complete
            counts.lost_tokens += len(whole) - len(ids)
        return ids

    def render(self, messages: Sequence[Message]) -> Rendered:
        """Render a whole conversation. If the template writes earlier turns otherwise than the last one, the mask has
        the last turn alone."""
        if self._cannot_write(messages):
            raise UserError("the model's chat template has no form for calls of tools, which this conversation holds")
        talk = self._plain(messages)
        if self.generation:
            return self._by_generation(talk)
        return self._rendered(*self._spans(talk))

    def pieces(self, messages: Sequence[Message], limit: int, counts: Counts) -> list[Rendered]:
        """Pieces of at most `limit` tokens, each with tokens to learn; `counts` counts whole and shortened ones."""
        if self._cannot_write(messages):
            counts.unwritten += 1
            return []
        system, groups = exchanges(messages)
        talk = self._plain([*system, *flat(groups)])
        pieces = self._whole(talk) if self._size(talk) <= limit else []
        whole = bool(pieces) and all(len(piece.ids) <= limit for piece in pieces)
        if not whole:
            pieces = self._split(system, groups, limit, counts)
        pieces = [piece for piece in pieces if any(piece.mask)]
        if not pieces:
            counts.unsupervised += 1
            return []
        counts.whole, counts.split = counts.whole + whole, counts.split + (not whole)
        counts.pieces += len(pieces)
        counts.tokens += sum(len(piece.ids) for piece in pieces)
        return pieces

    def with_options(self, **options: Any) -> ChatTemplate:
        """A copy of the template that is rendered with these variables."""
        template = copy.copy(self)
        template.options = {**self.options, **options}
        return template

    def around_thoughts(self) -> tuple[str, str]:
        """Two texts: the one that an answer without thoughts learns before its words, and the one by which a prompt
        alone opens the assistant's turn."""
        if self.lead is None:  # it accepts other conversations only
            return "", ""
        talk = [*self.lead, SHORT[0], {"role": "assistant", "content": CALLED}]
        before, (through, span) = self._text(talk[:-1], opened=True), self._turn(talk, len(talk) - 1)
        return through[span.begin : through.rindex(CALLED)], before[span.begin :]

    def learns_ends(self) -> bool:
        """True if the end of a reply is learned: generation blocks may leave it out."""
        if not self.generation:
            return True
        try:
            ids, mask = self.render([*(self.lead or ()), *SHORT])
        except UserError:  # it accepts other conversations only
            return True
        return any(learned and token in self.stops for token, learned in zip(ids, mask))

    # ---- rendering -----------------------------------------------------------------------------

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """Messages in the form of templates. Calls of the calculator stand in their texts as GSM8K writes them:
        <<17+25=42>>. Text that looks like a special token is broken up, whoever wrote it."""
        talk: list[Message] = []
        for message in canonical(messages):
            parts = [{**part, "text": self._safe(part["text"])} for part in content_parts(message["content"])]
            written = tool_messages(parts, self.thoughts or "") if self.calls or self.thoughts else []
            if not written and self.thoughts:  # calls of the calculator go into the text, thoughts stay beside it
                written = tool_messages(in_text(parts), self.thoughts)
            text = "".join(part["text"] for part in in_text(parts) if part["type"] == "text")
            talk += written or [{"role": message["role"], "content": text}]
        return with_tools(talk, bool(self.lead)) if self.offers else talk

    def _cannot_write(self, messages: Sequence[Message]) -> bool:
        """True if functions are called here and the template cannot write calls. Written into the text, as those of
        GSM8K's calculator, the model would learn to make up their results."""
        if self.calls:
            return False
        every = (tool_messages(content_parts(message["content"])) for message in canonical(messages))
        return any("tool_calls" in message for written in every for message in written)

    def _safe(self, text: str) -> str:
        """Break up text that looks like a special token."""
        return self._special.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)

    def _text(self, talk: Sequence[Message], opened: bool) -> str:
        """The text of a conversation; `opened`: up to where the assistant's next answer begins."""
        text: str = self._apply(talk, tokenize=False, add_generation_prompt=opened)
        return text

    def _apply(self, talk: Sequence[Message], **arguments: Any) -> Any:
        bare, tools = map(replace_lone_surrogates, split_offers(talk))
        options = {**({"tools": tools} if tools else {}), **self.options}
        try:
            return self.inner.apply_chat_template(bare, **options, **arguments)
        except Exception as error:  # noqa: BLE001 (a template is a program of the model's author)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"the model's chat template refuses this conversation: {reason}") from None

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._marked.encode(  # type: ignore[no-any-return]
            self._text(self._plain(messages), opened=True), add_special_tokens=False
        ).ids

    def _by_generation(self, talk: Sequence[Message]) -> Rendered:
        """Render with the mask of the template's own generation blocks."""
        encoded = self._apply(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Rendered(list(encoded["input_ids"]), list(encoded["assistant_masks"]))

    def _size(self, talk: Sequence[Message]) -> int:
        """Number of tokens of a whole conversation."""
        return len(self._marked.encode(self._text(talk, opened=False), add_special_tokens=False).ids)

    def _spans(self, talk: Sequence[Message]) -> tuple[str, list[_Span]]:
        """The text of a conversation and the assistant's turns in it, but those that the template writes otherwise when
        other turns follow."""
        text = self._text(talk, opened=False)
        spans = self._spans_by_exchange(talk, text)
        if spans is None:
            turns = [self._turn(talk, at) for at in turns_in(talk)]
            spans = [span for through, span in turns if text.startswith(through)]
        return text, spans

    def _turn(self, talk: Sequence[Message], at: int) -> tuple[str, _Span]:
        """The text up to the end of a turn of the assistant, and the turn in it."""
        before, through = self._text(talk[:at], opened=True), self._text(talk[: at + 1], opened=False)
        begin = len(os.path.commonprefix([before, through]))  # noqa: RUF071 (letters are meant)
        if begin < len(before):  # prompts may open thoughts that this turn has not
            earlier = self._text(talk[:at], opened=False)
            if THOUGHT in talk[at]["content"] and THOUGHT not in through[begin:]:
                raise UserError(
                    "the model's chat template leaves out what an answer thinks, so it cannot be learned; take the "
                    f"thoughts (all up to {THOUGHT}) out of the data, or mark the assistant's turns in the template by "
                    "generation blocks"
                )
            if OPENING not in before[len(earlier) :] or begin <= len(earlier) or not through.startswith(earlier):
                raise UserError(
                    "the model's chat template opens a turn of the assistant otherwise than it writes one, so it "
                    "cannot be told what the model should learn; mark it in the template by generation blocks"
                )
            opened = before.index(OPENING, len(earlier))
            begin = begin if begin >= opened + len(OPENING) else min(begin, opened)  # the answer may begin by a < too
        return through, _Span(begin, len(through))

    def _spans_by_exchange(self, talk: Sequence[Message], text: str) -> list[_Span] | None:
        """The assistant's turns, in time that grows with the conversation and not with its square: each exchange is
        rendered behind a short one and before the user's next word. None where these parts do not make up the text,
        for instance since the template counts the turns."""
        short = [*(self.lead or ()), *SHORT]
        starts = [0, *(at for at in range(1, len(talk)) if begins_exchange(talk, at)), len(talk)]
        spans, end = list[_Span](), 0
        try:
            opening = self._text([*short, NEXT], opened=False).rpartition(CALLED)[0]
            for begin, stop in itertools.pairwise(starts):
                before, prefix = (short, opening) if begin else ([], "")
                part = [*before, *talk[begin:stop]]
                written = body = self._text(part if stop == len(talk) else [*part, NEXT], opened=False)
                if stop < len(talk):
                    body = written.rpartition(CALLED)[0]
                if not body.startswith(prefix) or not text.startswith(body[len(prefix) :], end):
                    return None
                for span in self._spans_by_step(part, written, len(before)):
                    spans.append(_Span(*(end + edge - len(prefix) for edge in span)))
                end += len(body) - len(prefix)
        except UserError:
            return None
        return spans if end == len(text) else None

    def _spans_by_step(self, part: Sequence[Message], written: str, first: int) -> list[_Span]:
        """The assistant's turns in an exchange, whose text is `written`, from message `first` on. If there are many,
        with results of tools between them, each is rendered behind the one before it alone, unless these parts do not
        make up the text."""
        turns = [at for at in turns_in(part) if at >= first]
        spans: list[_Span] = []
        for last, at in itertools.pairwise([turns[0], *turns] if len(turns) > 2 else []):
            window = [*part[: turns[0]], *part[last : at + 1]]
            try:
                prefix = self._text(window[: turns[0] + 1], opened=False) if spans else ""
                through, span = self._turn(window, len(window) - 1)
            except UserError:
                break
            end = spans[-1].end if spans else 0
            if not through.startswith(prefix) or not written.startswith(through[len(prefix) :], end):
                break
            spans.append(_Span(*(end + edge - len(prefix) for edge in span)))
        if len(spans) == len(turns):
            return spans
        every = (self._turn(part, at) for at in turns)
        return [span for through, span in every if written.startswith(through)]

    def _rendered(self, text: str, spans: Sequence[_Span]) -> Rendered:
        """Encode a text; the mask has the tokens of these spans, each with the token that ends it."""
        ended = self.appended is not None and bool(spans) and spans[-1].end == len(text)
        if self.appended is not None:  # only text closes a turn, which the model need not write
            spans = [self._unclosed(text, span) for span in spans]
            text = text[: spans[-1].end] if ended else text
        encoding = self._marked.encode(text, add_special_tokens=False)
        ids, offsets = encoding.ids, encoding.offsets  # each access to the attributes makes a new list
        mask, begins = [0] * len(ids), [begin for begin, _ in offsets]
        for span in spans:
            near = range(bisect.bisect_left(begins, span.begin), bisect.bisect_right(begins, span.end))
            inside = [at for at in near if offsets[at][1] <= span.end]
            last = max((at for at in inside if ids[at] in self.stops), default=None)
            for at in inside:
                mask[at] = int(last is None or at <= last)  # not the newline behind the end of a turn
            behind = bisect.bisect_left(begins, span.end)
            if self.follows is not None and behind == len(ids):
                ids.append(self.follows)
                mask.append(1)
            elif self.follows is not None and ids[behind] in self._names:
                mask[behind] = 1
        if ended and self.appended is not None:
            ids.append(self.appended)
            mask.append(1)
        return Rendered(ids, mask)

    def _unclosed(self, text: str, span: _Span) -> _Span:
        """A turn without the text by which the template closes it."""
        closed = self.closing and text.endswith(self.closing, span.begin, span.end)
        return _Span(span.begin, span.end - len(self.closing) * bool(closed))

    def _whole(self, talk: Sequence[Message]) -> list[Rendered]:
        """The conversation as one piece, or as one for each turn of the assistant, if the template writes earlier turns
        otherwise."""
        if self.generation:
            return [self._by_generation(talk)]
        text, spans = self._spans(talk)
        turns = turns_in(talk)
        if len(spans) == len(turns):
            return [self._rendered(text, spans)]
        return [self._rendered(through, [span]) for through, span in (self._turn(talk, at) for at in turns)]

    def _split(
        self, system: Sequence[Message], groups: Sequence[Sequence[Message]], limit: int, counts: Counts
    ) -> list[Rendered]:
        """Split a conversation into pieces of as many exchanges as fit, each behind the system message."""
        pieces: list[Rendered] = []
        first = 0
        while first < len(groups):

            def talk(count: int, first: int = first) -> list[Message]:
                return self._plain([*system, *flat(groups[first : first + count])])

            count = max_that_fits(len(groups) - first, lambda count: self._size(talk(count)) <= limit) or 1
            whole = self._whole(talk(count))
            if len(whole) > 1:  # a turn may be longer here than when others follow: then it begins the next piece
                owners = [at for at in range(count) for _ in turns_in(self._plain(groups[first + at]))]
                long = next((at for at, piece in zip(owners, whole) if len(piece.ids) > limit), count)
                count = max(long, 1)
                whole = [piece for at, piece in zip(owners, whole) if at < count]
            if system and any(len(piece.ids) > limit for piece in whole):
                bare = self._whole(self._plain(flat(groups[first : first + count])))
                counts.lost_tokens += sum(len(a.ids) - len(b.ids) for a, b in zip(whole, bare))
                whole = bare
            pieces += [cut(piece, limit, counts) for piece in whole]
            first += count
        return pieces

    def _writes(self, talk: Sequence[Message], *words: str) -> bool:
        """True if the template writes all of these words; with a system message before them if it needs one."""
        for lead in LEADS:
            with contextlib.suppress(UserError):
                text = self._text([*lead, *talk], opened=False)
                return all(word in text for word in words)
        return False

    def _accepts(self, talk: Sequence[Message]) -> bool:
        """True if the template can render it."""
        try:
            self._text(talk, opened=False)
        except UserError:
            return False
        return True

    def _closing(self) -> str:
        """The text behind the words of the assistant's last turn, if the template accepts a short conversation."""
        if self.lead is None:
            return ""
        talk = [*self.lead, SHORT[0], {"role": "assistant", "content": CALLED}]
        return self._text(talk, opened=False).rpartition(CALLED)[2]

    def _turn_end(self, names: Mapping[int, str]) -> int | None:
        """The first of these tokens that closes a turn of the assistant, line breaks left out."""
        closing = self._marked.encode(self.closing, add_special_tokens=False).ids
        return next((number for number in closing if names.get(number, "").strip()), None)

    def _next_opening(self) -> int | None:
        """The special token that opens the user's next turn: where no token closes a turn, the model ends its own by
        that one (GLM)."""
        try:
            short = [*(self.lead or ()), *SHORT]
            through, text = (self._text(talk, opened=False) for talk in (short, [*short, NEXT]))
        except UserError:
            return None
        behind = self._marked.encode(text[len(through) :], add_special_tokens=False).ids
        return behind[0] if text.startswith(through) and behind and behind[0] in self._names else None


def in_text(parts: Sequence[Part]) -> list[Part]:
    """The parts of a message with tool calls and results put into the text around them."""
    joined: list[Part] = []
    for kind, run in itertools.groupby(parts, key=lambda part: "text" if part["type"] in IN_TEXT else part["type"]):
        texts = [IN_TEXT.get(part["type"], "{}").format(part["text"]) for part in run]
        joined += [{"type": kind, "text": text} for text in (texts if kind != "text" else ["".join(texts)])]
    return joined


def turns_in(talk: Sequence[Message]) -> list[int]:
    """Indices of the assistant's messages."""
    return [at for at, message in enumerate(talk) if message["role"] == "assistant"]


def begins_exchange(talk: Sequence[Message], at: int) -> bool:
    """True if the user speaks at this message, behind the assistant or the result of a tool."""
    return talk[at]["role"] == "user" and talk[at - 1]["role"] in ("assistant", "tool")


def cut(piece: Rendered, limit: int, counts: Counts) -> Rendered:
    """Shorten a piece: first the beginning of its prompt, down to half of the limit, then the end of its reply."""
    ids, mask = piece
    if len(ids) <= limit:
        return piece
    prompt = mask.index(1) if any(mask) else len(mask)
    allowed = max(limit - (len(ids) - prompt), limit // 2)
    if prompt > allowed:
        ids, mask = ids[prompt - allowed :], mask[prompt - allowed :]
        counts.cut_prompts += 1
    counts.cut_replies += len(ids) > limit
    counts.lost_tokens += len(piece.ids) - min(len(ids), limit)
    return Rendered(ids[:limit], mask[:limit])
