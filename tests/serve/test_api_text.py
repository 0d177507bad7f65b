"""/v1/completions, /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

import json

import engine_models as make
import openai
import pytest
import torch
from running_server import RANDOM_CONTEXT as CONTEXT
from running_server import Server, error_of, random_model

from ascendchat.version import __version__

pytestmark = pytest.mark.slow

TEXT = make.tokenizer()


def test_a_text_is_continued_behind_bos(client: openai.OpenAI, server: Server) -> None:
    answer = client.completions.create(model=server.name, prompt="once", max_tokens=6)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1 + len(TEXT.encode("once"))
    ids = make.greedy(random_model(), [TEXT.bos, *TEXT.encode("once")], 6, CONTEXT)
    assert answer.choices[0].text == TEXT.decode(ids)
    assert len(client.completions.create(model=server.name, prompt="once").choices[0].text.encode()) >= 1


def test_prompts_of_all_four_kinds_mean_the_same(server: Server) -> None:
    ids = [TEXT.bos, *TEXT.encode("once")]
    fields = {"max_tokens": 6, "return_token_ids": True}
    answers = [
        server.post("/v1/completions", {"prompt": prompt, **fields}).json() for prompt in ("once", ["once"], ids, [ids])
    ]
    assert len({str(answer["choices"][0]["token_ids"]) for answer in answers}) == 1
    assert all(answer["choices"][0]["prompt_token_ids"] == ids for answer in answers)


def test_many_prompts_with_many_choices_are_numbered_in_order(server: Server) -> None:
    fields = {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "temperature": 1, "seed": 5}
    answer = server.post("/v1/completions", fields).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 4
    alone = server.post("/v1/completions", {**fields, "prompt": "b", "n": 1, "seed": 6}).json()
    assert alone["choices"][0]["text"] == answer["choices"][3]["text"]
    found = ["", "", "", ""]
    for event in server.post("/v1/completions", {**fields, "stream": True}).text.split("\n\n")[:-2]:
        (choice,) = json.loads(event[6:])["choices"]
        found[choice["index"]] += choice["text"]
    assert found == [choice["text"] for choice in answer["choices"]]


def test_text_logprobs_are_the_models_own(server: Server) -> None:
    fields = {"prompt": "once", "max_tokens": 5, "logprobs": 3, "return_token_ids": True, "temperature": 1, "seed": 2}
    choice = server.post("/v1/completions", fields).json()["choices"][0]
    model, row = random_model(), [TEXT.bos, *TEXT.encode("once")]
    told = choice["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == 5
    for at, token in enumerate(choice["token_ids"]):
        numbers = torch.log_softmax(make.logits_of(model, row, CONTEXT).float(), -1)
        assert told["token_logprobs"][at] == pytest.approx(float(numbers[token]), abs=2e-3)
        assert max(told["top_logprobs"][at].values()) == pytest.approx(float(numbers.max()), abs=2e-3)
        row.append(token)
    assert told["text_offset"][0] == 0
    assert told["text_offset"] == sorted(told["text_offset"])


def test_a_calculation_in_a_text_has_no_probability_where_it_was_forced(sums: Server) -> None:
    ids = sums.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()["tokens"]
    fields = {"prompt": ids, "max_tokens": 40, "logprobs": 0, "return_token_ids": True}
    choice = sums.post("/v1/completions", fields).json()["choices"][0]
    assert choice["text"] == "你好!"
    assert choice["token_ids"] == make.calculator_script()[1]
    forced = [
        name
        for name, number in zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"])
        if number is None
    ]
    assert forced == ["<|output_start|>", "4", "2", "<|output_end|>"]


def test_models(client: openai.OpenAI, server: Server) -> None:
    (card,) = client.models.list().data
    assert card.id == server.name == "random/sft"
    assert client.models.retrieve(server.name).id == server.name
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"
    assert server.get("/version").json() == {"version": __version__}


def test_tokens_and_back(server: Server) -> None:
    found = server.post("/tokenize", {"prompt": "hello 你好", "return_token_strs": True}).json()
    assert found["tokens"] == [TEXT.bos, *TEXT.encode("hello 你好")]
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), CONTEXT)
    assert found["token_strs"][:2] == ["<|bos|>", "hell"]
    plain = server.post("/tokenize", {"prompt": "hello 你好", "add_special_tokens": False}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": plain}).json() == {"prompt": "hello 你好"}
    error_of(server.post("/detokenize", {"tokens": [10**6]}), 400)
    error_of(server.post("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}), 400)
