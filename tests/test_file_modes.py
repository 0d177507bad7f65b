"""Files that are written by way of a temporary one have the rights that any other new file has."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import hf_models
import pytest
import torch

from ascendchat.checkpoint import Writer, write_weights
from ascendchat.files import give_default_mode, write_atomic
from ascendchat.models.export import export, export_adapter

USUAL = {False: 0o640, True: 0o750}  # of a file, of a folder


@pytest.fixture(autouse=True)
def group_may_read() -> Iterator[None]:
    """A umask that lets the group read, and nobody else."""
    before = os.umask(0o027)
    yield
    os.umask(before)


def as_usual(folder: Path) -> set[str]:
    """The names of all files below a folder, which have the usual rights, as all folders have."""
    every = [folder, *folder.rglob("*")]
    odd = {
        path: oct(path.stat().st_mode) for path in every if stat.S_IMODE(path.stat().st_mode) != USUAL[path.is_dir()]
    }
    assert not odd
    return {path.name for path in every if path.is_file()}


def test_every_file_of_a_checkpoint_can_be_read_by_the_group(tmp_path: Path) -> None:
    weights = {"a": torch.zeros(2)}
    writer = Writer(tmp_path / "run")
    writer.save(1, model=weights, shards=weights, extra=weights, state={})
    writer.wait()
    write_weights(tmp_path / "run" / "sent.safetensors", weights)
    write_atomic(tmp_path / "run" / "note", "x")
    tensors = {"model.safetensors", "optim-0-of-1.safetensors", "extra-0-of-1.safetensors", "sent.safetensors"}
    assert as_usual(tmp_path / "run") == tensors | {"state.json", "manifest.json", "latest", "note"}


@pytest.mark.slow
def test_exported_models_and_adapters_can_be_read_by_the_group(tmp_path: Path) -> None:
    hf_models.save(tmp_path / "tiny")
    opened = hf_models.opened(tmp_path / "tiny")
    export(opened.model, opened.tokenizer, tmp_path / "out")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= as_usual(tmp_path / "out")
    (tmp_path / "beside").mkdir()
    export_adapter(tmp_path / "beside", {"a": torch.zeros(2)}, tmp_path / "adapter")
    assert as_usual(tmp_path / "adapter") == {"adapter_model.safetensors"}


def test_a_private_folder_becomes_as_open_as_others(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o700)
    give_default_mode(tmp_path / "private")
    assert as_usual(tmp_path / "private") == set()
    assert [path.name for path in tmp_path.iterdir()] == ["private"]
