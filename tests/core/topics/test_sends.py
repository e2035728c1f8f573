"""Sends of one request share a record; each is judged as if it had come alone, after
those before it.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.driver import Driver, token
from txmq.batch import encode, verify
from txmq.core import machine
from txmq.core.events import base
from txmq.core.events.base import RecordContext
from txmq.core.events.topics import BatchesStored, BatchStored, SequencesSkipped
from txmq.core.state.state import State
from txmq.core.topics import sends
from txmq.core.topics.sends import SkipSequences, StoreBatch, StoreBatches
from txmq.core.topics.topics import AlterTopic, CreateTopic
from txmq.errors import (
    RequestRejected,
    SequenceGap,
    StaleTopic,
    TopicClosed,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
)
from txmq.model.decider import ByPostgres
from txmq.model.message import Message
from txmq.model.units import SECOND
from txmq.store.tables import MemoryTables
from txmq.wire.data_requests import SendReceipt

P, Q = b"p" * 16, b"q" * 16


def send(
    sequence: int,
    topic: str = "t",
    partition: int = 0,
    *,
    count: int = 1,
    producer: bytes = P,
    **fields: Any,
) -> StoreBatch:
    """Return a send of messages whose bodies name producer and sequence."""
    epoch, key = fields.pop("epoch", 0), fields.pop("key", None)
    bodies = [f"{producer[:1].decode()}{sequence + row}" for row in range(count)]
    rows = [Message(body.encode(), key, delay=fields.get("delay")) for body in bodies]
    data = encode(rows, producer_id=producer, epoch=epoch, sequence=sequence, born_at=1)
    return StoreBatch(topic, fields.get("shape", 0), partition, data, verify(data))


@pytest.fixture
def core() -> Driver:
    core = Driver()
    core.do(CreateTopic("t", 2))
    core.do(CreateTopic("u", 1))
    return core


def recorded(core: Driver) -> list[tuple[RecordContext, Any]]:
    """Return the records after those of the topics."""
    return core.log[2:]


def store(core: Driver, *sent: StoreBatch) -> Any:
    return core.do(StoreBatches(sent))


def error_or_receipt(reply: object) -> object:
    """Return the error of a rejection, or the receipt."""
    return type(reply) if isinstance(reply, RequestRejected) else reply


def rows(state: State) -> dict[str, list[Any]]:
    """Return the rows of topics, entries and producers."""
    machine.save(state)
    return {
        name: list(state.tables[name].range(b"")) for name in ("topics", "entries", "producers")
    }


def test_sends_of_one_request_are_one_record_and_are_at_the_offsets_of_their_receipts(
    core: Driver,
) -> None:
    replies = store(
        core,
        send(0, count=2),
        send(2, "u"),
        send(3, partition=1),
        send(4, producer=P),
        send(0, producer=Q),
    )
    assert [reply.offset for reply in replies] == [0, 0, 0, 2, 3]
    assert [type(event) for _place, event in recorded(core)] == [BatchesStored]
    assert core.bodies("t") == ["p0", "p1", "p4", "q0"]
    assert (core.bodies("t", 1), core.bodies("u")) == (["p3"], ["p2"])


def test_a_single_send_is_recorded_as_a_plain_batch(core: Driver) -> None:
    assert [error_or_receipt(reply) for reply in store(core, send(0), send(1, "none"))] == [
        SendReceipt(0, core.now),
        UnknownTopic,
    ]
    assert [type(event) for _place, event in recorded(core)] == [BatchStored]
    assert core.bodies("t") == ["p0"]


def test_no_batch_of_a_record_is_visible_before_all_are_durable(core: Driver) -> None:
    store(core, send(0), send(1, "u"))
    [(place, _event)] = recorded(core)
    assert [row[5] for _key, row in core.state.entries.range(b"")] == [place.end, place.end]


def test_a_repeated_request_gets_its_receipts_again_and_stores_nothing(core: Driver) -> None:
    frame = (send(0), send(1, "u"), send(2, partition=1))
    first = store(core, *frame)
    core.now += SECOND
    assert store(core, *frame) == [receipt._replace(duplicate=True) for receipt in first]
    assert len(recorded(core)) == 1
    mixed = store(core, send(1, "u"), send(3), send(3), send(2, partition=1))
    stored = SendReceipt(1, core.now)
    again = stored._replace(duplicate=True)
    assert mixed == [
        first[1]._replace(duplicate=True),
        stored,
        again,
        first[2]._replace(duplicate=True),
    ]


def test_a_rejected_send_stops_later_ones_of_its_producer_and_no_others(
    core: Driver,
) -> None:
    replies = store(
        core,
        send(0),
        send(1, "none"),
        send(2),
        send(0, "u", producer=Q),
        send(1, "u", 7),
        send(1, "t", shape=9),
    )
    results = [error_or_receipt(reply) for reply in replies]
    stored = SendReceipt(0, core.now)
    assert results == [stored, UnknownTopic, SequenceGap, stored, UnknownPartition, StaleTopic]
    assert error_or_receipt(store(core, send(5), send(1))[0]) is SequenceGap
    assert core.bodies("t") == ["p0", "p1"]


def test_a_send_to_a_closed_topic_alone_is_rejected(core: Driver) -> None:
    core.do(AlterTopic("u", {"writable": False}))
    closed, stored = store(core, send(0, "u"), send(0, producer=Q))
    assert (error_or_receipt(closed), stored.offset) == (TopicClosed, 0)


def test_a_newer_producer_epoch_in_the_same_request_takes_over(core: Driver) -> None:
    replies = store(core, send(0), send(0, epoch=1), send(1), send(1, epoch=1))
    assert [error_or_receipt(reply) for reply in replies] == [
        SendReceipt(0, core.now),
        SendReceipt(1, core.now),
        UnknownProducer,
        SendReceipt(2, core.now),
    ]
    assert rows(core.state)["producers"] == rows(core.replayed())["producers"]


CHOICES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(["t", "u", "none"]),
        st.integers(0, 1),
        st.sampled_from([P, Q]),
    ),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(CHOICES, max_size=3))
def test_sends_in_one_record_have_the_same_results_as_one_by_one(
    frames: list[list[tuple[int, str, int, bytes]]],
) -> None:
    worlds = []
    for one_by_one in (False, True):
        core = Driver()
        core.do(CreateTopic("t", 2))
        core.do(CreateTopic("u", 1))
        replies: list[Any] = []
        for frame in frames:
            commands = [
                send(at, topic, partition, producer=who) for at, topic, partition, who in frame
            ]
            replies += [core.do(one) for one in commands] if one_by_one else store(core, *commands)
        found = [core.bodies("t"), core.bodies("t", 1), core.bodies("u")]
        assert rows(core.state) == rows(core.replayed())
        answers = [repr(reply) for reply in replies]  # errors are equal to themselves only
        worlds.append((answers, found, rows(core.state)["producers"], rows(core.state)["topics"]))
    assert worlds[0] == worlds[1]


def test_a_send_that_has_to_wait_does_not_share_a_record(core: Driver) -> None:
    topic = core.state.topics["t"]
    assert sends.can_share_record(core.state, topic, send(0))
    assert sends.can_share_record(core.state, None, send(0, "none"))
    assert not sends.can_share_record(core.state, topic, send(0, delay=5))
    core.store(token(core, 1), [("t", 1, "k", "half")], ByPostgres(1, 1, 5, 7, 1))
    assert not sends.can_share_record(core.state, topic, send(0, partition=1))
    assert sends.can_share_record(core.state, topic, send(0))


def test_a_send_to_a_lost_topic_is_left_out_without_its_neighbours(core: Driver) -> None:
    state = State(MemoryTables())
    other = Driver()
    other.do(CreateTopic("t", 2))
    machine.apply(state, other.log[0][1], other.log[0][0])  # the other topic's record is lost
    store(core, send(0), send(1, "u"), send(2, partition=1))
    [(place, event)] = recorded(core)
    assert not machine.apply_after_loss(state, event, place)
    assert (state.topics["t"].end_offsets, state.lost_log_end) == ([1, 1], place.end)


def skip(core: Driver, sequence: int, epoch: int = 0) -> int:
    before = len(core.log)
    core.do(SkipSequences(P, epoch, sequence))
    return len(core.log) - before


def test_a_session_skips_what_will_not_come(core: Driver) -> None:
    core.do(send(0))
    gap = core.do(send(3))
    assert type(gap) is SequenceGap
    assert [skip(core, 3), skip(core, 3), skip(core, 1)] == [1, 0, 0]
    assert core.do(send(3)) == SendReceipt(1, core.now)
    late = core.do(send(1))
    assert isinstance(late, RequestRejected)
    assert (type(late), late.detail) == (UnknownProducer, {"last": 3})
    assert core.do(send(0)) == SendReceipt(0, ANY, duplicate=True)


def test_a_session_may_begin_with_a_skip(core: Driver) -> None:
    forgotten = core.do(send(2))
    assert isinstance(forgotten, RequestRejected)
    assert (type(forgotten), forgotten.detail) == (UnknownProducer, {})
    assert [skip(core, 0), skip(core, 2)] == [0, 1]
    assert core.do(send(2)) == SendReceipt(0, core.now)
    core.do(send(0, epoch=5))
    assert skip(core, 9) == 0, "an older epoch is fenced"
    [(_place, event)] = [one for one in core.log if isinstance(one[1], SequencesSkipped)]
    assert base.KINDS[SequencesSkipped] == 122
    assert base.encode(event).hex() == "93c410" + P.hex() + "0001"


def test_the_event_has_the_bytes_of_the_format(core: Driver) -> None:
    store(core, send(0), send(1, "u"))
    [(_place, event)] = recorded(core)
    assert base.KINDS[BatchesStored] == 13
    batches = [BatchStored(*batch) for batch in event[0]]
    assert [batch[:5] for batch in batches] == [(1, 0, 0, 1, 96), (2, 0, 0, 1, 96)]
    assert base.encode(event).hex() == (
        "919299010000016000c410" + P.hex() + "0000" + "99020000016000c410" + P.hex() + "0001"
    )
