"""The depth dial: one number -> every dimension of the model, its parameters by part and its FLOPs per token.

    Shape.from_depth(20).parameters()        # what `ascendchat plan --depth 20` prints

`Shape` is the model's configuration: nn/gpt.py builds from it and a checkpoint stores `to_dict()`. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from ascendchat.errors import UserError

HEAD_DIM = 128
VOCAB_MULTIPLE = 64  # matrix units like round sizes, and the rows then divide among 2, 4, ... 64 devices
WINDOW_MULTIPLE = 128  # block of the attention kernels
PREFIX_BLOCK = 64  # a prompt can go on behind every so many cached tokens (engine/prefix.py)
SMEAR_GATE_CHANNELS = 24  # channels that gate how much of the previous token's embedding is mixed in


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least `value`."""
    return -(-value // multiple) * multiple


class Formulas(NamedTuple):
    """Constants of the model's formulas. Ours are the defaults; those of nanochat's checkpoints changed with time."""

    rope_base: float = 100_000.0
    qk_gain: float = 1.2  # on queries and on keys: of unit RMS they would attend too softly
    gate_channels: int = 12  # channels of the residual stream that gate the value embedding of each key-value head
    gate_range: float = 3.0  # of that gate
    short_share: int = 4  # an S layer sees one part in so many of the row
    short_multiple: int = WINDOW_MULTIPLE  # in whole blocks of so many tokens
    short_more: int = 0  # and so many tokens besides

    def short_window(self, seq_len: int) -> int:
        """Tokens seen by an S layer, the own one included, never more than the row."""
        return min(round_up(-(-seq_len // self.short_share), self.short_multiple) + self.short_more, seq_len)


# The dates are those from which nanochat computed so; it does not count the own token of a window.
FORMULAS = {
    "": Formulas(),
    "nanochat-2025-10": Formulas(rope_base=10_000.0, qk_gain=1.0),  # no value embeddings
    "nanochat-2026-01": Formulas(10_000.0, 1.0, 32, 2.0, short_share=2, short_multiple=1, short_more=1),
    "nanochat-2026-03-09": Formulas(qk_gain=1.15, short_share=3, short_more=1),
    "nanochat-2026-03-14": Formulas(short_more=1),
}


@dataclass(frozen=True)
class Shape:
    """All sizes of one model. Build it with `from_depth`; the constructor takes finished numbers and checks them."""

    depth: int  # layers
    dim: int  # width of the residual stream
    heads: int  # query heads
    kv_heads: int  # key-value heads; fewer than `heads` is grouped-query attention
    head_dim: int
    mlp_dim: int  # width of the ReLU² MLP
    vocab: int  # tokens that exist
    padded_vocab: int  # rows of the tables and of the head
    seq_len: int  # tokens per training row
    window_pattern: str  # S and L, repeated over the layers; the last layer is always L
    value_layers: tuple[int, ...]  # layers that have a value embedding
    formulas: str = ""  # name in FORMULAS; of an imported model

    def __post_init__(self) -> None:
        sizes = ("depth", "dim", "heads", "kv_heads", "head_dim", "mlp_dim", "vocab", "seq_len")
        small = [name for name in sizes if getattr(self, name) < 1]
        if small:
            raise UserError(f"{small[0]} must be at least 1, found {getattr(self, small[0])}")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads; choose a divisor")
        if self.head_dim % 2:
            raise UserError(f"head_dim {self.head_dim} must be even: rotary embedding turns pairs of channels")
        if self.padded_vocab < self.vocab:
            raise UserError(f"padded_vocab {self.padded_vocab} is smaller than vocab {self.vocab}")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(f"window pattern {self.window_pattern!r} must be made of S and L, for example SSSL")
        if any(not 0 <= layer < self.depth for layer in self.value_layers):
            raise UserError(f"value_layers {self.value_layers} must name layers 0 to {self.depth - 1}")
        if self.formulas not in FORMULAS:
            raise UserError(f"model shape: unknown formulas {self.formulas!r}; the file was written by another version")

    @classmethod
    def from_depth(
        cls,
        depth: int,
        *,
        vocab: int = 32768,
        seq_len: int = 2048,
        dim: int | None = None,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        mlp_dim: int | None = None,
        window_pattern: str = "L",
        value_embeddings: bool = True,
    ) -> Shape:
        """Turn the dial. Width is 64 per layer in whole heads of 128; everything can be overridden.

        A tiny `dim` that no head of 128 fits takes the largest of 64, 32, 16, 8 that divides it.
        """
        if depth < 1:
            raise UserError(f"--depth must be at least 1, found {depth}")
        dim = dim or round_up(64 * depth, HEAD_DIM)
        head_dim = head_dim or next((size for size in (HEAD_DIM, 64, 32, 16, 8) if dim % size == 0), 0)
        if not head_dim or dim % head_dim:
            raise UserError(f"width {dim} does not divide into heads; choose a multiple of {head_dim or 8}")
        heads = dim // head_dim
        parity = (depth - 1) % 2  # every other layer, so that the last one always has its own
        return cls(
            depth=depth,
            dim=dim,
            heads=heads,
            kv_heads=kv_heads or heads,
            head_dim=head_dim,
            mlp_dim=mlp_dim or 4 * dim,
            vocab=vocab,
            padded_vocab=round_up(vocab, VOCAB_MULTIPLE),
            seq_len=seq_len,
            window_pattern=window_pattern.upper(),
            value_layers=tuple(i for i in range(depth) if i % 2 == parity) if value_embeddings else (),
        )

    @property
    def constants(self) -> Formulas:
        return FORMULAS[self.formulas]

    @property
    def gate_channels(self) -> int:
        """Channels that gate a value embedding."""
        return min(self.constants.gate_channels, self.dim)

    @property
    def q_dim(self) -> int:
        """Width of the queries of one layer."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the keys (and of the values) of one layer."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_dim(self) -> int:
        """Width of the queries, keys and values of one layer together."""
        return self.q_dim + 2 * self.kv_dim

    def windows(self, seq_len: int | None = None) -> tuple[int, ...]:
        """Tokens that each layer sees, the own one included. S follows the training row, L the row at hand."""
        length = seq_len or self.seq_len
        short = min(self.constants.short_window(self.seq_len), length)
        tiled = [self.window_pattern[i % len(self.window_pattern)] for i in range(self.depth)]
        return tuple(length if kind == "L" or i == self.depth - 1 else short for i, kind in enumerate(tiled))

    def matrices(self) -> dict[tuple[int, int], int]:
        """The weights of the layers as (rows out, columns in) -> how many, by which memory.py counts the
        optimizer. The model itself (nn/optim.py) stacks `down` transposed beside `up` and queries by key-value head,
        and gives the gates to AdamW."""
        counts: dict[tuple[int, int], int] = {}
        layer = [(self.q_dim, self.dim), (self.kv_dim, self.dim), (self.kv_dim, self.dim), (self.dim, self.q_dim)]
        layer += [(self.mlp_dim, self.dim), (self.dim, self.mlp_dim)]
        for size in layer:
            counts[size] = counts.get(size, 0) + self.depth
        if self.value_layers:
            gate = (self.kv_heads, self.gate_channels)
            counts[gate] = counts.get(gate, 0) + len(self.value_layers)
        return counts

    def parameters(self) -> dict[str, int]:
        """Parameters by part."""
        table = self.padded_vocab * self.dim
        return {
            "embedding": table,
            "value_embeddings": len(self.value_layers) * self.padded_vocab * self.kv_dim,
            "attention": self.depth * self.dim * (2 * self.q_dim + 2 * self.kv_dim),
            "mlp": self.depth * 2 * self.dim * self.mlp_dim,
            "value_gates": len(self.value_layers) * self.kv_heads * self.gate_channels,
            "smear_gate": min(SMEAR_GATE_CHANNELS, self.dim),
            "shifts": self.depth * self.qkv_dim,
            "scalars": 2 * self.depth + 2,  # residual and first-embedding weight per layer, smear, backout
            "head": table,
        }

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters().values())

    @property
    def scaling_parameters(self) -> int:
        """Parameters that the token budget is a multiple of: transformer matrices and head, no tables."""
        part = self.parameters()
        return part["attention"] + part["mlp"] + part["value_gates"] + part["head"]

    @property
    def matmul_parameters(self) -> int:
        """Weights that every token is multiplied with."""
        return self.scaling_parameters + self.parameters()["smear_gate"]

    def read_parameters(self, sequences: int) -> int:
        """Weights that one decoding step reads, however many sequences it advances; of the tables only single rows."""
        return self.matmul_parameters

    @property
    def train_flops_per_token(self) -> int:
        """Forward and backward: 6 per weight; 12 per head channel and token in the window."""
        return 6 * self.matmul_parameters + 12 * self.q_dim * sum(self.windows())

    def decode_flops_per_token(self, context: int) -> int:
        """One new token behind `context` others."""
        return 2 * self.matmul_parameters + 4 * self.q_dim * sum(self.windows(context))

    def kv_elements(self, context: int) -> int:
        """Elements of the key-value cache of one sequence; an S layer keeps only its window. And of its last two tokens
        the queries, keys and values as they were before they were mixed with those of the token before."""
        return 2 * self.kv_dim * sum(self.windows(context)) + self.depth * 2 * self.qkv_dim

    def slot_elements(self, context: int) -> int:
        """Elements that the engine keeps per sequence: the cache, and where other prompts can go on behind it the
        queries, keys and values of one token of each block and of one token at the end of the prompt."""
        return self.kv_elements(context) + self.depth * (1 + context // PREFIX_BLOCK) * self.qkv_dim

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"value_layers": list(self.value_layers)}
        if not self.formulas:
            del values["formulas"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Shape:
        """Read back `to_dict`; a missing or unknown name is an error, so that an old file is never half understood."""
        names = {f.name for f in fields(cls)}
        wrong = sorted((names ^ set(values)) - {"formulas"})
        if wrong:
            raise UserError(
                f"model shape: {'unknown' if wrong[0] in values else 'missing'} size {wrong[0]}; "
                "the file was written by another version"
            )
        return cls(**{**values, "value_layers": tuple(values["value_layers"])})
