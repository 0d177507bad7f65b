"""A causal language model of transformers as a LanguageModel (nn/model.py): its layers, our attention and cache.

    model = CausalLM(AutoModelForCausalLM.from_pretrained(..., attn_implementation=ATTENTION), seq_len=2048)

transformers lets the attention of its models be replaced by name. Ours hands queries, keys and values, already rotated,
to the `attend` that came with the call: the kernel over rows, over packed documents, or one that reads the engine's
cache. So every architecture that transformers writes that way trains, scores and generates through our kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ascendchat.config import UserError
from ascendchat.hf import library
from ascendchat.hf.compiled import CompiledLayers
from ascendchat.hf.shape import HFShape
from ascendchat.nn.attention import Reference
from ascendchat.nn.documents import Documents
from ascendchat.nn.model import Attend, LanguageModel, Shift, dense
from ascendchat.nn.uncapped import uncapped_score

ATTENTION = "ascendchat"
PROVEN = {"llama", "mistral", "qwen2", "qwen3"}  # the tests compare these with transformers; others are tried at once
REFUSED = "final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"  # done by nobody here


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
    """transformers' attention function: (B, H, T, D), (B, K, T, D) -> (B, T, H, D). `attend` and `scale` are those of
    CausalLM, `alike` that of compiled.py; the mask is none of ours, since `attend` knows what each token sees."""
    if attend is None:
        raise RuntimeError("a model opened by ascendchat is called through CausalLM, not by itself")
    if scaling is not None and scaling != scale:
        query = query * (scaling / scale)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return attend(module.first_alike if alike else module.layer_idx, q, k, v), None


class CausalLM(LanguageModel):
    """The weights have the names they have in transformers, so that checkpoints are exchanged as they are."""

    restarts = True
    score = staticmethod(uncapped_score)
    compiles_layers = True  # where anything is compiled

    def __init__(self, inner: Any, seq_len: int | None = None) -> None:
        super().__init__()
        register()
        for name, child in inner.named_children():
            self.add_module(name, child)
        self.__dict__["inner"] = inner  # not a child: its children are
        self.inner: Any
        for module in inner.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # what is trained must be what answers
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
        return self.head.dtype

    def forward(
        self,
        tokens: Tensor,
        attend: Attend,
        rope: Any = None,
        shift: Shift | None = None,
        documents: Documents | None = None,
        **how: Any,
    ) -> Tensor:
        """`how`: that of compiled.py."""
        if documents is None:
            return self._run(tokens, torch.arange(tokens.size(1), device=tokens.device)[None], attend, **how)
        bounds, positions = documents.bounds, documents.positions
        assert positions is not None, "documents(..., restarts=model.restarts)"

        def within(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(layer, q, k, v, bounds)  # type: ignore[call-arg]  # that of `dense` takes them

        return self._run(tokens, positions, within, **how)

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

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend, **how: Any) -> Tensor:
        found: Tensor = self.inner.base_model(
            input_ids=tokens, position_ids=positions, use_cache=False, attend=attend, scale=self.scale, **how
        ).last_hidden_state
        return found

    @property
    def layers(self) -> list[torch.nn.Module]:
        """Those that attend, one after the other; none of a model that calls them something else."""
        return list(getattr(self.inner.base_model, "layers", ()))

    def compiled(self, compile: Callable[..., Any], say: Callable[[str], None]) -> Callable[..., Tensor]:
        return CompiledLayers(self, compile, say) if self.compiles_layers and self.layers else self

    def rope(self, length: int, dtype: Any, device: Any) -> None:
        """transformers makes its own, from the positions."""

    def cap(self, logits: Tensor) -> Tensor:
        return logits.float()

    def to_compute(self, dtype: torch.dtype) -> CausalLM:
        for parameter in self.parameters():
            if parameter.is_floating_point():  # those of quantize.py are packed
                parameter.data = parameter.data.to(dtype)
        return self

    def checkpoint_activations(self) -> None:
        """Recompute the activations of each layer in the backward pass."""
        self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def register() -> None:
    """Tell transformers of our attention function."""
    library().AttentionInterface.register(ATTENTION, attention)


def scale_of(inner: Any) -> float | None:
    """What the first attention layer multiplies its scores with."""
    return next((float(module.scaling) for module in inner.modules() if hasattr(module, "scaling")), None)


def check(model: CausalLM) -> None:
    """A model that our attention or our head does not fit is a UserError, and never a model that is a little wrong."""
    inner, shape = model.inner, model.shape
    kind, config = shape.model_type, inner.config.get_text_config()
    for name in REFUSED:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UserError(f"model type {kind!r} has {name}, which this engine does not compute; choose another model")
    head = inner.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UserError(f"model type {kind!r} has no head of one plain matrix; choose another model")
    if kind not in PROVEN:
        compare(model)


@torch.no_grad()
def compare(model: CausalLM) -> None:
    """Run a few tokens through transformers alone and through our attention: both must give the same logits."""
    inner, shape = model.inner, model.shape
    row = torch.arange(3, 11, device=model.head.device)[None] % shape.vocab
    layers: set[int] = set()
    plain = dense(model, Reference(), row.size(1))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers.add(layer)
        return plain(layer, q, k, v)

    try:
        ours = model(row, attend) @ model.head.t()
        inner.set_attn_implementation("eager")
        theirs = inner(row, use_cache=False).logits
    except (RuntimeError, TypeError, AttributeError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model type {shape.model_type!r} does not run with our attention ({reason}); choose another model"
        ) from None
    finally:
        inner.set_attn_implementation(ATTENTION)
    far = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-6))
    if len(layers) != shape.depth or far > (1e-4 if model.dtype == torch.float32 else 0.1):
        raise UserError(
            f"model type {shape.model_type!r} computes something that our attention does not ({len(layers)} of "
            f"{shape.depth} layers use it, logits differ by {far:.2g}); choose another model"
        )
