"""The protocol Stage of the training loop: pretraining, SFT, RL and fine-tuning differ only here.

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
    """Optimizer as the loop uses it; nn/optim.py has ours."""

    steps_done: int

    def gradients(self) -> list[Tensor]: ...
    def zero_grad(self) -> None: ...

    @property
    def step(self) -> Callable[..., Tensor]:
        """step(loss_scale=..., **rates) updates and zeroes the gradients; returns the norm of this rank's share."""

    def shards(self) -> dict[str, Tensor]:
        """This rank's state for a checkpoint."""

    def load(self, read: Callable[[Shard], Tensor], steps_done: int) -> None:
        """Load state and weights, whichever number of ranks saved them."""


class Loss(NamedTuple):
    """The loss of one micro-batch, on the device."""

    value: Tensor
    metrics: Mapping[str, Tensor] = {}  # named values beside it, not scaled; they add up like the loss

    def backward(self) -> Loss:
        """Add up the gradients; the same loss without its graph."""
        self.value.backward()  # type: ignore[no-untyped-call]
        return Loss(self.value.detach(), self.metrics)


class Correction(NamedTuple):
    """Factors on the sums over the micro-batches of a step."""

    loss: float = 1.0  # and its gradient
    metrics: float = 1.0


class Stage(Protocol):
    """A model, its data, loss and optimizer. Everything is a function of the step, so that a run can resume anywhere.

    A stage inherits from this class; methods with a body are defaults.
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
        """Factors of a stage that knows the size of its batch only after the last micro-batch; alike on all ranks,
        which all call it after their micro-batches."""
        return Correction()

    def rates(self, step: int) -> dict[str, float]:
        """Learning-rate scale, momentum and so on: arguments of optimizer.step, also logged."""
        ...

    def identity(self) -> dict[str, Any]:
        """Settings that a checkpoint keeps: other commands read them, and a run resumes only with equal ones."""
        ...

    def summary(self) -> str:
        """One line at the start: model, batch and steps."""
        return f"{self.steps} steps of {self.tokens_per_step} tokens"

    def after_step(self, step: int) -> None:
        """Hook after the update of `step`."""
        return

    def extra_metrics(self, step: int) -> dict[str, float]:
        """Values of a step that the host has, alike on all ranks; they are logged."""
        return {}

    def is_spike(self, loss: float, mean: float) -> bool:
        """True if a loss so far above the running mean shows that the run diverged."""
        return loss > mean + SPIKE

    def evaluate(self, step: int) -> dict[str, float]:
        """Validation metrics, alike on all ranks; the first one decides which checkpoint is the best."""
        return {}

    def benchmark(self, step: int) -> dict[str, float]:
        """Metrics that take longer (CORE), alike on all ranks, every Options.benchmark_every steps."""
        return {}

    def sample(self, step: int) -> list[str]:
        """A few generated texts."""
        return []

    def smaller(self) -> bool:
        """Take the next smaller device batch with the same total; False when there is none."""
        return False

    def weights(self) -> dict[str, Tensor]:
        """Weights in a checkpoint: the whole model, or adapters."""
        return dict(self.model.state_dict())

    def extra(self) -> dict[str, Tensor]:
        """Other tensors that this rank needs to resume; `load` finds them in saved.extras()."""
        return {}

    def load(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint of this stage."""
        self.optimizer.load(saved.reader(), updates_of(saved))

    def close(self) -> None:
        """Stop background threads."""
        return


def updates_of(saved: Checkpoint) -> int:
    """Updates that the optimizer of a checkpoint had done."""
    return int(saved.state.get("updates", saved.step))
