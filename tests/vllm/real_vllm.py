"""A real vLLM server in a process of its own, and a small Qwen2 for it: `make vllm-test`.

    folder = qwen2(tmp_path / "model")                              # a Hugging Face checkpoint
    with Served(folder, tmp_path) as server:
        RemoteGenerator.open(server.url, scorer=scorer_of(model))
        server.kill(); server.start()                               # at the same place

$ASCENDCHAT_VLLM_PYTHON is the Python of the virtual environment that has vLLM.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_models
import torch

from ascendchat.models.import_transformers import library
from ascendchat.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("ASCENDCHAT_VLLM_PYTHON", "")
PATIENCE = 900  # seconds for a start, on however busy a machine
CONTEXT = 256
FLAGS = "--dtype float32 --skip-tokenizer-init --enforce-eager --max-num-seqs 16 --logprobs-mode processed_logprobs"
RECEIVER = "ascendchat.remote.vllm_worker.WeightReceiver"


def qwen2(folder: Path) -> Path:
    """A random model in the form of a Hugging Face checkpoint. vLLM's attention on CPUs needs heads of 32 at least."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "initializer_range": 0.1}
    hf_models.save(folder, "qwen2", use_sliding_window=False, tie_word_embeddings=False, **sizes)
    return folder


def open_qwen2(folder: Path) -> Any:
    return library().Qwen2ForCausalLM.from_pretrained(folder).float().eval()


def scorer_of(model: Any, temperature: float = 1.0) -> Callable[[list[int]], list[float]]:
    """Log-probabilities of all tokens but the first, by a plain forward pass."""

    @torch.no_grad()
    def score(tokens: list[int]) -> list[float]:
        rows = (model(torch.tensor([tokens])).logits[0].float() / temperature).log_softmax(-1)
        return [rows[i, token].item() for i, token in enumerate(tokens[1:])]

    return score


class Served:
    """The server, from `with` to its end."""

    def __init__(self, model: Path, folder: Path, *flags: str, extended: bool = True) -> None:
        self.log, self.port = folder / "vllm.log", free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        more = ["--worker-extension-cls", RECEIVER] if extended else []
        place = ["--model", str(model), "--port", str(self.port), "--host", "127.0.0.1"]
        sizes = ["--served-model-name", "qwen2", "--max-model-len", str(CONTEXT)]
        self.command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *place, *sizes]
        self.command += [*FLAGS.split(), *more, *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Until it answers."""
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "TORCH_"))},
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=self.log.parent
            )
        end = time.monotonic() + PATIENCE
        while not self.healthy():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
            assert time.monotonic() < end, "it did not start"
            time.sleep(1)

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def kill(self) -> None:
        """kill -9, of all its processes."""
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
