"""What a Python without ascendchat reads in folders of models: logits, token ids, a rendered conversation.

python open_export.py transformers OUT.json FOLDER...
python open_export.py vllm OUT.json FOLDER              # one model in a process
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

IDS = [7 * number % 300 for number in range(3, 103)]  # longer than any window of these models
TEXT = "What is seventeen plus twenty-five? <|im_end|> 你好"
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "it is 42"}]


def by_transformers(folder: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logprobs = model.eval()(torch.tensor([IDS])).logits[0].log_softmax(-1)
    found = {"logprobs": logprobs.tolist(), "ids": tokenizer(TEXT).input_ids}
    return {**found, "talk": tokenizer.apply_chat_template(TALK, tokenize=False)}


def by_vllm(folder: str) -> dict[str, Any]:
    """The log-probability of each token of IDS but the first."""
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 128}
    model = LLM(folder, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, **sizes)
    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    (answer,) = model.generate([{"prompt_token_ids": IDS}], asked)
    return {"of_ids": [found[token].logprob for token, found in zip(IDS[1:], answer.prompt_logprobs[1:])]}


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    reader, out, *folders = sys.argv[1:]
    read = {"transformers": by_transformers, "vllm": by_vllm}[reader]
    Path(out).write_text(json.dumps({Path(folder).name: read(folder) for folder in folders}))
