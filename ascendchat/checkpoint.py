"""Checkpoints: atomic, checksummed, sharded over ranks and readable by any number of them, on any device.

    writer = Writer(folder)                                   # runs/NAME/base
    writer.save(step, model=..., shards=..., state={...})     # returns at once; a thread writes
    saved = newest(folder)                                    # verified; a damaged one is named, the one before used
    optimizer.load(saved.reader(), saved.step)                # or saved.model() for the weights alone

A checkpoint is the folder step_000123 with model.safetensors, one optim-R-of-N.safetensors per rank (and one
extra-R-of-N.safetensors where a stage keeps more than that), state.json and manifest.json (sizes and sha256). It is
written under another name and renamed when every rank's part is there, so a folder that bears its name is whole.
`latest` names the newest one, `best` the one that validated best.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ascendchat.config import load_yaml
from ascendchat.errors import NotSaved, UserError
from ascendchat.files import flush, give_default_mode, sha256, write_atomic
from ascendchat.parallel import collectives
from ascendchat.processes import lost_ranks
from ascendchat.runs.run import begun_by_this_launch, checkpoints, old_models


@dataclass(frozen=True)
class Shard:
    """Elements [start, stop) of one state tensor of one parameter: the unit that a rank saves and any rank reads."""

    parameter: str
    kind: str  # "weight" (float32), "first" and "second" moment, "mean" of late weights
    start: int
    stop: int

    def key(self) -> str:
        return f"{self.parameter}|{self.kind}|{self.start}|{self.stop}"

    @classmethod
    def parse(cls, key: str) -> Shard:
        parameter, kind, start, stop = key.split("|")
        return cls(parameter, kind, int(start), int(stop))


WRITING = "checkpoint"  # name of the thread that writes
PART_TIMEOUT = 1800.0  # seconds that rank 0 waits for the parts of the other ranks
PATIENCE = 5.0  # seconds of waiting after which a line says what for
TRIES, PAUSE = 5, 12.0  # attempts of the last save, and the seconds between them: a minute
UNWRITTEN = (OSError, SafetensorError)  # raised for a full or failing disk
MAX_FAILED = 3  # saves in a row; then a new process, perhaps on another node, is more likely to save


class Damaged(Exception):
    """A checkpoint that does not match its manifest."""


class _PartMissing(Exception):
    """A rank will not write its part of any checkpoint."""


def pause(seconds: float) -> None:
    """Wait between two attempts of the last save; tests replace it."""
    time.sleep(seconds)


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory, where later steps cannot change them."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file; the tensors are contiguous and in host memory."""
    save_file(tensors, path, metadata)
    give_default_mode(path)


def write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a safetensors file with these weights alone, to be sent over a connection."""
    write_tensors(path, host_copy(weights))


class Writer:
    """Saves checkpoints from a background thread, one at a time. A save that fails is reported, and training goes on to
    the next one; MAX_FAILED in a row, or a last one that fails TRIES times, end the run by NotSaved."""

    def __init__(self, folder: Path, *, keep: int = 2, say: Callable[[str], None] = print) -> None:
        """Every rank makes one. Drafts of a killed run are deleted before any rank may write."""
        self.folder, self.keep, self.say = Path(folder), keep, say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failed = 0  # saves in a row
        self._given_up: int | None = None  # step of the save that ends the run
        self._stuck: set[Path] = set()  # folders that could not be deleted, each reported once
        self.folder.mkdir(parents=True, exist_ok=True)
        if collectives.world().rank == 0:
            leftovers = [".step_*.writing", ".deleted_*", f"../.deleted_{self.folder.name}.old*"]
            for path in [path for pattern in leftovers for path in self.folder.glob(pattern)]:
                self._delete(path)
            for path in self.folder.glob(".*.tmp"):  # left by `write_atomic`
                with contextlib.suppress(OSError):
                    path.unlink()
        collectives.barrier()

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor],
        shards: Mapping[str, Tensor],
        state: Mapping[str, Any],
        extra: Mapping[str, Tensor] | None = None,
        last: bool = False,
    ) -> None:
        """Copy everything to the host, then write it while training goes on. `model` and `state` matter on rank 0;
        `extra`: further tensors of each rank that the stage needs to resume; `last`: no later save will follow."""
        self.wait()
        world = collectives.world()
        weights = host_copy(model) if world.rank == 0 else {}
        parts = {"optim": host_copy(shards), **({"extra": host_copy(extra)} if extra else {})}
        text = json.dumps({**state, "step": step}, indent=1)
        arguments = (TRIES if last else 1, step, weights, parts, text, world.rank, world.size)
        self._thread = threading.Thread(target=self._run, args=arguments, name=WRITING)
        self._thread.start()

    def mark_best(self, step: int, score: float, *, higher_is_better: bool = False) -> None:
        """Keep the checkpoint of this step besides the last ones if its score is the best so far."""
        self.wait()
        _, best = self._best()
        better = not math.isnan(score) and (best is None or (score > best if higher_is_better else score < best))
        if collectives.world().rank == 0 and (self.folder / f"step_{step:06d}").is_dir() and better:
            self._name("best", f"step_{step:06d} {score!r}\n")

    def _best(self) -> tuple[str, float | None]:
        """Name and score of the best checkpoint, from the file `best`: a resumed run needs both."""
        try:
            name, score = (self.folder / "best").read_text(encoding="utf-8").split()
            return (name, float(score)) if not math.isnan(float(score)) else ("", None)
        except (OSError, ValueError):  # there is none, or it is damaged: the next one is the best so far
            return "", None

    def wait(self) -> None:
        """Wait until the checkpoint under way is on disk."""
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self._say(f"waiting until the checkpoint is on disk, in {self.folder}")
            self._thread.join()
            self._thread = None
        if self._given_up is not None:
            raise NotSaved(
                f"the checkpoint of step {self._given_up} could not be written to {self.folder}: {self._error}; make "
                "room or mend the storage there, then run the same command again: it goes on from the last whole one"
            ) from self._error

    def failed(self) -> bool:
        """True if the save that was begun last has failed."""
        self.wait()
        return self._failed > 0

    def forget_earlier(self) -> None:
        """Delete earlier models of the run's folder (runs/run.py), which a finished run needs no longer."""
        if collectives.world().rank == 0:
            for old in old_models(self.folder):
                self._delete(old)

    def _run(self, tries: int, step: int, weights: Any, parts: Any, state: str, rank: int, size: int) -> None:
        draft = self.folder / f".step_{step:06d}.writing"
        for left in reversed(range(tries)):
            try:
                self._write(draft, step, weights, parts, state, rank, size)
                self._failed = 0
                return
            except BaseException as error:  # noqa: BLE001 (reported here, or raised by wait in the training thread)
                self._error = error
                with contextlib.suppress(OSError):  # a full disk mostly has room for the name
                    (draft / f"failed-{rank}").write_text(str(error))
                what = f"the checkpoint of step {step} could not be written to {self.folder}"
                if left:
                    self._say(f"{what} ({error}); trying again in {PAUSE:.0f} seconds")
                    pause(PAUSE)
                    with contextlib.suppress(OSError):
                        for mark in draft.glob(f"failed-{rank or '*'}"):  # rank 0 waits for all of them anew
                            mark.unlink(missing_ok=True)
        self._failed += 1
        if tries > 1 or self._failed >= MAX_FAILED or isinstance(self._error, _PartMissing):
            self._given_up = step
        else:
            self._say(f"{what} ({self._error}); training goes on, the next save tries again")
        if rank == 0 and draft.exists():
            self._delete(draft)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # standard output may be closed
            self.say(text)

    def _name(self, name: str, content: str) -> None:
        """Write `latest` or `best`; a failure is harmless, since `newest` reads the folder itself."""
        try:
            write_atomic(self.folder / name, content)
        except OSError as error:
            self._say(f"{self.folder / name} could not be written ({error.strerror}); training goes on")

    def _write(
        self,
        draft: Path,
        step: int,
        model: dict[str, Tensor],
        parts: dict[str, dict[str, Tensor]],
        state: str,
        rank: int,
        size: int,
    ) -> None:
        final = self.folder / f"step_{step:06d}"
        draft.mkdir(exist_ok=True)
        own = {}
        for name, tensors in parts.items():
            part = draft / f"{name}-{rank}-of-{size}.safetensors"
            write_tensors(part, tensors)
            own[part.name] = self._entry(part)
        write_atomic(draft / f"part-{rank}", json.dumps(own))
        if rank:
            return
        write_tensors(draft / "model.safetensors", model)
        write_atomic(draft / "state.json", state)
        files = {name: self._entry(draft / name) for name in ("model.safetensors", "state.json")}
        files.update(self._collect(draft, size))
        write_atomic(draft / "manifest.json", json.dumps({"step": step, "files": files}, indent=1))
        flush(draft)
        if final.exists():  # the same step again, after a resume
            self._delete(final)
        draft.rename(final)  # a failure from here on leaves a whole checkpoint
        with contextlib.suppress(OSError):
            for index in range(size):
                (final / f"part-{index}").unlink()
            flush(self.folder)
        self._name("latest", final.name + "\n")
        self._retain(step)
        for old in old_models(self.folder):
            if step >= max(checkpoints(old), default=0):
                self._delete(old)

    def _entry(self, path: Path) -> dict[str, Any]:
        flush(path)
        return {"bytes": path.stat().st_size, "sha256": sha256(path)}

    def _collect(self, draft: Path, size: int) -> dict[str, Any]:
        """Manifest entries of the parts of all ranks, waiting for those still writing."""
        deadline, entries = time.monotonic() + PART_TIMEOUT, {}
        for index in range(size):
            part = draft / f"part-{index}"
            while not part.exists():
                if (failed := draft / f"failed-{index}").exists():
                    raise OSError(f"rank {index} could not write its part: {failed.read_text() or 'no room'}")
                if index in lost_ranks() and not part.exists():
                    raise _PartMissing(f"rank {index} has ended and did not write its part")
                if time.monotonic() > deadline:
                    raise _PartMissing(f"rank {index} did not write its part; is {self.folder} shared by all nodes?")
                time.sleep(0.02)
            entries.update(json.loads(part.read_text()))
        return entries

    def _retain(self, last: int) -> None:
        """Delete all but the last few up to the one just written, and the best of this run. Later ones are damaged,
        since the run did not resume behind them: it will write them again."""
        best, _ = self._best()
        for step in [step for step in checkpoints(self.folder) if step <= last][: -self.keep]:
            if f"step_{step:06d}" != best:
                self._delete(self.folder / f"step_{step:06d}")

    def _delete(self, path: Path) -> None:
        """Delete a folder. Its name is free at once; files that cannot be removed (NFS keeps open ones) do not end a
        run: they are reported, and deleted when the next run starts."""
        gone = path if path.name.startswith(".deleted_") else path.with_name(f".deleted_{path.name}_{time.time_ns()}")
        try:
            path.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            if path not in self._stuck:
                self.say(f"{gone if gone.exists() else path} could not be deleted ({error.strerror}); training goes on")
            self._stuck.add(path)


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])

    @property
    def name(self) -> str:
        """The name of its run."""
        return self.folder.parent.parent.name

    @property
    def settings(self) -> dict[str, Any]:
        """The flags that its stage was trained with; empty when it was moved away from its run."""
        path = self.folder.parent / "config.yaml"
        return load_yaml(path) if path.is_file() else {}

    @property
    def results_folder(self) -> Path:
        """The stage's folder in its run: evaluations of the model write their results for it."""
        return self.folder.parent

    @property
    def fingerprint(self) -> str:
        """Identity of the weights."""
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        return str(manifest["files"]["model.safetensors"]["sha256"][:12])

    def model(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """All weights by name."""
        with safe_open(self.folder / "model.safetensors", "pt", device=str(device)) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    def index(self) -> dict[tuple[str, str], list[tuple[Shard, Path]]]:
        """Files and shards of every state tensor, by parameter and kind."""
        index: dict[tuple[str, str], list[tuple[Shard, Path]]] = {}
        manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        for path in sorted(self.folder / name for name in manifest["files"] if name.startswith("optim-")):
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    shard = Shard.parse(key)
                    index.setdefault((shard.parameter, shard.kind), []).append((shard, path))
        return index

    def extras(self) -> list[dict[str, Tensor]]:
        """The stage's further tensors (`Writer.save(extra=...)`) of each rank that had some, in the order of ranks."""
        matches = [re.fullmatch(r"extra-(\d+)-of-\d+\.safetensors", path.name) for path in self.folder.iterdir()]
        names = sorted((int(match[1]), match[0]) for match in matches if match)
        return [read_file(self.folder / name) for _, name in names]

    def reader(self) -> Callable[[Shard], Tensor]:
        """A function that assembles any shard of the optimizer's state, however many ranks saved it; an imported model
        has weights alone."""
        index = self.index()

        def read(wanted: Shard) -> Tensor:
            if not index and wanted.kind == "weight":
                with safe_open(self.folder / "model.safetensors", "pt") as file:
                    return file.get_tensor(wanted.parameter).flatten()[wanted.start : wanted.stop].float()
            if not index:
                raise UserError(
                    f"{self.folder} was imported without the state of its optimizer; start a stage from it without "
                    "--load-optimizer"
                )
            if (wanted.parameter, wanted.kind) not in index:
                raise UserError(
                    f"{self.folder} was written by another version of ascendchat: it has no {wanted.kind} of "
                    f"{wanted.parameter}; train it again (--resume never), or name another --run"
                )
            out = torch.empty(wanted.stop - wanted.start, dtype=torch.float32)
            filled = 0
            for shard, path in index[wanted.parameter, wanted.kind]:
                low, high = max(wanted.start, shard.start), min(wanted.stop, shard.stop)
                if low < high:
                    with safe_open(path, "pt") as file:
                        part = file.get_slice(shard.key())[low - shard.start : high - shard.start]
                    out[low - wanted.start : high - wanted.start] = part
                    filled += high - low
            if filled != wanted.stop - wanted.start:
                raise UserError(
                    f"{self.folder} holds {filled} of {wanted.stop - wanted.start} values of {wanted.parameter} "
                    f"{wanted.kind}; it was written for another model: give the same --depth, or another --run"
                )
            return out

        return read


def verify(folder: Path, *, optimizer: bool = True) -> Checkpoint:
    """Check the files against the manifest; raise Damaged with the file's name. Without `optimizer` only those of the
    model: the optimizer's are four times as large, and may have been deleted."""
    manifest = _read_object(folder / "manifest.json")
    try:
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
        for name, (size, checksum) in files.items():
            if name.startswith(("optim-", "extra-")) and not optimizer:
                continue
            path = folder / name
            if not path.is_file():
                raise Damaged(f"{path} is missing")
            if path.stat().st_size != size:
                raise Damaged(f"{path} has {path.stat().st_size} bytes instead of {size}")
            if sha256(path) != checksum:
                raise Damaged(f"{path} does not match its checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Damaged(f"{folder / 'manifest.json'} cannot be read: {error!r}") from error
    for name in ("model.safetensors", "state.json"):
        if name not in files:
            raise Damaged(f"{folder / 'manifest.json'} does not list {name}")
    state, step = _read_object(folder / "state.json"), manifest.get("step")
    if type(step) is not int or step < 0 or type(state.get("step")) is not int or state["step"] != step:
        raise Damaged(f"{folder / 'state.json'} does not name the step of the manifest")
    return Checkpoint(folder, state)


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # the last: thousands of brackets
        raise Damaged(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(values, dict):
        raise Damaged(f"{path} cannot be read: it holds no object")
    return values


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file that is not in a manifest; mapped into memory, not read."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise Damaged(f"this is not a whole safetensors file ({error})") from None


class Unfit(ValueError):
    """Weights that a model cannot take: `weight` names the first wrong one, `kind` is missing, unknown, shape, dtype or
    finite."""

    def __init__(self, weight: str, kind: str, text: str) -> None:
        super().__init__(text)
        self.weight, self.kind = weight, kind


def check_fit(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, finite: bool = True) -> None:
    """Raise Unfit unless `weights` can replace `own`, the state dict of a model: the same names, shapes and kinds of
    numbers. `finite`: also that no number is infinite or NaN in the model's dtypes, which reads all of them."""
    if odd := sorted(set(own) ^ set(weights)):
        kind = "missing" if odd[0] in own else "unknown"
        raise Unfit(odd[0], kind, f"these weights do not fit the model: {odd[0]} is {kind}")
    for name, tensor in own.items():
        given = weights[name]
        if given.shape != tensor.shape:
            sizes = f"{tuple(given.shape)} instead of {tuple(tensor.shape)}"
            raise Unfit(name, "shape", f"these weights do not fit the model: {name} is {sizes}")
        if given.is_floating_point() != tensor.is_floating_point():
            kinds = f"{given.dtype} instead of {tensor.dtype}"
            raise Unfit(name, "dtype", f"these weights do not fit the model: {name} is {kinds}")
    for name, tensor in own.items() if finite else ():
        if not weights[name].to(tensor.dtype).isfinite().all():  # a large number is not, in 16 bits
            numbers = f"numbers that are not finite, in {name} as {tensor.dtype}"
            raise Unfit(name, "finite", f"these weights hold {numbers}")


def to_continue(folder: Path, resume: str, *, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The checkpoint that a training run resumes from. `never` ignores checkpoints from before this launch: a restart
    by the launcher resumes from those that the launch itself has saved."""
    anew = collectives.broadcast_object(resume == "never" and not begun_by_this_launch(folder))
    return None if anew else newest(folder, say=say)


def newest(folder: Path, *, optimizer: bool = True, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint that is whole; rank 0 verifies and all ranks use the same one."""
    chosen: str | None = None
    if collectives.world().rank == 0:
        for step in reversed(checkpoints(folder)):
            try:
                chosen = str(verify(folder / f"step_{step:06d}", optimizer=optimizer).folder)
                break
            except Damaged as damage:
                say(f"DAMAGED CHECKPOINT, NOT USED: {damage}; trying the one before")
    chosen = collectives.broadcast_object(chosen)
    if chosen is None:
        return None
    path = Path(chosen)
    return Checkpoint(path, json.loads((path / "state.json").read_text(encoding="utf-8")))
