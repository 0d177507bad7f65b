"""The layers of a model of transformers in training, compiled: once for all that do the same.

    forward = CompiledLayers(model, device.compile, print)       # as model.forward; Learner in train/model.py

A compiler that is given the whole model writes out each of its layers, for minutes. Here it sees one of them, with the
weights as arguments. Only what calls `forward` is compiled: samples and scores come in many shapes and call the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ascendchat.models.causal_lm import CausalLM

MOST_GRAPHS = 64  # of layers that differ, of batches that do, with and without gradient; above that torch gives up


def run(layer: nn.Module, *args: Any, **named: Any) -> Any:
    """The layer itself. Its number would be a constant of the graph: `alike` asks for what layers have in common."""
    return type(layer).forward(layer, *args, alike=True, **named)


def routed(layer: nn.Module, *args: Any, compiled: Callable[..., Any] | None = None, **named: Any) -> Any:
    """As the call wants it, not as a switch says: activations must be recomputed as they were made."""
    if compiled is None:
        return type(layer).forward(layer, *args, **named)
    return compiled(layer, *args, **named)


class CompiledLayers:
    """The forward of a model. What cannot be compiled runs as it is, and a sentence says why."""

    def __init__(self, model: CausalLM, compile: Callable[..., Any], say: Callable[[str], None]) -> None:
        self.model, self.say, self.rows = model, say, 0
        self.compiled: Callable[..., Any] | None = compile(run, dynamic=False, fullgraph=True)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
        windows = model.shape.windows()
        for layer in model.layers:
            layer.forward = partial(routed, layer)
            for module in layer.modules():
                if isinstance(number := getattr(module, "layer_idx", None), int):
                    module.first_alike = windows.index(windows[number])  # type: ignore[assignment]

    def __call__(self, tokens: Tensor, *args: Any, **named: Any) -> Tensor:
        if self.compiled is not None and self._usual(len(tokens)):
            try:
                return self.model(tokens, *args, **named, compiled=self.compiled)  # type: ignore[no-any-return]
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                self.compiled = None
                self.say(f"the layers of the model are not compiled: {reason(error)}")
        return self.model(tokens, *args, **named)  # type: ignore[no-any-return]

    def _usual(self, rows: int) -> bool:
        """Not the last batch of an evaluation, which has fewer rows and would be compiled for itself."""
        self.rows = rows if torch.is_grad_enabled() else max(rows, self.rows)
        return rows == self.rows


def reason(error: Exception) -> str:
    """One line; that of an error behind which the compiler hides another is the other's."""
    inner = getattr(error, "inner_exception", None) or error
    line = str(inner).strip().partition("\n")[0]
    return f"{type(inner).__name__}: {line}" if line else type(inner).__name__
