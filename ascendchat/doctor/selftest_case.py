"""Parts that all items of the self-test share: settings, results, and running a process to its end."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ascendchat.device.env import without_own_settings
from ascendchat.processes import ChildProcess, how_ended

POLL_SECONDS = 0.05  # between two polls of a process
GRACE = 20.0  # seconds that a process has to end in order
MAX_MESSAGE_CHARS = 300  # of an item's `said`


@dataclass
class ItemResult:
    """Result of one item; `facts` are numbers worth sending."""

    name: str
    verdict: Literal["held", "failed", "skipped"]
    said: str = ""
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class SelftestSettings:
    """Settings of all items; `about` is what the first process found out about the device."""

    folder: Path  # logs, and what the runs write
    devices: int | None
    device_type: str | None
    quick: bool
    deadline: float  # seconds that an item may take
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """Environment for a process that prepares its own, and writes nothing outside `folder`."""
        return {**without_own_settings(), "ASCENDCHAT_HOME": str(self.folder / "home")}


def more_than_visible(devices: int, about: dict[str, Any]) -> bool:
    """True if there are fewer devices than that. Processes can share a CPU."""
    return about["device"] != "cpu" and devices > about["visible"]


def run_to_end(
    words: Sequence[str],
    log: Path,
    settings: SelftestSettings,
    progress: Callable[[], int] = int,
    environment: dict[str, str] | None = None,
) -> str:
    """Run a process to its end, or for as long as `progress` changes within the deadline; returns how it ended, "" when
    well. The sentence is the last one that it or a rank of it printed."""
    child = ChildProcess.start(words, log=log, tied=True, env=environment or settings.environment)
    last, since, overdue = progress(), time.monotonic(), False
    try:
        while child.poll() is None:
            time.sleep(POLL_SECONDS)
            if (now := progress()) != last:
                last, since = now, time.monotonic()
            if time.monotonic() > since + settings.deadline:
                overdue = True
                break
    finally:  # also when this process is told to stop
        status = child.end(GRACE)  # a launcher ends its ranks
    if overdue:
        return f"no answer within {settings.deadline:g} s"
    if status == 0:
        return ""
    return anonymised(f"its process ended ({how_ended(status)}): {last_message(log)}")


def last_message(log: Path) -> str:
    """The launcher's sentence about its rank, else the last error, else the last line of the log."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    ranks = [line for line in lines if re.search(r"ascendchat launch: rank \d+ ", line)]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b", line)]
    return (ranks or errors or lines or ["it printed nothing"])[-1]


def anonymised(text: str) -> str:
    """The text on one line, without paths, addresses, host and user names."""
    text = re.sub(r"(?<![\w.])(/[\w.@+~-]+){2,}/?", "<path>", " ".join(text.split()))
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b", "<address>", text)
    hosts = {socket.gethostname(), platform.node(), os.environ.get("HOSTNAME", "")}
    names = hosts | {host.partition(".")[0] for host in hosts}
    with contextlib.suppress(KeyError, OSError):
        names.add(getpass.getuser())
    for name in sorted((name for name in names if len(name) > 1), key=len, reverse=True):
        text = re.sub(rf"\b{re.escape(name)}\b", "<name>", text)
    return text[:MAX_MESSAGE_CHARS]
