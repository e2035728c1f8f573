"""Changes of messages that are retried: now, bury and skip, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.invariants import check, moved_rows
from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core.consumers import retries
from txmq.core.consumers.commands import ChangeRetries, ReplayLetters, RetryChange
from txmq.core.events.consumers import RetriesChanged
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.errors import BadRequest, UnknownGroup
from txmq.model.retry import FailureReport
from txmq.model.units import SECOND

NOW, BURY, SKIP = RetryChange


class RetryWorld(ConsumersWorld):
    """An ordered group with a message of key 7 that is retried, two parked behind it,
    and one of key 8 in hand.
    """

    def __init__(self, **wanted: Any) -> None:
        super().__init__(t=1)
        self.publish("t", 7, 7, 7, 8)
        self.join("a", mode="ordered", retry=QUICK, **wanted)
        self.fetch("a")
        self.nack("a", 0)
        self.return_messages("a", (1, 3))
        self.fetch("a")

    def change(self, change: RetryChange, *offsets: int, reason: str = "why") -> Any:
        places = tuple(("t", 0, offset) for offset in offsets)
        return self.do(ChangeRetries("g", change, places, reason, "ada"))

    def row(self, offset: int) -> FailedMessage:
        return moved_rows(self.state, self.group())[1, 0, offset]

    def kinds(self) -> dict[int, FailedKind]:
        found = moved_rows(self.state, self.group())
        return {ref[2]: FailedKind(row.kind) for ref, row in found.items()}


@pytest.fixture
def world() -> RetryWorld:
    return RetryWorld()


def test_a_message_is_retried_now_and_its_key_still_waits_for_it(world: RetryWorld) -> None:
    assert (world.row(0).due, world.fetch("a")) == (world.now + SECOND, [])
    assert world.change(NOW, 0, reason="").done == (("t", 0, 0),)
    assert [(one.offset, one.attempt) for one in world.fetch("a")] == [(0, 2)]
    assert world.kinds() == {
        0: FailedKind.RETRY, 1: FailedKind.PARKED, 2: FailedKind.PARKED,
    }  # fmt: skip
    world.ack("a", (0, 1))
    assert world.offsets("a") == [1]


def test_what_is_due_already_changes_nothing(world: RetryWorld) -> None:
    world.now += SECOND
    since = len(world.log)
    assert world.change(NOW, 0).done == (("t", 0, 0),)
    assert world.events(since) == []


def test_a_buried_message_is_a_letter_that_holds_its_key_until_it_is_replayed(
    world: RetryWorld,
) -> None:
    assert world.change(BURY, 0).done == (("t", 0, 0),)
    row = world.row(0)
    assert (row.kind, row.attempt, row.reason) == (FailedKind.LETTER, 1, "why")
    assert (row.error_text, row.dead_at) == ("text", world.now)
    world.now += 5 * SECOND
    assert world.fetch("a") == []
    world.do(ReplayLetters("g", (("t", 0, 0),)))
    assert world.row(0).reason == "", "of the letter that it was"
    assert world.offsets("a") == [0]


def test_a_buried_message_lets_its_key_go_where_the_group_skips_letters() -> None:
    world = RetryWorld(on_exhausted="skip")
    world.change(BURY, 0)
    assert world.offsets("a") == [1]


def test_a_skipped_message_is_closed_and_its_key_goes_on(world: RetryWorld) -> None:
    assert world.change(SKIP, 0).done == (("t", 0, 0),)
    assert (world.kinds()[0], world.row(0).reason) == (FailedKind.ABANDONED, "why")
    assert world.offsets("a") == [1]
    check(world.state, world.group(), world.keys, {(1, 0, 0)})


@pytest.mark.parametrize("change", RetryChange)
def test_what_does_not_wait_for_an_attempt_is_left_and_the_reason_said(
    world: RetryWorld, change: RetryChange
) -> None:
    world.nack("a", 3, dead=True)
    world.now += SECOND
    world.fetch("a")
    since = len(world.log)
    reply = world.change(change, 0, 3, 1, 4)
    assert (reply.done, world.events(since)) == ((), [])
    assert [one[3] for one in reply.refused] == [
        "a has it in hand",
        "not retried: it is a dead letter",
        "waits behind t/0/0",
        "not retried: it has not failed, or is processed",
    ]


def test_what_was_only_postponed_can_be_buried(world: RetryWorld) -> None:
    world.nack("a", 3, postpone=True, delay=5 * SECOND, failure=FailureReport())
    assert world.change(BURY, 3).done == (("t", 0, 3),)
    assert world.row(3).kind == FailedKind.LETTER


def test_messages_that_are_named_twice_are_changed_once_in_one_record(world: RetryWorld) -> None:
    world.nack("a", 3)
    since = len(world.log)
    assert world.change(SKIP, 3, 0, 3).done == (("t", 0, 3), ("t", 0, 0))
    [event] = world.events(since)
    assert isinstance(event, RetriesChanged)
    assert [move[2] for move in event.moves] == [0, 1, 3], "the key of the first goes on"
    assert event.by == "ada"


def test_wrong_changes_are_refused(world: RetryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(world.do(ChangeRetries("no", NOW, ()))) is UnknownGroup
    for change in (BURY, SKIP):
        assert type(world.change(change, 0, reason="")) is BadRequest
    monkeypatch.setattr(retries, "MAX_MESSAGES", 1)
    assert type(world.change(NOW, 0, 1)) is BadRequest
    assert world.do(ChangeRetries("g", NOW, (("no", 0, 0),))).refused == (
        ("no", 0, 0, "the group does not read it"),
    )
