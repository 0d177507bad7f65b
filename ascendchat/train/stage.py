"""What the loop trains: the protocol Stage. base, mid, SFT, RL and fine-tuning differ only here.

    class Mine(Stage): ...                # what has no body below: model, optimizer, forward_backward, ...
    fit(Mine(...), device, run, options)  # train/loop.py

No model and no optimizer is named here: ours are in train/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ascendchat.checkpoint import Checkpoint, Shard

SPIKE = 3.0  # nats above the running mean that stop a run


class Optimizer(Protocol):
    """What the loop needs of an optimizer; nn/optim.py has ours."""

    steps_done: int

    def gradients(self) -> list[Tensor]: ...
    def zero_grad(self) -> None: ...

    @property
    def step(self) -> Callable[..., Tensor]:
        """step(loss_scale=..., **rates): update, forget the gradients; the norm of this rank's share of them."""

    def shards(self) -> dict[str, Tensor]:
        """This rank's state, as a checkpoint keeps it."""

    def load(self, read: Callable[[Shard], Tensor], steps_done: int) -> None:
        """Take state and weights from whatever ranks saved them."""


class Loss(NamedTuple):
    """The loss of one micro-batch, on the device."""

    value: Tensor
    metrics: Mapping[str, Tensor] = {}  # named values beside it, not scaled; they add up like the loss

    def backward(self) -> Loss:
        """Add up the gradients; the same loss without its graph."""
        self.value.backward()  # type: ignore[no-untyped-call]
        return Loss(self.value.detach(), self.metrics)


class Correction(NamedTuple):
    """Factors on what the micro-batches of a step have added up to."""

    loss: float = 1.0  # and its gradient
    metrics: float = 1.0


class Stage(Protocol):
    """What is trained on what. Everything is a function of the step, so that a run can continue anywhere.

    A stage inherits from this class; what has a body here is what most stages want.
    """

    model: nn.Module
    optimizer: Optimizer
    steps: int
    tokens_per_step: int
    flops_per_token: float
    higher_is_better: bool = False  # the first metric of `evaluate`

    def micro_batches(self, step: int) -> Iterable[Any]:
        """This rank's share of the batch of `step`."""
        ...

    def probe(self) -> Any:
        """A micro-batch of full size for the dry run, whatever it holds; costs nothing to make."""
        ...

    def forward_backward(self, batch: Any, scale: float = 1.0) -> Loss:
        """Add the gradients of `scale` times this micro-batch's share of the step's loss to those of the optimizer.

        Micro-batches of a rank add up to its loss; the loop takes the mean over the ranks. The scale goes in before
        anything is rounded to 16 bits. The dry run calls this too, and forgets the gradients.
        """
        ...

    def correction(self, step: int) -> Correction:
        """For a stage that knows the size of its batch only when the last micro-batch is done; alike on all ranks. All
        of them ask for it, after their micro-batches."""
        return Correction()

    def rates(self, step: int) -> dict[str, float]:
        """Arguments of optimizer.step; they are logged."""
        ...

    def identity(self) -> dict[str, Any]:
        """What a checkpoint says about the run: other commands use it, and a run goes on only where it is the same."""
        ...

    def summary(self) -> str:
        """One line for the start: what is trained, and for how long."""
        return f"{self.steps} steps of {self.tokens_per_step} tokens"

    def after_step(self, step: int) -> None:
        """What happens to the weights after the update of `step`."""
        return

    def notes(self, step: int) -> dict[str, float]:
        """What the host knows of a step besides its loss, alike on all ranks; it is logged."""
        return {}

    def is_spike(self, loss: float, mean: float) -> bool:
        """Whether a loss so far from the running mean shows that the run went wrong."""
        return loss > mean + SPIKE

    def evaluate(self, step: int) -> dict[str, float]:
        """Validation metrics, alike on all ranks; the first one decides which checkpoint is the best."""
        return {}

    def examine(self, step: int) -> dict[str, float]:
        """Metrics that take longer (CORE), alike on all ranks; asked for when Options.examine_every is."""
        return {}

    def sample(self, step: int) -> list[str]:
        """A few texts of the model."""
        return []

    def smaller(self) -> bool:
        """Take the next smaller device batch with the same total; False when there is none."""
        return False

    def weights(self) -> dict[str, Tensor]:
        """What a checkpoint holds for those who use the model: all of it, or adapters."""
        return dict(self.model.state_dict())

    def extra(self) -> dict[str, Tensor]:
        """What else this rank needs to continue; `load` finds it in saved.extras()."""
        return {}

    def load(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint of this stage."""
        self.optimizer.load(saved.reader(), updates_of(saved))

    def close(self) -> None:
        """End what runs in the background."""
        return


def updates_of(saved: Checkpoint) -> int:
    """Updates that the optimizer of a checkpoint had done."""
    return int(saved.state.get("updates", saved.step))
