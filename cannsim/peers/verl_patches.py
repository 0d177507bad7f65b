"""verl: its NPU versions of Qwen3's layers (RMSNorm, SwiGLU, rotation, and experts by grouped products), trained.

Without an NPU verl leaves the layers as they are: those of transformers are what the CPU's run has.
"""

import tiny
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

if tiny.DEVICE == "npu":
    from verl.models.transformers.npu_patch import apply_npu_patches

    apply_npu_patches()


def train(model: torch.nn.Module) -> list[float]:
    model = model.to(tiny.DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in tiny.batches(16):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


losses = train(tiny.model())
torch.manual_seed(0)
shape = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
losses += train(Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=264, **shape, **experts)))
tiny.report(losses, "verl", "transformers")
