"""From conversations to tokens and back: the one renderer for mid-training, SFT, evaluation and chat.

    rendered = render(tokenizer, messages)            # ids, and a mask: 1 where the assistant must produce the token
    prompt = render_prompt(tokenizer, messages)       # ends with <|assistant_start|>, ready for generation
    messages = parse_messages(tokenizer, rendered.ids)  # back again
    pieces = render_pieces(tokenizer, messages, limit, counts)  # for training: no piece is longer than `limit` tokens

`ascendchat mid`, `ascendchat sft`, `ascendchat eval chat` and `ascendchat chat` all go through here.

A conversation is a list of messages {"role": "system" | "user" | "assistant" | "tool", "content": ...}. Content is a
string, or a list of parts {"type": "text" | "tool" | "output" | "thought", "text": ...}: text, a call of the
calculator, its result, and what the assistant thinks, which only chat templates with a place for it write. A "tool"
message is the same as an output part of the assistant's turn, and neighbouring assistant and tool messages are one
turn. On the wire:

    <|bos|> <|system_start|>...<|system_end|> <|user_start|>...<|user_end|>
    <|assistant_start|> text <|tool_start|>17+25<|tool_end|> <|output_start|>42<|output_end|> text <|assistant_end|>

Every text is encoded on its own and never becomes a special token, whatever a user types.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ascendchat.data.read import too_many
from ascendchat.errors import UserError

Message = dict[str, Any]
Conversation = list[Message]
Part = dict[str, str]

ROLES = ("system", "user", "assistant", "tool")
# The pair of special tokens around each kind of part; thoughts have none, since our own models do not write them
SPAN_OF = {"text": None, "tool": "tool", "output": "output", "thought": None}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class _Template(Protocol):
    """Chat template of another model (models/jinja_template.py). `thoughts`: its name for reasoning, None if it has no
    place for it."""

    thoughts: str | None

    def prompt(
        self, messages: Sequence[Message], limit: int | None = None, counts: Counts | None = None
    ) -> list[int]: ...
    def render(self, messages: Sequence[Message]) -> Rendered: ...
    def pieces(self, messages: Sequence[Message], limit: int, counts: Counts) -> list[Rendered]: ...


class Encoder(Protocol):
    """The part of a tokenizer that the renderer needs (data/tokenizer/); one with a `template` renders by that."""

    @property
    def specials(self) -> dict[str, int]: ...
    @property
    def opening(self) -> Sequence[int]: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Rendered(NamedTuple):
    """Token ids, and a mask: 1 where the assistant must produce the token."""

    ids: list[int]
    mask: list[int]

    def __add__(self, other: Rendered) -> Rendered:  # type: ignore[override]
        """Concatenate into new lists. For many parts use `concatenated`: a sum would copy the first part each time."""
        return Rendered(self.ids + other.ids, self.mask + other.mask)


def concatenated(parts: Iterable[Rendered]) -> Rendered:
    """Concatenate all parts."""
    result = Rendered([], [])
    for part in parts:
        result.ids.extend(part.ids)
        result.mask.extend(part.mask)
    return result


def dropped_reasoning_line(count: int) -> str:
    """Format the log's note about conversations, or pairs of them, that lost their reasoning."""
    return f"; in {count} the reasoning_content is left out, for which the model has no place" if count else ""


@dataclass
class Counts:
    """Number of conversations that were rendered, split and left out. Each is in `whole`, `split`, `unsupervised`,
    `empty`, `unwritten` or `refused`."""

    whole: int = 0  # fitted as they were
    split: int = 0  # too long: cut between exchanges into several pieces, or shortened
    unsupervised: int = 0  # hold no reply of the assistant, so there is nothing to learn from them
    empty: int = 0  # hold a reply without a word, from which a model learns to end at once: left out
    thoughtless: int = 0  # of all these: lost their reasoning, for which the template has no place
    pieces: int = 0  # rendered pieces
    cut_prompts: int = 0  # pieces whose prompt alone was too long: its beginning went
    cut_replies: int = 0  # pieces whose reply was too long: its end went
    tokens: int = 0  # of the rendered pieces
    lost_tokens: int = 0  # of cut prompts and replies
    unwritten: int = 0  # call tools, for which the model's chat template has no form: left out
    refused: int = 0  # by the model's chat template: left out
    why: str = ""  # the first refused one: its beginning and the error

    def refuse(self, messages: Sequence[Message], error: UserError) -> None:
        """Count a conversation that the chat template refuses."""
        self.refused += 1
        begin = next((text for message in messages if (text := text_of(message["content"]).strip())), "")
        self.why = self.why or f"the one that begins {begin[:60]!r}: {error}"

    def check(self) -> None:
        """Raise if more are refused than a file may have of rows that cannot be read: the template is not made for
        such data."""
        total = self.whole + self.split + self.unsupervised + self.empty + self.unwritten + self.refused
        if self.refused and too_many(self.refused, total):
            raise UserError(
                f"{self.refused} of {total} conversations are refused, first {self.why}; mend them, or take them out "
                "of --data"
            )

    def line(self) -> str:
        """Format one line for the log."""
        empty = f", {self.empty} with an empty reply (left out)" if self.empty else ""
        unwritten = f", {self.unwritten} that call tools, for which the model's chat template has no form"
        refused = f", {self.refused} refused by the chat template (first {self.why})" if self.refused else ""
        return (
            f"{self.whole} conversations whole, {self.split} too long (made {self.cut_prompts} shortened prompts and "
            f"{self.cut_replies} shortened replies, {self.lost_tokens} tokens lost), {self.unsupervised} without a "
            f"reply{empty}{unwritten if self.unwritten else ''}{refused}; {self.pieces} pieces, {self.tokens} tokens"
            f"{dropped_reasoning_line(self.thoughtless)}"
        )


def content_parts(content: str | Sequence[Part]) -> list[Part]:
    """Content as parts; neighbouring texts are one, empty texts are gone."""
    raw_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts: list[Part] = []
    for part in raw_parts:
        if part.get("type", "") not in SPAN_OF or not isinstance(part.get("text", ""), str):
            raise ValueError(f"a part needs a type of {', '.join(SPAN_OF)} and a text, not {part!r}")
    for kind, group in itertools.groupby(raw_parts, lambda part: part["type"]):
        texts = [part.get("text", "") for part in group]
        if kind != "text":
            parts += [{"type": kind, "text": text} for text in texts]
        elif text := "".join(texts):
            parts.append({"type": kind, "text": text})
    return parts


def content_of(parts: Sequence[Part]) -> str | list[Part]:
    """Content as a plain string where a turn is only text, else as parts."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return list(parts)


def text_of(content: str | Sequence[Part]) -> str:
    """The texts that a reader sees, without tool calls and their results."""
    return "".join(part["text"] for part in content_parts(content) if part["type"] == "text")


def canonical(messages: Sequence[Message]) -> Conversation:
    """The conversation in its one normal form, which `parse_messages` gives back."""
    turns: list[tuple[str, list[Part]]] = []
    for message in messages:
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"a message needs a role of {', '.join(ROLES)}, not {role!r}")
        parts = content_parts(message.get("content") or "")
        if role == "tool":
            role, parts = "assistant", [{"type": "output", "text": "".join(part["text"] for part in parts)}]
        elif role != "assistant" and any(part["type"] != "text" for part in parts):
            raise ValueError(f"only the assistant calls tools, not the role {role!r}")
        if role == "assistant" and turns and turns[-1][0] == "assistant":
            before = turns[-1][1]
            if before and parts and before[-1]["type"] == parts[0]["type"] == "text":
                before.append({"type": "text", "text": "\n"})
            before.extend(parts)
        else:
            turns.append((role, parts))
    return [{"role": role, "content": content_of(content_parts(parts))} for role, parts in turns]


def supported_messages(tokenizer: Encoder, messages: Sequence[Message]) -> Sequence[Message]:
    """Drop the assistant's reasoning from a conversation, unless the model's chat template has a place for it."""
    template = template_of(tokenizer)
    return messages if (template and template.thoughts) or not has_thoughts(messages) else without_thoughts(messages)


def has_thoughts(messages: Sequence[Message]) -> bool:
    """True if some part is reasoning."""
    lists = (message["content"] for message in messages if isinstance(message.get("content"), list))
    return any(part.get("type") == "thought" for content in lists for part in content)


def without_thoughts(messages: Sequence[Message]) -> Conversation:
    """Drop the parts that are reasoning."""
    contents = ((message, content_parts(message.get("content") or "")) for message in messages)
    return [
        {**message, "content": [part for part in parts if part["type"] != "thought"]} for message, parts in contents
    ]


def fold_system(tokenizer: Encoder, turns: Sequence[Message]) -> Conversation:
    """Fold system messages into the next user's, before its words and a blank line, if the tokenizer has no tokens
    for the system (nanochat's has none)."""
    if "<|system_start|>" in tokenizer.specials:
        return list(turns)
    talk: Conversation = []
    system_texts: list[str] = []
    for turn in turns:
        if turn["role"] == "system":
            system_texts.append(text_of(turn["content"]))
            continue
        if system_texts and turn["role"] == "user":
            turn = {"role": "user", "content": "\n\n".join([*system_texts, text_of(turn["content"])])}
        elif system_texts:
            talk.append({"role": "user", "content": "\n\n".join(system_texts)})
        system_texts = []
        talk.append(turn)
    return [*talk, {"role": "user", "content": "\n\n".join(system_texts)}] if system_texts else talk


def render_turns(tokenizer: Encoder, turns: Sequence[Message]) -> Rendered:
    """Render canonical messages one after the other."""
    return concatenated(render_message(tokenizer, message) for message in fold_system(tokenizer, turns))


def render_message(tokenizer: Encoder, message: Message) -> Rendered:
    """Render one canonical message between its special tokens."""
    special, role = tokenizer.specials, message["role"]
    if role != "assistant":
        text = tokenizer.encode(text_of(message["content"]))
        ids = [special[f"<|{role}_start|>"], *text, special[f"<|{role}_end|>"]]
        return Rendered(ids, [0] * len(ids))
    ids, mask = [special["<|assistant_start|>"]], [0]
    for part in content_parts(message["content"]):
        text, span = tokenizer.encode(part["text"]), SPAN_OF[part["type"]]
        if span:
            text = [special[f"<|{span}_start|>"], *text, special[f"<|{span}_end|>"]]
        ids += text
        mask += [0 if span == "output" else 1] * len(text)  # a result comes from the tool: nothing to learn
    return Rendered([*ids, special["<|assistant_end|>"]], [*mask, 1])


def has_reply(messages: Sequence[Message]) -> bool:
    """True if there is something to learn: turns of the assistant, none of them empty."""
    return any(message["role"] in ("assistant", "tool") for message in messages) and not has_empty_reply(messages)


def has_empty_reply(messages: Sequence[Message]) -> bool:
    """True if the assistant says and calls nothing in one of its turns."""
    replies = (turn["content"] for turn in canonical(messages) if turn["role"] == "assistant")
    return any(not text_of(reply).strip() and not has_calls(reply) for reply in replies)


def has_calls(content: str | Sequence[Part]) -> bool:
    """True if a turn holds a call or its result."""
    return any(part["type"] in ("tool", "output") for part in content_parts(content))


def template_of(tokenizer: Encoder) -> _Template | None:
    return getattr(tokenizer, "template", None)


def render(tokenizer: Encoder, messages: Sequence[Message]) -> Rendered:
    """Render a complete conversation, of any length."""
    messages = supported_messages(tokenizer, messages)
    if template := template_of(tokenizer):
        return template.render(messages)
    return Rendered([tokenizer.specials["<|bos|>"]], [0]) + render_turns(tokenizer, canonical(messages))


def exchanges(messages: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Split into the opening system messages and exchanges that each begin where a user begins to speak."""
    turns = canonical(messages)
    opening = 0
    while opening < len(turns) and turns[opening]["role"] == "system":
        opening += 1
    groups: list[list[Message]] = []
    for i, turn in enumerate(turns[opening:], opening):
        speaks = turn["role"] != "assistant" and (i == opening or turns[i - 1]["role"] == "assistant")
        if speaks or not groups:
            groups.append([])
        groups[-1].append(turn)
    return turns[:opening], groups


def max_that_fits(count: int, fits: Callable[[int], bool]) -> int:
    """Find the largest number of `count` things that fit, if fewer always fit too; 0 if not even one does. It
    doubles, then bisects, so nothing much larger than the answer is ever tried."""
    good, bad = 0, count + 1
    while bad - good > 1:
        tried = min(max(1, 2 * good), (good + bad) // 2)
        good, bad = (tried, bad) if fits(tried) else (good, tried)
    return good


def flat(groups: Iterable[Sequence[Message]]) -> list[Message]:
    """Flatten exchanges into messages."""
    return [message for group in groups for message in group]


def render_prompt(
    tokenizer: Encoder, messages: Sequence[Message], limit: int | None = None, counts: Counts | None = None
) -> list[int]:
    """Render the conversation so far, open for the assistant to speak.

    Longer than `limit` tokens: the oldest exchanges go first, system message and last exchange stay; if that is still
    too long, the system message goes, then the beginning of what remains.
    """
    messages = supported_messages(tokenizer, messages)
    if template := template_of(tokenizer):
        return template.prompt(messages, limit, counts)
    special = tokenizer.specials
    system, groups = exchanges(messages)
    groups = groups or [[]]
    bodies = [render_turns(tokenizer, group).ids for group in groups]
    room = (limit if limit is not None else 1 << 60) - 2  # <|bos|> and <|assistant_start|>
    if room < 1:
        raise ValueError(f"a prompt needs more than {limit} tokens")

    def lead(first: int) -> list[int]:
        """Token ids of one exchange after the system message."""
        return render_turns(tokenizer, [*system, *groups[first]]).ids if system else bodies[first]

    first, head, rest = 0, lead(0), sum(map(len, bodies[1:]))
    full_length = len(head) + rest
    while first < len(groups) - 1 and len(head) + rest > room:
        first += 1
        head, rest = lead(first), rest - len(bodies[first])
    if len(head) + rest > room:
        head = bodies[first]
    body = [*head, *(i for ids in bodies[first + 1 :] for i in ids)]
    if len(body) > room:
        body = shorten(body, room, special["<|user_start|>"])
    if counts is not None:
        kept_tokens = len(body)
        counts.pieces += 1
        counts.tokens += kept_tokens + 2
        counts.whole, counts.split = (
            counts.whole + (kept_tokens == full_length),
            counts.split + (kept_tokens < full_length),
        )
        counts.cut_prompts += kept_tokens < full_length
        counts.lost_tokens += full_length - kept_tokens
    return [special["<|bos|>"], *body, special["<|assistant_start|>"]]


def shorten(ids: list[int], room: int, start: int) -> list[int]:
    """The last `room` tokens of a prompt, opened by `start` so that it still reads as a user's turn."""
    return [start, *ids[len(ids) - room + 1 :]] if room > 1 else ids[len(ids) - room :]


def render_pieces(tokenizer: Encoder, messages: Sequence[Message], limit: int, counts: Counts) -> list[Rendered]:
    """Render pieces of at most `limit` tokens, each with something to learn; `counts` records what was done.

    A conversation that is too long is cut between exchanges into pieces as long as possible, each opened by the system
    message. An exchange that is too long alone loses the system message, then the beginning of its prompt down to half
    of the room, then the end of its reply (and with it <|assistant_end|>, so the model never learns to stop early).
    """
    if limit < 8:
        raise ValueError(f"rows of {limit} tokens are too short for a conversation")
    if has_empty_reply(messages):
        counts.empty += 1
        return []
    original, messages = messages, supported_messages(tokenizer, messages)
    counts.thoughtless += messages is not original
    if template := template_of(tokenizer):
        return template.pieces(messages, limit, counts)
    whole = render(tokenizer, messages)
    if not any(whole.mask):
        counts.unsupervised += 1
        return []
    pieces = [whole]
    if len(whole.ids) <= limit:
        counts.whole += 1
    else:
        counts.split += 1
        pieces = split_long(tokenizer, messages, limit, counts)
    counts.pieces += len(pieces)
    counts.tokens += sum(len(piece.ids) for piece in pieces)
    return pieces


def split_long(tokenizer: Encoder, messages: Sequence[Message], limit: int, counts: Counts) -> list[Rendered]:
    """Split a conversation that is longer than `limit` into pieces."""
    system, groups = exchanges(messages)
    bos = Rendered([tokenizer.specials["<|bos|>"]], [0])
    pieces: list[Rendered] = []
    current: Rendered | None = None
    for group in groups:
        body = render_turns(tokenizer, group)
        if current is not None and len(current.ids) + len(body.ids) <= limit:
            current.ids.extend(body.ids)
            current.mask.extend(body.mask)
            continue
        if current is not None:
            pieces.append(current)
        current = bos + render_turns(tokenizer, [*system, *group])
        if len(current.ids) > limit:
            counts.lost_tokens += len(current.ids) - len(bos.ids) - len(body.ids)  # of the system message
            current = cut(bos, body, limit, tokenizer.specials["<|user_start|>"], counts)
    return [piece for piece in [*pieces, *([current] if current else [])] if any(piece.mask)]


def cut(bos: Rendered, body: Rendered, limit: int, start: int, counts: Counts) -> Rendered:
    """Make one exchange fit: the beginning of its prompt goes, then the end of its reply."""
    room = limit - 1  # <|bos|>
    prompt = body.mask.index(1) if any(body.mask) else len(body.mask)  # tokens before the first supervised one
    reply = len(body.ids) - prompt
    allowed = max(room - reply, room // 2)
    ids, mask = body
    if prompt > allowed:
        ids = shorten(ids[:prompt], allowed, start) + ids[prompt:]
        mask = [0] * allowed + mask[prompt:]
        counts.cut_prompts += 1
    if len(ids) > room:
        counts.cut_replies += 1
    counts.lost_tokens += len(body.ids) - min(len(ids), room)
    return bos + Rendered(ids[:room], mask[:room])


def parse_messages(tokenizer: Encoder, ids: Sequence[int]) -> Conversation:
    """Parse rendered tokens back into messages; an unfinished last turn is taken as far as it goes."""
    names = {number: name for name, number in tokenizer.specials.items()}
    messages: Conversation = []
    role, begin = "", 0
    for at, token in enumerate(ids):
        name = names.get(token, "")
        if name in ("<|system_start|>", "<|user_start|>", "<|assistant_start|>"):
            role, begin = name[2:-8], at + 1
        elif name in ("<|system_end|>", "<|user_end|>", "<|assistant_end|>") and role:
            messages.append({"role": role, "content": parse_content(tokenizer, ids[begin:at])})
            role = ""
    if role:
        messages.append({"role": role, "content": parse_content(tokenizer, ids[begin:])})
    return messages


def parse_content(tokenizer: Encoder, ids: Sequence[int]) -> str | list[Part]:
    """Parse the content of one turn, for instance the tokens a model generated after a prompt."""
    special = tokenizer.specials
    opens = {special["<|tool_start|>"]: "tool", special["<|output_start|>"]: "output"}
    closes = {special["<|tool_end|>"], special["<|output_end|>"]}
    marks = set(special.values())
    parts: list[Part] = []
    kind, text = "text", list[int]()
    for token in [*ids, special["<|assistant_end|>"]]:
        if token not in marks:
            text.append(token)
            continue
        if kind != "text" or text:
            parts.append({"type": kind, "text": tokenizer.decode(text)})
        kind, text = opens.get(token, "text"), []
        if token not in opens and token not in closes:  # the end of the turn, or a token that has no place inside one
            break
    return content_of(content_parts(parts))


def render_choice(
    question: str, choices: Sequence[str], letters: Sequence[str] | None = None, ask: str | None = None
) -> str:
    """Format the user's text of a multiple-choice question; the answer is the bare letter. `ask` is the closing line.

    The letter follows its choice without a space: so it is the very token of the answer, and it is bound to the choice
    the model has just read. Small models need both.
    """
    names = list(letters) if letters is not None else list(LETTERS[: len(choices)])
    if len(names) != len(choices):
        raise ValueError(f"{len(choices)} choices need as many letters, not {len(names)}")
    lines = [f"- {choice}={letter}" for choice, letter in zip(choices, names)]
    close = ask if ask is not None else f"Answer with one letter: {', '.join(names)}."
    return "\n".join([question, *lines, *([close] if close else [])])
