"""The stage cache: runs/NAME/speedrun.json records the finished stages of a run, each under a hash of its inputs.

    cache = StageCache.open("tiny", fresh=False)
    identity = cache.identity(before, words, inputs)     # command, contents of the files it reads, stages before it
    cache.begin(identity, words, old, kept); ...; cache.done(identity, words, seconds)

A stage is identified by the contents of its inputs, not by their times: a file that was copied or touched is the same
file. Checksums are cached with size and time of the file in runs/NAME/inputs.json, so that a large one is read once. No
torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendchat.data.read import files_in
from ascendchat.errors import UserError
from ascendchat.files import check_folder, sha256, write_atomic
from ascendchat.runs.run import read_facts, run_folder
from ascendchat.version import __version__

LOCK_PATIENCE = 10.0  # seconds; a killed process releases its lock within these


@contextlib.contextmanager
def lock_run(run: str) -> Iterator[None]:
    """Lock a run: only one `ascendchat speedrun` works on it at a time, for two would train into the same folders.
    The running stage inherits the lock, so that it holds on when this process is killed and the stage is not."""
    folder = run_folder(run, "speedrun.lock").parent
    check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "speedrun.lock", "a", encoding="ascii") as file:
        os.set_inheritable(file.fileno(), True)
        until = time.monotonic() + LOCK_PATIENCE
        while not _taken(file.fileno()):
            if time.monotonic() > until:
                raise UserError(
                    f"another `ascendchat speedrun`, or a stage that it started, works on the run {run}; wait for it "
                    "to end, or give this one a name of its own: --run NAME"
                )
            time.sleep(0.1)
        yield


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


@dataclass
class StageCache:
    """The stages that have begun or are done, and the checksums of their inputs."""

    path: Path
    entries: dict[str, Any]  # identity -> {"command", "old" while it has not ended, "seconds" when it is done}
    sums: dict[str, Any] = field(default_factory=dict)  # path -> [size, time, sha256]

    @classmethod
    def open(cls, run: str, *, fresh: bool = False) -> StageCache:
        """Open the cache of a run; empty where it has none yet."""
        path = run_folder(run, "speedrun.json")
        entries = read_facts(path)
        if path.is_file() and not entries and not fresh:
            raise UserError(f"{path} is damaged: nobody knows which stages are done; --fresh runs all of them again")
        return cls(path, entries, read_facts(path.with_name("inputs.json")))

    def identity(self, before: str, words: Sequence[str], inputs: Sequence[Path]) -> str:
        """Hash of a stage: its command, the content of the files and folders that it reads and no stage has made,
        all stages before it, the version of the program."""
        contents = [f"{path} {self._content(path)}" for path in inputs]
        return hashlib.sha256("\0".join([before, __version__, *words, *contents]).encode()).hexdigest()[:16]

    def _content(self, path: Path) -> str:
        """Checksum of a file; of a folder, that of its manifest, which holds checksums, or of all its files."""
        if path.is_file():
            return self._sum(path)
        if (path / "manifest.json").is_file():
            return self._sum(path / "manifest.json")
        listed = "\n".join(f"{file.relative_to(path)} {self._sum(file)}" for file in files_in(path))
        return hashlib.sha256(listed.encode()).hexdigest()

    def _sum(self, path: Path) -> str:
        about = path.stat()
        key, facts = str(path.absolute()), [about.st_size, about.st_mtime_ns]
        if self.sums.get(key, [])[:2] != facts:
            self.sums[key] = [*facts, sha256(path)]
        return str(self.sums[key][2])

    def seconds(self, identity: str) -> float | None:
        """Seconds that a finished stage took; None of another."""
        seconds = self.entries.get(identity, {}).get("seconds")
        return None if seconds is None else float(seconds)

    def begin(self, identity: str, words: Sequence[str], old: int, kept: Collection[str]) -> None:
        """Record the start of a stage. One that was not begun before overwrites the results of other settings: all
        but the stages `kept`, those before it, are forgotten."""
        if identity not in self.entries:
            self.entries = {stage: entry for stage, entry in self.entries.items() if stage in kept}
        self._write(identity, {"command": " ".join(words), "old": old})

    def done(self, identity: str, words: Sequence[str], seconds: float) -> None:
        """Record the end of a stage."""
        self._write(identity, {"command": " ".join(words), "seconds": seconds})

    def forget(self, identity: str) -> None:
        """Forget a stage, so that it runs again."""
        self.entries.pop(identity, None)

    def _write(self, identity: str, entry: dict[str, Any]) -> None:
        self.entries[identity] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.sums:
            write_atomic(self.path.with_name("inputs.json"), json.dumps(self.sums, indent=1))
        write_atomic(self.path, json.dumps(self.entries, indent=1))
