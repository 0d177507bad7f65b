"""Runs of learning from pairs on a tiny Hugging Face model, for the tests.

python tests/invariant/preference_runs.py FOLDER RUN METHOD [KILLED_AT]      # 8 steps; dies of SIGKILL in that step
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dying import die

from ascendchat.config.finetune import FinetuneConfig
from ascendchat.train import finetune, preference

STEPS = 8
NUMBERS = "seventeen", "twenty", "five", "plus", "forty", "two"


def write_pairs(path: Path, count: int = 60) -> Path:
    """The better reply is short and the worse one long, or the other way round; some have earlier turns."""
    rows = []
    for n in range(count):
        asked = f"What is {NUMBERS[n % 6]} plus {NUMBERS[(n * 7 + n // 6) % 6]} and {n}?"
        good, bad = "The answer is " + NUMBERS[n % 5], "你好，世界。" * (1 + n % 3)
        before = [{"role": "user", "content": "user"}, {"role": "assistant", "content": "system"}] if n % 4 == 0 else []
        prompt = [*before, {"role": "user", "content": asked}]
        rows.append(
            {
                "prompt": prompt,
                "chosen": [{"role": "assistant", "content": good}],
                "rejected": [{"role": "assistant", "content": bad}],
            }
        )
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def config_of(folder: Path, run: str, method: str, **more: Any) -> FinetuneConfig:
    usual: dict[str, Any] = {
        "num_iterations": STEPS, "save_every": 3, "eval_every": 4, "max_seq_len": 96, "total_batch_size": 4 * 2 * 96,
        "device_batch_size": 4, "learning_rate": 1e-3, "device_type": "cpu", "log_every": 1,
    }  # fmt: skip
    return FinetuneConfig(
        start=str(folder / "tiny"),
        data=(str(folder / "pairs.jsonl"),),
        run=run,
        stage=method,  # type: ignore[arg-type]
        **{**usual, **more},
    )


def train(folder: Path, run: str, method: str, **more: Any) -> int:
    os.environ["ASCENDCHAT_HOME"] = str(folder)
    return finetune.run(config_of(folder, run, method, **more))


def main() -> int:
    folder, run, method, *killed = sys.argv[1:]
    if killed:
        plain = preference.PreferenceStage.micro_batches

        def dying(self: Any, step: int) -> Any:
            if step == int(killed[0]):
                die()
            return plain(self, step)

        preference.PreferenceStage.micro_batches = dying  # type: ignore[method-assign]
    return train(Path(folder), run, method)


if __name__ == "__main__":
    sys.exit(main())
