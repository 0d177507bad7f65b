"""Talk to a model in the terminal.

    ascendchat chat --run d12 --stage sft        # line by line; /help lists the commands
    ascendchat chat -p "What is 17 + 25?"        # one answer
    cat questions.txt | ascendchat chat          # every line is a prompt of its own, with --system before it

Answers go to standard output, everything else to standard error. Control characters in an answer are shown and not
obeyed; /save writes them as they are. Ctrl-C stops the answer and not the program; at the prompt it clears the line.
Ctrl-D ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import locale
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ascendchat.config.generate import ChatConfig
from ascendchat.data.chat.render import Conversation, parse_content, render_prompt
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import pick
from ascendchat.engine.open import engine_for, open_for_generation
from ascendchat.engine.request import Generator, Request, Sampling, prompt_room
from ascendchat.errors import home
from ascendchat.files import write_atomic
from ascendchat.parallel.context import Context, joined
from ascendchat.runs.console import inert

HELP = """\
/reset            forget the conversation
/temperature X    0 always takes the likeliest token; higher is livelier
/save FILE        write the conversation as JSON
/help             this list
Ctrl-C stops an answer, Ctrl-D ends."""
BASE_NOTICE = "this is a base model: it has not learned to chat, so it continues your text"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class _Interrupt:
    """While an answer is under way Ctrl-C ends it and raises nothing: no step of the engine is cut in the middle."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end

    def __enter__(self) -> _Interrupt:
        self.wanted = False
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.wanted = True
        self.end()

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)


class Chat:
    """A conversation with one model."""

    def __init__(
        self, generator: Generator, tokenizer: Tokenizer, config: ChatConfig, chats: bool, out: TextIO, colour: bool
    ) -> None:
        self.generator, self.tokenizer, self.config = generator, tokenizer, config
        self.chats, self.out, self.colour = chats, out, colour
        self.temperature, self.turn = config.temperature, 0
        self.seed = secrets.randbits(31) if config.seed is None else config.seed
        self.messages: Conversation = []
        self.reset()

    def reset(self) -> None:
        """Forget the conversation but for the system message."""
        self.messages = [{"role": "system", "content": self.config.system}] if self.config.system else []

    def request(self, text: str) -> Request:
        """The prompt for the user's next turn: the conversation so far, or a plain text for a base model."""
        tokenizer, most, seed = self.tokenizer, self.config.max_tokens, self.seed + self.turn
        sampling = Sampling(most, self.temperature, self.config.top_k, seed=seed, tools=self.chats)
        room = prompt_room(self.generator.context, most)
        if self.chats:
            return Request(render_prompt(tokenizer, self.messages, room), sampling)
        opening = tokenizer.opening
        return Request([*opening, *tokenizer.encode(text)[len(opening) - room :]], sampling)

    def answer(self, text: str) -> bool:
        """Print the answer as it comes and remember it; False when Ctrl-C stopped it."""
        self.messages.append({"role": "user", "content": text})
        stream = self.generator.stream(self.request(text))
        self.turn += 1
        kind, shown = "text", ""
        with contextlib.closing(stream), _Interrupt(stream.close) as interrupt:
            for piece in stream:
                self._mark(kind, piece.kind)
                kind = piece.kind
                if piece.kind == "text" or self.colour:
                    shown = self._write(inert(piece.text))
        self._mark(kind, "text")
        self._write("" if shown.endswith("\n") else "\n")
        said = stream.completion
        content = parse_content(self.tokenizer, said.ids) if self.chats else said.text
        self.messages.append({"role": "assistant", "content": content})
        return not interrupt.wanted

    def _mark(self, before: str, now: str) -> None:
        """On a terminal a tool call and its result are shown dim, in brackets: [17+25 = 42]."""
        if self.colour and before != now:
            between = {("text", "tool"): f"{DIM}[", ("tool", "output"): " = "}
            self._write(between.get((before, now), f"]{PLAIN} " if now == "text" else ""))

    def _write(self, text: str) -> str:
        self.out.write(text)
        self.out.flush()
        return text

    def command(self, line: str) -> None:
        """Run a command: a line that begins with a slash."""
        name, _, value = line.partition(" ")
        value = value.strip()
        if name == "/reset":
            self.reset()
            say("the conversation is forgotten")
        elif name == "/temperature":
            self.set_temperature(value)
        elif name == "/save":
            self.save(value)
        elif name == "/help":
            say(HELP)
        else:
            say(f"there is no command {name}\n{HELP}")

    def set_temperature(self, value: str) -> None:
        """Set the temperature, between 0 and 10."""
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 10:
            return say(f"the temperature is {self.temperature}; set it like this: /temperature 0.8")
        self.temperature = number
        return say(f"temperature {number}")

    def save(self, value: str) -> None:
        """Save the conversation as JSON, in the format that `ascendchat sft` reads."""
        if not value:
            return say("name a file: /save talk.json")
        try:
            write_atomic(Path(value).expanduser(), json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        except OSError as error:
            return say(f"cannot write {value}: {error.strerror}")
        except (ValueError, RuntimeError):  # "." or a NUL, the home of nobody
            return say(f"cannot write {value}: it names no file")
        return say(f"saved {len(self.messages)} messages to {value}")


def say(text: str) -> None:
    """Print what are not the model's words, to standard error."""
    print(text, file=sys.stderr, flush=True)


def typed_lines() -> Iterator[str]:
    """Yield lines from the keyboard until Ctrl-D; Ctrl-C at the prompt clears the line."""
    if "UTF-8" not in locale.setlocale(locale.LC_CTYPE).upper():  # line editing takes bytes of 你 for key commands then
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
            os.environ["LC_ALL"] = "C.UTF-8"
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (editing and history of input())
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)")


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input."""
    for line in sys.stdin:
        yield line.rstrip("\r\n")


def run(config: ChatConfig) -> int:
    """Run `ascendchat chat`."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # Chinese whatever the locale says
            stream.reconfigure(encoding="utf-8", errors="replace")
    with joined(pick(config.device_type), sys.stderr, quiet=not config.verbose) as here:
        return talk(config, here)


def talk(config: ChatConfig, here: Context) -> int:
    """Print one answer, or talk until the end."""
    opened = open_for_generation(here, config, config.stage)
    folder = opened.source.folder
    if config.verbose:
        here.say(f"{opened.why_kernel}\n{folder}")
    if not opened.chats:
        here.say(BASE_NOTICE)
    tokenizer = opened.tokenizer.thinking(config.enable_thinking)
    typed = not config.prompt and sys.stdin.isatty()
    chat = Chat(engine_for(opened, 1), tokenizer, config, opened.chats, sys.stdout, colour=sys.stdout.isatty())
    if config.prompt:
        return 0 if chat.answer(config.prompt) else 130
    if typed:
        runs = home() / "runs"
        name = folder.relative_to(runs) if folder.is_relative_to(runs) else folder
        here.say(f"{name} on {here.device.chip.name}; /help lists the commands, Ctrl-D ends")
    for line in typed_lines() if typed else piped_lines():
        if line.startswith("/"):
            chat.command(line)
        elif line.strip():
            if not typed:
                chat.reset()
            if not chat.answer(line) and not typed:
                return 130
    return 0
