"""Damage on the disk: found by reads and by scrubbing, reported, never skipped; the
rest is served.
"""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from tests.broker.support import BrokerInMemory, Client, send_payload
from txmq.batch import encode
from txmq.broker.data_directory.scrub_service import (
    HOUR_S,
    MEND_AGAIN_S,
    STEP_BYTES,
    ScrubService,
)
from txmq.config.broker import ScrubSettings
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.model import get
from txmq.errors import BrokerUnavailable, MessagesDamaged
from txmq.model.message import Message
from txmq.store import tables as t
from txmq.store.log.decoder import Damage
from txmq.store.log.segment import segment_path
from txmq.wire import data_requests
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Fetch, Opcode, Read, pack_fetch, pack_read
from txmq.wire.status import to_error


class Rotten:
    """A broker with a topic of two partitions, three messages in each."""

    def __init__(self) -> None:
        self.broker = BrokerInMemory()
        self.broker.do(CreateTopic("t", 2))
        self.client: Client = self.broker.connect()
        for sequence in range(6):
            assert (
                self.client.ask(Opcode.SEND, send_payload(sequence, partition=sequence % 2)).status
                == 0
            )

    def entry(self, partition: int, offset: int) -> t.BatchEntry:
        row = self.broker.engine.state.entries.get(t.ENTRY_KEY.pack(1, partition, offset))
        assert row is not None
        return t.BatchEntry._make(row)

    def rot(self, partition: int, offset: int) -> int:
        """Flip a bit of a message's body. Return the position of its batch."""
        position = self.entry(partition, offset).position
        file = self.broker.fs.open(segment_path("/data", 0), write=True)
        (byte,) = file.pread(1, position + 84)
        file.pwrite([bytes([byte ^ 16])], position + 84)
        return position

    def read(self, partition: int, offset: int) -> Any:
        reply = self.client.ask(Opcode.READ, pack_read(Read(partition, offset, 0, 1 << 20, "t")))
        if reply.status:
            return to_error(reply.status, reply.payload)
        return [chunk.base_offset for chunk in unpack_chunks(reply.payload).chunks]

    def join(self, mode: str) -> Any:
        return self.client.call(
            "consumer.join", group="g", member="a", instance="a", mode=mode, topics=["t"]
        )

    def fetch(self, joined: Any, messages: int = 100, run: int = 0) -> list[tuple[int, int]]:
        wanted = Fetch(joined["generation"], 0, 1 << 20, messages, "g", "a", run=run)
        reply = self.client.ask(Opcode.FETCH, pack_fetch(wanted))
        assert reply.status == 0
        chunks = unpack_chunks(reply.payload).chunks
        return [
            (chunk.partition, chunk.base_offset + row)
            for chunk in chunks
            for row in range(chunk.rows)
        ]

    def alarms(self) -> list[str]:
        return [alarm["name"] for alarm in self.broker.ask("broker.alarms")["alarms"]]


@pytest.fixture
def rotten() -> Rotten:
    return Rotten()


def test_a_reader_gets_messages_before_damage_then_an_error_with_the_next_offset(
    rotten: Rotten,
) -> None:
    position = rotten.rot(0, 1)
    assert rotten.read(0, 0) == [0]
    error = rotten.read(0, 1)
    assert isinstance(error, MessagesDamaged)
    assert error.detail == {"first": 1, "next": 2}
    assert rotten.read(0, 2) == [2]
    assert rotten.read(1, 0) == [0, 1, 2]
    [damage] = rotten.broker.log.quarantined
    assert (damage.position, damage.end) == (position, position + rotten.entry(0, 1).length)
    assert rotten.alarms() == ["log.damaged"]


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
@pytest.mark.parametrize(("messages", "run"), [(1, 0), (100, 0), (100, 2), (100, 100)])
def test_a_group_passes_nothing_over_and_gets_the_other_partition(
    rotten: Rotten, mode: str, messages: int, run: int
) -> None:
    rotten.rot(0, 1)
    joined = rotten.join(mode)
    got: list[tuple[int, int]] = []
    for _ in range(10):
        got += rotten.fetch(joined, messages, run)
    assert sorted(got) == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert rotten.alarms() == ["log.damaged"]
    whys = [
        position["reason"] for position in rotten.broker.ask("group.show", group="g")["positions"]
    ]
    assert whys[0] == "damaged"
    reset: dict[str, Any] = {
        "group": "g",
        "topic": "t",
        "to": {"0": 2},
        "operator": "ada",
        "reason": "lost",
    }
    rotten.client.call("group.reset", **reset)
    assert rotten.fetch(rotten.join(mode)) == [(0, 2)]


class Thread:
    """A thread that works when the test says so."""

    def __init__(self) -> None:
        self.given: list[tuple[Deferred[Any], Any, tuple[object, ...]]] = []

    def __call__(self, function: Any, *args: object) -> Deferred[Any]:
        done: Deferred[Any] = Deferred()
        self.given.append((done, function, args))
        return done

    def work(self) -> None:
        done, function, args = self.given.pop()
        done.callback(function(*args))


def test_scrubbing_finds_damage_before_a_reader(rotten: Rotten) -> None:
    position = rotten.rot(1, 2)
    thread, clock = Thread(), rotten.broker.clock
    scrubbing = ScrubService(
        rotten.broker.engine, ScrubSettings(mib_per_s=1.0, every_hours=2.0), clock, thread
    )
    scrubbing.start()
    assert rotten.alarms() == []
    clock.advance(1)
    assert scrubbing.busy
    thread.work()
    assert rotten.alarms() == ["log.damaged"]
    [damage] = rotten.broker.log.quarantined
    assert damage.position <= position < damage.end
    assert scrubbing.rounds == 1
    clock.advance(HOUR_S)
    assert not thread.given, "a round every two hours"
    clock.advance(HOUR_S)
    thread.work()
    assert (scrubbing.rounds, len(rotten.broker.log.quarantined)) == (2, 1)
    scrubbing.stop()
    clock.advance(3 * HOUR_S)
    assert not thread.given


def test_a_node_that_follows_mends_what_scrubbing_finds(
    rotten: Rotten,
) -> None:
    rotten.rot(0, 1)
    thread, clock, log = Thread(), rotten.broker.clock, rotten.broker.log
    scrubbing = ScrubService(
        rotten.broker.engine, ScrubSettings(mib_per_s=1.0, every_hours=2.0), clock, thread
    )
    asked: list[tuple[list[Damage], Deferred[list[Damage]]]] = []

    def mend(damages: list[Damage]) -> Deferred[list[Damage]]:
        asked.append((damages, Deferred()))
        return asked[-1][1]

    scrubbing.mend = mend
    scrubbing.start()
    clock.advance(1)
    thread.work()
    [(damages, answer)] = asked
    assert log.quarantined == tuple(damages)
    answer.errback(Failure(BrokerUnavailable("nobody leads")))
    clock.advance(MEND_AGAIN_S)
    asked[1][1].callback([])  # the leader has the same damage
    clock.advance(MEND_AGAIN_S)
    assert (asked[2][0], log.quarantined) == (damages, tuple(damages))
    asked[2][1].callback(damages)
    assert log.quarantined == ()
    clock.advance(MEND_AGAIN_S)
    scrubbing.stop()
    assert len(asked) == 3


def test_scrubbing_keeps_to_its_rate_and_to_durable_records(rotten: Rotten) -> None:
    data = encode(
        [Message(bytes(STEP_BYTES))], producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1
    )
    rotten.client.ask(Opcode.SEND, data_requests.send_header("t", 0, 0) + data)
    thread, clock = Thread(), rotten.broker.clock
    scrubbing = ScrubService(rotten.broker.engine, ScrubSettings(mib_per_s=0.5), clock, thread)
    scrubbing.start()
    clock.advance(2)
    thread.work()
    assert scrubbing.rounds == 1
    assert scrubbing.position == 0
    scrubbing.stop()


def test_it_can_be_switched_off(rotten: Rotten) -> None:
    thread = Thread()
    ScrubService(
        rotten.broker.engine, ScrubSettings(every_hours=0.0), rotten.broker.clock, thread
    ).start()
    rotten.broker.clock.advance(1_000 * HOUR_S)
    assert not thread.given


def test_a_search_ends_before_the_damage_and_then_reports_it(rotten: Rotten) -> None:
    position = rotten.rot(0, 1)
    page = rotten.broker.ask("message.find", topic="t")
    assert ([(row["partition"], row["offset"]) for row in page["messages"]], page["next"]) == (
        [(0, 0)],
        (0, 1),
    )
    refused = rotten.broker.ask("message.find", topic="t", after=[0, 1])
    assert (type(refused), refused.detail["position"]) == (MessagesDamaged, position)
    rest = rotten.broker.ask("message.find", topic="t", after=[0, 2])["messages"]
    assert [(row["partition"], row["offset"]) for row in rest] == [(0, 2), (1, 0), (1, 1), (1, 2)]
    assert rotten.alarms() == ["log.damaged"]


def test_a_damaged_letter_is_named_and_the_others_are_shown(rotten: Rotten) -> None:
    joined = rotten.join("concurrent")
    rotten.fetch(joined)
    failed = {"type": "E", "text": "no", "fingerprint": "f", "bases": []}
    for offset in range(3):
        place = {"topic": "t", "partition": 0, "offset": offset, "generation": joined["generation"]}
        rotten.client.call("consumer.nack", group="g", member="a", **place, error=failed, dead=True)
    position = rotten.rot(0, 1)
    ask = rotten.broker.ask
    letters = ask("dlq.list", group="g")["letters"]
    assert [letter["offset"] for letter in letters] == [0, 1, 2]
    assert [str(position) in letter.get("damaged", "") for letter in letters] == [
        False,
        True,
        False,
    ]
    first = ask("dlq.list", group="g", bodies=True)
    assert [letter["offset"] for letter in first["letters"]] == [0]
    refused = ask("dlq.list", group="g", bodies=True, after=first["next"])
    assert (type(refused), refused.detail["position"]) == (MessagesDamaged, position)
    assert (
        ask("dlq.list", group="g", bodies=True, after=letters[1]["number"])["letters"][0]["offset"]
        == 2
    )
    assert type(ask("dlq.show", group="g", topic="t", partition=0, offset=1)) is MessagesDamaged
    assert rotten.alarms() == ["log.damaged", "group.letters"]


def test_a_damaged_message_of_a_transaction_is_named_and_what_is_before_it_shown() -> None:
    broker = BrokerInMemory()
    token = broker.half(1, Message(b"good" * 9), Message(b"rotten" * 9))
    row = get(broker.engine.state, bytes.fromhex(token))
    assert row is not None
    position = row.batches[1].position
    file = broker.fs.open(segment_path("/data", 0), write=True)
    (byte,) = file.pread(1, position + 84)
    file.pwrite([bytes([byte ^ 16])], position + 84)
    shown = broker.ask("tx.show", token=token, detail=True)
    assert ([row["message_id"] for row in shown["rows"]], shown["next"]) == ([f"{token}-0"], 1)
    assert type(broker.ask("tx.show", token=token, detail=True, after=1)) is MessagesDamaged
    assert type(broker.ask("message.show", id=f"{token}-1")) is MessagesDamaged
