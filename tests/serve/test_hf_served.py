"""`ascendchat serve --model DIR`: a Hugging Face folder behind OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path

import hf_models
import httpx
import openai
import pytest
import torch
from running_server import serving

PATIENCE = 300.0  # seconds; a guard only
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is seventeen plus?"}]


@pytest.mark.slow
def test_a_hugging_face_folder_is_served_with_its_own_template(tmp_path: Path) -> None:
    theirs = hf_models.save(tmp_path / "tiny-llama", "llama")
    tokenizer = hf_models.library().AutoTokenizer.from_pretrained(tmp_path / "tiny-llama")
    prompt = tokenizer.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        row = theirs.generate(prompt, max_new_tokens=10, do_sample=False)
    wanted = tokenizer.decode(row[0, prompt.size(1) :], skip_special_tokens=True)
    flags = ["--model", str(tmp_path / "tiny-llama"), "--device-type", "cpu", "--temperature", "0", "--slots", "2"]
    with serving(tmp_path, *flags) as server:
        url = server.url
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        assert [model.id for model in client.models.list()] == ["tiny-llama/hf"]
        answer = client.chat.completions.create(model="tiny-llama/hf", messages=TALK, max_tokens=10, logprobs=True)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == wanted
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == prompt.size(1)
        body = {"messages": TALK, "max_tokens": 60, "response_format": {"type": "json_object"}}
        found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
        assert isinstance(json.loads(found["choices"][0]["message"]["content"]), dict)
        half = '"half \\ud83d of an emoji"'  # as the JSON of a client has it
        for path, body in (
            ("v1/chat/completions", f'{{"messages": [{{"role": "user", "content": {half}}}], "max_tokens": 1}}'),
            ("v1/completions", f'{{"prompt": {half}, "max_tokens": 1}}'),
            ("tokenize", f'{{"prompt": {half}}}'),
        ):
            found, whole = (
                httpx.post(
                    f"{url}/{path}", content=sent, headers={"Content-Type": "application/json"}, timeout=PATIENCE
                )
                for sent in (body, body.replace("\\ud83d", "\\ufffd"))
            )
            assert (found.status_code, whole.status_code) == (200, 200), found.text
            read = [answer.json().get("usage", answer.json()) for answer in (found, whole)]
            assert read[0].get("prompt_tokens", read[0].get("tokens")) == read[1].get(
                "prompt_tokens", read[1].get("tokens")
            )
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
        refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": TALK, "tools": [tool]}, timeout=PATIENCE)
        assert refused.status_code == 400
        assert "tools" in refused.json()["error"]["message"]
