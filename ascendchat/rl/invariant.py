"""`ascendchat rl --batch-invariant`: a TrainModel whose log-probabilities have the very bits that the engine reported.

train_model = batch_invariant(build(config, shape, here))       # in command.py; nn/invariant.py says how
"""

from __future__ import annotations

from torch import Tensor

from ascendchat.errors import UserError
from ascendchat.nn.gpt import GPT
from ascendchat.nn.invariant import InvariantAttention, InvariantOps
from ascendchat.nn.model import Documents
from ascendchat.train.model import TrainModel


class InvariantTrainModel(TrainModel):
    """Counts the positions of RoPE from the beginning of each document, like an engine. Counted from that of the row
    the scores are equal in theory, but not in their last bits."""

    def hidden(self, inputs: Tensor, known: Documents | None) -> Tensor:
        assert known is not None, "RL needs --attend document"
        cos, sin = self.model.rope(self.model.shape.seq_len, self.device.dtype, inputs.device)
        positions = known.bounds.positions
        hidden: Tensor = self.model(inputs, self.attend, (cos[positions], sin[positions]), documents=known)
        return hidden


def batch_invariant(train_model: TrainModel) -> InvariantTrainModel:
    """Give the model operators whose sums do not depend on the batch."""
    kernel, model, device = InvariantAttention(), train_model.model, train_model.device
    reason = kernel.refusal(device.type, device.dtype, model.shape.head_dim)
    if not isinstance(model, GPT):
        reason = "it is for models of our own"
    if device.compiles:
        reason = "a compiler would change the order of sums"
    if reason:
        raise UserError(f"--batch-invariant: {reason}; leave it out, or add --device-type cpu --no-compile")
    if not train_model.by_document:
        raise UserError("--batch-invariant needs --attend document: an answer is written without others before it")
    for part in (model, *model.blocks):
        part.ops = InvariantOps()  # type: ignore[assignment]
    return InvariantTrainModel(model, kernel, device, train_model.place, by_document=True)
