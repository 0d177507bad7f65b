"""`python -m scripts.chat_web` with nanochat's flags is a server that answers."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from running_server import make, save, serving


@pytest.mark.slow
def test_chat_web_serves_from_as_many_processes_as_were_asked_for(tmp_path: Path) -> None:
    save(tmp_path, make.scripted(make.calculator_script()[0]))
    with serving(tmp_path, "--num-gpus=2", "-i", "sft", "-g", "tiny", module="scripts.chat_web") as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as reply:
            card = json.load(reply)["data"][0]
        assert (card["id"], card["ascendchat"]["devices"]) == ("tiny/sft", 2)
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "temperature": 0}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions", body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["choices"][0]["message"]["content"] == "你好!"
