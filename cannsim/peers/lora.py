"""peft: LoRA on all linear layers, trained, merged, and the merged model's loss."""

import tiny
import torch
from peft import LoraConfig, get_peft_model

model = get_peft_model(tiny.model(), LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")).to(tiny.DEVICE)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
losses = []
for batch in tiny.batches(8):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
merged = model.merge_and_unload()
with torch.no_grad():
    losses.append(merged(**batch).loss.item())
tiny.report(losses, "peft", "transformers")
