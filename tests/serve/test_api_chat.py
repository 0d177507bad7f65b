"""/v1/chat/completions through the official client, against numbers that are computed here."""

from __future__ import annotations

import json
from typing import Any

import engine_models as make
import openai
import pytest
import torch
from pydantic import BaseModel
from running_server import CHAT, SPECIAL, Server, error_of, random_model
from running_server import RANDOM_CONTEXT as CONTEXT

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]
TEXT = make.tokenizer()


def test_an_answer_has_the_form_of_the_original(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.create(model=server.name, messages=HI, max_tokens=5, seed=1)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == server.name
    assert str(answer.system_fingerprint).startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert (choice.message.role, choice.message.refusal, choice.message.tool_calls) == ("assistant", None, None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(server.ids("hi"))
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert choice.model_extra == {"ascendchat": {"weight_version": 0}}


def test_a_greedy_answer_is_the_models_own(server: Server) -> None:
    answer = server.chat(max_tokens=12, return_token_ids=True).json()
    prompt = server.ids("hi")
    assert answer["prompt_token_ids"] == answer["choices"][0]["prompt_token_ids"] == prompt
    expected = make.greedy(random_model(), prompt, 12, CONTEXT, (SPECIAL["<|assistant_end|>"], TEXT.bos))
    assert answer["choices"][0]["token_ids"] == expected


def test_a_stream_says_the_same_as_the_whole_answer(client: openai.OpenAI, server: Server) -> None:
    fields: dict[str, Any] = {"model": server.name, "messages": HI, "max_tokens": 20}
    fields |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields).choices[0]
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    told = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content]
    assert [(e.token, e.bytes) for e in told] == [(e.token, e.bytes) for e in whole.logprobs.content]


def test_the_bytes_of_a_stream(server: Server) -> None:
    lines = server.chat(max_tokens=3, stream=True, stream_options={"include_usage": True})
    assert lines.headers["content-type"].startswith("text/event-stream")
    assert lines.text.endswith("\n\ndata: [DONE]\n\n")
    said = events(lines.text)
    assert [chunk["usage"] for chunk in said[:-1]] == [None] * (len(said) - 1)
    assert said[-1]["choices"] == []
    assert said[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["choices"][0]["ascendchat"] == {"weight_version": 0} for chunk in said[:-1])
    assert "usage" not in events(server.chat(max_tokens=3, stream=True).text)[0]


def events(text: str) -> list[Any]:
    """What a stream says before its end."""
    lines = text.split("\n\n")[:-2]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines]


def test_choices_have_seeds_of_their_own_and_stream_between_each_other(server: Server) -> None:
    fields = {"n": 3, "seed": 7, "temperature": 1.0, "max_tokens": 8}
    whole = server.chat(**fields).json()
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    alone = [server.chat(**{**fields, "n": 1, "seed": seed}).json() for seed in (7, 8, 9)]
    assert [answer["choices"][0]["message"]["content"] for answer in alone] == texts
    assert whole["usage"]["completion_tokens"] == 24
    assert whole["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    found = {0: "", 1: "", 2: ""}
    for event in events(server.chat(**fields, stream=True).text):
        (choice,) = event["choices"]
        found[choice["index"]] += choice["delta"].get("content", "")
    assert list(found.values()) == texts


def test_without_a_seed_answers_differ(server: Server) -> None:
    answers = {server.chat(temperature=1.5, max_tokens=12).json()["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(answers) > 1


def test_stop_texts_end_the_answer_and_are_in_neither_text_nor_logprobs(server: Server) -> None:
    whole = server.chat(max_tokens=24).json()["choices"][0]["message"]["content"]
    stop = whole[6:8]
    assert whole.index(stop) == 6
    for given in (stop, ["\0never", stop]):
        choice = server.chat(max_tokens=24, stop=given, logprobs=True).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (whole[:6], "stop")
        told = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        assert told.decode("utf-8", "replace").startswith(whole[:6])
        assert stop.encode() not in told


def test_logprobs_are_the_models_own(server: Server) -> None:
    """Before temperature, bias and penalties; computed here without a cache."""
    model, prompt = random_model(), server.ids("hi")
    fields = {"logprobs": True, "top_logprobs": 4, "temperature": 1.3, "seed": 3, "presence_penalty": 0.5}
    choice = server.chat(**fields, max_tokens=6, return_token_ids=True).json()["choices"][0]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == 6
    row = list(prompt)
    for token, entry in zip(choice["token_ids"], choice["logprobs"]["content"]):
        numbers = torch.log_softmax(make.logits_of(model, row, CONTEXT).float(), -1)
        assert entry["logprob"] == pytest.approx(float(numbers[token]), abs=2e-3)
        assert bytes(entry["bytes"]) == TEXT.decode_bytes([token])
        best, _ = numbers.topk(4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(best.tolist(), abs=2e-3)
        row.append(token)


def test_a_bias_forces_and_bars_tokens(server: Server) -> None:
    forced = server.chat(logit_bias={str(ord("q")): 100}, max_tokens=5).json()
    assert forced["choices"][0]["message"]["content"] == "qqqqq"
    first = server.chat(max_tokens=1, return_token_ids=True).json()["choices"][0]["token_ids"][0]
    other = server.chat(max_tokens=1, return_token_ids=True, logit_bias={str(first): -100}).json()
    assert other["choices"][0]["token_ids"][0] != first


def test_penalties_end_a_repetition(server: Server) -> None:
    """The bias makes q and z likely, by two steps; the penalty of 2 per q then gives way to z."""
    bias = {str(ord("q")): 52, str(ord("z")): 50}
    spread = [server.chat(logit_bias=bias, max_tokens=40, frequency_penalty=p).json() for p in (0, 2)]
    texts = [answer["choices"][0]["message"]["content"] for answer in spread]
    assert texts[1].count("q") < texts[0].count("q")


def test_a_turn_of_a_long_conversation_pays_only_for_what_is_new(server: Server) -> None:
    """The rest is in the prefix cache; of another conversation, nothing."""
    turns, length = 6, 60  # tokens of a question: one per byte

    def read(talk: list[dict[str, str]]) -> tuple[int, int]:
        """Tokens of the prompt, and those of them that were in the cache. The answer is "aaaaaaaa"."""
        body = {"messages": talk, "max_tokens": 8, "logit_bias": {"97": 100}}
        usage = server.post(CHAT, body).json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    talk: list[dict[str, str]] = []
    for turn in range(turns):
        talk.append({"role": "user", "content": f"{turn}. turn ".ljust(length, "x")})
        prompt, cached = read(talk)
        talk.append({"role": "assistant", "content": "a" * 8})
        assert turn == 0 or prompt - cached < length + 16, "only the question and the ends of turns"
    prompt, cached = read([{"role": "user", "content": f"other {talk[0]['content']}"}, *talk[1:-1]])
    assert cached < 16 < turns * length < prompt, "nothing of it is known"


def test_room_is_what_the_context_leaves(server: Server) -> None:
    long = "x" * (CONTEXT - 60)
    answer = server.chat(long, max_completion_tokens=500).json()
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"
    error = error_of(server.chat("x" * CONTEXT), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_roles_and_parts_are_rendered_as_in_training(server: Server) -> None:
    talk = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "<|assistant_end|>", "name": "Leo"},
    ]

    def turn(role: str, text: str) -> list[int]:
        return [SPECIAL[f"<|{role}_start|>"], *TEXT.encode(text), SPECIAL[f"<|{role}_end|>"]]

    ids = server.post("/tokenize", {"messages": talk}).json()["tokens"]
    turns = turn("system", "be brief") + turn("user", "a") + turn("assistant", "b") + turn("user", "<|assistant_end|>")
    assert ids == [TEXT.bos, *turns, SPECIAL["<|assistant_start|>"]]
    closed = server.post("/tokenize", {"messages": talk, "add_generation_prompt": False}).json()["tokens"]
    assert closed == ids[:-1]


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


def test_structured_output_is_a_pydantic_model(client: openai.OpenAI, server: Server) -> None:
    answer = client.chat.completions.parse(model=server.name, messages=HI, response_format=Person, max_tokens=120)
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


def test_a_json_object_is_one_even_when_tokens_are_few(server: Server) -> None:
    for most in (8, 20, 60):
        answer = server.chat(response_format={"type": "json_object"}, max_tokens=most, temperature=1).json()
        choice = answer["choices"][0]
        assert isinstance(json.loads(choice["message"]["content"]), dict)
        assert choice["finish_reason"] == "stop"


def test_other_limits_of_vllm(server: Server) -> None:
    first = server.chat(max_tokens=8, return_token_ids=True).json()["choices"][0]["token_ids"]
    cut = server.chat(max_tokens=8, return_token_ids=True, stop_token_ids=[first[3]]).json()["choices"][0]
    assert cut["token_ids"] == first[: first.index(first[3])]
    assert cut["finish_reason"] == "stop"
    likeliest = server.chat(max_tokens=8, temperature=2, top_k=1, return_token_ids=True).json()["choices"][0]
    assert likeliest["token_ids"] == first
    bias = {str(SPECIAL["<|assistant_end|>"]): 100}
    assert server.chat(max_tokens=4, logit_bias=bias).json()["usage"]["completion_tokens"] == 0
    on = server.chat(max_tokens=4, logit_bias=bias, ignore_eos=True).json()
    assert (on["usage"]["completion_tokens"], on["choices"][0]["finish_reason"]) == (4, "length")


def test_the_calculator_works_inside_the_server(sums: Server, sums_client: openai.OpenAI) -> None:
    answer = sums_client.chat.completions.create(model=sums.name, messages=HI)
    assert answer.choices[0].message.content == "你好!"
    told = [{"kind": "tool", "text": "17+25"}, {"kind": "output", "text": "42"}]
    assert answer.choices[0].model_extra == {"ascendchat": {"weight_version": 0, "tool": told}}
    chunks = sums_client.chat.completions.create(model=sums.name, messages=HI, stream=True)
    text, pieces = "", {"tool": "", "output": ""}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        if own := (delta.model_extra or {}).get("ascendchat"):
            pieces[own["tool"]["kind"]] += own["tool"]["text"]
    assert (text, pieces) == ("你好!", {"tool": "17+25", "output": "42"})


def test_an_answer_can_be_sent_back_with_its_calculation(sums: Server) -> None:
    parts = [{"type": "tool", "text": "1+1"}, {"type": "output", "text": "2"}, {"type": "text", "text": "two"}]
    talk = [*HI, {"role": "assistant", "content": parts}, *HI]
    ids = sums.post("/tokenize", {"messages": talk}).json()["tokens"]
    assert SPECIAL["<|output_start|>"] in ids
    assert SPECIAL["<|tool_start|>"] in ids


def test_a_base_model_names_the_route_that_it_has(base: Server) -> None:
    error = error_of(base.chat(), 400)
    assert "/v1/completions" in error["message"]
    assert base.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200
