"""One engine in a process of its own, on one device: what pool.py starts for each device of `ascendchat serve`.

Its loop: take what the front has sent, step the engine, send what came out. With many answers under way their tokens
are sent together, some dozen times a second, so that neither the pipe nor the front is the limit. When the front is
gone the pipe ends, and so does the worker.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ascendchat.checkpoint import Damaged, read_weights, verify
from ascendchat.config import UserError
from ascendchat.config.serve import ServeConfig
from ascendchat.device import describe, pick
from ascendchat.dist.context import Context
from ascendchat.infer.engine import Engine, Job
from ascendchat.infer.generator import Weights
from ascendchat.infer.load import open_model, tokenizer_folder
from ascendchat.launch.world import World
from ascendchat.serve.messages import Ask, Cancel, Done, Load, Part, Pause, Ready, Refused, Resume

FEW = 8  # answers up to which every token is sent at once
TOGETHER = 0.02  # seconds between two sendings when there are more


def main(connection: Connection, config: ServeConfig, index: int) -> None:
    """Process `index`: open the model on its device, then answer until the front goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the front says when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        engine, ready = open_engine(config, index)
    except UserError as error:
        connection.send(error)
        return
    connection.send(ready)
    try:
        Worker(connection, engine).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the front is gone: nobody waits for an orderly end


def open_engine(config: ServeConfig, index: int) -> tuple[Engine, Ready]:
    """The model on device `index` with an engine around it, and what the front must know of them."""
    device = pick(config.device_type, compiled=config.compile)
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // config.devices))
    elif config.devices > device.count():
        raise UserError(f"--devices {config.devices}: this machine has {device.count()}")
    here = Context(device, World(), device.bind(index), lambda text: print(text, file=sys.stderr, flush=True))
    opened = open_model(here, config, config.stage)
    slots = config.slots or (16 if device.type == "cpu" else 64)
    engine = opened.engine(slots, config.context, compiled=device.compiles)
    saved = opened.checkpoint
    model = {
        "run": saved.folder.parent.parent.name,
        "stage": str(saved.state.get("stage", "")),
        "step": saved.step,
        "chats": opened.chats,
        "checkpoint": str(saved.folder),
        "tokenizer": str(tokenizer_folder(config.tokenizer, saved)),
    }
    return engine, Ready(describe(device), slots, engine.context, engine.vocab, model, checksum(engine))


def checksum(engine: Engine) -> str:
    """Of the weights as they lie in memory, by name: equal weights have equal checksums."""
    total = hashlib.sha256()
    for name, tensor in sorted(engine.decoder.model.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return total.hexdigest()[:16]


@dataclass
class Answer:
    """One request under way, and how much of it the front has."""

    job: Job
    streams: bool
    sent: int = 0


class Worker:
    """The loop around one engine."""

    def __init__(self, connection: Connection, engine: Engine) -> None:
        self.connection, self.engine = connection, engine
        self.answers: dict[int, Answer] = {}
        self.paused = False
        self.sent_at = 0.0

    def run(self) -> None:
        """Until the front closes the pipe, which is an EOFError here."""
        while True:
            while not self.stepping or self.connection.poll():
                self.take(self.connection.recv())
            self.engine.step()
            self.send()

    @property
    def stepping(self) -> bool:
        return bool(self.answers) and not self.paused

    # ---- what the front wants ------------------------------------------------------------------

    def take(self, message: Any) -> None:
        if isinstance(message, Ask):
            self.ask(message)
        elif isinstance(message, Cancel):
            if answer := self.answers.get(message.key):
                self.engine.cancel(answer.job)
                self.send(now=True)
        else:
            self.connection.send(self.change(message))

    def ask(self, message: Ask) -> None:
        try:
            job = self.engine.add(message.request)
        except ValueError as error:
            self.connection.send([Refused(message.key, str(error))])
            return
        self.answers[message.key] = Answer(job, message.streams)

    def change(self, message: Pause | Resume | Load) -> Done:
        """Stop, go on, or take other weights."""
        what = type(message).__name__.lower()
        try:
            if isinstance(message, Pause):
                self.engine.pause(message.mode)
                self.paused = True
                self.send(now=True)
            elif isinstance(message, Resume):
                self.engine.resume()
                self.paused = False
            else:
                self.engine.load(weights_of(message.source), message.version)
                self.send(now=True)
                return Done(what, self.engine.version, checksum(self.engine))
        except (ValueError, OSError, Damaged, UserError) as error:
            return Done(what, self.engine.version, problem=str(error))
        return Done(what, self.engine.version)

    # ---- what came out -------------------------------------------------------------------------

    def send(self, now: bool = False) -> None:
        """What is new of every answer; with many of them not after every step."""
        over = [key for key, answer in self.answers.items() if answer.job.done]
        clock = time.monotonic()
        if not now and not over and len(self.answers) > FEW and clock - self.sent_at < TOGETHER:
            return
        self.sent_at = clock
        parts = [part for key, answer in self.answers.items() if (part := news(key, answer))]
        for key in over:
            del self.answers[key]
        if parts:
            self.connection.send(parts)


def news(key: int, answer: Answer) -> Part | None:
    """What the front does not have yet."""
    job, whole = answer.job, answer.job.completion
    if not job.done and (not answer.streams or len(whole.ids) == answer.sent):
        return None
    begin, answer.sent = answer.sent, len(whole.ids)
    pieces = job.take()
    return Part(
        key,
        pieces,
        whole.ids[begin:],
        whole.logprobs[begin:],
        whole.tops[begin:],
        whole.versions[begin:],
        whole.finish_reason if job.done else "",
        whole.cached_tokens,
    )


def weights_of(source: str | bytes) -> Weights:
    """The weights in a checkpoint folder, or in the bytes of a safetensors file."""
    if isinstance(source, bytes):
        return read_weights(source)
    return verify(Path(source), optimizer=False).model()
