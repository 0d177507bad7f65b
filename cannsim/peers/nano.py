"""nanochat, unmodified: its tokenizer, model, Muon and AdamW, then its engine with the key-value cache, greedily.

Its scripts refuse the device (`compute_init` takes cuda, mps and cpu only), so the loop is written here. Its folder has
to be in PYTHONPATH. It compiles its optimizer, which takes Triton kernels on an NPU: those are not simulated.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import tiny
import torch
from nanochat.engine import Engine
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import RustBPETokenizer

text = [row["prompt"] + row["completion"] for row in tiny.sums(256)]
tokenizer = RustBPETokenizer.train_from_iterator(iter(text), 300)
torch.manual_seed(0)
shape = dict(n_layer=2, n_head=2, n_kv_head=2, n_embd=64, window_pattern="SL")
model = GPT(GPTConfig(sequence_len=64, vocab_size=tokenizer.get_vocab_size(), **shape))
model.init_weights()
model = model.to(tiny.DEVICE)
optimizer = model.setup_optimizer()
stream = [token for line in text for token in tokenizer.encode(line, prepend="<|bos|>")]
losses = []
for step in range(8):
    ids = torch.tensor(stream[step * 256 : step * 256 + 257], device=tiny.DEVICE)
    loss = model(ids[:-1].view(4, 64), ids[1:].view(4, 64))
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    losses.append(loss.item())
prompt = tokenizer.encode("What is 1 plus 2?", prepend="<|bos|>")
(answer, _), _ = Engine(model, tokenizer).generate_batch(prompt, num_samples=2, max_tokens=16, temperature=0)
tiny.report(losses, "rustbpe", tokens=answer, nanochat="in PYTHONPATH")
