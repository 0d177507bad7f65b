"""A decoding step by our own kernels, where the chip has them: without torch.compile, and few are launched.

fused = fused_step(decoder)               # None: the model, the chip or the readout wants the general way
fused.read(rows, longest)                 # the first half of Decoder's step, as Decoder._read; logits not capped
fused.choose(known, random=True)          # the second, for PLAIN modes, as Decoder._extend
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ascendchat.nn.attention import Flash
from ascendchat.nn.gpt import GPT
from ascendchat.nn.readout import Float32Readout, Readout

if TYPE_CHECKING:
    from ascendchat.engine.decode import Decoder


class Fused(Protocol):
    """The two halves of a step."""

    def read(self, rows: int, longest: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def choose(self, known: tuple[Tensor, Tensor, Tensor], *, random: bool) -> Tensor: ...


def fused_step(decoder: Decoder) -> Fused | None:
    """Our own model, on a chip with Triton, and logits as they come."""
    kernel, model, cache = decoder.kernel, decoder.model, decoder.cache
    if not (isinstance(kernel, Flash) and kernel.triton and isinstance(model, GPT)):
        return None
    if type(decoder.readout) not in (Readout, Float32Readout):
        return None
    from ascendchat.engine.gpt_step import Slots, TokenStep
    from ascendchat.engine.sampling_kernels import State, choose

    tensors = cache.keys, cache.values, cache.raw, cache.places
    overlaps = kernel.overlaps
    step = TokenStep(model, *tensors, decoder.context, overlaps=overlaps)
    slots = Slots(decoder.token, decoder.override, decoder.previous, decoder.length, decoder.target)
    state = State(decoder.token, decoder.previous, decoder.override, decoder.length, decoder.advance)

    class Kernels:
        def read(self, rows: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
            return step(rows, slots, longest)

        def choose(self, known: tuple[Tensor, Tensor, Tensor], *, random: bool) -> Tensor:
            logits, read, _ = known
            told = decoder.settings, decoder.blocks, state
            return choose(logits, read, *told, softcap=model.softcap, random=random, overlaps=overlaps)

    return Kernels()
