"""Retention of topics and dead letters, and groups that are behind it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import BATCH, QUICK, ConsumersWorld
from tests.core.driver import RECORD, Driver, token
from txmq.broker.engine.log_reader import visible_end
from txmq.core.consumers.commands import (
    AbandonLetters,
    AdvanceGroupWork,
    CloneGroup,
    ReplayLetters,
    ReportStored,
    ResetPosition,
    StoredEntry,
)
from txmq.core.consumers.store_reports import key_source
from txmq.core.events.topics import MessagesCopied
from txmq.core.retention import log_floor, relocation, topic_retention
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.retention.relocation import CopyMessages, RepointMessages, RetainedMessage
from txmq.core.retention.topic_retention import ApplyRetention, RetentionLimits, RetentionReply
from txmq.core.state import log_pins
from txmq.core.state.visibility import offset_at_time
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import OffsetOutOfRange
from txmq.model.decider import ByJob, ByPostgres
from txmq.model.message import Decision
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import DAY, SECOND
from txmq.store.tables import FAILED, FAILED_KEY, MISSED, NAMES, POSITION_KEY, SIGN

POSTGRES = ByPostgres(1, 1, 5, 7, 1)


@pytest.fixture
def world() -> ConsumersWorld:
    """Ten batches of two, a day apart, the last one today."""
    world = ConsumersWorld(t=1)
    for day in range(10):
        world.publish("t", None, None)
        world.now += DAY if day < 9 else 0
    return world


def retain(
    world: Driver, *, days: float = 0, size: int = 0, topic_id: int = 1, **more: Any
) -> RetentionReply:
    command = ApplyRetention(
        topic_id,
        RetentionLimits(int(days * DAY), size),
        more.get("durable", world.end),
        more.get("oldest", 0),
    )
    reply: RetentionReply = world.do(command)
    return reply


def first(world: Driver, partition: int = 0) -> int:
    return world.state.topics_by_id[1].start_offsets[partition]


def same_after_replay(world: ConsumersWorld) -> bool:
    from txmq.core import machine

    again = world.replayed()
    for state in (world.state, again):
        machine.save(state)
    return all(
        list(world.state.tables[n].range(b"")) == list(again.tables[n].range(b"")) for n in NAMES
    )


def test_batches_that_are_too_old_are_removed_and_offsets_stay(world: ConsumersWorld) -> None:
    assert retain(world, days=3.5).batches == 6
    assert first(world) == 12
    assert offset_at_time(world.state, 1, 0, 0) == 12
    assert visible_end(world.state, 1, 0, world.end) == 20
    assert world.state.topics_by_id[1].partition_bytes == [4 * BATCH]
    world.publish("t", None)
    assert world.state.topics_by_id[1].end_offsets == [21]
    assert same_after_replay(world)


def test_retention_without_expired_batches_records_nothing(world: ConsumersWorld) -> None:
    retain(world, days=3.5)
    records = len(world.log)
    assert retain(world, days=3.5) == RetentionReply(0, (), more=False)
    assert len(world.log) == records


def test_all_batches_of_a_partition_may_be_removed(world: ConsumersWorld) -> None:
    world.now += 30 * DAY
    assert retain(world, days=1).batches == 10
    assert first(world) == visible_end(world.state, 1, 0, world.end) == 20
    assert world.state.topics_by_id[1].partition_bytes == [0]
    assert log_floor.topic_floor(world.state, world.state.topics_by_id[1]) == SIGN


def test_the_oldest_batches_are_removed_where_a_topic_is_too_large() -> None:
    world = ConsumersWorld(t=2)
    for _ in range(5):
        world.publish("t", None, partition=0)
        world.publish("t", None, partition=1)
    retain(world, size=3 * BATCH)
    assert world.state.topics_by_id[1].start_offsets == [4, 3], "the oldest of all partitions"
    assert sum(world.state.topics_by_id[1].partition_bytes) == 3 * BATCH


def test_no_limit_keeps_everything(world: ConsumersWorld) -> None:
    world.now += 1_000 * DAY
    assert retain(world).batches == 0


def test_batches_that_are_not_durable_stay(world: ConsumersWorld) -> None:
    retain(world, days=3.5, durable=3 * RECORD)
    assert first(world) <= 4


def test_batches_below_the_beginning_of_the_log_are_removed_at_any_age(
    world: ConsumersWorld,
) -> None:
    places = [place for place, event in world.log if type(event).__name__ == "BatchStored"]
    retain(world, oldest=places[2].attachment_position)
    assert first(world) == 4


def test_one_command_removes_a_limited_number_and_reports_that_there_are_more(
    monkeypatch: pytest.MonkeyPatch, world: ConsumersWorld
) -> None:
    monkeypatch.setattr(topic_retention, "STEP_BATCHES", 4)
    assert retain(world, days=3.5) == RetentionReply(4, (), more=True)
    assert retain(world, days=3.5) == RetentionReply(2, (), more=False)
    assert first(world) == 12


def test_a_group_behind_retention_goes_on_from_the_start_offset_and_missed_messages_are_counted(
    world: ConsumersWorld,
) -> None:
    world.join("a")
    world.fetch("a", most=5)
    world.ack("a", (0, 2))
    retain(world, days=3.5)
    position = world.group().positions[TopicPartition(1, 0)]
    assert (position.floor, position.cursor) == (12, 12)
    assert not world.group().leases
    assert world.state.tables["missed"].get(b"\0\0\0\1\0\0\0\1\0\0\0\0") == (10, world.now)
    assert [got.offset for got in world.fetch("a")] == list(range(12, 20))
    assert same_after_replay(world)


def test_a_group_that_has_processed_the_removed_messages_misses_nothing(
    world: ConsumersWorld,
) -> None:
    world.join("a")
    world.fetch("a")
    world.ack("a", (4, 14))
    world.ack("a", (0, 4))
    retain(world, days=3.5)
    assert world.group().positions[TopicPartition(1, 0)].floor == 14
    assert not list(world.state.tables["missed"].range(b""))


def test_a_new_group_begins_at_the_start_offset_and_cannot_be_reset_before_it(
    world: ConsumersWorld,
) -> None:
    retain(world, days=3.5)
    world.join("a")
    assert world.fetch("a")[0].offset == 12
    refused = world.do(ResetPosition("g", "t", "", ((0, 11),), False, False, ""))
    assert type(refused) is OffsetOutOfRange
    assert refused.detail == {"first": 12, "end": 20}
    [target] = world.do(ResetPosition("g", "t", "first", (), False, False, "")).positions
    assert target[:3] == (0, 12, 12)


def dead(world: ConsumersWorld, offset: int) -> None:
    world.nack("a", offset, dead=True)


def copy(
    world: ConsumersWorld, rows: tuple[RetainedMessage, ...]
) -> list[tuple[RetainedMessage, int, int]]:
    world.do(CopyMessages(tuple(b"c" * 8 for _ in rows)))
    place, event = world.log[-1]
    assert isinstance(event, MessagesCopied)
    return [(row, place.attachment_position + 8 * number, 8) for number, row in enumerate(rows)]


def test_a_dead_letter_is_copied_before_its_batch_is_removed(world: ConsumersWorld) -> None:
    world.join("a", retry=QUICK)
    world.fetch("a")
    dead(world, 3)
    reply = retain(world, days=3.5)
    assert (first(world), reply.batches) == (2, 1)
    [row] = reply.to_copy
    assert (row.offset, row.row) == (3, 1)
    [(_, position, _)] = pointed = copy(world, reply.to_copy)
    assert retain(world, days=3.5).to_copy, "as long as nothing points at the copy"
    world.do(RepointMessages(tuple(pointed)))
    assert retain(world, days=3.5).to_copy == ()
    assert first(world) == 12
    stored: Any = world.state.tables[FAILED].get(FAILED_KEY.pack(1, 1, 0, 3))
    assert (stored[4], stored[5], stored[6]) == (position, 8, 0)
    assert [pin.position for pin in log_pins.pins_below(world.state, SIGN)] == [position]
    assert world.group().positions[TopicPartition(1, 0)].floor == 12
    assert same_after_replay(world)


def test_a_message_at_a_consumer_is_copied_before_its_batch_is_removed(
    world: ConsumersWorld,
) -> None:
    world.join("a", retry=QUICK)
    world.fetch("a")
    entry = StoredEntry("t", 1, 0, 3, "stored", 1)
    entry = entry._replace(source=key_source(world.state, "g", entry))
    report = ReportStored("g", "a", world.generation(), b"s" * 16, "host", (entry,))
    assert world.do(report).verdicts == ("kept",)
    world.do(RepointMessages(tuple(copy(world, retain(world, days=3.5).to_copy))))
    retain(world, days=3.5)
    assert first(world) == 12
    records = len(world.log)
    assert world.do(report).verdicts == ("kept",)
    assert len(world.log) == records, "the copy changes nothing for the store"
    assert same_after_replay(world)
    acked = report._replace(entries=(entry._replace(state="acked"),))
    assert world.do(acked).verdicts == ("settled",)


def test_retention_waits_for_a_clone_in_the_making_which_then_misses_each_message_once(
    monkeypatch: pytest.MonkeyPatch, world: ConsumersWorld
) -> None:
    """Its group's failed messages are copied and fail again meanwhile, before and after
    their slices have come.
    """
    for module in ("background_work", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.STEP_ROWS", 2)
    world.join("a", retry=QUICK)
    world.fetch("a")
    for offset in range(6):
        world.nack("a", offset)
    world.ack("a", (8, 9))
    assert world.do(CloneGroup("g", "h")).pending
    for _ in range(4):
        world.do(RepointMessages(tuple(copy(world, retain(world, days=3.5).to_copy))))
        retain(world, days=3.5)
        world.now += 60 * SECOND
        for row in [got for got in world.fetch("a") if got.offset < 6]:
            world.nack("a", row.offset)
        world.do(AdvanceGroupWork())
    assert world.group("h").clone_progress is None
    retain_all(world)
    assert missed(world, "h") == 11
    assert world.group("h").positions[TopicPartition(1, 0)].floor == 12
    assert same_after_replay(world)


def test_a_dead_letter_below_a_clones_floor_is_not_delivered_to_the_clone_after_a_replay(
    monkeypatch: pytest.MonkeyPatch, world: ConsumersWorld
) -> None:
    for module in ("background_work", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.STEP_ROWS", 2)
    world.join("a", retry=QUICK)
    world.fetch("a")
    for offset in range(4):
        dead(world, offset)
    world.ack("a", (4, 20))
    retain_all(world)
    world.do(CloneGroup("g", "h"))
    world.do(ReplayLetters("g", (("t", 0, 2),)))
    while world.do(AdvanceGroupWork()).more:
        pass
    assert missed(world, "h") == 0
    assert world.group("h").positions[TopicPartition(1, 0)].floor == 20
    assert same_after_replay(world)


def retain_all(world: ConsumersWorld) -> None:
    """Remove what is older than 3.5 days, copying failed messages first."""
    while to_copy := retain(world, days=3.5).to_copy:
        world.do(RepointMessages(tuple(copy(world, to_copy))))
    assert first(world) == 12


def missed(world: ConsumersWorld, group: str) -> int:
    row: Any = world.state.tables[MISSED].get(POSITION_KEY.pack(world.group(group).group_id, 1, 0))
    return row[0] if row else 0


def test_the_copy_of_a_message_that_was_acked_meanwhile_is_not_used(world: ConsumersWorld) -> None:
    world.join("a", retry=QUICK)
    world.fetch("a")
    world.nack("a", 3)
    pointed = copy(world, retain(world, days=3.5).to_copy)
    world.now += 3 * SECOND
    world.fetch("a")
    world.ack("a", (3, 4))
    world.do(RepointMessages(tuple(pointed)))
    assert not list(log_pins.pins_below(world.state, SIGN))
    assert retain(world, days=3.5).to_copy == ()


def test_the_log_pin_of_an_expired_dead_letter_is_removed(world: ConsumersWorld) -> None:
    world.join("a", retry=QUICK)
    world.fetch("a")
    dead(world, 3)
    world.do(RepointMessages(tuple(copy(world, retain(world, days=3.5).to_copy))))
    [pin] = log_pins.pins_below(world.state, SIGN)
    again = relocation.message_of_pin(world.state, pin)
    assert again is not None
    assert not relocation.is_stale_pin(world.state, pin)
    world.do(ExpireLetters(1, 0, 1))
    world.now += SECOND
    world.do(ExpireLetters(1, 0, 1))
    assert relocation.is_stale_pin(world.state, pin)
    world.do(RepointMessages((), (pin.position, pin.position + 8)))
    assert not list(log_pins.pins_below(world.state, SIGN))


def test_messages_that_an_undecided_transaction_acks_stay(world: ConsumersWorld) -> None:
    world.join("a")
    world.fetch("a")
    world.ack("a", (0, 6))
    ack = ("ack", "g", "a", 1, "t", 0, 6, 7)
    world.store(token(world, 1), [("t", 0, None, "x")], POSTGRES, actions=(ack,))
    retain(world, days=3.5)
    assert first(world) == 6
    world.do(DecideTransaction(token(world, 1), Decision.ROLLBACK, "test"))
    retain(world, days=3.5)
    assert first(world) == 12


def test_the_log_floor_covers_undecided_bundles_and_queued_batches(core: Driver) -> None:
    number = token(core, 1)
    core.store(number, [("t", 0, "k", "half")], POSTGRES)
    stored = core.log[-1][0]
    core.send("t", "behind", key="k")
    assert log_floor.state_floor(core.state) == stored.position
    core.store(token(core, 2), [("t", 1, "k", "later")], POSTGRES)
    core.do(DecideTransaction(number, Decision.ROLLBACK, "test"))
    assert log_floor.state_floor(core.state) > stored.end
    core.do(DecideTransaction(token(core, 2), Decision.ROLLBACK, "test"))
    assert log_floor.state_floor(core.state) == SIGN


def test_the_log_floor_covers_committed_bundles_that_wait(core: Driver) -> None:
    one, two = token(core, 1), token(core, 2)
    core.store(two, [("t", 0, "k", "job")], ByJob(b"j" * 16))
    stands_at = core.log[-1][0].position
    core.store(one, [("t", 0, "k", "half")], POSTGRES)
    core.do(DecideTransaction(two, Decision.COMMIT, "test"))
    assert log_floor.state_floor(core.state) <= stands_at + RECORD
    core.do(DecideTransaction(one, Decision.COMMIT, "test"))
    assert log_floor.state_floor(core.state) == SIGN
    assert len(core.bodies("t")) == 2


def test_a_batch_stored_long_before_its_publication_is_pinned(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pins, "SLACK_BYTES", 100 * RECORD)
    late, soon = token(core, 1), token(core, 2)
    core.store(late, [("t", 0, None, "late")], POSTGRES)
    place = core.log[-1][0].attachment_position
    for number in range(60):
        core.send("t", f"{number}", partition=1)
    core.store(soon, [("t", 0, None, "soon")], POSTGRES)
    for one in (late, soon):
        core.do(DecideTransaction(one, Decision.COMMIT, "test"))
    assert [pin.position for pin in log_pins.pins_below(core.state, SIGN)] == [place]
    assert (
        log_floor.topic_floor(core.state, core.state.topics_by_id[1])
        <= core.log[1][0].attachment_position
    )
    core.now += 10 * DAY
    retain(core, days=1)
    assert not list(log_pins.pins_below(core.state, SIGN))


def test_a_deleted_topic_keeps_nothing(core: Driver) -> None:
    core.send("t", "a")
    core.do(DeleteTopic("t"))
    core.do(CreateTopic("t", 2))
    core.send("t", "b")
    assert retain(core, topic_id=1).batches == 1
    assert retain(core, topic_id=2).batches == 0
    assert core.bodies("t") == ["b"]


def test_dead_letters_have_their_own_retention_and_messages_parked_behind_them_go_on() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", 7, 7, 8)
    world.join("a", mode="ordered", retry=QUICK)
    world.fetch("a", most=1)
    dead(world, 0)
    world.fetch("a")
    assert world.group().fences[1][7].parked == 1
    assert world.do(ExpireLetters(1, 0, DAY)) == 0
    assert world.group().letters == 1
    world.now += 2 * DAY
    assert world.do(ExpireLetters(1, 0, 0)) == 0, "no limit"
    assert world.group().letters == 1
    world.do(ExpireLetters(1, 0, DAY))
    assert world.group().letters == 0
    assert [got.offset for got in world.fetch("a")] == [1]
    assert same_after_replay(world)


def test_abandoned_messages_expire_as_well(world: ConsumersWorld) -> None:
    world.join("a")
    world.fetch("a")
    dead(world, 3)
    world.do(AbandonLetters("g", (("t", 0, 3),), "no use", ""))
    world.now += 2 * DAY
    world.do(ExpireLetters(1, 0, DAY))
    assert not list(world.state.tables[FAILED].range(b""))
