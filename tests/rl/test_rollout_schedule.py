"""The schedule of rollouts under random interleavings: the bound on staleness, and every slot trained once."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.checkpoint import Damaged, Writer, newest, verify
from ascendchat.engine.request import Completion
from ascendchat.rl.buffer import UpdateShare, dealt, from_tensors, to_tensors
from ascendchat.rl.rollout import RESAMPLED, AnswerGroup, TaskQuestion, TokenRows
from ascendchat.rl.schedule import PromptSlot, RolloutSchedule
from ascendchat.rl.stage import RlStage


def ask(number: int) -> TaskQuestion:
    return TaskQuestion(number, None, number, [1])  # type: ignore[arg-type]


Versions = dict[tuple[int, int], list[int]]  # of the tokens under way, by slot and question


@dataclass
class World:
    """What a run is: for each question the steps that its answers take, and whether their rewards differ."""

    per_batch: int
    staleness: int
    refill: int
    batches: int
    ranks: int
    lengths: dict[int, int] = field(default_factory=dict)
    differ: dict[int, bool] = field(default_factory=dict)

    def schedule(self, rank: int) -> RolloutSchedule:
        names = "per_batch", "staleness", "refill", "batches", "ranks"
        return RolloutSchedule(**{name: getattr(self, name) for name in names}, rank=rank)

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


def generate(
    world: World, schedule: RolloutSchedule, slot: PromptSlot, written: Versions, chance: random.Random
) -> None:
    """A token more of a slot's answers, by the weights of now; `written`: the versions of those before."""
    question = schedule.question(slot)
    tokens, differ = world.known(chance, question)
    versions = written.setdefault((slot.number, question), [])
    versions.append(schedule.version)
    if len(versions) == tokens:
        answers = [
            Completion([7] * tokens, "", [-0.1] * tokens, [False] * tokens, "stop", versions[0], list(versions))
            for _ in range(2)
        ]
        schedule.finish(slot, AnswerGroup(ask(question), answers, [0.0, float(differ)], 2))


def expected(world: World, batch: int, rank: int) -> list[tuple[int, int]]:
    """What a batch is trained on: (slot, its last question)."""
    schedule, found = world.schedule(rank), []
    for number in range(batch * world.per_batch, (batch + 1) * world.per_batch):
        if schedule.is_mine(number):
            slot = PromptSlot(number)
            while not world.differ[schedule.question(slot)] and slot.attempt < world.refill:
                slot.attempt += 1
            found.append((number, schedule.question(slot)))
    return found


@dataclass
class Run:
    """All ranks of a run, and its last checkpoint."""

    schedules: list[RolloutSchedule]
    saved: tuple[int, list[dict[str, torch.Tensor]]]
    taken: list[list[PromptSlot]]  # of the batch, by rank
    trained: dict[int, list[list[tuple[int, int]]]]  # by batch and rank: slot and question


def check_admission(world: World, schedule: RolloutSchedule) -> None:
    limit = (world.staleness + schedule.version + 1) * world.per_batch
    assert schedule.begun <= min(limit, world.batches * world.per_batch)
    assert all(number < limit for number in schedule.slots)


def train(world: World, run: Run) -> None:
    """The update of a batch, on all ranks."""
    batch = run.schedules[0].version
    for rank, slots in enumerate(run.taken):
        run.trained[batch][rank] = sorted((slot.number, slot.group.question.number) for slot in slots if slot.group)
        for slot in slots:
            assert slot.group is not None
            for answer in slot.group.answers:
                assert answer.finish_reason != "cancelled", "half an answer"
                ages = [batch - version for version in answer.versions]
                assert 0 <= min(ages) <= max(ages) <= world.staleness
    for schedule in run.schedules:
        schedule.next_batch()
    run.taken = [[] for _ in run.schedules]


@settings(max_examples=60, deadline=None)
@given(worlds, st.integers(0, 2**32))
def test_any_interleaving_keeps_the_bound_and_trains_every_slot_once(world: World, seed: int) -> None:
    """Threads of the generator, the trainer, checkpoints and kills in any order."""
    chance = random.Random(seed)
    schedules = [world.schedule(rank) for rank in range(world.ranks)]
    under_way: list[Versions] = [{} for _ in schedules]
    run = Run(
        schedules, (0, []), [[] for _ in schedules], {batch: [[]] * world.ranks for batch in range(world.batches)}
    )
    kills = chance.randint(0, 3)
    while run.schedules[0].version < world.batches:
        step = chance.choice(["generate"] * 6 + ["take"] * 3 + ["begin", "save", "kill"])
        rank = chance.randrange(world.ranks)
        schedule = run.schedules[rank]
        unfinished = [slot for slot in schedule.slots.values() if slot.group is None]
        if step == "begin" or (not unfinished and step == "generate"):
            schedule.admit()
        elif step == "generate":
            generate(world, schedule, chance.choice(unfinished), under_way[rank], chance)
        elif step == "take" and schedule.begun >= (schedule.version + 1) * world.per_batch:
            run.taken[rank] += schedule.take(schedule.version)
            begun = all(one.begun >= (one.version + 1) * world.per_batch for one in run.schedules)
            if begun and all(one.is_taken(one.version) for one in run.schedules):
                train(world, run)
        elif step == "save" and not any(run.taken):
            states = [to_tensors(list(one.slots.values()), {}) for one in run.schedules]
            run.saved = schedule.version, [state for state in states if state]
        elif step == "kill" and kills:
            kills -= 1
            version, files = run.saved
            slots, _ = from_tensors(files, ask)
            run.schedules = [world.schedule(rank) for rank in range(world.ranks)]
            under_way = [{} for _ in run.schedules]  # half answers are generated again
            for one in run.schedules:
                one.resume(version, slots)
            run.taken = [[] for _ in run.schedules]
        for one in run.schedules:
            check_admission(world, one)
    for batch in range(world.batches):
        for rank in range(world.ranks):
            assert run.trained[batch][rank] == expected(world, batch, rank)


def test_a_resumed_run_begins_no_more_than_the_formula_allows() -> None:
    """A count that starts anew after a resume would let the staleness grow without a bound."""
    schedule = RolloutSchedule(per_batch=4, staleness=1, refill=0, batches=100)
    schedule.resume(10, [PromptSlot(number) for number in (40, 41, 43, 44)])
    assert [slot.number for slot in schedule.admit()] == [42, 45, 46, 47]
    assert schedule.admit() == []
    schedule.resume(10, [PromptSlot(45)], dropped=True)
    assert [slot.number for slot in schedule.admit()] == [44, 46, 47], "the batch that comes next is half trained"


def test_a_replacement_is_a_function_of_slot_and_attempt() -> None:
    schedule = RolloutSchedule(per_batch=4, staleness=0, refill=3, batches=9)
    numbers = [schedule.question(PromptSlot(number, attempt)) for number in range(12) for attempt in range(4)]
    assert len(set(numbers)) == 48
    assert sorted(numbers)[:12] == list(range(12))
    assert min(number for number in numbers if number >= 12) == RESAMPLED


def test_groups_are_trained_as_they_finish() -> None:
    schedule = RolloutSchedule(per_batch=3, staleness=0, refill=1, batches=1)
    first, second, third = schedule.admit()
    schedule.finish(third, group(2))
    schedule.finish(first, group(0))
    assert schedule.take(0) == [first, third]
    assert schedule.take(0) == []
    schedule.finish(second, AnswerGroup(ask(1), [], [1.0, 1.0], 2))
    assert (second.group, second.attempt, schedule.take(0)) == (None, 1, []), "it is resampled"
    assert not schedule.is_taken(0)
    schedule.finish(second, group(1))
    assert schedule.take(0) == [second]
    assert schedule.is_taken(0)


def group(number: int, *, text: str = "") -> AnswerGroup:
    answers = [Completion([5, 6 + i], text, [-0.1 / 3, None], [False, True], "stop", 3, [3, 4 + i]) for i in range(2)]
    right, terms = [True, False], [{"task": 1.0}, {"task": 0.0, "format": 1 / 3}]
    return AnswerGroup(ask(number), answers, [0.1, 0.7], 1, right=right, terms=terms, rejected=3)


def parts(rows: int) -> dict[int, UpdateShare]:
    packed = TokenRows.empty(rows, 4, 0)
    packed.behaviour[:] = 1 / 3
    return {1: UpdateShare(packed, 17, 2), 2: UpdateShare(TokenRows.empty(0, 4, 0), 0, 0)}


def saved(folder: Path) -> list[PromptSlot]:
    """A checkpoint with a finished group, one under way, and a batch half trained."""
    slots = [PromptSlot(8, 1, group=group(8, text="é 你好")), PromptSlot(9, 1, first=(4, 2), rejected=1)]
    writer = Writer(folder, say=lambda text: None)
    writer.save(4, model={"w": torch.zeros(1)}, shards={}, state={}, extra=to_tensors(slots, parts(3)))
    writer.wait()
    return slots


def test_what_is_not_trained_yet_survives_to_the_last_digit(tmp_path: Path) -> None:
    before = saved(tmp_path)
    found = newest(tmp_path)
    assert found is not None
    slots, rows = from_tensors(found.extras(), ask)
    assert slots == before
    (mine,) = rows
    assert (mine[1].tokens, mine[1].answers, len(mine[2].rows.inputs)) == (17, 2, 0)
    assert (mine[1].rows.behaviour == torch.full((3, 4), 1 / 3).numpy()).all()
    assert to_tensors([], {}) == {}


def test_half_answers_of_an_older_checkpoint_are_dropped() -> None:
    """It held them with the chunks that each had."""
    tensors = to_tensors([PromptSlot(8, group=group(8))], {})
    about = json.loads(bytes(tensors["about"].numpy()))
    (finished,) = about["slots"]
    half = {"number": 7, "round": 1, "wave": 2, "first": [2, 2], "rejected": 0, "answers": finished["answers"]}
    about["slots"] = [half, {**finished, "wave": 3}]
    columns = {name: torch.cat([tensors[name]] * 2) for name in ("ids", "logprobs", "forced", "versions")}
    columns["ids"][:4] = 0
    content = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
    slots, _ = from_tensors([{"about": content, **columns}], ask)
    assert slots == [PromptSlot(7, 1, first=(2, 2)), PromptSlot(8, group=group(8))]


def test_a_group_that_stands_in_for_others_remembers_the_first_and_what_was_rejected(tmp_path: Path) -> None:
    schedule = RolloutSchedule(per_batch=1, staleness=0, refill=2, batches=1)
    (slot,) = schedule.admit()
    for right in ([True, True, True], [False, False]):
        schedule.finish(slot, AnswerGroup(ask(0), [], [0.0] * len(right), right=right, rejected=1))
    writer = Writer(tmp_path, say=lambda text: None)
    writer.save(1, model={"w": torch.zeros(1)}, shards={}, state={}, extra=to_tensors([slot], {}))
    writer.wait()
    found = newest(tmp_path)
    assert found is not None
    ((again,), _) = from_tensors(found.extras(), ask)
    assert again == slot
    schedule.finish(again, replace(group(7), question=replace(ask(7), prompt=[1, 2, 3])))
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


def test_a_rank_without_a_share_of_a_half_trained_batch_prepares_the_next_one() -> None:
    """It is resumed by more ranks than have saved it."""
    prepared: list[int] = []
    stage = RlStage.__new__(RlStage)
    stage.config = SimpleNamespace(updates=2)  # type: ignore[assignment]
    stage.source = SimpleNamespace(version=0)  # type: ignore[assignment]
    stage._shares = {}

    def prepare(batch: int) -> None:
        prepared.append(batch)
        stage._shares = {update: UpdateShare(TokenRows.empty(update + 1, 4, 0), 17, 2) for update in range(2)}

    stage._prepare = prepare  # type: ignore[method-assign]
    rows = [[len(one.inputs) for one in stage._rows(*divmod(step, 2))] for step in (1, 2, 3, 4, 5)]
    assert rows == [[], [1], [2], [1], [2]]
    assert prepared == [1, 2]


def test_a_damaged_buffer_is_noticed_and_the_model_can_still_be_used(tmp_path: Path) -> None:
    saved(tmp_path)
    (file,) = (tmp_path / "step_000004").glob("extra-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(Damaged, match="extra-0-of-1"):
        verify(tmp_path / "step_000004")
    assert verify(tmp_path / "step_000004", optimizer=False).step == 4
