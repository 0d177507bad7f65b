"""The process that reads large requests: `python -m ascendchat.serve.reading_worker FD`, started by reader.py."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace
from typing import Any

from ascendchat.serve.errors import Problem
from ascendchat.serve.messages import Link
from ascendchat.serve.prompts import Model
from ascendchat.serve.reading import Begin, Job, Piece, open_tokenizer, read

NICE = 5  # answers under way come first


def main(fd: int) -> None:
    """Read one request after the other, until the front goes."""
    os.nice(NICE)
    link = Link(socket.socket(fileno=fd))
    link.stay_while_front_does()
    begin: Begin = link.receive()
    model = replace(begin.model, tokenizer=open_tokenizer(begin.tokenizer))
    while True:
        job: Job = link.receive()
        signal.setitimer(signal.ITIMER_PROF, begin.seconds)  # its signal ends the process
        answer = answer_to(job, replace(model, name=job.name, chats=job.chats))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if isinstance(answer, list):
            for content in answer:
                link.send(Piece(content))
            answer = []
        link.send(answer)


def answer_to(job: Job, model: Model) -> Any:
    """What goes back. An error of ours ends the process: it stands in the log, and the client hears of the end."""
    try:
        return read(job.path, job.content, model)
    except Problem as problem:
        return problem
    except RecursionError:
        return Problem(400, "the request is nested too deeply")


if __name__ == "__main__":
    main(int(sys.argv[1]))
