"""Memory by part: monotone in batch and devices, near what was measured, and windows honoured by the cache."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat import cli
from ascendchat.chips import GIB, find
from ascendchat.config.commands import PlanConfig
from ascendchat.plan.goals import train_parts, train_plan
from ascendchat.plan.memory import (
    HEAD_CHUNK_BYTES,
    activations,
    allocated,
    compute_dtype,
    decode_rate,
    decoding,
    kv_bytes,
    layer_bytes,
    logits_of_chunk,
    mean_on_device,
    most_sequences,
    optimizer_state,
    policy_logits,
    training,
    usable,
)
from ascendchat.plan.shape import Shape
from ascendchat.plan.share import LITTLE, MOST_PADDING, elements, stacks, team_size

STEADY = settings(derandomize=True, deadline=None, max_examples=60)  # the same examples on every machine

CHIPS = st.sampled_from(["Ascend910B3", "Ascend910B4", "Ascend910A", "H100", "M2", "cpu"])
DEPTHS = st.integers(1, 40)
ROWS = st.integers(1, 256)
DEVICES = st.integers(1, 200)


@STEADY
@given(CHIPS, DEPTHS, ROWS, DEVICES, st.booleans())
def test_many_nodes_never_need_more_memory_each_than_one_but_for_padding(
    chip: str, depth: int, rows: int, nodes: int, checkpointing: bool
) -> None:
    few, many = 8, 8 * nodes
    shape = Shape.from_depth(depth)
    before = sum(training(shape, find(chip), few, rows, checkpointing).values())
    now = sum(training(shape, find(chip), many, rows, checkpointing).values())
    less, more = (elements(stacks(shape), team_size(stacks(shape), devices)) for devices in (few, many))
    assert now <= before + 16 * max(0, more - less)
    assert more <= max(less, MOST_PADDING * elements(stacks(shape), 1), elements(stacks(shape), 1) + LITTLE)


@STEADY
@given(CHIPS, DEPTHS, ROWS, DEVICES, st.booleans())
def test_memory_grows_with_the_batch_and_checkpointing_never_adds(
    chip: str, depth: int, rows: int, devices: int, checkpointing: bool
) -> None:
    shape = Shape.from_depth(depth)
    parts = training(shape, find(chip), devices, rows, checkpointing)
    more = training(shape, find(chip), devices, rows + 1, checkpointing)
    assert all(size >= 0 for size in parts.values())
    assert sum(more.values()) >= sum(parts.values())
    assert more["activations"] > parts["activations"]
    if depth > 1:
        with_it, without = (training(shape, find(chip), devices, rows, on) for on in (True, False))
        assert with_it["activations"] < without["activations"]
        assert sum(with_it.values()) <= sum(without.values())


@pytest.mark.parametrize(
    ("depth", "rows", "vocab", "fused_mlp", "measured"),
    [
        (6, 8, 16384, False, 3.232),
        (12, 16, 16384, False, 16.666),
        (20, 16, 32768, False, 48.206),
        (20, 16, 32768, True, 42.034),
        (20, 32, 32768, False, 80.665),
        (20, 32, 32768, True, 68.321),
    ],
)
def test_the_prediction_is_near_what_was_measured_on_an_h200(
    depth: int, rows: int, vocab: int, fused_mlp: bool, measured: float
) -> None:
    """GiB, peak of torch's counter over real optimizer steps: `ascendchat bench train`, see docs/log.md."""
    shape, chip = Shape.from_depth(depth, vocab=vocab), replace(find("H200"), fused_mlp=fused_mlp)
    assert allocated(training(shape, chip, 1, rows)) / GIB == pytest.approx(measured, rel=0.02)


def test_every_part_of_depth_12_on_one_h200() -> None:
    shape = Shape.from_depth(12)
    parts = training(shape, find("H200"), 1, 32)
    tables = 25_165_824 + 150_994_944
    assert parts["weights"] == 2 * (286_261_730 + 12 * 3 * 768)  # and a share of the previous token per channel
    assert parts["masters"] == parts["gradients"] == 2 * parts["weights"]
    matrices = 12 * 12 * 768**2
    # momentum of the matrices, two moments of tables and head, and little else
    assert parts["optimizer"] == pytest.approx(4 * matrices + 8 * (tables + 25_165_824), rel=1e-3)
    assert parts["logits"] == 2 * 2**30  # a chunk of 1 GiB and its gradient
    # 20.5 widths per layer: 5 residuals and norms, 3 queries, 4.5 keys and values, 8 hidden; 4 bytes per head
    per_token = 12 * (41 * 768 + 4 * 6) + 6 * 768 * 2
    assert parts["activations"] == 32 * 2048 * per_token


def test_logits_of_the_whole_batch_never_exist() -> None:
    shape, chip = Shape.from_depth(12), find("Ascend910B3")
    assert logits_of_chunk(shape, chip, 64) == logits_of_chunk(shape, chip, 8) == 8 * logits_of_chunk(shape, chip, 1)


def test_npu_attention_keeps_64_bytes_per_head_and_token_and_the_rotation_its_input() -> None:
    shape = Shape.from_depth(12, kv_heads=2)
    npu, gpu = layer_bytes(shape, find("Ascend910B3")), layer_bytes(shape, find("H100"))
    # Queries and keys, and before the norm again; eager code also the values under every other layer's embedding.
    more = 2 * (768 + 256) + 256 / 2
    assert npu - gpu == (64 - 4) * shape.heads + 2 * more


def test_a_chip_without_fused_attention_keeps_the_probabilities() -> None:
    shape, old = Shape.from_depth(12, window_pattern="L"), find("Ascend910A")
    fused = replace(old, fused_attention=True)
    more = activations(shape, old, 1, False) - activations(shape, fused, 1, False)
    assert more == 2048 * 12 * 6 * (2 * 2 * 2048 - 64)


@pytest.mark.parametrize(("chip", "bytes_each"), [("Ascend910B3", 4), ("Ascend910A", 0), ("H100", 0), ("cpu", 0)])
def test_the_gradient_of_fused_attention_has_its_workspace_in_the_plan(chip: str, bytes_each: int) -> None:
    """dq, dk and dv in float32, which torch_npu holds beside what its counters show."""
    shape = Shape.from_depth(12)
    parts = training(shape, find(chip), 1, 8)
    assert parts["kernel_buffers"] == 8 * 2048 * 3 * 768 * bytes_each
    assert allocated(parts) == allocated({**parts, "kernel_buffers": 0})


def test_optimizer_state_is_shared_out_by_whole_matrices() -> None:
    shape = Shape.from_depth(12)
    one, seven, eight = (optimizer_state(shape, n) for n in (1, 7, 8))
    assert one / 8 <= eight <= one / 6
    assert one / 7 <= seven <= one / 5
    assert seven >= eight


@pytest.mark.parametrize(
    ("chip", "dtype"),
    [("910B3", "bfloat16"), ("Ascend910A", "float16"), ("H100", "bfloat16"), ("M2", "float32"), ("cpu", "float32")],
)
def test_the_compute_dtype_is_one_the_chip_has(chip: str, dtype: str) -> None:
    assert compute_dtype(find(chip)) == dtype


def test_the_cache_keeps_only_the_window_of_short_layers() -> None:
    chip = find("H200")
    full, short = Shape.from_depth(12), Shape.from_depth(12, window_pattern="SSSL")
    two_tokens = 12 * 2 * 3 * 768 * 2  # bytes of their queries, keys and values, bf16
    assert kv_bytes(full, chip, 2048) == 12 * 2048 * 2 * 768 * 2 + two_tokens
    assert kv_bytes(short, chip, 2048) == (3 * 2048 + 9 * 512) * 2 * 768 * 2 + two_tokens
    assert kv_bytes(short, chip, 400) == kv_bytes(full, chip, 400)


@STEADY
@given(CHIPS, st.integers(1, 16), st.sampled_from([128, 1000, 4096]))
def test_the_most_sequences_fit_and_one_more_does_not(chip: str, depth: int, context: int) -> None:
    shape, device = Shape.from_depth(depth), find(chip)
    none = decoding(shape, device, 0, context)
    fixed = sum(none.values()) - none["activations"] - none["kv_cache"]
    most = most_sequences(shape, device, context, fixed)
    assert sum(decoding(shape, device, most, context).values()) <= usable(device)
    assert sum(decoding(shape, device, most + 1, context).values()) > usable(device)


def test_the_roofline_at_one_sequence_is_the_bandwidth_over_the_weights() -> None:
    shape, chip = Shape.from_depth(12), find("H200")
    alone = decode_rate(shape, chip, 1, 1)
    assert alone == pytest.approx(chip.bandwidth / (2 * shape.matmul_parameters), rel=0.01)
    assert alone < decode_rate(shape, chip, 64, 1) <= 64 * alone


@pytest.mark.slow
def test_bench_train_compares_what_it_measured_with_the_plan_for_its_own_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shape = ["--depth", "4", "--dim", "64", "--vocab-size", "300", "--max-seq-len", "256", "--device-batch-size", "8"]
    planned = []
    for more in ([], ["--activation-checkpointing"]):
        command = [
            "bench",
            "train",
            "--device-type",
            "cpu",
            *shape,
            "--total-batch-size",
            "2048",
            "--steps",
            "1",
            *more,
        ]
        assert cli.main(command) == 0
        planned.append(json.loads(capsys.readouterr().out.splitlines()[-1])["memory_planned_gib"])
    model = Shape.from_depth(4, dim=64, vocab=300, seq_len=256)
    expected = [allocated(training(model, find("cpu"), 1, 8, saves)) / GIB for saves in (False, True)]
    assert planned == pytest.approx(expected, abs=0.001)
    assert planned[1] < planned[0]


def test_the_mean_of_the_last_weights_lies_on_the_device_only_if_there_is_room() -> None:
    shape, chip = Shape.from_depth(12), find("NVIDIA H200")
    needed = sum(training(shape, chip, 1, 16).values())
    held = needed + 4 * shape.total_parameters
    for memory, size in ((held, held - needed), (held - 2**20, 0)):
        sized = replace(chip, memory=int(memory / 0.95) + 1)
        assert mean_on_device(shape, sized, 1, 16, False) == size
    deep = Shape.from_depth(20)
    parts = training(deep, chip, 1024, 4)
    assert mean_on_device(deep, chip, 1024, 4, False) == parts["masters"] > 4 * deep.total_parameters / 1024, "a team"
    plan = train_plan(PlanConfig(depth=12, device_batch_size=16), chip)["memory"]
    assert plan["parts"]["mean_of_weights"] == held - needed
    assert plan["total"] == held


def test_rl_counts_the_logits_that_its_head_holds() -> None:
    """Six and a half bytes for each element of a chunk of training, 4 of which that counts (a dispatch mode that adds
    up living storages, on a CPU in bf16: 6.6 at temperature 1)."""
    chip, chunk = find("H200"), HEAD_CHUNK_BYTES[2] // 2
    assert (2 * HEAD_CHUNK_BYTES[2] + policy_logits(chip)) / chunk == pytest.approx(6.6, rel=0.07)
    assert policy_logits(find("Ascend910B3")) == 0, "no head is compiled there"
    config = PlanConfig(depth=12, chip="H200", device_batch_size=16)
    plain, policy = (
        train_parts(replace(config, goal=goal), Shape.from_depth(12), chip, 1, 16) for goal in ("train", "rl")
    )
    assert policy.pop("logits") - plain.pop("logits") == policy_logits(chip) == 1.5 * GIB
    assert policy == plain
