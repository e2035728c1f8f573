"""Letters that plans have put back: their rows stay, and everybody sees retries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.core.consumers.invariants import (
    check_histories,
    check_indexes,
    check_letter_index,
    moved_rows,
)
from tests.core.consumers.world import rows
from tests.core.replay.world import PlansWorld
from txmq.core import machine
from txmq.core.consumers import fetch_choice, letter_views
from txmq.core.consumers.commands import ResetPosition
from txmq.core.consumers.letter_selection import LetterScan, LetterSelection
from txmq.core.consumers.letter_views import list_letters
from txmq.core.replay.cleanup import SweepPlan
from txmq.core.replay.orders import CancelPlan, DeletePlan, StartPlan
from txmq.core.replay.putting_back import AdvancePlan, AdvanceReply
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.retention.relocation import RepointMessages, RetainedMessage
from txmq.core.state import attempts, failed_messages, plan_letters
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.letter_cells import SLOT, LetterState
from txmq.core.state.put_back import TRIMMED_AT, PlainLetter, PutBackQueue
from txmq.model.units import DAY

if TYPE_CHECKING:
    from collections.abc import Callable

TURNS = 100


@pytest.fixture
def world() -> PlansWorld:
    return PlansWorld(1)


def selected(world: PlansWorld, *states: LetterState) -> list[int]:
    """Return the offsets of the letters in these states."""
    found, _next = world.page(LetterSelection(states), None, 100)
    return [ref[2] for ref, _number in found]


def test_a_page_leaps_over_letters_that_are_put_back(
    world: PlansWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _slot in range(6):
        world.create(f"p{world.now}", *world.letters(*[None] * 100))
        world.now += SLOT
    world.letters(0)
    for plan in list(world.state.plans.by_name):
        world.run_plan(plan)
    for selection, wanted in ((LetterSelection(), 1), (LetterSelection(topic="b"), 0)):
        scan = LetterScan(world.state, world.group(), selection, None, world.now)
        found = 0
        while not scan.ended:
            found += len(list(scan.step()))
        assert found == wanted
        assert scan.examined < 50, "of 601, and of two slots"
    assert len(selected(world, LetterState.REPLAYING)) == 100
    monkeypatch.setattr(letter_views, "MAX_PASSED", 250)
    after, pages, found = 0, 0, 0
    while True:  # as clients that know no selections
        page: Any = list_letters(world.state, "g", after, 100)
        found, pages = found + len(page[0]), pages + 1
        if page[1] is None:
            break
        after = page[1]
    assert (found, pages) == (1, 3)


def test_putting_back_writes_no_row_of_a_letter(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, None, 7))
    before = rows(world.state)
    world.run_plan("p", most=2)
    after = rows(world.state)
    for name in ("failed", "letters", "letter_index", "plan_letters", "retries", "retries_by_time"):
        assert after[name] == before[name], name
    assert {row.kind for row in world.rows().values()} == {FailedKind.RETRY}
    world.check_plans()


def test_lists_and_counts_see_retries(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, None, 7))
    plan = world.plan_of("p")
    world.do(StartPlan("p"))
    world.do(AdvancePlan(plan.plan_id, 3))
    assert selected(world, LetterState.OPEN) == [3]
    assert selected(world, LetterState.REPLAYING) == [0, 1, 2]
    assert selected(world, LetterState.REPLAYING, LetterState.OPEN) == [0, 1, 2, 3]
    assert world.group().letters == 1
    listed = list_letters(world.state, "g", 0, 10)
    assert [letter.fields["offset"] for letter in listed[0]] == [3]
    world.now += 9 * DAY
    world.do(ExpireLetters(1, 0, DAY))
    assert [ref[2] for ref in world.rows()] == [0, 1, 2], "what is replayed does not expire"
    world.check_plans()


def test_a_start_finds_what_waits(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, None, 7))
    world.run_plan("p")
    assert [one.offset for one in world.fetch("m", most=4)] == [0, 1]  # half of a fetch
    machine.save(world.state)
    loaded = machine.load(world.state.tables)
    group = loaded.groups.by_name["g"]
    assert [*group.put_back[next(iter(group.positions))]] == [2, 3]
    assert failed_messages.get(loaded, group, (1, 0, 0)) == world.rows()[1, 0, 0]


def test_what_a_deleted_plan_has_put_back_is_still_delivered(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5))
    world.run_plan("p")
    plan_id = world.plan_of("p").plan_id
    world.do(CancelPlan("p"))
    world.do(DeletePlan("p"))
    world.tidy(plan_id)
    assert plan_id not in world.state.plans.by_id
    assert [(one.offset, one.attempt) for one in world.fetch("m")] == [(0, 1), (1, 1)]
    world.ack("m", (0, 2), topic="a")
    assert not world.rows()


def test_a_letter_that_is_put_back_again_is_in_the_queue_once() -> None:
    queue = PutBackQueue()
    for offset in (1, 2, 3):
        queue.add(offset)
    queue.discard(2)  # it was delivered before the first one, and has died again
    queue.add(2)
    assert ([*queue], len(queue)) == ([1, 3, 2], 3)
    queue.discard(2)
    queue.discard(1)
    assert ([*queue], len(queue)) == ([3], 1)


def test_a_letter_that_left_one_plan_and_is_put_back_by_another_is_delivered(
    world: PlansWorld,
) -> None:
    first, second = world.letters(0, 5)
    for name, place in (("p", first), ("q", second)):
        world.create(name, place)
        world.run_plan(name)
    plan_id = world.plan_of("q").plan_id
    world.do(CancelPlan("q"))
    world.do(DeletePlan("q"))
    world.tidy(plan_id)  # the letter is a retry as any other, and so goes out first
    [got] = world.fetch("m", most=1)
    world.fail(got.topic, got.partition, got.offset, dead=True)
    world.create("r", second)
    world.run_plan("r")
    assert [one.offset for one in world.fetch("m")] == [0, 1]
    world.check_plans()


def test_a_queue_keeps_its_order() -> None:
    queue = PutBackQueue()
    for offset in range(3 * TRIMMED_AT):
        queue.add(offset)
    for offset in (5, *range(1, 5), *range(6, 2 * TRIMMED_AT), 0):
        queue.discard(offset)
    assert [*queue] == [*range(2 * TRIMMED_AT, 3 * TRIMMED_AT)]
    assert len(queue) == TRIMMED_AT


def test_neighbours_of_a_batch_are_taken_together() -> None:
    queue, letter = PutBackQueue(), PlainLetter(1, 2, 3)
    for offset, position in ((4, 9), (5, 9), (6, 9), (7, 20), (9, 20)):
        queue.add(offset, position, letter if offset != 5 else None)
    assert [*queue.neighbours(10)] == [(4, 3, 9), (7, 1, 20), (9, 1, 20)]
    assert [*queue.neighbours(2)] == [(4, 2, 9), (6, 1, 9), (7, 1, 20), (9, 1, 20)]
    assert queue.take(7, 2) is None, "8 does not wait"
    assert queue.take(5, 2) == [None, letter]
    assert queue.waiting_at(4, 2) is None
    assert [*queue] == [4, 7, 9]
    assert queue.take(4, 1) == [letter]
    assert [*queue] == [7, 9]


def test_a_fetch_takes_runs_and_few_other_failed_messages(
    world: PlansWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of each other one changes with its delivery."""
    monkeypatch.setattr(fetch_choice, "MAX_ROWS", 1)
    world.create("p", *world.letters(0, 5, None, 7), *world.letters(1))
    world.run_plan("p")
    sizes = [len(world.fetch("m", most=6)) for _ in range(4)]
    assert sizes == [3, 1, 1, 0], "three are half of a fetch; the last one is a run of its own"


@pytest.mark.parametrize("first", [True, False])
def test_letters_that_retention_has_copied_go_out_from_their_copies(
    world: PlansWorld, *, first: bool
) -> None:
    """Each copy is a batch of its own. The others are where they were."""
    world.create("p", *world.letters(0, 5, None, 7))
    batch = world.rows()[1, 0, 3].position
    if first:
        world.run_plan("p")
    for offset in range(2):
        row = world.rows()[1, 0, offset]
        copied = RetainedMessage(1, 1, 0, offset, row.position, row.length, row.row)
        world.do(RepointMessages(((copied, (1 << 40) + 100 * offset, 10),)))
    world.run_plan("p")
    found = [(one.start, one.rows, one.batch.position) for one in world.choose("m").candidates]
    assert found == [(0, 1, 1 << 40), (1, 1, (1 << 40) + 100), (2, 2, batch)]
    assert world.early("m", world.end), "they are put back as before"
    assert [one.offset for one in world.fetch("m")] == [0, 1, 2, 3]
    world.ack("m", (0, 4), topic="a")
    assert world.outcomes("p") == {"processed": 4}
    world.check_plans()


def test_a_letter_that_is_certainly_put_back_goes_out_before_its_lease_is_durable(
    world: PlansWorld,
) -> None:
    """As a fresh message does. A record that the power takes back must not show."""
    world.create("p", *world.letters(0, 5, None, 7))
    world.do(StartPlan("p"))
    world.do(AdvancePlan(world.plan_of("p").plan_id, 2))
    first = world.end
    world.run_plan("p")
    assert not world.early("m", first), "the last two may be taken back"
    assert world.early("m", world.end)
    machine.save(world.state)
    world.state = machine.load(world.state.tables)
    assert world.early("m"), "what a start has read is durable"
    [got] = world.fetch("m", most=1)
    world.fail(got.topic, got.partition, got.offset, dead=False)
    world.now += DAY
    assert not world.early("m", world.end), "a second attempt counts"


def test_records_are_told_apart_until_places_move() -> None:
    queue = PutBackQueue()

    def ends(start: int, count: int) -> int | None:
        run = queue.waiting_at(start, count)
        return None if run is None else run.end

    for offset in range(6):
        queue.add(offset)
        if offset % 2:
            queue.end_record(offset * 10)
    assert [ends(*run) for run in ((0, 2), (1, 2), (4, 1))] == [10, 30, 50]
    queue.take(0, 3)
    assert [ends(*run) for run in ((3, 1), (4, 2))] == [30, 50]
    queue.discard(4)
    queue.add(4)
    queue.end_record(60)
    assert [ends(*run) for run in ((3, 1), (5, 1), (4, 1))] == [50, 50, 60]


def test_an_ack_says_so_in_the_plan_and_rows_go_later(world: PlansWorld) -> None:
    """What is processed is gone for everybody; a sweep removes what is left of it."""
    world.create("p", *world.letters(0, 5, None, 7))
    world.run_plan("p")
    before = rows(world.state)
    assert [one.offset for one in world.fetch("m", most=4)] == [0, 1]
    world.ack("m", (0, 2), topic="a")
    assert world.outcomes("p") == {"delivered": 2, "processed": 2}
    assert [ref[2] for ref in world.rows()] == [2, 3]
    assert selected(world, *LetterState) == [2, 3]
    machine.save(world.state)
    loaded = machine.load(world.state.tables)
    assert loaded.plans == world.state.plans
    assert failed_messages.get(loaded, loaded.groups.by_name["g"], (1, 0, 1)) is None
    after = rows(world.state)
    for name in ("failed", "letters", "letter_index", "plan_letters", "attempts"):
        assert after[name] == before[name], name
    assert world.do(SweepPlan(world.plan_of("p").plan_id)) == AdvanceReply(2)
    swept = rows(world.state)
    assert (len(swept["failed"]), len(swept["letters"])) == (2, 2)
    assert swept["attempts"] == before["attempts"], "what failed is known as long as the message"
    world.check_plans()


def test_a_deleted_plan_is_swept_first(world: PlansWorld) -> None:
    world.create("p", *world.letters(0, 5, None))
    world.run_plan("p")
    plan_id = world.plan_of("p").plan_id
    world.fetch("m")
    world.ack("m", (0, 3), topic="a")
    world.run_plan("p")
    world.do(DeletePlan("p"))
    world.tidy(plan_id)
    left = rows(world.state)
    for name in ("failed", "letters", "letter_index", "plan_letters", "plan_done"):
        assert not left[name], name


def test_a_message_that_is_processed_again_goes_on_with_its_history(world: PlansWorld) -> None:
    """A reset delivers what a plan's letter was, before it is swept."""
    world.create("p", *world.letters(0))
    world.run_plan("p")
    world.fetch("m")
    world.ack("m", (0, 1), topic="a")
    world.do(ResetPosition("g", "a", "first"))
    world.join("m", "a", "b")
    [got] = world.fetch("m")
    assert (got.offset, got.attempt) == (0, 1)
    world.fail_as(0, "new")
    assert attempts.get(world.state, world.group(), (1, 0, 0)).failures == 2
    world.do(SweepPlan(world.plan_of("p").plan_id))
    assert [*world.rows()] == [(1, 0, 0)]
    assert world.outcomes("p") == {"processed": 1}
    world.check_plans()


def run(seed: int) -> int:
    """Make random changes, and check everything after each. Return the number of swept
    letters.
    """
    world, swept = PlansWorld(seed), 0
    for _ in range(TURNS):
        chance = world.random.random()
        if chance < 0.1:
            for plan in world.state.plans.by_id.values():
                swept += world.do(SweepPlan(plan.plan_id)).letters
        elif chance < 0.3:
            world.plan_some()
            world.process()
        else:
            world.turn()
        check(world)
    replayed = world.replayed()
    assert rows(replayed) == rows(world.state)
    machine.save(world.state)
    loaded = machine.load(world.state.tables)
    assert loaded.plans == replayed.plans == world.state.plans
    return swept


def check(world: PlansWorld) -> None:
    group, failed = world.group(), moved_rows(world.state, world.group())
    check_indexes(world.state, group, failed)
    check_histories(world.state, group, failed)
    check_letter_index(world.state, group, failed)
    world.check_plans()
    for tp, queue in group.put_back.items():
        assert sum(one.letters for one in queue.neighbours(100)) == len(queue), tp


@pytest.mark.parametrize("seed", range(4))
def test_what_is_processed_is_nowhere_else(seed: int) -> None:
    assert run(seed) > 3


def what_is_processed_is_seen_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan_letters, "is_unswept", lambda *_: False)


def a_queue_takes_the_wrong_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PutBackQueue, "_find", lambda self, *_: self._first)


def an_ack_is_one_of_all_letters_of_a_chunk(patch: pytest.MonkeyPatch) -> None:
    def wide(_state: Any, plan: Any, ref: Any) -> bool:
        return (*ref[:2], ref[2] // plan_letters.CHUNK) in plan.unswept

    patch.setattr(plan_letters, "is_unswept", wide)


@pytest.mark.parametrize(
    "bug",
    [
        what_is_processed_is_seen_again,
        a_queue_takes_the_wrong_one,
        an_ack_is_one_of_all_letters_of_a_chunk,
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    for seed in range(8):
        try:
            run(seed)
        except (AssertionError, LookupError):
            return
    pytest.fail("the checks are blind to this bug")
