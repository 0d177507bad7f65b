"""One engine in a process of its own, on one device: `python -m ascendchat.serve.worker FD`, started by pool.py.

Its loop: take what the front has sent, step the engine, send what came out. With many answers under way their tokens
are sent together, some dozen times a second, so that neither the socket nor the front is the limit. When the front is
gone its end of the socket closes, and the worker ends at once, whatever it is doing.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascendchat.checkpoint import Checkpoint, Damaged, read_file, verify
from ascendchat.config.serve import ServeConfig
from ascendchat.config.train import STAGES
from ascendchat.device import describe, pick
from ascendchat.engine.cache import kv_cache_dtype
from ascendchat.engine.engine import Engine, RequestState
from ascendchat.engine.grammar import STACK, Matcher, grammars
from ascendchat.engine.open import engine_for, open_for_generation
from ascendchat.engine.request import Weights
from ascendchat.errors import UserError
from ascendchat.models.open import ModelSource
from ascendchat.nn.logprobs import Float32LMHead
from ascendchat.parallel.context import Context
from ascendchat.parallel.world import World
from ascendchat.remote.weights import checksum
from ascendchat.serve.worker_messages import (
    Begun,
    Cancel,
    Change,
    CheckWeights,
    Chunk,
    Done,
    FrontSocket,
    Generate,
    LoadWeights,
    Open,
    Pause,
    Ready,
    Refused,
    Resume,
)

FEW = 8  # answers up to which every token is sent at once
TOGETHER = 0.02  # seconds between two sendings when there are more, up to MANY; beyond, longer in proportion:
MANY = 64  # the front can write so many pieces 50 times a second and more
SIGN_OF_LIFE = 1.0  # seconds of work after which the front hears something, even if there is nothing to say


def main(fd: int) -> None:
    """Wait until the front names a device, open the model there, and answer until the front goes."""
    threading.stack_size(2 * STACK)  # of threads that compile grammars
    link = FrontSocket(socket.socket(fileno=fd))
    link.stay_while_front_does()
    opening: Open = link.receive()
    try:
        engine, ready = open_engine(opening.config, opening.place)
    except UserError as error:
        link.send(error)
        os._exit(2)
    link.send(ready)
    Worker(link, engine).run()


def open_engine(config: ServeConfig, index: int) -> tuple[Engine, Ready]:
    """Open the model on device `index` with an engine around it, and tell what the front must know of them."""
    device = pick(config.device_type, compiled=config.compile)
    if config.compile and not device.compiles:
        raise UserError(f"--compile: nothing is compiled on {device.chip.name}; leave it out")
    if device.type == "cpu":
        torch.set_num_threads(threads(torch.get_num_threads(), config.devices, "OMP_NUM_THREADS" in os.environ))
    elif config.devices > device.count():
        raise UserError(f"--devices {config.devices}: this machine has {device.count()}")
    here = Context(device, World(), device.bind(index), lambda text: print(text, file=sys.stderr, flush=True))
    opened = open_for_generation(here, config, config.stage, config.context)
    slots = config.slots or (16 if device.type == "cpu" else 64)
    trained = getattr(opened.model.shape, "longest", opened.model.shape.seq_len)
    if index == 0 and (config.context or 0) > trained:
        here.say(f"--context {config.context}: the model was trained on {trained} tokens; beyond, answers get worse")
    cache_dtype = kv_cache_dtype(config.kv_cache_dtype, device)
    # a trainer compares log-probabilities: it computes the head in float32 too
    readout = Float32LMHead(device.dtype, here.place) if config.weight_updates else None
    engine = engine_for(
        opened, slots, config.context, compiled=config.compile, cache_dtype=cache_dtype, readout=readout
    )
    if config.compile:
        engine.prepare(here.say)
    source = opened.source
    model = {
        "run": source.results_folder.parent.name,
        **facts_of(source),
        "chats": opened.chats,
        "checkpoint": str(source.folder),
        "tokenizer": str(Path(config.tokenizer or source.tokenizer_folder)),
    }
    weights = opened.model.state_dict()
    parameters = sum(tensor.numel() for tensor in weights.values())
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in weights.items()}
    known = (checksum(weights), parameters, dtypes)
    return engine, Ready(describe(device), slots, engine.context, engine.vocab, model, *known)


def facts_of(saved: Checkpoint | ModelSource) -> dict[str, Any]:
    """Facts of a checkpoint for clients."""
    stage = str(saved.state.get("stage", ""))
    return {"stage": stage, "step": saved.step, "chats": stage in STAGES and STAGES[stage].chats}


def threads(cores: int, workers: int, named: bool) -> int:
    """Threads of each worker on a CPU. One core is left to the front: a thread that has no core at the moment keeps the
    whole step waiting. A number that the user has named is shared out as it is."""
    return max(1, (cores if named else cores - 1) // workers)


def same_model(saved: dict[str, Any] | None, own: dict[str, Any]) -> bool:
    """True if weights of the one shape are weights of the other. Windows of our own models follow from the length of
    their rows; those of Hugging Face's do not."""
    length = {"seq_len": 0} if "hf" in own else {}
    return {**(saved or {}), **length} == {**own, **length}


@dataclass
class _Running:
    """A request in the engine, and how much of its answer the front has."""

    state: RequestState
    streams: bool
    sent: int = 0  # ids
    begun: bool = False


@dataclass
class _Waiting:
    """A request that has no slot yet."""

    wanted: Generate
    matcher: Matcher | str | None = None  # what came of its grammar, or why nothing


class Worker:
    """The loop around one engine."""

    def __init__(self, link: FrontSocket, engine: Engine) -> None:
        self.link, self.engine = link, engine
        self.slots = len(engine.running)
        self.waiting: deque[_Waiting] = deque()
        self.compiling: dict[int, _Waiting] = {}  # whose grammars are being compiled, each in a thread
        self.compiled, self._tell = os.pipe()  # has a byte for each that is done
        self.ends = [link.fileno, self.compiled]
        self.running: dict[int, _Running] = {}
        self.held = False  # nothing new enters
        self.frozen = False  # and what is under way stands still
        self.pausing: int | None = None  # number of the Pause that waits for the answers under way
        self.checked: tuple[str, Weights, dict[str, Any]] | None = None  # weights that were read and fit, and whose
        self.sent_at = 0.0

    def run(self) -> None:
        """Work until the front closes the socket."""
        while True:
            self.listen()
            self.admit()
            if self.engine.prefill():
                self.send()  # a first token need not wait for the second
            self.engine.decode()
            self.send()
            if self.pausing is not None and not self.running:
                self.paused()

    @property
    def stepping(self) -> bool:
        return bool(self.running or (self.waiting and not self.held)) and not self.frozen

    def listen(self) -> None:
        """Take all that has come; wait where there is nothing to do."""
        while ready := select.select(self.ends, [], [], 0 if self.stepping else None)[0]:
            if self.compiled in ready:
                os.read(self.compiled, 4096)
                for key in [key for key, one in self.compiling.items() if one.matcher is not None]:
                    self.waiting.append(self.compiling.pop(key))
            if self.link.fileno in ready:
                self.take(self.link.receive())

    def compile(self, waiting: _Waiting) -> None:
        """Compile a grammar, in a thread: a large one takes as long as hundreds of steps; the compiler releases the
        GIL."""
        request = waiting.wanted.request
        grammar = request.sampling.grammar
        assert grammar is not None
        try:
            compiler = grammars(self.engine.tokenizer)
            waiting.matcher = compiler.matcher(grammar, request.salt, tried=True)  # by the front
        except ValueError as error:
            waiting.matcher = str(error)
        os.write(self._tell, b".")

    def admit(self) -> None:
        """Add requests to the engine while it has slots for them, so that whatever is in it is under way."""
        while self.waiting and not self.held and len(self.running) < self.slots:
            first = self.waiting.popleft()
            wanted, matcher = first.wanted, first.matcher
            try:
                if isinstance(matcher, str):
                    raise ValueError(matcher)
                state = self.engine.add(wanted.request, matcher)
                self.running[wanted.key] = _Running(state, wanted.streams)
            except ValueError as error:
                self.link.send([Refused(wanted.key, str(error))])

    # ---- what the front wants ------------------------------------------------------------------

    def take(self, message: Any) -> None:
        if isinstance(message, Generate) and message.request.sampling.grammar is not None:
            self.compiling[message.key] = waiting = _Waiting(message)
            threading.Thread(target=self.compile, args=(waiting,), daemon=True).start()
        elif isinstance(message, Generate):
            self.waiting.append(_Waiting(message))
        elif isinstance(message, Cancel):
            self.cancel(message.key)
        elif isinstance(message, Change):
            self.change(message.number, message.what)

    def cancel(self, key: int) -> None:
        if answer := self.running.get(key):
            self.engine.cancel(answer.state)
            self.send(now=True)
        elif key in self.compiling or any(one.wanted.key == key for one in self.waiting):
            self.waiting = deque(one for one in self.waiting if one.wanted.key != key)
            self.compiling.pop(key, None)
            self.link.send([Chunk(key, [], [], [], [], [], "cancelled")])
        if self.pausing is not None and not self.running:
            self.paused()

    def change(self, number: int, what: Pause | Resume | CheckWeights | LoadWeights) -> None:
        """Stop, go on, or take other weights."""
        fresh, model = "", None
        try:
            if isinstance(what, Pause):
                if not self.pause(number, what.mode):
                    return
            elif isinstance(what, Resume):
                self.go_on()
            elif isinstance(what, CheckWeights):
                self.checked = (what.source, *self.read(what.source)) if what.source else None
                if self.checked and what.version == self.engine.version and not self.has(self.checked[1]):
                    raise ValueError(f"version {what.version} is in use with other weights; give these another number")
            else:
                checked = self.checked if self.checked and self.checked[0] == what.source else None
                weights, model = checked[1:] if checked else self.read(what.source)
                self.checked = None
                self.engine.load(weights, what.version, checked=True)
                fresh = checksum(self.engine.decoder.model.state_dict())
                self.send(now=True)
        except (ValueError, OSError, Damaged, UserError) as error:
            self.link.send(Done(number, self.engine.version, problem=str(error)))
        else:
            self.link.send(Done(number, self.engine.version, fresh, model=model))

    def pause(self, number: int, mode: str) -> bool:
        """Pause; False: it waits for answers."""
        self.go_on()  # a pause may follow another
        self.held = True
        if mode == "keep":
            self.engine.pause("keep")
            self.frozen = True
        elif mode == "abort":
            for answer in self.running.values():
                self.engine.cancel(answer.state)
        self.send(now=True)
        if mode == "wait" and self.running:
            self.pausing = number
            return False
        return True

    def paused(self) -> None:
        """Report that the Pause which waited is done."""
        if self.pausing is not None:
            self.link.send(Done(self.pausing, self.engine.version))
            self.pausing = None

    def go_on(self) -> None:
        self.paused()
        if self.frozen:
            self.engine.resume()
        self.held = self.frozen = False

    def has(self, weights: Weights) -> bool:
        """True if the model has exactly these weights."""
        own = self.engine.decoder.model.state_dict()
        return all(torch.equal(tensor.cpu(), weights[name].to(tensor.dtype)) for name, tensor in own.items())

    def read(self, source: str) -> tuple[Weights, dict[str, Any]]:
        """Open the weights in a checkpoint folder or a safetensors file, which must fit the model, and their facts.
        They stay on disk, mapped into memory: several workers read one copy."""
        path, model = Path(source), self.engine.decoder.model
        facts: dict[str, Any] = {"stage": None, "step": None}
        if path.is_dir():
            saved = verify(path, optimizer=False)
            if not same_model(saved.state.get("shape"), model.shape.to_dict()):
                raise ValueError(f"{path.name} is a checkpoint of a model of another shape")
            weights, facts = saved.model(), facts_of(saved)
        else:
            weights = read_file(path)
        self.engine.fits(weights)
        return weights, facts

    # ---- what came out -------------------------------------------------------------------------

    def send(self, now: bool = False) -> None:
        """Send what is new of every answer; with many of them not after every step."""
        over = [key for key, answer in self.running.items() if answer.state.done]
        clock = time.monotonic()
        pause = TOGETHER * max(1.0, len(self.running) / MANY) if len(self.running) > FEW else 0.0
        if not now and not over and clock - self.sent_at < pause:
            return
        chunks = [chunk for key, answer in self.running.items() if (chunk := news(key, answer))]
        for key in over:
            del self.running[key]
        if chunks or clock - self.sent_at > SIGN_OF_LIFE:
            self.link.send(chunks)
            self.sent_at = clock


def news(key: int, answer: _Running) -> Begun | Chunk | None:
    """The part of an answer that the front does not have yet."""
    state, whole = answer.state, answer.state.completion
    if not state.done and not answer.streams:
        first, answer.begun = bool(whole.ids) and not answer.begun, bool(whole.ids)
        return Begun(key) if first else None
    if not state.done and len(whole.ids) == answer.sent:
        return None
    begin, answer.sent = answer.sent, len(whole.ids)
    return Chunk(
        key,
        state.take(),
        whole.ids[begin:],
        whole.logprobs[begin:],
        whole.tops[begin:],
        whole.versions[begin:],
        whole.finish_reason if state.done else "",
        whole.cached_tokens,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
