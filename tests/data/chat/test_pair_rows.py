"""Pairs as packed rows: only replies are scored, both of a pair lie in one bin, and every pair comes once an epoch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest

from ascendchat.data.chat import pairs as pair_rows
from ascendchat.data.chat.pairs import Pair, PairCounts, PairLoader, PairRows, pack_pairs, render_pair
from ascendchat.data.chat.render import Encoder, Message, Rendered, render, render_prompt
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE
from ascendchat.tasks.pair_mixture import open_pair_mixture


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    """A tokenizer of our own."""
    return train_tokenizer(["what is the answer to it? the answer is four, not five."], 280)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One of Hugging Face, with a chat template."""
    folder = tmp_path_factory.mktemp("hf") / "tiny"
    hf_models.save(folder, num_hidden_layers=1)
    return hf_models.opened(folder).tokenizer


@pytest.fixture(params=["ours", "theirs"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Either of them."""
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def build(tokenizer: Tokenizer, pairs: list[Pair], seq_len: int, seed: int, counts: PairCounts) -> PairRows:
    found = [render_pair(tokenizer, pair, seq_len + 1, counts) for pair in pairs]
    counts.check()
    return PairRows([pair for pair in found if pair], seq_len, seed, tokenizer.specials["<|pad|>"])


def say(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def pair(question: str, good: str, bad: str, *before: dict[str, str]) -> Pair:
    return Pair([*before, say("user", question)], [say("assistant", good)], [say("assistant", bad)])


EARLIER = say("system", "be kind"), say("user", "hi"), say("assistant", "hello there")


def test_only_the_replies_are_scored_and_their_end(tokenizer: Tokenizer) -> None:
    asked = pair("what is it?", "four", "not five", *EARLIER)
    counts = PairCounts()
    found = render_pair(tokenizer, asked, 500, counts)
    assert found is not None
    prompt = render_prompt(tokenizer, asked.prompt)
    for side, text in zip(found, ("four", "not five")):
        assert side.ids[: len(prompt)] == prompt
        assert not any(side.mask[: len(prompt)]), "nothing of the prompt, where the assistant has spoken before"
        scored = [token for token, learnt in zip(side.ids, side.mask) if learnt]
        assert tokenizer.decode(scored[:-1]) == text
        assert scored[-1] == tokenizer.specials["<|assistant_end|>"]
    assert (counts.whole, counts.cut) == (1, 0)


def test_a_pair_that_is_too_long_loses_the_oldest_first_and_keeps_one_prompt(tokenizer: Tokenizer) -> None:
    asked = pair("what is it?", "four", "not five", *EARLIER)
    counts = PairCounts()
    whole = render_pair(tokenizer, asked, 500, PairCounts())
    bare = render_pair(tokenizer, pair("what is it?", "four", "not five"), 500, PairCounts())
    assert whole
    assert bare
    assert render_pair(tokenizer, asked, bare.longest, counts) == bare, "earlier turns and the system message go"
    assert counts.cut == 1
    assert counts.lost_tokens == sum(len(a.ids) - len(b.ids) for a, b in zip(whole, bare))
    long = render_pair(tokenizer, pair("it is " * 50, "four " * 40, "not five"), 40, counts)
    assert long is not None
    assert long.longest == 40
    firsts = [side.mask.index(1) for side in long]
    assert firsts == [20, 20], "half of the room stays for the prompt"
    assert long.chosen.ids[:20] == long.rejected.ids[:20]
    assert sum(long.chosen.mask) == 20


def test_replies_that_are_the_same_after_the_cut_are_counted_and_left_out(tokenizer: Tokenizer) -> None:
    counts = PairCounts()
    assert render_pair(tokenizer, pair("q", "it is " * 60 + "four", "it is " * 60 + "five"), 40, counts) is None
    assert counts.unsupervised == 1


def test_a_pair_whose_chosen_reply_is_empty_is_counted_and_left_out(tokenizer: Tokenizer) -> None:
    counts = PairCounts()
    assert render_pair(tokenizer, pair("q", " ", "five"), 40, counts) is None
    assert "1 with an empty chosen reply (left out)" in counts.line()
    assert render_pair(tokenizer, pair("q", "four", ""), 40, counts) is not None


def test_what_the_template_refuses_is_counted_and_too_much_of_it_is_an_error(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].content == 'bad' %}{{ raise_exception('not this one') }}{% endif %}" + hf_models.CHATML
    )
    hf_models.save(tmp_path / "picky", template=template, num_hidden_layers=1)
    tokenizer = hf_models.opened(tmp_path / "picky").tokenizer
    good = [pair(f"q {n}", "a", "b") for n in range(120)]
    counts = PairCounts()
    rows = build(tokenizer, [pair("bad", "a", "b"), *good], 64, 0, counts)
    assert (rows.pairs, counts.refused) == (120, 1)
    PairCounts(cut=120, refused=1).check()  # a pair that was cut was not refused
    assert "1 refused by the chat template" in counts.line()
    with pytest.raises(UserError, match="not this one; mend them"):
        build(tokenizer, [*[pair("bad", "a", "b")] * 2, *good], 64, 0, PairCounts())


def test_bins_hold_every_pair_once_both_sides_and_no_row_too_much() -> None:
    rng = np.random.default_rng(0)
    lengths = [(int(a), int(b)) for a, b in rng.integers(1, 65, (900, 2))]
    bins = pack_pairs(lengths, 64, window=400)
    seen = [sequence for both in bins for row in both for sequence in row]
    assert sorted(seen) == list(range(1800))
    for both in bins:
        assert {sequence // 2 for row in both for sequence in row if sequence % 2 == 0} == {
            sequence // 2 for row in both for sequence in row if sequence % 2
        }
        assert all(sum(lengths[s // 2][s % 2] for s in row) <= 64 for row in both)
    assert sum(map(sum, lengths)) > 0.9 * 128 * len(bins), "the rows are almost full"


def test_without_packing_a_bin_holds_one_pair(ours: Tokenizer) -> None:
    found = render_pair(ours, pair("q", "a", "b"), 65, PairCounts())
    assert found is not None
    rows = PairRows([found] * 5, 64, 0, ours.specials["<|pad|>"], packing=False)
    assert rows.per_epoch == 5
    batch = PairLoader([(rows, 1.0)], 2).batch(0)
    assert batch.lengths.tolist() == [len(found.chosen.ids) - 1, 65 - len(found.chosen.ids)] * 4
    assert rows.filled == (len(found.chosen.ids) - 1) / 64
    full = PairRows([found], found.longest - 1, 0, 0)
    assert full.filled == 1
    with pytest.raises(ValueError, match="a sequence is longer than a row"):
        PairRows([found], found.longest - 2, 0, 0)
    with pytest.raises(UserError, match="no pair of two replies was found"):
        PairRows([], 64, 0, 0)


def test_entries_are_split_by_prompt_shortened_and_validated_elsewhere(ours: Tokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": f"q {n // 2}", "chosen": f"a {n}", "rejected": "b"} for n in range(400)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def opened(**more: Any) -> tuple[list[int], list[int], list[int]]:
        found = open_pair_mixture([str(path)], ours, 64, say=lambda line: None, **more)
        firsts = [each.first for each in found.every]
        return [each.pairs for each, _ in found.sources], [each.pairs for each in found.validation], firsts

    (train,), (held,), firsts = opened()
    assert train + held == 400
    assert 0 < held < 30
    assert held % 2 == 0, "both pairs of a prompt"
    assert firsts == [0, train], "numbers of the validation are behind the others"
    assert opened(held_out=0) == ([400], [], [0])
    assert opened(max_pairs=7, held_out=0)[0] == [7]
    assert opened(validation=[str(path)]) == ([400], [400], [0, 400])
    (train,), (held,), _ = opened(held_out=100)
    assert train + held == 400
    assert 60 < held < 140


def test_batches_are_slices_of_one_global_batch_and_epochs_hold_every_pair(ours: Tokenizer) -> None:
    asked = [pair(f"what is {'it ' * (n % 7)}?", "four " * (1 + n % 3), "five " * (1 + n % 5)) for n in range(50)]
    rows = build(ours, asked, 96, 3, PairCounts())
    batches = PairLoader([(rows, 1.0)], 4)
    epoch = PairLoader([(rows, 1.0)], rows.per_epoch).batch(0)
    assert sorted(epoch.number) == list(range(50)), "each once an epoch"
    whole = batches.batch(1)
    halves = [batches.batch(1, 0, 2), batches.batch(1, 2, 4)]
    assert np.array_equal(whole.inputs, np.concatenate([half.inputs for half in halves]))
    assert whole.number.tolist() == [number for half in halves for number in half.number]
    assert len(whole.number) == batches.targets(1)
    for batch in (epoch, whole, batches.batch(2)):
        ends = np.cumsum(batch.lengths)
        assert ends[-1] == batch.inputs.size
        flat, targets = batch.inputs.reshape(-1), batch.targets.reshape(-1)
        for segments, side in ((batch.chosen, 0), (batch.rejected, 1)):
            for segment, number, tokens in zip(segments, batch.number, batch.tokens):
                span = slice(ends[segment] - batch.lengths[segment], ends[segment])
                begin, end = rows.starts[2 * number + side], rows.starts[2 * number + side + 1]
                assert flat[span].tolist() == rows.ids[begin : end - 1].tolist()
                scored = targets[span][targets[span] != IGNORE]
                assert scored.tolist() == rows.ids[begin + 1 : end][rows.mask[begin + 1 : end] == 1].tolist()
                assert len(scored) == tokens[side]
    again = PairLoader([(build(ours, asked, 96, 3, PairCounts()), 1.0)], 4).batch(7)
    assert np.array_equal(again.inputs, batches.batch(7).inputs), "a pure function of data, seed and step"


def test_a_pair_behind_a_long_conversation_is_work_in_proportion_to_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def messages_made(exchanges: int) -> int:
        made = 0

        def counted(tokenizer: Encoder, messages: Sequence[Message]) -> Rendered:
            nonlocal made
            made += len(messages)
            return render(tokenizer, messages)

        monkeypatch.setattr(pair_rows, "render", counted)
        before = [say(role, "hi") for _ in range(exchanges) for role in ("user", "assistant")]
        counts = PairCounts()
        assert render_pair(tokenizer, pair("What?", "42", "43", *before), 60, counts)
        assert counts.cut == 1
        return made

    assert messages_made(200) <= 2.2 * messages_made(100)
