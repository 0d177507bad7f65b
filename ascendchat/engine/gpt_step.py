"""Our model for one new token per row, the step of decoding, without torch.compile: few kernels, one graph. CUDA only.

    step = TokenStep(model, cache.keys, cache.values, cache.raw, cache.places, context)
    logits, tokens, positions = step(rows, slots, longest)  # (B, V) float32, not capped; the cache has the new tokens

What costs in a step is the time between kernels, and the reading of weights and cache; there is hardly anything to
compute. So everything around the matrix products is in as few kernels as its dependences allow. The new token's way
through a layer, in seven launches (nn/triton_decoding.py, nn/triton_decoding.py); with FEW rows a product is a sum over
the weights, which fuses with what stands before it, and there are five (nn/triton_decoding.py). Each kernel of ours
reads or fetches its weights before it waits for the one before; beyond some size the library's products are faster all
the same:

    norm      of the mixed stream; gates of the value embedding          } project
    (product with `qkv`)                                                 }
    attend    shift, norm and rotation of queries and keys; into the cache; attention, also over parts of the keys
    (product with `out`), norm of the stream with it                     joined: the parts, product, stream
    (product with `up`), its square                                      project
    (product with `down`)                                                down: the parts are added by who reads them

The formulas are those of nn/gpt.py, whose `extend` computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ascendchat.nn import triton_decoding
from ascendchat.nn import triton_decoding as kernels
from ascendchat.nn.gpt import GPT, Block
from ascendchat.nn.logprobs import Float32LMHead
from ascendchat.nn.model import NORM_EPS
from ascendchat.nn.triton_decoding import Blocks, product


class _Tiles(NamedTuple):
    """The tiling of `attend` over the keys."""

    keys: int  # at once
    stages: int  # so many of these are under way
    warps: int
    ahead: int  # so many are fetched while the kernel before still runs


FEW, SOME = 4, 64  # rows
LIBRARY = 2**18  # rows times width of the model, beyond SOME rows: from there on the library's products are faster
TILE = 8192  # weights that a program holds
# The rest was the fastest on an H200, in whole steps at depth 12 with 1, 64 and 256 rows of 192 tokens.
# For rows up to FEW, up to SOME, and more:
FEW_TILES, SOME_TILES, MANY_TILES = _Tiles(64, 1, 4, 0), _Tiles(32, 3, 2, 32), _Tiles(8, 3, 1, 32)
CUTS, PROGRAMS = 4, 400  # parts of the keys of a head at most; beyond FEW rows only up to so many programs in all, and
LONG = 512  # only for more keys than these: with 600 to 2,000 a step of 8 to 32 rows takes 5 to 44 % less time so
PROJECT_WARPS, JOINED_WARPS, DOWN_WARPS, NORM_WARPS = 8, 2, 8, 8
DOWN_COLUMNS, DOWN_ROWS = 32, 1024  # of `down` that a program holds
SOME_BLOCKS = {
    "qkv": Blocks(32, 1, deep=128, stages=6),
    "out": Blocks(32, 3),
    "up": Blocks(32, 1, stages=6),
    "down": Blocks(32, 6),
    "head": Blocks(128, 1),
}
MANY_BLOCKS = {  # those that are not here are the library's
    "qkv": Blocks(64, 1, deep=128, stages=3, tall=128),
    "out": Blocks(64, 2, deep=128, stages=3),
    "up": Blocks(128, 1, deep=128, stages=3),
}


class Slots(NamedTuple):
    """State of the rows (slots,) int64, as engine/decode.py keeps it."""

    token: Tensor  # the newest, not yet in the cache
    override: Tensor  # replaces it where it is not negative
    previous: Tensor  # the token before
    length: Tensor  # tokens in the cache
    target: Tensor  # slot that the row writes to


class TokenStep:
    """A model and the tensors of its cache (engine/cache.py). No weight is copied: they may change in place."""

    def __init__(
        self,
        model: GPT,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        raw: Sequence[Tensor],
        places: Sequence[int],
        context: int,
        *,
        overlaps: bool = False,
    ) -> None:
        """`overlaps`: the chip lets a kernel begin while the one before it runs."""
        self.model, self.shape, self.context = model, model.shape, context
        self.keys, self.values, self.raw, self.places = keys, values, raw, places
        self.place, self.pdl, self.readout = keys[0].device, overlaps, Float32LMHead(model.dtype, keys[0].device)
        self.options: dict[str, Any] = {"launch_pdl": True} if self.pdl else {}
        self.width = triton.next_power_of_2(self.shape.dim)
        self.tile = max(1, TILE // self.width)
        self.rope = model.rope(context, model.dtype, self.place)

    def __call__(self, rows: int, slots: Slots, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (rows, V) float32, before their bound; tokens (rows,) and their positions (rows,). No row has more
        than `longest` keys."""
        step = _Few(self, rows, slots) if rows <= FEW else _Many(self, rows, slots, longest)
        return step.run(), step.tokens, step.positions


class _Step:
    """One decoding step: its buffers and launches."""

    def __init__(self, whole: TokenStep, rows: int, slots: Slots) -> None:
        self.whole, self.rows, self.slots = whole, rows, slots
        self.model, self.shape = whole.model, whole.shape
        self.tokens, self.positions = (torch.empty(rows, dtype=torch.int64, device=whole.place) for _ in range(2))
        self.first, self.middle = (self.empty(self.shape.dim) for _ in range(2))
        self.gates, self.unit = self.empty(self.shape.kv_heads), self.empty(self.shape.dim, dtype=self.model.dtype)
        self.x = self.first  # the stream
        self.last_is_middle = self.shape.depth // 2 == self.shape.depth - 1

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(self.rows, *sizes, dtype=dtype, device=self.whole.place)

    def run(self) -> Tensor:
        """All layers: (rows, V)."""
        model, slots, whole = self.model, self.slots, self.whole
        state = slots.token, slots.override, slots.previous, slots.length
        written = self.tokens, self.positions, self.first, whole.context - 1
        sizes = self.shape.dim, whole.width, model.smear_gate.size(1), NORM_EPS, whole.pdl
        kernels.embed[(self.rows,)](*state, model.embed.weight, model.smear, model.smear_gate, *written, *sizes)
        for layer, block in enumerate(model.blocks):
            self.layer(layer, block)  # type: ignore[arg-type]
        return self.logits()

    def layer(self, layer: int, block: Block) -> None:
        raise NotImplementedError

    def logits(self) -> Tensor:
        raise NotImplementedError

    def gate(self, block: Block | None) -> tuple[Tensor, dict[str, Any]]:
        """The gates' weights, if the layer has some, and what kernels are told of them."""
        weight: Tensor | None = getattr(block, "gate", None)
        options = {"gated": self.shape.gate_channels, "gate_range": self.shape.constants.gate_range, "eps": NORM_EPS}
        options["kv_heads"] = 0 if weight is None else self.shape.kv_heads
        return self.gates if weight is None else weight, options

    def mix(self) -> tuple[Tensor, ...]:
        """The tensors that a layer mixes into the stream."""
        model = self.model
        return self.first, model.residual, model.first

    def norm(self, kind: str, added: Tensor, count: int, layer: int, block: Block | None, keeps: bool) -> None:
        """`unit`: the norm of the stream with what is to be added; the stream itself is then a new one."""
        stream, whole = self.empty(self.shape.dim), self.whole
        weight, options = self.gate(block)
        tensors = self.x, added, *self.mix(), self.model.backout, self.middle, weight, self.gates, stream, self.unit
        options |= {"dim": self.shape.dim, "width": whole.width, "count": count, "keeps": keeps, "pdl": whole.pdl}
        options |= {"kind": kind, "num_warps": NORM_WARPS}
        kernels.norm[(self.rows,)](*tensors, layer, self.rows, **options, **whole.options)
        self.x = stream

    def attend(self, layer: int, block: Block, qkv: Tensor, cuts: int, out: tuple[Tensor, Tensor]) -> None:
        whole, shape, slots = self.whole, self.shape, self.slots
        places, raw, embeds = whole.places[layer], whole.raw[layer], hasattr(block, "gate")
        tiles = FEW_TILES if self.rows <= FEW else SOME_TILES if self.rows <= SOME else MANY_TILES
        table = self.model.values[str(layer)].weight if embeds else qkv
        whole_lines = shape.head_dim * whole.keys[layer].element_size() % 16 == 0  # what `fetch_ahead` can fetch
        kernels.attend[(self.rows, shape.heads, cuts)](
            *(qkv, raw, block.shift, *whole.rope, self.gates, table, slots.token, slots.override, slots.target),
            *(slots.length, whole.keys[layer], whole.values[layer], *out, places, raw.size(1)),
            whole.context - 1,
            scale=self.model.scale,
            heads=shape.heads,
            group=shape.heads // shape.kv_heads,
            dim=shape.head_dim,
            width=triton.next_power_of_2(shape.head_dim),
            parts=cuts,
            embeds=embeds,
            block=tiles.keys,
            stages=tiles.stages,
            ahead=tiles.ahead if whole_lines else 0,
            eps=NORM_EPS,
            pdl=whole.pdl,
            num_warps=tiles.warps,
            **whole.options,
        )


class _Many(_Step):
    """Matrix products on matrix units; those of ours into the stream leave parts, which `norm` adds."""

    def __init__(self, whole: TokenStep, rows: int, slots: Slots, longest: int) -> None:
        super().__init__(whole, rows, slots)
        many = MANY_BLOCKS if rows * self.shape.dim <= LIBRARY else {}
        self.blocks = SOME_BLOCKS if rows <= SOME else many
        self.added, self.count = self.unit, 0  # to the stream, by the layer before
        out, cuts = self.blocks.get("out"), min(CUTS, PROGRAMS // (rows * self.shape.heads))
        joins = longest > LONG and out is not None and self.shape.head_dim % out.deep == 0
        self.cuts = cuts if joins and cuts > 1 else 1

    def product(self, name: str, x: Tensor, weight: Tensor, outputs: int, **options: Any) -> Tensor:
        """(parts, B, outputs)"""
        blocks, whole = self.blocks.get(name), self.whole
        if blocks is None and name == "head":
            return whole.readout.product(x, weight[:outputs])[None]
        if blocks is None:
            return (x @ (weight if name == "down" else weight.t()))[None]
        dtype = self.model.dtype if name in ("qkv", "up") else torch.float32
        out = torch.empty(blocks.parts, self.rows, outputs, dtype=dtype, device=whole.place)
        product(x, weight, out, blocks, turned=name == "down", squares=name == "up", pdl=whole.pdl, **options)
        return out

    def layer(self, layer: int, block: Block) -> None:
        shape, whole = self.shape, self.whole
        self.norm("mixed", self.added, self.count, layer, block, keeps=layer == shape.depth // 2 + 1)
        qkv = self.product("qkv", self.unit, block.qkv.flatten(0, 1), shape.q_dim + 2 * shape.kv_dim)[0]
        if self.cuts > 1:
            y = self.empty(shape.heads, self.cuts, shape.head_dim)
            options = {"totals": self.empty(shape.heads, self.cuts)}
        else:
            y, options = self.empty(shape.q_dim, dtype=self.model.dtype), {}
        self.attend(layer, block, qkv, self.cuts, (y, options.get("totals", y)))
        added = self.product("out", y, block.out, shape.dim, **options)
        self.norm("plain", added, added.size(0), layer, None, False)
        hidden = self.product("up", self.unit, block.up, shape.mlp_dim)[0]
        if "up" not in self.blocks:
            grid, count = (triton.cdiv(hidden.numel(), 1024),), hidden.numel()
            kernels.square[grid](hidden, count, 1024, whole.pdl, **whole.options)
        self.added = self.product("down", hidden, block.down, shape.dim)
        self.count = self.added.size(0)

    def logits(self) -> Tensor:
        self.norm("last", self.added, self.count, 0, None, keeps=self.last_is_middle)
        return self.product("head", self.unit, self.model.head, self.shape.vocab)[0]


class _Few(_Step):
    """Five kernels a layer; the parts that `down` leaves are added by whoever reads the stream."""

    def __init__(self, whole: TokenStep, rows: int, slots: Slots) -> None:
        super().__init__(whole, rows, slots)
        shape = self.shape
        self.count, self.streams = 0, [self.empty(shape.dim) for _ in range(2)]
        self.cuts = triton.cdiv(shape.mlp_dim, DOWN_ROWS)
        self.parts = torch.empty(self.cuts, rows, shape.dim, device=whole.place)
        self.qkv = self.empty(shape.q_dim + 2 * shape.kv_dim, dtype=self.model.dtype)
        self.hidden = self.empty(shape.mlp_dim)
        self.attended = self.empty(shape.heads, CUTS, shape.head_dim), self.empty(shape.heads, CUTS)

    def project(self, kind: str, weight: Tensor, out: Tensor, layer: int, block: Block | None, keeps: bool) -> None:
        gate, options = self.gate(block)
        outputs = out.size(1)
        triton_decoding.project[(triton.cdiv(outputs, self.whole.tile),)](
            *(self.x, self.parts, *self.mix(), self.middle, gate, self.gates, weight, out, layer, outputs),
            rows=self.rows,
            dim=self.shape.dim,
            width=self.whole.width,
            count=self.count,
            tile=self.whole.tile,
            kind=kind,
            keeps=keeps,
            pdl=self.whole.pdl,
            num_warps=PROJECT_WARPS,
            **options,
            **self.whole.options,
        )

    def layer(self, layer: int, block: Block) -> None:
        shape, whole = self.shape, self.whole
        keeps = layer == shape.depth // 2 + 1
        self.project("mixed", block.qkv.flatten(0, 1), self.qkv, layer, block, keeps)
        self.attend(layer, block, self.qkv, CUTS, self.attended)
        after, width = self.streams[layer % 2], triton.next_power_of_2(shape.q_dim)
        tile = max(1, TILE // 2 // width)
        triton_decoding.joined[(triton.cdiv(shape.dim, tile),)](
            *(*self.attended, block.out, self.x, self.parts, *self.mix(), after),
            layer,
            rows=self.rows,
            dim=shape.dim,
            count=self.count,
            heads=shape.heads,
            head_dim=shape.head_dim,
            width=width,
            cuts=CUTS,
            tile=tile,
            pdl=whole.pdl,
            num_warps=JOINED_WARPS,
            **whole.options,
        )
        self.x, self.count = after, 0
        self.project("plain", block.up, self.hidden, layer, None, False)
        sizes = self.rows, shape.mlp_dim, shape.dim, DOWN_ROWS, DOWN_COLUMNS, whole.pdl
        grid = triton.cdiv(shape.dim, DOWN_COLUMNS), self.cuts
        triton_decoding.down[grid](self.hidden, block.down, self.parts, *sizes, num_warps=DOWN_WARPS, **whole.options)
        self.count = self.cuts

    def logits(self) -> Tensor:
        self.norm("last", self.parts, self.count, 0, None, keeps=self.last_is_middle)
        self.x, self.count, logits = self.unit, 0, self.empty(self.shape.vocab)
        self.project("ready", self.model.head, logits, 0, None, False)
        return logits
