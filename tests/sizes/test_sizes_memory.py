"""Memory by part: small models counted by hand, and near what was measured on devices."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat import cli
from ascendchat.chips import GIB, Chip, find
from ascendchat.config.commands import PlanConfig
from ascendchat.plan.goals import train_parts
from ascendchat.sizes.memory import (
    HEAD_CHUNK_BYTES,
    MAX_EXTRA,
    MAX_PADDING,
    MIB,
    activations,
    allocated,
    backward_work,
    compute_dtype,
    decode_rate,
    decoding,
    elements,
    exchanged_elements,
    kv_bytes,
    logits_of_chunk,
    max_sequences_beside,
    policy_logits,
    stacks,
    step_work,
    team_size,
    training,
    usable,
)
from ascendchat.sizes.shape import Shape

STEADY = settings(derandomize=True, deadline=None, max_examples=30)  # the same examples on every machine
CHIPS = st.sampled_from(["Ascend910B3", "Ascend910A", "H100", "cpu"])
# Three layers of 4 heads, 2 for keys and values, 16 wide; windows of 128, 128 and 512 tokens. Two layers have a value
# embedding. 332,240 parameters, 135,168 of them in the matrices of Muon: 12 of 32 x 64, 3 of 64 x 64, 6 of 256 x 64.
SMALL = Shape.from_depth(3, dim=64, head_dim=16, kv_heads=2, vocab=1000, seq_len=512, window_pattern="SSL")


@STEADY
@given(CHIPS, st.integers(1, 40), st.integers(1, 256), st.integers(1, 200), st.booleans())
def test_many_nodes_never_need_more_memory_each_than_one_but_for_padding(
    chip: str, depth: int, rows: int, nodes: int, checkpointing: bool
) -> None:
    few, many = 8, 8 * nodes
    shape = Shape.from_depth(depth)
    before = sum(training(shape, find(chip), few, rows, checkpointing).values())
    now = sum(training(shape, find(chip), many, rows, checkpointing).values())
    less, more = (elements(stacks(shape), team_size(stacks(shape), devices)) for devices in (few, many))
    assert now <= before + 16 * max(0, more - less)
    assert more <= max(less, MAX_PADDING * elements(stacks(shape), 1), elements(stacks(shape), 1) + MAX_EXTRA)


@STEADY
@given(CHIPS, st.integers(2, 40), st.integers(1, 256), st.integers(1, 200))
def test_memory_grows_with_the_batch_and_checkpointing_never_adds(
    chip: str, depth: int, rows: int, devices: int
) -> None:
    shape = Shape.from_depth(depth)
    parts, more, saving = (
        training(shape, find(chip), devices, number, saves)
        for number, saves in ((rows, False), (rows + 1, False), (rows, True))
    )
    assert all(size >= 0 for size in (*parts.values(), *saving.values()))
    assert sum(more.values()) >= sum(parts.values()) >= sum(saving.values())
    assert more["activations"] > parts["activations"] > saving["activations"]


@pytest.mark.parametrize(
    ("depth", "rows", "vocab", "packaged", "measured"),
    [(6, 8, 16384, (), 3.232), (12, 16, 16384, (), 16.666), (20, 32, 32768, ("mlp",), 68.321)],
)
def test_the_prediction_is_near_what_was_measured_on_an_h200(
    depth: int, rows: int, vocab: int, packaged: tuple[str, ...], measured: float
) -> None:
    """GiB, peak of torch's counter over real optimizer steps: `ascendchat bench train`, see docs/log.md."""
    shape, chip = Shape.from_depth(depth, vocab=vocab), find("H200")
    assert allocated(training(shape, chip, 1, rows, packaged=packaged)) / GIB == pytest.approx(measured, rel=0.02)


def test_every_part_of_a_small_model_on_one_h200() -> None:
    parts = training(SMALL, find("H200"), 1, 2)
    matrices, rest = 12 * (32 * 64 + 32) + 3 * (64 * 64 + 64) + 6 * (256 * 64 + 256), 332_240 - 135_168
    assert parts == {
        "weights": 2 * 332_240,
        "masters": 4 * 332_240,
        "gradients": 4 * 332_240,
        "optimizer": 4 * matrices + 8 * rest,  # momentum and a moment per row; two moments
        "activations": 1024 * 7856,  # tokens; bytes of each: see below
        "logits": 1024 * 1024 * 4,  # and their gradient
        "workspace": 0,
        "kernel_buffers": 0,
        "collective_buffers": 400 * MIB,
        "reserve": find("H200").reserved + GIB,
    }
    assert allocated(parts) == sum(parts.values()) - parts["collective_buffers"] - parts["reserve"]


def test_five_npus_share_out_weights_and_moments_rounded_up() -> None:
    """Of 12, 3 and 6 matrices each keeps 3, 1 and 2: they exchange 15, 5 and 10."""
    parts = training(SMALL, find("Ascend910B3"), 5, 2)
    total, own = 197_072 + 215_040, 39_415 + 215_040 // 5
    assert (parts["weights"], parts["masters"]) == (2 * total, 4 * own)
    assert parts["gradients"] == 4 * total + 4 * own, "the reduced gradient is one more"
    assert parts["optimizer"] == 4 * (3 * (2048 + 32) + (4096 + 64) + 2 * (16384 + 256)) + 8 * 39_415
    assert parts["kernel_buffers"] == 1024 * 128 * 4, "dq, dk and dv in float32, which no counter shows"
    assert allocated(parts) == allocated({**parts, "kernel_buffers": 0})
    assert parts["reserve"] == find("Ascend910B3").reserved + 512 * MIB
    assert exchanged_elements(SMALL, 5) == (total, total, 0)


H200, NPU, OLD, CPU = (find(name) for name in ("H200", "Ascend910B3", "Ascend910A", "cpu"))


@pytest.mark.parametrize(
    ("chip", "layers", "outside", "checkpointed"),
    [
        # of three layers: 5 residuals and norms; queries and keys as often as they are copied; the hidden layer, twice;
        # queries, keys and values; and 2 value embeddings, in eager code also shifted. Then a few bytes per head.
        (H200, 2 * (3 * (5 * 64 + 2 * 96 + 2 * 256 + 128) + 2 * 32) + 3 * 4 * 4, 6 * 64 * 2, 3 * 64 * 2),
        (NPU, 2 * (3 * (5 * 64 + 4 * 96 + 2 * 256 + 128) + 4 * 32) + 3 * 4 * 64, 6 * 64 * 2, 3 * 64 * 2),
        (CPU, 4 * (3 * (5 * 64 + 3 * 96 + 2 * 256 + 128) + 4 * 32) + 3 * 4 * 4, 6 * 64 * 4, 3 * 64 * 4),
        # without fused attention the probabilities over the windows, twice
        (OLD, 2 * (3 * (5 * 64 + 4 * 96 + 2 * 256 + 128) + 4 * 32) + 4 * 4 * (128 + 128 + 512), 768, 384),
    ],
    ids=["cuda", "npu", "cpu", "npu of 2019"],
)
def test_activations_of_a_token_counted_by_hand(chip: Chip, layers: int, outside: int, checkpointed: int) -> None:
    assert activations(SMALL, chip, 2, False) == 1024 * (layers + outside)
    assert activations(SMALL, chip, 2, True) == int(1024 * (outside + checkpointed + layers / 3))


def test_an_mlp_of_a_package_keeps_its_hidden_layer_once() -> None:
    saved = activations(SMALL, H200, 2, False) - activations(SMALL, H200, 2, False, ["mlp"])
    assert saved == 1024 * 2 * 3 * 256  # tokens, bytes, layers, width


def test_logits_of_the_whole_batch_never_exist() -> None:
    """A chunk is 2**30 bytes in 16 bits, 2**27 in 32: 512 Ki and 32 Ki tokens of this vocabulary."""
    assert logits_of_chunk(SMALL, H200, 1) == 512 * 1024 * 4
    assert logits_of_chunk(SMALL, H200, 2000) == 2**19 * 1024 * 4
    assert logits_of_chunk(SMALL, NPU, 2000) == 2**19 * 1024 * (4 + 12), "three float32 steps between, in eager code"
    assert logits_of_chunk(SMALL, CPU, 100) == 2**15 * 1024 * (8 + 12)


def test_another_moment_of_a_step_may_need_more_than_the_head_loss() -> None:
    assert backward_work(SMALL, H200, 2) == 1024 * (2 * 256 + 64) * 2
    assert step_work(SMALL, H200, 1) == 1024 * 64 * 12, "the largest table: gradient and two terms of AdamW"
    assert step_work(SMALL, H200, 5) == 3 * 256 * 64 * 4 + 256 * 64 * (4 + 3 * 2), "the stack of the MLP, own share"
    assert step_work(SMALL, CPU, 5) == 3 * 256 * 64 * 4 + 256 * 64 * (4 + 3 * 4)
    wide = Shape.from_depth(2, dim=64, mlp_dim=4096, vocab=64, seq_len=64)
    assert training(wide, H200, 1, 4096)["workspace"] == 2**18 * ((2 * 4096 + 64) * 2 - 64 * 4), "backward"
    step = step_work(wide, H200, 1)
    head_loss = activations(wide, H200, 1, False) + logits_of_chunk(wide, H200, 1)
    assert training(wide, H200, 1, 1)["workspace"] == step - head_loss > 0, "the optimizer"


@pytest.mark.parametrize(("chip", "bytes_each"), [("Ascend910B3", 4), ("Ascend910A", 0), ("H100", 0), ("cpu", 0)])
def test_the_gradient_of_fused_attention_has_its_workspace_on_npus(chip: str, bytes_each: int) -> None:
    assert training(Shape.from_depth(12), find(chip), 1, 8)["kernel_buffers"] == 8 * 2048 * 3 * 768 * bytes_each


@pytest.mark.parametrize(
    ("size", "matrices", "devices", "team"),
    [
        ((1000, 1000), 52, 1024, 64),  # 64 are 1.23 times 52
        ((4096, 2048), 8, 40, 10),  # 1.25 times just
        ((2**20, 1), 1, 72, 9),  # eight more, which is MAX_EXTRA just
        ((4096, 2048), 9, 24, 8),  # 12 would be a third more
        ((4096, 4096), 3, 16, 8),  # too much padding in any case: the devices of a node
        ((4096, 4096), 3, 4, 4),
        ((4096, 4096), 3, 12, 12),
        ((4096, 4096), 3, 1, 1),
    ],
)
def test_matrices_are_shared_among_as_many_as_pad_little(
    size: tuple[int, int], matrices: int, devices: int, team: int
) -> None:
    assert team_size({size: matrices}, devices) == team


def test_teams_exchange_padded_matrices_and_add_up_between_them() -> None:
    """Depth 12: 48 matrices of 768 x 768 and 24 of 3072 x 768, in 64 teams of 16 on 1,024 devices."""
    shape = Shape.from_depth(12)
    padded = 48 * 768 * 768 + 32 * 3072 * 768
    given = shape.total_parameters - 12 * 12 * 768**2 + padded
    assert exchanged_elements(shape, 1024) == (given, given, padded // 16)
    assert exchanged_elements(shape, 1) == (shape.total_parameters, shape.total_parameters, 0)


@pytest.mark.parametrize(
    ("chip", "dtype"),
    [("910B3", "bfloat16"), ("Ascend910A", "float16"), ("H100", "bfloat16"), ("M2", "float32"), ("cpu", "float32")],
)
def test_the_compute_dtype_is_one_the_chip_has(chip: str, dtype: str) -> None:
    assert compute_dtype(find(chip)) == dtype


def test_the_cache_keeps_only_the_window_of_short_layers() -> None:
    full, short = Shape.from_depth(12), Shape.from_depth(12, window_pattern="SSSL")
    two_tokens = 12 * 2 * 3 * 768 * 2  # bytes of their queries, keys and values, bf16
    assert kv_bytes(full, H200, 2048) == 12 * 2048 * 2 * 768 * 2 + two_tokens
    assert kv_bytes(short, H200, 2048) == (3 * 2048 + 9 * 512) * 2 * 768 * 2 + two_tokens
    assert kv_bytes(short, H200, 400) == kv_bytes(full, H200, 400)


def test_every_part_of_three_sequences_that_are_generated() -> None:
    parts = decoding(SMALL, H200, 3, 256)
    windows, layers = 128 + 128 + 256, 3
    slot = 2 * 32 * windows + layers * 2 * 128 + layers * (1 + 256 // 64) * 128  # cache, two tokens, where others go on
    row = 1024 * (2 + 4) + 2 * (256 + 4 * 64) * 2
    assert parts["weights"] == 2 * 332_240
    assert parts["kv_cache"] == 4 * slot * 2, "one more than sequences: where idle rows write"
    assert parts["activations"] == 3 * row + 256 * 2 * (256 + 4 * 64) * 2, "of three steps and one prompt"
    assert (parts["collective_buffers"], parts["reserve"]) == (400 * MIB, H200.reserved + GIB)


@STEADY
@given(CHIPS, st.integers(1, 16), st.sampled_from([128, 1000, 4096]))
def test_the_most_sequences_fit_and_one_more_does_not(chip: str, depth: int, context: int) -> None:
    shape, device = Shape.from_depth(depth), find(chip)
    none = decoding(shape, device, 0, context)
    fixed = sum(none.values()) - none["activations"] - none["kv_cache"]
    most = max_sequences_beside(shape, device, context, fixed)
    assert sum(decoding(shape, device, most, context).values()) <= usable(device)
    assert sum(decoding(shape, device, most + 1, context).values()) > usable(device)
    assert max_sequences_beside(shape, device, context, usable(device)) == 0


def test_generation_is_bounded_by_reading_weights_and_caches_or_by_multiplying() -> None:
    read = 2 * SMALL.matmul_parameters + kv_bytes(SMALL, H200, 256)
    assert decode_rate(SMALL, H200, 1, 256) == pytest.approx(H200.bandwidth / read)
    assert decode_rate(SMALL, H200, 1, 256) < decode_rate(SMALL, H200, 64, 256) <= 64 * H200.bandwidth / read
    slow = replace(H200, flops=1e9)
    assert decode_rate(SMALL, slow, 64, 256) == pytest.approx(1e9 / SMALL.decode_flops_per_token(256))


@pytest.mark.slow
def test_bench_train_compares_what_it_measured_with_the_plan_for_its_own_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "--depth 2 --dim 32 --vocab-size 300 --max-seq-len 64 --device-batch-size 8 --total-batch-size 512"
    flags = [*sizes.split(), "--steps", "1", "--device-type", "cpu", "--activation-checkpointing"]
    assert cli.main(["bench", "train", *flags]) == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])["memory_planned_gib"]
    model = Shape.from_depth(2, dim=32, vocab=300, seq_len=64)
    saving, keeping = (allocated(training(model, CPU, 1, 8, saves)) / GIB for saves in (True, False))
    assert planned == pytest.approx(saving, abs=0.0005)
    assert keeping - saving > 0.001


def test_rl_counts_the_logits_that_its_head_holds() -> None:
    """Six and a half bytes for each element of a chunk of training, 4 of which that counts (a dispatch mode that adds
    up living storages, on a CPU in bf16: 6.6 at temperature 1)."""
    chunk = HEAD_CHUNK_BYTES[2] // 2
    assert (2 * HEAD_CHUNK_BYTES[2] + policy_logits(H200)) / chunk == pytest.approx(6.6, rel=0.07)
    assert policy_logits(NPU) == 0, "no head is compiled there"
    config = PlanConfig(depth=12, chip="H200", device_batch_size=16)
    plain, policy = (
        train_parts(replace(config, goal=goal), Shape.from_depth(12), H200, 1, 16) for goal in ("train", "rl")
    )
    assert policy.pop("logits") - plain.pop("logits") == policy_logits(H200) == 1.5 * GIB
    assert policy == plain
