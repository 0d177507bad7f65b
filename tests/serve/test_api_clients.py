"""Other clients and the compatibility suite, where they are installed (CONTRIBUTING.md says how).

ASCENDCHAT_TEST_CLIENTS=DIR      a folder with litellm (pip install --target DIR/litellm litellm mcp) and
                                 compatcanary (npm install --prefix DIR compatcanary)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running_server import PATIENCE, Server

pytestmark = pytest.mark.long(short="test_an_answer_has_the_form_of_the_original")

CLIENTS = Path(os.environ.get("ASCENDCHAT_TEST_CLIENTS", "/nonexistent"))
WHERE = "set ASCENDCHAT_TEST_CLIENTS to a folder that holds it"

LITELLM = """
import json, sys, litellm
url, name = sys.argv[1:]
ask = dict(model=f"openai/{name}", api_base=f"{url}/v1", api_key="none", messages=[{"role": "user", "content": "hi"}])
whole = litellm.completion(**ask, max_tokens=9)
parts = list(litellm.completion(**ask, max_tokens=9, stream=True, stream_options={"include_usage": True}))
tool = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object", "properties": {
    "value": {"type": "string", "maxLength": 5}}, "required": ["value"], "additionalProperties": False}}}
called = litellm.completion(**ask, tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=99)
text = litellm.text_completion(model=f"text-completion-openai/{name}", api_base=f"{url}/v1", api_key="none",
                               prompt="once", max_tokens=4)
try:
    litellm.completion(**ask, temperature=9)
    refused = ""
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "stream": "".join(part.choices[0].delta.content or "" for part in parts if part.choices),
    "arguments": called.choices[0].message.tool_calls[0].function.arguments,
    "text": text.choices[0].text,
    "refused": refused,
}))
"""


def test_litellm(server: Server) -> None:
    if not (CLIENTS / "litellm").is_dir():
        pytest.skip(f"litellm is not here: {WHERE}")
    env = {**os.environ, "PYTHONPATH": str(CLIENTS / "litellm"), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    run = subprocess.run(
        [sys.executable, "-c", LITELLM, server.url, server.name],
        env=env,
        capture_output=True,
        timeout=PATIENCE,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["whole"] == found["stream"] != ""
    assert set(json.loads(found["arguments"])) == {"value"}
    assert found["text"]
    assert "temperature" in found["refused"]


@pytest.mark.parametrize("profile", ["chat", "modern"])
def test_compatcanary(sums: Server, profile: str) -> None:
    program = CLIENTS / "node_modules" / "compatcanary" / "src" / "cli.js"
    if shutil.which("node") is None or not program.exists():
        pytest.skip(f"node or compatcanary is not here: {WHERE}")
    command = ["node", str(program), "scan", "--base-url", f"{sums.url}/v1", "--model", sums.name]
    run = subprocess.run(
        [*command, "--profile", profile, "--format", "json"], capture_output=True, timeout=PATIENCE, text=True
    )
    report = json.loads(run.stdout)
    assert report["summary"]["passes"] == report["summary"]["total"], run.stdout
    assert (run.returncode, report["score"]) == (0, 100)
