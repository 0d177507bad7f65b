"""accelerate: a training loop of one's own, with accumulated gradients, clipping and a scheduler."""

import tiny
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import default_data_collator

accelerator = Accelerator(gradient_accumulation_steps=2)
model = tiny.model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
loader = DataLoader(tiny.rows(), batch_size=4, collate_fn=default_data_collator)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach()).mean().item())
accelerator.end_training()
tiny.report(losses, "accelerate", "transformers")
