"""Retention: what goes, what stays, and what becomes of groups that are behind it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumer_world import BATCH, QUICK, World
from tests.core.driver import RECORD, SECOND, Driver, token
from txmq.broker.log_reader import end_of, offset_at
from txmq.core.consumers.commands import (
    AbandonLetters,
    GroupClone,
    ReplayLetters,
    ResetPosition,
    TidyGroups,
)
from txmq.core.events.base import MessagesCopied
from txmq.core.retention import log_floor, relocation, topic_retention
from txmq.core.retention.letter_retention import ExpireLetters
from txmq.core.retention.relocation import CopyOut, Outlived, Repoint
from txmq.core.retention.topic_retention import Keep, Retain, Retained
from txmq.core.state import log_pins
from txmq.core.state.state import Rejected
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.core.transactions.decisions import Decide
from txmq.errors import OffsetOutOfRange
from txmq.model.message import Decision
from txmq.store.tables import MOVED, MOVED_KEY, NAMES, PASSED, POSITION_KEY, SIGN

DAY = 24 * 3600 * SECOND
POSTGRES = ("postgres", 1, 1, 5, 7)


@pytest.fixture
def world() -> World:
    """Ten batches of two, a day apart, the last one today."""
    world = World(t=1)
    for day in range(10):
        world.publish("t", None, None)
        world.now += DAY if day < 9 else 0
    return world


def retain(
    world: Driver, *, days: float = 0, size: int = 0, topic_id: int = 1, **more: Any
) -> Retained:
    command = Retain(
        topic_id, Keep(int(days * DAY), size), more.get("durable", world.end), more.get("oldest", 0)
    )
    reply: Retained = world.do(command)
    return reply


def first(world: Driver, partition: int = 0) -> int:
    return world.state.topics_by_id[1].firsts[partition]


def same_after_replay(world: World) -> bool:
    from txmq.core import machine

    again = world.replayed()
    for state in (world.state, again):
        machine.save(state)
    return all(
        list(world.state.tables[n].range(b"")) == list(again.tables[n].range(b"")) for n in NAMES
    )


def test_batches_that_are_too_old_go_and_offsets_stay(world: World) -> None:
    assert retain(world, days=3.5).batches == 6
    assert first(world) == 12
    assert offset_at(world.state, 1, 0, 0) == 12
    assert end_of(world.state, 1, 0, world.end) == 20
    assert world.state.topics_by_id[1].sizes == [4 * BATCH]
    world.publish("t", None)
    assert world.state.topics_by_id[1].ends == [21]
    assert same_after_replay(world)


def test_nothing_goes_twice(world: World) -> None:
    retain(world, days=3.5)
    records = len(world.log)
    assert retain(world, days=3.5) == Retained(0, (), more=False)
    assert len(world.log) == records


def test_all_of_a_partition_may_go(world: World) -> None:
    world.now += 30 * DAY
    assert retain(world, days=1).batches == 10
    assert first(world) == end_of(world.state, 1, 0, world.end) == 20
    assert world.state.topics_by_id[1].sizes == [0]
    assert log_floor.by_topic(world.state, world.state.topics_by_id[1]) == SIGN


def test_the_oldest_go_where_there_is_too_much_of_a_topic() -> None:
    world = World(t=2)
    for _ in range(5):
        world.publish("t", None, partition=0)
        world.publish("t", None, partition=1)
    retain(world, size=3 * BATCH)
    assert world.state.topics_by_id[1].firsts == [4, 3], "the oldest of all partitions"
    assert sum(world.state.topics_by_id[1].sizes) == 3 * BATCH


def test_no_limit_keeps_everything(world: World) -> None:
    world.now += 1_000 * DAY
    assert retain(world).batches == 0


def test_what_is_not_durable_stays(world: World) -> None:
    retain(world, days=3.5, durable=3 * RECORD)
    assert first(world) <= 4


def test_what_the_log_has_lost_goes_whatever_its_age(world: World) -> None:
    places = [place for place, event in world.log if type(event).__name__ == "BatchStored"]
    retain(world, oldest=places[2].attachment)
    assert first(world) == 4


def test_one_command_takes_so_many_and_says_that_there_is_more(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    monkeypatch.setattr(topic_retention, "AT_ONCE", 4)
    assert retain(world, days=3.5) == Retained(4, (), more=True)
    assert retain(world, days=3.5) == Retained(2, (), more=False)
    assert first(world) == 12


def test_a_group_behind_retention_goes_on_from_the_first_and_what_it_missed_is_counted(
    world: World,
) -> None:
    world.join("a")
    world.fetch("a", most=5)
    world.ack("a", (0, 2))
    retain(world, days=3.5)
    position = world.group().positions[1, 0]
    assert (position.floor, position.cursor) == (12, 12)
    assert not world.group().leases
    assert world.state.tables["passed"].get(b"\0\0\0\1\0\0\0\1\0\0\0\0") == (10, world.now)
    assert [got.offset for got in world.fetch("a")] == list(range(12, 20))
    assert same_after_replay(world)


def test_a_group_that_is_done_with_what_goes_misses_nothing(world: World) -> None:
    world.join("a")
    world.fetch("a")
    world.ack("a", (4, 14))
    world.ack("a", (0, 4))
    retain(world, days=3.5)
    assert world.group().positions[1, 0].floor == 14
    assert not list(world.state.tables["passed"].range(b""))


def test_a_new_group_begins_at_the_first_and_cannot_be_reset_before_it(world: World) -> None:
    retain(world, days=3.5)
    world.join("a")
    assert world.fetch("a")[0].offset == 12
    refused = world.do(ResetPosition("g", "t", "", ((0, 11),), False, False, ""))
    assert isinstance(refused, Rejected)
    assert refused.error is OffsetOutOfRange
    assert refused.detail == {"first": 12, "end": 20}
    [target] = world.do(ResetPosition("g", "t", "first", (), False, False, "")).positions
    assert target[:3] == (0, 12, 12)


def dead(world: World, offset: int) -> None:
    world.nack("a", offset, dead=True)


def copied_out(world: World, rows: tuple[Outlived, ...]) -> list[tuple[Outlived, int, int]]:
    world.do(CopyOut(tuple(b"c" * 8 for _ in rows)))
    place, event = world.log[-1]
    assert isinstance(event, MessagesCopied)
    return [(row, place.attachment + 8 * number, 8) for number, row in enumerate(rows)]


def test_a_letter_is_copied_before_its_batch_goes(world: World) -> None:
    world.join("a", retry=QUICK)
    world.fetch("a")
    dead(world, 3)
    reply = retain(world, days=3.5)
    assert (first(world), reply.batches) == (2, 1)
    [row] = reply.outlived
    assert (row.offset, row.row) == (3, 1)
    [(_, position, _)] = pointed = copied_out(world, reply.outlived)
    assert retain(world, days=3.5).outlived, "as long as nothing points at the copy"
    world.do(Repoint(tuple(pointed)))
    assert retain(world, days=3.5).outlived == ()
    assert first(world) == 12
    stored: Any = world.state.tables[MOVED].get(MOVED_KEY.pack(1, 1, 0, 3))
    assert (stored[4], stored[5], stored[6]) == (position, 8, 0)
    assert [pin.position for pin in log_pins.below(world.state, SIGN)] == [position]
    assert world.group().positions[1, 0].floor == 12
    assert same_after_replay(world)


def test_of_what_a_clone_may_yet_come_to_nothing_goes_and_then_it_has_missed_each_message_once(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    """Its group's failed messages are copied and fail again meanwhile, before and after
    their slices have come.
    """
    for module in ("background_work", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.SLICE", 2)
    world.join("a", retry=QUICK)
    world.fetch("a")
    for offset in range(6):
        world.nack("a", offset)
    world.ack("a", (8, 9))
    assert world.do(GroupClone("g", "h")).pending
    for _ in range(4):
        world.do(Repoint(tuple(copied_out(world, retain(world, days=3.5).outlived))))
        retain(world, days=3.5)
        world.now += 60 * SECOND
        for row in [got for got in world.fetch("a") if got.offset < 6]:
            world.nack("a", row.offset)
        world.do(TidyGroups())
    assert world.group("h").cloning is None
    pass_all(world)
    assert passed(world, "h") == 11
    assert world.group("h").positions[1, 0].floor == 12
    assert same_after_replay(world)


def test_a_letter_of_long_ago_that_comes_back_meanwhile_is_none_of_a_clone_s(
    monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    for module in ("background_work", "clones"):
        monkeypatch.setattr(f"txmq.core.consumers.{module}.SLICE", 2)
    world.join("a", retry=QUICK)
    world.fetch("a")
    for offset in range(4):
        dead(world, offset)
    world.ack("a", (4, 20))
    pass_all(world)
    world.do(GroupClone("g", "h"))
    world.do(ReplayLetters("g", (("t", 0, 2),)))
    while world.do(TidyGroups()).more:
        pass
    assert passed(world, "h") == 0
    assert world.group("h").positions[1, 0].floor == 20
    assert same_after_replay(world)


def pass_all(world: World) -> None:
    """What is older than three days and a half goes, as soon as what outlives it is
    copied.
    """
    while outlived := retain(world, days=3.5).outlived:
        world.do(Repoint(tuple(copied_out(world, outlived))))
    assert first(world) == 12


def passed(world: World, group: str) -> int:
    row: Any = world.state.tables[PASSED].get(POSITION_KEY.pack(world.group(group).group_id, 1, 0))
    return row[0] if row else 0


def test_a_copy_of_what_was_acked_meanwhile_is_of_no_use(world: World) -> None:
    world.join("a", retry=QUICK)
    world.fetch("a")
    world.nack("a", 3)
    pointed = copied_out(world, retain(world, days=3.5).outlived)
    world.now += 3 * SECOND
    world.fetch("a")
    world.ack("a", (3, 4))
    world.do(Repoint(tuple(pointed)))
    assert not list(log_pins.below(world.state, SIGN))
    assert retain(world, days=3.5).outlived == ()


def test_the_pin_of_what_is_done_with_is_taken_away(world: World) -> None:
    world.join("a", retry=QUICK)
    world.fetch("a")
    dead(world, 3)
    world.do(Repoint(tuple(copied_out(world, retain(world, days=3.5).outlived))))
    [pin] = log_pins.below(world.state, SIGN)
    again = relocation.outlived(world.state, pin)
    assert again is not None
    assert not relocation.is_stale(world.state, pin)
    world.do(ExpireLetters(1, 0, 1))
    world.now += SECOND
    world.do(ExpireLetters(1, 0, 1))
    assert relocation.is_stale(world.state, pin)
    world.do(Repoint((), (pin.position, pin.position + 8)))
    assert not list(log_pins.below(world.state, SIGN))


def test_what_an_undecided_transaction_acks_stays(world: World) -> None:
    world.join("a")
    world.fetch("a")
    world.ack("a", (0, 6))
    ack = ("ack", "g", "a", 1, "t", 0, 6, 7)
    world.store(token(world, 1), [("t", 0, None, "x")], POSTGRES, actions=(ack,))
    retain(world, days=3.5)
    assert first(world) == 6
    world.do(Decide(token(world, 1), Decision.ROLLBACK, "test"))
    retain(world, days=3.5)
    assert first(world) == 12


def test_nothing_that_a_transaction_holds_is_dropped_from_the_log(core: Driver) -> None:
    number = token(core, 1)
    core.store(number, [("t", 0, "k", "half")], POSTGRES)
    stored = core.log[-1][0]
    core.send("t", "behind", key="k")
    assert log_floor.besides(core.state) == stored.position
    core.store(token(core, 2), [("t", 1, "k", "later")], POSTGRES)
    core.do(Decide(number, Decision.ROLLBACK, "test"))
    assert log_floor.besides(core.state) > stored.end
    core.do(Decide(token(core, 2), Decision.ROLLBACK, "test"))
    assert log_floor.besides(core.state) == SIGN


def test_what_is_committed_and_waits_is_needed(core: Driver) -> None:
    one, two = token(core, 1), token(core, 2)
    core.store(two, [("t", 0, "k", "job")], ("job", b"j" * 16))
    stands_at = core.log[-1][0].position
    core.store(one, [("t", 0, "k", "half")], POSTGRES)
    core.do(Decide(two, Decision.COMMIT, "test"))
    assert log_floor.besides(core.state) <= stands_at + RECORD
    core.do(Decide(one, Decision.COMMIT, "test"))
    assert log_floor.besides(core.state) == SIGN
    assert len(core.bodies("t")) == 2


def test_what_was_stored_long_before_it_was_published_is_pinned(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_pins, "SLACK", 100 * RECORD)
    late, soon = token(core, 1), token(core, 2)
    core.store(late, [("t", 0, None, "late")], POSTGRES)
    place = core.log[-1][0].attachment
    for number in range(60):
        core.send("t", f"{number}", partition=1)
    core.store(soon, [("t", 0, None, "soon")], POSTGRES)
    for one in (late, soon):
        core.do(Decide(one, Decision.COMMIT, "test"))
    assert [pin.position for pin in log_pins.below(core.state, SIGN)] == [place]
    assert log_floor.by_topic(core.state, core.state.topics_by_id[1]) <= core.log[1][0].attachment
    core.now += 10 * DAY
    retain(core, days=1)
    assert not list(log_pins.below(core.state, SIGN))


def test_a_deleted_topic_keeps_nothing(core: Driver) -> None:
    core.send("t", "a")
    core.do(DeleteTopic("t"))
    core.do(CreateTopic("t", 2))
    core.send("t", "b")
    assert retain(core, topic_id=1).batches == 1
    assert retain(core, topic_id=2).batches == 0
    assert core.bodies("t") == ["b"]


def test_letters_have_a_time_of_their_own_and_what_waits_for_them_goes_on() -> None:
    world = World(t=1)
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


def test_abandoned_letters_go_as_well(world: World) -> None:
    world.join("a")
    world.fetch("a")
    dead(world, 3)
    world.do(AbandonLetters("g", (("t", 0, 3),), "no use", ""))
    world.now += 2 * DAY
    world.do(ExpireLetters(1, 0, DAY))
    assert not list(world.state.tables[MOVED].range(b""))
