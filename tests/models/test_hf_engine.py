"""Our engine around a Hugging Face model: the tokens of transformers' own generate, many prompts at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch

from ascendchat.device import pick
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Request, Sampling
from ascendchat.models.folder import LoadedModel
from ascendchat.nn.attention import KERNELS

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9] * 30, list(range(40, 61))]


@pytest.fixture(scope="module", params=hf_models.KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    """A model of transformers, and the same as we open it."""
    folder = tmp_path_factory.mktemp("hf") / request.param
    made = hf_models.save(folder, request.param)
    return made, hf_models.opened(folder)


def engine(opened: LoadedModel, slots: int = 2, **options: Any) -> Engine:
    device = pick("cpu", dtype="fp32", compiled=False)
    known = {"slots": slots, "context": 96, **options}
    return Engine(opened.model, KERNELS["sdpa"], opened.tokenizer, device, CPU, **known)


def greedy(count: int = 12, **named: Any) -> Sampling:
    return Sampling(max_tokens=count, temperature=0.0, logprobs=True, stop_tokens=(), **named)


@torch.no_grad()
def generated(theirs: Any, prompt: list[int], count: int = 12) -> tuple[list[int], list[float]]:
    """Tokens of transformers' generate, and the log-probability of each by its own logits."""
    row = theirs.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=-1
    )
    logprobs = theirs(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    ids = row[0, len(prompt) :]
    return ids.tolist(), logprobs.gather(-1, ids[:, None])[:, 0].tolist()


def test_greedy_answers_are_those_of_generate_whoever_runs_beside(pair: tuple[Any, LoadedModel]) -> None:
    theirs, opened = pair
    answers = engine(opened).generate([Request(prompt, greedy()) for prompt in PROMPTS])
    for prompt, answer in zip(PROMPTS, answers):
        ids, logprobs = generated(theirs, prompt)
        assert answer.ids == ids
        assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)


def test_a_prompt_goes_on_behind_one_that_is_in_the_cache(pair: tuple[Any, LoadedModel]) -> None:
    theirs, opened = pair
    running = engine(opened, slots=1, prefill_tokens=32)  # and is read in pieces
    head = [number * 7 % 300 for number in range(66)]
    (first,) = running.generate([Request(head, greedy(6))])
    longer = [*head, *first.ids, 17, 18]
    (second,) = running.generate([Request(longer, greedy(12))])
    assert second.cached_tokens >= len(head)
    assert second.ids == generated(theirs, longer, 12)[0]


def test_an_answer_ends_at_the_stop_tokens_of_the_model(tmp_path: Path) -> None:
    theirs = hf_models.save(tmp_path / "m")
    ids, _ = generated(theirs, PROMPTS[0], 8)
    stop = next(token for token in ids if token not in ids[: ids.index(token)] and token != ids[0])
    path = tmp_path / "m" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [stop]}))
    (answer,) = engine(hf_models.opened(tmp_path / "m")).generate([Request(PROMPTS[0], Sampling(24, 0.0))])
    assert (answer.ids, answer.finish_reason) == (ids[: ids.index(stop)], "stop")


def test_weights_are_replaced_by_name_and_answers_have_their_version(tmp_path: Path) -> None:
    hf_models.save(tmp_path / "m")
    other = hf_models.network("qwen2", seed=5)
    running = engine(hf_models.opened(tmp_path / "m"))
    before = running.generate([Request(PROMPTS[2], greedy())])[0]
    running.load(other.state_dict(), version=3)
    after = running.generate([Request(PROMPTS[2], greedy())])[0]
    assert (before.version, after.version) == (0, 3)
    assert before.ids != after.ids == generated(other, PROMPTS[2])[0]
    with pytest.raises(ValueError, match=r"lm_head.weight is missing"):
        running.load({name: w for name, w in other.state_dict().items() if name != "lm_head.weight"}, 4)
