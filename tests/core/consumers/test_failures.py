"""Failures: retries with back-off, dead letters, replay and abandonment."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import BATCH, QUICK, ConsumersWorld, Received
from tests.core.due import next_due
from txmq.core.consumers import failures
from txmq.core.consumers.commands import (
    AbandonLetters,
    AlterGroup,
    LeaveGroup,
    NackMessage,
    ReplayLetters,
    RequestedSettings,
)
from txmq.core.consumers.failures import MAX_LETTERS, MAX_TEXT_BYTES, LettersReply, NackReply
from txmq.core.events.consumers import Abandoned, Acked, DeadLettered, Delivered, Replayed, Retried
from txmq.core.state.failed_messages import ISOLATED_AFTER
from txmq.core.state.failed_rows import FailedKind, FailedMessage, Move
from txmq.errors import BadRequest, NotLeased, UnknownGroup
from txmq.model.retry import FailureReport, RetryPolicy
from txmq.model.topic_partition import TopicPartition
from txmq.store.tables import FAILED, FAILED_KEY

SECOND = 1_000_000


@pytest.fixture
def world() -> ConsumersWorld:
    world = ConsumersWorld(t=1)
    world.publish("t", 7, 8, 9)
    world.join("a", retry=QUICK)
    world.fetch("a")
    return world


def moved_row(world: ConsumersWorld, offset: int) -> FailedMessage | None:
    row: Any = world.state.tables[FAILED].get(FAILED_KEY.pack(1, 1, 0, offset))
    return None if row is None else FailedMessage(*row)


def fail_until_dead(world: ConsumersWorld, offset: int) -> None:
    while world.nack("a", offset).moved == "retry":
        world.now += 3 * SECOND
        world.fetch("a")


def test_a_failed_message_leaves_its_place_and_the_floor_passes(world: ConsumersWorld) -> None:
    since = len(world.log)
    reply = world.nack("a", 0)
    assert reply == NackReply("retry", 1, world.now + SECOND, 0)
    batch = next(event for event in world.log if type(event[1]).__name__ == "BatchStored")[0]
    row = FailedMessage(
        FailedKind.RETRY, 1, world.now + SECOND, 7, batch.attachment_position, BATCH, 0,
        batch.end, batch.stored_at, "a", "E", "text", "print", first_failed_at=world.now,
        accepted=True,
    )  # fmt: skip
    assert world.events(since) == [Retried(1, (Move(1, 0, 0, row),), (), failed=True)]
    assert world.group().positions[TopicPartition(1, 0)].floor == 1
    world.ack("a", (1, 3))
    assert world.group().positions[TopicPartition(1, 0)].floor == 3


def test_a_retry_is_delivered_when_it_is_due(world: ConsumersWorld) -> None:
    world.nack("a", 0)
    assert next_due(world.state, world.now) == world.now + SECOND
    assert world.fetch("a") == []
    world.now += SECOND
    since = len(world.log)
    assert world.fetch("a") == [Received("t", 0, 0, 2)]
    assert world.events(since) == [
        Delivered(
            *(1, 2, "a", world.now + 60 * SECOND, False, (), ((1, 0, 0),), (), ()),
            *((), (), (), (), 0),
        )
    ]
    assert world.fetch("a") == [], "somebody has it"
    since = len(world.log)
    world.ack("a", (0, 1))
    assert world.events(since) == [Acked(1, (), ((1, 0, 0),), (), ())]
    assert moved_row(world, 0) is None


def test_a_retry_must_be_durable_before_its_delivery(world: ConsumersWorld) -> None:
    world.ack("a", (1, 3))
    world.nack("a", 0, delay=0)
    assert not world.early("a")


def test_the_delay_follows_the_policy_or_the_consumers_wish(world: ConsumersWorld) -> None:
    assert world.nack("a", 0).due_at == world.now + SECOND
    assert world.nack("a", 1, delay=5 * SECOND).due_at == world.now + 5 * SECOND
    world.now += 5 * SECOND
    world.fetch("a")
    assert world.nack("a", 0).due_at == world.now + 2 * SECOND
    assert type(world.nack("a", 2, delay=-1)) is BadRequest
    assert type(world.nack("a", 2, delay=1 << 63)) is BadRequest


def test_a_postponed_message_comes_again_and_its_delivery_does_not_count(
    world: ConsumersWorld,
) -> None:
    assert world.nack(
        "a", 0, postpone=True, delay=5 * SECOND, failure=FailureReport()
    ) == NackReply("retry", 0, world.now + 5 * SECOND, 0)
    for number in range(1, 10):
        world.now += 5 * SECOND
        assert world.fetch("a") == [Received("t", 0, 0, 1)], number
        assert (
            world.nack("a", 0, postpone=True, failure=FailureReport()).due_at == world.now + SECOND
        )
    row = moved_row(world, 0)
    assert row is not None
    assert (row.attempt, row.first_failed_at, row.error_type) == (0, 0, "")


def test_a_postponed_message_keeps_what_failed_before(world: ConsumersWorld) -> None:
    world.nack("a", 0)
    world.now += SECOND
    world.fetch("a")
    world.nack("a", 0, postpone=True, failure=FailureReport())
    row = moved_row(world, 0)
    assert row is not None
    assert (row.attempt, row.error_text) == (1, "text")


def test_the_policy_separates_errors_without_retry_from_errors_that_do_not_count() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 2, 3)
    world.join("a", retry=RetryPolicy((9,), dead=["ValueError"], postpone=["OSError"]))
    world.fetch("a")
    bad = FailureReport("json.JSONDecodeError", bases=("ValueError", "Exception"))
    assert world.nack("a", 0, failure=bad).moved == "letter"
    away = FailureReport(
        "ConnectionRefusedError", bases=("ConnectionError", "OSError", "Exception")
    )
    for _ in range(3):
        assert world.nack("a", 1, failure=away) == NackReply("retry", 0, world.now + 9 * SECOND, 0)
        world.now += 9 * SECOND
        world.fetch("a")
    assert world.nack("a", 2).moved == "retry"


def test_jitter_is_placed_by_chance_given() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 2)
    world.join("a", retry=RetryPolicy((10,), jitter=0.5))
    world.fetch("a")
    assert world.nack("a", 0, chance=0.0).due_at == world.now + 5 * SECOND
    assert world.nack("a", 1, chance=1.0).due_at == world.now + 15 * SECOND


def test_an_exhausted_message_becomes_a_letter_that_keeps_everything(world: ConsumersWorld) -> None:
    first = world.now
    world.nack("a", 0)
    world.now += 3 * SECOND
    world.fetch("a")
    world.nack("a", 0)
    world.now += 3 * SECOND
    world.fetch("a")
    since = len(world.log)
    assert world.nack("a", 0, failure=FailureReport("Worse", "at last", "f")) == NackReply(
        "letter", 3, 0, 0
    )
    row = moved_row(world, 0)
    assert row is not None
    assert world.events(since) == [DeadLettered(1, (Move(1, 0, 0, row),), ())]
    assert (row.kind, row.attempt, row.key_hash, row.number) == (FailedKind.LETTER, 3, 7, 1)
    assert (row.error_type, row.error_text, row.fingerprint) == ("Worse", "at last", "f")
    assert (row.consumer, row.first_failed_at, row.dead_at) == ("a", first, world.now)
    assert world.group().letters == 1


def test_with_block_a_message_is_retried_for_ever(world: ConsumersWorld) -> None:
    world.do(AlterGroup("g", RequestedSettings(on_exhausted="block")))
    for _ in range(10):
        assert world.nack("a", 0).moved == "retry"
        world.now += 2 * SECOND
        world.fetch("a")
    assert world.nack("a", 0).due_at == world.now + 2 * SECOND
    assert world.nack("a", 1, dead=True).moved == "letter", "unless the consumer says otherwise"


def test_a_consumer_can_dead_letter_at_once(world: ConsumersWorld) -> None:
    assert world.nack("a", 0, dead=True, failure=FailureReport(text="no use")).moved == "letter"
    row = moved_row(world, 0)
    assert row is not None
    assert (row.attempt, row.error_text) == (1, "no use")


def test_a_long_reason_is_cut_between_characters(world: ConsumersWorld) -> None:
    world.nack("a", 0, failure=FailureReport("T" * 10_000, "ä" * (1 << 20), "f" * 10_000))
    row = moved_row(world, 0)
    assert row is not None
    assert row.error_text == "ä" * (MAX_TEXT_BYTES // 2)
    assert len(row.error_type) == len(row.fingerprint) == 256
    world.nack("a", 1, failure=FailureReport(text="x\ud800y"))
    row = moved_row(world, 1)
    assert row is not None
    assert row.error_text == "x?y"


@pytest.mark.parametrize("offset", [3, -1, 1 << 62])
def test_only_leased_messages_can_fail(world: ConsumersWorld, offset: int) -> None:
    refused = world.nack("a", offset)
    assert (type(refused), refused.detail) == (NotLeased, {"fence_lease": 2})


def test_a_message_fails_once(world: ConsumersWorld) -> None:
    world.nack("a", 0)
    assert type(world.nack("a", 0)) is NotLeased
    world.join("b", retry=QUICK)
    assert type(world.nack("b", 1)) is NotLeased


def test_the_engine_learns_where_to_read_the_key(world: ConsumersWorld) -> None:
    command = NackMessage("g", "a", 1, "t", 0, 1)
    source = failures.key_source(world.state, command)
    assert source is not None
    assert (source.entry.length, source.row) == (BATCH, 1)
    world.nack("a", 1)
    assert failures.key_source(world.state, command) is None, "it is known by now"
    assert failures.key_source(world.state, command._replace(topic="nothing")) is None
    assert failures.key_source(world.state, command._replace(offset=99)) is None
    assert failures.key_source(world.state, command._replace(offset=-1)) is None
    assert failures.key_source(world.state, command._replace(partition=1 << 40)) is None


def test_a_lost_consumer_is_no_failure_of_its_retries(world: ConsumersWorld) -> None:
    world.nack("a", 0)
    world.now += SECOND
    world.fetch("a")
    world.join("b", retry=QUICK)
    world.do(LeaveGroup("g", "a", "a", lost=True))
    row = moved_row(world, 0)
    assert row is not None
    assert (row.kind, row.attempt, row.deaths, row.due) == (FailedKind.RETRY, 1, 1, world.now)
    assert world.offsets("b") == [1, 2], "a lot at a time"
    world.ack("b", (1, 3))
    assert world.fetch("b") == [Received("t", 0, 0, 2)]


def test_a_retry_whose_consumers_die_ends_as_a_letter(world: ConsumersWorld) -> None:
    world.ack("a", (1, 3))
    world.nack("a", 0)
    for _ in range(ISOLATED_AFTER + 2):
        world.now += 2 * SECOND
        assert len(world.fetch("a")) == 1
        world.expire()
    world.now += 2 * SECOND
    assert world.fetch("a") == []
    row = moved_row(world, 0)
    assert row is not None
    assert (row.kind, row.attempt, row.error_text) == (FailedKind.LETTER, 3, "text"), (
        "what was known is kept"
    )


def test_a_suspect_is_retried_alone(world: ConsumersWorld) -> None:
    for offset in range(3):
        world.nack("a", offset, delay=0)
    for _ in range(ISOLATED_AFTER):
        assert len(world.fetch("a")) == 3
        assert world.fetch("a") == [], "a lot at a time"
        world.expire()
    assert world.offsets("a") == [0]
    assert world.fetch("a") == []
    assert world.group().isolated_rows.keys() == {(1, 0, 1), (1, 0, 2)}


def test_retries_survive_the_broker(world: ConsumersWorld) -> None:
    world.nack("a", 0)
    world.nack("a", 1)
    world.now += SECOND
    world.fetch("a", most=1)
    world.boot()
    world.join("a", retry=QUICK)
    attempts = {message.offset: message.attempt for message in world.fetch("a")}
    assert attempts == {0: 2, 1: 2, 2: 1}


def test_a_returned_retry_does_not_count(world: ConsumersWorld) -> None:
    world.nack("a", 0, delay=0)
    world.fetch("a")
    assert world.return_messages("a", (0, 1)).messages == 1
    assert world.fetch("a") == [Received("t", 0, 0, 2)]


def test_any_member_takes_a_retry_of_a_concurrent_group(world: ConsumersWorld) -> None:
    world.join("b", retry=QUICK)
    world.nack("a", 0, delay=0)
    assert world.fetch("b") == [Received("t", 0, 0, 2)]


def test_a_letter_can_be_replayed(world: ConsumersWorld) -> None:
    fail_until_dead(world, 0)
    since = len(world.log)
    reply = world.do(ReplayLetters("g", (("t", 0, 0), ("t", 0, 1), ("x", 0, 0)), by="me"))
    assert reply == LettersReply(
        (("t", 0, 0),), (("t", 0, 1, "no such letter"), ("x", 0, 0, "no such letter"))
    )
    row = moved_row(world, 0)
    assert row is not None
    assert world.events(since) == [Replayed(1, (Move(1, 0, 0, row),), (), "me")]
    assert (row.kind, row.attempt, row.replays, row.due) == (FailedKind.RETRY, 0, 1, world.now)
    assert world.group().letters == 0
    assert world.fetch("a") == [Received("t", 0, 0, 1)]
    refused = world.do(ReplayLetters("g", (("t", 0, 0),))).refused
    assert refused == (("t", 0, 0, "not dead: it is retried, see txmq retry"),)
    fail_until_dead(world, 0)
    row = moved_row(world, 0)
    assert row is not None
    assert (row.number, row.replays, row.attempt) == (2, 1, 3)


def test_a_letter_can_be_abandoned_for_a_reason(world: ConsumersWorld) -> None:
    fail_until_dead(world, 0)
    assert type(world.do(AbandonLetters("g", (("t", 0, 0),), ""))) is BadRequest
    since = len(world.log)
    assert world.do(AbandonLetters("g", (("t", 0, 0),), "a duplicate", by="me")).done == (
        ("t", 0, 0),
    )
    row = moved_row(world, 0)
    assert row is not None
    assert world.events(since) == [Abandoned(1, (Move(1, 0, 0, row),), (), "me")]
    assert (row.kind, row.reason) == (FailedKind.ABANDONED, "a duplicate")
    assert world.group().letters == 0
    again = world.do(ReplayLetters("g", (("t", 0, 0),)))
    assert again == LettersReply((), (("t", 0, 0, "abandoned"),))


def test_letters_are_moved_a_bounded_number_at_a_time(world: ConsumersWorld) -> None:
    many = tuple(("t", 0, offset) for offset in range(MAX_LETTERS + 1))
    assert type(world.do(ReplayLetters("g", many))) is BadRequest
    assert type(world.do(ReplayLetters("x", many[:1]))) is UnknownGroup
