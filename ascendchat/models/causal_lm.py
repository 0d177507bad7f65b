"""Runs a causal language model of transformers as a LanguageModel (nn/model.py): its layers, our attention and cache.

    model = CausalLM(AutoModelForCausalLM.from_pretrained(..., attn_implementation=ATTENTION), seq_len=2048)

transformers lets users replace the attention of its models by name. Ours passes the rotated queries, keys and values to
the `attend` of the call: the kernel over rows, over packed documents, or over the engine's cache. So every architecture
that transformers writes with this interface trains, scores and generates through our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ascendchat.models.import_transformers import library
from ascendchat.models.shape import HFShape
from ascendchat.nn.loss import score_without_softcap
from ascendchat.nn.model import Attend, Documents, LanguageModel, Shift

ATTENTION = "ascendchat"  # the name of our attention in transformers


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    attend: Any = None,
    scale: float = 0.0,
    alike: bool = False,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers: (B, H, T, D), (B, K, T, D) -> (B, T, H, D). CausalLM passes `attend` and
    its `scale`, compiled layers `alike`. The mask is ignored: `attend` masks by itself."""
    if attend is None:
        raise RuntimeError("a model opened by ascendchat is called through CausalLM, not by itself")
    if scaling is not None and scaling != scale:
        query = query * (scaling / scale)
    width = value.size(-1)
    if width > query.size(-1):
        raise RuntimeError(f"its values have {width} channels and its queries {query.size(-1)}")
    if width < query.size(-1):  # DeepSeek: kernels and cache need one width
        value = F.pad(value, (0, query.size(-1) - width))
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(module.first_alike if alike else module.layer_idx, q, k, v)[..., :width], None


class CausalLM(LanguageModel):
    """The model; its weights have their names in transformers, so that checkpoints are exchanged unchanged."""

    restarts = True
    score = staticmethod(score_without_softcap)
    compiles_layers = True  # where anything is compiled

    def __init__(self, inner: Any, seq_len: int | None = None) -> None:
        super().__init__()
        register()
        for name, child in inner.named_children():
            self.add_module(name, child)
        self.__dict__["inner"] = inner  # not registered as a child, since its children are
        self.inner: Any
        for module in inner.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # RL compares log-probabilities of training and generation
        total = sum(parameter.numel() for parameter in inner.parameters())
        self.shape: HFShape = HFShape.of(inner.config, total, seq_len)
        self.scale = scale_of(inner) or self.shape.head_dim**-0.5

    @property
    def head(self) -> Tensor:  # type: ignore[override]
        """(V, C)"""
        weight: Tensor = self.inner.get_output_embeddings().weight
        return weight

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.head.dtype  # packed weights have another

    def forward(
        self,
        tokens: Tensor,
        attend: Attend,
        rope: Any = None,
        shift: Shift | None = None,
        documents: Documents | None = None,
        **layer_arguments: Any,
    ) -> Tensor:
        """(B, T) -> (B, T, C). `layer_arguments`: for each layer, from _CompiledLayers."""
        if documents is None:
            every = torch.arange(tokens.size(1), device=tokens.device)[None]
            return self._run(tokens, every, attend, **layer_arguments)
        bounds, positions = documents.bounds, documents.positions
        assert positions is not None, "documents(..., restarts=model.restarts)"

        def within(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layer, q, k, v, bounds)  # type: ignore[call-arg]  # `dense` makes one that takes them

        return self._run(tokens, positions, within, **layer_arguments)

    def extend(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        shift: Shift,
        *,
        room: int,
        before: Tensor | None = None,
        begins: Tensor | None = None,
    ) -> Tensor:
        return self._run(tokens, positions if positions.dim() == 2 else positions[None], attend)

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend, **layer_arguments: Any) -> Tensor:
        arguments = {"attend": attend, "scale": self.scale, **layer_arguments}
        output = self.inner.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **arguments)
        hidden: Tensor = output.last_hidden_state
        return hidden

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The decoder layers in their order; empty for a model that has another name for them."""
        return list(getattr(self.inner.base_model, "layers", ()))

    def compiled(self, compile: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Tensor]:
        return _CompiledLayers(self, compile, say) if self.compiles_layers and self.layers else self

    def rope(self, length: int, dtype: Any, device: Any) -> None:
        """None: transformers computes its own from the positions."""

    def cap(self, logits: Tensor) -> Tensor:
        return logits.float()

    def to_compute(self, dtype: torch.dtype) -> CausalLM:
        for parameter in self.parameters():
            if parameter.is_floating_point():  # packed weights (quantize.py) are not
                parameter.data = parameter.data.to(dtype)
        return self

    def checkpoint_activations(self) -> None:
        """Recompute the activations of each layer in the backward pass."""
        self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def register() -> None:
    """Register our attention function in transformers."""
    library().AttentionInterface.register(ATTENTION, attention)


def scale_of(inner: Any) -> float | None:
    """The factor of the attention scores in the first layer that has one."""
    return next((float(module.scaling) for module in inner.modules() if hasattr(module, "scaling")), None)


# Compiled layers of a model of transformers, for training: one graph for all layers that compute the same.
#
#     forward = model.compiled(device.compile, print)       # called like model.forward, by train/model.py
#
# Given the whole model, the compiler unrolls its layers, which takes minutes. Here it gets one layer, with the weights
# as arguments. Samples and scores come in many shapes: they call the model itself, which is not compiled.

MAX_GRAPHS = 64  # for different layers, batch shapes, with and without gradients; above that torch stops compiling


def run(layer: nn.Module, *args: Any, **named: Any) -> Any:
    """Call the layer. Its index would be a constant of the graph: `alike` makes `attention` use that of the first layer
    that computes the same."""
    return type(layer).forward(layer, *args, alike=True, **named)


def routed(layer: nn.Module, *args: Any, compiled: Callable[..., Any] | None = None, **named: Any) -> Any:
    """The forward of a layer, compiled if the call says so. A switch on the layer would not do: activations must be
    recomputed in the same way as before, whatever ran in between."""
    if compiled is None:
        return type(layer).forward(layer, *args, **named)
    return compiled(layer, *args, **named)


class _CompiledLayers:
    """The forward of a model. A model that cannot be compiled runs eagerly, and a sentence says why."""

    def __init__(self, model: CausalLM, compile: Callable[..., Any], say: Callable[[str], None]) -> None:
        self.model, self.say, self.rows = model, say, 0
        self.compiled: Callable[..., Any] | None = compile(run, dynamic=False, fullgraph=True)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
        windows = model.shape.windows()
        for layer in model.layers:
            layer.forward = partial(routed, layer)
            for module in layer.modules():
                if isinstance(number := getattr(module, "layer_idx", None), int):
                    module.first_alike = windows.index(windows[number])  # type: ignore[assignment]

    def __call__(self, tokens: Tensor, *args: Any, **named: Any) -> Tensor:
        if self.compiled is not None and self._is_usual(len(tokens)):
            try:
                return self.model(tokens, *args, **named, compiled=self.compiled)  # type: ignore[no-any-return]
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                self.compiled = None
                self.say(f"the layers of the model are not compiled: {reason(error)}")
        return self.model(tokens, *args, **named)  # type: ignore[no-any-return]

    def _is_usual(self, rows: int) -> bool:
        """False for the last batch of an evaluation, which has fewer rows and would need another graph."""
        self.rows = rows if torch.is_grad_enabled() else max(rows, self.rows)
        return rows == self.rows


def reason(error: Exception) -> str:
    """One line about an error of the compiler, or about the error that it wraps."""
    inner = getattr(error, "inner_exception", None) or error
    line = str(inner).strip().partition("\n")[0]
    return f"{type(inner).__name__}: {line}" if line else type(inner).__name__
