"""The chat template of a Hugging Face model: conversations to tokens, and which of them the assistant writes.

    template.prompt(messages, limit)       # open for the assistant to speak
    template.render(messages)              # ids and mask
    template.pieces(messages, limit)       # for training: no piece is longer than `limit`

data/chat/template.py comes here when the tokenizer has a template. The mask is that of the template's {% generation %}
blocks. A template without them is rendered up to each turn of the assistant, before and after: the difference is what
it writes, provided that the one text begins with the other. Some templates write earlier turns otherwise than the last
one (Qwen3 leaves out its thoughts): then each turn becomes a piece of its own, with all before it as the model will see
it. Calls of tools, their results and the tools that a system message offers are written as the template writes such,
where it knows them (models/template.py); else they stand in the texts. What the assistant thinks reaches a template
that takes it beside the words, as `reasoning_content` or by another name.
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

from ascendchat.data.chat.tables import THOUGHTS
from ascendchat.data.chat.template import (
    Counts,
    Message,
    Part,
    Rendered,
    canonical,
    content_parts,
    exchanges,
    flat,
    most_that_fit,
)
from ascendchat.data.chat.turns import TOOLS_OFFERED
from ascendchat.data.surrogates import replace_lone_surrogates
from ascendchat.errors import UserError

# Calls of tools as the messages that chat templates take, as transformers describes them.
#
#     called([{"type": "tool", "text": '{"name": "weather", "arguments": {}}'}, {"type": "output", "text": "sunny"}])
#     # [{"role": "assistant", "content": "", "tool_calls": [...]}, {"role": "tool", "content": "sunny", ...}]
#
# template.py comes here where the template writes what PROBE_CALL and PROBE_OFFER hold.

OFFERED = "tools"  # in the first message of a conversation: the tools that may be called
CALLED, ARGUMENT, RESULT = "qqzq", "zqqz", "qzqz"


def function(name: str, number: int, arguments: Any) -> dict[str, Any]:
    """A call. Its id has nine letters and digits, since Mistral's templates take no other."""
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
    """What a template that knows thoughts by this name writes."""
    return [{"role": "user", "content": "a"}, {"role": "assistant", "content": ARGUMENT, name: CALLED}]


def read_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a part; none where it is one of the calculator, or no JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        return []
    calls = found if isinstance(found, list) else [found]
    return calls if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls) else []


def called(parts: Sequence[Part], thoughts: str = "thought") -> list[Message]:
    """A turn of the assistant as messages, with what it thinks under the name `thoughts`; none where nothing is called
    or thought, or something is called that is no function."""
    messages: list[Message] = []
    number, waiting = 0, list[tuple[str, str]]()  # calls without a result: id and name
    for at, part in enumerate(parts):
        fresh = at > 0 and parts[at - 1]["type"] == "thought"  # the message of the thought has no words yet
        if part["type"] == "text":
            if fresh:
                messages[-1]["content"] = part["text"]
            else:
                messages.append({"role": "assistant", "content": part["text"]})
        elif part["type"] == "thought":
            messages.append({"role": "assistant", "content": "", thoughts: part["text"]})
        elif part["type"] == "tool":
            found = read_calls(part["text"])
            if not found:
                return []
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            for call in found:
                made = function(call["name"], number, call.get("arguments") or {})
                messages[-1].setdefault("tool_calls", []).append(made)
                waiting.append((made["id"], call["name"]))
                number += 1
        elif not waiting:
            return []
        else:
            identity, name = waiting.pop(0)
            messages.append({"role": "tool", "content": part["text"], "name": name, "tool_call_id": identity})
    return messages if number or any(thoughts in message for message in messages) else []


def offered(talk: list[Message], wants_system: bool = False) -> list[Message]:
    """The conversation with the tools that its system message lists (data/chat/turns.py) beside its first message; a
    system message that says nothing else goes, unless the template wants one."""
    if not talk or talk[0]["role"] != "system" or TOOLS_OFFERED not in talk[0]["content"]:
        return talk
    before, _, listed = talk[0]["content"].rpartition(TOOLS_OFFERED)
    try:
        found = json.loads(listed)
    except ValueError:
        return talk
    found = found if isinstance(found, list) else [found]
    if not found or not all(isinstance(tool, dict) for tool in found):
        return talk
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in found]
    kept = wants_system or before.strip()
    rest = [{"role": "system", "content": before.rstrip("\n")}, *talk[1:]] if kept else talk[1:]
    return [{**rest[0], OFFERED: tools}, *rest[1:]] if rest else talk


def split_offers(talk: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """Messages as a template takes them, and the tools for it."""
    bare = [{name: value for name, value in message.items() if name != OFFERED} for message in talk]
    return bare, [tool for message in talk for tool in message.get(OFFERED, ())]


MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
WRITTEN = {"text": "{}", "tool": "<<{}=", "output": "{}>>"}
SHORT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
NEXT = {"role": "user", "content": CALLED}
LEADS: Sequence[Sequence[Message]] = (
    (),
    ({"role": "system", "content": "a"},),
)  # before short talks, as they are tried
OPENING, THOUGHT = "<think>", "</think>"  # around what an answer thinks
BREAK = "\u200b"  # a zero-width space: put into what only looks like a special token


class _Span(NamedTuple):
    """Letters of a text that the assistant writes."""

    begin: int
    end: int


class ChatTemplate:
    """`marked`: the tokenizer that reads special tokens in a text as such; `names`: those; `added`: others that it was
    given beside its vocabulary, such as runs of blanks."""

    def __init__(
        self, inner: Any, marked: Any, stops: Sequence[int], names: Mapping[int, str], added: Mapping[int, str]
    ) -> None:
        self.inner, self._marked, self._names = inner, marked, dict(names)
        self.options: dict[str, Any] = {}  # further variables of the template, such as enable_thinking
        self.generation = bool(MARKED.search(str(inner.chat_template)))
        # What short talks begin with, so that the template takes them; None where it refuses all
        self.lead: Sequence[Message] | None = next((lead for lead in LEADS if self._takes([*lead, *SHORT])), None)
        self.calls = self._knows(PROBE_CALL, CALLED, ARGUMENT, RESULT)
        self.offers = self._knows(PROBE_OFFER, CALLED, ARGUMENT)
        source = str(inner.chat_template)
        named = (name for name in THOUGHTS if name in source and self._knows(probe_thought(name), CALLED, ARGUMENT))
        self.thoughts = next(named, None)
        self.closing = self._closing()
        self.end = self._turn_end(self._names)
        if self.end is None and (end := self._turn_end(added)) is not None:  # as <|im_end|> of some ChatML models
            self.end, self._names[end] = end, added[end]
        self.follows = self._next_opening() if self.end is None else None
        bare = self.lead is not None and self.end is None and self.follows is None and not self.generation
        self.appended = next(iter(stops), None) if bare else None  # learnt in place of `closing`, as the end of a reply
        found = [number for number in (self.end, self.follows) if number is not None]
        self.stops = tuple(dict.fromkeys([*found, *stops]))
        self._special = re.compile(
            "|".join(map(re.escape, sorted(self._names.values(), key=len, reverse=True))) or r"(?!)"
        )

    # ---- what data/chat/template.py offers --------------------------------------------------------------

    def prompt(self, messages: Sequence[Message], limit: int | None = None, counts: Counts | None = None) -> list[int]:
        """The conversation so far, open for the assistant. Too long: the oldest exchanges go, then the system message,
        then the beginning."""
        system, groups = exchanges(messages)
        whole = ids = self._prompt([*system, *flat(groups)])
        if limit is not None and len(ids) > limit:

            def behind(count: int) -> list[int]:
                return self._prompt([*system, *flat(groups[-count:])])

            most = most_that_fit(len(groups) - 1, lambda count: len(behind(count)) <= limit)
            ids = (behind(most) if most else self._prompt(flat(groups[-1:])))[-limit:]
        if counts is not None:
            kept = len(ids) == len(whole)
            counts.pieces += 1
            counts.tokens += len(ids)
            counts.whole, counts.split = counts.whole + kept, counts.split + (not kept)
            counts.cut_prompts += not kept
            counts.lost_tokens += len(whole) - len(ids)
        return ids

    def render(self, messages: Sequence[Message]) -> Rendered:
        """A whole conversation; where earlier turns are written otherwise than the last, only that is in the mask."""
        if self._cannot_write(messages):
            raise UserError("the model's chat template has no form for calls of tools, which this conversation holds")
        talk = self._plain(messages)
        if self.generation:
            return self._by_generation(talk)
        return self._rendered(*self._spans(talk))

    def pieces(self, messages: Sequence[Message], limit: int, counts: Counts) -> list[Rendered]:
        """Pieces of at most `limit` tokens, each with something to learn; what was done is added to `counts`."""
        if self._cannot_write(messages):
            counts.unwritten += 1
            return []
        system, groups = exchanges(messages)
        talk = self._plain([*system, *flat(groups)])
        found = self._whole(talk) if self._size(talk) <= limit else []
        whole = bool(found) and all(len(piece.ids) <= limit for piece in found)
        if not whole:
            found = self._split(system, groups, limit, counts)
        found = [piece for piece in found if any(piece.mask)]
        if not found:
            counts.unsupervised += 1
            return []
        counts.whole, counts.split = counts.whole + whole, counts.split + (not whole)
        counts.pieces += len(found)
        counts.tokens += sum(len(piece.ids) for piece in found)
        return found

    def with_options(self, **options: Any) -> ChatTemplate:
        """The same template with these variables."""
        made = copy.copy(self)
        made.options = {**self.options, **options}
        return made

    def around_thoughts(self) -> tuple[str, str]:
        """(what an answer without thoughts learns before its words, what only prompts open the assistant's turn by)."""
        if self.lead is None:  # it takes other conversations
            return "", ""
        talk = [*self.lead, SHORT[0], {"role": "assistant", "content": CALLED}]
        before, (through, span) = self._text(talk[:-1], opened=True), self._turn(talk, len(talk) - 1)
        return through[span.begin : through.rindex(CALLED)], before[span.begin :]

    def learns_ends(self) -> bool:
        """Whether the end of a reply is learned: generation blocks may leave it out."""
        if not self.generation:
            return True
        try:
            ids, mask = self.render([*(self.lead or ()), *SHORT])
        except UserError:  # it takes other conversations
            return True
        return any(mine and token in self.stops for token, mine in zip(ids, mask))

    # ---- rendering -----------------------------------------------------------------------------

    def _plain(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as templates take them. Calls of the calculator stand in their texts as GSM8K writes them:
        <<17+25=42>>. What looks like a special token is broken, whoever wrote it."""
        talk: list[Message] = []
        for message in canonical(messages):
            parts = [{**part, "text": self._safe(part["text"])} for part in content_parts(message["content"])]
            written = called(parts, self.thoughts or "") if self.calls or self.thoughts else []
            if not written and self.thoughts:  # what is called is no function: thoughts keep their place beside it
                written = called(in_text(parts), self.thoughts)
            said = "".join(part["text"] for part in in_text(parts) if part["type"] == "text")
            talk += written or [{"role": message["role"], "content": said}]
        return offered(talk, bool(self.lead)) if self.offers else talk

    def _cannot_write(self, messages: Sequence[Message]) -> bool:
        """Whether functions are called here though the template knows none. In a text, as GSM8K's calculator, the model
        would learn to make up their results."""
        if self.calls:
            return False
        every = (called(content_parts(message["content"])) for message in canonical(messages))
        return any("tool_calls" in message for written in every for message in written)

    def _safe(self, text: str) -> str:
        return self._special.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)

    def _text(self, talk: Sequence[Message], opened: bool) -> str:
        text: str = self._apply(talk, tokenize=False, add_generation_prompt=opened)
        return text

    def _apply(self, talk: Sequence[Message], **how: Any) -> Any:
        bare, tools = map(replace_lone_surrogates, split_offers(talk))
        try:
            return self.inner.apply_chat_template(bare, **({"tools": tools} if tools else {}), **self.options, **how)
        except Exception as error:  # noqa: BLE001 (a template is a program of the model's author)
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"the model's chat template refuses this conversation: {reason}") from None

    def _prompt(self, messages: Sequence[Message]) -> list[int]:
        return self._marked.encode(  # type: ignore[no-any-return]
            self._text(self._plain(messages), opened=True), add_special_tokens=False
        ).ids

    def _by_generation(self, talk: Sequence[Message]) -> Rendered:
        """As the template's own blocks say."""
        found = self._apply(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return Rendered(list(found["input_ids"]), list(found["assistant_masks"]))

    def _size(self, talk: Sequence[Message]) -> int:
        """Tokens of a conversation as it is written whole."""
        return len(self._marked.encode(self._text(talk, opened=False), add_special_tokens=False).ids)

    def _spans(self, talk: Sequence[Message]) -> tuple[str, list[_Span]]:
        """The text of a conversation and what the assistant writes in it; where the template writes a turn otherwise
        when others follow, it is left out."""
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
        """The same in time that grows with the conversation, not with its square: each exchange is written behind a
        short one and before the user's next word. None where these parts do not make up the text, for instance since
        the template counts the turns."""
        short = [*(self.lead or ()), *SHORT]
        starts = [0, *(at for at in range(1, len(talk)) if begins_exchange(talk, at)), len(talk)]
        spans, end = list[_Span](), 0
        try:
            opening = self._text([*short, NEXT], opened=False).rpartition(CALLED)[0]
            for begin, stop in itertools.pairwise(starts):
                before, known = (short, opening) if begin else ([], "")
                part = [*before, *talk[begin:stop]]
                written = body = self._text(part if stop == len(talk) else [*part, NEXT], opened=False)
                if stop < len(talk):
                    body = written.rpartition(CALLED)[0]
                if not body.startswith(known) or not text.startswith(body[len(known) :], end):
                    return None
                for span in self._spans_by_step(part, written, len(before)):
                    spans.append(_Span(*(end + place - len(known) for place in span)))
                end += len(body) - len(known)
        except UserError:
            return None
        return spans if end == len(text) else None

    def _spans_by_step(self, part: Sequence[Message], written: str, first: int) -> list[_Span]:
        """The turns of an exchange that is `written` so, from the message `first` on. Of many, between which tools
        give their results, each is written behind the one before it only, where these parts make up the text."""
        turns = [at for at in turns_in(part) if at >= first]
        spans: list[_Span] = []
        for last, at in itertools.pairwise([turns[0], *turns] if len(turns) > 2 else []):
            window = [*part[: turns[0]], *part[last : at + 1]]
            try:
                known = self._text(window[: turns[0] + 1], opened=False) if spans else ""
                through, span = self._turn(window, len(window) - 1)
            except UserError:
                break
            end = spans[-1].end if spans else 0
            if not through.startswith(known) or not written.startswith(through[len(known) :], end):
                break
            spans.append(_Span(*(end + place - len(known) for place in span)))
        if len(spans) == len(turns):
            return spans
        found = (self._turn(part, at) for at in turns)
        return [span for through, span in found if written.startswith(through)]

    def _rendered(self, text: str, spans: Sequence[_Span]) -> Rendered:
        ended = self.appended is not None and bool(spans) and spans[-1].end == len(text)
        if self.appended is not None:  # what closes a turn is only text: the model need not write it
            spans = [self._unclosed(text, span) for span in spans]
            text = text[: spans[-1].end] if ended else text
        found = self._marked.encode(text, add_special_tokens=False)
        ids, offsets = found.ids, found.offsets  # each made anew whenever it is asked for
        mask, begins = [0] * len(ids), [begin for begin, _ in offsets]
        for span in spans:
            near = range(bisect.bisect_left(begins, span.begin), bisect.bisect_right(begins, span.end))
            inside = [at for at in near if offsets[at][1] <= span.end]
            last = max((at for at in inside if ids[at] in self.stops), default=None)
            for at in inside:
                mask[at] = int(last is None or at <= last)  # the newline behind the end of a turn is nobody's
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
        """One piece; or one for each turn of the assistant, where the template writes earlier turns otherwise."""
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
        """As many exchanges in a piece as fit, each opened by the system message."""
        pieces: list[Rendered] = []
        first = 0
        while first < len(groups):

            def talk(count: int, first: int = first) -> list[Message]:
                return self._plain([*system, *flat(groups[first : first + count])])

            count = most_that_fit(len(groups) - first, lambda count: self._size(talk(count)) <= limit) or 1
            found = self._whole(talk(count))
            if len(found) > 1:  # a turn may be longer here than when others follow: then it begins the next piece
                owners = [at for at in range(count) for _ in turns_in(self._plain(groups[first + at]))]
                long = next((at for at, piece in zip(owners, found) if len(piece.ids) > limit), count)
                count = max(long, 1)
                found = [piece for at, piece in zip(owners, found) if at < count]
            if system and any(len(piece.ids) > limit for piece in found):
                bare = self._whole(self._plain(flat(groups[first : first + count])))
                counts.lost_tokens += sum(len(a.ids) - len(b.ids) for a, b in zip(found, bare))
                found = bare
            pieces += [cut(piece, limit, counts) for piece in found]
            first += count
        return pieces

    def _knows(self, talk: Sequence[Message], *words: str) -> bool:
        """Whether the template writes all of these words; asked with a system message where it refuses without."""
        for lead in LEADS:
            with contextlib.suppress(UserError):
                text = self._text([*lead, *talk], opened=False)
                return all(word in text for word in words)
        return False

    def _takes(self, talk: Sequence[Message]) -> bool:
        """Whether the template does not refuse it."""
        try:
            self._text(talk, opened=False)
        except UserError:
            return False
        return True

    def _closing(self) -> str:
        """What the template writes behind the words of the assistant's last turn, if it takes a short talk."""
        if self.lead is None:
            return ""
        talk = [*self.lead, SHORT[0], {"role": "assistant", "content": CALLED}]
        return self._text(talk, opened=False).rpartition(CALLED)[2]

    def _turn_end(self, names: Mapping[int, str]) -> int | None:
        """The first of these tokens that closes a turn of the assistant, if there is one but line breaks."""
        behind = self._marked.encode(self.closing, add_special_tokens=False).ids
        return next((number for number in behind if names.get(number, "").strip()), None)

    def _next_opening(self) -> int | None:
        """Where no token closes a turn: the special one that opens the user's next turn, by which the model ends its
        own (GLM)."""
        try:
            short = [*(self.lead or ()), *SHORT]
            through, text = (self._text(talk, opened=False) for talk in (short, [*short, NEXT]))
        except UserError:
            return None
        behind = self._marked.encode(text[len(through) :], add_special_tokens=False).ids
        return behind[0] if text.startswith(through) and behind and behind[0] in self._names else None


def in_text(parts: Sequence[Part]) -> list[Part]:
    """The same, with calls and their results in the text around them, as GSM8K writes those of its calculator."""
    found: list[Part] = []
    for kind, run in itertools.groupby(parts, key=lambda part: "text" if part["type"] in WRITTEN else part["type"]):
        texts = [WRITTEN.get(part["type"], "{}").format(part["text"]) for part in run]
        found += [{"type": kind, "text": text} for text in (texts if kind != "text" else ["".join(texts)])]
    return found


def turns_in(talk: Sequence[Message]) -> list[int]:
    return [at for at, message in enumerate(talk) if message["role"] == "assistant"]


def begins_exchange(talk: Sequence[Message], at: int) -> bool:
    """Whether the user speaks again, behind the assistant or the result of a tool."""
    return talk[at]["role"] == "user" and talk[at - 1]["role"] in ("assistant", "tool")


def cut(piece: Rendered, limit: int, counts: Counts) -> Rendered:
    """A piece made to fit: the beginning of its prompt goes, down to half of the room, then the end of its reply."""
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
