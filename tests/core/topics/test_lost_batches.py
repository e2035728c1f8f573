"""Batches that a repair of the log gave up: groups, readers and retention go on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.broker.support import BrokerInMemory, send_payload
from tests.core.consumers.world import BATCH, ConsumersWorld
from tests.core.driver import Driver, token
from txmq.broker.engine.log_reader import published_batches, read_batches
from txmq.core import machine
from txmq.core.events.topics import BatchStored
from txmq.core.retention import log_floor
from txmq.core.retention.topic_retention import ApplyRetention, RetentionLimits
from txmq.core.state.state import State
from txmq.core.topics.lost_batches import give_up
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions import lost_records
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import CorruptRecord
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision
from txmq.store.tables import ENTRIES, BatchEntry, MemoryTables
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Opcode, Read, pack_read

Loss = Callable[..., None]
BATCHES = 4  # of two messages each


def lose_records(world: ConsumersWorld, *lost: int) -> None:
    """Make the state anew from the log without the records of these batches."""
    stored = [context for context, event in world.log if isinstance(event, BatchStored)]
    gone = {stored[number].position for number in lost}
    state = State(MemoryTables())
    for context, event in world.log:
        if context.position in gone:
            lost_records.apply_lost(state, context.end)
        else:
            assert machine.apply_after_loss(state, event, context)
    world.state = state


def lose_bytes(world: ConsumersWorld, *lost: int) -> None:
    """Give up the bytes of these batches, whose events a snapshot knows."""
    places = [
        context.attachment_position
        for context, event in world.log
        if isinstance(event, BatchStored)
    ]
    give_up(world.state, [(places[number], places[number] + 1) for number in lost])


@pytest.fixture
def world() -> ConsumersWorld:
    world = ConsumersWorld(t=1)
    for _ in range(BATCHES):
        world.publish("t", None, None)
    return world


@pytest.mark.parametrize("run", [0, 100])
@pytest.mark.parametrize("lose", [lose_records, lose_bytes])
@pytest.mark.parametrize("lost", [(0,), (1,), (1, 2), (0, 2)])
def test_a_group_gets_every_other_message_once_by_its_own_offset(
    world: ConsumersWorld, lose: Loss, lost: tuple[int, ...], run: int
) -> None:
    lose(world, *lost)
    world.join("a")
    left = [n for batch in range(BATCHES) if batch not in lost for n in (2 * batch, 2 * batch + 1)]
    got = world.deliver("a", world.generation(), world.choose("a", run=run))
    assert [message.offset for message in got] == left
    for offset in left:
        world.ack("a", (offset, offset + 1))
    [position] = world.group().positions.values()
    assert (position.floor, position.cursor, list(position.settled)) == (8, 8, [])
    assert world.fetch("a") == []


@pytest.mark.parametrize("lose", [lose_records, lose_bytes])
def test_retention_and_the_floor_of_the_log_go_past_lost_messages(
    world: ConsumersWorld, lose: Loss
) -> None:
    lose(world, 0, 2)
    topic = world.state.topics_by_id[1]
    second = next(published_batches(world.state, 1, 0, 0, world.end))
    assert second.base == 2
    assert log_floor.topic_floor(world.state, topic) <= second.entry.position
    assert topic.partition_bytes == [2 * BATCH]
    command = ApplyRetention(1, RetentionLimits(0, BATCH), world.end, 0)
    world.do(command)
    assert (topic.start_offsets, topic.partition_bytes) == ([4], [BATCH])


def test_a_bundle_whose_bytes_are_lost_is_published_without_them(core: Driver) -> None:
    number, begun = token(core, 1), core.end
    core.store(number, [("t", 0, "k", "half")], ByPostgres(1, 1, 5, 7, 1))
    give_up(core.state, [(begun, core.end)])
    machine.save(core.state)
    core.state = machine.load(core.state.tables)
    core.do(DecideTransaction(number, Decision.COMMIT, "test"))
    [(_key, row)] = core.state.tables[ENTRIES].range(b"")
    assert (BatchEntry._make(row).length, BatchEntry._make(row).count) == (0, 1)
    assert core.send("t", "after").offset == 1
    topic_id = core.state.topics["t"].topic_id
    assert [one.base for one in published_batches(core.state, topic_id, 0, 0, core.end)] == [1]


def test_a_reader_is_sent_on_behind_lost_messages_at_the_end() -> None:
    broker = BrokerInMemory()
    broker.do(CreateTopic("t", 1))
    client = broker.connect()
    assert client.ask(Opcode.SEND, send_payload()).status == 0
    begun = broker.engine.store.end
    assert client.ask(Opcode.SEND, send_payload(1)).status == 0
    give_up(broker.engine.state, [(begun, broker.engine.store.end)])
    followed = []
    for offset in (0, 1, 2):
        reply = unpack_chunks(
            client.ask(Opcode.READ, pack_read(Read(0, offset, 0, 1 << 20, "t"))).payload
        )
        followed.append(([chunk.base_offset for chunk in reply.chunks], reply.next_offset))
    assert followed == [([0], 1), ([], 2), ([], 2)]
    *_others, (_key, row) = broker.engine.state.entries.range(b"")
    with pytest.raises(CorruptRecord, match="lost to a repair"):
        read_batches(broker.engine.store, [(BatchEntry._make(row).position, 0)])
