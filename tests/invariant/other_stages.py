"""Two stages that exist only in tests, to show that the loop knows nothing of what it trains.

python tests/invariant/other_stages.py policy|adapters FOLDER [KILLED_AT]     # 10 steps; dies of SIGKILL in that step
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from dying import die
from torch import Tensor, nn

from ascendchat.checkpoint import newest
from ascendchat.config.train import BaseConfig
from ascendchat.device import pick
from ascendchat.dist.context import joined
from ascendchat.nn import IGNORE
from ascendchat.nn.attention import KERNELS
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import softcap
from ascendchat.nn.objective import head_objective
from ascendchat.nn.optim import Group, MuonAdamW, groups
from ascendchat.nn.readout import Drawn
from ascendchat.plan.schedule import rates
from ascendchat.plan.shape import Shape
from ascendchat.train.run import train_stage
from ascendchat.train.stage import Loss, Stage

VOCAB, PROMPT, REPLY = 32, 4, 4
KILLED_AT = int(sys.argv[3]) if len(sys.argv) > 3 else -1


def reinforce(logprob: Tensor, advantage: Tensor) -> Tensor:
    return -advantage * logprob


class Policy(Stage):
    """Policy gradients: the reward is the share of even tokens in a reply of four that the model samples itself."""

    higher_is_better = True
    steps, tokens_per_step, flops_per_token = 10, 16 * (PROMPT + REPLY), 1.0

    def __init__(self) -> None:
        shape = Shape.from_depth(2, vocab=VOCAB, seq_len=PROMPT + REPLY, dim=32, head_dim=16)
        self.model = GPT(shape)
        self.model.initialise(0)
        self.optimizer = MuonAdamW(groups(self.model, rates(32, 1 << 14)), compute_dtype=torch.float32)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, dense(self.model, KERNELS["reference"], tokens.size(1)))

    @torch.no_grad()
    def rollout(self, step: int) -> Tensor:
        """16 rows of a prompt and a sampled reply: a function of (weights, step)."""
        chance = torch.Generator().manual_seed(step)
        rows = torch.randint(0, VOCAB, (16, PROMPT), generator=chance)
        for _ in range(REPLY):
            logits = softcap(self.hidden(rows)[:, -1] @ self.model.head[:VOCAB].t())
            rows = torch.cat((rows, torch.multinomial(logits.softmax(-1), 1, generator=chance)), dim=1)
        return rows

    def micro_batches(self, step: int) -> Iterable[tuple[Tensor, Tensor]]:
        rows = self.rollout(step)
        reward = (rows[:, PROMPT:] % 2 == 0).float().mean(1)
        advantage = (reward - reward.mean())[:, None].expand(-1, PROMPT + REPLY - 1)
        if step == KILLED_AT:
            die()
        return [(rows[half], advantage[half]) for half in (slice(0, 8), slice(8, 16))]

    def probe(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(8, PROMPT + REPLY, dtype=torch.int64), torch.zeros(8, PROMPT + REPLY - 1)

    def loss(self, batch: tuple[Tensor, Tensor], scale: float = 1.0) -> Loss:
        rows, advantage = batch
        targets = rows[:, 1:].clone()
        targets[:, : PROMPT - 1] = IGNORE
        weight = torch.tensor(scale / (16 * REPLY))
        hidden, drawn = self.hidden(rows[:, :-1]), Drawn(VOCAB)
        value, logprobs, _ = head_objective(
            hidden, self.model.head, targets, drawn, reinforce, (advantage,), weight=weight
        )
        return Loss(value, {"logprob": logprobs.sum() / (16 * REPLY)})

    def rates(self, step: int) -> dict[str, float]:
        return {"lr_scale": 4.0, "momentum": 0.9, "matrix_decay": 0.0, "clip": 1.0}

    def identity(self) -> dict[str, Any]:
        return {"stage": "policy", "steps": self.steps}

    def is_spike(self, loss: float, mean: float) -> bool:
        return False

    def evaluate(self, step: int) -> dict[str, float]:
        replies = torch.cat([self.rollout(1000 + n)[:, PROMPT:] for n in range(8)])
        return {"reward": (replies % 2 == 0).float().mean().item()}


class Adapted(nn.Module):
    """A linear layer with a low-rank addition; only that is trained."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        generator = torch.Generator().manual_seed(layer.in_features + layer.out_features)
        self.down = nn.Parameter(torch.randn(4, layer.in_features, generator=generator) * 0.02)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.t() @ self.up.t()


class Adapters(Stage):
    """A three-layer Hugging Face model whose head is its embedding, frozen, with adapters; it learns to count."""

    steps, tokens_per_step, flops_per_token = 10, 8 * 16, 1.0

    def __init__(self) -> None:
        sys.modules["torch_npu"] = None  # type: ignore[assignment]  # transformers imports it, which fails without CANN
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=True, **sizes)
        self.model = Qwen2ForCausalLM(config).requires_grad_(False)
        for block in self.model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(block.self_attn, name, Adapted(getattr(block.self_attn, name)))
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        adapters = Group("adapters", trained, 0.05, betas=(0.9, 0.999))
        self.optimizer = MuonAdamW([adapters], compute_dtype=torch.float32)

    def micro_batches(self, step: int) -> Iterable[Tensor]:
        if step == KILLED_AT:
            die()
        first = torch.randint(0, VOCAB, (8, 1), generator=torch.Generator().manual_seed(step))
        rows = (first + torch.arange(16)) % VOCAB
        return [rows[:4], rows[4:]]

    def probe(self) -> Tensor:
        return torch.zeros(4, 16, dtype=torch.int64)

    def loss(self, batch: Tensor, scale: float = 1.0) -> Loss:
        logits = self.model(batch[:, :-1]).logits
        return Loss(nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) * scale / 2)

    def rates(self, step: int) -> dict[str, float]:
        return {"lr_scale": 1.0}

    def identity(self) -> dict[str, Any]:
        return {"stage": "adapters", "steps": self.steps}

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}


def main() -> int:
    folder, config = Path(sys.argv[2]), BaseConfig(save_every=3, eval_every=5, device_type="cpu")
    with joined(pick("cpu")) as here:
        stage = {"policy": Policy, "adapters": Adapters}[sys.argv[1]]()
        saved = newest(folder)
        return train_stage(stage, here, config, folder, saved, title="toy", facts={}, add_files=lambda folder: None)


if __name__ == "__main__":
    sys.exit(main())
