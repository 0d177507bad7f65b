"""The folder of a run: config.yaml, run.json, metrics.jsonl; models that were set aside; finding checkpoints.

    run = open_run(run_folder("demo", "base"), config, facts={"chip": "cpu"}, track=("tensorboard",), main=rank == 0)
    run.log(100, loss=2.5, tokens_per_second=1200.0)

`ascendchat base --run demo --track tensorboard` writes it, `ascendchat speedrun` sums it up. A step is the number of
optimizer steps done. No torch here, and nothing that makes a device wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import secrets
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ascendchat.config import as_dict, dump, load_yaml, spelling, stored_settings
from ascendchat.config.train import STAGES
from ascendchat.errors import MAX_NAMED, UserError, home, nearest
from ascendchat.files import begin_sha256, write_atomic
from ascendchat.runs.trackers import Sinks, check_track
from ascendchat.version import __version__

# JSON has no NaN: these strings stand for the three floats it cannot write, and are read back as floats.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def run_folder(name: str, stage: str) -> Path:
    """$ASCENDCHAT_HOME/runs/NAME/STAGE, for a name that is one folder and nothing else."""
    if not re.fullmatch(r"\w[\w.+=@-]*", name):
        raise UserError(f"{name!r} cannot name a run; use letters, digits, . _ - only, for example --run first-try")
    return home() / "runs" / name / stage


def environment() -> dict[str, Any]:
    """Facts that explain a result later: versions, commit, host, command. Packages are looked up, not imported."""
    return {
        "ascendchat": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "pid": os.getpid(),
        "argv": list(sys.argv),
        "cwd": os.getcwd(),
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "packages": _packages(),
    }


def _packages() -> dict[str, str]:
    """Installed packages and their versions. Distribution.metadata would parse the whole file for each field that is
    read: a third of a second for a hundred packages, at the start of every run."""
    versions = []
    for package in importlib.metadata.distributions():
        header, _, _ = (package.read_text("METADATA") or package.read_text("PKG-INFO") or "").partition("\n\n")
        fields = dict(line.split(": ", 1) for line in header.splitlines() if line.startswith(("Name: ", "Version: ")))
        if len(fields) == 2:
            versions.append((fields["Name"].strip(), fields["Version"].strip()))
    return dict(sorted(versions, key=lambda item: item[0].lower()))


def _commit(checkout: Path) -> str | None:
    """The commit of our own checkout ("+" when files differ from it); None for an installed package."""
    if not (checkout / ".git").exists():
        return None
    git = ["git", "-C", str(checkout)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "") if head.returncode == 0 else None


def _plain(value: Any) -> Any:
    """A metric as strict JSON: numbers stay numbers, NaN and infinities become strings, arrays of one their item."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    try:
        return _plain(float(value))  # a numpy scalar; a tensor works too, but reading it makes its device wait
    except (TypeError, ValueError, RuntimeError):
        return str(value)


def _revive(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, list):
        return [_revive(v) for v in value]
    return {k: _revive(v) for k, v in value.items()} if isinstance(value, dict) else value


def _json(row: dict[str, Any]) -> bytes:
    # ASCII only: a lone surrogate in a sample, or a tool without UTF-8, cannot hurt the file.
    return (json.dumps(_plain(row), allow_nan=False) + "\n").encode("ascii")


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows that count, in order: rows of steps that a resumed run repeated replace the earlier ones.

    `path` is metrics.jsonl or its folder. The file may belong to a run that is writing: an unfinished last line is
    left out.
    """
    path = Path(path)
    rows: list[dict[str, Any]] = []
    last = math.inf  # the last step that no later resume replaced
    for row in reversed(stored_rows(path / "metrics.jsonl" if path.is_dir() else path)):
        if "resumed_at" in row:
            last = min(last, row["resumed_at"])
        elif row["step"] <= last:
            rows.append(row)
    return rows[::-1]


def stored_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl or results.jsonl, in order; an unfinished last line is left out."""
    rows = []
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give the folder of a run") from None
    for number, line in enumerate(content.split(b"\n")[:-1], 1):  # what follows the last newline is unfinished
        row = _parse(line)
        if row is None:
            raise UserError(f"{path} line {number} is not one of its rows; delete that line to read the others")
        rows.append(_revive(row))
    return rows


def append_row(fd: int, row: dict[str, Any], size: int) -> int:
    """Add a row to a file of `size` bytes that is open for appending; return its new size. One write() of a whole line:
    a kill -9 leaves the line whole or absent."""
    line, written = _json(row), 0
    try:
        written = os.write(fd, line)
    finally:
        if written != len(line):  # the disk filled up in the middle of the line
            os.ftruncate(fd, size)
    if written != len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return size + written


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or not row.keys() & {"step", "resumed_at"}:
        return None
    at = row.get("resumed_at", row.get("step"))
    return row if isinstance(at, (int, float)) and not isinstance(at, bool) and math.isfinite(at) else None


def whole_size(path: Path) -> int:
    """Bytes of a file of rows up to its last whole row: the rest was torn by a crash or a power cut."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end = file.tell() if line.endswith(b"\n") and _parse(line) is not None else end
    return end


@contextlib.contextmanager
def _said_once(run: Run) -> Iterator[None]:
    """Report a full disk once, and continue: it must not end days of training."""
    try:
        yield
    except OSError as error:
        if not run.complained:
            run.say(f"metrics.jsonl cannot be written ({error.strerror}): rows are lost until there is room again")
            run.complained = True


class Run:
    """One open run folder; made by `open_run`. On ranks other than 0 every method does nothing."""

    def __init__(self, folder: Path, main: bool, say: Callable[[str], None]) -> None:
        self.folder = folder
        self.main = main
        self.say = say
        self.sinks: Sinks | None = None
        self.facts: dict[str, Any] = {}
        self.complained = False
        self._fd = -1
        self._lock = -1
        self._size = 0

    def log(self, step: int, **metrics: Any) -> None:
        """Append one row."""
        if not self.main:
            return
        with _said_once(self):
            self._append({"step": int(step), "time": round(time.time(), 3), **metrics})
        if self.sinks is not None:
            self.sinks.log(int(step), metrics)

    def _append(self, row: dict[str, Any]) -> None:
        self._size = append_row(self._fd, row, self._size)

    def note(self, **facts: Any) -> None:
        """Add facts to run.json (the chosen attention kernel, the planned batch...)."""
        if self.main:
            self.facts.update(_plain(facts))
            write_atomic(self.folder / "run.json", json.dumps(self.facts, indent=2, ensure_ascii=False) + "\n")

    def close(self, status: str = "finished") -> None:
        """End the run: `finished`, `stopped` (asked to) or `failed`. Closing twice does nothing."""
        if not self.main or self._fd < 0:
            return
        if self.sinks is not None:
            self.sinks.close()
        with _said_once(self):
            os.fsync(self._fd)
            self.note(status=status, ended=round(time.time(), 3))
        os.close(self._fd)
        os.close(self._lock)
        self._fd = self._lock = -1

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stopped = kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))
        self.close("finished" if kind is None else "stopped" if stopped else "failed")


def open_run(
    folder: Path,
    config: Any,
    *,
    facts: dict[str, Any] | None = None,
    resume_step: int | None = None,
    track: tuple[str, ...] = (),
    main: bool = True,
    say: Callable[[str], None] = print,
) -> Run:
    """Create or reopen a run folder. `resume_step=s`: rows after step s no longer count; None: the run begins, and an
    earlier model in the folder is set aside (run.py).

    `config` is the resolved dataclass; `facts` go to run.json (chip, world size). `main` is true on the one rank that
    writes.
    """
    check_track(track)  # on every rank, so that all of them stop together
    run = Run(Path(folder), main, say)
    if not main:
        return run
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        run._lock = _take_lock(run.folder)
        if resume_step is None and set_aside(run.folder):
            run.folder.mkdir()
            os.close(run._lock)
            run._lock = _take_lock(run.folder)
        if text := old_models_notice(run.folder):
            say(text)
        if resume_step is not None:
            for line in changed(run.folder, config):
                say(line)
        write_atomic(run.folder / "config.yaml", dump(config))
        _open_metrics(run, resume_step)
    except OSError as error:
        raise UserError(
            f"cannot write the run folder {run.folder}: {error.strerror}; set ASCENDCHAT_HOME to a writable folder"
        ) from None
    before = read_facts(run.folder / "run.json")
    history = before.pop("history", [])
    if before:
        history.append({k: before.get(k) for k in ("started", "ended", "status", "host", "argv", "resume_step")})
    run.facts = {"id": before.get("id") or secrets.token_hex(4), "created": before.get("created") or time.time()}
    run.note(started=round(time.time(), 3), status="running", resume_step=resume_step, **environment())
    run.note(**(facts or {}), launch=this_launch(), history=history)
    run.sinks = Sinks(track, run.folder, run.facts["id"], config, resume_step, say) if track else None
    return run


def changed(folder: Path, config: Any) -> list[str]:
    """One line for every setting that differs from those the run was last started with, in any version of this
    package: a setting that the command has lost since counts where the run had changed it from its default."""
    path = folder / "config.yaml"
    before, lost = stored_settings(type(config), load_yaml(path) if path.is_file() else {})
    now = as_dict(config)
    names = [name for name, value in now.items() if name in before and name != "resume" and before[name] != value]
    lines = [f"continuing with {spelling(name)} {now[name]}; before, this run had {before[name]}" for name in names]
    return lines + [f"continuing without {spelling(name)}, which this run had: {value}" for name, value in lost.items()]


def _take_lock(folder: Path) -> int:
    """Lock the folder against a second process. The kernel drops the lock with the process, also after kill -9, and
    data workers forked by this process do not inherit it."""
    fd = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            os.close(fd)
            raise UserError(
                f"another process is writing to {folder}; stop it, or give this run another --run"
            ) from None
        # a file system without locks: continue without one
    return fd


def _open_metrics(run: Run, resume_step: int | None) -> None:
    path = run.folder / "metrics.jsonl"
    run._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    size, run._size = path.stat().st_size, whole_size(path)
    if run._size < size:
        os.ftruncate(run._fd, run._size)
        run.say(f"{path}: the last row was torn ({size - run._size} bytes), removed")
    if run._size:
        if resume_step is None:
            run.say(f"{path}: this run starts anew; the rows of the earlier one no longer count")
        run._append({"resumed_at": -1 if resume_step is None else resume_step, "time": round(time.time(), 3)})


# Earlier models of a stage stay beside it while a new run trains: `ascendchat base --run NAME --resume never`.
#
# The folder runs/NAME/base becomes runs/NAME/base.old (base.old.2, ...), whole: checkpoints, tokenizer, metrics. So
# `ascendchat chat --checkpoint runs/NAME/base.old` opens it. It is deleted when the new run has passed its last step or
# is finished, never before.


def old_models(folder: Path) -> list[Path]:
    """The earlier models of this stage folder that were set aside, oldest first."""
    form = re.compile(re.escape(folder.name) + r"\.old(?:\.(\d+))?")
    numbered = [(int(m[1] or 1), path) for path in folder.parent.iterdir() if (m := form.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def last_step(folder: Path) -> int:
    """Step of the newest checkpoint in a stage folder; 0 if there is none."""
    return max((int(path.name[5:]) for path in folder.glob("step_*") if path.name[5:].isdecimal()), default=0)


def set_aside(folder: Path) -> Path | None:
    """Rename a stage folder that holds a model, with or without a `latest`; None if it holds none."""
    if not last_step(folder):
        return None
    names = itertools.chain([f"{folder.name}.old"], (f"{folder.name}.old.{n}" for n in itertools.count(2)))
    free = next(path for path in map(folder.with_name, names) if not path.exists())
    folder.rename(free)
    return free


def old_models_notice(folder: Path) -> str:
    """The sentence that names the earlier models and the command that restores one; empty if there are none."""
    models = old_models(folder)
    if not models:
        return ""
    names = ", ".join(str(path) for path in models)
    most = shlex.quote(str(max(models, key=last_step)))  # not a new run that was stopped soon
    here = shlex.quote(str(folder))
    return (
        f"the earlier model is kept in {names} until this run has passed it or is finished; "
        f"to get it back: rm -r {here} && mv {most} {here}"
    )


def this_launch() -> str:
    """Identity of the `ascendchat launch` that started this process, kept over its restarts; empty without one."""
    return os.environ.get("ASCENDCHAT_LAUNCH", "")


def begun_by_this_launch(folder: Path) -> bool:
    """True if the run in a stage folder was begun by the launch that also started this process."""
    return bool(this_launch()) and read_facts(folder / "run.json").get("launch") == this_launch()


def read_facts(path: Path) -> dict[str, Any]:
    """The content of a run.json; empty if it is absent, or damaged (it is then written anew)."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


# Where checkpoints are, as `--run`, `--stage` and `--checkpoint` name them: `ascendchat chat --run d12 --stage sft`.
#
# folder = named_folder(run, stage, checkpoint)     # of a stage, or of one checkpoint
# read_ahead(run, stage, checkpoint)                # its checksum, in a thread, while torch is imported

NAME = re.compile(r"step_(\d{6,})")
WEIGHTS = "model.safetensors"


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for path in folder.iterdir() if (m := NAME.fullmatch(path.name)))


def named_folder(run: str, stage: str | None, checkpoint: str) -> Path:
    """The folder of the model to open: `checkpoint`, else that of run and stage, else of the run written last."""
    if checkpoint:
        return Path(checkpoint)
    run = run or last_run(stage)
    return run_folder(run, stage or last_stage(run))


def last_run(stage: str | None = None) -> str:
    """The run that saved a checkpoint last."""
    saved = sorted((home() / "runs").glob(f"*/{stage or '*'}/latest"), key=lambda path: path.stat().st_mtime)
    saved = [path for path in saved if path.parent.name in STAGES]
    if not saved:
        raise UserError(
            f"no {f'{stage} model' if stage else 'model'} in {home() / 'runs'}; "
            "make one: ascendchat speedrun --recipe tiny-cpu"
        )
    return saved[-1].parent.parent.name


def last_stage(run: str) -> str:
    """The latest stage of a run that has a checkpoint."""
    stages = [stage for stage in STAGES if checkpoints(run_folder(run, stage))]
    if not stages:
        saved = [path.parent for path in (home() / "runs").glob("*/*/latest")]
        runs = sorted({folder.parent.name for folder in saved if folder.name in STAGES})  # not base.old
        if len(runs) > MAX_NAMED:
            raise UserError(f"the run {run!r} has no checkpoint; of those that have, {nearest(run, runs)}")
        raise UserError(f"the run {run!r} has no checkpoint; runs that have: {', '.join(runs) or 'none'}")
    return stages[-1]


def read_ahead(run: str, stage: str | None, checkpoint: str) -> None:
    """Begin the checksum of the weights that the command will open; errors are left to the code that opens them."""
    with contextlib.suppress(UserError, OSError, RuntimeError):  # RuntimeError: no further thread is allowed
        folder = named_folder(run, stage, checkpoint)
        if not NAME.fullmatch(folder.name) and (steps := checkpoints(folder)):
            folder /= f"step_{steps[-1]:06d}"
        if NAME.fullmatch(folder.name):  # Hugging Face models have no checksum of ours
            begin_sha256(folder / WEIGHTS)
