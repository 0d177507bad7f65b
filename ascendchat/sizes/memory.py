"""Memory of one device, by part, for training and for decoding. Pure arithmetic on a Shape and a Chip; no torch.

    ascendchat plan --depth 20 --chip Ascend910B3 --devices 8

Training keeps on every device all parameters in the compute dtype and all gradients in float32; the float32 weights
and the optimizer state are sharded over the devices: gradients are reduce-scattered, the owner updates its share, the
parameters are gathered back. Everything is counted at the highest point of a step, so the parts add up to the total.
All figures are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from ascendchat.chips import GIB, KINDS, MIB, Chip
from ascendchat.sizes.shape import Shape


def bytes_text(value: float) -> str:
    """Bytes in GiB, MiB or KiB."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value:.0f} B"


FP32 = 4
HEAD_CHUNK_BYTES = {2: 2**30, 4: 2**27}  # logits that exist at once, by bytes per element: nn/loss.py
UNSEEN = ("kernel_buffers", "collective_buffers", "reserve")  # parts that the framework's counters do not show
FREE_SHARE = 0.05  # of the device's memory, left to fragmentation


def compute_dtype(chip: Chip) -> str:
    """bfloat16 where the chip has it, float16 on older accelerators, float32 on CPUs and Apple GPUs."""
    if not KINDS[chip.device_type].half:
        return "float32"
    return "bfloat16" if chip.bf16 else "float16"


def compute_bytes(chip: Chip) -> int:
    """Bytes of one element of the compute dtype."""
    return FP32 if compute_dtype(chip) == "float32" else 2


def usable(chip: Chip) -> int:
    """Bytes a plan may use of one device, its reserve and collective buffers included."""
    return int(chip.memory * (1 - FREE_SHARE))


def outside(chip: Chip) -> dict[str, int]:
    """Bytes that the framework's own counter never shows. The collective buffers are set aside on one device too: a
    plan made for one device then holds on many."""
    traits = KINDS[chip.device_type].memory
    return {"collective_buffers": traits.collectives, "reserve": chip.reserved + traits.context}


def layer_bytes(shape: Shape, chip: Chip, packaged: Collection[str] = ()) -> float:
    """Activations that one layer keeps for its backward pass, per token (mean over the layers).

    In elements: residual in, its mix with the first embedding, norm (3 dim); queries and keys after rotation and norm,
    and before where these are not fused (q + kv each); values (kv) and, on every other layer, the value embedding (kv);
    attention out (q); residual and norm before the MLP (2 dim); the hidden layer before ReLU² (mlp) and, unless the
    MLP is `packaged`, after it (mlp). Before the shift: queries, keys and values again (q + 2 kv) and, in eager
    code under a value embedding, the shifted values (kv). Plus what attention keeps of its softmax: a few bytes per
    head where the kernel is fused, else the probabilities over the window, twice.
    """
    traits, size = KINDS[chip.device_type].memory, compute_bytes(chip)
    tables = shape.kv_dim * len(shape.value_layers) / shape.depth
    elements = 5 * shape.dim + (1 + traits.rotations) * (shape.q_dim + shape.kv_dim) + tables
    elements += (1 if "mlp" in packaged else 2) * shape.mlp_dim + shape.qkv_dim + (0 if traits.compiled else tables)
    if chip.fused_attention or traits.always_fused:
        return elements * size + traits.softmax * shape.heads
    return elements * size + 2 * size * shape.heads * sum(shape.windows()) / shape.depth


def activations(shape: Shape, chip: Chip, rows: int, checkpointing: bool, packaged: Collection[str] = ()) -> int:
    """All activations of one micro-batch at the end of the forward pass.

    With checkpointing a layer keeps its input, and one layer at a time is computed again.
    """
    tokens, size = rows * shape.seq_len, compute_bytes(chip)
    # embedding and its norm, smeared first embedding, final norm in and out, gradient of the head's input
    around = 6 * shape.dim * size
    layer = layer_bytes(shape, chip, packaged)
    layers = shape.depth * layer
    if checkpointing:
        layers = shape.depth * shape.dim * size + layer
    return int(tokens * (around + layers))


def logits_of_chunk(shape: Shape, chip: Chip, rows: int) -> int:
    """Logits of one chunk and their gradient in the compute dtype. Never those of the whole batch (nn/loss.py)."""
    size = compute_bytes(chip)
    chunk = HEAD_CHUNK_BYTES[size] // (size * shape.padded_vocab)
    eager = 0 if KINDS[chip.device_type].memory.compiled else 3 * FP32  # without a compiler the steps between exist too
    return min(rows * shape.seq_len, chunk) * shape.padded_vocab * (2 * size + eager)


def policy_logits(chip: Chip) -> int:
    """Bytes that the logits of `rl` need beyond those of a chunk of training, where that is compiled and rl's is not:
    three float32 tensors, of half as many rows, and their gradient in the compute dtype (nn/logprobs.py)."""
    size = compute_bytes(chip)
    if not KINDS[chip.device_type].memory.compiled:
        return 0
    return max(0, HEAD_CHUNK_BYTES[size] // FP32 * (3 * FP32 + size) - 2 * HEAD_CHUNK_BYTES[size])


def backward_work(shape: Shape, chip: Chip, rows: int) -> int:
    """Gradients in flight inside the widest block, the MLP: both sides of ReLU² and the residual."""
    return rows * shape.seq_len * (2 * shape.mlp_dim + shape.dim) * compute_bytes(chip)


def kernel_buffers(chip: Chip, tokens: int, width: int) -> int:
    """Bytes that the largest operator needs beside its arguments, on NPUs: fused attention's gradient holds dq, dk and
    dv in float32. `width`: elements of the queries, keys and values of a token. torch_npu keeps the block, and its
    counters do not show it."""
    fused = KINDS[chip.device_type].memory.gradient_buffers and chip.fused_attention and compute_bytes(chip) != FP32
    return tokens * width * FP32 if fused else 0


def optimizer_state(shape: Shape, devices: int) -> int:
    """Share of one device. Muon: fp32 momentum and one second moment per row of every matrix, shared out whole matrices
    at a time among the devices of a team (memory.py). AdamW: two fp32 moments of all else, shared out evenly."""
    matrices = stacks(shape)
    team = team_size(matrices, devices)
    muon = sum(-(-count // team) * (rows * cols + rows) for (rows, cols), count in matrices.items())
    rest = shape.total_parameters - elements(matrices, 1)
    return FP32 * muon + 2 * FP32 * -(-rest // devices)


def step_work(shape: Shape, chip: Chip, devices: int) -> int:
    """Buffers of the optimizer step, when no activation is alive: the largest stack of gradients (fp32), and for the
    own share of it the fp32 update and three compute-dtype matrices of the orthogonalisation."""
    size, team = compute_bytes(chip), team_size(stacks(shape), devices)
    work = [
        count * r * c * FP32 + -(-count // team) * r * c * (FP32 + 3 * size)
        for (r, c), count in shape.matrices().items()
    ]
    table = -(-shape.padded_vocab // devices) * max(shape.dim, shape.kv_dim) * 3 * FP32  # gradient and two AdamW terms
    return max(*work, table)


def shared_out(shape: Shape, devices: int) -> tuple[int, int]:
    """(parameters with the padding of their exchange, those of them that one device updates): memory.py."""
    matrices = stacks(shape)
    team = team_size(matrices, devices)
    rest, padded = shape.total_parameters - elements(matrices, 1), elements(matrices, team)
    return rest + padded, -(-rest // devices) + padded // team


def training(
    shape: Shape, chip: Chip, devices: int, rows: int, checkpointing: bool = False, packaged: Collection[str] = ()
) -> dict[str, int]:
    """Bytes by part on one device at the peak of a step with `rows` rows per micro-batch (nn/optim.py).

    Parameters in the compute dtype and their float32 gradients are whole on every device; the float32 weights and the
    moments are shared out, and so is the reduced gradient when there are several devices. `packaged`: the parts of a
    layer that optional packages compute (train/model.py); "mlp" keeps its hidden layer once.
    """
    size, (total, own) = compute_bytes(chip), shared_out(shape, devices)
    acts, head = activations(shape, chip, rows, checkpointing, packaged), logits_of_chunk(shape, chip, rows)
    # The parts above peak in the head loss; another moment may be higher by this much.
    work = max(0, backward_work(shape, chip, rows) - head, step_work(shape, chip, devices) - (acts + head))
    return {
        "weights": total * size,
        "masters": 0 if size == FP32 else own * FP32,
        "gradients": total * FP32 + (own * FP32 if devices > 1 else 0),
        "optimizer": optimizer_state(shape, devices),
        "activations": acts,
        "logits": head,
        "workspace": work,
        "kernel_buffers": kernel_buffers(chip, rows * shape.seq_len, shape.qkv_dim),
        **outside(chip),
    }


def allocated(parts: dict[str, int]) -> int:
    """The part of a total that the framework's peak counter measures."""
    return sum(size for part, size in parts.items() if part not in UNSEEN)


class _DecoderSizes(Protocol):
    """Sizes of a model that decoding depends on: our own Shape, or one read from a Hugging Face config.json."""

    @property
    def dim(self) -> int: ...
    @property
    def mlp_dim(self) -> int: ...
    @property
    def padded_vocab(self) -> int: ...
    @property
    def total_parameters(self) -> int: ...
    def kv_elements(self, context: int) -> int: ...
    def slot_elements(self, context: int) -> int: ...
    def read_parameters(self, sequences: int) -> int: ...
    def decode_flops_per_token(self, context: int) -> int: ...


def kv_bytes(shape: _DecoderSizes, chip: Chip, context: int) -> int:
    """Key-value cache of one sequence of `context` tokens; layers with a window keep only the window."""
    return shape.kv_elements(context) * compute_bytes(chip)


def slot_bytes(shape: _DecoderSizes, chip: Chip, context: int) -> int:
    """The cache of one sequence and the states by which other prompts can go on behind its tokens (prefix cache)."""
    return shape.slot_elements(context) * compute_bytes(chip)


def caches(shape: _DecoderSizes, chip: Chip, sequences: int, context: int) -> dict[str, int]:
    """Bytes that `sequences` sequences of `context` tokens need while they are generated, beside the weights."""
    return {
        "kv_cache": (sequences + 1) * slot_bytes(shape, chip, context),  # one slot is where idle rows write
        "activations": sequences * decode_row(shape, chip) + prefill_work(shape, chip, context),
    }


def decoding(shape: _DecoderSizes, chip: Chip, sequences: int, context: int) -> dict[str, int]:
    """Bytes by part of a device that only generates: weights in the compute dtype, caches, one step's activations."""
    weights = shape.total_parameters * compute_bytes(chip)
    return {"weights": weights, **caches(shape, chip, sequences, context), **outside(chip)}


def max_sequences_beside(shape: _DecoderSizes, chip: Chip, context: int, taken: int) -> int:
    """Sequences of `context` tokens that fit beside `taken` bytes."""
    slot = slot_bytes(shape, chip, context)
    left = usable(chip) - taken - prefill_work(shape, chip, context) - slot
    return max(0, left // (slot + decode_row(shape, chip)))


def decode_rate(shape: _DecoderSizes, chip: Chip, sequences: int, context: int) -> float:
    """Upper bound of tokens per second: every step reads the weights once and every cache once, and multiplies."""
    read = shape.read_parameters(sequences) * compute_bytes(chip) + sequences * kv_bytes(shape, chip, context)
    return sequences / max(read / chip.bandwidth, sequences * shape.decode_flops_per_token(context) / chip.flops)


def decode_row(shape: _DecoderSizes, chip: Chip) -> int:
    """Working set of one sequence in a decoding step: logits (also in fp32) and the widest layer."""
    size = compute_bytes(chip)
    return shape.padded_vocab * (size + FP32) + 2 * (shape.mlp_dim + 4 * shape.dim) * size


def prefill_work(shape: _DecoderSizes, chip: Chip, context: int) -> int:
    """Working set of reading one prompt of `context` tokens: the widest layer, nothing kept for a backward pass."""
    return context * 2 * (shape.mlp_dim + 4 * shape.dim) * compute_bytes(chip)


# How the optimizer shares matrices out over devices: whole, among teams. nn/optim.py does it, memory.py counts it.
#
# A reduce-scatter gives every device an equal share, so a stack of matrices is padded to a multiple of the devices: 52
# matrices on 1,024 devices would be exchanged, and kept, as 1,024. So where padding costs too much, neighbours form
# teams that are small enough; each team has all matrices, and the teams add up their gradients. No torch here.

Stacks = Mapping[tuple[int, int], int]  # (rows, columns) -> how many matrices
MAX_PADDING = 1.25  # times the matrices is what a team may exchange,
MAX_EXTRA = 2**23  # or so many elements more: less than one more exchange is worth.
NODE = 8  # devices always share, whatever the padding: they have less to keep than each would have alone


def stacks(shape: Shape) -> dict[tuple[int, int], int]:
    """The matrices that Muon updates, by shape, as nn/optim.py groups them."""
    counts: dict[tuple[int, int], int] = {}
    heads = shape.q_dim // shape.kv_dim + 2
    for size, count in (
        ((shape.kv_dim, shape.dim), heads),
        ((shape.dim, shape.q_dim), 1),
        ((shape.mlp_dim, shape.dim), 2),
    ):
        counts[size] = counts.get(size, 0) + count * shape.depth
    return counts


def elements(matrices: Stacks, team: int) -> int:
    """Count the elements of all matrices, padded so that every device of a team has equally many."""
    return sum(-(-count // team) * team * rows * cols for (rows, cols), count in matrices.items())


def team_size(matrices: Stacks, devices: int) -> int:
    """Devices that share the matrices out: the largest divisor of all that pads little, if it is not too small."""
    whole = elements(matrices, 1)
    max_elements = max(MAX_PADDING * whole, whole + MAX_EXTRA)
    divisors = [team for team in range(devices, 0, -1) if devices % team == 0]
    large_enough = [team for team in divisors if team >= min(devices, NODE)]
    return next((team for team in large_enough if elements(matrices, team) <= max_elements), large_enough[-1])


def exchanged_elements(shape: Shape, devices: int) -> tuple[int, int, int]:
    """(reduce-scattered, gathered, all-reduced among teams) by a device in a step. With one device: as if there were
    more, without padding."""
    matrices = stacks(shape)
    rest = shape.total_parameters - elements(matrices, 1)
    team = team_size(matrices, devices)
    padded = elements(matrices, team)
    return rest + padded, rest + padded, padded // team if team < devices else 0
