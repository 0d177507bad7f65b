"""Checkpoints are whole or invisible, damage is found and named, and any number of ranks can read them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ascendchat import checkpoint, files
from ascendchat.checkpoint import Checkpoint, Damaged, Shard, Writer, newest, to_continue, verify
from ascendchat.errors import NotSaved, OutOfMemory, UserError
from ascendchat.files import begin_sha256, check_folder, sha256, write_atomic
from ascendchat.parallel.collectives import World
from ascendchat.runs.run import checkpoints, old_models, old_models_notice, read_ahead, set_aside


def tensors(seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    model = {"a": torch.randn(10, generator=generator), "b": torch.randn(3, 4, generator=generator).bfloat16()}
    return model, {Shard("a", "first", 0, 10).key(): torch.randn(10, generator=generator)}


def save(folder: Path, *steps: int, keep: int = 5) -> None:
    writer = Writer(folder, keep=keep)
    for step in steps:
        save_step(writer, step)
    writer.wait()


def save_step(writer: Writer, step: int) -> None:
    model, shards = tensors(step)
    writer.save(step, model=model, shards=shards, state={"shape": {"depth": 3}})


def found_in(folder: Path, **how: Any) -> Checkpoint:
    """The newest whole checkpoint, of which there is one."""
    found = newest(folder, **how)
    assert found is not None
    return found


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"  # not made by anybody yet
    save(folder, 3, 7)
    found = found_in(folder)
    assert found.step == 7
    assert found.state["shape"] == {"depth": 3}
    model, shards = tensors(7)
    assert all(torch.equal(found.model()[name], tensor) for name, tensor in model.items())
    assert torch.equal(found.reader()(Shard("a", "first", 2, 9)), shards["a|first|0|10"][2:9])
    assert (folder / "latest").read_text() == "step_000007\n"


def test_weights_of_the_optimizer_are_its_own_and_of_an_imported_model_those_of_the_model(tmp_path: Path) -> None:
    model, exact = {"w": torch.ones(4, 3).bfloat16()}, torch.arange(12.0)
    for name, shards in (("trained", {"w|weight|0|5": exact[:5], "w|weight|5|12": exact[5:]}), ("imported", {})):
        writer = Writer(tmp_path / name)
        writer.save(1, model=model, shards=shards, state={})
        writer.wait()
    assert torch.equal(found_in(tmp_path / "trained").reader()(Shard("w", "weight", 3, 9)), exact[3:9])
    read = found_in(tmp_path / "imported").reader()
    assert torch.equal(read(Shard("w", "weight", 3, 9)), torch.ones(6))
    with pytest.raises(UserError, match="without the state of its optimizer; start a stage from it without"):
        read(Shard("w", "first", 0, 12))


def test_saving_copies_so_that_training_may_go_on_at_once(tmp_path: Path) -> None:
    model, shards = tensors(1)
    expected = model["a"].clone()
    writer = Writer(tmp_path)
    writer.save(1, model=model, shards=shards, state={})
    model["a"].zero_()
    writer.wait()
    assert torch.equal(found_in(tmp_path).model()["a"], expected)


@pytest.mark.parametrize("patience", [0.0, 600.0])
def test_who_waits_for_a_slow_disk_is_told(patience: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    writing, whole = threading.Event(), Writer._write

    def slow(self: Writer, *arguments: Any) -> None:
        if not patience:
            assert writing.wait(60)
        whole(self, *arguments)

    def say(text: str) -> None:
        said.append(text)
        writing.set()

    monkeypatch.setattr(Writer, "_write", slow)
    monkeypatch.setattr("ascendchat.checkpoint.PATIENCE", patience)
    writer = Writer(tmp_path, say=say)
    save_step(writer, 1)
    writer.wait()
    assert said == ([] if patience else [f"waiting until the checkpoint is on disk, in {tmp_path}"])
    assert checkpoints(tmp_path) == [1]


def test_only_the_last_few_are_kept_and_drafts_of_killed_runs_go(tmp_path: Path) -> None:
    (tmp_path / ".step_000001.writing").mkdir(parents=True)
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert checkpoints(tmp_path) == [3, 4]
    assert not list(tmp_path.glob(".step*"))


def test_what_was_just_written_stays_though_damaged_steps_are_ahead(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2)
    for step in (400, 500, 600):
        save_step(writer, step)
        writer.mark_best(step, float(step))
    writer.wait()
    for step in (500, 600):
        (tmp_path / f"step_{step:06d}" / "model.safetensors").write_bytes(b"damaged")
    assert found_in(tmp_path).step == 400
    save(tmp_path, 450, keep=2)
    assert found_in(tmp_path).step == 450
    assert (tmp_path / "latest").read_text() == "step_000450\n"
    save(tmp_path, 700, 800, keep=2)
    assert checkpoints(tmp_path) == [400, 700, 800]


def test_an_earlier_model_is_kept_until_the_new_run_has_passed_it(tmp_path: Path) -> None:
    stage, old, older = (tmp_path / name for name in ("base", "base.old.2", "base.old"))
    save(old, 100, 342)
    save(older, 120)
    (tmp_path / "base.older").mkdir()  # not ours
    writer = Writer(stage)
    for step, left in ((119, [older, old]), (120, [old]), (341, [old]), (342, [])):
        save_step(writer, step)
        writer.wait()
        assert old_models(stage) == left, step
    assert (tmp_path / "base.older").is_dir()
    save(old, 999)
    writer.forget_earlier()  # the new run is finished, though it was shorter
    assert old_models(stage) == []


def test_the_way_back_leads_to_the_model_with_most_steps_whatever_its_path(tmp_path: Path) -> None:
    stage = tmp_path / "my runs" / "base"
    stage.mkdir(parents=True)
    save(stage.with_name("base.old"), 342)
    for name, step in (("base.old.2", 3), ("base.old.10", 5)):  # stopped soon
        save(stage.with_name(name), step)
    assert [path.name for path in old_models(stage)] == ["base.old", "base.old.2", "base.old.10"]
    subprocess.run(old_models_notice(stage).partition("to get it back: ")[2], shell=True, check=True)
    assert checkpoints(stage) == [342]


def test_a_run_that_was_killed_before_it_wrote_latest_is_set_aside_too(tmp_path: Path) -> None:
    stage = tmp_path / "base"
    save(stage, 7)
    (stage / "latest").unlink()
    assert set_aside(stage) == tmp_path / "base.old"
    assert newest(stage) is None


def test_what_cannot_be_deleted_is_named_once_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def busy(path: Path, **_: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))  # as on NFS while somebody reads a file in it

    writer = Writer(tmp_path, keep=1, say=said.append)
    with monkeypatch.context() as nfs:
        nfs.setattr("ascendchat.checkpoint.shutil.rmtree", busy)
        for step in (1, 2, 3, 3):  # the last one again, as after a resume
            save_step(writer, step)
            writer.wait()
    assert checkpoints(tmp_path) == [3]
    assert found_in(tmp_path).step == 3
    assert len(said) == 3
    assert all("could not be deleted (Directory not empty); training goes on" in line for line in said)
    Writer(tmp_path)
    assert not list(tmp_path.glob(".deleted_*"))  # tried again by the next run


def test_who_only_uses_the_model_does_not_need_the_optimizer_files(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step_000002" / "optim-0-of-1.safetensors").unlink()
    assert found_in(tmp_path, say=lambda text: None).step == 1
    found = found_in(tmp_path, optimizer=False)
    assert found.step == 2
    assert set(found.model()) == set(tensors(2)[0])
    (tmp_path / "step_000002" / "model.safetensors").write_bytes(b"damaged")
    assert found_in(tmp_path, optimizer=False, say=lambda text: None).step == 1


def test_a_flipped_byte_anywhere_is_found_and_the_one_before_is_used(tmp_path: Path) -> None:
    save(tmp_path / "good", 1, 2)
    rng = random.Random(0)
    files = sorted(p.name for p in (tmp_path / "good" / "step_000002").iterdir())
    assert files == ["manifest.json", "model.safetensors", "optim-0-of-1.safetensors", "state.json"]
    for number in range(8):
        folder = tmp_path / f"try{number}"
        shutil.copytree(tmp_path / "good", folder)
        victim = folder / "step_000002" / files[number % 4]
        data = bytearray(victim.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        victim.write_bytes(data)
        said: list[str] = []
        found = newest(folder, say=said.append)
        if victim.name == "manifest.json" and not said:  # a bit of white space, or of a number nobody needs
            good = tmp_path / "good" / "step_000002" / "manifest.json"
            assert json.loads(victim.read_text())["files"] == json.loads(good.read_text())["files"]
            continue
        assert found is not None
        assert found.step == 1
        assert "DAMAGED" in said[0]


def sign(folder: Path, **contents: str) -> None:
    """Write files of a checkpoint anew, with the checksums that belong to them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, content in contents.items():
        path = folder / f"{name}.json"
        path.write_text(content)
        manifest["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


DEEP = "[" * 100_000
HEX = json.dumps("0" * 64)
MANIFESTS = [DEEP, "", "null", "[]", "7", '"a"', "{}", '{"files": []}', '{"files": {}}', '{"files": null}', "\\ud800"]
MANIFESTS += [
    f'{{"files": {{"model.safetensors": {entry}}}}}'
    for entry in ("null", "[]", '{"bytes": 1e999}', '{"bytes": "a"}', "{}")
]
MANIFESTS += [f'{{"files": {{"../latest": {{"bytes": 12, "sha256": {HEX}}}}}}}', '{"files": {"\\u0000": {"bytes": 1}}}']
STATES = [DEEP, "", "[]", "null", "{}", '{"step": "a"}', '{"step": null}', '{"step": 1e999}', '{"step": -1}']
STATES += ['{"step": true}', '{"step": 2.5}', '{"step": [2]}', '{"step": 3}', '{"step": NaN}']


def test_whatever_stands_in_its_json_a_damaged_checkpoint_is_named_and_the_one_before_used(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    path, said = tmp_path / "step_000002", list[str]()
    whole = (path / "manifest.json").read_text()
    for content in MANIFESTS:
        (path / "manifest.json").write_text(content)
        assert found_in(tmp_path, say=said.append).step == 1, content[:80]
    for content in STATES:
        (path / "manifest.json").write_text(whole)
        sign(path, state=content)
        assert found_in(tmp_path, say=said.append).step == 1, content[:80]
    assert len(said) == len(MANIFESTS) + len(STATES)
    for text in said:
        assert text.startswith(f"DAMAGED CHECKPOINT, NOT USED: {path}")
        assert text.endswith("; trying the one before")
        assert len(text) < 500
    (path / "manifest.json").write_text(whole)
    sign(path, state='{"step": 2}')
    assert found_in(tmp_path).step == 2


@pytest.mark.parametrize("content", ["", "step_000001", "step_000001 a", "a b c", "step_000001 nan", "\udcff"])
def test_a_mark_of_the_best_that_cannot_be_read_or_compared_is_replaced(content: str, tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "best").write_bytes(content.encode(errors="surrogateescape"))
    writer = Writer(tmp_path)
    writer.mark_best(1, float("nan"))
    writer.mark_best(2, 0.5)
    writer.mark_best(1, float("nan"))
    assert (tmp_path / "best").read_text() == "step_000002 0.5\n"


def test_what_a_kill_left_of_small_files_goes_with_the_next_start(tmp_path: Path) -> None:
    for name in (".latest.4213.tmp", ".best.77.tmp", ".run.json.5.tmp", ".lock", "mine.tmp"):
        (tmp_path / name).touch()
    said: list[str] = []
    Writer(tmp_path, say=said.append)
    assert ({path.name for path in tmp_path.iterdir()}, said) == ({".lock", "mine.tmp"}, [])


def test_who_replaces_a_file_takes_away_what_kills_have_left_of_it(tmp_path: Path) -> None:
    old, new, other = (tmp_path / f".{name}.tmp" for name in ("a.json.11", "a.json.12", "b.json.13"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (1, 1))
    write_atomic(tmp_path / "a.json", "{}")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", new.name, other.name}, "another process writes it"


def test_a_truncated_or_missing_file_is_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step_000001"
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(Damaged, match=r"model\.safetensors has"):
        verify(folder)
    model.unlink()
    with pytest.raises(Damaged, match=r"model\.safetensors is missing"):
        verify(folder)


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    read = found_in(tmp_path).reader()
    with pytest.raises(UserError, match="holds 10 of 12 values of a first"):
        read(Shard("a", "first", 0, 12))
    with pytest.raises(UserError, match="another version of ascendchat: it has no first of other"):
        read(Shard("other", "first", 0, 5))


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nothing") is None


def test_a_run_that_shall_not_go_on_takes_only_what_its_own_launch_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 4)
    (tmp_path / "run.json").write_text(json.dumps({"launch": "one"}))
    taken = {}
    for launch in ("", "one", "two"):
        monkeypatch.setenv("ASCENDCHAT_LAUNCH", launch)
        taken[launch] = to_continue(tmp_path, "never") is not None
        assert to_continue(tmp_path, "auto") is not None
    assert taken == {"": False, "one": True, "two": False}


class Disk:
    """A disk that is full for so many writes of tensors, of `rank` where several write; pauses are noted, not made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, full: int = 0) -> None:
        self.full, self.pauses, self.said = full, list[float](), list[str]()
        whole = checkpoint.write_tensors

        def write(path: Path, tensors: dict[str, torch.Tensor], *more: Any) -> None:
            if self.full:
                self.full -= 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            whole(path, tensors, *more)

        monkeypatch.setattr(checkpoint, "write_tensors", write)
        monkeypatch.setattr(checkpoint, "pause", self.pauses.append, raising=False)


def test_a_save_that_fails_is_said_and_the_next_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    writer = Writer(tmp_path, say=disk.said.append)
    for step, full in enumerate([0, 1, 1, 0, 1, 1, 0], 1):
        disk.full = full
        save_step(writer, step)
        writer.wait()
        writer.mark_best(step, float(step))  # of a checkpoint that is not there
        assert not list(tmp_path.glob(".step_*"))
    assert checkpoints(tmp_path) == [1, 4, 7]
    assert (tmp_path / "best").read_text() == "step_000001 1.0\n"
    failed = (
        "could not be written to {} ([Errno 28] No space left on device); training goes on, the next save tries again"
    )
    assert disk.said == [f"the checkpoint of step {step} {failed.format(tmp_path)}" for step in (2, 3, 5, 6)]
    assert disk.pauses == []


def test_three_failed_saves_in_a_row_end_the_run_with_a_status_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, full=3)
    writer = Writer(tmp_path, say=disk.said.append)
    for step in (1, 2, 3):
        save_step(writer, step)
    with pytest.raises(
        NotSaved, match=f"step 3 could not be written to {tmp_path}.*No space left.*make room"
    ) as caught:
        writer.wait()
    assert caught.value.status == 75
    assert len({error.status for error in (UserError, OutOfMemory, NotSaved)}) == 3
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("full", [1, 4, 5])
def test_the_last_save_is_tried_five_times_within_a_minute(
    full: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, full=full)
    writer = Writer(tmp_path, say=disk.said.append)
    writer.save(9, model={}, shards=tensors(9)[1], state={}, last=True)
    if full == 5:
        with pytest.raises(NotSaved, match=r"step 9 could not be written .* make room .* run the same command again"):
            writer.wait()
    else:
        writer.wait()
        assert found_in(tmp_path).step == 9
    assert (len(disk.pauses), len(disk.said)) == (min(full, 4), min(full, 4))
    assert 40 < sum(disk.pauses) * 4 / len(disk.pauses) < 60
    assert all(text.endswith("trying again in 12 seconds") for text in disk.said)


def test_a_checkpoint_is_saved_although_what_names_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, content: str | bytes) -> None:
        if path.name in ("latest", "best"):
            raise OSError(errno.EIO, "Input/output error")
        write_atomic(path, content)

    monkeypatch.setattr(checkpoint, "write_atomic", refuse)
    said: list[str] = []
    writer = Writer(tmp_path, say=said.append)
    save_step(writer, 3)
    writer.mark_best(3, 0.5)
    assert found_in(tmp_path).step == 3
    assert said == [
        f"{tmp_path / name} could not be written (Input/output error); training goes on" for name in ("latest", "best")
    ]


def test_the_best_one_is_kept_besides_the_last(tmp_path: Path) -> None:
    writer = Writer(tmp_path, keep=2)
    for step in range(1, 7):
        save_step(writer, step)
        writer.mark_best(step, [3.0, 1.0, 2.0, 2.0, 1.5, 1.0][step - 1])
    writer.wait()
    assert checkpoints(tmp_path) == [2, 5, 6]
    assert (tmp_path / "best").read_text() == "step_000002 1.0\n"


def test_what_a_killed_run_of_other_ranks_left_behind_is_in_no_new_checkpoint(tmp_path: Path) -> None:
    draft = tmp_path / ".step_000003.writing"
    draft.mkdir()
    save_file({Shard("a", "first", 0, 5).key(): torch.ones(5)}, draft / "optim-1-of-2.safetensors")
    (draft / "part-1").write_text("{}")
    save(tmp_path, 3)
    found = found_in(tmp_path)
    assert torch.equal(found.reader()(Shard("a", "first", 0, 10)), tensors(3)[1]["a|first|0|10"])
    save_file({Shard("a", "first", 0, 5).key(): torch.ones(5)}, found.folder / "optim-1-of-2.safetensors")
    assert torch.equal(found.reader()(Shard("a", "first", 0, 10)), tensors(3)[1]["a|first|0|10"])


class Ranks:
    """Two ranks of one job, in this process: the one that `now` names speaks. `waits`: rank 0 has looked in vain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waits = 0, threading.Event()
        clock = SimpleNamespace(monotonic=time.monotonic, time_ns=time.time_ns, sleep=lambda _: self.waits.set())
        monkeypatch.setattr("ascendchat.checkpoint.collectives.world", lambda: World(self.now, 2))
        monkeypatch.setattr("ascendchat.checkpoint.collectives.barrier", lambda: None)
        monkeypatch.setattr("ascendchat.checkpoint.time", clock)

    def writer(self, rank: int, folder: Path) -> Writer:
        self.now = rank
        return Writer(folder)


def test_a_checkpoint_gets_its_name_when_the_slowest_rank_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch)
    first, second = ranks.writer(0, tmp_path), ranks.writer(1, tmp_path)
    (tmp_path / ".step_000009.writing").mkdir()  # a rank that is ahead has begun the next one
    model, shards = tensors(4)
    halves = [{f"a|first|{low}|{low + 5}": shards["a|first|0|10"][low : low + 5]} for low in (0, 5)]
    ranks.now = 0
    first.save(4, model=model, shards=halves[0], state={})
    assert ranks.waits.wait(20), "rank 0 does not wait for the part of rank 1"
    assert checkpoints(tmp_path) == []
    ranks.now = 1
    second.save(4, model=model, shards=halves[1], state={})
    second.mark_best(4, 0.5)  # which is for rank 0 to say
    first.wait()
    ranks.now = 0
    assert torch.equal(found_in(tmp_path).reader()(Shard("a", "first", 0, 10)), shards["a|first|0|10"])
    assert not (tmp_path / "best").exists()
    assert (tmp_path / ".step_000009.writing").is_dir()


@pytest.mark.parametrize(("gone", "limit", "said"), [({1}, 99.0, "has ended"), (set(), -1.0, "shared by all nodes")])
def test_a_rank_that_never_writes_its_part_is_named(
    gone: set[int], limit: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ascendchat.checkpoint.lost_ranks", lambda: gone)
    monkeypatch.setattr("ascendchat.checkpoint.PART_TIMEOUT", limit)
    writer = Ranks(monkeypatch).writer(0, tmp_path)
    writer.save(1, model={}, shards={}, state={})
    with pytest.raises(UserError, match=f"rank 1 .*did not write its part.*{said}|rank 1 {said}.*its part"):
        writer.wait()
    assert checkpoints(tmp_path) == []


@pytest.mark.parametrize("last", [False, True])
def test_a_rank_that_could_not_write_its_part_says_so_and_is_not_waited_for(
    last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, disk = Ranks(monkeypatch), Disk(monkeypatch)
    model, shards = tensors(4)
    tried = threading.Event()
    monkeypatch.setattr(checkpoint, "pause", lambda _: tried.wait(20))
    first, second = (ranks.writer(rank, tmp_path) for rank in (0, 1))
    first.say = second.say = disk.said.append
    disk.full, ranks.now = 1, 1
    second.save(4, model={}, shards=shards, state={}, last=last)
    while not disk.said:  # it has failed, and waits where it is the last
        tried.wait(0.001)
    ranks.now = 0
    first.save(4, model=model, shards={}, state={}, last=last)
    while len(disk.said) < 2:
        tried.wait(0.001)
    assert "rank 1 could not write its part: [Errno 28] No space left on device" in disk.said[1]
    tried.set()
    second.wait()
    first.wait()
    assert checkpoints(tmp_path) == ([4] if last else [])


def test_old_drafts_are_cleared_before_any_rank_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".step_000001.writing").mkdir()
    left: list[list[Path]] = []
    monkeypatch.setattr("ascendchat.checkpoint.collectives.barrier", lambda: left.append([*tmp_path.iterdir()]))
    Writer(tmp_path)
    assert left == [[]], "a rank that has passed the barrier would lose what it writes"


def test_a_checksum_that_was_begun_is_not_believed_when_the_file_has_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"old")
    begin_sha256(path)
    files._background[path].join()
    write_atomic(path, "new")
    assert sha256(path) == hashlib.sha256(b"new").hexdigest()
    begin_sha256(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        sha256(path)


def test_a_file_where_a_folder_is_needed_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match="taken is a file, and a folder is needed there"):
        check_folder(tmp_path / "taken" / "out" / "deeper")
    check_folder(tmp_path / "out" / "deeper")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_checksum_is_begun_of_checkpoints_only_and_where_a_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a Hugging Face model nobody asks for: to read gigabytes for it would only slow the load."""
    begun: dict[Path, object] = {}
    monkeypatch.setattr("ascendchat.files._background", begun)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"weights")
    save(tmp_path / "base", 3)
    read_ahead("", None, str(tmp_path / "hf"))
    assert not begun
    read_ahead("", None, str(tmp_path / "base"))
    weights = tmp_path / "base" / "step_000003" / "model.safetensors"
    assert list(begun) == [weights]
    digest = sha256(weights)

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refused)
    read_ahead("", None, str(tmp_path / "base"))
    assert sha256(weights) == digest
