"""The scheduler of RL under random interleavings: the bound on staleness, no question lost, one order of training."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.checkpoint import Damaged, Writer, newest, verify
from ascendchat.engine.request import Completion
from ascendchat.rl.buffer import Part, dealt, from_tensors, to_tensors
from ascendchat.rl.rollout import SPARE, Group, Question, TokenRows
from ascendchat.rl.schedule import Rhythm, Slot

CHUNK = 2  # tokens


def ask(number: int) -> Question:
    return Question(number, None, number, [1])  # type: ignore[arg-type]


@dataclass
class World:
    """What a run is: for each question the lengths of its two answers in chunks, and whether their rewards differ."""

    per_batch: int
    staleness: int
    refill: int
    batches: int
    ranks: int
    lengths: dict[int, int] = field(default_factory=dict)
    differ: dict[int, bool] = field(default_factory=dict)

    def rhythm(self, rank: int) -> Rhythm:
        names = "per_batch", "staleness", "refill", "batches", "ranks"
        return Rhythm(**{name: getattr(self, name) for name in names}, rank=rank)

    def known(self, chance: random.Random, question: int) -> tuple[int, bool]:
        if question not in self.lengths:
            self.lengths[question] = chance.randint(1, 4)
            self.differ[question] = chance.random() < 0.5
        return self.lengths[question], self.differ[question]


worlds = st.builds(
    World,
    per_batch=st.integers(1, 5),
    staleness=st.integers(0, 3),
    refill=st.integers(0, 2),
    batches=st.integers(1, 5),
    ranks=st.integers(1, 2),
)


def generate(world: World, rhythm: Rhythm, slot: Slot, chance: random.Random) -> None:
    """A chunk more of a slot, by the weights of now."""
    question = rhythm.question(slot)
    chunks, differ = world.known(chance, question)
    answers = slot.answers or [Completion(finish_reason="cancelled"), Completion(finish_reason="cancelled")]
    slot.answers = [
        Completion(
            ids=one.ids + [7] * CHUNK,
            logprobs=one.logprobs + [-0.1] * CHUNK,
            forced=one.forced + [False] * CHUNK,
            versions=one.versions + [rhythm.version] * CHUNK,
            finish_reason="stop" if slot.wave + 1 == chunks else "cancelled",
        )
        for one in answers
    ]
    if slot.wave + 1 == chunks:
        rhythm.finished(slot, Group(ask(question), slot.answers, [0.0, float(differ)], 2))
    else:
        rhythm.passed(slot)


def expected(world: World, batch: int, rank: int) -> list[tuple[int, int]]:
    """The order of training by the lengths alone: (slot, its last question)."""
    rhythm, found = world.rhythm(rank), []
    for number in range(batch * world.per_batch, (batch + 1) * world.per_batch):
        if rhythm.mine(number):
            slot = Slot(number)
            while not world.differ[rhythm.question(slot)] and slot.round < world.refill:
                slot.round += 1
            question = rhythm.question(slot)
            found.append((slot.round, world.lengths[question], number, question))
    return [(number, question) for _, _, number, question in sorted(found)]


@dataclass
class Run:
    """All ranks of a run, and its last checkpoint."""

    rhythms: list[Rhythm]
    saved: tuple[int, list[dict[str, torch.Tensor]]]
    taken: list[list[Slot]]  # of the batch, by rank
    trained: dict[int, list[list[tuple[int, int]]]]  # by batch and rank: slot and question


def check_admission(world: World, rhythm: Rhythm) -> None:
    limit = (world.staleness + rhythm.version + 1) * world.per_batch
    assert rhythm.begun <= min(limit, world.batches * world.per_batch)
    assert all(number < limit for number in rhythm.slots)


def train(world: World, run: Run) -> None:
    """The update of a batch, on all ranks."""
    batch = run.rhythms[0].version
    for rank, slots in enumerate(run.taken):
        run.trained[batch][rank] = [(slot.number, slot.group.question.number) for slot in slots if slot.group]
        for slot in slots:
            assert slot.group is not None
            for answer in slot.group.answers:
                assert answer.finish_reason != "cancelled", "half an answer"
                ages = [batch - version for version in answer.versions]
                assert 0 <= min(ages) <= max(ages) <= world.staleness
    for rhythm in run.rhythms:
        rhythm.next_batch()
    run.taken = [[] for _ in run.rhythms]


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(0, 2**32))
def test_any_interleaving_keeps_the_bound_and_trains_every_slot_once(world: World, seed: int) -> None:
    """Threads of the generator, the trainer, checkpoints and kills in any order."""
    chance = random.Random(seed)
    rhythms = [world.rhythm(rank) for rank in range(world.ranks)]
    run = Run(rhythms, (0, []), [[] for _ in rhythms], {batch: [[]] * world.ranks for batch in range(world.batches)})
    kills = chance.randint(0, 3)
    while run.rhythms[0].version < world.batches:
        step = chance.choice(["generate"] * 6 + ["take"] * 3 + ["begin", "save", "kill"])
        rank = chance.randrange(world.ranks)
        rhythm = run.rhythms[rank]
        unfinished = [slot for slot in rhythm.slots.values() if slot.group is None]
        if step == "begin" or (not unfinished and step == "generate"):
            rhythm.admit()
        elif step == "generate":
            generate(world, rhythm, chance.choice(unfinished), chance)
        elif step == "take" and rhythm.begun >= (rhythm.version + 1) * world.per_batch:
            run.taken[rank] += rhythm.take(rhythm.version)
            begun = all(one.begun >= (one.version + 1) * world.per_batch for one in run.rhythms)
            if begun and all(one.over(one.version) for one in run.rhythms):
                train(world, run)
        elif step == "save" and not any(run.taken):
            states = [to_tensors(list(one.slots.values()), {}) for one in run.rhythms]
            run.saved = rhythm.version, [state for state in states if state]
        elif step == "kill" and kills:
            kills -= 1
            version, files = run.saved
            slots, _ = from_tensors(files, ask)
            run.rhythms = [world.rhythm(rank) for rank in range(world.ranks)]
            for one in run.rhythms:
                one.go_on(version, slots)
            run.taken = [[] for _ in run.rhythms]
        for one in run.rhythms:
            check_admission(world, one)
    for batch in range(world.batches):
        for rank in range(world.ranks):
            assert run.trained[batch][rank] == expected(world, batch, rank)


def test_a_resumed_run_begins_no_more_than_the_formula_allows() -> None:
    """A count that starts anew after a resume would let the staleness grow without a bound."""
    rhythm = Rhythm(per_batch=4, staleness=1, refill=0, batches=100)
    rhythm.go_on(10, [Slot(number) for number in (40, 41, 43, 44)])
    assert [slot.number for slot in rhythm.admit()] == [42, 45, 46, 47]
    assert rhythm.admit() == []
    rhythm.go_on(10, [Slot(45)], dropped=True)
    assert [slot.number for slot in rhythm.admit()] == [44, 46, 47], "the batch that comes next is half trained"


def test_a_replacement_is_a_function_of_slot_and_round() -> None:
    rhythm = Rhythm(per_batch=4, staleness=0, refill=3, batches=9)
    numbers = [rhythm.question(Slot(number, round)) for number in range(12) for round in range(4)]
    assert len(set(numbers)) == 48
    assert sorted(numbers)[:12] == list(range(12))
    assert min(number for number in numbers if number >= 12) == SPARE


def test_short_groups_are_trained_while_a_long_one_runs() -> None:
    rhythm = Rhythm(per_batch=3, staleness=0, refill=0, batches=1)
    short, long, middle = rhythm.admit()
    rhythm.finished(short, group(0))
    assert rhythm.take(0) == [], "another may be as short, and come before"
    rhythm.passed(long)
    rhythm.passed(middle)
    assert rhythm.take(0) == [short]
    rhythm.finished(middle, group(2))
    rhythm.passed(long)
    assert rhythm.take(0, whole=True) == []
    assert rhythm.take(0) == [middle]
    assert rhythm.take(0) == []
    assert not rhythm.over(0)
    rhythm.finished(long, group(1))
    assert rhythm.take(0) == [long]
    assert rhythm.over(0)


def group(number: int, *, text: str = "") -> Group:
    answers = [Completion([5, 6 + i], text, [-0.1 / 3, None], [False, True], "stop", 3, [3, 4 + i]) for i in range(2)]
    right, terms = [True, False], [{"task": 1.0}, {"task": 0.0, "format": 1 / 3}]
    return Group(ask(number), answers, [0.1, 0.7], 1, right=right, terms=terms, rejected=3)


def parts(rows: int) -> dict[int, Part]:
    packed = TokenRows.empty(rows, 4, 0)
    packed.behaviour[:] = 1 / 3
    return {1: Part(packed, 17, 2), 2: Part(TokenRows.empty(0, 4, 0), 0, 0)}


def saved(folder: Path) -> tuple[Slot, Slot]:
    """A checkpoint with a finished group, one under way, and a batch half trained."""
    done, going = Slot(8, 1, 2, group=group(8, text="é 你好")), Slot(9, 0, 1, answers=group(9).answers)
    writer = Writer(folder, say=lambda text: None)
    extra = to_tensors([done, going], parts(3))
    writer.save(4, model={"w": torch.zeros(1)}, shards={}, state={}, extra=extra)
    writer.wait()
    return done, going


def test_what_is_not_trained_yet_survives_to_the_last_digit(tmp_path: Path) -> None:
    done, going = saved(tmp_path)
    found = newest(tmp_path)
    assert found is not None
    slots, rows = from_tensors(found.extras(), ask)
    assert slots == [done, going]
    (mine,) = rows
    assert (mine[1].tokens, mine[1].answers, len(mine[2].rows.inputs)) == (17, 2, 0)
    assert (mine[1].rows.behaviour == torch.full((3, 4), 1 / 3).numpy()).all()
    assert to_tensors([], {}) == {}


def test_a_group_that_stands_in_for_others_remembers_the_first_and_what_was_rejected(tmp_path: Path) -> None:
    rhythm = Rhythm(per_batch=1, staleness=0, refill=2, batches=1)
    (slot,) = rhythm.admit()
    for right in ([True, True, True], [False, False]):
        rhythm.finished(slot, Group(ask(0), [], [0.0] * len(right), right=right, rejected=1))
    writer = Writer(tmp_path, say=lambda text: None)
    writer.save(1, model={"w": torch.zeros(1)}, shards={}, state={}, extra=to_tensors([slot], {}))
    writer.wait()
    found = newest(tmp_path)
    assert found is not None
    ((again,), _) = from_tensors(found.extras(), ask)
    assert again == slot
    rhythm.finished(again, replace(group(7), question=replace(ask(7), prompt=[1, 2, 3])))
    assert again.group is not None
    assert again.group.solved == (3, 3), "pass@k is of the question that was drawn"
    assert again.group.rejected == 1 + 1 + 3
    state = to_tensors([again], {})
    assert from_tensors([state], ask)[0] == [again], "the prompt is that of its conversations"


def test_rows_are_dealt_to_another_number_of_ranks() -> None:
    both = dealt([parts(3), parts(2)], 0, 1)
    assert (len(both[1].rows.inputs), both[1].tokens, both[1].answers) == (5, 34, 4)
    assert both[1].rows.lengths.sum() == 5 * 4
    assert [len(dealt([parts(3), parts(2)], rank, 2)[1].rows.inputs) for rank in range(2)] == [3, 2]
    assert dealt([parts(3)], 1, 2) == {}


def test_a_damaged_buffer_is_noticed_and_the_model_can_still_be_used(tmp_path: Path) -> None:
    saved(tmp_path)
    (file,) = (tmp_path / "step_000004").glob("extra-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Damaged, match="extra-0-of-1"):
        verify(tmp_path / "step_000004")
    assert verify(tmp_path / "step_000004", optimizer=False).step == 4
