"""Conversations of several turns, as a workflow sees them: `ascendchat rl --workflow module:name`.

    class Twice:                                               # or a plain `async def`
        async def arun(self, generator, row):
            talk = generator.talk(row["messages"])             # row: what a reward function gets
            answer = await talk.reply()                        # the model writes
            talk.say("Are you sure?")                          # the user says: read by the model, not learnt
            answer = await talk.reply(temperature=0.7)
            return talk.trajectory(await generator.reward(answer.text))       # None: this episode is left out

It runs in a process of its own (sandbox/pool.py): it may raise, hang or die. Many episodes run beside one another
there, so it must `await` what takes time. `generator.agenerate(messages or ids)` is what `reply` is made of. A workflow
may also return a dict in AReaL's form: input_ids, loss_mask, logprobs, rewards, versions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ascendchat.data.chat.render import Message, render, render_prompt
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.calculator import calculate
from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.request import Completion
from ascendchat.sandbox.process import Link, find_object

MAX_CALLS = 8  # of the calculator in an answer
SECOND_TRY = 0.5  # share of its reward that the second answer gets
TRY_AGAIN = {"en": "That is not right. Try again.", "zh": "不对，请再试一次。"}


@dataclass
class Trajectory:
    """All tokens of an episode, the prompt too, and for each whether the model did not write it (`forced`)."""

    ids: list[int]
    forced: list[bool]
    logprobs: list[float | None]  # None where forced
    versions: list[int]  # of the weights; where forced: of the token behind it
    reward: float | None  # None: leave this episode out
    text: str = ""
    finish: str = "stop"


class _AsyncGenerator:
    """The generator of one episode. Requests of all episodes are answered in one batch."""

    def __init__(self, link: Link, tokenizer: Tokenizer, context: int, room: int) -> None:
        self.tokenizer, self.context, self.room = tokenizer, context, room
        self._link, self._turns = link, 0

    async def agenerate(self, prompt: Sequence[Message] | Sequence[int], **sampling: Any) -> Completion:
        """The answer to messages or token ids. `sampling`: fields of infer.request.Sampling that differ from the run's;
        log-probabilities are there, and the stop token is the last of the ids. The seed follows from the run's."""
        ids: list[Any] = list(prompt)
        if ids and isinstance(ids[0], Mapping):
            ids = render_prompt(self.tokenizer, ids, self.room)
        self._turns += 1
        answer: Completion = await self._link.ask("generate", self._turns - 1, ids, sampling)
        return answer

    async def reward(self, reply: str | Completion, ids: Sequence[int] = ()) -> float | None:
        """The reward of a reply, by --reward or the task; None if it could not be judged."""
        if isinstance(reply, Completion):
            question = reply.text, reply.ids, reply.finish_reason
        else:
            question = reply, list(ids), "stop"
        reward: float | None = await self._link.ask("reward", *question)
        return reward

    def talk(self, messages: Sequence[Message]) -> _Talk:
        """A conversation that becomes a trajectory."""
        return _Talk(self, render_prompt(self.tokenizer, messages, self.room))


@dataclass
class _Talk:
    """A conversation under way, as tokens: text of the model is never tokenized again."""

    generator: _AsyncGenerator
    prompt: list[int]
    after: Completion = field(default_factory=Completion)  # everything behind the prompt
    lines: list[str] = field(default_factory=list)  # for people to read
    turn: int = 0  # where in `after` the assistant's last turn begins

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.after.ids]

    @property
    def left(self) -> int:
        """Tokens of the context that are left."""
        return self.generator.context - len(self.prompt) - len(self.after.ids)

    @property
    def text(self) -> str:
        """The text of the assistant's last turn, without special tokens."""
        stream = TextStream(self.generator.tokenizer)
        stream.feed_all(self.after.ids[self.turn :])
        stream.close()
        return stream.text

    async def reply(self, **sampling: Any) -> Completion:
        """Generate the next turn of the model."""
        answer = await self.generator.agenerate(self.ids, **sampling)
        whole = self.after
        whole.versions += [answer.version] * (len(whole.ids) - len(whole.versions))  # of what was forced before
        whole.ids += answer.ids
        whole.forced += answer.forced
        whole.logprobs += answer.logprobs
        whole.versions += answer.versions
        whole.finish_reason = answer.finish_reason
        self.lines.append(answer.text)
        return answer

    def say(self, text: str, role: str = "user") -> None:
        """Add a turn of somebody else; the next `reply` answers it."""
        self.force(self.turn_of(text, role))
        self.turn = len(self.after.ids)
        self.lines.append(f"[{role}] {text}")

    def turn_of(self, text: str, role: str = "user") -> list[int]:
        """The tokens that `say` would put there: what a conversation has behind the end of the assistant's turn, and
        that end too if the model was cut short."""
        tokenizer, end = self.generator.tokenizer, self._special("assistant_end")
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        until = render(tokenizer, before).ids
        ended = len(until) - until[::-1].index(end)
        turn = render_prompt(tokenizer, [*before, {"role": role, "content": text}])[ended:]
        return turn if self.ids[-1] == end else [end, *turn]

    def result(self, text: str) -> None:
        """Add the result of the tool that the model has just called."""
        encoded = self.generator.tokenizer.encode(text)
        self.force([self._special("output_start"), *encoded, self._special("output_end")])
        self.lines.append(f"[result] {text}")

    def force(self, ids: Sequence[int]) -> None:
        """Add tokens that the model reads and does not learn."""
        self.after.ids += ids
        self.after.forced += [True] * len(ids)
        self.after.logprobs += [None] * len(ids)

    def trajectory(self, reward: float | None) -> Trajectory:
        """The finished trajectory. Forced tokens behind the model's last one teach nothing, and are left out."""
        whole, prompt_size = self.after, len(self.prompt)
        size = max((i + 1 for i, forced in enumerate(whole.forced) if not forced), default=0)
        first = whole.versions[0] if whole.versions else 0
        return Trajectory(
            [*self.prompt, *whole.ids[:size]],
            [*[True] * prompt_size, *whole.forced[:size]],
            [*[None] * prompt_size, *whole.logprobs[:size]],
            [*[first] * prompt_size, *whole.versions[:size]],
            reward,
            "\n".join(self.lines),
            whole.finish_reason,
        )

    def _special(self, name: str) -> int:
        return self.generator.tokenizer.specials[f"<|{name}|>"]


class _Calculator:
    """The calculator as a tool of a workflow: the model calls it, the result comes as a turn, the model goes on. The
    engine can do the same within an answer; here it can be any tool."""

    async def arun(self, generator: _AsyncGenerator, row: Mapping[str, Any]) -> Trajectory:
        special = generator.tokenizer.specials
        opens, closes = special["<|tool_start|>"], special["<|tool_end|>"]
        stops = closes, special["<|assistant_end|>"], special["<|bos|>"]
        talk = generator.talk(row["messages"])
        for _ in range(MAX_CALLS):
            answer = await talk.reply(tools=False, stop_tokens=stops)
            if answer.ids[-1:] != [closes] or talk.left < 2:
                break
            call = answer.ids[len(answer.ids) - answer.ids[::-1].index(opens) : -1] if opens in answer.ids else []
            if call:
                result = calculate(generator.tokenizer.decode(call))
                if talk.left < len(generator.tokenizer.encode(result)) + 3:
                    break
                talk.result(result)
        return talk.trajectory(await generator.reward(talk.text, talk.after.ids))


class _TryAgain:
    """Tells the model once that its answer is wrong; a second one that is right gets half of the reward."""

    async def arun(self, generator: _AsyncGenerator, row: Mapping[str, Any]) -> Trajectory:
        talk = generator.talk(row["messages"])
        reward = await generator.reward(await talk.reply())
        words = TRY_AGAIN["zh" if re.search(r"[\u4e00-\u9fff]", str(row["messages"][-1]["content"])) else "en"]
        if reward is not None and reward <= 0 and talk.left > 2 * len(talk.turn_of(words)):
            talk.say(words)
            second = await generator.reward(await talk.reply())
            reward = None if second is None else SECOND_TRY * second
        return talk.trajectory(reward)


BUILT_IN = {"calculator": _Calculator, "try-again": _TryAgain}


@cache
def workflow_of(name: str) -> Callable[..., Any]:
    """The coroutine function of a built-in workflow or of module:name, which is one, or a class or object with arun."""
    workflow: Any = BUILT_IN[name] if name in BUILT_IN else find_object(name)
    workflow = workflow() if inspect.isclass(workflow) else workflow
    run: Callable[..., Any] = getattr(workflow, "arun", workflow)
    if not inspect.iscoroutinefunction(run):
        raise TypeError(f"{name} is not a workflow: it has no `async def arun(generator, row)`, nor is it one")
    return run


async def run_episode(
    tokenizer: Tokenizer, context: int, room: int, link: Link, name: str, row: Mapping[str, Any] | None = None
) -> Trajectory | None:
    """Run one episode, in a process of the pool; without a row only import the workflow."""
    workflow = workflow_of(name)
    if row is None:
        return None
    link.begin()
    return as_trajectory(await workflow(_AsyncGenerator(link, tokenizer, context, room), row))


def as_trajectory(value: Any) -> Trajectory | None:
    """Turn the result of a workflow into a trajectory; AReaL's dicts may hold lists or tensors (T) or (1, T)."""
    if value is None or isinstance(value, Trajectory):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"a workflow returns a trajectory or None, not {type(value).__name__}")

    def column(name: str) -> list[Any]:
        values = value[name]
        values = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(values, (list, tuple)):
            return [values]
        return list(values[0]) if len(values) and isinstance(values[0], (list, tuple)) else list(values)

    ids, mask, logprobs = column("input_ids"), column("loss_mask"), column("logprobs")
    versions = column("versions") if "versions" in value else [0] * len(ids)
    reward = column("rewards" if "rewards" in value else "reward")[-1]
    forced = [not written for written in mask]
    chosen = [None if given else float(number) for given, number in zip(forced, logprobs)]
    return Trajectory([int(token) for token in ids], forced, chosen, [max(0, int(v)) for v in versions], reward)
