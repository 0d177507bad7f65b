"""`ascendchat bench decode` measures the real engine and ends with one JSON object."""

from __future__ import annotations

import json
import weakref
from typing import Any

import pytest

from ascendchat.bench import decode
from ascendchat.bench.decode import read_bytes, run
from ascendchat.config import parse
from ascendchat.config.generate import BenchDecodeConfig
from ascendchat.device.accelerator import no_garbage_collection
from ascendchat.engine.cache import KVCache
from ascendchat.engine.engine import Engine
from ascendchat.errors import UserError
from ascendchat.sizes.shape import Shape

SMALL = ["--device-type", "cpu", "--depth", "1", "--vocab-size", "512", "--context", "32", "--prompt-tokens", "8"]


def test_the_last_line_is_one_json_object_with_a_row_per_batch_size(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*SMALL, "--new-tokens", "8", "--batch-sizes", "1,3", "--no-compile"]
    assert run(parse(BenchDecodeConfig, flags)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["batch"] for row in found["results"]] == [1, 3]
    for row in found["results"]:
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * 1000 / row["step_ms"], rel=0.02, abs=1)
        assert row["bandwidth_share"] > 0
    assert (found["depth"], found["prompt_tokens"], found["attention"]) == (1, 8, "sdpa")


def test_bytes_of_a_step_are_weights_once_and_the_cache_of_every_row() -> None:
    shape = Shape.from_depth(12, window_pattern="L")
    one, many = read_bytes(shape, 1, 100, 2, 2), read_bytes(shape, 256, 100, 2, 2)
    cache = 2 * 12 * 2 * 768 * 100  # bytes of bf16 keys and values, 12 layers, width 768, 100 tokens
    cache += 2 * 12 * 2 * 3 * 768  # and of the last two tokens as they came out of the projection
    assert one == 2 * shape.matmul_parameters + cache
    assert many - one == 255 * cache


@pytest.mark.parametrize("flags", [["--new-tokens", "30"], ["--new-tokens", "2"], ["--vocab-size", "100"]], ids=str)
def test_impossible_sizes_are_refused_in_one_sentence(flags: list[str]) -> None:
    with pytest.raises(UserError, match="--"):
        run(parse(BenchDecodeConfig, [*SMALL, "--batch-sizes", "1", "--new-tokens", "8", *flags]))


def test_the_cache_of_one_size_is_gone_before_that_of_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[KVCache]] = []
    alive: list[int] = []

    class Watched(Engine):
        def __init__(self, *given: Any, **named: Any) -> None:
            alive.append(sum(cache() is not None for cache in made))
            super().__init__(*given, **named)
            made.append(weakref.ref(self.decoder.cache))

    monkeypatch.setattr(decode, "Engine", Watched)
    with no_garbage_collection():  # that would find it by chance
        run(parse(BenchDecodeConfig, [*SMALL, "--new-tokens", "8", "--batch-sizes", "1,2", "--no-compile"]))
    assert alive == [0, 0]
