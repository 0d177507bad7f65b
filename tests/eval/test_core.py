"""CORE: the batched evaluation against the one-at-a-time reference, and the rules that make the number comparable."""

from __future__ import annotations

import math
import random
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_bundle import write_bundle
from core_reference import Judged
from core_reference import run as run_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.data.tokenizer.tokenizer import train_tokenizer
from ascendchat.engine.padding import padded_length
from ascendchat.errors import UserError
from ascendchat.eval import core_benchmark as core
from ascendchat.eval import scorer
from ascendchat.eval.core_benchmark import CoreTask, load_bundle
from ascendchat.eval.scorer import Example, ModelScorer, Pending, Scored, batches
from ascendchat.nn.attention import choose
from ascendchat.nn.gpt import GPT, dense
from ascendchat.sizes.shape import Shape

CPU = torch.device("cpu")
KERNEL = choose("cpu", torch.float32, 16)[0]


OURS = train_tokenizer(["the cat.\n\nsat on 12 mats\n", "it's  a\n b's\t\n猫坐在垫子上。\n"] * 4, 320)
PART = st.text(st.sampled_from("ab '’.\n\r\t 12猫。\u3000\u2028\x1c\xa0"), max_size=12)


class Hashed:
    """A tokenizer with the split rule of GPT-style patterns and 40 ids: pieces fall on ids by their bytes."""

    SPLIT = re.compile(r" ?\w+| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+")
    specials = {"<|bos|>": 40}  # noqa: RUF012
    opening: Sequence[int] = (40,)

    def encode(self, text: str) -> list[int]:
        return [sum(piece.encode()) % 40 for piece in self.SPLIT.findall(text)]


class Letters(Hashed):
    """One token per character: the encoding of a text is that of its parts."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 40 for letter in text]


@pytest.fixture(scope="module")
def model() -> GPT:
    """Small, random, but with every part of the network at work."""
    model = GPT(Shape.from_depth(4, vocab=41, dim=32, head_dim=16, seq_len=512, window_pattern="SSSL"))
    model.initialise(seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1] in ("out", "down", "smear", "head", "shift"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small bundle on the disk."""
    return write_bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[CoreTask]:
    """The tasks of the small bundle."""
    return load_bundle(folder)


class Recorder:
    """Passes everything on, and keeps what was scored."""

    def __init__(self, inner: scorer.Scorer) -> None:
        self.inner = inner
        self.scored: list[list[Scored]] = []

    def submit(self, examples: Sequence[Example]) -> Pending:
        pending = self.inner.submit(examples)

        def result() -> list[list[Scored]]:
            found = pending()
            self.scored += found
            return found

        return result


def agree(
    model: GPT, tokenizer: Any, tasks: list[CoreTask], *, max_len: int, max_tokens: int, max_rows: int | None
) -> int:
    """Assert that every example is judged alike, down to the nats; returns how many there were."""
    expected = run_reference(model, dense(model, KERNEL), tokenizer, tasks, CPU, max_rows=max_rows, max_len=max_len)
    compared = 0
    for task in tasks:
        if task.missing:
            continue
        recorder = Recorder(ModelScorer(model, KERNEL, CPU, max_tokens=max_tokens, max_len=max_len))
        outcome = core.score_task(task, recorder, tokenizer, max_len=max_len, max_rows=max_rows)
        reference: list[Judged] = expected[task.label]
        assert outcome.cropped == sum(judged.cropped for judged in reference), task.label
        assert len(outcome.correct) == len(recorder.scored) == len(reference)
        for i, (judged, scored) in enumerate(zip(reference, recorder.scored)):
            if task.kind == "language_modeling":
                assert scored[0].greedy.tolist() == judged.hits, (task.label, i)
            else:
                means = [row.nats.mean() if len(row.nats) else math.nan for row in scored]
                np.testing.assert_allclose(means, judged.means, rtol=0, atol=2e-5, err_msg=f"{task.label} {i}")
            assert outcome.correct[i] == judged.correct, (task.label, i, judged)
            compared += 1
    return compared


@pytest.mark.slow
def test_batches_agree_with_one_example_at_a_time(model: GPT, tasks: list[CoreTask]) -> None:
    assert agree(model, Hashed(), tasks, max_len=512, max_tokens=700, max_rows=None) == 3 * 16 + 12


def test_cropped_prompts_agree_and_are_counted(model: GPT, tasks: list[CoreTask]) -> None:
    agree(model, Hashed(), tasks, max_len=90, max_tokens=700, max_rows=8)
    outcome = core.score_task(tasks[0], ModelScorer(model, KERNEL, CPU), Hashed(), max_len=90)
    assert outcome.cropped == 16
    assert core.score_task(tasks[0], ModelScorer(model, KERNEL, CPU), Hashed(), max_len=512).cropped == 0


def test_the_shared_beginning_is_run_once(model: GPT, tasks: list[CoreTask]) -> None:
    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].numel()))
    core.score_task(tasks[0], ModelScorer(model, KERNEL, CPU), Hashed(), max_len=512)
    shared, seen[:] = sum(seen), []
    one = ModelScorer(model, KERNEL, CPU)
    shown = [[tasks[0].rows[j] for j in core.demonstrations(16, i, 6)] for i in range(16)]
    rows = [
        row
        for i in range(16)
        for row in core.Prompts(Hashed()).encode(
            core.demonstration_texts(tasks[0], shown[i]), core.query_texts(tasks[0], tasks[0].rows[i])
        )
    ]
    one.submit([Example([row], [len(row) - 1]) for row in rows])()
    hook.remove()
    assert shared < sum(seen) / 3  # four options each


@pytest.fixture(scope="module")
def real_tasks(real_data: Path) -> list[CoreTask]:
    """The tasks of the published bundle."""
    return load_bundle(real_data / "eval" / "eval_bundle")


@pytest.mark.long(short="test_batches_agree_with_one_example_at_a_time")
def test_the_real_bundle_agrees_with_one_example_at_a_time(model: GPT, real_tasks: list[CoreTask]) -> None:
    some = [task for task in real_tasks if task.label in ("copa", "winograd", "arc_easy", "jeopardy", "squad")]
    assert agree(model, Hashed(), some, max_len=400, max_tokens=4096, max_rows=11) == 55


def test_the_real_bundle_has_22_tasks_and_every_row_but_those_of_squad(real_tasks: list[CoreTask]) -> None:
    assert len(real_tasks) == 22
    assert [task.label for task in real_tasks if not task.complete] == ["squad"]


class Uniform:
    """Every token costs the same; nothing is ever the first choice but by the rule for equals."""

    def submit(self, examples: Sequence[Example]) -> Pending:
        def score(row: Any, start: int) -> Scored:
            return Scored(np.full(len(row) - start, 4.0), np.zeros(len(row) - start, bool))

        return lambda: [[score(row, start) for row, start in zip(e.rows, e.starts)] for e in examples]


def test_a_scorer_that_knows_nothing_takes_the_first_option_and_is_measured_against_chance(
    tasks: list[CoreTask],
) -> None:
    for task, chance in zip(tasks, (0.25, 0.5, 0.0)):
        outcome = core.score_task(task, Uniform(), Letters(), max_len=512)
        firsts = [row.get("gold") == 0 for row in task.rows]
        assert outcome.correct == (firsts if task.kind != "language_modeling" else [False] * len(firsts))
        assert outcome.accuracy == sum(outcome.correct) / len(firsts)
        assert outcome.centred == core.centre(outcome.accuracy, chance)


def test_chance_is_centred_to_zero_and_perfection_to_one() -> None:
    assert core.centre(0.25, 0.25) == 0.0
    assert core.centre(1.0, 0.62) == 1.0
    assert core.centre(0.4, 0.2) == pytest.approx(0.25)
    assert core.centre(0.0, 0.5) == -1.0


def test_missing_tasks_and_subsets_are_reported_and_never_hidden(tasks: list[CoreTask]) -> None:
    said: list[str] = []
    report = core.score_tasks(tasks, Uniform(), Hashed(), max_len=512, say=said.append)
    found = report.to_dict()
    assert found["missing"] == {"gone": "no file words/gone.jsonl"}
    assert found["subsets"] == {"part": "12 of 40 rows"}
    assert (found["core_tasks"], found["core_with_subsets_tasks"], found["tasks_in_bundle"]) == (3, 4, 5)
    centred = {task["label"]: task["centred"] for task in found["tasks"]}
    assert found["core"] == pytest.approx(sum(centred[name] for name in ("choice", "schema", "lm")) / 3)
    assert found["core_with_subsets"] == pytest.approx(sum(centred.values()) / 4)
    assert any("gone" in line and "MISSING" in line for line in said)
    assert any("part" in line and "SUBSET 12 of 40 rows" in line for line in said)
    assert any("over the 3 complete of 5 tasks" in line for line in core.core_lines(report))
    assert any("gone" in line for line in core.core_lines(report))


def test_a_cut_task_draws_its_demonstrations_from_the_cut_rows(model: GPT, tasks: list[CoreTask]) -> None:
    assert agree(model, Hashed(), tasks[:1], max_len=512, max_tokens=700, max_rows=8) == 8


def test_a_cut_below_the_demonstrations_scores_its_rows_as_the_whole_run_does(
    model: GPT, tasks: list[CoreTask]
) -> None:
    def score(rows: int | None) -> tuple[core.TaskScore, list[list[Scored]]]:
        recorder = Recorder(ModelScorer(model, KERNEL, CPU, max_tokens=100))  # one example at a time
        return core.score_task(tasks[0], recorder, Hashed(), max_len=512, max_rows=rows), recorder.scored

    (quick, some), (full, every) = score(6), score(None)  # six are to be shown, so the cut has one too few
    assert (quick.rows, len(some), full.rows) == (6, 6, 16)
    assert quick.correct == full.correct[:6]
    for one, same in zip(some, every):
        for a, b in zip(one, same, strict=True):
            np.testing.assert_allclose(a.nats, b.nats, rtol=0, atol=2e-5)
    assert "first 6 rows, shown ones from all" in core.score_line(quick)


def test_a_file_too_small_for_its_demonstrations_is_refused_before_anything_is_scored(tasks: list[CoreTask]) -> None:
    small = [*tasks[1:], CoreTask(**{**vars(tasks[0]), "rows": tasks[0].rows[:6]})]
    with pytest.raises(UserError, match=r"choice shows 6 other rows .* holds only 6; .*data fetch core"):
        core.check_rows(small)
    core.check_rows(tasks)


def test_demonstrations_never_show_the_row_itself_and_follow_the_published_draw() -> None:
    for index in range(50):
        others = [i for i in range(50) if i != index]
        assert core.demonstrations(50, index, 10) == random.Random(1234 + index).sample(others, 10)


def test_a_context_that_ends_inside_a_token_is_counted_and_scored_from_where_it_differs() -> None:
    counts = core.PromptCounts()
    example = core.build_example("language_modeling", [[9, 1, 2, 3], [9, 1, 2, 7, 8]], 512, counts)
    assert (list(example.starts), counts.unclean) == ([3], 1)
    core.build_example("language_modeling", [[9, 1, 2], [9, 1, 2, 7, 8]], 512, counts)
    assert counts.unclean == 1


def test_parts_are_encoded_once_and_a_tokenizer_that_crosses_them_is_used_whole() -> None:
    class Crossing(Hashed):
        def encode(self, text: str) -> list[int]:
            return [len(text) % 40]

    crossing = core.Prompts(Crossing())
    assert [crossing.encode(["a\n\n"], ["b"]), crossing.encode(["ab\n\n"], ["c"])] == [[[40, 4]], [[40, 5]]]
    calls: list[str] = []

    class Counted(Hashed):
        def encode(self, text: str) -> list[int]:
            calls.append(text)
            return super().encode(text)

    prompts = core.Prompts(Counted(), checks=0)
    head, ends = ["the cat.\n\n", "sat on\n a mat\n\n"], ["who?\nAnswer: red", "who?\nAnswer: blue"]
    for _ in range(2):
        rows = prompts.encode(head, ends)
        assert rows == [[40, *Hashed().encode("".join(head) + end)] for end in ends]
    assert calls == [*head, "who?\n", "Answer: red", "Answer: blue", "Answer: red", "Answer: blue"]
    blank = prompts.encode(head, [" red"])  # a blank may belong to the line break before it: no cut there
    assert blank == [[40, *Hashed().encode("".join(head) + " red")]]
    assert calls[-1] == "".join(head) + " red"


@settings(deadline=None, max_examples=60)
@given(st.lists(PART, max_size=3), st.lists(PART, min_size=1, max_size=2))
def test_our_tokenizer_gives_the_same_ids_part_by_part(head: list[str], ends: list[str]) -> None:
    prompts = core.Prompts(OURS, checks=0)
    parts = [f"{part}\n\n" for part in head]
    assert prompts.encode(parts, ends) == prompts.whole(parts, ends)


def test_the_fetched_archive_is_read_in_place(folder: Path, tmp_path: Path, tasks: list[CoreTask]) -> None:
    with zipfile.ZipFile(tmp_path / "eval_bundle.zip", "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, f"eval_bundle/{path.relative_to(folder)}")
    assert load_bundle(tmp_path) == load_bundle(tmp_path / "eval_bundle.zip") == tasks


def test_a_missing_or_broken_bundle_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ascendchat data fetch core"):
        load_bundle(tmp_path / "nothing")
    broken = write_bundle(tmp_path / "broken")
    packed = broken / "eval_data" / "words" / "choice.jsonl.xz"
    packed.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"choice\.jsonl\.xz is damaged or incomplete"):
        load_bundle(broken)


def test_batches_hold_every_row_once_within_the_budget_longest_first() -> None:
    rng = random.Random(3)
    lengths = [rng.randint(1, 700) for _ in range(300)]
    made = list(batches(lengths, 4096))
    assert sorted(i for batch in made for i in batch) == list(range(300))
    assert all(len(batch) * padded_length(max(lengths[i] for i in batch)) <= 4096 for batch in made)
    assert lengths[made[0][0]] == max(lengths)
    assert list(batches([9000], 4096)) == [[0]]  # a row larger than the budget still runs, alone
    assert all(n <= padded_length(n) <= max(16, n + n // 8 + 16) for n in range(1, 3000))


def text_rows(tokenizer: core.Encoder, texts: Sequence[str], seq_len: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of at most `seq_len` tokens; every token of every text is a target exactly once."""
    for text in texts:
        ids = np.array([tokenizer.specials["<|bos|>"], *tokenizer.encode(text)], dtype=np.int64)
        for begin in range(0, len(ids) - 1, seq_len):
            row = ids[begin : begin + seq_len + 1]
            yield row[:-1], row[1:]


def test_rows_begin_as_the_tokenizer_begins_a_text() -> None:
    for opening in ([], [7], [7, 9]):
        letters = Letters()
        letters.opening = opening
        prompts = core.Prompts(letters)
        for head in ([], ["ab\n", "cd\n"]):
            for _ in range(2):
                rows = prompts.encode([*head, "ab"], ["a", "\nb"])
                wanted = ["".join([*head, "ab", end]) for end in ("a", "\nb")]
                assert rows == [[*opening, *letters.encode(text)] for text in wanted]
