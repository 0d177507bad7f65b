"""The depth dial: sizes, parameters and FLOPs of the published table, and shapes that survive a file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ascendchat.config.commands import PlanConfig
from ascendchat.config.generate import BenchDecodeConfig
from ascendchat.config.train import BaseConfig, BenchTrainConfig
from ascendchat.errors import UserError
from ascendchat.sizes.batch import batch_for, default_token_budget
from ascendchat.sizes.shape import Formulas, Shape

# depth: total, value embeddings, scaling parameters, FLOPs per token, tokens at 12, log2(batch), steps, training FLOPs
TABLE = {
    4: ("36.7M", "16.8M", "11.5M", "8.0e+07", "0.14B", 17, 1056, "1.1e+16"),
    12: ("286.3M", "151.0M", "110.1M", "7.6e+08", "1.32B", 19, 2520, "1.0e+18"),
    20: ("896.5M", "419.4M", "435.2M", "2.9e+09", "5.22B", 20, 4980, "1.5e+19"),
    32: ("2818.6M", "1073.7M", "1677.7M", "1.1e+10", "20.13B", 21, 9600, "2.2e+20"),
}


@pytest.mark.parametrize("depth", TABLE)
def test_the_dial_reproduces_the_published_sizes(depth: int) -> None:
    shape = Shape.from_depth(depth, window_pattern="SSSL")  # as published
    assert (shape.dim, shape.heads * 128, shape.kv_heads * 128, shape.mlp_dim) == (64 * depth,) * 3 + (256 * depth,)
    tokens = default_token_budget(shape, 12)
    batch = batch_for(tokens, shape.seq_len)
    published = shape.total_parameters - shape.parameters()["shifts"]  # the published model does not mix tokens so
    assert TABLE[depth] == (
        f"{published / 1e6:.1f}M",
        f"{shape.parameters()['value_embeddings'] / 1e6:.1f}M",
        f"{shape.scaling_parameters / 1e6:.1f}M",
        f"{shape.train_flops_per_token:.1e}",
        f"{tokens / 1e9:.2f}B",
        batch.bit_length() - 1,
        tokens // batch,
        f"{tokens * shape.train_flops_per_token:.1e}",
    )


def test_every_command_and_the_dial_itself_have_full_attention_by_default() -> None:
    configs = (PlanConfig, BaseConfig, BenchTrainConfig, BenchDecodeConfig)
    assert {Shape.from_depth(4).window_pattern, *(cls.window_pattern for cls in configs)} == {"L"}


@pytest.mark.parametrize(("depth", "pattern", "flops"), [(12, "L", 8.871e8), (12, "SSSL", 7.597e8), (20, "L", 3.240e9)])
def test_flops_per_token_equal_the_measured_programs_count(depth: int, pattern: str, flops: float) -> None:
    assert Shape.from_depth(depth, window_pattern=pattern).train_flops_per_token == pytest.approx(flops, rel=2e-4)


def test_the_last_layer_sees_the_whole_row_and_has_a_value_embedding() -> None:
    for depth in (1, 2, 3, 5, 12, 13):
        shape = Shape.from_depth(depth, window_pattern="S")
        assert shape.windows()[-1] == shape.seq_len
        assert shape.value_layers[-1] == depth - 1
        assert len(shape.value_layers) == (depth + 1) // 2
    shape = Shape.from_depth(5, window_pattern="SSSL")
    assert shape.windows() == (512, 512, 512, 2048, 2048)
    assert shape.windows(300) == (300,) * 5


def test_short_windows_are_whole_kernel_blocks_and_fit_the_row() -> None:
    assert [Formulas().short_window(n) for n in (2048, 1024, 600, 256, 64)] == [512, 256, 256, 128, 64]


def test_tiny_widths_take_smaller_heads() -> None:
    assert Shape.from_depth(1, dim=32).head_dim == 32
    shape = Shape.from_depth(2, dim=64, head_dim=16, kv_heads=2, vocab=1000)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.padded_vocab) == (4, 2, 16, 1024)


def test_grouped_query_attention_shrinks_keys_values_and_value_embeddings() -> None:
    full, grouped = Shape.from_depth(12), Shape.from_depth(12, kv_heads=2)
    two_tokens = [12 * 2 * shape.qkv_dim for shape in (full, grouped)]  # beside the keys and values, queries included
    assert two_tokens == [12 * 2 * 3 * 768, 12 * 2 * (768 + 2 * 256)]
    assert (grouped.kv_elements(2048) - two_tokens[1]) * 3 == full.kv_elements(2048) - two_tokens[0]
    assert grouped.parameters()["value_embeddings"] * 3 == full.parameters()["value_embeddings"]
    assert full.parameters()["attention"] - grouped.parameters()["attention"] == 12 * 2 * 768 * (768 - 256)


@pytest.mark.parametrize("shape", [Shape.from_depth(12), Shape.from_depth(7, kv_heads=1, dim=384)])
def test_the_stacks_of_matrices_are_all_transformer_weights(shape: Shape) -> None:
    part = shape.parameters()
    counted = sum(rows * columns * count for (rows, columns), count in shape.matrices().items())
    assert counted == part["attention"] + part["mlp"] + part["value_gates"]


def test_a_shape_survives_json_and_rejects_other_fields() -> None:
    shape = Shape.from_depth(6, vocab=4097, seq_len=512, window_pattern="sl")
    values = json.loads(json.dumps(shape.to_dict()))
    assert Shape.from_dict(values) == shape
    with pytest.raises(UserError, match="unknown size rope"):
        Shape.from_dict(values | {"rope": 1})
    del values["dim"]
    with pytest.raises(UserError, match="missing size dim"):
        Shape.from_dict(values)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"depth": 0}, "--depth must be at least 1"),
        ({"depth": 4, "dim": 100}, "does not divide into heads"),
        ({"depth": 4, "kv_heads": 3}, "choose a divisor"),
        ({"depth": 4, "window_pattern": "SXL"}, "made of S and L"),
    ],
)
def test_impossible_sizes_are_refused_with_a_reason(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        Shape.from_depth(**wrong)  # type: ignore[arg-type]


def test_the_rules_are_imported_without_the_plan_command() -> None:
    rules = [f"ascendchat.sizes.{name}" for name in ("shape", "schedule", "batch", "memory")]
    program = f"import sys, {', '.join(rules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert set(rules) < set(loaded)
    command = {"ascendchat.sizes.hf", *(f"ascendchat.plan.{name}" for name in ("command", "goals", "show"))}
    assert not {*command, "ascendchat.config.commands", "yaml"} & set(loaded)
