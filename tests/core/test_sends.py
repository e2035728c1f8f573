"""Sends of one frame: one record, and each judged as if it had come alone, after those
before it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.driver import SECOND, Driver, token
from txmq.batch import encode, verify
from txmq.core import machine
from txmq.core.events import base
from txmq.core.events.base import BatchesStored, BatchStored, Place
from txmq.core.state.state import Rejected, SendReceipt, State
from txmq.core.topics import sends
from txmq.core.topics.sends import Send, SendTogether
from txmq.core.topics.topics import AlterTopic, CreateTopic
from txmq.errors import (
    SequenceGap,
    StaleTopic,
    TopicClosed,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
)
from txmq.model.message import Message
from txmq.store.tables import MemoryTables

P, Q = b"p" * 16, b"q" * 16


def send(
    sequence: int,
    topic: str = "t",
    partition: int = 0,
    *,
    count: int = 1,
    producer: bytes = P,
    **fields: Any,
) -> Send:
    """Messages whose bodies tell where they come from."""
    epoch, key = fields.pop("epoch", 0), fields.pop("key", None)
    bodies = [f"{producer[:1].decode()}{sequence + row}" for row in range(count)]
    rows = [Message(body.encode(), key, delay=fields.get("delay")) for body in bodies]
    data = encode(rows, producer_id=producer, epoch=epoch, sequence=sequence, born_at=1)
    return Send(topic, fields.get("shape", 0), partition, data, verify(data))


@pytest.fixture
def core() -> Driver:
    core = Driver()
    core.do(CreateTopic("t", 2))
    core.do(CreateTopic("u", 1))
    return core


def recorded(core: Driver) -> list[tuple[Place, Any]]:
    """Behind the topics."""
    return core.log[2:]


def store(core: Driver, *sent: Send) -> Any:
    return core.do(SendTogether(sent))


def no(reply: object) -> object:
    """What was refused, by its error."""
    return reply.error if isinstance(reply, Rejected) else reply


def rows(state: State) -> dict[str, list[Any]]:
    """What all comes to: topics and producers too."""
    machine.save(state)
    return {
        name: list(state.tables[name].range(b"")) for name in ("topics", "entries", "producers")
    }


def test_sends_that_come_together_are_one_record_and_are_found_where_their_receipts_say(
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


def test_a_send_alone_is_recorded_as_ever(core: Driver) -> None:
    assert [no(reply) for reply in store(core, send(0), send(1, "none"))] == [
        SendReceipt(0, core.now),
        UnknownTopic,
    ]
    assert [type(event) for _place, event in recorded(core)] == [BatchStored]
    assert core.bodies("t") == ["p0"]


def test_nobody_sees_one_of_them_before_all_are_durable(core: Driver) -> None:
    store(core, send(0), send(1, "u"))
    [(place, _event)] = recorded(core)
    assert [row[5] for _key, row in core.state.entries.range(b"")] == [place.end, place.end]


def test_a_repeated_frame_gets_its_receipts_again_and_stores_nothing(core: Driver) -> None:
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


def test_a_refused_neighbour_stops_what_comes_behind_it_in_its_session_and_nobody_else(
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
    told = [no(reply) for reply in replies]
    stored = SendReceipt(0, core.now)
    assert told == [stored, UnknownTopic, SequenceGap, stored, UnknownPartition, StaleTopic]
    assert no(store(core, send(5), send(1))[0]) is SequenceGap
    assert core.bodies("t") == ["p0", "p1"]


def test_what_a_topic_does_not_take_is_told_of_it_alone(core: Driver) -> None:
    core.do(AlterTopic("u", {"writable": False}))
    closed, stored = store(core, send(0, "u"), send(0, producer=Q))
    assert (no(closed), stored.offset) == (TopicClosed, 0)


def test_a_newer_incarnation_in_the_same_frame_takes_over(core: Driver) -> None:
    replies = store(core, send(0), send(0, epoch=1), send(1), send(1, epoch=1))
    assert [no(reply) for reply in replies] == [
        SendReceipt(0, core.now), SendReceipt(1, core.now), UnknownProducer, SendReceipt(2, core.now),
    ]  # fmt: skip
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
def test_together_comes_to_the_same_as_one_by_one(
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
        worlds.append((replies, found, rows(core.state)["producers"], rows(core.state)["topics"]))
    assert worlds[0] == worlds[1]


def test_what_has_to_wait_is_stored_alone(core: Driver) -> None:
    topic = core.state.topics["t"]
    assert sends.shares(core.state, topic, send(0))
    assert sends.shares(core.state, None, send(0, "none"))
    assert not sends.shares(core.state, topic, send(0, delay=5))
    core.store(token(core, 1), [("t", 1, "k", "half")], ("postgres", 1, 1, 5, 7))
    assert not sends.shares(core.state, topic, send(0, partition=1))
    assert sends.shares(core.state, topic, send(0))


def test_what_builds_on_a_lost_topic_does_not_take_its_neighbours_along(core: Driver) -> None:
    state = State(MemoryTables())
    other = Driver()
    other.do(CreateTopic("t", 2))
    machine.apply(state, other.log[0][1], other.log[0][0])  # the other topic's record is lost
    store(core, send(0), send(1, "u"), send(2, partition=1))
    [(place, event)] = recorded(core)
    assert not machine.apply_beyond(state, event, place)
    assert (state.topics["t"].ends, state.lost_to) == ([1, 1], place.end)


def test_the_event_is_that_of_the_format(core: Driver) -> None:
    store(core, send(0), send(1, "u"))
    [(_place, event)] = recorded(core)
    assert base.KINDS[BatchesStored] == 13
    batches = [BatchStored(*batch) for batch in event[0]]
    assert [batch[:5] for batch in batches] == [(1, 0, 0, 1, 96), (2, 0, 0, 1, 96)]
    assert base.encode(event).hex() == (
        "919299010000016000c410" + P.hex() + "0000" + "99020000016000c410" + P.hex() + "0001"
    )
