"""A log that was restored from a backup: epochs, ids, and what is not made up."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import ConsumersWorld
from tests.core.driver import Driver, token
from txmq.core import machine
from txmq.core.consumers.commands import ResetPosition
from txmq.core.consumers.membership import identities
from txmq.core.events.base import Booted, LogRestored
from txmq.core.retention.broker_time import NoteTime
from txmq.core.state import restores
from txmq.core.topics.restored_log import EPOCHS_APART, AcceptRestore, NoteBackup
from txmq.core.topics.topics import CreateTopic, GrowTopic
from txmq.core.transactions import lost_records
from txmq.core.transactions.model import get
from txmq.core.transactions.xa import ResolveOutcome
from txmq.errors import Conflict, UnknownTransaction
from txmq.model.decider import ByHome
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import DAY, SECOND

LOG = b"l" * 16
AT = 1_800_000_000 * SECOND


def restore(core: Driver, at: int = AT) -> None:
    core.record(LogRestored(b"i" * 16, at, core.now, at // SECOND))
    core.record(Booted(core.state.boot_epoch + 1, "broker"))


def steps(world: ConsumersWorld, topic: int, partition: int, group: str = "g") -> object:
    """Return the steps of a partition, which must be those that members are told."""
    tp = TopicPartition(topic, partition)
    found = restores.epoch_steps(world.state, world.group(group), tp)
    told = identities(world.state, world.group(group), [topic]).resets
    assert [row[3] for row in told if row[1] == partition] in ([found], [])
    assert found == () or [row[3] for row in told if row[1] == partition] == [found]
    return found


@pytest.fixture
def world() -> ConsumersWorld:
    made = ConsumersWorld(t=2)
    made.publish("t", 1, 2, 3)
    made.join("a")
    return made


def test_a_restore_begins_an_epoch_at_the_ends_of_all_partitions(world: ConsumersWorld) -> None:
    restore(world)
    assert (steps(world, 1, 0), steps(world, 1, 1)) == (((3, AT),), ((0, AT),))
    restore(world, AT + 5_000_000)
    assert steps(world, 1, 0) == ((3, AT + 5_000_000),)
    world.publish("t", 4)
    restore(world, AT)  # the clock went back
    assert steps(world, 1, 0) == ((3, AT + 5_000_000), (4, AT + 5_000_000 + EPOCHS_APART))


def test_groups_partitions_and_topics_that_come_later_are_told_from_lost_ones(
    world: ConsumersWorld,
) -> None:
    restore(world)
    world.do(GrowTopic("t", 3))
    world.do(CreateTopic("u", 1))
    world.join("a", group="h")
    assert steps(world, 1, 0, "h") == ((3, AT),)
    assert steps(world, 1, 2, "h") == ((0, AT),)
    assert world.state.topics["u"].topic_id == AT // SECOND
    assert steps(world, AT // SECOND, 0, "h") == ()


def test_a_reset_after_a_restore_begins_an_epoch_that_no_lost_one_was(
    world: ConsumersWorld,
) -> None:
    restore(world)
    world.publish("t", 4, 5)
    world.do(ResetPosition("g", "t", offsets=((0, 4),), reprocess=True))
    assert steps(world, 1, 0) == ((3, AT), (4, AT + 1))
    world.do(ResetPosition("g", "t", offsets=((0, 1),), reprocess=True))
    assert steps(world, 1, 0) == ((1, AT + 2),)
    assert steps(world, 1, 1) == ((0, AT),)


def test_a_reset_before_a_restore_keeps_its_epoch_below_the_ends(world: ConsumersWorld) -> None:
    world.do(ResetPosition("g", "t", offsets=((0, 1),), reprocess=True))
    restore(world)
    assert steps(world, 1, 0) == ((1, 2), (3, AT))


def test_the_restores_are_part_of_the_tables(world: ConsumersWorld) -> None:
    restore(world)
    world.do(AcceptRestore("ada", "dealt with"))
    machine.save(world.state)
    state = machine.load(world.state.tables)
    assert state.restores == world.state.restores
    assert state.restores[-1].accepted
    assert state.topics["t"].ends_at_restore == [(AT, (3, 0))]
    assert (state.boot_epoch, state.next_topic_id) == (AT // SECOND + 1, AT // SECOND)
    assert world.replayed().restores == world.state.restores


def test_the_time_of_the_newest_backup_is_kept(core: Driver) -> None:
    core.do(NoteBackup(core.now - SECOND))
    core.do(NoteBackup(core.now - 2 * SECOND))
    assert core.state.backed_up_at == core.now - SECOND
    machine.save(core.state)
    assert machine.load(core.state.tables).backed_up_at == core.now - SECOND
    assert core.replayed().backed_up_at == core.now - SECOND


def test_no_backup_is_of_the_future_also_where_the_clock_was_ahead(core: Driver) -> None:
    core.now += 30 * DAY
    core.do(NoteBackup(core.now + SECOND))
    assert core.state.backed_up_at == core.now
    core.do(NoteTime(0, back=30 * DAY))
    core.now -= 30 * DAY
    assert core.state.backed_up_at == core.now
    core.now += SECOND
    core.do(NoteBackup(core.now))
    assert core.state.backed_up_at == core.now


def test_a_restored_log_is_as_old_as_its_last_record(core: Driver) -> None:
    core.do(NoteBackup(core.now - 5 * SECOND))
    restore(core)
    assert core.state.backed_up_at == core.now


def test_a_log_that_was_never_restored_accepts_nothing(core: Driver) -> None:
    refused = core.do(AcceptRestore("ada", "x"))
    assert type(refused) is Conflict


def test_what_may_have_been_decided_in_the_lost_part_is_not_made_up(core: Driver) -> None:
    before, unheard_of = token(core, 1), token(core, 2)
    core.store(before, [("t", 0, "k", "1")], ByHome(LOG, before))
    restore(core, core.now)
    row = get(core.state, before)
    assert row is not None
    assert lost_records.may_have_lost_decision(core.state, row)
    for name in (before, unheard_of):
        reply = core.do(ResolveOutcome(name, LOG, True, "recovery"))
        assert type(reply) is UnknownTransaction
    core.now += 2 * lost_records.CLOCK_SKEW
    assert core.do(ResolveOutcome(token(core, 3), LOG, True, "recovery"))
